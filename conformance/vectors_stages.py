"""The vectors of base, factors, prod and dequantize (sections 3.2, 3.3, 3.8 and 6)."""

from __future__ import annotations

import numpy as np

from .build import (
    Group,
    add,
    codec,
    compact,
    integers,
    literal,
    put,
    scale_by,
    sum4,
    zeros,
)
from .inputs import Spec
from .oracle_numbers import Array

BITS = (1, 2, 3, 4, 5, 6, 8)
TINY = 2.0**-80


def base() -> Group:
    g = Group("base")

    def tile(name: str, comment: str, flags: str, x: Spec, bits: int = 4, quick: bool = False) -> None:
        g.quantize(
            name,
            comment,
            flags,
            codec(x["shape"][-1], bits),
            x,
            base=True,
            dequantize=("float32",),
            quick=quick,
        )

    tile(
        "plain",
        "two tiles with an offset per channel",
        "outlier_channel",
        sum4(1, 1, 2, 128, 12, edits=[add(20, 0, 0, None, 3)]),
        quick=True,
    )
    tile(
        "constant-key",
        "64 equal keys: the residual is zero, the base is everything",
        "constant_key zero_vector",
        zeros(1, 1, 64, 12, edits=[put(0.7, 0, 0, None, None)]),
    )
    tile("zero", "a tile of zeros has E = -79", "zero_vector", zeros(1, 1, 64, 8), quick=True)
    # Sums of 32 + 64 k: exactly half way between two integers.
    ties = np.zeros((1, 1, 64, 8))
    ties[..., 0] = 4096
    for d, count in enumerate((32, 96, 160, -32, -96, -160)):
        rows = np.arange(64) < abs(count) % 64
        ties[0, 0, :, d + 1] = np.sign(count) * (rows + abs(count) // 64)
    tile(
        "mean-ties",
        "means exactly half way go to the even integer, also below zero",
        "rounding_tie",
        compact(ties),
        quick=True,
    )
    for gap in (1, 2, 13, 14, 15, 29, 30, 31, 40):
        edits = [scale_by(-gap, 0, 0, [1, 33], None)]
        tile(
            f"gap-{gap}",
            f"half of the tile lies 2^{gap} lower",
            "rounding_tie",
            integers(gap, -8191, 8191, 1, 1, 64, 8, edits=edits),
            bits=8,
            quick=gap in (2, 13),
        )
    tile(
        "huge",
        "E = 128; a base of 2^128 overflows on dequantization",
        "huge_norm overflow",
        zeros(
            1,
            1,
            64,
            8,
            edits=[put(3.4028235e38, 0, 0, None, 0), put(-1e38, 0, 0, None, 5), put(1e37, 0, 0, [3, 9], 2)],
        ),
    )
    tile("tiny", "keys around 2^-80 in one tile", "tiny_norm", sum4(3, 1, 1, 64, 8, exponent=-80))
    tile(
        "non-finite",
        "a NaN key counts as zero in the base and stays NaN alone",
        "non_finite",
        sum4(3, 1, 1, 64, 8, edits=[put("nan", 0, 0, 5, 2), put("inf", 0, 0, 63, 0), add(9, 0, 0, None, 6)]),
        bits=3,
    )
    for bits in BITS:
        tile(
            f"bits-{bits}",
            "residual codes",
            "outlier_channel dead_channel",
            sum4(
                bits,
                1,
                1,
                64,
                20,
                dtype="bfloat16",
                edits=[scale_by(6, 0, 0, None, 2), put(0, 0, 0, None, 7)],
            ),
            bits=bits,
        )
    return g


def factors() -> Group:
    g = Group("factors")

    def swings(name: str, comment: str, flags: str, amplitude: Array, quick: bool = False) -> None:
        # Alternating signs make the base zero, so S_d is 64 amplitude_d^2 in units of the tile's exponent.
        edits = [put(float(v), 0, 0, [0, 64, 2], d) for d, v in enumerate(amplitude) if v]
        edits += [put(float(-v), 0, 0, [1, 64, 2], d) for d, v in enumerate(amplitude) if v]
        x = zeros(1, 1, 64, len(amplitude), edits=edits)
        g.quantize(
            name, comment, flags, codec(len(amplitude), 4), x, base=True, dequantize=("float32",), quick=quick
        )

    swings(
        "4-equal",
        "D S_d = 4 T exactly: f = 0",
        "boundary_tie outlier_channel",
        np.array([2, 1, 1, 1, 1, 0, 0, 0.0]),
        True,
    )
    swings(
        "4-above",
        "D S_d just above 4 T: f = -1",
        "outlier_channel",
        np.array([2048 + 1, 1024, 1024, 1024, 1024, 0, 0, 0.0]),
        True,
    )
    tail = np.zeros(128)
    tail[0] = 4
    tail[1:17] = 1
    swings("64-equal", "D S_d = 64 T exactly: f = -1", "boundary_tie outlier_channel", tail, True)
    swings(
        "64-above",
        "D S_d just above 64 T: f = -2",
        "outlier_channel",
        np.where(np.arange(128) == 0, 4097, tail * 1024),
    )
    for dim in (128, 1024):
        only = (np.arange(dim) == 5).astype(float)
        swings(
            f"single-{dim}",
            "one channel holds everything: D S_d = D T, so f = -2 even at D = 1024",
            "boundary_tie outlier_channel dead_channel",
            only,
            dim == 128,
        )
    # D = 12, 4 D S_d against T: 48 v^2 against the sum of squares.
    for bound, limit in ((4, 1), (64, 2), (1024, 3)):
        v = 2
        other = bound * 12 * v * v - v * v
        rest = _squares(other, 11)
        amplitude = np.array([v, *rest], float)
        swings(
            f"low-{bound}-equal",
            f"{bound} D S_d = T exactly: f = {limit - 1}",
            "boundary_tie dead_channel",
            amplitude,
            True,
        )
        amplitude = np.array([v, *_squares(other + 1, 11)], float)
        swings(f"low-{bound}-below", f"{bound} D S_d just below T: f = {limit}", "dead_channel", amplitude)
    swings(
        "dead",
        "channels that are always zero get +3",
        "dead_channel",
        np.array([0, 3, 3, 3, 0, 2, 3, 3, 3, 3, 3, 1.0]),
    )
    ramp = integers(0, -3, 3, 1, 2, 20, dtype="int8")
    g.quantize(
        "given-no-base",
        "given factors without a base: r = X, E = e, and half units under 2^-3",
        "given_factors",
        codec(20, 5),
        sum4(6, 1, 2, 3, 20, dtype="float16"),
        factors=ramp,
        dequantize=("float32",),
        quick=True,
    )
    g.quantize(
        "given-base",
        "given factors replace those of tile 0",
        "given_factors",
        codec(20, 5),
        sum4(6, 1, 2, 128, 20, dtype="float16", edits=[scale_by(7, 0, 0, None, 4)]),
        base=True,
        factors=ramp,
        dequantize=("float32",),
    )
    g.quantize(
        "second-tile",
        "tile 0 alone decides, whatever tile 1 holds",
        "outlier_channel",
        codec(8, 4),
        sum4(8, 1, 1, 128, 8, edits=[scale_by(5, 0, 0, [64, 128], 2)]),
        base=True,
    )
    return g


def _squares(total: int, count: int) -> list[int]:
    """``count`` integers whose squares sum to ``total``, greedily with a search at the end."""
    if count == 0:
        return [] if total == 0 else [-1]
    for v in range(int(total**0.5), -1, -1):
        rest = _squares(total - v * v, count - 1)
        if -1 not in rest:
            return [v, *rest]
    return [-1]


def prod() -> Group:
    g = Group("prod")
    for bits in range(2, 7):
        for dim in (12, 64):
            g.quantize(
                f"gauss-{dim}-{bits}",
                "codes, remainder and sign codes",
                "prod",
                codec(dim, bits, 7, "prod"),
                sum4(bits, 4, dim),
                dequantize=("float32",),
                quick=bits in (2, 4),
            )
    exact = np.zeros((2, 8))
    exact[0, 0] = 127 * 33
    exact[1, 6] = -127 * 64
    g.quantize(
        "no-remainder",
        "the first codes are exact, the remainder is zero: sign scale +0",
        "prod zero_vector",
        codec(8, 2, 0, "prod"),
        literal(exact),
        dequantize=("float32",),
        quick=True,
    )
    g.quantize(
        "ties",
        "remainders whose rotation is zero take the negative sign",
        "prod boundary_tie",
        codec(16, 3, 0, "prod"),
        integers(2, -1, 1, 12, 16),
        quick=True,
    )
    powers = [-120, -79, -30, -20, -16, -14, -12, -10, 12, 14, 16, 18, 40, 120]
    g.quantize(
        "exponents",
        "both scales at the ends of fp16",
        "prod saturated_scale subnormal_scale",
        codec(16, 4, 0, "prod"),
        sum4(3, len(powers), 16, edits=[scale_by(p, t, None) for t, p in enumerate(powers)]),
        dequantize=("float32",),
    )
    g.quantize(
        "zero-and-nan",
        "zero and non-finite vectors",
        "prod zero_vector non_finite",
        codec(12, 4, 0, "prod"),
        sum4(3, 4, 12, edits=[put(0, 1, None), put("nan", 2, 3)]),
        dequantize=("float32",),
    )
    g.quantize(
        "base",
        "on residuals with factors",
        "prod outlier_channel",
        codec(12, 4, 0, "prod"),
        sum4(3, 1, 1, 64, 12, edits=[scale_by(4, 0, 0, None, 2), add(5, 0, 0, None, 3)]),
        base=True,
        dequantize=("float32",),
        quick=True,
    )
    return g


def dequantize() -> Group:
    g = Group("dequantize")
    scales = [0.0, 2.0**-24, 3 * 2.0**-24, 2.0**-14, 1.0, 1.5, 1023.5, 65504.0, float("nan")]
    for bits, per_word in ((8, 4),):
        words = integers(1, 0, 0x7F7F7F, len(scales), 16 // per_word, dtype="uint32")
        for dtype in ("float32", "float16", "bfloat16"):
            inputs = {
                "codec": codec(16, bits),
                "words": words,
                "scales": literal(scales, "float16"),
                "dequantize": [dtype],
            }
            g.add(
                f"scales-{bits}-{dtype}",
                "every kind of scale; casts round once and overflow to infinity",
                "subnormal_scale saturated_scale non_finite dtype_cast",
                "dequantize",
                inputs,
                quick=dtype == "float16",
            )
    for bits in (1, 2, 3, 4, 5, 6):
        g.quantize(
            f"round-trip-{bits}",
            "quantized, then dequantized to every dtype",
            "dtype_cast",
            codec(36, bits),
            sum4(bits, 3, 36),
            dequantize=("float32", "float16", "bfloat16"),
        )
    base_inputs = {
        "codec": codec(8, 8),
        "words": integers(2, 0, 0x7F7F7F, 1, 1, 64, 2, dtype="uint32"),
        "scales": literal(np.ldexp(1.0, np.arange(64) % 40 - 24)[None, None], "float16"),
        "base": literal(np.array([[[[8192, -8192, 1, -1, 0, 4097, -3, 77]]]]), "int16"),
        "dequantize": ["float32"],
    }
    for e in (-79, -40, -3, 0, 4, 100, 128):
        g.add(
            f"base-{e}",
            f"sum with a base at exponent {e}, one rounding",
            "overflow" if e == 128 else "rounding_tie",
            "dequantize",
            {**base_inputs, "base_exponent": literal(np.array([[[e]]]), "int16")},
            quick=e == -3,
        )
    ramp = literal(np.array([[[-3, -2, -1, 0, 1, 2, 3, 3]]]), "int8")
    g.add(
        "factors",
        "2^-f per channel",
        "given_factors",
        "dequantize",
        {k: v for k, v in base_inputs.items() if k != "base"} | {"factors": ramp},
    )
    return g


GROUPS = (base, factors, prod, dequantize)
