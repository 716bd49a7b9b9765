"""How the CPU kernels are built, found again, chosen and fed; and the threads they run on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm.fast import targets
from turboquant_vlm.fast.cpu import native

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"no CPU kernels here: {native.unavailable_reason()}"
)

ANSWER = 'extern "C" __attribute__((visibility("default"))) int tq_answer() { return %d; }\n'
COMPILING = "compiling CPU kernels"
VARIABLES = ("TURBOQUANT_CXX", "TURBOQUANT_CPU_ISA", "TURBOQUANT_CPU_SANITIZE", "TURBOQUANT_THREADS")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a library of one function, which compiles in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER % 42)
    return folder


ASK = "print(native.library().tq_answer())"


def start(sources: Path, body: str = ASK, **environment: str) -> subprocess.Popen[str]:
    """A new process that builds from `sources`."""
    code = "from pathlib import Path\nfrom turboquant_vlm.fast.cpu import native\n"
    code += f"native.SOURCES = Path({str(sources)!r})\n" + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return out.strip(), err


def built(cache: Path) -> list[str]:
    """What lies in the cache, but for the files of locks."""
    return sorted(path.name for path in (cache / "cpu").iterdir() if path.suffix != ".lock")


# The cache


def test_second_process_does_not_compile(sources: Path, tmp_path: Path) -> None:
    cache = {"TURBOQUANT_CACHE": str(tmp_path / "cache")}
    out, err = finish(start(sources, **cache))
    assert out == "42"
    assert err.count(COMPILING) == 1
    out, err = finish(start(sources, **cache))
    assert out == "42"
    assert COMPILING not in err
    assert len(built(tmp_path / "cache")) == 1


def test_processes_at_once_compile_once(sources: Path, tmp_path: Path) -> None:
    cache = {"TURBOQUANT_CACHE": str(tmp_path / "cache")}
    ended = [finish(child) for child in [start(sources, **cache) for _ in range(3)]]
    assert [out for out, _ in ended] == ["42"] * 3
    assert sum(COMPILING in err for _, err in ended) == 1
    assert len(built(tmp_path / "cache")) == 1


def test_other_sources_make_another_library(sources: Path, tmp_path: Path) -> None:
    cache = {"TURBOQUANT_CACHE": str(tmp_path / "cache")}
    assert finish(start(sources, **cache))[0] == "42"
    (sources / "answer.cpp").write_text(ANSWER % 43)
    out, err = finish(start(sources, **cache))
    assert (out, COMPILING in err) == ("43", True)
    (sources / "unused.h").write_text("// A header counts too.\n")
    assert COMPILING in finish(start(sources, **cache))[1]
    assert len(built(tmp_path / "cache")) == 3


def test_other_flags_make_another_library(sources: Path, tmp_path: Path) -> None:
    cache = {"TURBOQUANT_CACHE": str(tmp_path / "cache")}
    for isa in native.available_isas():
        out, err = finish(start(sources, **cache, TURBOQUANT_CPU_ISA=isa))
        assert (out, COMPILING in err) == ("42", True)
    assert COMPILING in finish(start(sources, "native._FLAGS += ('-DX',); native.library()", **cache))[1]
    assert len(built(tmp_path / "cache")) == len(native.available_isas()) + 1


def test_damaged_library_is_built_again(sources: Path, tmp_path: Path) -> None:
    cache = {"TURBOQUANT_CACHE": str(tmp_path / "cache")}
    finish(start(sources, **cache))
    (name,) = built(tmp_path / "cache")
    path = tmp_path / "cache" / "cpu" / name
    path.write_bytes(path.read_bytes()[:300])
    out, err = finish(start(sources, **cache))
    assert (out, COMPILING in err) == ("42", True)
    assert COMPILING not in finish(start(sources, **cache))[1]


def test_cache_that_cannot_be_written_only_costs_time(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    body = "print(native.library().tq_answer(), native._temporary_folder())"
    environment = {"TURBOQUANT_CACHE": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path)}
    out, err = finish(start(sources, body, **environment))
    answer, folder = out.split()
    assert (answer, COMPILING in err) == ("42", True)
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()


def test_library_is_found_in_a_cache_that_is_read_only(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    finish(start(sources, TURBOQUANT_CACHE=str(cache)))
    (cache / "cpu").chmod(0o500)
    try:
        assert finish(start(sources, TURBOQUANT_CACHE=str(cache)))[0] == "42"
    finally:
        (cache / "cpu").chmod(0o700)


# The compiler


@pytest.fixture
def here(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process builds from `sources` into a cache of its own, given."""
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    native.source_digest.cache_clear()
    yield tmp_path / "cache"
    native.source_digest.cache_clear()


