"""Codes, scales, packing, `prod` and dequantization: sections 3.2 to 3.8 and 6, on int64 NumPy arrays.

Vectors are rows of ``[T, D]`` here; callers loop over rows and heads. Nothing is packed except for
comparison: the other oracle modules work on centroids.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .oracle_codebook import codebook
from .oracle_numbers import (
    FP16_NAN,
    Array,
    f32,
    fp16_from_ratio,
    fp16_value,
    round_shift,
    snap_floats,
    snap_integers,
)
from .oracle_rotation import rotate, signs, unrotate

TILE = 64


@dataclass(frozen=True)
class OracleCodec:
    """The parameters that decide the bits: head size, bits, seed and kind ("mse" or "prod")."""

    dim: int
    bits: int
    seed: int = 0
    kind: str = "mse"

    @property
    def code_bits(self) -> int:
        return self.bits - 1 if self.kind == "prod" else self.bits

    @property
    def log_dim(self) -> int:
        return (self.dim - 1).bit_length()

    @property
    def kappa(self) -> int:
        return self.log_dim + 3

    @property
    def kappa2(self) -> int:
        return self.kappa + (self.log_dim + 1) // 2 + 2

    @cached_property
    def s(self) -> Array:
        return signs(self.dim, self.seed, 0)

    @cached_property
    def s2(self) -> Array:
        return signs(self.dim, self.seed, 1)


@dataclass
class Codes:
    """Coded vectors: centroids ``c`` [T, D], fp16 scale bits [T]; `prod` adds ``c2`` and its scale."""

    c: Array
    scale: Array
    c2: Array | None = None
    scale2: Array | None = None

    @property
    def non_finite(self) -> Array:
        return (self.scale & 0x7FFF) > 0x7C00


@dataclass
class Base:
    """Bases of N tiles: ``m`` [N, D] in units of 2**(e - 13), ``e`` [N]."""

    m: Array
    e: Array


def key_base(x: Array, e: Array) -> tuple[Base, Array]:
    """3.2 on snapped keys ``x`` [N*64, D], ``e`` [N*64]: the bases and the residuals [N*64, D]."""
    tiles = x.reshape(-1, TILE, x.shape[-1])
    te = e.reshape(-1, TILE)
    top = te.max(axis=1)
    shift = te - top[:, None]
    aligned = np.where(shift[..., None] < -30, 0, round_shift(tiles, shift[..., None]))
    m = round_shift(aligned.sum(axis=1), -6)
    return Base(m, top), (aligned - m[:, None]).reshape(x.shape)


def channel_factors(residual: Array) -> Array:
    """3.3: f [D] from the residuals [64, D] of tile 0, in Python integers."""
    s = [int(v) for v in (residual.astype(np.int64) ** 2).sum(axis=0)]
    total = sum(s)
    dim = len(s)
    out = []
    for v in s:
        if dim * v > 1024 * total:
            f = -3
        elif dim * v > 64 * total:
            f = -2
        elif dim * v > 4 * total:
            f = -1
        elif 1024 * dim * v < total:
            f = 3
        elif 64 * dim * v < total:
            f = 2
        elif 4 * dim * v < total:
            f = 1
        else:
            f = 0
        out.append(f)
    return np.array(out, np.int64)


def encode(x: Array, codec: OracleCodec, base: bool, factors: Array | None) -> tuple[Codes, Base | None]:
    """Code float32 vectors ``x`` [T, D] with a base per 64 of them if asked and factors [D] if given."""
    big, e, bad = snap_floats(x, 13)
    tile_base = None
    if base:
        tile_base, r = key_base(big, e)
        e = np.repeat(tile_base.e, TILE)
    else:
        r = big
    if base or factors is not None:
        z, g = snap_integers(r, 13, 0 if factors is None else factors)
        epsilon = e + g - 26
    else:
        z, epsilon = r, e - 13
    z = np.where(bad[:, None], 0, z)
    return encode_snapped(z, epsilon, bad, codec), tile_base


def tile_zero_factors(x: Array) -> Array:
    """f [D] fixed by the first 64 keys ``x`` [64, D] float32."""
    big, e, _ = snap_floats(x, 13)
    return channel_factors(key_base(big, e)[1])


def encode_snapped(z: Array, epsilon: Array, bad: Array, codec: OracleCodec) -> Codes:
    """3.4 to 3.6 and 3.8 on the integer vectors ``z 2**epsilon``."""
    dim = codec.dim
    y = rotate(z, codec.s)
    s = (z * z).sum(axis=1)
    c = quantize_rotated(y, s, dim, codec.code_bits)
    n = (y * c).sum(axis=1)
    scale = _scales(s, n, epsilon + codec.kappa, bad)
    if codec.kind != "prod":
        return Codes(c, scale)
    a = np.where(n == 0, 0, (512 * dim * s + n) // np.where(n == 0, 1, 2 * n))
    rest = 256 * y - a[:, None] * c
    z2, g2 = snap_integers(rest, 13)
    y2 = rotate(z2, codec.s2)
    c2 = np.where(y2 > 0, 127, -127)
    s2 = (z2 * z2).sum(axis=1)
    n2 = (y2 * c2).sum(axis=1)
    return Codes(c, scale, c2, _scales(s2, dim * n2, epsilon + g2 - 21 + codec.kappa2, bad))


def _scales(num: Array, den: Array, k: Array, bad: Array) -> Array:
    out = [
        FP16_NAN if b else fp16_from_ratio(int(p), int(q), int(e)) if q else 0
        for p, q, e, b in zip(num, den, k, bad, strict=True)
    ]
    return np.array(out, np.uint16)


def quantize_rotated(y: Array, s: Array, dim: int, bits: int) -> Array:
    """The centroids of 3.5 of rotated vectors ``y`` [T, D] whose unrotated square norms are ``s`` [T]."""
    if bits == 8:
        m = np.abs(y).max(axis=1, keepdims=True)
        return np.sign(y) * ((254 * np.abs(y) + m) // np.where(m == 0, 1, 2 * m))
    levels, k = codebook(dim, bits)
    root = np.array([math.isqrt(int(v) << 16) for v in s], np.int64)
    rho = (root * k) >> 12
    index = np.zeros(y.shape, np.int64)
    for low, high in itertools.pairwise(levels):
        theta = ((low + high) * rho) >> 16
        index += y > theta[:, None]
    return np.array(levels, np.int64)[index]


# ---- packing (3.7) -------------------------------------------------------------------------------


def word_count(dim: int, bits: int) -> int:
    """uint32 words of one coded vector."""
    g = -(-dim // 8)
    return {
        1: -(-g // 4),
        2: -(-g // 2),
        3: 3 * (g // 4) + g % 4,
        4: g,
        5: g + -(-g // 4),
        6: g + -(-g // 2),
        8: -(-dim // 4),
    }[bits]


def code_of(c: Array, dim: int, bits: int) -> Array:
    """Centroids to b-bit codes: sign bit on top, rank of the magnitude below; 8 bits are two's complement."""
    if bits == 8:
        return c & 0xFF
    levels, _ = codebook(dim, bits)
    magnitudes = [v for v in levels if v > 0]
    rank = np.zeros(128, np.int64)
    rank[magnitudes] = np.arange(len(magnitudes))
    return np.where(c < 0, 1 << (bits - 1), 0) + rank[np.abs(c)]


