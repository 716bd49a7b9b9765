"""The check that a set of kernels has to pass on this device before it may serve.

A subset of the vectors (`gate_cases`) runs on the target's module in a process of its own, so that a kernel that
aborts or hangs fails the check instead of ending the run. The verdict is kept in the cache folder and holds as long
as nothing changes that the bits could depend on: device, driver, MLX, Python, kernels, reference, vectors.

    python -m turboquant_vlm.conformance.gate --module turboquant_vlm.fast.metal --device gpu
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from turboquant_vlm.fast.targets import Target

from .folder import cache_folder
from .gate_cases import GATE, PROBES
from .suite import check as run_case
from .suite import gate_vectors

TIMEOUT = 300.0
"""Seconds the whole check may take; compiling the kernels of all cases, more than a hundred, is most of it."""
FOLDER = "verdicts"
_MARK = "turboquant-gate "
_LONGEST_REASON = 240
_GRACE = 10.0  # seconds that a killed process gets to be gone

Log = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """What the check of one target found.

    reason: one line; why it failed, or that it passed.  cases: how many passed.  seconds: how long the check took.
    identity: what it holds for (`Target.identity`, and "vectors").  when: UTC, ISO 8601.  remembered: it was read from
    the cache folder, not found now.
    """

    ok: bool
    reason: str
    cases: int
    seconds: float
    identity: dict[str, str]
    when: str
    remembered: bool = False


def check(
    target: Target,
    force: bool = False,
    timeout: float = TIMEOUT,
    folder: Path | None = None,
    log: Log | None = None,
) -> Verdict:
    """The verdict on an available ``target`` on MLX's default device; from memory where there is one.

    force: run it in any case.  timeout: seconds after which the process counts as hung.  folder: where verdicts are
    kept (default: in the cache folder).  log: is told, in one line, that the check starts to run.
    Never raises for anything that the target does. A folder that cannot be written only means that nothing is
    remembered; so does a check that could not be started, that hung, or that another process ended, because that need
    not be the kernels' fault.
    """
    identity = {**target.identity(), "vectors": _vectors_digest()}
    path = (cache_folder() / FOLDER if folder is None else folder) / _file_name(identity)
    if not force and (found := _recall(path, identity)) is not None:
        return found
    if log is not None:
        log(f"checking backend {target.name} on {identity['device']} (once, a few seconds to some minutes)")
    start = time.perf_counter()
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        outcome = _run_child(target, identity["default_device"], timeout)
    except OSError as error:
        seconds = time.perf_counter() - start
        return Verdict(False, f"the check could not be started: {error}", 0, seconds, identity, when)
    verdict = Verdict(outcome.ok, outcome.reason, outcome.cases, time.perf_counter() - start, identity, when)
    if outcome.lasting:
        _remember(path, verdict)
    return verdict


# Remembering


def _vectors_digest() -> str:
    """SHA-256 of the vectors, of the choice among them, and of what judges them."""
    here = Path(__file__).parent
    total = hashlib.sha256()
    judge = [here / f"{name}.py" for name in ("gate", "gate_cases", "suite", "backend", "cases", "compare", "inputs")]
    for path in [*sorted(here.glob("vectors/*.json")), *judge]:
        total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _file_name(identity: dict[str, str]) -> str:
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{identity['target']}-{key[:32]}.json"


def _recall(path: Path, identity: dict[str, str]) -> Verdict | None:
    """The verdict kept in ``path`` if it is one for ``identity``; None if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = Verdict(**{**data, "remembered": True})
    except (OSError, ValueError, TypeError):
        return None
    kinds: dict[str, type | tuple[type, ...]] = {
        "ok": bool,
        "reason": str,
        "cases": int,
        "seconds": (int, float),
        "identity": dict,
        "when": str,
    }
    sound = all(isinstance(getattr(found, name), kind) for name, kind in kinds.items())
    return found if sound and found.identity == identity else None


