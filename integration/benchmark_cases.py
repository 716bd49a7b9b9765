"""What the benchmark measures: cases, made-up caches, and the contestants.

A contestant is built for a case, outside of the clock, and gives a function that computes the last ``count`` queries
of the case (or encodes its first ``count`` tokens). All contestants get the same random vectors, rounded to float16;
those of another type get the rounded vectors in their own type.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import fast, reference

SEED = 0
FORMAT = mx.float16
CHUNK = 2048
"""Tokens of one call while a cache is filled."""
SMALL = 1 << 19
"""Queries times tokens up to which slow contestants are asked for more than a few queries."""
LEAD = reference.TILE + reference.LAG
"""Tokens before those that `encode` appends to our cache, so that as many are packed as are appended."""
UNIFORM_BITS, GROUP_SIZE = 4, 64
QUERY_BLOCK = 128

OURS = "turboquant-vlm"
NUMPY = "NumPy float32"
UNIFORM = "MLX uniform 4-bit"
UPSTREAM = "mlx-vlm TurboQuant"
REFERENCE = "our reference"

QUERIES = {"decode": 1, "rows": 4, "prefill": 512, "encode": 0}
"""The steps, and how many queries each asks."""

Floats = npt.NDArray[np.float32]
Run = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """One measurement. tokens: what the cache holds; of `encode`, what is appended."""

    step: str
    dim: int = 128
    query_heads: int = 32
    kv_heads: int = 8
    tokens: int = 4096
    key_bits: int = 4
    value_bits: int = 3

    @property
    def queries(self) -> int:
        """New tokens that attend."""
        return QUERIES[self.step]

    @property
    def work(self) -> int:
        """What `Run` counts: queries, or tokens of `encode`."""
        return self.queries or self.tokens

    @property
    def scale(self) -> float:
        """The usual factor of the logits."""
        return float(self.dim**-0.5)

    @property
    def mask(self) -> str | None:
        """What mlx-vlm hands to attention: one query needs no mask."""
        return "causal" if self.queries > 1 else None


class Data:
    """Random vectors of a case, seeded."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(SEED)
        shape = (1, case.kv_heads, case.tokens, case.dim)
        self.keys, self.values = _normal(rng, shape), _normal(rng, shape)
        self.queries = _normal(rng, (1, case.query_heads, max(case.queries, 1), case.dim))
        mx.eval(self.keys, self.values, self.queries)

    @cached_property
    def floats(self) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values as float32."""
        q, k, v = (x.astype(mx.float32) for x in (self.queries, self.keys, self.values))
        mx.eval(q, k, v)
        return q, k, v


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(FORMAT)


def _last(queries: mx.array, count: int) -> mx.array:
    """The last queries as a new array: mlx-vlm's functions write into what they get."""
    return queries[:, :, queries.shape[2] - count :]


# Contestants: (case, data) -> Run


def filled(module: ModuleType, case: Case, data: Data) -> tuple[reference.Tokens, reference.Tokens]:
    """Keys and values in this project's cache, appended in chunks by the module's functions."""
    keys, values = _empty(module, case)
    for start in range(0, case.tokens, CHUNK):
        here = slice(start, start + CHUNK)
        keys, values = module.append_pair(keys, values, data.keys[:, :, here], data.values[:, :, here])
    return keys, values


def _empty(module: ModuleType, case: Case) -> tuple[reference.Tokens, reference.Tokens]:
    key_codec = module.make_codec(case.dim, case.key_bits, SEED)
    value_codec = module.make_codec(case.dim, case.value_bits, SEED + 1)
    return (
        module.empty_tokens(key_codec, "key", 1, case.kv_heads, FORMAT),
        module.empty_tokens(value_codec, "value", 1, case.kv_heads, FORMAT),
    )


def packed(module: ModuleType) -> Callable[[Case, Data], Run]:
    """This project's cache through the functions of `module`."""

    def build(case: Case, data: Data) -> Run:
        if case.step == "encode":
            lead = module.append_pair(*_empty(module, case), data.keys[:, :, :LEAD], data.values[:, :, :LEAD])
            mx.eval(_arrays(lead))
            return lambda count: _arrays(module.append_pair(*lead, data.keys[:, :, :count], data.values[:, :, :count]))
        keys, values = filled(fast, case, data)
        return lambda count: module.attend(_last(data.queries, count), keys, values, case.scale, "causal")

    return build


def _arrays(pair: Sequence[reference.Tokens]) -> list[mx.array]:
    return [x for t in pair for x in (*t.packed.arrays().values(), t.first, t.recent) if x is not None]


def fused(dtype: mx.Dtype) -> Callable[[Case, Data], Run]:
    """MLX's attention on a float cache."""

    def build(case: Case, data: Data) -> Run:
        q, k, v = (x.astype(dtype) for x in (data.queries, data.keys, data.values))
        mx.eval(q, k, v)
        return lambda count: mx.fast.scaled_dot_product_attention(
            _last(q, count), k, v, scale=case.scale, mask="causal" if count > 1 else None
        )

    return build


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def numpy_attention(case: Case, data: Data) -> Run:
    """Softmax attention with NumPy's float32 matrix products; threads share the kv heads."""
    q, k, v = (np.array(x)[0] for x in data.floats)
    grouped = q.reshape(case.kv_heads, -1, *q.shape[1:]) * np.float32(case.scale)
    pool = ThreadPoolExecutor(cpus())

    def run(count: int) -> Floats:
        asked = grouped[:, :, grouped.shape[2] - count :]
        return np.concatenate(list(pool.map(_softmax_attention, asked, k, v)))

    return run


