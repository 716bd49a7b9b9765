"""The TurboQuant KV cache of one sequence, with the cache protocol of mlx-vlm.

Being a subclass of mlx-vlm's class of the same name it passes every ``isinstance`` test made there; all behaviour is
its own (`packed_cache`).

Shapes: keys [B, H, L, Dk], values [B, H, L, Dv], any float dtype; B rows of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm import turboquant as _upstream
from mlx_vlm.models.cache import KVCache, create_attention_mask

from .packed_cache import PackedCache
from .state import arrays_of
from .views import Step, Usage

UpstreamTurboQuantKVCache: type = _upstream.TurboQuantKVCache

SLICE = 1024  # tokens quantized at a time when a float cache is converted: bounds what is alive besides it


class TurboQuantKVCache(PackedCache, UpstreamTurboQuantKVCache):
    """KV cache of one sequence (or of B rows of equal length) in TurboQuant codes.

    ``bits`` may be fractional (3.5: 4-bit keys, 3-bit values); ``key_bits`` and ``value_bits`` override it. ValueError
    for widths other than 1 to 6 and 8. ``backend`` names an implementation; default: the environment's choice.
    """

    def __init__(
        self,
        bits: float,
        seed: int = 0,
        key_bits: float | None = None,
        value_bits: float | None = None,
        backend: str | None = None,
    ) -> None:
        # mlx-vlm's __init__ would assign attributes that are properties here.
        self._configure(bits, seed, key_bits, value_bits, backend)

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        bits: float,
        seed: int = 0,
        key_bits: float | None = None,
        value_bits: float | None = None,
    ) -> TurboQuantKVCache:
        """The same tokens as a float ``cache``, quantized slice by slice so that little else is alive meanwhile."""
        made = cls(bits=bits, seed=seed, key_bits=key_bits, value_bits=value_bits)
        if cache.empty():
            return made
        keys, values = cache.state
        made._open(keys, values)
        if made._float is not None:
            made._float.state = (keys, values)
            return made
        for start in range(0, keys.shape[2], SLICE):
            part = slice(start, start + SLICE)
            made._append(keys[:, :, part], values[:, :, part])
            mx.eval(arrays_of(made._keys), arrays_of(made._values))
        return made

    def _new_float(self) -> KVCache:
        return KVCache()

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = self._backend.append_pair(self._keys, self._values, keys, values)

    def _step(self) -> Step:
        return Step(self._backend, self._keys, self._values, self._usage)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add L tokens; returns views of all keys and values (`views`), which attention reads packed."""
        if self._float is None and self._keys is None:
            self._open(keys, values)
        if self._float is not None:
            fetched: tuple[mx.array, mx.array] = self._float.update_and_fetch(keys, values)
            return fetched
        raw = (keys, values) if self.offset == 0 else None
        self._append(keys, values)
        step = Step(self._backend, self._keys, self._values, self._usage, raw)
        queries = keys.shape[2]
        return step.view("key", queries), step.view("value", queries)

    def trim(self, n: int) -> int:
        """Drop the last ``n`` tokens; returns how many there were to drop. Exact up to 32 (docs/numerics.md)."""
        n = min(self.offset, int(n))
        if n <= 0:
            return 0
        if self._float is not None:
            self._float.trim(n)
        elif n == self.offset:
            self._keys = self._values = None
        else:
            self._keys = self._backend.trim(self._keys, n)
            self._values = self._backend.trim(self._values, n)
        return n

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    @property
    def offset(self) -> int:
        """Tokens held."""
        if self._float is not None:
            return int(self._float.offset)
        return 0 if self._keys is None else int(max(self._keys.lengths))

    @offset.setter
    def offset(self, tokens: int) -> None:
        if tokens > self.offset:
            raise ValueError(f"offset={tokens} lies beyond the {self.offset} tokens of this TurboQuant cache")
        self.trim(self.offset - tokens)

    def size(self) -> int:
        return self.offset

    @property
    def state(self) -> tuple[Any, Any]:
        """(keys, values), each a flat tuple of arrays; (None, None) when empty; plain arrays in a float layer."""
        return self._sides()

    @state.setter
    def state(self, value: Sequence[Any] | None) -> None:
        self._set_state(value)

    @property
    def meta_state(self) -> tuple[str, ...]:
        return self._meta()

    @meta_state.setter
    def meta_state(self, meta: Sequence[str]) -> None:
        self._set_meta(meta)

    def extract(self, idx: int) -> TurboQuantKVCache:
        """Row ``idx`` as a cache of its own. IndexError if there is no such row."""
        made = self.__copy__()
        if self._float is not None:
            made._float = self._float.extract(idx)
            return made
        rows = 1 if self._keys is None else len(self._keys.lengths)
        if not -rows <= idx < rows:
            raise IndexError(f"row {idx} of a TurboQuant cache with {rows} rows")
        if self._keys is not None:
            made._keys = self._backend.select_rows(self._keys)[idx]
            made._values = self._backend.select_rows(self._values)[idx]
        return made

    @classmethod
    def merge(cls, caches: Sequence[Any], prefix_lens: Sequence[int] | None = None) -> Any:
        """Caches of single sequences as one batch, a `BatchTurboQuantKVCache`; with lengths, see below."""
        from .batch import BatchTurboQuantKVCache

        if prefix_lens is not None:
            return caches[0].prefix_cache_merge(caches, prefix_lens)
        return BatchTurboQuantKVCache.merge(caches)

    def prefix_cache_merge(self, rows: Sequence[Any], prefix_lens: Sequence[int]) -> Any:
        """Rows restored from the prefix cache as one batch, or None if they do not fit together.

        Rows without a hit arrive as empty float caches.
        """
        from .batch import BatchTurboQuantKVCache

        if not rows or len(rows) != len(prefix_lens):
            return None
        filled: list[TurboQuantKVCache] = []
        for row, length in zip(rows, prefix_lens, strict=True):
            if type(row) is KVCache and row.keys is None:
                row = type(self)(self.bits, self.seed, self.key_bits, self.value_bits, self.backend_name)
            if not isinstance(row, TurboQuantKVCache) or (row._keys is not None and row.offset != int(length)):
                return None
            filled.append(row)
        return BatchTurboQuantKVCache.merge(filled) if BatchTurboQuantKVCache.mergeable(filled) else None

    def __copy__(self) -> TurboQuantKVCache:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._usage = Usage()
        if self._float is not None:
            made._float = KVCache()
            made._float.state = self._float.state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantKVCache:
        return self.__copy__()  # tokens are never changed in place, so copies may share them


# mlx-vlm's prefix cache stores the class by module and name and only looks inside mlx_vlm. With the hook in, that
# name is this class; without it, mlx-vlm's class refuses the format and the entry counts as a miss.
TurboQuantKVCache.__module__ = _upstream.__name__
