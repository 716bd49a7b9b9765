"""TurboQuant's vector codec: rotate, look up each coordinate in a codebook, keep one scale.

    x  --snap-->  integers  --(- base, * 2^f: keys)-->  r  --rotate-->  Y  --codebook-->  codes, scale

Keys first lose the mean of their 64-token tile (the base, kept exactly) and have quiet channels enlarged by powers of
two (the factors f; queries are divided by them): what is left is small and evenly spread, which is what a codebook of
one coordinate law can serve.  Values go in as they are.  The scale <x, x> / <x, x^> makes inner products with the
quantized vector unbiased.  Steps and roundings: docs/numerics.md, section 3.  Source: arXiv 2504.19874, algorithms 1
and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import mlx.core as mx

from .codebook import boundary_constant, centroids_ascending, magnitudes
from .integers import half_from_ratio, isqrt, pow2, snap, snap_wide
from .packing import pack, unpack
from .rotation import hadamard, rotate, rotate_back
from .types import ALLOWED_BITS, DTYPES, TILE, Codec, Packed

__all__ = ["coded_centroids", "dequantize", "make_codec", "quantize"]

SIGN_CENTROID = 127
MAX_FACTOR = 3


def make_codec(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> Codec:
    """A validated codec for vectors of `dim` coordinates at `bits` bits each.

    dim: a head size with a Hadamard matrix (8 to 1024).  bits: 1 to 6 or 8.  seed: of the signs, 0 <= seed < 2^31.
    kind: "mse", or "prod" (bits - 1 bits and the sign of a second rotation of the remainder; 2 to 6 bits, keys only).
    Raises ValueError naming the argument, the value and what is allowed.
    """
    if isinstance(bits, bool) or bits not in ALLOWED_BITS:
        raise ValueError(f"TurboQuant supports 1 to 6 or 8 bits per coordinate; got bits={bits!r}")
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise ValueError(f"dim must be an integer from 8 to 1024; got dim={dim!r}")
    if kind not in ("mse", "prod"):
        raise ValueError(f'kind must be "mse" or "prod"; got kind={kind!r}')
    if kind == "prod" and not 2 <= bits <= 6:
        raise ValueError(f'kind="prod" supports 2 to 6 bits per coordinate; got bits={bits}')
    if not isinstance(seed, Integral) or not 0 <= seed < 2**31:
        raise ValueError(f"seed must be an integer from 0 to 2147483647; got seed={seed!r}")
    hadamard(int(dim))
    return Codec(int(dim), int(bits), int(seed), kind)


@dataclass(frozen=True)
class _Coded:
    """A rotated vector's centroids c and codes to pack, int32 [..., D], and <Y, c> and <Z, Z>, int64 [..., 1]."""

    centroids: mx.array
    codes: mx.array
    inner: mx.array
    square: mx.array


def quantize(x: mx.array, codec: Codec, base: bool = False, factors: mx.array | None = None) -> Packed:
    """Quantize vectors x [..., T, D] of any floating dtype (section 3).

    base: subtract and store the mean of each tile of 64 tokens (T a multiple of 64); without `factors` those of the
        first tile are then measured and used.  factors: int8 [..., D] in -3 .. 3, one set for all T vectors.
    Returns words [..., T, W], scales [..., T], and with a base: base [..., T / 64, D], base_exponent [..., T / 64],
    factors [..., D].  A vector holding NaN or infinity gets the scale NaN.  Raises ValueError for wrong shapes.
    """
    check_vectors(x, codec, base, factors)
    residual, exponent, finite = snap(x)
    base_values = base_exponent = None
    if base:
        residual, exponent, base_values, base_exponent = _subtract_base(residual, exponent)
        if factors is None:
            factors = channel_factors(residual[..., :TILE, :])
    if base or factors is not None:
        residual, exponent = _apply_factors(residual, exponent, factors)
    else:
        exponent = exponent - 13
    residual = mx.where(finite, residual, 0)
    rotated = rotate(residual, codec.seed)
    coded = _code(residual, rotated, codec.dim, codec.code_bits)
    scales = _finish_scale(half_from_ratio(coded.square, coded.inner, exponent + codec.scale_shift), finite)
    sign_words = sign_scales = None
    if codec.kind == "prod":
        sign_words, ratio = _code_remainder(rotated, coded, codec, exponent)
        sign_scales = _finish_scale(ratio, finite)
    return Packed(
        words=pack(coded.codes, codec.code_bits),
        scales=scales,
        base=base_values,
        base_exponent=base_exponent,
        factors=None if factors is None else factors.astype(mx.int8),
        sign_words=sign_words,
        sign_scales=sign_scales,
    )


