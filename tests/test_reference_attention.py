"""Attention: float64 softmax over the same codes, and equal bits wherever two calls mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_helpers import (
    PROPERTY,
    SLOW_PROPERTY,
    assert_same_bits,
    cache,
    differs,
    fill,
    float64,
    plain_attention,
    relative_error,
    vectors,
)

from turboquant_vlm import reference as tq
from turboquant_vlm.reference import attention, integers, query

DIM = 16
# Logits have 12 fractional bits of a base-2 logarithm, weights 13 bits, queries 13: together about fp16's rounding.
CLOSE = 1.5e-3


def example(
    total: int, queries: int = 1, dim: int = DIM, heads: int = 2, group: int = 2, value_dim: int | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """q in float32, so that the error is not that of rounding the output; k and v in fp16."""
    return (
        vectors((1, heads * group, queries, dim), 3, mx.float32),
        vectors((1, heads, total, dim), 1),
        vectors((1, heads, total, value_dim or dim), 2),
    )


class TestAgainstFloat64:
    """The whole against plain softmax attention over the vectors that the codes stand for."""

    @pytest.mark.parametrize("total", [1, 5, 64, 97, 161, 300, 700])
    @pytest.mark.parametrize("queries", [1, 5])
    def test_lengths(self, total: int, queries: int) -> None:
        queries = min(queries, total)
        q, k, v = example(total, queries, 64)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, 0.125, mask="causal")
        assert relative_error(got, plain_attention(q, k, v, keys, values, 0.125)) < CLOSE

    @pytest.mark.parametrize("dim", [64, 72, 80, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576])
    def test_head_sizes(self, dim: int) -> None:
        """Odd sizes once crashed, or were rotated by a slice of a larger matrix."""
        q, k, v = example(130, 3, dim, heads=1)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, dim**-0.5, mask="causal")
        assert relative_error(got, plain_attention(q, k, v, keys, values, dim**-0.5)) < CLOSE

    @pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (512, 512), (192, 128)])
    def test_every_pair_of_widths(self, dims: tuple[int, int]) -> None:
        """A width that is hard-coded for another, or swapped between keys and values, is far off."""
        q, k, v = example(110, 1, dims[0], heads=1, value_dim=dims[1])
        scale = 1.5 * dims[0] ** -0.5
        keys = {b: fill(k, tq.make_codec(dims[0], b), "key") for b in tq.ALLOWED_BITS}
        values = {b: fill(v, tq.make_codec(dims[1], b), "value") for b in tq.ALLOWED_BITS}
        seen = set()
        for key_bits, value_bits in product(tq.ALLOWED_BITS, repeat=2):
            got = tq.attend(q, keys[key_bits], values[value_bits], scale)
            assert got.shape == (1, 2, 1, dims[1])
            want = plain_attention(q, k, v, keys[key_bits], values[value_bits], scale)
            assert relative_error(got, want) < CLOSE, (key_bits, value_bits)
            seen.add(np.array(got).tobytes())
        assert len(seen) == 49

    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
    def test_prod_keys(self, bits: int) -> None:
        """Both of its terms; the plain softmax dequantizes both."""
        q, k, v = example(200, 2, 64)
        keys, values = cache(k, v, key_bits=bits, kind="prod")
        got = tq.attend(q, keys, values, 0.125, mask="causal")
        assert relative_error(got, plain_attention(q, k, v, keys, values, 0.125)) < 2 * CLOSE

    def test_constant_part_and_uneven_channels(self) -> None:
        """Keys with a mean of 20 spreads and channels of unequal size: the base and the factors at work."""
        q, k, v = example(300, 2, 64)
        rng = np.random.default_rng(0)
        k = (k.astype(mx.float32) + mx.array(20 * rng.standard_normal(64).astype(np.float32))).astype(mx.float16)
        k = (k.astype(mx.float32) * mx.array(np.exp2(rng.integers(-3, 2, 64)).astype(np.float32))).astype(mx.float16)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, 0.06, mask="causal")
        assert relative_error(got, plain_attention(q, k, v, keys, values, 0.06)) < 3 * CLOSE

    @pytest.mark.parametrize("scale", [1e-3, 0.125, 1.0, 8.0])
    def test_softmax_scales(self, scale: float) -> None:
        q, k, v = example(200, 1, 64)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, scale)
        # A logit of 14 bits is worth more where the softmax is steep.
        assert relative_error(got, plain_attention(q, k, v, keys, values, scale)) < CLOSE * max(1.0, 2 * scale)

    @pytest.mark.parametrize("window", [1, 2, 63, 64, 100, 128, 5000])
    def test_windows(self, window: int) -> None:
        q, k, v = example(1000 if window == 128 else 300, 3)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, 0.25, mask="causal", window=window)
        want = plain_attention(q, k, v, keys, values, 0.25, window=window)
        assert relative_error(got, want) < CLOSE
        if window < 300:
            assert differs(got, tq.attend(q, keys, values, 0.25, mask="causal"))

    def test_query_sees_raw_what_is_young_for_it(self) -> None:
        """Queries of one call sit on both sides of the position where a tile turns from raw to packed."""
        total = 165
        q, k, v = example(total, 10, 64)
        keys, values = cache(k, v, 1, 1)
        got = tq.attend(q, keys, values, 0.125, mask="causal")
        for i in range(10):
            position = total - 10 + i
            assert tq.packed_tiles(position + 1) == (1 if position < 159 else 2)
        assert relative_error(got, plain_attention(q, k, v, keys, values, 0.125)) < CLOSE


class TestSinks:
    @pytest.mark.parametrize("queries", [1, 5])
    @pytest.mark.parametrize("total", [20, 97, 300, 700, 1100])
    @pytest.mark.parametrize("sink", [-3.0, 0.0, 8.0, None])
    def test_counted_once(self, total: int, queries: int, sink: float | None) -> None:
        """Once per split was a fault; 1,100 tokens are five splits of 256."""
        q, k, v = example(total, queries)
        keys, values = cache(k, v)
        # None: a sink that weighs about as much as all tokens together, so that its double is far off.
        middle = math.log(total) if sink is None else sink
        sinks = np.array([middle, middle + 1, middle - 1, middle / 2])
        got = tq.attend(q, keys, values, 0.25, mask="causal", sinks=mx.array(sinks.astype(np.float32)))
        want = plain_attention(q, k, v, keys, values, 0.25, sinks=sinks)
        assert relative_error(got, want) < CLOSE
        if sink is None:
            twice = plain_attention(q, k, v, keys, values, 0.25, sinks=sinks + math.log(2))
            assert np.linalg.norm(twice - want) > 50 * CLOSE * np.linalg.norm(want)

    def test_minus_infinity_is_none(self) -> None:
        q, k, v = example(300, 5)
        keys, values = cache(k, v)
        want = tq.attend(q, keys, values, 0.25, mask="causal")
        assert_same_bits(tq.attend(q, keys, values, 0.25, mask="causal", sinks=mx.full((4,), -mx.inf)), want)
        mixed = tq.attend(q, keys, values, 0.25, mask="causal", sinks=mx.array([-mx.inf, 0.0, -mx.inf, 2.0]))
        assert_same_bits(mixed[:, 0::2], want[:, 0::2])
        assert differs(mixed[:, 1], want[:, 1])
        assert differs(mixed[:, 3], want[:, 3])

    def test_every_dtype(self) -> None:
        q, k, v = example(100, 2)
        keys, values = cache(k, v)
        sinks = mx.array([0.5, -2.0, 8.0, 1.25])
        want = tq.attend(q, keys, values, 0.25, sinks=sinks)
        for dtype in (mx.float16, mx.bfloat16):
            assert_same_bits(tq.attend(q, keys, values, 0.25, sinks=sinks.astype(dtype)), want)

    @pytest.mark.parametrize("sink", [1e30, float("inf")])
    def test_overwhelming(self, sink: float) -> None:
        q, k, v = example(100, 2)
        keys, values = cache(k, v)
        got = tq.attend(q, keys, values, 0.25, sinks=mx.full((4,), sink))
        assert not np.array(got).any()

    def test_wrong_shape(self) -> None:
        q, k, v = example(10)
        with pytest.raises(ValueError, match=r"sinks must be \[4\]"):
            tq.attend(q, *cache(k, v), 0.25, sinks=mx.zeros((2,)))


class TestHeads:
    @pytest.mark.parametrize(("query_heads", "heads"), [(64, 1), (128, 1), (40, 8), (6, 2), (3, 3)])
    def test_every_head_equals_its_solo_run(self, query_heads: int, heads: int) -> None:
        """Group size once was tied to the GQA ratio; query head h reads kv head h // (Hq / Hk)."""
        q, k, v = example(170, 2, heads=heads, group=query_heads // heads)
        keys, values = cache(k, v)
        sinks = vectors((query_heads,), 5, mx.float32)
        got = tq.attend(q, keys, values, 0.25, mask="causal", sinks=sinks)
        logits = tq.scores(q, keys, 0.25, mask="causal")
        for h in range(0, query_heads, max(1, query_heads // 9)):
            kv = h // (query_heads // heads)
            solo_keys, solo_values = cache(k[:, kv : kv + 1], v[:, kv : kv + 1])
            q_h = q[:, h : h + 1]
            want = tq.attend(q_h, solo_keys, solo_values, 0.25, mask="causal", sinks=sinks[h : h + 1])
            assert_same_bits(got[:, h : h + 1], want, f"head {h}")
            assert_same_bits(logits[:, h : h + 1], tq.scores(q_h, solo_keys, 0.25, mask="causal"), f"scores {h}")

    def test_kv_heads_differ(self) -> None:
        q, k, v = example(170)
        keys, values = cache(k, v)
        same = mx.concatenate([q[:, :1]] * 4, axis=1)
        got = tq.attend(same, keys, values, 0.25)
        assert_same_bits(got[:, 0], got[:, 1])
        assert_same_bits(got[:, 2], got[:, 3])
        assert differs(got[:, 1], got[:, 2])


class TestEqualCalls:
    """Calls that mean the same give the same bits."""

    def test_bfloat16_query_is_its_widened_self(self) -> None:
        """Only the output is cast."""
        q, k, v = example(200, 3)
        keys, values = cache(k, v)
        for dtype in (mx.bfloat16, mx.float16):
            short = q.astype(dtype)
            got = tq.attend(short, keys, values, 0.25, mask="causal")
            want = tq.attend(short.astype(mx.float32), keys, values, 0.25, mask="causal")
            assert got.dtype == dtype
            assert_same_bits(got, want.astype(dtype))

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    def test_strided_and_transposed_arrays(self, dtype: mx.Dtype) -> None:
        _, k, v = example(200)
        q = vectors((1, 4, 3, DIM), 3, dtype)
        keys, values = cache(k, v)
        want = tq.attend(q, keys, values, 0.25, mask="causal")
        by_token = mx.contiguous(q.transpose(0, 2, 1, 3))
        wide = mx.concatenate([q, q + 1], axis=-1).reshape(1, 4, 3, 2, DIM)
        every_other = mx.stack([q, q * 0], axis=3).reshape(1, 4, 6, DIM)
        backwards = mx.contiguous(q[..., ::-1])
        for name, same in {
            "transposed": by_token.transpose(0, 2, 1, 3),
            "sliced": wide[..., 0, :],
            "strided": every_other[:, :, ::2],
            "reversed": backwards[..., ::-1],
        }.items():
            assert_same_bits(tq.attend(same, keys, values, 0.25, mask="causal"), want, name)
        moved = fill(mx.contiguous(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), keys.codec, "key")
        assert_same_bits(tq.attend(q, moved, values, 0.25, mask="causal"), want, "keys")

    def test_lazy_chains(self) -> None:
        """Nothing depends on when MLX evaluates."""
        _, k, v = example(200)
        q = vectors((1, 4, 2, DIM), 3)

        def run(touch: Callable[[mx.array], mx.array]) -> mx.array:
            keys = tq.empty_tokens(tq.make_codec(DIM, 4), "key", 1, 2, mx.float16)
            values = tq.empty_tokens(tq.make_codec(DIM, 3), "value", 1, 2, mx.float16)
            out = touch(q * 2)
            for start, stop in pairwise((0, 100, 101, 165, 200)):
                keys = tq.append(keys, touch(k[:, :, start:stop] * 0.5))
                values = tq.append(values, touch(v[:, :, start:stop] + 1))
                for array in (*keys.packed.arrays().values(), keys.recent, values.recent):
                    touch(array)
                out = touch(tq.attend(out, keys, values, 0.25, mask="causal") + q)
            return out

        def evaluated(x: mx.array) -> mx.array:
            mx.eval(x)
            return x

        assert_same_bits(run(lambda x: x), run(evaluated))

    @pytest.mark.parametrize("block", [1, 700, 3000, 10**9])
    def test_block_size(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = example(300, 40)
        keys, values = cache(k, v)
        mask = vectors((1, 4, 40, 300), 6, mx.float32)
        sinks = mx.zeros((4,))
        want = tq.attend(q, keys, values, 0.25, mask=mask, sinks=sinks)
        logits = tq.scores(q, keys, 0.25, mask=mask)
        monkeypatch.setattr(attention, "BLOCK", block)
        assert len(attention._blocks(q, 300)) == {1: 40, 700: 40, 3000: 20, 10**9: 1}[block]
        assert_same_bits(tq.attend(q, keys, values, 0.25, mask=mask, sinks=sinks), want)
        assert_same_bits(tq.scores(q, keys, 0.25, mask=mask), logits)

    def test_the_gpu_path_of_matrix_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Digits of eight bits give the bits of the CPU's float64 product in a whole run."""
        q, k, v = example(300, 5, 64)
        keys, values = cache(k, v, kind="prod")
        want = tq.attend(q, keys, values, 0.125, mask="causal")
        monkeypatch.setattr(integers, "_host_matmul", integers._digit_matmul)
        assert_same_bits(tq.attend(q, *cache(k, v, kind="prod"), 0.125, mask="causal"), want)

    def test_one_query_at_a_time(self) -> None:
        q, k, v = example(300, 20)
        keys, values = cache(k, v)
        want = tq.attend(q, keys, values, 0.25, mask="causal")
        for i in range(20):
            left = 20 - 1 - i
            got = tq.attend(q[:, :, i : i + 1], tq.trim(keys, left), tq.trim(values, left), 0.25)
            assert_same_bits(got, want[:, :, i : i + 1], f"query {i}")


def packed_from(first: int, positions: mx.array, columns: int) -> mx.array:
    j = mx.arange(columns)
    return ((j // 64 + 1) * 64 + 32 <= positions[:, None] + 1) & (j >= first)


class TestEveryStageActs:
    """Removing a stage changes the output; one that did nothing passed tests elsewhere."""

    @pytest.fixture
    def setting(self) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = example(300, 2)
        rng = np.random.default_rng(2)
        k = (k.astype(mx.float32) * mx.array(np.exp2(rng.integers(-4, 3, DIM)).astype(np.float32))).astype(mx.float16)
        return q, k + 1, v

    def run(self, setting: tuple[mx.array, mx.array, mx.array], **arguments: Any) -> mx.array:
        q, k, v = setting
        return tq.attend(q, *cache(k, v, kind="prod"), 0.25, mask="causal", **arguments)

    ABLATIONS: tuple[tuple[str, str, Any], ...] = (
        ("signs", "rotation.random_signs", lambda dim, seed, stream=0: np.ones(dim, np.int8)),
        ("rotation of the query", "query.rotate", lambda x, seed, stream=0: x),
        ("rotation of the keys", "codec.rotate", lambda x, seed, stream=0: x),
        ("rotation back", "attention.rotate_back", lambda y, seed, stream=0: y * y.shape[-1]),
        ("channel factors", "codec.channel_factors", lambda r: mx.zeros(r[..., 0, :].shape, mx.int8)),
        ("first tokens raw", "attention._read_packed", lambda i, columns: packed_from(0, i, columns)),
        ("sign code", "attention.sign_centroids", lambda words, codec: mx.zeros((*words.shape[:-1], DIM), mx.int32)),
        ("raw logits", "attention._raw_logits", None),
        ("low weights", "attention.WEIGHT_LOW", lambda: [4096] * 64),
    )

    @pytest.mark.parametrize(("name", "target", "replacement"), ABLATIONS, ids=[a[0] for a in ABLATIONS])
    def test_ablation(
        self,
        setting: tuple[mx.array, mx.array, mx.array],
        name: str,
        target: str,
        replacement: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        before = self.run(setting)
        if replacement is None:
            plain = attention._raw_logits
            value: object = lambda query, raw: mx.zeros_like(plain(query, raw))  # noqa: E731
        elif name == "low weights":
            value = replacement()
        else:
            value = replacement
        monkeypatch.setattr(f"turboquant_vlm.reference.{target}", value)
        assert differs(self.run(setting), before)

    def test_base_of_packed_keys(self, setting: tuple[mx.array, mx.array, mx.array]) -> None:
        q, k, v = setting
        keys, values = cache(k, v)
        assert keys.packed.base is not None
        keys.packed.base[0, :, 1] = 0
        assert differs(tq.attend(q, keys, values, 0.25), tq.attend(q, *cache(k, v), 0.25))

    def test_arguments(self, setting: tuple[mx.array, mx.array, mx.array]) -> None:
        before = self.run(setting)
        for arguments in ({"sinks": mx.zeros((4,))}, {"window": 200}, {"window": 299}):
            assert differs(self.run(setting, **arguments), before), arguments
        q, k, v = setting
        keys, values = cache(k, v, kind="prod")
        assert differs(tq.attend(q, keys, values, 0.25), before)
        assert differs(tq.attend(q, keys, values, 0.26, mask="causal"), before)


class TestWeights:
    def test_tables(self) -> None:
        high = [math.floor(2**12 * 2 ** (-h / 64) + 0.5) for h in range(64)]
        low = [math.floor(2**12 * 2 ** (-n / 4096) + 0.5) for n in range(64)]
        assert high == attention.WEIGHT_HIGH
        assert low == attention.WEIGHT_LOW
        # Some by hand.
        assert (high[0], high[1], high[32], high[63]) == (4096, 4052, 2896, 2070)
        assert (low[0], low[1], low[63]) == (4096, 4095, 4053)

    def test_every_distance_by_fractions(self) -> None:
        distances = np.arange(0, 16 * 4096, 7)
        got = np.array(attention._weight(mx.array(distances.astype(np.int32)))).tolist()
        for d, weight in zip(distances.tolist(), got, strict=True):
            s, h, low = d >> 12, d >> 6 & 63, d & 63
            exact = Fraction(attention.WEIGHT_HIGH[h] * attention.WEIGHT_LOW[low], 2 ** (11 + s))
            assert weight == (0 if s > 13 else round(exact)), d
        assert got[0] == 2**13

    def test_is_a_power_of_two_and_falls(self) -> None:
        distances = np.arange(0, 14 * 4096)
        got = np.array(attention._weight(mx.array(distances.astype(np.int32)))).astype(float)
        want = 2.0 ** (13 - distances / 4096)
        # Half a unit each of two 12-bit tables and of the result.
        assert (np.abs(got - want) <= 0.5 + want * (2**-12.0 + 2**-12.0)).all()
        assert (np.diff(got[:4096]) <= 1).all()

    @pytest.mark.parametrize("distance", [14 * 4096, 2**20, 2**29])
    def test_far_away_is_zero(self, distance: int) -> None:
        assert attention._weight(mx.array([distance], mx.int32)).item() == 0


def reference_merge(parts: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, int]:
    """Four after the other, then a binary tree, in NumPy float32 (IEEE's additions)."""

    def merge(left: tuple[np.ndarray, int], right: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
        m = max(left[1], right[1])
        total = np.zeros_like(left[0])
        for a, x in (left, right):
            if x - m >= -40:
                shifted = np.ldexp(a, x - m).astype(np.float32)
                total = total + np.where(np.abs(shifted) < 2.0**-64, np.float32(0), shifted)
        return np.where(np.abs(total) < 2.0**-64, np.float32(0), total), m

    identity = (np.zeros_like(parts[0][0]), integers.IDENTITY_EXPONENT)
    splits = []
    for start in range(0, len(parts), 4):
        running = parts[start]
        for part in parts[start + 1 : start + 4]:
            running = merge(running, part)
        splits.append(running)
    while len(splits) > 1:
        splits += [identity] * (len(splits) % 2)
        splits = [merge(splits[m], splits[m + 1]) for m in range(0, len(splits), 2)]
    return splits[0]


class TestMergeOrder:
    @PROPERTY
    @given(st.integers(1, 40), st.integers(0, 2**32 - 1))
    def test_splits_in_sequence_then_a_tree(self, tiles: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a = (rng.standard_normal((tiles, 3)) * 2.0 ** rng.integers(-5, 20, (tiles, 1))).astype(np.float32)
        x = rng.integers(-20, 20, tiles)
        empty = rng.random(tiles) < 0.2
        a[empty], x[empty] = 0, integers.IDENTITY_EXPONENT
        got, exponent = attention._merge_tiles(
            mx.array(a[None, None]), mx.array(x.astype(np.int32)[None, None, :, None])
        )
        want, want_exponent = reference_merge([(row, int(e)) for row, e in zip(a, x, strict=True)])
        assert_same_bits(got[0, 0], mx.array(want))
        assert exponent.item() == want_exponent

    def test_order_matters_at_all(self) -> None:
        """Otherwise the test above could not fail: a plain sequence gives other bits."""
        rng = np.random.default_rng(0)
        a = rng.standard_normal((16, 200)).astype(np.float32)
        got, _ = attention._merge_tiles(mx.array(a[None, None]), mx.zeros((1, 1, 16, 1), mx.int32))
        running = a[0]
        for row in a[1:]:
            running = running + row
        assert differs(got[0, 0], mx.array(running))


class TestScores:
    @SLOW_PROPERTY
    @given(st.integers(0, 2**32 - 1), st.integers(-20, 20), st.integers(-20, 20))
    def test_raw_logits_are_those_of_the_text(self, seed: int, q_power: int, k_power: int) -> None:
        """Snap both, multiply in halves, round once to 12 fractional bits, in Python integers."""
        rng = np.random.default_rng(seed)
        q = (rng.standard_normal((1, 1, 2, 8)) * 2.0**q_power).astype(np.float32)
        k = (rng.standard_normal((1, 1, 5, 8)) * 2.0**k_power).astype(np.float32)
        got = tq.scores(mx.array(q), fill(mx.array(k), tq.make_codec(8, 4), "key"), 0.3)
        a = np.float32(0.3 * math.log2(math.e))
        for row in range(2):
            big_q, e_q = by_the_text(q[0, 0, row] * a, 13)
            for column in range(5):
                x, e_k = by_the_text(k[0, 0, column], 14)
                high = [(n + 64) >> 7 for n in big_q]
                low = [n - 128 * h for n, h in zip(big_q, high, strict=True)]
                dot = np.float32(128 * sum(h * n for h, n in zip(high, x, strict=True)))
                dot = dot + np.float32(sum(h * n for h, n in zip(low, x, strict=True)))
                f = round(Fraction(float(dot)) * Fraction(2) ** (e_q + e_k - 15))
                assert got[0, 0, row, column].item() == max(-(2**28), min(2**28, f))

    def test_packed_logits_are_near_the_dequantized_ones(self) -> None:
        q, k, _ = example(300, 2, 64)
        for kind in ("mse", "prod"):
            keys = fill(k, tq.make_codec(64, 4, kind=kind), "key")
            got = float64(tq.scores(q, keys, 0.125))[0, :, 0] / 4096
            seen = float64(tq.dequantize(keys.packed, keys.codec)).reshape(2, -1, 64)
            want = np.einsum("hd,htd->ht", float64(q)[0, :, 0], np.repeat(seen, 2, axis=0)) * 0.125 * math.log2(math.e)
            assert np.abs(got[:, 4:256] - want[:, 4:256]).max() < 3e-3

    def test_clamped(self) -> None:
        k = mx.array(np.full((1, 1, 3, 8), 1e30, np.float32))
        keys = fill(k, tq.make_codec(8, 4), "key")
        assert (np.array(tq.scores(mx.full((1, 1, 1, 8), 1e30), keys, 1.0)) == 2**28).all()
        assert (np.array(tq.scores(mx.full((1, 1, 1, 8), -1e30), keys, 1.0)) == -(2**28)).all()

    def test_no_tokens(self) -> None:
        keys = tq.empty_tokens(tq.make_codec(8, 4), "key", 2, 1, mx.float16)
        assert tq.scores(mx.zeros((2, 1, 3, 8)), keys, 1.0).shape == (2, 1, 3, 0)
        values = tq.empty_tokens(tq.make_codec(8, 4), "value", 2, 1, mx.float16)
        got = tq.attend(mx.full((2, 1, 3, 8), mx.nan), keys, values, 1.0, sinks=mx.zeros((1,)))
        assert_same_bits(got, mx.zeros((2, 1, 3, 8)))

    @pytest.mark.parametrize(("exponent", "want"), [(-101, 2**10), (-100, 2**10), (60, 2**28), (400, 2**28)])
    def test_exponents_are_limited(self, exponent: int, want: int) -> None:
        y = 2.0**110 if exponent < 0 else 2.0**-40
        assert query.logit(mx.array([y]), mx.array([exponent])).item() == (want if exponent < 0 else 2**20)


def by_the_text(x: np.ndarray, bits: int) -> tuple[list[int], int]:
    fractions = [Fraction(float(v)) for v in x]
    m = max(map(abs, fractions))
    e = m.numerator.bit_length() - m.denominator.bit_length()
    e += m >= Fraction(2) ** e
    return [round(v * Fraction(2) ** (bits - e)) for v in fractions], e


class TestNorms:
    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    @pytest.mark.parametrize("norm", [0.0, 1e-7, 1e3, 7e4, 1e6])
    def test_keys_and_values_of_any_norm(self, norm: float, dtype: mx.Dtype) -> None:
        """Finite outputs, and young tokens as exact as ever."""
        q, k, v = example(140, 2, 64)
        size = norm / 8
        if size > 1e4 and dtype == mx.float16:
            # Coordinates of four standard deviations still fit into fp16.
            size = 1.4e4
        k, v = ((x.astype(mx.float32) * size).astype(dtype) for x in (k, v))
        scale = 0.125 / max(size, 1e-3)
        keys, values = cache(k, v, 4, 4)
        got = tq.attend(q, keys, values, scale, mask="causal")
        assert np.isfinite(np.array(got)).all()
        want = plain_attention(q, k, v, keys, values, scale)
        if norm == 0:
            assert not np.array(got).any()
        else:
            assert relative_error(got, want) < CLOSE

    @pytest.mark.parametrize("power", [-60, -30, 0, 30, 60])
    def test_powers_of_two_of_raw_values_scale_the_output(self, power: int) -> None:
        q, k, v = example(90, 3)
        v = v.astype(mx.float32)
        keys, values = cache(k, v)
        scaled = fill(v * 2.0**power, values.codec, "value")
        got = tq.attend(q, keys, scaled, 0.25, mask="causal")
        assert_same_bits(got, tq.attend(q, keys, values, 0.25, mask="causal") * 2.0**power)

    def test_a_convex_combination(self) -> None:
        """Equal values come out as they went in."""
        q, k, _ = example(90, 3)
        values = fill(mx.full((1, 2, 90, DIM), 0.375, mx.float16), tq.make_codec(DIM, 4), "value")
        keys = fill(k, tq.make_codec(DIM, 4), "key")
        got = tq.attend(q, keys, values, 0.25, mask="causal")
        assert np.abs(np.array(got) - 0.375).max() < 0.375 * CLOSE


class TestRefused:
    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [
            ((1, 3, 1, DIM), mx.float32, "q must be"),
            ((2, 4, 1, DIM), mx.float32, "q must be"),
            ((1, 4, 1, DIM + 4), mx.float32, "q must be"),
            ((4, 1, DIM), mx.float32, "q must be"),
            ((1, 0, 1, DIM), mx.float32, "q must be"),
            ((1, 4, 1, DIM), mx.int32, "q must be float16"),
        ],
    )
    def test_query(self, shape: tuple[int, ...], dtype: mx.Dtype, message: str) -> None:
        _, k, v = example(10)
        keys, values = cache(k, v)
        for call in (lambda q: tq.attend(q, keys, values, 0.25), lambda q: tq.scores(q, keys, 0.25)):
            with pytest.raises(ValueError, match=message):
                call(mx.zeros(shape, dtype))

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 2.0**-32, 2.0**20])
    def test_scale(self, scale: float) -> None:
        q, k, v = example(10)
        with pytest.raises(ValueError, match="scale must be"):
            tq.attend(q, *cache(k, v), scale)

    @pytest.mark.parametrize("scale", [2.0**-30, 2.0**19])
    def test_extreme_scales_that_are_allowed(self, scale: float) -> None:
        q, k, v = example(10)
        assert np.isfinite(np.array(tq.attend(q, *cache(k, v), scale))).all()

    def test_roles_and_lengths(self) -> None:
        q, k, v = example(10)
        keys, values = cache(k, v)
        with pytest.raises(ValueError, match='keys must have role "key"'):
            tq.attend(q, values, values, 0.25)
        with pytest.raises(ValueError, match='values must have role "value"'):
            tq.attend(q, keys, keys, 0.25)
        with pytest.raises(ValueError, match="must hold the same tokens"):
            tq.attend(q, keys, tq.trim(values, 1), 0.25)

    def test_queries_whose_raw_tokens_are_gone(self) -> None:
        """Better an error than a wrong answer: the ring is 128 tokens long."""
        _, k, v = example(400)
        keys, values = cache(k[:, :, :200], v[:, :, :200])
        for t in range(200, 400):
            keys, values = tq.append(keys, k[:, :, t : t + 1]), tq.append(values, v[:, :, t : t + 1])
        q = vectors((1, 4, 150, DIM), 0)
        with pytest.raises(ValueError, match="need the raw keys from token"):
            tq.attend(q, keys, values, 0.25, mask="causal")
        good = tq.attend(q[:, :, -33:], keys, values, 0.25, mask="causal")
        assert_same_bits(good, tq.attend(q[:, :, -33:], *cache(k, v), 0.25, mask="causal"))
