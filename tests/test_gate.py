"""The device check: faulty kernels never serve, a run goes on with the reference's bits, verdicts hold while nothing
changes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fake_targets import Fakes, generation, noise, same_bits

from turboquant_vlm import fast, reference
from turboquant_vlm.conformance import gate, metal_host, run_suite
from turboquant_vlm.conformance.cases import FLAGS
from turboquant_vlm.conformance.gate_cases import GATE, PROBES
from turboquant_vlm.conformance.suite import gate_vectors
from turboquant_vlm.fast import targets
from turboquant_vlm.fast.targets import Target
from turboquant_vlm.integration import backend, report
from turboquant_vlm.integration.cache import TurboQuantKVCache
from turboquant_vlm.integration.guard import Guard

SHARED = os.environ.get("TURBOQUANT_CACHE")
CASES = 1 + len(PROBES) + len(GATE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a backend that has not been resolved."""
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    backend.forget()
    yield tmp_path / "cache" / gate.FOLDER
    backend.forget()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    made = Fakes(tmp_path / "modules", monkeypatch)
    yield made
    made.unload()


# What the check runs


def _codecs(value: Any) -> set[tuple[int, int, str]]:
    if isinstance(value, list):
        return set().union(*map(_codecs, value))
    if not isinstance(value, dict):
        return set()
    own = {(value["dim"], value["bits"], value.get("kind", "mse"))} if {"dim", "bits"} <= set(value) else set()
    return own.union(*map(_codecs, value.values()))


def test_the_subset_covers_what_it_claims() -> None:
    cases = gate_vectors()
    assert len(cases) == len(GATE) == len(set(GATE)) <= 64
    assert {c["op"] for c in cases} == {"quantize", "dequantize", "tokens", "attend", "error", "supported"}
    # Few head sizes and widths, for each pair is a kernel to compile.
    codecs = set().union(*(_codecs(c["inputs"]) for c in cases if c["op"] != "error"))
    assert len(codecs) <= 24
    assert {d for d, _, _ in codecs} >= {8, 12, 64, 80, 128, 256}
    attended = [c["inputs"] for c in cases if c["op"] == "attend"]
    for side in ("keys", "values"):
        assert {i[side]["codec"]["bits"] for i in attended} >= set(reference.ALLOWED_BITS)
        assert {i[side]["dtype"] for i in attended} >= {"float16", "float32"}
    assert any(kind == "prod" for _, _, kind in codecs)
    assert {i["q"]["dtype"] for i in attended} >= {"float16", "float32"}
    masks = [i["mask"] for i in attended if isinstance(i["mask"], dict)]
    assert {m["dtype"] for m in masks} >= {"bool", "float32"}
    assert {len(m["shape"]) for m in masks} >= {3, 4, 5}
    assert {i["mask"] for i in attended if not isinstance(i["mask"], dict)} == {None, "causal"}
    for option in ("sinks", "window", "left_padding", "scores"):
        assert any(i.get(option) for i in attended), option
    # What only some kinds of arithmetic would notice, apart from four kinds that the whole suite covers.
    flags = {flag for c in cases for flag in c["flags"]}
    assert FLAGS - flags <= {"one_hot", "seed", "tail_tile", "constant_key", "equal_logits"}


def test_the_subset_reads_raw_packed_and_mixed_tiles() -> None:
    lengths = set()
    for case in gate_vectors():
        if case["op"] == "attend":
            lengths |= {sum(step[1] for step in case["inputs"]["steps"] if step[0] == "append")}
    assert min(lengths) < 96  # nothing packed
    assert any(96 <= n < 160 for n in lengths)  # one packed tile and raw ones
    assert max(lengths) > 600  # many splits


def test_the_subset_passes_on_the_reference_and_on_fast() -> None:
    for module in (reference, fast):
        result = run_suite(module, gate=True)
        assert result.passed, result.verdict()
        assert len(result.cases) == len(GATE)
        assert {name: probe(module) for name, probe in PROBES.items()} == {name: [] for name in PROBES}


def test_probes_notice_what_no_vector_calls() -> None:
    def broken(**changes: Any) -> Any:
        names = {name: getattr(reference, name) for name in reference.__all__}
        return type("Broken", (), {k: staticmethod(v) if callable(v) else v for k, v in {**names, **changes}.items()})

    def reversed_rows(rows: Any) -> Any:
        return reference.stack_rows(rows[::-1])

    def raises(q: mx.array, k: mx.array) -> mx.array:
        raise RuntimeError("no kernel")

    assert PROBES["probe/rows"](broken(stack_rows=reversed_rows)) != []
    assert PROBES["probe/tables"](broken(measure_factors=raises)) == ["raised RuntimeError: no kernel"]
    assert PROBES["probe/tables"](broken(RING=192)) != []


