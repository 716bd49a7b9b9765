"""The integer tools of the reference against Python's own integers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_helpers import PROPERTY, assert_same_bits, bits_of

from turboquant_vlm.reference import integers

HALF_MAX = Fraction(65504)


def int64(values: list[int]) -> mx.array:
    return mx.array(np.array(values, np.int64))


def int32(values: list[int]) -> mx.array:
    return mx.array(np.array(values, np.int32))


def half_even(x: Fraction) -> int:
    """Python's round on a fraction: nearest, halves to even."""
    return round(x)


def binade(x: Fraction) -> int:
    """e with 2^(e-1) <= x < 2^e."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while x >= Fraction(2) ** e:
        e += 1
    while x < Fraction(2) ** (e - 1):
        e -= 1
    return e


def nearest_float(x: Fraction, mantissa: int, smallest: int) -> Fraction:
    """The nearest binary float of `mantissa` bits whose unit is at least 2^smallest."""
    if x == 0:
        return x
    unit = Fraction(2) ** max(binade(abs(x)) - mantissa, smallest)
    return half_even(x / unit) * unit


# Numbers around powers of two, where bit lengths, roots and roundings change.
EDGES = sorted({max(0, 2**k + d) for k in range(61) for d in (-2, -1, 0, 1, 2)} | {2**62 - 1, 2**62 - 2})


class TestPowersOfTwo:
    def test_every_exponent(self) -> None:
        exponents = list(range(-126, 128))
        want = np.ldexp(np.float32(1), np.array(exponents)).astype(np.float32)
        assert_same_bits(integers.pow2(int32(exponents)), mx.array(want))

    def test_clamped_outside_the_normal_range(self) -> None:
        got = np.array(integers.pow2(int32([-127, -1000, -(2**20), 128, 500])))
        assert got.tolist() == [2.0**-126] * 3 + [2.0**127] * 2

    @pytest.mark.parametrize("e", [-125, -80, -1, 0, 1, 13, 128])
    def test_float_exponent_bounds_its_number(self, e: int) -> None:
        low = np.float32(2.0 ** (e - 1))
        high = np.nextafter(np.float32(2.0**e) if e < 128 else np.float32(np.inf), np.float32(0))
        assert np.array(integers.float_exponent(mx.array(np.array([low, high])))).tolist() == [e, e]


class TestSnap:
    @PROPERTY
    @given(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
        st.sampled_from([12, 13]),
    )
    def test_is_the_rounding_of_the_text(self, x: list[float], bits: int) -> None:
        got, e, finite = integers.snap(mx.array(np.array(x, np.float32)), bits)
        assert finite.item() is True
        largest = max(abs(Fraction(value)) for value in x)
        if largest < Fraction(2) ** -80:
            assert e.item() == -79
            assert np.array(got).tolist() == [0] * len(x)
            return
        assert Fraction(2) ** (e.item() - 1) <= largest < Fraction(2) ** e.item()
        assert np.array(got).tolist() == [half_even(Fraction(value) * Fraction(2) ** (bits - e.item())) for value in x]
        assert 2 ** (bits - 1) <= np.abs(np.array(got)).max() <= 2**bits

    @PROPERTY
    @given(st.lists(st.integers(-(2**13) + 1, 2**13 - 1), min_size=1, max_size=9), st.integers(-60, 100))
    def test_integers_of_13_bits_and_their_scalings_are_exact(self, numbers: list[int], k: int) -> None:
        got, e, _ = integers.snap(mx.array(np.ldexp(np.array(numbers, np.float32), k)))
        unit = Fraction(2) ** (e.item() - 13)
        restored = [value * unit for value in np.array(got).tolist()]
        assert restored == [number * Fraction(2) ** k for number in numbers]

    def test_ties_go_to_even_and_a_carry_reaches_2_to_the_13(self) -> None:
        x = np.array([4096.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
        got, e, _ = integers.snap(mx.array(x))
        assert e.item() == 13
        assert np.array(got).tolist() == [4096, 0, 2, 2, 0, -2, -2]
        got, e, _ = integers.snap(mx.array(np.array([8191.5], np.float32)))
        assert (got.item(), e.item()) == (8192, 13)

    @pytest.mark.parametrize(
        ("x", "e"),
        [
            (0.0, -79),
            (-0.0, -79),
            (float(np.nextafter(np.float32(2.0**-80), np.float32(0))), -79),
            (1e-40, -79),
            (2.0**-80, -79),
        ],
    )
    def test_threshold_of_zero(self, x: float, e: int) -> None:
        got, exponent, finite = integers.snap(mx.array(np.array([x, 0.0], np.float32)))
        # 2^-80 itself is the smallest number that counts, with the exponent that zero has too.
        assert np.array(got).tolist() == [2**12 if x == 2.0**-80 else 0, 0]
        assert (exponent.item(), finite.item()) == (e, True)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_non_finite_vectors_are_zero_and_remembered(self, bad: float) -> None:
        x = np.ones((3, 4), np.float32)
        x[1, 2] = bad
        got, e, finite = integers.snap(mx.array(x))
        assert np.array(finite).ravel().tolist() == [True, False, True]
        assert np.array(got).tolist() == [[2**12] * 4, [0] * 4, [2**12] * 4]
        assert np.array(e).ravel().tolist() == [1, -79, 1]

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_every_number_of_a_short_dtype(self, dtype: mx.Dtype) -> None:
        """One coordinate a vector: all 65,536 patterns, subnormal fp16 included, against NumPy."""
        x = mx.array(np.arange(65536, dtype=np.uint16)).view(dtype)
        got, e, finite = (np.array(a).ravel() for a in integers.snap(x[:, None]))
        with np.errstate(invalid="ignore"):
            wide = np.array(x.astype(mx.float32)).astype(np.float64)
        assert finite.tolist() == np.isfinite(wide).tolist()
        counts = finite & (np.abs(wide) >= 2.0**-80)
        assert not got[~counts].any()
        assert (e[~counts] == -79).all()
        assert (np.frexp(wide[counts])[1] == e[counts]).all()
        # At most 11 bits, so nothing is rounded.
        assert (got[counts] * np.exp2(e[counts] - 13.0) == wide[counts]).all()

    def test_largest_float32(self) -> None:
        largest = float(np.finfo(np.float32).max)
        got, e, _ = integers.snap(mx.array(np.array([largest, -largest, 1.0], np.float32)))
        assert (np.array(got).tolist(), e.item()) == ([8192, -8192, 0], 128)


class TestSnapWide:
    @PROPERTY
    @given(st.lists(st.integers(-(2**61), 2**61), min_size=1, max_size=6))
    def test_equals_the_text_in_integers(self, numbers: list[int]) -> None:
        got, e = integers.snap_wide(int64(numbers))
        largest = max(abs(n) for n in numbers)
        if largest == 0:
            assert (np.array(got).tolist(), e.item()) == ([0] * len(numbers), -79)
            return
        assert e.item() == largest.bit_length()
        unit = Fraction(2) ** (e.item() - 13)
        assert np.array(got).tolist() == [half_even(n / unit) for n in numbers]

    def test_equals_snap_where_float32_is_exact(self) -> None:
        numbers = np.random.default_rng(0).integers(-(2**23), 2**23, (40, 8))
        narrow, e, _ = integers.snap(mx.array(numbers.astype(np.int32)))
        wide, wide_e = integers.snap_wide(mx.array(numbers))
        assert_same_bits(wide, narrow)
        assert_same_bits(wide_e, e)


class TestBitLength:
    def test_around_every_power_of_two(self) -> None:
        got = np.array(integers.bit_length(int64(EDGES))).tolist()
        assert got == [n.bit_length() for n in EDGES]

    @PROPERTY
    @given(st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=20))
    def test_anywhere(self, numbers: list[int]) -> None:
        assert np.array(integers.bit_length(int64(numbers))).tolist() == [n.bit_length() for n in numbers]


class TestRoundShift:
    def test_every_small_number(self) -> None:
        numbers = list(range(-70, 71))
        for shift in range(7):
            got = np.array(integers.round_shift(int64(numbers), int64([shift]))).tolist()
            assert got == [half_even(Fraction(n, 2**shift)) for n in numbers], shift

    @PROPERTY
    @given(st.integers(-(2**61) + 1, 2**61 - 1), st.integers(0, 60))
    def test_anywhere(self, n: int, shift: int) -> None:
        assert integers.round_shift(int64([n]), int64([shift])).item() == half_even(Fraction(n, 2**shift))

    @PROPERTY
    @given(st.integers(0, 2**50), st.integers(1, 60))
    def test_sticky_breaks_ties_upwards(self, n: int, shift: int) -> None:
        got = integers.round_shift(int64([n]), int64([shift]), mx.array([True])).item()
        assert got == half_even(Fraction(n * 2 + 1, 2 ** (shift + 1)))


class TestSquareRoot:
    def test_edges(self) -> None:
        roots = sorted({min(2**k + d, 2**26) for k in range(27) for d in (-1, 0, 1)})
        numbers = sorted({min(max(0, r * r + d), 2**52) for r in roots for d in (-1, 0, 1)})
        assert np.array(integers.isqrt(int64(numbers))).tolist() == [math.isqrt(n) for n in numbers]

    def test_small_numbers(self) -> None:
        numbers = list(range(5000))
        assert np.array(integers.isqrt(int64(numbers))).tolist() == [math.isqrt(n) for n in numbers]

    @PROPERTY
    @given(st.lists(st.integers(0, 2**26), min_size=1, max_size=50), st.integers(-1, 1))
    def test_around_squares(self, roots: list[int], d: int) -> None:
        numbers = [min(max(0, r * r + d), 2**52) for r in roots]
        assert np.array(integers.isqrt(int64(numbers))).tolist() == [math.isqrt(n) for n in numbers]


def half_of_the_text(numerator: int, denominator: int, shift: int) -> Fraction:
    if denominator == 0:
        return Fraction(0)
    exact = Fraction(numerator, denominator) * Fraction(2) ** shift
    return min(nearest_float(exact, 11, -24), HALF_MAX)


def check_half(cases: list[tuple[int, int, int]]) -> None:
    numerator, denominator, shift = (list(column) for column in zip(*cases, strict=True))
    got = np.array(integers.half_from_ratio(int64(numerator), int64(denominator), int32(shift)))
    assert got.dtype == np.float16
    assert not np.signbit(got).any()
    want = [half_of_the_text(*case) for case in cases]
    assert [Fraction(float(g)) for g in got] == want


class TestHalfFromRatio:
    @PROPERTY
    @given(
        st.lists(st.tuples(st.integers(0, 2**37), st.integers(0, 2**46), st.integers(-60, 60)), min_size=1, max_size=30)
    )
    def test_numbers_that_the_codec_makes(self, cases: list[tuple[int, int, int]]) -> None:
        check_half(cases)

    @PROPERTY
    @given(st.lists(st.tuples(st.integers(0, 2**49 - 1), st.integers(0, 2**49 - 1), st.integers(-80, 80)), min_size=1))
    def test_the_whole_range_of_its_docstring(self, cases: list[tuple[int, int, int]]) -> None:
        check_half(cases)

    def test_every_half_comes_back(self) -> None:
        """All non-negative finite halves as m / 1 2^-24, subnormals included."""
        values = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
        multiples = (values.astype(np.float64) * 2.0**24).astype(np.int64)
        got = integers.half_from_ratio(mx.array(multiples), int64([1]), int32([-24]))
        assert_same_bits(got, mx.array(values))

    def test_ties_between_halves_go_to_even_and_a_hair_decides(self) -> None:
        cases = []
        for mantissa in (1024, 1025, 2046, 2047):
            for k in (-34, -30, -10, 0, 4):
                # mantissa + 1/2 exactly, then a little less and a little more.
                cases += [(2 * mantissa + 1, 2, k), ((2 * mantissa + 1) * 2**20 - 1, 2**21, k)]
                cases += [((2 * mantissa + 1) * 2**20 + 1, 2**21, k)]
        check_half(cases)

    def test_ties_among_subnormals(self) -> None:
        check_half([(2 * m + 1, 2, -24) for m in range(1100)])
        check_half([(1, 2, -24), (1, 3, -23), (3, 2**20, -5), (1, 1, -60)])

    def test_limits(self) -> None:
        check_half([(65504, 1, 0), (65519, 1, 0), (65520, 1, 0), (65536, 1, 0), (1, 1, 60), (0, 5, 0), (5, 0, 0)])
        got = integers.half_from_ratio(int64([65520, 1, 5, 0]), int64([1, 1, 0, 7]), int32([0, 40, 0, 0]))
        assert bits_of(got).tolist() == [0x7BFF, 0x7BFF, 0, 0]


class TestQuotient:
    @PROPERTY
    @given(
        st.lists(
            st.tuples(
                st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False),
                st.floats(1.0, 2.0**40, width=32),
                st.integers(-160, 160),
            ),
            min_size=1,
            max_size=30,
        )
    )
    def test_is_correctly_rounded(self, cases: list[tuple[float, float, int]]) -> None:
        a, b, k = (list(column) for column in zip(*cases, strict=True))
        got = integers.quotient_times_pow2(
            mx.array(np.array(a, np.float32)), mx.array(np.array(b, np.float32)), int32(k)
        )
        for result, x, y, exponent in zip(np.array(got).tolist(), a, b, k, strict=True):
            # The quotient is rounded first, then scaled.
            exact = nearest_float(Fraction(x) / Fraction(y), 24, -10000) * Fraction(2) ** exponent
            if abs(exact) < Fraction(2) ** -100:
                assert result == 0
                assert math.copysign(1, result) == 1
            elif abs(exact) >= Fraction(2) ** 128:
                assert result == math.copysign(math.inf, x)
            else:
                assert Fraction(result) == exact

    def test_hard_quotients(self) -> None:
        """Quotients near a rounding boundary: 2^24 - 1 over its neighbours, and sevenths."""
        rng = np.random.default_rng(1)
        a = np.concatenate([rng.integers(2**23, 2**24, 3000), np.arange(2**24 - 300, 2**24)]).astype(np.float32)
        b = np.concatenate([rng.integers(2**23, 2**24, 3000), np.arange(2**24 - 1, 2**24 - 301, -1)]).astype(np.float32)
        got = np.array(integers.quotient_times_pow2(mx.array(a), mx.array(b), int32([0])))
        # NumPy's float32 division is IEEE's.
        assert (got == a / b).all()

    @pytest.mark.parametrize(
        ("a", "b", "k", "want"),
        [
            (0.0, 3.0, 500, 0.0),
            (1.0, 1.0, -100, 2.0**-100),
            (1.0, 1.0, -101, 0.0),
            (-1.0, 1.0, -101, 0.0),
            (1.0, 1.0, 127, 2.0**127),
            (1.0, 1.0, 128, math.inf),
            (-1.0, 1.0, 128, -math.inf),
            (1.0, 2.0, 128, 2.0**127),
        ],
    )
    def test_limits(self, a: float, b: float, k: int, want: float) -> None:
        got = integers.quotient_times_pow2(
            mx.array(np.array([a], np.float32)), mx.array(np.array([b], np.float32)), int32([k])
        )
        assert_same_bits(got, mx.array(np.array([want], np.float32)))


def extremes(rng: np.random.Generator, shape: tuple[int, ...], limit: int) -> np.ndarray:
    """Integers within +-limit, half of them at the limits."""
    inner = rng.integers(-limit, limit + 1, shape)
    return np.where(rng.random(shape) < 0.5, inner, limit * rng.choice([-1, 1], shape)).astype(np.int32)


# (largest left, largest right): codes and queries, halves against raw vectors, rotations of 14 and of 17 bits.
RANGES = [(2**12, 127), (2**13, 127), (64, 2**14), (2**14, 1), (2**17, 1), (2**13, 1), (2**10, 2**10)]


class TestMatrixProducts:
    @pytest.mark.parametrize(("left", "right"), RANGES)
    @pytest.mark.parametrize("terms", [1, 37, 1024])
    def test_both_paths_equal_int64(self, left: int, right: int, terms: int) -> None:
        rng = np.random.default_rng(left + right + terms)
        a, b = extremes(rng, (3, 5, terms), left), extremes(rng, (3, terms, 4), right)
        # All terms of one sign, the largest sum there is.
        a[0, 0], b[0, :, 0] = left, right
        a[0, 1], b[0, :, 1] = -left, right
        want = a.astype(np.int64) @ b.astype(np.int64)
        assert np.abs(want).max() == left * right * terms < 2**31
        for path in (integers._host_matmul, integers._digit_matmul, integers.integer_matmul):
            got = np.array(path(mx.array(a), mx.array(b)))
            assert got.dtype == np.int32
            assert (got == want).all(), path.__name__

    def test_digits_at_the_ends_of_their_range(self) -> None:
        """A low digit of -128 and a high digit of 128, 1024 times: partial sums of exactly 2^24."""
        a = np.full((1, 1024), 2**15 - 128, np.int32)
        b = np.full((1024, 1), -128, np.int32)
        for path in (integers._host_matmul, integers._digit_matmul):
            wide = a.astype(np.int64) @ b.astype(np.int64) // 4
            assert np.array(path(mx.array(a[:, :256]), mx.array(b[:256]))).tolist() == wide.tolist()

    @PROPERTY
    @given(st.integers(-(2**15), 2**15))
    def test_halves(self, n: int) -> None:
        high, low = (part.item() for part in integers.halves(int32([n])))
        assert 128 * high + low == n
        assert -64 <= low <= 63
        assert high == (n + 64) >> 7

    def test_split_product_rounds_once(self) -> None:
        rng = np.random.default_rng(5)
        a, b = extremes(rng, (6, 1024), 2**13), extremes(rng, (1024, 7), 2**13)
        a[0], b[:, 0] = 2**13, 2**13
        high = ((a + 64) >> 7).astype(np.int64)
        low = a - 128 * high
        exact_high, exact_low = high @ b.astype(np.int64), low @ b.astype(np.int64)
        want = np.float32(128) * exact_high.astype(np.float32) + exact_low.astype(np.float32)
        assert_same_bits(integers.split_matmul(mx.array(a), mx.array(b)), mx.array(want))


def pair(a: float, x: int) -> tuple[mx.array, mx.array]:
    return mx.array(np.array([a], np.float32)), int32([x])


def merged(left: tuple[float, int], right: tuple[float, int]) -> tuple[float, int]:
    a, x = integers.merge(*pair(*left), *pair(*right))
    return a.item(), x.item()


class TestMerge:
    def test_adds_at_the_larger_exponent(self) -> None:
        assert merged((3.0, 5), (4.0, 3)) == (4.0, 5)
        assert merged((4.0, 3), (3.0, 5)) == (4.0, 5)

    @PROPERTY
    @given(
        st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda a: a == 0 or abs(a) >= 2.0**-64), st.integers(-500, 500)
    )
    def test_identity_is_neutral_on_both_sides(self, a: float, x: int) -> None:
        identity = (0.0, integers.IDENTITY_EXPONENT)
        assert merged((a, x), identity) == (a, x)
        assert merged(identity, (a, x)) == (a, x)
        assert merged(identity, identity) == identity

    @PROPERTY
    @given(
        st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda a: a == 0 or abs(a) >= 2.0**-64),
        st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda a: a == 0 or abs(a) >= 2.0**-64),
        st.integers(-100, 100),
        st.integers(-100, 100),
    )
    def test_is_one_rounded_addition_and_commutes(self, a: float, b: float, x: int, y: int) -> None:
        m = max(x, y)

        def shifted(value: float, k: int) -> Fraction:
            small = Fraction(value) * Fraction(2) ** k
            return Fraction(0) if k < -40 or abs(small) < Fraction(2) ** -64 else small

        total = nearest_float(shifted(a, x - m) + shifted(b, y - m), 24, -10000)
        want = Fraction(0) if abs(total) < Fraction(2) ** -64 else total
        value, exponent = merged((a, x), (b, y))
        assert (Fraction(value), exponent) == (want, m)
        assert math.copysign(1, value) == 1 or value != 0
        assert merged((b, y), (a, x)) == (value, exponent)

    def test_drops_beyond_40_and_below_64(self) -> None:
        assert merged((2.0**30, -40), (0.0, 0)) == (2.0**-10, 0)
        assert merged((2.0**30, -41), (0.0, 0)) == (0.0, 0)
        assert merged((2.0**-64, 0), (0.0, 0)) == (2.0**-64, 0)
        assert merged((2.0**-64, -1), (0.0, 0)) == (0.0, 0)
        # A sum that cancels leaves no negative zero.
        value, _ = merged((-1.0, 0), (1.0, 0))
        assert math.copysign(1, value) == 1
