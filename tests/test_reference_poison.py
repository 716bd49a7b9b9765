"""NaN and infinity: visible in every output that attends to them, and nowhere else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import assert_same_bits, cache, float64, vectors

from turboquant_vlm import reference as tq

DIM = 16
TOTAL = 230
QUERIES = 6
POISON = 2**31 - 1
# A first token, one in each packed tile, one raw beside a packed tile, the newest.
PLACES = [0, 3, 4, 40, 100, 128, 190, TOTAL - QUERIES, TOTAL - 3, TOTAL - 1]
BAD = [np.nan, np.inf, -np.inf]


def with_bad(x: mx.array, index: tuple[int, ...], bad: float) -> mx.array:
    out = np.array(x)
    out[index] = bad
    return mx.array(out)


def zeroed(x: mx.array, row: int, head: int, place: int) -> mx.array:
    """A clean cache to compare with: a bad vector counts as zero in what it shares with others, base and factors."""
    return with_bad(x, (row, head, place), 0.0)


class Setting:
    """Two rows, two kv heads, four query heads, the last six tokens as queries."""

    q = vectors((2, 4, QUERIES, DIM), 3)
    k = vectors((2, 2, TOTAL, DIM), 1)
    v = vectors((2, 2, TOTAL, DIM), 2)


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str = "causal", **arguments: Any) -> mx.array:
    return tq.attend(q, *cache(k, v), 0.25, mask=mask, **arguments)


def reached(row: int, head: int, place: int) -> np.ndarray:
    """bool [B, Hq, L]: the queries that attend to a token of one row and kv head."""
    hit = np.zeros((2, 4, QUERIES), bool)
    hit[row, 2 * head : 2 * head + 2] = np.arange(TOTAL - QUERIES, TOTAL) >= place
    return hit


def check(got: mx.array, hit: np.ndarray, clean: mx.array) -> None:
    """NaN in all coordinates where hit, and the bits of a clean run elsewhere."""
    out = float64(got)
    assert np.isnan(out[hit]).all()
    rest = mx.array(np.broadcast_to(hit[..., None], out.shape))
    assert_same_bits(mx.where(rest, 0, got), mx.where(rest, 0, clean))


class TestKeysAndValues:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("bad", BAD)
    def test_key(self, place: int, bad: float) -> None:
        s = Setting
        clean = attend(s.q, zeroed(s.k, 1, 0, place), s.v)
        check(attend(s.q, with_bad(s.k, (1, 0, place, 5), bad), s.v), reached(1, 0, place), clean)

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("bad", BAD)
    def test_value(self, place: int, bad: float) -> None:
        """All coordinates of the output, though one alone was bad."""
        s = Setting
        clean = attend(s.q, s.k, zeroed(s.v, 0, 1, place))
        check(attend(s.q, s.k, with_bad(s.v, (0, 1, place, 5), bad)), reached(0, 1, place), clean)

    @pytest.mark.parametrize("place", PLACES)
    def test_masked_out_has_no_effect(self, place: int) -> None:
        s = Setting
        allowed = np.arange(TOTAL) <= np.arange(TOTAL - QUERIES, TOTAL)[:, None]
        allowed[:, place] = False
        additive = mx.array(np.where(allowed, 0, -np.inf).astype(np.float32))
        want = attend(s.q, zeroed(s.k, 1, 0, place), zeroed(s.v, 1, 0, place), mx.array(allowed))
        assert np.isfinite(float64(want)).all()
        for bad in BAD:
            k, v = (with_bad(x, (1, 0, place, 2), bad) for x in (s.k, s.v))
            for mask in (mx.array(allowed), additive):
                assert_same_bits(attend(s.q, k, v, mask), want)

    def test_outside_the_window_has_no_effect(self) -> None:
        s = Setting
        k, v = (with_bad(x, (0, 0, 100, 2), np.nan) for x in (s.k, s.v))
        want = attend(s.q, zeroed(s.k, 0, 0, 100), zeroed(s.v, 0, 0, 100), window=100)
        assert_same_bits(attend(s.q, k, v, window=100), want)

    def test_a_weight_of_zero_does_not_hide_it(self) -> None:
        """A float softmax multiplies NaN by a weight that underflowed and still gets NaN."""
        s = Setting
        mask = np.zeros((QUERIES, TOTAL), np.float32)
        mask[:, 100] = -1e9
        got = attend(s.q, s.k, with_bad(s.v, (0, 0, 100, 2), np.nan), mx.array(mask))
        assert np.isnan(float64(got)[0, :2]).all()
        assert np.isfinite(float64(got)[0, 2:]).all()

    def test_scores_say_which(self) -> None:
        s = Setting
        for place in PLACES:
            keys, _ = cache(with_bad(s.k, (1, 0, place, 5), np.nan), s.v)
            clean, _ = cache(zeroed(s.k, 1, 0, place), s.v)
            got, want = (np.array(tq.scores(s.q, keys_, 0.25, mask="causal")) for keys_ in (keys, clean))
            where = np.zeros(got.shape, bool)
            where[..., place] = reached(1, 0, place)
            assert (got[where] == POISON).all()
            assert (got[~where] == want[~where]).all()

    def test_prod_keys(self) -> None:
        s = Setting
        keys, values = cache(with_bad(s.k, (1, 0, 70, 5), np.nan), s.v, kind="prod")
        clean = cache(zeroed(s.k, 1, 0, 70), s.v, kind="prod")
        check(
            tq.attend(s.q, keys, values, 0.25, mask="causal"),
            reached(1, 0, 70),
            tq.attend(s.q, *clean, 0.25, mask="causal"),
        )

    def test_raw_tokens_show_it(self) -> None:
        s = Setting
        keys, _ = cache(with_bad(s.k, (1, 0, 70, 5), np.inf), s.v)
        back = float64(tq.raw_tokens(keys))
        # Token 70 is read from its codes, whose scale is NaN.
        assert np.isnan(back[1, 0, 70]).all()
        assert np.isfinite(np.delete(back, 70, axis=2)).all()


class TestQueries:
    @pytest.mark.parametrize("bad", BAD)
    def test_only_its_own_output(self, bad: float) -> None:
        s = Setting
        hit = np.zeros((2, 4, QUERIES), bool)
        hit[1, 2, 3] = True
        check(attend(with_bad(s.q, (1, 2, 3, 7), bad), s.k, s.v), hit, attend(s.q, s.k, s.v))

    def test_scores_of_all_allowed_tokens(self) -> None:
        s = Setting
        keys, _ = cache(s.k, s.v)
        got = np.array(tq.scores(with_bad(s.q, (1, 2, 3, 7), np.nan), keys, 0.25, mask="causal"))
        want = np.array(tq.scores(s.q, keys, 0.25, mask="causal"))
        position = TOTAL - QUERIES + 3
        want[1, 2, 3, : position + 1] = POISON
        assert (got == want).all()

    def test_overflow_of_the_scaled_query_counts(self) -> None:
        """x = q a overflows float32 although q is finite."""
        k = vectors((1, 1, 10, DIM), 1)
        q = mx.full((1, 1, 1, DIM), 3e38)
        assert np.isnan(float64(tq.attend(q, *cache(k, k), 1000.0))).all()
        assert np.isfinite(float64(tq.attend(q, *cache(k, k), 0.5))).all()

    def test_a_query_that_may_attend_to_nothing_gives_zeros(self) -> None:
        s = Setting
        q = mx.full(s.q.shape, mx.nan, mx.float16)
        k, v = mx.full(s.k.shape, mx.nan, mx.float16), mx.full(s.v.shape, mx.inf, mx.float16)
        got = attend(q, k, v, mx.array(False), sinks=mx.full((4,), mx.nan))
        assert_same_bits(got, mx.zeros(s.q.shape, mx.float16))


class TestMasks:
    @pytest.mark.parametrize("place", PLACES)
    def test_nan_in_an_additive_mask(self, place: int) -> None:
        s = Setting
        allowed = np.arange(TOTAL) <= np.arange(TOTAL - QUERIES, TOTAL)[:, None]
        mask = np.broadcast_to(np.where(allowed, 0, -np.inf), (2, 4, QUERIES, TOTAL)).astype(np.float32).copy()
        hit = np.zeros((2, 4, QUERIES), bool)
        hit[0, 3, 5] = True
        mask[0, 3, 5, place] = np.nan
        check(attend(s.q, s.k, s.v, mx.array(mask)), hit, attend(s.q, s.k, s.v))

    def test_nan_where_something_else_forbids(self) -> None:
        """Beyond the window and before the row's first token a NaN of the mask is as good as absent."""
        s = Setting
        keys, values = cache(s.k, s.v)
        mask = np.zeros((QUERIES, TOTAL), np.float32)
        mask[:, :20] = np.nan
        want = tq.attend(s.q, keys, values, 0.25, window=150)
        assert_same_bits(tq.attend(s.q, keys, values, 0.25, mask=mx.array(mask), window=150), want)
        padded = np.concatenate([np.full((QUERIES, 9), np.nan), np.zeros((QUERIES, TOTAL))], axis=1)
        got = tq.attend(s.q, keys, values, 0.25, mask=mx.array(padded.astype(np.float32)), left_padding=(9, 9))
        assert_same_bits(got, tq.attend(s.q, keys, values, 0.25))


class TestSinks:
    def test_nan_is_its_own_heads(self) -> None:
        s = Setting
        hit = np.zeros((2, 4, QUERIES), bool)
        hit[:, 1] = True
        clean = attend(s.q, s.k, s.v, sinks=mx.array([0.0, -mx.inf, 1.0, 2.0]))
        check(attend(s.q, s.k, s.v, sinks=mx.array([0.0, mx.nan, 1.0, 2.0])), hit, clean)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_every_dtype_gives_its_own_nan(dtype: mx.Dtype) -> None:
    k, q = vectors((1, 1, 20, DIM), 1, dtype), vectors((1, 1, 1, DIM), 2, dtype)
    bad = mx.where(mx.arange(DIM) == 3, mx.nan, k[:, :, 4:5]).astype(dtype)
    k = mx.concatenate([k[:, :, :4], bad, k[:, :, 5:]], axis=2)
    got = tq.attend(q, *cache(k, k), 0.25)
    assert got.dtype == dtype
    assert np.isnan(float64(got)).all()
