"""Quantize and dequantize on the CPU: `turboquant_vlm.reference.codec` with the same bits.

One kernel codes everything: key base, channel factors, snap, rotation, codes, scale and packing, for keys, values or
both in one call, any number of tiles. Threads share the tiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx

from turboquant_vlm.reference.codec import check_vectors
from turboquant_vlm.reference.packing import words_per_vector
from turboquant_vlm.reference.tokens import Span
from turboquant_vlm.reference.types import TILE, Codec, Packed

from . import native
from .tables import CodecTables, codec_tables

__all__ = ["TYPES", "dequantize", "encode_tiles", "quantize"]

TYPES: dict[mx.Dtype, int] = {mx.float16: 0, mx.bfloat16: 1, mx.float32: 2}
"""The dtypes that kernels read and write, as they count them."""
NO_FACTORS, GIVEN, MEASURED = 0, 1, 2

_TABLES = ctypes.POINTER(CodecTables)


class _EncodeJob(ctypes.Structure):
    """`tq::EncodeJob` of the kernels."""

    _fields_ = (
        ("codec", _TABLES),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "start", "rows", "tokens")),
        *((name, ctypes.c_int32) for name in ("type", "base", "origin", "unused")),
        ("given", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("words_to", "scales_to", "base_to", "base_exponent_to")),
        *((name, ctypes.c_void_p) for name in ("factors_to", "sign_words_to", "sign_scales_to")),
    )


class _DequantizeJob(ctypes.Structure):
    """`tq::DequantizeJob` of the kernels."""

    _fields_ = (
        ("codec", _TABLES),
        ("vectors", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("words", "scales", "sign_words", "sign_scales")),
        *((name, ctypes.c_void_p) for name in ("factors", "base", "base_exponent", "out")),
        ("type", ctypes.c_int64),
    )


@dataclass(frozen=True)
class _Job:
    """What one store codes: of each row of x [..., columns, D] the `tokens` columns from `start` on.

    rows, columns: x seen as [rows, columns, D].  factors: int8 [rows, D], or None; with a base and without factors the
    first tile fixes them.  lead, inner: the results are [*lead, *inner, ...] by vector, [*lead, N, ...] by tile.
    """

    x: mx.array
    rows: int
    columns: int
    start: int
    tokens: int
    codec: Codec
    base: bool
    factors: mx.array | None
    lead: tuple[int, ...]
    inner: tuple[int, ...]

    @property
    def origin(self) -> int:
        """Where the factors come from, as the kernel counts it."""
        if self.factors is not None:
            return GIVEN
        return MEASURED if self.base else NO_FACTORS


def quantize(x: mx.array, codec: Codec, base: bool = False, factors: mx.array | None = None) -> Packed:
    """Quantize vectors x [..., T, D]; arguments and results are those of `turboquant_vlm.reference.quantize`."""
    check_vectors(x, codec, base, factors)
    lead, tokens = tuple(x.shape[:-2]), x.shape[-2]
    each = None
    if factors is not None:
        factors = factors.astype(mx.int8)
        each = mx.broadcast_to(factors, (*lead, codec.dim))
    # Vectors with nothing in common need no rows: whole groups of 64 whatever T is.
    rows = 1 if not base and factors is None else prod(lead)
    columns = x.size // codec.dim // rows
    (packed,) = _encode([_Job(x, rows, columns, 0, columns, codec, base, each, lead, (tokens,))])
    return packed if factors is None else replace(packed, factors=factors)


def encode_tiles(spans: Sequence[Span]) -> list[Packed]:
    """Codes whole tiles of keys, of values, or of both in one call, in the layout of a cache.

    spans: the columns of raw tokens to code, of one store or of keys and values.
    """
    jobs = []
    for span in spans:
        batch, heads, columns, _ = span.raw.shape
        keys, tiles = span.tokens.role == "key", span.tiles
        factors = span.tokens.packed.factors if keys else None
        codec, inner = span.tokens.codec, (tiles, TILE)
        place = (batch * heads, columns, span.start, tiles * TILE)
        jobs.append(_Job(span.raw, *place, codec, keys, factors, (batch, heads), inner))
    return [
        packed if job.factors is None else replace(packed, factors=job.factors)
        for packed, job in zip(_encode(jobs), jobs, strict=True)
    ]


def _encode(jobs: Sequence[_Job]) -> list[Packed]:
    """Codes all jobs in one call. Factors are only among the results where they are measured."""
    keep: list[Any] = []
    made: list[dict[str, native.Output]] = []
    structures = (_EncodeJob * len(jobs))()
    for job, structure in zip(jobs, structures, strict=True):
        x = job.x if job.x.dtype in TYPES else job.x.astype(mx.float32)
        outputs = _outputs(job)
        structure.codec = ctypes.pointer(codec_tables(job.codec))
        structure.x = native.pointer(x, keep)
        structure.rows, structure.columns = job.rows, job.columns
        structure.start, structure.tokens = job.start, job.tokens
        structure.type, structure.base, structure.origin = TYPES[x.dtype], int(job.base), job.origin
        structure.given = native.pointer(job.factors, keep)
        for name, memory in outputs.items():
            setattr(structure, f"{name}_to", memory.address)
        made.append(outputs)
    encode = native.function("tq_encode", (ctypes.POINTER(_EncodeJob), ctypes.c_int, ctypes.c_int))
    encode(structures, len(jobs), native.threads())
    return [Packed(**{name: memory.array() for name, memory in outputs.items()}) for outputs in made]


def _outputs(job: _Job) -> dict[str, native.Output]:
    codec, vectors, tiles = job.codec, (*job.lead, *job.inner), (*job.lead, job.tokens // TILE)
    made = {
        "words": native.output((*vectors, words_per_vector(codec.dim, codec.code_bits)), mx.uint32),
        "scales": native.output(vectors, mx.float16),
    }
    if job.base:
        made["base"] = native.output((*tiles, codec.dim), mx.int16)
        made["base_exponent"] = native.output(tiles, mx.int16)
    if job.origin == MEASURED:
        made["factors"] = native.output((*job.lead, codec.dim), mx.int8)
    if codec.kind == "prod":
        made["sign_words"] = native.output((*vectors, words_per_vector(codec.dim, 1)), mx.uint32)
        made["sign_scales"] = native.output(vectors, mx.float16)
    return made


def dequantize(packed: Packed, codec: Codec, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The vectors that `packed` stands for; arguments and result are those of `turboquant_vlm.reference.dequantize`."""
    shape = (*packed.words.shape[:-1], codec.dim)
    vectors = prod(shape[:-1])
    if vectors == 0:
        return mx.zeros(shape, dtype)
    keep: list[Any] = []
    written = dtype if dtype in TYPES else mx.float32
    out = native.output(shape, written)
    job = _DequantizeJob(
        codec=ctypes.pointer(codec_tables(codec)),
        vectors=vectors,
        shared=1,
        words=native.pointer(packed.words, keep),
        scales=native.pointer(mx.broadcast_to(packed.scales, shape[:-1]), keep),
        out=out.address,
        type=TYPES[written],
    )
    if packed.sign_words is not None and packed.sign_scales is not None:
        job.sign_words = native.pointer(packed.sign_words, keep)
        job.sign_scales = native.pointer(mx.broadcast_to(packed.sign_scales, shape[:-1]), keep)
    if packed.factors is not None:
        factors = _spread_factors(packed.factors, shape)
        job.factors = native.pointer(factors, keep)
        job.shared = vectors // (factors.size // codec.dim)
    if packed.base is not None and packed.base_exponent is not None:
        job.base = native.pointer(packed.base, keep)
        job.base_exponent = native.pointer(packed.base_exponent, keep)
    restore = native.function("tq_dequantize", (ctypes.POINTER(_DequantizeJob), ctypes.c_int))
    restore(ctypes.byref(job), native.threads())
    return out.array() if dtype == written else out.array().astype(dtype)


def _spread_factors(factors: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Factors [..., D] such that equal numbers of vectors, in order, share each set."""
    lead = factors.shape[:-1]
    if lead == shape[: len(lead)] and len(lead) < len(shape) - 1:
        return factors
    lift = (1,) * (len(shape) - factors.ndim)
    return mx.broadcast_to(factors.reshape(*lead, *lift, shape[-1]), (*shape[:-2], 1, shape[-1]))
