"""Kernels beside the reference and MLX on small sizes, and the benchmark command.

The first half are benchmarks of pytest-benchmark: run once as tests they compare results, and
`pytest tests/test_benchmarks.py --benchmark-enable` times them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import assert_same_bits, assert_same_packed, assert_same_tokens

from turboquant_vlm import fast, reference
from turboquant_vlm.integration import benchmark as command
from turboquant_vlm.integration import benchmark_cases as cases
from turboquant_vlm.integration.benchmark_cases import Case, Data

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = pytest.mark.parametrize("module", [fast, reference], ids=["ours", "reference"])
STEPS = {
    "decode": Case("decode", dim=64, query_heads=8, kv_heads=2, tokens=700),
    "rows": Case("rows", dim=64, query_heads=8, kv_heads=2, tokens=700),
    "prefill": Case("prefill", dim=64, query_heads=4, kv_heads=1, tokens=600),
    "encode": Case("encode", dim=64, query_heads=8, kv_heads=2, tokens=320),
}


def by_step(*steps: str) -> Any:
    """A test per step, in the step's group of benchmarks."""
    return pytest.mark.parametrize(
        "case", [pytest.param(STEPS[s], id=s, marks=pytest.mark.benchmark(group=s)) for s in steps]
    )


@by_step("decode", "rows", "prefill")
@MODULES
def test_packed_attention(benchmark: Any, case: Case, module: Any) -> None:
    data = Data(case)
    run = cases.packed(module)(case, data)
    found = benchmark(lambda: command.timed(run, case.work)[1])
    # The cache is the reference's own, so that nothing of the kernels is in what is expected.
    keys, values = cases.filled(reference, case, data)
    assert_same_bits(found, reference.attend(data.queries, keys, values, case.scale, "causal"))


@by_step("decode", "rows", "prefill")
@pytest.mark.parametrize(
    ("dtype", "most"), [(mx.float32, 1e-5), (mx.bfloat16, 0.02), (mx.float16, 2e-3)], ids=["f32", "bf16", "f16"]
)
def test_mlx_attention(benchmark: Any, case: Case, dtype: mx.Dtype, most: float) -> None:
    data = Data(case)
    run = cases.fused(dtype)(case, data)
    found = np.array(benchmark(lambda: command.timed(run, case.work)[1]).astype(mx.float32))
    assert distance(found, in_float64(case, data)) < most


@by_step("decode", "rows", "prefill")
def test_numpy_attention(benchmark: Any, case: Case) -> None:
    data = Data(case)
    run = cases.numpy_attention(case, data)
    assert distance(benchmark(run, case.work), in_float64(case, data)) < 1e-5


@by_step("decode", "rows")
@pytest.mark.parametrize("build", [cases.uniform, cases.upstream])
def test_other_quantized_attention(benchmark: Any, case: Case, build: Callable[[Case, Data], cases.Run]) -> None:
    data = Data(case)
    run = build(case, data)
    found = np.array(benchmark(lambda: command.timed(run, case.work)[1]).astype(mx.float32))
    # They lose what their bits lose, and attend to the same tokens.
    assert 0.01 < distance(found, in_float64(case, data)) < 0.35


@by_step("encode")
@MODULES
def test_encoding(benchmark: Any, case: Case, module: Any) -> None:
    data = Data(case)
    pair = benchmark(cases.filled, module, case, data)
    for found, expected in zip(pair, cases.filled(reference, case, data), strict=True):
        assert_same_tokens(found, expected)
        assert_same_packed(found.packed, expected.packed)
    timed, expected = (command.timed(cases.packed(m)(case, data), case.work)[1] for m in (module, reference))
    for number, (found, wanted) in enumerate(zip(timed, expected, strict=True)):
        assert_same_bits(found, wanted, f"array {number}")
    # One tile was there before; as many tokens are packed as are appended.
    assert timed[0].shape[2] == 1 + case.tokens // reference.TILE


