"""Input arrays of vectors: pinned generators and hex words, independent of any library's random numbers.

An array spec is a JSON object with ``shape``, ``dtype`` ("float16", "bfloat16", "float32", "int8", "int16",
"uint32" or "bool") and either

- ``hex``: the words, row-major, each as 2, 4 or 8 hex digits (bool: one digit), or
- ``generator``, one of the following, where word i is word i (row-major) of splitmix64 (section 3.4) from
  state ``seed``:
  - ``"zeros"``;
  - ``"sum4"``: (sum of the four 16-bit fields of the word - 131070) 2^(exponent - 15), close to a Gaussian of
    deviation 1.15;
  - ``"integers"``: (low + word mod (high - low + 1)) 2^exponent;
  - ``"one_hot"``: row t of [..., T, D] is 2^exponent at coordinate positions[t mod len(positions)], else 0;
    no seed;
  - ``"patterns"``: the low bits of the word as a bit pattern of the dtype; where that would be NaN or
    infinite, the top exponent bit is cleared;

then ``edits``, a list applied in order, in float32: ``{"index": [...], "op": "set" | "add" | "scale",
"value": v}``. An index entry is an integer, ``[start, stop]`` or null (all). "scale" multiplies by 2^value. v
may be "nan", "inf" or "-inf". At the end float32 is rounded to the dtype (nearest, halves to even); for bool
every non-zero value is true.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .compare import WORD_BITS
from .oracle_numbers import DTYPES, Array, cast, widen
from .oracle_rotation import GOLDEN

Spec = dict[str, Any]


def splitmix_words(seed: int, count: int) -> Array:
    """Words 0 .. count-1 of splitmix64 from state ``seed``, uint64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def load(spec: Spec) -> Array:
    """The array of a spec: float32 values for float dtypes, int64 for integers, bool for bool."""
    dtype, shape = spec["dtype"], tuple(spec["shape"])
    if "hex" in spec:
        return _from_hex(spec["hex"], dtype, shape)
    values = _generate(spec, prod(shape)).reshape(shape)
    for edit in spec.get("edits", ()):
        where = tuple(
            slice(None) if i is None else slice(*i) if isinstance(i, list) else i for i in edit["index"]
        )
        amount = edit["value"]
        with np.errstate(over="ignore", invalid="ignore"):
            if edit["op"] == "set":
                values[where] = np.float32(float(amount))
            elif edit["op"] == "add":
                values[where] = values[where] + np.float32(float(amount))
            elif edit["op"] == "scale":
                values[where] = np.ldexp(values[where], int(amount))
            else:
                raise ValueError(f"edit op must be set, add or scale; got {edit['op']!r}")
    if dtype == "bool":
        return values != 0
    if dtype in DTYPES:
        return widen(cast(values, dtype), dtype)
    return values.astype(np.int64)


def _from_hex(text: str, dtype: str, shape: tuple[int, ...]) -> Array:
    digits = 1 if dtype == "bool" else WORD_BITS[dtype] // 4
    words = np.array([int(text[i : i + digits], 16) for i in range(0, len(text), digits)], np.int64).reshape(
        shape
    )
    if dtype == "bool":
        return words != 0
    if dtype in DTYPES:
        return widen(words.astype(np.uint32 if dtype == "float32" else np.uint16), dtype)
    bits = WORD_BITS[dtype]
    return (
        np.where(words >> (bits - 1) == 1, words - (1 << bits), words) if dtype.startswith("int") else words
    )


def _generate(spec: Spec, count: int) -> Array:
    kind = spec["generator"]
    if kind == "zeros":
        return np.zeros(count, np.float32)
    exponent = spec.get("exponent", 0)
    if kind == "one_hot":
        rows, positions = spec["shape"][-2], spec["positions"]
        hot = np.zeros((rows, spec["shape"][-1]), np.float32)
        hot[np.arange(rows), np.array(positions)[np.arange(rows) % len(positions)]] = np.ldexp(1.0, exponent)
        return np.broadcast_to(hot, spec["shape"]).copy()
    words = splitmix_words(spec["seed"], count)
    if kind == "sum4":
        fields = [(words >> np.uint64(16 * i)).astype(np.int64) & 0xFFFF for i in range(4)]
        total = fields[0] + fields[1] + fields[2] + fields[3] - 131070
        with np.errstate(over="ignore"):
            return np.ldexp(total.astype(np.float64), exponent - 15).astype(np.float32)
    if kind == "integers":
        low, high = spec["low"], spec["high"]
        drawn = (words % np.uint64(high - low + 1)).astype(np.int64) + low
        return np.ldexp(drawn.astype(np.float64), exponent).astype(np.float32)
    if kind == "patterns":
        dtype = spec["dtype"]
        bits, field, top = {
            "float16": (16, 0x7C00, 0x4000),
            "bfloat16": (16, 0x7F80, 0x4000),
            "float32": (32, 0x7F800000, 0x40000000),
        }[dtype]
        pattern = words.astype(np.int64) & ((1 << bits) - 1)
        pattern = np.where(pattern & field == field, pattern & ~top, pattern)
        return widen(pattern.astype(np.uint32 if bits == 32 else np.uint16), dtype)
    raise ValueError(f"generator must be zeros, sum4, integers, one_hot or patterns; got {kind!r}")


def hex_spec(words: Array, dtype: str) -> Spec:
    """A spec that holds ``words`` literally."""
    digits = 1 if dtype == "bool" else WORD_BITS[dtype] // 4
    mask = (1 << (4 * digits)) - 1
    text = "".join(f"{int(w) & mask:0{digits}x}" for w in np.asarray(words).ravel())
    return {"dtype": dtype, "shape": list(np.shape(words)), "hex": text}


def words_of(spec: Spec, values: Array) -> Array:
    """The raw words of a loaded array, for handing to a backend."""
    dtype = spec["dtype"]
    return cast(values, dtype) if dtype in DTYPES else values
