"""The vectors of snap, rotation, codebook, codes, scale and packing (sections 3.1 and 3.4 to 3.7)."""

from __future__ import annotations

import numpy as np

from .build import (
    UNIT_SCALE,
    Group,
    codec,
    integers,
    keys_of,
    literal,
    one_hot,
    patterns,
    put,
    scale_by,
    sum4,
    values_of,
    zeros,
)
from .oracle_codec import word_count
from .oracle_numbers import Array
from .oracle_rotation import SUPPORTED_DIMS
from .search import (
    boundary_vectors,
    half_byte_vectors,
    root_sensitive_vectors,
    scale_tie_vectors,
)

BITS = (1, 2, 3, 4, 5, 6, 8)
TINY = 2.0**-80


def snap() -> Group:
    """Raw logits with a one-hot query show every snapped integer of a key: F is X times a known factor."""
    g = Group("snap")

    def show(
        name: str, comment: str, flags: str, keys: Array, dtype: str, power: int, quick: bool = False
    ) -> None:
        _n, dim = keys.shape
        q = literal(np.ldexp(np.eye(dim, dtype=np.float32), power)[None, None], dtype="float32")
        data = literal(keys[None, None], dtype)
        g.attend(
            name,
            comment,
            flags,
            keys_of(4, data),
            values_of(4, data),
            q,
            scale=UNIT_SCALE,
            scores=True,
            quick=quick,
        )

    half = np.array([[4096.5, 4097.5, -4096.5, -4097.5, 0.5, 1.5, -0.5, 2.5]], np.float32)
    quarter = np.array([[4096.25, 4096.75, -4096.25, -4096.75, 0.25, 0.75, -0.25, 1.25]], np.float32)
    show(
        "ties",
        "coordinates exactly half way between two integers go to the even one",
        "rounding_tie",
        quarter,
        "float32",
        4,
        True,
    )
    show(
        "14-bits",
        "raw keys have 14 bits: these halves are integers",
        "rounding_tie",
        half,
        "float32",
        4,
        True,
    )
    top = np.array([[8191.75, 8191.625, -8191.875, 1, 0, 0, 0, -8191.25]], np.float32)
    show(
        "up-to-2^14", "rounding may reach 2^14 without moving the exponent", "rounding_tie", top, "float32", 4
    )
    powers = np.array(
        [[1, 0.5, 0.25, 0, 0, 0, 0, 0], [-1, 2.0**-14, 2.0**-15, 3 * 2.0**-16, 0, 0, 0, 0]], np.float32
    )
    show(
        "powers-of-two",
        "a power of two lies at the bottom of its binade: 1 has e = 1",
        "rounding_tie",
        powers,
        "bfloat16",
        10,
    )
    edge = np.zeros((5, 8), np.float32)
    edge[0, :2] = [TINY, TINY / 3]
    edge[1, :2] = [np.nextafter(np.float32(TINY), np.float32(0)), TINY / 2]
    edge[2, 0] = 2.0**-149
    edge[3, :2] = [-TINY * 1.5, 2.0**-149]
    show(
        "threshold",
        "2^-80 is kept, the next smaller float32 is zero, subnormals vanish",
        "tiny_norm zero_vector",
        edge,
        "float32",
        100,
        True,
    )
    big = np.array(
        [[3.4028235e38, -3.4028235e38, 1e38, 1, 0, 0, 0, 0], [2.0**127, 1e30, 0, 0, 0, 0, 0, 0]], np.float32
    )
    show("largest", "the largest float32 has e = 128", "huge_norm", big, "float32", -110)
    half_range = np.array(
        [[65504, -65504, 2048, 1, 2.0**-14, 2.0**-24, 0, 0], [2.0**-24, 2.0**-23, -(2.0**-24), 0, 0, 0, 0, 0]]
    )
    show(
        "fp16-range",
        "fp16 maximum and fp16 subnormals, which are ordinary numbers here",
        "huge_norm tiny_norm",
        half_range,
        "float16",
        8,
    )
    data = literal(np.array([[[[1, 1, 1, 1, 1, 1, 1, 1], [1, -1, 0.5, 0.25, 3, 5, 7, 9]]]]), "float32")
    q = literal(half.reshape(1, 1, 1, 8), "float32")
    g.attend(
        "query-ties",
        "the query is snapped by the same rule",
        "rounding_tie",
        keys_of(4, data),
        values_of(4, data),
        q,
        scale=UNIT_SCALE,
        scores=True,
    )
    for dtype in ("float16", "bfloat16", "float32"):
        x = patterns(11, 1, 1, 24, 16, dtype=dtype)
        g.quantize(
            f"all-exponents-{dtype}",
            "random bit patterns: all exponents in one vector",
            "huge_norm tiny_norm",
            codec(16, 4),
            x,
        )
    return g


