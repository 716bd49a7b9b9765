"""The tokens of a cache on the CPU: `turboquant_vlm.reference.tokens`, coded and restored by kernels.

What moves data is the reference's own; appending keys and values together codes their tiles in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from turboquant_vlm.reference.tokens import (
    Coder,
    append_with,
    check_pair,
    empty_tokens,
    raw_tokens_with,
    select_rows,
    stack_rows,
    trim_with,
)
from turboquant_vlm.reference.types import Tokens

from .codec import dequantize, encode_tiles

__all__ = ["append", "append_pair", "empty_tokens", "raw_tokens", "select_rows", "stack_rows", "trim"]

_CPU = Coder(encode_tiles, dequantize)


def append(tokens: Tokens, x: mx.array, counts: Sequence[int] | None = None) -> Tokens:
    """Add new keys or values x [B, H, L, D] to every row; as `turboquant_vlm.reference.append`."""
    return append_with(_CPU, [tokens], [x], counts)[0]


def append_pair(
    keys: Tokens, values: Tokens, k: mx.array, v: mx.array, counts: Sequence[int] | None = None
) -> tuple[Tokens, Tokens]:
    """Add the keys k and values v of the same tokens; as `turboquant_vlm.reference.append_pair`, in one call."""
    check_pair(keys, values, k, v)
    new_keys, new_values = append_with(_CPU, [keys, values], [k, v], counts)
    return new_keys, new_values


def trim(tokens: Tokens, n: int | Sequence[int]) -> Tokens:
    """Take the last n tokens back; as `turboquant_vlm.reference.trim`."""
    return trim_with(_CPU, tokens, n)


def raw_tokens(tokens: Tokens, dtype: mx.Dtype | None = None) -> mx.array:
    """All tokens as plain vectors; as `turboquant_vlm.reference.raw_tokens`."""
    return raw_tokens_with(_CPU, tokens, dtype)
