"""The distribution: does the wheel hold all that the rooms hold, and is the repository fit to be read elsewhere?"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import turboquant_vlm

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "fast", "conformance", "integration")
# The code of a room, and what it reads at run time.
SHIPPED = {".py", ".typed", ".json", ".metal", ".cu", ".cuh", ".cpp", ".h", ".txt"}


def repository_files() -> list[Path]:
    """Files of the repository, relative to its root: what git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listing.stdout.splitlines() if (ROOT / (path := Path(line))).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that the repository stays as it is."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in repository_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True)
    (file,) = target.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_every_file_of_every_room(wheel: zipfile.ZipFile) -> None:
    expected = {
        "/".join(("turboquant_vlm", *(path.parts[1:] if path.parts[0] == "package" else path.parts)))
        for path in repository_files()
        if path.parts[0] in (*ROOMS, "package") and path.suffix in SHIPPED
    }
    assert "turboquant_vlm/py.typed" in expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_no_room_holds_a_kind_of_file_that_is_not_shipped() -> None:
    files = [path for path in repository_files() if path.parts[0] in (*ROOMS, "package")]
    assert [str(path) for path in files if path.suffix not in SHIPPED | {".md"}] == []


def test_metadata(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["Name"] == "turboquant-vlm"
    assert metadata["Version"] == turboquant_vlm.__version__
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra") or []) == {"cpu", "cuda13", "demo", "dev"}
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "turboquant-vlm = turboquant_vlm.integration.cli:main" in wheel.read(name).decode()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_under_their_package_name(room: str) -> None:
    module = importlib.import_module(f"turboquant_vlm.{room}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / room / "__init__.py"


def test_console_script_runs() -> None:
    script = Path(sysconfig.get_path("scripts")) / "turboquant-vlm"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert turboquant_vlm.__version__ in done.stdout


def test_no_path_of_one_machine_is_written_down() -> None:
    # Put together here, so that this file does not hold what it looks for.
    roots = "|".join(("home", "Users", "root", "work", "tmp"))
    pattern = re.compile(rf"(?<![\w.$}}~*)/-])/(?:{roots})/\w")
    found = []
    for path in repository_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path}:{i}" for i, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert found == []


def test_files_stay_short() -> None:
    modules = [path for path in repository_files() if path.suffix == ".py"]
    assert modules
    lengths = {str(path): (ROOT / path).read_text(encoding="utf-8").count("\n") for path in modules}
    # Tests may run a little longer: they are lists of cases, read one at a time.
    too_long = {path: n for path, n in lengths.items() if n > (600 if path.startswith("tests/") else 500)}
    assert too_long == {}
