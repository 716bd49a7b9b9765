"""What the kernels look up: signs, Paley rows and centroids of a codec, in the structure of `src/codec.h`."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from turboquant_vlm.reference.codebook import boundary_constant, centroids_ascending, magnitudes
from turboquant_vlm.reference.packing import words_per_vector
from turboquant_vlm.reference.rotation import hadamard, random_signs
from turboquant_vlm.reference.types import Codec

from ..tables import order

__all__ = ["CodecTables", "codec_tables"]


class CodecTables(ctypes.Structure):
    """`tq::Codec` of the kernels; `codec_tables` makes it and keeps its arrays."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dim", "bits", "prod", "paley", "blocks", "words", "sign_words")),
        *((name, ctypes.c_int32) for name in ("scale_shift", "sign_scale_shift", "boundary")),
        *((name, ctypes.c_void_p) for name in ("signs", "sign_signs", "rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("row_counts", "column_counts", "ascending", "by_code")),
    )


@cache
def codec_tables(codec: Codec) -> CodecTables:
    """The tables of a codec. Its address stays good for the life of the process."""
    m, k = order(codec.dim)
    # The first column of every block of 2^k is P_m itself: S_k starts with a one.
    paley = hadamard(codec.dim)[:: 1 << k, :: 1 << k] > 0
    rows, row_counts = _where(paley)
    columns, column_counts = _where(paley.T)
    bits = codec.code_bits
    if bits == 8:
        boundary, ascending, by_code = 0, np.zeros(1, np.int32), np.zeros(1, np.int32)
    else:
        positive = magnitudes(codec.dim, bits)
        boundary, ascending = boundary_constant(codec.dim, bits), centroids_ascending(codec.dim, bits)
        by_code = np.concatenate([positive, -positive])
    arrays = {
        "signs": random_signs(codec.dim, codec.seed).astype(np.int32) >> 1,  # 1 to 0, -1 to -1
        "sign_signs": random_signs(codec.dim, codec.seed, stream=1).astype(np.int32) >> 1,
        "rows": rows,
        "columns": columns,
        "row_counts": row_counts,
        "column_counts": column_counts,
        "ascending": np.ascontiguousarray(ascending, np.int32),
        "by_code": np.ascontiguousarray(by_code, np.int32),
    }
    tables = CodecTables(
        dim=codec.dim,
        bits=bits,
        prod=int(codec.kind == "prod"),
        paley=m,
        blocks=1 << k,
        words=words_per_vector(codec.dim, bits),
        sign_words=words_per_vector(codec.dim, 1),
        scale_shift=codec.scale_shift,
        sign_scale_shift=codec.sign_scale_shift,
        boundary=boundary,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    tables.arrays = tuple(arrays.values())
    return tables


def _where(positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [m, m]: where each row is true, the rest zeros; int32 [m]: how often that is."""
    found = np.zeros(positive.shape, np.uint8)
    for row, to in zip(positive, found, strict=True):
        columns = np.flatnonzero(row)
        to[: columns.size] = columns
    return found, positive.sum(axis=1).astype(np.int32)
