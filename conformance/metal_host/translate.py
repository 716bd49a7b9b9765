"""From the final text of a Metal kernel to C++ that the emulated standard library compiles.

The text stays as it is, line for line, but for what C++ has no word for:

* ``threadgroup float x[32];`` becomes a reference to storage that the threads of a group share;
* swizzles (``v.zyx``) become member calls;
* unsuffixed floating literals get the ``f`` that they have in Metal, ``h`` and ``bf`` literals their type;
* the explicit instantiation that MLX appends is taken out and remembered: it names what to call.

Address-space words are macros of the emulated library. Position attributes and buffers of the kernel's parameters are
read here, so that one generated entry function can call the kernel with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_grid",
    "threadgroups_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_size",
    "grid_origin",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
)
"""Position attributes of a thread; the scheduler fills them in this order."""

FILE_NAME = "kernel.metal"
"""The name under which kernel text appears in compiler messages and line tables."""

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>0[xX][0-9a-fA-F.']+(?:[pP][+-]?\d+)?\w*|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<space>\s+)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_INSTANCE = re.compile(
    r'template\s*\[\[\s*host_name\("(?P<host>[^"]*)"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel)\s*'
    r"decltype\(.*?\)\s*(?P<call>[^;]*?)\s*;",
    re.DOTALL,
)
_KERNEL = re.compile(r"(?:\[\[\s*kernel\s*\]\]|\bkernel\b)\s+void\s+(\w+)\s*\(")
_METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>[^\n]*", re.MULTILINE)
_FLOAT_LITERAL = re.compile(r"(?P<digits>(?:[\d']*\.[\d']*|[\d']+(?=[eE]))(?:[eE][+-]?\d+)?)(?P<suffix>\w*)$")
_SWIZZLE = re.compile(r"[xyzw]{2,4}$|[rgba]{2,4}$")
_COMPONENT = {letter: index for letters in ("xyzw", "rgba") for index, letter in enumerate(letters)}


class MetalTextError(ValueError):
    """The text is not a kernel that the host runner understands."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the kernel function: a buffer, or a position attribute of the thread."""

    name: str
    buffer: int | None
    attribute: str | None
    line: int
    declaration: str


@dataclass(frozen=True)
class Translation:
    """C++ for one kernel, and what it takes."""

    code: str
    kernel: str
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> list[Parameter]:
        """The buffer parameters, by buffer number."""
        found = [p for p in self.parameters if p.buffer is not None]
        return sorted(found, key=lambda p: p.buffer or 0)


@dataclass
class _Token:
    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    return [_Token(m.lastgroup or "mark", m.group()) for m in _TOKEN.finditer(text)]


def _literal(text: str) -> str:
    if text[:2] in ("0x", "0X"):
        return text + "f" if re.search(r"[pP][+-]?\d+$", text) else text
    match = _FLOAT_LITERAL.match(text)
    if not match:
        return text
    digits, suffix = match["digits"], match["suffix"].lower()
    if suffix == "h":
        return f"half({digits}f)"
    if suffix == "bf":
        return f"bfloat({digits}f)"
    return text if suffix else digits + "f"


def _next_solid(tokens: list[_Token], at: int, step: int = 1) -> int:
    """The index of the next token that is neither space nor comment (or one past either end)."""
    at += step
    while 0 <= at < len(tokens) and tokens[at].kind in ("space", "comment"):
        at += step
    return at


def _text(tokens: list[_Token], at: int) -> str:
    return tokens[at].text if 0 <= at < len(tokens) else ""


def _rewrite_swizzle(tokens: list[_Token], at: int) -> None:
    before = _next_solid(tokens, at, -1)
    if _text(tokens, before) != ".":
        return
    owner = _next_solid(tokens, before, -1)
    if not (owner >= 0 and (tokens[owner].kind == "name" or tokens[owner].text in ")]")):
        return
    after = _next_solid(tokens, at)
    follow = _text(tokens, after)
    if follow == "(":
        return
    second = _text(tokens, after + 1)
    assigned = (follow == "=" and second != "=") or (follow in tuple("+-*/&|^") and second == "=")
    indices = ", ".join(str(_COMPONENT[c]) for c in tokens[at].text)
    tokens[at].text = f"template tq_{'ref' if assigned else 'get'}<{indices}>()"


def _declaration(tokens: list[_Token], at: int) -> tuple[int, int] | None:
    """For ``threadgroup`` at a token: where its first declarator ends, and the semicolon; None for a qualifier."""
    depth, end = 0, at + 1
    while end < len(tokens):
        mark = tokens[end].text
        if mark == "<":
            depth += 1
        elif mark == ">":
            if depth == 0:
                return None
            depth -= 1
        elif depth == 0 and mark in ("*", "&", "(", ")", "{", "}"):
            return None
        elif depth == 0 and mark in ("[", ";", ",", "="):
            break
        end += 1
    stop = end
    while stop < len(tokens) and tokens[stop].text != ";":
        if tokens[stop].text in ("{", "}", ")"):
            return None
        stop += 1
    return (end, stop) if stop < len(tokens) else None


