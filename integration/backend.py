"""Which implementation of the numerics serves a cache.

A backend is a module with the public functions of ``turboquant_vlm.reference`` (``make_codec``, ``empty_tokens``,
``append``, ``attend``, ...). All backends give the same bits, so a cache written by one can be read by another; a user
chooses by name, with ``--kv-backend`` or the environment variable ``TURBOQUANT_BACKEND``.

Kernels serve only after they have passed `turboquant_vlm.conformance.gate` on this device, and behind a `Guard`. If
they fail either, one line says so and the reference serves.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turboquant_vlm.conformance.gate import Verdict
    from turboquant_vlm.fast.targets import Target

    from .guard import Functions, Guard

VARIABLE = "TURBOQUANT_BACKEND"
NAMES = ("auto", "fast", "reference", "metal", "cuda", "cpu", "upstream")
_ALWAYS = ("auto", "reference", "upstream")


@dataclass(frozen=True)
class Backend:
    """``name`` is what serves (never "auto" or "fast"); ``module`` is None for "upstream": mlx-vlm's own caches stay.

    ``why``: one line on why this one serves.
    """

    name: str
    module: Functions | None
    why: str = ""

    def functions(self) -> Functions:
        """The module, or a RuntimeError for "upstream", which has none."""
        if self.module is None:
            raise RuntimeError("backend 'upstream' leaves the KV cache to mlx-vlm; it has no functions of its own")
        return self.module


def targets() -> tuple[Target, ...]:
    """All sets of kernels, best first."""
    from turboquant_vlm.fast.targets import TARGETS

    return TARGETS


def _reasons() -> dict[str, str | None]:
    """Per target the reason why it cannot be used here and now, or None."""
    return {target.name: target.unavailable_reason() for target in targets()}


def _available(reasons: dict[str, str | None]) -> tuple[str, ...]:
    usable = [name for name, reason in reasons.items() if reason is None]
    return ("auto", *(["fast"] if usable else []), "reference", *usable, "upstream")


def available() -> tuple[str, ...]:
    """Names that `resolve` accepts in this installation, on this device."""
    return _available(_reasons())


_chosen: str | None = None


def choose(name: str | None) -> None:
    """Ask for a backend in this process, whatever the environment says; None returns to the environment's choice."""
    global _chosen
    _chosen = None if name is None else check(name)


def chosen() -> str:
    """The name asked for: by `choose`, by ``TURBOQUANT_BACKEND``, or "auto"."""
    return _chosen or os.environ.get(VARIABLE, "").strip().lower() or "auto"


def check(name: str) -> str:
    """``name`` in lower case, or a ValueError that lists what is available and why this is not.

    Runs no kernel; for "auto", "reference" and "upstream" it imports nothing.
    """
    wanted = name.strip().lower()
    if wanted not in NAMES:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(NAMES)}")
    if wanted in _ALWAYS:
        return wanted
    reasons = _reasons()
    names = _available(reasons)
    if wanted not in names:
        why = "; ".join(f"{key}: {reason}" for key, reason in reasons.items() if reason and wanted in ("fast", key))
        raise ValueError(f"backend {wanted!r} is not available here; available: {', '.join(names)} ({why})")
    return wanted


# One answer per name and process: a run does not change its backend, except when a guard says so.
_resolved: dict[str, Backend] = {}
_said: set[str] = set()
_verdicts: dict[tuple[Target, str], Verdict] = {}
_guards: dict[str, Guard] = {}
_lock = threading.RLock()


def resolve(name: str | None = None) -> Backend:
    """The backend called ``name`` (default: the one asked for, see `chosen`).

    "fast" is the first target that is available and passes its check, "auto" the same where there is one; the
    reference where none passes. The first call for kernels on a machine runs their check, which may take a minute.
    """
    wanted = check(chosen() if name is None else name)
    if wanted == "upstream":
        return Backend("upstream", None, "mlx-vlm's own caches were asked for")
    if wanted == "reference":
        return Backend("reference", _reference(), "it was asked for")
    with _lock:
        # The default device decides what is available, and may change.
        key = f"{wanted} on {_device()}"
        found = _resolved.get(key)
        if found is None or failure(found) is not None:
            found = _resolved[key] = _pick(wanted)
        return found


def failure(found: Backend) -> str | None:
    """Why the kernels of a backend gave up while serving, or None; the reference serves since."""
    from .guard import Guard

    return found.module.failure if isinstance(found.module, Guard) else None


def describe(name: str) -> str:
    """``name``, the backend a cache was made with, as reports show it: also whether it gave up."""
    for guard in list(_guards.values()):
        if guard.name == name and guard.failure is not None:
            return f"reference ({name} failed while serving)"
    return name


def attends_first_chunk(functions: Any) -> bool:
    """Whether a first chunk on an empty cache goes to the kernels instead of MLX's attention on its own floats.

    Only the CPU's: MLX's CPU attention takes about a hundred times longer there. A first chunk then reads old tokens
    packed, as every later one does.
    """
    return getattr(functions, "name", None) == "cpu" and functions.failure is None


def verdict(target: Target, force: bool = False) -> Verdict:
    """The verdict of the device check on ``target``; it runs if none is remembered, or with ``force``."""
    from turboquant_vlm.conformance import gate

    with _lock:
        key = (target, _device())
        if force or key not in _verdicts:
            _verdicts[key] = gate.check(target, force=force, log=say)
        return _verdicts[key]


def say(line: str) -> None:
    """One line on standard error, at most once per process."""
    if line not in _said:
        _said.add(line)
        print(f"turboquant: {line}", file=sys.stderr, flush=True)


def forget() -> None:
    """Forget everything resolved and said so far, as in a new process."""
    with _lock:
        _resolved.clear()
        _guards.clear()
        _verdicts.clear()
        _said.clear()


def _reference() -> ModuleType:
    return importlib.import_module("turboquant_vlm.reference")


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device())


def _pick(wanted: str) -> Backend:
    """The first target among those wanted that passes, or the reference with a line on why."""
    reasons = []
    for target in targets():
        if wanted not in ("auto", "fast", target.name):
            continue
        reason = target.unavailable_reason()
        if reason is not None:
            reasons.append(f"{target.name}: {reason}")
            continue
        reason = _unsound(target)
        if reason is None:
            return Backend(target.name, _guards[target.name], f"{target.name} passed its check on this device")
        reasons.append(f"{target.name} {reason}")
    return Backend("reference", _reference(), "; ".join(reasons))


def _unsound(target: Target) -> str | None:
    """Why an available target must not serve, also said on standard error; or None, and its guard is ready."""
    from .guard import Guard

    guard = _guards.get(target.name)
    if guard is not None:
        return None if guard.failure is None else f"failed while serving ({guard.failure})"
    try:
        found = verdict(target)
        if found.ok:
            _guards[target.name] = Guard(target.name, target.load(), _reference(), say)
            return None
        device, reason = found.identity["device"], found.reason
    except Exception as error:  # nothing about kernels may end a run that the reference can serve
        device, reason = "this device", f"{type(error).__name__}: {error}"
    failed = f"failed its check on {device} ({reason})"
    say(f"backend {target.name} {failed}; the reference serves")
    return failed
