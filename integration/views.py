"""What ``update_and_fetch`` hands to a model: keys and values that stay packed until someone needs the floats.

mlx-vlm's models treat the result of ``update_and_fetch`` in three ways. Most pass it on to
``scaled_dot_product_attention``; some look at ``shape`` or slice a prefix first; a few (soft-capped, latent or
hand-written attention) compute with it directly. A `Step` is one such result; its two sides are handed out as

- `ArrayView`, an ``mx.array`` whose value is the dequantized cache as a graph that is only evaluated when used: right
  for every model, but building the graph costs time on each call;
- `LightView`, which only knows shape and dtype and turns into an array on demand.

A cache hands out ArrayViews until it has seen attention accept them, then LightViews; see `Usage`. Attention
recognises both, so the packed form is what it reads.

Shapes: queries [B, Hq, L, D]; keys and values [B, H, T, D], T the columns of the cache, left padding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import mlx.core as mx

from .backend import attends_first_chunk
from .guard import Functions

Role = Literal["key", "value"]
Mask = mx.array | str | None


class Usage:
    """Whether packed attention has served a cache, for decode (L = 1) and for prefill (L > 1).

    A model's decode and prefill may take different paths, so what one accepts says nothing about the other.
    """

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.decode = False
        self.prefill = False

    def note(self, queries: int) -> None:
        if queries == 1:
            self.decode = True
        else:
            self.prefill = True

    def seen(self, queries: int) -> bool:
        return self.decode if queries == 1 else self.prefill


class Step:
    """Keys and values of one update, shared by the two views handed out.

    ``raw`` holds the float keys and values when this update was the first on an empty cache: that one attention call
    may read them as they are. ``left_padding`` is the number of padding columns before each row's first token,
    ``right_padding`` of those after its last one (rows of unequal length may be prefilled either way).
    """

    __slots__ = ("_narrowed", "backend", "keys", "left_padding", "raw", "right_padding", "usage", "values")

    def __init__(
        self,
        backend: Functions,
        keys: Any,
        values: Any,
        usage: Usage,
        raw: tuple[mx.array, mx.array] | None = None,
        left_padding: tuple[int, ...] = (),
        right_padding: tuple[int, ...] = (),
    ) -> None:
        self.backend = backend
        self.keys = keys
        self.values = values
        self.raw = raw
        rows = len(keys.lengths)
        self.left_padding = left_padding or (0,) * rows
        self.right_padding = right_padding or (0,) * rows
        self.usage = usage
        self._narrowed: dict[int, Step] = {}

    def side(self, role: Role) -> Any:
        return self.keys if role == "key" else self.values

    @property
    def columns(self) -> int:
        """Columns of the cache, padding included; the same for every row."""
        rows = zip(self.left_padding, self.keys.lengths, self.right_padding, strict=True)
        return max((sum(row) for row in rows), default=0)

    def shape(self, role: Role) -> tuple[int, int, int, int]:
        tokens = self.side(role)
        batch, heads = tokens.recent.shape[:2]
        return batch, heads, self.columns, tokens.codec.dim

    def dequantize(self, role: Role, dtype: mx.Dtype | None = None) -> mx.array:
        """Plain [B, H, T, D] array in ``dtype`` (default: the dtype the model wrote). Padding columns are zero."""
        tokens = self.side(role)
        dtype = tokens.recent.dtype if dtype is None else dtype
        if self.raw is not None:
            return self.raw[0 if role == "key" else 1].astype(dtype)
        array = self.backend.raw_tokens(tokens, dtype)
        if not any(self.left_padding) and not any(self.right_padding):
            return array
        return _place_rows(array, self.left_padding, self.keys.lengths, self.columns)

    def narrow(self, end: int) -> Step:
        """The same cache when it had only its first ``end`` columns, as speculative verification asks for."""
        drop = self.columns - end
        if drop <= 0:
            return self
        found = self._narrowed.get(end)
        if found is None:
            raw = None if self.raw is None else (self.raw[0][:, :, :end], self.raw[1][:, :, :end])
            right = tuple(max(0, pad - drop) for pad in self.right_padding)
            counts = [min(max(0, drop - pad), n) for pad, n in zip(self.right_padding, self.keys.lengths, strict=True)]
            found = Step(
                self.backend,
                self.backend.trim(self.keys, counts),
                self.backend.trim(self.values, counts),
                self.usage,
                raw,
                tuple(min(pad, end) for pad in self.left_padding),
                right,
            )
            self._narrowed[end] = found
        return found

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries``, the last L columns of every row; [B, Hq, L, Dv] in their dtype."""
        if isinstance(mask, str) and mask != "causal":
            raise ValueError(f"unknown attention mask {mask!r}; expected None, 'causal' or an array")
        self.usage.note(queries.shape[2])
        if self.raw is not None and not attends_first_chunk(self.backend):
            keys, values = (x.astype(queries.dtype) for x in self.raw)
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if any(self.right_padding):
            return self._attend_by_row(queries, scale, mask, sinks)
        out: mx.array = self.backend.attend(
            queries,
            self.keys,
            self.values,
            scale,
            mask=mask,
            sinks=sinks,
            left_padding=self.left_padding if any(self.left_padding) else None,
        )
        return out

    def _attend_by_row(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """`attend` for right-padded rows: backends take the last query of a row to be its last token."""
        keys, values = self.backend.select_rows(self.keys), self.backend.select_rows(self.values)
        total = queries.shape[2]
        rows = []
        for b, (left, right) in enumerate(zip(self.left_padding, self.right_padding, strict=True)):
            real = total - min(right, total)
            if real == 0:
                rows.append(mx.zeros((1, queries.shape[1], total, self.values.codec.dim), queries.dtype))
                continue
            out = self.backend.attend(
                queries[b : b + 1, :, :real],
                keys[b],
                values[b],
                scale,
                mask=_mask_of_row(mask, b, real, left + self.keys.lengths[b]),
                sinks=sinks,
                left_padding=(left,) if left else None,
            )
            rows.append(mx.pad(out, [(0, 0), (0, 0), (0, total - real), (0, 0)]))
        return mx.concatenate(rows, axis=0)

    def view(self, role: Role, queries: int) -> ArrayView | LightView:
        """What to hand to a model that will attend with ``queries`` new tokens."""
        if self.raw is None and self.usage.seen(queries):
            return LightView(self, role)
        return ArrayView(self.dequantize(role), self, role)


def _place_rows(array: mx.array, padding: tuple[int, ...], lengths: tuple[int, ...], columns: int) -> mx.array:
    """Put the ``lengths[b]`` tokens of row b of [B, H, T, D] at column ``padding[b]``, zeros around them."""
    rows = []
    for b, (pad, length) in enumerate(zip(padding, lengths, strict=True)):
        row = array[b : b + 1, :, :length]
        rows.append(mx.pad(row, [(0, 0), (0, 0), (pad, columns - pad - length), (0, 0)]))
    return mx.concatenate(rows, axis=0)


def _mask_of_row(mask: Mask, row: int, queries: int, columns: int) -> Mask:
    """The part of an array mask [..., L, T] for the first ``queries`` and ``columns`` of one row."""
    if not isinstance(mask, mx.array):
        return mask
    mask = mask.reshape((1,) * max(0, 4 - mask.ndim) + mask.shape)
    mask = mask[row : row + 1] if mask.shape[0] > 1 else mask
    mask = mask[..., :queries, :] if mask.shape[-2] > 1 else mask
    return mask[..., :columns] if mask.shape[-1] > 1 else mask


def prefix_end(key: Any, columns: int) -> int | None:
    """End of the time axis if ``key`` indexes [B, H, T, D] as a plain prefix in time and nothing else, else None."""
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        return None
    if dots:
        parts[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(parts) + 1)
    parts += [slice(None)] * (4 - len(parts))
    if len(parts) != 4 or not all(isinstance(part, slice) for part in parts):
        return None
    if any(part != slice(None) for axis, part in enumerate(parts) if axis != 2):
        return None
    time: slice = parts[2]
    if not all(bound is None or isinstance(bound, int) for bound in (time.start, time.stop, time.step)):
        return None
    start, stop, step = time.indices(columns)
    return stop if start == 0 and step == 1 and stop > 0 else None


class ArrayView(mx.array):
    """An ``mx.array`` holding the dequantized side of a `Step`; a prefix slice in time is again a view."""

    def __init__(self, array: mx.array, step: Step, role: Role) -> None:
        super().__init__(array)
        self.step = step
        self.role = role

    def __getitem__(self, key: Any) -> mx.array:
        array: mx.array = super().__getitem__(key)
        end = prefix_end(key, self.step.columns)
        return array if end is None else ArrayView(array, self.step.narrow(end), self.role)


class LightView:
    """Shape and dtype of one side of a `Step`; anything else asked of it goes to the dequantized array."""

    __slots__ = ("_array", "role", "shape", "step")
    ndim = 4

    def __init__(self, step: Step, role: Role) -> None:
        self.step = step
        self.role = role
        self.shape = step.shape(role)
        self._array: mx.array | None = None

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.step.side(self.role).recent.dtype
        return dtype

    def array(self) -> mx.array:
        if self._array is None:
            self._array = self.step.dequantize(self.role)
        return self._array

    def __mlx_array__(self) -> mx.array:
        return self.array()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.array(), name)

    def __getitem__(self, key: Any) -> Any:
        end = prefix_end(key, self.shape[2])
        return self.array()[key] if end is None else LightView(self.step.narrow(end), self.role)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[mx.array]:
        return iter(self.array())


