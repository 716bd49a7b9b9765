"""Young tokens raw, old tokens packed by the tile: what a cache holds, and how it changes.

Attention leans on the first tokens of a sequence and on the latest ones, so those stay in the model's own dtype; the
long middle is packed, 64 tokens at a time, once a tile has been complete for 32 tokens (docs/numerics.md, section 2).
A tile is coded from raw tokens only and exactly once, so the codes do not depend on how many tokens came per call.

Everything is a pure function from `Tokens` to new `Tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from .codec import dequantize, quantize
from .packing import words_per_vector
from .types import DTYPES, FIRST, RING, TILE, Codec, Packed, Role, Tokens, packed_tiles

__all__ = ["append", "append_pair", "empty_tokens", "raw_tokens", "select_rows", "stack_rows", "trim"]


@dataclass(frozen=True)
class Span:
    """Whole tiles to pack for `tokens`: the columns from `start` on of raw tokens [B, H, R, D], 64 for each tile."""

    tokens: Tokens
    raw: mx.array
    start: int
    tiles: int


@dataclass(frozen=True)
class Coder:
    """What packs and restores the tokens of a store: this reference's codec, or a target's with the same bits.

    encode: spans of one call to Packed with words [B, H, tiles, 64, W], one for each span.
    """

    encode: Callable[[Sequence[Span]], Sequence[Packed]]
    dequantize: Callable[[Packed, Codec, mx.Dtype], mx.array]


def empty_tokens(
    codec: Codec, role: Role, batch: int, heads: int, dtype: mx.Dtype, factors: mx.array | None = None
) -> Tokens:
    """Tokens of `batch` empty rows with `heads` kv heads.

    role: "key" or "value".  dtype: the model's, of raw tokens.  factors: int8 [heads, D] or [batch, heads, D] channel
    factors of a profile, keys only; without them the first tile fixes them.
    """
    if role not in ("key", "value"):
        raise ValueError(f'role must be "key" or "value"; got role={role!r}')
    if batch < 1 or heads < 1:
        raise ValueError(f"batch and heads must be at least 1; got batch={batch}, heads={heads}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32; got dtype={dtype}")
    if role == "value" and codec.kind != "mse":
        raise ValueError(f'values need kind="mse"; got kind={codec.kind!r}')
    if role == "value" and factors is not None:
        raise ValueError("channel factors belong to keys; got factors with role='value'")
    if factors is not None:
        if tuple(factors.shape[-2:]) != (heads, codec.dim):
            raise ValueError(f"factors must be [..., {heads}, {codec.dim}]; got shape {tuple(factors.shape)}")
        if factors.dtype != mx.int8 or mx.any(mx.abs(factors) > 3).item():
            raise ValueError(f"factors must be int8 from -3 to 3; got {factors.dtype}")
        factors = mx.broadcast_to(factors, (batch, heads, codec.dim)).astype(mx.int8)
    raw = mx.zeros((batch, heads, 0, codec.dim), dtype)
    return Tokens(
        codec=codec,
        role=role,
        lengths=(0,) * batch,
        held=(0,) * batch,
        first=raw,
        recent=raw,
        packed=_no_tiles(codec, role, batch, heads, factors),
        factors_given=factors is not None,
    )


def _no_tiles(codec: Codec, role: Role, batch: int, heads: int, factors: mx.array | None) -> Packed:
    width = words_per_vector(codec.dim, codec.code_bits)
    prod, keys = codec.kind == "prod", role == "key"
    shape = (batch, heads, 0, TILE)
    return Packed(
        words=mx.zeros((*shape, width), mx.uint32),
        scales=mx.zeros(shape, mx.float16),
        base=mx.zeros((batch, heads, 0, codec.dim), mx.int16) if keys else None,
        base_exponent=mx.zeros((batch, heads, 0), mx.int16) if keys else None,
        factors=factors,
        sign_words=mx.zeros((*shape, words_per_vector(codec.dim, 1)), mx.uint32) if prod else None,
        sign_scales=mx.zeros(shape, mx.float16) if prod else None,
    )


def append(tokens: Tokens, x: mx.array, counts: Sequence[int] | None = None) -> Tokens:
    """Add new keys or values x [B, H, L, D] to every row.

    counts: how many of the L columns are real in each row; they are the last ones, columns before them are left
    padding and dropped.  Raises ValueError for a wrong shape or count.
    """
    return append_with(_REFERENCE, [tokens], [x], counts)[0]


def append_pair(
    keys: Tokens, values: Tokens, k: mx.array, v: mx.array, counts: Sequence[int] | None = None
) -> tuple[Tokens, Tokens]:
    """`append` of k [B, H, L, D] to keys and of v [B, H, L, Dv] to values, for the keys and values of the same tokens.

    Raises ValueError for wrong shapes or counts, and unless both hold equally many tokens.
    """
    check_pair(keys, values, k, v)
    return append(keys, k, counts), append(values, v, counts)


def check_pair(keys: Tokens, values: Tokens, k: mx.array, v: mx.array) -> None:
    """Raises ValueError unless these are keys and values, old and new, of the same tokens."""
    if (keys.role, values.role) != ("key", "value"):
        raise ValueError(f"keys and values must have these roles; got {keys.role!r} and {values.role!r}")
    if keys.lengths != values.lengths:
        raise ValueError(f"keys and values must be as long; got {list(keys.lengths)} and {list(values.lengths)} tokens")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must be [B, H, L, ...] alike; got shapes {tuple(k.shape)} and {tuple(v.shape)}")


def append_with(
    coder: Coder, stores: Sequence[Tokens], chunks: Sequence[mx.array], counts: Sequence[int] | None
) -> list[Tokens]:
    """`append` of one chunk to each store, through `coder`; several stores have rows of equal lengths."""
    for tokens, x in zip(stores, chunks, strict=True):
        real = _real_columns(tokens, x, counts)
    chunks = [x.astype(tokens.first.dtype) for tokens, x in zip(stores, chunks, strict=True)]
    length = chunks[0].shape[2]
    if all(map(_alike, stores)) and len(set(real)) == 1:
        return _append_alike(coder, stores, [x[:, :, length - real[0] :] for x in chunks])
    rows = zip(*(select_rows(tokens) for tokens in stores), strict=True)
    grown = [
        _append_alike(coder, row, [x[b : b + 1, :, length - real[b] :] for x in chunks]) for b, row in enumerate(rows)
    ]
    return [stack_rows(store) for store in zip(*grown, strict=True)]


def _real_columns(tokens: Tokens, x: mx.array, counts: Sequence[int] | None) -> tuple[int, ...]:
    """How many of the columns of x [B, H, L, D] are real in each row."""
    batch, heads, _, dim = tokens.first.shape
    if x.ndim != 4 or tuple(x.shape[:2]) != (batch, heads) or x.shape[3] != dim:
        raise ValueError(f"x must be [{batch}, {heads}, L, {dim}]; got shape {tuple(x.shape)}")
    length = x.shape[2]
    real = (length,) * batch if counts is None else tuple(int(c) for c in counts)
    if len(real) != batch or not all(0 <= c <= length for c in real):
        raise ValueError(f"counts must be {batch} numbers from 0 to {length}; got {list(real)}")
    return real


def _alike(tokens: Tokens) -> bool:
    return len(set(tokens.lengths)) == 1 and set(tokens.held) == {tokens.recent.shape[2]}


def _append_alike(coder: Coder, stores: Sequence[Tokens], chunks: Sequence[mx.array]) -> list[Tokens]:
    """`append_with` for rows of equal length; the tiles of all stores are coded in one call."""
    grown, spans = [], []
    for tokens, x in zip(stores, chunks, strict=True):
        before, after = tokens.lengths[0], tokens.lengths[0] + x.shape[2]
        first = tokens.first
        if before < FIRST:
            first = mx.concatenate([first, x[:, :, : FIRST - before]], axis=2)
        held = min(tokens.recent.shape[2], RING - 1)
        recent = mx.concatenate([tokens.recent[:, :, tokens.recent.shape[2] - held :], x], axis=2)
        batch = len(tokens.lengths)
        grown.append(
            replace(
                tokens, lengths=(after,) * batch, held=(recent.shape[2],) * batch, first=first, recent=recent
            )
        )
        old, new = packed_tiles(before), packed_tiles(after)
        if new > old:
            spans.append(Span(tokens, recent, recent.shape[2] - after + old * TILE, new - old))
    if not spans:
        return grown
    coded = coder.encode(spans)
    return [
        replace(tokens, packed=_join(tokens.packed, packed)) for tokens, packed in zip(grown, coded, strict=True)
    ]


def _encode_spans(spans: Sequence[Span]) -> list[Packed]:
    return [_encode_tiles(span.tokens, span.raw[:, :, span.start : span.start + span.tiles * TILE]) for span in spans]


def _encode_tiles(tokens: Tokens, x: mx.array) -> Packed:
    """Code whole tiles x [B, H, 64 n, D]; the arrays come back with tiles apart."""
    keys = tokens.role == "key"
    coded = quantize(x, tokens.codec, base=keys, factors=tokens.packed.factors if keys else None)
    tiled = {
        "words": coded.words,
        "scales": coded.scales,
        "sign_words": coded.sign_words,
        "sign_scales": coded.sign_scales,
    }
    batch, heads = x.shape[:2]
    return replace(
        coded,
        **{
            name: array.reshape(batch, heads, -1, TILE, *array.shape[3:])
            for name, array in tiled.items()
            if array is not None
        },
    )


_REFERENCE = Coder(_encode_spans, dequantize)


def _join(old: Packed, new: Packed) -> Packed:
    joined = {
        name: mx.concatenate([array, getattr(new, name)], axis=2)
        for name, array in old.arrays().items()
        if name != "factors"
    }
    return Packed(**joined, factors=new.factors if old.factors is None else old.factors)


def trim(tokens: Tokens, n: int | Sequence[int]) -> Tokens:
    """Take the last n tokens (one number, or one per row) back from every row.

    Exact for n <= 32 after an append: appending the same tokens again gives equal bits.  A deeper trim may need raw
    tokens that are no longer held; these come back dequantized.  Raises ValueError if a row is shorter than n.
    """
    return trim_with(_REFERENCE, tokens, n)


def trim_with(coder: Coder, tokens: Tokens, n: int | Sequence[int]) -> Tokens:
    """`trim` through `coder`."""
    batch = len(tokens.lengths)
    amounts = (int(n),) * batch if isinstance(n, int) else tuple(int(a) for a in n)
    if len(amounts) != batch or any(not 0 <= a <= have for a, have in zip(amounts, tokens.lengths, strict=False)):
        raise ValueError(f"cannot trim {list(amounts)} tokens from rows of {list(tokens.lengths)} tokens")
    if _alike(tokens) and len(set(amounts)) == 1:
        return _trim_alike(coder, tokens, amounts[0])
    return stack_rows([_trim_alike(coder, row, a) for row, a in zip(select_rows(tokens), amounts, strict=True)])


def _trim_alike(coder: Coder, tokens: Tokens, n: int) -> Tokens:
    if n == 0:
        return tokens
    after = tokens.lengths[0] - n
    tiles = packed_tiles(after)
    held = max(0, tokens.recent.shape[2] - n)
    recent = tokens.recent[:, :, :held]
    # Tile `tiles` will be coded again, so its raw tokens are needed.
    missing = after - held - tiles * TILE
    if missing > 0:
        lost = _packed_tokens(coder, tokens, tiles * TILE, tiles * TILE + missing, tokens.first.dtype)
        recent = mx.concatenate([lost, recent], axis=2)
        held += missing
    packed = _first_tiles(tokens.packed, tiles)
    if tiles == 0 and not tokens.factors_given:
        packed = replace(packed, factors=None)
    batch = len(tokens.lengths)
    return replace(
        tokens,
        lengths=(after,) * batch,
        held=(held,) * batch,
        first=tokens.first[:, :, : min(FIRST, after)],
        recent=recent,
        packed=packed,
    )


def _first_tiles(packed: Packed, tiles: int) -> Packed:
    kept = {name: array[:, :, :tiles] for name, array in packed.arrays().items() if name != "factors"}
    return Packed(**kept, factors=packed.factors)


def _packed_tokens(coder: Coder, tokens: Tokens, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    """Tokens start .. stop - 1 out of packed tiles, the first tokens raw: [B, H, stop - start, D] of equal rows."""
    tiles = range(start // TILE, (stop + TILE - 1) // TILE)
    window = {
        name: array[:, :, tiles.start : tiles.stop]
        for name, array in tokens.packed.arrays().items()
        if name != "factors"
    }
    values = coder.dequantize(Packed(**window, factors=tokens.packed.factors), tokens.codec, dtype)
    batch, heads = values.shape[:2]
    values = values.reshape(batch, heads, -1, tokens.codec.dim)
    if tiles.start == 0:
        values = mx.concatenate([tokens.first.astype(dtype), values[:, :, tokens.first.shape[2] :]], axis=2)
    return values[:, :, start - tiles.start * TILE : stop - tiles.start * TILE]


def raw_tokens(tokens: Tokens, dtype: mx.Dtype | None = None) -> mx.array:
    """All tokens as plain vectors [B, H, max length, D], left-aligned by position, zeros beyond a row's end.

    Young and first tokens are the model's own, packed ones are dequantized.  dtype: default the model's.
    """
    return raw_tokens_with(_REFERENCE, tokens, dtype)


def raw_tokens_with(coder: Coder, tokens: Tokens, dtype: mx.Dtype | None) -> mx.array:
    """`raw_tokens` through `coder`."""
    longest = max(tokens.lengths, default=0)
    dtype = dtype or tokens.first.dtype
    rows = []
    for row in select_rows(tokens):
        length, tiled = row.lengths[0], packed_tiles(row.lengths[0]) * TILE
        # A packed token reads as packed even while the ring still holds it: chunking must not show.
        parts = [row.recent[:, :, row.held[0] - (length - tiled) :].astype(dtype)]
        if tiled:
            parts.insert(0, _packed_tokens(coder, row, 0, tiled, dtype))
        whole = mx.concatenate(parts, axis=2)
        rows.append(mx.pad(whole, [(0, 0), (0, 0), (0, longest - length), (0, 0)]))
    return mx.concatenate(rows, axis=0)


def select_rows(tokens: Tokens) -> list[Tokens]:
    """Each row as Tokens of its own, without any padding."""
    if len(tokens.lengths) == 1 and _alike(tokens):
        return [tokens]
    columns = tokens.recent.shape[2]
    rows = []
    for b, (length, held) in enumerate(zip(tokens.lengths, tokens.held, strict=True)):
        tiles = packed_tiles(length)
        arrays = {name: array[b : b + 1] for name, array in tokens.packed.arrays().items()}
        packed = _first_tiles(Packed(**arrays), tiles)
        if tiles == 0 and not tokens.factors_given:
            packed = replace(packed, factors=None)
        rows.append(
            replace(
                tokens,
                lengths=(length,),
                held=(held,),
                first=tokens.first[b : b + 1, :, : min(FIRST, length)],
                recent=tokens.recent[b : b + 1, :, columns - held :],
                packed=packed,
            )
        )
    return rows


def stack_rows(rows: Sequence[Tokens]) -> Tokens:
    """Rows of any lengths as one batch.

    Raises ValueError unless there are rows, all of one codec, role, number of heads and dtype, and with channel
    factors all from a profile or all measured.
    """
    kinds = {(r.codec, r.role, r.first.shape[1], str(r.first.dtype), r.factors_given) for r in rows}
    if len(kinds) != 1:
        raise ValueError(f"rows must share codec, role, heads, dtype and origin of factors; got {len(kinds)} kinds")
    columns = max(row.recent.shape[2] for row in rows)
    firsts = max(row.first.shape[2] for row in rows)
    tiles = max(row.packed.words.shape[2] for row in rows)
    names: set[str] = set().union(*(row.packed.arrays() for row in rows))
    _, heads, _, dim = rows[0].first.shape
    arrays = {}
    for name in names:
        parts = []
        for row in rows:
            array = getattr(row.packed, name)
            if name == "factors":
                # A row without a tile has no factors yet; the zeros that stand for them are never read.
                parts.append(mx.zeros((len(row.lengths), heads, dim), mx.int8) if array is None else array)
            else:
                parts.append(_pad_axis2(array, tiles - array.shape[2], left=False))
        arrays[name] = mx.concatenate(parts, axis=0)
    return replace(
        rows[0],
        lengths=tuple(n for row in rows for n in row.lengths),
        held=tuple(h for row in rows for h in row.held),
        first=mx.concatenate([_pad_axis2(row.first, firsts - row.first.shape[2], left=False) for row in rows], axis=0),
        recent=mx.concatenate(
            [_pad_axis2(row.recent, columns - row.recent.shape[2], left=True) for row in rows], axis=0
        ),
        packed=Packed(**arrays),
    )


def _pad_axis2(x: mx.array, amount: int, left: bool) -> mx.array:
    if amount == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[2] = (amount, 0) if left else (0, amount)
    return mx.pad(x, widths)
