"""Runs the final text of Metal kernels on a machine without Metal, and reports what is wrong with them.

The text is that which a Mac would compile: MLX hands it over when a function that calls an ``mx.fast.metal_kernel``
kernel is exported. It is compiled as C++ against an emulated ``metal_stdlib`` and run, each thread of a threadgroup on
its own stack: 32-lane simdgroups, barriers, simd functions, threadgroup memory, smaller threadgroups at the edges.

    from turboquant_vlm.conformance.metal_host import host_call, host_run

    kernel = mx.fast.metal_kernel(name="double", input_names=["x"], output_names=["y"],
                                  source="uint i = thread_position_in_grid.x; y[i] = x[i] * 2;")
    (y,) = host_call(kernel, inputs=[x], grid=(x.size, 1, 1), threadgroup=(64, 1, 1),
                     output_shapes=[x.shape], output_dtypes=[x.dtype])     # raises FindingsError on a fault
    result = host_run(kernel, ..., order="shuffle:1")                      # outputs and findings
    result = run(capture(function, x), [x])                                # a captured launch, run later

Findings name the line of Metal text: accesses out of bounds on either side, uninitialised reads, outputs left
unwritten, races within and across threadgroups, barriers and simd functions that not all threads reach, floating-point
sums that depend on their order, shifts, overflows and conversions without a defined result, endless loops.
:func:`strict_check` compiles the text with clang, when there is one, to check address spaces and implicit conversions.

:func:`count_operations` counts what a launch does, by category and by the memory it touches, and needs clang;
:class:`Recorder` keeps the launches of a computation for it.

Limits. There is no Apple compiler here: no fast-math, no fused operations, no limit on registers, and transcendental
functions are the C library's, not Apple's bits. Two overloads that differ only in their address space do not compile.
Threads of a threadgroup take turns, so a thread that spins until another acts is reported as a hang. Simd functions
whose lanes are not all present are reported, then resolved among the lanes that are. Needs GCC and, for the lines of
findings, addr2line, on Linux, x86-64 or arm64.
"""

from .build import MetalCompileError, NoCompilerError, compiler
from .capture import capture, capture_all, dispatch_of, host_call, host_run
from .count import (
    BufferTraffic,
    CountIRError,
    Counts,
    Launch,
    Marginal,
    NoClangError,
    count_operations,
    count_unavailable_reason,
    per_element,
    per_kernel,
    sum_of,
)
from .dispatch import Dispatch
from .findings import KINDS, Finding, Findings, FindingsError
from .launch import Result, run, run_orders, run_source
from .record import Recorder, checked_outputs, counted_outputs, mlx_vlm_kernels
from .strict import StrictResult, strict_check
from .translate import MetalTextError

__all__ = [
    "KINDS",
    "BufferTraffic",
    "CountIRError",
    "Counts",
    "Dispatch",
    "Finding",
    "Findings",
    "FindingsError",
    "Launch",
    "Marginal",
    "MetalCompileError",
    "MetalTextError",
    "NoClangError",
    "NoCompilerError",
    "Recorder",
    "Result",
    "StrictResult",
    "available",
    "capture",
    "capture_all",
    "checked_outputs",
    "count_operations",
    "count_unavailable_reason",
    "counted_outputs",
    "dispatch_of",
    "host_call",
    "host_run",
    "mlx_vlm_kernels",
    "per_element",
    "per_kernel",
    "run",
    "run_orders",
    "run_source",
    "strict_check",
    "sum_of",
    "unavailable_reason",
]


def unavailable_reason() -> str | None:
    """Why kernels cannot run here (no compiler, or not Linux); None when they can."""
    import sys

    if not sys.platform.startswith("linux"):
        return f"the Metal host runner needs Linux; this is {sys.platform}"
    try:
        compiler()
    except NoCompilerError as error:
        return str(error)
    return None


def available() -> bool:
    """Whether kernels can run on this machine."""
    return unavailable_reason() is None
