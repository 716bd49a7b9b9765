"""A set of kernels that cannot break a run: where a call fails, the reference repeats it and serves from then on.

All public functions are pure and every backend reads the others' tokens, so a call can be repeated at any point of a
run without a trace.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from turboquant_vlm.fast.kernels import evaluated
from turboquant_vlm.reference import FIRST, Codec, Packed, Tokens, packed_tiles

Log = Callable[[str], None]

MOST_WORK = 2**28
"""Numbers of a query times tokens up to which a new kernel is compared with the reference: some seconds at most."""
LAST_QUERIES = 8
"""Queries of a larger call that are compared instead."""



class Guard:
    """The public functions of ``module``, each with the reference behind it.

    A call that raises is repeated on ``fallback``. If that raises too, the arguments were wrong: its error goes to the
    caller and nothing else happens. If not, the kernels are at fault: ``log`` gets one line, and ``fallback`` serves
    every later call in this process (``failure`` then holds the reason).

    The kernels behind ``module`` are compiled for what a model needs. When one of them starts for the first time, its
    result is also compared with the reference's, bit for bit (`_other_bits`): the check of the device cannot have run
    every shape.

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
        self._started: Callable[[], int] = getattr(module, "kernels_started", lambda: 0)
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
            before = self._started()
            try:
                result = own(*args, **kwargs)
                if first:
                    _evaluate(result)
                if self._started() != before:
                    # A kernel ran for the first time: on what it is asked for here, it has to agree with the reference.
                    expected = _other_bits(name, own, safe, args, kwargs, result)
                    if expected is not None:
                        self._fail(f"a new kernel of {name} gave other bits than the reference")
                        return safe(*args, **kwargs)
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
        text = " ".join(str(error).split())
        self._fail(f"{name} raised {type(error).__name__}: {text[:200]}")
        return result

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = reason
                self._log(f"backend {self.name} failed while serving ({self.failure}); the reference serves")


def _other_bits(
    name: str,
    own: Callable[..., Any],
    safe: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """The reference's result if it differs from ``result``, else None; of a long prefill only the last queries."""
    bound = inspect.signature(safe).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if name in ("attend", "scores"):
        q, mask = given["q"], given["mask"]
        tokens = max(1, max(given["keys"].lengths, default=1))
        if q.size * tokens > MOST_WORK and q.shape[2] > LAST_QUERIES:
            given["q"] = q[:, :, -LAST_QUERIES:]
            if isinstance(mask, mx.array) and mask.ndim >= 2 and mask.shape[-2] > 1:
                given["mask"] = mask[..., -LAST_QUERIES:, :]
            result = own(*bound.args, **bound.kwargs)
        if given["q"].size * tokens > MOST_WORK:
            return None
    elif sum(a.size for a in _arrays(tuple(given.values())) if a.ndim == 4) > MOST_WORK:
        return None
    expected = safe(*bound.args, **bound.kwargs)
    if not _evaluate((expected, result)):
        return None
    pairs = zip(_arrays(expected), _arrays(result), strict=True)
    alike = all(a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b, equal_nan=True) for a, b in pairs)
    return None if alike else expected


def _evaluate(result: Any) -> bool:
    """Compute all arrays in a result; False inside a function transformation of MLX, where that is not possible."""
    return evaluated(list(_arrays(result)))


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
