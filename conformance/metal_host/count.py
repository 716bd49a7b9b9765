"""Counts the operations of a kernel launch, from the final Metal text.

    counts = count_operations(dispatch, inputs)
    counts.total, counts.operations["int"], counts.bytes_read, counts.registers
    marginal = per_element(lambda tokens: [Launch("attend", dispatch, inputs)], 1024, 2048, elements=2 * D * heads)

The text is translated as for a run and compiled by clang to optimised LLVM IR, without vectors of its own making, fast
math or fused operations. Each basic block's instructions are sorted into categories; the launch then runs, thread by
thread, and each execution of a block adds what it holds. Accesses are counted where they happen, by the memory they
touch. Sums are over all threads.

What counts as one: a fused multiply-add that the text asks for, a minimum or maximum, a comparison with the one
select that uses it, a library function, a simd function, an access of up to four bytes. ``address`` (what only makes
pointers: their sums, and the widening of indices) stands apart and is in no total. ``fusible`` counts pairs that a
compiler may join: multiply and add, shift and mask, shift and add; ``fused_total`` takes all of them as joined,
``total`` none. ``issued`` is ``total`` as a simdgroup pays it: all 32 lanes wait for what one of them does.

``registers`` is an estimate: the most values that are live at one point of the optimised IR, in 32-bit registers;
addresses take none, the indices in them do. Apple's compiler orders instructions anew, so its own number differs.

Limits. This is not Apple's compiler, and versions of clang differ in what they unroll and simplify: numbers compare
only when one version made them. Categories are not weighted: a simd function and an addition count as one each.
Address spaces are erased, so a store to threadgroup memory makes later device loads repeat where Apple's compiler may
keep them. Arithmetic on 16-bit floats counts its conversions. A vector access counts once per four bytes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .build import runtime
from .count_build import NoClangError, build_counted, count_unavailable_reason
from .count_classes import ACCESS, ADDRESS, CONTROL, FUSIBLE, OPERATIONS
from .count_ir import CountIRError
from .dispatch import Array, Buffer, Dispatch
from .launch import bind, execute, validate
from .translate import translate

__all__ = [
    "CATEGORIES",
    "BufferTraffic",
    "CountIRError",
    "Counts",
    "Launch",
    "MakeLaunches",
    "Marginal",
    "NoClangError",
    "count_operations",
    "count_unavailable_reason",
    "per_element",
    "per_kernel",
    "sum_of",
]

_MEMORY = (
    *("device_load", "device_store", "constant_load", "threadgroup_load", "threadgroup_store"),
    *("private_load", "private_store"),
)
CATEGORIES = (*OPERATIONS, *_MEMORY, *CONTROL)
"""The categories of operations. ``special`` are divisions, roots and transcendental functions; ``int`` has shifts and
logic; ``compare`` has selects, minima and maxima; ``private`` is memory of one thread that stayed in memory."""

_MAX_THREADS, _LANES = 1024, 32
_TREE = 3  # of the simd sums, as runs have it
_lock = threading.Lock()


@dataclass(frozen=True)
class BufferTraffic:
    """What all threads together read and wrote of one buffer. ``distinct_read`` counts each byte once."""

    name: str
    constant: bool
    loads: int
    bytes_read: int
    distinct_read: int
    stores: int
    bytes_written: int
    distinct_written: int


@dataclass(frozen=True)
class Counts:
    """The operations of one launch, over all threads, and the outputs it gave."""

    kernel: str
    threads: int
    operations: dict[str, int]
    address: int
    fusible: int
    issued: int
    registers: int
    threadgroup_bytes: int
    buffers: tuple[BufferTraffic, ...]
    outputs: list[mx.array] = field(repr=False, compare=False)

    @property
    def total(self) -> int:
        """All operations but address arithmetic."""
        return sum(self.operations.values())

    @property
    def fused_total(self) -> int:
        """``total`` with every pair joined that one instruction could do."""
        return self.total - self.fusible

    @property
    def distinct_bytes_read(self) -> int:
        """Bytes of buffers that were read at least once: what must come from memory."""
        return sum(b.distinct_read for b in self.buffers)

    @property
    def bytes_read(self) -> int:
        """Bytes that all threads asked for, caches and neighbours left aside."""
        return sum(b.bytes_read for b in self.buffers)


class Launch(NamedTuple):
    """One captured launch: a name for tables, the text and its sizes, and the kernel's own inputs."""

    name: str
    dispatch: Dispatch
    inputs: Sequence[Any]