def bit_positions(dim: int, bits: int) -> list[list[tuple[int, int]]]:
    """For each coordinate, where bit 0, 1, ... of its code lies: (word, bit)."""
    g = -(-dim // 8)
    out: list[list[tuple[int, int]]] = []
    for d in range(dim):
        group, n = divmod(d, 8)
        one = (group // 4, 4 * n + group % 4)
        two = [(group // 2, 4 * n + 2 * (group % 2) + i) for i in range(2)]
        four = [(group, 4 * n + i) for i in range(4)]
        if bits == 1:
            out.append([one])
        elif bits == 2:
            out.append(two)
        elif bits == 4:
            out.append(four)
        elif bits == 3:
            quad, member = divmod(group, 4)
            if member < 3:
                out.append([(3 * quad + member, 4 * n + i) for i in range(3)])
            else:
                out.append([(3 * quad + i, 4 * n + 3) for i in range(3)])
        elif bits == 5:
            out.append([*four, (g + one[0], one[1])])
        elif bits == 6:
            out.append([*four, *((g + w, b) for w, b in two)])
        else:
            out.append([(d // 4, 8 * (d % 4) + i) for i in range(8)])
    return out


def pack(c: Array, dim: int, bits: int) -> Array:
    """Centroids [..., D] to uint32 words [..., W]."""
    codes = code_of(c, dim, bits)
    words = np.zeros((*c.shape[:-1], word_count(dim, bits)), np.int64)
    for d, places in enumerate(bit_positions(dim, bits)):
        for i, (word, bit) in enumerate(places):
            words[..., word] |= ((codes[..., d] >> i) & 1) << bit
    return words.astype(np.uint32)


def unpack(words: Array, dim: int, bits: int) -> Array:
    """uint32 words [..., W] to centroids [..., D]."""
    wide = words.astype(np.int64)
    codes = np.zeros((*words.shape[:-1], dim), np.int64)
    for d, places in enumerate(bit_positions(dim, bits)):
        for i, (word, bit) in enumerate(places):
            codes[..., d] |= ((wide[..., word] >> bit) & 1) << i
    if bits == 8:
        return codes - ((codes & 0x80) << 1)
    levels, _ = codebook(dim, bits)
    magnitudes = np.array([v for v in levels if v > 0], np.int64)
    rank = codes & ((1 << (bits - 1)) - 1)
    return np.where(codes >> (bits - 1) == 1, -magnitudes[rank], magnitudes[rank])


# ---- dequantize (6) ------------------------------------------------------------------------------


def decode(codes: Codes, codec: OracleCodec, base: Base | None, factors: Array | None) -> Array:
    """Section 6: float32 [T, D] of coded vectors."""
    f = np.zeros(codec.dim, np.int64) if factors is None else factors
    with np.errstate(over="ignore", invalid="ignore"):
        t = f32(unrotate(codes.c, codec.s)) * fp16_value(codes.scale)[:, None]
        x = np.ldexp(t, (-codec.kappa - f).astype(np.int32)).astype(np.float32)
        if codes.c2 is not None:
            assert codes.scale2 is not None
            inner = unrotate(codes.c2, np.ones(codec.dim, np.int64))
            t2 = f32(unrotate(codec.s2 * inner, codec.s)) * fp16_value(codes.scale2)[:, None]
            x = x + np.ldexp(t2, (-codec.kappa2 - f).astype(np.int32)).astype(np.float32)
        if base is not None:
            added = np.ldexp(base.m.astype(np.float32), (base.e - 13).astype(np.int32)[:, None])
            x = x + np.repeat(added.astype(np.float32), TILE, axis=0)
    bad = codes.non_finite
    if codes.scale2 is not None:
        bad = bad | ((codes.scale2 & 0x7FFF) > 0x7C00)
    return np.where(bad[:, None], np.float32(np.nan), x).astype(np.float32)
