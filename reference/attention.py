"""Attention on packed keys and values, in integers.

A score of a packed key is <H s q, c> times two scales: the query is rotated once, the keys are never rotated back.
Likewise the weighted sum of values is taken over centroids and rotated back once at the end.  Softmax works tile by
tile (64 tokens): logits are fixed-point base-2 logarithms, weights come from two small tables, and each tile carries
a power of two, so tiles merge like the blocks of flash attention, but by exact shifts (docs/numerics.md, sections 4
and 5).

Shapes: B rows, Hq query and Hk kv heads, G = Hq / Hk, L queries, M = G L, T columns (tokens, whole tiles), N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .codec import coded_centroids, sign_centroids
from .integers import (
    IDENTITY_EXPONENT,
    float_exponent,
    integer_matmul,
    merge,
    pow2,
    quotient_times_pow2,
    snap,
    split_matmul,
)
from .masks import Mask, MaskView, additive_logits, attended, row_mask
from .query import LOG2_E, Query, clamp28, logit, prepare_query
from .rotation import rotate_back
from .tokens import select_rows
from .types import DTYPES, FIRST, LAG, TILE, Codec, Tokens, packed_tiles

__all__ = ["attend", "scores"]

EXCLUDED = -(2**31)
POISON = 2**31 - 1
FRACTION = 12
"""Fractional bits of a logit."""
RAW_KEY_BITS = 14
"""Raw keys keep one bit more than values: beside a large constant part, their spread needs it."""
RAW_VALUE_BITS = 13
SPLIT = 4
"""Tiles that are merged one after the other before the tree."""
BLOCK = 2**22
"""Logits computed at a time; any value gives the same bits."""

WEIGHT_HIGH = [round(2**12 * 2 ** (-h / 64)) for h in range(64)]
WEIGHT_LOW = [round(2**12 * 2 ** (-low / 4096)) for low in range(64)]


def scores(
    q: mx.array,
    keys: Tokens,
    scale: float,
    mask: Mask = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Attention logits of the last L tokens of every row against all tokens, before softmax.

    Arguments as in `attend`.  Returns int32 [B, Hq, L, longest row]: base-2 logarithms with 12 fractional bits;
    -2^31 where the query may not look, 2^31 - 1 where query or key hold NaN or infinity.
    """
    check_query(q, keys, scale)
    longest = max(keys.lengths)
    rows = []
    for b, row in enumerate(select_rows(keys)):
        view = row_mask(mask, window, left_padding, b, q.shape, keys.lengths, keys.first.shape[1])
        if row.lengths[0] == 0 or q.shape[2] == 0:
            rows.append(mx.full((*q.shape[1:3], longest), EXCLUDED, mx.int32))
            continue
        parts = []
        for start, stop in _blocks(q, row.lengths[0]):
            logits, allowed, poison = _logits(q[b, :, start:stop], start, q.shape[2], row, scale, view)
            logits = mx.where(poison, POISON, logits)
            logits = mx.where(allowed, logits, EXCLUDED)[..., : row.lengths[0]]
            parts.append(logits.reshape(q.shape[1], stop - start, -1))
        part = mx.concatenate(parts, axis=1)
        rows.append(mx.pad(part, [(0, 0), (0, 0), (0, longest - part.shape[2])], constant_values=mx.array(EXCLUDED)))
    return mx.stack(rows)


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
    """Softmax attention of the last L tokens of every row.

    q: [B, Hq, L, D], floating.  keys, values: the tokens of B rows with Hk kv heads, Hk dividing Hq; D and Dv may
    differ.  scale: softmax scale.  mask: None, "causal", or a bool or additive array that broadcasts to [B, Hq, L,
    columns] (or of rank 5, [B, Hk, G, L, columns]); column c of row b is position c - left_padding[b].
    sinks: [Hq] logits that take part in the denominator only.  window: a query sees at most this many tokens, itself
    included.
    Returns [B, Hq, L, Dv] in q's dtype; zeros for a query that may attend to nothing.
    Raises ValueError naming the argument for shapes and values that do not fit.
    """
    check_query(q, keys, scale)
    check_values(q, keys, values, sinks)
    if q.shape[2] == 0:
        return mx.zeros((*q.shape[:3], values.codec.dim), q.dtype)
    rows = []
    pairs = zip(select_rows(keys), select_rows(values), strict=True)
    for b, (row_keys, row_values) in enumerate(pairs):
        view = row_mask(mask, window, left_padding, b, q.shape, keys.lengths, keys.first.shape[1])
        parts = [
            _attend_block(q[b, :, start:stop], start, q.shape[2], row_keys, row_values, scale, view, sinks)
            for start, stop in _blocks(q, row_keys.lengths[0])
        ]
        rows.append(mx.concatenate(parts, axis=1))
    return mx.stack(rows)


