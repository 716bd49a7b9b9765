"""The vectors of section 3 and 6: snap, rotation, codebook, codes, scale, packing, base, factors, prod, dequantize."""

from __future__ import annotations

import numpy as np

from .build import (
    UNIT_SCALE,
    Group,
    add,
    codec,
    compact,
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

    def show(name: str, comment: str, flags: str, keys: Array, dtype: str, power: int, quick: bool = False) -> None:
        n, dim = keys.shape
        q = literal(np.ldexp(np.eye(dim, dtype=np.float32), power)[None, None], dtype="float32")
        data = literal(keys[None, None], dtype)
        g.attend(name, comment, flags, keys_of(4, data), values_of(4, data), q, scale=UNIT_SCALE, scores=True, quick=quick)

    half = np.array([[4096.5, 4097.5, -4096.5, -4097.5, 0.5, 1.5, -0.5, 2.5]], np.float32)
    quarter = np.array([[4096.25, 4096.75, -4096.25, -4096.75, 0.25, 0.75, -0.25, 1.25]], np.float32)
    show("ties", "coordinates exactly half way between two integers go to the even one", "rounding_tie", quarter, "float32", 4, True)
    show("14-bits", "raw keys have 14 bits: these halves are integers", "rounding_tie", half, "float32", 4, True)
    top = np.array([[8191.75, 8191.625, -8191.875, 1, 0, 0, 0, -8191.25]], np.float32)
    show("up-to-2^14", "rounding may reach 2^14 without moving the exponent", "rounding_tie", top, "float32", 4)
    powers = np.array([[1, 0.5, 0.25, 0, 0, 0, 0, 0], [-1, 2.0**-14, 2.0**-15, 3 * 2.0**-16, 0, 0, 0, 0]], np.float32)
    show("powers-of-two", "a power of two lies at the bottom of its binade: 1 has e = 1", "rounding_tie", powers, "bfloat16", 10)
    edge = np.zeros((5, 8), np.float32)
    edge[0, :2] = [TINY, TINY / 3]
    edge[1, :2] = [np.nextafter(np.float32(TINY), np.float32(0)), TINY / 2]
    edge[2, 0] = 2.0**-149
    edge[3, :2] = [-TINY * 1.5, 2.0**-149]
    show("threshold", "2^-80 is kept, the next smaller float32 is zero, subnormals vanish", "tiny_norm zero_vector", edge, "float32", 100, True)
    big = np.array([[3.4028235e38, -3.4028235e38, 1e38, 1, 0, 0, 0, 0], [2.0**127, 1e30, 0, 0, 0, 0, 0, 0]], np.float32)
    show("largest", "the largest float32 has e = 128", "huge_norm", big, "float32", -110)
    half_range = np.array([[65504, -65504, 2048, 1, 2.0**-14, 2.0**-24, 0, 0], [2.0**-24, 2.0**-23, -(2.0**-24), 0, 0, 0, 0, 0]])
    show("fp16-range", "fp16 maximum and fp16 subnormals, which are ordinary numbers here", "huge_norm tiny_norm", half_range, "float16", 8)
    data = literal(np.array([[[[1, 1, 1, 1, 1, 1, 1, 1], [1, -1, 0.5, 0.25, 3, 5, 7, 9]]]]), "float32")
    q = literal(half.reshape(1, 1, 1, 8), "float32")
    g.attend(
        "query-ties", "the query is snapped by the same rule", "rounding_tie", keys_of(4, data), values_of(4, data), q,
        scale=UNIT_SCALE, scores=True,
    )
    for dtype in ("float16", "bfloat16", "float32"):
        x = patterns(11, 1, 1, 24, 16, dtype=dtype)
        g.quantize(f"all-exponents-{dtype}", "random bit patterns: all exponents in one vector", "huge_norm tiny_norm", codec(16, 4), x)
    return g


def rotation() -> Group:
    g = Group("rotation")
    for dim in SUPPORTED_DIMS:
        flags = "one_hot" + (" odd_dim" if dim % 8 else "")
        positions = sorted({0, 1, 2, 3, dim - 1, dim - 2, dim // 2, dim // 3, dim // 4 + 1, 7 * dim // 11})
        x = one_hot(positions, len(positions), dim)
        g.quantize(
            f"columns-{dim}", f"one-hot vectors show columns of H and signs of order {dim} as one-bit codes", flags, codec(dim, 1), x,
            quick=dim in (12, 28, 52, 60, 100),
        )
        inputs = {
            "codec": codec(dim, 2, seed=dim),
            "words": integers(dim, 0, 0xFF, 1, -(-(-(-dim // 8)) // 2), dtype="uint32"),
            "scales": literal([1.0], "float16"),
            "dequantize": ["float16"],
        }
        if dim % 8 == 0:
            g.add(f"inverse-{dim}", f"H^T and the signs of order {dim}, through dequantize", flags.replace("one_hot", "word_spill"), "dequantize", inputs)
    for seed in (1, 2, 0x7FFFFFFF):
        for dim in (64, 68, 128, 1024):
            x = one_hot([0, dim - 1], 2, dim)
            g.quantize(f"seed-{seed}-{dim}", "the seed enters the sign stream above bit 32", "seed", codec(dim, 2, seed, "prod"), x, quick=(seed, dim) == (2, 128))
    g.add(
        "orders", "exactly these head sizes exist", "odd_dim", "supported", {"dims": list(range(1100))}, quick=True
    )
    return g


def codebook() -> Group:
    g = Group("codebook")
    for dim in SUPPORTED_DIMS:
        for bits in range(1, 7):
            x = sum4(1000 * bits + dim, 2, dim)
            flags = "odd_dim" if dim % 8 else "word_spill"
            g.quantize(f"gauss-{dim}-{bits}", f"thresholds and centroids of D={dim}, b={bits}", flags, codec(dim, bits), x)
    for dim in (8, 12, 64, 100, 128, 256):
        for bits in range(2, 7):
            tokens = -(-(1 << bits) * 2 // dim)
            x = integers(dim + bits, -100, 100, tokens + 1, dim, edits=[scale_by(3, None, [0, 2])])
            g.quantize(
                f"levels-{dim}-{bits}", "heavy tails reach the outer levels; dequantize shows the centroids", "outlier_channel",
                codec(dim, bits), x, dequantize=("float32",),
            )
    return g


def codes() -> Group:
    g = Group("codes")
    for bits in (1, 2, 3, 4, 5, 6):
        x = boundary_vectors(64 if bits > 1 else 8, bits)
        g.quantize(
            f"boundary-{bits}", "coordinates that equal a threshold, on both sides of zero, take the lower code", "boundary_tie",
            codec(x.shape[-1], bits), literal(x, "float32"), quick=bits in (2, 6),
        )
    x = root_sensitive_vectors(64, 6)
    g.quantize("floor-of-root", "codes that change if the root is rounded instead of floored", "boundary_tie", codec(64, 6), literal(x), quick=True)
    x = half_byte_vectors()
    g.quantize("int8-ties", "127 |Y| / m exactly half way: away from zero", "int8 boundary_tie", codec(8, 8), literal(x), quick=True)
    for bits in BITS:
        g.quantize(f"zero-{bits}", "a zero vector has index 0 everywhere and scale +0", "zero_vector", codec(20, bits), zeros(2, 20))
        g.quantize(f"one-hot-{bits}", "all |Y| equal", "one_hot", codec(16, bits), one_hot([0, 5, 15], 3, 16))
        g.quantize(
            f"small-integers-{bits}", "small integers give many equal and zero coordinates after rotation", "boundary_tie zero_vector",
            codec(24, bits), integers(bits, -1, 1, 12, 24), quick=bits == 3,
        )
    return g


def scale() -> Group:
    g = Group("scale")
    x = scale_tie_vectors()
    g.quantize("halves-to-even", "S / N exactly between two fp16 numbers", "rounding_tie", codec(8, 1), literal(x), quick=True)
    for bits in (1, 4, 8):
        powers = [*range(-34, -8), -4, 0, 6, 12, 13, 14, 15, 16, 17, 20, 60, 126]
        edits = [scale_by(p, t, None) for t, p in enumerate(powers)]
        x_spec = sum4(5, len(powers), 16, edits=edits)
        g.quantize(
            f"every-exponent-{bits}", "fp16 subnormals, the step to zero, the largest, and saturation at 65504",
            "saturated_scale subnormal_scale tiny_norm huge_norm", codec(16, bits), x_spec, dequantize=("float32",), quick=bits == 4,
        )
    # D = 8 with one-hot x gives the scale |x| 2^3 / 127, so these steps walk across 65504 and across the smallest subnormals.
    high = [65504 * 127 / 8 * (1 + k * 2.0**-13) for k in range(-4, 5)]
    low = [2.0**-24 * 127 / 8 * k for k in (0.49, 0.5, 0.51, 1.49, 1.5, 1.51, 2.5, 1023.5)]
    rows = np.zeros((len(high) + len(low), 8))
    rows[:, 3] = high + low
    g.quantize("around-limits", "just below and above the largest fp16 and half of the smallest", "saturated_scale subnormal_scale", codec(8, 1), literal(rows))
    norms = [0.0, 1e-7, 1e3, 7e4, 1e6]
    for dtype in ("float16", "bfloat16", "float32"):
        rows = np.outer(norms, np.array([0.6, -0.8] + [0] * 10))
        g.quantize(f"norms-{dtype}", "vectors of norm 0, 1e-7, 1e3, 7e4 and 1e6", "huge_norm tiny_norm zero_vector", codec(12, 4), literal(rows, dtype))
    for bad in ("nan", "inf", "-inf"):
        spec = sum4(9, 3, 20, dtype="float16", edits=[put(bad, 1, 7)])
        for bits in (3, 8):
            g.quantize(f"{bad}-{bits}", "a non-finite vector: codes of zero, scale 0x7E00", "non_finite", codec(20, bits), spec, dequantize=("float32",))
    return g


def packing() -> Group:
    g = Group("packing")
    for dim in (8, 12, 20, 24, 28, 36, 44, 52, 60, 64, 72, 100):
        for bits in BITS:
            flags = "word_spill" + (" odd_dim" if dim % 8 else "") + (" int8" if bits == 8 else "")
            g.quantize(
                f"{dim}-{bits}", f"{-(-dim // 8)} groups of 8 coordinates, {bits} bits", flags, codec(dim, bits, seed=3),
                sum4(dim * bits, 2, dim), quick=(dim, bits) in ((28, 3), (52, 3), (20, 5), (36, 6), (44, 1), (36, 2), (12, 8)),
            )
    g.quantize("rank-5", "any leading axes", "word_spill", codec(12, 3), sum4(4, 2, 1, 2, 3, 12), dequantize=("bfloat16",))
    return g


def base() -> Group:
    g = Group("base")

    def tile(name: str, comment: str, flags: str, x: dict[str, object], bits: int = 4, quick: bool = False) -> None:
        g.quantize(name, comment, flags, codec(x["shape"][-1], bits), x, base=True, dequantize=("float32",), quick=quick)  # type: ignore[index]

    tile("plain", "two tiles with an offset per channel", "outlier_channel", sum4(1, 1, 2, 128, 12, edits=[add(20, 0, 0, None, 3)]), quick=True)
    tile("constant-key", "64 equal keys: the residual is zero, the base is everything", "constant_key zero_vector", zeros(1, 1, 64, 12, edits=[put(0.7, 0, 0, None, None)]))
    tile("zero", "a tile of zeros has E = -79", "zero_vector", zeros(1, 1, 64, 8), quick=True)
    # Sums of 32 + 64 k: exactly half way between two integers.
    ties = np.zeros((1, 1, 64, 8))
    ties[..., 0] = 4096
    for d, count in enumerate((32, 96, 160, -32, -96, -160)):
        rows = np.arange(64) < abs(count) % 64
        ties[0, 0, :, d + 1] = np.sign(count) * (rows + abs(count) // 64)
    tile("mean-ties", "means exactly half way go to the even integer, also below zero", "rounding_tie", compact(ties), quick=True)
    for gap in (1, 2, 13, 14, 15, 29, 30, 31, 40):
        edits = [scale_by(-gap, 0, 0, [1, 33], None)]
        tile(f"gap-{gap}", f"half of the tile lies 2^{gap} lower", "rounding_tie", integers(gap, -8191, 8191, 1, 1, 64, 8, edits=edits), bits=8, quick=gap in (2, 13))
    tile("huge", "E = 128; a base of 2^128 overflows on dequantization", "huge_norm overflow", zeros(1, 1, 64, 8, edits=[put(3.4028235e38, 0, 0, None, 0), put(-1e38, 0, 0, None, 5), put(1e37, 0, 0, [3, 9], 2)]))
    tile("tiny", "keys around 2^-80 in one tile", "tiny_norm", sum4(3, 1, 1, 64, 8, exponent=-80))
    tile("non-finite", "a NaN key counts as zero in the base and stays NaN alone", "non_finite", sum4(3, 1, 1, 64, 8, edits=[put("nan", 0, 0, 5, 2), put("inf", 0, 0, 63, 0), add(9, 0, 0, None, 6)]), bits=3)
    for bits in BITS:
        tile(f"bits-{bits}", "residual codes", "outlier_channel dead_channel", sum4(bits, 1, 1, 64, 20, dtype="bfloat16", edits=[scale_by(6, 0, 0, None, 2), put(0, 0, 0, None, 7)]), bits=bits)
    return g


def factors() -> Group:
    g = Group("factors")

    def swings(name: str, comment: str, flags: str, amplitude: Array, quick: bool = False) -> None:
        # Alternating signs make the base zero, so S_d is 64 amplitude_d^2 in units of the tile's exponent.
        edits = [put(float(v), 0, 0, [0, 64, 2], d) for d, v in enumerate(amplitude) if v]
        edits += [put(float(-v), 0, 0, [1, 64, 2], d) for d, v in enumerate(amplitude) if v]
        x = zeros(1, 1, 64, len(amplitude), edits=edits)
        g.quantize(name, comment, flags, codec(len(amplitude), 4), x, base=True, dequantize=("float32",), quick=quick)

    swings("4-equal", "D S_d = 4 T exactly: f = 0", "boundary_tie outlier_channel", np.array([2, 1, 1, 1, 1, 0, 0, 0.0]), True)
    swings("4-above", "D S_d just above 4 T: f = -1", "outlier_channel", np.array([2048 + 1, 1024, 1024, 1024, 1024, 0, 0, 0.0]), True)
    tail = np.zeros(128)
    tail[0] = 4
    tail[1:17] = 1
    swings("64-equal", "D S_d = 64 T exactly: f = -1", "boundary_tie outlier_channel", tail, True)
    swings("64-above", "D S_d just above 64 T: f = -2", "outlier_channel", np.where(np.arange(128) == 0, 4097, tail * 1024))
    for dim in (128, 1024):
        only = (np.arange(dim) == 5).astype(float)
        swings(f"single-{dim}", "one channel holds everything: D S_d = D T, so f = -2 even at D = 1024", "boundary_tie outlier_channel dead_channel", only, dim == 128)
    # D = 12, 4 D S_d against T: 48 v^2 against the sum of squares.
    for bound, limit in ((4, 1), (64, 2), (1024, 3)):
        v = 2
        other = bound * 12 * v * v - v * v
        rest = _squares(other, 11)
        amplitude = np.array([v, *rest], float)
        swings(f"low-{bound}-equal", f"{bound} D S_d = T exactly: f = {limit - 1}", "boundary_tie dead_channel", amplitude, True)
        amplitude = np.array([v, *_squares(other + 1, 11)], float)
        swings(f"low-{bound}-below", f"{bound} D S_d just below T: f = {limit}", "dead_channel", amplitude)
    swings("dead", "channels that are always zero get +3", "dead_channel", np.array([0, 3, 3, 3, 0, 2, 3, 3, 3, 3, 3, 1.0]))
    ramp = integers(0, -3, 3, 1, 2, 20, dtype="int8")
    g.quantize("given-no-base", "given factors without a base: r = X, E = e, and half units under 2^-3", "given_factors", codec(20, 5), sum4(6, 1, 2, 3, 20, dtype="float16"), factors=ramp, dequantize=("float32",), quick=True)
    g.quantize("given-base", "given factors replace those of tile 0", "given_factors", codec(20, 5), sum4(6, 1, 2, 128, 20, dtype="float16", edits=[scale_by(7, 0, 0, None, 4)]), base=True, factors=ramp, dequantize=("float32",))
    g.quantize("second-tile", "tile 0 alone decides, whatever tile 1 holds", "outlier_channel", codec(8, 4), sum4(8, 1, 1, 128, 8, edits=[scale_by(5, 0, 0, [64, 128], 2)]), base=True)
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
            g.quantize(f"gauss-{dim}-{bits}", "codes, remainder and sign codes", "prod", codec(dim, bits, 7, "prod"), sum4(bits, 4, dim), dequantize=("float32",), quick=bits in (2, 4))
    exact = np.zeros((2, 8))
    exact[0, 0] = 127 * 33
    exact[1, 6] = -127 * 64
    g.quantize("no-remainder", "the first codes are exact, the remainder is zero: sign scale +0", "prod zero_vector", codec(8, 2, 0, "prod"), literal(exact), dequantize=("float32",), quick=True)
    g.quantize("ties", "remainders whose rotation is zero take the negative sign", "prod boundary_tie", codec(16, 3, 0, "prod"), integers(2, -1, 1, 12, 16), quick=True)
    powers = [-120, -79, -30, -20, -16, -14, -12, -10, 12, 14, 16, 18, 40, 120]
    g.quantize("exponents", "both scales at the ends of fp16", "prod saturated_scale subnormal_scale", codec(16, 4, 0, "prod"), sum4(3, len(powers), 16, edits=[scale_by(p, t, None) for t, p in enumerate(powers)]), dequantize=("float32",))
    g.quantize("zero-and-nan", "zero and non-finite vectors", "prod zero_vector non_finite", codec(12, 4, 0, "prod"), sum4(3, 4, 12, edits=[put(0, 1, None), put("nan", 2, 3)]), dequantize=("float32",))
    g.quantize("base", "on residuals with factors", "prod outlier_channel", codec(12, 4, 0, "prod"), sum4(3, 1, 1, 64, 12, edits=[scale_by(4, 0, 0, None, 2), add(5, 0, 0, None, 3)]), base=True, dequantize=("float32",), quick=True)
    return g


def dequantize() -> Group:
    g = Group("dequantize")
    scales = [0.0, 2.0**-24, 3 * 2.0**-24, 2.0**-14, 1.0, 1.5, 1023.5, 65504.0, float("nan")]
    for bits, per_word in ((8, 4),):
        words = integers(1, 0, 0x7F7F7F, len(scales), 16 // per_word, dtype="uint32")
        for dtype in ("float32", "float16", "bfloat16"):
            inputs = {"codec": codec(16, bits), "words": words, "scales": literal(scales, "float16"), "dequantize": [dtype]}
            g.add(f"scales-{bits}-{dtype}", "every kind of scale; casts round once and overflow to infinity", "subnormal_scale saturated_scale non_finite dtype_cast", "dequantize", inputs, quick=dtype == "float16")
    for bits in (1, 2, 3, 4, 5, 6):
        g.quantize(f"round-trip-{bits}", "quantized, then dequantized to every dtype", "dtype_cast", codec(36, bits), sum4(bits, 3, 36), dequantize=("float32", "float16", "bfloat16"))
    base_inputs = {
        "codec": codec(8, 8),
        "words": integers(2, 0, 0x7F7F7F, 1, 1, 64, 2, dtype="uint32"),
        "scales": literal(np.ldexp(1.0, np.arange(64) % 40 - 24)[None, None], "float16"),
        "base": literal(np.array([[[[8192, -8192, 1, -1, 0, 4097, -3, 77]]]]), "int16"),
        "dequantize": ["float32"],
    }
    for e in (-79, -40, -3, 0, 4, 100, 128):
        g.add(f"base-{e}", f"sum with a base at exponent {e}, one rounding", "overflow" if e == 128 else "rounding_tie", "dequantize", {**base_inputs, "base_exponent": literal(np.array([[[e]]]), "int16")}, quick=e == -3)
    ramp = literal(np.array([[[-3, -2, -1, 0, 1, 2, 3, 3]]]), "int8")
    g.add("factors", "2^-f per channel", "given_factors", "dequantize", {k: v for k, v in base_inputs.items() if k != "base"} | {"factors": ramp})
    return g


GROUPS = (snap, rotation, codebook, codes, scale, packing, base, factors, prod, dequantize)
