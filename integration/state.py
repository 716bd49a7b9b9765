"""Tokens as flat arrays and strings, and back, bit for bit.

mlx-vlm stores a cache as ``state`` (a tree of arrays) and ``meta_state`` (strings). A side of the cache (keys or
values) becomes the tuple of its non-empty arrays, in the order of `FIELDS`, and one JSON string with everything else:
codec, role, lengths, the order of the arrays, and shape and dtype of those that are empty (safetensors files cannot
hold an array without elements). Nothing in it depends on the backend.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .guard import Functions

FORMAT = "turboquant-vlm"
VERSION = "1"  # of this layout and of the numerics contract whose codes it holds

_OWN = ("first", "recent")


def _arrays(tokens: Any) -> dict[str, mx.array]:
    """Every array of ``tokens`` by name, in a fixed order."""
    named = {name: getattr(tokens, name) for name in _OWN}
    for field in dataclasses.fields(tokens.packed):
        value = getattr(tokens.packed, field.name)
        if isinstance(value, mx.array):
            named[field.name] = value
    return named


def arrays_of(tokens: Any) -> list[mx.array]:
    """The arrays that ``state`` holds: all that have elements."""
    return [array for array in _arrays(tokens).values() if array.size]


def describe(tokens: Any) -> str:
    """JSON for `rebuild`: all of ``tokens`` but the contents of its arrays."""
    codec = tokens.codec
    fields = [
        [name, None if array.size else [list(array.shape), str(array.dtype).split(".")[-1]]]
        for name, array in _arrays(tokens).items()
    ]
    batch, heads = tokens.recent.shape[:2]
    return json.dumps(
        {
            "codec": [codec.dim, codec.bits, codec.seed, codec.kind],
            "role": tokens.role,
            "lengths": list(tokens.lengths),
            "held": list(tokens.held),
            "factors_given": tokens.factors_given,
            "shape": [batch, heads],
            "dtype": str(tokens.recent.dtype).split(".")[-1],
            "fields": fields,
        },
        separators=(",", ":"),
    )


def rebuild(arrays: Sequence[mx.array], description: str, backend: Functions) -> Any:
    """Tokens from the arrays of `arrays_of` and the text of `describe`. ValueError if the two do not fit."""
    spec = json.loads(description)
    dim, bits, seed, kind = spec["codec"]
    codec = backend.make_codec(dim, bits, seed=seed, kind=kind)
    batch, heads = spec["shape"]
    blank = backend.empty_tokens(codec, spec["role"], batch, heads, getattr(mx, spec["dtype"]))
    filled = [name for name, empty in spec["fields"] if empty is None]
    if len(filled) != len(arrays):
        raise ValueError(f"TurboQuant state needs {len(filled)} arrays ({', '.join(filled)}); got {len(arrays)}")
    given = iter(arrays)
    named: dict[str, mx.array] = {}
    for name, empty in spec["fields"]:
        named[name] = next(given) if empty is None else mx.zeros(empty[0], getattr(mx, empty[1]))
    own = {name: named.pop(name) for name in _OWN}
    packed_names = {field.name for field in dataclasses.fields(blank.packed)}
    return dataclasses.replace(
        blank,
        lengths=tuple(spec["lengths"]),
        held=tuple(spec["held"]),
        factors_given=spec["factors_given"],
        packed=dataclasses.replace(blank.packed, **{name: named.get(name) for name in packed_names}),
        **own,
    )


def check_version(meta: Sequence[str]) -> None:
    """ValueError unless ``meta`` was written by this format and version."""
    found = tuple(meta[:2])
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"this cache state was written by {' version '.join(map(str, found)) or 'nothing known'!r}; "
            f"expected {FORMAT} version {VERSION}. Recompute the prompt, or read it with the version that wrote it."
        )
