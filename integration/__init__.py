"""mlx-vlm's side: the caches, the hook that puts them in place, the commands and the report.

    from turboquant_vlm.integration import install, last_report

    install()                                    # before or after importing mlx_vlm
    generate(model, processor, prompt, kv_bits=3.5, kv_quant_scheme="turboquant", quantized_kv_start=0)
    print(last_report())

Importing this package does not import mlx or mlx-vlm; the caches are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .hook import active, install, uninstall
from .report import Report, cache_bytes, last_report
from .support import UnsupportedMlxVlm

if TYPE_CHECKING:
    from .batch import BatchTurboQuantKVCache
    from .cache import TurboQuantKVCache

__all__ = [
    "BatchTurboQuantKVCache",
    "Report",
    "TurboQuantKVCache",
    "UnsupportedMlxVlm",
    "active",
    "cache_bytes",
    "install",
    "last_report",
    "uninstall",
]

_LATER = {"TurboQuantKVCache": ".cache", "BatchTurboQuantKVCache": ".batch"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
