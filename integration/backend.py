"""Which implementation of the numerics serves a cache.

A backend is a module with the public functions of ``turboquant_vlm.reference`` (``make_codec``, ``empty_tokens``,
``append``, ``attend``, ...). All backends give the same bits, so a cache written by one can be read by another; a user
chooses by name, with ``--kv-backend`` or the environment variable ``TURBOQUANT_BACKEND``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

VARIABLE = "TURBOQUANT_BACKEND"
NAMES = ("auto", "fast", "reference", "metal", "cuda", "cpu", "upstream")


@dataclass(frozen=True)
class Backend:
    """``name`` is what serves (never "auto"); ``module`` is None for "upstream": mlx-vlm's own caches stay."""

    name: str
    module: ModuleType | None

    def functions(self) -> ModuleType:
        """The module, or a RuntimeError for "upstream", which has none."""
        if self.module is None:
            raise RuntimeError("backend 'upstream' leaves the KV cache to mlx-vlm; it has no functions of its own")
        return self.module


def _reference() -> Backend:
    return Backend("reference", importlib.import_module("turboquant_vlm.reference"))


def _upstream() -> Backend:
    return Backend("upstream", None)


# "auto" means the best that is available.
_AVAILABLE: dict[str, Callable[[], Backend]] = {
    "auto": _reference,
    "reference": _reference,
    "upstream": _upstream,
}


def available() -> tuple[str, ...]:
    """Names that `resolve` accepts in this installation."""
    return tuple(_AVAILABLE)


_chosen: str | None = None


def choose(name: str | None) -> None:
    """Ask for a backend in this process, whatever the environment says; None returns to the environment's choice."""
    global _chosen
    _chosen = None if name is None else check(name)


def chosen() -> str:
    """The name asked for: by `choose`, by ``TURBOQUANT_BACKEND``, or "auto"."""
    return _chosen or os.environ.get(VARIABLE, "").strip().lower() or "auto"


def check(name: str) -> str:
    """``name`` in lower case, or a ValueError that lists what is available. Imports nothing."""
    wanted = name.strip().lower()
    if wanted not in NAMES:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(NAMES)}")
    if wanted not in _AVAILABLE:
        raise ValueError(f"backend {wanted!r} is not available here; available: {', '.join(available())}")
    return wanted


def resolve(name: str | None = None) -> Backend:
    """The backend called ``name`` (default: the one asked for, see `chosen`)."""
    return _AVAILABLE[check(chosen() if name is None else name)]()
