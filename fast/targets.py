"""Which kernels exist, whether they can run here, and what their results depend on.

Nothing here runs a kernel, and importing this module imports neither MLX nor a kernel.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

__all__ = ["TARGETS", "Target", "first_available"]

Reason = str | None


def _no_requirement() -> Reason:
    return None


def _no_metal() -> Reason:
    """Why MLX would not run Metal kernels in this process, or None."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return "MLX has no Metal device here"
    if mx.default_device().type != mx.DeviceType.gpu:
        return "MLX's default device is the CPU"
    return None


def _no_cpu_kernels() -> Reason:
    """Why the CPU kernels could not be compiled or run in this process, or None. Compiles nothing."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.cpu:
        return "MLX's default device is the GPU"
    from .cpu import native

    return native.unavailable_reason()


def _cpu_details() -> dict[str, str]:
    from .cpu import native

    return native.identity()


@dataclass(frozen=True)
class Target:
    """One set of kernels.

    name: what users call it.  module: import path of a module with the public functions of the reference, or None if
    it has not been built.  device_reason: gives the reason why the device cannot be used now, or None.  details: what
    the bits of its kernels could depend on besides what all targets depend on.
    """

    name: str
    module: str | None
    device_reason: Callable[[], Reason] = _no_requirement
    details: Callable[[], dict[str, str]] = dict

    def unavailable_reason(self) -> Reason:
        """Why it cannot be used in this process, in a few words, or None if it can. Imports the module, runs nothing.

        The default device counts: it may change during a process, and the answer with it.
        """
        if self.module is None:
            return "not built yet"
        reason = self.device_reason()
        if reason is not None:
            return reason
        try:
            importlib.import_module(self.module)
        except Exception as error:  # whatever a broken module raises, it cannot be used
            return f"{self.module} cannot be imported: {_one_line(error)}"
        return None

    def load(self) -> ModuleType:
        """The module. RuntimeError with the reason if it is unavailable."""
        reason = self.unavailable_reason()
        if reason is not None or self.module is None:
            raise RuntimeError(f"{self.name} is unavailable: {reason}")
        return importlib.import_module(self.module)

    def identity(self) -> dict[str, str]:
        """Everything on this machine that the bits of a kernel could depend on; equal means: nothing has changed.

        Keys: target, module, device (its name), architecture, default_device, system, driver, python, mlx, package,
        kernels (SHA-256 of the ``fast`` package and of the module), reference (SHA-256 of what kernels take from it),
        and the target's own (the CPU's: cpu, isa, compiler, sources).
        """
        import mlx.core as mx

        info = mx.device_info()
        here = Path(__file__).parent
        return {
            "target": self.name,
            "module": self.module or "",
            "device": str(info.get("device_name", "unknown")),
            "architecture": _architecture(info),
            "default_device": mx.default_device().type.name,
            "system": _system(),
            "driver": _driver(),
            "python": platform.python_version(),
            "mlx": str(vars(mx)["__version__"]),  # not declared in its types
            "package": _package_version(),
            "kernels": _digest([here, *_outside(self.module, here)]),
            "reference": _digest([here.parent / "reference"]),
            **self.details(),
        }


def _architecture(info: dict[str, str | int]) -> str:
    """What kernels are compiled for: Metal's family, or a CUDA card's compute capability."""
    parts = [info.get(key) for key in ("architecture", "compute_capability_major", "compute_capability_minor")]
    return " ".join(str(part) for part in parts if part is not None) or platform.machine()


def _system() -> str:
    release = platform.mac_ver()[0]
    return f"macOS {release} {platform.machine()}" if release else platform.platform()


def _driver() -> str:
    """The version of the GPU's driver. On a Mac it comes with the system, so the kernel's build stands for it."""
    if sys.platform == "darwin":
        return platform.version()
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _package_version() -> str:
    try:
        return metadata.version("turboquant-vlm")
    except metadata.PackageNotFoundError:
        return ""


def _outside(module: str | None, folder: Path) -> list[Path]:
    """The module's own file if it does not belong to ``folder``."""
    found = None if module is None else importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return []
    origin = Path(found.origin)
    return [] if folder.resolve() in origin.resolve().parents else [origin]


def _digest(places: list[Path]) -> str:
    """SHA-256 over names and contents of all files in ``places`` (files or folders)."""
    total = hashlib.sha256()
    for place in places:
        for path in _files(place):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(place.parent).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for path in sorted(place.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


TARGETS: tuple[Target, ...] = (
    Target("metal", "turboquant_vlm.fast.metal", _no_metal),
    Target("cuda", None),
    Target("cpu", "turboquant_vlm.fast.cpu", _no_cpu_kernels, _cpu_details),
)
"""Best first."""


def first_available() -> tuple[Target | None, str]:
    """The first target that can be used now and why, or (None, why each cannot)."""
    reasons = []
    for target in TARGETS:
        reason = target.unavailable_reason()
        if reason is None:
            return target, f"{target.name} is available"
        reasons.append(f"{target.name}: {reason}")
    return None, "; ".join(reasons)