def test_no_compiler(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(native.NativeError, match=r"^no C\+\+ compiler found \(tried c\+\+, g\+\+, clang\+\+\)$"):
        native.library()
    assert native.unavailable_reason() == "no C++ compiler found (tried c++, g++, clang++)"
    monkeypatch.setenv("TURBOQUANT_CXX", "no-such-compiler")
    assert native.unavailable_reason() == "TURBOQUANT_CXX='no-such-compiler' is no C++ compiler that runs here"


def test_compiler_that_does_not_run(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TURBOQUANT_CXX", str(broken))
    with pytest.raises(native.NativeError, match=r"is no C\+\+ compiler that runs here$"):
        native.library()


def test_compiler_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "clang++"):
        if shutil.which(name):
            monkeypatch.setenv("TURBOQUANT_CXX", name)
            assert native.library().tq_answer() == 42
            assert native.compiler()[0] == shutil.which(name)


def test_sources_that_do_not_compile(
    here: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (sources / "broken.cpp").write_text("int f() { return missing; }\n")
    assert native.unavailable_reason() is None
    for _ in range(2):
        with pytest.raises(native.NativeError, match="do not compile") as caught:
            native.library()
        assert "missing" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert native.unavailable_reason() == str(caught.value)
    assert capfd.readouterr().err.count(COMPILING) == 1
    assert built(here) == []


# Choices


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = native.available_isas()
    assert usable[-1] == "generic"
    assert native.isa_in_use() == usable[0]
    monkeypatch.setenv("TURBOQUANT_CPU_ISA", "generic")
    assert native.isa_in_use() == "generic"
    assert native.isa_in_use(usable[0]) == usable[0]
    for isa in set(native.ISAS) - set(usable):
        monkeypatch.setenv("TURBOQUANT_CPU_ISA", isa)
        with pytest.raises(native.NativeError, match=f"this CPU does not run {isa} kernels; it runs .*generic"):
            native.library()
        assert f"does not run {isa}" in str(native.unavailable_reason())
    monkeypatch.setenv("TURBOQUANT_CPU_ISA", "sse9")
    with pytest.raises(native.NativeError, match="'sse9'; expected one of avx512, avx2, neon, generic"):
        native.library()


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "1025", "²"])
def test_wrong_numbers_of_threads(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOQUANT_THREADS", value)
    with pytest.raises(native.NativeError, match=f"a number from 1 to 1024; got '{value}'"):
        native.threads()


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= native.threads() <= (os.cpu_count() or 1)
    monkeypatch.setenv("TURBOQUANT_THREADS", "3")
    assert native.threads() == 3


def test_wrong_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOQUANT_CPU_SANITIZE", "magic")
    with pytest.raises(native.NativeError, match="'magic'"):
        native.library()


# Arrays


def at(address: int, count: int, dtype: type[Any]) -> np.ndarray:
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).copy()


def test_pointers() -> None:
    keep: list[Any] = []
    x = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    assert at(native.pointer(x, keep), 12, np.float32).tolist() == list(range(12))
    assert native.pointer(x, keep) == native.pointer(x, keep)
    assert at(native.pointer(x.T, keep), 12, np.float32).tolist() == x.T.flatten().tolist()
    assert at(native.pointer(x[:, 1:3], keep), 6, np.float32).tolist() == x[:, 1:3].flatten().tolist()
    assert at(native.pointer(mx.broadcast_to(x[:1], (2, 4)), keep), 8, np.float32).tolist() == [0, 1, 2, 3] * 2
    assert at(native.pointer(x.astype(mx.bfloat16), keep), 2, np.uint16).tolist() == [0, 0x3F80]
    assert native.pointer(None, keep) == 0
    assert native.pointer(mx.zeros((3, 0, 2)), keep) == 0


@pytest.mark.parametrize("dtype", list(native._NUMPY), ids=str)
def test_outputs(dtype: mx.Dtype) -> None:
    made = native.output((2, 3), dtype)
    one = mx.array(1, dtype)
    size = dtype.size
    for index in range(6):
        ctypes.memmove(made.address + index * size, native.pointer(one, keep := []), size)
        assert keep
    array = made.array()
    assert array.dtype == dtype
    assert array.tolist() == [[1] * 3] * 2


# The pool

