"""Exact integer arithmetic on `mx.array`: the tools that make results equal on every device.

Floating point sums depend on their order; integer sums do not.  So vectors are snapped to integers with one shared
exponent, sums run over integers, and the few roots and quotients are corrected in integers (docs/numerics.md,
section 1).  Exponents are int32 arrays; a value is `integer * 2^exponent`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

ZERO_EXPONENT = -79
"""Exponent of a vector whose largest magnitude is below 2^-80: it counts as zero (section 3.1)."""
IDENTITY_EXPONENT = -(2**20)
"""Exponent of the empty sum."""


def pow2(exponent: mx.array) -> mx.array:
    """float32 2^exponent for int32 exponents; -126 .. 127, clamped there."""
    bits = (mx.clip(exponent, -126, 127).astype(mx.int32) + 127) << 23
    return bits.view(mx.float32)


def float_exponent(x: mx.array) -> mx.array:
    """int32 e with 2^(e-1) <= x < 2^e for positive normal float32 x."""
    return (x.view(mx.int32) >> 23) - 126


def bit_length(n: mx.array) -> mx.array:
    """int32 number of bits of non-negative int64 n < 2^62; 0 for 0."""
    # The conversion may round up to the next power of two, hence the correction.
    estimate = float_exponent(mx.maximum(n, 1).astype(mx.float32))
    estimate = estimate - ((n >> (estimate - 1).astype(mx.int64)) == 0)
    return mx.where(n == 0, 0, estimate).astype(mx.int32)


def snap(x: mx.array, bits: int = 13) -> tuple[mx.array, mx.array, mx.array]:
    """Vectors to integers with one exponent each: x ~ X 2^(e - bits), |X| <= 2^bits (section 3.1).

    x: [..., D], floating, or integers below 2^24.
    Returns X int32 [..., D], e int32 [..., 1], finite bool [..., 1].  A vector with NaN or infinity gives X = 0.
    """
    x = x.astype(mx.float32)
    finite = mx.all(mx.isfinite(x), axis=-1, keepdims=True)
    x = mx.where(finite, x, 0.0)
    largest = mx.max(mx.abs(x), axis=-1, keepdims=True)
    zero = largest < 2.0**-80
    e = mx.where(zero, ZERO_EXPONENT, float_exponent(largest))
    snapped = mx.where(zero, 0.0, mx.round(x * pow2(bits - e)))
    return snapped.astype(mx.int32), e.astype(mx.int32), finite


def snap_wide(n: mx.array, bits: int = 13) -> tuple[mx.array, mx.array]:
    """`snap` for int64 vectors below 2^62, where float32 would round first."""
    largest = mx.max(mx.abs(n), axis=-1, keepdims=True)
    e = mx.where(largest == 0, ZERO_EXPONENT, bit_length(largest))
    up = mx.maximum(bits - e, 0).astype(mx.int64)
    down = mx.maximum(e - bits, 0).astype(mx.int64)
    snapped = mx.where(largest == 0, 0, round_shift(n << mx.minimum(up, 62), down))
    return snapped.astype(mx.int32), e.astype(mx.int32)


def round_shift(n: mx.array, shift: mx.array, sticky: mx.array | None = None) -> mx.array:
    """n / 2^shift rounded half to even, int64; shift int64 >= 0.

    sticky: true where n itself is the floor of a value that is not an integer.
    """
    shift = mx.minimum(shift, 60)
    quotient = n >> shift
    remainder = n - (quotient << shift)
    half = mx.where(shift > 0, mx.array(1, mx.int64) << mx.maximum(shift - 1, 0), mx.array(2**61, mx.int64))
    tie = remainder == half
    odd = (quotient & 1) == 1
    above = (remainder > half) | (tie & odd)
    if sticky is not None:
        above = above | (tie & sticky)
    return quotient + above.astype(mx.int64)


def isqrt(n: mx.array) -> mx.array:
    """Floor of the square root of int64 n, 0 <= n <= 2^52."""
    x = mx.maximum(mx.sqrt(n.astype(mx.float32)).astype(mx.int64), 1)
    # A float32 root is good to 2^-20 relative on any device; a Newton step squares that error.
    for _ in range(2):
        x = (x + n // x) >> 1
    x = x - (x * x > n).astype(mx.int64)
    return x + ((x + 1) * (x + 1) <= n).astype(mx.int64)


def half_from_ratio(numerator: mx.array, denominator: mx.array, shift: mx.array) -> mx.array:
    """float16 nearest to numerator / denominator * 2^shift, half to even (section 3.6).

    numerator, denominator: int64, 0 <= . < 2^49; shift: int32.  0 where the denominator is 0; at most 65504.
    """
    denominator_or_1 = mx.maximum(denominator, 1)
    k = 13 - bit_length(numerator) + bit_length(denominator_or_1)
    up, down = mx.maximum(k, 0).astype(mx.int64), mx.maximum(-k, 0).astype(mx.int64)
    scaled, divisor = numerator << up, denominator_or_1 << down
    quotient = scaled // divisor
    sticky = quotient * divisor != scaled
    e = bit_length(quotient) - k + shift
    # The weight of the last bit of the fp16 number: subnormals share 2^-24.
    unit = mx.maximum(e - 11, -24)
    mantissa = round_shift(quotient, (unit - shift + k).astype(mx.int64), sticky)
    bits = ((mx.minimum(unit, 6) + 24) << 10).astype(mx.int64) + mantissa
    bits = mx.where((unit > 5) | (bits > 0x7BFF), 0x7BFF, bits)
    bits = mx.where((numerator == 0) | (denominator == 0), 0, bits)
    return bits.astype(mx.uint16).view(mx.float16)


def quotient_times_pow2(numerator: mx.array, denominator: mx.array, exponent: mx.array) -> mx.array:
    """float32 numerator / denominator, correctly rounded, times 2^exponent (section 5, output).

    numerator: normal float32 or 0; denominator: normal float32 > 0.  Magnitudes below 2^-100 become 0, at or above
    2^128 infinity.  Done in integers because a GPU's division may be off by an ulp.
    """
    a, b = numerator.view(mx.int32), denominator.view(mx.int32)
    mantissa_a = ((a & 0x7FFFFF) | 0x800000).astype(mx.int64)
    mantissa_b = ((b & 0x7FFFFF) | 0x800000).astype(mx.int64)
    scaled = mantissa_a << 26
    quotient = scaled // mantissa_b
    drop = bit_length(quotient) - 24
    rounded = round_shift(quotient, drop.astype(mx.int64), quotient * mantissa_b != scaled)
    k = drop - 26 + ((a >> 23) & 255) - ((b >> 23) & 255) + exponent
    top = bit_length(rounded) + k - 1
    y = rounded.astype(mx.float32) * pow2(k)
    y = mx.where(top >= 128, mx.inf, mx.where(top < -100, 0.0, y))
    return mx.where(numerator == 0, 0.0, mx.where(top < -100, 0.0, mx.where(numerator < 0, -y, y)))


def integer_matmul(a: mx.array, b: mx.array) -> mx.array:
    """Exact int32 matrix product a @ b of integers, batch axes broadcast; the result must fit into int32.

    a and b: int32, at most 15 bits and a sign each, or 17 bits against a matrix of +-1; at most 1024 terms.

    Any exact product gives the same bits.  On a CPU NumPy's float64 product is exact below 2^53 and fifty times
    faster than MLX's; on a GPU the operands are split into digits that even TF32 and bfloat16 units hold exactly.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return _host_matmul(a, b)
    return _digit_matmul(a, b)


