"""The codec of the CPU kernels equals the reference bit for bit, on every instruction set that this machine runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import assert_same_bits, assert_same_packed, assert_same_tokens, vectors

from turboquant_vlm import reference as tq
from turboquant_vlm.conformance import suite
from turboquant_vlm.fast import cpu
from turboquant_vlm.fast.cpu import native

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"no CPU kernels here: {native.unavailable_reason()}"
)

DIMS = (8, 12, 64, 72, 80, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576, 1024)
KINDS = [("mse", b) for b in tq.ALLOWED_BITS] + [("prod", b) for b in (2, 3, 4, 5, 6)]
# Whether there is a base, and whether factors are given.
MODES = ((False, False), (False, True), (True, False), (True, True))
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
ISAS = native.available_isas()
CODEC_GROUPS = [
    "base", "codebook", "codes", "dequantize", "errors", "factors", "packing", "prod", "rotation", "scale", "snap",
    "tokens",
]  # fmt: skip


def some_factors(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(-3, 4, shape).astype(np.int8))


def assert_same_vectors(got: mx.array, want: mx.array) -> None:
    """Equal bits, but for which NaN it is."""
    assert mx.array_equal(mx.isnan(got), mx.isnan(want)).item()
    zero = mx.array(0, want.dtype)
    assert_same_bits(mx.where(mx.isnan(got), zero, got), mx.where(mx.isnan(want), zero, want), "dequantized")


def check(
    x: mx.array, codec: tq.Codec, base: bool, given: bool, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and restores x on both sides, on every instruction set with 1 and 2 threads, and compares all bits."""
    factors = some_factors((*x.shape[:-2], codec.dim), codec.dim) if given else None
    want = tq.quantize(x, codec, base=base, factors=factors)
    restored = tq.dequantize(want, codec, dtype)
    for index, isa in enumerate(ISAS):
        monkeypatch.setenv("TURBOQUANT_CPU_ISA", isa)
        monkeypatch.setenv("TURBOQUANT_THREADS", str(1 + (index + codec.bits) % 2))
        assert_same_packed(cpu.quantize(x, codec, base=base, factors=factors), want)
        assert_same_vectors(cpu.dequantize(want, codec, dtype), restored)


