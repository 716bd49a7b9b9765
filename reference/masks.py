"""Which tokens a query may attend to: lengths, causality, windows and masks (docs/numerics.md, section 2).

Columns of a mask are those of the model's own timeline, left padding included; here they become positions of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import mlx.core as mx
import numpy as np

from .query import clamp28

__all__ = ["Mask", "MaskView", "additive_logits", "attended", "checked_mask", "row_mask"]

LOG2_E_FLOAT32 = float(np.array(0x3FB8AA3B, np.uint32).view(np.float32))


@dataclass(frozen=True)
class MaskView:
    """The mask of one row: causal, window, and an array [Hq or 1, L or 1, n or 1] by position, or None."""

    causal: bool
    window: int | None
    array: mx.array | None


Mask = mx.array | str | None


def checked_mask(
    mask: Mask,
    window: int | None,
    left_padding: Sequence[int] | None,
    query_shape: Sequence[int],
    lengths: Sequence[int],
    heads: int,
) -> tuple[list[int], mx.array | None]:
    """The padding of every row and the mask with four axes, or None for a mask without numbers.

    Raises ValueError for a mask, window or padding that does not fit q [B, Hq, L, D] and keys of `heads` kv heads.
    """
    padding = [0] * len(lengths) if left_padding is None else [int(p) for p in left_padding]
    if len(padding) != len(lengths) or min(padding) < 0:
        raise ValueError(f"left_padding must be {len(lengths)} numbers >= 0; got {padding}")
    if window is not None and (not isinstance(window, Integral) or window < 1):
        raise ValueError(f"window must be an integer of at least 1; got window={window!r}")
    if mask is None or isinstance(mask, str):
        if mask not in (None, "causal"):
            raise ValueError(f'mask must be None, "causal" or an array; got mask={mask!r}')
        return padding, None
    array = _four_axes(mask, query_shape, heads)
    columns = max(n + p for n, p in zip(lengths, padding, strict=True))
    wanted = (query_shape[0], query_shape[1], query_shape[2], columns)
    if any(have not in (1, want) for have, want in zip(array.shape, wanted, strict=True)):
        raise ValueError(f"mask must broadcast to {list(wanted)}; got shape {tuple(mask.shape)}")
    return padding, array


def row_mask(
    mask: Mask,
    window: int | None,
    left_padding: Sequence[int] | None,
    row: int,
    query_shape: Sequence[int],
    lengths: Sequence[int],
    heads: int,
) -> MaskView:
    """Check a mask and take the part of one row."""
    padding, array = checked_mask(mask, window, left_padding, query_shape, lengths, heads)
    # A window that reaches beyond every token is none; a wider one would not fit into int32.
    window = None if window is None or window >= 2**31 else int(window)
    if array is None:
        return MaskView(mask is not None, window, None)
    part = array[row if array.shape[0] > 1 else 0]
    if part.shape[2] > 1:
        part = part[..., padding[row] : padding[row] + lengths[row]]
    return MaskView(False, window, part)


def _four_axes(mask: mx.array, query_shape: Sequence[int], kv_heads: int) -> mx.array:
    if mask.dtype != mx.bool_ and not mx.issubdtype(mask.dtype, mx.floating):
        raise ValueError(f"mask must be bool or floating; got {mask.dtype}")
    if mask.ndim > 5:
        raise ValueError(f"mask must have at most 5 axes; got shape {tuple(mask.shape)}")
    if mask.ndim == 5:
        outer, heads, group = mask.shape[:3]
        groups = query_shape[1] // kv_heads
        if heads not in (1, kv_heads) or group not in (1, groups):
            raise ValueError(
                f"a mask of rank 5 must broadcast to [B, {kv_heads}, {groups}, L, columns]; got {tuple(mask.shape)}"
            )
        if heads * group == 1:
            return mask.reshape(outer, 1, *mask.shape[3:])
        mask = mx.broadcast_to(mask, (outer, kv_heads, groups, *mask.shape[3:]))
        return mask.reshape(outer, query_shape[1], *mask.shape[3:])
    return mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)


def attended(
    view: MaskView, positions: mx.array, group: int, heads: int, start: int, columns: int, length: int
) -> tuple[mx.array, mx.array | None]:
    """allowed bool [Hk or 1, M, T] for queries at `positions` (query `start` of the mask first), and the additive mask.

    The additive mask is float32 [Hk or 1, M or 1, T] or None; -inf in it excludes a token.
    """
    i, j = positions[:, None], mx.arange(columns)
    allowed = (j < length) & (i >= 0)
    if view.causal:
        allowed = allowed & (j <= i)
    if view.window is not None:
        allowed = allowed & (i - j < view.window)
    allowed = mx.tile(allowed, (group, 1))[None]
    if view.array is None:
        return allowed, None
    queries = positions.shape[0]
    array = view.array if view.array.shape[1] == 1 else view.array[:, start : start + queries]
    if array.shape[2] > 1:
        array = mx.pad(array, [(0, 0), (0, 0), (0, columns - array.shape[2])])
    array = mx.broadcast_to(array, (array.shape[0], queries, columns))
    one_for_all = array.shape[0] == 1
    array = mx.tile(array, (1, group, 1)) if one_for_all else array.reshape(heads, group * queries, columns)
    if array.dtype == mx.bool_:
        return allowed & array, None
    array = array.astype(mx.float32)
    return allowed & (array != -mx.inf), array


def additive_logits(values: mx.array) -> tuple[mx.array, mx.array]:
    """Natural logits (float32) as fixed-point base-2 ones within +-2^28, int32, and where they are NaN."""
    nan = mx.isnan(values)
    known = mx.where(nan, 0.0, values)
    return clamp28(mx.round(known * LOG2_E_FLOAT32 * 4096.0)), nan