# Faults


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("does not compile", "probe/rows: raised RuntimeError: Unable to build metal library from source error: no"),
        ("one wrong bit", "output["),
        ("aborts", "the process ended with SIGABRT"),
        ("leaves early", "the process ended with status 0"),
        ("leaves on import", "import: the process ended with status 0"),
        ("cannot be imported", "import: raised ModuleNotFoundError"),
        ("another signature", "probe/functions: attend has the signature (q, keys, values, scale, **options)"),
        ("lacks a function", "probe/functions: stack_rows is missing"),
    ],
)
def test_a_fault_fails_the_check(fakes: Fakes, fault: str, reason: str) -> None:
    target = fakes.target(fault)
    found = gate.check(target)
    assert not found.ok
    assert reason in found.reason
    assert "\n" not in found.reason
    assert found.cases < CASES
    again = gate.check(target)
    assert again.remembered
    assert (again.ok, again.reason, again.cases) == (False, found.reason, found.cases)


def test_a_hanging_kernel_fails_the_check(fakes: Fakes) -> None:
    start = time.perf_counter()
    found = gate.check(fakes.target("hangs"), timeout=8)
    assert time.perf_counter() - start < 30
    assert not found.ok
    assert found.reason == "probe/rows: no end after 8 s"


@pytest.mark.parametrize("fault", ["none", "noise"])
def test_right_kernels_pass(fakes: Fakes, fault: str) -> None:
    found = gate.check(fakes.target(fault))
    assert (found.ok, found.reason, found.cases, found.remembered) == (True, f"all {CASES} cases agree", CASES, False)
    assert found.seconds > 0
    assert all(found.identity[key] for key in ("device", "system", "mlx", "python", "kernels", "reference", "vectors"))


hosted = pytest.mark.skipif(
    metal_host.unavailable_reason() is not None, reason=f"no host for Metal text: {metal_host.unavailable_reason()}"
)


