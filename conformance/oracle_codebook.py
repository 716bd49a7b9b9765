"""Lloyd-Max codebooks of section 3.5, solved here from the density alone.

The density of one coordinate of a random point on the sphere of radius sqrt(D) is log-concave for D > 3, so
the Lloyd-Max condition (each centroid is the mean of its cell, each cell ends half way between centroids) has
one solution. It is found by Newton's method; the mean of a cell is a closed form over a regularised
incomplete beta function.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.special import betainc, betaincc, betaln

from .oracle_numbers import Array


def _tail_moments(t: Array, dim: int) -> tuple[Array, Array, Array]:
    """Mass and first moment of the half density beyond t, and the half density at t (its whole mass is 1)."""
    z = np.clip(t * t / dim, 0.0, 1.0)
    half = (dim - 1) / 2.0
    log_norm = np.log(2.0) - betaln(0.5, half) - 0.5 * np.log(dim)
    tail = np.where(z < 0.5, 1.0 - betainc(0.5, half, z), betaincc(0.5, half, z))
    small = betaincc(0.5, half, z)
    tail = np.where(small < 0.5, small, tail)
    with np.errstate(divide="ignore"):
        log_w = np.log1p(-z)
        moment = np.exp(log_norm + half * log_w) * dim / (dim - 1)
        density = np.exp(log_norm + (dim - 3) / 2.0 * log_w)
    return tail, moment, density


@cache
def lloyd_max(dim: int, bits: int) -> tuple[float, ...]:
    """The 2**(bits-1) positive centroids, ascending, to about 1e-13."""
    count = 1 << (bits - 1)
    # A smooth start: equal steps out to where a Gaussian quantizer of this size would end.
    top = min(0.8 + 0.55 * (bits - 1), 0.95 * np.sqrt(dim))
    x = top * (np.arange(count) + 0.5) / count
    edge_end = np.sqrt(float(dim))
    for _ in range(400):
        edges = np.concatenate([[0.0], (x[1:] + x[:-1]) / 2, [edge_end]])
        tail, moment, density = _tail_moments(edges, dim)
        mass = tail[:-1] - tail[1:]
        mean = (moment[:-1] - moment[1:]) / mass
        error = mean - x
        # d mean / d edge: the lower edge removes mass at its own position, the upper edge adds it.
        low = density[:-1] * (mean - edges[:-1]) / mass
        high = density[1:] * (edges[1:] - mean) / mass
        low[0] = 0.0
        high[-1] = 0.0
        jac = np.diag(low / 2 + high / 2 - 1.0)
        jac += np.diag(low[1:] / 2, -1) + np.diag(high[:-1] / 2, 1)
        step = np.linalg.solve(jac, -error)
        new = x + step
        edge = np.concatenate([[0.0], new, [edge_end]])
        if not np.all(np.diff(edge) > 0):
            new = mean  # one plain Lloyd step, which cannot cross, until Newton is safe
        if np.abs(new - x).max() < 1e-14 * edge_end:
            return tuple(float(v) for v in new)
        x = new
    if np.abs(error).max() > 1e-11:
        raise ArithmeticError(f"Lloyd-Max did not converge for D={dim}, b={bits}")
    return tuple(float(v) for v in x)


@cache
def codebook(dim: int, bits: int) -> tuple[tuple[int, ...], int]:
    """``(c_0 < ... < c_(2**bits - 1), K)`` of section 3.5 for bits 1..6."""
    half = lloyd_max(dim, bits)
    positive = [int(np.floor(127 * v / half[-1] + 0.5)) for v in half]
    return tuple([-c for c in reversed(positive)] + positive), int(np.floor(2**20 * half[-1] / 254 + 0.5))


def rounding_margin(dim: int, bits: int) -> float:
    """Distance of the nearest rounded quantity to a half-integer: how much accuracy the integers needed."""
    half = lloyd_max(dim, bits)
    values = [127 * v / half[-1] for v in half[:-1]] + [2**20 * half[-1] / 254]
    return min(abs(v - np.floor(v) - 0.5) for v in values)
