"""Models on mlx-vlm's own path with the Metal kernels in the caches: the same logits, bit by bit, as the reference."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.generate import common
from mlx_vlm.models.cache import make_prompt_cache

from turboquant_vlm import reference
from turboquant_vlm.conformance import host_target, metal_host
from turboquant_vlm.fast import kernels, launch, metal
from turboquant_vlm.integration import TurboQuantKVCache, backend, install, uninstall
from turboquant_vlm.integration.backend import Backend
from turboquant_vlm.integration.guard import Guard

pytestmark = pytest.mark.skipif(
    not metal_host.available(),
    reason=f"{metal_host.unavailable_reason()}: no model ran on the Metal kernels",
)

VOCABULARY = 97
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
}
# gpt_oss has attention sinks and sliding windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("ModelConfig", SIZES),
    "gpt_oss": (
        "ModelConfig",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 48,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}


def build(name: str) -> Any:
    config_name, options = MODELS[name]
    config = importlib.import_module(f"mlx_vlm.models.{name}.config")
    language = importlib.import_module(f"mlx_vlm.models.{name}.language")
    mx.random.seed(0)
    model = language.LanguageModel(getattr(config, config_name)(**{"model_type": name, **options}))
    # MLX's CPU build multiplies the experts of gpt_oss in float32 only.
    dtype = mx.float32 if name == "gpt_oss" else mx.float16
    model.update(tree_map(lambda x: x.astype(dtype), model.parameters()))
    model.eval()
    return model


def logits(model: Any, served: Backend, monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """A first chunk, a second one, then decoding over the edge of a tile."""
    monkeypatch.setattr(backend, "resolve", lambda name=None: served)
    caches = make_prompt_cache(model)
    ids = mx.random.randint(0, VOCABULARY, (1, 168), key=mx.random.key(1))
    rows = []
    for start, end in [(0, 110), (110, 155), *((i, i + 1) for i in range(155, 164)), (164, 168)]:
        common.maybe_quantize_kv_cache(caches, 0, 64, 3.5, "turboquant")
        rows.append(model(ids[:, start:end], cache=caches).logits[0, -1])
        mx.eval(rows[-1], [c.state for c in caches])
    assert any(isinstance(c, TurboQuantKVCache) and c.backend_name == served.name for c in caches)
    return mx.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_the_kernels_equals_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    guard = Guard("metal", host_target, reference, said.append)
    install()
    try:
        model = build(name)
        want = logits(model, Backend("reference", reference, "asked for"), monkeypatch)
        got = logits(model, Backend("metal", guard, "asked for"), monkeypatch)
    finally:
        uninstall()
    assert said == []
    assert guard.failure is None
    assert mx.array_equal(want, got)
    assert bool(mx.all(mx.isfinite(got)))


class Faulty:
    """The Metal target on the host; kernels whose name holds `word` go wrong."""

    def __init__(self, word: str, how: str) -> None:
        self.word, self.how = word, how

    def launch(self, kernel: Any, **call: Any) -> Any:
        results = host_target.on_host(kernel, **call)
        if self.word not in kernels.source_of(kernel).name:
            return results
        if self.how == "raises":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return [results[0] + 1, *results[1:]]

    def __getattr__(self, name: str) -> Any:
        value = getattr(metal, name)
        if not callable(value) or isinstance(value, type):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with launch.using(self.launch):
                return value(*args, **kwargs)

        return call


@pytest.mark.parametrize("how", ["raises", "is wrong"])
@pytest.mark.parametrize(
    ("word", "tokens"), [("merge", 1025), ("base_given", 224), ("final_stack12", 257), ("rows6", 258)]
)
def test_a_kernel_that_fails_when_it_starts_late(word: str, tokens: int, how: str) -> None:
    """Texts that come into play in the middle of a conversation: the answer stays the reference's."""
    kernels.forget()
    said: list[str] = []
    guard = Guard("metal", Faulty(word, how), reference, said.append)
    codecs = [(guard.make_codec(64, bits), role) for bits, role in ((4, "key"), (3, "value"))]
    stores = [tuple(b.empty_tokens(c, role, 1, 1, mx.float16) for c, role in codecs) for b in (guard, reference)]
    x = mx.random.normal((1, 1, tokens + 1, 64), key=mx.random.key(3)).astype(mx.float16)
    ours, theirs = (
        b.append_pair(*store, x[:, :, : tokens - 2], x[:, :, : tokens - 2])
        for b, store in zip((guard, reference), stores, strict=True)
    )
    for start, queries in ((tokens - 2, 1), (tokens - 1, 1), (tokens, 1)):
        part = x[:, :, start : start + queries]
        q = mx.concatenate([part] * (6 if word == "rows6" and start == tokens else 1), axis=1)
        ours = guard.append_pair(*ours, part, part)
        theirs = reference.append_pair(*theirs, part, part)
        assert mx.array_equal(guard.attend(q, *ours, 0.1), reference.attend(q, *theirs, 0.1))
    assert len(said) == 1, said
    assert ("raised RuntimeError" if how == "raises" else "other bits than the reference") in said[0]
    assert guard.failure is not None
