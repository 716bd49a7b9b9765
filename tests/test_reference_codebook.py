"""Codebooks: the committed integers, the optimum they come from, and the error that quantized vectors really have."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from scipy import integrate

from turboquant_vlm.reference import codebook, dequantize, make_codec, quantize, supported_dims
from turboquant_vlm.reference.codec import coded_centroids
from turboquant_vlm.reference.rotation import rotate_back

# Mean squared error of unit vectors for b = 1 .. 4, exact optimum (paper: .36 .117 .03 .009).
OPTIMUM = {
    64: (0.358387, 0.114526, 0.033391, 0.009132),
    128: (0.360889, 0.116000, 0.033966, 0.009315),
    256: (0.362136, 0.116740, 0.034256, 0.009408),
    80: (0.359389, 0.115115, 0.033620, 0.009204),
    96: (0.360056, 0.115508, 0.033773, 0.009253),
    576: (0.362827, 0.117152, 0.034418, 0.009459),
}
CASES = [(dim, bits) for dim in OPTIMUM for bits in (1, 2, 3, 4)]
PINNED_128 = {
    1: [[127], 3300],
    2: [[38, 127], 6214],
    3: [[15, 45, 80, 127], 8799],
    4: [[6, 18, 31, 44, 59, 76, 97, 127], 11100],
}
CONFIDENCE_99 = 2.576
# Centroids rounded to int8 move the error by at most this much.
INT8 = 0.001


def committed() -> dict[str, dict[str, list]]:
    text = resources.files("turboquant_vlm.reference").joinpath("codebooks.json").read_text(encoding="utf-8")
    return json.loads(text)["codebooks"]


class TestTable:
    def test_covers_every_head_size_and_width(self) -> None:
        table = committed()
        assert sorted(map(int, table)) == list(supported_dims())
        assert all(sorted(books) == ["1", "2", "3", "4", "5", "6"] for books in table.values())

    def test_regenerated_equal(self) -> None:
        """A table that drifts when it is copied is found here."""
        for dim, books in committed().items():
            for bits, (centroids, constant) in books.items():
                assert codebook.integer_codebook(int(dim), int(bits)) == (centroids, constant), (dim, bits)

    def test_pinned(self) -> None:
        """Some rows by hand, so that solver and table cannot drift together."""
        table = committed()
        assert table["8"]["1"] == [[127], 3398]
        assert table["8"]["2"] == [[40, 127], 5895]
        assert table["8"]["3"] == [[16, 49, 84, 127], 7680]
        assert table["128"]["1"] == PINNED_128[1]
        assert table["128"]["2"] == PINNED_128[2]
        assert table["128"]["3"] == PINNED_128[3]
        assert table["128"]["4"] == PINNED_128[4]

    def test_shape_of_every_book(self) -> None:
        for books in committed().values():
            for bits, (centroids, constant) in books.items():
                assert len(centroids) == 2 ** (int(bits) - 1)
                assert centroids[-1] == 127
                assert centroids[0] > 0
                assert all(low < high for low, high in pairwise(centroids))
                assert 0 < constant < 2**15

    def test_ascending_is_symmetric(self) -> None:
        for bits in range(1, 7):
            both = codebook.centroids_ascending(128, bits)
            assert (both == -both[::-1]).all()
            assert (both[2 ** (bits - 1) :] == codebook.magnitudes(128, bits)).all()


class TestSolver:
    @pytest.mark.parametrize(("dim", "bits"), [(8, 3), (64, 1), (64, 4), (100, 2), (128, 6), (1024, 3)])
    def test_every_centroid_is_the_mean_of_its_cell(self, dim: int, bits: int) -> None:
        """By adaptive quadrature of the density, which the solver does not use."""
        centroids = codebook.solve(dim, bits)
        edges = [0.0, *(centroids[1:] + centroids[:-1]) / 2, np.sqrt(dim)]

        def density(t: float) -> float:
            return max(1 - t * t / dim, 0.0) ** ((dim - 3) / 2)

        for centroid, low, high in zip(centroids, edges[:-1], edges[1:], strict=True):
            # Beyond 12 standard deviations there is nothing that quadrature should hunt for.
            high = min(high, 12.0)
            mass, _ = integrate.quad(density, low, high, epsabs=1e-14, epsrel=1e-12)
            moment, _ = integrate.quad(lambda t: t * density(t), low, high, epsabs=1e-14, epsrel=1e-12)
            assert centroid == pytest.approx(moment / mass, rel=1e-7)

    @pytest.mark.parametrize(("dim", "bits"), CASES)
    def test_exact_distortion(self, dim: int, bits: int) -> None:
        exact = codebook.distortion(dim, bits)
        # Six decimals are listed.
        assert abs(exact - OPTIMUM[dim][bits - 1]) <= 0.5e-6 + 1e-12
        # The bounds of the paper.
        assert 4.0**-bits < exact < np.sqrt(3) * np.pi / 2 * 4.0**-bits


@cache
def coded(dim: int, bits: int, seed: int = 0, count: int = 4000) -> dict[str, np.ndarray]:
    """Random unit vectors, what the codec makes of them, and the same codes with the norm as the scale."""
    rng = np.random.default_rng([seed, dim, bits])
    x = rng.standard_normal((count, dim))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    codec = make_codec(dim, bits)
    packed = quantize(mx.array(x), codec)
    c = coded_centroids(packed.words, codec)
    # One coordinate in units of its standard deviation is c c_max / 127, and c_max is 254 K / 2^20.
    unit = 254 * codebook.boundary_constant(dim, bits) / 2**20 / 127
    by_norm = np.array(rotate_back(c, codec.seed)).astype(np.float64) * unit / dim
    wide = x.astype(np.float64)
    return {
        "x": wide,
        "shipped": np.array(dequantize(packed, codec)).astype(np.float64),
        "by_norm": by_norm * np.linalg.norm(wide, axis=1, keepdims=True),
    }


def squared_error(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sum((x - y) ** 2, axis=1)


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y * (np.sum(x * y, axis=1) / np.sum(y * y, axis=1))[:, None]


def interval(samples: np.ndarray) -> float:
    """Half the width of the 99 % confidence interval of the mean."""
    return CONFIDENCE_99 * float(samples.std(ddof=1)) / np.sqrt(len(samples))


@cache
def simulated_unbiased(dim: int, bits: int) -> tuple[float, float]:
    """Mean squared error of exact centroids with the unbiased scale, by simulation: (mean, half the interval)."""
    centroids = codebook.solve(dim, bits)
    both = np.concatenate([-centroids[::-1], centroids])
    rng = np.random.default_rng([99, dim, bits])
    x = rng.standard_normal((20000 if dim < 500 else 5000, dim))
    x *= np.sqrt(dim) / np.linalg.norm(x, axis=1, keepdims=True)
    c = both[np.searchsorted((both[1:] + both[:-1]) / 2, x)]
    cosine_squared = np.sum(x * c, axis=1) ** 2 / (dim * np.sum(c * c, axis=1))
    error = 1 / cosine_squared - 1
    return float(error.mean()), interval(error)


@pytest.mark.parametrize(("dim", "bits"), CASES)
class TestMeasuredError:
    def test_with_the_norm_as_scale_is_the_optimum(self, dim: int, bits: int) -> None:
        error = squared_error(coded(dim, bits)["x"], coded(dim, bits)["by_norm"])
        listed = OPTIMUM[dim][bits - 1]
        assert abs(error.mean() - listed) < interval(error) + INT8 * listed

    def test_with_the_least_squares_scale(self, dim: int, bits: int) -> None:
        """The best scale of every single vector: below the optimum of one fixed scale by what one fitted number gains.

        The gain is of the order of 1 / D of the error's spread, 4 % at D = 64 and 4 bits, so the listed number is
        an upper bound here, and the gain has a bound of its own.
        """
        data = coded(dim, bits)
        fitted = squared_error(data["x"], least_squares(data["x"], data["by_norm"]))
        assert (fitted <= squared_error(data["x"], data["by_norm"]) + 1e-12).all()
        listed = OPTIMUM[dim][bits - 1]
        assert fitted.mean() < listed + interval(fitted) + INT8 * listed
        assert fitted.mean() > listed * (1 - 3.5 / dim) - interval(fitted)

    def test_with_the_shipped_scale(self, dim: int, bits: int) -> None:
        """The unbiased scale costs error: what an exact simulation says, roughly 1 / (1 - optimum) - 1."""
        data = coded(dim, bits)
        error = squared_error(data["x"], data["shipped"])
        mean, half = simulated_unbiased(dim, bits)
        assert abs(error.mean() - mean) < np.hypot(interval(error), half) + INT8 * mean
        rough = 1 / (1 - OPTIMUM[dim][bits - 1]) - 1
        assert abs(error.mean() / rough - 1) < 0.06

    def test_shipped_scale_is_the_unbiased_one(self, dim: int, bits: int) -> None:
        """<x, x^> = <x, x> for every vector, as far as an fp16 scale can say it."""
        data = coded(dim, bits)
        inner = np.sum(data["x"] * data["shipped"], axis=1) / np.sum(data["x"] ** 2, axis=1)
        # Half a unit of fp16, 2^-11, and snapping to 14 bits, less than 2^-12 of the norm.
        assert np.abs(inner - 1).max() < 2**-11 + 2**-12
        assert abs(inner.mean() - 1) < 2**-13

    def test_inner_products_are_unbiased(self, dim: int, bits: int) -> None:
        """The slope of <q, x^> on <q, x> is 1 with the shipped scale, and 1 - error with the norm as scale."""
        data = coded(dim, bits)
        q = np.random.default_rng([7, dim, bits]).standard_normal(data["x"].shape)
        for name, want in (("shipped", 1.0), ("by_norm", 1 - OPTIMUM[dim][bits - 1])):
            exact, got = np.sum(q * data["x"], axis=1), np.sum(q * data[name], axis=1)
            slope = np.sum(exact * got) / np.sum(exact**2)
            noise = np.std(got - slope * exact) / np.sqrt(np.sum(exact**2))
            assert abs(slope - want) < CONFIDENCE_99 * noise + 2**-13, name


def test_listed_unbiased_errors() -> None:
    """At D = 64: .56 .128 .0336 .0089, two or three digits."""
    means = [simulated_unbiased(64, bits)[0] for bits in (1, 2, 3, 4)]
    assert means == pytest.approx([0.56, 0.128, 0.0336, 0.0089], rel=0.01)


class TestOneHot:
    """A randomized Hadamard transform is no uniform rotation: all coordinates of a rotated one-hot vector are alike."""

    def test_listed_errors(self) -> None:
        """.0402 .2552 .0609 .0040 are those of exact centroids with the norm as scale, at D = 128."""
        errors = []
        for bits in (1, 2, 3, 4):
            centroids = codebook.solve(128, bits)
            errors.append(float(np.min(np.abs(centroids - 1)) ** 2))
        assert errors == pytest.approx([0.0402, 0.2552, 0.0609, 0.0040], abs=1e-4)

    @pytest.mark.parametrize(
        ("dim", "want"),
        [
            (64, (0.0396, 0.2500, 0.0635, 0.0039)),
            (128, (0.0402, 0.2552, 0.0599, 0.0047)),
            (576, (0.0407, 0.2594, 0.0572, 0.0032)),
        ],
    )
    def test_with_the_norm_as_scale(self, dim: int, want: tuple[float, ...]) -> None:
        """Integers round the centroid next to 1, which moves these errors, unlike those of random vectors."""
        for bits in (1, 2, 3, 4):
            codec = make_codec(dim, bits)
            x = mx.eye(dim)
            c = np.abs(np.array(coded_centroids(quantize(x, codec).words, codec)))
            assert (c == c[0, 0]).all()
            unit = 254 * codebook.boundary_constant(dim, bits) / 2**20 / 127
            assert (1 - c[0, 0] * unit) ** 2 == pytest.approx(want[bits - 1], abs=1e-4)

    @pytest.mark.parametrize("dim", [64, 80, 128, 576])
    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
    def test_with_the_shipped_scale(self, dim: int, bits: int) -> None:
        """The unbiased scale gives them back up to its own rounding."""
        codec = make_codec(dim, bits)
        x = np.eye(dim)
        back = np.array(dequantize(quantize(mx.array(x.astype(np.float32)), codec), codec)).astype(np.float64)
        assert np.abs(back - x).max() <= 2**-11