def _remember(path: Path, verdict: Verdict) -> None:
    """Write the verdict in one step: a reader sees all of it or nothing. Does nothing where that is impossible."""
    text = json.dumps(asdict(replace(verdict, remembered=False)), indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


# The parent's side


@dataclass(frozen=True)
class _Outcome:
    ok: bool
    reason: str
    cases: int
    lasting: bool = True
    """False for what may have come from outside: a hang, or a signal that others send."""


def _run_child(target: Target, device: str, timeout: float) -> _Outcome:
    """Run the check of ``target`` in another process and read what it found. OSError if it cannot be started."""
    if not sys.executable:
        raise OSError("there is no Python executable to run it with")
    command = [sys.executable, "-m", f"{__package__}.gate", "--module", target.module or "", "--device", device]
    # The child imports what this process imports, wherever that comes from.
    places = [str(Path(place or os.curdir).resolve()) for place in sys.path if Path(place or os.curdir).exists()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
    # Its own process group, so that nothing it started outlives it.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    hung = False
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        hung = True
        _kill(child)
        try:
            out, err = child.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:  # stuck in a driver: it cannot be waited for
            out, err = b"", b""
    except BaseException:
        _kill(child)
        raise
    return _judge(_messages(out), _last_line(err), child.returncode, f"{timeout:g} s" if hung else None)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def _messages(out: bytes) -> list[dict[str, Any]]:
    """What the child said; whatever else a module printed is passed over."""
    found = []
    for line in out.decode("utf-8", "replace").splitlines():
        if line.startswith(_MARK):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line[len(_MARK) :]))
    return found


def _last_line(err: bytes) -> str:
    lines = [line.strip() for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _judge(messages: list[dict[str, Any]], complaint: str, status: int | None, hung: str | None) -> _Outcome:
    """An outcome is only good if the child ran every case, said so and then ended well."""
    begun = [str(message["case"]) for message in messages if "case" in message]
    done = [message for message in messages if "ok" in message]
    where = f"{begun[-1]}: " if begun else ""
    passed = max(0, len(begun) - 1)
    if hung is not None:
        return _Outcome(False, f"{where}no end after {hung}", passed, lasting=False)
    if not done or (status != 0 and done[-1]["ok"]):
        how = f"the process ended with {_status(status)}"
        sent = status is not None and -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        reason = _short(f"{where}{how}{f' ({complaint})' if complaint else ''}")
        return _Outcome(False, reason, passed, lasting=not sent)
    if not done[-1]["ok"]:
        return _Outcome(False, _short(str(done[-1]["reason"])), passed)
    if len(begun) != _size():
        return _Outcome(False, f"{len(begun)} of {_size()} cases ran", passed)
    return _Outcome(True, f"all {len(begun)} cases agree", len(begun))


def _size() -> int:
    """How many cases the child runs; importing the module is the first."""
    return 1 + len(PROBES) + len(GATE)


def _status(status: int | None) -> str:
    if status is None or status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


# The child's side


def _say(**message: Any) -> None:
    # The line break first: a module may have printed half a line.
    print(f"\n{_MARK}{json.dumps(message)}", flush=True)


def _run(module_name: str) -> Iterator[tuple[str, list[str]]]:
    """(case, its problems), one after the other, each announced before it runs."""
    _say(case="import")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        yield "import", [f"raised {type(error).__name__}: {error}"]
        return
    yield "import", []
    for name, probe in PROBES.items():
        _say(case=name)
        yield name, probe(module)
    for case in gate_vectors():
        _say(case=case["id"])
        yield case["id"], run_case(case, module)


def main(argv: list[str] | None = None) -> int:
    """Check a module on a device and print what was found, for `check`; 0 if it passed, 1 if not."""
    import mlx.core as mx

    parser = argparse.ArgumentParser(prog="python -m turboquant_vlm.conformance.gate", description=__doc__)
    parser.add_argument("--module", required=True, help="import path of a module with the reference's functions")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="MLX device (default: MLX's own)")
    args = parser.parse_args(argv)
    if args.device is not None:
        mx.set_default_device(mx.Device(mx.gpu if args.device == "gpu" else mx.cpu))
    for name, problems in _run(args.module):
        if problems:
            _say(ok=False, reason=f"{name}: {problems[0]}")
            return 1
    _say(ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
