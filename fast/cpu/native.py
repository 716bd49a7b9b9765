"""The CPU kernels as a shared library: compiled once by the system's C++ compiler, loaded with ctypes.

The library lies in the package's cache folder under a name made from the sources, the compiler, its flags and the
features of the CPU; a library of that name is loaded, whoever built it. Environment variables:

    TURBOQUANT_CXX            the compiler (default: the first of c++, g++, clang++)
    TURBOQUANT_CACHE          the cache folder
    TURBOQUANT_CPU_ISA        avx512, avx2, neon or generic (default: the best that this CPU runs)
    TURBOQUANT_CPU_SANITIZE   address or thread: a build that checks itself, for tests
    TURBOQUANT_THREADS        how many threads a kernel uses (default: the CPUs this process may use)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from turboquant_vlm.fast.folder import cache_folder

__all__ = [
    "ISAS",
    "NativeError",
    "Output",
    "available_isas",
    "compiler",
    "function",
    "identity",
    "isa_in_use",
    "library",
    "output",
    "pointer",
    "source_digest",
    "threads",
    "unavailable_reason",
]

SOURCES = Path(__file__).parent / "src"
ISAS = ("avx512", "avx2", "neon", "generic")
"""Instruction sets that the kernels are compiled for, best first."""

COMPILERS = ("c++", "g++", "clang++")
MOST_THREADS = 1024
LOCK_SECONDS = 120.0

_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra"),
)
_SANITIZERS = {
    None: (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"),
    "thread": ("-fsanitize=thread", "-O1", "-g"),
}
# What an instruction set needs, and what is used besides where the CPU has it: name in /proc/cpuinfo, flag.
_NEEDED = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
    "generic": (),
}
_BESIDES = {
    "avx512": ("avx512vbmi", "avx512_vnni", "bmi1", "bmi2", "abm", "popcnt"),
    "avx2": ("bmi1", "bmi2", "abm", "popcnt"),
    "neon": ("asimddp",),
    "generic": (),
}
_FLAG_NAMES = {
    "avx512_vnni": "-mavx512vnni",
    "bmi1": "-mbmi",
    "abm": "-mlzcnt",
    "asimd": "",
    "asimddp": "-march=armv8.2-a+dotprod",
}
# The same features as macOS names them.
_APPLE = {"hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.neon": "asimd", "hw.optional.AdvSIMD": "asimd"}
_INTEL_MAC = {"avx1.0": "avx", "avx512vnni": "avx512_vnni", "lzcnt": "abm"}


_lock = threading.RLock()


class NativeError(RuntimeError):
    """The CPU kernels cannot be built, loaded or run as asked; the message is one line."""


class _Compiler(NamedTuple):
    path: str
    version: str


# The compiler


def compiler() -> tuple[str, str]:
    """Path and version line of the C++ compiler. NativeError where there is none."""
    # One process at a time is started: OpenBLAS, for one, does not survive forks from two threads at once.
    with _lock:
        return _find_compiler(os.environ.get("TURBOQUANT_CXX", ""), os.environ.get("PATH", ""))


@cache
def _find_compiler(named: str, _search_path: str) -> _Compiler:
    for name in (named,) if named else COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = asked.stdout.splitlines()
        if asked.returncode == 0 and lines:
            return _Compiler(path, lines[0].strip())
    if named:
        raise NativeError(f"TURBOQUANT_CXX={named!r} is no C++ compiler that runs here")
    raise NativeError(f"no C++ compiler found (tried {', '.join(COMPILERS)})")


@cache
def source_digest() -> str:
    """SHA-256 over names and contents of the C++ sources."""
    total = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


# The CPU


@cache
def cpu_features() -> frozenset[str]:
    """The instruction set extensions of this CPU, by their names in Linux's /proc/cpuinfo."""
    if sys.platform == "darwin":
        return _mac_features()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _mac_features() -> frozenset[str]:
    found = {feature for name, feature in _APPLE.items() if _sysctl(name) == "1"}
    if platform.machine() == "arm64":
        return frozenset(found | {"asimd"})
    words = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".lower().split()
    return frozenset(_INTEL_MAC.get(word, word) for word in words)


def _sysctl(name: str) -> str:
    try:
        asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


