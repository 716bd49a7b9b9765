"""Hadamard matrices, signs and the rotation ``Y = H (s * Z)`` of section 3.4, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from .oracle_numbers import Array, exact_matmul

Element = tuple[int, int]

CORES = (1, 12, 20, 28, 36, 44, 52, 60, 68, 84, 100)
PALEY_ONE = (12, 20, 44, 60, 68, 84)
GOLDEN = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


def split_order(dim: int) -> tuple[int, int] | None:
    """``(m, k)`` with ``dim = m 2**k`` and 8 <= dim <= 1024, or None for an order the contract refuses."""
    if not 8 <= dim <= 1024:
        return None
    for m in CORES:
        power, rest = divmod(dim, m)
        if rest == 0 and power & (power - 1) == 0:
            return m, power.bit_length() - 1
    return None


SUPPORTED_DIMS = tuple(d for d in range(1, 1025) if split_order(d))


@cache
def hadamard(dim: int) -> Array:
    """H of order ``dim``, int64 [dim, dim] with entries +-1. Raises ValueError for an unsupported order."""
    split = split_order(dim)
    if split is None:
        raise ValueError(f"dim must be m 2^k in 8..1024 with m in {CORES}; got {dim}")
    m, k = split
    size = 1 << k
    sylvester = np.array([[(-1) ** (u & v).bit_count() for v in range(size)] for u in range(size)], np.int64)
    return np.kron(_core(m), sylvester)


def _core(m: int) -> Array:
    if m == 1:
        return np.ones((1, 1), np.int64)
    return _paley_one(m) if m in PALEY_ONE else _paley_two(m)


def _paley_one(m: int) -> Array:
    q = m - 1
    squares = {x * x % q for x in range(1, q)}
    p = np.ones((m, m), np.int64)
    for i in range(1, m):
        p[i, 0] = -1
        for j in range(1, m):
            if i != j:
                p[i, j] = 1 if (i - j) % q in squares else -1
    return p


def _paley_two(m: int) -> Array:
    q = m // 2 - 1
    difference, squares = _field(q)
    c = np.zeros((q + 1, q + 1), np.int64)
    c[0, 1:] = 1
    c[1:, 0] = 1
    for i in range(1, q + 1):
        for j in range(1, q + 1):
            if i != j:
                c[i, j] = 1 if difference(i - 1, j - 1) in squares else -1
    on = np.array([[1, 1], [1, -1]], np.int64)
    off = np.array([[1, -1], [-1, -1]], np.int64)
    return np.kron(c, on) + np.kron(np.eye(q + 1, dtype=np.int64), off)


def _field(q: int) -> tuple[Callable[[int, int], Element], set[Element]]:
    """x_i - x_j of GF(q) and the set of its non-zero squares, as pairs (u, v) for u + v w."""
    if q in (13, 17):
        return (lambda i, j: ((i - j) % q, 0)), {(x * x % q, 0) for x in range(1, q)}
    p, w2 = {25: (5, 2), 49: (7, 3)}[q]

    def difference(i: int, j: int) -> tuple[int, int]:
        return (i % p - j % p) % p, (i // p - j // p) % p

    # (u + v w)^2 = u^2 + v^2 w^2 + 2 u v w.
    squares = {
        ((u * u + v * v * w2) % p, 2 * u * v % p) for u in range(p) for v in range(p) if (u, v) != (0, 0)
    }
    return difference, squares


def splitmix64(state: int, w: int) -> int:
    """Word ``w`` (from 0) of the stream that starts at ``state``."""
    z = (state + (w + 1) * GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


@cache
def signs(dim: int, seed: int, stream: int = 0) -> Array:
    """``s`` of section 3.4, int64 [dim] of +-1."""
    state = (seed << 32) + (stream << 16) + dim
    words = [splitmix64(state, w) for w in range((dim + 63) // 64)]
    return np.array([-1 if (words[d // 64] >> (d % 64)) & 1 else 1 for d in range(dim)], np.int64)


def rotate(z: Array, s: Array) -> Array:
    """``H (s * z)`` over the last axis, exact."""
    h = hadamard(z.shape[-1])
    return exact_matmul((s * z).reshape(-1, z.shape[-1]), h.T).reshape(z.shape)


def unrotate(c: Array, s: Array) -> Array:
    """``s * (H^T c)`` over the last axis, exact and not divided by D."""
    h = hadamard(c.shape[-1])
    return s * exact_matmul(c.reshape(-1, c.shape[-1]), h).reshape(c.shape)
