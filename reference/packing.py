"""One layout of packed codes for every width and backend (docs/numerics.md, section 3.7).

A code is sign and magnitude: its top bit is the sign of the centroid, the rest the rank of the centroid's magnitude.
Eight codes at a time sit in the eight nibbles of a 32-bit word, so for every width up to 4 bits one shift and one mask
give eight codes in nibble lanes.  Narrower codes share the nibbles of a word: 2 groups of eight at 2 bits, 4 at 1 bit,
and at 3 bits three groups fill the low three bits of three words while a fourth is spread over their spare bits.
"""

from __future__ import annotations

import mlx.core as mx


def words_per_vector(dim: int, bits: int) -> int:
    """Words of 32 bits that hold `dim` codes of `bits` bits."""
    groups = (dim + 7) // 8
    if bits == 8:
        return (dim + 3) // 4
    if bits > 4:
        return groups + words_per_vector(dim, bits - 4)
    if bits == 3:
        return 3 * (groups // 4) + groups % 4
    return (groups * bits + 3) // 4


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., D] (integers of `bits` bits; int8 values for bits = 8) to uint32 words [..., W]."""
    dim = codes.shape[-1]
    if bits == 8:
        lanes = _pad(codes.astype(mx.int32) & 255, 4).astype(mx.uint32)
        lanes = lanes.reshape(*codes.shape[:-1], -1, 4)
        return _or_lanes(lanes, 8)
    codes = codes.astype(mx.uint32)
    if bits > 4:
        return mx.concatenate([pack(codes & 15, 4), pack(codes >> 4, bits - 4)], axis=-1)
    per_word = 4 // bits if bits != 3 else 4
    nibbles = _pad(codes, 8 * per_word).reshape(*codes.shape[:-1], -1, per_word, 8)
    groups = _or_lanes(nibbles, 4)
    if bits == 3:
        spread = mx.stack([(nibbles[..., 3, :] >> j) & 1 for j in range(3)], axis=-2)
        words = groups[..., :3] | (_or_lanes(spread, 4) << 3)
        flat = words.reshape(*codes.shape[:-1], -1)
    else:
        flat = groups[..., 0]
        for position in range(1, per_word):
            flat = flat | (groups[..., position] << (bits * position))
    return flat[..., : words_per_vector(dim, bits)]


def unpack(words: mx.array, bits: int, dim: int) -> mx.array:
    """The inverse of `pack`: uint32 words [..., W] to int32 codes [..., dim]."""
    if bits == 8:
        lanes = _lanes(words, 8, 4).astype(mx.int32).reshape(*words.shape[:-1], -1)[..., :dim]
        return lanes - ((lanes & 128) << 1)
    if bits > 4:
        low = words_per_vector(dim, 4)
        return unpack(words[..., :low], 4, dim) | (unpack(words[..., low:], bits - 4, dim) << 4)
    if bits == 3:
        nibbles = _lanes(_pad(words, 3).reshape(*words.shape[:-1], -1, 3), 4, 8)
        spare = nibbles >> 3
        fourth = spare[..., 0, :] | (spare[..., 1, :] << 1) | (spare[..., 2, :] << 2)
        groups = mx.concatenate([nibbles & 7, fourth[..., None, :]], axis=-2)
    else:
        nibbles = _lanes(words, 4, 8)
        parts = [(nibbles >> shift) & (2**bits - 1) for shift in range(0, 4, bits)]
        groups = mx.stack(parts, axis=-2)
    return groups.astype(mx.int32).reshape(*words.shape[:-1], -1)[..., :dim]


def _pad(x: mx.array, multiple: int) -> mx.array:
    missing = -x.shape[-1] % multiple
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _or_lanes(lanes: mx.array, width: int) -> mx.array:
    # The lanes do not overlap, so adding them is or-ing them.
    shifts = mx.arange(lanes.shape[-1], dtype=mx.uint32) * width
    return mx.sum(lanes << shifts, axis=-1).astype(mx.uint32)


def _lanes(words: mx.array, width: int, count: int) -> mx.array:
    shifts = mx.arange(count, dtype=mx.uint32) * width
    lanes: mx.array = (words[..., None] >> shifts) & (2**width - 1)
    return lanes
