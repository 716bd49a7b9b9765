"""`turboquant-vlm doctor`: what it shows, what it checks again, and when its exit code is 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_targets import Fakes

from turboquant_vlm.fast.targets import Target
from turboquant_vlm.integration import backend, cli, doctor, support


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(backend.VARIABLE, "auto")
    backend.forget()
    yield
    backend.forget()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    made = Fakes(tmp_path / "modules", monkeypatch)
    yield made
    made.unload()


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit status and standard output of the command, as in a new process."""
    backend.forget()
    status = cli.main(["doctor", *flags])
    return status, capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status, text = run(capsys, "--json", *flags)
    return status, json.loads(text)


def test_without_kernels_the_reference_is_checked_and_picked(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, tmp_path: Path
) -> None:
    fakes.serve(Target("metal", "no.such", lambda: "no device"), Target("cuda", None))
    status, text = run(capsys)
    assert status == 0
    lines = text.splitlines()
    assert lines[0].startswith("turboquant-vlm ")
    assert f"supported ({support.RANGE})" in lines[1]
    assert any(line.startswith("device: ") and line.endswith("MLX's default") for line in lines)
    assert "  metal: unavailable, no device" in lines
    assert "  cuda: unavailable, not built yet" in lines
    assert any(line.startswith("  reference: device check passed, ") for line in lines)
    assert "backend: auto, served by reference; available: auto, reference, upstream" in lines
    assert "  why: metal: no device; cuda: not built yet" in lines
    assert f"cache folder: {tmp_path / 'cache'}" in lines


def test_verdicts_are_remembered_and_checked_again(capsys: pytest.CaptureFixture[str], fakes: Fakes) -> None:
    fakes.serve(fakes.target("none"))
    status, found = data(capsys)
    assert (status, found["serving"], found["asked"], found["sound"]) == (0, "metal", "auto", True)
    assert found["available"] == ["auto", "fast", "reference", "metal", "upstream"]
    first = found["backends"]["metal"]["verdict"]
    assert (first["ok"], first["remembered"]) == (True, False)
    assert first["identity"]["target"] == "metal"
    _, again = data(capsys)
    assert {name: entry["verdict"]["remembered"] for name, entry in again["backends"].items()} == {
        "metal": True,
        "reference": True,
    }
    assert again["backends"]["metal"]["verdict"]["when"] == first["when"]
    _, forced = data(capsys, "--recheck")
    assert not any(entry["verdict"]["remembered"] for entry in forced["backends"].values())
    _, text = run(capsys)
    assert "metal: device check passed" in text
    assert "remembered from" in text
    assert "why: metal passed its check on this device" in text


def test_failed_kernels_are_shown_and_the_sound_reference_serves(
    capsys: pytest.CaptureFixture[str], fakes: Fakes
) -> None:
    fakes.serve(fakes.target("aborts"))
    status, text = run(capsys)
    assert status == 0
    assert "  metal: device check FAILED, " in text
    assert "SIGABRT" in text
    assert "backend: auto, served by reference; available: auto, fast, reference, metal, upstream" in text
    assert "why: metal failed its check on" in text


def test_a_backend_that_cannot_serve_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.serve(Target("metal", None))
    monkeypatch.setenv(backend.VARIABLE, "metal")
    status, text = run(capsys)
    assert status == 1
    assert "backend: metal, served by none; available: auto, reference, upstream" in text
    assert "backend 'metal' is not available here" in text
    monkeypatch.setenv(backend.VARIABLE, "upstream")
    assert run(capsys)[0] == 0


def test_an_unsound_reference_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.serve()
    broken = fakes.target("one wrong bit", "reference")
    monkeypatch.setattr(doctor, "_reference", lambda: broken)
    status, text = run(capsys)
    assert status == 1
    assert "  reference: device check FAILED" in text


def test_an_unsupported_mlx_vlm_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.serve()
    original = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.9.0" if name == "mlx-vlm" else original(name))
    status, text = run(capsys)
    assert status == 1
    assert f"mlx-vlm 0.9.0: outside the supported range ({support.RANGE})" in text


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--recheck" in out
    assert "--json" in out
    assert cli.main(["doctor", "--fix"]) == 2
    assert "unrecognized arguments: --fix" in capsys.readouterr().err
