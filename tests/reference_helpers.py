"""What the tests of the reference share: bit comparison, seeded vectors, and plain float64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import settings

from turboquant_vlm import reference as tq

# Derandomized, so that a red test is red everywhere; deadlines would measure the machine, not the code.
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
SLOW_PROPERTY = settings(PROPERTY, max_examples=15)

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def bits_of(x: mx.array) -> np.ndarray:
    """The bit patterns of an array, so that NaN equals itself and -0 differs from 0."""
    return np.array(x if x.dtype == mx.bool_ else x.view(UNSIGNED[x.dtype.size]))


def assert_same_bits(got: mx.array, want: mx.array, what: str = "array") -> None:
    """Equal dtype, shape and bits; the message names the first difference."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype} instead of {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    if got.size == 0:
        return
    different = bits_of(got) != bits_of(want)
    if different.any():
        first = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.size} differ, first at {first}: "
            f"{got[first].item()!r} instead of {want[first].item()!r}"
        )


def differs(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of one shape differ in any bit."""
    assert a.shape == b.shape
    return bool((bits_of(a) != bits_of(b)).any())


def assert_same_packed(got: tq.Packed, want: tq.Packed) -> None:
    """The same arrays are present and equal to the bit."""
    ours, theirs = got.arrays(), want.arrays()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert_same_bits(array, theirs[name], name)


def assert_same_tokens(got: tq.Tokens, want: tq.Tokens) -> None:
    """Equal lengths, codes and raw tokens, row by row.

    How many raw tokens beyond the needed ones are still held depends on the last call and changes no result, so only
    those that both hold are compared; both must hold what a query at the end of the row reads.
    """
    assert got.lengths == want.lengths
    assert got.codec == want.codec
    assert got.role == want.role
    for ours, theirs in zip(tq.select_rows(got), tq.select_rows(want), strict=True):
        length = ours.lengths[0]
        assert ours.packed.words.shape[2] == tq.packed_tiles(length)
        assert_same_packed(ours.packed, theirs.packed)
        assert_same_bits(ours.first, theirs.first, "first")
        common = min(ours.held[0], theirs.held[0])
        assert common >= length - tq.TILE * tq.packed_tiles(length)
        assert ours.recent.shape[2] == ours.held[0]
        assert_same_bits(
            ours.recent[:, :, ours.held[0] - common :], theirs.recent[:, :, theirs.held[0] - common :], "recent"
        )


def vectors(shape: Sequence[int], seed: int, dtype: mx.Dtype = mx.float16, spread: float = 1.0) -> mx.array:
    """Seeded normal vectors in a model's dtype."""
    return mx.array((np.random.default_rng(seed).standard_normal(tuple(shape)) * spread).astype(np.float32)).astype(
        dtype
    )


def cache(
    k: mx.array, v: mx.array, key_bits: int = 4, value_bits: int = 3, kind: str = "mse", factors: mx.array | None = None
) -> tuple[tq.Tokens, tq.Tokens]:
    """Keys and values of equal rows, appended in one call."""
    return (
        fill(k, tq.make_codec(k.shape[3], key_bits, kind=kind), "key", factors=factors),
        fill(v, tq.make_codec(v.shape[3], value_bits), "value"),
    )


def fill(
    x: mx.array, codec: tq.Codec, role: Any, counts: Sequence[int] | None = None, factors: mx.array | None = None
) -> tq.Tokens:
    """Tokens made of x [B, H, T, D] in one call."""
    empty = tq.empty_tokens(codec, role, x.shape[0], x.shape[1], x.dtype, factors)
    return tq.append(empty, x, counts)


def float64(x: mx.array) -> np.ndarray:
    """Exact: every dtype of a model fits into float32."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def as_read(tokens: tq.Tokens, raw: np.ndarray, position: int) -> np.ndarray:
    """What a query at `position` reads, float64 [H, T, D], in a cache of one row whose raw vectors were [H, T, D]."""
    tiles = tq.packed_tiles(position + 1)
    seen = raw.copy()
    if tiles:
        coded = tq.dequantize(tokens.packed, tokens.codec)[0, :, :tiles]
        flat = float64(coded).reshape(raw.shape[0], tiles * tq.TILE, -1)
        seen[:, tq.FIRST : tiles * tq.TILE] = flat[:, tq.FIRST :]
    return seen


def plain_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    keys: tq.Tokens,
    values: tq.Tokens,
    scale: float,
    causal: bool = True,
    sinks: np.ndarray | None = None,
    window: int | None = None,
) -> np.ndarray:
    """Softmax attention of one row in float64 over the same codes: [Hq, L, Dv]."""
    queries, raw_keys, raw_values = float64(q)[0], float64(k)[0], float64(v)[0]
    heads, count, _ = queries.shape
    group, length = heads // raw_keys.shape[0], raw_keys.shape[1]
    out = np.zeros((heads, count, raw_values.shape[2]))
    for column in range(count):
        position = length - count + column
        seen_keys, seen_values = as_read(keys, raw_keys, position), as_read(values, raw_values, position)
        j = np.arange(length)
        allowed = (j <= position) | (not causal)
        if window is not None:
            allowed = allowed & (position - j < window)
        for head in range(heads):
            logits = scale * seen_keys[head // group] @ queries[head, column]
            logits[~allowed] = -np.inf
            sink = -np.inf if sinks is None else float(sinks[head])
            top = max(logits.max(), sink)
            weights = np.exp(logits - top)
            out[head, column] = weights @ seen_values[head // group] / (weights.sum() + np.exp(sink - top))
    return out


def relative_error(got: mx.array, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(float64(got).reshape(want.shape) - want) / np.linalg.norm(want))