@by_step("encode")
def test_uniform_encoding(benchmark: Any, case: Case) -> None:
    data = Data(case)
    run = cases.uniform(case, data)
    keys = benchmark(lambda: command.timed(run, case.work)[1])[:3]
    again = mx.dequantize(*keys, group_size=cases.GROUP_SIZE, bits=cases.UNIFORM_BITS)
    assert distance(np.array(again), np.array(data.keys)) < 0.2


def in_float64(case: Case, data: Data) -> np.ndarray[Any, Any]:
    """Softmax attention, written out."""
    q, k, v = (np.array(x)[0].astype(np.float64) for x in data.floats)
    group = case.query_heads // case.kv_heads
    logits = q @ np.repeat(k, group, axis=0).transpose(0, 2, 1) * case.scale
    position = np.arange(case.tokens - case.queries, case.tokens)
    logits[:, np.arange(case.tokens) > position[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ np.repeat(v, group, axis=0) / weights.sum(axis=-1, keepdims=True)


def distance(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(found.ravel() - expected.ravel()) / np.linalg.norm(expected))


# The command

NAMES = [
    *("turboquant-vlm", "NumPy float32", "MLX float32", "MLX bfloat16", "MLX float16", "MLX uniform 4-bit"),
    *("mlx-vlm TurboQuant", "our reference"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What `--quick` writes and prints, with the shapes of its cases and shorter contexts."""
    target = tmp_path_factory.mktemp("quick") / "new" / "result.json"
    with pytest.MonkeyPatch.context() as patch:
        small = [replace(STEPS[c.step], key_bits=c.key_bits, value_bits=c.value_bits) for c in cases.QUICK]
        patch.setattr(command, "QUICK", small)
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(str(words[0])))
        assert command.run(["--quick", "--json", str(target)]) == 0
    return json.loads(target.read_text(encoding="utf-8")), printed[-1]


def check_schema(result: dict[str, Any]) -> None:
    """Names and types of everything in a result."""
    assert set(result) == {"environment", "settings", "cases"}
    assert set(result["environment"]) == {
        *("python", "mlx", "mlx-vlm", "numpy", "system", "cpu", "cores", "target", "threads", "isa")
    }
    assert set(result["settings"]) == {"seed", "rounds", "call_limit", "load_before"}
    for case in result["cases"]:
        assert set(case) == {
            *("step", "dim", "query_heads", "kv_heads", "tokens", "queries", "key_bits", "value_bits", "rows")
        }
        for row in case["rows"]:
            if "skipped" in row:
                assert set(row) == {"contestant", "skipped"}
                assert row["skipped"]
                continue
            assert set(row) == {"contestant", "median", "least", "most", "rounds", "ratio", "error"}
            assert 0 < row["least"] <= row["median"] <= row["most"]
            assert 1 <= row["rounds"] <= result["settings"]["rounds"]
            assert row["ratio"] > 0
            assert (row["error"] is None) == (case["step"] == "encode")


def test_quick_has_every_contestant_and_ratio(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    check_schema(result)
    assert [case["step"] for case in result["cases"]] == ["decode", "rows", "encode", "prefill"]
    for case in result["cases"]:
        rows = {row["contestant"]: row for row in case["rows"]}
        floats = [name for name in NAMES if "float" in name]
        assert list(rows) == [name for name in NAMES if case["step"] != "encode" or name not in floats]
        assert not [row for row in case["rows"] if row.get("skipped", "").startswith("failed")]
        assert "skipped" not in rows["turboquant-vlm"]
        assert rows["turboquant-vlm"]["ratio"] == 1
        if case["step"] in ("decode", "rows"):
            assert not [row for row in case["rows"] if "skipped" in row]
            # Kernels and reference read the same bits.
            assert rows["turboquant-vlm"]["error"] == rows["our reference"]["error"] > 0.01
            assert rows["MLX float32"]["error"] < 1e-5


def test_quick_prints_the_table_of_its_json(quick: tuple[dict[str, Any], str]) -> None:
    result, printed = quick
    assert printed == command.text(result)
    assert f"Times belong to this machine: {result['environment']['cpu']}, " in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + sum(len(case["rows"]) for case in result["cases"])


def test_quick_cases_are_the_main_ones() -> None:
    assert [(c.step, c.queries, c.tokens) for c in cases.QUICK] == [
        ("decode", 1, 4096),
        ("rows", 4, 4096),
        ("encode", 0, 512),
        ("prefill", 512, 4096),
    ]
    assert {(c.dim, c.query_heads, c.kv_heads, c.key_bits, c.value_bits) for c in cases.QUICK} == {(128, 32, 8, 4, 3)}


def test_all_cases_cover_sizes_and_widths() -> None:
    every = cases.all_cases()
    for step in ("decode", "rows", "prefill"):
        mine = [c for c in every if c.step == step]
        assert {c.dim for c in mine} == {64, 128, 256}
        assert {c.query_heads // c.kv_heads for c in mine} == {1, 4, 8}
        assert {c.tokens for c in mine} == {1024, 4096, 16_384, 65_536}
        assert {(c.key_bits, c.value_bits) for c in mine} == {(4, 4), (4, 3), (3, 3), (8, 4)}
    assert len(set(every)) == len(every)


def test_a_slow_contestant_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CALL_LIMIT", 0.0)
    (case,) = command.benchmark([STEPS["decode"]], command.FAST, log=lambda _: None)["cases"]
    assert all(row["skipped"].startswith("one call took") for row in case["rows"])
    assert "skipped: one call took" in command.text({**stored(), "cases": [case]})


def test_what_does_not_fit_into_the_time_is_left_out() -> None:
    effort = command.Effort(3, 0.1, total=0.0)
    (case,) = command.benchmark([STEPS["rows"]], effort, log=lambda _: None)["cases"]
    assert [row["contestant"] for row in case["rows"] if "skipped" not in row] == ["turboquant-vlm"]
    assert case["rows"][0]["rounds"] == 1
    assert all("more than was left of --quick" in row["skipped"] for row in case["rows"][1:])


def test_a_failing_contestant_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Case, __: Data) -> cases.Run:
        raise ValueError("no such\nshape")

    ours = cases.Contestant(cases.OURS, cases.packed(fast))
    monkeypatch.setattr(command, "contestants", lambda _: [ours, cases.Contestant("broken", build)])
    (case,) = command.benchmark([STEPS["decode"]], command.FAST, log=lambda _: None)["cases"]
    assert case["rows"][0]["ratio"] == 1
    assert case["rows"][0]["error"] is None
    assert case["rows"][1] == {"contestant": "broken", "skipped": "failed: ValueError: no such shape"}


def test_command_runs_in_a_process_with_threads(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    arguments = ["--quick", "--cases", "encode", "--threads", "1", "--json", str(target)]
    program = [sys.executable, "-m", "turboquant_vlm.integration.benchmark", *arguments]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(target.read_text(encoding="utf-8"))
    check_schema(result)
    assert [case["step"] for case in result["cases"]] == ["encode"]
    if result["environment"]["target"] == "cpu":
        assert result["environment"]["threads"] == 1
    assert ended.stdout.strip() == command.text(result)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cases", "decode,sideways"], "cases are some of decode,rows,prefill,encode; got 'decode,sideways'"),
        (["--cases", ""], "cases are some of"),
        (["--threads", "0"], "must be a number from 1 to"),
        (["--threads", "two"], "got 'two'"),
        (["--threads", str((os.cpu_count() or 1) + 1)], "the CPUs at hand"),
        (["--slow"], "unrecognized arguments: --slow"),
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def stored() -> dict[str, Any]:
    """The measurement that the documentation shows."""
    return json.loads((REPOSITORY / "docs" / "measurements" / "benchmark_cpu.json").read_text(encoding="utf-8"))


def test_documented_table_comes_from_the_stored_measurement() -> None:
    result = stored()
    check_schema(result)
    assert [case["step"] for case in result["cases"]] == [case.step for case in cases.QUICK]
    shown = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert command.text(result) in shown, "docs/benchmarks.md does not show the table of benchmark_cpu.json"
