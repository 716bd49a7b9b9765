"""Short ways to write a vector: specs, stores and cases as plain dictionaries (schema: :mod:`cases`)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

from .cases import FLAGS, Case
from .inputs import Spec, hex_spec
from .oracle_numbers import Array, cast

#: With this softmax scale the query factor a of section 4 is exactly 1, so logits can be set by hand.
UNIT_SCALE = 0.6931471805599453


def sum4(
    seed: int, *shape: int, dtype: str = "float32", exponent: int = 0, edits: list[Any] | None = None
) -> Spec:
    return _spec("sum4", dtype, shape, edits, seed=seed, exponent=exponent)


def integers(
    seed: int,
    low: int,
    high: int,
    *shape: int,
    dtype: str = "float32",
    exponent: int = 0,
    edits: list[Any] | None = None,
) -> Spec:
    return _spec("integers", dtype, shape, edits, seed=seed, low=low, high=high, exponent=exponent)


def patterns(seed: int, *shape: int, dtype: str = "float32", edits: list[Any] | None = None) -> Spec:
    return _spec("patterns", dtype, shape, edits, seed=seed)


def zeros(*shape: int, dtype: str = "float32", edits: list[Any] | None = None) -> Spec:
    return _spec("zeros", dtype, shape, edits)


def one_hot(positions: list[int], *shape: int, dtype: str = "float32", exponent: int = 0) -> Spec:
    return _spec("one_hot", dtype, shape, None, positions=positions, exponent=exponent)


def literal(values: Any, dtype: str = "float32") -> Spec:
    """Hex words of float values (rounded to ``dtype``) or of booleans or integers."""
    if dtype in ("float16", "bfloat16", "float32"):
        return hex_spec(cast(np.asarray(values, np.float32), dtype), dtype)
    return hex_spec(np.asarray(values), dtype)


def compact(values: Any, dtype: str = "float32") -> Spec:
    """Like :func:`literal`, or zeros with one edit per run of equal values along T if that is shorter."""
    a = np.asarray(values, np.float32)
    edits: list[Any] = []
    for lead in np.ndindex(*a.shape[:-2]):
        for d in range(a.shape[-1]):
            column = a[(*lead, slice(None), d)]
            edges = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), len(column)]
            for start, stop in itertools.pairwise(edges):
                if column[start] != 0:
                    edits.append(put(float(column[start]), *lead, [start, stop], d))
    sparse = zeros(*a.shape, dtype=dtype, edits=edits)
    full = literal(a, dtype)
    return min(sparse, full, key=lambda spec: len(json.dumps(spec)))


def _spec(kind: str, dtype: str, shape: tuple[int, ...], edits: list[Any] | None, **more: Any) -> Spec:
    spec: Spec = {"generator": kind, **more, "dtype": dtype, "shape": list(shape)}
    if edits:
        spec["edits"] = edits
    return spec


def put(value: float | str, *index: Any) -> dict[str, Any]:
    return {"index": list(index), "op": "set", "value": value}


def add(value: float, *index: Any) -> dict[str, Any]:
    return {"index": list(index), "op": "add", "value": value}


def scale_by(power: int, *index: Any) -> dict[str, Any]:
    return {"index": list(index), "op": "scale", "value": power}


def codec(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> dict[str, Any]:
    return {"dim": dim, "bits": bits, "seed": seed, "kind": kind}


class Group:
    """Collects the vectors of one group, in order, refusing a repeated id or an unknown flag."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def add(
        self, name: str, comment: str, flags: str, op: str, inputs: dict[str, Any], quick: bool = False
    ) -> None:
        case: Case = {
            "id": f"{self.name}/{name}",
            "group": self.name,
            "comment": comment,
            "flags": flags.split(),
            "op": op,
            "inputs": inputs,
        }
        unknown = set(case["flags"]) - FLAGS
        if unknown:
            raise ValueError(f"unknown flags {sorted(unknown)} in {case['id']}")
        if any(c["id"] == case["id"] for c in self.cases):
            raise ValueError(f"two vectors are called {case['id']}")
        if quick:
            case["quick"] = True
        self.cases.append(case)

    def quantize(
        self,
        name: str,
        comment: str,
        flags: str,
        spec: dict[str, Any],
        x: Spec,
        base: bool = False,
        factors: Spec | None = None,
        dequantize: tuple[str, ...] = (),
        quick: bool = False,
    ) -> None:
        inputs = {"codec": spec, "x": x, "base": base, "factors": factors, "dequantize": list(dequantize)}
        self.add(name, comment, flags, "quantize", inputs, quick)

    def attend(
        self,
        name: str,
        comment: str,
        flags: str,
        keys: dict[str, Any],
        values: dict[str, Any],
        q: Spec,
        *,
        steps: list[list[Any]] | None = None,
        scale: float | None = None,
        mask: Any = None,
        sinks: Spec | None = None,
        window: int | None = None,
        left_padding: list[int] | None = None,
        scores: bool = False,
        arrays: bool = False,
        quick: bool = False,
    ) -> None:
        columns = keys["data"]["shape"][2]
        inputs = {
            "keys": keys,
            "values": values,
            "steps": steps if steps is not None else [["append", columns, None]],
            "q": q,
            "scale": q["shape"][-1] ** -0.5 if scale is None else scale,
            "mask": mask,
            "sinks": sinks,
            "window": window,
            "left_padding": left_padding,
            "scores": scores,
            "arrays": arrays,
        }
        self.add(name, comment, flags, "attend", inputs, quick)


def store(
    role: str, bits: int, data: Spec, seed: int = 0, kind: str = "mse", factors: Spec | None = None
) -> dict[str, Any]:
    """A store whose batch, heads, dtype and head size are those of ``data`` [B, H, columns, D]."""
    batch, heads, _, dim = data["shape"]
    return {
        "codec": codec(dim, bits, seed, kind),
        "role": role,
        "dtype": data["dtype"],
        "batch": batch,
        "heads": heads,
        "factors": factors,
        "data": data,
    }


def keys_of(bits: int, data: Spec, **more: Any) -> dict[str, Any]:
    return store("key", bits, data, **more)


def values_of(bits: int, data: Spec, **more: Any) -> dict[str, Any]:
    return store("value", bits, data, **more)


def steps(*columns: int) -> list[list[Any]]:
    """Appends of so many columns each, all real."""
    return [["append", n, None] for n in columns]


def one_hot_values(values: list[float], dim: int, at: int = 0) -> Array:
    """Rows [T, dim] that hold ``values`` in coordinate ``at`` only."""
    out = np.zeros((len(values), dim), np.float32)
    out[:, at] = values
    return out
