"""Quantize and dequantize on Metal: `turboquant_vlm.reference.codec` with the same bits.

One kernel codes everything: key base, channel factors, snap, rotation, codes, scale and packing, for keys, values or
both in one dispatch, any number of tiles. Eight simdgroups share a tile of one row and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from turboquant_vlm.reference.codec import check_vectors
from turboquant_vlm.reference.packing import words_per_vector
from turboquant_vlm.reference.tokens import Span
from turboquant_vlm.reference.types import TILE, Codec, Packed

from .kernels import THREADGROUP_BYTES, TYPES, Kernel, Parameter, build, dtype_name, rotation_parameters
from .tables import codec_tables

__all__ = ["dequantize", "encode_tiles", "quantize"]

SIMD = 32
MOST_SIMDGROUPS = 8
NO_FACTORS, GIVEN, MEASURED = 0, 1, 2

Output = tuple[str, tuple[int, ...], mx.Dtype]


@dataclass(frozen=True)
class Job:
    """What one role of a dispatch codes: tokens `start` and on out of x [rows, columns, D].

    factors: int8 [rows, D], or None; with a base and without factors the first tile fixes them.
    """

    x: mx.array
    start: int
    codec: Codec
    base: bool
    factors: mx.array | None

    @property
    def origin(self) -> int:
        """Where the factors come from, as the kernel counts it."""
        if self.factors is not None:
            return GIVEN
        return MEASURED if self.base else NO_FACTORS


def quantize(x: mx.array, codec: Codec, base: bool = False, factors: mx.array | None = None) -> Packed:
    """Quantize vectors x [..., T, D]; arguments and results are those of `turboquant_vlm.reference.quantize`."""
    check_vectors(x, codec, base, factors)
    lead, tokens = x.shape[:-2], x.shape[-2]
    each = None
    if factors is not None:
        factors = factors.astype(mx.int8)
        each = mx.broadcast_to(factors, (*lead, codec.dim)).reshape(-1, codec.dim)
    # Vectors with nothing in common need no rows: whole groups of 64 whatever T is.
    alone = not base and factors is None
    flat = x.reshape(1 if alone else prod(lead), -1, codec.dim)
    (packed,) = _encode([Job(flat, 0, codec, base, each)], flat.shape[1])
    tiles = tokens // TILE
    return Packed(
        words=packed.words.reshape(*lead, tokens, -1),
        scales=packed.scales.reshape(*lead, tokens),
        base=None if packed.base is None else packed.base.reshape(*lead, tiles, codec.dim),
        base_exponent=None if packed.base_exponent is None else packed.base_exponent.reshape(*lead, tiles),
        factors=factors if packed.factors is None else packed.factors.reshape(*lead, codec.dim),
        sign_words=None if packed.sign_words is None else packed.sign_words.reshape(*lead, tokens, -1),
        sign_scales=None if packed.sign_scales is None else packed.sign_scales.reshape(*lead, tokens),
    )


def encode_tiles(spans: Sequence[Span]) -> list[Packed]:
    """Codes whole tiles of keys, of values, or of both in one dispatch, in the layout of a cache.

    spans: the columns of raw tokens to code, of one store or of keys and values with equal rows and tiles.
    """
    jobs, kinds = [], set()
    for span in spans:
        batch, heads, columns, dim = span.raw.shape
        keys = span.tokens.role == "key"
        factors = span.tokens.packed.factors if keys else None
        each = None if factors is None else factors.reshape(-1, dim)
        jobs.append(Job(span.raw.reshape(-1, columns, dim), span.start, span.tokens.codec, keys, each))
        kinds.add((batch * heads, span.tiles))
    together = [jobs] if len(kinds) == 1 and len(jobs) <= 2 else [[job] for job in jobs]
    coded = [
        packed
        for group, span in zip(together, spans, strict=False)
        for packed in _encode(group, span.tiles * TILE)
    ]
    return [_tiled(packed, span) for packed, span in zip(coded, spans, strict=True)]


def _tiled(packed: Packed, span: Span) -> Packed:
    """[rows, T, ...] as [B, H, N, 64, ...]."""
    rows, tiles = span.raw.shape[:2], span.tiles
    keys = span.tokens.role == "key"
    factors = packed.factors if span.tokens.packed.factors is None else span.tokens.packed.factors

    def by_tile(array: mx.array | None) -> mx.array | None:
        return None if array is None else array.reshape(*rows, tiles, TILE, *array.shape[2:])

    return Packed(
        words=packed.words.reshape(*rows, tiles, TILE, -1),
        scales=packed.scales.reshape(*rows, tiles, TILE),
        base=None if packed.base is None else packed.base.reshape(*rows, tiles, -1),
        base_exponent=None if packed.base_exponent is None else packed.base_exponent.reshape(*rows, tiles),
        factors=factors.reshape(*rows, -1) if keys and factors is not None else None,
        sign_words=by_tile(packed.sign_words),
        sign_scales=by_tile(packed.sign_scales),
    )


def _encode(jobs: Sequence[Job], tokens: int) -> list[Packed]:
    """Codes `tokens` tokens of every row of every job in one dispatch; arrays [rows, tokens, ...], [rows, N, ...]."""
    rows = jobs[0].x.shape[0]
    inputs: dict[str, mx.array] = {}
    outputs: list[list[Output]] = []
    parameters: list[tuple[str, Parameter]] = []
    sizes = [tokens]
    for letter, job in zip("ab", jobs, strict=False):
        x = job.x if job.x.dtype in TYPES else job.x.astype(mx.float32)
        inputs |= {f"{letter}_x": x, f"{letter}_tables": codec_tables(job.codec)}
        if job.factors is not None:
            inputs[f"{letter}_given"] = job.factors
        sizes += [x.shape[1], job.start]
        made = _outputs(job, rows, tokens)
        outputs.append(made)
        parameters += _role_parameters(letter, job, TYPES[x.dtype], [name for name, _, _ in made])
    inputs["sizes"] = mx.array(sizes, mx.int32)
    widest = max(job.codec.dim for job in jobs)
    simdgroups = encode_simdgroups(widest)
    parameters += [("TQ_SIMDGROUPS", simdgroups), ("TQ_WIDEST", widest), ("TQ_ROLES", len(jobs))]
    kernel = build(
        name="tq_encode_" + "_".join(_job_name(job) for job in jobs),
        body="encode",
        parts=("numerics", "rotation", "packing", "coding"),
        parameters=tuple(parameters),
        inputs=tuple(inputs),
        outputs=tuple(f"{letter}_{name}" for letter, made in zip("ab", outputs, strict=False) for name, _, _ in made),
    )
    results = iter(
        kernel(
            inputs,
            groups=((tokens + TILE - 1) // TILE, rows, len(jobs)),
            threads=SIMD * simdgroups,
            outputs=[(shape, dtype) for made in outputs for _, shape, dtype in made],
        )
    )
    return [Packed(**{name: next(results) for name, _, _ in made}) for made in outputs]


def _outputs(job: Job, rows: int, tokens: int) -> list[Output]:
    codec, tiles = job.codec, tokens // TILE
    made: list[Output] = [
        ("words", (rows, tokens, words_per_vector(codec.dim, codec.code_bits)), mx.uint32),
        ("scales", (rows, tokens), mx.float16),
    ]
    if job.base:
        made += [("base", (rows, tiles, codec.dim), mx.int16), ("base_exponent", (rows, tiles), mx.int16)]
    if job.origin == MEASURED:
        made.append(("factors", (rows, codec.dim), mx.int8))
    if codec.kind == "prod":
        made += [
            ("sign_words", (rows, tokens, words_per_vector(codec.dim, 1)), mx.uint32),
            ("sign_scales", (rows, tokens), mx.float16),
        ]
    return made


def _role_parameters(letter: str, job: Job, dtype: str, outputs: Sequence[str]) -> list[tuple[str, Parameter]]:
    prefix = f"TQ_{letter.upper()}"
    optional = ("base", "base_exponent", "factors", "sign_words", "sign_scales")
    return [
        *rotation_parameters(prefix, job.codec.dim),
        (f"{prefix}_TYPE", dtype),
        (f"{prefix}_BITS", job.codec.code_bits),
        (f"{prefix}_PROD", int(job.codec.kind == "prod")),
        (f"{prefix}_BASE", int(job.base)),
        (f"{prefix}_FACTORS", job.origin),
        (f"{prefix}_FACTORS_FROM", f"{letter}_given" if job.origin == GIVEN else "nullptr"),
        *((f"{prefix}_{name.upper()}_TO", f"{letter}_{name}" if name in outputs else "nullptr") for name in optional),
    ]


def _job_name(job: Job) -> str:
    codec = job.codec
    dtype = job.x.dtype if job.x.dtype in TYPES else mx.float32
    origin = ("", "_given", "_measured")[job.origin]
    return f"{codec.kind}{codec.bits}_d{codec.dim}_{dtype_name(dtype)}{'_base' if job.base else ''}{origin}"


def encode_bytes(widest: int, simdgroups: int) -> int:
    """Threadgroup memory of the coding kernel: what `templates/encode.metal` declares."""
    shared = [4 * 32, *4 * [4 * 64], 2 * widest, widest]
    return sum(map(_aligned, [*shared, *(simdgroups * size for size in (4 * widest, 4 * 64, 8))]))


def encode_simdgroups(widest: int) -> int:
    """How many simdgroups share a tile: eight, or four where eight vectors do not fit."""
    return _fitting(lambda simdgroups: encode_bytes(widest, simdgroups), f"coding vectors of {widest}")


def dequantize(packed: Packed, codec: Codec, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The vectors that `packed` stands for; arguments and result are those of `turboquant_vlm.reference.dequantize`."""
    shape = (*packed.words.shape[:-1], codec.dim)
    vectors = prod(shape[:-1])
    if vectors == 0:
        return mx.zeros(shape, dtype)
    inputs = {
        "words": packed.words,
        "scales": mx.broadcast_to(packed.scales, shape[:-1]),
        "tables": codec_tables(codec),
    }
    shared = 1
    if packed.sign_words is not None and packed.sign_scales is not None:
        inputs |= {"sign_words": packed.sign_words, "sign_scales": mx.broadcast_to(packed.sign_scales, shape[:-1])}
    if packed.factors is not None:
        inputs["factors"] = _spread_factors(packed.factors, shape)
        shared = vectors // (inputs["factors"].size // codec.dim)
    if packed.base is not None and packed.base_exponent is not None:
        inputs |= {"base": packed.base, "base_exponent": packed.base_exponent}
    inputs = {name: _at_least_8(array) for name, array in inputs.items()}
    inputs["sizes"] = mx.array([vectors, shared], mx.int32)
    written = dtype if dtype in TYPES else mx.float32
    simdgroups = dequantize_simdgroups(codec.dim, "sign_words" in inputs)
    (out,) = _dequantize_kernel(codec, written, tuple(inputs))(
        inputs,
        groups=((vectors + simdgroups - 1) // simdgroups, 1, 1),
        threads=SIMD * simdgroups,
        outputs=[(shape, written)],
    )
    return out.astype(dtype)


def _dequantize_kernel(codec: Codec, dtype: mx.Dtype, inputs: tuple[str, ...]) -> Kernel:
    signs = "sign_words" in inputs
    present = "".join(f"_{name}" for name in ("factors", "base") if name in inputs)
    kind = "prod" if signs else "mse"
    return build(
        name=f"tq_dequantize_{kind}{codec.code_bits}_d{codec.dim}_{dtype_name(dtype)}{present}",
        body="dequantize",
        parts=("numerics", "rotation", "packing", "coding"),
        parameters=(
            *rotation_parameters("TQ_D", codec.dim),
            ("TQ_TYPE", TYPES[dtype]),
            ("TQ_BITS", codec.code_bits),
            ("TQ_PROD", int(signs)),
            ("TQ_FACTORS", int("factors" in inputs)),
            ("TQ_BASE", int("base" in inputs)),
            ("TQ_BUFFERS", 1 + signs),
            ("TQ_SIMDGROUPS", dequantize_simdgroups(codec.dim, signs)),
        ),
        inputs=inputs,
        outputs=("out",),
    )


def _spread_factors(factors: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Factors [..., D] such that equal numbers of vectors, in order, share each set."""
    lead = factors.shape[:-1]
    if lead == shape[: len(lead)] and len(lead) < len(shape) - 1:
        return factors
    lift = (1,) * (len(shape) - factors.ndim)
    return mx.broadcast_to(factors.reshape(*lead, *lift, shape[-1]), (*shape[:-2], 1, shape[-1]))


def _at_least_8(array: mx.array) -> mx.array:
    # MLX places smaller inputs in constant memory, which functions of the kernel cannot take.
    flat = array.reshape(-1)
    return mx.pad(flat, (0, 8 - flat.size)) if flat.size < 8 else array


def dequantize_bytes(dim: int, signs: bool, simdgroups: int) -> int:
    """Threadgroup memory of the restoring kernel: what `templates/dequantize.metal` declares."""
    return _aligned(simdgroups * 4 * dim * (1 + signs)) + 4 * 32


def dequantize_simdgroups(dim: int, signs: bool) -> int:
    """How many vectors a threadgroup restores at a time."""
    return _fitting(lambda simdgroups: dequantize_bytes(dim, signs, simdgroups), f"restoring vectors of {dim}")


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _fitting(size: Callable[[int], int], what: str) -> int:
    simdgroups = MOST_SIMDGROUPS
    while size(simdgroups) > THREADGROUP_BYTES:
        simdgroups //= 2
        if simdgroups < 2:
            raise ValueError(f"{what} coordinates takes more than {THREADGROUP_BYTES} bytes of threadgroup memory")
    return simdgroups
