"""What the device check runs: a choice of the vectors, and probes for the functions that no vector calls.

On a GPU every pair of head size and width compiles kernels of its own, so the choice has few of them (23). It covers
every operation, all widths as keys and as values, head sizes that are no power of two, both codecs, the three dtypes,
masks, sinks, windows, ragged rows, trims, and raw, packed and mixed tiles; and every mistake that the tests plant in
copies of the reference (tests/test_negative_controls.py) fails at least one of its vectors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import mlx.core as mx
import numpy as np

from turboquant_vlm import reference

from .backend import from_mx
from .compare import compare

GATE = (
    # Codes, scales, bases, factors, packing.
    "base/plain",
    "base/constant-key",
    "base/non-finite",
    "base/bits-5",
    "packing/20-5",
    "codes/small-integers-3",
    "codes/int8-ties",
    "factors/low-64-equal",
    "factors/single-128",
    "scale/halves-to-even",
    "scale/every-exponent-4",
    "prod/gauss-64-4",
    "dequantize/factors",
    "dequantize/scales-8-float16",
    "rotation/orders",
    "snap/threshold",
    # Decoding: all widths on either side, head sizes, dtypes, long caches.
    "decode/widths-1-2",
    "decode/widths-2-3",
    "decode/widths-3-4",
    "decode/widths-4-5",
    "decode/widths-5-6",
    "decode/widths-6-8",
    "decode/widths-8-1",
    "decode/dims-64-80",
    "decode/dims-128-192",
    "limits/head-256",
    "decode/largest-sums",
    "decode/dtypes-bfloat16-float32",
    "decode/values-2^16-float16",
    "decode/gqa-3x2",
    "decode/long-spread",
    "sinks/1350-2",
    "window/long-300-2",
    "non-finite/key-early-split",
    "decode/weights-end",
    "decode/shift-41",
    "scores/prod-3",
    "scores/clamp-2^16",
    "non-finite/key-packed-nan",
    "non-finite/value-raw-inf",
    "non-finite/value-raw-inf-hidden",
    # Several queries, masks, windows, sinks.
    "multi-row/161-8-causal",
    "multi-row/both-ways",
    "multi-row/more-queries-than-tokens",
    "masks/bool-4x1x100",
    "masks/nan-inf",
    "window/65",
    "window/with-mask",
    "sinks/extreme",
    "sinks/nothing-allowed",
    # Rows of a batch, appending, trimming.
    "ragged/heads",
    "ragged/three-rows",
    "ragged/pads-additive",
    "ragged/five-axes",
    "ragged/empty-row",
    "ragged/trim-rows",
    "tokens/chunks-sevens-key",
    "tokens/factors-once",
    "tokens/trim-steps-key",
    "tokens/trim-rows-value",
    "tokens/trim-far-value",
    # Refusals.
    "errors/bits-7",
    "errors/attend-scale-0",
)

Problems = list[str]


def _public_functions(backend: Any) -> Problems:
    """Every public name of the reference has to be there, functions with the same signature."""
    for name in reference.__all__:
        if not hasattr(backend, name):
            return [f"{name} is missing"]
        own, theirs = getattr(reference, name), getattr(backend, name)
        if inspect.isfunction(own) and inspect.signature(own) != inspect.signature(theirs):
            return [f"{name} has the signature {inspect.signature(theirs)}; expected {inspect.signature(own)}"]
    return []


def _noise(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def _tokens(backend: Any, role: str, bits: int, seed: int) -> Any:
    """Rows of 170, 0 and 40 tokens, 2 heads, D = 12."""
    tokens = backend.empty_tokens(backend.make_codec(12, bits, seed=seed), role, 3, 2, mx.float16)
    return backend.append(tokens, _noise((3, 2, 170, 12), seed), counts=[170, 0, 40])


def _rows(backend: Any) -> dict[str, Any]:
    """Rows taken out of a batch, put together in another order, and attended to."""
    keys, values = _tokens(backend, "key", 4, 1), _tokens(backend, "value", 3, 2)
    apart = backend.select_rows(keys), backend.select_rows(values)
    joined = [backend.stack_rows([side[2], side[0]]) for side in apart]
    return {
        "lengths": mx.array([row.lengths[0] for row in apart[0]] + list(joined[1].lengths)),
        "output": backend.attend(_noise((2, 4, 3, 12), 3), joined[0], joined[1], 0.3, mask="causal"),
        "plain": backend.raw_tokens(joined[0], mx.float32),
        "single": backend.raw_tokens(apart[1][0]),
    }


def _pairs(backend: Any) -> dict[str, Any]:
    """Keys and values appended together: a whole tile and more, then one token."""
    keys, values = _tokens(backend, "key", 4, 1), _tokens(backend, "value", 3, 2)
    for length, counts in ((70, [70, 3, 60]), (1, None)):
        k, v = _noise((3, 2, length, 12), length), _noise((3, 2, length, 12), length + 1)
        keys, values = backend.append_pair(keys, values, k, v, counts)
    return {
        "lengths": mx.array([*keys.lengths, *values.lengths]),
        "keys": backend.raw_tokens(keys),
        "values": backend.raw_tokens(values),
        "output": backend.attend(_noise((3, 4, 1, 12), 6), keys, values, 0.3),
    }


def _tables(backend: Any) -> dict[str, Any]:
    """Measured factors, and the functions on numbers."""
    return {
        "factors": backend.measure_factors(_noise((4, 128, 12), 4), _noise((2, 128, 12), 5)),
        "dims": mx.array([*backend.supported_dims(), *(int(backend.supported_dim(d)) for d in range(8, 200))]),
        "tiles": mx.array([backend.packed_tiles(n) for n in range(400)]),
        "words": mx.array([backend.words_per_vector(dim, bits) for dim in (12, 80) for bits in (1, 3, 5, 8)]),
        "constants": mx.array([backend.FIRST, backend.LAG, backend.RING, backend.TILE, *backend.ALLOWED_BITS]),
        "fields": mx.array([len(fields(kind)) for kind in (backend.Codec, backend.Packed, backend.Tokens)]),
    }


def _against_reference(outputs: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Problems]:
    def probe(backend: Any) -> Problems:
        expected = {name: from_mx(array) for name, array in outputs(reference).items()}
        try:
            got = {name: from_mx(array) for name, array in outputs(backend).items()}
        except Exception as error:
            return [f"raised {type(error).__name__}: {error}"]
        found = (compare(name, want, got[name]) for name, want in expected.items())
        return [str(difference) for difference in found if difference is not None]

    return probe


PROBES: dict[str, Callable[[Any], Problems]] = {
    "probe/functions": _public_functions,
    "probe/tables": _against_reference(_tables),
    "probe/rows": _against_reference(_rows),
    "probe/pairs": _against_reference(_pairs),
}
"""What to ask of a backend besides the vectors: name, and a function that gives the differences."""