@dataclass(frozen=True)
class Marginal:
    """What one more element costs, from two lengths: fixed costs cancel. Bytes are per token.

    ``fixed`` are the operations of the whole launch that no token adds. ``threads`` are those of the longer length;
    over several kernels, those of the largest.
    """

    kernels: tuple[str, ...]
    operations: dict[str, float]
    address: float
    fusible: float
    issued: float
    distinct_bytes_per_token: float
    bytes_per_token: float
    threads: int
    registers: int
    fixed: float

    @property
    def total(self) -> float:
        """Operations per element, address arithmetic left out."""
        return sum(self.operations.values())

    @property
    def fused_total(self) -> float:
        """``total`` with every pair joined that one instruction could do."""
        return self.total - self.fusible


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    runtime()
    return ctypes.CDLL(path)


def _traffic(
    buffers: list[Buffer], constants: set[str], tally: Array, read: Array, written: Array
) -> tuple[BufferTraffic, ...]:
    found, at = [], 0
    for buffer, row in zip(buffers, tally, strict=False):
        loads, bytes_read, stores, bytes_written = map(int, row)
        distinct = [int(np.count_nonzero(touched[at : at + buffer.size])) for touched in (read, written)]
        at += buffer.size
        found.append(
            BufferTraffic(
                buffer.name,
                buffer.name in constants,
                loads,
                bytes_read,
                distinct[0],
                stores,
                bytes_written,
                distinct[1],
            )
        )
    return tuple(found)


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def count_operations(dispatch: Dispatch, inputs: Sequence[Any], *, timeout: float = 600.0) -> Counts:
    """Counts the operations of one launch while it runs on the host.

    Raises :class:`NoClangError` without clang, ``MetalTextError`` or ``MetalCompileError`` for text that cannot run,
    :class:`CountIRError` for what cannot be counted, and ``RuntimeError`` when the launch does not end well.
    """
    reason = count_unavailable_reason()
    if reason is not None:
        raise NoClangError(reason)
    validate(dispatch)
    translation = translate(dispatch.source, dispatch.template_arguments)
    counted = build_counted(translation)
    buffers = bind(dispatch, translation, inputs)
    constants = {p.name for p in translation.buffers if "constant" in p.declaration.split()}
    runs = np.zeros((2, len(counted.blocks)), np.uint64)
    by_thread = np.zeros((_MAX_THREADS, len(counted.blocks)), np.uint32)
    tally = np.zeros((len(buffers) + 3, 4), np.uint64)
    sizes = np.array([b.size for b in buffers], np.uint64)
    starts = np.array([b.offset for b in buffers], np.uint64)
    read, written = (np.zeros(int(sizes.sum()) + 1, np.uint8) for _ in range(2))
    library = _library(str(counted.library))
    with _lock:
        library.tq_count_setup(
            *(_pointer(runs), _pointer(by_thread), ctypes.c_uint32(len(counted.blocks)), _pointer(tally)),
            *(ctypes.c_uint32(len(buffers)), _pointer(sizes), _pointer(starts), _pointer(read), _pointer(written)),
        )
        entry = ctypes.cast(library.tq_counted_entry, ctypes.c_void_p).value
        assert entry is not None
        options = {"order": 0, "float_order": _TREE, "poison": False, "flush": True, "seed": 0, "checks": 0}
        report, outputs = execute(dispatch, buffers, entry, timeout=timeout, **options)
        library.tq_count_finish()
    if report.aborted:
        raise RuntimeError(f"{translation.kernel} did not end well while it was counted; run it with checks")
    totals = dict.fromkeys((*CATEGORIES, ADDRESS, FUSIBLE, ACCESS), 0)
    issued = 0
    for times, groups, cost in zip(*runs.tolist(), counted.blocks, strict=True):
        for category, amount in cost.items():
            totals[category] += times * amount
            issued += 0 if category in (ADDRESS, FUSIBLE) else groups * amount * _LANES
    traffic = _traffic(buffers, constants, tally, read, written)
    private, tables, shared = (tuple(map(int, row)) for row in tally[len(buffers) :])
    totals["device_load"] = sum(b.loads for b in traffic if not b.constant)
    totals["device_store"] = sum(b.stores for b in traffic)
    totals["constant_load"] = tables[0] + sum(b.loads for b in traffic if b.constant)
    totals["threadgroup_load"], totals["threadgroup_store"] = shared[0], shared[2]
    totals["private_load"], totals["private_store"] = private[0], private[2]
    return Counts(
        kernel=translation.kernel,
        threads=int(report.threads),
        operations={c: totals[c] for c in CATEGORIES},
        address=totals[ADDRESS],
        fusible=totals[FUSIBLE],
        issued=issued,
        registers=counted.registers,
        threadgroup_bytes=int(report.threadgroup_bytes),
        buffers=traffic,
        outputs=outputs,
    )


