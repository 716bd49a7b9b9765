"""Attention and scores of the CPU kernels against the reference, bit by bit, on every instruction set of this CPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.conformance import suite, sweep
from turboquant_vlm.conformance.backend import from_mx
from turboquant_vlm.conformance.compare import compare
from turboquant_vlm.fast.cpu import attention, native
from turboquant_vlm.reference.types import ALLOWED_BITS, Codec, Tokens

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"no CPU kernels here: {native.unavailable_reason()}"
)

ISAS = native.available_isas()
GROUPS = (
    *("base", "decode", "errors", "factors", "limits", "masks", "multi-row", "non-finite", "prod", "ragged", "scores"),
    *("sinks", "window"),
)
"""Groups of vectors that call `attend` or `scores`."""


def _backend() -> ModuleType:
    """The reference with these kernels' attention: what differs is the attention's fault."""
    made = ModuleType("cpu_attention")
    for name in reference.__all__:
        setattr(made, name, getattr(reference, name))
    made.attend, made.scores = attention.attend, attention.scores  # type: ignore[attr-defined]
    return made


BACKEND = _backend()
PLAIN = sweep.Shape(
    index=0,
    key_dim=64,
    value_dim=64,
    key_bits=4,
    value_bits=4,
    kind="mse",
    dtype=mx.float16,
    heads=1,
    group=1,
    queries=1,
    lengths=(161,),
    mask="causal",
    sinks=False,
    window=None,
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TURBOQUANT_CPU_ISA", request.param)
    return str(request.param)


def agree(shape: sweep.Shape) -> None:
    problems = sweep.differences(shape, BACKEND)
    assert not problems, f"{shape}\n" + "\n".join(problems)


def same(want: mx.array, got: mx.array) -> None:
    difference = compare("output", from_mx(want), from_mx(got))
    assert difference is None, str(difference)


def tokens(
    role: str, length: int, dim: int = 64, bits: int = 4, heads: int = 1, dtype: mx.Dtype = mx.float16, **codec: Any
) -> Tokens:
    rng = np.random.default_rng(length + dim)
    x = mx.array(rng.standard_normal((1, heads, length, dim)).astype(np.float32)).astype(dtype)
    made = reference.make_codec(dim, bits, seed=1, **codec)
    return reference.append(reference.empty_tokens(made, role, 1, heads, dtype), x)


def query(heads: int, length: int = 1, dim: int = 64, dtype: mx.Dtype = mx.float16) -> mx.array:
    rng = np.random.default_rng(heads + length)
    return mx.array(rng.standard_normal((1, heads, length, dim)).astype(np.float32)).astype(dtype)


def test_vectors(isa: str) -> None:
    result = suite.run_suite(BACKEND, groups=GROUPS)
    assert result.passed, result.verdict()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_sweep(isa: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape of the sweep once: pairs of widths, head sizes, masks, windows, sinks, ragged rows, `prod`."""
    monkeypatch.setenv("TURBOQUANT_THREADS", threads)
    known = len(sweep.kernels())
    start = known * (1 + ISAS.index(isa)) if threads == "1" else 0
    step = 1 if isa == ISAS[0] and threads == "1" else 3
    for shape in itertools.islice(sweep.shapes(start + known), start, start + known, step):
        agree(shape)


