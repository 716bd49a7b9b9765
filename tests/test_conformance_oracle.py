"""The oracle against first principles: rationals, quadrature, words written out by hand, float64 softmax."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from turboquant_vlm.conformance import oracle_attention as attention
from turboquant_vlm.conformance import oracle_codebook as book
from turboquant_vlm.conformance import oracle_codec as coding
from turboquant_vlm.conformance import oracle_numbers as numbers
from turboquant_vlm.conformance import oracle_rotation as rotation
from turboquant_vlm.conformance import oracle_tokens as tokens

Array = Any
WIDTHS = (1, 2, 3, 4, 5, 6, 8)


# ---- numbers -------------------------------------------------------------------------------------


@given(st.integers(-(2**40), 2**40), st.integers(-80, 20))
def test_round_shift_is_python_round_of_the_rational(m: int, k: int) -> None:
    assert int(numbers.round_shift(np.array(m), k)) == round(Fraction(m) * Fraction(2) ** k)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_snap_is_the_definition_in_rationals(values: list[float]) -> None:
    x = np.array(values, np.float32)
    got, e, bad = numbers.snap_floats(x, 13)
    largest = max(abs(Fraction(float(v))) for v in x)
    assert not bad
    if largest < Fraction(1, 2**80):
        assert int(e) == -79
        assert not got.any()
        return
    assert Fraction(2) ** (int(e) - 1) <= largest < Fraction(2) ** int(e)
    assert got.tolist() == [round(Fraction(float(v)) * Fraction(2) ** (13 - int(e))) for v in x]


@given(st.lists(st.integers(-(2**33), 2**33), min_size=1, max_size=4), st.integers(-3, 3))
def test_snap_of_integers_is_snap_of_the_same_floats(values: list[int], k: int) -> None:
    small = [v % 2**20 for v in values]
    x, e = numbers.snap_integers(np.array(small, np.int64), 12, k)
    y, f, _ = numbers.snap_floats(np.ldexp(np.array(small, np.float32), k), 12)
    assert x.tolist() == y.tolist()
    assert int(e) == int(f)


ALL_FP16 = np.arange(0x7C00, dtype=np.uint16)
FP16_VALUES = [Fraction(float(v)) for v in ALL_FP16.view(np.float16)]


@given(st.integers(1, 2**44), st.integers(1, 2**40), st.integers(-40, 40))
@settings(max_examples=300)
def test_fp16_of_a_ratio_is_the_nearest_of_all_fp16(num: int, den: int, k: int) -> None:
    value = Fraction(num, den) * Fraction(2) ** k
    bits = numbers.fp16_from_ratio(num, den, k)
    if value > 65504:
        assert bits == 0x7BFF
        return
    gap = abs(FP16_VALUES[bits] - value)
    for other in (bits - 1, bits + 1):
        if 0 <= other < len(FP16_VALUES):
            distance = abs(FP16_VALUES[other] - value)
            assert gap < distance or (gap == distance and bits % 2 == 0)


@pytest.mark.parametrize(("num", "den", "k", "bits"), [
    (0, 1, 0, 0x0000), (1, 1, 0, 0x3C00), (2049, 2048, 0, 0x3C00), (2051, 2048, 0, 0x3C02), (1, 1, -25, 0),
    (3, 1, -25, 0x0002), (1, 1, -24, 0x0001), (65504, 1, 0, 0x7BFF), (65519, 1, 0, 0x7BFF),
    (1, 1, 16, 0x7BFF), (2047, 1, -25, 0x0400),
])  # fmt: skip
def test_fp16_of_a_ratio_at_its_edges(num: int, den: int, k: int, bits: int) -> None:
    assert numbers.fp16_from_ratio(num, den, k) == bits


@given(st.floats(2.0**-60, 2.0**60, width=32), st.floats(1, 2.0**30, width=32), st.booleans())
def test_division_is_correctly_rounded(o: float, n: float, negative: bool) -> None:
    o = -o if negative else o
    got = numbers.divide32(np.array([o], np.float32), np.array([n], np.float32))[0]
    assert got == numbers.nearest32(Fraction(o) / Fraction(n))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_round_to_the_nearest_neighbour_halves_to_even(dtype: str) -> None:
    top = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    words = np.arange(1, top - 1, dtype=np.uint16)
    low, high = numbers.widen(words, dtype), numbers.widen(words + 1, dtype)
    half = ((low.astype(np.float64) + high.astype(np.float64)) / 2).astype(np.float32)
    assert (numbers.cast(low, dtype) == words).all()
    exact = half.astype(np.float64) * 2 == low.astype(np.float64) + high.astype(np.float64)
    even = np.where(words % 2 == 0, words, words + 1)
    assert (numbers.cast(half, dtype) == even)[exact].all()
    beyond = np.nextafter(half, np.float32(np.inf))
    assert (numbers.cast(beyond, dtype) == words + 1)[exact].all()
    assert numbers.cast(np.array([np.nan, -np.inf], np.float32), dtype).tolist() == [
        top | (0x200 if top == 0x7C00 else 0x40),
        top | 0x8000,
    ]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-200, 200))
def test_logit_rounds_the_exact_product_and_clamps(y: float, k: int) -> None:
    exact = round(Fraction(y) * Fraction(2) ** min(60, max(-100, k)))
    expected = max(-(2**28), min(2**28, exact))
    assert int(numbers.logit(np.array(y, np.float32), np.array(k))) == expected


@given(st.lists(st.integers(-8192, 8192), min_size=1, max_size=1024), st.data())
@settings(max_examples=50)
def test_dot14_in_rationals(q: list[int], data: Any) -> None:
    x = data.draw(st.lists(st.integers(-16384, 16384), min_size=len(q), max_size=len(q)))
    high = [(v + 64) >> 7 for v in q]
    low = [v - 128 * h for v, h in zip(q, high, strict=True)]
    parts = [
        Fraction(float(numbers.nearest32(Fraction(sum(a * b for a, b in zip(p, x, strict=True))))))
        for p in (high, low)
    ]
    got = numbers.dot14(np.array([q], np.int64), np.array([x], np.int64))[0, 0]
    assert got == numbers.nearest32(128 * parts[0] + parts[1])


# ---- rotation and codebooks ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", rotation.SUPPORTED_DIMS)
def test_hadamard_matrices_are_orthogonal(dim: int) -> None:
    h = rotation.hadamard(dim)
    assert (np.abs(h) == 1).all()
    assert (numbers.exact_matmul(h, h.T) == dim * np.eye(dim, dtype=np.int64)).all()


def test_head_sizes_of_known_models_are_supported() -> None:
    known = {64, 72, 80, 88, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576}
    assert known <= set(rotation.SUPPORTED_DIMS)
    assert len(rotation.SUPPORTED_DIMS) == 59


def test_first_row_and_column_of_each_core() -> None:
    assert rotation.hadamard(12)[0].tolist() == [1] * 12
    assert rotation.hadamard(12)[:, 0].tolist() == [1] + [-1] * 11
    # 3 = 5^2 modulo 11 is a square, 2 is not: rows 4 and 3 against column 1.
    assert rotation.hadamard(12)[4, 1] == 1
    assert rotation.hadamard(12)[3, 1] == -1
    # Paley II: C is zero on its diagonal, so the diagonal blocks are the second matrix alone.
    assert rotation.hadamard(28)[:2, :2].tolist() == [[1, -1], [-1, -1]]
    assert rotation.hadamard(28)[:2, 2:4].tolist() == [[1, 1], [1, -1]]


def test_splitmix_matches_its_published_stream() -> None:
    assert [rotation.splitmix64(0, w) for w in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("dim", [8, 12, 68, 128, 1000 - 200])
def test_unrotate_inverts_rotate_up_to_the_dimension(dim: int) -> None:
    z = np.arange(-dim, dim, dtype=np.int64).reshape(2, dim)
    s = rotation.signs(dim, 77)
    assert (rotation.unrotate(rotation.rotate(z, s), s) == dim * z).all()


@pytest.mark.parametrize(("dim", "bits"), [(8, 1), (8, 3), (12, 6), (64, 4), (128, 2), (128, 6), (1024, 5)])
def test_centroids_are_the_means_of_their_cells(dim: int, bits: int) -> None:
    half = book.lloyd_max(dim, bits)
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(half)), dim**0.5]

    def density(t: float) -> float:
        return float((1 - t * t / dim) ** ((dim - 3) / 2))

    for centroid, low, high in zip(half, edges[:-1], edges[1:], strict=True):
        mass = quad(density, low, high, epsabs=0, epsrel=1e-12)[0]
        mean = quad(lambda t: t * density(t), low, high, epsabs=0, epsrel=1e-12)[0] / mass
        assert centroid == pytest.approx(mean, rel=1e-8)


def test_large_dimensions_approach_the_gaussian_quantizer() -> None:
    assert book.lloyd_max(1024, 1)[0] == pytest.approx((2 / np.pi) ** 0.5, rel=1e-3)
    assert book.lloyd_max(1024, 2) == pytest.approx((0.4528, 1.510), rel=3e-3)


def test_codebook_integers_are_far_from_a_rounding_edge() -> None:
    for dim in rotation.SUPPORTED_DIMS:
        for bits in range(1, 7):
            levels, k = book.codebook(dim, bits)
            assert book.rounding_margin(dim, bits) > 1e-6
            assert list(levels) == sorted(set(levels))
            assert levels[-1] == 127
            assert 0 < k < 2**15


# ---- packing, by hand ----------------------------------------------------------------------------


def _centroids(codes: list[int], dim: int, bits: int) -> Array:
    """Centroids of b-bit codes as section 3.7 numbers them."""
    if bits == 8:
        return np.array(codes)
    positive = [v for v in book.codebook(dim, bits)[0] if v > 0]
    rank_bits = (1 << (bits - 1)) - 1
    return np.array([(-1 if c >> (bits - 1) else 1) * positive[c & rank_bits] for c in codes])


@pytest.mark.parametrize(("dim", "bits", "codes", "words"), [
    (8, 4, [0, 1, 2, 3, 12, 13, 14, 15], [0xFEDC3210]),
    (12, 4, [1] * 8 + [2, 4, 8, 15], [0x11111111, 0x0000F842]),
    # Group 0 in the lower two bits of each nibble, group 1 in the upper two.
    (12, 2, [3, 0, 1, 2, 3, 0, 1, 2, 1, 1, 2, 3], [0x2103_2103 | 0x0000_C844]),
    # Four groups of one word take bits 0, 1, 2, 3 of each nibble.
    (28, 1, [1] * 8 + [0] * 8 + [1, 0, 0, 0, 0, 0, 0, 1] + [0, 1, 0, 0],
     [0x11111111 | 0x40000004 | 0x00000080]),
    # A last quad with one group: one word, spare bits zero.
    (8, 3, [7, 0, 1, 2, 3, 4, 5, 6], [0x65432107]),
    # Four groups: the fourth group's bits 0, 1, 2 go to bit 3 of words 0, 1, 2.
    (28, 3, [1] * 8 + [2] * 8 + [4] * 8 + [5, 2, 1, 7],
     [0x1111_1111 | 0x8808, 0x2222_2222 | 0x8080, 0x4444_4444 | 0x8008]),
    (12, 5, [16, 1, 31, 0, 0, 0, 0, 0, 0, 0, 0, 17], [0x00000F10, 0x00001000, 0x00000101 | 0x00002000]),
    (12, 6, [16, 33, 63, 0, 0, 0, 0, 0, 48, 0, 0, 1], [0x00000F10, 0x00001000, 0x00000321 | 0x0000000C]),
    (8, 8, [1, -1, 127, -127, 0, 2, 3, -128 + 1], [0x817FFF01, 0x81030200]),
])  # fmt: skip
def test_packing_by_hand(dim: int, bits: int, codes: list[int], words: list[int]) -> None:
    c = _centroids(codes, dim, bits)
    packed = coding.pack(c, dim, bits)
    assert [hex(w) for w in packed] == [hex(w) for w in words]
    assert (coding.unpack(packed, dim, bits) == c).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [8, 12, 20, 28, 36, 64, 84, 100])
def test_unpack_inverts_pack(dim: int, bits: int) -> None:
    rng = np.arange(dim * 3).reshape(3, dim) * 7919 % 251
    c = rng - 125 if bits == 8 else np.array(book.codebook(dim, bits)[0])[rng % (1 << bits)]
    words = coding.pack(c, dim, bits)
    assert words.shape == (3, coding.word_count(dim, bits))
    assert (coding.unpack(words, dim, bits) == c).all()


# ---- codes and scale -----------------------------------------------------------------------------


def _vectors(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [8, 20, 64, 100])
def test_scale_makes_the_estimate_unbiased(dim: int, bits: int) -> None:
    """<x, x^> = <x, x>: exactly with S / N, and up to half an ulp of fp16 with the stored scale."""
    codec = coding.OracleCodec(dim, bits, 3)
    z, e, bad = numbers.snap_floats(_vectors(dim + bits, 5, dim), 13)
    codes = coding.encode_snapped(z, e - 13, bad, codec)
    estimate = rotation.unrotate(codes.c, codec.s)
    for t in range(5):
        s = int((z[t] ** 2).sum())
        n = int((z[t] * estimate[t]).sum())
        assert Fraction(s, n) * n == s
        sigma = Fraction(float(numbers.fp16_value(codes.scale)[t]))
        read = sigma * n * Fraction(2) ** (-codec.kappa) / Fraction(2) ** int(e[t] - 13)
        assert abs(read / s - 1) <= Fraction(1, 2**11)


@pytest.mark.parametrize(
    ("bits", "worst"), [(1, 0.37), (2, 0.13), (3, 0.04), (4, 0.013), (5, 0.005), (6, 0.002), (8, 0.0002)]
)
def test_distortion_is_that_of_the_quantizer(bits: int, worst: float) -> None:
    codec = coding.OracleCodec(128, bits)
    x = _vectors(bits, 64, 128)
    codes, _ = coding.encode(x, codec, False, None)
    error = coding.decode(codes, codec, None, None) - x
    # The unbiased scale divides by the correlation, which adds to the error of coarse codes.
    limit = worst / (1 - worst) * 1.1
    assert float((error**2).sum() / (x**2).sum()) < limit


def test_prod_is_closer_in_inner_products_than_its_first_codes() -> None:
    x, y = _vectors(1, 256, 64), _vectors(2, 256, 64)
    exact = (x * y).sum(1)
    errors = {}
    for kind, bits in (("mse", 2), ("prod", 3)):
        codec = coding.OracleCodec(64, bits, 0, kind)
        codes, _ = coding.encode(x, codec, False, None)
        errors[kind] = float((((coding.decode(codes, codec, None, None) * y).sum(1) - exact) ** 2).mean())
    assert errors["prod"] < errors["mse"]


def test_base_and_factors_bring_a_spread_key_back() -> None:
    x = _vectors(3, 64, 32)
    x[:, 5] *= 100
    x[:, 6] += 50
    codec = coding.OracleCodec(32, 4)
    f = coding.tile_zero_factors(x)
    assert f[5] == -1
    assert f[0] >= 2
    codes, base = coding.encode(x, codec, True, f)
    with_base = coding.decode(codes, codec, base, f) - x
    plain_codes, _ = coding.encode(x, codec, False, None)
    plain = coding.decode(plain_codes, codec, None, None) - x
    others = [d for d in range(32) if d != 5]
    assert (with_base[:, others] ** 2).sum() < 0.25 * (plain[:, others] ** 2).sum()


# ---- tokens --------------------------------------------------------------------------------------


def test_when_tiles_are_packed() -> None:
    assert [tokens.packed_tiles(n) for n in (0, 31, 32, 95, 96, 159, 160, 224)] == [0, 0, 0, 0, 1, 1, 2, 3]


def _store(role: str, x: Array, bits: int, chunks: list[int], kind: str = "mse") -> tokens.OracleTokens:
    out = tokens.OracleTokens(
        coding.OracleCodec(x.shape[-1], bits, 1, kind), role, x.shape[0], x.shape[1], "float32"
    )
    at = 0
    for n in chunks:
        out.append(x[:, :, at : at + n])
        at += n
    return out


def test_chunks_and_short_trims_change_nothing() -> None:
    x = _vectors(4, 1, 1, 200, 8)
    whole = _store("key", x, 4, [200])
    parts = _store("key", x, 4, [90, 7, *[1] * 20, 83])
    parts.trim(32)
    parts.append(x[:, :, 168:])
    one, two = whole.rows[0][0], parts.rows[0][0]
    assert len(one.tiles) == len(two.tiles) == 2
    for a, b in zip(one.tiles, two.tiles, strict=True):
        assert (a.codes.c == b.codes.c).all()
        assert (a.codes.scale == b.codes.scale).all()
    assert (one.raw == two.raw).all()


def test_a_deep_trim_reads_dequantized_tokens() -> None:
    x = _vectors(5, 1, 1, 600, 8)
    store = _store("value", x, 4, [590, *[1] * 10])
    tile = store.decode_tile(store.rows[0][0], 1)
    store.trim(470)
    row = store.rows[0][0]
    assert len(row.raw) == 130
    assert (row.raw[64:128] == tile).all()
    assert (row.raw[:4] == x[0, 0, :4]).all()


# ---- attention -----------------------------------------------------------------------------------


@given(st.integers(0, 15 * 4096))
def test_weight_is_a_power_of_two_of_the_distance(delta: int) -> None:
    exact = 2.0**13 * 2.0 ** (-delta / 4096)
    p = int(attention.weight(np.array(delta)))
    assert p == pytest.approx(exact, abs=0.5 + exact * 2.0**-11) or (delta >> 12 > 13 and p == 0)


def test_merging_with_the_identity_changes_nothing() -> None:
    rng = np.random.default_rng(6)
    a = attention.Sum(rng.integers(-(2**24), 2**24, (5, 3)).astype(np.float32), rng.integers(-50, 50, 5))
    nothing = attention.identity(5, 3)
    for got in (attention.merge(a, nothing), attention.merge(nothing, a)):
        assert (got.a == a.a).all()
        assert (got.x == a.x).all()
    both = attention.merge(nothing, nothing)
    assert not both.a.any()
    assert (both.x == -(2**20)).all()


def test_identities_between_tiles_change_nothing_but_their_places() -> None:
    rng = np.random.default_rng(7)
    parts = [
        attention.Sum(rng.integers(1, 2**24, (1, 2)).astype(np.float32), rng.integers(-3, 3, 1))
        for _ in range(6)
    ]
    tiles = [*parts[:4], *parts[4:]]
    padded = [*tiles, attention.identity(1, 2), attention.identity(1, 2), *[attention.identity(1, 2)] * 8]
    one, two = attention.merge_tiles(tiles, 1, 2), attention.merge_tiles(padded, 1, 2)
    assert (one.a == two.a).all()
    assert (one.x == two.x).all()


def test_merge_order_is_splits_of_four_then_neighbours() -> None:
    parts = [
        attention.Sum(np.array([[v]], np.float32), np.array([0])) for v in (2**24, 1, 1, 1, 1, 1, 1, 1, 1)
    ]
    # ((2^24 + 1) + 1) + 1 stays 2^24, the second split is 4, the third is 1.
    assert attention.merge_tiles(parts, 1, 1).a[0, 0] == (2**24 + 4) + 0


def _softmax(q: Array, k: Array, v: Array, scale: float, allowed: Array, sink: float | None) -> Array:
    logits = np.where(allowed, (q.astype(np.float64) @ k.astype(np.float64).T) * scale, -np.inf)
    top = max(logits.max(), -np.inf if sink is None else sink)
    weights = np.exp(logits - top)
    return weights @ v.astype(np.float64) / (weights.sum() + (0 if sink is None else np.exp(sink - top)))


@pytest.mark.parametrize(("n", "key_bits", "value_bits", "kind", "sink"), [
    (50, 4, 4, "mse", None), (97, 8, 8, "mse", None), (300, 4, 3, "mse", 1.5), (300, 3, 8, "prod", None),
    (700, 2, 5, "mse", -2.0), (700, 6, 1, "prod", 0.0),
])  # fmt: skip
def test_attention_is_softmax_over_dequantized_tokens(
    n: int, key_bits: int, value_bits: int, kind: str, sink: float | None
) -> None:
    k, v = _vectors(n, 1, 1, n, 32), _vectors(n + 1, 1, 1, n, 20)
    k[..., 3] += 4
    keys, values = _store("key", k, key_bits, [n], kind), _store("value", v, value_bits, [n])
    q = _vectors(n + 2, 1, 2, 1, 32)
    sinks = None if sink is None else np.full(2, sink, np.float32)
    got = attention.attend(q, keys, values, 32**-0.5, attention.Mask(), sinks).view(np.float32)
    read = [np.array([*s.plain("float32").view(np.float32)[0, 0]]) for s in (keys, values)]
    for store, plain in zip((keys, values), read, strict=True):
        row = store.rows[0][0]
        for t in range(len(row.tiles)):
            start = max(4, 64 * t)
            plain[start : 64 * (t + 1)] = store.decode_tile(row, t)[start - 64 * t :]
    for h in range(2):
        exact = _softmax(q[0, h, 0], read[0], read[1], 32**-0.5, np.ones(n, bool), sink)
        assert np.abs(got[0, h, 0] - exact).max() < 3e-3 * np.abs(read[1]).max()


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    k, v, q = _vectors(1, 3, 1, 130, 8), _vectors(2, 3, 1, 130, 8), _vectors(3, 3, 2, 2, 8)
    together = attention.attend(
        q, _store("key", k, 4, [130]), _store("value", v, 4, [130]), 0.3, attention.Mask("causal")
    )
    for b in range(3):
        one = slice(b, b + 1)
        alone = attention.attend(
            q[one],
            _store("key", k[one], 4, [130]),
            _store("value", v[one], 4, [130]),
            0.3,
            attention.Mask("causal"),
        )
        assert (together[one] == alone).all()


def test_several_queries_equal_single_queries() -> None:
    k, v, q = _vectors(1, 1, 1, 162, 8), _vectors(2, 1, 1, 162, 8), _vectors(3, 1, 2, 5, 8)
    keys, values = _store("key", k, 4, [162]), _store("value", v, 4, [162])
    together = attention.attend(q, keys, values, 0.3, attention.Mask("causal"))
    for l in range(5):  # noqa: E741
        n = 162 - 4 + l
        one = attention.attend(
            q[:, :, l : l + 1],
            _store("key", k[:, :, :n], 4, [n]),
            _store("value", v[:, :, :n], 4, [n]),
            0.3,
            attention.Mask(),
        )
        assert (together[:, :, l : l + 1] == one).all()
