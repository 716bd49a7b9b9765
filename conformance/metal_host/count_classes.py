"""What one basic block of optimised LLVM IR costs: its operations by category, and the registers of its function.

Free are: phi, bitcasts and other moves of bits, constant offsets of pointers, reads of the kernel's own arguments, an
integer conversion of what was just loaded (loads extend), a comparison that only one select of its block uses (one
instruction compares and selects). Accesses are left to the run, which sees the address.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .count_ir import Block, CountIRError, Function, Instruction, first_type, lanes_of, size_of, split_top

OPERATIONS = ("float", "fma", "int", "int_multiply", "int64", "conversion", "compare", "special", "simd", "atomic")
CONTROL = ("branch", "barrier")
ADDRESS = "address"
FUSIBLE = "fusible"
ACCESS = "access"

_FLOAT = frozenset({"fadd", "fsub", "fmul", "fneg"})
_INT = frozenset({"add", "sub", "and", "or", "xor", "shl", "lshr", "ashr"})
_DIVISIONS = frozenset({"fdiv", "frem", "udiv", "sdiv", "urem", "srem"})
_CASTS = frozenset({"trunc", "zext", "sext"})
_CONVERSIONS = frozenset({"fptrunc", "fpext", "fptoui", "fptosi", "uitofp", "sitofp"})
_FREE = frozenset(
    [
        *("phi", "bitcast", "addrspacecast", "ptrtoint", "inttoptr", "alloca", "ret", "unreachable", "freeze", "fence"),
        *("load", "store"),
        *("extractelement", "insertelement", "shufflevector", "extractvalue", "insertvalue"),
    ]
)
_HALF = re.compile(r"and 4294967295$|lshr 32$")
_INTRINSIC = re.compile(r"llvm\.([a-z]+(?:\.with\.overflow|\.sat)?)")
_CALLS: dict[str, str] = {
    **dict.fromkeys(("fma", "fmuladd"), "fma"),
    **dict.fromkeys(("minnum", "maxnum", "minimum", "maximum", "smin", "smax", "umin", "umax"), "compare"),
    **dict.fromkeys(("is",), "compare"),
    **dict.fromkeys(("fabs", "copysign", "rint", "nearbyint", "floor", "ceil", "trunc", "round", "roundeven"), "float"),
    **dict.fromkeys(("sqrt", "exp", "log", "sin", "cos", "tan", "pow", "powi", "ldexp", "frexp"), "special"),
    **dict.fromkeys(("ctpop", "ctlz", "cttz", "bitreverse", "bswap", "fshl", "fshr", "abs"), "int"),
    **dict.fromkeys(("uadd", "usub", "sadd", "ssub", "umul", "smul"), "int"),
    **dict.fromkeys(("lifetime", "assume", "memcpy", "memmove", "memset", "dbg", "experimental", "invariant"), ""),
}
_HOST: dict[str, str] = {
    **dict.fromkeys(("tq_half_to_float", "tq_float_to_half", "tq_float_to_bfloat", "tq_bfloat_to_float"), "conversion"),
    **dict.fromkeys(("tq_threadgroup_variable", "tq_active", "tq_peek32", "tq_poke32", "tq_copy"), ""),
    **dict.fromkeys(("tq_threadgroup_barrier", "tq_simdgroup_barrier"), "barrier"),
    **dict.fromkeys(("tq_op_mulhi", "tq_op_mulhi_signed"), "int_multiply"),
    **dict.fromkeys(("tq_op_rsqrt", "tq_op_exp10"), "special"),
    **dict.fromkeys(("tq_op_sign", "tq_op_fract", "tq_op_saturate"), "float"),
    "tq_atomic": "atomic",
}
_MATH = re.compile(
    r"(exp|exp2|log|log2|log10|sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|pow|atan2|fmod|ldexp|frexp|ilogb|fdim|sqrt)f$"
)
_MATH_FLOAT = re.compile(r"(rint|floor|ceil|trunc|round|fabs|copysign)f$")


def call_category(name: str, known: Callable[[str], bool]) -> str:
    """The category of a call; empty for what is free. ``known`` says which functions the module defines."""
    if name in _HOST:
        return _HOST[name]
    if name.startswith("tq_op_simd"):
        return "simd"
    if name.startswith("tq_op_"):
        return "int"
    intrinsic = _INTRINSIC.match(name)
    if intrinsic:
        head = intrinsic[1].split(".")[0]
        if head in _CALLS:
            return _CALLS[head]
    if _MATH.match(name):
        return "special"
    if _MATH_FLOAT.match(name):
        return "float"
    if name in ("fminf", "fmaxf"):
        return "compare"
    if name in ("fmaf",):
        return "fma"
    if known(name):
        return "branch"
    raise CountIRError(f"the kernel calls {name or 'a function through a pointer'}, which the counting does not know")


@dataclass(frozen=True)
class Access:
    """One load or store: the pointer as IR text (``float* %7``), and its bytes."""

    line: int
    pointer: str
    size: int
    store: bool


class Analysis:
    """The instructions of one function, sorted into categories."""

    def __init__(self, function: Function, entry: bool, known: Callable[[str], bool]) -> None:
        self.function, self.known = function, known
        instructions = function.instructions()
        self.defined = {i.result: i for i in instructions if i.result is not None}
        self.block_of = {id(i): b for b in function.blocks for i in b.instructions}
        self.users: dict[str, list[Instruction]] = {}
        for i in instructions:
            for value in i.uses:
                self.users.setdefault(value, []).append(i)
        self.arguments = self._arguments() if entry else set()
        self.addresses = self._addresses()

    def _arguments(self) -> set[str]:
        """Pointers into the kernel's own arguments: the buffers' table and the thread's position."""
        found = set(self.function.parameters)
        for i in self.function.instructions():
            if i.result is not None and i.opcode in ("getelementptr", "bitcast") and i.uses and i.uses[0] in found:
                found.add(i.result)
        return found

    def _addresses(self) -> set[str]:
        """64-bit integers that end in addresses only. The text computes them in 32 bits."""
        whole = _INT | _CASTS | {"mul", "phi", "select"}
        found = {r for r, i in self.defined.items() if i.opcode in whole and i.type == "i64"}
        changed = True
        while changed:
            kept = {
                r for r in found
                if all(u.opcode == "getelementptr" or (u.result in found) for u in self.users.get(r, []))
            }  # fmt: skip
            changed = kept != found
            found = kept
        return found

    def of_arguments(self, i: Instruction) -> bool:
        """Whether this reads the kernel's own arguments."""
        return i.opcode == "load" and bool(i.uses) and i.uses[-1] in self.arguments

    def _unpacks_argument(self, i: Instruction) -> bool:
        """Whether this takes one half of two coordinates of a position, which the host keeps in one 64-bit value."""
        source = self.defined.get(i.uses[0]) if len(i.uses) == 1 else None
        if source is None or source.type != "i64" or not self.of_arguments(source):
            return False
        return i.opcode == "trunc" or bool(_HALF.match(f"{i.opcode} {split_top(i.rest)[-1]}"))

    def alone(self, value: str, block: Block) -> Instruction | None:
        """The instruction of this block that gives ``value``, when nothing else uses it."""
        maker = self.defined.get(value)
        if maker is None or len(self.users.get(value, [])) != 1 or self.block_of[id(maker)] is not block:
            return None
        return maker

    def category(self, i: Instruction) -> str:
        """The category of one instruction; empty for what is free."""
        op = i.opcode
        if op in _FREE or self._unpacks_argument(i):
            return ""
        if op == "call":
            return call_category(i.callee, self.known)
        if op == "br":
            return "branch" if len(i.labels) > 1 else ""
        if op == "switch":
            return "branch"
        if op == "getelementptr":
            constant = all(re.search(r"%", part) is None for part in split_top(i.rest)[2:])
            return "" if constant else ADDRESS
        if op in _FLOAT:
            return "float"
        if op in _DIVISIONS:
            return "special"
        if op in _CONVERSIONS:
            return "conversion"
        if op == "select":
            return "compare"
        if op in ("icmp", "fcmp"):
            users = self.users.get(i.result or "", [])
            one = len(users) == 1 and users[0].opcode == "select" and users[0].uses[:1] == (i.result,)
            return "" if one and self.block_of[id(users[0])] is self.block_of[id(i)] else "compare"
        address = i.result in self.addresses
        if op in _CASTS:
            source = self.defined.get(i.uses[0]) if i.uses else None
            if source is not None and source.opcode == "load":
                return ""
            return ADDRESS if address else "conversion"
        wide = size_of(i.type) == 8 and lanes_of(i.type) == 1
        if op == "mul":
            return "int64" if wide and not address else "int_multiply"
        if op in _INT:
            return "int64" if wide and not address else "int"
        raise CountIRError(f"the counting does not know the instruction {op}")

    def fusible(self, block: Block) -> int:
        """Pairs that one instruction could do: multiply and add, shift and mask, shift and add."""
        absorbed: set[int] = set()
        absorbing = 0
        rules = {
            "fadd": ("fmul",), "fsub": ("fmul",), "and": ("lshr", "ashr"), "add": ("mul", "shl"), "sub": ("mul",),
            "or": ("shl",),
        }  # fmt: skip
        takers: set[int] = set()
        for i in block.instructions:
            for value in i.uses if i.opcode in rules else ():
                maker = self.alone(value, block)
                if maker is None or maker.opcode not in rules[i.opcode] or id(maker) in takers | absorbed:
                    continue
                absorbed.add(id(maker))
                takers.add(id(i))
                absorbing += lanes_of(i.type)
                break
        return absorbing

    def cost(self, block: Block) -> Counter[str]:
        """Operations of one run of the block, by category; accesses are one, by the four bytes."""
        counts: Counter[str] = Counter()
        for i in block.instructions:
            category = self.category(i)
            if category:
                counts[category] += lanes_of(i.type)
        words = sum((a.size + 3) // 4 for a in self.accesses(block))
        if words:
            counts[ACCESS] = words
        fused = self.fusible(block)
        if fused:
            counts[FUSIBLE] = fused
        return counts

    def accesses(self, block: Block) -> list[Access]:
        """The loads and stores of the block, but for those of the kernel's own arguments."""
        found = []
        for i in block.instructions:
            if i.opcode in ("load", "store") and not self.of_arguments(i):
                parts = split_top(_plain(i.rest))
                kind = parts[0] if i.opcode == "load" else first_type(parts[0])[0]
                found.append(Access(i.line, parts[1], size_of(kind), i.opcode == "store"))
            elif i.callee.startswith(("llvm.memcpy", "llvm.memmove", "llvm.memset")):
                found.extend(_block_accesses(i))
            elif i.callee in ("tq_peek32", "tq_poke32"):
                found.append(Access(i.line, _argument(i, 0), 4, i.callee == "tq_poke32"))
        return [a for a in found if a.size]

    def registers(self) -> int:
        """The most 32-bit registers that live values take at any point of the function.

        Addresses take none: those of buffers are the same for all threads, and sums with an index are made where they
        are used. Indices do. Arrays that stayed in memory count whole.
        """
        weight = {r: self._weight(i) for r, i in self.defined.items()}
        seen: dict[str, frozenset[str]] = {}
        self.held = {r: self._held(r, seen) for r in self.defined}
        gone, comes = self._uses_and_definitions()
        live_in: dict[str, set[str]] = {b.label: set() for b in self.function.blocks}
        changed = True
        while changed:
            changed = False
            for b in reversed(self.function.blocks):
                new = (self._live_out(b, live_in) - gone[b.label]) | comes[b.label]
                if new != live_in[b.label]:
                    live_in[b.label] = new
                    changed = True
        most = 0
        for b in self.function.blocks:
            live = self._live_out(b, live_in)
            most = max(most, sum(weight.get(v, 0) for v in live))
            for i in reversed(b.instructions):
                if i.result is not None:
                    live.discard(i.result)
                if i.opcode != "phi":
                    live.update(*(self._registers_of(v) for v in i.uses))
                most = max(most, sum(weight.get(v, 0) for v in live))
        return most + sum(self._array(i) for i in self.defined.values() if i.opcode == "alloca")

    def _registers_of(self, value: str) -> frozenset[str]:
        return self.held.get(value) or frozenset({value})

    def _live_out(self, block: Block, live_in: dict[str, set[str]]) -> set[str]:
        live: set[str] = set()
        following = {b.label: b for b in self.function.blocks}
        for label in block.successors:
            after = following[label]
            phis = {i.result for i in after.instructions if i.opcode == "phi"}
            live |= {v for v in live_in[label] if v not in phis}
            incoming = [pair for i in after.instructions if i.opcode == "phi" for pair in i.incoming]
            live.update(*(self._registers_of(v) for v, source in incoming if source == block.label and v[0] == "%"))
        return live

    def _uses_and_definitions(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        defined: dict[str, set[str]] = {}
        used: dict[str, set[str]] = {}
        for b in self.function.blocks:
            mine: set[str] = set()
            needs: set[str] = set()
            for i in b.instructions:
                if i.opcode != "phi":
                    needs |= set().union(*(self._registers_of(v) for v in i.uses)) - mine
                if i.result is not None:
                    mine.add(i.result)
            defined[b.label], used[b.label] = mine, needs
        return defined, used

    def _held(self, value: str, seen: dict[str, frozenset[str]]) -> frozenset[str]:
        """The values whose registers hold this one: casts of bits take none, addresses are summed where used."""
        if value in seen:
            return seen[value]
        i = self.defined.get(value)
        if i is None or not i.uses or not self._dissolves(i):
            return frozenset({value})
        seen[value] = frozenset({value})  # of a value that depends on itself
        seen[value] = frozenset().union(*(self._held(v, seen) for v in i.uses))
        return seen[value]

    def _dissolves(self, i: Instruction) -> bool:
        moves = i.opcode in ("bitcast", "addrspacecast", "freeze", "getelementptr")
        return moves or (i.opcode in _CASTS and i.result in self.addresses)

    def _weight(self, i: Instruction) -> int:
        uniform = i.result in self.arguments or (self.of_arguments(i) and size_of(i.type) == 8)
        if uniform or i.opcode == "alloca" or i.callee == "tq_threadgroup_variable":
            return 0
        return 1 if i.result in self.addresses else max(1, (size_of(i.type) + 3) // 4)

    @staticmethod
    def _array(i: Instruction) -> int:
        return (size_of(first_type(i.rest)[0]) + 3) // 4


def _plain(rest: str) -> str:
    return re.sub(r"^\s*(?:(?:atomic|volatile) )+", "", rest)


def _arguments_of(i: Instruction) -> list[str]:
    start = i.rest.index(f"@{i.callee}(") + len(i.callee) + 2
    return split_top(i.rest[start : i.rest.rindex(")")])


def _argument(i: Instruction, number: int) -> str:
    """One argument of a call as type and value, without attributes."""
    kind, value = first_type(_arguments_of(i)[number])
    value = re.sub(r"\b(?:noundef|nonnull|nocapture|readonly|writeonly|noalias|captures\([^)]*\)) ", "", value)
    value = re.sub(r"\b(?:align \d+|dereferenceable(?:_or_null)?\(\d+\)) ", "", value)
    return f"{kind} {value}"


def _block_accesses(i: Instruction) -> list[Access]:
    length = _argument(i, 2).split(" ")[-1]
    if not length.isdigit():
        raise CountIRError("the kernel copies a block whose length is not constant")
    found = [Access(i.line, _argument(i, 0), int(length), True)]
    if not i.callee.startswith("llvm.memset"):
        found.insert(0, Access(i.line, _argument(i, 1), int(length), False))
    return found
