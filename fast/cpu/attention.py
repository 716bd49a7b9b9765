"""Attention and scores on the CPU: what a call hands to `tq_attend` of `src/attend.cpp`.

The kernel reads the arrays of MLX in place. It takes blocks of queries of one kv head, unpacks each tile once for all
of them, and sums integers; the division of work among threads never changes a bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from turboquant_vlm.reference.attention import (
    EXCLUDED,
    WEIGHT_HIGH,
    WEIGHT_LOW,
    check_query,
    check_rows_held,
    check_values,
)
from turboquant_vlm.reference.codebook import magnitudes
from turboquant_vlm.reference.masks import Mask, checked_mask
from turboquant_vlm.reference.query import query_factor
from turboquant_vlm.reference.rotation import hadamard, random_signs, split_order
from turboquant_vlm.reference.types import Codec, Tokens

from . import native

__all__ = ["attend", "scores"]

TYPES = {mx.float16: 0, mx.bfloat16: 1, mx.float32: 2}
BOOL = -1

_POINTERS = (
    *("q", "key_words", "sign_words", "value_words", "key_scales", "sign_scales", "value_scales"),
    *("base", "base_exponent", "factors", "key_first", "key_recent", "value_first", "value_recent"),
    *("mask", "sinks", "rows", "key_signs", "key_signs_two", "key_paley", "value_signs", "value_paley"),
    *("key_centroids", "value_centroids", "weights", "out", "logits"),
)
_NUMBERS = (
    *("batch", "kv_heads", "group", "queries", "key_dim", "value_dim", "key_bits", "value_bits", "prod"),
    *("key_m", "value_m", "q_type", "key_type", "value_type", "key_tiles", "value_tiles"),
    *("key_recent_count", "value_recent_count", "key_first_count", "value_first_count"),
    *("causal", "window", "mask_type"),
)
_LAST_NUMBERS = ("columns", "key_shift", "sign_shift", "value_shift", "threads")


class _Arguments(ctypes.Structure):
    """`tq_attend_args` of `src/attend_args.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("mask_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in _LAST_NUMBERS),
        ("factor", ctypes.c_double),
    )


def attend(
    q: mx.array,
    keys: Tokens,
    values: Tokens,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Softmax attention of the last L tokens of every row; arguments, result and errors as in the reference.

    q: [B, Hq, L, D].  Returns [B, Hq, L, Dv] in q's dtype.
    """
    check_query(q, keys, scale)
    check_values(q, keys, values, sinks)
    padding, array = checked_mask(mask, window, left_padding, q.shape, keys.lengths, keys.first.shape[1])
    out_shape = (*q.shape[:3], values.codec.dim)
    if q.shape[2] == 0 or max(keys.lengths) == 0:
        return mx.zeros(out_shape, q.dtype)
    for name, tokens in (("keys", keys), ("values", values)):
        check_rows_held(tokens, q.shape[2], name)
    out = native.output(out_shape, q.dtype)
    _launch(q, keys, values, scale, mask, array, sinks, window, padding, out=out.address)
    return out.array()


def scores(
    q: mx.array,
    keys: Tokens,
    scale: float,
    mask: Mask = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Attention logits before softmax, int32 [B, Hq, L, longest row]; arguments and errors as in the reference."""
    check_query(q, keys, scale)
    padding, array = checked_mask(mask, window, left_padding, q.shape, keys.lengths, keys.first.shape[1])
    longest = max(keys.lengths)
    shape = (*q.shape[:3], longest)
    if q.shape[2] == 0 or longest == 0:
        return mx.full(shape, EXCLUDED, mx.int32)
    check_rows_held(keys, q.shape[2], "keys")
    logits = native.output(shape, mx.int32)
    _launch(q, keys, None, scale, mask, array, None, window, padding, logits=logits.address)
    return logits.array()


def _launch(
    q: mx.array,
    keys: Tokens,
    values: Tokens | None,
    scale: float,
    mask: Mask,
    array: mx.array | None,
    sinks: mx.array | None,
    window: int | None,
    padding: Sequence[int],
    out: int = 0,
    logits: int = 0,
) -> None:
    """Run the kernel; without values it writes logits."""
    packed, others = keys.packed, keys if values is None else values
    sinks = None if sinks is None else sinks.astype(mx.float32)
    arrays = {
        "q": q,
        "key_words": packed.words,
        "sign_words": packed.sign_words,
        "value_words": others.packed.words,
        "key_scales": packed.scales,
        "sign_scales": packed.sign_scales,
        "value_scales": others.packed.scales,
        "base": packed.base,
        "base_exponent": packed.base_exponent,
        "factors": packed.factors,
        "key_first": keys.first,
        "key_recent": keys.recent,
        "value_first": others.first,
        "value_recent": others.recent,
        "mask": array,
        "sinks": sinks,
    }
    mx.eval([x for x in arrays.values() if x is not None])
    keep: list[Any] = []
    call = _Arguments(**{name: native.pointer(x, keep) for name, x in arrays.items()})
    key, value = _codec_tables(keys.codec), _codec_tables(others.codec)
    numbers = [n for row in zip(keys.lengths, keys.held, others.held, padding, strict=True) for n in row]
    rows = (ctypes.c_int64 * len(numbers))(*numbers)
    call.rows = ctypes.addressof(rows)
    call.key_signs, call.key_signs_two, call.key_paley = key.address.signs, key.address.signs_two, key.address.forth
    call.value_signs, call.value_paley = value.address.signs, value.address.back
    call.key_centroids, call.value_centroids = key.address.centroids, value.address.centroids
    call.weights = _weights()[1]
    call.out, call.logits = out, logits
    heads = keys.first.shape[1]
    call.batch, call.kv_heads, call.group, call.queries = q.shape[0], heads, q.shape[1] // heads, q.shape[2]
    call.key_dim, call.value_dim = keys.codec.dim, others.codec.dim
    call.key_bits, call.value_bits = keys.codec.code_bits, others.codec.code_bits
    call.prod = int(keys.codec.kind == "prod")
    call.key_m, call.value_m = key.m, value.m
    call.q_type, call.key_type, call.value_type = TYPES[q.dtype], TYPES[keys.first.dtype], TYPES[others.first.dtype]
    call.key_tiles, call.value_tiles = packed.words.shape[2], others.packed.words.shape[2]
    call.key_recent_count, call.value_recent_count = keys.recent.shape[2], others.recent.shape[2]
    call.key_first_count, call.value_first_count = keys.first.shape[2], others.first.shape[2]
    call.causal = int(isinstance(mask, str))
    call.window = 0 if window is None else min(window, 2**31)
    if array is not None:
        call.mask_type = BOOL if array.dtype == mx.bool_ else TYPES[array.dtype]
        step = 1
        for axis in (3, 2, 1, 0):
            call.mask_strides[axis] = step if array.shape[axis] > 1 else 0
            step *= array.shape[axis]
    call.columns = max(keys.lengths)
    call.key_shift, call.sign_shift = keys.codec.scale_shift, keys.codec.sign_scale_shift
    call.value_shift = others.codec.scale_shift
    call.threads = native.threads()
    call.factor = query_factor(scale)
    native.function("tq_attend", (ctypes.POINTER(_Arguments),))(ctypes.byref(call))


class _Addresses(NamedTuple):
    signs: int
    signs_two: int
    forth: int
    back: int
    centroids: int


@dataclass(frozen=True)
class _CodecTables:
    """What the kernel looks up of a codec, and where it is.

    m: of D = m 2^k.  signs, signs_two: float32 [D] of +-1, streams 0 and 1.  forth, back: float32 [m, D]; row b holds
    P[a, b], or P[b, a], for every coordinate a 2^k + u.  centroids: int16 [64] by packed code.
    """

    m: int
    signs: npt.NDArray[np.float32]
    signs_two: npt.NDArray[np.float32]
    forth: npt.NDArray[np.float32]
    back: npt.NDArray[np.float32]
    centroids: npt.NDArray[np.int16]

    @cached_property
    def address(self) -> _Addresses:
        return _Addresses(*(getattr(self, name).ctypes.data for name in _Addresses._fields))


@cache
def _codec_tables(codec: Codec) -> _CodecTables:
    found = split_order(codec.dim)
    if found is None:
        raise ValueError(f"TurboQuant has no Hadamard matrix for dim={codec.dim}")
    m, k = found
    # The first column of every block of 2^k is P_m itself: S_k starts with a one.
    paley = hadamard(codec.dim)[:: 1 << k, :: 1 << k].astype(np.float32)
    centroids = np.zeros(64, np.int16)
    if codec.code_bits < 8:
        positive = magnitudes(codec.dim, codec.code_bits)
        centroids[: 2 * positive.size] = np.concatenate([positive, -positive])
    return _CodecTables(
        m=m,
        signs=random_signs(codec.dim, codec.seed).astype(np.float32),
        signs_two=random_signs(codec.dim, codec.seed, stream=1).astype(np.float32),
        forth=np.ascontiguousarray(np.repeat(paley.T, 1 << k, axis=1)),
        back=np.ascontiguousarray(np.repeat(paley, 1 << k, axis=1)),
        centroids=centroids,
    )


@cache
def _weights() -> tuple[npt.NDArray[np.int16], int]:
    """int16 [2, 64], A and B of section 5, and their address."""
    both = np.array([WEIGHT_HIGH, WEIGHT_LOW], np.int16)
    return both, both.ctypes.data
