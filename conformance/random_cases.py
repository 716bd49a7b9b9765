"""Random cases, biased towards what breaks caches: ties, extreme norms, tile edges, masks that hide tiles.

``random_case(seed, index)`` is a pure function of its arguments (splitmix64 of section 3.4 picks everything),
so a failing case is named by two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .cases import Case
from .inputs import Spec, hex_spec, load
from .oracle_codebook import codebook
from .oracle_codec import pack
from .oracle_numbers import DTYPES
from .oracle_rotation import SUPPORTED_DIMS, splitmix64
from .oracle_tokens import RING, packed_tiles

T = TypeVar("T")

BITS = (1, 2, 3, 4, 5, 6, 8)
LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    31,
    32,
    33,
    63,
    64,
    65,
    95,
    96,
    97,
    127,
    128,
    129,
    159,
    160,
    161,
    191,
    192,
    223,
    224,
    225,
)
LONG = (255, 256, 257, 287, 288, 289, 300, 319, 320, 352, 511, 545, 600)
VERY_LONG = (1023, 1024, 1025, 1026, 1056, 1151, 1152, 1153)
SMALL_DIMS = tuple(d for d in SUPPORTED_DIMS if d <= 48)
MIDDLE_DIMS = tuple(d for d in SUPPORTED_DIMS if 48 < d <= 128)
LARGE_DIMS = tuple(d for d in SUPPORTED_DIMS if 128 < d <= 256)


class Chooser:
    """A stream of choices from one splitmix64 stream."""

    def __init__(self, seed: int, index: int) -> None:
        self.state = splitmix64(seed, index)
        self.count = 0

    def word(self) -> int:
        self.count += 1
        return splitmix64(self.state, self.count)

    def below(self, n: int) -> int:
        return (self.word() >> 11) % n

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent


def random_case(seed: int, index: int) -> Case:
    """Case ``index`` of the stream ``seed``."""
    r = Chooser(seed, index)
    kind = r.below(100)
    if kind < 22:
        op, inputs = "quantize", _quantize(r)
    elif kind < 30:
        op, inputs = "dequantize", _dequantize(r)
    elif kind < 45:
        op, inputs = "tokens", _tokens(r)
    else:
        op, inputs = "attend", _attend(r)
    return {
        "id": f"random-{seed}-{index}",
        "group": f"random {op}",
        "comment": "random case",
        "flags": [],
        "op": op,
        "inputs": inputs,
    }


# ---- pieces --------------------------------------------------------------------------------------


def _dim(r: Chooser, largest: int = 1024) -> int:
    roll = r.below(100)
    if roll < 55:
        options: Sequence[int] = SMALL_DIMS
    elif roll < 88:
        options = MIDDLE_DIMS
    elif roll < 97:
        options = LARGE_DIMS
    else:
        options = SUPPORTED_DIMS
    return r.pick([d for d in options if d <= largest])


def _codec(r: Chooser, dim: int, prod_allowed: bool) -> dict[str, Any]:
    kind = "prod" if prod_allowed and r.chance(25) else "mse"
    bits = r.between(2, 6) if kind == "prod" else r.pick(BITS)
    return {"dim": dim, "bits": bits, "seed": r.pick([0, 1, r.below(1 << 31), (1 << 31) - 1]), "kind": kind}


def _exponent(r: Chooser, dtype: str) -> int:
    roll = r.below(100)
    if roll < 60:
        return r.between(-4, 4)
    if dtype == "float16":
        return r.between(-26, 15)
    if roll < 75:
        return r.between(-84, -76)
    return r.between(-150, 127)


def _data(r: Chooser, shape: list[int], dtype: str, bad_percent: int = 6) -> Spec:
    """Model vectors [..., T, D] with a few faults put in by edits."""
    roll = r.below(100)
    spec: Spec = {"dtype": dtype, "shape": shape, "seed": r.word() >> 1}
    if roll < 60:
        spec |= {"generator": "sum4", "exponent": _exponent(r, dtype)}
    elif roll < 75:
        # Small integers meet thresholds and halves exactly, and repeat themselves.
        top = r.pick([1, 2, 5, 100])
        spec |= {"generator": "integers", "low": -top, "high": top, "exponent": r.between(-6, 6)}
    elif roll < 88:
        spec |= {"generator": "patterns"}
    else:
        spec |= {"generator": "zeros"}
    edits: list[dict[str, Any]] = []
    lead = [None] * (len(shape) - 2)
    tokens, dim = shape[-2], shape[-1]
    for _ in range(r.pick([0, 0, 0, 1, 2, 4]) + (spec["generator"] == "zeros") * r.between(0, 6)):
        if tokens == 0:
            break
        start = r.below(tokens)
        span = [start, min(tokens, start + r.pick([1, 1, 2, 64]))]
        channel = r.below(dim)
        edits.append(
            r.pick(
                [
                    {"index": [*lead, span, None], "op": "set", "value": 0},
                    {"index": [*lead, span, channel], "op": "set", "value": r.pick([1, -1, 3.5, 1e-3, 6e4])},
                    {"index": [*lead, span, None], "op": "set", "value": r.pick([1, -0.0, 0.333251953125])},
                    {"index": [*lead, span, None], "op": "scale", "value": r.between(-20, 20)},
                    {"index": [*lead, None, channel], "op": "scale", "value": r.pick([-20, -6, -3, 3, 5, 8])},
                    {"index": [*lead, None, channel], "op": "set", "value": 0},
                    {"index": [*lead, None, channel], "op": "add", "value": r.pick([4, -32, 200])},
                ]
            )
        )
    if tokens and r.chance(bad_percent):
        edits.append(
            {
                "index": [*lead, r.below(tokens), r.below(dim)],
                "op": "set",
                "value": r.pick(["nan", "inf", "-inf"]),
            }
        )
    if edits:
        spec["edits"] = edits
    return spec


def _factors(r: Chooser, shape: list[int]) -> Spec:
    return {
        "generator": "integers",
        "low": r.pick([-3, 0]),
        "high": r.pick([3, 0]),
        "seed": r.word() >> 1,
        "dtype": "int8",
        "shape": shape,
    }


def _quantize(r: Chooser) -> dict[str, Any]:
    dim, dtype, base = _dim(r), r.pick(DTYPES), r.chance(50)
    length = 64 * r.pick([1, 1, 2, 3]) if base else r.pick([1, 2, 7, 33])
    lead = [r.pick([1, 2]), r.pick([1, 2])]
    return {
        "codec": _codec(r, dim, True),
        "x": _data(r, [*lead, length, dim], dtype, 15),
        "base": base,
        "factors": _factors(r, [*lead, dim]) if r.chance(40) else None,
        "dequantize": ["float32", r.pick(DTYPES)],
    }


def _dequantize(r: Chooser) -> dict[str, Any]:
    dim = _dim(r)
    codec = _codec(r, dim, True)
    base = r.chance(40)
    lead = [1, r.pick([1, 2]), 64 * r.pick([1, 2]) if base else r.pick([1, 5, 20])]

    def scales() -> Spec:
        spec: Spec = {"generator": "patterns", "dtype": "float16", "shape": lead, "seed": r.word() >> 1}
        # A codec never writes a negative scale.
        return spec | {"generator": "integers", "low": 0, "high": 2047, "exponent": r.between(-24, 4)}

    def words(bits: int) -> Spec:
        # Words are made by packing, so that spare bits are zero as the contract says.
        spec: Spec = {"generator": "integers", "dtype": "int16", "shape": [*lead, dim], "seed": r.word() >> 1}
        if bits == 8:
            return hex_spec(pack(load({**spec, "low": -127, "high": 127}), dim, 8), "uint32")
        index = load({**spec, "low": 0, "high": (1 << bits) - 1})
        return hex_spec(pack(np.array(codebook(dim, bits)[0])[index], dim, bits), "uint32")

    prod = codec["kind"] == "prod"
    out: dict[str, Any] = {
        "codec": codec,
        "words": words(codec["bits"] - prod),
        "scales": scales(),
        "dequantize": ["float32", r.pick(DTYPES)],
    }
    if r.chance(15):
        out["scales"]["edits"] = [{"index": [0, 0, r.below(lead[-1])], "op": "set", "value": "nan"}]
    if prod:
        out |= {"sign_words": words(1), "sign_scales": scales()}
        if "edits" in out["scales"]:
            out["sign_scales"]["edits"] = out["scales"]["edits"]
    if base:
        shape = [*lead[:-1], lead[-1] // 64]
        middle = r.between(-60, 100)
        out["base"] = {
            "generator": "integers",
            "low": -8192,
            "high": 8192,
            "dtype": "int16",
            "shape": [*shape, dim],
            "seed": r.word() >> 1,
        }
        out["base_exponent"] = {
            "generator": "integers",
            "low": middle - 5,
            "high": middle + 5,
            "dtype": "int16",
            "shape": shape,
            "seed": r.word() >> 1,
        }
    if r.chance(40):
        out["factors"] = _factors(r, [*lead[:-1], dim])
    return out


# ---- token stores --------------------------------------------------------------------------------


class Plan:
    """Steps that fill a store, with each row's length and from where its raw tokens are surely held."""

    def __init__(self, batch: int) -> None:
        self.steps: list[list[Any]] = []
        self.lengths = [0] * batch
        self.held = [0] * batch
        self.columns = 0

    def append(self, columns: int, counts: list[int] | None) -> None:
        self.steps.append(["append", columns, counts])
        self.columns += columns
        for b in range(len(self.lengths)):
            self.held[b] = max(self.held[b], self.lengths[b] - RING)
            self.lengths[b] += columns if counts is None else counts[b]

    def trim(self, amounts: int | list[int]) -> None:
        self.steps.append(["trim", amounts])
        for b in range(len(self.lengths)):
            self.lengths[b] -= amounts if isinstance(amounts, int) else amounts[b]
            self.held[b] = min(self.held[b], 64 * packed_tiles(self.lengths[b]))

    def exact_trim(self, amount: int) -> bool:
        """Whether a trim of every row by ``amount`` needs only raw tokens that are held."""
        return all(
            amount <= n and held <= 64 * packed_tiles(n - amount)
            for n, held in zip(self.lengths, self.held, strict=True)
        )

    def query_allowed(self, length: int) -> bool:
        """Whether ``length`` queries read only raw tokens that are held."""
        return all(
            held <= 64 * packed_tiles(max(0, n - length) + 1)
            for n, held in zip(self.lengths, self.held, strict=True)
        )


