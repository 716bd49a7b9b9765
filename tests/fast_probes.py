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
from turboquant_vlm.conformance.compare import Words, compare
from turboquant_vlm.fast import attention

Arrays = dict[str, Any]
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
    found = [compare(part, _words(want[part]), _words(have[part])) for part in want]
    return [str(difference) for difference in found if difference is not None]


def _words(x: mx.array | Words) -> Words:
    return x if isinstance(x, Words) else from_mx(x)


@cache
def expected(name: str) -> Arrays:
    """What the reference gives for a probe."""
    return PROBES[name](reference)


def normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Seeded normal numbers."""
    return array_of(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def array_of(x: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Numbers as an array of MLX."""
    return mx.array(np.asarray(x, np.float32)).astype(dtype)


def uneven(shape: tuple[int, ...], seed: int) -> np.ndarray:
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
    keys = uneven((*shape, dim), seed) if keys is None else keys
    values = np.array(normal((*shape, value_dim or dim), seed + 1)) if values is None else values
    out: dict[str, Any] = {"scale": 0.3, **rest}
    for name, role, x, codec in (
        ("keys", "key", keys, reference.make_codec(keys.shape[3], bits, seed=seed % 3, kind=kind)),
        ("values", "value", values, reference.make_codec(values.shape[3], value_bits, seed=seed % 3 + 1)),
    ):
        tokens = reference.empty_tokens(codec, role, batch, heads, dtype)
        cut = longest - queries if ring else 0
        if cut:
            tokens = reference.append(tokens, array_of(x[:, :, :cut], dtype))
        counts = None if ring else list(lengths)
        out[name] = reference.append(tokens, array_of(x[:, :, cut:], dtype), counts)
    shape_q = (batch, heads * group, queries, keys.shape[3])
    out["q"] = array_of(np.array(normal(shape_q, seed + 2)) if q is None else q, dtype)
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
_plain("raw/short open", lengths=(2,), queries=4)
_plain("raw/one worker", ONE_WORKER, queries=9)
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
_plain("heads", heads=2, group=2, queries=2, lengths=(105, 40, 100), mask="causal")
_plain("heads/one row", heads=2, group=3, queries=2, lengths=(105,))
_plain("boundary", lengths=(257,), queries=2, mask="causal")
_plain("splits", WHOLE, lengths=(800,), queries=2)
_plain("splits/long", WHOLE, lengths=(1900,))
_plain("splits/pairs", PAIRS, lengths=(1500,), queries=2)
_plain("splits/groups", lengths=(1900,))
_plain("splits/groups nine", lengths=(1300,), queries=9)
_plain("splits/sinks", lengths=(1300,), group=2, scale=0.01, sinks=mx.array([2.0, -1.0]))
_plain("splits/causal", WHOLE, lengths=(520,), queries=9, mask="causal")
_plain("window", lengths=(700,), queries=2, window=100)
_plain("window/two", lengths=(614,), queries=4, window=101)
_plain("window/edge", lengths=(612,), window=101)
_plain("window/groups", lengths=(1500,), window=300)
_plain("ring rows", lengths=(300, 300), ring=True)
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
        mask = array_of(np.where(kept, 3 * rng.standard_normal(kept.shape), -np.inf), dtype)
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
    keys = uneven((1, 1, 20, 8), 0)
    keys[0, 0, 7, 3] = NAN
    return _scene(group=2, mask=mx.array(mask), keys=keys, sinks=mx.array([NAN, 0.5]))


def _poison(what: str) -> dict[str, Any]:
    """Something that is not finite; four queries, of which some read it packed, some raw, some not at all."""
    keys, values = uneven((1, 1, 98, 8), 0), np.array(normal((1, 1, 98, 8), 1))
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
        dim=16, lengths=(110,), group=2, scale=softmax_scale, keys=size * uneven((1, 1, 110, 16), 0)
    )


def _planted(packed: bool) -> dict[str, Any]:
    """NaN in packed vectors whose raw ones are numbers (two first tokens among them), or infinity in raw ones only."""
    made = _scene(lengths=(98,), queries=4, mask="causal")
    for name, token in (("keys", 10), ("values", 20)):
        tokens = made[name]
        scales, recent = np.array(tokens.packed.scales), np.array(tokens.recent)
        if packed:
            scales[..., [2, token]] = NAN
        else:
            recent[:, :, tokens.held[0] - 98 + token] = INFINITY
        made[name] = replace(tokens, packed=replace(tokens.packed, scales=mx.array(scales)), recent=mx.array(recent))
    return made


