"""The cache of one sequence: mlx-vlm's protocol, bit equality of what can be equal, and errors."""

from __future__ import annotations

import copy
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import KVCache, _BaseCache

from turboquant_vlm import reference
from turboquant_vlm.integration.backend import available
from turboquant_vlm.integration.batch import BatchTurboQuantKVCache
from turboquant_vlm.integration.bits import ALLOWED_BITS, is_default_split, resolve_kv_bits
from turboquant_vlm.integration.cache import SLICE, TurboQuantKVCache

HEADS, DIM = 2, 64


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def tokens(count: int, seed: int = 0, rows: int = 1, dim: int = DIM) -> tuple[mx.array, mx.array]:
    return random(rows, HEADS, count, dim, seed=seed), random(rows, HEADS, count, dim, seed=seed + 1000)


def filled(count: int, chunk: int = 0, bits: float = 3.5, seed: int = 0) -> TurboQuantKVCache:
    """A cache of `count` tokens, in chunks of `chunk` (0: in one), its last token apart as in decoding."""
    keys, values = tokens(count, seed)
    cache = TurboQuantKVCache(bits)
    edges = [*range(0, count - 1, chunk or count), count - 1, count]
    for start, end in pairwise(edges):
        if end > start:
            cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    return cache


def answer(cache: Any, queries: int = 1, seed: int = 7) -> mx.array:
    q = random(1, 2 * HEADS, queries, DIM, seed=seed)
    return cache.quantized_attention(q, scale=DIM**-0.5, mask="causal" if queries > 1 else None)


def flat(state: Any) -> list[tuple[str, mx.array]]:
    pairs: Any = tree_flatten(state)
    return list(pairs)


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and bool(mx.array_equal(a, b, equal_nan=True))


def same_state(a: Any, b: Any) -> bool:
    left, right = flat(a.state), flat(b.state)
    return len(left) == len(right) and all(n == m and same(x, y) for (n, x), (m, y) in zip(left, right, strict=True))


# Bit widths


@pytest.mark.parametrize(
    ("bits", "key", "value", "expected"),
    [
        (3.5, None, None, (4, 3)),
        (2.5, None, None, (3, 2)),
        (4, None, None, (4, 4)),
        (8, None, None, (8, 8)),
        (1, None, None, (1, 1)),
        (3.5, 3, 4, (3, 4)),
        (3.5, 8, None, (8, 3)),
        (3.5, None, 8, (4, 8)),
        (6.5, 8, None, (8, 6)),
        (7, 8, 6, (8, 6)),
    ],
)
def test_widths(bits: float, key: float | None, value: float | None, expected: tuple[int, int]) -> None:
    cache = TurboQuantKVCache(bits, key_bits=key, value_bits=value)
    assert (cache.key_bits, cache.value_bits) == expected


@pytest.mark.parametrize(
    ("bits", "key", "value", "named"),
    [
        (7, None, None, "kv_bits=7"),
        (9, None, None, "kv_bits=9"),
        (0, None, None, "kv_bits=0"),
        (0.5, None, None, "kv_bits=0.5 "),
        (6.5, None, None, "kv_bits=6.5 (7-bit keys"),
        (3.3, None, None, "kv_bits=3.3"),
        (4, 7, None, "kv_key_bits=7"),
        (4, None, 7, "kv_value_bits=7"),
        (4, 2.5, None, "kv_key_bits=2.5"),
        (4, None, 0, "kv_value_bits=0"),
    ],
)
def test_other_widths_are_refused(bits: float, key: float | None, value: float | None, named: str) -> None:
    with pytest.raises(ValueError, match="TurboQuant supports 1 to 6 or 8 bits per coordinate") as error:
        TurboQuantKVCache(bits, key_bits=key, value_bits=value)
    assert named in str(error.value)


@pytest.mark.parametrize("bits", [1.5, 2, 2.5, 3.5, 4.5, 5.5, 8])
def test_the_default_split_is_recognised_as_one(bits: float) -> None:
    assert is_default_split(*resolve_kv_bits(bits))
    assert not is_default_split(bits, 8, 1)


@pytest.mark.parametrize("key", ALLOWED_BITS)
@pytest.mark.parametrize("value", ALLOWED_BITS)
def test_every_pair_of_widths_attends(key: int, value: int) -> None:
    cache = TurboQuantKVCache(4, key_bits=key, value_bits=value)
    cache.update_and_fetch(*tokens(130))
    cache.update_and_fetch(*tokens(1, seed=3))
    assert cache._keys.codec.bits == key
    assert cache._values.codec.bits == value
    assert bool(mx.all(mx.isfinite(answer(cache))))


