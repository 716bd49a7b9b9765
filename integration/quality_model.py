"""A Llama forward pass in NumPy float32, with its attention left open.

The quality measurement needs a model whose attention can be exchanged and whose other sums stay the same. This one
reads a model folder as mlx-vlm does and follows the same equations: RMS norm, rotary positions that turn coordinate d
against d + D/2, grouped-query attention, SwiGLU, and the embedding as output matrix. NumPy, because MLX's matrix
product on a CPU is tens of times slower.

Shapes: T tokens, Hq query and Hk key and value heads, D the head size, E the width of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]

Attention = Callable[[Floats, Floats, Floats], Floats]
"""Causal attention of whole sequences: q [Hq, T, D], k and v [Hk, T, D] to [Hq, T, D]."""

# What a config may say, and what this forward pass does when it says nothing.
_FIXED = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_traditional": False,
    "rope_scaling": None,
    "sliding_window": None,
}


@dataclass(frozen=True)
class Llama:
    """Weights in float32 and the sizes that give them their shape."""

    weights: dict[str, Floats]
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_base: float

    def hidden(self, tokens: list[int], attention: Attention) -> Floats:
        """What the output matrix meets, [T, E], with ``attention`` in every layer."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        turn = self._turn(len(tokens))
        for layer in range(self.layers):
            x = x + self._attend(x, f"model.layers.{layer}.", turn, attention)
            x = x + self._feed_forward(x, f"model.layers.{layer}.")
        return self._norm(x, "model.norm")

    def logits(self, hidden: Floats) -> Floats:
        """Next-token logits [T, vocabulary] of hidden states [T, E]."""
        return hidden @ self.weights["model.embed_tokens.weight"].T

    def _turn(self, tokens: int) -> tuple[Floats, Floats]:
        """Cosine and sine of every position and pair, [T, D / 2]."""
        pairs = np.arange(0, self.head_dim, 2) / self.head_dim
        angle = np.outer(np.arange(tokens), self.rope_base**-pairs)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def _attend(self, x: Floats, prefix: str, turn: tuple[Floats, Floats], attention: Attention) -> Floats:
        h = self._norm(x, prefix + "input_layernorm")
        q = _rotate(self._heads(h, prefix + "self_attn.q_proj", self.query_heads), turn)
        k = _rotate(self._heads(h, prefix + "self_attn.k_proj", self.kv_heads), turn)
        v = self._heads(h, prefix + "self_attn.v_proj", self.kv_heads)
        joined = attention(q, k, v).swapaxes(0, 1).reshape(len(x), -1)
        return self._linear(joined, prefix + "self_attn.o_proj")

    def _feed_forward(self, x: Floats, prefix: str) -> Floats:
        h = self._norm(x, prefix + "post_attention_layernorm")
        gate = self._linear(h, prefix + "mlp.gate_proj")
        up = self._linear(h, prefix + "mlp.up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj")

    def _heads(self, h: Floats, name: str, heads: int) -> Floats:
        return self._linear(h, name).reshape(len(h), heads, self.head_dim).swapaxes(0, 1)

    def _linear(self, x: Floats, name: str) -> Floats:
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Floats, name: str) -> Floats:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(self.epsilon)) * self.weights[name + ".weight"]


def load_llama(folder: Path) -> Llama:
    """The model of a folder with ``config.json`` and ``model.safetensors``.

    Raises:
        ValueError: the config asks for something that this forward pass does not do.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise ValueError(f"the quality measurement runs models with {key}={expected!r}; got {config[key]!r}")
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    weights = {name: np.array(array.astype(mx.float32)) for name, array in loaded.items()}
    heads = config["num_attention_heads"]
    return Llama(
        weights=weights,
        layers=config["num_hidden_layers"],
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        epsilon=config["rms_norm_eps"],
        rope_base=config.get("rope_theta", 10000.0),
    )


def _rotate(x: Floats, turn: tuple[Floats, Floats]) -> Floats:
    """Rotary positions on [heads, T, D]."""
    cosine, sine = turn
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1)
