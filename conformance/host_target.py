"""The Metal target executed on this machine's CPU: every kernel's final text goes through the host runner.

A backend for `python -m turboquant_vlm.conformance --backend conformance.host_target`. Each launch runs in another
order of threads, with poisoned memory, and any complaint of the runner is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from turboquant_vlm.fast import launch, metal
from turboquant_vlm.reference import __all__ as _names

from .metal_host import host_call

ORDERS = ("forward", "reverse", "shuffle:1", "shuffle:2")
"""Thread orders, one launch after the other."""

_launches = itertools.count()


def on_host(kernel: Callable[..., Any], **call: Any) -> Any:
    """A launcher that runs a kernel on the host, the next of `ORDERS` each time."""
    return host_call(kernel, **call, order=ORDERS[next(_launches) % len(ORDERS)])


def __getattr__(name: str) -> Any:
    if name == "kernels_started":
        return metal.kernels_started
    if name not in _names:
        raise AttributeError(name)
    return launch.through(on_host, getattr(metal, name))
