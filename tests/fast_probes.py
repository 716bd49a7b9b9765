"""Small calls of the public functions that look at the text of the kernels from many sides.

A probe is a call with fixed inputs. Keys and values are coded by the reference, unless coding is what is looked at, so
that a probe needs one or two kernels. `problems` compares a backend with the reference, every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from turboquant_vlm import reference
from turboquant_vlm.conformance.backend import from_mx
from turboquant_vlm.conformance.compare import compare
from turboquant_vlm.fast import attention

Arrays = dict[str, mx.array]
Call = Callable[[ModuleType], Arrays]
PROBES: dict[str, Call] = {}
NAN, INFINITY = float("nan"), float("inf")

# How work is divided: all splits in one group, a split a group, two splits a group, one block at a time.
WHOLE = attention.Division(one_dispatch=64)
PAIRS = attention.Division(wanted_groups=3, max_groups=3)
ONE_WORKER = attention.Division(workers=1)


def problems(name: str, backend: ModuleType) -> list[str]:
    """What differs between a backend and the reference in one probe; nothing if they agree."""
    want, have = expected(name), PROBES[name](backend)
    assert want.keys() == have.keys()
    found = [compare(part, from_mx(want[part]), from_mx(have[part])) for part in want]
    return [str(difference) for difference in found if difference is not None]


@cache
def expected(name: str) -> Arrays:
    """What the reference gives for a probe."""
    return PROBES[name](reference)


def normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Seeded normal numbers."""
    return _array(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def _array(x: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.asarray(x, np.float32)).astype(dtype)


def _uneven(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Vectors with a common part and channels of different size, as keys of models are."""
    rng = np.random.default_rng([seed, 7, *shape])
    x = rng.standard_normal(shape) * np.exp(1.5 * rng.standard_normal(shape[-1]))
    return (x + 4 * rng.standard_normal(shape[-1])).astype(np.float32)


# ---- Attention.


@contextmanager
def _divided(division: attention.Division | None) -> Iterator[None]:
    before = attention.DIVISION
    attention.DIVISION = division or before
    try:
        yield
    finally:
        attention.DIVISION = before


def _scene(
    dim: int = 8,
    value_dim: int | None = None,
    bits: int = 4,
    value_bits: int = 4,
    kind: str = "mse",
    dtype: mx.Dtype = mx.float32,
    heads: int = 1,
    group: int = 1,
    queries: int = 1,
    lengths: tuple[int, ...] = (20,),
    seed: int = 0,
    keys: np.ndarray | None = None,
    values: np.ndarray | None = None,
    q: np.ndarray | None = None,
    ring: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """The arguments of `attend`: normal vectors unless given. ring: tokens come one chunk before the new ones."""
    longest, batch = max(lengths), len(lengths)
    shape = (batch, heads, longest)
    keys = _uneven((*shape, dim), seed) if keys is None else keys
    values = np.array(normal((*shape, value_dim or dim), seed + 1)) if values is None else values
    out: dict[str, Any] = {"scale": 0.3, **rest}
    for name, role, x, codec in (
        ("keys", "key", keys, reference.make_codec(keys.shape[3], bits, seed=seed % 3, kind=kind)),
        ("values", "value", values, reference.make_codec(values.shape[3], value_bits, seed=seed % 3 + 1)),
    ):
        tokens = reference.empty_tokens(codec, role, batch, heads, dtype)
        cut = longest - queries if ring else 0
        if cut:
            tokens = reference.append(tokens, _array(x[:, :, :cut], dtype))
        counts = None if ring else list(lengths)
        out[name] = reference.append(tokens, _array(x[:, :, cut:], dtype), counts)
    shape_q = (batch, heads * group, queries, keys.shape[3])
    out["q"] = _array(np.array(normal(shape_q, seed + 2)) if q is None else q, dtype)
    return out


def _attend(make: Callable[[], dict[str, Any]], division: attention.Division | None, backend: ModuleType) -> Arrays:
    with _divided(division):
        return {"output": backend.attend(**make())}


def _scores(make: Callable[[], dict[str, Any]], division: attention.Division | None, backend: ModuleType) -> Arrays:
    arguments = {k: v for k, v in make().items() if k not in ("values", "sinks")}
    with _divided(division):
        return {"scores": backend.scores(**arguments)}


def _add(name: str, make: Callable[[], dict[str, Any]], division: attention.Division | None = None) -> None:
    """Two probes: NAME of `attend`, NAME.scores of `scores`."""
    made = cache(make)
    PROBES[name] = partial(_attend, made, division)
    PROBES[f"{name}.scores"] = partial(_scores, made, division)


def _plain(name: str, division: attention.Division | None = None, **options: Any) -> None:
    _add(name, partial(_scene, **options), division)


_plain("raw")
_plain("raw/two tiles", lengths=(70,), queries=3, mask="causal")
_plain("raw/short", lengths=(2,), queries=4, mask="causal")
_plain("raw/sinks", sinks=mx.array([1.3]))
_plain("packed", dim=16, lengths=(110,))
_plain("packed/ring", lengths=(300,), queries=2, ring=True, mask="causal")
_plain("packed/half", dim=16, lengths=(110,), dtype=mx.float16)
_plain("packed/padded", dim=12, lengths=(110,))
_plain("packed/paley", dim=40, lengths=(110,), seed=4)
_plain("packed/two words", dim=36, lengths=(110,), seed=4)
_plain("packed/two dims", dim=16, value_dim=8, lengths=(110,))
_plain("packed/three rows", lengths=(110,), group=3)
_plain("packed/wide", dim=64, value_dim=256, lengths=(110,))
_plain("edge", lengths=(98,), queries=4, mask="causal")
_plain("edge/open", lengths=(98,), queries=4)
_plain("nine", lengths=(98,), queries=9, mask="causal")
_plain("nine/one worker", ONE_WORKER, lengths=(98,), queries=9, mask="causal")
_plain("nine/two heads", lengths=(98,), queries=9, mask="causal", heads=2)
_plain("heads", heads=2, group=2, queries=2, lengths=(105, 40), mask="causal")
_plain("heads/one row", heads=2, group=3, queries=2, lengths=(105,))
_plain("boundary", lengths=(257,), queries=2, mask="causal")
_plain("splits", WHOLE, lengths=(800,), queries=2)
_plain("splits/long", WHOLE, lengths=(1900,))
_plain("splits/pairs", PAIRS, lengths=(1500,), queries=2)
_plain("splits/groups", lengths=(1900,))
_plain("splits/groups nine", lengths=(1300,), queries=9)
_plain("splits/sinks", lengths=(1300,), group=2, sinks=mx.array([9.0, -3.0]), seed=1)
_plain("splits/causal", WHOLE, lengths=(520,), queries=9, mask="causal")
_plain("window", lengths=(700,), queries=2, window=100)
_plain("window/two", lengths=(614,), queries=4, window=101)
_plain("window/edge", lengths=(612,), window=101)
_plain("window/groups", lengths=(1500,), window=300)
_plain("ring rows", lengths=(300, 300), ring=True)
_plain("last of a split", lengths=(287,), queries=2)
_plain("padded bytes", dim=12, bits=8, lengths=(110,))
_plain("prod", dim=16, bits=3, kind="prod", lengths=(110,), queries=2)
for _bits in reference.ALLOWED_BITS:
    _plain(f"bits/{_bits}", dim=40, bits=_bits, value_bits=_bits, lengths=(110,))


def _masked(dtype: mx.Dtype) -> dict[str, Any]:
    """A mask of full rank, two rows of different length, several heads and queries."""
    rng = np.random.default_rng(5)
    kept = rng.random((2, 4, 2, 20)) > 0.4
    mask = mx.array(kept)
    if dtype != mx.bool_:
        mask = _array(np.where(kept, 3 * rng.standard_normal(kept.shape), -np.inf), dtype)
    return _scene(heads=2, group=2, queries=2, lengths=(20, 13), mask=mask, left_padding=[0, 7])


def _special_mask() -> dict[str, Any]:
    """Masks of infinity, of NaN on one head, and so large that logits reach their limit."""
    mask = np.zeros((1, 4, 1, 20), np.float32)
    mask[0, 0, 0, 3], mask[0, 1, 0, 3], mask[0, 2, 0, 3:5] = INFINITY, NAN, [-1e9, 65000]
    mask[0, 3, 0, 3:5] = [-INFINITY, 45000]
    return _scene(group=4, mask=mx.array(mask), q=3e4 * np.array(normal((1, 4, 1, 8), 2)))


def _special_sinks() -> dict[str, Any]:
    return _scene(group=4, sinks=mx.array([NAN, -INFINITY, INFINITY, 50000.0]))


def _nothing_allowed() -> dict[str, Any]:
    """A query that may look at nothing and has a sink that is NaN, beside one that meets NaN."""
    mask = np.zeros((1, 2, 1, 20), bool)
    mask[0, 1] = True
    keys = _uneven((1, 1, 20, 8), 0)
    keys[0, 0, 7, 3] = NAN
    return _scene(group=2, mask=mx.array(mask), keys=keys, sinks=mx.array([NAN, 0.5]))


def _poison(what: str) -> dict[str, Any]:
    """Something that is not finite; four queries, of which some read it packed, some raw, some not at all."""
    keys, values = _uneven((1, 1, 98, 8), 0), np.array(normal((1, 1, 98, 8), 1))
    q = np.array(normal((1, 1, 4, 8), 2))
    if what == "query":
        q[0, 0, 1, 5] = NAN
    elif what == "huge query":
        q[0, 0, 1, 5] = 3e38
        return _scene(lengths=(98,), queries=4, q=q, scale=4.0)
    elif what.endswith("value"):
        values[0, 0, 96 if what == "young value" else 10, 2] = INFINITY
    else:
        keys[0, 0, 96 if what == "young key" else 10, 2] = INFINITY
    return _scene(lengths=(98,), queries=4, keys=keys, values=values, q=q, mask="causal")


_add("mask", partial(_masked, mx.bool_))
_add("mask/additive", partial(_masked, mx.float32))
_add("mask/special", _special_mask)
_add("sinks/special", _special_sinks)
_add("nothing allowed", _nothing_allowed)
for _what in ("query", "huge query", "young key", "old key", "young value", "old value"):
    _add(f"poison/{_what}", partial(_poison, _what))


def _loud(softmax_scale: float, size: float) -> dict[str, Any]:
    """Logits at and beyond their limit: the sum of code and base, and each of them."""
    return _scene(
        dim=16, lengths=(110,), group=2, scale=softmax_scale, keys=size * _uneven((1, 1, 110, 16), 0)
    )


def _planted() -> dict[str, Any]:
    """Packed vectors with NaN whose raw ones are numbers, and raw vectors with infinity whose packed ones are numbers."""
    made = _scene(lengths=(98,), queries=4, mask="causal")
    for name, token in (("keys", 10), ("values", 20)):
        tokens = made[name]
        scales, recent = np.array(tokens.packed.scales), np.array(tokens.recent)
        scales[..., token] = NAN
        recent[:, :, tokens.held[0] - 98 + token + 30] = INFINITY
        packed = replace(tokens.packed, scales=mx.array(scales))
        made[name] = replace(tokens, packed=packed, recent=mx.array(recent))
    return made


def _broken_prod() -> dict[str, Any]:
    keys = _uneven((1, 1, 110, 16), 0)
    keys[0, 0, 10, 2] = INFINITY
    return _scene(keys=keys, bits=3, kind="prod", lengths=(110,))


def _far_poison(length: int, token: int) -> dict[str, Any]:
    keys = _uneven((1, 1, length, 8), 0)
    keys[0, 0, token, 2] = INFINITY
    return _scene(keys=keys, lengths=(length,))


def _quiet_logits() -> dict[str, Any]:
    """Logits far below zero, with a tile of their own."""
    keys, q = np.ones((1, 1, 70, 8), np.float32), np.full((1, 1, 1, 8), -9.0, np.float32)
    return _scene(keys=keys, q=q, lengths=(70,))


_add("poison/planted", _planted)
_add("poison/prod", _broken_prod)
_add("far poison", partial(_far_poison, 200, 150))
_add("far poison/groups", partial(_far_poison, 1300, 2))
_add("quiet logits", _quiet_logits)
_add("loud", partial(_loud, 900.0, 30.0))
_add("loud/more", partial(_loud, 3e4, 300.0))


def _largest_codes() -> dict[str, Any]:
    """Codes of 127 that all have the sign of the query, whose rotated numbers are odd and as large as they can be."""
    keys = np.zeros((1, 1, 110, 64), np.float32)
    keys[0, 0, :, 5] = np.where(np.arange(110) % 2, 1, -1) * (1 + np.arange(110) / 300)
    keys[0, 0, :, 9] = np.where(np.arange(110) % 2, 1, -1) * 1e-3
    q = np.zeros((1, 1, 1, 64), np.float32)
    q[..., 5] = 8190 / 8192
    return _scene(keys=keys, q=q, bits=1, lengths=(110,), scale=4e5)


def _largest_raw() -> dict[str, Any]:
    """Raw keys whose numbers are odd and near 2^14, and queries whose halves are odd and near 64."""
    rng = np.random.default_rng(8)
    keys = (rng.integers(8000, 8192, (1, 1, 20, 64)) * 2 - 1).astype(np.float32)
    q = (63 * 128 + 63 - 128 * rng.integers(0, 2, (1, 1, 1, 64))).astype(np.float32) / 8192
    # With a factor of a power of two the query stays what it is.
    return _scene(keys=keys, q=q, scale=2.0**-10 / np.log2(np.e))


def _largest_shares() -> dict[str, Any]:
    """Equal weights, codes of 127 and scales that make every share large."""
    rng = np.random.default_rng(9)
    values = np.zeros((1, 1, 160, 8), np.float32)
    values[..., 1] = 1.9 + 0.09 * rng.random(160)
    values[..., 2] = 1e-3
    return _scene(values=values, value_bits=1, lengths=(160,), q=np.zeros((1, 1, 1, 8), np.float32))


def _largest_values() -> dict[str, Any]:
    """Raw values near 2^13 and weights whose upper half is 63, for all tokens of a tile."""
    rng = np.random.default_rng(10)
    keys = np.ones((1, 1, 64, 8), np.float32)
    values = (rng.integers(4000, 4096, (1, 1, 64, 8)) * 2 + 1).astype(np.float32)
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1.0
    return _scene(keys=keys, values=values, lengths=(64,), q=q, scale=0.98 * np.log(2))


def _far_apart(distance: int) -> dict[str, Any]:
    """Tiles whose weights are `distance` powers of two apart; the light one alone has something in coordinate 0."""
    keys, values = np.zeros((1, 1, 95, 8), np.float32), np.ones((1, 1, 95, 8), np.float32)
    keys[0, 0, 64:, 0] = distance
    values[0, 0, 64:, 0] = 0
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    return _scene(keys=keys, values=values, lengths=(95,), q=q, scale=float(np.log(2)))


def _twice_apart(size: float) -> dict[str, Any]:
    """Three raw tiles, each 2^40 above the one before; only the lightest has something in coordinate 0."""
    keys, values = np.zeros((1, 1, 134, 8), np.float32), np.full((1, 1, 134, 8), 2.0**60, np.float32)
    keys[0, 0, 64:, 0], keys[0, 0, 128:, 0] = 40, 80
    values[0, 0, :, 0] = 0
    values[0, 0, 0, 0] = size * 2.0**60
    q = np.zeros((1, 1, 40, 8), np.float32)
    q[..., 0] = 1
    return _scene(keys=keys, values=values, lengths=(134,), queries=40, q=q, scale=float(np.log(2)))


def _spread_weights() -> dict[str, Any]:
    """One strong token and others from far below to near: all weights, zero included."""
    keys = np.zeros((1, 1, 20, 8), np.float32)
    keys[0, 0, :, 0] = [0, *np.linspace(-15, -11.4, 19)]
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    return _scene(keys=keys, q=q, scale=float(np.log(2)))


def _extreme_outputs(exponent: int) -> dict[str, Any]:
    values = np.array(normal((1, 1, 20, 8), 1)) * 2.0 ** (exponent + np.arange(8))
    return _scene(values=values.astype(np.float32))


_add("largest codes", _largest_codes)
_add("largest raw", _largest_raw)
_add("largest shares", _largest_shares)
_add("largest values", _largest_values)
_add("apart/40", partial(_far_apart, 40))
_add("apart/41", partial(_far_apart, 41))
_add("apart/twice", partial(_twice_apart, 2.0**-13))
_add("spread weights", _spread_weights)
_add("outputs/tiny", partial(_extreme_outputs, -108))
_add("outputs/huge", partial(_extreme_outputs, 119))


# ---- Coding and restoring.


def _packed(packed: reference.Packed) -> Arrays:
    return packed.arrays()


def _quantize(make: Callable[[], dict[str, Any]], backend: ModuleType) -> Arrays:
    return _packed(backend.quantize(**make()))


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
    x = _uneven(shape, seed) if x is None else x
    return {"x": _array(x, dtype), "codec": reference.make_codec(shape[-1], bits, seed=seed + 1, kind=kind), **rest}


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
    x = _uneven((64, 16), 1)
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
    return _vectors((120, 8), 8, x=x)


def _quiet_tile() -> dict[str, Any]:
    """Tokens of very different size, and an empty tile, under one base."""
    x = _uneven((128, 8), 2)
    x[:20] *= 2.0 ** -np.arange(20)[:, None] * 2.0**-15
    x[64:] = 0
    return _vectors((128, 8), x=x, base=True)


def _equal_channels() -> dict[str, Any]:
    """Channels whose energy is exactly at the limits of the factors: 1, 4 and 16 times the mean's root, and below."""
    x = np.zeros((64, 64), np.float32)
    sign = np.where(np.arange(64) % 2, 1, -1)
    # 64 channels: T = 64 in units of a channel's mean; one channel with 4 of them, the others share 60.
    sizes = np.zeros(64)
    sizes[0], sizes[1:16] = 2, 2
    x[:] = sign[:, None] * sizes
    return _vectors((64, 64), x=x, base=True)


_code("prod odd", partial(_vectors, (10, 12), 4, "prod"))
_code("prod small", lambda: _vectors((40, 8), 2, "prod", x=np.random.default_rng(2).integers(-1, 2, (40, 8))))
_code("broken", partial(_broken, False))
_code("broken/base", partial(_broken, True))
_code("broken/prod", partial(_broken, False, "prod"))
_code("sizes", _all_sizes)
_code("ties", _ties)
_code("quiet", _quiet_tile)
_code("equal channels", _equal_channels)


def _tokens(new: tuple[int, ...], dim: int, value_dim: int, backend: ModuleType) -> Arrays:
    """Keys and values together, in several chunks; then as plain vectors."""
    keys = backend.empty_tokens(backend.make_codec(dim, 4), "key", 1, 2, mx.float32)
    values = backend.empty_tokens(backend.make_codec(value_dim, 3, seed=5), "value", 1, 2, mx.float32)
    k, v = _array(_uneven((1, 2, sum(new), dim), 0)), normal((1, 2, sum(new), value_dim), 1)
    start = 0
    for count in new:
        chunk = slice(start, start + count)
        keys, values = backend.append_pair(keys, values, k[:, :, chunk], v[:, :, chunk])
        start += count
    out = {f"keys.{name}": array for name, array in keys.packed.arrays().items()}
    return out | {f"values.{name}": array for name, array in values.packed.arrays().items()}


PROBES["tokens"] = partial(_tokens, (170, 60), 8, 16)
