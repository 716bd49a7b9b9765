"""The quality measurement: is the model the model, are the numbers what they are called, are the criteria met?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.integration import quality
from turboquant_vlm.integration.quality_attention import SEED, causal_attention, packed_cache, upstream_cache
from turboquant_vlm.integration.quality_memory import Memory, measure_memory
from turboquant_vlm.integration.quality_model import Floats, Llama, load_llama
from turboquant_vlm.integration.quality_report import OURS, UPSTREAM, tables
from turboquant_vlm.integration.quality_statistics import compare, kl_divergence, log_softmax, summarize
from turboquant_vlm.integration.quality_synthetic import Case, Errors, Shape, synthetic_errors

REPOSITORY = Path(__file__).resolve().parents[1]


def silent(_: str) -> None:
    """No progress lines."""


@pytest.fixture(scope="module")
def llama(smollm2: Path) -> Llama:
    return load_llama(smollm2)


@pytest.mark.weights
def test_forward_pass_agrees_with_mlx_vlm(smollm2: Path, llama: Llama) -> None:
    from mlx_vlm.utils import load_model

    (tokens,) = quality.windows_of(quality.PROSE.read_text(encoding="utf-8"), smollm2, 1, 30)
    model = load_model(smollm2)
    model.set_dtype(mx.float32)
    expected = np.array(model(mx.array([tokens])).logits[0])
    found = llama.logits(llama.hidden(tokens, causal_attention))
    assert found.shape == expected.shape == (30, 49152)
    # Both sum in float32, in different orders.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


@pytest.mark.weights
def test_prose_holds_four_windows(smollm2: Path) -> None:
    windows = quality.windows_of(quality.PROSE.read_text(encoding="utf-8"), smollm2, 4, 1024)
    assert [len(w) for w in windows] == [1024] * 4
    with pytest.raises(ValueError, match="need 102400 tokens; the text has"):
        quality.windows_of(quality.PROSE.read_text(encoding="utf-8"), smollm2, 100, 1024)


@pytest.mark.weights
def test_quantization_costs_little_and_less_than_upstream(smollm2: Path, llama: Llama) -> None:
    windows = quality.windows_of(quality.PROSE.read_text(encoding="utf-8"), smollm2, 1, 160)
    rows = quality.measure_model(llama, windows, [(4, 4)], log=silent)
    (ours_name, _, ours), (upstream_name, _, upstream) = rows
    assert (ours_name, upstream_name) == (OURS, UPSTREAM)
    assert 0 < ours.kl < 0.004
    assert ours.kl < upstream.kl
    assert ours.top1 > 0.95
    assert ours.perplexity == pytest.approx(ours.float_perplexity, rel=0.02)


def test_a_model_that_the_forward_pass_cannot_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_scaling": {"factor": 8}}))
    with pytest.raises(ValueError, match="rope_scaling=None; got"):
        load_llama(tmp_path)


def test_whole_window_reads_what_decoding_reads() -> None:
    """The measurement attends a window at once; the same bits must come out token by token."""
    rng = np.random.default_rng(5)
    length, dim = 200, 64
    q, k, v = (rng.normal(size=(heads, length, dim)).astype(np.float32) for heads in (3, 1, 1))
    whole = packed_cache(4, 3)(q, k, v)
    keys = reference.empty_tokens(reference.make_codec(dim, 4, SEED), "key", 1, 1, mx.float16)
    values = reference.empty_tokens(reference.make_codec(dim, 3, SEED + 1), "value", 1, 1, mx.float16)
    for position in range(length):
        here = slice(position, position + 1)
        keys = reference.append(keys, mx.array(k[None, :, here]).astype(mx.float16))
        values = reference.append(values, mx.array(v[None, :, here]).astype(mx.float16))
        if position in (0, 94, 95, 96, 127, 159, 160, 199):
            alone = reference.attend(mx.array(q[None, :, here]), keys, values, dim**-0.5)
            np.testing.assert_array_equal(np.array(alone)[0], whole[:, here], err_msg=f"position {position}")


def test_upstream_attention_packs_every_token() -> None:
    """With one token the softmax weight is 1, so the output is the value out of mlx-vlm's codec."""
    from mlx_vlm.turboquant import TurboQuantKVCache

    rng = np.random.default_rng(6)
    q, k, v = (rng.normal(size=(1, 1, 64)).astype(np.float32) for _ in range(3))
    cache = TurboQuantKVCache(4)
    cache.update_and_fetch(mx.array(k[None]).astype(mx.float16), mx.array(v[None]).astype(mx.float16))
    _, value = cache.dequantize()
    found = upstream_cache(4, 4)(q, k, v)
    assert np.abs(found - v).max() > 0.01
    np.testing.assert_allclose(found, np.array(value.astype(mx.float32))[0], rtol=0, atol=1e-3)


def test_causal_attention_weighs_the_past() -> None:
    """Equal logits: each output is the mean of the values so far."""
    v = np.array([[[1.0], [3.0], [8.0]]], np.float32)
    q = np.zeros((2, 3, 1), np.float32)
    np.testing.assert_allclose(causal_attention(q, v, v), [[[1], [2], [4]]] * 2)


