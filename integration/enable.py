"""``turboquant-vlm enable`` and ``disable``: the hook in every Python program of one environment, and out again.

Two files in site-packages do it: `autohook.py` under a name of its own, and a ``.pth`` file whose one line imports it.
Python reads ``.pth`` files at start-up, so no program has to change.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import sysconfig
from importlib import resources
from pathlib import Path

MODULE = "_turboquant_vlm_autohook"
# Guarded, because an error in a .pth file is printed at the start of every program.
LINE = f"import sys; exec('try:\\n import {MODULE}\\nexcept ImportError:\\n pass')\n"


def start() -> None:
    """What `autohook.py` does once mlx_vlm is imported: the hook, and mlx-vlm's own commands end with the report."""
    from .hook import install

    if install():
        atexit.register(_report_after_commands)


def _report_after_commands() -> None:
    from .report import last_report

    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = spec.name if spec is not None else Path(sys.argv[0]).name
    report = last_report()
    if program.startswith("mlx_vlm") and report is not None:
        print(report, file=sys.stderr)


def site_packages() -> Path:
    """Where this environment keeps pure Python packages."""
    return Path(sysconfig.get_paths()["purelib"])


def _files(folder: Path) -> tuple[Path, Path]:
    """(module, .pth); the .pth file comes last so that it never points at nothing."""
    return folder / f"{MODULE}.py", folder / f"{MODULE}.pth"


def enabled(folder: Path | None = None) -> bool:
    """Whether the hook is installed in every program of this environment."""
    return all(path.exists() for path in _files(folder or site_packages()))


def enable(folder: Path | None = None) -> str:
    """Write the two files; returns what was done. OSError if ``folder`` (default: site-packages) is not writable."""
    folder = folder or site_packages()
    module, pth = _files(folder)
    text = resources.files(__package__).joinpath("autohook.py").read_text(encoding="utf-8")
    if enabled(folder) and module.read_text(encoding="utf-8") == text and pth.read_text(encoding="utf-8") == LINE:
        return f"Already enabled in {folder}."
    module.write_text(text, encoding="utf-8")
    pth.write_text(LINE, encoding="utf-8")
    return f"Enabled: mlx_vlm in this environment now uses turboquant-vlm's cache ({pth.name} in {folder})."


def disable(folder: Path | None = None) -> str:
    """Remove the two files and the module's compiled form; returns what was done."""
    folder = folder or site_packages()
    found = [path for path in reversed(_files(folder)) if path.exists()]
    compiled = folder / "__pycache__"
    found += list(compiled.glob(f"{MODULE}.*.pyc"))
    for path in found:
        path.unlink()
    if compiled.is_dir() and not any(compiled.iterdir()):
        shutil.rmtree(compiled)
    return f"Disabled: removed from {folder}." if found else f"Not enabled in {folder}; nothing to remove."