def _first_planted() -> dict[str, Any]:
    """NaN in the packed value of a token that is always read raw."""
    made = _scene(lengths=(110,))
    scales = np.array(made["values"].packed.scales)
    scales[..., 2] = NAN
    packed = replace(made["values"].packed, scales=mx.array(scales))
    return made | {"values": replace(made["values"], packed=packed)}


def _short_ring() -> dict[str, Any]:
    """The ring holds just the tokens that are read raw."""
    made = _scene(lengths=(110,))
    for name in ("keys", "values"):
        made[name] = replace(made[name], recent=made[name].recent[:, :, -46:], held=(46,))
    return made


def _broken_prod() -> dict[str, Any]:
    keys = uneven((1, 1, 110, 16), 0)
    keys[0, 0, 10, 2] = INFINITY
    return _scene(keys=keys, bits=3, kind="prod", lengths=(110,))


def _far_poison(length: int, token: int) -> dict[str, Any]:
    keys = uneven((1, 1, length, 8), 0)
    keys[0, 0, token, 2] = INFINITY
    return _scene(keys=keys, lengths=(length,))


def _quiet_logits() -> dict[str, Any]:
    """Logits far below zero, with a tile of their own."""
    keys, q = np.ones((1, 1, 70, 8), np.float32), np.full((1, 1, 1, 8), -9.0, np.float32)
    return _scene(keys=keys, q=q, lengths=(70,))


_add("planted/packed", partial(_planted, True))
_add("planted/raw", partial(_planted, False))
_add("planted/first", _first_planted)
_add("short ring", _short_ring)
_add("poison/prod", _broken_prod)
_add("far poison", partial(_far_poison, 200, 150))
_add("far poison/groups", partial(_far_poison, 1300, 2))
_add("quiet logits", _quiet_logits)
_add("loud", partial(_loud, 900.0, 30.0))
_add("loud/more", partial(_loud, 3e4, 300.0))


def _largest_codes() -> dict[str, Any]:
    """Codes near 127 that all have the sign of the query, whose rotated numbers are near 2^12."""
    rng = np.random.default_rng(12)
    keys = 1e-4 * rng.standard_normal((1, 1, 110, 64)).astype(np.float32)
    keys[0, 0, :, 5] = np.where(np.arange(110) % 2, 1, -1) * (1 + np.arange(110) / 300)
    q = 3e-2 * rng.standard_normal((1, 1, 1, 64))
    # An even sum of the query: otherwise every rotated number is rounded to an even one.
    q[..., 5] = 7620 / 8192
    return _scene(keys=keys, q=q, bits=8, lengths=(110,), scale=2.0**14 / np.log2(np.e))


def _largest_raw() -> dict[str, Any]:
    """Raw keys near 2^14 and odd, and queries whose halves are odd and near 64, or near 128 unrounded."""
    rng = np.random.default_rng(8)
    keys = (rng.integers(8000, 8192, (1, 1, 20, 64)) * 2 - 1).astype(np.float32)
    q = np.full((1, 2, 1, 64), 63 * 128 + 63) - 128 * rng.integers(0, 2, (1, 2, 1, 64))
    q[:, 1] = 62 * 128 + 127
    # With a factor of a power of two the query stays what it is.
    return _scene(keys=keys, q=q / 8192, group=2, scale=2.0**-5 / np.log2(np.e))


def _largest_shares() -> dict[str, Any]:
    """Large shares and codes of 127; a second tile has the same values with the other sign, in another order."""
    rng = np.random.default_rng(9)
    values = np.zeros((1, 1, 224, 8), np.float32)
    sizes = 1.9 + 0.09 * rng.random(64)
    values[0, 0, 64:128, 1], values[0, 0, 128:192, 1] = sizes, -rng.permutation(sizes)
    keys, q = np.ones((1, 1, 224, 8), np.float32), np.eye(1, 8).reshape(1, 1, 1, 8)
    # The weight, 8057, makes products of all their bits.
    return _scene(keys=keys, values=values, value_bits=1, lengths=(224,), q=q, scale=3997 / 4096 * np.log(2))


