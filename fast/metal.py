"""The target "metal": the public functions of `turboquant_vlm.reference` with the same bits, as Metal kernels."""

from turboquant_vlm.reference import (
    ALLOWED_BITS,
    FIRST,
    LAG,
    RING,
    TILE,
    Codec,
    Packed,
    Tokens,
    make_codec,
    measure_factors,
    packed_tiles,
    supported_dim,
    supported_dims,
    words_per_vector,
)

from .attention import attend, scores
from .codec import dequantize, quantize
from .kernels import kernels_started as kernels_started
from .tokens import append, append_pair, empty_tokens, raw_tokens, select_rows, stack_rows, trim

__all__ = [
    "ALLOWED_BITS",
    "FIRST",
    "LAG",
    "RING",
    "TILE",
    "Codec",
    "Packed",
    "Tokens",
    "append",
    "append_pair",
    "attend",
    "dequantize",
    "empty_tokens",
    "make_codec",
    "measure_factors",
    "packed_tiles",
    "quantize",
    "raw_tokens",
    "scores",
    "select_rows",
    "stack_rows",
    "supported_dim",
    "supported_dims",
    "trim",
    "words_per_vector",
]
