"""Tiny random language models of mlx-vlm on the cache: every way a model treats keys and values after the update.

Each runs twice, on float caches and on ours at 8 bits, with the same tokens: a prefill in two chunks, then decoding.
Random weights make attention diffuse, so 8-bit codes must leave the logits almost unchanged.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.generate import common
from mlx_vlm.models.cache import make_prompt_cache

from turboquant_vlm.integration import TurboQuantKVCache, install, uninstall
from turboquant_vlm.integration.report import describe_cache

VOCABULARY = 97
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
}
LATENT = {
    **COMMON,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_key_value_heads": 4,
}
# Model, config class, config, and what is left float besides the last layer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("ModelConfig", {**COMMON, "head_dim": 64}),
    "gemma2": ("ModelConfig", {**COMMON, "head_dim": 64}),
    "gemma3": ("TextConfig", {**COMMON, "head_dim": 64, "sliding_window": 48, "sliding_window_pattern": 2}),
    "gemma3n": (
        "TextConfig",
        {
            **COMMON,
            "num_hidden_layers": 6,
            "intermediate_size": [128] * 6,
            "head_dim": 64,
            "sliding_window": 48,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "gpt_oss": (
        "ModelConfig",
        {
            **COMMON,
            "head_dim": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 48,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "olmo": (
        "ModelConfig",
        {"d_model": 256, "n_layers": 4, "n_heads": 4, "vocab_size": VOCABULARY, "embedding_size": VOCABULARY},
    ),
    "deepseek_v3": ("ModelConfig", LATENT),
    "glm4_moe_lite": ("ModelConfig", LATENT),
    "qwen2_5_vl": (
        "TextConfig",
        {**COMMON, "hidden_size": 256, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
    ),
    "qwen3_5": (
        "TextConfig",
        {
            **COMMON,
            "head_dim": 64,
            "num_hidden_layers": 8,
            "full_attention_interval": 2,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 4096,
        },
    ),
}


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    install()
    yield
    uninstall()


def build(name: str) -> Any:
    """A language model with random weights, float32."""
    package = importlib.import_module(f"mlx_vlm.models.{name}.config")
    language = importlib.import_module(f"mlx_vlm.models.{name}.language")
    config_name, options = MODELS[name]
    config = getattr(package, config_name)(**{"model_type": name, **options})
    mx.random.seed(0)
    model = _language_model(language.LanguageModel, config)
    model.update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
    model.eval()
    return model


def _language_model(cls: Any, config: Any) -> Any:
    """Some language models also take the whole model's config and look up how images are laid out."""
    whole = SimpleNamespace(
        text_config=config,
        vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2),
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
    )
    return cls(config, whole) if len(inspect.signature(cls).parameters) > 1 else cls(config)


def run(model: Any, caches: list[Any], convert: bool) -> mx.array:
    """Logits of the last prefill token and of five decoded ones, [6, vocabulary]."""
    ids = mx.random.randint(0, VOCABULARY, (1, 150), key=mx.random.key(1))
    rows = []
    for start, end in [(0, 100), (100, 145), *((i, i + 1) for i in range(145, 150))]:
        if convert:
            common.maybe_quantize_kv_cache(caches, 0, 64, 8, "turboquant")
        out = model(ids[:, start:end], cache=caches)
        rows.append(out.logits[0, -1])
        mx.eval(rows[-1], [c.state for c in caches])
    return mx.stack(rows[1:])


@pytest.mark.parametrize("name", MODELS)
def test_models_run_on_the_cache(name: str) -> None:
    model = build(name)
    expected = run(model, make_prompt_cache(model), convert=False)
    caches = make_prompt_cache(model)
    got = run(model, caches, convert=True)
    layers = describe_cache(caches, start=0)
    assert any(isinstance(cache, TurboQuantKVCache) for cache in caches), layers
    assert any(layer.quantized for layer in layers), layers
    assert bool(mx.all(mx.isfinite(got)))
    assert not mx.array_equal(got, expected)
    spread = mx.std(expected, axis=-1)
    error = mx.sqrt(mx.mean((got - expected) ** 2, axis=-1))
    assert bool(mx.max(error / spread) < 0.05)