def _largest_values(cancel: bool) -> dict[str, Any]:
    """Raw values near 2^13 and weights whose upper half is 63, or lower half 121 unrounded, for all tokens of a tile.

    cancel: the second half of the tile is the first with the other sign, in another order.
    """
    rng = np.random.default_rng(10)
    values = (rng.integers(4000, 4096, (1, 1, 64, 8)) * 2 + 1).astype(np.float32)
    if cancel:
        values[:, :, 32:] = -values[:, :, rng.permutation(32)]
    keys, q = np.ones((1, 1, 64, 8), np.float32), np.eye(1, 8).reshape(1, 1, 1, 8)
    return _scene(keys=keys, values=values, lengths=(64,), q=q, scale=3997 / 4096 * np.log(2))


def _cancelling(sizes: tuple[float, ...], length: int) -> dict[str, Any]:
    """Equal weights; all values of a tile are `sizes[tile]`, so that what is left depends on the order of the sum."""
    values = np.zeros((1, 1, length, 8), np.float32)
    values[..., 0] = (np.repeat([*sizes, *[0] * length], 64))[:length]
    return _scene(values=values, lengths=(length,), q=np.zeros((1, 1, 1, 8), np.float32))


def _packed_far_below() -> dict[str, Any]:
    """Tile 1 is 2^45 above tile 0, which alone has something in coordinate 0; one query reads it raw, one packed."""
    keys, values = np.zeros((1, 1, 160, 8), np.float32), np.ones((1, 1, 160, 8), np.float32)
    keys[0, 0, 64:128, 0] = 45
    values[0, 0, 64:, 0] = 0
    q = np.zeros((1, 1, 2, 8), np.float32)
    q[..., 0] = 1
    return _scene(keys=keys, values=values, queries=2, lengths=(160,), q=q, scale=float(np.log(2)))


def _one_rotated() -> dict[str, Any]:
    """A query whose rotation has one coordinate, the 40th."""
    hadamard = np.array([[(-1) ** bin(a & 40).count("1") for a in range(64)]])
    q = hadamard * np.array(reference.rotation.random_signs(64, 0))
    return _scene(keys=np.array(normal((1, 1, 110, 64), 3)), q=q.reshape(1, 1, 1, 64), lengths=(110,))


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


def _tiny_outputs() -> dict[str, Any]:
    """Outputs from 2^-104 to 2^-98: small coordinates of one small vector, with a small weight."""
    keys, values = np.zeros((1, 1, 20, 8), np.float32), np.zeros((1, 1, 20, 8), np.float32)
    keys[0, 0, 0, 0] = -8
    values[0, 0, 0] = [*2.0 ** np.arange(-92, -85), 2.0**-79]
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    return _scene(keys=keys, values=values, q=q, scale=float(np.log(2)))


def _huge_outputs() -> dict[str, Any]:
    """Outputs from 2^124 to beyond what a float32 holds."""
    largest = float(np.finfo(np.float32).max)
    return _scene(values=np.broadcast_to(np.array([largest, *1.5 * 2.0 ** np.arange(127, 120, -1)]), (1, 1, 20, 8)))


_LARGE, _TINY = 2.0**8, 2.0**-20
_END = (0, *[_LARGE] * 15, *[-2 * _LARGE] * 7, -_LARGE, _TINY, _TINY)
_add("cancel/end", partial(_cancelling, _END, 1700), WHOLE)
_add("cancel/end groups", partial(_cancelling, _END, 1700))
_add("packed far below", _packed_far_below)
_add("one rotated", _one_rotated)
_add("lowest logits", lambda: _quiet_logits() | {"scale": 1000.0, "sinks": mx.array([-INFINITY])})
_plain("prefill", lengths=(256,), queries=170)
_add("largest codes", _largest_codes)
_add("largest raw", _largest_raw)
_add("largest shares", _largest_shares)
_add("largest values", partial(_largest_values, False))
_add("largest values/cancel", partial(_largest_values, True))
_add("apart/40", partial(_far_apart, 40))
_add("apart/41", partial(_far_apart, 41))
_add("apart/twice", partial(_twice_apart, 2.0**-12))
_add("spread weights", _spread_weights)
_add("outputs/tiny", _tiny_outputs)
_add("outputs/huge", _huge_outputs)
