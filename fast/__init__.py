"""The room of the kernels: the public functions of `turboquant_vlm.reference` on packed data, with the same bits.

Every function goes to the first of `targets.TARGETS` that can be used on MLX's default device, and to the reference
if none can; `serving` says which.  Importing this package looks at no device; the first call does.  Whether a target
computes the right bits is not judged here but in `turboquant_vlm.conformance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from turboquant_vlm import reference as _reference
from turboquant_vlm.reference import ALLOWED_BITS, FIRST, LAG, RING, TILE, Codec, Packed, Tokens
from turboquant_vlm.reference.masks import Mask
from turboquant_vlm.reference.types import Role

from . import targets as _targets

__all__ = [
    "ALLOWED_BITS",
    "FIRST",
    "LAG",
    "RING",
    "TILE",
    "Codec",
    "Packed",
    "Tokens",
    "append",
    "append_pair",
    "attend",
    "dequantize",
    "empty_tokens",
    "make_codec",
    "measure_factors",
    "packed_tiles",
    "quantize",
    "raw_tokens",
    "scores",
    "select_rows",
    "stack_rows",
    "supported_dim",
    "supported_dims",
    "trim",
    "words_per_vector",
]


@cache
def _resolved(device: str) -> tuple[str, str, Any]:
    """(name, why, module) of what serves while ``device`` is MLX's default device."""
    target, why = _targets.first_available()
    if target is None:
        return "reference", why, _reference
    return target.name, why, target.load()


def _module() -> Any:
    return _resolved(str(mx.default_device()))[2]


def serving() -> tuple[str, str]:
    """The name of what serves calls now ("metal", ..., or "reference"), and why."""
    name, why, _ = _resolved(str(mx.default_device()))
    return name, why


def make_codec(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> Codec:
    """See `turboquant_vlm.reference.make_codec`, also for errors."""
    return _module().make_codec(dim, bits, seed, kind)


def quantize(x: mx.array, codec: Codec, base: bool = False, factors: mx.array | None = None) -> Packed:
    """Vectors x [..., T, D] as `Packed`; see `turboquant_vlm.reference.quantize`, also for errors."""
    return _module().quantize(x, codec, base, factors)


def dequantize(packed: Packed, codec: Codec, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The vectors [..., T, D] that `packed` stands for; see `turboquant_vlm.reference.dequantize`."""
    return _module().dequantize(packed, codec, dtype)


def empty_tokens(
    codec: Codec, role: Role, batch: int, heads: int, dtype: mx.Dtype, factors: mx.array | None = None
) -> Tokens:
    """Tokens of `batch` empty rows; see `turboquant_vlm.reference.empty_tokens`, also for errors."""
    return _module().empty_tokens(codec, role, batch, heads, dtype, factors)


def append(tokens: Tokens, x: mx.array, counts: Sequence[int] | None = None) -> Tokens:
    """The tokens with x [B, H, L, D] added; see `turboquant_vlm.reference.append`, also for errors."""
    return _module().append(tokens, x, counts)


def append_pair(
    keys: Tokens, values: Tokens, k: mx.array, v: mx.array, counts: Sequence[int] | None = None
) -> tuple[Tokens, Tokens]:
    """Both with the same tokens added; see `turboquant_vlm.reference.append_pair`, also for errors."""
    return _module().append_pair(keys, values, k, v, counts)


def trim(tokens: Tokens, n: int | Sequence[int]) -> Tokens:
    """The tokens without the last n of every row; see `turboquant_vlm.reference.trim`, also for errors."""
    return _module().trim(tokens, n)


def raw_tokens(tokens: Tokens, dtype: mx.Dtype | None = None) -> mx.array:
    """All tokens as plain vectors [B, H, longest row, D]; see `turboquant_vlm.reference.raw_tokens`."""
    return _module().raw_tokens(tokens, dtype)


def select_rows(tokens: Tokens) -> list[Tokens]:
    """Each row as Tokens of its own; see `turboquant_vlm.reference.select_rows`."""
    return _module().select_rows(tokens)


def stack_rows(rows: Sequence[Tokens]) -> Tokens:
    """Rows of any lengths as one batch; see `turboquant_vlm.reference.stack_rows`, also for errors."""
    return _module().stack_rows(rows)


def scores(
    q: mx.array,
    keys: Tokens,
    scale: float,
    mask: Mask = None,
    window: int | None = None,
    left_padding: Sequence[int] | None = None,
) -> mx.array:
    """Attention logits, int32 [B, Hq, L, longest row]; see `turboquant_vlm.reference.scores`, also for errors."""
    return _module().scores(q, keys, scale, mask, window, left_padding)


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
    """Attention of q [B, Hq, L, D], [B, Hq, L, Dv]; see `turboquant_vlm.reference.attend`, also for errors."""
    return _module().attend(q, keys, values, scale, mask, sinks, window, left_padding)


def measure_factors(q: mx.array, k: mx.array) -> mx.array:
    """Channel factors int8 [Hk, D]; see `turboquant_vlm.reference.measure_factors`, also for errors."""
    return _module().measure_factors(q, k)


def supported_dim(dim: int) -> bool:
    """Whether vectors of `dim` coordinates have a rotation."""
    return _module().supported_dim(dim)


def supported_dims() -> tuple[int, ...]:
    """All head sizes that `supported_dim` accepts."""
    return _module().supported_dims()


def packed_tiles(tokens: int) -> int:
    """Whole tiles that a row of `tokens` tokens holds packed."""
    return _module().packed_tiles(tokens)


def words_per_vector(dim: int, bits: int) -> int:
    """uint32 words of a packed vector."""
    return _module().words_per_vector(dim, bits)
