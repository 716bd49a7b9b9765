"""The plain data that every backend shares: a codec's parameters, packed vectors, the tokens of a cache.

Nothing here computes.  Shapes use B rows of a batch, H kv heads, N tiles of 64 tokens, D the head size, W words
per vector.  All classes are immutable: a backend returns new objects and never writes into the arrays of old ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import mlx.core as mx

TILE = 64
"""Tokens of a tile (docs/numerics.md, section 2)."""
FIRST = 4
"""First tokens of a row, never packed: the model's own attention sinks."""
LAG = 32
"""A tile is packed once it has been complete for this many tokens."""
RING = 128
"""Raw tokens kept for decoding, the newest included."""

ALLOWED_BITS = (1, 2, 3, 4, 5, 6, 8)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
"""The dtypes of a model."""

Role = Literal["key", "value"]


def packed_tiles(tokens: int) -> int:
    """Number of whole tiles that a row of `tokens` tokens holds packed (section 2)."""
    return max(0, (tokens - LAG) // TILE)


@dataclass(frozen=True)
class Codec:
    """Parameters of one vector codec; make it with `make_codec`, which validates.

    dim: head size D.  bits: bits per coordinate.  seed: of the random signs.
    kind: "mse" (Lloyd-Max codes) or "prod" (bits - 1 bits and a sign of the remainder, keys only).
    """

    dim: int
    bits: int
    seed: int = 0
    kind: str = "mse"

    @property
    def code_bits(self) -> int:
        """Bits of the Lloyd-Max part."""
        return self.bits - 1 if self.kind == "prod" else self.bits

    @property
    def scale_shift(self) -> int:
        """κ: scales are stored 2^κ times larger, so that common norms are normal fp16 numbers (section 3.6)."""
        return (self.dim - 1).bit_length() + 3

    @property
    def sign_scale_shift(self) -> int:
        """κ2 of the sign code of `prod` (section 3.8)."""
        return self.scale_shift + ((self.dim - 1).bit_length() + 1) // 2 + 2


@dataclass(frozen=True)
class Packed:
    """Quantized vectors.

    words: uint32 [..., W].  scales: float16 [...].
    base, base_exponent: int16 [..., N, D] and [..., N], the key base of each tile, or None.
    factors: int8 [..., D], the channel factors of a row and kv head, or None.
    sign_words, sign_scales: uint32 [..., W1] and float16 [...], the second part of `prod`, or None.
    """

    words: mx.array
    scales: mx.array
    base: mx.array | None = None
    base_exponent: mx.array | None = None
    factors: mx.array | None = None
    sign_words: mx.array | None = None
    sign_scales: mx.array | None = None

    def arrays(self) -> dict[str, mx.array]:
        """The arrays that are present, by name."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: array for name, array in present.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())


@dataclass(frozen=True)
class Tokens:
    """The keys, or the values, of B rows: packed tiles, first tokens and the ring of young ones.

    codec, role: how old tokens are coded; keys have a base and channel factors, values have neither.
    lengths: tokens of each row.  A row of n tokens has `packed_tiles(n)` packed tiles.
    first: [B, H, <=4, D] in the model's dtype, the first tokens of each row.
    recent: [B, H, R, D] in the model's dtype, right-aligned: the last column is each row's newest token.
    held: how many of the R columns of `recent` belong to each row; columns to the left of them are padding.
    packed: words [B, H, N, 64, W], scales [B, H, N, 64], base [B, H, N, D], base_exponent [B, H, N],
        factors [B, H, D]; N is the largest tile count of the rows, tiles beyond a row's own count are padding.
    factors_given: the factors come from a profile; otherwise tile 0 fixes them.
    """

    codec: Codec
    role: Role
    lengths: tuple[int, ...]
    held: tuple[int, ...]
    first: mx.array
    recent: mx.array
    packed: Packed
    factors_given: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of everything held: packed tiles, scales, bases, factors, first tokens and the ring."""
        return self.packed.nbytes + self.first.nbytes + self.recent.nbytes