# Attention


@pytest.mark.parametrize("chunk", [0, 1, 37, 64, 100])
def test_codes_and_attention_do_not_depend_on_the_chunks(chunk: int) -> None:
    whole, parts = filled(200), filled(200, chunk)
    assert same(whole._keys.packed.words, parts._keys.packed.words)
    assert same(answer(whole), answer(parts))


def test_it_is_the_references_attention() -> None:
    keys, values = tokens(150)
    cache = TurboQuantKVCache(3.5)
    got = cache.update_and_fetch(keys[:, :, :140], values[:, :, :140])
    got = cache.update_and_fetch(keys[:, :, 140:], values[:, :, 140:])
    q = random(1, 4, 10, DIM, seed=5)
    sinks = mx.array([0.0, 1.0, -2.0, 3.0])

    def side(role: Any, x: mx.array, bits: int, seed: int) -> reference.Tokens:
        codec = reference.make_codec(DIM, bits, seed=seed)
        return reference.append(reference.empty_tokens(codec, role, 1, HEADS, x.dtype), x)

    k, v = side("key", keys, 4, 0), side("value", values, 3, 1)
    window = mx.arange(150)[None] > mx.arange(140, 150)[:, None] - 60
    for mask in (None, "causal", window, mx.where(window, 0.0, -1e9)):
        expected = reference.attend(q, k, v, 0.125, mask=mask, sinks=sinks)
        assert same(cache.quantized_attention(q, *got, scale=0.125, mask=mask, sinks=sinks), expected)


def test_it_is_close_to_float_attention() -> None:
    keys, values = tokens(300)
    cache = TurboQuantKVCache(6)
    cache.update_and_fetch(keys[:, :, :299], values[:, :, :299])
    cache.update_and_fetch(keys[:, :, 299:], values[:, :, 299:])
    q = random(1, 4, 1, DIM, seed=9)
    expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125)
    assert bool(mx.max(mx.abs(answer(cache, seed=9) - expected)) < 0.05)


def test_the_first_chunk_attends_to_its_own_floats() -> None:
    keys, values = tokens(150)
    cache = TurboQuantKVCache(2, backend="reference")
    got = cache.update_and_fetch(keys, values)
    q = random(1, 4, 150, DIM)
    expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1, mask="causal")
    assert same(cache.quantized_attention(q, *got, scale=0.1, mask="causal"), expected)
    # Any later look at the same tokens reads codes.
    assert not same(cache.quantized_attention(q[:, :, -1:], scale=0.1), expected[:, :, -1:])


@pytest.mark.skipif("cpu" not in available(), reason="no CPU kernels here: their first chunk was not checked")
def test_cpu_kernels_take_the_first_chunk() -> None:
    """MLX's CPU attention takes a hundred times longer; old tokens of the chunk are then read packed."""
    keys, values = tokens(150)
    q = random(1, 4, 150, DIM)
    cache = TurboQuantKVCache(2, backend="cpu")
    got = cache.quantized_attention(q, *cache.update_and_fetch(keys, values), scale=0.1, mask="causal")
    functions = TurboQuantKVCache(2, backend="reference")
    functions.update_and_fetch(keys, values)
    assert same(got, reference.attend(q, functions._keys, functions._values, 0.1, mask="causal"))


def test_unknown_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown attention mask 'sliding'"):
        filled(10).quantized_attention(random(1, 4, 1, DIM), mask="sliding")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_output_has_the_queries_dtype(dtype: mx.Dtype) -> None:
    cache = TurboQuantKVCache(4)
    for count in (120, 1):
        keys, values = tokens(count)
        got = cache.update_and_fetch(keys.astype(dtype), values.astype(dtype))
        out = cache.quantized_attention(random(1, 4, count, DIM, dtype=dtype), *got, scale=0.1, mask="causal")
        assert out.dtype == dtype


def test_rows_of_equal_length() -> None:
    keys, values = tokens(140, rows=3)
    cache = TurboQuantKVCache(3.5)
    cache.update_and_fetch(keys[:, :, :139], values[:, :, :139])
    cache.update_and_fetch(keys[:, :, 139:], values[:, :, 139:])
    q = random(3, 4, 1, DIM)
    out = cache.quantized_attention(q, scale=0.125)
    for row in range(3):
        alone = cache.extract(row)
        assert alone.offset == 140
        assert same(alone.quantized_attention(q[row : row + 1], scale=0.125), out[row : row + 1])
    with pytest.raises(IndexError, match="row 3 of a TurboQuant cache with 3 rows"):
        cache.extract(3)