@cache
def cpu_model() -> str:
    """The name of this CPU, or "unknown"."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # An ARM core has numbers in place of a name.
    numbers = [fields[name] for name in ("CPU implementer", "CPU part", "CPU variant") if name in fields]
    return fields.get("model name") or " ".join(numbers) or "unknown"


@cache
def available_isas() -> tuple[str, ...]:
    """The instruction sets among `ISAS` that this CPU runs, best first; "generic" is always one."""
    features = cpu_features()
    return tuple(isa for isa in ISAS if features.issuperset(_NEEDED[isa]))


def isa_in_use(isa: str | None = None) -> str:
    """The instruction set asked for, by the argument or TURBOQUANT_CPU_ISA, or the best. NativeError if unusable."""
    wanted = isa or os.environ.get("TURBOQUANT_CPU_ISA", "").strip().lower()
    usable = available_isas()
    if not wanted:
        return usable[0]
    if wanted not in ISAS:
        raise NativeError(f"unknown instruction set {wanted!r}; expected one of {', '.join(ISAS)}")
    if wanted not in usable:
        raise NativeError(f"this CPU does not run {wanted} kernels; it runs {', '.join(usable)}")
    return wanted


@cache
def _isa_flags(isa: str) -> tuple[str, ...]:
    features = cpu_features()
    names = [*_NEEDED[isa], *(name for name in _BESIDES[isa] if name in features)]
    flags = [_FLAG_NAMES.get(name, f"-m{name}") for name in names]
    if isa == "avx512":
        flags.append("-mprefer-vector-width=512")
    return tuple(flag for flag in flags if flag)


def threads() -> int:
    """How many threads a kernel may use: TURBOQUANT_THREADS, or the CPUs this process may run on.

    NativeError unless the variable holds a number from 1 to 1024.
    """
    asked = os.environ.get("TURBOQUANT_THREADS", "").strip()
    if not asked:
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if not (asked.isascii() and asked.isdigit()) or not 1 <= int(asked) <= MOST_THREADS:
        raise NativeError(f"TURBOQUANT_THREADS must be a number from 1 to {MOST_THREADS}; got {asked!r}")
    return int(asked)


# The library

_loaded: dict[tuple[str, str | None, _Compiler], ctypes.CDLL | NativeError] = {}
_functions: dict[tuple[int, str], Any] = {}


def library(isa: str | None = None, sanitize: str | None = None) -> ctypes.CDLL:
    """The kernels, built if need be and loaded once in this process.

    isa: one of `available_isas()`; default TURBOQUANT_CPU_ISA, else the best.  sanitize: "address" or "thread" for a
    build that checks itself; default TURBOQUANT_CPU_SANITIZE, else none.  Raises NativeError with one line if there is
    no compiler, if the kernels do not build or load, or if the CPU cannot run them.
    """
    isa = isa_in_use(isa)
    sanitize = sanitize or os.environ.get("TURBOQUANT_CPU_SANITIZE", "").strip().lower() or None
    if sanitize not in _SANITIZERS:
        raise NativeError(f'sanitize must be "address" or "thread"; got {sanitize!r}')
    key = (isa, sanitize, _Compiler(*compiler()))
    found = _loaded.get(key)
    if found is None:
        with _lock:
            found = _loaded.get(key)
            if found is None:
                try:
                    found = _load(*key)
                except NativeError as error:
                    found = error
                _loaded[key] = found
    if isinstance(found, NativeError):
        raise found
    return found


def function(name: str, arguments: Sequence[Any]) -> Callable[..., None]:
    """The kernel called `name` of the `library` in use, which takes arguments of these ctypes and returns nothing."""
    loaded = library()
    key = (id(loaded), name)
    found = _functions.get(key)
    if found is None:
        found = getattr(loaded, name)
        found.argtypes = list(arguments)
        found.restype = None
        _functions[key] = found
    return found


def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, in a few words, or None if nothing is known to stand in the way.

    Looks for a compiler and compiles nothing; a build that has failed in this process counts.
    """
    if os.name != "posix":
        return f"the kernels need a POSIX system; this is {sys.platform}"
    try:
        key = (isa_in_use(), None, _Compiler(*compiler()))
    except NativeError as error:
        return str(error)
    found = _loaded.get(key)
    return str(found) if isinstance(found, NativeError) else None


def identity() -> dict[str, str]:
    """What the bits of the kernels could depend on: cpu, isa (with its flags), compiler and sources (their SHA-256).

    NativeError if there is no compiler or the CPU does not run what is asked for.
    """
    isa = isa_in_use()
    return {
        "cpu": cpu_model(),
        "isa": " ".join((isa, *_isa_flags(isa))),
        "compiler": " ".join(compiler()),
        "sources": source_digest(),
    }


