"""Finds inputs that sit exactly on an edge of the contract, by trying seeded candidates with the oracle.

The results are committed as hex words, so a vector does not depend on how it was found.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from .inputs import load
from .oracle_attention import attention_factor
from .oracle_codebook import codebook
from .oracle_codec import OracleCodec
from .oracle_numbers import Array, snap_floats
from .oracle_rotation import rotate

KEEP = 4


def _candidates(seed: int, count: int, dim: int) -> tuple[Array, Array, Array]:
    """Float vectors, their snapped rotation Y and S."""
    x = load(
        {
            "generator": "integers",
            "seed": seed,
            "low": -8191,
            "high": 8191,
            "dtype": "float32",
            "shape": [count, dim],
        }
    )
    z, _, _ = snap_floats(x, 13)
    return x, rotate(z, OracleCodec(dim, 1).s), (z * z).sum(axis=1)


def _thresholds(s: Array, dim: int, bits: int, more: int = 0) -> Array:
    levels, k = codebook(dim, bits)
    root = np.array([math.isqrt(int(v) << 16) for v in s], np.int64) + more
    sums = np.array([a + b for a, b in itertools.pairwise(levels)], np.int64)
    return (sums[None, :] * ((root * k) >> 12)[:, None]) >> 16


def boundary_vectors(dim: int, bits: int) -> Array:
    """Vectors [<=8, dim] with a coordinate on a negative threshold, and with one on a positive threshold."""
    low: list[Array] = []
    high: list[Array] = []
    if bits == 1:
        # The one threshold is zero, which sums of a few equal numbers reach.
        x = load(
            {
                "generator": "integers",
                "seed": 1,
                "low": -1,
                "high": 1,
                "dtype": "float32",
                "shape": [2 * KEEP, dim],
            }
        )
        return x
    for seed in range(4000):
        x, y, s = _candidates(seed, 64, dim)
        theta = _thresholds(s, dim, bits)
        equal = y[:, :, None] == theta[:, None, :]
        middle = theta.shape[1] // 2
        for t in np.flatnonzero(equal[:, :, :middle].any(axis=(1, 2)))[: KEEP - len(low)]:
            low.append(x[t])
        for t in np.flatnonzero(equal[:, :, middle + 1 :].any(axis=(1, 2)))[: KEEP - len(high)]:
            high.append(x[t])
        if len(low) >= KEEP and len(high) >= KEEP:
            break
    return np.stack(low + high)


def root_sensitive_vectors(dim: int, bits: int) -> Array:
    """Vectors whose codes change when the floor of the root is replaced by the next integer."""
    found: list[Array] = []
    for seed in range(100000, 104000):
        x, y, s = _candidates(seed, 64, dim)
        floor, above = _thresholds(s, dim, bits), _thresholds(s, dim, bits, 1)
        differs = ((y[:, :, None] > floor[:, None, :]) != (y[:, :, None] > above[:, None, :])).any(
            axis=(1, 2)
        )
        found += [x[t] for t in np.flatnonzero(differs)[: KEEP - len(found)]]
        if len(found) >= KEEP:
            break
    return np.stack(found)


def half_byte_vectors() -> Array:
    """D = 8 vectors with a coordinate where 127 |Y| / m lies exactly between two integers."""
    found: list[Array] = []
    for seed in range(200000, 204000):
        x, _, _ = _candidates(seed, 64, 8)
        # Multiples of 127 in the largest coordinate make exact halves likely.
        x[:, 1:] = 0
        x[:, 0] = np.abs(x[:, 0]) // 127 * 127 + 127
        x[:, 1] = (np.arange(64) * 64) % 4096
        x[:, 2] = 127 * ((seed + np.arange(64)) % 16)
        z, _, _ = snap_floats(x, 13)
        y = np.abs(rotate(z, OracleCodec(8, 8).s))
        m = y.max(axis=1, keepdims=True)
        tie = ((254 * y + m) % (2 * m) == 0) & (y > 0) & (m > 0)
        found += [x[t] for t in np.flatnonzero(tie.any(axis=1))[: KEEP - len(found)]]
        if len(found) >= KEEP:
            break
    return np.stack(found)


def scale_tie_vectors() -> Array:
    """D = 8, b = 1 vectors with S / N exactly between two fp16 numbers, the lower one even and odd alike."""
    found: dict[int, list[Array]] = {0: [], 1: []}
    for seed in range(300000, 320000):
        v = load(
            {
                "generator": "integers",
                "seed": seed,
                "low": -64,
                "high": 64,
                "dtype": "float32",
                "shape": [64, 8],
            }
        )
        x = v * 127
        z, _, _ = snap_floats(x, 13)
        y = rotate(z, OracleCodec(8, 1).s)
        s, n = (z * z).sum(axis=1), 127 * np.abs(y).sum(axis=1)
        for t in range(64):
            g = math.gcd(int(s[t]), int(n[t]))
            top, bottom = int(s[t]) // g, int(n[t]) // g
            power_of_two = bottom & (bottom - 1) == 0
            odd = top >> ((top & -top).bit_length() - 1) if top else 0
            if power_of_two and odd.bit_length() == 12 and len(found[(odd >> 1) & 1]) < KEEP:
                found[(odd >> 1) & 1].append(x[t])
        if min(map(len, found.values())) >= KEEP:
            break
    return np.stack(found[0] + found[1])


def query_factor_vectors(scale: float) -> Array:
    """Queries [2, 8] whose snapped coordinates 1..7 change if a moves up or down by its last bit."""
    a = attention_factor(scale)
    out = np.zeros((2, 8), np.float32)
    out[:, 0] = 8191
    for row, neighbour in enumerate((np.nextafter(a, np.float32(np.inf)), np.nextafter(a, np.float32(0)))):
        exponent = int(np.frexp(np.float32(8191) * a)[1])
        found: list[np.float32] = []
        for k in range(1, 4000):
            # Close to the query that lands half way between k and k + 1.
            near = np.float32((k + 0.5) * 2.0 ** (exponent - 13) / float(a))
            for q in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
                here, there = (np.rint(np.ldexp(float(q * f), 13 - exponent)) for f in (a, neighbour))
                if here != there and len(found) < 7:
                    found.append(q)
                    break
        out[row, 1:] = found
    return out