def test_key_and_value_dims_may_differ() -> None:
    cache = TurboQuantKVCache(3.5)
    cache.update_and_fetch(random(1, 2, 120, 192), random(1, 2, 120, 128))
    got = cache.update_and_fetch(random(1, 2, 1, 192), random(1, 2, 1, 128))
    assert got[0].shape == (1, 2, 121, 192)
    assert got[1].shape == (1, 2, 121, 128)
    assert cache.quantized_attention(random(1, 4, 1, 192), *got, scale=0.1).shape == (1, 4, 1, 128)


# Head sizes without a rotation


@pytest.mark.parametrize(("key", "value", "role"), [(64, 0, "value"), (90, 64, "key"), (64, 92, "value")])
def test_unsupported_head_sizes_stay_float(key: int, value: int, role: str) -> None:
    cache, plain = TurboQuantKVCache(3.5), KVCache()
    for seed in range(2):
        k, v = random(1, 2, 70, key, seed=seed), random(1, 2, 70, value, seed=seed)
        got, expected = cache.update_and_fetch(k, v), plain.update_and_fetch(k, v)
        assert same(got[0], expected[0])
        assert same(got[1], expected[1])
    size = key if role == "key" else value
    assert cache.why_float == f"{role} head size {size} has no exact rotation"
    assert (cache.offset, cache.nbytes, cache.trim(3), cache.offset) == (140, plain.nbytes, 3, 137)
    q = random(1, 4, 1, key)
    if value:
        k, v = cache.state
        expected_out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1)
        assert same(cache.quantized_attention(q, scale=0.1), expected_out)
    back = TurboQuantKVCache.from_state(cache.state, cache.meta_state)
    assert (back.offset, back.why_float) == (137, cache.why_float)
    plain.trim(3)
    assert TurboQuantKVCache.from_cache(plain, 3.5).why_float == cache.why_float


# The protocol


def test_every_member_of_mlx_vlms_caches_is_there() -> None:
    wanted = {name for name in dir(_BaseCache) if not name.startswith("_")}
    wanted |= {name for name in dir(KVCache) if not name.startswith("_")} - {"to_quantized", "step"}
    wanted |= {"update_and_fetch", "decode_attention", "prefill_attention", "dequantize", "dequantize_for_apc"}
    wanted |= {"bits", "key_bits", "value_bits", "group_size", "zero_row_tail"}
    cache = filled(100)
    assert [name for name in sorted(wanted) if not hasattr(cache, name)] == []
    # Nothing of mlx-vlm's own implementation is reachable by accident.
    inherited = [
        name
        for name, _ in inspect.getmembers(TurboQuantKVCache, callable)
        if not name.startswith("__")
        and getattr(inspect.unwrap(getattr(TurboQuantKVCache, name)), "__module__", "") == "mlx_vlm.turboquant"
    ]
    assert [name for name in inherited if not name.startswith("_") and name != "from_state"] == []


def test_an_empty_cache() -> None:
    cache = TurboQuantKVCache(3.5)
    assert cache.empty()
    assert (cache.offset, cache.size(), cache.nbytes) == (0, 0, 0)
    assert cache.state == (None, None)
    assert cache.keys is None
    assert cache.values is None
    assert cache.trim(5) == 0
    assert cache.dequantize_for_apc() == (None, None)
    assert cache.prefix_cache_reserve(100) == ()
    assert cache.is_trimmable()
    back = TurboQuantKVCache.from_state(cache.state, cache.meta_state)
    assert back.empty()
    mx.eval([cache.state])
    with pytest.raises(ValueError, match="is empty"):
        answer(cache)


def test_sizes_and_masks() -> None:
    cache = filled(300)
    plain = KVCache()
    plain.update_and_fetch(*tokens(300))
    assert isinstance(cache.offset, int)
    assert (cache.offset, cache.size()) == (300, 300)
    assert cache.nbytes == sum(array.nbytes for _, array in flat(cache.state))
    assert not cache.empty()
    for n, window, array in [(1, None, False), (4, None, False), (4, None, True), (4, 16, False), (1, 16, True)]:
        ours = cache.make_mask(n, return_array=array, window_size=window)
        theirs = plain.make_mask(n, return_array=array, window_size=window)
        assert ours == theirs if not isinstance(theirs, mx.array) else same(ours, theirs)
    profile = cache.memory_profile(300)
    assert profile is None or profile.source_bytes == cache.nbytes


