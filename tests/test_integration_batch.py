"""The cache of a batch: every row answers, bit for bit, as it would alone, whoever joins or leaves."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import BatchKVCache

from turboquant_vlm.integration.batch import BatchTurboQuantKVCache
from turboquant_vlm.integration.cache import TurboQuantKVCache
from turboquant_vlm.integration.views import LightView, attention

SCALE = 0.125


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def flat(state: Any) -> list[tuple[str, mx.array]]:
    pairs: Any = tree_flatten(state)
    return list(pairs)


class Row:
    """One sequence: an endless supply of its tokens and queries, and the same cache alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.keys, self.values = (random(1, 2, 900, 64, seed=seed + i) for i in (1000, 2000))
        self.queries = random(1, 4, 900, 64, seed=seed + 3000)
        self.length = 0
        self.alone = TurboQuantKVCache(3.5)

    def take(self, count: int) -> tuple[mx.array, mx.array, mx.array]:
        start, self.length = self.length, self.length + count
        return tuple(x[:, :, start : start + count] for x in (self.keys, self.values, self.queries))  # type: ignore[return-value]

    def back(self, count: int) -> None:
        self.length -= count
        self.alone.trim(count)


def pad(x: mx.array, left: int, right: int = 0) -> mx.array:
    """Padding columns hold numbers that would show if anything read them."""
    return mx.pad(x, [(0, 0), (0, 0), (left, right), (0, 0)], constant_values=mx.array(1e4))


def step(cache: BatchTurboQuantKVCache, rows: list[Row], counts: list[int], right: bool = False) -> None:
    """Feed `counts[b]` tokens to each row, padded on one side, and compare every real query with the row alone."""
    columns = max(counts)
    sides: list[list[mx.array]] = [[], [], []]
    expected: list[tuple[int, mx.array | None]] = []
    # A first chunk without padding may attend to its own floats; with padding, a batch reads codes.
    floats = cache.size() == 0 and len(set(counts)) == 1
    for row, count in zip(rows, counts, strict=True):
        k, v, q = row.take(count)
        gap = columns - count
        left, behind = (0, gap) if right else (gap, 0)
        for side, x in zip(sides, (k, v, q), strict=True):
            side.append(pad(x, left, behind))
        if count:
            got = row.alone.update_and_fetch(k, v)
            pair = got if row.length > count or floats else row.alone.state
            expected.append((left, attention(q, *pair, SCALE, "causal")))
        else:
            expected.append((left, None))
    mask = cache.make_mask(columns)
    k, v, q = (mx.concatenate(side) for side in sides)
    out = attention(q, *cache.update_and_fetch(k, v), SCALE, mask)
    assert bool(mx.all(mx.isfinite(out)))
    for b, (left, answer) in enumerate(expected):
        if answer is not None:
            assert mx.array_equal(out[b : b + 1, :, left : left + answer.shape[2]], answer), f"row {b}"
        # What stands for padding attends to nothing.
        assert answer is not None or mx.all(out[b] == 0)


def begin(lengths: list[int], seed: int = 0) -> tuple[BatchTurboQuantKVCache, list[Row]]:
    rows = [Row(seed + 10 * b) for b in range(len(lengths))]
    longest = max(lengths)
    cache = BatchTurboQuantKVCache([longest - n for n in lengths], 3.5)
    step(cache, rows, lengths)
    return cache, rows


def decode(cache: BatchTurboQuantKVCache, rows: list[Row], steps: int) -> None:
    for _ in range(steps):
        step(cache, rows, [1] * len(rows))


@pytest.mark.parametrize("lengths", [[150], [10, 7, 3], [200, 97, 96, 5], [60, 29], [130, 130]])
def test_rows_answer_as_if_alone(lengths: list[int]) -> None:
    cache, rows = begin(lengths)
    assert cache.offset.tolist() == lengths
    assert cache.left_padding.tolist() == [max(lengths) - n for n in lengths]
    decode(cache, rows, 5)
    step(cache, rows, [4] * len(rows))
    assert cache._keys.lengths == tuple(n + 9 for n in lengths)