def _forward(name: str) -> Any:
    def operator(self: LightView, *others: Any) -> Any:
        plain = [other.array() if isinstance(other, LightView) else other for other in others]
        return getattr(self.array(), name)(*plain)

    return operator


# Python looks operators up on the type, so __getattr__ does not reach them.
_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv matmul pow neg abs eq ne lt le gt ge"
for _name in _OPERATORS.split(" "):
    setattr(LightView, f"__{_name}__", _forward(f"__{_name}__"))


class StateView(tuple[mx.array, ...]):
    """One side of ``cache.state``: its arrays as a flat tuple, which attention also accepts as keys or values."""

    step: Step
    role: Role

    @classmethod
    def of(cls, arrays: list[mx.array], step: Step, role: Role) -> StateView:
        made = cls(arrays)
        made.step = step
        made.role = role
        return made

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.step.shape(self.role)

    def __getitem__(self, key: Any) -> Any:
        """Arrays by number as in any tuple; with several indices, [B, H, T, D] of the tokens."""
        return LightView(self.step, self.role)[key] if isinstance(key, tuple) else super().__getitem__(key)


Viewed = ArrayView | LightView | StateView


def as_array(x: Any, dtype: mx.Dtype | None = None) -> mx.array:
    """A plain array for whatever ``update_and_fetch`` or ``state`` gave; arrays pass through."""
    if isinstance(x, ArrayView) and (dtype is None or dtype == x.dtype):
        return x
    if isinstance(x, (ArrayView, LightView, StateView)):
        return x.step.dequantize(x.role, dtype)
    array: mx.array = x
    return array if dtype is None else array.astype(dtype)


def packed_pair(keys: Any, values: Any) -> Step | None:
    """The `Step` that ``keys`` and ``values`` are the two sides of, or None."""
    if not isinstance(keys, (ArrayView, LightView, StateView)) or not isinstance(
        values, (ArrayView, LightView, StateView)
    ):
        return None
    same = keys.step is values.step and keys.role == "key" and values.role == "value"
    return keys.step if same else None


def is_view(x: Any) -> bool:
    return isinstance(x, (ArrayView, LightView, StateView))


def attention(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attention over a cache's keys and values, packed if they are the two sides of one step, else as floats.

    The float case is a model that computed something from them first (latent attention passes the keys as values).
    """
    step = packed_pair(keys, values)
    if step is not None:
        return step.attend(queries, scale, mask, sinks)
    plain_keys, plain_values = as_array(keys, queries.dtype), as_array(values, queries.dtype)
    return mx.fast.scaled_dot_product_attention(queries, plain_keys, plain_values, scale=scale, mask=mask, sinks=sinks)