def test_kl_of_hand_computed_distributions() -> None:
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]))
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]]))
    # 1/2 ln 2 - 1/4 ln 2.
    np.testing.assert_allclose(kl_divergence(p, q), [0.25 * np.log(2), 0], atol=1e-15)
    # A constant added to logits changes no distribution, however large.
    np.testing.assert_allclose(log_softmax(1000 + p), p, atol=1e-12)


def test_comparison_of_two_known_runs() -> None:
    """A vocabulary of two: hidden state x gives the logits (x, 0)."""
    embedding: Floats = np.array([[1.0], [0.0]], np.float32)
    model = Llama({"model.embed_tokens.weight": embedding}, 0, 1, 1, 2, 0.0, 1.0)
    expected = np.array([[np.log(3)], [np.log(3)]], np.float32)
    found = np.array([[np.log(3)], [-np.log(3)]], np.float32)
    result = compare(model, expected, found, [0, 0])
    # 3/4 ln 3 - 1/4 ln 3 where the two answers have changed places.
    np.testing.assert_allclose(result.kl, [0, 0.5 * np.log(3)], atol=1e-6)
    assert result.same_top.tolist() == [True, False]
    np.testing.assert_allclose(result.surprise, [np.log(4 / 3)], atol=1e-6)
    summary = summarize([result, result])
    assert summary.perplexity == pytest.approx(4 / 3)
    assert summary.kl == pytest.approx(0.25 * np.log(3))
    assert summary.late_kl == pytest.approx(0.5 * np.log(3))


@pytest.fixture(scope="module")
def memory() -> dict[tuple[int, int], Memory]:
    measured = measure_memory((64, 128), log=silent)
    return {(m.dim, m.tokens): m for m in measured}


@pytest.mark.parametrize(
    ("dim", "tokens", "least"),
    [(64, 600, 0.55), (64, 8_192, 0.735), (128, 600, 0.55), (128, 8_192, 0.745), (128, 65_536, 0.76)],
)
def test_memory_saved(memory: dict[tuple[int, int], Memory], dim: int, tokens: int, least: float) -> None:
    assert memory[dim, tokens].saved >= least


def test_memory_counts_every_byte(memory: dict[tuple[int, int], Memory]) -> None:
    """By hand for D=64 and 8,192 tokens, of which 127 tiles are packed."""
    tiles, first, ring = 127, 4, 128
    expected = {
        "words": tiles * 64 * (64 * 4 + 64 * 3) // 8,
        "scales": tiles * 64 * 2 * 2,
        "base": tiles * 64 * 2,
        "base_exponent": tiles * 2,
        "factors": 64,
        "first": 2 * first * 64 * 2,
        "ring": 2 * ring * 64 * 2,
    }
    assert memory[64, 8_192].parts == expected
    assert memory[64, 8_192].float16 == 2 * 8_192 * 64 * 2


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("shape", ["equal", "own", "normal"])
def test_large_constant_part_of_keys(dtype: mx.Dtype, shape: Shape) -> None:
    errors = [synthetic_errors(Case(dtype, shape), seed) for seed in range(2)]
    for e in errors:
        assert e.float_error < 0.2
        assert e.plain_error > 3
        # Integer logits, weights and sums; the snap of raw keys comes on top and grows with the largest channel.
        assert e.snapped_error < 1e-3
        assert e.codes_error < 4e-3


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["float16", "float32"])
def test_no_constant_part(dtype: mx.Dtype) -> None:
    e: Errors = synthetic_errors(Case(dtype, "none", 0.0), 0)
    assert e.float_error < 0.2
    assert e.codes_error < 1.5e-3


def test_case_refuses_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"constant part of 100\.0 cannot have the shape 'none'"):
        replace(Case(mx.float16, "equal"), shape="none")


@pytest.mark.parametrize("text", ["4", "4/7", "4/0", "a/b", "4/3/2", "-4/3"])
def test_bits_that_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.main([f"--bits={text}"])
    assert "each 1 to 6 or 8 per coordinate" in capsys.readouterr().err


def test_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "result.json"
    assert quality.main(["--synthetic", "--seeds", "1", "--json", str(target)]) == 0
    result = json.loads(target.read_text(encoding="utf-8"))
    assert set(result) == {"environment", "synthetic"}
    assert capsys.readouterr().out.strip() == tables(result)["synthetic"]


def test_documented_tables_come_from_the_stored_measurement() -> None:
    folder = REPOSITORY / "docs"
    result = json.loads((folder / "measurements" / "quality.json").read_text(encoding="utf-8"))
    text = (folder / "measurements.md").read_text(encoding="utf-8")
    found = tables(result)
    assert set(found) == {"model", "synthetic", "memory"}
    for part, table in found.items():
        assert table in text, f"docs/measurements.md does not show the {part} table of quality.json"


def test_stored_measurement_meets_the_targets() -> None:
    result = json.loads((REPOSITORY / "docs" / "measurements" / "quality.json").read_text(encoding="utf-8"))
    kl = {(r["cache"], r["key_bits"], r["value_bits"]): r["kl"] for r in result["model"]["rows"]}
    assert kl[OURS, 4, 4] < 0.004
    assert kl[OURS, 4, 3] < 0.006
    assert kl[OURS, 3, 3] < 0.015
