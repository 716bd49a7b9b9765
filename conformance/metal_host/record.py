"""Remembers the launches of a computation, of this project's kernels or of mlx-vlm's, to run or count them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .capture import dispatch_of
from .count import Launch, count_operations
from .dispatch import Dispatch, as_mlx
from .findings import FindingsError
from .launch import run


def checked_outputs(dispatch: Dispatch, inputs: Sequence[Any]) -> list[mx.array]:
    """Runs a launch with all checks; raises ``FindingsError`` on a fault."""
    result = run(dispatch, inputs, timeout=600.0)
    if result.findings.errors:
        raise FindingsError(result.findings, dispatch.name)
    return result.outputs


def counted_outputs(dispatch: Dispatch, inputs: Sequence[Any]) -> list[mx.array]:
    """Runs a launch in its counting form, without checks; many times faster."""
    return count_operations(dispatch, inputs).outputs


class Recorder:
    """A launcher, called like a kernel with the kernel in front; it keeps each launch in ``launches``.

        recorder = Recorder()
        (out,) = recorder(kernel, inputs=[x], grid=(n, 1, 1), ...)
        recorder.launches[0].dispatch.source

    ``execute`` gives a launch's outputs: :func:`checked_outputs`, :func:`counted_outputs` or a function of your own.
    """

    def __init__(self, execute: Callable[[Dispatch, Sequence[Any]], list[mx.array]] = checked_outputs) -> None:
        self.execute = execute
        self.launches: list[Launch] = []

    def __call__(self, kernel: Callable[..., Any], **call: Any) -> list[mx.array]:
        call = {k: v for k, v in call.items() if k not in ("stream", "verbose")}
        inputs = [as_mlx(x) for x in call["inputs"]]
        dispatch = dispatch_of(kernel, **{**call, "inputs": inputs})
        self.launches.append(Launch(dispatch.name.removeprefix("custom_kernel_"), dispatch, inputs))
        return self.execute(dispatch, inputs)


class _Fast:
    """``mx.fast`` whose kernels go to a launcher."""

    def __init__(self, launcher: Callable[..., list[mx.array]]) -> None:
        self._launcher = launcher

    def metal_kernel(self, **options: Any) -> Callable[..., list[mx.array]]:
        kernel = mx.fast.metal_kernel(**options)
        return lambda **call: self._launcher(kernel, **call)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.fast, name)


class _Core:
    """``mlx.core`` with such a ``fast``."""

    def __init__(self, launcher: Callable[..., list[mx.array]]) -> None:
        self.fast = _Fast(launcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


@contextmanager
def mlx_vlm_kernels(launcher: Callable[..., list[mx.array]]) -> Iterator[Any]:
    """mlx-vlm's own ``turboquant`` module, taking its Metal paths, with kernels started by ``launcher``."""
    from mlx_vlm import turboquant

    def forget() -> None:
        for value in vars(turboquant).values():
            if hasattr(value, "cache_clear") and "kernel" in getattr(value, "__name__", ""):
                value.cache_clear()

    before = turboquant.mx, turboquant._metal_available
    forget()
    turboquant.mx, turboquant._metal_available = _Core(launcher), lambda: True
    try:
        yield turboquant
    finally:
        turboquant.mx, turboquant._metal_available = before
        forget()
