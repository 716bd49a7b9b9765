"""The vector codec: every number from the text in Python integers, then the faults that shipped elsewhere."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import (
    assert_same_bits,
    assert_same_packed,
    bits_of,
    differs,
    float64,
    vectors,
)

from turboquant_vlm.reference import ALLOWED_BITS, Codec, Packed, codebook, codec, dequantize, make_codec, quantize
from turboquant_vlm.reference.packing import pack, unpack
from turboquant_vlm.reference.rotation import hadamard, random_signs

NAN_SCALE = 0x7E00


class TestMakeCodec:
    @pytest.mark.parametrize("bits", [0, 7, 9, -1, 16, 32, 2.5, 3.5, True, False, "4"])
    def test_other_widths_are_refused(self, bits: object) -> None:
        with pytest.raises(ValueError, match=r"1 to 6 or 8 bits per coordinate; got bits="):
            make_codec(64, bits)  # type: ignore[arg-type]

    @pytest.mark.parametrize("bits", ALLOWED_BITS)
    def test_allowed_widths(self, bits: int) -> None:
        assert make_codec(64, bits) == Codec(64, bits, 0, "mse")

    @pytest.mark.parametrize("bits", [1, 8])
    def test_prod_needs_a_bit_for_the_sign(self, bits: int) -> None:
        with pytest.raises(ValueError, match=f"2 to 6 bits per coordinate; got bits={bits}"):
            make_codec(64, bits, kind="prod")

    @pytest.mark.parametrize("seed", [-1, 2**31, 0.5])
    def test_seed(self, seed: float) -> None:
        with pytest.raises(ValueError, match="seed must be an integer from 0 to 2147483647"):
            make_codec(64, 4, seed=seed)  # type: ignore[arg-type]

    def test_kind(self) -> None:
        with pytest.raises(ValueError, match="kind='PROD'"):
            make_codec(64, 4, kind="PROD")

    def test_scale_shifts(self) -> None:
        """κ = ceil(log2 D) + 3 and κ2 = κ + ceil(ceil(log2 D) / 2) + 2."""
        want = {8: (6, 10), 12: (7, 11), 64: (9, 14), 72: (10, 16), 128: (10, 16), 576: (13, 20), 1024: (13, 20)}
        assert {d: (c.scale_shift, c.sign_scale_shift) for d in want for c in [make_codec(d, 4)]} == want


@pytest.mark.parametrize(
    ("x", "base", "message"),
    [
        (mx.zeros((2, 63)), False, "x must be"),
        (mx.zeros((64,)), False, "x must be"),
        (mx.zeros((2, 64), mx.int32), False, "float16, bfloat16 or float32"),
        (mx.zeros((63, 64)), True, "whole tiles of 64"),
        (mx.zeros((0, 64)), True, "whole tiles of 64"),
    ],
)
def test_wrong_vectors_are_refused(x: mx.array, base: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(x, make_codec(64, 4), base=base)


# ---- the text, one vector at a time, in Python integers ----


def snap(x: list[Fraction], n: int = 13) -> tuple[list[int], int]:
    m = max(map(abs, x))
    if m < Fraction(2) ** -80:
        return [0] * len(x), -79
    e = m.numerator.bit_length() - m.denominator.bit_length()
    e += m >= Fraction(2) ** e
    return [round(value * Fraction(2) ** (n - e)) for value in x], e


def half(x: Fraction) -> float:
    """Nearest fp16 with subnormals, at most 65504."""
    if x == 0:
        return 0.0
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e += x >= Fraction(2) ** e
    unit = Fraction(2) ** max(e - 11, -24)
    return float(min(round(x / unit) * unit, Fraction(65504)))


def rotated(z: list[int], dim: int, seed: int, stream: int) -> list[int]:
    signed = np.array(z, np.int64) * random_signs(dim, seed, stream)
    return (hadamard(dim).astype(np.int64) @ signed).tolist()


def centroids_of(y: list[int], square: int, dim: int, bits: int) -> list[int]:
    if bits == 8:
        m = max(map(abs, y))
        return [int(math.copysign((254 * abs(v) + m) // (2 * m), v)) if m else 0 for v in y]
    positive = codebook.magnitudes(dim, bits).tolist()
    c = [-v for v in reversed(positive)] + positive
    rho = (math.isqrt(square * 2**16) * codebook.boundary_constant(dim, bits)) >> 12
    thresholds = [(low + high) * rho // 2**16 for low, high in pairwise(c)]
    return [c[sum(v > t for t in thresholds)] for v in y]


def code_of(c: int, dim: int, bits: int) -> int:
    if bits == 8:
        return c
    return (c < 0) << (bits - 1) | codebook.magnitudes(dim, bits).tolist().index(abs(c))


def by_the_text(z: list[int], epsilon: int, codec: Codec) -> dict[str, object]:
    """Codes and scales of a snapped vector z 2^epsilon."""
    dim, bits = codec.dim, codec.code_bits
    kappa = (dim - 1).bit_length() + 3
    y, square = rotated(z, dim, codec.seed, 0), sum(v * v for v in z)
    c = centroids_of(y, square, dim, bits)
    inner = sum(a * b for a, b in zip(y, c, strict=True))
    ratio = Fraction(square, inner) if inner else Fraction(0)
    out: dict[str, object] = {
        "codes": [code_of(v, dim, bits) for v in c],
        "scale": half(ratio * Fraction(2) ** (epsilon + kappa)),
    }
    if codec.kind == "prod":
        amount = (512 * dim * square + inner) // (2 * inner) if inner else 0
        remainder = [256 * a - amount * b for a, b in zip(y, c, strict=True)]
        z2, g2 = snap([Fraction(v) for v in remainder])
        y2 = rotated(z2, dim, codec.seed, 1)
        c2 = [127 if v > 0 else -127 for v in y2]
        square2, inner2 = sum(v * v for v in z2), sum(a * b for a, b in zip(y2, c2, strict=True))
        kappa2 = kappa + -(-(dim - 1).bit_length() // 2) + 2
        ratio2 = Fraction(square2, dim * inner2) if inner2 else Fraction(0)
        out["signs"] = [int(v < 0) for v in c2]
        out["sign_scale"] = half(ratio2 * Fraction(2) ** (epsilon + g2 - 21 + kappa2))
    return out


def check_against_text(packed: Packed, snapped: list[tuple[list[int], int]], codec: Codec) -> None:
    for t, (z, epsilon) in enumerate(snapped):
        want = by_the_text(z, epsilon, codec)
        assert np.array(unpack(packed.words[t], codec.code_bits, codec.dim)).tolist() == want["codes"], t
        assert packed.scales[t].item() == want["scale"], t
        if codec.kind == "prod":
            assert packed.sign_words is not None
            assert packed.sign_scales is not None
            assert np.array(unpack(packed.sign_words[t], 1, codec.dim)).tolist() == want["signs"], t
            assert packed.sign_scales[t].item() == want["sign_scale"], t


def exact(x: mx.array) -> list[list[Fraction]]:
    return [[Fraction(v) for v in row] for row in float64(x).tolist()]


def mixed_vectors(dim: int) -> mx.array:
    """Random vectors, a one-hot, an alternating, a zero, a constant, huge and tiny ones."""
    x = np.random.default_rng(dim).standard_normal((10, dim)).astype(np.float32)
    x[1] = 0
    x[1, dim // 2] = -3
    x[2] = [1.5 if d % 2 else -1.5 for d in range(dim)]
    x[3] = 0
    x[4] = 0.1
    x[5] *= 1e-7
    x[6] *= 1e6
    x[7] *= 1e-30
    x[8, 1:] *= 1e-4
    return mx.array(x)


KINDS = [(bits, "mse") for bits in ALLOWED_BITS] + [(bits, "prod") for bits in range(2, 7)]


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 100, 128])
@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_codes_and_scales_are_those_of_the_text(dim: int, bits: int, kind: str) -> None:
    codec_ = make_codec(dim, bits, seed=dim + bits, kind=kind)
    x = mixed_vectors(dim)
    snapped = [(z, e - 13) for z, e in map(snap, exact(x))]
    check_against_text(quantize(x, codec_), snapped, codec_)


@pytest.mark.parametrize(("bits", "kind"), [(1, "mse"), (3, "mse"), (8, "mse"), (4, "prod")])
@pytest.mark.parametrize("spread", ["even", "loud and quiet channels", "dead channels", "constant part", "norms"])
def test_keys_are_those_of_the_text(bits: int, kind: str, spread: str) -> None:
    """Base, factors and codes of two tiles of 64 keys."""
    dim = 16
    rng = np.random.default_rng(3)
    x = rng.standard_normal((128, dim)).astype(np.float32)
    if spread == "loud and quiet channels":
        x *= 2.0 ** rng.integers(-9, 5, dim)
    elif spread == "dead channels":
        x[:, 2:] = 0.25
    elif spread == "constant part":
        x += 300 * rng.standard_normal(dim)
    elif spread == "norms":
        x *= 2.0 ** rng.integers(-40, 10, (128, 1))
    keys = mx.array(x.astype(np.float32))
    codec_ = make_codec(dim, bits, kind=kind)
    packed = quantize(keys, codec_, base=True)
    factors: list[int] | None = None
    for tile in range(2):
        integers, exponents = zip(*map(snap, exact(keys[64 * tile : 64 * tile + 64])), strict=True)
        top = max(exponents)
        aligned = [
            [round(v * Fraction(2) ** (e - top)) if e - top >= -30 else 0 for v in z]
            for z, e in zip(integers, exponents, strict=True)
        ]
        mean = [round(Fraction(sum(column), 64)) for column in zip(*aligned, strict=True)]
        residual = [[v - m for v, m in zip(row, mean, strict=True)] for row in aligned]
        assert packed.base is not None
        assert packed.base_exponent is not None
        assert np.array(packed.base[tile]).tolist() == mean
        assert packed.base_exponent[tile].item() == top
        if factors is None:
            energy = [sum(v * v for v in column) for column in zip(*residual, strict=True)]
            factors = [factor(dim * s, sum(energy)) for s in energy]
            assert packed.factors is not None
            assert np.array(packed.factors).tolist() == factors
        snapped = []
        for row in residual:
            z, g = snap([Fraction(v) * Fraction(2) ** f for v, f in zip(row, factors, strict=True)])
            snapped.append((z, top + g - 26))
        part = Packed(
            **{n: a[64 * tile : 64 * tile + 64] for n, a in packed.arrays().items() if "words" in n or "scale" in n}
        )
        check_against_text(part, snapped, codec_)
    assert factors is not None
    if spread == "loud and quiet channels":
        assert {-3, 3} & set(factors)
        assert len(set(factors)) > 3


def factor(energy: int, total: int) -> int:
    """f of one channel: the mean square against powers of 16 around the average, in integers."""
    for f, limit in ((-3, 1024), (-2, 64), (-1, 4)):
        if energy > limit * total:
            return f
    for f, limit in ((3, 1024), (2, 64), (1, 4)):
        if limit * energy < total:
            return f
    return 0


class TestChannelFactors:
    @pytest.mark.parametrize("limit", [4, 64, 1024])
    def test_exactly_on_a_threshold_is_the_smaller_factor(self, limit: int) -> None:
        """A loud channel against quiet ones, with the total on the threshold, one below and one above."""
        dim, root = 1024, math.isqrt(limit)
        step = {4: 1, 64: 2, 1024: 3}[limit]
        for delta in (-1, 0, 1):
            residual = np.zeros((64, dim), np.int32)
            residual[0, 0] = root
            quiet = dim - limit if limit < dim else 0
            residual[0, 1 : 1 + quiet] = 1
            # D S_0 = 1024 limit and T = limit + quiet = 1024, so D S_0 = limit T; delta moves T by one.
            if delta > 0:
                residual[1, 1] = 1
            elif delta < 0 and quiet:
                residual[0, 1] = 0
            energy = (residual.astype(int) ** 2).sum(axis=0)
            got = np.array(codec.channel_factors(mx.array(residual)))
            want = [factor(dim * int(s), int(energy.sum())) for s in energy]
            assert got.tolist() == want
            if quiet:
                assert got[0] == (-step if delta < 0 else -(step - 1))

    def test_quiet_side_exactly_on_a_threshold(self) -> None:
        dim = 8
        # D S_0 = 8, T = 32 (so 4 D S_0 = T), then 31 and 33.
        for extra, want in ((24, 0), (23, 0), (25, 1)):
            residual = np.zeros((64, dim), np.int32)
            residual[0, 0] = 1
            residual[:extra, 1] = 1
            residual[:7, 2] = 1
            assert np.array(codec.channel_factors(mx.array(residual)))[0] == want

    def test_silence_has_no_factors(self) -> None:
        assert not np.array(codec.channel_factors(mx.zeros((64, 16), mx.int32))).any()

    def test_extremes_do_not_overflow(self) -> None:
        residual = np.zeros((64, 1024), np.int32)
        residual[:, 0] = 2**14
        got = np.array(codec.channel_factors(mx.array(residual)))
        assert got[0] == -2  # D S = 1024 T is not above 1024 T.
        assert (got[1:] == 3).all()
        assert not np.array(codec.channel_factors(mx.full((64, 1024), 2**14, mx.int32))).any()

    def test_given_factors_replace_measured_ones(self) -> None:
        x, codec_ = vectors((128, 16), 0), make_codec(16, 4)
        given = mx.array(np.arange(16, dtype=np.int8) % 7 - 3)
        packed = quantize(x, codec_, base=True, factors=given)
        assert packed.factors is not None
        assert_same_bits(packed.factors, given)
        assert differs(packed.words, quantize(x, codec_, base=True).words)


class TestBoundaries:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
    @pytest.mark.parametrize("dim", [8, 64, 576])
    def test_a_value_on_a_boundary_goes_to_the_lower_code(self, dim: int, bits: int) -> None:
        c = codebook.centroids_ascending(dim, bits).tolist()
        square = 12345678 * dim
        rho = (math.isqrt(square * 2**16) * codebook.boundary_constant(dim, bits)) >> 12
        thresholds = [(low + high) * rho // 2**16 for low, high in pairwise(c)]
        y = [t + d for t in thresholds for d in (-1, 0, 1)]
        want = [j + (d == 1) for j in range(len(thresholds)) for d in (-1, 0, 1)]
        got = codec._cell_index(mx.array(np.array(y, np.int32)), mx.array(np.array([square])), dim, bits)
        assert np.array(got).tolist() == want

    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
    def test_a_zero_vector_has_the_lowest_code_everywhere_and_scale_plus_zero(self, bits: int) -> None:
        packed = quantize(mx.zeros((1, 64)), make_codec(64, bits))
        codes = np.array(unpack(packed.words, bits, 64))
        assert (codes == 2**bits - 1).all()
        assert bits_of(packed.scales).tolist() == [0]

    def test_eight_bits_round_half_away_from_zero(self) -> None:
        """127 |Y| / m with m = 254: every odd number is a tie."""
        y = mx.array(np.arange(-254, 255, dtype=np.int32))
        coded = codec._code(mx.zeros((509,), mx.int32), y, 509, 8)
        want = [int(math.copysign((abs(v) + 1) // 2, v)) for v in range(-254, 255)]
        assert np.array(coded.centroids).tolist() == want

    def test_eight_bits_of_zero(self) -> None:
        packed = quantize(mx.zeros((1, 64)), make_codec(64, 8))
        assert not np.array(packed.words).any()
        assert bits_of(packed.scales).tolist() == [0]


class TestDequantize:
    @pytest.mark.parametrize("bits", ALLOWED_BITS)
    @pytest.mark.parametrize("dim", [8, 64, 100])
    def test_values(self, dim: int, bits: int) -> None:
        codec_ = make_codec(dim, bits, seed=5)
        packed = quantize(vectors((6, dim), bits), codec_)
        c = np.array(codec.coded_centroids(packed.words, codec_)).astype(np.int64)
        t = random_signs(dim, 5).astype(np.int64) * (c @ hadamard(dim).astype(np.int64))
        want = t.astype(np.float32) * np.array(packed.scales).astype(np.float32)[:, None]
        want = want * np.float32(2.0**-codec_.scale_shift)
        assert_same_bits(dequantize(packed, codec_), mx.array(want))

    def test_keys(self) -> None:
        codec_ = make_codec(16, 4, kind="prod")
        x = vectors((128, 16), 1) + 3
        packed = quantize(x, codec_, base=True)
        matrix = hadamard(16).astype(np.int64)
        s, s2 = (random_signs(16, 0, stream).astype(np.int64) for stream in (0, 1))
        c = np.array(codec.coded_centroids(packed.words, codec_)).astype(np.int64)
        assert packed.sign_words is not None
        c2 = np.array(codec.sign_centroids(packed.sign_words, codec_)).astype(np.int64)
        down = np.exp2(-np.array(packed.factors).astype(np.float32))
        first = (s * (c @ matrix)).astype(np.float32) * np.array(packed.scales).astype(np.float32)[:, None]
        second = (s * ((s2 * (c2 @ matrix)) @ matrix)).astype(np.float32)
        second = second * np.array(packed.sign_scales).astype(np.float32)[:, None]
        residual = first * np.float32(2.0**-codec_.scale_shift) * down
        residual = residual + second * np.float32(2.0**-codec_.sign_scale_shift) * down
        units = np.exp2(np.array(packed.base_exponent).astype(np.float32) - 13)
        base = np.array(packed.base).astype(np.float32) * units[:, None]
        want = residual + np.repeat(base, 64, axis=0)
        assert_same_bits(dequantize(packed, codec_), mx.array(want.astype(np.float32)))

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_casts_once(self, dtype: mx.Dtype) -> None:
        codec_ = make_codec(64, 3)
        packed = quantize(vectors((6, 64), 0), codec_)
        assert_same_bits(dequantize(packed, codec_, dtype), dequantize(packed, codec_).astype(dtype))

    def test_error_falls_with_bits(self) -> None:
        x = vectors((200, 64), 2, mx.float32)
        errors = []
        for bits in ALLOWED_BITS:
            codec_ = make_codec(64, bits)
            errors.append(float(np.linalg.norm(float64(dequantize(quantize(x, codec_), codec_)) - float64(x))))
        assert errors == sorted(errors, reverse=True)
        # Every bit is worth a factor; a width that is another one in disguise would show here.
        assert all(high / low > 1.5 for high, low in pairwise(errors))


class TestNorms:
    """Scales that overflow fp16 were a fault elsewhere."""

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    @pytest.mark.parametrize("norm", [0.0, 1e-7, 1e3, 7e4, 1e6])
    @pytest.mark.parametrize("bits", ALLOWED_BITS)
    def test_any_norm(self, norm: float, dtype: mx.Dtype, bits: int) -> None:
        wide = np.random.default_rng(8).standard_normal((64, 64))
        wide *= norm / np.linalg.norm(wide, axis=1, keepdims=True)
        x = mx.array(wide.astype(np.float32)).astype(dtype)
        codec_ = make_codec(64, bits)
        # Coordinates that the dtype itself turned into infinity make their vector NaN, and no other one.
        fits = np.isfinite(float64(x)).all(axis=1)
        assert fits.all() or (norm == 1e6 and dtype == mx.float16)
        scales = float64(quantize(x, codec_).scales)
        assert (np.isfinite(scales) == fits).all()
        x = x[mx.array(np.flatnonzero(fits))]
        if x.shape[0] == 0:
            return
        packed = quantize(x, codec_)
        scales = float64(packed.scales)
        assert np.isfinite(scales).all()
        assert (scales <= 65504).all()
        back = float64(dequantize(packed, codec_))
        assert np.isfinite(back).all()
        size = np.linalg.norm(float64(x))
        if size == 0:
            assert not back.any()
        elif 1e-3 <= norm <= 1e5:
            # Normal fp16 scales: the error is that of the codebook.
            usual = math.sqrt(1 / (1 - codebook.distortion(64, bits)) - 1) if bits < 8 else 0.01
            assert np.linalg.norm(back - float64(x)) / size < 1.1 * usual
        elif norm > 1e5:
            # Saturated: shorter than the vector, and in its direction.
            cosine = np.sum(back * float64(x)) / (np.linalg.norm(back) * size)
            assert cosine > 0.79
            assert np.linalg.norm(back) < 1.3 * size

    @pytest.mark.parametrize(("norm", "error"), [(1e-3, 0.1), (1e-4, 0.1), (1e-5, 0.1), (1e-6, 0.2), (1e-7, 1.0)])
    def test_precision_fades_gently_below(self, norm: float, error: float) -> None:
        """At norm 1e-6 the scale is three units of an fp16 subnormal; below, vectors read as zero."""
        x = vectors((50, 64), 3, mx.float32, spread=norm / 8)
        codec_ = make_codec(64, 4)
        back = float64(dequantize(quantize(x, codec_), codec_))
        assert np.linalg.norm(back - float64(x)) / np.linalg.norm(float64(x)) <= error

    def test_dtypes_agree_on_equal_numbers(self) -> None:
        """Numbers that all dtypes hold give equal codes from all of them."""
        x = mx.array(np.random.default_rng(4).integers(-128, 129, (64, 64)).astype(np.float32))
        for base in (False, True):
            want = quantize(x, make_codec(64, 4), base=base)
            for dtype in (mx.float16, mx.bfloat16):
                assert_same_packed(quantize(x.astype(dtype), make_codec(64, 4), base=base), want)


class TestNonFinite:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("base", [False, True])
    @pytest.mark.parametrize(("bits", "kind"), [(4, "mse"), (8, "mse"), (4, "prod")])
    def test_only_its_own_vector(self, bad: float, base: bool, bits: int, kind: str) -> None:
        """Everything else is as if that vector were zero, which is what it counts as in base and factors."""
        clean = float64(vectors((128, 16), 6)).astype(np.float32)
        clean[70] = 0
        dirty = clean.copy()
        dirty[70, 5] = bad
        codec_ = make_codec(16, bits, kind=kind)
        got, want = (quantize(mx.array(x), codec_, base=base) for x in (dirty, clean))
        others = mx.array(np.delete(np.arange(128), 70))
        for name, array in got.arrays().items():
            per_vector = "words" in name or "scales" in name
            pick = others if per_vector else mx.arange(array.shape[0])
            assert_same_bits(array[pick], getattr(want, name)[pick], name)
        assert np.isnan(float64(got.scales)[70])
        zero = quantize(mx.zeros((1, 16)), codec_)
        assert_same_bits(got.words[70], zero.words[0])
        if kind == "prod":
            assert got.sign_scales is not None
            assert np.isnan(float64(got.sign_scales)[70])
        back = float64(dequantize(got, codec_))
        assert np.isnan(back[70]).all()
        assert np.isfinite(np.delete(back, 70, axis=0)).all()

    @pytest.mark.parametrize("kind", ["mse", "prod"])
    def test_the_scale_is_the_quiet_nan_of_the_text(self, kind: str) -> None:
        """One pattern, so that a saved cache does not depend on the device that wrote it."""
        packed = quantize(mx.full((3, 16), mx.nan), make_codec(16, 4, kind=kind))
        assert bits_of(packed.scales).tolist() == [NAN_SCALE] * 3
        if packed.sign_scales is not None:
            assert bits_of(packed.sign_scales).tolist() == [NAN_SCALE] * 3


class TestOneVectorAtATime:
    """Codes must not depend on how many vectors come in one call."""

    @pytest.mark.parametrize("dim", [64, 80, 128, 256])
    @pytest.mark.parametrize(("bits", "kind"), [*((b, "mse") for b in ALLOWED_BITS), (3, "prod")])
    def test_equals_one_call(self, dim: int, bits: int, kind: str) -> None:
        codec_ = make_codec(dim, bits, kind=kind)
        x = vectors((2, 40, dim), bits)
        want = quantize(x, codec_)
        singles = [quantize(x[:, t : t + 1], codec_) for t in range(40)]
        for name, array in want.arrays().items():
            assert_same_bits(mx.concatenate([getattr(s, name) for s in singles], axis=1), array, name)
        alone = quantize(x[1], codec_)
        for name, array in want.arrays().items():
            assert_same_bits(getattr(alone, name), array[1], name)

    def test_three_hundred_single_calls(self) -> None:
        codec_ = make_codec(64, 4)
        x = vectors((300, 64), 0)
        words = mx.concatenate([quantize(x[t : t + 1], codec_).words for t in range(300)])
        assert_same_bits(words, quantize(x, codec_).words)


class TestEveryStageActs:
    """A stage that does nothing was found in the field: removing it must change what comes out."""

    @pytest.fixture
    def keys(self) -> mx.array:
        rng = np.random.default_rng(9)
        return mx.array((rng.standard_normal((64, 64)) * np.exp2(rng.integers(-3, 3, 64)) + 2).astype(np.float32))

    def test_signs(self, keys: mx.array, monkeypatch: pytest.MonkeyPatch) -> None:
        codec_ = make_codec(64, 4)
        before = quantize(keys, codec_, base=True)
        monkeypatch.setattr(
            "turboquant_vlm.reference.rotation.random_signs", lambda dim, seed, stream=0: np.ones(dim, np.int8)
        )
        assert differs(quantize(keys, codec_, base=True).words, before.words)

    def test_rotation(self, keys: mx.array, monkeypatch: pytest.MonkeyPatch) -> None:
        codec_ = make_codec(64, 4)
        before = quantize(keys, codec_, base=True)
        monkeypatch.setattr(codec, "rotate", lambda z, seed, stream=0: z)
        assert differs(quantize(keys, codec_, base=True).words, before.words)

    def test_base(self, keys: mx.array) -> None:
        codec_, none = make_codec(64, 4), mx.zeros((64,), mx.int8)
        with_base = quantize(keys, codec_, base=True, factors=none)
        without = quantize(keys, codec_, factors=none)
        assert differs(with_base.words, without.words)
        errors = [
            np.linalg.norm(float64(dequantize(packed, codec_)) - float64(keys)) for packed in (with_base, without)
        ]
        assert errors[0] < 0.8 * errors[1]

    def test_factors(self, keys: mx.array) -> None:
        codec_ = make_codec(64, 4)
        with_factors = quantize(keys, codec_, base=True)
        without = quantize(keys, codec_, base=True, factors=mx.zeros((64,), mx.int8))
        assert differs(with_factors.words, without.words)
        quiet = np.argsort(np.array(keys).std(axis=0))[:20]
        errors = [
            np.linalg.norm((float64(dequantize(packed, codec_)) - float64(keys))[:, quiet])
            for packed in (with_factors, without)
        ]
        assert errors[0] < 0.7 * errors[1]

    def test_sign_code_of_prod(self, keys: mx.array) -> None:
        """It makes inner products better than the codes alone, which are those of one bit less."""
        codec_ = make_codec(64, 3, kind="prod")
        packed = quantize(keys, codec_)
        alone = Packed(words=packed.words, scales=packed.scales)
        assert_same_packed(alone, quantize(keys, make_codec(64, 2)))
        assert differs(dequantize(packed, codec_), dequantize(alone, codec_))
        q = np.random.default_rng(1).standard_normal((64, 64))
        exact_products = np.sum(q * float64(keys), axis=1)
        errors = [
            np.linalg.norm(np.sum(q * float64(dequantize(p, codec_)), axis=1) - exact_products) for p in (packed, alone)
        ]
        assert errors[0] < errors[1]

    def test_seed_and_width(self, keys: mx.array) -> None:
        seen = [quantize(keys, make_codec(64, 4, seed=seed)).words for seed in (0, 1)]
        assert differs(*seen)


def test_prod_inner_products_are_unbiased() -> None:
    """Slope 1 within the 99 % confidence interval, for the remainder's sign code as for the codes."""
    rng = np.random.default_rng(12)
    for dim in (64, 128):
        x, q = rng.standard_normal((2, 4000, dim))
        for bits in (2, 3, 4):
            codec_ = make_codec(dim, bits, kind="prod")
            x32 = mx.array(x.astype(np.float32))
            back = float64(dequantize(quantize(x32, codec_), codec_))
            want, got = np.sum(q * float64(x32), axis=1), np.sum(q * back, axis=1)
            slope = np.sum(want * got) / np.sum(want**2)
            noise = np.std(got - slope * want) / np.sqrt(np.sum(want**2))
            assert abs(slope - 1) < 2.576 * noise + 2**-12, (dim, bits)


def test_arrays_survive_a_round_trip_through_a_file(tmp_path: object) -> None:
    codec_ = make_codec(64, 5, kind="prod")
    packed = quantize(vectors((128, 64), 3), codec_, base=True)
    path = f"{tmp_path}/packed.safetensors"
    mx.save_safetensors(path, packed.arrays())
    loaded = Packed(**mx.load(path))
    assert_same_packed(loaded, packed)
    assert_same_bits(dequantize(loaded, codec_), dequantize(packed, codec_))
    assert packed.nbytes == sum(a.nbytes for a in packed.arrays().values())


def test_pack_is_what_quantize_stores() -> None:
    """Words are the layout of `packing`, not a private one."""
    for bits in ALLOWED_BITS:
        codec_ = make_codec(72, bits)
        words = quantize(vectors((5, 72), 0), codec_).words
        assert_same_bits(pack(unpack(words, bits, 72), bits), words)
