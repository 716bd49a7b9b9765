"""What a kernel looks up: signs, centroid magnitudes, Paley rows and softmax weights of a codec, in one buffer.

Kernel text holds the same offsets as constants (`OFFSETS`), so that one text serves every seed.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from turboquant_vlm.reference.attention import WEIGHT_HIGH, WEIGHT_LOW
from turboquant_vlm.reference.codebook import boundary_constant, magnitudes
from turboquant_vlm.reference.rotation import hadamard, random_signs, split_order
from turboquant_vlm.reference.types import Codec

OFFSETS = {
    "TQ_SIGNS": 0,
    "TQ_SIGN_CODE_SIGNS": 32,
    "TQ_MAGNITUDES": 64,
    "TQ_BOUNDARY": 72,
    "TQ_WEIGHTS": 80,
    "TQ_PALEY": 144,
}
"""Where each table starts, in words of 32 bits; the columns of P_m (`TQ_PALEY_BACK`) follow its rows."""


@cache
def codec_tables(codec: Codec) -> mx.array:
    """uint32 [words]: the tables of a codec, at `OFFSETS`."""
    m, k = order(codec.dim)
    table = np.zeros(OFFSETS["TQ_PALEY"], np.uint32)
    _place(table, "TQ_SIGNS", _bit_rows(random_signs(codec.dim, codec.seed)[None] < 0))
    _place(table, "TQ_SIGN_CODE_SIGNS", _bit_rows(random_signs(codec.dim, codec.seed, stream=1)[None] < 0))
    if codec.code_bits != 8:
        values = np.asarray(magnitudes(codec.dim, codec.code_bits), np.uint8)
        packed = np.zeros(-(-values.size // 4) * 4, np.uint8)
        packed[: values.size] = values
        _place(table, "TQ_MAGNITUDES", packed.view("<u4"))
        table[OFFSETS["TQ_BOUNDARY"]] = boundary_constant(codec.dim, codec.code_bits)
    weights = np.asarray(WEIGHT_HIGH, np.uint32) | (np.asarray(WEIGHT_LOW, np.uint32) << 16)
    _place(table, "TQ_WEIGHTS", weights)
    # The first column of every block of 2^k is P_m itself: S_k starts with a one.
    paley = hadamard(codec.dim)[:: 1 << k, :: 1 << k] < 0
    rows, columns = _bit_rows(paley), _bit_rows(paley.T)
    return mx.array(np.concatenate([table, rows, columns]) if m > 1 else np.concatenate([table, rows, rows]))


def order(dim: int) -> tuple[int, int]:
    """(m, k) of the Hadamard matrix of a supported head size."""
    found = split_order(dim)
    if found is None:
        raise ValueError(f"TurboQuant has no Hadamard matrix for dim={dim}")
    return found


def _place(table: np.ndarray, name: str, values: np.ndarray) -> None:
    start = OFFSETS[name]
    table[start : start + values.size] = values.reshape(-1)


def _bit_rows(bits: np.ndarray) -> np.ndarray:
    """Rows of booleans as words of 32 bits each, lowest bit first, rows one after the other."""
    rows, columns = bits.shape
    padded = np.zeros((rows, -(-columns // 32) * 32), np.uint8)
    padded[:, :columns] = bits
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").reshape(-1)