def _softmax_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """One kv head: scaled q [G, L, D], k and v [T, D]; [G, L, D]."""
    group, queries, dim = q.shape
    tokens = len(k)
    out = np.empty_like(q)
    for start in range(0, queries, QUERY_BLOCK):
        block = slice(start, min(start + QUERY_BLOCK, queries))
        position = np.arange(tokens - queries, tokens)[block]
        # All of these queries see every token before this one.
        seen = int(position[0]) + 1
        future = np.arange(seen, tokens) > position[:, None]
        logits = q[:, block].reshape(-1, dim) @ k.T
        logits.reshape(group, -1, tokens)[:, :, seen:][:, future] = -np.inf
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        total = logits.sum(axis=1, keepdims=True)
        out[:, block] = (logits @ v / total).reshape(group, -1, dim)
    return out


def uniform(case: Case, data: Data) -> Run:
    """MLX's uniform quantization with mlx-vlm's attention on it."""
    from mlx_vlm.models.base import quantized_scaled_dot_product_attention

    def quantized(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return mx.quantize(x, group_size=GROUP_SIZE, bits=UNIFORM_BITS)

    if case.step == "encode":
        return lambda count: [*quantized(data.keys[:, :, :count]), *quantized(data.values[:, :, :count])]
    keys, values = quantized(data.keys), quantized(data.values)
    mx.eval(*keys, *values)
    return lambda count: quantized_scaled_dot_product_attention(
        _last(data.queries, count), keys, values, case.scale, case.mask, GROUP_SIZE, UNIFORM_BITS
    )


def upstream(case: Case, data: Data) -> Run:
    """mlx-vlm's own TurboQuant cache and the attention that mlx-vlm chooses for it."""
    from mlx_vlm.models.base import scaled_dot_product_attention
    from mlx_vlm.turboquant import TurboQuantKVCache

    def cache() -> Any:
        width = (case.key_bits + case.value_bits) / 2
        return TurboQuantKVCache(width, key_bits=case.key_bits, value_bits=case.value_bits)

    if case.step == "encode":
        codecs = cache()
        codecs.update_and_fetch(data.keys[:, :, :1], data.values[:, :, :1])

        def encode(count: int) -> list[Any]:
            made = cache()
            made.key_codec, made.value_codec = codecs.key_codec, codecs.value_codec
            made.update_and_fetch(data.keys[:, :, :count], data.values[:, :, :count])
            return [made.keys, made.values]

        return encode
    held = cache()
    for start in range(0, case.tokens, CHUNK):
        keys, values = held.update_and_fetch(
            data.keys[:, :, start : start + CHUNK], data.values[:, :, start : start + CHUNK]
        )
    return lambda count: scaled_dot_product_attention(
        _last(data.queries, count), keys, values, held, case.scale, "causal" if count > 1 else None
    )


def _always(_: Case) -> str | None:
    return None


def _small(case: Case) -> str | None:
    if case.queries > 4 and case.queries * case.tokens > SMALL:
        return f"slow, so only up to {SMALL // case.queries:,} tokens with {case.queries} queries"
    return None


def _upstream_small(case: Case) -> str | None:
    if case.tokens > 4096:
        return "slow, so only up to 4,096 tokens"
    return _small(case)


@dataclass(frozen=True)
class Contestant:
    """name, how it is built, whether it attends only, and why it is not asked for a case (or None)."""

    name: str
    build: Callable[[Case, Data], Run]
    encodes: bool = True
    refused: Callable[[Case], str | None] = _always


def contestants(case: Case) -> list[Contestant]:
    """Who takes part in a case, in the order of the table; ours is the first."""
    every = [
        Contestant(OURS, packed(fast)),
        Contestant(NUMPY, numpy_attention, encodes=False),
        Contestant("MLX float32", fused(mx.float32), encodes=False),
        Contestant("MLX bfloat16", fused(mx.bfloat16), encodes=False),
        Contestant("MLX float16", fused(mx.float16), encodes=False),
        Contestant(UNIFORM, uniform),
        Contestant(UPSTREAM, upstream, refused=_upstream_small),
        Contestant(REFERENCE, packed(reference), refused=_small),
    ]
    return [c for c in every if c.encodes or case.step != "encode"]


# Cases

QUICK = (Case("decode"), Case("rows"), Case("encode", tokens=512), Case("prefill"))


def all_cases() -> tuple[Case, ...]:
    """Around one main case of each step, one thing changes at a time."""
    made: list[Case] = []
    for step in QUERIES:
        main = Case(step, tokens=512 if step == "encode" else 4096)
        lengths = (128, 512, 4096) if step == "encode" else (1024, 4096, 16_384, 65_536)
        made += [replace(main, tokens=tokens) for tokens in lengths]
        made += [replace(main, key_bits=k, value_bits=v) for k, v in ((4, 4), (3, 3), (8, 4))]
        made += [replace(main, dim=dim) for dim in (64, 256)]
        made += [replace(main, kv_heads=heads) for heads in (32, 4)]
    return tuple(made)
