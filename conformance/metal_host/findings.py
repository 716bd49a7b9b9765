"""What a run reports: kinds of faults, each with the line of Metal text that shows it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .translate import FILE_NAME

KINDS = (
    "out_of_bounds_read",
    "out_of_bounds_write",
    "null_pointer",
    "write_to_input",
    "uninitialized_threadgroup_read",
    "uninitialized_output_read",
    "unwritten_output",
    "race_read_write",
    "race_write_write",
    "race_across_threadgroups",
    "barrier_divergence",
    "simd_divergence",
    "simd_inactive_lane",
    "array_bounds",
    "shift",
    "overflow",
    "division",
    "float_to_int",
    "misaligned",
    "missing_return",
    "foreign_stack",
    "hang",
    "crash",
    "threadgroup_memory",
    "float_order",
)
"""Kinds that the emulator finds, in the order of ``tq_kind`` in ``emulator/interface.h``."""

PYTHON_KINDS = ("order_dependence", "threadgroup_size", "address_space", "conversion", "strict")
"""Kinds found outside it: differing outputs, large groups, and the strict pass."""

NOTES = frozenset({"float_order", "threadgroup_size", "conversion"})
"""Kinds that are no fault by themselves."""

EXPLANATIONS = {
    "out_of_bounds_read": "reads outside its memory",
    "out_of_bounds_write": "writes outside its memory",
    "null_pointer": "uses a null pointer",
    "write_to_input": "writes to an input",
    "uninitialized_threadgroup_read": "reads threadgroup memory that this threadgroup has not written",
    "uninitialized_output_read": "reads output memory that was never written",
    "unwritten_output": "leaves elements of an output unwritten",
    "race_read_write": "races: one thread reads what another writes, with no barrier between",
    "race_write_write": "races: two threads write the same place, with no barrier between",
    "race_across_threadgroups": "races across threadgroups, which no barrier orders",
    "barrier_divergence": "reaches a threadgroup barrier that other threads of the threadgroup do not",
    "simd_divergence": "reaches a simd operation that other lanes of the simdgroup do not",
    "simd_inactive_lane": "takes the value of a lane that takes no part",
    "array_bounds": "indexes an array outside its bounds",
    "shift": "shifts by the width of the type or more",
    "overflow": "overflows a signed integer",
    "division": "divides by zero, or overflows in a division",
    "float_to_int": "converts a float that the integer type cannot hold",
    "misaligned": "uses a pointer that is not aligned for its type",
    "missing_return": "ends a function without its return value",
    "foreign_stack": "uses another thread's private memory",
    "hang": "does not end in time",
    "crash": "crashes",
    "threadgroup_memory": "takes more threadgroup memory than the 32768 bytes there are",
    "float_order": "adds floating-point values across threads: the result depends on the order",
    "order_dependence": "gives different outputs for different orders of its threads",
    "threadgroup_size": "asks for more threads per threadgroup than heavy kernels get on every chip",
    "address_space": "mixes address spaces",
    "conversion": "converts implicitly to a type that holds less",
    "strict": "is rejected by the strict pass",
}


@dataclass(frozen=True)
class Finding:
    """One fault (or note) at one line of the Metal text."""

    kind: str
    line: int | None
    text: str
    detail: str = ""
    buffer: str | None = None
    index: int | None = None
    thread: str | None = None
    other_line: int | None = None
    other_thread: str | None = None
    count: int = 1

    @property
    def is_error(self) -> bool:
        """False for notes, such as a floating-point sum whose result depends on its order."""
        return self.kind not in NOTES

    def __str__(self) -> str:
        where = f"{FILE_NAME}:{self.line if self.line is not None else '?'}"
        parts = [f"{where}: {self.kind}: {EXPLANATIONS.get(self.kind, self.kind)}"]
        if self.buffer is not None:
            parts.append(f"{self.buffer}[{self.index}]" if self.index is not None else self.buffer)
        if self.thread:
            parts.append(f"by {self.thread}")
        if self.other_thread or self.other_line is not None:
            at = f" at line {self.other_line}" if self.other_line is not None else ""
            parts.append(f"against {self.other_thread or 'another thread'}{at}")
        if self.detail:
            parts.append(self.detail)
        if self.count > 1:
            parts.append(f"{self.count} times")
        message = "; ".join(parts)
        return f"{message}\n    {self.text.strip()}" if self.text.strip() else message


@dataclass
class Findings:
    """All findings of a run, in the order in which they came up."""

    items: list[Finding] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def errors(self) -> list[Finding]:
        """The findings that are faults."""
        return [f for f in self.items if f.is_error]

    @property
    def kinds(self) -> set[str]:
        """The kinds that occur."""
        return {f.kind for f in self.items}

    def of(self, kind: str) -> list[Finding]:
        """The findings of one kind."""
        return [f for f in self.items if f.kind == kind]

    def __str__(self) -> str:
        return "\n".join(map(str, self.items)) if self.items else "no findings"


class FindingsError(RuntimeError):
    """A kernel ran with faults; ``findings`` lists them."""

    def __init__(self, findings: Findings, kernel: str) -> None:
        self.findings = findings
        faults = "\n".join(map(str, findings.errors))
        super().__init__(f"{kernel}: {len(findings.errors)} faults on the Metal host runner\n{faults}")


@functools.cache
def _symbolizer() -> str | None:
    return shutil.which("addr2line")


def resolve(library: Path, addresses: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """For code addresses of a built kernel, the lines of Metal text they stand for, innermost call first."""
    wanted = sorted({a for a in addresses if a})
    tool = _symbolizer()
    if not wanted or tool is None:
        return {}
    command = [tool, "-e", str(library), "-a", "-i", *(hex(a) for a in wanted)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines: dict[int, list[int]] = {}
    current: list[int] = []
    for row in output.splitlines():
        if row.startswith("0x"):
            current = lines.setdefault(int(row, 16), [])
            continue
        file, _, number = row.split(" ")[0].rpartition(":")
        # GCC names the file it compiled for code outside inlined calls; its lines are those of the text all the same.
        if file.endswith((FILE_NAME, f"{library.stem}.cpp")) and number.isdigit():
            current.append(int(number))
    return {address: tuple(found) for address, found in lines.items()}