def test_every_head_size(isa: str) -> None:
    every = 1 if isa == ISAS[0] else 3
    for at, dim in itertools.islice(enumerate(reference.supported_dims()), 0, None, every):
        bits = ALLOWED_BITS[at % len(ALLOWED_BITS)]
        other = ALLOWED_BITS[at // 7 % len(ALLOWED_BITS)]
        agree(replace(PLAIN, index=at, key_dim=dim, value_dim=dim, key_bits=bits, value_bits=other, queries=2))


@pytest.mark.parametrize("dim", [8, 12, 100, 128, 176])
def test_every_width_at_head_sizes_around_registers(isa: str, dim: int) -> None:
    for at, bits in enumerate(ALLOWED_BITS):
        agree(replace(PLAIN, index=at, key_dim=dim, value_dim=dim, key_bits=bits, value_bits=bits, group=3))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_prod(isa: str, bits: int) -> None:
    agree(replace(PLAIN, key_bits=bits, kind="prod", key_dim=96, lengths=(200, 99), queries=3, group=2))


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("threads", ["1", "2", "7"])
def test_division_of_work_changes_no_bit(isa: str, queries: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOQUANT_THREADS", threads)
    keys, values, q = tokens("key", 3000), tokens("value", 3000, bits=3), query(2, queries)
    sinks = mx.array([0.5, -np.inf])
    for mask, window in (("causal", None), (None, 2000), ("causal", 100)):
        want = _once(reference.attend, q, keys, values, 0.125, mask, sinks, window)
        same(want, attention.attend(q, keys, values, 0.125, mask, sinks, window))
        same(
            _once(reference.scores, q, keys, 0.125, mask, window), attention.scores(q, keys, 0.125, mask, window)
        )


_known: dict[Any, mx.array] = {}


def _once(function: Any, q: mx.array, *rest: Any) -> mx.array:
    """What the reference says, computed once for all instruction sets."""
    key = (function.__name__, q.shape, tuple(r for r in rest if isinstance(r, (str, int, float, type(None)))))
    if key not in _known:
        _known[key] = function(q, *rest)
    return _known[key]


def test_more_tokens_than_bases_fit_at_once(isa: str) -> None:
    keys, values, q = tokens("key", 4300, dim=16), tokens("value", 4300, dim=16), query(3, 2, dim=16)
    same(_once(reference.attend, q, keys, values, 0.25), attention.attend(q, keys, values, 0.25))


def test_blocks_of_one_position(isa: str) -> None:
    """More query heads than a block has rows."""
    agree(replace(PLAIN, group=200, lengths=(97,), queries=2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ["key", "value", "q"])
def test_non_finite(isa: str, bad: float, role: str) -> None:
    for where in (1, 40, 120, 190, 199):
        made: dict[str, Any] = {}
        for name in ("key", "value"):
            x = np.random.default_rng(7).standard_normal((1, 2, 200, 64)).astype(np.float32)
            if role == name:
                x[0, 1, where, 3] = bad
            empty = reference.empty_tokens(reference.make_codec(64, 3), name, 1, 2, mx.float32)
            made[name] = reference.append(empty, mx.array(x))
        q = np.random.default_rng(3).standard_normal((1, 4, 8, 64)).astype(np.float32)
        if role == "q":
            q[0, 2, where % 8, 63] = bad
        arguments = (mx.array(q), made["key"], made["value"], 0.1, "causal", None, 30 if where % 2 else None)
        same(reference.attend(*arguments), attention.attend(*arguments))
        of_keys = (mx.array(q), made["key"], 0.1, "causal")
        same(reference.scores(*of_keys), attention.scores(*of_keys))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_masks_of_every_shape(isa: str, dtype: mx.Dtype) -> None:
    keys, values = tokens("key", 150, heads=2, dtype=dtype), tokens("value", 150, heads=2, bits=2, dtype=dtype)
    q, rng = query(4, 5, dtype=dtype), np.random.default_rng(0)
    for shape in ((150,), (5, 1), (1, 4, 1, 150), (4, 5, 150), (1, 2, 1, 5, 150), (1, 1, 2, 1, 1), (1,)):
        numbers = rng.standard_normal(shape).astype(np.float32) * 3
        numbers[rng.random(shape) < 0.2] = -np.inf
        numbers[rng.random(shape) < 0.02] = np.nan
        for mask in (mx.array(numbers > 0), mx.array(numbers).astype(dtype)):
            same(reference.attend(q, keys, values, 0.1, mask), attention.attend(q, keys, values, 0.1, mask))
            same(reference.scores(q, keys, 0.1, mask), attention.scores(q, keys, 0.1, mask))


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-30, 1.0, 2.0**40])
def test_extreme_magnitudes(isa: str, factor: float) -> None:
    made = []
    for role in ("key", "value"):
        x = np.random.default_rng(1).standard_normal((1, 1, 200, 32)) * factor
        empty = reference.empty_tokens(reference.make_codec(32, 4), role, 1, 1, mx.float32)
        made.append(reference.append(empty, mx.array(x.astype(np.float32))))
    for of_q in (2.0**-40, 1.0, 2.0**30):
        q = mx.array((np.random.default_rng(2).standard_normal((1, 2, 2, 32)) * of_q).astype(np.float32))
        for sinks in (None, mx.array([30.0, np.nan])):
            same(reference.attend(q, *made, 0.3, "causal", sinks), attention.attend(q, *made, 0.3, "causal", sinks))
        same(reference.scores(q, made[0], 0.3), attention.scores(q, made[0], 0.3))


def test_dtypes_of_queries_keys_and_values_may_differ(isa: str) -> None:
    dtypes = (mx.float16, mx.bfloat16, mx.float32)
    for of_q, of_keys, of_values in itertools.product(dtypes, repeat=3):
        keys, values = tokens("key", 100, dtype=of_keys), tokens("value", 100, dim=96, dtype=of_values)
        q = query(2, 3, dtype=of_q)
        same(reference.attend(q, keys, values, 0.1, "causal"), attention.attend(q, keys, values, 0.1, "causal"))


def test_queries_that_are_not_contiguous(isa: str) -> None:
    keys, values = tokens("key", 140), tokens("value", 140)
    q = query(3, 2).swapaxes(1, 2)
    same(reference.attend(q, keys, values, 0.1), attention.attend(q, keys, values, 0.1))


def test_scratch_memory_is_reused_by_smaller_and_larger_calls() -> None:
    for dim, length in ((64, 200), (512, 500), (8, 70), (128, 900)):
        keys, values, q = tokens("key", length, dim), tokens("value", length, dim), query(2, 3, dim)
        same(reference.attend(q, keys, values, 0.1), attention.attend(q, keys, values, 0.1))


def test_calls_at_the_same_time_do_not_disturb_each_other() -> None:
    calls = [(query(4, n), tokens("key", 300 + n, heads=2), tokens("value", 300 + n, heads=2)) for n in range(1, 7)]
    for call in calls:
        mx.eval(call[0], *call[1].packed.arrays().values(), *call[2].packed.arrays().values())
    wanted = [reference.attend(*call, 0.1, "causal") for call in calls]
    mx.eval(wanted)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda call: from_mx(attention.attend(*call, 0.1, "causal")), calls * 4))
    for want, got in zip(wanted * 4, made, strict=True):
        assert compare("output", from_mx(want), got) is None


