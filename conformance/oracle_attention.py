"""Logits, weights, sums, merge and output: sections 2 (what is allowed), 4 and 5.

For one row and one kv head all its query heads and queries are handled together as R query rows; a tile axis
of 64 tokens is then an ordinary array axis and every step of section 5 is written once for all tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .oracle_codec import TILE
from .oracle_numbers import (
    IDENTITY_EXPONENT,
    Array,
    bit_length,
    cast,
    clamp28,
    divide32,
    dot14,
    exact_matmul,
    f32,
    fp16_value,
    halves,
    logit,
    power_tables,
    rint_clamp28,
    round_shift,
    snap_floats,
    snap_integers,
)
from .oracle_rotation import rotate, unrotate
from .oracle_tokens import FIRST, RAW_TAIL, OracleTokens, Row

LOG2E = 1.4426950408889634
LAMBDA = np.uint32(0x3FB8AA3B).view(np.float32)
NOT_ALLOWED = -(1 << 31)
POISON = (1 << 31) - 1


@dataclass
class Mask:
    """``kind`` is "none", "causal", "bool" or "additive"; ``values`` [B, Hq, L, columns] for the last two."""

    kind: str = "none"
    values: Array | None = None


def broadcast_mask(
    values: Array, batch: int, kv_heads: int, q_heads: int, length: int, columns: int
) -> Array:
    """A mask array of rank 0 to 5 as [B, Hq, L, columns] (section 2)."""
    if values.ndim == 5:
        full = np.broadcast_to(values, (batch, kv_heads, q_heads // kv_heads, length, columns))
        return full.reshape(batch, q_heads, length, columns)
    return np.broadcast_to(values, (batch, q_heads, length, columns))


@dataclass
class Logits:
    """Logits of R query rows against the n tokens of a row: F [R, n], who is allowed, read packed, poison."""

    f: Array
    allowed: Array
    packed: Array
    poison: Array
    bad_query: Array


def attention_factor(scale: float) -> np.float32:
    a = np.float32(np.float64(scale) * np.float64(LOG2E))
    if not 2.0**-30 <= a <= 2.0**20:
        raise ValueError(f"scale must make scale * log2(e) lie in 2^-30 .. 2^20; got {scale}")
    return a


def row_logits(
    q: Array, row: Row, keys: OracleTokens, a: np.float32, mask: Array | None, kind: str, window: int | None
) -> Logits:
    """Sections 2 and 4 for queries ``q`` [G, L, D] float32 of one kv head; ``mask`` [G, L, n] or None."""
    groups, length, dim = q.shape
    n = len(row.raw)
    i = np.tile(np.arange(n - length, n), groups)[:, None]
    j = np.arange(n)[None, :]
    allowed = np.broadcast_to(i >= 0, (groups * length, n)).copy()
    if kind == "causal":
        allowed &= j <= i
    if window is not None:
        allowed &= i - j < window
    flat = None if mask is None else mask.reshape(groups * length, n)
    if flat is not None:
        allowed &= flat if kind == "bool" else ~np.isneginf(flat)
    packed = (j >= FIRST) & (TILE * (j // TILE + 1) + RAW_TAIL <= i + 1)

    with np.errstate(over="ignore", invalid="ignore"):
        x = q.reshape(groups * length, dim) * a
    big, e_q, bad_x = snap_floats(x, 13)
    bad_query = bad_x | ~np.isfinite(q.reshape(groups * length, dim)).all(axis=1)
    big = np.where(bad_query[:, None], 0, big)

    kx, ke, k_bad = snap_floats(row.raw, 14)
    f = logit(dot14(big, kx), e_q[:, None] + ke[None, :] - 15)
    poison = np.broadcast_to(k_bad, f.shape).copy()
    if row.tiles:
        stop = TILE * len(row.tiles)
        code, code_bad = _packed_logits(big, e_q, row, keys)
        f[:, :stop] = np.where(packed[:, :stop], code, f[:, :stop])
        poison[:, :stop] = np.where(packed[:, :stop], code_bad, poison[:, :stop])
    if flat is not None and kind == "additive":
        nan = np.isnan(flat)
        poison |= nan
        with np.errstate(over="ignore"):
            scaled = np.where(nan | np.isneginf(flat), np.float32(0), flat) * LAMBDA
        f = clamp28(f + rint_clamp28(scaled, 12))
    return Logits(f, allowed, np.broadcast_to(packed, f.shape), poison & allowed, bad_query)


def _packed_logits(big: Array, e_q: Array, row: Row, keys: OracleTokens) -> tuple[Array, Array]:
    codec = keys.codec
    factors = np.zeros(codec.dim, np.int64) if row.factors is None else row.factors
    u, g = snap_integers(big, 13, -factors)
    v = rotate(u, codec.s)
    w, h = snap_integers(v, 12)
    c = np.concatenate([t.codes.c for t in row.tiles])
    bits = np.concatenate([t.codes.scale for t in row.tiles])
    bad = (bits & 0x7FFF) > 0x7C00
    sigma = np.where(bad, np.float32(0), fp16_value(bits))
    f = logit(f32(exact_matmul(w, c.T)) * sigma, (e_q + g + h - 26 - codec.kappa)[:, None])
    if codec.kind == "prod":
        u2, g2 = snap_integers(v, 13)
        w2, h2 = snap_integers(rotate(u2, codec.s2), 12)
        c2 = np.concatenate([t.codes.c2 for t in row.tiles if t.codes.c2 is not None])
        bits2 = np.concatenate([t.codes.scale2 for t in row.tiles if t.codes.scale2 is not None])
        bad2 = (bits2 & 0x7FFF) > 0x7C00
        sigma2 = np.where(bad2, np.float32(0), fp16_value(bits2))
        f = f + logit(f32(exact_matmul(w2, c2.T)) * sigma2, (e_q + g + g2 + h2 - 39 - codec.kappa2)[:, None])
        bad = bad | bad2
    bases = [t.base for t in row.tiles if t.base is not None]
    if bases:
        m = np.concatenate([b.m for b in bases])
        e = np.concatenate([b.e for b in bases])
        f = f + np.repeat(logit(dot14(big, m), e_q[:, None] + e[None, :] - 14), TILE, axis=1)
    return clamp28(f), np.broadcast_to(bad, f.shape)


# ---- weights, sums, merge (5) --------------------------------------------------------------------


def weight(delta: Array) -> Array:
    """P of a logit that lies ``delta`` >= 0 below E 2**12."""
    table_a, table_b = power_tables()
    s = delta >> 12
    p = round_shift(table_a[(delta >> 6) & 63] * table_b[delta & 63], -11 - np.minimum(s, 14))
    return np.where(s > 13, 0, p)


@dataclass
class Sum:
    """R partial sums: float32 ``a`` [R, K] and one integer exponent ``x`` [R] each."""

    a: Array
    x: Array


def identity(rows: int, width: int) -> Sum:
    return Sum(np.zeros((rows, width), np.float32), np.full(rows, IDENTITY_EXPONENT, np.int64))


def _shift(a: Array, k: Array) -> Array:
    scaled = np.ldexp(a.astype(np.float64), np.maximum(k, -60).astype(np.int32)[:, None])
    return np.where((k < -40)[:, None] | (np.abs(scaled) < 2.0**-64), 0.0, scaled).astype(np.float32)


def merge(left: Sum, right: Sum) -> Sum:
    """(a, x) + (b, y) of section 5."""
    m = np.maximum(left.x, right.x)
    total = _shift(left.a, left.x - m) + _shift(right.a, right.x - m)
    return Sum(np.where(np.abs(total) < np.float32(2.0**-64), np.float32(0), total), m)


def merge_tiles(tiles: list[Sum], rows: int, width: int) -> Sum:
    """Splits of four tiles one after the other, then neighbouring splits in a binary tree."""
    level = []
    for start in range(0, len(tiles), 4):
        total = tiles[start]
        for t in tiles[start + 1 : start + 4]:
            total = merge(total, t)
        level.append(total)
    while len(level) > 1:
        if len(level) % 2:
            level.append(identity(rows, width))
        level = [merge(level[k], level[k + 1]) for k in range(0, len(level), 2)]
    return level[0] if level else identity(rows, width)


def _pad_tiles(a: Array, fill: int | bool) -> Array:
    """[R, n] to [R, tiles, 64]."""
    rows, n = a.shape
    tiles = -(-n // TILE)
    out = np.full((rows, tiles * TILE), fill, a.dtype)
    out[:, :n] = a
    return out.reshape(rows, tiles, TILE)


def tile_sums(logits: Logits, values: OracleTokens, row: Row) -> tuple[list[Sum], list[Sum], list[Sum]]:
    """The three partial sums (packed values, raw values, den) of every tile."""
    f = _pad_tiles(logits.f, 0)
    allowed = _pad_tiles(logits.allowed, False)
    packed = _pad_tiles(logits.packed, False)
    rows, tiles, _ = f.shape
    some = np.asarray(allowed.any(axis=2))
    top = (np.where(allowed, f, -(1 << 40)).max(axis=2) + 4095) >> 12
    p = np.where(allowed, weight(np.where(allowed, top[..., None] * 4096 - f, 0)), 0)
    den_sum = p.sum(axis=2)

    x, e, _ = snap_floats(row.raw, 13)
    dim = values.codec.dim
    x = np.concatenate([x, np.zeros((tiles * TILE - len(x), dim), np.int64)])
    e = np.concatenate([e, np.full(tiles * TILE - len(e), -79, np.int64)]).reshape(tiles, TILE)
    packed_out, raw_out, den_out = [], [], []
    for t in range(tiles):
        here = some[:, t]
        den_out.append(_where(here, f32(den_sum[:, t : t + 1]), top[:, t]))

        p_raw = np.where(packed[:, t], 0, p[:, t])
        bits = np.where(p_raw > 0, bit_length(p_raw) + e[t], -(1 << 30)).max(axis=1)
        u = np.where(p_raw > 0, round_shift(p_raw, e[t] + 13 - bits[:, None]), 0)
        hi, lo = halves(u)
        xt = x[t * TILE : (t + 1) * TILE]
        acc = np.float32(128) * f32(exact_matmul(hi, xt)) + f32(exact_matmul(lo, xt))
        raw_out.append(_where(here & (p_raw > 0).any(axis=1), acc, top[:, t] + bits))

        if t >= len(row.tiles):
            packed_out.append(identity(rows, dim))
            continue
        codes = row.tiles[t].codes
        sigma = np.where(codes.non_finite, np.float32(0), fp16_value(codes.scale))
        # fp16 is an integer of at most 41 bits in units of 2**-24; P adds 14 more.
        u_units = np.where(packed[:, t], p[:, t], 0) * (sigma.astype(np.float64) * 2.0**24).astype(np.int64)
        bits = bit_length(u_units.max(axis=1))
        u = round_shift(u_units, (13 - bits)[:, None])
        packed_out.append(_where(here & (bits > 0), f32(exact_matmul(u, codes.c)), top[:, t] + bits - 24))
    return packed_out, raw_out, den_out


def _where(real: Array, a: Array, x: Array) -> Sum:
    return Sum(
        np.where(real[:, None], a, np.float32(0)).astype(np.float32),
        np.where(real, x, IDENTITY_EXPONENT).astype(np.int64),
    )


def finish(p: Sum, r: Sum, n: Sum, values: OracleTokens) -> Array:
    """The float32 output of section 5 before the cast, from the merged sums."""
    codec = values.codec
    z, g, _ = snap_floats(p.a, 13)
    o_int = unrotate(z, codec.s)
    nothing = (z == 0).all(axis=1)
    left = _where(~nothing, f32(o_int), p.x + g - 26 - codec.kappa)
    total = merge(left, Sum(r.a, r.x - 26))
    y = divide32(total.a, np.broadcast_to(n.a, total.a.shape))
    # Limiting the power keeps float64 finite and nonzero; beyond the limits the result is zero or infinity
    # anyway.
    k = np.clip(total.x - n.x, -400, 400).astype(np.int32)[:, None]
    wide = np.ldexp(y.astype(np.float64), k)
    wide = np.where(np.abs(wide) < 2.0**-100, 0.0, wide)
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)


def sink_sum(sink: Array) -> tuple[Sum, Array]:
    """Per query row: the sink as a sum (the identity for -inf or NaN) and whether it is NaN."""
    nan = np.isnan(sink)
    use = ~nan & ~np.isneginf(sink)
    with np.errstate(over="ignore"):
        f = rint_clamp28(np.where(use, sink, np.float32(0)) * LAMBDA, 12)
    e = (f + 4095) >> 12
    return _where(use, f32(weight(e * 4096 - f))[:, None], e), nan


# ---- the two public functions --------------------------------------------------------------------


def _row_mask(mask: Mask, b: int, heads: slice, pad: int, n: int) -> Array | None:
    return None if mask.values is None else mask.values[b, heads, :, pad : pad + n]


def scores(
    q: Array,
    keys: OracleTokens,
    scale: float,
    mask: Mask,
    left_padding: list[int] | None = None,
    window: int | None = None,
) -> Array:
    """int32 [B, Hq, L, max n] of section 4; ``q`` [B, Hq, L, D] float32."""
    batch, q_heads, length, _ = q.shape
    a = attention_factor(scale)
    out = np.full((batch, q_heads, length, max(keys.lengths)), NOT_ALLOWED, np.int64)
    per = q_heads // keys.heads
    for b in range(batch):
        n = keys.lengths[b]
        pad = 0 if left_padding is None else left_padding[b]
        for h in range(keys.heads):
            heads = slice(h * per, (h + 1) * per)
            got = row_logits(
                q[b, heads], keys.rows[b][h], keys, a, _row_mask(mask, b, heads, pad, n), mask.kind, window
            )
            f = np.where(got.poison | got.bad_query[:, None], POISON, got.f)
            out[b, heads, :, :n] = np.where(got.allowed, f, NOT_ALLOWED).reshape(per, length, n)
    return out.astype(np.int32)


def attend(
    q: Array,
    keys: OracleTokens,
    values: OracleTokens,
    scale: float,
    mask: Mask,
    sinks: Array | None = None,
    window: int | None = None,
    left_padding: list[int] | None = None,
    dtype: str = "float32",
) -> Array:
    """Words of ``dtype`` [B, Hq, L, Dv] of section 5; ``q`` [B, Hq, L, D] and ``sinks`` [Hq] float32."""
    batch, q_heads, length, _ = q.shape
    a = attention_factor(scale)
    per = q_heads // keys.heads
    width = values.codec.dim
    out = np.zeros((batch, q_heads, length, width), np.float32)
    for b in range(batch):
        n = keys.lengths[b]
        pad = 0 if left_padding is None else left_padding[b]
        for h in range(keys.heads):
            heads = slice(h * per, (h + 1) * per)
            got = row_logits(
                q[b, heads], keys.rows[b][h], keys, a, _row_mask(mask, b, heads, pad, n), mask.kind, window
            )
            row = values.rows[b][h]
            rows = per * length
            p_tiles, r_tiles, n_tiles = tile_sums(got, values, row)
            den = merge_tiles(n_tiles, rows, 1)
            bad = (
                got.bad_query
                | got.poison.any(axis=1)
                | (got.allowed & _bad_values(row, got.packed)).any(axis=1)
            )
            if sinks is not None:
                extra, nan = sink_sum(np.repeat(sinks[heads], length))
                den = merge(den, extra)
                bad = bad | nan
            some = np.asarray(got.allowed.any(axis=1))
            den.a = np.where(some[:, None], den.a, np.float32(1))
            y = finish(merge_tiles(p_tiles, rows, width), merge_tiles(r_tiles, rows, width), den, values)
            y = np.where(bad[:, None], np.float32(np.nan), y)
            out[b, heads] = np.where(some[:, None], y, np.float32(0)).reshape(per, length, width)
    return cast(out, dtype)


def _bad_values(row: Row, packed: Array) -> Array:
    """[R, n]: whether the value vector that a query reads at a position is non-finite."""
    bad = np.broadcast_to(~np.isfinite(row.raw).all(axis=1), packed.shape).copy()
    if row.tiles:
        stop = TILE * len(row.tiles)
        coded = np.concatenate([t.codes.non_finite for t in row.tiles])
        bad[:, :stop] = np.where(packed[:, :stop], coded, bad[:, :stop])
    return bad