def _plan(r: Chooser, batch: int, longest: int, allow_trim: bool = True) -> Plan:
    plan = Plan(batch)
    ragged = batch > 1 and r.chance(50)
    style = r.below(4)
    left = longest
    while left > 0:
        if style == 0:
            chunk = left
        elif style == 1:
            chunk = min(left, r.pick([64, 96, 97, 128, 200]))
        elif style == 2:
            chunk = max(1, left - r.between(1, 5)) if left > 6 else 1
        else:
            chunk = min(left, r.between(1, max(1, longest // 2)))
        counts = None
        if ragged:
            counts = [chunk if r.chance(50) else r.between(0, chunk) for _ in range(batch)]
            counts[r.below(batch)] = chunk
        plan.append(chunk, counts)
        left -= chunk
        if allow_trim and r.chance(12):
            amount = r.pick([1, 3, 31, 32, r.between(1, 90)])
            if plan.exact_trim(amount):
                plan.trim(amount)
                if r.chance(70):
                    plan.append(amount, None)
            elif ragged and plan.exact_trim(0):
                amounts = [min(n, r.between(0, 32)) for n in plan.lengths]
                if all(
                    h <= 64 * packed_tiles(n - a)
                    for n, h, a in zip(plan.lengths, plan.held, amounts, strict=True)
                ):
                    plan.trim(amounts)
    return plan


def _length(r: Chooser) -> int:
    roll = r.below(100)
    return r.pick(LENGTHS if roll < 68 else LONG if roll < 97 else VERY_LONG)


def _store(
    r: Chooser, role: str, batch: int, heads: int, dim: int, dtype: str, columns: int
) -> dict[str, Any]:
    return {
        "codec": _codec(r, dim, role == "key"),
        "role": role,
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "factors": _factors(r, [batch, heads, dim]) if role == "key" and r.chance(15) else None,
        "data": _data(r, [batch, heads, columns, dim], dtype),
    }


def _tokens(r: Chooser) -> dict[str, Any]:
    batch, heads = r.pick([1, 1, 2, 3]), r.pick([1, 2])
    plan = _plan(r, batch, _length(r))
    store = _store(r, r.pick(["key", "value"]), batch, heads, _dim(r, 256), r.pick(DTYPES), plan.columns)
    return {"store": store, "steps": plan.steps, "plain": r.pick(DTYPES)}


def _attend(r: Chooser) -> dict[str, Any]:
    batch, heads = r.pick([1, 1, 2, 3]), r.pick([1, 1, 2, 3])
    per = r.pick([1, 1, 2, 3, 4, 8] if r.chance(96) else [16, 64, 128])
    plan = _plan(r, batch, _length(r))
    length = r.pick([1, 1, 1, 2, 4, 5, 8, 17, 33, min(100, plan.columns)])
    if not plan.query_allowed(length):
        length = 1
    dim = _dim(r, 256)
    value_dim = dim if r.chance(60) else _dim(r, 256)
    dtype = r.pick(DTYPES)
    q_dtype = dtype if r.chance(75) else r.pick(DTYPES)
    if r.chance(25):
        # One logit for all tokens: every rounding of the weights then shows in the sums.
        q: Spec = {"generator": "zeros", "dtype": q_dtype, "shape": [batch, heads * per, length, dim]}
    else:
        q = _data(r, [batch, heads * per, length, dim], q_dtype, 4)
    pads = None
    if r.chance(40):
        longest = max(plan.lengths)
        pads = [longest - n for n in plan.lengths]
        if r.chance(30):
            pads = [p + 3 for p in pads]
    columns = max(n + (pads[b] if pads else 0) for b, n in enumerate(plan.lengths))
    return {
        "keys": _store(r, "key", batch, heads, dim, dtype, plan.columns),
        "values": _store(r, "value", batch, heads, value_dim, dtype, plan.columns),
        "steps": plan.steps,
        "q": q,
        "scale": r.pick([dim**-0.5, dim**-0.5, 1.0, 0.0625, 1e-6, 300.0]),
        "mask": _mask(r, batch, heads, per, length, columns),
        "sinks": _sinks(r, heads * per) if r.chance(30) else None,
        "window": r.pick([1, 2, 31, 64, 65, 100, 128, 1000]) if r.chance(30) else None,
        "left_padding": pads,
        "scores": r.chance(60),
        "arrays": r.chance(25),
    }


def _mask(r: Chooser, batch: int, heads: int, per: int, length: int, columns: int) -> Any:
    roll = r.below(100)
    if roll < 25 or columns == 0:
        return None
    if roll < 50:
        return "causal"
    rank = r.between(0, 5)
    full = [batch, heads, per, length, columns] if rank == 5 else [batch, heads * per, length, columns]
    shape = [n if r.chance(70) else 1 for n in full[len(full) - rank :]]
    dtype = "bool" if r.chance(50) else r.pick(DTYPES)
    spec: Spec = {"dtype": dtype, "shape": shape, "seed": r.word() >> 1}
    if dtype == "bool":
        spec |= {"generator": "integers", "low": 0, "high": r.pick([1, 3, 20, 1000])}
    else:
        spec |= {"generator": "sum4", "exponent": r.pick([-14, 0, 4, 10])}
    edits: list[dict[str, Any]] = []
    hidden: float | str = 0 if dtype == "bool" else "-inf"
    if rank and shape[-1] > 1:
        lead: list[Any] = [None] * (rank - 1)
        for _ in range(r.between(0, 3)):
            # Hides tiles, prefixes, or all but a few tokens.
            start = r.pick([0, 0, 4, 64 * r.below(columns // 64 + 1), r.below(columns)])
            stop = r.pick([columns, min(columns, start + 64), min(columns, start + 128)])
            edits.append({"index": [*lead, [start, stop]], "op": "set", "value": hidden})
        if r.chance(15) and rank >= 2:
            edits.append({"index": [*lead[:-1], r.below(shape[-2]), None], "op": "set", "value": hidden})
        if dtype != "bool" and r.chance(25):
            extremes: list[float | str] = ["nan", "inf", 1e30, -1e30, -65504]
            odd = r.pick(extremes)
            edits.append({"index": [*lead, r.below(columns)], "op": "set", "value": odd})
    elif not rank and r.chance(10):
        edits.append({"index": [], "op": "set", "value": hidden})
    if edits:
        spec["edits"] = edits
    return spec


def _sinks(r: Chooser, heads: int) -> Spec:
    edits = [
        {"index": [r.below(heads)], "op": "set", "value": r.pick(["-inf", 0, 8, -30, 1e30, "inf", 60000])}
        for _ in range(r.between(0, 3))
    ]
    if r.chance(5):
        edits.append({"index": [r.below(heads)], "op": "set", "value": "nan"})
    return {
        "generator": "sum4",
        "exponent": r.pick([0, 2]),
        "seed": r.word() >> 1,
        "dtype": r.pick(DTYPES),
        "shape": [heads],
        "edits": edits,
    }
