"""A case: one call sequence of the public functions, evaluated by the oracle and by a backend.

A case is a JSON object with ``id``, ``group``, ``comment``, ``flags``, ``op`` and ``inputs``; a vector adds
``expected``. Every op has the same inputs for both sides and yields named arrays of words
(:class:`compare.Words`), so comparing is one loop.

Ops and their inputs (array specs: see :mod:`inputs`; a codec is ``{"dim", "bits", "seed", "kind"}``):

- ``quantize``: codec, x [..., T, D], base, factors or null, dequantize: dtypes to dequantize to.
- ``dequantize``: codec, words, scales and optionally base, base_exponent, factors, sign_words, sign_scales;
  dequantize.
- ``tokens``: store (codec, role, dtype, batch, heads, factors, data [B, H, columns, D]), steps; plain: a
  dtype or null.
- ``attend``: keys and values (stores), steps, q, scale, mask, sinks, window, left_padding, scores (whether to
  ask for them).
- ``error``: call and its arguments; expected is the exception's type and the words its message must hold.
- ``supported``: dims; the ones that ``supported_dim`` accepts.

A step is ``["append", columns, counts or null]``, which takes the next columns of ``data``, or ``["trim", n
or list]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compare import Words
from .inputs import load
from .oracle_attention import Mask, attend, broadcast_mask, scores
from .oracle_codec import (
    TILE,
    Base,
    Codes,
    OracleCodec,
    decode,
    encode,
    pack,
    tile_zero_factors,
    unpack,
    word_count,
)
from .oracle_numbers import Array, cast
from .oracle_rotation import split_order
from .oracle_tokens import FIRST, OracleTokens

Case = dict[str, Any]
Arrays = dict[str, Words]

FLAGS = frozenset(
    [
        "zero_vector",
        "boundary_tie",
        "one_hot",
        "word_spill",
        "tail_tile",
        "left_padding",
        "sink",
        "all_masked_row",
        "huge_norm",
        "tiny_norm",
        "non_finite",
        "odd_dim",
        "saturated_scale",
        "subnormal_scale",
        "additive_mask",
        "bool_mask",
        "causal",
        "low_rank_mask",
        "rank5_mask",
        "window",
        "gqa",
        "ragged",
        "trim",
        "deep_trim",
        "prod",
        "int8",
        "dead_channel",
        "outlier_channel",
        "constant_key",
        "first_tokens",
        "tile_boundary",
        "split_tree",
        "equal_logits",
        "mixed_widths",
        "mixed_dims",
        "chunking",
        "given_factors",
        "rounding_tie",
        "overflow",
        "error",
        "seed",
        "long",
        "all_padding",
        "dtype_cast",
    ]
)


def oracle_codec(spec: dict[str, Any]) -> OracleCodec:
    return OracleCodec(spec["dim"], spec["bits"], spec.get("seed", 0), spec.get("kind", "mse"))


def evaluate(case: Case) -> Arrays:
    """What the contract says: the expected arrays of a case."""
    return _OPS[case["op"]](case["inputs"])


# ---- quantize and dequantize ---------------------------------------------------------------------


def _quantize(inputs: dict[str, Any]) -> Arrays:
    codec = oracle_codec(inputs["codec"])
    x = load(inputs["x"])
    lead, (length, dim) = x.shape[:-2], x.shape[-2:]
    vectors = x.reshape(-1, length, dim)
    base = inputs.get("base", False)
    given = None if inputs.get("factors") is None else load(inputs["factors"]).reshape(-1, dim)
    coded, bases, factors = [], [], []
    for k, v in enumerate(vectors):
        f = given[k] if given is not None else tile_zero_factors(v[:TILE]) if base else None
        codes, tile_base = encode(v, codec, base, f)
        coded.append(codes)
        bases.append(tile_base)
        factors.append(f)
    out = _stack_codes(codec, coded, (*lead, length))
    if base:
        out["base"] = Words.of("int16", np.stack([b.m for b in bases if b]).reshape(*lead, -1, dim))
        out["base_exponent"] = Words.of("int16", np.stack([b.e for b in bases if b]).reshape(*lead, -1))
    if factors[0] is not None:
        out["factors"] = Words.of("int8", np.stack([f for f in factors if f is not None]).reshape(*lead, dim))
    decoded = [decode(c, codec, b, f) for c, b, f in zip(coded, bases, factors, strict=True)]
    for dtype in inputs.get("dequantize", ()):
        out[f"dequantized_{dtype}"] = Words.of(dtype, cast(np.stack(decoded), dtype).reshape(x.shape))
    return out


def _stack_codes(codec: OracleCodec, coded: list[Codes], lead: tuple[int, ...]) -> Arrays:
    words = np.stack([pack(c.c, codec.dim, codec.code_bits) for c in coded])
    out = {
        "words": Words.of("uint32", words.reshape(*lead, words.shape[-1])),
        "scales": Words.of("float16", np.stack([c.scale for c in coded]).reshape(lead)),
    }
    if codec.kind == "prod":
        extra = np.stack([pack(c.c2, codec.dim, 1) for c in coded if c.c2 is not None])
        out["sign_words"] = Words.of("uint32", extra.reshape(*lead, extra.shape[-1]))
        out["sign_scales"] = Words.of(
            "float16", np.stack([c.scale2 for c in coded if c.scale2 is not None]).reshape(lead)
        )
    return out


def _dequantize(inputs: dict[str, Any]) -> Arrays:
    codec = oracle_codec(inputs["codec"])
    words = load(inputs["words"])
    lead = words.shape[:-1]
    length = lead[-1]
    c = unpack(words, codec.dim, codec.code_bits).reshape(-1, length, codec.dim)
    scale = cast(load(inputs["scales"]), "float16").reshape(-1, length)
    c2 = scale2 = m = e = f = None
    if codec.kind == "prod":
        c2 = unpack(load(inputs["sign_words"]), codec.dim, 1).reshape(c.shape)
        scale2 = cast(load(inputs["sign_scales"]), "float16").reshape(-1, length)
    if inputs.get("base") is not None:
        m = load(inputs["base"]).reshape(len(c), -1, codec.dim)
        e = load(inputs["base_exponent"]).reshape(len(c), -1)
    if inputs.get("factors") is not None:
        f = load(inputs["factors"]).reshape(-1, codec.dim)
    rows = [
        decode(
            Codes(c[k], scale[k], None if c2 is None else c2[k], None if scale2 is None else scale2[k]),
            codec,
            None if m is None or e is None else Base(m[k], e[k]),
            None if f is None else f[k],
        )
        for k in range(len(c))
    ]
    x = np.stack(rows).reshape(*lead, codec.dim)
    return {f"dequantized_{dtype}": Words.of(dtype, cast(x, dtype)) for dtype in inputs["dequantize"]}


# ---- tokens and attention ------------------------------------------------------------------------


def build_store(spec: dict[str, Any], steps: list[list[Any]]) -> OracleTokens:
    """The oracle's tokens after ``steps``."""
    factors = None if spec.get("factors") is None else load(spec["factors"])
    store = OracleTokens(
        oracle_codec(spec["codec"]), spec["role"], spec["batch"], spec["heads"], spec["dtype"], factors
    )
    data = load(spec["data"])
    at = 0
    for step in steps:
        if step[0] == "append":
            store.append(data[:, :, at : at + step[1]], step[2])
            at += step[1]
        else:
            store.trim(step[1])
    return store


