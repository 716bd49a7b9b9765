"""Exact arithmetic of the contract: rounding, snapping and the two float formats (sections 1, 3.1 and 3.6).

Everything is done on integers: a float32 is taken apart into ``mantissa * 2**exponent`` and rounded by
shifts, so that no result leans on a device's rounding of anything but one float32 addition or multiplication,
which IEEE 754 pins. Arrays are NumPy ``int64`` unless said otherwise; the last axis of a vector array is the
coordinate.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CLAMP = 1 << 28
ZERO_EXPONENT = -79
IDENTITY_EXPONENT = -(1 << 20)
FP16_NAN = 0x7E00
FP16_MAX = 0x7BFF

DTYPES = ("float16", "bfloat16", "float32")


def round_shift(m: Array, k: Array | int) -> Array:
    """``rint(m 2**k)`` of int64 ``m``, halves to even, for any integer ``k`` whose result fits in 62 bits.

    Below 2**-62 the product of a |m| < 2**61 is under one half, so deeper shifts are the same as 62.
    """
    m, k = np.broadcast_arrays(np.asarray(m, np.int64), np.asarray(k, np.int64))
    left = np.left_shift(m, np.clip(k, 0, 61))
    s = np.clip(-k, 1, 62)
    q = np.right_shift(m, s)
    rest = m - np.left_shift(q, s)
    half = np.left_shift(np.int64(1), s - 1)
    q = q + ((rest > half) | ((rest == half) & ((q & 1) == 1)))
    return np.where(k >= 0, left, q)


def split_float(x: Array) -> tuple[Array, Array]:
    """Finite float32 ``x`` as int64 ``(m, e)`` with ``x = m 2**e`` exactly and |m| < 2**24."""
    fraction, e = np.frexp(np.asarray(x, np.float32).astype(np.float64))
    m = np.ldexp(fraction, 24).astype(np.int64)
    return m, e.astype(np.int64) - 24


def f32(i: Array) -> Array:
    """int64 (below 2**53, so exact on the way) to float32, rounded once."""
    i = np.asarray(i, np.int64)
    assert i.size == 0 or int(np.abs(i).max()) < 1 << 53
    return i.astype(np.float64).astype(np.float32)


def exact_matmul(a: Array, b: Array) -> Array:
    """Integer matrix product through float64, exact because every partial sum stays below 2**53."""
    if a.size == 0 or b.size == 0:
        return np.matmul(a.astype(np.int64), b.astype(np.int64))
    bound = float(np.abs(a).max()) * float(np.abs(b).max()) * a.shape[-1]
    assert bound < 2.0**53, "exact_matmul would round"
    left, right = a.astype(np.float64), b.astype(np.float64)
    if a.ndim != 2:
        return np.matmul(left, right).astype(np.int64)
    # Blocks below a BLAS's threading threshold: waiting for threads on busy cores costs far more than it
    # gains here.
    rows = max(1, (1 << 18) // right.size)
    blocks = [left[i : i + rows] @ right for i in range(0, len(left), rows)]
    return np.concatenate(blocks).astype(np.int64)


def snap_integers(v: Array, n: int, k: Array | int = 0) -> tuple[Array, Array]:
    """``snap_n`` (3.1) of the vectors ``v 2**k``, ``v`` int64, ``k`` per coordinate: ``(X, e)``.

    Used where the vector is made of integers, which are zero or far above the 2**-80 threshold.
    """
    k = np.broadcast_to(np.asarray(k, np.int64), v.shape)
    low = int(k.min()) if k.size else 0
    # One common unit 2**low makes the coordinates comparable integers.
    scaled = np.left_shift(v, k - low)
    biggest = np.abs(scaled).max(axis=-1)
    bits = bit_length(biggest)
    e = np.where(biggest == 0, ZERO_EXPONENT, bits + low)
    x = round_shift(scaled, (n - bits)[..., None])
    return x, e


def snap_floats(x: Array, n: int) -> tuple[Array, Array, Array]:
    """``snap_n`` (3.1) of float32 vectors: ``(X, e, non_finite)``."""
    x = np.asarray(x, np.float32)
    bad: Array = ~np.asarray(np.isfinite(x).all(axis=-1))
    safe = np.where(bad[..., None], np.float32(0), x)
    m, e_each = split_float(safe)
    biggest = np.abs(safe).max(axis=-1).astype(np.float64)
    _, e = np.frexp(biggest)
    tiny = biggest < 2.0**-80
    e = np.where(tiny, ZERO_EXPONENT, e.astype(np.int64))
    out = round_shift(m, e_each + n - e[..., None])
    return np.where(tiny[..., None], 0, out), e, bad


def bit_length(n: Array) -> Array:
    """Number of bits of each non-negative int64 below 2**62."""
    n = np.asarray(n, np.int64)
    bits = np.zeros(n.shape, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        big = (n >> step) > 0
        bits += np.where(big, step, 0)
        n = np.where(big, n >> step, n)
    return bits + (n > 0)


def clamp28(x: Array) -> Array:
    return np.clip(x, -CLAMP, CLAMP)


def rint_clamp28(y: Array, k: Array | int) -> Array:
    """``clamp28(rint(y 2**k))`` of float32 ``y``, exact; infinities count as the clamp, NaN as zero."""
    y = np.asarray(y, np.float32)
    m, e = split_float(np.where(np.isfinite(y), y, np.float32(0)))
    t = e + k
    # |m| >= 2**23 unless zero, so t > 5 is beyond the clamp already; limiting t keeps the shift inside int64.
    out = clamp28(round_shift(m, np.minimum(t, 8)))
    return np.where(np.isposinf(y), CLAMP, np.where(np.isneginf(y), -CLAMP, out))


def logit(y: Array, k: Array) -> Array:
    """``logit(y, k)`` of section 4."""
    return rint_clamp28(y, np.clip(k, -100, 60))


def dot14(q: Array, x: Array) -> Array:
    """``dot14`` of section 4: rows of ``q`` [R, D] against rows of ``x`` [T, D], float32 [R, T]."""
    hi, lo = halves(q)
    top = np.float32(128) * f32(exact_matmul(hi, x.T))
    return (top + f32(exact_matmul(lo, x.T))).astype(np.float32)


def halves(q: Array) -> tuple[Array, Array]:
    hi = (q + 64) >> 7
    return hi, q - 128 * hi


def fp16_from_ratio(num: int, den: int, k: int) -> int:
    """Bits of the fp16 nearest to ``num / den * 2**k`` (3.6), num >= 0 < den; above 65504 it is 65504."""
    if num == 0:
        return 0
    if k >= 0:
        num <<= k
    else:
        den <<= -k
    e = num.bit_length() - den.bit_length()
    if (num << max(-e, 0)) < (den << max(e, 0)):
        e -= 1
    unit = max(e, -14) - 10
    if unit >= 0:
        den <<= unit
    else:
        num <<= -unit
    q, rest = divmod(num, den)
    if 2 * rest > den or (2 * rest == den and q & 1):
        q += 1
    # The exponent field counts units above 2**-24, and a carry out of the mantissa moves into it by itself.
    return min(((unit + 24) << 10) + q, FP16_MAX)


def fp16_value(bits: Array) -> Array:
    """float32 values of fp16 bit patterns."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def divide32(o: Array, n: Array) -> Array:
    """``RN32(o / n)`` by integer division with a sticky bit, for finite o and n > 0; o = 0 gives +0."""
    mo, eo = split_float(o)
    mn, en = split_float(n)
    # 62 bits of numerator over 24 bits leave at least 38 bits of quotient, more than the 24 + 2 rounding
    # needs.
    top = np.abs(mo) << 38
    q = top // mn
    q = q | (top - q * mn != 0)
    value = np.ldexp(q.astype(np.float64).astype(np.float32), (eo - en - 38).astype(np.int32)).astype(
        np.float32
    )
    return np.where(mo < 0, -value, value)


