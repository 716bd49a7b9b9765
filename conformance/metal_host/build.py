"""Compiles translated kernels and the emulator, and keeps the results.

Compiled kernels lie in a folder named by the environment variable ``TURBOQUANT_CACHE`` (else the user's cache folder,
else a temporary one), under a name made from the text, the compiler and the emulator's own files. A file is moved into
place whole, so two processes may build the same kernel at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from .translate import Translation

EMULATOR = Path(__file__).parent / "emulator"

# Thread-sanitizer instrumentation without its runtime: each access calls the emulator's own hooks.
_KERNEL_FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-w", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-nostdlib"),
    "-fsanitize=thread",
    "-fsanitize=bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
    "-fsanitize=alignment,null,return",
    "-fsanitize-recover=all",
    *("-ffp-contract=off", "-fno-math-errno", "-fsigned-char", "-fno-strict-aliasing"),
    *("-fno-delete-null-pointer-checks", "-ftrivial-auto-var-init=pattern", "-fstack-clash-protection"),
    *("-fno-finite-loops", "-fno-tree-loop-distribute-patterns"),
]
_RUNTIME_FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=default", "-Wno-clobbered"]


class MetalCompileError(RuntimeError):
    """The kernel text does not compile; the message quotes the compiler, with lines of the Metal text."""


class NoCompilerError(RuntimeError):
    """There is no C++ compiler that the host runner can use."""


@functools.cache
def compiler() -> tuple[str, str]:
    """The C++ compiler and its version line: ``TURBOQUANT_CXX``, else g++, else c++. It has to be GCC."""
    names = [os.environ["TURBOQUANT_CXX"]] if os.environ.get("TURBOQUANT_CXX") else ["g++", "c++"]
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if "Free Software Foundation" in version:
            return path, version.splitlines()[0]
    raise NoCompilerError(f"the Metal host runner needs GCC's C++ compiler; tried {', '.join(names)}")


@functools.cache
def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    named = os.environ.get("TURBOQUANT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for candidate in ([Path(named)] if named else []) + [home / "turboquant-vlm"]:
        folder = candidate / "metal_host"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="turboquant-metal-host-"))


@functools.cache
def emulator_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(EMULATOR.iterdir()):
        if file.suffix in (".h", ".cpp"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update("\0".join([*compiler(), platform.machine(), *_KERNEL_FLAGS, *_RUNTIME_FLAGS]).encode())
    return digest.hexdigest()


def place(target: Path, command: list[str], output_flag: str = "-o") -> subprocess.CompletedProcess[str]:
    """Runs a compiler command whose output appears at ``target`` whole or not at all."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
    os.close(handle)
    try:
        done = subprocess.run([*command, output_flag, name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            os.replace(name, target)
        return done
    finally:
        if os.path.exists(name):
            os.unlink(name)


@functools.cache
def runtime() -> tuple[ctypes.CDLL, Path]:
    """The scheduler and its checks, compiled on first use and loaded once."""
    path = cache_folder() / f"runtime-{emulator_digest()[:24]}.so"
    if not path.exists():
        sources = [str(EMULATOR / name) for name in ("scheduler.cpp", "hooks.cpp")]
        done = place(path, [compiler()[0], *_RUNTIME_FLAGS, f"-Wl,-soname,{path.name}", *sources])
        if done.returncode:
            raise MetalCompileError(f"the emulator's runtime does not compile:\n{done.stderr}")
    return ctypes.CDLL(str(path)), path


def _prelude() -> Path:
    """The emulated standard library, compiled once into a precompiled header."""
    folder = cache_folder() / f"include-{emulator_digest()[:24]}"
    header = folder / "metal_host.h"
    compiled = folder / "metal_host.h.gch"
    if not compiled.exists():
        folder.mkdir(exist_ok=True)
        for file in EMULATOR.glob("*.h"):
            handle, name = tempfile.mkstemp(dir=folder, prefix=".")
            os.write(handle, file.read_bytes())
            os.close(handle)
            os.replace(name, folder / file.name)
        done = place(compiled, [compiler()[0], *_KERNEL_FLAGS, "-x", "c++-header", str(header)])
        if done.returncode:
            raise MetalCompileError(f"the emulated Metal library does not compile:\n{done.stderr}")
    return header


@functools.lru_cache(maxsize=512)
def build(translation: Translation) -> Path:
    """The shared library of a translated kernel. Raises :class:`MetalCompileError`."""
    key = hashlib.sha256(f"{emulator_digest()}\0{translation.code}".encode()).hexdigest()[:32]
    path = cache_folder() / f"kernel-{key}.so"
    if path.exists():
        return path
    source = path.with_suffix(".cpp")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".cpp")
    with os.fdopen(handle, "w") as file:
        file.write(translation.code)
    os.replace(name, source)
    command = [compiler()[0], *_KERNEL_FLAGS, "-shared", "-include", str(_prelude()), str(source)]
    done = place(path, [*command, str(runtime()[1]), "-lm", "-lgcc"])
    if done.returncode:
        raise MetalCompileError(f"the Metal text of {translation.kernel} does not compile:\n{done.stderr}")
    return path


@functools.cache
def load(path: Path) -> int:
    """The address of the entry function of a built kernel."""
    runtime()
    library = ctypes.CDLL(str(path))
    address = ctypes.cast(library.tq_entry, ctypes.c_void_p).value
    assert address is not None
    _LOADED.append(library)
    return address


_LOADED: list[ctypes.CDLL] = []
