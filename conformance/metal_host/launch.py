"""Runs one dispatch on the emulator and turns its report into outputs and findings."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .build import build, load, runtime
from .dispatch import STORAGE, Array, Buffer, Dispatch, as_mlx, bits_of, from_bits, input_buffer, output_buffer
from .findings import KINDS, Finding, Findings, resolve
from .translate import Translation, translate

_CHAIN, _RECORDS, _VARIABLES = 8, 64, 64
_NOBODY = 0xFFFFFFFF
_ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2, "tree": 3}
_MAX_THREADS = 1024
_SAFE_THREADS = 512
_lock = threading.Lock()


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("item_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("float_order", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
        ("byte_shadow", ctypes.c_uint32),
        ("flush", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("checks", ctypes.c_uint64),
        ("timeout", ctypes.c_double),
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("region", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("suspect", ctypes.c_uint32),
        ("pc", ctypes.c_uint32 * _CHAIN),
        ("other_pc", ctypes.c_uint32 * _CHAIN),
    )


class _Variable(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 48),
        ("size", ctypes.c_uint32),
        ("item_size", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint32),
        ("aborted", ctypes.c_uint32),
        ("want_byte_shadow", ctypes.c_uint32),
        ("variable_count", ctypes.c_uint32),
        ("threads", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("records", _Record * _RECORDS),
        ("variables", _Variable * _VARIABLES),
    )


@dataclass(frozen=True)
class Result:
    """What one run gave. ``completed`` is False when a fault ended the run early; ``outputs`` then hold what was
    written until then."""

    outputs: list[mx.array]
    findings: Findings
    completed: bool
    threads: int
    accesses: int
    threadgroup_bytes: int


def _order(text: str, name: str, allowed: Sequence[str]) -> tuple[int, int]:
    word, _, seed = text.partition(":")
    if word not in allowed or (seed and word != "shuffle") or (seed and not seed.isdigit()):
        choices = ", ".join(f"{a}:SEED" if a == "shuffle" else a for a in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {text!r}")
    return _ORDERS[word], int(seed or 0)


def _mask(checks: bool | Iterable[str]) -> int:
    if isinstance(checks, bool):
        return (1 << len(KINDS)) - 1 if checks else 0
    unknown = set(checks) - set(KINDS)
    if unknown:
        raise ValueError(f"checks must name kinds of findings {KINDS}; got {sorted(unknown)}")
    return sum(1 << KINDS.index(kind) for kind in set(checks))


def validate(dispatch: Dispatch) -> None:
    """Raises ``ValueError`` for sizes that no launch can have, or that the runner does not take."""
    total = int(np.prod([min(g, t) for g, t in zip(dispatch.grid, dispatch.threadgroup, strict=True)]))
    if min(*dispatch.grid, *dispatch.threadgroup) < 1:
        raise ValueError(f"grid and threadgroup must be positive; got {dispatch.grid} and {dispatch.threadgroup}")
    if total > _MAX_THREADS:
        raise ValueError(f"a threadgroup has at most {_MAX_THREADS} threads; got {dispatch.threadgroup} = {total}")
    groups = int(np.prod([-(-g // min(g, t)) for g, t in zip(dispatch.grid, dispatch.threadgroup, strict=True)]))
    if groups >= 1 << 22:
        raise ValueError(f"the host runner takes fewer than {1 << 22} threadgroups; grid {dispatch.grid} has {groups}")


def bind(dispatch: Dispatch, translation: Translation, inputs: Sequence[Any]) -> list[Buffer]:
    """One buffer per [[buffer(i)]]: inputs in order, each with the shape, strides and ndim that the text asks for,
    then outputs."""
    parameters = translation.buffers
    extra_names = {
        f"{p.name}_{suffix}" for p in parameters for suffix in ("shape", "strides", "ndim")
    } & {p.name for p in parameters}
    mains = [p for p in parameters if p.name not in extra_names]
    outputs = len(dispatch.output_shapes)
    if len(mains) != len(inputs) + outputs:
        raise ValueError(
            f"{translation.kernel} takes {len(mains) - outputs} inputs and {outputs} outputs; got {len(inputs)} inputs"
        )
    made: dict[str, Buffer] = {}
    for p, value in zip(mains, inputs, strict=False):
        made[p.name], shape, strides = input_buffer(p.name, p.line, as_mlx(value), dispatch.row_contiguous)
        extra: dict[str, Array] = {
            "shape": np.array(shape, np.int32),
            "strides": np.array(strides, np.int64),
            "ndim": np.array([len(shape)], np.int32),
        }
        for suffix, data in extra.items():
            raw: Array = data.view(np.uint8)
            made[f"{p.name}_{suffix}"] = Buffer(f"{p.name}_{suffix}", p.line, raw, raw.size, data.itemsize, keep=data)
    shapes = zip(mains[len(inputs) :], dispatch.output_shapes, dispatch.output_dtypes, strict=True)
    for p, out_shape, dtype in shapes:
        made[p.name] = output_buffer(p.name, p.line, out_shape, dtype, dispatch.init_value)
    return [replace(made[p.name], line=p.line) for p in parameters]


def _position(number: int, size: Sequence[int]) -> tuple[int, int, int]:
    return number % size[0], number // size[0] % size[1], number // size[0] // size[1]


class _Reporter:
    """Words for the records of one run."""

    def __init__(self, dispatch: Dispatch, translation: Translation, buffers: list[Buffer], report: _Report) -> None:
        self.dispatch, self.buffers, self.report = dispatch, buffers, report
        self.rows = dispatch.source.splitlines()
        self.size = [min(g, t) for g, t in zip(dispatch.grid, dispatch.threadgroup, strict=True)]
        self.groups = [-(-g // s) for g, s in zip(dispatch.grid, self.size, strict=True)]

    def text(self, line: int | None) -> str:
        return self.rows[line - 1] if line is not None and 0 < line <= len(self.rows) else ""

    def thread(self, number: int) -> str | None:
        if number == _NOBODY:
            return None
        group, local = divmod(number, _MAX_THREADS)
        at = _position(group, self.groups)
        size = [min(s, g - a * s) for s, g, a in zip(self.size, self.dispatch.grid, at, strict=True)]
        inside = _position(local, size)
        return f"thread {inside} of threadgroup {at}"

    def region(self, number: int) -> tuple[str | None, int, int | None, int]:
        """Name, bytes per element, line and bytes of a buffer or threadgroup variable."""
        if number < len(self.buffers):
            buffer = self.buffers[number]
            return buffer.name, buffer.item_size, buffer.line, buffer.size
        if number == _NOBODY:
            return None, 1, None, 0
        variable = self.report.variables[number - len(self.buffers)]
        return variable.name.decode(), max(1, variable.item_size), None, variable.size

    def finding(self, r: _Record, lines: dict[int, tuple[int, ...]]) -> Finding | None:
        kind = KINDS[r.kind]
        chain = [line for pc in r.pc for line in lines.get(pc, ())]
        other_chain = [line for pc in r.other_pc for line in lines.get(pc, ())]
        if r.suspect and chain == other_chain:
            return None
        name, item, declared, size = self.region(r.region)
        line = chain[0] if chain else None
        detail = ""
        if kind == "unwritten_output":
            line, detail = declared, f"{r.size // item} of {size // item} elements"
        elif kind.startswith("out_of_bounds"):
            detail = f"{name} has {size // item} elements"
        elif kind == "threadgroup_memory":
            detail = f"{r.size} bytes"
        elif kind.endswith("divergence") and r.offset:
            detail = "the other thread has ended"
        elif r.suspect:
            callers = (" < ".join(map(str, c)) for c in (chain, other_chain))
            detail = f"called from other lines: {' and '.join(callers)}"
        return Finding(
            kind=kind,
            line=line,
            text=self.text(line),
            detail=detail,
            buffer=name,
            index=r.offset // item if name is not None else None,
            thread=self.thread(r.thread),
            other_line=other_chain[0] if other_chain else None,
            other_thread=self.thread(r.other),
            count=r.count,
        )

    def findings(self, library: Path) -> Findings:
        records = self.report.records[: self.report.count]
        lines = resolve(library, (pc for r in records for pc in (*r.pc, *r.other_pc)))
        found = [self.finding(r, lines) for r in records]
        return Findings([f for f in found if f is not None])


def _execute(launch: _Launch, report: _Report) -> None:
    with _lock:
        if runtime()[0].tq_run(ctypes.byref(launch), ctypes.byref(report)):
            raise MemoryError("the Metal host runner could not reserve memory for the launch")


def execute(dispatch: Dispatch, buffers: list[Buffer], entry: int, **options: Any) -> tuple[_Report, list[mx.array]]:
    """Runs the entry function of a built kernel on bound buffers; gives the emulator's report and the outputs.

    ``options`` are the remaining fields of the emulator's launch.
    """
    results: list[Array] = [np.zeros(max(1, b.size), np.uint8) for b in buffers if b.output]
    pending = iter(results)
    native = (_Buffer * max(1, len(buffers)))()
    for n, b in zip(native, buffers, strict=False):
        n.data = b.data.ctypes.data if b.data is not None and b.size else None
        n.out = next(pending).ctypes.data if b.output else None
        n.size, n.offset, n.item_size = b.size, b.offset, b.item_size
        n.flags = b.output | b.initialised << 1
    launch = _Launch(
        entry=entry,
        buffers=native,
        buffer_count=len(buffers),
        grid=dispatch.grid,
        group=dispatch.threadgroup,
        **options,
    )
    report = _Report()
    _execute(launch, report)
    if report.want_byte_shadow:
        # Some access was smaller than an element: watch each byte, so that neighbours do not look like one place.
        launch.byte_shadow = 1
        _execute(launch, report)
    outputs = [
        from_bits(bits[: b.size].view(STORAGE[dtype]), shape, dtype)
        for bits, b, shape, dtype in zip(
            results, (b for b in buffers if b.output), dispatch.output_shapes, dispatch.output_dtypes, strict=True
        )
    ]
    return report, outputs


def run(
    dispatch: Dispatch,
    inputs: Sequence[Any],
    *,
    order: str = "forward",
    simd_float_order: str = "tree",
    poison: bool = True,
    checks: bool | Iterable[str] = True,
    flush_subnormals: bool = True,
    timeout: float = 20.0,
) -> Result:
    """Runs a dispatch on the host and reports what it finds.

    ``inputs`` are the kernel's own inputs (arrays or scalars). ``order`` is the order of the threads of a threadgroup
    and of the threadgroups: ``forward``, ``reverse`` or ``shuffle:SEED``. ``simd_float_order`` is the order in which
    floating-point simd reductions add: ``tree``, ``forward``, ``reverse`` or ``shuffle:SEED``. ``poison`` fills memory
    that the kernel should write first with ones (not-a-number) instead of zero. ``checks`` turns the findings on, off,
    or names the kinds to report; accesses out of bounds end the run either way. ``timeout`` is in seconds of
    processor time.

    Raises ``MetalTextError`` or ``MetalCompileError`` for text that cannot be run. Faults do not raise: look at
    ``findings``.
    """
    validate(dispatch)
    translation = translate(dispatch.source, dispatch.template_arguments)
    library = build(translation)
    buffers = bind(dispatch, translation, inputs)
    thread_order, seed = _order(order, "order", ("forward", "reverse", "shuffle"))
    float_order, float_seed = _order(simd_float_order, "simd_float_order", ("tree", "forward", "reverse", "shuffle"))
    report, outputs = execute(
        dispatch,
        buffers,
        load(library),
        order=thread_order,
        float_order=float_order,
        poison=poison,
        flush=flush_subnormals,
        seed=seed * 0x9E3779B9 + float_seed,
        checks=_mask(checks),
        timeout=timeout,
    )
    findings = _Reporter(dispatch, translation, buffers, report).findings(library)
    if checks is True and int(np.prod(dispatch.threadgroup)) > _SAFE_THREADS:
        text = f"{dispatch.threadgroup}; ask for at most {_SAFE_THREADS}"
        findings.items.append(Finding("threadgroup_size", None, "", text))
    return Result(outputs, findings, not report.aborted, report.threads, report.accesses, report.threadgroup_bytes)


def run_orders(
    dispatch: Dispatch,
    inputs: Sequence[Any],
    *,
    orders: Sequence[str] = ("forward", "reverse", "shuffle:1"),
    **options: Any,
) -> Result:
    """Runs a dispatch in several orders of its threads and compares the outputs bit by bit.

    Gives the first run's outputs and all findings, with ``order_dependence`` for outputs that differ.
    """
    runs = [run(dispatch, inputs, order=order, **options) for order in orders]
    first = runs[0]
    findings = Findings(list(dict.fromkeys(f for r in runs for f in r.findings)))
    names = [b.name for b in translate(dispatch.source, dispatch.template_arguments).buffers][-len(first.outputs) :]
    for order, other in zip(orders[1:], runs[1:], strict=True):
        for name, a, b in zip(names, first.outputs, other.outputs, strict=True):
            differ = np.flatnonzero(bits_of(a).view(np.uint8).ravel() != bits_of(b).view(np.uint8).ravel())
            if differ.size:
                at = int(differ[0]) // a.itemsize
                detail = f"{orders[0]} and {order}"
                findings.items.append(Finding("order_dependence", None, "", detail, buffer=name, index=at))
    return replace(first, findings=findings, completed=all(r.completed for r in runs))


def run_source(
    source: str,
    inputs: Sequence[Any],
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
    template_arguments: str | None = None,
    **options: Any,
) -> Result:
    """Runs hand-written Metal text with one ``kernel`` function. Options are those of :func:`run`."""
    dispatch = Dispatch(
        source=source,
        name="source",
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=tuple(tuple(s) for s in output_shapes),
        output_dtypes=tuple(output_dtypes),
        init_value=init_value,
        template_arguments=template_arguments,
    )
    return run(dispatch, inputs, **options)