def _rewrite_threadgroup(tokens: list[_Token], at: int, number: int) -> int:
    """Turns a declaration of threadgroup variables into references; returns how many there were (0: a qualifier)."""
    place = _declaration(tokens, at)
    if place is None:
        return 0
    end, stop = place
    head = "".join(t.text for t in tokens[at + 1 : end] if t.kind != "comment")
    match = re.match(r"(.*?)(\w+)\s*$", head, re.DOTALL)
    if not match or not match[1].strip():
        return 0
    element, first = match[1], match[2]
    rest = "".join(t.text for t in tokens[end:stop] if t.kind != "comment")
    declarators = [first + rest] if "," not in rest else (first + rest).split(",")
    made = []
    for index, declarator in enumerate(declarators):
        named = re.match(r"\s*(\w+)\s*((?:\[.*\])?)\s*$", declarator, re.DOTALL)
        if not named:
            raise MetalTextError(f"cannot read the threadgroup declaration {('threadgroup' + head + rest)!r}")
        name, dims = named[1], named[2]
        alias = f"tq_shared_{number + index}"
        prefix = element if index == 0 else element.replace("\n", " ")
        storage = f'tq::threadgroup_variable<{alias}>({number + index}, "{name}")'
        made.append(f"typedef {prefix} {alias} {dims}; {alias}& {name} = {storage}")
    text = "; ".join(made)
    lines = "".join(t.text for t in tokens[at:stop]).count("\n") - text.count("\n")
    for t in tokens[at:stop]:
        t.text, t.kind = "", "space"
    tokens[at].text, tokens[at].kind = text + "\n" * lines, "mark"
    return len(declarators)


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _split(text: str) -> list[tuple[int, str]]:
    """Splits a parameter list at its top-level commas; gives the offset of each part."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "<([":
            depth += 1
        elif c in ">)]":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append((start, text[start:i]))
            start = i + 1
    parts.append((start, text[start:]))
    return [(o, p) for o, p in parts if p.strip()]


def _parameters(source: str) -> tuple[str, tuple[Parameter, ...]]:
    found = list(_KERNEL.finditer(source))
    if len(found) != 1:
        raise MetalTextError(f"the text must define exactly one kernel function; found {len(found)}")
    start = found[0].end()
    depth, end = 1, start
    while depth:
        if end == len(source):
            raise MetalTextError(f"the parameter list of {found[0][1]} does not end")
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    parameters = []
    for offset, part in _split(source[start : end - 1]):
        match = re.match(r"(.*?)(\w+)\s*\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]\s*$", part, re.DOTALL)
        if not match:
            raise MetalTextError(f"a kernel parameter needs an attribute such as [[buffer(0)]]; got {part.strip()!r}")
        buffer = int(match[4]) if match[3] == "buffer" and match[4] else None
        if buffer is None and match[3] not in ATTRIBUTES:
            raise MetalTextError(f"unknown kernel parameter attribute [[{match[3]}]]")
        parameters.append(
            Parameter(
                name=match[2],
                buffer=buffer,
                attribute=None if buffer is not None else match[3],
                line=_line(source, start + offset + len(part) - len(part.lstrip())),
                declaration=" ".join(match[1].split()),
            )
        )
    return found[0][1], tuple(parameters)


def _without_instance(source: str) -> tuple[str, str | None]:
    found = list(_INSTANCE.finditer(source))
    if not found:
        return source, None
    for m in reversed(found):
        source = source[: m.start()] + "\n" * m.group().count("\n") + source[m.end() :]
    return source, found[-1]["call"]


def translate(source: str, template_arguments: str | None = None, strict: bool = False) -> Translation:
    """C++ for the one kernel in ``source``.

    ``template_arguments`` (``"float, 4"``) instantiates a kernel template that the text does not instantiate itself.
    With ``strict``, for clang's type checker: address spaces and swizzles stay, threadgroup variables become extern.
    Raises :class:`MetalTextError` when the text holds no kernel, or several.
    """
    source = _METAL_INCLUDE.sub("", source)
    source, call = _without_instance(source)
    name, parameters = _parameters(source)
    if template_arguments is not None:
        call = f"{name}<{template_arguments}>"
    tokens = _tokens(source)
    shared = 0
    for at, token in enumerate(tokens):
        if token.kind == "number":
            token.text = _literal(token.text)
        elif token.kind == "name" and token.text == "threadgroup":
            if not strict:
                shared += _rewrite_threadgroup(tokens, at, shared)
            elif _declaration(tokens, at):
                token.text = "extern threadgroup"
        elif token.kind == "name" and _SWIZZLE.match(token.text) and not strict:
            _rewrite_swizzle(tokens, at)
    body = f'#line 1 "{FILE_NAME}"\n' + "".join(t.text for t in tokens) + '\n#line 1 "entry"\n'
    if strict:
        return Translation(f"{body}auto* tq_entry = &{call or name};\n", name, parameters)
    numbers = [p.buffer if p.buffer is not None else -1 - ATTRIBUTES.index(p.attribute or "") for p in parameters]
    entry = (
        'extern "C" __attribute__((visibility("default"))) void tq_entry(void* const* buffers, const tq_thread* at) {\n'
        f"  tq::invoke<{', '.join(map(str, numbers))}>(&{call or name}, buffers, at);\n}}\n"
    )
    return Translation(body + entry, name, parameters)
