"""What the cache of one sequence and the cache of a batch have in common.

Both hold keys and values as `Tokens` and hand every operation on them to a backend. Head sizes without an exact
rotation (``backend.supported_dim``) cannot be known before the first update; such a layer then keeps one of mlx-vlm's
float caches inside and says why in ``why_float``.

Shapes: keys [B, H, L, Dk], values [B, H, L, Dv], any float dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import backend as _backend
from .bits import resolve_kv_bits
from .guard import Functions
from .state import FORMAT, VERSION, arrays_of, check_version, describe, rebuild
from .views import Mask, StateView, Step, Usage, as_array, attention

Layout = tuple[str, str]


class PackedCache:
    """Keys and values of a layer in TurboQuant codes, or a float cache inside if its head size has none.

    Subclasses give ``_new_float`` (the float cache), ``_step`` (the cache as attention sees it) and ``offset``.
    """

    bits: float
    key_bits: int
    value_bits: int
    seed: int
    backend_name: str
    _backend: Functions
    _usage: Usage
    _keys: Any = None
    _values: Any = None
    _float: Any = None
    why_float: str | None = None
    _pending: Sequence[Any] | None = None
    _layout: Layout | None = None

    def _configure(
        self,
        bits: float,
        seed: int,
        key_bits: float | None,
        value_bits: float | None,
        backend: str | None = None,
    ) -> None:
        self.bits, key, value = resolve_kv_bits(bits, key_bits, value_bits)
        self.key_bits, self.value_bits = int(key), int(value)
        self.seed = int(seed)
        chosen = _backend.resolve(backend)
        self.backend_name = chosen.name
        self._backend = chosen.functions()
        self._usage = Usage()

    def _new_float(self) -> Any:
        raise NotImplementedError

    def _step(self) -> Step:
        raise NotImplementedError

    def _open(self, keys: mx.array, values: mx.array) -> None:
        """Decide, now that head sizes are known, how this layer is kept."""
        for role, x in (("key", keys), ("value", values)):
            if not self._backend.supported_dim(x.shape[-1]):
                self.why_float = f"{role} head size {x.shape[-1]} has no exact rotation"
                self._float = self._new_float()
                return
        batch, heads, _, key_dim = keys.shape
        key_codec = self._backend.make_codec(key_dim, self.key_bits, seed=self.seed)
        # Another seed for the values: mlx-vlm does so too, and equal head sizes then do not share a rotation.
        value_codec = self._backend.make_codec(values.shape[-1], self.value_bits, seed=self.seed + 1)
        self._keys = self._backend.empty_tokens(key_codec, "key", batch, heads, keys.dtype)
        self._values = self._backend.empty_tokens(value_codec, "value", batch, values.shape[1], values.dtype)

    # Attention

    def quantized_attention(
        self,
        queries: mx.array,
        keys_state: Any = None,
        values_state: Any = None,
        scale: float = 1.0,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of [B, Hq, L, Dk] queries, the last L tokens, over this cache: [B, Hq, L, Dv] in their dtype."""
        if keys_state is None or values_state is None:
            keys_state, values_state = self._filled()
        return attention(queries, keys_state, values_state, scale, mask, sinks)

    decode_attention = quantized_attention
    prefill_attention = quantized_attention

    def dequantize(self, keys_state: Any = None, values_state: Any = None) -> tuple[mx.array, mx.array]:
        """All keys and values (or those of a view) as float32 arrays [B, H, T, D]."""
        if keys_state is None or values_state is None:
            keys_state, values_state = self._filled()
        return as_array(keys_state, mx.float32), as_array(values_state, mx.float32)

    def dequantize_for_apc(self) -> tuple[mx.array | None, mx.array | None]:
        """Float keys and values for mlx-vlm's block-wise prefix cache, which quantizes them again on a hit."""
        return (None, None) if self.empty() else self.dequantize()

    # What the cache is

    def is_trimmable(self) -> bool:
        return True

    def empty(self) -> bool:
        return bool(self._float.empty()) if self._float is not None else self._keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of everything held: codes, scales, bases, factors, raw tokens."""
        if self._float is not None:
            return int(self._float.nbytes)
        return 0 if self._keys is None else int(self._keys.nbytes) + int(self._values.nbytes)

    def memory_profile(self, token_count: int) -> Any:
        """mlx-vlm's estimate of growth (None before it had one): a constant for raw tokens, then bytes per token."""
        from mlx_vlm.models import cache as kinds

        CacheMemory = getattr(kinds, "CacheMemory", None)
        if CacheMemory is None:
            return None
        if self._float is not None:
            return self._float.memory_profile(token_count)
        if self._keys is None:
            return CacheMemory()
        sides = (self._keys, self._values)
        fixed = sum(side.first.nbytes + side.recent.nbytes for side in sides)
        packed = sum(side.packed.nbytes for side in sides)
        held = max(1, *self._keys.lengths)
        return CacheMemory(source_bytes=fixed + packed, fixed_bytes=fixed, bytes_per_token=packed / held, step=64)

    @property
    def group_size(self) -> int:
        return 64  # asked for by code that dispatches on quantized caches; without meaning here

    @property
    def key_codec(self) -> Any:
        return None if self._keys is None else self._keys.codec

    @property
    def value_codec(self) -> Any:
        return None if self._values is None else self._values.codec

    def zero_row_tail(self, batch_index: int, start: int, end: int) -> None:
        raise NotImplementedError("a TurboQuant cache drops tokens with trim, or with prepare and finalize")

    # Storing and restoring

    def _sides(self) -> tuple[Any, Any]:
        """(keys, values), each a flat tuple of arrays; (None, None) when empty; plain arrays in a float layer."""
        if self._float is not None:
            state = self._float.state
            return state[0], state[1]
        if self._keys is None:
            return None, None
        step = self._step()
        return (
            StateView.of(arrays_of(self._keys), step, "key"),
            StateView.of(arrays_of(self._values), step, "value"),
        )

    def _filled(self) -> tuple[Any, Any]:
        if self.empty():
            raise ValueError("this TurboQuant cache is empty: there are no keys and values yet")
        return self._sides()

    @property
    def keys(self) -> Any:
        return self._sides()[0]

    @keys.setter
    def keys(self, arrays: Any) -> None:
        """Put back the arrays of ``keys`` after something wrapped them (``mx.depends``)."""
        if self._float is not None:
            self._float.keys = arrays
        else:
            self._keys = rebuild(arrays, describe(self._keys), self._backend)

    @property
    def values(self) -> Any:
        return self._sides()[1]

    @values.setter
    def values(self, arrays: Any) -> None:
        if self._float is not None:
            self._float.values = arrays
        else:
            self._values = rebuild(arrays, describe(self._values), self._backend)

    def _meta(self) -> tuple[str, ...]:
        """Format, version, widths, seed, kind ("empty", "float" or "tokens") and what describes that kind."""
        head = (FORMAT, VERSION, str(self.bits), str(self.key_bits), str(self.value_bits), str(self.seed))
        if self._float is not None:
            return (*head, "float", self.why_float or "")
        if self._keys is None:
            return (*head, "empty")
        return (*head, "tokens", describe(self._keys), describe(self._values))

    def _set_meta(self, meta: Sequence[str]) -> None:
        """Take in what `_meta` gave. ValueError if another format or version wrote it."""
        check_version(meta)
        _, _, bits, key_bits, value_bits, seed, kind, *rest = meta
        if "_backend" not in self.__dict__:  # made by from_state or a clone, without __init__
            self._configure(float(bits), int(seed), float(key_bits), float(value_bits))
        self.bits, self.key_bits, self.value_bits = float(bits), int(key_bits), int(value_bits)
        self.seed = int(seed)
        self._layout = (rest[0], rest[1]) if kind == "tokens" else None
        self.why_float = rest[0] if kind == "float" else None
        self._float = self._new_float() if kind == "float" else None
        self._settle()

    def _set_state(self, state: Sequence[Any] | None) -> None:
        self._keys = self._values = self._pending = None
        if self._float is not None:
            self._float = self._new_float()
        if state is not None and state[0] is not None:
            self._pending = state
            self._settle()

    def _settle(self) -> None:
        """Take pending arrays in once both halves are known; mlx-vlm may set state before or after meta_state."""
        if self._pending is None:
            return
        if self._float is not None:
            self._float.state = tuple(self._pending)
        elif self._layout is not None:
            keys = rebuild(self._pending[0], self._layout[0], self._backend)
            values = rebuild(self._pending[1], self._layout[1], self._backend)
            self._keys, self._values = keys, values
        else:
            return
        self._pending = self._layout = None

    state: Any
    meta_state: Any

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        return {"state": self.state, "meta_state": self.meta_state}

    def prefix_cache_restore(self, snapshot: dict[str, Any]) -> None:
        """Take over a snapshot. ValueError if another format or version wrote it."""
        check_version(snapshot["meta_state"])
        self._keys = self._values = self._float = self._pending = self._layout = None
        self.meta_state = snapshot["meta_state"]
        self.state = snapshot["state"]

    def prefix_cache_reserve(self, min_capacity_tokens: int) -> tuple[()]:
        return ()  # tiles are added as they fill; there is no capacity to reserve
