"""The attentions that the quality measurement compares: a float cache, this project's, and mlx-vlm's codec.

All three get keys and values rounded to float16 first, as a model in half precision would hand them to its cache, so
that what differs is the cache alone. Queries and all sums outside the cache stay float32.

* float: softmax attention over the rounded keys and values.
* turboquant-vlm: the reference. The query at position i reads the first four tokens and the young ones raw and the
  rest packed (docs/numerics.md, section 2), exactly as when it is decoded token by token.
* mlx-vlm: quantize and dequantize with mlx-vlm's own codec, its cache's seeds, every token packed as in its cache;
  float attention over the result.

Shapes: q [Hq, T, D], k and v [Hk, T, D].
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from .. import reference
from .quality_model import Attention, Floats

FORMAT = mx.float16
SEED = 0
"""Both caches' default; values get the next seed."""


def causal_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Softmax attention in float32: every query sees itself and what is before it."""
    heads, tokens, dim = q.shape
    group = heads // len(k)
    future = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
    out = np.empty_like(q)
    for head in range(heads):
        logits = q[head] @ k[head // group].T * np.float32(dim**-0.5) + future
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[head] = weights @ v[head // group] / weights.sum(axis=-1, keepdims=True)
    return out


def float_cache(q: Floats, k: Floats, v: Floats) -> Floats:
    """What a float16 cache gives."""
    return causal_attention(q, _rounded(k), _rounded(v))


def packed_cache(key_bits: int, value_bits: int) -> Attention:
    """Attention as this project's caches give it, at these bits per coordinate."""

    def attention(q: Floats, k: Floats, v: Floats) -> Floats:
        keys = _tokens(k, key_bits, SEED, "key")
        values = _tokens(v, value_bits, SEED + 1, "value")
        out = reference.attend(mx.array(q[None]), keys, values, q.shape[-1] ** -0.5, "causal")
        return np.array(out)[0]

    return attention


def upstream_cache(key_bits: int, value_bits: int) -> Attention:
    """Attention over what mlx-vlm's codec keeps of every token, at these bits per coordinate."""

    def attention(q: Floats, k: Floats, v: Floats) -> Floats:
        return causal_attention(q, _upstream(k, key_bits, SEED), _upstream(v, value_bits, SEED + 1))

    return attention


def _tokens(x: Floats, bits: int, seed: int, role: reference.types.Role) -> reference.Tokens:
    codec = reference.make_codec(x.shape[-1], bits, seed)
    empty = reference.empty_tokens(codec, role, 1, len(x), FORMAT)
    return reference.append(empty, mx.array(x[None]).astype(FORMAT))


_codecs: dict[tuple[int, int, int], Any] = {}


def _upstream(x: Floats, bits: int, seed: int) -> Floats:
    """x through mlx-vlm's codec and back."""
    from mlx_vlm import turboquant

    vectors = mx.array(x[None]).astype(FORMAT)
    key = (x.shape[-1], bits, seed)
    if key not in _codecs:
        _codecs[key] = turboquant._build_codec(vectors, bits, mode="mse", seed=seed)
    codec = _codecs[key]
    return np.array(codec.dequantize(codec.quantize(vectors)).astype(mx.float32))[0]


def _rounded(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)