def cast(x: Array, dtype: str) -> Array:
    """float32 to the words of ``dtype`` (uint16 or uint32), nearest, halves to even; NaN is quiet."""
    x = np.asarray(x, np.float32)
    if dtype == "float32":
        return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).astype(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            words = x.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7E00), words).astype(np.uint16)
    if dtype == "bfloat16":
        w = x.view(np.uint32).astype(np.int64)
        rounded = (w + 0x7FFF + ((w >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")


def widen(words: Array, dtype: str) -> Array:
    """Words of ``dtype`` to float32, exactly."""
    if dtype == "float32":
        return np.ascontiguousarray(words, dtype=np.uint32).view(np.float32)
    if dtype == "float16":
        return fp16_value(words)
    if dtype == "bfloat16":
        return (np.ascontiguousarray(words, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")


@lru_cache(maxsize=1)
def power_tables() -> tuple[Array, Array]:
    """``A`` and ``B`` of section 5, each entry found by comparing integer powers."""
    return _table(64), _table(4096)


def _table(root: int) -> Array:
    out = []
    for h in range(64):
        n = round(4096 * 2.0 ** (-h / root))
        # n is nearest to x = 2**12 2**(-h/root) when (2n-1)**root < (2x)**root = 2**(13 root - h) <
        # (2n+1)**root.
        middle = 1 << (13 * root - h)
        assert (2 * n - 1) ** root < middle < (2 * n + 1) ** root
        out.append(n)
    return np.array(out, np.int64)


def nearest32(value: Fraction) -> np.float32:
    """RN32 of a rational in the normal range, for the self-tests."""
    if value == 0:
        return np.float32(0)
    sign, value = (-1, -value) if value < 0 else (1, value)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** e:
        e -= 1
    q = round(value / Fraction(2) ** (e - 23))
    return np.float32(sign * np.ldexp(float(q), e - 23))
