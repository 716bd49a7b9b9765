"""Bitwise comparison of arrays, and what to say about the first difference.

Two arrays are equal when dtype, shape and every word are equal, except that all NaNs of one float dtype count
as one value. +0 and -0 are different words and therefore different.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .oracle_numbers import Array, widen

WORD_BITS = {
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "uint32": 32,
    "int32": 32,
    "int16": 16,
    "int8": 8,
}
#: Longer arrays of a vector are kept as a digest; the oracle gives the words when a digest differs.
HEX_LIMIT = 400
_QUIET_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}


@dataclass(frozen=True)
class Words:
    """An array as raw words: ``words`` is uint8, uint16 or uint32, ``dtype`` what they mean."""

    dtype: str
    words: Array

    @staticmethod
    def of(dtype: str, values: Array) -> Words:
        """Integers (wrapped to the width of an integer ``dtype``) or ready words of a float ``dtype``."""
        bits = WORD_BITS[dtype]
        unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
        wide = np.asarray(values).astype(np.int64) & ((1 << bits) - 1)
        return Words(dtype, wide.astype(unsigned))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.words.shape)

    def value(self, index: tuple[int, ...]) -> float | int:
        word = self.words[index]
        if self.dtype in _INFINITY:
            return float(widen(np.array([word]), self.dtype)[0])
        bits = WORD_BITS[self.dtype]
        signed = (
            int(word) - (1 << bits) if self.dtype.startswith("int") and int(word) >> (bits - 1) else int(word)
        )
        return signed

    def hex(self) -> str:
        """All words, row-major, with every NaN written as the quiet positive one."""
        digits = WORD_BITS[self.dtype] // 4
        quiet = _QUIET_NAN.get(self.dtype, 0)
        return "".join(f"{int(w) if w >= 0 else quiet:0{digits}x}" for w in _canonical(self).ravel())

    def sha256(self) -> str:
        """Digest of the text of :meth:`hex`."""
        return hashlib.sha256(self.hex().encode()).hexdigest()

    def to_json(self, longest: int = HEX_LIMIT) -> dict[str, Any]:
        """``hex`` words, or their ``sha256`` if there are more than ``longest``."""
        head: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        return head | ({"hex": self.hex()} if self.words.size <= longest else {"sha256": self.sha256()})

    @staticmethod
    def from_json(data: dict[str, Any]) -> Words:
        """The inverse of :meth:`to_json` for arrays given as hex words."""
        dtype, shape, text = data["dtype"], data["shape"], data["hex"]
        digits = WORD_BITS[dtype] // 4
        words = np.array([int(text[i : i + digits], 16) for i in range(0, len(text), digits)], np.int64)
        return Words.of(dtype, words.reshape(shape))


@dataclass(frozen=True)
class Difference:
    """Where and how two arrays differ; ``str()`` is the line shown to people."""

    name: str
    reason: str
    index: tuple[int, ...] | None = None
    count: int = 0
    total: int = 0

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.name}: {self.reason}"
        where = f"{self.name}[{', '.join(map(str, self.index))}]"
        return f"{where}: {self.reason}; {self.count} of {self.total} elements differ"


def _canonical(a: Words) -> Array:
    words = a.words.astype(np.int64)
    infinity = _INFINITY.get(a.dtype)
    if infinity is None:
        return words
    sign = 1 << (WORD_BITS[a.dtype] - 1)
    return np.where((words & (sign - 1)) > infinity, -1, words)


def compare(name: str, expected: Words, got: Words) -> Difference | None:
    """The first difference in row-major order, or None."""
    if expected.dtype != got.dtype:
        return Difference(name, f"expected dtype {expected.dtype}, got {got.dtype}")
    if expected.shape != got.shape:
        return Difference(name, f"expected shape {list(expected.shape)}, got {list(got.shape)}")
    differs = _canonical(expected) != _canonical(got)
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    digits = WORD_BITS[expected.dtype] // 4

    def show(a: Words) -> str:
        return f"0x{int(a.words[index]):0{digits}x} ({a.value(index)!r})"

    return Difference(
        name, f"expected {show(expected)}, got {show(got)}", index, int(differs.sum()), differs.size
    )