def _load(isa: str, sanitize: str | None, cxx: _Compiler) -> ctypes.CDLL:
    flags = (*_FLAGS, *_isa_flags(isa), *_SANITIZERS[sanitize])
    parts = (source_digest(), *cxx, platform.system(), platform.machine(), *flags)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    name = f"turboquant-{isa}{'-' + sanitize if sanitize else ''}-{key}.so"
    folder = _build_folder(name)
    path = folder / name
    with _locked(folder / f".{name}.lock") if not path.exists() else contextlib.nullcontext():
        if not path.exists():
            _compile(cxx, flags, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # a damaged file
            with contextlib.suppress(OSError):
                path.unlink()
    _compile(cxx, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the compiled CPU kernels cannot be loaded: {_one_line(str(error))}") from None


def _build_folder(name: str) -> Path:
    """Where the library called `name` is, or can be written."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = cache_folder() / "cpu"
        if (folder / name).exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    # Of this process alone: others could write into a folder with a known name.
    try:
        folder = tempfile.mkdtemp(prefix="turboquant-cpu-")
    except OSError as error:
        raise NativeError(f"there is no folder to build the CPU kernels in: {_one_line(str(error))}") from None
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return Path(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes from building the same; without file locks, or after a while, all of them build."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(path.open("ab"))
            end = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def _compile(cxx: _Compiler, flags: Sequence[str], target: Path) -> None:
    """Builds the library at `target`; it appears there whole or not at all."""
    print("turboquant: compiling CPU kernels (once)", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as build:
            objects = []
            for source in sorted(SOURCES.glob("*.cpp")):
                objects.append(Path(build) / f"{source.stem}.o")
            commands = [
                [cxx.path, *flags, "-c", str(SOURCES / f"{made.stem}.cpp"), "-o", str(made)] for made in objects
            ]
            _run(commands)
            made = Path(build) / target.name
            _run([[cxx.path, *flags, "-shared", *map(str, objects), "-o", str(made)]])
            os.replace(made, target)
    except OSError as error:
        raise NativeError(f"the CPU kernels cannot be built in {target.parent}: {_one_line(str(error))}") from None


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Runs compiler commands at the same time. NativeError with the first complaint."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    ended = [(child.communicate()[0], child.returncode) for child in running]
    for said, status in ended:
        if status:
            lines = [line for line in said.splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line]
            complaint = (errors or lines or [f"status {status}"])[0]
            raise NativeError(f"the CPU kernels do not compile with {commands[0][0]}: {_one_line(complaint)}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."


# Arrays


def pointer(x: mx.array | None, keep: list[Any]) -> int:
    """The address of the elements of x, in row-major order; 0 for None and for an array without elements.

    The kernel reads MLX's own memory; only an array that is not row-contiguous is copied. x is evaluated. What has to
    stay alive while the address is used is added to `keep`.
    """
    if x is None or x.size == 0:
        return 0
    try:
        view = ctypes.c_char.from_buffer(x)  # type: ignore[arg-type]
    except TypeError:  # it is not contiguous
        view = ctypes.c_char.from_buffer(mx.contiguous(x))  # type: ignore[arg-type]
    keep.append(view)
    return ctypes.addressof(view)


_NUMPY: dict[mx.Dtype, type[np.generic]] = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.uint32: np.uint32,
    mx.int32: np.int32,
    mx.int16: np.int16,
    mx.int8: np.int8,
    mx.uint8: np.uint8,
}


class Output:
    """Memory for a kernel to fill: `address` before the call, `array()` after it.

    The memory is NumPy's and MLX copies it once: every way to have MLX provide it costs as much or more.
    """

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype) -> None:
        self._memory = np.empty(tuple(shape), _NUMPY[dtype])
        self._dtype = dtype
        self.address: int = self._memory.__array_interface__["data"][0]

    def array(self) -> mx.array:
        """The result [shape] of the dtype asked for."""
        made = mx.array(self._memory)
        return made.view(mx.bfloat16) if self._dtype == mx.bfloat16 else made


def output(shape: Sequence[int], dtype: mx.Dtype) -> Output:
    """Memory of this shape for a kernel to fill; dtype: float32, float16, bfloat16, uint32, int32, int16, (u)int8."""
    return Output(shape, dtype)
