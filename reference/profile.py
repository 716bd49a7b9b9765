"""Channel factors measured with queries at hand: an optional refinement of those that the first tile gives.

A channel whose queries are large deserves finer keys: f = round(0.3 log2(rms q / rms r)), r the key residual after the
base of its tile (docs/numerics.md, section 7).  This runs once per model; its result is data, so float64 serves.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .types import TILE

EXPONENT = 0.3
FLOOR = 0.03


def measure_factors(q: mx.array, k: mx.array) -> mx.array:
    """int8 [Hk, D] channel factors from queries q [Hq, T, D] and keys k [Hk, T, D] of one layer, T a multiple of 64.

    Query heads of a group share the factors of their kv head.  Raises ValueError for shapes that do not fit.
    """
    heads, count, dim = k.shape
    if count % TILE or count == 0 or q.shape[0] % heads or tuple(q.shape[1:]) != (count, dim):
        raise ValueError(
            f"q must be [a multiple of {heads}, T, {dim}] and k [{heads}, T, {dim}] with T a multiple of {TILE}; "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    queries = np.asarray(q.astype(mx.float32)).astype(np.float64).reshape(heads, -1, dim)
    tiles = np.asarray(k.astype(mx.float32)).astype(np.float64).reshape(heads, -1, TILE, dim)
    residual = (tiles - tiles.mean(axis=2, keepdims=True)).reshape(heads, -1, dim)
    ratio = _floored_rms(queries) / _floored_rms(residual)
    exponent = EXPONENT * np.log2(ratio)
    exponent -= np.median(exponent, axis=-1, keepdims=True)
    return mx.array(np.clip(np.rint(exponent), -3, 3).astype(np.int8))


def _floored_rms(x: np.ndarray) -> np.ndarray:
    rms = np.sqrt(np.mean(x * x, axis=1))
    largest = np.max(rms, axis=-1, keepdims=True)
    return np.maximum(rms, np.where(largest > 0, FLOOR * largest, 1.0))