def test_offsets_can_be_set_backwards_only() -> None:
    cache = filled(100)
    cache.offset = 98
    assert (cache.offset, cache._keys.lengths) == (98, (98,))
    with pytest.raises(ValueError, match="offset=99 lies beyond the 98 tokens"):
        cache.offset = 99


@pytest.mark.parametrize(("count", "drafted", "rejected"), [(97, 5, 3), (190, 8, 8), (130, 32, 32), (200, 1, 1)])
def test_trimmed_drafts_leave_no_trace(count: int, drafted: int, rejected: int) -> None:
    keys, values = tokens(count + drafted + 40)
    plain, speculated = TurboQuantKVCache(3.5), TurboQuantKVCache(3.5)
    for cache in (plain, speculated):
        cache.update_and_fetch(keys[:, :, : count - 1], values[:, :, : count - 1])
        cache.update_and_fetch(keys[:, :, count - 1 : count], values[:, :, count - 1 : count])
    speculated.update_and_fetch(*tokens(drafted, seed=50))
    assert speculated.trim(rejected) == rejected
    assert speculated.trim(drafted - rejected) == drafted - rejected
    for start in range(count, count + drafted + 40, 20):
        for cache in (plain, speculated):
            cache.update_and_fetch(keys[:, :, start : start + 20], values[:, :, start : start + 20])
        assert same(answer(plain, 5), answer(speculated, 5))
    assert same_state(plain, speculated)


def test_mlx_vlms_speculative_transactions() -> None:
    start_speculative_cache = pytest.importorskip("mlx_vlm.speculative.cache_state").start_speculative_cache
    keys, values = tokens(140)
    pair = filled(100), filled(100)
    batch = BatchTurboQuantKVCache.merge(pair)
    single = filled(100)
    for caches, accepted in (([single], [2]), ([batch], [4, 1]), ([batch], [0, 0])):
        rows = len(accepted)
        before = _offsets(caches[0])
        transaction = start_speculative_cache(caches, 5)
        x = mx.repeat(keys[:, :, 100:105], rows, axis=0)
        caches[0].update_and_fetch(x, mx.repeat(values[:, :, 100:105], rows, axis=0))
        transaction.commit(accepted)
        assert _offsets(caches[0]) == [n + kept for n, kept in zip(before, accepted, strict=True)]
    transaction = start_speculative_cache([single], 5)
    single.update_and_fetch(*tokens(5))
    transaction.abort()
    plain = filled(100)
    plain.update_and_fetch(keys[:, :, 100:102], values[:, :, 100:102])
    assert same_state(single, plain)
    assert same_state(batch.extract(1), _after(pair[1], keys[:, :, 100:101], values[:, :, 100:101]))


def _offsets(cache: Any) -> list[int]:
    offsets = cache.offset
    return [offsets] if isinstance(offsets, int) else [int(n) for n in offsets.tolist()]


def _after(cache: TurboQuantKVCache, keys: mx.array, values: mx.array) -> TurboQuantKVCache:
    cache.update_and_fetch(keys, values)
    return cache


def test_trimming_everything_starts_over() -> None:
    cache = filled(150)
    assert cache.trim(1000) == 150
    assert cache.empty()
    cache.update_and_fetch(*tokens(120, seed=4))
    fresh = TurboQuantKVCache(3.5)
    fresh.update_and_fetch(*tokens(120, seed=4))
    assert same_state(cache, fresh)


def test_copies_go_their_own_way() -> None:
    cache = filled(120)
    for made in (copy.copy(cache), copy.deepcopy(cache)):
        assert same_state(cache, made)
        made.update_and_fetch(*tokens(3, seed=8))
        assert (cache.offset, made.offset) == (120, 123)


# Storing


@pytest.mark.parametrize("count", [3, 95, 96, 200, 400])
@pytest.mark.parametrize("state_first", [True, False])
def test_state_round_trip_is_lossless(count: int, state_first: bool) -> None:
    cache = filled(count)
    back = TurboQuantKVCache.__new__(TurboQuantKVCache)
    if state_first:
        back.state = cache.state
        back.meta_state = cache.meta_state
    else:
        back.meta_state = cache.meta_state
        back.state = cache.state
    assert back.meta_state == cache.meta_state
    assert same_state(cache, back)
    for each in (cache, back):
        each.update_and_fetch(*tokens(70, seed=6))
    assert same_state(cache, back)
    assert same(answer(cache, 3), answer(back, 3))


