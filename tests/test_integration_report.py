"""The report: its numbers against the caches, its formula against real sizes, its words."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.generate import common
from mlx_vlm.models import cache as kinds

from turboquant_vlm.integration import TurboQuantKVCache, cache_bytes, install, last_report, report, uninstall
from turboquant_vlm.integration.bits import ALLOWED_BITS


def cache_with(count: int, key: int = 4, value: int = 3, dims: tuple[int, int] = (64, 64), heads: int = 2) -> Any:
    cache = TurboQuantKVCache(4, key_bits=key, value_bits=value)
    shapes = [(1, heads, count, dim) for dim in dims]
    keys, values = (mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes)
    for start, end in ((0, count - 1), (count - 1, count)):
        if end > start:
            cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    return cache


# The formula


@pytest.mark.parametrize("count", [1, 2, 4, 5, 63, 64, 95, 96, 97, 128, 129, 159, 160, 200, 500, 1000])
def test_the_formula_is_the_size(count: int) -> None:
    assert cache_bytes(count, 2, 64, 64, 4, 3) == cache_with(count).nbytes


@pytest.mark.parametrize("key", ALLOWED_BITS)
@pytest.mark.parametrize("value", ALLOWED_BITS)
def test_at_every_width(key: int, value: int) -> None:
    assert cache_bytes(300, 2, 64, 64, key, value) == cache_with(300, key, value).nbytes


@pytest.mark.parametrize("dims", [(80, 80), (96, 64), (192, 128), (72, 112)])
def test_at_other_head_sizes(dims: tuple[int, int]) -> None:
    assert cache_bytes(300, 3, *dims, 4, 3) == cache_with(300, dims=dims, heads=3).nbytes


def test_large_numbers_by_hand() -> None:
    # 511 tiles of 64 tokens at 4 and 3 bits: 8 + 6 words and two scales a token, a base and an exponent a tile.
    tile = 64 * (4 * 14 + 4) + 2 * 64 + 2
    assert cache_bytes(32768, 1, 64, 64, 4, 3) == 511 * tile + 132 * 128 * 2 + 64


# The layers of a run


def run_caches() -> list[Any]:
    """Layers as in a hybrid model after 300 tokens with TurboQuant from the first one."""
    x = mx.random.normal((1, 2, 300, 64)).astype(mx.bfloat16)
    window = kinds.RotatingKVCache(128)
    window.update_and_fetch(x, x)
    state = kinds.ArraysCache(1)
    state[0] = mx.zeros((1, 4, 8))
    odd = TurboQuantKVCache(3.5)
    odd.update_and_fetch(*(mx.random.normal((1, 2, 300, 90)),) * 2)
    last = kinds.KVCache()
    last.update_and_fetch(x, x)
    nested = kinds.CacheList(cache_with(300), kinds.ChunkedKVCache(64))
    return [cache_with(300), window, state, odd, nested, last]


def test_layers_and_reasons() -> None:
    caches = run_caches()
    made = report.make_report(caches, 3.5, True, "reference", 0, 131072)
    assert made.tokens == 300
    assert made.bits == (4, 3)
    assert [layer.index for layer in made.converted] == [0, 4]
    assert {layer.index: layer.why for layer in made.left} == {
        1: "sliding window of 128 tokens, which bounds it already",
        2: "recurrent state, no keys and values",
        3: "key head size 90 has no exact rotation",
        4: "ChunkedKVCache is not a cache that mlx-vlm converts to TurboQuant",
    }
    assert made.last_layer is not None
    assert (made.last_layer.index, made.last_layer.nbytes) == (5, 300 * 2 * 128 * 2)


def test_bytes_and_predictions() -> None:
    caches = run_caches()
    made = report.make_report(caches, 3.5, True, "reference", 0, 131072)
    layers = {layer.index: layer for layer in made.layers}
    assert layers[0].nbytes == caches[0].nbytes
    assert layers[0].fp16_bytes == 300 * 2 * 128 * 2
    assert layers[1].fp16_bytes == layers[1].nbytes == 128 * 2 * 128 * 2
    assert made.nbytes == sum(layer.nbytes for layer in made.layers)
    assert made.saved_percent == pytest.approx(100 * (1 - made.nbytes / made.fp16_bytes))
    assert [p.tokens for p in made.predictions] == [8192, 32768, 131072]
    for p in made.predictions:
        window, state = 128 * 2 * 128 * 2, 32 * 4
        odd, plain = p.tokens * 2 * 180 * 4, p.tokens * 2 * 128 * 2
        assert p.nbytes == 2 * cache_bytes(p.tokens, 2, 64, 64, 4, 3) + window + state + odd + plain
        assert p.fp16_bytes == 3 * plain + window + state + odd // 2


def test_what_it_says() -> None:
    caches = [cache_with(300) for _ in range(3)] + [kinds.KVCache()]
    caches[-1].update_and_fetch(*(mx.zeros((1, 2, 300, 64), mx.bfloat16),) * 2)
    text = str(report.make_report(caches, 3.5, True, "reference", 0, 40960))
    own = 3 * cache_bytes(300, 2, 64, 64, 4, 3) + 300 * 512
    lines = text.splitlines()
    assert lines[0] == (
        "KV cache: 3 of 4 layers quantized with TurboQuant, keys 4 bits, values 3 bits, backend reference."
    )
    assert lines[1] == "  Layer 3, the last, is kept in full precision: 153.60 KB."
    percent = 100 * (1 - own / (4 * 300 * 512))
    assert lines[2] == f"  300 tokens: {own / 1e3:.2f} KB instead of 614.40 KB in fp16, {percent:.1f} % saved."
    assert lines[3].startswith("  At 8,192 tokens: ")
    assert lines[5].startswith("  At 40,960 tokens (the model's longest context): ")
    assert len(lines) == 6


def test_nothing_quantized_says_which_flag_changes_that() -> None:
    caches: list[Any] = [kinds.KVCache() for _ in range(3)]
    for cache in caches:
        cache.update_and_fetch(*(mx.zeros((1, 2, 212, 64)),) * 2)
    text = str(report.make_report(caches, 3.5, True, "reference", 5000, 8192))
    assert text.splitlines()[:2] == [
        "KV cache: nothing was quantized, 0 of 3 layers, 212 tokens.",
        "  212 tokens are fewer than --quantized-kv-start 5000; "
        "--quantized-kv-start 0 (quantized_kv_start=0 in Python) quantizes from the first.",
    ]
    assert "At 8,192" not in text


def test_short_caches_say_that_they_are_raw() -> None:
    text = str(report.make_report([cache_with(50)], 3.5, True, "reference", 0))
    assert "a cache under 96 tokens saves nothing yet" in text
    assert "% more" in text


def test_another_quantizer_says_that_it_is_one() -> None:
    text = str(report.make_report([kinds.KVCache()], 4, False, "reference", 0))
    assert text == report.NOT_SELECTED


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 1000}, "max_position_embeddings": 5}, 1000),
        ({"text_config": SimpleNamespace(max_position_embeddings=7)}, 7),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_the_longest_context(config: dict[str, Any], longest: int | None) -> None:
    assert report.max_context(SimpleNamespace(config=SimpleNamespace(**config))) == longest
    assert report.max_context(object()) is None


@pytest.mark.parametrize(("indices", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([1, 1, 3], "1, 3"), ([], "")])
def test_ranges(indices: list[int], text: str) -> None:
    assert report._numbers(indices) == text


# Following a run


@pytest.fixture
def hooked() -> Iterator[None]:
    install()
    yield
    uninstall()
    report.forget()


class Model:
    """Stands for a model in generate_step's first arguments."""

    config = SimpleNamespace(max_position_embeddings=2048)


