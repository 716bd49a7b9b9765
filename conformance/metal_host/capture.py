"""Takes the final Metal text of ``mx.fast.metal_kernel`` kernels, without Metal, and runs it in their place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .dispatch import Dispatch, as_mlx
from .findings import FindingsError
from .launch import Result, run


def capture_all(kernel_call: Callable[..., Any], *arrays: mx.array) -> list[Dispatch]:
    """One :class:`Dispatch` per custom kernel that ``kernel_call(*arrays)`` would launch, in order.

    Nothing is computed: MLX builds the graph, and its exporter hands over the text. ``init_value`` is not part of the
    graph, so the dispatches have none.
    """
    found: list[Dispatch] = []

    def visit(entry: dict[str, Any]) -> None:
        if entry.get("type") != "primitive" or entry.get("name") != "CustomKernel":
            return
        name, source, *sizes = entry["arguments"][:8]
        found.append(
            Dispatch(
                source=source,
                name=name,
                grid=(sizes[0], sizes[1], sizes[2]),
                threadgroup=(sizes[3], sizes[4], sizes[5]),
                output_shapes=tuple(tuple(shape) for _, shape, _ in entry["outputs"]),
                output_dtypes=tuple(dtype for *_, dtype in entry["outputs"]),
                input_shapes=tuple(tuple(shape) for _, shape, _ in entry["inputs"]),
                input_dtypes=tuple(dtype for *_, dtype in entry["inputs"]),
                row_contiguous=bool(entry["arguments"][9]),
            )
        )

    mx.export_function(visit, kernel_call, *arrays)
    return found


def capture(kernel_call: Callable[..., Any], *arrays: mx.array, init_value: float | None = None) -> Dispatch:
    """The one kernel launch of ``kernel_call(*arrays)``, a function that calls an ``mx.fast.metal_kernel`` kernel.

        dispatch = capture(lambda x: kernel(inputs=[x], grid=(64, 1, 1), ...)[0], x)

    ``init_value`` has to be named again, since MLX does not export it. Raises ``ValueError`` when the function launches
    no custom kernel, or several.
    """
    found = capture_all(kernel_call, *arrays)
    if len(found) != 1:
        raise ValueError(f"the function must launch one custom kernel; it launches {len(found)}")
    dispatch = found[0]
    if init_value is None:
        return dispatch
    return Dispatch(**{**dispatch.__dict__, "init_value": init_value})


class _Captured:
    """Dispatches by what decides their text, so that a repeated call does not export again."""

    def __init__(self) -> None:
        self.seen: dict[Any, Dispatch] = {}

    def get(self, kernel: Callable[..., Any], inputs: list[mx.array], options: dict[str, Any]) -> Dispatch:
        specs = tuple((tuple(x.shape), x.dtype) for x in inputs)
        key = (id(kernel), specs, repr(sorted(options.items(), key=lambda item: item[0])))
        if key not in self.seen:
            stand_ins = [mx.zeros(shape, dtype=dtype) for shape, dtype in specs]
            self.seen[key] = capture(lambda *xs: kernel(inputs=list(xs), **options), *stand_ins)
            _keep(kernel)
        return self.seen[key]


@functools.cache
def _keep(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Holds a kernel object, so that no other takes its identity."""
    return kernel


_captured = _Captured()


def dispatch_of(
    kernel: Callable[..., Any],
    *,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, Any]] | None = None,
    init_value: float | None = None,
) -> Dispatch:
    """The launch that one call of a ``mx.fast.metal_kernel`` kernel would make. Nothing runs."""
    arrays = [as_mlx(x) for x in inputs]
    call: dict[str, Any] = {
        "output_shapes": [tuple(s) for s in output_shapes],
        "output_dtypes": list(output_dtypes),
        "grid": tuple(grid),
        "threadgroup": tuple(threadgroup),
    }
    if template is not None:
        call["template"] = list(template)
    dispatch = _captured.get(kernel, arrays, call)
    if init_value is not None:
        dispatch = Dispatch(**{**dispatch.__dict__, "init_value": init_value})
    return dispatch


def host_run(
    kernel: Callable[..., Any],
    *,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, Any]] | None = None,
    init_value: float | None = None,
    **options: Any,
) -> Result:
    """Runs one call of a ``mx.fast.metal_kernel`` kernel on the host. ``options`` are those of :func:`run`."""
    arrays = [as_mlx(x) for x in inputs]
    dispatch = dispatch_of(
        kernel,
        inputs=arrays,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
        grid=grid,
        threadgroup=threadgroup,
        template=template,
        init_value=init_value,
    )
    return run(dispatch, arrays, **options)


def host_call(
    kernel: Callable[..., Any],
    *,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, Any]] | None = None,
    init_value: float | None = None,
    verbose: bool = False,
    stream: Any = None,
    on_findings: str = "raise",
    **options: Any,
) -> list[mx.array]:
    """Calls a kernel as the object from ``mx.fast.metal_kernel`` is called, on the host instead of on Metal.

        launch = kernel if mx.metal.is_available() else functools.partial(host_call, kernel)
        (out,) = launch(inputs=[x], grid=(n, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(n,)], ...)

    ``on_findings``: ``raise`` (:class:`FindingsError` when there are faults), ``warn`` or ``ignore``. ``verbose`` and
    ``stream`` are taken for the sake of the signature.
    """
    if on_findings not in ("raise", "warn", "ignore"):
        raise ValueError(f"on_findings must be raise, warn or ignore; got {on_findings!r}")
    result = host_run(
        kernel,
        inputs=inputs,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
        grid=grid,
        threadgroup=threadgroup,
        template=template,
        init_value=init_value,
        **options,
    )
    if result.findings.errors and on_findings != "ignore":
        error = FindingsError(result.findings, getattr(kernel, "__name__", "the kernel"))
        if on_findings == "raise":
            raise error
        warnings.warn(str(error), stacklevel=2)
    return result.outputs