@hosted
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "ok"), [("hosted", True), ("hosted, one wrong bit", False)])
def test_the_text_of_the_metal_kernels(
    fakes: Fakes, fault: str, ok: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled text is shared with the other tests of the kernels; the first compilation takes minutes.
    if SHARED is None:
        monkeypatch.delenv("TURBOQUANT_CACHE")
    else:
        monkeypatch.setenv("TURBOQUANT_CACHE", SHARED)
    found = gate.check(fakes.target(fault), timeout=900, folder=folder)
    assert found.ok is ok, found.reason


@pytest.mark.slow
@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal device here")
def test_the_metal_kernels_on_this_device() -> None:
    found = gate.check(targets.TARGETS[0])
    assert found.ok, found.reason


@pytest.mark.parametrize("fault", ["does not compile", "one wrong bit", "aborts", "hangs"])
@pytest.mark.parametrize("name", ["auto", "fast", "metal"])
def test_after_a_failed_check_the_reference_serves(
    fakes: Fakes, fault: str, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checks: list[Target] = []
    original = gate.check

    def quick(target: Target, **options: Any) -> gate.Verdict:
        checks.append(target)
        return original(target, **options, timeout=8)

    monkeypatch.setattr(gate, "check", quick)
    fakes.serve(fakes.target(fault))
    assert backend.check(name) == name
    found = backend.resolve(name)
    assert found.name == "reference"
    assert found.module is reference
    assert "metal failed its check on" in found.why
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("turboquant: checking backend metal on ")
    assert second.startswith("turboquant: backend metal failed its check on ")
    assert second.endswith("; the reference serves")
    assert same_bits(found.functions())
    # Once per process, whatever asks again.
    assert backend.resolve(name).name == backend.resolve("auto").name == "reference"
    assert capfd.readouterr().err == ""
    assert len(checks) == 1


@pytest.mark.parametrize("name", ["auto", "fast", "metal"])
def test_checked_kernels_serve(fakes: Fakes, name: str) -> None:
    fakes.serve(fakes.target("none"), Target("cuda", None))
    assert backend.available() == ("auto", "fast", "reference", "metal", "upstream")
    found = backend.resolve(name)
    assert found.name == "metal"
    assert isinstance(found.module, Guard)
    assert same_bits(found.functions())
    assert found.module.failure is None
    assert backend.resolve(name) is backend.resolve(name)


def test_without_a_device_a_name_is_refused_and_auto_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "TARGETS", (Target("metal", "no.such", lambda: "no device"), Target("cuda", None)))
    assert backend.resolve().name == "reference"
    assert backend.resolve().why == "metal: no device; cuda: not built yet"
    with pytest.raises(ValueError, match=r"'metal' is not available here; available: auto, .* \(metal: no device\)"):
        backend.resolve("metal")
    with pytest.raises(ValueError, match=r"'fast' is not available.*\(metal: no device; cuda: not built yet\)"):
        backend.check("fast")
    assert capfd.readouterr().err == ""


def test_a_check_that_breaks_down_itself_lets_the_reference_serve(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(*args: Any, **options: Any) -> gate.Verdict:
        raise RuntimeError("out of file handles")

    monkeypatch.setattr(gate, "check", breaks)
    fakes.serve(fakes.target("none"))
    assert backend.resolve().name == "reference"
    (line,) = capfd.readouterr().err.splitlines()
    assert "failed its check on this device (RuntimeError: out of file handles)" in line


# Remembering


def test_a_verdict_is_remembered_until_the_kernels_change(fakes: Fakes, folder: Path) -> None:
    target = fakes.target("none")
    first = gate.check(target)
    assert [first.remembered, gate.check(target).remembered] == [False, True]
    assert not gate.check(target, force=True).remembered
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text())["identity"] == first.identity
    path = fakes.path(str(target.module))
    path.write_text(path.read_text() + "\n# changed\n")
    changed = gate.check(target)
    assert not changed.remembered
    assert changed.identity["kernels"] != first.identity["kernels"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("key", ["device", "architecture", "system", "driver", "mlx", "python", "package", "vectors"])
def test_a_verdict_holds_for_one_machine_only(fakes: Fakes, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fakes.target("none")
    first = gate.check(target)
    original = Target.identity
    monkeypatch.setattr(Target, "identity", lambda self: {**original(self), key: "another"})
    if key == "vectors":
        monkeypatch.setattr(Target, "identity", original)
        monkeypatch.setattr(gate, "_vectors_digest", lambda: "another")
    ran: list[str] = []

    def run(*args: Any) -> Any:
        ran.append(key)
        return gate._Outcome(True, "ran", CASES)

    monkeypatch.setattr(gate, "_run_child", run)
    assert gate.check(target).identity != first.identity
    assert ran == [key]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"ok": true}', '"passed"', "\x00\xff", "{}"],
)
def test_a_damaged_file_means_another_run(
    fakes: Fakes, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fakes.target("none")
    monkeypatch.setattr(gate, "_run_child", lambda *args: gate._Outcome(True, "ran", CASES))
    gate.check(target)
    (kept,) = folder.iterdir()
    assert gate.check(target).remembered
    whole = json.loads(kept.read_text())
    for damaged in (text, json.dumps({**whole, "ok": "yes"}), json.dumps({**whole, "identity": {}})):
        kept.write_bytes(damaged.encode("latin-1"))
        assert not gate.check(target).remembered
        assert json.loads(kept.read_text())["reason"] == "ran"


def test_a_folder_that_cannot_be_written_only_forgets(fakes: Fakes, tmp_path: Path) -> None:
    target = fakes.target("none")
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        found = gate.check(target, folder=tmp_path / "file" / "verdicts")
        assert (found.ok, found.remembered) == (True, False)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_check_that_cannot_start_is_not_remembered(
    fakes: Fakes, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = fakes.target("none")
    for executable in ("", str(tmp_path / "no-python")):
        monkeypatch.setattr(sys, "executable", executable)
        found = gate.check(target)
        assert not found.ok
        assert found.reason.startswith("the check could not be started")
    assert not folder.exists()


def test_two_processes_at_once(fakes: Fakes, folder: Path) -> None:
    target = fakes.target("none")
    code = (
        "from turboquant_vlm.conformance import gate\n"
        "from turboquant_vlm.fast.targets import Target\n"
        f"print(gate.check(Target('metal', {target.module!r})).ok)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(fakes.folder)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["True\n", "True\n"]
    # One verdict, and nothing half written.
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text())["ok"]
    assert gate.check(target).remembered


# Serving


@pytest.mark.parametrize("fault", ["third attend", "second attend, when computed", "refuses what is right"])
def test_a_failure_while_serving_switches_to_the_reference(
    fakes: Fakes, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target = fakes.target(fault)
    fakes.serve(target)
    found = backend.resolve()
    assert found.name == "metal"
    capfd.readouterr()
    sys.modules[str(target.module)].armed = True  # type: ignore[attr-defined]
    want, got = generation(reference), generation(found.functions())
    assert all(np.array_equal(a.words, b.words) for a, b in zip(want, got, strict=True))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("turboquant: backend metal failed while serving (attend raised ")
    assert line.endswith("; the reference serves")
    assert backend.describe("metal") == "reference (metal failed while serving)"
    # New caches start on the reference; a name that was valid stays so.
    assert backend.resolve().name == backend.resolve("metal").name == "reference"
    assert "failed while serving" in backend.resolve("metal").why
    assert same_bits(found.functions())
    assert capfd.readouterr().err == ""


def test_a_cache_and_its_report_survive_a_failure(fakes: Fakes) -> None:
    target = fakes.target("third attend")
    fakes.serve(target)
    made, plain = TurboQuantKVCache(bits=3.5), TurboQuantKVCache(bits=3.5, backend="reference")
    assert made.backend_name == "metal"
    sys.modules[str(target.module)].armed = True  # type: ignore[attr-defined]
    for step, count in enumerate([100, 1, 1, 1, 1, 1]):
        x, q = noise((1, 2, count, 16), step), noise((1, 4, count, 16), 100 + step)
        outputs = []
        for cache in (made, plain):
            keys, values = cache.update_and_fetch(x, x + 1)
            outputs.append(cache.quantized_attention(q, keys, values, 0.25, "causal"))
        assert mx.array_equal(*outputs)
    text = str(report._report(report.Run(3.5, True, 0, None, [made, made, made])))
    assert "backend reference (metal failed while serving)" in text
    assert backend.describe("reference") == "reference"


def test_wrong_arguments_are_the_callers_and_switch_nothing(fakes: Fakes, capfd: pytest.CaptureFixture[str]) -> None:
    fakes.serve(fakes.target("none"))
    functions: Any = backend.resolve().functions()
    capfd.readouterr()
    with pytest.raises(ValueError, match="got bits=7"):
        functions.make_codec(64, 7)
    codec = functions.make_codec(16, 4)
    with pytest.raises(ValueError, match="x must be"):
        functions.quantize(mx.zeros((3, 8)), codec)
    with pytest.raises(TypeError):
        functions.quantize()
    with pytest.raises(AttributeError, match="no public function 'compress'"):
        _ = functions.compress
    assert functions.failure is None
    assert functions.TILE == 64
    assert capfd.readouterr().err == ""


def test_the_guard_evaluates_nothing_while_mlx_transforms_a_function(fakes: Fakes) -> None:
    fakes.serve(fakes.target("none"))
    functions: Any = backend.resolve().functions()
    empty = functions.empty_tokens(functions.make_codec(16, 4), "key", 1, 1, mx.float16)
    x = noise((1, 1, 10, 16), 1)
    assert mx.array_equal(mx.compile(lambda x: functions.append(empty, x).recent)(x), x)
    assert functions.failure is None


def test_an_argument_that_cannot_be_computed_is_not_the_kernels_fault(fakes: Fakes, tmp_path: Path) -> None:
    fakes.serve(fakes.target("none"))
    functions: Any = backend.resolve().functions()
    mx.save(str(tmp_path / "x.npy"), mx.zeros((1, 1, 1000, 16)))
    late = mx.load(str(tmp_path / "x.npy"))
    os.truncate(tmp_path / "x.npy", 200)
    with pytest.raises(RuntimeError, match="Unable to read"):
        functions.append(functions.empty_tokens(functions.make_codec(16, 4), "key", 1, 1, mx.float32), late)
    assert functions.failure is None


# The room itself


def test_fast_has_the_references_names_and_signatures() -> None:
    assert fast.__all__ == reference.__all__
    for name in reference.__all__:
        own, theirs = getattr(reference, name), getattr(fast, name)
        if inspect.isfunction(own):
            assert inspect.signature(theirs) == inspect.signature(own), name
        else:
            assert theirs is own


def test_fast_serves_the_first_available_target(fakes: Fakes) -> None:
    name, why = fast.serving()
    assert name == "reference" or why == f"{name} is available"
    fakes.serve(Target("cuda", None), fakes.target("none"), Target("cpu", None))
    fast._resolved.cache_clear()
    try:
        assert fast.serving() == ("metal", "metal is available")
        assert same_bits(fast)
    finally:
        fast._resolved.cache_clear()


def test_importing_fast_loads_no_kernel() -> None:
    code = "import sys, turboquant_vlm.fast.targets; print('turboquant_vlm.fast.metal' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_reasons_of_the_real_targets() -> None:
    reasons = {target.name: target.unavailable_reason() for target in targets.TARGETS}
    assert list(reasons) == ["metal", "cuda", "cpu"]
    assert reasons["cuda"] == "not built yet"
    if mx.default_device().type != mx.DeviceType.cpu:
        assert reasons["cpu"] == "MLX's default device is the GPU"
    if not mx.metal.is_available():
        assert reasons["metal"] == "MLX has no Metal device here"
    missing = Target("metal", "turboquant_vlm.no_such_module")
    assert "turboquant_vlm.no_such_module cannot be imported: ModuleNotFoundError" in str(missing.unavailable_reason())
    with pytest.raises(RuntimeError, match="cuda is unavailable: not built yet"):
        targets.TARGETS[1].load()
