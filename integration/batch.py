"""The TurboQuant KV cache of a batch: rows of their own length, joining and leaving while the batch runs.

mlx-vlm keeps a batch as one timeline of columns; shorter rows begin with padding columns. Here padding is never
stored: each row is the same tokens, with the same codes, as that sequence alone. What remains of the timeline are two
numbers: ``_idx``, its columns, and the padding of each row. A row holds max(0, _idx - padding) tokens.

In a mixed prefill mlx-vlm pads rows at the end instead (``prepare(right_padding=..., lengths=...)``, then updates, then
``finalize()``): columns behind a row's ``lengths`` are dropped on arrival, and ``finalize`` moves the padding to the
front. The same two calls without an update between them take tokens back from each row, after speculative decoding.

Shapes: keys [B, H, L, Dk], values [B, H, L, Dv], any float dtype; L columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm import turboquant as _upstream
from mlx_vlm.models.cache import BatchKVCache, KVCache, create_causal_mask

from .cache import TurboQuantKVCache
from .packed_cache import PackedCache
from .views import Step, Usage

UpstreamBatchTurboQuantKVCache: type = _upstream.BatchTurboQuantKVCache


def _integers(values: Any) -> list[int]:
    plain: Any = values.tolist() if isinstance(values, mx.array) else values
    return [int(v) for v in plain]


class BatchTurboQuantKVCache(PackedCache, UpstreamBatchTurboQuantKVCache):
    """KV cache of B rows in TurboQuant codes; ``left_padding``: padding columns before each row's first token.

    Widths and errors as in `TurboQuantKVCache`.
    """

    _idx: int = 0
    _padding: list[int]
    _right: list[int] | None = None
    _remaining: list[int] | None = None

    def __init__(
        self,
        left_padding: Sequence[int],
        bits: float,
        seed: int = 0,
        key_bits: float | None = None,
        value_bits: float | None = None,
        backend: str | None = None,
    ) -> None:
        self._configure(bits, seed, key_bits, value_bits, backend)
        self._padding = _integers(left_padding)

    def _new_float(self) -> BatchKVCache:
        return BatchKVCache(self._padding)

    def _like(self, padding: Sequence[int]) -> BatchTurboQuantKVCache:
        return type(self)(padding, self.bits, self.seed, self.key_bits, self.value_bits, self.backend_name)

    # Writing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add L columns; returns views of all keys and values (`views`), which attention reads packed."""
        if self._float is None and self._keys is None:
            self._open(keys, values)
        if self._float is not None:
            fetched: tuple[mx.array, mx.array] = self._float.update_and_fetch(keys, values)
            self._idx += keys.shape[2]
            return fetched
        columns = keys.shape[2]
        counts, tails = self._real(columns)
        raw = (keys, values) if self._idx == 0 and counts == [columns] * len(counts) else None
        if any(tails):
            keys, values = _shift_right(keys, tails), _shift_right(values, tails)
        self._keys, self._values = self._backend.append_pair(self._keys, self._values, keys, values, counts)
        self._idx += columns
        step = self._step(raw)
        return step.view("key", columns), step.view("value", columns)

    def _real(self, columns: int) -> tuple[list[int], list[int]]:
        """Of the next ``columns``: how many are tokens of each row, and how many follow its last one."""
        counts = [columns - min(max(pad - self._idx, 0), columns) for pad in self._padding]
        if self._remaining is None:
            return counts, [0] * len(counts)
        kept = [min(count, left) for count, left in zip(counts, self._remaining, strict=True)]
        self._remaining = [left - count for left, count in zip(self._remaining, kept, strict=True)]
        return kept, [count - keep for count, keep in zip(counts, kept, strict=True)]

    def _step(self, raw: tuple[mx.array, mx.array] | None = None) -> Step:
        left = tuple(min(pad, self._idx) for pad in self._padding)
        right = tuple(self._idx - pad - n for pad, n in zip(left, self._keys.lengths, strict=True))
        return Step(self._backend, self._keys, self._values, self._usage, raw, left, right)

    def trim(self, n: int) -> int:
        """Drop the last ``n`` columns of every row; returns how many there were. Exact up to 32 (docs/numerics.md)."""
        n = min(self._idx, int(n))
        if n <= 0:
            return 0
        if self._float is not None:
            self._float.trim(n)
        elif self._keys is not None:
            self._take_back([min(n, length) for length in self._keys.lengths])
        self._idx -= n
        return n

    def _take_back(self, counts: Sequence[int]) -> None:
        self._keys = self._backend.trim(self._keys, list(counts))
        self._values = self._backend.trim(self._values, list(counts))

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding of the coming columns: in front of an empty cache, or behind each row's ``lengths``."""
        if self._float is not None:
            self._float.prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
            self._follow_float()
            return
        if left_padding is not None:
            if self._keys is not None:
                raise ValueError("left padding can only be added to an empty cache")
            more = _integers(left_padding)
            self._padding = [pad + extra for pad, extra in zip(self._padding, more, strict=True)]
        if right_padding is not None and max(_integers(right_padding)) > 0:
            self._right = _integers(right_padding)
            self._remaining = None if lengths is None else _integers(lengths)

    def finalize(self) -> None:
        """Turn announced right padding into left padding."""
        if self._float is not None:
            self._float.finalize()
            self._follow_float()
            return
        right, self._right, self._remaining = self._right, None, None
        if right is None or self._keys is None:
            return
        self._padding = [pad + extra for pad, extra in zip(self._padding, right, strict=True)]
        kept = [max(0, self._idx - pad) for pad in self._padding]
        self._take_back([n - keep for n, keep in zip(self._keys.lengths, kept, strict=True)])

    # Rows

    def filter(self, batch_indices: Any) -> None:
        """Keep the given rows, in that order, and drop columns that are padding in all of them."""
        rows = _integers(batch_indices)
        if self._float is not None:
            self._float.filter(mx.array(rows))
            self._follow_float()
            return
        if self._keys is not None:
            self._keys = self._pick(self._keys, rows)
            self._values = self._pick(self._values, rows)
        self._padding = [self._padding[row] for row in rows]
        common = min(min(self._padding, default=0), self._idx)
        if common > 0:
            self._idx -= common
            self._padding = [pad - common for pad in self._padding]

    def _pick(self, tokens: Any, rows: Sequence[int]) -> Any:
        apart = self._backend.select_rows(tokens)
        return self._backend.stack_rows([apart[row] for row in rows])

    def extend(self, other: Any) -> None:
        """Append the rows of ``other``, a cache of the same widths, or a float batch cache (then quantized)."""
        if isinstance(other, BatchKVCache):
            other = self._quantized(other)
        if self._float is not None or other._float is not None:
            self._extend_float(other)
            return
        columns = max(self._idx, other._idx)
        mine = [pad + columns - self._idx for pad in self._padding]
        theirs = [pad + columns - other._idx for pad in other._padding]
        model = self if self._keys is not None else other
        if model._keys is not None:
            keys = [side._rows_or_empty(model._keys, side._keys) for side in (self, other)]
            values = [side._rows_or_empty(model._values, side._values) for side in (self, other)]
            self._keys, self._values = self._backend.stack_rows(keys), self._backend.stack_rows(values)
        self._padding = mine + theirs
        self._idx = columns

    def _rows_or_empty(self, model: Any, tokens: Any) -> Any:
        """``tokens``, or as many empty rows as this cache has, shaped like ``model``."""
        if tokens is not None:
            return tokens
        heads, dtype = model.first.shape[1], model.first.dtype
        return self._backend.empty_tokens(model.codec, model.role, len(self._padding), heads, dtype)

    def _extend_float(self, other: BatchTurboQuantKVCache) -> None:
        for side in (self, other):
            if side._float is None:
                side._float = side._new_float()
        self._float.extend(other._float)
        self.why_float = self.why_float or other.why_float
        self._follow_float()

    def _follow_float(self) -> None:
        self._idx, self._padding = self._float._idx, _integers(self._float.left_padding)

    def _quantized(self, cache: BatchKVCache) -> BatchTurboQuantKVCache:
        """A float batch cache in the codes of this one."""
        made = self._like(_integers(cache.left_padding))
        keys, values = cache.state[:2]
        if keys is not None:
            made.update_and_fetch(keys, values)
        return made

    def extract(self, idx: int) -> TurboQuantKVCache:
        """Row ``idx`` as the cache of one sequence, without padding."""
        made = TurboQuantKVCache(self.bits, self.seed, self.key_bits, self.value_bits, self.backend_name)
        if self._float is not None:
            made._float, made.why_float = self._float.extract(idx), self.why_float
        elif self._keys is not None and self._keys.lengths[idx]:
            made._keys = self._backend.select_rows(self._keys)[idx]
            made._values = self._backend.select_rows(self._values)[idx]
        return made

    @staticmethod
    def mergeable(caches: Sequence[TurboQuantKVCache]) -> bool:
        """Whether the caches have the same widths, seed and (where filled) codecs and kind."""
        if not caches or len({(c.key_bits, c.value_bits, c.seed) for c in caches}) > 1:
            return False
        kinds = {(c._float is not None, c.key_codec, c.value_codec) for c in caches if not c.empty()}
        return len(kinds) <= 1

    @classmethod
    def merge(cls, caches: Sequence[TurboQuantKVCache]) -> BatchTurboQuantKVCache:
        """Caches of single sequences as one batch. ValueError if their widths or codecs differ."""
        if not cls.mergeable(caches):
            raise ValueError("TurboQuant caches of different widths, seeds or head sizes cannot form a batch")
        one = caches[0]
        columns = max(cache.offset for cache in caches)
        made = cls(
            [columns - c.offset for c in caches], one.bits, one.seed, one.key_bits, one.value_bits, one.backend_name
        )
        made._idx = columns
        floats = [cache._float or KVCache() for cache in caches]
        if any(cache._float is not None for cache in caches):
            made._float = BatchKVCache.merge(floats)
            made.why_float = next(cache.why_float for cache in caches if cache._float is not None)
            return made
        filled = next((cache for cache in caches if cache._keys is not None), None)
        if filled is not None:
            alone = [made._like([0]) for _ in caches]
            keys = [a._rows_or_empty(filled._keys, c._keys) for a, c in zip(alone, caches, strict=True)]
            values = [a._rows_or_empty(filled._values, c._values) for a, c in zip(alone, caches, strict=True)]
            made._keys, made._values = made._backend.stack_rows(keys), made._backend.stack_rows(values)
        return made

    def prefix_cache_merge(self, rows: Any, prefix_lens: Any) -> None:
        return None  # rows of a prefix cache are caches of one sequence

    # What the cache is

    @property
    def left_padding(self) -> mx.array:
        """int32 [B], a new array each time: models keep what they were given."""
        return mx.array(self._padding, dtype=mx.int32)

    @left_padding.setter
    def left_padding(self, padding: Any) -> None:
        wanted = _integers(padding)
        if self._keys is not None and wanted != self._padding:
            raise ValueError(f"left_padding={wanted} does not fit the tokens held ({self._padding})")
        self._padding = wanted

    @property
    def offset(self) -> mx.array:
        """int32 [B], position of the next token of each row, negative in padding; a new array each time."""
        return mx.array([self._idx - pad for pad in self._padding], dtype=mx.int32)

    @offset.setter
    def offset(self, offsets: Any) -> None:
        wanted = _integers(offsets)
        if wanted != [self._idx - pad for pad in self._padding]:
            raise ValueError(f"offset={wanted} does not fit a cache of {self._idx} columns, padding {self._padding}")

    @property
    def batch_size(self) -> int:
        return len(self._padding)

    def is_single_row(self) -> bool:
        return self.batch_size == 1

    @property
    def fused_attention_eligible(self) -> bool:
        return True

    def size(self) -> int:
        return self._idx

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = create_causal_mask(N, offset=self._idx, left_padding=self.left_padding, **kwargs)
        return mask

    # Storing and restoring

    @property
    def state(self) -> tuple[Any, Any, mx.array, mx.array]:
        """(keys, values, offset, left_padding); keys and values flat tuples of arrays, or None when empty."""
        return (*self._sides(), self.offset, self.left_padding)

    @state.setter
    def state(self, value: Sequence[Any] | None) -> None:
        self._padding = self._padding if value is None else _integers(value[3])
        self._set_state(value)

    @property
    def meta_state(self) -> tuple[str, ...]:
        return (*self._meta(), str(self._idx))

    @meta_state.setter
    def meta_state(self, meta: Sequence[str]) -> None:
        if "_padding" not in self.__dict__:
            self._padding = []
        self._set_meta(meta[:-1])
        self._idx = int(meta[-1])

    def __copy__(self) -> BatchTurboQuantKVCache:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._usage = Usage()
        made._padding = list(self._padding)
        if self._float is not None:
            made._float = BatchKVCache(self._padding)
            made._float.state = self._float.state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchTurboQuantKVCache:
        return self.__copy__()


def joinable(cache: Any, other: Any) -> Any:
    """``cache``, or its quantized form if it is a float batch that the rows of a quantized ``other`` will join."""
    if isinstance(cache, BatchKVCache) and isinstance(other, BatchTurboQuantKVCache):
        return other._quantized(cache)
    return cache


def _shift_right(x: mx.array, tails: Sequence[int]) -> mx.array:
    """Move the columns of row b of [B, H, L, D] right by ``tails[b]``: backends take the last ones as tokens."""
    return mx.concatenate([mx.roll(x[b : b + 1], tail, 2) for b, tail in enumerate(tails)], axis=0)


BatchTurboQuantKVCache.__module__ = _upstream.__name__  # see cache.py
