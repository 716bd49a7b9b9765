"""The attention kernels beyond the vectors: how work is divided, what a launch may use, odd inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.conformance import host_target, metal_host
from turboquant_vlm.conformance.backend import from_mx
from turboquant_vlm.conformance.compare import compare
from turboquant_vlm.fast import attention, launch
from turboquant_vlm.reference.types import ALLOWED_BITS, Codec, Tokens

pytestmark = pytest.mark.skipif(
    not metal_host.available(),
    reason=f"{metal_host.unavailable_reason()}: the Metal kernels were not executed",
)


def tokens(role: str, length: int, dim: int = 64, bits: int = 4, heads: int = 1, **codec: object) -> Tokens:
    rng = np.random.default_rng(length + dim)
    x = mx.array(rng.standard_normal((1, heads, length, dim)).astype(np.float32)).astype(mx.float16)
    made = reference.make_codec(dim, bits, seed=1, **codec)
    return reference.append(reference.empty_tokens(made, role, 1, heads, mx.float16), x)


def query(heads: int, length: int = 1, dim: int = 64, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal((1, heads, length, dim)).astype(np.float32)).astype(mx.float16)


def same(want: mx.array, got: mx.array) -> None:
    difference = compare("output", from_mx(want), from_mx(got))
    assert difference is None, str(difference)


DIVISIONS = {
    "one group reads everything": attention.Division(one_dispatch=99),
    "every split has a group": attention.Division(one_dispatch=1),
    "two groups of several splits": attention.Division(one_dispatch=1, max_groups=2),
    "three groups: the tree of groups has a gap": attention.Division(one_dispatch=1, max_groups=3),
    "one worker takes all blocks": attention.Division(one_dispatch=1, workers=1),
    "few groups are wanted": attention.Division(one_dispatch=1, wanted_groups=6),
}


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("length", [1280, 1793])
def test_division_of_work_changes_no_bit(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = tokens("key", length, heads=2), tokens("value", length, bits=3, heads=2)
    q = query(6, 3)
    arguments = {"mask": "causal", "window": 1100, "sinks": mx.array([0.5, -1.0, 3.0, 0.0, 7.0, -np.inf])}
    monkeypatch.setattr(attention, "DIVISION", DIVISIONS[name])
    same(reference.attend(q, keys, values, 0.125, **arguments), host_target.attend(q, keys, values, 0.125, **arguments))


@pytest.mark.parametrize("kind", ["causal", "array"])
def test_many_queries_go_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch that would run for seconds is divided by queries; each part knows where it stands."""
    keys, values, q = tokens("key", 300), tokens("value", 300), query(2, 20)
    mask = "causal"
    if kind == "array":
        mask = mx.array(np.random.default_rng(3).random((1, 2, 20, 300)) > 0.4)
    launched = []

    def counting(kernel: object, **call: object) -> object:
        launched.append(call)
        return host_target.on_host(kernel, **call)

    monkeypatch.setattr(attention, "DIVISION", attention.Division(products=1))
    with launch.using(counting):
        got = attention.attend(q, keys, values, 0.1, mask=mask)
    assert len(launched) == 3
    same(reference.attend(q, keys, values, 0.1, mask=mask), got)


def test_short_context_is_one_dispatch_and_a_long_one_two() -> None:
    launched = []

    def counting(kernel: object, **call: object) -> object:
        launched.append(call)
        return host_target.on_host(kernel, **call)

    for length, expected in ((1024, 1), (1025, 2)):
        launched.clear()
        with launch.using(counting):
            mx.eval(attention.attend(query(4), tokens("key", length), tokens("value", length), 0.1))
        assert len(launched) == expected


def test_no_output_grows_with_queries_times_tokens() -> None:
    """A prefill's scratch memory is bounded: nothing in it has one entry per query and token."""
    shapes = []

    def recording(kernel: object, **call: object) -> object:
        shapes.extend(call["output_shapes"])
        return [mx.zeros(s, dtype=d) for s, d in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    keys, values = tokens("key", 8192), tokens("value", 8192)
    with launch.using(recording):
        attention.attend(query(8, 2048), keys, values, 0.1, mask="causal")
    words = sum(int(np.prod(shape)) for shape in shapes)
    # The output itself, and at most one block of sums per worker and level.
    assert words - 8 * 2048 * 64 <= 256 * 6 * 8 * 2 * 64
    assert words < 8 * 2048 * 8192 // 16


def _codecs() -> list[tuple[Codec, Codec]]:
    dims = reference.supported_dims()
    widest = [reference.make_codec(d, b, kind=k) for d in dims for b, k in ((4, "mse"), (6, "mse"), (4, "prod"))]
    return [(key, reference.make_codec(d, 4)) for key in widest for d in (key.dim, 64, 1024)]


def test_threadgroup_memory_fits_for_every_head_size() -> None:
    for keys, values in _codecs():
        rows = attention._max_rows(keys, values)
        assert rows >= 1
        assert attention.threadgroup_bytes(rows, keys, values, attention.MAX_LEVELS) <= 32768
    assert attention._max_rows(reference.make_codec(128, 4), reference.make_codec(128, 4)) == 8
    assert attention._max_rows(reference.make_codec(256, 4), reference.make_codec(256, 4)) >= 4


@pytest.mark.parametrize(
    ("dim", "bits", "kind", "group"), [(64, 4, "mse", 1), (128, 3, "mse", 4), (80, 6, "mse", 3), (64, 3, "prod", 8)]
)
def test_threadgroup_memory_is_what_the_runner_counts(dim: int, bits: int, kind: str, group: int) -> None:
    keys, values = tokens("key", 300, dim, bits, kind=kind), tokens("value", 300, dim, min(bits, 6))
    seen = []

    def measuring(kernel: object, **call: object) -> object:
        result = metal_host.host_run(kernel, **call)
        assert not result.findings.errors
        assert int(np.prod(call["threadgroup"])) <= 512
        seen.append(result.threadgroup_bytes)
        return result.outputs

    with launch.using(measuring):
        mx.eval(attention.attend(query(group, 1, dim), keys, values, 0.1))
    computed = attention.threadgroup_bytes(group, keys.codec, values.codec, attention.MAX_LEVELS)
    # Each of about twenty arrays may start at a multiple of 16 bytes.
    assert computed - 20 * 16 <= seen[0] <= computed


def test_strided_transposed_and_unevaluated_queries() -> None:
    keys, values = tokens("key", 200), tokens("value", 200)
    wide = query(4, 6, 64)
    for q in (wide[:, :, ::2], wide.transpose(0, 2, 1, 3).transpose(0, 2, 1, 3), wide[:, ::-1], wide + 0 * wide):
        want = reference.attend(q, keys, values, 0.1, mask="causal")
        same(want, host_target.attend(q, keys, values, 0.1, mask="causal"))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1, 5), (1, 2, 1, 1), (2, 5), (1, 1, 2, 1, 5)])