@pytest.mark.parametrize("chunk", [3, 40])
def test_prefill_in_chunks_that_are_all_padding_for_some_rows(chunk: int) -> None:
    lengths = [100, 30, 1]
    cache = BatchTurboQuantKVCache([0, 70, 99], 3.5)
    rows = [Row(10 * b) for b in range(3)]
    for start in range(0, 100, chunk):
        end = min(100, start + chunk)
        counts = [max(0, end - max(start, 100 - n)) for n in lengths]
        step(cache, rows, counts)
        assert cache.offset.tolist() == [end - (100 - n) for n in lengths]
    decode(cache, rows, 3)


def test_the_longest_row_leaves() -> None:
    cache, rows = begin([10, 7, 3])
    decode(cache, rows, 2)
    cache.filter(mx.array([1, 2]))
    assert (cache._idx, cache.left_padding.tolist(), cache.offset.tolist()) == (9, [0, 4], [9, 5])
    decode(cache, rows[1:], 5)
    cache.filter([1])
    assert (cache._idx, cache.is_single_row(), cache.batch_size) == (10, True, 1)
    decode(cache, rows[2:], 5)


@pytest.mark.parametrize(("mine", "theirs"), [([40], [90]), ([130, 20], [5, 140]), ([200], [200, 3])])
def test_rows_join(mine: list[int], theirs: list[int]) -> None:
    cache, rows = begin(mine)
    decode(cache, rows, 3)
    other, more = begin(theirs, seed=100)
    cache.extend(other)
    rows += more
    assert cache.batch_size == len(rows)
    assert cache.offset.tolist() == [row.length for row in rows]
    decode(cache, rows, 4)
    cache.filter([len(rows) - 1, 0])
    decode(cache, [rows[-1], rows[0]], 3)


def test_joining_and_being_joined_while_empty() -> None:
    cache, rows = begin([100, 20])
    cache.extend(BatchTurboQuantKVCache([0], 3.5))
    assert cache.offset.tolist() == [100, 20, 0]
    rows.append(Row(77))
    decode(cache, rows, 4)
    waiting = BatchTurboQuantKVCache([0], 3.5)
    waiting.extend(cache)
    decode(waiting, [Row(88), *rows], 2)
    empty = BatchTurboQuantKVCache([1, 0], 3.5)
    empty.extend(BatchTurboQuantKVCache([2], 3.5))
    assert empty.left_padding.tolist() == [1, 0, 2]


def test_a_float_batch_joins_in_codes() -> None:
    cache, rows = begin([100])
    late = Row(50)
    k, v, _ = late.take(30)
    late.alone.update_and_fetch(k, v)
    plain = BatchKVCache([2])
    plain.update_and_fetch(pad(k, 2), pad(v, 2))
    cache.extend(plain)
    decode(cache, [*rows, late], 3)


def test_right_padded_prefill_after_a_prefix() -> None:
    cache, rows = begin([100, 40])
    cache.prepare(right_padding=[0, 25], lengths=[30, 5])
    step(cache, rows, [30, 5], right=True)
    cache.finalize()
    assert cache.offset.tolist() == [130, 45]
    assert cache.left_padding.tolist() == [0, 85]
    decode(cache, rows, 3)


def test_right_padding_in_chunks() -> None:
    cache, rows = begin([70, 70])
    cache.prepare(right_padding=[0, 33], lengths=[60, 27])
    step(cache, rows, [20, 20], right=True)
    step(cache, rows, [20, 7], right=True)
    step(cache, rows, [20, 0], right=True)
    cache.finalize()
    assert cache.offset.tolist() == [130, 97]
    decode(cache, rows, 3)


def test_rejected_drafts_of_each_row() -> None:
    cache, rows = begin([130, 60])
    step(cache, rows, [5, 5])
    # As mlx-vlm's rollback does: trim the common part, then per row.
    cache.trim(1)
    cache.prepare(right_padding=[2, 0])
    cache.finalize()
    rows[0].back(3)
    rows[1].back(1)
    assert cache.offset.tolist() == [132, 64]
    decode(cache, rows, 6)