def rotation() -> Group:
    g = Group("rotation")
    for dim in SUPPORTED_DIMS:
        flags = "one_hot" + (" odd_dim" if dim % 8 else "")
        positions = sorted({0, 1, 2, 3, dim - 1, dim - 2, dim // 2, dim // 3, dim // 4 + 1, 7 * dim // 11})
        x = one_hot(positions, len(positions), dim)
        g.quantize(
            f"columns-{dim}",
            f"one-hot vectors show columns of H and signs of order {dim} as one-bit codes",
            flags,
            codec(dim, 1),
            x,
            quick=dim in (12, 28, 52, 60, 100),
        )
        inputs = {
            "codec": codec(dim, 2, seed=dim),
            "words": integers(dim, 0, 0xFF, 1, word_count(dim, 2), dtype="uint32"),
            "scales": literal([1.0], "float16"),
            "dequantize": ["float16"],
        }
        if dim % 8 == 0:
            g.add(
                f"inverse-{dim}",
                f"H^T and the signs of order {dim}, through dequantize",
                flags.replace("one_hot", "word_spill"),
                "dequantize",
                inputs,
            )
    for seed in (1, 2, 0x7FFFFFFF):
        for dim in (64, 68, 128, 1024):
            x = one_hot([0, dim - 1], 2, dim)
            g.quantize(
                f"seed-{seed}-{dim}",
                "the seed enters the sign stream above bit 32",
                "seed",
                codec(dim, 2, seed, "prod"),
                x,
                quick=(seed, dim) == (2, 128),
            )
    g.add(
        "orders",
        "exactly these head sizes exist",
        "odd_dim",
        "supported",
        {"dims": list(range(1100))},
        quick=True,
    )
    return g


def codebook() -> Group:
    g = Group("codebook")
    for dim in SUPPORTED_DIMS:
        for bits in range(1, 7):
            x = sum4(1000 * bits + dim, 2, dim)
            flags = "odd_dim" if dim % 8 else "word_spill"
            g.quantize(
                f"gauss-{dim}-{bits}",
                f"thresholds and centroids of D={dim}, b={bits}",
                flags,
                codec(dim, bits),
                x,
            )
    for dim in (8, 12, 64, 100, 128, 256):
        for bits in range(2, 7):
            tokens = -(-(1 << bits) * 2 // dim)
            x = integers(dim + bits, -100, 100, tokens + 1, dim, edits=[scale_by(3, None, [0, 2])])
            g.quantize(
                f"levels-{dim}-{bits}",
                "heavy tails reach the outer levels; dequantize shows the centroids",
                "outlier_channel",
                codec(dim, bits),
                x,
                dequantize=("float32",),
            )
    return g


def codes() -> Group:
    g = Group("codes")
    for bits in (1, 2, 3, 4, 5, 6):
        x = boundary_vectors(64 if bits > 1 else 8, bits)
        g.quantize(
            f"boundary-{bits}",
            "coordinates that equal a threshold, on both sides of zero, take the lower code",
            "boundary_tie",
            codec(x.shape[-1], bits),
            literal(x, "float32"),
            quick=bits in (2, 6),
        )
    x = root_sensitive_vectors(64, 6)
    g.quantize(
        "floor-of-root",
        "codes that change if the root is rounded instead of floored",
        "boundary_tie",
        codec(64, 6),
        literal(x),
        quick=True,
    )
    x = half_byte_vectors()
    g.quantize(
        "int8-ties",
        "127 |Y| / m exactly half way: away from zero",
        "int8 boundary_tie",
        codec(8, 8),
        literal(x),
        quick=True,
    )
    for bits in BITS:
        g.quantize(
            f"zero-{bits}",
            "a zero vector has index 0 everywhere and scale +0",
            "zero_vector",
            codec(20, bits),
            zeros(2, 20),
        )
        g.quantize(f"one-hot-{bits}", "all |Y| equal", "one_hot", codec(16, bits), one_hot([0, 5, 15], 3, 16))
        g.quantize(
            f"small-integers-{bits}",
            "small integers give many equal and zero coordinates after rotation",
            "boundary_tie zero_vector",
            codec(24, bits),
            integers(bits, -1, 1, 12, 24),
            quick=bits == 3,
        )
    return g


def scale() -> Group:
    g = Group("scale")
    x = scale_tie_vectors()
    g.quantize(
        "halves-to-even",
        "S / N exactly between two fp16 numbers",
        "rounding_tie",
        codec(8, 1),
        literal(x),
        quick=True,
    )
    for bits in (1, 4, 8):
        powers = [*range(-34, -8), -4, 0, 6, 12, 13, 14, 15, 16, 17, 20, 60, 126]
        edits = [scale_by(p, t, None) for t, p in enumerate(powers)]
        x_spec = sum4(5, len(powers), 16, edits=edits)
        g.quantize(
            f"every-exponent-{bits}",
            "fp16 subnormals, the step to zero, the largest, and saturation at 65504",
            "saturated_scale subnormal_scale tiny_norm huge_norm",
            codec(16, bits),
            x_spec,
            dequantize=("float32",),
            quick=bits == 4,
        )
    # D = 8 with one-hot x gives the scale |x| 2^3 / 127, so these steps walk across 65504 and across the
    # smallest subnormals.
    high = [65504 * 127 / 8 * (1 + k * 2.0**-13) for k in range(-4, 5)]
    low = [2.0**-24 * 127 / 8 * k for k in (0.49, 0.5, 0.51, 1.49, 1.5, 1.51, 2.5, 1023.5)]
    rows = np.zeros((len(high) + len(low), 8))
    rows[:, 3] = high + low
    g.quantize(
        "around-limits",
        "just below and above the largest fp16 and half of the smallest",
        "saturated_scale subnormal_scale",
        codec(8, 1),
        literal(rows),
    )
    norms = [0.0, 1e-7, 1e3, 7e4, 1e6]
    for dtype in ("float16", "bfloat16", "float32"):
        rows = np.outer(norms, np.array([0.6, -0.8] + [0] * 10))
        g.quantize(
            f"norms-{dtype}",
            "vectors of norm 0, 1e-7, 1e3, 7e4 and 1e6",
            "huge_norm tiny_norm zero_vector",
            codec(12, 4),
            literal(rows, dtype),
        )
    for bad in ("nan", "inf", "-inf"):
        spec = sum4(9, 3, 20, dtype="float16", edits=[put(bad, 1, 7)])
        for bits in (3, 8):
            g.quantize(
                f"{bad}-{bits}",
                "a non-finite vector: codes of zero, scale 0x7E00",
                "non_finite",
                codec(20, bits),
                spec,
                dequantize=("float32",),
            )
    return g


def packing() -> Group:
    g = Group("packing")
    for dim in (8, 12, 20, 24, 28, 36, 44, 52, 60, 64, 72, 100):
        for bits in BITS:
            flags = "word_spill" + (" odd_dim" if dim % 8 else "") + (" int8" if bits == 8 else "")
            g.quantize(
                f"{dim}-{bits}",
                f"{-(-dim // 8)} groups of 8 coordinates, {bits} bits",
                flags,
                codec(dim, bits, seed=3),
                sum4(dim * bits, 2, dim),
                quick=(dim, bits) in ((28, 3), (52, 3), (20, 5), (36, 6), (44, 1), (36, 2), (12, 8)),
            )
    g.quantize(
        "rank-5",
        "any leading axes",
        "word_spill",
        codec(12, 3),
        sum4(4, 2, 1, 2, 3, 12),
        dequantize=("bfloat16",),
    )
    return g


GROUPS = (snap, rotation, codebook, codes, scale, packing)