def test_small_masks(shape: tuple[int, ...]) -> None:
    """MLX puts inputs below eight elements into another address space."""
    keys, values = tokens("key", 5), tokens("value", 5)
    for array in (mx.array(np.arange(np.prod(shape)).reshape(shape) % 3 != 1), mx.full(shape, -0.75, mx.float16)):
        want = reference.attend(query(2, 2), keys, values, 0.1, mask=array)
        same(want, host_target.attend(query(2, 2), keys, values, 0.1, mask=array))


def test_one_tile_one_head() -> None:
    keys, values = tokens("key", 96), tokens("value", 96)
    assert keys.packed.base_exponent is not None
    assert keys.packed.base_exponent.size == 1
    same(reference.attend(query(1), keys, values, 0.1), host_target.attend(query(1), keys, values, 0.1))


def test_query_dtype_may_differ_from_the_tokens() -> None:
    keys, values = tokens("key", 130), tokens("value", 130)
    for dtype in (mx.bfloat16, mx.float32):
        q = query(2, 2).astype(dtype)
        got = host_target.attend(q, keys, values, 0.1)
        assert got.dtype == dtype
        same(reference.attend(q, keys, values, 0.1), got)


def test_capacity_beyond_a_row_is_never_read() -> None:
    """NaN patterns in tiles and columns that belong to no token change nothing."""
    short, long = (tokens(role, 100) for role in ("key", "value")), (tokens(role, 300) for role in ("key", "value"))
    keys, values = (reference.stack_rows([a, b]) for a, b in zip(short, long, strict=True))
    q = mx.concatenate([query(1, 2), query(1, 2, seed=5)])

    def poisoned(batch: Tokens) -> Tokens:
        arrays = {}
        for name, array in batch.packed.arrays().items():
            if name != "factors":
                bits = np.array(array.view(mx.uint8)).reshape(*array.shape, -1)
                bits[0, :, 1:] = 0xFE
                array = mx.array(bits.reshape(*array.shape[:-1], -1)).view(array.dtype)
            arrays[name] = array
        recent = np.array(batch.recent.astype(mx.float32))
        recent[0, :, : recent.shape[2] - batch.held[0]] = np.nan
        return replace(batch, packed=replace(batch.packed, **arrays), recent=mx.array(recent).astype(mx.float16))

    same(
        reference.attend(q, keys, values, 0.1, mask="causal"),
        host_target.attend(q, poisoned(keys), poisoned(values), 0.1, mask="causal"),
    )


def test_kernel_names_tell_their_parameters_apart() -> None:
    names: dict[str, str] = {}

    def recording(kernel: object, **call: object) -> object:
        return [mx.zeros(s, dtype=d) for s, d in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    built = []
    original = attention.build

    def watching(*arguments: object) -> object:
        kernel = original(*arguments)
        built.append(kernel)
        return kernel

    attention.build = watching
    try:
        with launch.using(recording):
            masks = (None, mx.array([True]))
            for length, group, bits, mask in itertools.product((50, 300, 2000), (1, 4), (3, 4), masks):
                keys, values = tokens("key", length, bits=bits), tokens("value", length)
                attention.attend(query(group), keys, values, 0.1, mask=mask)
    finally:
        attention.build = original
    for kernel in built:
        assert names.setdefault(kernel.name, kernel.header + kernel.body) == kernel.header + kernel.body
    assert len(names) >= 12


def test_strict_compile_of_every_kind_of_kernel() -> None:
    dispatches = []

    def capturing(kernel: object, **call: object) -> object:
        dispatches.append(metal_host.capture(lambda *xs: kernel(**{**call, "inputs": list(xs)}), *call["inputs"]))
        return host_target.on_host(kernel, **call)

    with launch.using(capturing):
        for bits in ALLOWED_BITS:
            keys, values = tokens("key", 1100, bits=bits), tokens("value", 1100, bits=bits)
            mx.eval(attention.attend(query(2), keys, values, 0.1, sinks=mx.array([0.0, 1.0])))
        keys = tokens("key", 200, bits=4, kind="prod")
        mx.eval(attention.scores(query(2, 2), keys, 0.1, mask=mx.full((1, 200), -1.0)))
    result = metal_host.strict_check(dispatches[0])
    if result.skipped:
        pytest.skip(f"{result.skipped}: address spaces and implicit conversions of kernel text were not checked")
    for dispatch in dispatches:
        result = metal_host.strict_check(dispatch)
        assert not result.findings.errors, result.findings
