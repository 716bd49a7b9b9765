"""What models do with the result of ``update_and_fetch``: look at it, slice it, compute with it, attend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.base import dequantize_kv_state, kv_sequence_length, slice_kv_sequence

from turboquant_vlm.integration.cache import TurboQuantKVCache
from turboquant_vlm.integration.views import ArrayView, LightView, StateView, as_array, attention, prefix_end

SCALE = 0.125


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def cache_of(count: int, last: int = 1, attends: bool = True) -> tuple[TurboQuantKVCache, Any, Any]:
    """A cache of `count` tokens and what its latest update of `last` tokens returned."""
    cache = TurboQuantKVCache(3.5)
    cache.update_and_fetch(random(1, 2, count - 2 * last, 64), random(1, 2, count - 2 * last, 64, seed=1))
    for seed in (2, 3):
        got = cache.update_and_fetch(random(1, 2, last, 64, seed=seed), random(1, 2, last, 64, seed=seed + 10))
        if attends:
            cache.quantized_attention(random(1, 4, last, 64), *got, scale=SCALE, mask="causal")
    return cache, *got


def test_models_that_attend_get_light_views_after_the_first() -> None:
    _, keys, values = cache_of(150)
    assert isinstance(keys, LightView)
    assert isinstance(values, LightView)


def test_models_that_do_not_attend_keep_getting_arrays() -> None:
    cache, keys, values = cache_of(150, attends=False)
    assert isinstance(keys, ArrayView)
    assert isinstance(values, mx.array)
    assert mx.array_equal(keys, cache._backend.raw_tokens(cache._keys))


def test_decode_and_prefill_are_told_apart() -> None:
    cache, _, _ = cache_of(150)
    keys, _ = cache.update_and_fetch(random(1, 2, 7, 64), random(1, 2, 7, 64))
    assert isinstance(keys, ArrayView)
    keys, _ = cache.update_and_fetch(random(1, 2, 1, 64), random(1, 2, 1, 64))
    assert isinstance(keys, LightView)


@pytest.mark.parametrize("attends", [True, False])
def test_looking(attends: bool) -> None:
    _, keys, values = cache_of(150, attends=attends)
    assert keys.shape == (1, 2, 150, 64)
    assert (keys.shape[-2], keys.ndim, keys.dtype, len(keys)) == (150, 4, mx.float32, 1)
    assert kv_sequence_length(keys) == 150
    assert dequantize_kv_state(None, keys, values) == (keys, values)
    mask = mx.ones((1, 1, 1, 200), dtype=mx.bool_)
    assert mask[..., : keys.shape[-2]].shape[-1] == 150


@pytest.mark.parametrize("attends", [True, False])
def test_computing(attends: bool) -> None:
    cache, keys, values = cache_of(150, attends=attends)
    k = cache._backend.raw_tokens(cache._keys)
    v = cache._backend.raw_tokens(cache._values)
    q = random(1, 2, 1, 64)
    assert mx.array_equal(mx.array(keys), k)
    assert mx.array_equal(keys[:, 1], k[:, 1])
    assert mx.array_equal(keys[..., 10:20, :], k[..., 10:20, :])
    assert mx.array_equal(keys.transpose(0, 1, 3, 2), k.transpose(0, 1, 3, 2))
    assert mx.array_equal(keys.swapaxes(-1, -2), k.swapaxes(-1, -2))
    assert mx.array_equal(keys.astype(mx.float16), k.astype(mx.float16))
    assert mx.array_equal(keys * 2 + values, k * 2 + v)
    assert mx.array_equal(1 - keys, 1 - k)
    assert mx.array_equal(keys @ values.swapaxes(-1, -2), k @ v.swapaxes(-1, -2))
    assert [x.shape for x in keys] == [(2, 150, 64)]
    if not attends:  # functions of mlx take arrays only
        assert mx.array_equal(mx.expand_dims(keys, 2), mx.expand_dims(k, 2))
        assert mx.array_equal(mx.repeat(keys, 2, axis=1), mx.repeat(k, 2, axis=1))
        assert mx.array_equal(q @ keys.swapaxes(-1, -2), q @ k.swapaxes(-1, -2))
        direct = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE)
        assert mx.array_equal(direct, mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE))


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize(
    "index",
    [lambda n: (slice(None), slice(None), slice(None, n)), lambda n: (..., slice(0, n), slice(None))],
)
def test_a_prefix_is_the_cache_before_the_draft(attends: bool, index: Any) -> None:
    cache, keys, values = cache_of(200, last=6, attends=attends)
    for drop in range(6):
        end = 200 - drop
        k, v = keys[index(end)], values[index(end)]
        assert type(k) is type(keys)
        assert k.shape == (1, 2, end, 64)
        q = random(1, 4, 1, 64, seed=drop)
        plain = TurboQuantKVCache.from_state(cache.state, cache.meta_state)
        plain.trim(drop)
        assert mx.array_equal(attention(q, k, v, SCALE), plain.quantized_attention(q, scale=SCALE))
        sliced = slice_kv_sequence(keys, end), slice_kv_sequence(values, end)
        assert mx.array_equal(attention(q, *sliced, SCALE), attention(q, k, v, SCALE))
    # Row by row or at once: the same verification.
    q = random(1, 4, 6, 64)
    at_once = attention(q, keys, values, SCALE, "causal")
    one_by_one = [
        attention(q[:, :, i : i + 1], keys[:, :, : 195 + i], values[:, :, : 195 + i], SCALE) for i in range(6)
    ]
    assert mx.array_equal(at_once, mx.concatenate(one_by_one, axis=2))


@pytest.mark.parametrize(
    ("key", "end"),
    [
        (slice(None), 9),
        ((slice(None), slice(None), slice(None, 4)), 4),
        ((slice(None), slice(None), slice(0, 4, 1), slice(None)), 4),
        ((..., slice(None, -2), slice(None)), 7),
        ((..., slice(None, 50), slice(None)), 9),
        (0, None),
        ((..., 3, slice(None)), None),
        ((slice(None), slice(None), slice(1, 4)), None),
        ((slice(None), slice(None), slice(None, None, 2)), None),
        ((slice(0, 1), slice(None), slice(None, 4)), None),
        ((..., slice(None, 4)), None),
        ((..., None, slice(None), slice(None)), None),
        ((..., slice(None, 0), slice(None)), None),
    ],
)
def test_which_slices_are_prefixes(key: Any, end: int | None) -> None:
    assert prefix_end(key, 9) == end


def test_the_state_attends_like_the_views() -> None:
    cache, keys, values = cache_of(150)
    q = random(1, 4, 1, 64)
    state = cache.state
    assert isinstance(state[0], StateView)
    assert state[0].shape == keys.shape
    assert mx.array_equal(attention(q, *state, SCALE), attention(q, keys, values, SCALE))
    k, v = (slice_kv_sequence(side, 149) for side in state)
    assert mx.array_equal(attention(q, k, v, SCALE), attention(q, keys[:, :, :149], values[:, :, :149], SCALE))
    assert state[0][0].shape == (1, 2, 4, 64)


def test_keys_as_values_are_dequantized() -> None:
    cache, keys, _ = cache_of(150)
    q = random(1, 4, 1, 64)
    k = cache._backend.raw_tokens(cache._keys)
    expected = mx.fast.scaled_dot_product_attention(q, k, k, scale=SCALE)
    assert mx.array_equal(attention(q, keys, keys, SCALE), expected)


def test_views_do_not_change_when_the_cache_goes_on() -> None:
    cache, keys, values = cache_of(150)
    q = random(1, 4, 1, 64)
    before = attention(q, keys, values, SCALE)
    for seed in range(80):
        cache.update_and_fetch(random(1, 2, 1, 64, seed=seed), random(1, 2, 1, 64, seed=seed))
    assert mx.array_equal(attention(q, keys, values, SCALE), before)
    assert keys.shape == (1, 2, 150, 64)


def test_plain_arrays_pass_through() -> None:
    array = random(1, 2, 3, 4)
    assert as_array(array) is array
    assert as_array(array, mx.float16).dtype == mx.float16
