"""Hadamard matrices, head sizes that have none, and the random signs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import assert_same_bits

from turboquant_vlm.reference import make_codec, rotation, supported_dim, supported_dims

# The orders of the text, written out: m 2^k between 8 and 1024.
ORDERS = sorted(
    {m * 2**k for m in (1, 12, 20, 28, 36, 44, 52, 60, 68, 84, 100) for k in range(11) if 8 <= m * 2**k <= 1024}
)
# Head sizes of models in the field; each once crashed something or was cut out of a larger matrix.
HEAD_SIZES = [64, 72, 80, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576]


def test_supported_sizes_are_those_of_the_text() -> None:
    assert list(supported_dims()) == ORDERS
    assert [d for d in range(-5, 3000) if supported_dim(d)] == ORDERS
    assert set(HEAD_SIZES) <= set(ORDERS)


@pytest.mark.parametrize("dim", ORDERS)
def test_orthogonal(dim: int) -> None:
    matrix = rotation.hadamard(dim).astype(np.int64)
    assert matrix.shape == (dim, dim)
    assert set(np.unique(matrix)) == {-1, 1}
    # A float64 product of these integers is exact.
    assert (matrix.T.astype(np.float64) @ matrix == dim * np.eye(dim)).all()


@pytest.mark.parametrize("dim", [0, 1, 2, 4, 7, 9, 10, 76, 90, 92, 184, 116, 124, 140, 172, 1025, 1152, 2048, -64])
def test_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"dim={dim}"):
        rotation.hadamard(dim)
    with pytest.raises(ValueError, match=f"dim={dim}"):
        make_codec(dim, 4)


class TestMatrixEntries:
    def test_sylvester(self) -> None:
        want = [[(-1) ** bin(u & v).count("1") for v in range(64)] for u in range(64)]
        assert rotation.hadamard(64).tolist() == want

    @pytest.mark.parametrize("m", [12, 20, 44, 60, 68, 84])
    def test_paley_one_by_squares(self, m: int) -> None:
        q = m - 1
        squares = {x * x % q for x in range(1, q)}
        want = np.ones((m, m), int)
        want[1:, 0] = -1
        for i in range(1, m):
            for j in range(1, m):
                want[i, j] = 1 if i == j or (i - j) % q in squares else -1
        assert (rotation.hadamard(m) == want).all()

    @pytest.mark.parametrize(("m", "p", "w2"), [(28, 13, None), (36, 17, None), (52, 5, 2), (100, 7, 3)])
    def test_paley_two_by_squares(self, m: int, p: int, w2: int | None) -> None:
        """The field's elements as pairs (a, b) = a + b w, squared by hand."""
        w = w2 or 0
        field = [(a, b) for b in range(p if w2 else 1) for a in range(p)]
        squares = {((a * a + w * b * b) % p, 2 * a * b % p) for a, b in field if (a, b) != (0, 0)}
        assert len(squares) == (len(field) - 1) // 2
        order = len(field) + 1
        assert m == 2 * order
        conference = np.zeros((order, order), int)
        conference[0, 1:] = conference[1:, 0] = 1
        for i, x in enumerate(field):
            for j, y in enumerate(field):
                if i != j:
                    conference[i + 1, j + 1] = 1 if ((x[0] - y[0]) % p, (x[1] - y[1]) % p) in squares else -1
        want = np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(order, dtype=int), [[1, -1], [-1, -1]])
        assert (rotation.hadamard(m) == want).all()

    @pytest.mark.parametrize(("dim", "m"), [(96, 12), (160, 20), (112, 28), (144, 36), (200, 100), (576, 36)])
    def test_kronecker_order(self, dim: int, m: int) -> None:
        """Paley outside, Sylvester inside: neighbours along the inner axis are Sylvester's columns."""
        k = dim // m
        blocks = rotation.hadamard(dim).reshape(m, k, m, k)
        assert (blocks[:, 0, :, 0] == rotation.hadamard(m)).all()
        sylvester = np.array([[(-1) ** bin(u & v).count("1") for v in range(k)] for u in range(k)])
        assert (blocks[0, :, 0, :] == sylvester * blocks[0, 0, 0, 0]).all()


def splitmix64(state: int, word: int) -> int:
    mask = 2**64 - 1
    z = (state + (word + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def sign_words(dim: int, seed: int, stream: int = 0) -> list[int]:
    """64 signs a word, a one for -1."""
    ones = (rotation.random_signs(dim, seed, stream) == -1).astype(int).tolist()
    return [sum(bit << n for n, bit in enumerate(ones[at : at + 64])) for at in range(0, dim, 64)]


class TestSigns:
    def test_generator_of_this_test_is_splitmix64(self) -> None:
        # The published first output for state 0.
        assert splitmix64(0, 0) == 0xE220A8397B1DCDAF

    def test_pinned(self) -> None:
        assert sign_words(64, 0) == [0xD6967248FBE68CC3]
        assert sign_words(128, 0) == [0xABF42ACC138FEDBE, 0xA686B2C9730AEC76]
        assert sign_words(64, 1234567, stream=1) == [0x1AE16C050514CFF5]

    @pytest.mark.parametrize(("dim", "seed", "stream"), [(72, 0, 0), (100, 7, 1), (576, 2**31 - 1, 0), (1024, 3, 1)])
    def test_all_words(self, dim: int, seed: int, stream: int) -> None:
        want = [splitmix64((seed << 32) + (stream << 16) + dim, w) for w in range(-(-dim // 64))]
        if dim % 64:
            want[-1] &= (1 << dim % 64) - 1
        assert sign_words(dim, seed, stream) == want

    @pytest.mark.parametrize("dim", HEAD_SIZES)
    def test_balanced(self, dim: int) -> None:
        """The sum of 200 seeds' signs stays within four standard deviations of zero, in all and per coordinate."""
        signs = np.array([rotation.random_signs(dim, seed) for seed in range(200)], float)
        assert set(np.unique(signs)) == {-1, 1}
        assert abs(signs.sum()) < 4 * np.sqrt(200 * dim)
        assert np.abs(signs.sum(axis=0)).max() < 4.5 * np.sqrt(200)

    def test_seed_stream_and_size_matter(self) -> None:
        seen = [sign_words(d, seed, stream)[0] for d in (64, 128) for seed in (0, 1, 2**20) for stream in (0, 1)]
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 100, 576, 1024])
class TestRotate:
    def test_is_the_signed_matrix(self, dim: int) -> None:
        rng = np.random.default_rng(dim)
        x = rng.integers(-(2**13), 2**13 + 1, (3, 2, dim))
        x[0, 0] = 2**13
        matrix = rotation.hadamard(dim).astype(np.int64)
        for stream in (0, 1):
            signs = rotation.random_signs(dim, 11, stream).astype(np.int64)
            want = np.einsum("ij,...j->...i", matrix, x * signs)
            got = rotation.rotate(mx.array(x.astype(np.int32)), 11, stream)
            assert_same_bits(got, mx.array(want.astype(np.int32)))

    def test_back_and_forth_multiplies_by_the_order(self, dim: int) -> None:
        x = mx.array(np.random.default_rng(dim).integers(-127, 128, (5, dim)).astype(np.int32))
        assert_same_bits(rotation.rotate_back(rotation.rotate(x, 3), 3), x * dim)
        assert_same_bits(rotation.rotate(rotation.rotate_back(x, 3, 1), 3, 1), x * dim)