POOL = """
#include "pool.h"
#include <atomic>
#include <chrono>
#include <thread>
using namespace tq;
#define EXPORT extern "C" __attribute__((visibility("default")))
// How often each of the indices ran; nested: each starts as many again.
EXPORT void tq_count(int count, int threads, int nested, std::atomic<int>* ran) {
  parallel_for(count, threads, [&](int index) {
    if (nested) parallel_for(nested, threads, [&](int) { ran[index]++; });
    else ran[index]++;
  });
}
// How many threads took part in work that takes its time.
EXPORT void tq_threads(int count, int threads, int* found) {
  std::atomic<int> taken{0};
  static std::atomic<int> call{0};
  const int mine = ++call;
  parallel_for(count, threads, [&](int) {
    static thread_local int seen = 0;
    if (seen != mine) { seen = mine; taken++; }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  *found = taken;
}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of the pool and of what these tests call."""
    folder = tmp_path_factory.mktemp("pool")
    for name in ("pool.h", "pool.cpp"):
        shutil.copy(native.SOURCES / name, folder / name)
    (folder / "harness.cpp").write_text(POOL)
    return folder


COUNT = """
import ctypes, os, threading
import numpy as np
library = native.library()
def count(n, threads, nested=0):
    ran = np.zeros(n, np.int32)
    library.tq_count(n, threads, nested, ctypes.c_void_p(ran.ctypes.data))
    assert (ran == max(nested, 1)).all(), ran
def taken(n, threads):
    found = ctypes.c_int()
    library.tq_threads(n, threads, ctypes.byref(found))
    return found.value
"""


def run_pool(pool: Path, tmp_path_factory: pytest.TempPathFactory, body: str) -> str:
    cache = tmp_path_factory.getbasetemp() / "pool-cache"
    return finish(start(pool, COUNT + textwrap.dedent(body), TURBOQUANT_CACHE=str(cache)))[0]


def test_every_index_runs_once(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    body = """
    for repeat in range(300):
        for n in (0, 1, 2, 3, 7, 100):
            for threads in (1, 2, 3, 8):
                count(n, threads)
    count(20, 4, nested=5)
    count(100000, 4)
    print(taken(8, 1), taken(8, 4), taken(2, 4))
    """
    assert run_pool(pool, tmp_path_factory, body) == "1 4 2"


def test_python_threads_at_once(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    body = """
    def many():
        for repeat in range(500):
            count(50, 3)
            count(5, 2, nested=3)
    at_once = [threading.Thread(target=many) for _ in range(4)]
    for thread in at_once: thread.start()
    for thread in at_once: thread.join()
    print("done")
    """
    assert run_pool(pool, tmp_path_factory, body) == "done"


def test_forked_child_has_threads_of_its_own(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    body = """
    assert taken(6, 3) == 3
    child = os.fork()
    if child == 0:
        os._exit(0 if taken(6, 3) == 3 and taken(6, 2) == 2 else 1)
    assert taken(6, 3) == 3
    print(os.waitpid(child, 0)[1])
    """
    assert run_pool(pool, tmp_path_factory, body) == "0"


def test_process_ends_while_threads_sleep_or_work(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    begun = time.perf_counter()
    body = """
    import time
    count(10, 4)
    threading.Thread(target=taken, args=(10**6, 4), daemon=True).start()
    time.sleep(0.1)
    print("end")
    """
    assert run_pool(pool, tmp_path_factory, body) == "end"
    assert time.perf_counter() - begun < 60


# The target


def cpu_target() -> targets.Target:
    return next(target for target in targets.TARGETS if target.name == "cpu")


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="MLX's default device is no CPU")
def test_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = cpu_target()
    assert target.unavailable_reason() is None
    assert target.load().__name__ == "turboquant_vlm.fast.cpu"
    before = target.identity()
    assert before["cpu"] == native.cpu_model()
    assert before["isa"].split()[0] == native.available_isas()[0]
    assert before["compiler"] == " ".join(native.compiler())
    assert before["sources"] == native.source_digest()
    monkeypatch.setenv("TURBOQUANT_CPU_ISA", "generic")
    assert target.identity() == {**before, "isa": "generic"}
    monkeypatch.setenv("TURBOQUANT_CXX", "no-such-compiler")
    assert "no-such-compiler" in str(target.unavailable_reason())


def test_target_needs_the_cpu_as_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert cpu_target().unavailable_reason() == "MLX's default device is the GPU"


def test_asking_for_the_target_compiles_nothing(sources: Path, tmp_path: Path) -> None:
    body = "from turboquant_vlm.fast import targets\nprint([t.unavailable_reason() for t in targets.TARGETS][2])"
    out, err = finish(start(sources, body, TURBOQUANT_CACHE=str(tmp_path / "cache")))
    assert COMPILING not in err
    assert out
    assert not (tmp_path / "cache").exists()
