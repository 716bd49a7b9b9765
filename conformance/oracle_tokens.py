"""What a cache of tokens holds (section 2): raw tokens, packed tiles, and what append and trim do to them.

The oracle keeps every raw token of a row. It only remembers from which position on a real cache would still
hold them, to know which ones a deep trim replaces by dequantized tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .oracle_codec import TILE, Base, Codes, OracleCodec, decode, encode, tile_zero_factors
from .oracle_numbers import Array, cast, widen

FIRST = 4
RING = 127
RAW_TAIL = 32


def packed_tiles(n: int) -> int:
    """Packed tiles of a cache of n tokens."""
    return max(0, (n - RAW_TAIL) // TILE)


@dataclass
class Tile:
    """One packed tile of one row and head."""

    codes: Codes
    base: Base | None


@dataclass
class Row:
    """One row and head: raw tokens [n, D] float32, its packed tiles, its factors once they are fixed.

    Raw tokens from ``held_from`` on are surely held by a cache; in a ragged batch, whose ring has as many
    columns as its longest chunk asks for, some from ``maybe_held_from`` on may be.
    """

    raw: Array
    tiles: list[Tile]
    factors: Array | None
    held_from: int = 0
    maybe_held_from: int = 0


class OracleTokens:
    """Keys or values of B rows and H heads; ``append`` and ``trim`` change it in place."""

    def __init__(
        self, codec: OracleCodec, role: str, batch: int, heads: int, dtype: str, factors: Array | None = None
    ) -> None:
        self.codec = codec
        self.role = role
        self.dtype = dtype
        self.batch = batch
        self.heads = heads
        self.given = factors
        self.lengths = [0] * batch
        self.rows = [
            [
                Row(
                    np.zeros((0, codec.dim), np.float32),
                    [],
                    None if factors is None else factors[b, h].astype(np.int64),
                )
                for h in range(heads)
            ]
            for b in range(batch)
        ]

    def append(self, x: Array, counts: list[int] | None = None) -> None:
        """``x`` [B, H, L, D] float32, exact in the model dtype; the last counts[b] columns are real."""
        length = x.shape[2]
        for b in range(self.batch):
            count = length if counts is None else counts[b]
            for h in range(self.heads):
                row = self.rows[b][h]
                row.held_from = max(row.held_from, self.lengths[b] - RING)
                row.maybe_held_from = max(row.maybe_held_from, self.lengths[b] + count - length - RING)
                row.raw = np.concatenate([row.raw, x[b, h, length - count :]])
                self._pack(row)
            self.lengths[b] += count

    def _pack(self, row: Row) -> None:
        start, stop = len(row.tiles), packed_tiles(len(row.raw))
        if start >= stop:
            return
        key = self.role == "key"
        if key and row.factors is None:
            row.factors = tile_zero_factors(row.raw[:TILE])
        codes, base = encode(row.raw[start * TILE : stop * TILE], self.codec, key, row.factors)
        for t in range(stop - start):
            rows = slice(t * TILE, (t + 1) * TILE)
            row.tiles.append(
                Tile(
                    Codes(
                        codes.c[rows],
                        codes.scale[rows],
                        None if codes.c2 is None else codes.c2[rows],
                        None if codes.scale2 is None else codes.scale2[rows],
                    ),
                    None if base is None else Base(base.m[t : t + 1], base.e[t : t + 1]),
                )
            )

    def trim(self, amounts: int | list[int]) -> None:
        for b in range(self.batch):
            amount = amounts if isinstance(amounts, int) else amounts[b]
            n = self.lengths[b] - amount
            keep = packed_tiles(n)
            for h in range(self.heads):
                row = self.rows[b][h]
                gone = min(row.held_from, n)
                for t in range(-(-gone // TILE)):
                    values = self._round(self.decode_tile(row, t))
                    for j in range(max(FIRST, t * TILE), min(gone, (t + 1) * TILE)):
                        row.raw[j] = values[j - t * TILE]
                row.raw = row.raw[:n].copy()
                del row.tiles[keep:]
                if keep == 0 and self.given is None:
                    row.factors = None
                row.held_from = min(row.held_from, keep * TILE)
                row.maybe_held_from = min(row.maybe_held_from, row.held_from)
            self.lengths[b] = n

    def _round(self, x: Array) -> Array:
        return widen(cast(x, self.dtype), self.dtype)

    def decode_tile(self, row: Row, t: int) -> Array:
        return decode(row.tiles[t].codes, self.codec, row.tiles[t].base, row.factors)

    def plain(self, dtype: str) -> Array:
        """Words of ``dtype`` [B, H, max n, D]: packed tokens dequantized, the others raw, zeros beyond a row.

        Tokens that are packed and may be held raw as well are zero too: see :meth:`unpinned`.
        """
        longest = max(self.lengths, default=0)
        out = np.zeros((self.batch, self.heads, longest, self.codec.dim), np.float32)
        for b, heads in enumerate(self.rows):
            for h, row in enumerate(heads):
                out[b, h, : self.lengths[b]] = row.raw
                for t in range(len(row.tiles)):
                    start = max(FIRST, t * TILE)
                    out[b, h, start : (t + 1) * TILE] = self.decode_tile(row, t)[start - t * TILE :]
            low, high = self.unpinned(b)
            out[b, :, low:high] = 0
        return cast(out, dtype)

    def unpinned(self, b: int) -> tuple[int, int]:
        """Positions of row b that plain arrays may give raw or dequantized: packed, perhaps in the ring."""
        return max(FIRST, self.rows[b][0].maybe_held_from), TILE * packed_tiles(self.lengths[b])