def store_arrays(store: OracleTokens, prefix: str) -> Arrays:
    """Every array of a store that the contract pins, with zeros beyond each row."""
    codec, batch, heads = store.codec, store.batch, store.heads
    tiles = max((len(r.tiles) for row in store.rows for r in row), default=0)
    width = max(recent_width(store, b) for b in range(batch))
    first = min(FIRST, max(store.lengths))
    out: dict[str, tuple[str, Array]] = {
        "lengths": ("int32", np.array(store.lengths)),
        "first": (store.dtype, np.zeros((batch, heads, first, codec.dim), np.int64)),
        "recent": (store.dtype, np.zeros((batch, heads, width, codec.dim), np.int64)),
    }
    if tiles:
        shape = (batch, heads, tiles, TILE)
        out["words"] = ("uint32", np.zeros((*shape, word_count(codec.dim, codec.code_bits)), np.int64))
        out["scales"] = ("float16", np.zeros(shape, np.int64))
        if codec.kind == "prod":
            out["sign_words"] = ("uint32", np.zeros((*shape, word_count(codec.dim, 1)), np.int64))
            out["sign_scales"] = ("float16", np.zeros(shape, np.int64))
        if store.role == "key":
            out["base"] = ("int16", np.zeros((*shape[:3], codec.dim), np.int64))
            out["base_exponent"] = ("int16", np.zeros(shape[:3], np.int64))
            out["factors"] = ("int8", np.zeros((batch, heads, codec.dim), np.int64))
    for b, row in enumerate(store.rows):
        for h, head in enumerate(row):
            n = store.lengths[b]
            keep = min(FIRST, n)
            out["first"][1][b, h, :keep] = cast(head.raw[:keep], store.dtype)
            w = recent_width(store, b)
            out["recent"][1][b, h, width - w :] = cast(head.raw[n - w :], store.dtype)
            for t, tile in enumerate(head.tiles):
                out["words"][1][b, h, t] = pack(tile.codes.c, codec.dim, codec.code_bits)
                out["scales"][1][b, h, t] = tile.codes.scale
                if tile.codes.c2 is not None:
                    out["sign_words"][1][b, h, t] = pack(tile.codes.c2, codec.dim, 1)
                    out["sign_scales"][1][b, h, t] = tile.codes.scale2
                if tile.base is not None:
                    out["base"][1][b, h, t] = tile.base.m[0]
                    out["base_exponent"][1][b, h, t] = tile.base.e[0]
                    out["factors"][1][b, h] = head.factors
    return {f"{prefix}{name}": Words.of(dtype, values) for name, (dtype, values) in out.items()}


