"""The codec of the Metal target, run from its Metal text, equals the reference bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import assert_same_bits, assert_same_packed, assert_same_tokens, vectors

from turboquant_vlm import reference as tq
from turboquant_vlm.conformance import suite
from turboquant_vlm.fast import codec as fast_codec
from turboquant_vlm.fast import launch, tokens
from turboquant_vlm.fast.kernels import THREADGROUP_BYTES

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

pytestmark = pytest.mark.skipif(not metal_host.available(), reason=str(metal_host.unavailable_reason()))

DIMS = (64, 72, 80, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576, 8, 12, 1024)
PLAIN, FACTORS, BASE, BASE_FACTORS = "plain", "factors", "base", "base and factors"
KINDS = [("mse", b) for b in tq.ALLOWED_BITS] + [("prod", b) for b in (2, 3, 4, 5, 6)]
MODES = ((BASE, FACTORS), (PLAIN, BASE_FACTORS))
ALL_MODES = (BASE, PLAIN, BASE_FACTORS, FACTORS)
SPREAD = [
    (DIMS[(2 * i + j) % 16], kind, bits, mode)
    for i, (kind, bits) in enumerate(KINDS)
    for j, mode in enumerate(MODES[i % 2])
] + [
    (8, "prod", 3, BASE),
    (12, "mse", 8, BASE),
    (1024, "prod", 4, BASE),
    (1024, "mse", 6, PLAIN),
]
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
BACKEND = SimpleNamespace(
    **{name: getattr(tq, name) for name in tq.__all__} | {name: getattr(tokens, name) for name in tokens.__all__},
)
BACKEND.quantize, BACKEND.dequantize = fast_codec.quantize, fast_codec.dequantize


class Host:
    """Runs Metal text on this machine, refuses whatever the runner remarks, and keeps what each dispatch took."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.threads: list[int] = []
        self.memory: list[int] = []

    def __call__(self, kernel: Any, **call: Any) -> list[mx.array]:
        result = metal_host.host_run(kernel, **call, **self.options)
        assert not list(result.findings), str(result.findings)
        self.threads.append(int(np.prod(call["threadgroup"])))
        self.memory.append(result.threadgroup_bytes)
        return result.outputs


@pytest.fixture
def host() -> Iterator[Host]:
    """Kernels of this test run on the host."""
    with launch.using(launcher := Host()):
        yield launcher


def some_factors(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(-3, 4, shape).astype(np.int8))


def check(x: mx.array, codec: tq.Codec, mode: str, dtype: mx.Dtype = mx.float32) -> None:
    """Codes and restores x on both sides and compares all bits."""
    given = some_factors((*x.shape[:-2], codec.dim)) if mode in (FACTORS, BASE_FACTORS) else None
    base = mode in (BASE, BASE_FACTORS)
    want = tq.quantize(x, codec, base=base, factors=given)
    assert_same_packed(fast_codec.quantize(x, codec, base=base, factors=given), want)
    restored = (fast_codec.dequantize(want, codec, dtype), tq.dequantize(want, codec, dtype))
    # Which NaN comes back is not pinned.
    assert_same_bits(*(mx.where(mx.isnan(array), mx.array(-1, dtype), array) for array in restored), "dequantized")
    assert mx.array_equal(*map(mx.isnan, restored)).item()


def shape_for(dim: int, mode: str) -> tuple[int, ...]:
    if mode in (BASE, BASE_FACTORS):
        return (1, 2, 128, dim) if dim <= 128 else (1, 64, dim)
    return (2, 67, dim) if dim <= 128 else (2, 5, dim)


@pytest.mark.parametrize(("dim", "kind", "bits", "mode"), SPREAD)
def test_codes_and_restored_vectors_equal_the_reference(host: Host, dim: int, kind: str, bits: int, mode: str) -> None:
    check_spread(dim, kind, bits, mode)
    assert max(host.threads) <= 512
    assert max(host.memory) <= THREADGROUP_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_more_codes_and_restored_vectors_equal_the_reference(host: Host, kind: str, bits: int, mode: str) -> None:
    for dim in DIMS[(bits + ALL_MODES.index(mode)) % 4 : 16 : 4]:
        check_spread(dim, kind, bits, mode)


