"""Attention and scores on Metal: which kernel a call needs, and how its work is divided.

A group of threads takes ROWS queries of one kv head through one or more splits of 256 tokens. A short context is one
dispatch; a long one is divided over groups, and a second dispatch joins their sums. Every sum whose order matters has
the order of the contract's tree, so the division never changes a bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turboquant_vlm.reference.attention import EXCLUDED, check_query, check_rows_held, check_values
from turboquant_vlm.reference.masks import Mask, checked_mask
from turboquant_vlm.reference.packing import words_per_vector
from turboquant_vlm.reference.query import query_factor
from turboquant_vlm.reference.types import Codec, Tokens, packed_tiles

from .kernels import THREADGROUP_BYTES, TYPES, Kernel, Parameter, build, dtype_name, remembered, rotation_parameters
from .tables import codec_tables

__all__ = ["attend", "scores"]

SPLIT = 256
"""Tokens of a split, and threads of a group."""
THREADS = 256
MAX_ROWS = 8
"""Queries that share one unpacking of a token."""
MAX_LEVELS = 12
"""Levels of the tree within a group: up to 2^11 splits, 524,288 tokens."""


@dataclass(frozen=True)
class Division:
    """How much work goes to one group of threads; no choice changes a bit.

    one_dispatch: splits up to which a group reads the whole context itself.  wanted_groups: groups that keep a large
    GPU busy.  max_groups: groups that the second dispatch joins for one query.  workers: groups that take blocks of
    queries one after the other, so that the scratch memory of a prefill is bounded.  products: multiply-adds of one
    dispatch, so that none runs for seconds.
    """

    one_dispatch: int = 4
    wanted_groups: int = 512
    max_groups: int = 64
    workers: int = 256
    products: int = 2**37


DIVISION = Division()
META_CALL, META_ROW = 24, 4


def attend(
    q: mx.array,
    keys: Tokens,
    values: Tokens,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Softmax attention of the last L tokens of every row; arguments, result and errors as in the reference.

    q: [B, Hq, L, D].  Returns [B, Hq, L, Dv] in q's dtype.
    """
    check_query(q, keys, scale)
    check_values(q, keys, values, sinks)
    padding, array = checked_mask(mask, window, left_padding, q.shape, keys.lengths, keys.first.shape[1])
    out_shape = (*q.shape[:3], values.codec.dim)
    if q.shape[2] == 0 or max(keys.lengths) == 0:
        return mx.zeros(out_shape, q.dtype)
    for name, tokens in (("keys", keys), ("values", values)):
        check_rows_held(tokens, q.shape[2], name)
    call = _Call(scale, mask == "causal" if isinstance(mask, str) else False, window, tuple(padding), q.shape[2])
    one = q.shape[0] * q.shape[1] * max(keys.lengths) * (keys.codec.dim + values.codec.dim)
    step = max(MAX_ROWS, DIVISION.products // one)
    if q.shape[2] <= step:
        return _attend_part(q, keys, values, call, array, sinks, 0)
    parts = []
    for start in range(0, q.shape[2], step):
        part = slice(start, start + step)
        own = array if array is None or array.shape[2] == 1 else array[:, :, part]
        parts.append(_attend_part(q[:, :, part], keys, values, call, own, sinks, start))
    return mx.concatenate(parts, axis=2)


@dataclass(frozen=True)
class _Call:
    """What all parts of a call share. queries: of the whole call."""

    scale: float
    causal: bool
    window: int | None
    padding: tuple[int, ...]
    queries: int


def _attend_part(
    q: mx.array,
    keys: Tokens,
    values: Tokens,
    call: _Call,
    array: mx.array | None,
    sinks: mx.array | None,
    start: int,
) -> mx.array:
    """Attention of the queries from number `start` of the call on; q and the mask hold only these."""
    plan = _Plan.of(q, keys, values)
    out_shape = (*q.shape[:3], values.codec.dim)
    inputs = _key_inputs(q, keys) | _value_inputs(values)
    variant = _variant(q, keys, values, array, plan.rows) | {"FINAL": int(plan.groups == 1)}
    variant |= {"USES_STACK": int(plan.groups == 1 or plan.levels > 1), "LEVELS": MAX_LEVELS if plan.levels > 1 else 1}
    inputs["meta"] = _meta(q, keys, values, call, array, plan, start)
    if array is not None:
        inputs["mask"] = array
    dim = values.codec.dim
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {}
    if plan.groups == 1:
        outputs["out"] = (out_shape, q.dtype)
    else:
        outputs["sums"] = ((plan.work, plan.groups, plan.rows, 2, dim), mx.float32)
        outputs["tails"] = ((plan.work, plan.groups, plan.rows, 5), mx.int32)
    if variant["USES_STACK"]:
        outputs["scratch"] = ((plan.workers, plan.groups, plan.levels, plan.rows, 2, dim), mx.float32)
    with_sinks = sinks is not None
    if with_sinks and plan.groups == 1:
        inputs["sinks"] = _padded(sinks)
    variant["HAS_SINKS"] = int("sinks" in inputs)
    kernel = _attend_kernel(tuple(variant.items()), keys.codec, values.codec, tuple(inputs), tuple(outputs))
    results = kernel(inputs, (plan.groups, plan.workers, 1), THREADS, list(outputs.values()))
    if plan.groups == 1:
        return results[0]
    merge_inputs = {"sums": results[0], "tails": results[1], "meta": inputs["meta"], "v_tables": inputs["v_tables"]}
    if with_sinks:
        merge_inputs["sinks"] = _padded(sinks)
    merge = _merge_kernel(values.codec, q.dtype, plan.rows, DIVISION.max_groups, tuple(merge_inputs))
    merge_rows = _merge_rows(dim)
    merge_groups = -(-plan.work * plan.rows // merge_rows)
    return merge(merge_inputs, (merge_groups, 1, 1), 32 * merge_rows, [(out_shape, q.dtype)])[0]


def scores(
    q: mx.array,
    keys: Tokens,
    scale: float,
    mask: Mask = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Attention logits before softmax, int32 [B, Hq, L, longest row]; arguments and errors as in the reference."""
    check_query(q, keys, scale)
    padding, array = checked_mask(mask, window, left_padding, q.shape, keys.lengths, keys.first.shape[1])
    longest = max(keys.lengths)
    shape = (*q.shape[:3], longest)
    if q.shape[2] == 0 or longest == 0:
        return mx.full(shape, EXCLUDED, mx.int32)
    check_rows_held(keys, q.shape[2], "keys")
    plan = _Plan.of(q, keys, None)
    inputs = _key_inputs(q, keys)
    variant = _variant(q, keys, None, array, plan.rows)
    call = _Call(scale, mask == "causal" if isinstance(mask, str) else False, window, tuple(padding), q.shape[2])
    inputs["meta"] = _meta(q, keys, None, call, array, plan, 0)
    if array is not None:
        inputs["mask"] = array
    kernel = _attend_kernel(tuple(variant.items()), keys.codec, None, tuple(inputs), ("logits",))
    return kernel(inputs, (plan.groups, plan.workers, 1), THREADS, [(shape, mx.int32)])[0]


@dataclass(frozen=True)
class _Plan:
    """How the work of a call is divided.

    rows: queries of a group.  work: blocks of `rows` queries in all rows and kv heads.  splits: splits of a group.
    groups: groups that share the splits of one block.  workers: blocks at work at a time.  levels: of the tree in
    a group.
    """

    rows: int
    work: int
    splits: int
    groups: int
    workers: int
    levels: int

    @staticmethod
    def of(q: mx.array, keys: Tokens, values: Tokens | None) -> _Plan:
        heads = keys.first.shape[1]
        queries = q.shape[1] // heads * q.shape[2]
        widest = _max_rows(keys.codec, None if values is None else values.codec)
        blocks = -(-queries // widest)
        rows = -(-queries // blocks)
        if queries > widest:
            # A round number of rows, so that few kernels serve every length.
            rows = widest
        work = q.shape[0] * heads * -(-queries // rows)
        total = -(-max(keys.lengths) // SPLIT)
        if values is None:
            return _Plan(rows, work, 1, total, min(work, DIVISION.workers), 1)
        splits = _power_of_two(total)
        if total > DIVISION.one_dispatch and work < DIVISION.wanted_groups:
            wanted = min(DIVISION.max_groups, -(-DIVISION.wanted_groups // work), total)
            splits = _power_of_two(-(-total // wanted))
        splits = min(splits, 2 ** (MAX_LEVELS - 1))
        groups = -(-total // splits)
        if groups > DIVISION.max_groups:
            most = SPLIT * splits * DIVISION.max_groups
            raise ValueError(f"keys must hold at most {most} tokens a row; got {max(keys.lengths)}")
        workers = min(work, DIVISION.workers if groups == 1 else max(DIVISION.workers // groups, 64))
        return _Plan(rows, work, splits, groups, workers, min(splits, total).bit_length())


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _padded(sinks: mx.array | None) -> mx.array:
    """Sinks as float32, at least 8 of them: MLX puts smaller inputs into another address space."""
    assert sinks is not None
    return mx.pad(sinks.astype(mx.float32), [(0, max(0, 8 - sinks.shape[0]))])


def _key_inputs(q: mx.array, keys: Tokens) -> dict[str, mx.array]:
    inputs = {"q": q, "k_first": keys.first, "k_recent": keys.recent}
    if _has_tiles(keys):
        packed = keys.packed
        inputs |= {"k_words": packed.words, "k_scales": packed.scales, "k_tables": codec_tables(keys.codec)}
        heads, dim = keys.first.shape[1], keys.codec.dim
        factors, base, exponent = packed.factors, packed.base, packed.base_exponent
        assert base is not None
        assert exponent is not None
        zeros = mx.zeros((len(keys.lengths), heads, dim), mx.int8)
        inputs |= {"k_base": base, "k_base_exponent": exponent, "k_factors": zeros if factors is None else factors}
        if packed.sign_words is not None and packed.sign_scales is not None:
            inputs |= {"k_sign_words": packed.sign_words, "k_sign_scales": packed.sign_scales}
    return inputs


def _value_inputs(values: Tokens) -> dict[str, mx.array]:
    inputs = {"v_first": values.first, "v_recent": values.recent, "v_tables": codec_tables(values.codec)}
    if _has_tiles(values):
        inputs |= {"v_words": values.packed.words, "v_scales": values.packed.scales}
    return inputs


def _has_tiles(tokens: Tokens) -> bool:
    return packed_tiles(max(tokens.lengths)) > 0


def _variant(
    q: mx.array, keys: Tokens, values: Tokens | None, mask: mx.array | None, rows: int
) -> dict[str, Parameter]:
    """The parameters of a kernel's text beside the codecs."""
    variant: dict[str, Parameter] = {
        "ROWS": rows,
        "QT": TYPES[q.dtype],
        "KT": TYPES[keys.first.dtype],
        "HAS_PACKED": int(_has_tiles(keys)),
        "HAS_MASK": int(mask is not None),
        "MASK_ADDITIVE": int(mask is not None and mask.dtype != mx.bool_),
        "SCORES": int(values is None),
        "FINAL": 0,
        "USES_STACK": 0,
        "HAS_SINKS": 0,
        "LEVELS": 1,
    }
    if values is not None:
        variant["VT"] = TYPES[values.first.dtype]
    return variant


def _meta(
    q: mx.array,
    keys: Tokens,
    values: Tokens | None,
    call: _Call,
    mask: mx.array | None,
    plan: _Plan,
    start: int,
) -> mx.array:
    """int32: the numbers of a call and of its rows, at the places that templates/attention.metal names."""
    heads = keys.first.shape[1]
    factor = struct.unpack("<i", struct.pack("<f", query_factor(call.scale)))[0]
    strides = [0, 0, 0, 0]
    if mask is not None:
        step = 1
        for axis in (3, 2, 1, 0):
            strides[axis] = step if mask.shape[axis] > 1 else 0
            step *= mask.shape[axis]
    other = keys if values is None else values
    numbers = [
        heads,
        q.shape[1] // heads,
        q.shape[2],
        keys.packed.words.shape[2],
        other.packed.words.shape[2],
        keys.recent.shape[2],
        other.recent.shape[2],
        keys.first.shape[2],
        other.first.shape[2],
        int(call.causal),
        0 if call.window is None else min(int(call.window), 2**31 - 1),
        factor,
        plan.splits,
        plan.groups,
        *strides,
        max(keys.lengths),
        plan.levels,
        plan.work,
        plan.workers,
        call.queries - start - q.shape[2],
    ]
    numbers += [0] * (META_CALL - len(numbers))
    for n, k, v, p in zip(keys.lengths, keys.held, other.held, call.padding, strict=True):
        numbers += [n, k, v, p]
    return _numbers(tuple(numbers))


@lru_cache(maxsize=64)
def _numbers(values: tuple[int, ...]) -> mx.array:
    # The layers of a model ask for the same numbers one after the other.
    return mx.array(values, mx.int32)


def _attend_parameters(
    variant: dict[str, Parameter], keys: Codec, values: Codec | None
) -> list[tuple[str, Parameter]]:
    dim = keys.dim
    parameters: list[tuple[str, Parameter]] = [*variant.items(), *rotation_parameters("DK", dim)]
    padded = -(-dim // 32) * 32
    parameters += [
        ("DK_PADDED", padded),
        ("SHARES", _shares(int(variant["ROWS"]))),
        ("BK", keys.code_bits),
        ("PROD", int(keys.kind == "prod")),
        ("WORDS_K", words_per_vector(dim, keys.code_bits)),
        ("WORDS_SIGN", words_per_vector(dim, 1)),
        ("KAPPA_K", keys.scale_shift),
        ("KAPPA_SIGN", keys.sign_scale_shift),
        ("VECTOR", max(padded, 0 if values is None else values.dim)),
        *_table_parameters("K", keys.code_bits),
    ]
    # Scores have no values: the numbers below only let the text compile.
    other = values or keys
    parameters += [
        *rotation_parameters("DV", other.dim),
        ("BV", other.code_bits),
        ("WORDS_V", words_per_vector(other.dim, other.code_bits)),
        ("KAPPA_V", other.scale_shift),
        *_table_parameters("V", other.code_bits),
    ]
    if values is None:
        parameters.append(("VT", "float"))
    return parameters


def _table_parameters(name: str, bits: int) -> list[tuple[str, Parameter]]:
    size = {5: 32, 6: 64, 8: 1}.get(bits, 256)
    return [(f"TABLE_{name}", "float2" if bits <= 4 else "float"), (f"TABLE_{name}_SIZE", size)]


def threadgroup_bytes(rows: int, keys: Codec, values: Codec | None, levels: int, packed: bool = True) -> int:
    """Threadgroup memory of a kernel of `rows` queries, in bytes."""
    padded = -(-keys.dim // 32) * 32
    vector = max(padded, 0 if values is None else values.dim)
    table = {5: 128, 6: 256, 8: 4}
    sizes = [4 * vector * rows, 2 * keys.dim * rows, 12 * rows, 4 * rows, 4 * rows, 4 * rows]
    if packed:
        sizes += [table.get(keys.code_bits, 2048), 16 * rows]
        sizes += [4 * vector * rows] if keys.kind == "prod" else []
    if values is not None:
        sizes += [256, 256, 32 * rows, 32 * rows, 32 * rows, 48 * rows, 512 * rows, 1024, 64]
        sizes += [12 * levels * rows, 4 * levels * rows]
        if packed:
            sizes += [table.get(values.code_bits, 2048), 1024 * _shares(rows), 32 * rows]
    # Each array may start at a multiple of 16 bytes.
    return sum(-(-size // 16) * 16 for size in sizes)


def _shares(rows: int) -> int:
    """Floats of a token's shares: loads of four serve up to four queries each."""
    return rows if rows <= 2 else -(-rows // 4) * 4


@remembered
def _max_rows(keys: Codec, values: Codec | None) -> int:
    """The most queries of a group whose threadgroup memory fits."""
    for rows in range(MAX_ROWS, 0, -1):
        if threadgroup_bytes(rows, keys, values, MAX_LEVELS) <= THREADGROUP_BYTES:
            return rows
    raise ValueError(f"a key of {keys.dim} coordinates does not fit into threadgroup memory")


def _name(stem: str, keys: Codec, values: Codec | None, variant: dict[str, Parameter]) -> str:
    key = f"k{keys.dim}b{keys.bits}{'prod' if keys.kind == 'prod' else ''}"
    value = "" if values is None else f"_v{values.dim}b{values.bits}"
    kinds = {"half": "f16", "bfloat16_t": "bf16", "float": "f32"}
    types = [kinds[str(variant[t])] for t in ("QT", "KT", "VT") if t in variant]
    types = types[:1] if len(set(types)) == 1 else types
    flags = {
        "HAS_PACKED": "packed",
        "HAS_MASK": "mask",
        "MASK_ADDITIVE": "additive",
        "HAS_SINKS": "sinks",
        "FINAL": "final",
        "USES_STACK": "stack",
    }
    extra = "".join(f"_{label}" for flag, label in flags.items() if variant.get(flag))
    if variant["LEVELS"] != 1:
        extra += f"{variant['LEVELS']}"
    return f"turboquant_{stem}_{key}{value}_rows{variant['ROWS']}_{'_'.join(types)}{extra}"


@remembered
def _attend_kernel(
    variant: tuple[tuple[str, Parameter], ...],
    keys: Codec,
    values: Codec | None,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Kernel:
    chosen = dict(variant)
    name = _name("scores" if values is None else "attend", keys, values, chosen)
    parts = ("numerics", "rotation", "packing", "attention", "sink", "score", "weigh")
    return build(name, "attend", parts, tuple(_attend_parameters(chosen, keys, values)), inputs, outputs)


def _merge_rows(dim: int) -> int:
    """Queries of a group of the second dispatch."""
    return 4 if dim <= 512 else 2


@remembered
def _merge_kernel(values: Codec, dtype: mx.Dtype, rows: int, groups: int, inputs: tuple[str, ...]) -> Kernel:
    parameters: list[tuple[str, Parameter]] = [
        *rotation_parameters("DV", values.dim),
        ("KAPPA_V", values.scale_shift),
        ("ROWS", rows),
        ("MERGE_ROWS", _merge_rows(values.dim)),
        ("MERGE_LEVELS", groups.bit_length()),
        ("HAS_SINKS", int("sinks" in inputs)),
        ("QT", TYPES[dtype]),
    ]
    name = f"turboquant_merge_v{values.dim}_rows{rows}_groups{groups}_{dtype_name(dtype)}"
    name += "_sinks" if "sinks" in inputs else ""
    return build(name, "merge", ("numerics", "rotation", "attention", "sink"), tuple(parameters), inputs, ("out",))
