"""Reads clang's textual LLVM IR, as far as counting operations needs it: functions, blocks, instructions, operands.

Both spellings of pointers are read (``float*`` of older versions, ``ptr`` of newer ones). Values must be unnamed, as
clang leaves them with ``-fdiscard-value-names``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_DEFINE = re.compile(r"^define\b.*?@(?P<name>[\w.$]+|\"[^\"]+\")\((?P<rest>.*)\{\s*$")
_LABEL = re.compile(r"^(?P<name>\d+):")
_INSTRUCTION = re.compile(
    r"^\s+(?:(?P<result>%\d+) = )?(?:(?:tail|musttail|notail) )?(?P<opcode>[a-z]\w*)(?P<rest>.*)$"
)
_METADATA = re.compile(r", ![\w.]+ ![\w.()]+.*$|\s+#\d+(?=\s*$)")
_VALUE = re.compile(r"(?<![\w\"%])%\d+")
_LABEL_USE = re.compile(r"label (%\d+)")
_CALLEE = re.compile(r"@(?P<name>[\w.$]+|\"[^\"]+\")\(")
_PHI = re.compile(r"\[ ([^,\]]+), (%\d+) \]")
_FLAGS = frozenset(
    [
        *("nuw", "nsw", "exact", "inbounds", "volatile", "atomic", "disjoint", "nneg", "nusw", "samesign"),
        *("fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn", "reassoc"),
    ]
)
_ATTRIBUTES = re.compile(
    r"^(?:noundef|zeroext|signext|noalias|nonnull|fastcc|range\([^)]*\)|align \d+|dereferenceable(?:_or_null)?\(\d+\)) "
)
_SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8, "void": 0}


class CountIRError(RuntimeError):
    """The compiler's output is not of a form that the counting reads."""


@dataclass
class Instruction:
    """One instruction: its opcode, its type where that matters, and the values it uses."""

    line: int
    opcode: str
    result: str | None
    rest: str
    uses: tuple[str, ...]
    type: str = "void"
    callee: str = ""
    labels: tuple[str, ...] = ()
    incoming: tuple[tuple[str, str], ...] = ()


@dataclass
class Block:
    """One basic block."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def successors(self) -> tuple[str, ...]:
        """Labels that its last instruction may jump to."""
        return self.instructions[-1].labels if self.instructions else ()


@dataclass
class Function:
    """One function: its head line and its blocks, the entry first."""

    name: str
    head: str
    parameters: tuple[str, ...]
    blocks: list[Block] = field(default_factory=list)

    def instructions(self) -> list[Instruction]:
        """All instructions, in order."""
        return [i for b in self.blocks for i in b.instructions]


def split_top(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for at, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted and c in "<[({":
            depth += 1
        elif not quoted and c in ">])}":
            depth -= 1
        elif not quoted and c == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return parts


def first_type(text: str) -> tuple[str, str]:
    """Splits a type from the front of ``text``; gives it and what follows."""
    text = text.lstrip()
    depth, quoted, at = 0, False, 0
    for at, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted and c in "<[({":
            depth += 1
        elif not quoted and c in ">])}":
            depth -= 1
        elif quoted or depth or c not in ", ":
            continue
        elif c == "," or not text.startswith(("(", "*", "addrspace("), at + 1):
            break
    else:
        at = len(text)
    return text[:at], text[at:].lstrip(" ,")


def size_of(name: str) -> int:
    """Bytes of a scalar or vector type; 8 for pointers, 0 for what has no size here."""
    name = name.strip()
    if name.endswith("*") or name.startswith("ptr"):
        return 8
    if name in _SIZES:
        return _SIZES[name]
    if re.fullmatch(r"i\d+", name):
        return (int(name[1:]) + 7) // 8
    vector = re.fullmatch(r"[<\[](\d+) x (.*)[>\]]", name)
    return int(vector[1]) * size_of(vector[2]) if vector else 0


def lanes_of(name: str) -> int:
    """Elements of a vector type, 1 for others."""
    vector = re.fullmatch(r"<(\d+) x .*>", name.strip())
    return int(vector[1]) if vector else 1


def _without_flags(rest: str) -> str:
    words = rest.lstrip()
    while words.split(" ", 1)[0] in _FLAGS:
        words = words.split(" ", 1)[1]
    return words


def _typed(opcode: str, rest: str) -> str:
    if opcode in ("icmp", "fcmp"):
        return "i1"
    if opcode == "getelementptr":
        return "ptr"
    body = _without_flags(rest)
    if opcode == "select":
        return first_type(first_type(body)[1].split(" ", 1)[1].lstrip(" ,"))[0]
    if " to " in body and opcode in (
        *("trunc", "zext", "sext", "fptrunc", "fpext", "fptoui", "fptosi", "uitofp", "sitofp"),
        *("ptrtoint", "inttoptr", "bitcast", "addrspacecast"),
    ):
        return body.rsplit(" to ", 1)[1].strip()
    if opcode == "extractelement":
        vector = re.match(r"<\d+ x ([^>]*)>", body)
        return vector[1] if vector else "i32"
    while _ATTRIBUTES.match(body):
        body = _ATTRIBUTES.sub("", body, count=1)
    return first_type(body)[0]


def compared_type(instruction: Instruction) -> str:
    """The type of the operands of a comparison (or of the value of a store or a cast)."""
    body = _without_flags(instruction.rest)
    if instruction.opcode in ("icmp", "fcmp"):
        body = body.split(" ", 1)[1]
    return first_type(body)[0]


def _instruction(text: str, line: int) -> Instruction:
    match = _INSTRUCTION.match(text)
    if not match:
        raise CountIRError(f"cannot read this line of LLVM IR: {text.strip()!r}")
    opcode = match["opcode"]
    rest = _METADATA.sub("", match["rest"])
    labels = tuple(_LABEL_USE.findall(rest))
    incoming: tuple[tuple[str, str], ...] = ()
    if opcode == "phi":
        incoming = tuple(_PHI.findall(rest))
        uses = tuple(v for v, _ in incoming if v.startswith("%"))
    else:
        uses = tuple(_VALUE.findall(_LABEL_USE.sub("", rest)))
    callee = ""
    if opcode == "call":
        found = _CALLEE.search(rest)
        callee = found["name"].strip('"') if found else ""
    return Instruction(line, opcode, match["result"], rest, uses, _typed(opcode, rest), callee, labels, incoming)


def parse(text: str) -> dict[str, Function]:
    """The functions that a module defines, by name. Raises :class:`CountIRError`."""
    functions: dict[str, Function] = {}
    rows = iter(enumerate(text.splitlines()))
    for _, row in rows:
        head = _DEFINE.match(row)
        if head:
            function = _function(head, row, rows)
            functions[function.name] = function
    return functions


def _function(head: re.Match[str], first: str, rows: Iterator[tuple[int, str]]) -> Function:
    parameters = tuple(f"%{p}" for p in re.findall(r"%(\d+)(?=[,)])", head["rest"]))
    function = Function(head["name"].strip('"'), first, parameters)
    # The entry block has no label line: it takes the number after the parameters.
    block = Block(f"%{len(parameters)}")
    function.blocks.append(block)
    for number, row in rows:
        if row == "}":
            break
        label = _LABEL.match(row)
        if label:
            block = Block(f"%{label['name']}")
            function.blocks.append(block)
        elif row.strip() and not row.lstrip().startswith((";", "#dbg")):
            if row.lstrip().startswith("switch") and "]" not in row:
                for _, more in rows:
                    row += " " + more.strip()
                    if "]" in more:
                        break
            block.instructions.append(_instruction(row, number))
    return function
