"""The random rotation: random signs, then a Hadamard matrix.  Y = H (s * x).

A random rotation makes every coordinate of a vector look like a coordinate of a random point on the sphere, whatever
the vector was (arXiv 2504.19874, section 3).  A randomized Hadamard transform does this with entries +-1 only, so
integers stay integers: |Y| <= D 2^13 < 2^24 is exact in any order of summation (docs/numerics.md, section 3.4).

Orders are m 2^k: Sylvester's matrix for 2^k, Paley's constructions for m.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .integers import integer_matmul

IntMatrix = npt.NDArray[np.int8]

PALEY_ONE = (12, 20, 44, 60, 68, 84)
PALEY_TWO = (28, 36, 52, 100)
# The squares of these primes need a field extension GF(p)[w]; the value is w^2.
EXTENSIONS = {25: (5, 2), 49: (7, 3)}


def split_order(dim: int) -> tuple[int, int] | None:
    """(m, k) with dim = m 2^k, or None where no Hadamard matrix is built here."""
    if not 8 <= dim <= 1024:
        return None
    twos = (dim & -dim).bit_length() - 1
    odd = dim >> twos
    if odd == 1:
        return 1, twos
    m = 4 * odd
    return (m, twos - 2) if twos >= 2 and m in PALEY_ONE + PALEY_TWO else None


def supported_dim(dim: int) -> bool:
    """Whether vectors of `dim` coordinates can be rotated."""
    return split_order(dim) is not None


def supported_dims() -> tuple[int, ...]:
    """Every supported head size, ascending."""
    return tuple(d for d in range(8, 1025) if supported_dim(d))


@cache
def hadamard(dim: int) -> IntMatrix:
    """The Hadamard matrix of order dim: int8 [dim, dim], entries +-1, H^T H = dim I.

    Raises ValueError for an order that is not supported.
    """
    order = split_order(dim)
    if order is None:
        raise ValueError(
            f"TurboQuant has no Hadamard matrix for dim={dim}; supported head sizes between 8 and 1024 are 2^k times "
            f"1, 12, 20, 28, 36, 44, 52, 60, 68, 84 or 100"
        )
    m, k = order
    matrix = _paley(m)
    sylvester = np.array([[1]], np.int8)
    for _ in range(k):
        sylvester = np.kron(np.array([[1, 1], [1, -1]], np.int8), sylvester)
    return np.kron(matrix, sylvester)


def _paley(m: int) -> IntMatrix:
    if m == 1:
        return np.array([[1]], np.int8)
    if m in PALEY_ONE:
        q = m - 1
        matrix = np.ones((m, m), np.int8)
        matrix[1:, 0] = -1
        matrix[1:, 1:] = _character_of_differences(q) + np.eye(q, dtype=np.int8)
        return matrix
    q = m // 2 - 1
    conference = np.ones((q + 1, q + 1), np.int8)
    conference[0, 0] = 0
    conference[1:, 1:] = _character_of_differences(q)
    same, own = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(conference, same) + np.kron(np.eye(q + 1, dtype=np.int8), own)


def _character_of_differences(q: int) -> IntMatrix:
    """χ(x_i - x_j) over the field of q elements: 0 on the diagonal, 1 for a non-zero square, -1 otherwise."""
    p, w2 = EXTENSIONS.get(q, (q, 0))
    i = np.arange(q)
    low, high = i % p, i // p
    squares = {(int(a * a + w2 * b * b) % p, int(2 * a * b) % p) for a, b in zip(low, high, strict=True)}
    chi = np.full((q, q), -1, np.int8)
    for row in range(q):
        for column in range(q):
            difference = (int(low[row] - low[column]) % p, int(high[row] - high[column]) % p)
            if difference == (0, 0):
                chi[row, column] = 0
            elif difference in squares:
                chi[row, column] = 1
    return chi


@cache
def random_signs(dim: int, seed: int, stream: int = 0) -> IntMatrix:
    """The signs s of a codec: int8 [dim] of +-1 from splitmix64 (section 3.4)."""
    mask = 2**64 - 1
    state = (seed << 32) + (stream << 16) + dim
    signs = []
    for word in range((dim + 63) // 64):
        z = (state + (word + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signs += [-1 if z >> bit & 1 else 1 for bit in range(64)]
    return np.array(signs[:dim], np.int8)


def rotate(x: mx.array, seed: int, stream: int = 0) -> mx.array:
    """H (s * x) for int32 vectors [..., D] of at most 14 bits; exact int32."""
    dim = x.shape[-1]
    signs = mx.array(random_signs(dim, seed, stream).astype(np.int32))
    return _matvec(x * signs, hadamard(dim).T)


def rotate_back(y: mx.array, seed: int, stream: int = 0) -> mx.array:
    """s * (H^T y) for int32 vectors [..., D]: D times the inverse of `rotate`; exact int32."""
    dim = y.shape[-1]
    signs = mx.array(random_signs(dim, seed, stream).astype(np.int32))
    return _matvec(y, hadamard(dim)) * signs


def _matvec(x: mx.array, matrix: IntMatrix) -> mx.array:
    flat = x.reshape(-1, x.shape[-1])
    return integer_matmul(flat, mx.array(matrix.astype(np.int32))).reshape(x.shape)