def recent_width(store: OracleTokens, b: int) -> int:
    """How many of a row's youngest tokens every backend must still hold raw."""
    return min(128, store.lengths[b] - store.rows[b][0].held_from)


def _tokens(inputs: dict[str, Any]) -> Arrays:
    store = build_store(inputs["store"], inputs["steps"])
    out = store_arrays(store, "")
    if inputs.get("plain"):
        out["plain"] = Words.of(inputs["plain"], store.plain(inputs["plain"]))
    return out


def mask_columns(lengths: list[int], left_padding: list[int] | None) -> int:
    return max(n + (0 if left_padding is None else left_padding[b]) for b, n in enumerate(lengths))


def oracle_mask(spec: Any, q_shape: tuple[int, ...], kv_heads: int, columns: int) -> Mask:
    if spec is None:
        return Mask()
    if spec == "causal":
        return Mask("causal")
    full = broadcast_mask(load(spec), q_shape[0], kv_heads, q_shape[1], q_shape[2], columns)
    return Mask("bool" if spec["dtype"] == "bool" else "additive", full)


def _attend(inputs: dict[str, Any]) -> Arrays:
    keys = build_store(inputs["keys"], inputs["steps"])
    values = build_store(inputs["values"], inputs["steps"])
    q = load(inputs["q"])
    pads = inputs.get("left_padding")
    mask = oracle_mask(inputs.get("mask"), q.shape, keys.heads, mask_columns(keys.lengths, pads))
    sinks = None if inputs.get("sinks") is None else load(inputs["sinks"])
    scale, window, dtype = inputs["scale"], inputs.get("window"), inputs["q"]["dtype"]
    out = {"output": Words.of(dtype, attend(q, keys, values, scale, mask, sinks, window, pads, dtype))}
    if inputs.get("scores"):
        out["scores"] = Words.of("int32", scores(q, keys, scale, mask, pads))
    if inputs.get("arrays"):
        out |= store_arrays(keys, "keys.") | store_arrays(values, "values.")
    return out


def _error(inputs: dict[str, Any]) -> Arrays:
    return {}


def _supported(inputs: dict[str, Any]) -> Arrays:
    return {
        "supported": Words.of("int32", np.array([int(split_order(d) is not None) for d in inputs["dims"]]))
    }


_OPS = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "tokens": _tokens,
    "attend": _attend,
    "error": _error,
    "supported": _supported,
}
