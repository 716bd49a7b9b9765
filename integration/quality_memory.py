"""What a cache holds, counted on real caches.

Keys and values are appended in chunks and then one token at a time, as a prefill and a decode do, so that the ring of
young tokens has its decoding size. Every array is counted: words, scales, key bases with their exponents, channel
factors, first tokens, ring. A float16 cache of the same tokens holds 2 bytes a coordinate; mlx-vlm's allocates up to
255 tokens more, which is not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .. import reference
from .weights import Log, say

DIMS = (64, 128, 256)
LENGTHS = (600, 2_000, 8_192, 65_536)
CHUNK = 2_048
KEY_BITS, VALUE_BITS = 4, 3
"""What 3.5 bits means."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one kv head of one row, keys and values together.

    parts: bytes of each kind of array. saved: what is saved against float16, 0 .. 1.
    """

    dim: int
    tokens: int
    parts: dict[str, int]
    float16: int

    @property
    def held(self) -> int:
        return sum(self.parts.values())

    @property
    def saved(self) -> float:
        return 1 - self.held / self.float16


def measure_memory(dims: tuple[int, ...] = DIMS, lengths: tuple[int, ...] = LENGTHS, log: Log = say) -> list[Memory]:
    """Build a cache of every head size and length at 4-bit keys and 3-bit values, and count."""
    measured = []
    for dim in dims:
        for tokens in lengths:
            parts: dict[str, int] = {}
            for role, bits in (("key", KEY_BITS), ("value", VALUE_BITS)):
                for name, size in _parts(_filled(dim, bits, role, tokens)).items():
                    parts[name] = parts.get(name, 0) + size
            measured.append(Memory(dim, tokens, parts, float16=2 * 2 * dim * tokens))
            log(f"Memory: D={dim}, {tokens} tokens: {100 * measured[-1].saved:.2f} % saved")
    return measured


def _filled(dim: int, bits: int, role: str, tokens: int) -> reference.Tokens:
    """One row and head of random tokens (sizes do not depend on them), the last one appended alone."""
    codec = reference.make_codec(dim, bits)
    held = reference.empty_tokens(codec, "key" if role == "key" else "value", 1, 1, mx.float16)
    chunks = [min(CHUNK, tokens - 1 - start) for start in range(0, tokens - 1, CHUNK)]
    for number, chunk in enumerate([*chunks, 1]):
        held = reference.append(held, mx.random.normal((1, 1, chunk, dim), mx.float16, key=mx.random.key(number)))
        # Otherwise the graph of all chunks is held at once.
        mx.eval(held.recent, held.first, *held.packed.arrays().values())
    assert held.lengths == (tokens,)
    return held


def _parts(tokens: reference.Tokens) -> dict[str, int]:
    parts = {name: array.nbytes for name, array in tokens.packed.arrays().items()}
    parts["first"] = tokens.first.nbytes
    parts["ring"] = tokens.recent.nbytes
    assert sum(parts.values()) == tokens.nbytes
    return parts
