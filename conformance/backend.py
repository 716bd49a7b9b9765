"""Runs a case on a backend: a module with the public functions of ``turboquant_vlm.reference``.

Arrays travel as words, so that no conversion of a float can change a bit on the way in or out.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from .cases import Arrays, Case, build_store, recent_width
from .compare import Words
from .inputs import Spec, load, words_of
from .oracle_numbers import Array
from .oracle_tokens import FIRST, packed_tiles

_MX = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
    "int8": mx.int8,
    "int16": mx.int16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "bool": mx.bool_,
}
_UNSIGNED = {
    1: (mx.uint8, np.uint8),
    2: (mx.uint16, np.uint16),
    4: (mx.uint32, np.uint32),
}


class UnknownBackend(ValueError):
    """No module of that name can be imported from the package."""


def load_backend(name: str) -> ModuleType:
    """The module ``turboquant_vlm.<name>``. Raises UnknownBackend."""
    package = __package__.rpartition(".")[0] if __package__ else "turboquant_vlm"
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise UnknownBackend(
            f"backend must name a module of {package} with the functions of {package}.reference; "
            f"got {name!r} ({error})"
        ) from error
    missing = [f for f in ("make_codec", "quantize", "append", "attend") if not hasattr(module, f)]
    if missing:
        raise UnknownBackend(f"backend {name!r} lacks {', '.join(missing)}")
    return module


def to_mx(spec: Spec, values: Array | None = None) -> mx.array:
    """The mx array of a spec, word for word."""
    values = load(spec) if values is None else values
    words, dtype = words_of(spec, values), _MX[spec["dtype"]]
    if spec["dtype"] in ("bool", "int8", "int16", "uint32"):
        return (
            mx.array(words.tolist(), dtype=dtype)
            if words.ndim == 0
            else mx.array(words.astype(_numpy(spec["dtype"])))
        )
    return mx.array(words).view(dtype)


def _numpy(dtype: str) -> Any:
    return {"bool": np.bool_, "int8": np.int8, "int16": np.int16, "uint32": np.uint32}[dtype]


def from_mx(a: mx.array) -> Words:
    """Words of an mx array, word for word."""
    name = str(a.dtype).rpartition(".")[2]
    kind, numpy_kind = _UNSIGNED[a.dtype.size]
    if a.size == 0:
        return Words(name, np.zeros(a.shape, numpy_kind))
    flat = mx.contiguous(a).reshape(-1).view(kind)
    return Words(name, np.array(flat).astype(numpy_kind).reshape(a.shape))


def observe(case: Case, backend: Any) -> Arrays:
    """What the backend gives for a case, by the same names as :func:`cases.evaluate`."""
    return _OPS[case["op"]](case["inputs"], backend)


def _codec(spec: dict[str, Any], backend: Any) -> Any:
    return backend.make_codec(
        spec["dim"], spec["bits"], seed=spec.get("seed", 0), kind=spec.get("kind", "mse")
    )


def _quantize(inputs: dict[str, Any], backend: Any) -> Arrays:
    codec = _codec(inputs["codec"], backend)
    factors = None if inputs.get("factors") is None else to_mx(inputs["factors"])
    packed = backend.quantize(to_mx(inputs["x"]), codec, base=inputs.get("base", False), factors=factors)
    out = {name: from_mx(a) for name, a in packed.arrays().items()}
    for dtype in inputs.get("dequantize", ()):
        out[f"dequantized_{dtype}"] = from_mx(backend.dequantize(packed, codec, _MX[dtype]))
    return out


_PACKED = ("words", "scales", "base", "base_exponent", "factors", "sign_words", "sign_scales")


def _dequantize(inputs: dict[str, Any], backend: Any) -> Arrays:
    from turboquant_vlm.reference import Packed

    codec = _codec(inputs["codec"], backend)
    arrays: dict[str, Any] = {
        name: to_mx(inputs[name]) if inputs.get(name) is not None else None for name in _PACKED
    }
    packed = Packed(**arrays)
    return {
        f"dequantized_{d}": from_mx(backend.dequantize(packed, codec, _MX[d])) for d in inputs["dequantize"]
    }


def _build(spec: dict[str, Any], steps: list[list[Any]], backend: Any) -> Any:
    factors = None if spec.get("factors") is None else to_mx(spec["factors"])
    tokens = backend.empty_tokens(
        _codec(spec["codec"], backend),
        spec["role"],
        spec["batch"],
        spec["heads"],
        _MX[spec["dtype"]],
        factors=factors,
    )
    data = to_mx(spec["data"])
    at = 0
    for step in steps:
        if step[0] == "append":
            tokens = backend.append(tokens, data[:, :, at : at + step[1]], counts=step[2])
            at += step[1]
        else:
            tokens = backend.trim(tokens, step[1])
    return tokens


def _store_arrays(tokens: Any, spec: dict[str, Any], steps: list[list[Any]], prefix: str) -> Arrays:
    """The pinned arrays of a backend's tokens, with everything beyond a row's own tokens set to zero."""
    store = build_store({**spec, "data": _zeros(spec["data"])}, steps)
    lengths = [int(n) for n in tokens.lengths]
    out = {"lengths": Words.of("int32", np.array(lengths))}
    first = from_mx(tokens.first)
    width = max(recent_width(store, b) for b in range(store.batch))
    recent = from_mx(tokens.recent)
    if recent.shape[2] < width:
        raise AssertionError(f"recent holds {recent.shape[2]} tokens; {width} are needed")
    start = recent.shape[2] - width
    recent_words = recent.words[:, :, start:].copy()
    columns = min(FIRST, max(store.lengths))
    first_words = first.words[:, :, :columns].copy()
    for b, n in enumerate(store.lengths):
        first_words[b, :, min(n, FIRST) :] = 0
        recent_words[b, :, : width - recent_width(store, b)] = 0
    out["first"] = Words(first.dtype, first_words)
    out["recent"] = Words(recent.dtype, recent_words)
    tiles = [packed_tiles(n) for n in store.lengths]
    if max(tiles):
        for name, a in tokens.packed.arrays().items():
            words = from_mx(a)
            if name == "factors":
                kept = words.words.copy()
                for b, count in enumerate(tiles):
                    if count == 0:
                        kept[b] = 0
            else:
                kept = words.words[:, :, : max(tiles)].copy()
                for b, count in enumerate(tiles):
                    kept[b, :, count:] = 0
            out[name] = Words(words.dtype, kept)
    return {f"{prefix}{name}": a for name, a in out.items()}


def _zeros(data: Spec) -> Spec:
    return {"generator": "zeros", "dtype": data["dtype"], "shape": data["shape"]}


def _tokens(inputs: dict[str, Any], backend: Any) -> Arrays:
    tokens = _build(inputs["store"], inputs["steps"], backend)
    out = _store_arrays(tokens, inputs["store"], inputs["steps"], "")
    if inputs.get("plain"):
        plain = from_mx(backend.raw_tokens(tokens, _MX[inputs["plain"]]))
        words = plain.words.copy()
        store = build_store({**inputs["store"], "data": _zeros(inputs["store"]["data"])}, inputs["steps"])
        for b, n in enumerate(store.lengths):
            words[b, :, n:] = 0
            low, high = store.unpinned(b)
            words[b, :, low:high] = 0
        out["plain"] = Words(plain.dtype, words)
    return out


def _attend(inputs: dict[str, Any], backend: Any) -> Arrays:
    keys = _build(inputs["keys"], inputs["steps"], backend)
    values = _build(inputs["values"], inputs["steps"], backend)
    q = to_mx(inputs["q"])
    mask = inputs.get("mask")
    mask = mask if mask is None or mask == "causal" else to_mx(mask)
    sinks = None if inputs.get("sinks") is None else to_mx(inputs["sinks"])
    pads = inputs.get("left_padding")
    result = backend.attend(
        q,
        keys,
        values,
        inputs["scale"],
        mask=mask,
        sinks=sinks,
        window=inputs.get("window"),
        left_padding=pads,
    )
    out = {"output": from_mx(result)}
    if inputs.get("scores"):
        out["scores"] = from_mx(backend.scores(q, keys, inputs["scale"], mask=mask, left_padding=pads))
    if inputs.get("arrays"):
        out |= _store_arrays(keys, inputs["keys"], inputs["steps"], "keys.")
        out |= _store_arrays(values, inputs["values"], inputs["steps"], "values.")
    return out


def _error(inputs: dict[str, Any], backend: Any) -> Arrays:
    call = inputs["call"]
    if call == "make_codec":
        backend.make_codec(**inputs["arguments"])
    elif call in ("attend", "scores"):
        (_attend if call == "attend" else _scores_only)(inputs["arguments"], backend)
    else:
        raise KeyError(call)
    return {}


def _scores_only(inputs: dict[str, Any], backend: Any) -> Arrays:
    keys = _build(inputs["keys"], inputs["steps"], backend)
    return {"scores": from_mx(backend.scores(to_mx(inputs["q"]), keys, inputs["scale"]))}


def _supported(inputs: dict[str, Any], backend: Any) -> Arrays:
    return {"supported": Words.of("int32", np.array([int(backend.supported_dim(d)) for d in inputs["dims"]]))}


_OPS = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "tokens": _tokens,
    "attend": _attend,
    "error": _error,
    "supported": _supported,
}
