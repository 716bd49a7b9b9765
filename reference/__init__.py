"""TurboQuant as readable array code: the algorithm of docs/numerics.md, one idea a module.

Read in this order: `integers` (why results are exact), `rotation`, `codebook`, `packing`, `codec` (vectors to codes),
`tokens` (what a cache holds), `query`, `masks`, `attention`, `profile`.  The functions exported here are the public
ones; every fast backend has the same functions with the same signatures and gives the same bits.
"""

from .attention import attend, scores
from .codec import dequantize, make_codec, quantize
from .packing import words_per_vector
from .profile import measure_factors
from .rotation import supported_dim, supported_dims
from .tokens import append, append_pair, empty_tokens, raw_tokens, select_rows, stack_rows, trim
from .types import ALLOWED_BITS, FIRST, LAG, RING, TILE, Codec, Packed, Tokens, packed_tiles

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
