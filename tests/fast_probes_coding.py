"""Probes of coding and restoring: `quantize`, `dequantize` and the tokens of a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from fast_probes import INFINITY, NAN, PROBES, Arrays, array_of, normal, uneven

from turboquant_vlm import reference
from turboquant_vlm.conformance.backend import observe
from turboquant_vlm.conformance.suite import vectors


def _quantize(make: Callable[[], dict[str, Any]], backend: ModuleType) -> Arrays:
    return dict(backend.quantize(**make()).arrays())


def _restore(make: Callable[[], dict[str, Any]], dtype: mx.Dtype, backend: ModuleType) -> Arrays:
    arguments = make()
    packed = reference.quantize(**arguments)
    return {"restored": backend.dequantize(packed, arguments["codec"], dtype)}


def _code(name: str, make: Callable[[], dict[str, Any]], dtype: mx.Dtype = mx.float32) -> None:
    """Two probes: code/NAME of `quantize`, restore/NAME of `dequantize`."""
    made = cache(make)
    PROBES[f"code/{name}"] = partial(_quantize, made)
    PROBES[f"restore/{name}"] = partial(_restore, made, dtype)


def _vectors(
    shape: tuple[int, ...], bits: int = 4, kind: str = "mse", seed: int = 0, dtype: mx.Dtype = mx.float32, **rest: Any
) -> dict[str, Any]:
    x = rest.pop("x", None)
    x = uneven(shape, seed) if x is None else x
    return {"x": array_of(x, dtype), "codec": reference.make_codec(shape[-1], bits, seed=seed + 1, kind=kind), **rest}


for _bits in reference.ALLOWED_BITS:
    _code(f"bits/{_bits}", partial(_vectors, (70, 40), _bits))
    _code(f"padded/{_bits}", partial(_vectors, (10, 12), _bits))
_code("half", partial(_vectors, (10, 8), dtype=mx.float16), mx.float16)
_code("two words", partial(_vectors, (10, 36)))
_code("wide", partial(_vectors, (10, 512)))
_code("base", partial(_vectors, (2, 128, 16), base=True))
_code("base/wide", partial(_vectors, (64, 320), base=True))
_code("base/prod", partial(_vectors, (64, 16), 3, "prod", base=True))
_code("prod", partial(_vectors, (20, 40), 4, "prod"))
_code(
    "given", lambda: _vectors((2, 20, 16), factors=mx.array(np.random.default_rng(3).integers(-3, 4, (2, 16)), mx.int8))
)


def _broken(base: bool, kind: str = "mse") -> dict[str, Any]:
    x = uneven((64, 16), 1)
    x[3, 2], x[9, 5], x[11] = NAN, INFINITY, 0
    return _vectors((64, 16), 3, kind, x=x, base=base)


def _all_sizes() -> dict[str, Any]:
    """Vectors of all sizes that float32 has, zero and the smallest that counts among them."""
    x = np.array(normal((260, 8), 4)).astype(np.float64)
    x /= np.abs(x).max(axis=1, keepdims=True)
    x *= 2.0 ** np.linspace(-128, 127.9, 260)[:, None]
    x[7] = 0
    x[8] = 0
    x[8, 3] = 2.0**-80
    return _vectors((260, 8), 3, x=x.astype(np.float32))


def _ties() -> dict[str, Any]:
    """Small integers: sums and quotients that fall on the middle between two numbers."""
    x = np.random.default_rng(6).integers(-3, 4, (120, 8)).astype(np.float32)
    x[5] = 0
    return _vectors((120, 8), 8, x=x)


def _quiet_tile() -> dict[str, Any]:
    """Tokens of very different size, and an empty tile, under one base."""
    x = uneven((128, 8), 2)
    x[:20] *= 2.0 ** -np.arange(20)[:, None] * 2.0**-15
    x[64:] = 0
    return _vectors((128, 8), x=x, base=True)


def _channels(sizes: Any) -> dict[str, Any]:
    """Channels of given sizes with alternating sign: their base is zero, and nothing is rounded."""
    x = np.where(np.arange(64) % 2, 1, -1)[:, None] * np.asarray(sizes, np.float64)
    return _vectors((64, len(sizes)), x=x, base=True)


def _found(bits: int, *vectors: list[int]) -> dict[str, Any]:
    """Snapped vectors, each with a coordinate at a boundary that is hard to compute."""
    return _vectors((len(vectors), 8), bits, x=np.array(vectors) / 8192)


def _wide_root() -> dict[str, Any]:
    """A vector whose root is too long for a float32, with a coordinate at a boundary that depends on its last bit."""
    rng = np.random.default_rng(13465)
    x = (8191 - rng.integers(0, 1500, 512)) * rng.choice([-1, 1], 512)
    return _vectors((1, 512), 6, x=x[None] / 8192)


def _top_scales() -> dict[str, Any]:
    """Vectors whose scale would round to 2^16 (some of them from below)."""
    rows = [2864, 3159, 4074, 4489, 5233, 5552, 6178, 7267]
    shift = 31 - np.array([14, 13, 13, 13, 14, 14, 13, 13])
    x = np.random.default_rng(77).standard_normal((8000, 8)).astype(np.float32)[rows]
    return _vectors((8, 8), 3, x=x * 2.0 ** shift[:, None])


def _prod_ties() -> dict[str, Any]:
    """Vectors with remainders in the middle between two numbers that change the scale of the signs."""
    x = np.random.default_rng(78).standard_normal((8000, 8)).astype(np.float32)[[266, 2315, 7419, 7654]]
    return _vectors((4, 8), 2, "prod", x=x)


def _young_loud() -> dict[str, Any]:
    """The second half of a tile is larger than the first."""
    x = uneven((64, 8), 2)
    x[32:] *= 64
    return _vectors((64, 8), x=x, base=True)


_code("prod odd", partial(_vectors, (10, 20), 4, "prod"))
_code("prod wide", partial(_vectors, (5, 256), 3, "prod"))
_code("prod ties", _prod_ties)
_code("scale top", _top_scales)
# S 2^16 is a square less one; a threshold is an integer before it is rounded.
_code("root", partial(_found, 6, [1695, -476, -1025, 746, -1834, -871, 4365, -1553]))
_code("whole threshold", partial(_found, 3, [-99, -595, 2064, -1320, 1989, -986, 4134, -1718]))
_code("root/wide", _wide_root)
_code("prod small", lambda: _vectors((40, 8), 2, "prod", x=np.random.default_rng(2).integers(-1, 2, (40, 8))))
_code("broken", partial(_broken, False))
_code("broken/base", partial(_broken, True))
_code("broken/prod", partial(_broken, False, "prod"))
_code("sizes", _all_sizes)
_code("ties", _ties)
_code("quiet", _quiet_tile)
# Energies at the limits: 64 times 4 is what all have; 4 times 64 times 1 is what all have.
_code("equal channels", partial(_channels, [2] * 16 + [0] * 48))
_code("equal quiet channels", partial(_channels, [3] * 24 + [1] * 40))
_code("largest channel", partial(_channels, [1 - 2.0**-20, *np.linspace(0.05, 0.3, 7)]))
_code("young loud", _young_loud)


def _tokens(new: tuple[int, ...], dim: int, value_dim: int, backend: ModuleType) -> Arrays:
    """Keys and values together, in several chunks; then as plain vectors."""
    keys = backend.empty_tokens(backend.make_codec(dim, 4), "key", 1, 2, mx.float32)
    values = backend.empty_tokens(backend.make_codec(value_dim, 3, seed=5), "value", 1, 2, mx.float32)
    k, v = array_of(uneven((1, 2, sum(new), dim), 0)), normal((1, 2, sum(new), value_dim), 1)
    start = 0
    for count in new:
        chunk = slice(start, start + count)
        keys, values = backend.append_pair(keys, values, k[:, :, chunk], v[:, :, chunk])
        start += count
    out = {f"keys.{name}": array for name, array in keys.packed.arrays().items()}
    return out | {f"values.{name}": array for name, array in values.packed.arrays().items()}


PROBES["tokens"] = partial(_tokens, (170, 60), 8, 16)


def _vector(name: str, backend: ModuleType) -> Arrays:
    return observe(next(case for case in vectors() if case["id"] == name), backend)


for _name in ("scale/halves-to-even",):
    PROBES[_name] = partial(_vector, _name)
