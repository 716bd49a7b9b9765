"""The attention output on made-up caches, where the float answer is known and keys are as awkward as wanted.

1,500 tokens; one query per head at the last position. Keys vary around a constant part; their channels' spreads differ
by up to 64 times, and "spread" alone is the root mean square over channels. Three shapes of the constant part:

* ``equal``: the same magnitude in every channel, a random sign each,
* ``own``: in every channel that many times the channel's own spread, a random sign each,
* ``normal``: normally distributed over channels, so that a few are three times the rest.

Errors are relative: |out - expected| / |expected| over all heads.

* ``float_error``: against float attention over what a float cache holds,
* ``plain_error``: the same for plain TurboQuant: rotation and codebook for every token, no key base, no channel
  factors, no raw tokens,
* ``codes_error``: against float attention over the same codes: packed tokens dequantized, first and young ones as the
  cache holds them. What integer attention adds to the quantization.
* ``snapped_error``: as before, but with the raw tokens' snap (docs/numerics.md, 3.1) in the expected result
  too. What the fixed-point logits, weights and sums add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from .. import reference
from .quality_model import Doubles
from .weights import Log, say

TOKENS = 1_500
BITS = 4
HEADS, GROUP = 2, 2
"""Kv heads, and query heads of each."""
OCTAVES = 3
"""Channel spreads lie between 2^-3 and 2^3, before they are scaled to rms 1."""

Shape = Literal["none", "equal", "own", "normal"]


@dataclass(frozen=True)
class Case:
    """One kind of cache. dtype: of the cache and of the query. constant: the constant part over the spread."""

    dtype: mx.Dtype
    shape: Shape
    constant: float = 100.0
    dim: int = 128

    def __post_init__(self) -> None:
        if (self.shape == "none") != (self.constant == 0):
            raise ValueError(f"a constant part of {self.constant} cannot have the shape {self.shape!r}")


@dataclass(frozen=True)
class Errors:
    """Relative errors of one cache; see the module."""

    float_error: float
    plain_error: float
    codes_error: float
    snapped_error: float


CASES = tuple(
    Case(dtype, shape, 0.0 if shape == "none" else 100.0, dim)
    for dim in (128, 64)
    for dtype in (mx.float16, mx.float32)
    for shape in ("none", "equal", "own", "normal")
)


def measure_synthetic(
    cases: tuple[Case, ...] = CASES, seeds: int = 8, log: Log = say
) -> list[tuple[Case, list[Errors]]]:
    """The errors of every case for seeds 0, 1, ..."""
    measured = []
    for case in cases:
        errors = [synthetic_errors(case, seed) for seed in range(seeds)]
        worst = max(e.codes_error for e in errors), max(e.float_error for e in errors)
        name = dtype_name(case.dtype)
        log(f"Synthetic: D={case.dim}, {name}, {case.shape}: at most {worst[0]:.5f} (codes), {worst[1]:.3f} (float)")
        measured.append((case, errors))
    return measured


def dtype_name(dtype: mx.Dtype) -> str:
    """``float16`` for ``mx.float16``."""
    return str(dtype).rpartition(".")[2]


def synthetic_errors(case: Case, seed: int) -> Errors:
    """Build one cache, attend with the last token's queries, compare."""
    q, k, v = (mx.array(x.astype(np.float32)).astype(case.dtype) for x in _vectors(case, seed))
    codecs = reference.make_codec(case.dim, BITS), reference.make_codec(case.dim, BITS, 1)
    keys = reference.append(reference.empty_tokens(codecs[0], "key", 1, HEADS, case.dtype), k)
    values = reference.append(reference.empty_tokens(codecs[1], "value", 1, HEADS, case.dtype), v)
    out = _wide(reference.attend(q, keys, values, case.dim**-0.5))

    exact = _attend(q, _wide(k), _wide(v))
    plain = _attend(q, *(_through_codec(x, codec) for x, codec in zip((k, v), codecs, strict=True)))
    codes = _attend(q, _as_read(keys, _wide(k)), _as_read(values, _wide(v)))
    snapped = _attend(q, _as_read(keys, _snapped(k, 14)), _as_read(values, _snapped(v, 13)))
    return Errors(
        float_error=_relative(out, exact),
        plain_error=_relative(plain, exact),
        codes_error=_relative(out, codes),
        snapped_error=_relative(out, snapped),
    )


def _vectors(case: Case, seed: int) -> tuple[Doubles, Doubles, Doubles]:
    """q [1, 4, 1, D], k and v [1, 2, T, D]."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.uniform(-OCTAVES, OCTAVES, size=(1, HEADS, 1, case.dim)))
    spread /= np.sqrt(np.mean(spread**2, axis=-1, keepdims=True))
    direction = rng.normal(size=spread.shape)
    shapes = {
        "none": np.zeros_like(spread),
        "equal": np.sign(direction),
        "own": np.sign(direction) * spread,
        "normal": direction,
    }
    k = rng.normal(size=(1, HEADS, TOKENS, case.dim)) * spread + case.constant * shapes[case.shape]
    v = rng.normal(size=(1, HEADS, TOKENS, case.dim))
    q = rng.normal(size=(1, HEADS * GROUP, 1, case.dim))
    return q, k, v


def _as_read(tokens: reference.Tokens, raw: Doubles) -> Doubles:
    """The tokens [1, Hk, T, D] as the last query reads them: dequantized where packed, else out of ``raw``."""
    packed = reference.packed_tiles(TOKENS) * reference.TILE
    read = raw.copy()
    coded = _wide(reference.dequantize(tokens.packed, tokens.codec)).reshape(1, HEADS, packed, -1)
    read[:, :, reference.FIRST : packed] = coded[:, :, reference.FIRST :]
    return read


def _snapped(x: mx.array, bits: int) -> Doubles:
    """x rounded to integers of `bits` bits and a sign, with one exponent a vector."""
    wide = _wide(x)
    unit = np.exp2(np.frexp(np.abs(wide).max(axis=-1, keepdims=True))[1] - float(bits))
    return np.rint(wide / unit) * unit


def _through_codec(x: mx.array, codec: reference.Codec) -> Doubles:
    return _wide(reference.dequantize(reference.quantize(x, codec), codec))


def _attend(q: mx.array, k: Doubles, v: Doubles) -> Doubles:
    """Softmax attention in float64; k and v [1, Hk, T, D]."""
    k, v = np.repeat(k, GROUP, axis=1), np.repeat(v, GROUP, axis=1)
    logits = _wide(q) @ k.swapaxes(-1, -2) * k.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def _wide(x: mx.array) -> Doubles:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _relative(found: Doubles, expected: Doubles) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