@pytest.mark.parametrize("dim", DIMS)
def test_codes_and_restored_vectors_equal_the_reference(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dim <= 128
    for index, (kind, bits) in enumerate(KINDS):
        codec = tq.make_codec(dim, bits, seed=dim + bits, kind=kind)
        for turn, (base, given) in enumerate(MODES):
            dtype = DTYPES[(index + turn) % 3]
            shape = (2, 128 if base else 67, dim) if small else (1, 64 if base else 21, dim)
            x = vectors(shape, dim * 10 + bits, dtype)
            # Channels of different size, so that factors of every size are measured.
            x = x * mx.array(2.0 ** np.random.default_rng(dim).integers(-6, 7, dim)).astype(dtype)
            check(x, codec, base, given, DTYPES[(index + 2 * turn) % 3], monkeypatch)


def special_vectors(dim: int) -> mx.array:
    """128 vectors, float32: zeros, NaN, infinities, subnormals, huge, tiny, spikes, constants, normal ones between."""
    x = np.random.default_rng(dim).standard_normal((128, dim)).astype(np.float32)
    x[0] = 0
    x[3, 5], x[4, 0], x[5, dim - 1], x[70] = np.nan, np.inf, -np.inf, np.nan
    x[8] = 1e-40
    x[9] *= np.float32(1e-30)
    x[10] = np.where(np.arange(dim) == 3, np.float32(3e38), 0)
    x[11] *= np.float32(1e37)
    x[12:16] = 1
    x[16] = np.where(np.arange(dim) % 2, -1, 1)
    x[17] = np.float32(2.0**-80)
    x[18] = np.nextafter(np.float32(2.0**-80), np.float32(0))
    x[19] = -np.finfo(np.float32).max
    x[20] = np.arange(dim) / 7
    x[90:100] *= np.exp2(np.arange(-60, 60, 12, dtype=np.float32))[:, None]
    return mx.array(x)


@pytest.mark.parametrize("dim", [8, 64, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dim: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, bits in (("mse", 1), ("mse", 4), ("mse", 8), ("prod", 3)):
        codec = tq.make_codec(dim, bits, seed=1, kind=kind)
        for base, given in MODES:
            check(special_vectors(dim).astype(dtype), codec, base, given, dtype, monkeypatch)


def test_tiles_that_are_zero_constant_or_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (0.0, 1.0, float("nan"), float("inf"), 1e-40):
        for kind in ("mse", "prod"):
            codec = tq.make_codec(64, 3, kind=kind)
            check(mx.full((1, 128, 64), value), codec, True, False, mx.float16, monkeypatch)


@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 1, 64), (130, 64), (2, 2, 65, 64)])
def test_any_number_of_vectors(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = tq.make_codec(64, 4, seed=9)
    for given in (False, True):
        check(vectors(shape, 5), codec, False, given, mx.float32, monkeypatch)


def test_arrays_that_are_not_contiguous() -> None:
    codec = tq.make_codec(64, 4, seed=9)
    x = vectors((3, 128, 2, 64), 1).transpose(0, 2, 1, 3)
    for base in (False, True):
        want = tq.quantize(x, codec, base)
        assert_same_packed(cpu.quantize(x, codec, base), want)
        sliced = tq.Packed(**{name: array[:, 1:] for name, array in want.arrays().items()})
        assert_same_vectors(cpu.dequantize(sliced, codec), tq.dequantize(sliced, codec))


def test_factors_and_scales_that_are_shared() -> None:
    codec = tq.make_codec(64, 4, seed=9)
    x = vectors((3, 2, 64, 64), 1)
    for factors in (some_factors((64,)), some_factors((2, 64)), some_factors((3, 1, 64))):
        assert_same_packed(cpu.quantize(x, codec, True, factors), tq.quantize(x, codec, True, factors))
    tokens = tq.append(tq.empty_tokens(codec, "key", 3, 2, mx.float16), vectors((3, 2, 300, 64), 2))
    assert_same_vectors(cpu.dequantize(tokens.packed, codec), tq.dequantize(tokens.packed, codec))


def test_arguments_are_checked_as_in_the_reference() -> None:
    codec = tq.make_codec(64, 4)
    for arguments in (
        (mx.zeros((2, 8)), codec),
        (mx.zeros((2, 64), mx.int32), codec),
        (mx.zeros((0, 64)), codec),
        (mx.zeros((63, 64)), codec, True),
        (mx.zeros((2, 64)), codec, False, mx.zeros((8,), mx.int8)),
    ):
        messages = []
        for module in (tq, cpu):
            with pytest.raises(ValueError, match=r"64|vectors|int32") as caught:
                module.quantize(*arguments)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    empty = tq.Packed(mx.zeros((2, 0, 8), mx.uint32), mx.zeros((2, 0), mx.float16))
    assert_same_bits(cpu.dequantize(empty, codec, mx.float16), mx.zeros((2, 0, 64), mx.float16))


def test_float64_is_refused_as_vectors_and_given_as_result() -> None:
    codec = tq.make_codec(64, 4)
    with mx.stream(mx.cpu):
        for backend in (tq, cpu):
            with pytest.raises(ValueError, match=r"x must be float16, bfloat16 or float32; got mlx\.core\.float64"):
                backend.quantize(vectors((2, 64, 64), 3, mx.float64), codec, True)
        want = tq.quantize(vectors((2, 64, 64), 3, mx.float32), codec, True)
        got = cpu.dequantize(want, codec, mx.float64)
        assert got.dtype == mx.float64
        assert mx.array_equal(got, tq.dequantize(want, codec, mx.float64)).item()


# Caches


@pytest.mark.parametrize(("kind", "key_bits", "value_bits"), [("mse", 4, 3), ("prod", 3, 8)])
def test_one_token_at_a_time_equals_all_at_once(kind: str, key_bits: int, value_bits: int) -> None:
    codecs = tq.make_codec(64, key_bits, kind=kind), tq.make_codec(80, value_bits)
    k, v = vectors((2, 2, 300, 64), 1, mx.bfloat16), vectors((2, 2, 300, 80), 2, mx.bfloat16)

    def grown(steps: list[int], module: object = cpu) -> tuple[tq.Tokens, tq.Tokens]:
        keys = cpu.empty_tokens(codecs[0], "key", 2, 2, mx.bfloat16)
        values = cpu.empty_tokens(codecs[1], "value", 2, 2, mx.bfloat16)
        at = 0
        for step in steps:
            part = slice(at, at + step)
            keys, values = module.append_pair(keys, values, k[:, :, part], v[:, :, part])  # type: ignore[attr-defined]
            at += step
        return keys, values

    want = grown([300], tq)
    for steps in ([300], [1] * 300, [7] * 42 + [6], [100, 200]):
        for got, expected in zip(grown(steps), want, strict=True):
            assert_same_tokens(got, expected)


def test_tokens_of_rows_that_differ() -> None:
    codec = tq.make_codec(64, 4, seed=2)
    x = vectors((3, 2, 240, 64), 4)
    made = []
    for module in (tq, cpu):
        tokens = module.append(module.empty_tokens(codec, "key", 3, 2, mx.float16), x, counts=[240, 10, 130])
        tokens = module.append(tokens, x[:, :, :70], counts=[0, 70, 33])
        shorter = module.trim(tokens, [100, 80, 3])
        made.append((tokens, shorter, module.append(shorter, x[:, :, :90]), module.raw_tokens(tokens)))
    for want, got in zip(made[0][:3], made[1][:3], strict=True):
        assert_same_tokens(got, want)
    assert_same_vectors(made[1][3], made[0][3])


@pytest.mark.parametrize("isa", ISAS)
def test_vectors_of_the_codec(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOQUANT_CPU_ISA", isa)
    result = suite.run_suite(cpu, groups=CODEC_GROUPS)
    assert result.passed, result.verdict()
    assert len(result.cases) > 800


# Builds that check themselves

CASES = """
import threading
import mlx.core as mx
import numpy as np
from turboquant_vlm import reference as tq
from turboquant_vlm.fast import cpu
from turboquant_vlm.fast.cpu import native
mx.set_default_device(mx.cpu)
def run(seed):
    random = np.random.default_rng(seed)
    for dim in (12, 64, 100, 128):
        for kind, bits in [("mse", b) for b in (1, 2, 3, 4, 5, 6, 8)] + [("prod", b) for b in (2, 5)]:
            codec = tq.make_codec(dim, bits, seed=3, kind=kind)
            for base in (False, True):
                x = mx.array(random.standard_normal((2, 128 if base else 67, dim)).astype(np.float32))
                packed = cpu.quantize(x.astype(mx.bfloat16), codec, base)
                cpu.dequantize(packed, codec, mx.float16)
"""


def run_sanitized(sanitize: str, body: str, tmp_path: Path) -> str:
    """What a process says that runs CASES and `body` on kernels built for a sanitizer; skips where there is none."""
    cxx = native.compiler()[0]
    name = {"address": "libasan.so", "thread": "libtsan.so"}[sanitize]
    asked = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    runtime = asked.stdout.strip()
    if sys.platform != "linux" or not Path(runtime).is_absolute():
        pytest.skip(f"{shutil.which(cxx)} has no {name}")
    quiet = tmp_path / "suppressions"
    quiet.write_text("called_from_lib:libmlx.so\nrace:libmlx.so\n")
    environment = {
        **os.environ,
        "TURBOQUANT_CPU_SANITIZE": sanitize,
        "TURBOQUANT_THREADS": "4",
        "LD_PRELOAD": runtime,
        "OPENBLAS_NUM_THREADS": "1",
        "ASAN_OPTIONS": "detect_leaks=0",
        # What is not compiled for the sanitizer, OpenBLAS say, makes it report races that are none.
        "TSAN_OPTIONS": f"suppressions={quiet} exitcode=0",
    }
    code = CASES + textwrap.dedent(body) + "\nprint('done')\n"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in ended.stderr or "cannot allocate memory" in ended.stderr:
        pytest.skip(f"the runtime of the {sanitize} sanitizer does not start here")
    assert ended.stdout == "done\n", ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stderr


def test_no_access_out_of_bounds_and_no_undefined_behaviour(tmp_path: Path) -> None:
    said = run_sanitized("address", "run(0)", tmp_path)
    assert "runtime error" not in said
    assert "ERROR" not in said


def test_no_data_race(tmp_path: Path) -> None:
    body = """
    native.library()
    at_once = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in at_once: thread.start()
    for thread in at_once: thread.join()
    """
    said = run_sanitized("thread", body, tmp_path)
    assert "fast/cpu/src" not in said
    assert "turboquant-" not in said