def _host_matmul(a: mx.array, b: mx.array) -> mx.array:
    product = np.matmul(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64))
    return mx.array(product.astype(np.int32))


def _digit_matmul(a: mx.array, b: mx.array) -> mx.array:
    # Digits of 8 bits and at most 1024 terms: every partial sum stays within 2^24.
    a_high, a_low = _digits(a)
    b_high, b_low = _digits(b)
    high = _float_matmul(a_high, b_high) << 16
    middle = (_float_matmul(a_high, b_low) + _float_matmul(a_low, b_high)) << 8
    return high + middle + _float_matmul(a_low, b_low)


def _digits(n: mx.array) -> tuple[mx.array, mx.array]:
    n = n.astype(mx.int32)
    low = ((n + 128) & 255) - 128
    return ((n - low) >> 8).astype(mx.float32), low.astype(mx.float32)


def _float_matmul(a: mx.array, b: mx.array) -> mx.array:
    return mx.matmul(a, b).astype(mx.int32)


def halves(n: mx.array) -> tuple[mx.array, mx.array]:
    """int32 (high, low) with n = 128 high + low, low in -64 .. 63 (section 4)."""
    high = (n + 64) >> 7
    return high, n - (high << 7)


def split_matmul(a: mx.array, b: mx.array) -> mx.array:
    """float32 128 f32(high(a) @ b) + f32(low(a) @ b): a product too wide for int32, one rounding at the end."""
    high, low = halves(a)
    return integer_matmul(high, b).astype(mx.float32) * 128 + integer_matmul(low, b).astype(mx.float32)


def shift_down(a: mx.array, k: mx.array) -> mx.array:
    """a 2^k for k <= 0; zero below 2^-40 relative and below 2^-64 absolute, so that no subnormal arises."""
    shifted = a * pow2(mx.maximum(k, -40))
    return mx.where((k < -40) | (mx.abs(shifted) < 2.0**-64), 0.0, shifted)


def merge(a: mx.array, x: mx.array, b: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    """Sum of a 2^x and b 2^y (section 5, merge): one float32 addition at the larger exponent."""
    m = mx.maximum(x, y)
    total = shift_down(a, x - m) + shift_down(b, y - m)
    return mx.where(mx.abs(total) < 2.0**-64, 0.0, total), m