def test_rows_come_out_alone() -> None:
    cache, rows = begin([150, 20])
    decode(cache, rows, 2)
    for index, row in enumerate(rows):
        out = cache.extract(index)
        assert type(out) is TurboQuantKVCache
        assert out.offset == row.length
        q = row.queries[:, :, :1]
        assert mx.array_equal(out.quantized_attention(q, scale=SCALE), row.alone.quantized_attention(q, scale=SCALE))
    again = BatchTurboQuantKVCache.merge([cache.extract(1), cache.extract(0), TurboQuantKVCache(3.5)])
    assert again.offset.tolist() == [22, 152, 0]
    decode(again, [rows[1], rows[0], Row(99)], 2)
    with pytest.raises(ValueError, match="cannot form a batch"):
        BatchTurboQuantKVCache.merge([cache.extract(0), TurboQuantKVCache(4)])


def test_offsets_handed_out_stay_as_they_were() -> None:
    cache, rows = begin([10, 4])
    offset, padding = cache.offset, cache.left_padding
    decode(cache, rows, 3)
    cache.filter([1])
    assert offset.tolist() == [10, 4]
    assert padding.tolist() == [0, 6]


@pytest.mark.parametrize("state_first", [True, False])
def test_state_round_trip(state_first: bool) -> None:
    cache, rows = begin([150, 20])
    decode(cache, rows, 1)
    back = BatchTurboQuantKVCache.__new__(BatchTurboQuantKVCache)
    pairs = [("state", cache.state), ("meta_state", cache.meta_state)]
    for name, value in pairs if state_first else pairs[::-1]:
        setattr(back, name, value)
    assert back.meta_state == cache.meta_state
    for (n, x), (m, y) in zip(flat(cache.state), flat(back.state), strict=True):
        assert n == m
        assert mx.array_equal(x, y)
    decode(back, rows, 3)
    assert BatchTurboQuantKVCache.from_state(cache.state, cache.meta_state).offset.tolist() == [151, 21]


def test_views_and_sizes() -> None:
    cache, rows = begin([150, 20])
    decode(cache, rows, 2)
    x = random(2, 2, 1, 64)
    keys, values = cache.update_and_fetch(x, x)
    assert isinstance(keys, LightView)
    assert keys.shape == (2, 2, 153, 64)
    k, _ = cache.dequantize(keys, values)
    assert mx.all(k[1, :, :130] == 0)
    assert mx.array_equal(k[1, :, -1], x[1, :, 0])
    assert (cache.size(), cache.empty(), cache.is_trimmable(), cache.group_size) == (153, False, True, 64)
    assert cache.nbytes == sum(a.nbytes for _, a in flat(cache.state[:2]))
    made = copy.deepcopy(cache)
    made.trim(153)
    assert (cache.offset.tolist(), made.offset.tolist()) == ([153, 23], [0, -130])


@pytest.mark.parametrize("action", ["left_padding", "offset"])
def test_metadata_that_does_not_fit_is_refused(action: str) -> None:
    cache, _ = begin([10, 4])
    setattr(cache, action, getattr(cache, action))
    with pytest.raises(ValueError, match=f"{action}="):
        setattr(cache, action, mx.array([1, 2]))
    with pytest.raises(ValueError, match="only be added to an empty cache"):
        cache.prepare(left_padding=[1, 1])


def test_unsupported_head_sizes_stay_float() -> None:
    def fill(cache: Any, seed: int) -> Any:
        x = random(2, 2, 6, 90, seed=seed)
        return cache.update_and_fetch(x, x)

    cache, plain = BatchTurboQuantKVCache([0, 2], 3.5), BatchKVCache([0, 2])
    for each in (cache, plain):
        fill(each, 1)
        fill(each, 2)
    other, more = BatchTurboQuantKVCache([1, 0], 3.5), BatchKVCache([1, 0])
    for each in (other, more):
        fill(each, 3)
    cache.extend(other)
    plain.extend(more)
    cache.filter([1, 3])
    plain.filter(mx.array([1, 3]))
    assert cache.why_float == "key head size 90 has no exact rotation"
    assert cache.offset.tolist() == plain.offset.tolist()
    assert cache.left_padding.tolist() == plain.left_padding.tolist()
    assert mx.array_equal(cache.state[0], plain.state[0])
    assert cache.extract(0).why_float == cache.why_float
    back = BatchTurboQuantKVCache.from_state(cache.state, cache.meta_state)
    assert back.offset.tolist() == plain.offset.tolist()
    assert cache.trim(1) == 1
    assert cache._idx == plain._idx - 1
