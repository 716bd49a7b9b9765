"""The commands: flags go through untouched, enable and disable leave no trace, errors are one line."""

from __future__ import annotations

import importlib
import os
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turboquant_vlm.integration import active, cli, enable, report, support, uninstall
from turboquant_vlm.integration.backend import VARIABLE


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "auto")  # so that what a command sets is undone
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    report.forget()
    yield
    uninstall()


# Passing flags on


@pytest.fixture
def mains(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Replace mlx-vlm's mains; what each was given, by command."""
    seen: dict[str, list[str]] = {}
    for command in ("generate", "chat", "server"):
        module = importlib.import_module(f"mlx_vlm.{command}")

        def record(command: str = command) -> None:
            assert active() or os.environ[VARIABLE] == "upstream"
            seen[command] = list(sys.argv)

        monkeypatch.setattr(module, "main", record)
    return seen


@pytest.mark.parametrize("command", ["generate", "chat", "server"])
@pytest.mark.parametrize(
    ("given", "passed", "backend"),
    [
        ([], [], "auto"),
        (["--model", "m", "--kv-bits", "3.5"], ["--model", "m", "--kv-bits", "3.5"], "auto"),
        (["--kv-backend", "reference", "--model", "m"], ["--model", "m"], "reference"),
        (["--model", "m", "--kv-backend=reference"], ["--model", "m"], "reference"),
        (["--prompt", "use --kv-backend", "-v"], ["--prompt", "use --kv-backend", "-v"], "auto"),
        (["--kv-backend", "Upstream"], [], "upstream"),
    ],
)
def test_flags_go_through(
    mains: dict[str, list[str]], command: str, given: list[str], passed: list[str], backend: str
) -> None:
    before = list(sys.argv)
    assert cli.main([command, *given]) == 0
    assert mains[command] == [f"turboquant-vlm {command}", *passed]
    assert os.environ[VARIABLE] == backend
    assert sys.argv == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["generate", "--kv-backend", "cuda"], 1, "turboquant-vlm: backend 'cuda' is not available here; available:"),
        (["generate", "--kv-backend"], 1, "turboquant-vlm: --kv-backend needs a name"),
        (["chat", "--kv-backend=gpu"], 1, "turboquant-vlm: unknown backend 'gpu'; expected one of auto,"),
        (["convert"], 2, "turboquant-vlm: unknown command 'convert'; expected one of generate, chat, server"),
        (["enable", "--now"], 1, "turboquant-vlm: enable takes no flags; got --now"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_failures_of_the_model_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(message: str) -> Any:
        def main() -> None:
            raise ValueError(message)

        monkeypatch.setattr(importlib.import_module("mlx_vlm.generate"), "main", main)

    fails("no image processor")
    with pytest.raises(ValueError, match="no image processor"):
        cli.main(["generate"])
    fails("TurboQuant supports 1 to 6 or 8 bits per coordinate; got kv_bits=7")
    assert cli.main(["generate"]) == 1


@pytest.mark.parametrize(
    ("program", "printed"), [("mlx_vlm.generate.__main__", True), ("mlx_vlm", True), ("pytest", False), (None, False)]
)
def test_enabled_commands_end_with_the_report(
    program: str | None, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = None if program is None else SimpleNamespace(name=program)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["script.py"])
    enable._report_after_commands()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(report, "last_report", lambda: "the report")
    enable._report_after_commands()
    assert capsys.readouterr().err == ("the report\n" if printed else "")


@pytest.mark.parametrize(
    ("stop", "status"), [(SystemExit(), 0), (SystemExit(0), 0), (SystemExit(3), 3), (SystemExit("no"), 1)]
)
def test_exit_statuses_are_kept(stop: SystemExit, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> None:
        raise stop

    monkeypatch.setattr(importlib.import_module("mlx_vlm.generate"), "main", ends)
    assert cli.main(["generate"]) == status


def test_mlx_vlms_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--help"]) == 0
    assert "--quantized-kv-start" in capsys.readouterr().out


def test_a_reloading_server_needs_enable(mains: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["server", "--reload"]) == 0
    assert "run `turboquant-vlm enable` once" in capsys.readouterr().err


def test_the_report_follows_on_standard_error(
    mains: dict[str, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "last_report", lambda: "the report")
    assert cli.main(["generate"]) == 0
    assert capsys.readouterr() == ("", "the report\n")
    assert cli.main(["generate", "--kv-backend", "upstream"]) == 0
    assert capsys.readouterr() == ("", "")


def test_help_version_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}" in text for command in cli.COMMANDS)
    assert "--kv-backend auto|fast|reference|metal|cuda|cpu|upstream" in text
    assert cli.main([]) == 2
    capsys.readouterr()
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("turboquant-vlm ")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "supported (0.7.0 to 0.7.10)" in text
    assert re.search("^backend: auto, served by .*; available: auto, .*reference, .*upstream$", text, re.MULTILINE)


def test_demo_gets_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = importlib.import_module("turboquant_vlm.integration.demo")
    seen: list[Any] = []

    def record(argv: list[str]) -> int:
        seen.append(argv)
        return 5

    monkeypatch.setattr(demo, "main", record)
    assert cli.main(["demo", "--max-tokens", "3"]) == 5
    assert seen == [["--max-tokens", "3"]]


# enable and disable


def test_enable_and_disable_in_a_folder(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert not enable.enabled(tmp_path)
    assert enable.enable(tmp_path).startswith("Enabled: mlx_vlm in this environment now uses")
    assert enable.enabled(tmp_path)
    assert enable.enable(tmp_path) == f"Already enabled in {tmp_path}."
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / f"{enable.MODULE}.py").write_text("old")
    assert enable.enable(tmp_path).startswith("Enabled")
    compiled = tmp_path / "__pycache__"
    compiled.mkdir()
    (compiled / f"{enable.MODULE}.cpython-311.pyc").touch()
    assert enable.disable(tmp_path) == f"Disabled: removed from {tmp_path}."
    assert sorted(tmp_path.rglob("*")) == before
    assert enable.disable(tmp_path) == f"Not enabled in {tmp_path}; nothing to remove."


class Environment:
    """A virtual environment; with `packages`, it also sees everything that this process sees."""

    def __init__(self, folder: Path, packages: bool) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python*")) / "site-packages"
        if packages:
            folders = [*site.getsitepackages(), *(p for p in sys.path if p and Path(p).is_dir())]
            lines = [f"import site; site.addsitedir({str(Path(path).resolve())!r})\n" for path in folders]
            (self.site / "everything.pth").write_text("".join(lines))

    def run(self, *arguments: str, packages: bool = True) -> tuple[str, str]:
        """Standard output and standard error of the environment's Python."""
        environment = {k: v for k, v in os.environ.items() if packages or k != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=self.site
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def files(self) -> set[Path]:
        return set(self.site.rglob("*"))


WHOSE = (
    "from mlx_vlm.generate.common import TurboQuantKVCache as C\n"
    "print('ours' if any('packed_cache' in base.__module__ for base in C.__mro__) else 'theirs')"
)


def test_enable_and_disable_in_an_environment(tmp_path: Path) -> None:
    made = Environment(tmp_path / "env", packages=True)
    before = made.files()
    assert made.run("-c", WHOSE)[0] == "theirs\n"
    command = ("-m", "turboquant_vlm.integration.cli")
    assert made.run(*command, "enable")[0].startswith("Enabled")
    assert made.run("-c", WHOSE) == ("ours\n", "")
    assert "enabled in" in made.run(*command, "doctor")[0]
    # A program that does not use mlx_vlm loads nothing for it.
    script = "import sys; print({'mlx', 'mlx_vlm', 'turboquant_vlm.integration'} & set(sys.modules))"
    assert made.run("-c", script)[0] == "set()\n"
    # Every way to mlx_vlm passes the hook, and importing it twice is harmless.
    assert made.run("-c", f"import mlx_vlm.models.base, mlx_vlm\n{WHOSE}")[0] == "ours\n"
    assert made.run("-c", f"import importlib.util; importlib.util.find_spec('mlx_vlm')\n{WHOSE}")[0] == "ours\n"
    assert made.run(*command, "disable")[0].startswith("Disabled")
    assert made.files() == before
    assert made.run("-c", WHOSE)[0] == "theirs\n"


def test_enabled_but_uninstalled_is_silent(tmp_path: Path) -> None:
    made = Environment(tmp_path / "env", packages=False)
    enable.enable(made.site)
    (made.site / "mlx_vlm").mkdir()
    (made.site / "mlx_vlm" / "__init__.py").write_text("name = 'stand-in'\n")
    assert made.run("-c", "import mlx_vlm; print(mlx_vlm.name)", packages=False) == ("stand-in\n", "")
    (made.site / f"{enable.MODULE}.py").unlink()
    assert made.run("-c", "print('runs')", packages=False) == ("runs\n", "")


LEFT = "mlx-vlm was left as it is."


def test_enabled_with_another_mlx_vlm_says_so_and_leaves_it(tmp_path: Path) -> None:
    made = Environment(tmp_path / "env", packages=True)
    enable.enable(made.site)
    fake = tmp_path / "fake" / "mlx_vlm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "version.py").write_text("__version__ = '0.9.0'\n")
    script = f"import sys; sys.path.insert(0, {str(fake.parent)!r}); import mlx_vlm; print('goes on')"
    out, err = made.run("-c", script)
    assert out == "goes on\n"
    assert err == f"turboquant-vlm: supported mlx-vlm versions are {support.RANGE}; found 0.9.0. {LEFT}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-bits=7.5"], "got kv_bits=7.5"),
        (["--kv-bits", "nan"], "got kv_bits=nan"),
        (["--kv-bits", "4", "--kv-quant-scheme", "turboquant", "--kv-value-bits", "7"], "got kv_value_bits=7"),
    ],
)
def test_widths_are_refused_before_a_model_is_loaded(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["server", "--model", "absent", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
