"""Putting the cache where mlx-vlm builds its own, and taking it out again.

mlx-vlm has no registry of caches: modules import classes and functions by name. So the hook exchanges objects: every
name in every loaded ``mlx_vlm`` module that refers to one of mlx-vlm's originals is pointed at the replacement, and
back on removal. Modules loaded later import from the exchanged ones. What is exchanged:

- ``TurboQuantKVCache``, so that each place that builds one builds ours;
- ``scaled_dot_product_attention``, so that attention (with sinks too) reads packed keys and values;
- ``resolve_kv_bits`` and ``_is_default_split``, so that 3.5 means 4-bit keys and 3-bit values everywhere;
- ``kv_quant_fingerprint``, so that prefix caches on disk never mix mlx-vlm's codes with ours;
- ``_extend_cache``, so that a batch begun with short prompts, in floats, can take in a row that is quantized;
- ``maybe_quantize_kv_cache`` and ``generate_step``, which only watch, for the report.

Importing this module does not import mlx or mlx-vlm; `install` does.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from . import backend, support

# Where each original lives. Names are checked before anything is exchanged.
_ORIGINALS = (
    ("mlx_vlm.turboquant", "TurboQuantKVCache"),
    ("mlx_vlm.turboquant", "BatchTurboQuantKVCache"),
    ("mlx_vlm.turboquant", "resolve_kv_bits"),
    ("mlx_vlm.kv_quant", "_is_default_split"),
    ("mlx_vlm.kv_quant", "kv_quant_fingerprint"),
    ("mlx_vlm.models.base", "scaled_dot_product_attention"),
    ("mlx_vlm.generate.common", "maybe_quantize_kv_cache"),
    ("mlx_vlm.generate.ar", "generate_step"),
    ("mlx_vlm.generate.ar", "_extend_cache"),
)

_exchanged: list[tuple[Any, Any]] = []  # (original, replacement), empty while the hook is out
_capabilities: tuple[dict[type, Any], bool] | None = None


def active() -> bool:
    """Whether the hook is in."""
    return bool(_exchanged)


def install(name: str | None = None) -> bool:
    """Put the hook in; True if it is in afterwards.

    ``name``: backend for caches made from now on; default the environment's choice. "upstream" keeps mlx-vlm as it is
    (False). ValueError for a backend that is not available, UnsupportedMlxVlm for a version outside the tested range;
    both before any change.
    Calling it again changes nothing.
    """
    if name is not None:
        backend.choose(name)
    if backend.check(backend.chosen()) == "upstream":
        uninstall()
        return False
    if active():
        return True
    originals = _find_originals()
    _exchanged.extend(zip(originals.values(), _replacements(originals).values(), strict=True))
    _exchange(_exchanged)
    _register_classes()
    return True


def uninstall() -> None:
    """Point every name back at mlx-vlm's original. Does nothing if the hook is not in."""
    if not active():
        return
    _unregister_classes()
    _exchange([(replacement, original) for original, replacement in _exchanged])
    _exchanged.clear()


def _find_originals() -> dict[str, Any]:
    """mlx-vlm's own objects by name, after checking its version. Imports mlx-vlm."""
    version = importlib.import_module("mlx_vlm.version").__version__
    support.check(version)
    found = {}
    for module_name, name in _ORIGINALS:
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            raise support.UnsupportedMlxVlm(
                f"mlx-vlm {version} has no {module_name}.{name}; mlx-vlm was left as it is."
            )
        found[name] = getattr(module, name)
    return found


def _replacements(originals: dict[str, Any]) -> dict[str, Any]:
    """One object to stand in for each original, in the same order."""
    from .batch import BatchTurboQuantKVCache
    from .bits import is_default_split, resolve_kv_bits
    from .cache import TurboQuantKVCache

    return {
        "TurboQuantKVCache": TurboQuantKVCache,
        "BatchTurboQuantKVCache": BatchTurboQuantKVCache,
        "resolve_kv_bits": resolve_kv_bits,
        "_is_default_split": is_default_split,
        "kv_quant_fingerprint": _fingerprint(originals["kv_quant_fingerprint"]),
        "scaled_dot_product_attention": _attention(originals["scaled_dot_product_attention"]),
        "maybe_quantize_kv_cache": _watch_conversion(originals["maybe_quantize_kv_cache"]),
        "generate_step": _watch_generation(originals["generate_step"]),
        "_extend_cache": _extend(originals["_extend_cache"]),
    }