def test_errors_are_those_of_the_reference() -> None:
    keys, values, q = tokens("key", 100), tokens("value", 100), query(2)
    calls: tuple[dict[str, Any], ...] = (
        {"q": query(2, dim=32)},
        {"keys": values},
        {"values": keys},
        {"scale": -1.0},
        {"mask": "full"},
        {"mask": mx.zeros((3, 7))},
        {"sinks": mx.zeros(3)},
        {"window": 0},
        {"left_padding": [1, 2]},
        {"q": query(2, 100), "keys": tokens("key", 700), "values": tokens("value", 700)},
    )
    for changed in calls:
        arguments: dict[str, Any] = {"q": q, "keys": keys, "values": values, "scale": 0.1} | changed
        said = []
        for backend in (reference, attention):
            try:
                mx.eval(backend.attend(**arguments))
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
        assert said[0] == said[1]


def test_tables_of_a_codec_match_its_matrix() -> None:
    from turboquant_vlm.reference.rotation import hadamard

    for dim in (8, 12, 80, 96, 100, 288):
        tables = attention._codec_tables(Codec(dim, 4, 0))
        block, matrix = dim // tables.m, hadamard(dim)
        for b in range(tables.m):
            assert np.array_equal(tables.forth[b], matrix[:, b * block])
            assert np.array_equal(tables.back[b], matrix[b * block])