def test_a_safetensors_file_holds_it(tmp_path: Path) -> None:
    cache = filled(200)
    path = str(tmp_path / "cache.safetensors")
    metadata = {str(i): text for i, text in enumerate(cache.meta_state)}
    mx.save_safetensors(path, dict(flat(cache.state)), metadata)
    loaded: Any = mx.load(path, return_metadata=True)
    arrays, texts = loaded
    sides = [tuple(arrays[name] for name, _ in flat(cache.state) if name.startswith(f"{side}.")) for side in "01"]
    back = TurboQuantKVCache.from_state(tuple(sides), tuple(texts[str(i)] for i in range(len(texts))))
    assert same_state(cache, back)
    assert same(answer(cache), answer(back))


def test_snapshots_restore_into_anything() -> None:
    cache = filled(300)
    snapshot = cache.prefix_cache_snapshot()
    other = filled(40, bits=2)
    bare = TurboQuantKVCache.__new__(TurboQuantKVCache)
    for back in (other, bare):
        back.prefix_cache_restore(snapshot)
        assert (back.key_bits, back.value_bits, back.offset) == (4, 3, 300)
        assert same_state(cache, back)


@pytest.mark.parametrize("meta", [("17", "3.5", "0", "3.0", "4.0"), ("turboquant-vlm", "2", "x"), ()])
def test_other_formats_are_refused(meta: tuple[str, ...]) -> None:
    cache = filled(120)
    with pytest.raises(ValueError, match="expected turboquant-vlm version 1"):
        TurboQuantKVCache.from_state(cache.state, meta)
    with pytest.raises(ValueError, match="expected turboquant-vlm version 1"):
        cache.prefix_cache_restore({"state": cache.state, "meta_state": meta})
    assert cache.offset == 120


def test_missing_arrays_are_refused() -> None:
    cache = filled(200)
    keys, values = cache.state
    with pytest.raises(ValueError, match=r"TurboQuant state needs \d+ arrays \(first, recent, words"):
        TurboQuantKVCache.from_state((tuple(keys)[:-1], values), cache.meta_state)


def test_wrapped_keys_can_be_put_back() -> None:
    cache = filled(200)
    before = answer(cache)
    cache.keys = mx.depends(cache.keys, mx.zeros(1))
    cache.values = mx.depends(cache.values, mx.zeros(1))
    assert same(answer(cache), before)


# Conversion


@pytest.mark.parametrize("count", [1, 95, 300, SLICE + 100])
def test_conversion_gives_the_codes_of_a_cache_that_was_never_float(count: int) -> None:
    keys, values = tokens(count)
    plain = KVCache()
    plain.update_and_fetch(keys, values)
    converted = TurboQuantKVCache.from_cache(plain, 3.5)
    direct = TurboQuantKVCache(3.5)
    direct.update_and_fetch(keys, values)
    for cache in (converted, direct):
        cache.update_and_fetch(*tokens(1, seed=5))
    assert converted.offset == count + 1
    assert same_state(converted, direct)
    assert TurboQuantKVCache.from_cache(KVCache(), 3.5).empty()


def _working_memory(slices: int) -> int:
    """Bytes alive at the peak of a conversion, besides the float cache and twice the result."""
    plain = KVCache()
    shape = (1, 2, slices * SLICE, 64)
    plain.update_and_fetch(random(*shape, dtype=mx.float16), random(*shape, dtype=mx.float16))
    mx.eval(plain.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    converted = TurboQuantKVCache.from_cache(plain, 3.5)
    return mx.get_peak_memory() - before - 2 * converted.nbytes


def test_conversion_works_by_slices() -> None:
    _working_memory(4)  # constants are made once
    one_slice = 2 * 2 * SLICE * 64 * 2
    assert _working_memory(24) < max(1.1 * _working_memory(8), one_slice)


def test_merging_caches_makes_a_batch() -> None:
    batch = TurboQuantKVCache.merge([filled(130), filled(40, seed=2)])
    assert isinstance(batch, BatchTurboQuantKVCache)
    assert batch.offset.tolist() == [130, 40]