MakeLaunches = Callable[[int], Sequence[Launch]]
"""All launches of a computation over so many tokens."""


def per_kernel(make_launches: MakeLaunches, tokens: int, more_tokens: int, elements: int) -> tuple[Marginal, ...]:
    """What each element of one more token costs in each kernel: counts of two lengths, subtracted and divided.

    ``elements`` is how many code elements one token adds (keys and values: ``2 * D * heads``). Both lengths must take
    the same kernels, for fixed costs to cancel.
    """
    if not 0 < tokens < more_tokens or elements < 1:
        raise ValueError(f"needs 0 < tokens < more_tokens and elements > 0; got {tokens}, {more_tokens}, {elements}")
    short, long = (list(make_launches(t)) for t in (tokens, more_tokens))
    if [x.name for x in short] != [x.name for x in long]:
        raise ValueError(f"the two lengths launch different kernels: {_names(short)} and {_names(long)}")
    found = []
    for a, b in zip(short, long, strict=True):
        less, more = (count_operations(x.dispatch, x.inputs) for x in (a, b))
        found.append(_marginal(a.name, (less, more), (tokens, more_tokens), elements))
    return tuple(found)


def per_element(make_launches: MakeLaunches, tokens: int, more_tokens: int, elements: int) -> Marginal:
    """:func:`per_kernel`, summed over the kernels."""
    return sum_of(per_kernel(make_launches, tokens, more_tokens, elements))


def sum_of(parts: Sequence[Marginal]) -> Marginal:
    """The cost of several kernels that run one after another."""
    return Marginal(
        kernels=tuple(name for p in parts for name in p.kernels),
        operations={c: sum(p.operations[c] for p in parts) for c in CATEGORIES},
        address=sum(p.address for p in parts),
        fusible=sum(p.fusible for p in parts),
        issued=sum(p.issued for p in parts),
        distinct_bytes_per_token=sum(p.distinct_bytes_per_token for p in parts),
        bytes_per_token=sum(p.bytes_per_token for p in parts),
        threads=max((p.threads for p in parts), default=0),
        registers=max((p.registers for p in parts), default=0),
        fixed=sum(p.fixed for p in parts),
    )


def _names(launches: Sequence[Launch]) -> str:
    return ", ".join(x.name for x in launches)


def _marginal(name: str, counts: tuple[Counts, Counts], lengths: tuple[int, int], elements: int) -> Marginal:
    less, more = counts
    tokens = lengths[1] - lengths[0]
    return Marginal(
        kernels=(name,),
        operations={c: (more.operations[c] - less.operations[c]) / tokens / elements for c in CATEGORIES},
        address=(more.address - less.address) / tokens / elements,
        fusible=(more.fusible - less.fusible) / tokens / elements,
        issued=(more.issued - less.issued) / tokens / elements,
        distinct_bytes_per_token=(more.distinct_bytes_read - less.distinct_bytes_read) / tokens,
        bytes_per_token=(more.bytes_read - less.bytes_read) / tokens,
        threads=more.threads,
        registers=more.registers,
        fixed=more.total - (more.total - less.total) / tokens * lengths[1],
    )
