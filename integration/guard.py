"""A set of kernels that cannot break a run: where a call fails, the reference repeats it and serves from then on.

All public functions are pure and every backend reads the others' tokens, so a call can be repeated at any point of a
run without a trace.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from turboquant_vlm.reference import FIRST, Codec, Packed, Tokens, packed_tiles

Log = Callable[[str], None]

_TRACED = "during function transformations"  # MLX's words when it may not evaluate


class Guard:
    """The public functions of ``module``, each with the reference behind it.

    A call that raises is repeated on ``fallback``. If that raises too, the arguments were wrong: its error goes to the
    caller and nothing else happens. If not, the kernels are at fault: ``log`` gets one line, and ``fallback`` serves
    every later call in this process (``failure`` then holds the reason).

    MLX computes when a result is needed, long after the call. The first result of each kind of call (codecs, dtypes,
    rows, heads, lengths up to a power of two, which options are used) is therefore evaluated here, so that a kernel
    that does not compile or start fails where the call can be repeated. What only a later run of the same kernel can
    meet surfaces at evaluation, outside: an access outside a buffer, a time limit of the device, memory running out.
    """

    def __init__(self, name: str, module: Any, fallback: ModuleType, log: Log) -> None:
        self.name = name
        self.failure: str | None = None
        self._fallback = fallback
        self._log = log
        self._seen: set[Hashable] = set()
        self._lock = threading.Lock()
        for public in vars(fallback)["__all__"]:
            own, safe = getattr(module, public), getattr(fallback, public)
            # Constants and data types are shared by all backends.
            plain = isinstance(safe, type) or not callable(safe)
            setattr(self, public, safe if plain else self._guarded(public, own, safe))

    def __getattr__(self, name: str) -> Any:
        # Only for what __init__ did not set; it also tells type checkers that any name may be asked for.
        raise AttributeError(f"backend {self.name} has no public function {name!r}")

    def _guarded(self, name: str, own: Callable[..., Any], safe: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(safe)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.failure is not None:
                return safe(*args, **kwargs)
            kind = (name, *[_kind(a) for a in args], *[(key, _kind(a)) for key, a in kwargs.items()])
            # The arguments first: what fails there is the model's, and is whole again before kernels can fail.
            first = kind not in self._seen and _evaluate((args, tuple(kwargs.values())))
            try:
                result = own(*args, **kwargs)
                if first:
                    _evaluate(result)
            except Exception as error:
                return self._repeat(error, functools.partial(safe, *args, **kwargs), name)
            if first:
                self._seen.add(kind)
            return result

        return call

    def _repeat(self, error: Exception, safe: Callable[[], Any], name: str) -> Any:
        try:
            result = safe()
        except Exception as same:
            raise same from (None if type(same) is type(error) else error)
        with self._lock:
            if self.failure is None:
                text = " ".join(str(error).split())
                self.failure = f"{name} raised {type(error).__name__}: {text[:200]}"
                self._log(f"backend {self.name} failed while serving ({self.failure}); the reference serves")
        return result


def _evaluate(result: Any) -> bool:
    """Compute all arrays in a result; False inside a function transformation of MLX, where that is not possible."""
    try:
        mx.eval(list(_arrays(result)))
    except ValueError as error:
        if _TRACED in str(error):
            return False
        raise
    return True


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)


def _kind(value: Any) -> Hashable:
    """What may decide which kernel a value needs: equal for values that surely need the same one.

    This runs on every call, so it looks at as little as it can, and asks for types in the order of their frequency.
    """
    if value is None:
        return None
    kind = type(value)
    if kind is Tokens:
        lengths, codec = value.lengths, value.codec
        longest = max(lengths, default=0)
        return (
            codec.dim,
            codec.bits,
            codec.kind,
            codec.seed,
            value.role,
            value.factors_given,
            value.first.dtype,
            value.first.shape[1],
            len(lengths),
            packed_tiles(longest).bit_length(),
            min(longest, FIRST),
            min(lengths, default=0) == longest,
        )
    if isinstance(value, mx.array):
        shape = value.shape
        # Rows and heads exactly, lengths roughly: a cache grows with every token.
        exact = 2 if len(shape) >= 4 else 0
        return (value.dtype, shape[:exact], *[n.bit_length() for n in shape[exact:]])
    if kind in (str, bool, Codec):
        return value
    if kind is int:
        return value.bit_length()
    if kind is Packed:
        return tuple((name, _kind(array)) for name, array in value.arrays().items())
    if isinstance(value, (list, tuple)):
        # One entry per row, or the rows themselves: how many, and how many kinds.
        return (len(value), frozenset(_kind(item) for item in value))
    return str(value) if kind is mx.Dtype else kind.__name__


Functions = ModuleType | Guard
"""Something with the public functions of ``turboquant_vlm.reference``."""