def check_spread(dim: int, kind: str, bits: int, mode: str) -> None:
    dtype = DTYPES[(dim + bits) % 3]
    x = vectors(shape_for(dim, mode), dim * 10 + bits, dtype)
    # Channels of different size, so that factors of every size are measured.
    x = x * mx.array(2.0 ** np.random.default_rng(dim).integers(-6, 7, dim)).astype(dtype)
    check(x, tq.make_codec(dim, bits, seed=dim + bits, kind=kind), mode, DTYPES[bits % 3])


def special_vectors(dim: int, dtype: mx.Dtype) -> mx.array:
    """64 vectors: zeros, NaN, infinities, subnormals, huge, tiny, spikes, constants, and normal ones between."""
    x = np.random.default_rng(dim).standard_normal((64, dim)).astype(np.float32)
    x[0] = 0
    x[3, 5], x[4, 0], x[5, dim - 1] = np.nan, np.inf, -np.inf
    x[8] = 1e-40
    x[9] *= np.float32(1e-30)
    x[10], x[11] = 1, -3
    x[12] = 0
    x[12, dim // 2] = -7
    x[13] *= 2.0**-14
    x[14, :] = 0
    x[14, 1], x[14, 2] = 2.0**-80, 2.0**-81
    x[15] = np.where(np.arange(dim) % 2, 1, -1)
    x[20] = -0.0
    if dtype != mx.float16:
        x[16] *= np.float32(1e38) / np.abs(x[16]).max()
        x[17] *= np.float32(1e30)
    with np.errstate(over="ignore"):
        return mx.array(x).astype(dtype)


@pytest.mark.parametrize(
    ("kind", "bits", "dtype"),
    [
        pytest.param(kind, bits, dtype, marks=[] if i == j else pytest.mark.slow)
        for i, (kind, bits) in enumerate([("mse", 4), ("prod", 3), ("mse", 8), ("mse", 1)])
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_special_vectors(host: Host, kind: str, bits: int, dtype: mx.Dtype) -> None:
    x = special_vectors(72, dtype)
    codec = tq.make_codec(72, bits, seed=1, kind=kind)
    check(x, codec, PLAIN, dtype)
    check(x, codec, BASE, dtype)
    check(x[20:23], codec, FACTORS, dtype)


ON_A_BOUNDARY = [
    # Y_0 = 7682 = (40 + 127) rho / 2^16, and 3250 = (16 + 49) rho / 2^16.
    (2, [-3068, -2919, -4351, 3264, 3103, -108, 3128, 83]),
    (3, [-2069, -3154, 363, -4367, -1001, -2225, 2329, 1340]),
    # A quotient that is whole, and one that lies just below a whole number.
    (8, [-5193, -7463, -686, 4233, 6863, 6661, 1861, -3412]),
    (8, [1437, 4437, -2917, -351, -562, 5679, -2654, -2040]),
]


@pytest.mark.parametrize(("bits", "vector"), ON_A_BOUNDARY)
def test_coordinates_on_a_boundary(host: Host, bits: int, vector: list[int]) -> None:
    x = mx.array([vector, [-n for n in vector]], mx.float32)
    check(x, tq.make_codec(8, bits), PLAIN)
    check(x[:1], tq.make_codec(8, bits), PLAIN)


@pytest.mark.parametrize("kept", [slice(0, 1), slice(3, 4), slice(16, 17)], ids=["zeros", "nan", "huge"])
def test_a_tile_of_one_special_vector(host: Host, kept: slice) -> None:
    x = mx.concatenate([special_vectors(72, mx.float32)[kept]] * 64, axis=0)
    check(x, tq.make_codec(72, 4), BASE)
    check(x, tq.make_codec(72, 3, kind="prod"), BASE)


@pytest.mark.parametrize(("order", "poison"), [("reverse", True), ("shuffle:1", True), ("shuffle:2", False)])
def test_the_order_of_threads_and_stale_memory_do_not_show(order: str, poison: bool) -> None:
    with launch.using(Host(order=order, poison=poison)):
        check(vectors((2, 128, 80), 5), tq.make_codec(80, 5), BASE)
        check(vectors((2, 64, 72), 6), tq.make_codec(72, 3, kind="prod"), BASE_FACTORS)
        check(vectors((2, 9, 72), 7), tq.make_codec(72, 8), FACTORS)


def test_strided_and_broadcast_arguments(host: Host) -> None:
    codec = tq.make_codec(64, 4)
    x = vectors((64, 3, 2, 64), 3).transpose(2, 1, 0, 3)
    check(x, codec, BASE)
    check(x[:, ::2, 5:17], codec, PLAIN)
    for given in (some_factors((64,)), some_factors((3, 64))):
        want = tq.quantize(x, codec, base=True, factors=given)
        assert_same_packed(fast_codec.quantize(x, codec, base=True, factors=given), want)
    assert_same_bits(
        fast_codec.dequantize(tq.quantize(x, codec, factors=some_factors((64,))), codec),
        tq.dequantize(tq.quantize(x, codec, factors=some_factors((64,))), codec),
    )


def test_refusals_and_empty_arrays_are_the_references(host: Host) -> None:
    codec = tq.make_codec(64, 4)
    wrong = [
        {"x": mx.zeros((3, 65))},
        {"x": mx.zeros((3, 64), mx.int32)},
        {"x": mx.zeros((0, 64))},
        {"x": mx.zeros((63, 64)), "base": True},
        {"x": mx.zeros((64, 64)), "factors": mx.zeros((63,), mx.int8)},
    ]
    for arguments in wrong:
        with pytest.raises(ValueError) as want:  # noqa: PT011
            tq.quantize(codec=codec, **arguments)
        with pytest.raises(ValueError) as got:  # noqa: PT011
            fast_codec.quantize(codec=codec, **arguments)
        assert str(got.value) == str(want.value)
    empty = tq.empty_tokens(codec, "key", 1, 2, mx.float16).packed
    assert fast_codec.dequantize(empty, codec, mx.float16).shape == (1, 2, 0, 64, 64)
    assert not host.threads


def stores(k: mx.array, v: mx.array, bits: int, kind: str = "mse", factors: mx.array | None = None) -> Any:
    other = tq.ALLOWED_BITS[(tq.ALLOWED_BITS.index(bits) + 3) % 7]
    return (
        tq.empty_tokens(tq.make_codec(k.shape[3], bits, kind=kind), "key", *k.shape[:2], k.dtype, factors),
        tq.empty_tokens(tq.make_codec(v.shape[3], other, seed=9), "value", *v.shape[:2], v.dtype),
    )


ONE_BY_ONE = [
    pytest.param(bits, dim, 1 + (i + j) % 2, marks=[] if i % 4 == j or (i, j) == (0, 1) else pytest.mark.slow)
    for i, bits in enumerate(tq.ALLOWED_BITS)
    for j, dim in enumerate((64, 80, 128, 256))
]


@pytest.mark.parametrize(("bits", "dim", "batch"), ONE_BY_ONE)
def test_one_token_at_a_time_equals_all_at_once(host: Host, bits: int, dim: int, batch: int) -> None:
    dtype = mx.bfloat16 if dim == 80 else mx.float16
    count = 162 if dim <= 80 else 97
    x = vectors((batch, 1, count, dim), bits, dtype)
    pair = stores(x, x, bits)
    want = tuple(tq.append(store, x) for store in pair)
    slow = pair
    for t in range(count):
        slow = tokens.append_pair(*slow, x[:, :, t : t + 1], x[:, :, t : t + 1])
    assert len(host.threads) == tq.packed_tiles(count)
    fast = tokens.append_pair(*pair, x, x)
    assert len(host.threads) == tq.packed_tiles(count) + 1
    for got in (slow, fast):
        for mine, theirs in zip(got, want, strict=True):
            assert_same_tokens(mine, theirs)


@pytest.mark.parametrize(
    ("dim", "value_dim", "kind", "bits", "given"),
    [(96, 64, "mse", 3, False), (64, 128, "prod", 4, False), (256, 80, "prod", 2, True), (72, 576, "mse", 8, True)],
)
def test_keys_and_values_of_different_sizes_share_a_dispatch(
    host: Host, dim: int, value_dim: int, kind: str, bits: int, given: bool
) -> None:
    k = vectors((1, 2, 100, dim), 1, mx.float16)
    v = vectors((1, 2, 100, value_dim), 2, mx.bfloat16 if given else mx.float16)
    pair = stores(k, v, bits, kind, some_factors((2, dim)) if given else None)
    got = tokens.append_pair(*pair, k, v)
    assert len(host.threads) == 1
    want = tq.append_pair(*pair, k, v)
    for mine, theirs in zip(got, want, strict=True):
        assert_same_tokens(mine, theirs)
        assert_same_bits(tokens.raw_tokens(mine), tq.raw_tokens(theirs), "raw tokens")


def test_rows_of_different_lengths_and_trims(host: Host) -> None:
    x = vectors((2, 1, 130, 64), 4, mx.float16)
    pair = stores(x, x, 4)
    got, want = pair, pair
    steps = [(130, [130, 71]), (40, [3, 40]), (-60, [60, 20]), (50, [50, 50])]
    for amount, counts in steps:
        if amount < 0:
            got = tuple(tokens.trim(store, counts) for store in got)
            want = tuple(tq.trim(store, counts) for store in want)
        else:
            got = tokens.append_pair(*got, x[:, :, :amount], x[:, :, :amount], counts)
            want = tq.append_pair(*want, x[:, :, :amount], x[:, :, :amount], counts)
        for mine, theirs in zip(got, want, strict=True):
            assert_same_tokens(mine, theirs)
            assert_same_bits(tokens.raw_tokens(mine, mx.float32), tq.raw_tokens(theirs, mx.float32), "raw tokens")


def test_a_pair_of_different_tokens_is_refused() -> None:
    x = vectors((1, 1, 4, 64), 0)
    keys, values = stores(x, x, 4)
    for append_pair in (tq.append_pair, tokens.append_pair):
        with pytest.raises(ValueError, match="roles"):
            append_pair(values, keys, x, x)
        with pytest.raises(ValueError, match="as long"):
            append_pair(tq.append(keys, x), values, x, x)
        with pytest.raises(ValueError, match="alike"):
            append_pair(keys, values, x, x[:, :, :3])
        with pytest.raises(ValueError, match="counts"):
            append_pair(keys, values, x, x, [5])


CODEC_CASES = [c for c in suite.vectors() if c["op"] in ("quantize", "dequantize", "tokens", "supported")]


def run_cases(cases: list[Any]) -> None:
    problems = {case["id"]: suite.check(case, BACKEND) for case in cases}
    assert not {name: lines for name, lines in problems.items() if lines}


def test_some_vectors_of_every_group(host: Host) -> None:
    groups: dict[str, list[Any]] = {}
    for case in CODEC_CASES:
        groups.setdefault(case["group"], []).append(case)
    run_cases([case for cases in groups.values() for case in cases[:: max(1, len(cases) // 2)]])


@pytest.mark.slow
def test_all_vectors(host: Host) -> None:
    run_cases(CODEC_CASES)


@pytest.mark.parametrize("dim", tq.supported_dims())
def test_threads_and_threadgroup_memory_of_every_head_size(dim: int) -> None:
    coding = fast_codec.encode_simdgroups(dim)
    assert 4 <= coding <= 8
    assert fast_codec.encode_bytes(dim, coding) <= THREADGROUP_BYTES
    for signs in (False, True):
        restoring = fast_codec.dequantize_simdgroups(dim, signs)
        assert 2 <= restoring <= 8
        assert fast_codec.dequantize_bytes(dim, signs, restoring) <= THREADGROUP_BYTES


@pytest.mark.parametrize("dim", [8, 200, 1024])
def test_the_memory_counted_is_the_memory_declared(host: Host, dim: int) -> None:
    for codec in (tq.make_codec(dim, 4), tq.make_codec(dim, 3, kind="prod")):
        packed = fast_codec.quantize(vectors((8, dim), 1), codec)
        fast_codec.dequantize(packed, codec)
        signs = codec.kind == "prod"
        assert host.memory[-2:] == [
            fast_codec.encode_bytes(dim, fast_codec.encode_simdgroups(dim)),
            fast_codec.dequantize_bytes(dim, signs, fast_codec.dequantize_simdgroups(dim, signs)),
        ]


def test_sizes_beyond_any_threadgroup_are_refused() -> None:
    with pytest.raises(ValueError, match="threadgroup memory"):
        fast_codec.encode_simdgroups(8192)


def test_the_text_keeps_its_address_spaces() -> None:
    def strict(kernel: Any, *, inputs: Any, **call: Any) -> list[mx.array]:
        dispatch = metal_host.capture(lambda *arrays: kernel(inputs=list(arrays), **call), *map(mx.array, inputs))
        result = metal_host.strict_check(dispatch)
        assert not result.findings.errors, str(result.findings)
        return metal_host.host_call(kernel, inputs=inputs, **call)

    with launch.using(strict):
        check(vectors((64, 72), 1, mx.bfloat16), tq.make_codec(72, 3, kind="prod"), BASE, mx.bfloat16)
        check(vectors((3, 64), 1, mx.float32), tq.make_codec(64, 8), FACTORS, mx.float16)
        x = vectors((1, 1, 100, 64), 1)
        tokens.append_pair(*stores(x, x, 5), x, x)