def _loaded_modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "mlx_vlm" or name.startswith("mlx_vlm.")):
            yield module


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    """In every loaded mlx_vlm module, point names that hold the first of a pair at the second."""
    wanted = {id(old): new for old, new in pairs}
    for module in _loaded_modules():
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                setattr(module, name, wanted[id(value)])


def _fingerprint(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def kv_quant_fingerprint(
        kv_bits: Any,
        kv_group_size: Any,
        kv_quant_scheme: Any,
        quantized_kv_start: Any,
        kv_key_bits: Any = None,
        kv_value_bits: Any = None,
    ) -> str:
        from .bits import resolve_kv_bits
        from .state import FORMAT, VERSION

        text = original(kv_bits, kv_group_size, kv_quant_scheme, quantized_kv_start, kv_key_bits, kv_value_bits)
        turboquant = importlib.import_module("mlx_vlm.turboquant")
        if not turboquant.turboquant_enabled(kv_bits, kv_quant_scheme):
            return text
        _, key, value = resolve_kv_bits(kv_bits, kv_key_bits, kv_value_bits)
        return f"{text}-{FORMAT}{VERSION}-k{key:g}-v{value:g}"

    return kv_quant_fingerprint


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    from .batch import BatchTurboQuantKVCache
    from .cache import TurboQuantKVCache
    from .views import attention, is_view

    ours = (TurboQuantKVCache, BatchTurboQuantKVCache)

    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        # Views are recognised by themselves: layers that share keys and values pass them on with another cache.
        if is_view(keys) or is_view(values) or isinstance(cache, ours):
            return attention(queries, keys, values, scale, mask, sinks)
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


def _extend(original: Callable[..., Any]) -> Callable[..., Any]:
    from .batch import joinable

    @functools.wraps(original)
    def _extend_cache(cache_a: Any, cache_b: Any) -> Any:
        if cache_a and cache_b:
            cache_a = [joinable(a, b) for a, b in zip(cache_a, cache_b, strict=True)]
        return original(cache_a, cache_b)

    return _extend_cache


def _watch_conversion(original: Callable[..., None]) -> Callable[..., None]:
    from . import report

    @functools.wraps(original)
    def maybe_quantize_kv_cache(prompt_cache: Any, *args: Any, **kwargs: Any) -> None:
        original(prompt_cache, *args, **kwargs)
        report.note_cache(prompt_cache)

    return maybe_quantize_kv_cache


def _watch_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    from . import report

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        run = report.begin(args[1] if len(args) > 1 else kwargs.get("model"), kwargs)
        try:
            yield from original(*args, **kwargs)
        finally:
            report.finish(run)

    return generate_step


def _register_classes() -> None:
    """Tell mlx-vlm's prefix cache and its cache lists about the classes, as they know mlx-vlm's own."""
    global _capabilities
    from .batch import BatchTurboQuantKVCache
    from .cache import TurboQuantKVCache

    adapters = importlib.import_module("mlx_vlm.apc_adapters")
    _capabilities = dict(adapters._CAPABILITY), vars(adapters)["_DEFAULTS_REGISTERED"]
    for cls in (TurboQuantKVCache, BatchTurboQuantKVCache):
        adapters.register_capability(cls, adapters.Capability.PAGEABLE)
        setattr(importlib.import_module("mlx_vlm.models.cache"), cls.__name__, cls)


def _unregister_classes() -> None:
    global _capabilities
    from .batch import BatchTurboQuantKVCache
    from .cache import TurboQuantKVCache

    adapters = importlib.import_module("mlx_vlm.apc_adapters")
    if _capabilities is not None:
        known, registered = _capabilities
        adapters._CAPABILITY.clear()
        adapters._CAPABILITY.update(known)
        setattr(adapters, "_DEFAULTS_REGISTERED", registered)  # noqa: B010 - not declared in its type
        _capabilities = None
    for cls in (TurboQuantKVCache, BatchTurboQuantKVCache):
        delattr(importlib.import_module("mlx_vlm.models.cache"), cls.__name__)
