"""How a kernel is started: by Metal on a Mac, or by whatever a caller puts in its place.

A launcher is called like the object that `mx.fast.metal_kernel` returns, with that object in front. Putting another
one in its place is how the same text runs on a machine without Metal, or is counted, or is made to fail.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx


class Launcher(Protocol):
    """Runs one kernel; arguments are those of the object that `mx.fast.metal_kernel` returns."""

    def __call__(
        self,
        kernel: Callable[..., Any],
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]: ...


def _on_metal(kernel: Callable[..., Any], **call: Any) -> list[mx.array]:
    if not mx.metal.is_available():
        raise RuntimeError("MLX has no Metal device here; the Metal kernels cannot run")
    return kernel(**call)


_local = threading.local()
_default: Launcher = _on_metal


def current() -> Launcher:
    """The launcher of this thread."""
    return getattr(_local, "launcher", None) or _default


def set_default(launcher: Launcher | None) -> None:
    """Starts kernels of every thread through `launcher`; None returns to Metal."""
    global _default
    _default = launcher or _on_metal


@contextmanager
def using(launcher: Launcher) -> Iterator[None]:
    """Starts this thread's kernels through `launcher`."""
    before = getattr(_local, "launcher", None)
    _local.launcher = launcher
    try:
        yield
    finally:
        _local.launcher = before


def through(launcher: Launcher, value: Any) -> Any:
    """A function whose kernels start through `launcher`; a constant or a class as it is."""
    if not callable(value) or isinstance(value, type):
        return value

    @functools.wraps(value)
    def run(*args: Any, **kwargs: Any) -> Any:
        with using(launcher):
            return value(*args, **kwargs)

    return run
