"""Turn a GGUF checkpoint of the Llama family into a model folder that mlx-vlm loads.

A GGUF file holds block-quantized matrices, the tokenizer and the chat template. mlx-vlm wants a folder in
the layout of the Hugging Face hub: ``config.json``, ``model.safetensors``, ``tokenizer.json`` and their
companions. Four things change on the way:

* **Weights.** Q4_1 and Q8_0 blocks of 32 weights become ``bfloat16``. A weight is ``scale * q + bias``. The
  product is exact in ``float32`` (at most 8 bits times 11), so the sum is rounded once whether or not the
  device fuses the two operations, and every machine writes the same weights.
* **Rotary layout.** llama.cpp stores the rows of ``q_proj`` and ``k_proj`` so that the two coordinates of a
  rotary pair are neighbours; the hub's layout keeps them half a head apart.
* **Names.** ``blk.3.attn_q`` becomes ``model.layers.3.self_attn.q_proj``.
* **Tokenizer.** Vocabulary and merges of a byte-level BPE, rebuilt as ``tokenizer.json``. GGUF only names the
  pre-tokenizer; ``smollm`` means that each digit stands alone and the rest is split by GPT-2's pattern.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

BLOCK = 32
DTYPE = mx.bfloat16

_CONTROL = 3

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hub_name(name: str) -> str:
    """Name in the hub's layout of a GGUF tensor, both without the trailing ``.weight``.

    Raises:
        ValueError: the tensor is none that a Llama model has.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    pieces = name.split(".")
    if len(pieces) == 3 and pieces[0] == "blk" and pieces[1].isdigit() and pieces[2] in _PARTS:
        return f"model.layers.{pieces[1]}.{_PARTS[pieces[2]]}"
    raise ValueError(f"a Llama GGUF has blk.N.*, token_embd, output_norm and output; got tensor={name!r}")


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's rotary row order.

    Args:
        rows: ``[heads * D, hidden]``; within a head, rows ``2i`` and ``2i + 1`` form rotary pair ``i``.
        heads: number of heads that the rows belong to.

    Returns:
        ``[heads * D, hidden]`` of the same dtype; within a head, rows ``i`` and ``i + D/2`` form pair ``i``.

    Raises:
        ValueError: the rows do not divide into ``heads`` heads of even size.
    """
    count, width = rows.shape
    if heads < 1 or count % (2 * heads):
        raise ValueError(f"rows must divide into heads of even size; got rows={count}, heads={heads}")
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def dequantize_blocks(tensors: dict[str, mx.array], name: str) -> mx.array:
    """Read one matrix or vector as ``float32``.

    Args:
        tensors: what ``mx.load`` returns for the GGUF file.
        name: GGUF name without the trailing ``.weight``.

    Raises:
        KeyError: there is no such tensor.
        ValueError: the words are neither 4-bit nor 8-bit codes.
    """
    weight = tensors[f"{name}.weight"]
    if weight.dtype != mx.uint32:
        return weight.astype(mx.float32)
    scales = tensors[f"{name}.scales"].astype(mx.float32)
    biases = tensors[f"{name}.biases"].astype(mx.float32)
    bits = 32 * weight.shape[-1] // (BLOCK * scales.shape[-1])
    if bits not in (4, 8):
        raise ValueError(f"GGUF blocks of 4 or 8 bits are supported; got bits={bits} in tensor={name!r}")
    return mx.dequantize(weight, scales, biases, group_size=BLOCK, bits=bits)


def read_weights(tensors: dict[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    """All weights under the hub's names, as ``bfloat16``.

    Args:
        tensors: what ``mx.load`` returns for the GGUF file.
        heads: number of query heads.
        kv_heads: number of key and value heads.

    Raises:
        ValueError: a tensor is none that a Llama model has, or its block format is not supported.
    """
    weights: dict[str, mx.array] = {}
    with mx.stream(mx.cpu):
        for key in sorted(tensors):
            name, _, kind = key.rpartition(".")
            if kind != "weight":
                continue
            rows = dequantize_blocks(tensors, name)
            if name.endswith("attn_q"):
                rows = unpermute(rows, heads)
            elif name.endswith("attn_k"):
                rows = unpermute(rows, kv_heads)
            weights[f"{hub_name(name)}.weight"] = rows.astype(DTYPE)
        mx.eval(weights)
    return weights


def model_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """``config.json`` of a Llama model from GGUF metadata.

    Args:
        metadata: what ``mx.load(..., return_metadata=True)`` returns as its second value.
        tied: whether the output matrix is the embedding.

    Raises:
        ValueError: the architecture is not ``llama``.
        KeyError: a field that a Llama GGUF must have is missing.
    """
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"architecture must be 'llama'; got {metadata['general.architecture']!r}")

    def integer(key: str) -> int:
        return int(metadata[key].item())

    heads = integer("llama.attention.head_count")
    hidden = integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": integer("llama.block_count"),
        "intermediate_size": integer("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        # GGUF stores this as float32; the shortest decimal that reads back to it is the original 1e-05.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        "vocab_size": integer("llama.vocab_size"),
        "max_position_embeddings": integer("llama.context_length"),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": integer("tokenizer.ggml.padding_token_id"),
    }


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE with SmolLM's pre-tokenizer.

    Raises:
        ValueError: the tokenizer is not ``gpt2`` or its pre-tokenizer not ``smollm``.
    """
    model, pre = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if (model, pre) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer must be model='gpt2', pre='smollm'; got model={model!r}, pre={pre!r}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """``special_tokens_map.json``: the text of the begin, end, unknown and padding tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()] for role, key in roles.items()}


def convert(gguf: Path, folder: Path) -> None:
    """Write the model folder for one GGUF file.

    Args:
        gguf: the checkpoint, architecture ``llama``, blocks of Q4_1, Q8_0 or plain floats.
        folder: an existing, empty folder.

    Raises:
        ValueError: the checkpoint is of another architecture, block format or tokenizer.
        OSError: the folder cannot be written.
    """
    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    tensors, metadata = loaded
    config = model_config(metadata, tied="output.weight" not in tensors)
    weights = read_weights(tensors, config["num_attention_heads"], config["num_key_value_heads"])
    # transformers looks for this mark to tell whose layout the file follows.
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise OSError(str(error)) from error
    special = special_tokens(metadata)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer.json": tokenizer_json(metadata),
        "special_tokens_map.json": dict(special),
        "tokenizer_config.json": {
            **special,
            # Classes named after one model rebuild its own pre-tokenizer and would lose the lone digits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