def check_vectors(x: mx.array, codec: Codec, base: bool, factors: mx.array | None) -> None:
    """Raises ValueError for arguments that `quantize` cannot take."""
    if x.ndim < 2 or x.shape[-1] != codec.dim:
        raise ValueError(f"x must be [..., T, {codec.dim}] for this codec; got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32; got {x.dtype}")
    if base and (x.shape[-2] % TILE or not x.shape[-2]):
        raise ValueError(f"a key base needs whole tiles of {TILE} tokens; got T={x.shape[-2]}")
    if x.size == 0:
        raise ValueError(f"x holds no vectors: shape {tuple(x.shape)}")
    if factors is not None:
        wanted = (*x.shape[:-2], codec.dim)
        lead = (1,) * (len(wanted) - factors.ndim) + tuple(factors.shape)
        if len(lead) != len(wanted) or any(have not in (1, want) for have, want in zip(lead, wanted, strict=True)):
            raise ValueError(f"factors must broadcast to {list(wanted)}; got shape {tuple(factors.shape)}")


def _subtract_base(x: mx.array, e: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Residuals [..., T, D], their exponents [..., T, 1], base int16 [..., N, D] and its exponent (section 3.2)."""
    tiles = x.reshape(*x.shape[:-2], -1, TILE, x.shape[-1])
    exponents = e.reshape(*e.shape[:-2], -1, TILE, 1)
    top = mx.max(exponents, axis=-2, keepdims=True)
    aligned = mx.round(tiles.astype(mx.float32) * pow2(mx.maximum(exponents - top, -30)))
    # Sums stay below 2^19, so the mean is exact before it is rounded.
    mean = mx.round(mx.sum(aligned, axis=-2, keepdims=True) / TILE)
    residual = (aligned - mean).astype(mx.int32).reshape(x.shape)
    spread_top = mx.broadcast_to(top, exponents.shape).reshape(e.shape)
    return residual, spread_top, mean[..., 0, :].astype(mx.int16), top[..., 0, 0].astype(mx.int16)


def channel_factors(residual: mx.array) -> mx.array:
    """int8 f [..., D] from a tile's residuals int32 [..., 64, D]: quiet channels are enlarged (section 3.3)."""
    dim = residual.shape[-1]
    wide = residual.astype(mx.int64)
    energy = mx.sum(wide * wide, axis=-2)
    total = mx.sum(energy, axis=-1, keepdims=True)
    scaled = energy * dim
    f = mx.zeros(energy.shape, mx.int32)
    for threshold in (4, 64, 1024):
        f = f + (threshold * scaled < total) - (scaled > threshold * total)
    return f.astype(mx.int8)


def _apply_factors(residual: mx.array, e: mx.array, factors: mx.array | None) -> tuple[mx.array, mx.array]:
    """snap_13(r 2^f) and ε, the exponent of its unit (section 3.3)."""
    enlarged = residual.astype(mx.float32)
    if factors is not None:
        enlarged = enlarged * pow2(factors.astype(mx.int32))[..., None, :]
    snapped, g, _ = snap(enlarged)
    return snapped, e + g - 26


def _code(z: mx.array, y: mx.array, dim: int, bits: int) -> _Coded:
    """Codes of rotated vectors y = H (s * z), int32 [..., D] (section 3.5)."""
    wide = z.astype(mx.int64)
    square = mx.sum(wide * wide, axis=-1, keepdims=True)
    if bits == 8:
        largest = mx.max(mx.abs(y), axis=-1, keepdims=True)
        # 255 * 2^23 still fits into 31 bits.
        magnitude = (254 * mx.abs(y) + largest) // mx.maximum(2 * largest, 1)
        centroids = mx.where(y < 0, -magnitude, magnitude)
        codes = centroids
    else:
        index = _cell_index(y, square, dim, bits)
        centroids = mx.array(centroids_ascending(dim, bits))[index]
        half = 2 ** (bits - 1)
        # Sign and magnitude: below the middle the rank counts downwards.
        codes = mx.where(index < half, 2 * half - 1 - index, index - half)
    inner = mx.sum(y.astype(mx.int64) * centroids.astype(mx.int64), axis=-1, keepdims=True)
    return _Coded(centroids, codes, inner, square)


def _cell_index(y: mx.array, square: mx.array, dim: int, bits: int) -> mx.array:
    rho = (isqrt(square << 16) * boundary_constant(dim, bits)) >> 12
    centroids = centroids_ascending(dim, bits)
    index = mx.zeros(y.shape, mx.int32)
    for lower, upper in pairwise(centroids):
        threshold = (rho * int(lower + upper)) >> 16
        index = index + (y > threshold.astype(mx.int32))
    return index


def _finish_scale(scale: mx.array, finite: mx.array) -> mx.array:
    # Conversions of NaN differ between devices, so its bits are spelled out.
    nan = mx.array(0x7E00, mx.uint16)
    return mx.where(finite, scale.view(mx.uint16), nan).view(mx.float16)[..., 0]


def _code_remainder(y: mx.array, coded: _Coded, codec: Codec, exponent: mx.array) -> tuple[mx.array, mx.array]:
    """Sign words and sign scale of what the codes leave over (`prod`, section 3.8)."""
    inner = coded.inner
    amount = mx.where(inner == 0, 0, (512 * codec.dim * coded.square + inner) // mx.maximum(2 * inner, 1))
    remainder = 256 * y.astype(mx.int64) - amount * coded.centroids.astype(mx.int64)
    z2, g2 = snap_wide(remainder)
    y2 = rotate(z2, codec.seed, stream=1)
    positive = y2 > 0
    signs = mx.where(positive, SIGN_CENTROID, -SIGN_CENTROID)
    inner2 = mx.sum(y2.astype(mx.int64) * signs.astype(mx.int64), axis=-1, keepdims=True)
    square2 = mx.sum(z2.astype(mx.int64) * z2.astype(mx.int64), axis=-1, keepdims=True)
    shift = exponent + g2 - 21 + codec.sign_scale_shift
    return pack(1 - positive.astype(mx.int32), 1), half_from_ratio(square2, codec.dim * inner2, shift)


def coded_centroids(words: mx.array, codec: Codec) -> mx.array:
    """The centroids c that words [..., W] stand for: int32 [..., D]."""
    bits = codec.code_bits
    codes = unpack(words, bits, codec.dim)
    if bits == 8:
        return codes
    magnitude = mx.array(magnitudes(codec.dim, bits))[codes & (2 ** (bits - 1) - 1)]
    return mx.where(codes >> (bits - 1) == 1, -magnitude, magnitude)


def sign_centroids(words: mx.array, codec: Codec) -> mx.array:
    """The second part of `prod`: int32 [..., D] of +-127."""
    return SIGN_CENTROID * (1 - 2 * unpack(words, 1, codec.dim))


def dequantize(packed: Packed, codec: Codec, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The vectors that `packed` stands for (section 6): [..., T, D], or [..., N, 64, D] for tiled words.

    A vector that held NaN or infinity comes back as NaN in all coordinates.
    """
    if packed.words.size == 0:
        return mx.zeros((*packed.words.shape[:-1], codec.dim), dtype)
    x = _scaled(rotate_back(coded_centroids(packed.words, codec), codec.seed), packed.scales, codec.scale_shift)
    if packed.sign_words is not None and packed.sign_scales is not None:
        remainder = rotate_back(sign_centroids(packed.sign_words, codec), codec.seed, stream=1)
        x = x + _scaled(rotate_back(remainder, codec.seed), packed.sign_scales, codec.sign_scale_shift)
    if packed.factors is not None:
        # [..., D] to [..., 1, D], or to [..., 1, 1, D] for tiled words.
        lift = (1,) * (packed.words.ndim - packed.factors.ndim)
        f = packed.factors.reshape(*packed.factors.shape[:-1], *lift, codec.dim)
        x = x * pow2(-f.astype(mx.int32))
    if packed.base is not None and packed.base_exponent is not None:
        base = packed.base.astype(mx.float32) * pow2(packed.base_exponent.astype(mx.int32) - 13)[..., None]
        tiles = x.reshape(*packed.base.shape[:-1], TILE, codec.dim)
        x = (tiles + base[..., None, :]).reshape(x.shape)
    return x.astype(dtype)


def _scaled(x: mx.array, scales: mx.array, shift: int) -> mx.array:
    return x.astype(mx.float32) * scales.astype(mx.float32)[..., None] * 2.0**-shift
