"""Where this package keeps what it can make again: models, compiled kernels, and the verdicts of the device check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "TURBOQUANT_CACHE"


def cache_folder() -> Path:
    """``$TURBOQUANT_CACHE``, or the place that the platform has for caches. It may not exist yet."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "turboquant-vlm"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turboquant-vlm"
