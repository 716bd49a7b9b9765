"""Builds a kernel that counts itself: optimised LLVM IR with a call at the head of each block and before each access.

What a block holds is read from the IR before the calls go in, so the calls change no count. The IR is made for one
fixed target, whatever the machine, and only then compiled for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from . import count_classes, count_ir
from .build import EMULATOR, MetalCompileError, cache_folder, compiler, emulator_digest, place, runtime
from .count_classes import Access, Analysis
from .count_ir import Function, parse
from .strict import clang
from .translate import Translation

_FLAGS = [
    *("-x", "c++", "-std=c++17", "-O2", "-ffreestanding", "--target=x86_64-unknown-linux-gnu", "-fPIC", "-w"),
    *("-DTQ_COUNT", "-fno-vectorize", "-fno-slp-vectorize", "-fno-exceptions", "-fno-rtti", "-fdiscard-value-names"),
    *("-ffp-contract=off", "-fno-math-errno", "-fsigned-char", "-fno-strict-aliasing"),
    *("-fno-delete-null-pointer-checks", "-fno-finite-loops"),
    # A GPU's compiler inlines everything and keeps 32-bit counters in 32 bits.
    *("-mllvm", "-inline-threshold=1000000", "-mllvm", "-indvars-widen-indvars=false"),
]
_ATTRIBUTES = re.compile(r"^(attributes #\d+ = \{).*\}$", re.MULTILINE)
_PARAMETER_ATTRIBUTES = re.compile(r"\b(?:nocapture|readonly|readnone|writeonly|noalias|captures\([^)]*\)) ")
_ENTRY = "tq_entry"


class NoClangError(RuntimeError):
    """Counting needs clang, and there is none."""


@dataclass(frozen=True)
class Counted:
    """A built kernel: its library, what each block costs, and the registers its functions take."""

    library: Path
    blocks: tuple[Counter[str], ...]
    registers: int


def count_unavailable_reason() -> str | None:
    """Why operations cannot be counted here; None when they can."""
    if clang() is None:
        return "counting operations needs clang++ (or TURBOQUANT_CLANG), which is not installed"
    return None


@functools.cache
def _clang() -> tuple[str, str]:
    tool = clang()
    if tool is None:
        raise NoClangError(str(count_unavailable_reason()))
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    return tool, version.splitlines()[0]


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256("\0".join([emulator_digest(), *_clang(), platform.machine(), *_FLAGS]).encode())
    for module in (count_ir.__file__, count_classes.__file__, __file__):
        digest.update(Path(module).read_bytes())
    return digest.hexdigest()[:24]


@functools.cache
def _counter() -> Path:
    """The counters' object file."""
    path = cache_folder() / f"count-{_digest()}.o"
    if not path.exists():
        command = [compiler()[0], "-std=c++17", "-O2", "-fPIC", "-w", "-fvisibility=hidden", "-c"]
        done = place(path, [*command, str(EMULATOR / "count.cpp")])
        if done.returncode:
            raise MetalCompileError(f"the counters do not compile:\n{done.stderr}")
    return path


def _emit(translation: Translation, path: Path) -> str:
    """The optimised IR of a kernel, as text."""
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".cpp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(translation.code)
            include = ["-include", str(EMULATOR / "metal_host.h")]
            done = place(path, [_clang()[0], *_FLAGS, *include, "-S", "-emit-llvm", name])
        finally:
            os.unlink(name)
        if done.returncode:
            raise MetalCompileError(f"clang does not compile the text of {translation.kernel}:\n{done.stderr}")
    return path.read_text()


def _reachable(functions: dict[str, Function]) -> list[Function]:
    """The entry and what it calls by name; the emulator's own work is only called through pointers."""
    found = [_ENTRY]
    for name in found:
        for i in functions[name].instructions():
            if i.opcode == "call" and i.callee in functions and i.callee not in found:
                found.append(i.callee)
    return [functions[name] for name in found]


def _hook(access: Access, number: int) -> list[str]:
    return [
        f"  %tq.{number} = ptrtoint {access.pointer} to i64",
        f"  call void @tq_count_access(i64 %tq.{number}, i32 {access.size}, i32 {int(access.store)})",
    ]


def instrument(text: str) -> tuple[str, tuple[Counter[str], ...], int]:
    """The IR with its counters, what each counted block costs, and the registers of the largest function."""
    functions = parse(text)
    before: dict[int, list[str]] = {}
    blocks: list[Counter[str]] = []
    registers = hooks = 0
    for function in _reachable(functions):
        analysis = Analysis(function, function.name == _ENTRY, functions.__contains__)
        registers = max(registers, analysis.registers())
        for block in function.blocks:
            head = next(i for i in block.instructions if i.opcode != "phi")
            before.setdefault(head.line, []).insert(0, f"  call void @tq_count_block(i32 {len(blocks)})")
            blocks.append(analysis.cost(block))
            for access in analysis.accesses(block):
                before.setdefault(access.line, []).extend(_hook(access, hooks))
                hooks += 1
    rows: list[str] = []
    for number, row in enumerate(text.splitlines()):
        if row.startswith(("target ", "source_filename")):
            continue
        rows.extend(before.get(number, ()))
        rows.append(_PARAMETER_ATTRIBUTES.sub("", row) if row.startswith("define ") else row)
    rows += ["declare void @tq_count_block(i32)", "declare void @tq_count_access(i64, i32, i32)"]
    # What the functions promised no longer holds: they count.
    return _ATTRIBUTES.sub(r"\1 nounwind }", "\n".join(rows)) + "\n", tuple(blocks), registers


@functools.lru_cache(maxsize=128)
def build_counted(translation: Translation) -> Counted:
    """The counting library of a translated kernel.

    Raises :class:`NoClangError` without clang, :class:`MetalCompileError` when the text does not compile, and
    :class:`CountIRError` when it holds something that cannot be counted.
    """
    key = hashlib.sha256(f"{_digest()}\0{translation.code}".encode()).hexdigest()[:32]
    path = cache_folder() / f"count-{key}.so"
    text, blocks, registers = instrument(_emit(translation, path.with_suffix(".ll")))
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".ll")
        part = Path(name).with_suffix(".o")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            command = [_clang()[0], "-x", "ir", "-O1", "-fPIC", "-w", "-c", name, "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                objects = [str(part), str(_counter()), str(runtime()[1])]
                done = place(path, [compiler()[0], "-shared", *objects, "-lm"])
        finally:
            os.unlink(name)
            part.unlink(missing_ok=True)
        if done.returncode:
            raise MetalCompileError(f"the counting form of {translation.kernel} does not build:\n{done.stderr}")
    return Counted(path, blocks, registers)