def _blocks(q: mx.array, length: int) -> list[tuple[int, int]]:
    """Ranges of queries whose logits fit into BLOCK."""
    heads, queries = q.shape[1], q.shape[2]
    step = max(1, min(queries, BLOCK // max(1, heads * length)))
    return [(start, min(start + step, queries)) for start in range(0, queries, step)]


@dataclass(frozen=True)
class _Raw:
    """Raw tokens of the tiles that some query reads raw: x int32 [Hk, n, 64, D], e int32 and finite bool [Hk, n, 64].

    The tiles are tile 0 (its first tokens are always raw) and those from `start` on.
    """

    start: int
    x: mx.array
    e: mx.array
    finite: mx.array

    def dense(self, tiles: mx.array, axis: int) -> mx.array:
        """An array over these tiles as one over all tiles, zero in between."""
        if self.start <= 1:
            return tiles
        first, rest = mx.split(tiles, [1], axis=axis)
        shape = list(first.shape)
        shape[axis] = self.start - 1
        return mx.concatenate([first, mx.zeros(shape, tiles.dtype), rest], axis=axis)


def _raw_tiles(row: Tokens, oldest: int, name: str, bits: int) -> _Raw:
    """The raw tiles that queries at positions >= oldest need, snapped to `bits` bits and a sign."""
    length, held = row.lengths[0], row.held[0]
    start = packed_tiles(max(oldest, 0) + 1)
    check_held(length, held, oldest, name)
    recent_from = length - held
    recent = row.recent
    if recent_from < start * TILE:
        recent, recent_from = recent[:, :, start * TILE - recent_from :], start * TILE
    if start == 0 and recent_from > 0:
        recent, recent_from = mx.concatenate([row.first[:, :, :recent_from], recent], axis=2), 0
    end = -(-length // TILE) * TILE
    pieces = [mx.pad(recent[0], [(0, 0), (0, end - length), (0, 0)])]
    if start > 0:
        pieces.insert(0, mx.pad(row.first[0], [(0, 0), (0, TILE - FIRST), (0, 0)]))
    raw = mx.concatenate(pieces, axis=1)
    x, e, finite = snap(raw, bits)
    heads, dim = raw.shape[0], raw.shape[2]
    return _Raw(start, x.reshape(heads, -1, TILE, dim), e.reshape(heads, -1, TILE), finite.reshape(heads, -1, TILE))


def _read_packed(positions: mx.array, columns: int) -> mx.array:
    """bool [L, T]: whether the query at a position reads a token packed (section 2)."""
    j = mx.arange(columns)
    complete = (j // TILE + 1) * TILE + LAG <= positions[:, None] + 1
    return complete & (j >= FIRST)


def _logits(
    q: mx.array, start: int, total: int, keys: Tokens, scale: float, view: MaskView
) -> tuple[mx.array, mx.array, mx.array]:
    """F int32, allowed and poison bool, all [Hk, M, T], of queries start .. start + L - 1 of `total` in one row."""
    heads, length = keys.first.shape[1], keys.lengths[0]
    group, queries = q.shape[0] // heads, q.shape[1]
    columns = -(-length // TILE) * TILE
    positions = mx.arange(start, start + queries) + (length - total)
    oldest = length - total + start
    query = prepare_query(q.reshape(heads, group * queries, q.shape[2]), scale, keys)
    packed_here = mx.tile(_read_packed(positions, columns), (group, 1))

    raw = _raw_tiles(keys, oldest, "keys", RAW_KEY_BITS)
    tile_logits = _raw_logits(query, raw)
    logits = raw.dense(tile_logits, axis=2).reshape(heads, -1, columns)
    bad = mx.logical_not(raw.dense(raw.finite, axis=1).reshape(heads, 1, columns))
    bad = bad & mx.logical_not(packed_here)
    tiles = packed_tiles(max(length - total + start + queries - 1, 0) + 1)
    if tiles:
        packed_logits, packed_bad = _packed_logits(query, keys, tiles)
        pad = [(0, 0), (0, 0), (0, columns - tiles * TILE)]
        logits = mx.where(packed_here, mx.pad(packed_logits, pad), logits)
        bad = bad | (packed_here & mx.pad(packed_bad, pad))
    allowed, additive = attended(view, positions, group, heads, start, columns, length)
    if additive is not None:
        amount, nan = additive_logits(additive)
        logits = clamp28(logits + amount)
        bad = bad | nan
    poison = bad | mx.logical_not(query.finite)
    shape = (heads, group * queries, columns)
    return logits, mx.broadcast_to(allowed, shape), mx.broadcast_to(poison, shape)


def _raw_logits(query: Query, raw: _Raw) -> mx.array:
    """F of raw keys: int32 [Hk, M, n, 64]."""
    heads, tiles, _, dim = raw.x.shape
    flat = raw.x.reshape(heads, tiles * TILE, dim)
    dots = split_matmul(query.plain, flat.swapaxes(1, 2)).reshape(heads, -1, tiles, TILE)
    return logit(dots, query.exponent[..., None] + raw.e[:, None] - 1 - RAW_KEY_BITS)


def _packed_logits(query: Query, keys: Tokens, tiles: int) -> tuple[mx.array, mx.array]:
    """F of packed keys int32 [Hk, M, 64 tiles], and which hold NaN, bool [Hk, 1, 64 tiles]."""
    codec, packed = keys.codec, keys.packed
    scales = packed.scales[0, :, :tiles].reshape(keys.first.shape[1], 1, -1)
    nan = mx.isnan(scales)
    codes = _flat_centroids(packed.words, tiles, codec)
    total = _code_logits(query.rotated, query.rotated_exponent, codes, scales)
    if packed.sign_words is not None and packed.sign_scales is not None:
        signs = sign_centroids(packed.sign_words[0, :, :tiles], codec).reshape(codes.shape)
        sign_scales = packed.sign_scales[0, :, :tiles].reshape(scales.shape)
        total = total + _code_logits(query.twice, query.twice_exponent, signs, sign_scales)
    if packed.base is not None and packed.base_exponent is not None:
        base = packed.base[0, :, :tiles].astype(mx.int32)
        exponent = packed.base_exponent[0, :, :tiles].astype(mx.int32)[:, None]
        of_tile = logit(split_matmul(query.plain, base.swapaxes(1, 2)), query.exponent + exponent - 14)
        total = total + mx.repeat(of_tile, TILE, axis=2)
    return clamp28(total), nan


def _flat_centroids(words: mx.array, tiles: int, codec: Codec) -> mx.array:
    """int32 [Hk, 64 tiles, D] centroids of the first tiles of a row."""
    codes = coded_centroids(words[0, :, :tiles], codec)
    return codes.reshape(codes.shape[0], tiles * TILE, codec.dim)


def _code_logits(rotated: mx.array, exponent: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
    dots = integer_matmul(rotated, codes.swapaxes(1, 2)).astype(mx.float32)
    known = mx.where(mx.isnan(scales), mx.zeros_like(scales), scales).astype(mx.float32)
    return logit(dots * known, exponent)


def _attend_block(
    q: mx.array,
    start: int,
    total: int,
    keys: Tokens,
    values: Tokens,
    scale: float,
    view: MaskView,
    sinks: mx.array | None,
) -> mx.array:
    """[Hq, L, Dv] of a range of queries of one row."""
    length = keys.lengths[0]
    heads, queries = keys.first.shape[1], q.shape[1]
    if length == 0:
        return mx.zeros((q.shape[0], queries, values.codec.dim), q.dtype)
    logits, allowed, poison = _logits(q, start, total, keys, scale, view)
    weights, exponent = _tile_weights(logits, allowed)
    positions = mx.arange(start, start + queries) + (length - total)
    packed_here = mx.tile(_read_packed(positions, logits.shape[2]), (q.shape[0] // heads, 1))
    packed_here = packed_here.reshape(1, *packed_here.shape[:1], -1, TILE)

    raw = _raw_tiles(values, length - total + start, "values", RAW_VALUE_BITS)
    bad = mx.logical_not(raw.dense(raw.finite, axis=1))[:, None] & mx.logical_not(packed_here)
    plain, plain_exponent = _raw_sums(mx.where(packed_here, 0, weights), raw, exponent)
    tiles = packed_tiles(max(length - total + start + queries - 1, 0) + 1)
    coded, coded_exponent = mx.zeros_like(plain), mx.full(plain_exponent.shape, IDENTITY_EXPONENT)
    if tiles:
        coded, coded_exponent, nan = _packed_sums(mx.where(packed_here, weights, 0), values, exponent, tiles)
        bad = bad | (nan & packed_here)
    poison = poison | bad.reshape(heads, -1, logits.shape[2])

    denominator = mx.sum(weights, axis=-1, keepdims=True).astype(mx.float32)
    den, den_exponent = _merge_tiles(denominator, exponent[..., None])
    coded, coded_exponent = _merge_tiles(coded, coded_exponent)
    plain, plain_exponent = _merge_tiles(plain, plain_exponent)
    sink_nan = mx.array(False)
    if sinks is not None:
        per_row = mx.repeat(sinks.astype(mx.float32).reshape(heads, -1), queries, axis=1)[..., None]
        den, den_exponent, sink_nan = _add_sink(den, den_exponent, per_row)
    out = _output(coded, coded_exponent, plain, plain_exponent, den, den_exponent, values.codec)
    poisoned = mx.any(allowed & poison, axis=-1, keepdims=True) | sink_nan
    out = mx.where(poisoned, mx.nan, out)
    out = mx.where(mx.any(allowed, axis=-1, keepdims=True), out, 0.0)
    return out.reshape(q.shape[0], queries, -1).astype(q.dtype)


def _weight(distance: mx.array) -> mx.array:
    """P = rint(2^13 2^(-distance / 2^12)) from two tables, int32; distance int32 >= 0 (section 5)."""
    s, h, low = distance >> FRACTION, (distance >> 6) & 63, distance & 63
    high_table, low_table = mx.array(WEIGHT_HIGH, mx.float32), mx.array(WEIGHT_LOW, mx.float32)
    product = high_table[h] * low_table[low] * pow2(-11 - mx.minimum(s, 60))
    return mx.where(s > 13, 0, mx.round(product).astype(mx.int32))


def _tile_weights(logits: mx.array, allowed: mx.array) -> tuple[mx.array, mx.array]:
    """Weights P int32 [Hk, M, N, 64] and the exponent E of each tile, int32 [Hk, M, N]."""
    shape = (*logits.shape[:2], -1, TILE)
    logits, allowed = logits.reshape(shape), allowed.reshape(shape)
    some = mx.any(allowed, axis=-1)
    largest = mx.max(mx.where(allowed, logits, -(2**28)), axis=-1)
    exponent = (largest + (2**FRACTION - 1)) >> FRACTION
    distance = mx.maximum((exponent << FRACTION)[..., None] - logits, 0)
    weights = mx.where(allowed, _weight(distance), 0)
    return weights, mx.where(some, exponent, IDENTITY_EXPONENT)


def _packed_sums(
    weights: mx.array, values: Tokens, exponent: mx.array, tiles: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Weighted sums of the centroids of each tile: float32 [Hk, M, N, Dv], exponents [Hk, M, N, 1], and NaN values."""
    heads, total = values.first.shape[1], weights.shape[2]
    scales = values.packed.scales[0, :, :tiles]
    nan = mx.isnan(scales)
    known = mx.where(nan, mx.zeros_like(scales), scales).astype(mx.float32)[:, None]
    # 14 bits times 11 bits: exact, since 2^13 is the only weight with 14 bits.
    u = weights[:, :, :tiles].astype(mx.float32) * known
    largest = mx.max(u, axis=-1, keepdims=True)
    e = float_exponent(mx.where(largest > 0, largest, 1.0))
    shares = mx.round(u * pow2(13 - e)).astype(mx.int32)
    codes = _flat_centroids(values.packed.words, tiles, values.codec).reshape(heads, tiles, TILE, -1)
    sums = integer_matmul(shares.swapaxes(1, 2), codes).swapaxes(1, 2).astype(mx.float32)
    where = mx.where(largest > 0, exponent[:, :, :tiles, None] + e, IDENTITY_EXPONENT)
    rest = [(0, 0), (0, 0), (0, total - tiles), (0, 0)]
    nan = mx.pad(nan, [(0, 0), (0, total - tiles), (0, 0)])[:, None]
    return mx.pad(sums, rest), mx.pad(where, rest, constant_values=mx.array(IDENTITY_EXPONENT)), nan


def _raw_sums(weights: mx.array, raw: _Raw, exponent: mx.array) -> tuple[mx.array, mx.array]:
    """Weighted sums of the raw values of each tile: float32 [Hk, M, N, Dv], exponents [Hk, M, N, 1]."""
    if raw.start > 1:
        weights = mx.concatenate([weights[:, :, :1], weights[:, :, raw.start :]], axis=2)
        exponent = mx.concatenate([exponent[:, :, :1], exponent[:, :, raw.start :]], axis=2)
    length = float_exponent(mx.maximum(weights, 1).astype(mx.float32))
    reach = mx.where(weights > 0, length + raw.e[:, None], IDENTITY_EXPONENT)
    e = mx.max(reach, axis=-1, keepdims=True)
    shift = mx.clip(raw.e[:, None] + 13 - e, -40, 13)
    shares = mx.round(weights.astype(mx.float32) * pow2(shift)).astype(mx.int32)
    sums = split_matmul(shares.swapaxes(1, 2), raw.x).swapaxes(1, 2)
    where = mx.where(e > IDENTITY_EXPONENT, exponent[..., None] + e, IDENTITY_EXPONENT)
    present = where > IDENTITY_EXPONENT
    dense = raw.dense(mx.where(present, where - IDENTITY_EXPONENT, 0), axis=2) + IDENTITY_EXPONENT
    return raw.dense(sums, axis=2), dense


def _merge_tiles(a: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    """Merge over the tile axis: a [Hk, M, N, D], exponents x [Hk, M, N, 1] to [Hk, M, D], [Hk, M, 1] (section 5)."""
    missing = -a.shape[2] % SPLIT
    pad = [(0, 0), (0, 0), (0, missing), (0, 0)]
    a, x = mx.pad(a, pad), mx.pad(x, pad, constant_values=mx.array(IDENTITY_EXPONENT))
    parts = (a[:, :, 0::SPLIT], x[:, :, 0::SPLIT])
    for t in range(1, SPLIT):
        parts = merge(*parts, a[:, :, t::SPLIT], x[:, :, t::SPLIT])
    while parts[0].shape[2] > 1:
        a, x = parts
        pad = [(0, 0), (0, 0), (0, a.shape[2] % 2), (0, 0)]
        a, x = mx.pad(a, pad), mx.pad(x, pad, constant_values=mx.array(IDENTITY_EXPONENT))
        parts = merge(a[:, :, 0::2], x[:, :, 0::2], a[:, :, 1::2], x[:, :, 1::2])
    return parts[0][:, :, 0], parts[1][:, :, 0]


def _add_sink(den: mx.array, exponent: mx.array, sink: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The attention sink's weight joins the denominator, once: [Hk, M, 1] all."""
    nan = mx.isnan(sink)
    logits, _ = additive_logits(sink)
    e = (logits + (2**FRACTION - 1)) >> FRACTION
    weight = _weight((e << FRACTION) - logits).astype(mx.float32)
    absent = nan | (sink == -mx.inf)
    weight, e = mx.where(absent, 0.0, weight), mx.where(absent, IDENTITY_EXPONENT, e)
    return *merge(den, exponent, weight, e), nan


def _output(
    coded: mx.array,
    coded_exponent: mx.array,
    plain: mx.array,
    plain_exponent: mx.array,
    den: mx.array,
    den_exponent: mx.array,
    codec: Codec,
) -> mx.array:
    """float32 [Hk, M, Dv]: the packed sum rotated back, plus the raw sum, over the denominator."""
    z, g, _ = snap(coded)
    back = rotate_back(z, codec.seed).astype(mx.float32)
    nothing = mx.logical_not(mx.any(z != 0, axis=-1, keepdims=True))
    x = mx.where(nothing, IDENTITY_EXPONENT, coded_exponent + g - 26 - codec.scale_shift)
    total, e = merge(back, x, plain, mx.where(plain_exponent > IDENTITY_EXPONENT, plain_exponent - 26, plain_exponent))
    return quotient_times_pow2(total, mx.maximum(den, 1.0), e - den_exponent)


def check_held(length: int, held: int, oldest: int, name: str) -> None:
    """Raise ValueError unless a row still holds the raw tokens that queries at positions >= oldest read."""
    start = packed_tiles(max(oldest, 0) + 1)
    if max(start * TILE, min(FIRST, length)) < length - held:
        raise ValueError(
            f"queries from position {oldest} on need the raw {name} from token {start * TILE} on, but only the last "
            f"{held} of {length} are held; attend with at most the tokens appended last"
        )


def check_rows_held(tokens: Tokens, queries: int, name: str) -> None:
    """`check_held` for the last `queries` positions of every row."""
    for length, held in zip(tokens.lengths, tokens.held, strict=True):
        if length:
            check_held(length, held, length - queries, name)


def check_query(q: mx.array, keys: Tokens, scale: float) -> None:
    """Raise ValueError for queries, keys or a scale that do not fit."""
    heads, dim = keys.first.shape[1], keys.codec.dim
    if q.ndim != 4 or q.shape[0] != len(keys.lengths) or q.shape[3] != dim or q.shape[1] % heads or not q.shape[1]:
        raise ValueError(
            f"q must be [{len(keys.lengths)}, a multiple of {heads}, L, {dim}] for these keys; got {tuple(q.shape)}"
        )
    if keys.role != "key":
        raise ValueError(f'keys must have role "key"; got role={keys.role!r}')
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32; got {q.dtype}")
    if not (math.isfinite(scale) and 2.0**-30 <= scale * LOG2_E <= 2.0**20):
        raise ValueError(f"scale must be a positive number between 2^-30 and 2^20 over log2(e); got scale={scale}")


def check_values(q: mx.array, keys: Tokens, values: Tokens, sinks: mx.array | None) -> None:
    """Raise ValueError for values or sinks that do not fit queries and keys."""
    if values.role != "value":
        raise ValueError(f'values must have role "value"; got role={values.role!r}')
    if values.lengths != keys.lengths or values.first.shape[1] != keys.first.shape[1]:
        raise ValueError(
            f"keys and values must hold the same tokens: lengths {list(keys.lengths)} and {list(values.lengths)}, "
            f"kv heads {keys.first.shape[1]} and {values.first.shape[1]}"
        )
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}], one logit per query head; got {tuple(sinks.shape)}")