def test_reports_follow_generate_step(hooked: None) -> None:
    from turboquant_vlm.integration.hook import _watch_generation

    given: list[Any] = [kinds.KVCache(), kinds.KVCache()]

    def fake(ids: Any, model: Any, *args: Any, **options: Any) -> Iterator[int]:
        caches = options.get("prompt_cache") or given
        for step in range(3):
            for cache in caches:
                cache.update_and_fetch(*(mx.zeros((1, 1, 100, 64)),) * 2)
            common.maybe_quantize_kv_cache(caches, options["quantized_kv_start"], 64, options["kv_bits"])
            yield step

    follow = _watch_generation(fake)
    assert last_report() is None
    for with_cache in (True, False):
        given = [kinds.KVCache(), kinds.KVCache()]
        options = {"kv_bits": 3.5, "quantized_kv_start": 150, **({"prompt_cache": given} if with_cache else {})}
        steps = follow(None, Model(), **options)
        next(steps)
        during = last_report()
        assert during is not None
        assert (during.tokens, during.bits) == (100, None)
        next(steps)
        steps.close()  # as when the model says its end token
        after = last_report()
        assert after is not None
        assert (after.tokens, after.bits, after.start, after.max_context) == (200, (4, 3), 150, 2048)
        assert report._running == []


def test_a_failing_run_is_closed(hooked: None) -> None:
    from turboquant_vlm.integration.hook import _watch_generation

    def fails(ids: Any, model: Any, **options: Any) -> Iterator[int]:
        yield 1
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        list(_watch_generation(fails)(None, Model(), kv_bits=None))
    assert report._running == []
    assert last_report() is not None
    assert not last_report().selected  # type: ignore[union-attr]
