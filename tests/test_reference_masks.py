"""Masks of every rank and kind, padding, windows: calls that mean the same give the same bits."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_helpers import SLOW_PROPERTY, assert_same_bits, cache, differs, fill, float64, relative_error, vectors

from turboquant_vlm import reference as tq
from turboquant_vlm.reference.masks import LOG2_E_FLOAT32

DIM = 16
EXCLUDED, POISON = -(2**31), 2**31 - 1


def causal(queries: int, total: int) -> np.ndarray:
    """bool [L, T]: query l is token total - L + l."""
    return np.arange(total) <= np.arange(total - queries, total)[:, None]


def additive(allowed: np.ndarray, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.where(allowed, 0, -np.inf).astype(np.float32)).astype(dtype)


class Setting:
    """Two rows, 8 query and 2 kv heads, the last five tokens of `total`."""

    def __init__(self, total: int, queries: int = 5, batch: int = 2, heads: int = 2, group: int = 4) -> None:
        self.q = vectors((batch, heads * group, queries, DIM), 3)
        self.keys, self.values = cache(vectors((batch, heads, total, DIM), 1), vectors((batch, heads, total, DIM), 2))

    def attend(self, mask: mx.array | str | None = None, **arguments: Any) -> mx.array:
        return tq.attend(self.q, self.keys, self.values, 0.25, mask=mask, **arguments)

    def scores(self, mask: mx.array | str | None = None, **arguments: Any) -> mx.array:
        return tq.scores(self.q, self.keys, 0.25, mask=mask, **arguments)


@pytest.mark.parametrize("total", [5, 40, 200, 300])
class TestSameMeaning:
    def test_nothing_masked(self, total: int) -> None:
        s = Setting(total)
        want, logits = s.attend(), s.scores()
        for mask in (
            mx.array(True),
            mx.ones((total,), mx.bool_),
            mx.ones((5, total), mx.bool_),
            mx.ones((5, 1), mx.bool_),
            mx.ones((1, 5, total), mx.bool_),
            mx.ones((2, 1, 1, total), mx.bool_),
            mx.ones((2, 8, 5, total), mx.bool_),
            mx.ones((2, 2, 4, 5, total), mx.bool_),
            mx.ones((1, 1, 1, 1, 1), mx.bool_),
            mx.zeros((total,)),
            mx.zeros((5, total), mx.float16),
            mx.zeros((2, 8, 5, total), mx.bfloat16),
            mx.zeros((2, 2, 4, 1, 1)),
        ):
            assert_same_bits(s.attend(mask), want, f"mask {mask.shape} {mask.dtype}")
            assert_same_bits(s.scores(mask), logits, f"scores with {mask.shape} {mask.dtype}")
        assert_same_bits(s.attend(window=total), want)

    def test_causal(self, total: int) -> None:
        s = Setting(total)
        want, logits = s.attend("causal"), s.scores("causal")
        assert differs(want, s.attend())
        flat = causal(5, total)
        for shape in [
            (5, total),
            (1, 5, total),
            (1, 1, 5, total),
            (2, 1, 5, total),
            (1, 8, 5, total),
            (2, 8, 5, total),
        ]:
            mask = np.broadcast_to(flat, shape)
            for m in (mx.array(mask), additive(mask), additive(mask, mx.float16), additive(mask, mx.bfloat16)):
                assert_same_bits(s.attend(m), want, f"{shape} {m.dtype}")
                assert_same_bits(s.scores(m), logits, f"scores {shape} {m.dtype}")
        for shape in [
            (1, 1, 1, 5, total),
            (2, 1, 1, 5, total),
            (2, 2, 1, 5, total),
            (1, 2, 1, 5, total),
            (2, 1, 4, 5, total),
            (1, 1, 4, 5, total),
            (2, 2, 4, 5, total),
        ]:
            mask = np.broadcast_to(flat, shape)
            for m in (mx.array(mask), additive(mask)):
                assert_same_bits(s.attend(m), want, f"{shape} {m.dtype}")

    @pytest.mark.parametrize("window", [1, 3, 64, 150])
    def test_windows(self, total: int, window: int) -> None:
        s = Setting(total)
        i, j = np.arange(total - 5, total)[:, None], np.arange(total)
        both = causal(5, total) & (i - j < window)
        assert_same_bits(s.attend("causal", window=window), s.attend(mx.array(both)))
        assert_same_bits(s.attend(mx.array(causal(5, total)), window=window), s.attend(mx.array(both)))
        # Without causality a window has no upper end.
        assert_same_bits(s.attend(window=window), s.attend(mx.array(np.broadcast_to(i - j < window, (5, total)))))

    def test_every_row_head_and_query_has_its_own(self, total: int) -> None:
        """A 4-d mask with 5-d scores once mixed up the axes."""
        s = Setting(total)
        allowed = np.random.default_rng(total).random((2, 8, 5, total)) < 0.6
        allowed[..., 0] = True
        got = s.attend(mx.array(allowed))
        assert_same_bits(s.attend(additive(allowed)), got)
        assert_same_bits(s.attend(mx.array(allowed.reshape(2, 2, 4, 5, total))), got)
        logits, plain = np.array(s.scores(mx.array(allowed))), np.array(s.scores())
        assert (logits == np.where(allowed, plain, EXCLUDED)).all()
        for b, h in ((0, 0), (0, 5), (1, 3), (1, 7)):
            kv = h // 4
            keys, values = cache(
                vectors((2, 2, total, DIM), 1)[b : b + 1, kv : kv + 1],
                vectors((2, 2, total, DIM), 2)[b : b + 1, kv : kv + 1],
            )
            q = s.q[b : b + 1, h : h + 1]
            alone = tq.attend(q, keys, values, 0.25, mask=mx.array(allowed[b, h]))
            assert_same_bits(got[b : b + 1, h : h + 1], alone, f"row {b}, head {h}")


def test_bool_mask_of_many_heads() -> None:
    """Two rows, 40 and 8 heads, 16 queries: bool (2, 1, 16, 16), additive, and the full (B, Hq, L, T)."""
    s = Setting(16, 16, heads=8, group=5)
    allowed = causal(16, 16) & np.ones((2, 1, 1, 1), bool)
    allowed[1, 0, :, :3] = False
    allowed[1, 0, :3, 0] = True
    got = s.attend(mx.array(allowed))
    full = np.broadcast_to(allowed, (2, 40, 16, 16))
    for mask in (mx.array(full), additive(allowed), additive(full), mx.array(full.reshape(2, 8, 5, 16, 16))):
        assert_same_bits(s.attend(mask), got)
    assert_same_bits(got[:1], s.attend("causal")[:1])
    assert differs(got[1], s.attend("causal")[1])


@pytest.mark.parametrize("shape", [(2, 4, 2, 5, 40), (2, 8, 1, 5, 40), (1, 1, 8, 5, 40)])
def test_rank_five_that_does_not_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    """[B, Hk, Hq / Hk, L, columns] with 2 kv heads and groups of 4: other splits of the 8 heads are a mistake."""
    s = Setting(40)
    with pytest.raises(ValueError, match="mask"):
        s.attend(mx.ones(shape, mx.bool_))


class TestAdditive:
    @SLOW_PROPERTY
    @given(st.integers(0, 2**32 - 1), st.sampled_from([mx.float16, mx.bfloat16, mx.float32]))
    def test_scores_grow_by_the_fixed_point_value(self, seed: int, dtype: mx.Dtype) -> None:
        s = Setting(150)
        values = vectors((2, 1, 5, 150), seed, dtype, spread=20)
        product = np.array(values.astype(mx.float32)) * np.float32(LOG2_E_FLOAT32)
        step = np.rint(product.astype(np.float64) * 4096).astype(np.int64)
        want = np.clip(np.array(s.scores()).astype(np.int64) + step, -(2**28), 2**28)
        assert (np.array(s.scores(values)) == want).all()

    def test_constant_of_log2_e(self) -> None:
        assert np.float32(LOG2_E_FLOAT32).view(np.uint32) == 0x3FB8AA3B
        assert np.float32(math.log2(math.e)) == np.float32(LOG2_E_FLOAT32)

    def test_softmax_with_a_bias(self) -> None:
        """Against float64: exp(logit + bias)."""
        q = vectors((1, 2, 1, DIM), 3, mx.float32)
        k, v = vectors((1, 1, 60, DIM), 1), vectors((1, 1, 60, DIM), 2)
        bias = vectors((1, 2, 1, 60), 4, mx.float32, spread=2)
        got = tq.attend(q, *cache(k, v), 0.25, mask=bias)
        logits = np.einsum("hd,td->ht", float64(q)[0, :, 0], float64(k)[0, 0]) * 0.25 + float64(bias)[0, :, 0]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        want = (weights / weights.sum(axis=1, keepdims=True)) @ float64(v)[0, 0]
        assert relative_error(got, want[:, None]) < 1.5e-3

    @pytest.mark.parametrize("huge", [-65504.0, -1e9, float(np.finfo(np.float32).min)])
    def test_a_finite_minus_infinity(self, huge: float) -> None:
        """What models write instead of -inf: the token keeps a weight, which is zero beside any other."""
        s = Setting(150)
        allowed = causal(5, 150)
        mask = mx.array(np.where(allowed, 0, huge).astype(np.float32))
        assert_same_bits(s.attend(mask), s.attend("causal"))

    def test_everything_at_a_finite_minus_infinity(self) -> None:
        """Such tokens are allowed: logits end at -2^28, those above zero a little higher, and nothing is NaN."""
        s = Setting(50)
        got = s.attend(mx.full((5, 50), float(np.finfo(np.float32).min)))
        logits = np.maximum(float64(s.scores()), 0) / 4096
        weights = np.exp2(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        want = weights @ np.repeat(float64(vectors((2, 2, 50, DIM), 2)), 4, axis=1)
        # The output is fp16.
        assert relative_error(got, want) < 1.5e-3

    def test_plus_infinity_takes_all(self) -> None:
        s = Setting(50)
        mask = np.zeros((5, 50), np.float32)
        mask[:, 7] = np.inf
        got = float64(s.attend(mx.array(mask)))
        want = np.repeat(float64(vectors((2, 2, 50, DIM), 2))[:, :, 7], 4, axis=1)[:, :, None]
        assert np.abs(got - want).max() < 1e-3

    def test_clamped_twice(self) -> None:
        s = Setting(50)
        plain = np.array(s.scores())
        assert (plain > 0).any()
        assert (plain < 0).any()
        for value, limit in ((1e30, 2**28), (-1e30, -(2**28))):
            # The mask's value is clamped, and then the sum.
            want = np.clip(plain + limit, -(2**28), 2**28)
            assert (np.array(s.scores(mx.full((5, 50), value))) == want).all()


class TestNothingAllowed:
    @pytest.mark.parametrize("total", [40, 200])
    def test_zeros(self, total: int) -> None:
        s = Setting(total)
        nothing = np.zeros((5, total), bool)
        for mask in (mx.array(nothing), additive(nothing), mx.array(False), mx.array(-mx.inf)):
            got = s.attend(mask)
            assert_same_bits(got, mx.zeros_like(got))
            assert_same_bits(s.attend(mask, sinks=mx.full((8,), 3.0)), got)
            assert (np.array(s.scores(mask)) == EXCLUDED).all()

    def test_one_row_of_a_mask(self) -> None:
        s = Setting(200)
        allowed = np.broadcast_to(causal(5, 200), (2, 8, 5, 200)).copy()
        allowed[1, 3, 2] = False
        got, want = s.attend(mx.array(allowed)), s.attend("causal")
        assert not float64(got)[1, 3, 2].any()
        rest = np.ones((2, 8, 5), bool)
        rest[1, 3, 2] = False
        assert (float64(got)[rest] == float64(want)[rest]).all()
        assert float64(want)[1, 3, 2].any()

    def test_whole_tiles_and_splits(self) -> None:
        """A tile, or a split of four, without an allowed token is the identity: as if nothing had been computed."""
        s = Setting(700, 2, batch=1)
        allowed = np.ones((2, 700), bool)
        allowed[:, 64:600] = False
        sparse = s.attend(mx.array(allowed))
        q, keys, values = s.q, s.keys, s.values
        logits = float64(tq.scores(q, keys, 0.25))[0] / 4096
        raw_v = float64(tq.raw_tokens(values, mx.float32))[0]
        seen = float64(tq.dequantize(values.packed, values.codec))[0].reshape(2, -1, DIM)
        raw_v[:, 4:640] = seen[:, 4:640]
        logits[:, :, 64:600] = -np.inf
        weights = np.exp2(logits - logits.max(axis=-1, keepdims=True))
        want = np.einsum("hlt,htd->hld", weights / weights.sum(axis=-1, keepdims=True), np.repeat(raw_v, 4, axis=0))
        assert relative_error(sparse, want[None]) < 1.5e-3


def left_padded(x: mx.array, pads: tuple[int, ...]) -> mx.array:
    """Garbage where the padding of each row stands."""
    out = np.array(x.astype(mx.float32))
    for b, pad in enumerate(pads):
        out[b, :, :pad] = 1e4
    return mx.array(out).astype(x.dtype)


class TestLeftPadding:
    """Rows of a left-padded batch are rows of their own; mask columns are the model's timeline, padding included."""

    @pytest.mark.parametrize("pads", [(0, 5, 31), (9, 0), (100, 3)])
    @pytest.mark.parametrize("queries", [1, 4])
    @pytest.mark.parametrize("total", [40, 170])
    @pytest.mark.parametrize("group", [1, 4])
    def test_masked_decode(self, pads: tuple[int, ...], queries: int, total: int, group: int) -> None:
        """Single-token decode with a padding mask was once wrong at every width."""
        pads = tuple(min(p, total - 1) for p in pads)
        batch = len(pads)
        k, v = vectors((batch, 2, total, DIM), 1), vectors((batch, 2, total, DIM), 2)
        counts = tuple(total - p for p in pads)
        keys = fill(left_padded(k, pads), tq.make_codec(DIM, 4), "key", counts)
        values = fill(left_padded(v, pads), tq.make_codec(DIM, 3), "value", counts)
        q = vectors((batch, 2 * group, queries, DIM), 3)
        timeline = causal(queries, total)[None] & (np.arange(total) >= np.array(pads)[:, None, None])
        got = {
            "padding mask": tq.attend(q, keys, values, 0.25, mask=mx.array(timeline[:, None]), left_padding=pads),
            "additive": tq.attend(q, keys, values, 0.25, mask=additive(timeline[:, None]), left_padding=pads),
            "causal": tq.attend(q, keys, values, 0.25, mask="causal"),
        }
        logits = tq.scores(q, keys, 0.25, mask=mx.array(timeline[:, None]), left_padding=pads)
        for b, pad in enumerate(pads):
            solo = cache(k[b : b + 1, :, pad:], v[b : b + 1, :, pad:])
            want = tq.attend(q[b : b + 1], *solo, 0.25, mask="causal")
            for name, out in got.items():
                assert_same_bits(out[b : b + 1], want, f"{name}, row {b}")
            alone = tq.scores(q[b : b + 1], solo[0], 0.25, mask="causal")
            assert_same_bits(logits[b : b + 1, ..., : total - pad], alone, f"scores of row {b}")

    @SLOW_PROPERTY
    @given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**32 - 1))
    def test_any_mask_is_shifted(self, first: int, second: int, seed: int) -> None:
        pads = (first, second)
        total = 130
        k, v = vectors((2, 1, total, DIM), 1), vectors((2, 1, total, DIM), 2)
        counts = tuple(total - p for p in pads)
        keys = fill(k, tq.make_codec(DIM, 4), "key", counts)
        values = fill(v, tq.make_codec(DIM, 4), "value", counts)
        q = vectors((2, 2, 3, DIM), 3)
        allowed = np.random.default_rng(seed).random((2, 2, 3, total)) < 0.5
        got = tq.attend(q, keys, values, 0.25, mask=mx.array(allowed), left_padding=pads)
        for b, pad in enumerate(pads):
            row = (tq.select_rows(keys)[b], tq.select_rows(values)[b])
            want = tq.attend(q[b : b + 1], *row, 0.25, mask=mx.array(allowed[b : b + 1, :, :, pad:]))
            assert_same_bits(got[b : b + 1], want, f"row {b}")

    @pytest.mark.parametrize("pads", [(5, 0), (31, 2), (2, 40)])
    def test_chunks_that_are_all_padding(self, pads: tuple[int, int]) -> None:
        """A chunk of three that is all padding in a row: zeros there, and the row goes on as if alone."""
        total, chunk = 45, 3
        k, v, q = (vectors((2, heads, total, DIM), s) for heads, s in ((1, 1), (1, 2), (2, 3)))
        k, v = left_padded(k, pads), left_padded(v, pads)
        keys = tq.empty_tokens(tq.make_codec(DIM, 4), "key", 2, 1, mx.float16)
        values = tq.empty_tokens(tq.make_codec(DIM, 4), "value", 2, 1, mx.float16)
        solo = [cache(k[b : b + 1, :, p:], v[b : b + 1, :, p:], 4, 4) for b, p in enumerate(pads)]
        whole = [tq.attend(q[b : b + 1, :, p:], *solo[b], 0.25, mask="causal") for b, p in enumerate(pads)]
        for start in range(0, total, chunk):
            columns = slice(start, start + chunk)
            counts = [min(chunk, max(0, start + chunk - p)) for p in pads]
            keys = tq.append(keys, k[:, :, columns], counts)
            values = tq.append(values, v[:, :, columns], counts)
            out = tq.attend(q[:, :, columns], keys, values, 0.25, mask="causal")
            assert np.isfinite(float64(out)).all()
            for b, p in enumerate(pads):
                padding = chunk - counts[b]
                assert not float64(out[b, :, :padding]).any()
                if counts[b]:
                    want = whole[b][:, :, start + padding - p : start + chunk - p]
                    assert_same_bits(out[b : b + 1, :, padding:], want, f"row {b} from {start}")

    def test_padding_queries_are_zero_whatever_they_hold(self) -> None:
        k = vectors((1, 1, 2, DIM), 1)
        keys, values = cache(k, k)
        q = np.ones((1, 2, 5, DIM), np.float16)
        q[:, :, :3] = np.nan
        out = tq.attend(mx.array(q), keys, values, 0.25, mask="causal", sinks=mx.zeros((2,)))
        assert not float64(out[:, :, :3]).any()
        assert_same_bits(
            out[:, :, 3:], tq.attend(mx.array(q[:, :, 3:]), keys, values, 0.25, mask="causal", sinks=mx.zeros((2,)))
        )
        assert (np.array(tq.scores(mx.array(q), keys, 0.25))[:, :, :3] == EXCLUDED).all()


class TestRefused:
    @pytest.mark.parametrize(
        "mask",
        [
            mx.ones((4, 40), mx.bool_),
            mx.ones((5, 39), mx.bool_),
            mx.ones((3, 1, 5, 40), mx.bool_),
            mx.ones((2, 2, 5, 40), mx.bool_),
            mx.ones((5, 40), mx.int32),
            mx.ones((1, 1, 1, 1, 5, 40), mx.bool_),
            "full",
        ],
    )
    def test_masks(self, mask: mx.array | str) -> None:
        s = Setting(40)
        for call in (s.attend, s.scores):
            with pytest.raises(ValueError, match="mask must"):
                call(mask)

    @pytest.mark.parametrize("padding", [(1,), (1, 2, 3), (-1, 0)])
    def test_left_padding(self, padding: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="left_padding must be 2 numbers"):
            Setting(40).attend(mx.ones((5, 40), mx.bool_), left_padding=padding)

    @pytest.mark.parametrize("window", [0, -3])
    def test_window(self, window: int) -> None:
        with pytest.raises(ValueError, match=f"window={window}"):
            Setting(40).attend(window=window)
