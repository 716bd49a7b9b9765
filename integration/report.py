"""What became of the KV cache of a run: which layers were quantized, what was left and why, and what it saved.

The hook calls `begin` and `finish` around each generation and `note_cache` when mlx-vlm looks for caches to convert.
The report is computed once, at the end, from sizes the caches know; no cache outlives its run because of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_START = 5000  # mlx-vlm's own default of --quantized-kv-start
LANDMARKS = (8192, 32768)  # context lengths for which every report predicts the size
NOT_SELECTED = "KV cache: TurboQuant was not selected; --kv-bits 3.5 or --kv-quant-scheme turboquant does that."
TOO_FEW = "fewer tokens than --quantized-kv-start"


def cache_bytes(tokens: int, heads: int, dim_k: int, dim_v: int, bits_k: int, bits_v: int, itemsize: int = 2) -> int:
    """Bytes of one TurboQuant layer that decodes its ``tokens``-th token, one row.

    ``itemsize``: bytes per number of the model's dtype (2 for float16 and bfloat16). Packed, per token and kv head:
    the words of the codes and a 2-byte scale; per tile of 64 a key base of 2 bytes per coordinate and a 2-byte
    exponent. Raw: the last 128 tokens and the first 4. Channel factors: one byte per key coordinate and head, once
    there is a tile. During prefill the raw part is larger by the current chunk, until the next token arrives.
    """
    from turboquant_vlm.reference import FIRST, RING, TILE, packed_tiles, words_per_vector

    tiles = packed_tiles(tokens)
    raw = (min(tokens, RING) + min(tokens, FIRST)) * (dim_k + dim_v) * itemsize
    per_token = 4 * (words_per_vector(dim_k, bits_k) + words_per_vector(dim_v, bits_v)) + 2 * 2
    per_tile = TILE * per_token + 2 * dim_k + 2
    return heads * (raw + tiles * per_tile + (dim_k if tiles else 0))


@dataclass(frozen=True)
class Layer:
    """One leaf cache of a run. ``why`` is None if it was quantized, else the reason it was left.

    ``held``: tokens it keeps, at most ``limit`` (sliding windows; None: all). ``heads``, ``dim_k``, ``dim_v`` and
    ``itemsize`` are 0 where a cache holds no keys and values; ``nbytes`` counts what is in use, for all its rows.
    """

    index: int
    kind: str
    why: str | None
    held: int = 0
    nbytes: int = 0
    rows: int = 1
    heads: int = 0
    dim_k: int = 0
    dim_v: int = 0
    itemsize: int = 0
    limit: int | None = None
    last: bool = False
    bits: tuple[int, int] = (0, 0)

    @property
    def quantized(self) -> bool:
        return self.why is None

    @property
    def fp16_bytes(self) -> int:
        """The same tokens with two bytes per coordinate; a cache without keys and values counts as it is."""
        return 2 * self.rows * self.held * self.heads * (self.dim_k + self.dim_v) if self.heads else self.nbytes

    def bytes_at(self, tokens: int) -> tuple[int, int]:
        """Predicted bytes at a context of ``tokens``: (this cache, the same in fp16)."""
        if not self.heads:
            return self.nbytes, self.nbytes
        held = tokens if self.limit is None else min(tokens, self.limit)
        floats = self.rows * held * self.heads * (self.dim_k + self.dim_v)
        if not self.quantized:
            return floats * self.itemsize, 2 * floats
        own = cache_bytes(held, self.heads, self.dim_k, self.dim_v, *self.bits, self.itemsize)
        return self.rows * own, 2 * floats


@dataclass(frozen=True)
class Prediction:
    tokens: int
    nbytes: int
    fp16_bytes: int


@dataclass(frozen=True)
class Report:
    """The report of one run; ``str()`` gives the text the commands print.

    ``selected``: TurboQuant was asked for. ``start``: quantized_kv_start. Bytes are of all layers together.
    """

    selected: bool
    backend: str
    kv_bits: float | None
    start: int
    tokens: int = 0
    layers: tuple[Layer, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    max_context: int | None = None

    @property
    def converted(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def left(self) -> tuple[Layer, ...]:
        """Layers not quantized, the deliberately exact last one apart (`last_layer`)."""
        return tuple(layer for layer in self.layers if not layer.quantized and not layer.last)

    @property
    def last_layer(self) -> Layer | None:
        return next((layer for layer in self.layers if layer.last and not layer.quantized), None)

    @property
    def bits(self) -> tuple[int, int] | None:
        """(key, value) bits, or None if nothing was quantized."""
        return self.converted[0].bits if self.converted else None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def fp16_bytes(self) -> int:
        return sum(layer.fp16_bytes for layer in self.layers)

    @property
    def saved_percent(self) -> float:
        return _saved(self.nbytes, self.fp16_bytes)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _saved(nbytes: int, fp16: int) -> float:
    return 100.0 * (1 - nbytes / fp16) if fp16 else 0.0


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def _numbers(indices: list[int]) -> str:
    """ "0-28, 30" for a rising list of layer numbers."""
    ranges: list[list[int]] = []
    for i in indices:
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        elif not ranges or i != ranges[-1][1]:
            ranges.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _compare(nbytes: int, fp16: int) -> str:
    saved = _saved(nbytes, fp16)
    change = f"{saved:.1f} % saved" if saved >= 0 else f"{-saved:.1f} % more"
    return f"{_size(nbytes)} instead of {_size(fp16)} in fp16, {change}"


def _lines(report: Report) -> Iterator[str]:
    if not report.selected:
        yield NOT_SELECTED
        return
    count = len({layer.index for layer in report.layers})
    converted = {layer.index for layer in report.converted}
    if report.bits is None:
        yield f"KV cache: nothing was quantized, 0 of {count} layers, {report.tokens} tokens."
        if report.tokens < report.start:
            yield (
                f"  {report.tokens} tokens are fewer than --quantized-kv-start {report.start}; "
                "--quantized-kv-start 0 (quantized_kv_start=0 in Python) quantizes from the first."
            )
    else:
        key, value = report.bits
        yield (
            f"KV cache: {len(converted)} of {count} layers quantized with TurboQuant, keys {key} bits, "
            f"values {value} bits, backend {report.backend}."
        )
    last = report.last_layer
    if last is not None and converted:
        yield f"  Layer {last.index}, the last, is kept in full precision: {_size(last.nbytes)}."
    reasons: dict[str, list[int]] = {}
    for layer in report.left:
        if layer.why != TOO_FEW:
            reasons.setdefault(layer.why or "", []).append(layer.index)
    for why, indices in reasons.items():
        yield f"  Left as {'it is' if len(indices) == 1 else 'they are'}: layer {_numbers(indices)}: {why}."
    yield f"  {report.tokens} tokens: {_compare(report.nbytes, report.fp16_bytes)}."
    if converted and not any(_packed(layer) for layer in report.converted):
        yield "  The first 4 and the last 32 to 95 tokens stay raw, so a cache under 96 tokens saves nothing yet."
    for p in report.predictions if converted else ():
        name = " (the model's longest context)" if p.tokens == report.max_context else ""
        yield f"  At {p.tokens:,} tokens{name}: {_compare(p.nbytes, p.fp16_bytes)}."


def _packed(layer: Layer) -> bool:
    from turboquant_vlm.reference import packed_tiles

    return packed_tiles(layer.held) > 0


# Looking at caches


def _leaves(caches: Any, index: int | None = None) -> Iterator[tuple[int, Any]]:
    """(layer number, leaf cache) through cache lists, lists and tuples."""
    for i, entry in enumerate(caches):
        number = i if index is None else index
        children = entry if isinstance(entry, (list, tuple)) else getattr(entry, "caches", None)
        if children is not None:
            yield from _leaves(children, number)
        elif entry is not None:
            yield number, entry


def describe_cache(caches: Any, start: int = DEFAULT_START) -> tuple[Layer, ...]:
    """One `Layer` per leaf cache of a prompt cache. ``start``: quantized_kv_start, for the reasons given."""
    count = len(caches)
    return tuple(
        _describe(index, cache, start, last=count > 2 and index == count - 1) for index, cache in _leaves(caches)
    )


def _describe(index: int, cache: Any, start: int, last: bool) -> Layer:
    from mlx_vlm.models import cache as kinds

    from .packed_cache import PackedCache

    name = type(cache).__name__
    if isinstance(cache, PackedCache) and cache._keys is not None:
        return _describe_packed(index, cache, last)
    if isinstance(cache, PackedCache):
        return _describe_floats(index, cache._float or cache, name, cache.why_float or "it is empty", last)
    if isinstance(cache, kinds.RotatingKVCache):
        why = f"sliding window of {cache.max_size} tokens, which bounds it already"
        return _describe_floats(index, cache, name, why, last, limit=int(cache.max_size))
    if isinstance(cache, kinds.KVCache):
        held = int(cache.offset)
        why = TOO_FEW if held < start else "not converted"
        if last:
            why = "the last layer is kept in full precision"
        elif getattr(cache, "preserve_auxiliary_kv_state", False):
            why = f"{name} holds more than keys and values"
        return _describe_floats(index, cache, name, why, last)
    if name == "HybridQuantKVCache":
        why = "two schemes mixed, which mlx-vlm's own cache serves"
    elif isinstance(cache, kinds.ArraysCache):
        why = "recurrent state, no keys and values"
    else:
        why = f"{name} is not a cache that mlx-vlm converts to TurboQuant"
    return Layer(index, name, why, held=_offset(cache), nbytes=_nbytes(cache))


def _describe_packed(index: int, cache: Any, last: bool) -> Layer:
    keys, values = cache._keys, cache._values
    return Layer(
        index,
        type(cache).__name__,
        None,
        held=max(keys.lengths),
        nbytes=cache.nbytes,
        rows=len(keys.lengths),
        heads=keys.first.shape[1],
        dim_k=keys.codec.dim,
        dim_v=values.codec.dim,
        itemsize=keys.first.itemsize,
        last=last,
        bits=(keys.codec.bits, values.codec.bits),
    )


def _describe_floats(index: int, cache: Any, kind: str, why: str, last: bool, limit: int | None = None) -> Layer:
    keys: Any = getattr(cache, "keys", None)
    values: Any = getattr(cache, "values", None)
    held = _offset(cache) if limit is None else min(_offset(cache), limit)
    if not hasattr(keys, "itemsize"):
        return Layer(index, kind, why, held=held, nbytes=_nbytes(cache), last=last, limit=limit)
    rows, heads, _, dim_k = keys.shape
    dim_v = values.shape[3]
    used = rows * heads * held * (dim_k + dim_v) * keys.itemsize
    return Layer(index, kind, why, held, used, rows, heads, dim_k, dim_v, keys.itemsize, limit, last)


def _offset(cache: Any) -> int:
    offset = getattr(cache, "offset", 0)
    return offset if isinstance(offset, int) else 0


def _nbytes(cache: Any) -> int:
    from mlx.utils import tree_flatten

    try:
        return int(cache.nbytes)
    except (AttributeError, NotImplementedError, TypeError):  # some cannot say, some not while empty
        arrays: Any = tree_flatten(getattr(cache, "state", None))
        return sum(array.nbytes for _, array in arrays if hasattr(array, "nbytes"))


def max_context(model: Any) -> int | None:
    """The longest context in a model's config, of its language part if it has one, or None."""
    config = getattr(model, "config", None)
    for part in (getattr(config, "text_config", None), getattr(config, "language_config", None), config):
        value = part.get("max_position_embeddings") if isinstance(part, dict) else None
        value = value or getattr(part, "max_position_embeddings", None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def make_report(
    caches: Any,
    kv_bits: float | None,
    selected: bool,
    backend: str,
    start: int = DEFAULT_START,
    longest: int | None = None,
) -> Report:
    """The report of a prompt cache as it is now. ``longest``: the model's longest context, if known."""
    layers = describe_cache(caches, start)
    lengths = sorted({*LANDMARKS, *((longest,) if longest else ())})
    predictions = []
    for tokens in lengths:
        pairs = [layer.bytes_at(tokens) for layer in layers]
        predictions.append(Prediction(tokens, sum(p[0] for p in pairs), sum(p[1] for p in pairs)))
    held = max((layer.held for layer in layers), default=0)
    return Report(selected, backend, kv_bits, start, held, layers, tuple(predictions), longest)


# Following a run


@dataclass
class Run:
    """A generation under way: what was asked for, and its caches."""

    kv_bits: float | None
    selected: bool
    start: int
    longest: int | None
    caches: Any = field(default=None, repr=False)


_running: list[Run] = []
_last: Report | None = None


def begin(model: Any, options: Mapping[str, Any]) -> Run:
    """A run of ``generate_step`` with keyword arguments ``options`` starts."""
    from mlx_vlm.turboquant import turboquant_enabled

    bits, start = options.get("kv_bits"), options.get("quantized_kv_start")
    run = Run(
        kv_bits=bits,
        selected=bool(turboquant_enabled(bits, options.get("kv_quant_scheme"))),
        start=DEFAULT_START if start is None else int(start),
        longest=max_context(model),
        caches=options.get("prompt_cache"),
    )
    _running.append(run)
    return run


def note_cache(caches: Any) -> None:
    """mlx-vlm looked at ``caches`` for conversion; they belong to the youngest run that has none yet."""
    if _running and _running[-1].caches is None:
        _running[-1].caches = caches


def finish(run: Run) -> None:
    """The run ended: keep its report and let go of its caches."""
    global _last
    if run in _running:
        _running.remove(run)
    _last = _report(run)
    run.caches = None


def _report(run: Run) -> Report:
    from . import backend

    name = backend.chosen()
    for _, cache in _leaves(run.caches or ()):
        name = getattr(cache, "backend_name", name)
    served = backend.describe(name)
    return make_report(run.caches or (), run.kv_bits, run.selected, served, run.start, run.longest)


def last_report() -> Report | None:
    """The report of the latest generation in this process (of the one under way, if any), or None."""
    return _report(_running[-1]) if _running else _last


def forget() -> None:
    """Forget the latest report, so that `last_report` speaks of runs from now on only."""
    global _last
    _last = None
