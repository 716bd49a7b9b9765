"""The strict pass: clang's type checker on the Metal text, with real address spaces.

The compile for running erases ``device``, ``constant``, ``threadgroup`` and ``thread``. Here they are address spaces of
clang, vectors are native, and library functions are mere declarations, so that mixing pointers of two spaces is an
error, and a conversion to a type that holds less is reported where it happens without being asked for.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from .build import EMULATOR
from .dispatch import Dispatch
from .findings import Finding, Findings
from .translate import FILE_NAME, translate

_FLAGS = [
    "-x",
    "c++",
    "-std=c++17",
    "--target=aarch64-none-elf",
    "-ffreestanding",
    "-fsyntax-only",
    "-fsigned-char",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    "-ferror-limit=0",
    "-Wno-everything",
    "-Wimplicit-int-conversion",
    "-Wimplicit-float-conversion",
    "-Wimplicit-int-float-conversion",
    "-Wfloat-conversion",
    "-Wshorten-64-to-32",
]
_MESSAGE = re.compile(
    rf"^(?:[^\n]*/)?{re.escape(FILE_NAME)}:(?P<line>\d+):\d+: (?P<level>error|warning): (?P<text>.*)$", re.MULTILINE
)
_VECTOR = re.compile(r"\b(char|uchar|short|ushort|int|uint|long|ulong|float|half|bfloat)([234])(?=\s*\()")
_VECTOR_TEMPLATE = re.compile(r"\bvec(?=\s*<[^<>;]*>\s*\()")


@dataclass(frozen=True)
class StrictResult:
    """What the strict pass found; ``skipped`` says why it did not run, or is None."""

    findings: Findings
    skipped: str | None = None


@functools.cache
def clang() -> str | None:
    """The clang that the strict pass uses: ``TURBOQUANT_CLANG``, else ``clang++``."""
    return shutil.which(os.environ.get("TURBOQUANT_CLANG") or "clang++")


def _kind(level: str, text: str) -> str:
    if level == "warning":
        return "conversion"
    space = "address space" in text or re.search(r"\b(device|threadgroup|constant)\b|__attribute__", text)
    return "address_space" if space or "no matching function" in text else "strict"


def strict_check(source: str | Dispatch, template_arguments: str | None = None) -> StrictResult:
    """Checks Metal text (or that of a dispatch) with clang.

    Findings have the kinds ``address_space``, ``strict`` (other errors) and, as notes, ``conversion``. Without clang,
    the result says so in ``skipped``.
    """
    if isinstance(source, Dispatch):
        return strict_check(source.source, source.template_arguments)
    tool = clang()
    if tool is None:
        return StrictResult(Findings(), "the strict pass needs clang++, which is not installed")
    translation = translate(source, template_arguments, strict=True)
    code = _VECTOR.sub(r"tq_vec<\1, \2>", translation.code)
    code = _VECTOR_TEMPLATE.sub("tq_vec", code)
    command = [tool, *_FLAGS, "-include", str(EMULATOR / "strict.h"), "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    rows = source.splitlines()
    found = []
    for m in _MESSAGE.finditer(done.stderr):
        line = int(m["line"])
        text = rows[line - 1] if line <= len(rows) else ""
        found.append(Finding(_kind(m["level"], m["text"]), line, text, m["text"]))
    if done.returncode and not found:
        return StrictResult(Findings(), f"clang could not check the text: {done.stderr.strip()[:500]}")
    return StrictResult(Findings(found))
