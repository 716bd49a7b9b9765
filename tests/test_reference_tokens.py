"""What a cache holds: equal codes and equal attention however tokens arrive, leave and share a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_helpers import (
    PROPERTY,
    SLOW_PROPERTY,
    assert_same_bits,
    assert_same_tokens,
    bits_of,
    cache,
    differs,
    fill,
    float64,
    relative_error,
    vectors,
)

from turboquant_vlm import reference as tq

DIM = 16
# Lengths around every event of a row: the first tokens, the first packed tile, the ring, later tiles.
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 191, 192, 223, 224, 225, 300]


def pieces(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:
    ends = np.cumsum(sizes)
    assert ends[-1] == x.shape[2]
    return [x[:, :, end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def append_all(tokens: tq.Tokens, parts: Sequence[mx.array]) -> tq.Tokens:
    for part in parts:
        tokens = tq.append(tokens, part)
    return tokens


def empty_like(tokens: tq.Tokens) -> tq.Tokens:
    return tq.empty_tokens(tokens.codec, tokens.role, len(tokens.lengths), tokens.first.shape[1], tokens.first.dtype)


def attend_last(keys: tq.Tokens, values: tq.Tokens, queries: int = 1, scale: float = 0.3) -> mx.array:
    q = vectors((len(keys.lengths), 2 * keys.first.shape[1], queries, keys.codec.dim), 77)
    return tq.attend(q, keys, values, scale, mask="causal")


def test_number_of_packed_tiles() -> None:
    """A tile is packed once it has been complete for 32 tokens."""
    for n in range(700):
        assert tq.packed_tiles(n) == sum(64 * (t + 1) + 32 <= n for t in range(20)), n


def test_what_a_row_holds() -> None:
    x = vectors((1, 2, 300, DIM), 0)
    tokens = fill(x, tq.make_codec(DIM, 4), "key")
    assert (tq.TILE, tq.FIRST, tq.LAG, tq.RING) == (64, 4, 32, 128)
    for n in range(1, 301):
        row = tq.trim(tokens, 300 - n) if n >= 300 - 32 else fill(x[:, :, :n], tokens.codec, "key")
        assert row.lengths == (n,)
        assert row.packed.words.shape == (1, 2, tq.packed_tiles(n), 64, 2)
        assert_same_bits(row.first, x[:, :, : min(n, 4)], "first")
        held = row.held[0]
        assert_same_bits(row.recent, x[:, :, n - held : n], "recent")


class TestAnyChunking:
    """Codes must not depend on how many tokens came per call."""

    @SLOW_PROPERTY
    @given(st.data())
    def test_equals_one_call(self, data: st.DataObject) -> None:
        total = data.draw(st.sampled_from(LENGTHS))
        sizes: list[int] = []
        while sum(sizes) < total:
            left = total - sum(sizes)
            sizes.append(data.draw(st.sampled_from([0, 1, 2, 5, 31, 64, 96, 200])) if left > 1 else 1)
            sizes[-1] = min(sizes[-1], left)
        k, v = vectors((1, 2, total, DIM), 1), vectors((1, 2, total, DIM), 2)
        keys, values = cache(k, v)
        ours, theirs = append_all(empty_like(keys), pieces(k, sizes)), append_all(empty_like(values), pieces(v, sizes))
        assert_same_tokens(ours, keys)
        assert_same_tokens(theirs, values)
        assert_same_bits(attend_last(ours, theirs), attend_last(keys, values), "attention")

    @pytest.mark.parametrize("dim", [64, 80, 128, 256])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_three_hundred_single_tokens(self, dim: int, batch: int) -> None:
        """Every width; the single-token path once raced on packed words."""
        x = vectors((batch, 1, 300, dim), dim)
        singles = [x[:, :, t : t + 1] for t in range(300)]
        for bits in tq.ALLOWED_BITS:
            for role in ("key", "value"):
                want = fill(x, tq.make_codec(dim, bits), role)
                got = append_all(empty_like(want), singles)
                assert_same_tokens(got, want)
                # Nothing but the ring depends on the way, and after single tokens that is 128 long.
                assert got.recent.shape[2] == 128

    @pytest.mark.parametrize("role", ["key", "value"])
    def test_prefill_then_one_token(self, role: str) -> None:
        """Decode once rotated with another matrix than prefill."""
        for total in (17, 97, 161):
            x = vectors((2, 2, total, 64), 5)
            codec = tq.make_codec(64, 3)
            split = tq.append(fill(x[:, :, :-1], codec, role), x[:, :, -1:])
            assert_same_tokens(split, fill(x, codec, role))

    def test_attention_on_the_way(self) -> None:
        """Decoding token by token gives the outputs of one causal call over the chunk."""
        total, chunk = 230, 70
        k, v, q = vectors((1, 1, total, DIM), 1), vectors((1, 1, total, DIM), 2), vectors((1, 3, chunk, DIM), 3)
        keys, values = cache(k, v)
        whole = tq.attend(q, keys, values, 0.25, mask="causal")
        keys, values = cache(k[:, :, : total - chunk], v[:, :, : total - chunk])
        for step in range(chunk):
            at = total - chunk + step
            keys, values = tq.append(keys, k[:, :, at : at + 1]), tq.append(values, v[:, :, at : at + 1])
            one = tq.attend(q[:, :, step : step + 1], keys, values, 0.25)
            assert_same_bits(one, whole[:, :, step : step + 1], f"step {step}")

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    def test_dtype_is_the_models(self, dtype: mx.Dtype) -> None:
        x = vectors((1, 1, 130, DIM), 4, dtype)
        tokens = fill(x, tq.make_codec(DIM, 4), "value")
        assert tokens.first.dtype == tokens.recent.dtype == dtype
        assert_same_bits(tokens.recent, x[:, :, -tokens.held[0] :])

    def test_given_factors_stay(self) -> None:
        factors = mx.array((np.arange(2 * DIM) % 7 - 3).astype(np.int8).reshape(2, DIM))
        x = vectors((1, 2, 300, DIM), 1)
        tokens = fill(x, tq.make_codec(DIM, 4), "key", factors=factors)
        assert tokens.packed.factors is not None
        assert_same_bits(tokens.packed.factors[0], factors)
        # They outlive a trim to nothing, unlike those that tile 0 fixed.
        again = tq.append(tq.trim(tokens, 300), x)
        assert_same_tokens(again, tokens)
        assert differs(tokens.packed.words, fill(x, tokens.codec, "key").packed.words)


class TestBatch:
    """A batch is rows of their own length, each as if alone."""

    LENGTHS = (230, 40, 97)

    def rows(self, role: str) -> tuple[tq.Tokens, list[tq.Tokens], mx.array]:
        longest = max(self.LENGTHS)
        x = vectors((3, 2, longest, DIM), 8 if role == "key" else 9)
        codec = tq.make_codec(DIM, 4)
        alone = [fill(x[b : b + 1, :, longest - n :], codec, role) for b, n in enumerate(self.LENGTHS)]
        return fill(x, codec, role, counts=self.LENGTHS), alone, x

    @pytest.mark.parametrize("role", ["key", "value"])
    def test_ragged_rows_equal_solo_runs(self, role: str) -> None:
        batch, alone, _ = self.rows(role)
        assert batch.lengths == self.LENGTHS
        for row, solo in zip(tq.select_rows(batch), alone, strict=True):
            assert_same_tokens(row, solo)

    @pytest.mark.parametrize("queries", [1, 4, 30])
    def test_attention_equals_solo_runs(self, queries: int) -> None:
        keys, solo_keys, _ = self.rows("key")
        values, solo_values, _ = self.rows("value")
        q = vectors((3, 4, queries, DIM), 10)
        together = tq.attend(q, keys, values, 0.3, mask="causal")
        logits = tq.scores(q, keys, 0.3, mask="causal")
        for b in range(3):
            one = tq.attend(q[b : b + 1], solo_keys[b], solo_values[b], 0.3, mask="causal")
            assert_same_bits(together[b : b + 1], one, f"row {b}")
            alone = tq.scores(q[b : b + 1], solo_keys[b], 0.3, mask="causal")
            assert_same_bits(logits[b : b + 1, :, :, : self.LENGTHS[b]], alone, f"scores of row {b}")
            assert (np.array(logits[b, :, :, self.LENGTHS[b] :]) == -(2**31)).all()

    def test_equal_rows_of_a_batch_equal_solo_runs(self) -> None:
        """The batch axis itself, with rows of one length and nothing ragged."""
        k, v, q = vectors((3, 2, 170, DIM), 1), vectors((3, 2, 170, DIM), 2), vectors((3, 2, 5, DIM), 3)
        keys, values = cache(k, v)
        together = tq.attend(q, keys, values, 0.3, mask="causal")
        for b in range(3):
            solo = cache(k[b : b + 1], v[b : b + 1])
            assert_same_bits(together[b : b + 1], tq.attend(q[b : b + 1], *solo, 0.3, mask="causal"), f"row {b}")

    @SLOW_PROPERTY
    @given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 33, 64, 100])] * 3), min_size=1, max_size=6))
    def test_ragged_appends(self, steps: list[tuple[int, ...]]) -> None:
        """Any counts per call, padding on the left of each chunk full of NaN."""
        codec = tq.make_codec(8, 4)
        rng = np.random.default_rng(0)
        batch = tq.empty_tokens(codec, "key", 3, 1, mx.float16)
        real: list[list[np.ndarray]] = [[np.zeros((1, 0, 8), np.float16)] for _ in range(3)]
        for counts in steps:
            width = max(*counts, 1)
            chunk = np.full((3, 1, width, 8), np.nan, np.float16)
            for b, n in enumerate(counts):
                chunk[b, :, width - n :] = rng.standard_normal((1, n, 8))
                real[b].append(chunk[b, :, width - n :])
            batch = tq.append(batch, mx.array(chunk), counts)
        assert batch.lengths == tuple(sum(column) for column in zip(*steps, strict=True))
        for b, row in enumerate(tq.select_rows(batch)):
            solo = fill(mx.array(np.concatenate(real[b], axis=1)[None]), codec, "key")
            assert_same_tokens(row, solo)

    def test_padding_is_never_read(self) -> None:
        """Unused capacity holds NaN patterns; nothing of it may reach an output."""
        keys, solo_keys, _ = self.rows("key")
        values, _, _ = self.rows("value")
        q = vectors((3, 4, 3, DIM), 10)
        want = tq.attend(q, keys, values, 0.3, mask="causal")
        poisoned = [poison_padding(tokens) for tokens in (keys, values)]
        assert any(differs(p.recent, t.recent) for p, t in zip(poisoned, (keys, values), strict=True))
        assert differs(poisoned[1].packed.scales, values.packed.scales)
        assert_same_bits(tq.attend(q, *poisoned, 0.3, mask="causal"), want)
        assert_same_bits(tq.scores(q, poisoned[0], 0.3), tq.scores(q, keys, 0.3))
        assert_same_bits(tq.raw_tokens(poisoned[1]), tq.raw_tokens(values))
        grown = tq.append(poisoned[0], vectors((3, 2, 70, DIM), 11))
        for row, solo in zip(tq.select_rows(grown), solo_keys, strict=True):
            b = self.LENGTHS.index(solo.lengths[0])
            assert_same_tokens(row, tq.append(solo, vectors((3, 2, 70, DIM), 11)[b : b + 1]))

    @pytest.mark.parametrize("lengths", [(10, 7, 3), (100, 97, 93), (170, 100, 20)])
    def test_a_row_leaves(self, lengths: tuple[int, ...]) -> None:
        """After the longest row had left, new tokens once overwrote live ones."""
        longest = lengths[0]
        x = {role: vectors((3, 1, longest, DIM), seed) for role, seed in (("key", 1), ("value", 2))}
        later = {role: vectors((3, 1, 7, DIM), seed) for role, seed in (("key", 3), ("value", 4))}
        codec = tq.make_codec(DIM, 4)
        batch = {role: fill(x[role], codec, role, counts=lengths) for role in x}
        solo = {
            role: [fill(x[role][b : b + 1, :, longest - n :], codec, role) for b, n in enumerate(lengths)] for role in x
        }
        for step in range(7):
            if step == 2:
                batch = {role: tq.stack_rows(tq.select_rows(tokens)[1:]) for role, tokens in batch.items()}
            rows = range(3) if step < 2 else range(1, 3)
            for role in x:
                token = later[role][:, :, step : step + 1]
                batch[role] = tq.append(batch[role], token[rows.start :])
                solo[role] = [tq.append(row, token[b : b + 1]) for b, row in enumerate(solo[role])]
            q = vectors((3, 2, 1, DIM), 20 + step)
            got = tq.attend(q[rows.start :], batch["key"], batch["value"], 0.3)
            for place, b in enumerate(rows):
                want = tq.attend(q[b : b + 1], solo["key"][b], solo["value"][b], 0.3)
                assert_same_bits(got[place : place + 1], want, f"step {step}, row {b}")
        for place, row in enumerate(tq.select_rows(batch["key"])):
            assert_same_tokens(row, solo["key"][place + 1])

    def test_rows_join(self) -> None:
        """Stacking rows of any lengths and taking them apart again changes nothing, also for an empty row."""
        codec = tq.make_codec(DIM, 3)
        rows = [fill(vectors((1, 2, n, DIM), n), codec, "key") for n in (200, 1, 95, 97, 0, 161)]
        batch = tq.stack_rows(rows)
        assert batch.lengths == (200, 1, 95, 97, 0, 161)
        for row, solo in zip(tq.select_rows(batch), rows, strict=True):
            assert_same_tokens(row, solo)
        more = vectors((6, 2, 130, DIM), 50)
        for b, row in enumerate(tq.select_rows(tq.append(batch, more))):
            assert_same_tokens(row, tq.append(rows[b], more[b : b + 1]))


def poison_padding(tokens: tq.Tokens) -> tq.Tokens:
    """NaN patterns and ones in every element that belongs to no row."""
    columns = tokens.recent.shape[2]
    recent = mx.array(np.array(tokens.recent))
    first = mx.array(np.array(tokens.first))
    arrays = {name: mx.array(np.array(a)) for name, a in tokens.packed.arrays().items()}
    for b, (length, held) in enumerate(zip(tokens.lengths, tokens.held, strict=True)):
        recent[b, :, : columns - held] = mx.nan
        first[b, :, min(length, 4) :] = mx.nan
        tiles = tq.packed_tiles(length)
        for name, array in arrays.items():
            if name == "factors":
                if tiles == 0:
                    array[b] = 3
            elif mx.issubdtype(array.dtype, mx.floating):
                array[b, :, tiles:] = mx.nan
            else:
                array[b, :, tiles:] = 2**15 - 1
    return replace(tokens, recent=recent, first=first, packed=tq.Packed(**arrays))


class TestTrim:
    """The last 32 tokens can be taken back and appended again with equal bits."""

    @pytest.mark.parametrize("total", [36, 96, 97, 127, 128, 160, 161, 191, 192, 224, 230])
    def test_every_amount_equals_never_appended(self, total: int) -> None:
        k, v = vectors((1, 1, total, DIM), 1), vectors((1, 1, total, DIM), 2)
        start = max(0, total - 33)
        # A long prefill, then the tokens that are taken back one at a time: the shortest ring there is.
        keys, values = cache(k[:, :, :start], v[:, :, :start])
        stages = [(keys, values)]
        for t in range(start, total):
            keys, values = tq.append(keys, k[:, :, t : t + 1]), tq.append(values, v[:, :, t : t + 1])
            stages.append((keys, values))
        new_k, new_v = vectors((1, 1, 40, DIM), 3), vectors((1, 1, 40, DIM), 4)
        for n in range(1, min(32, total) + 1):
            trimmed = tq.trim(keys, n), tq.trim(values, n)
            never = stages[total - start - n]
            for got, want in zip(trimmed, never, strict=True):
                assert got.lengths == (total - n,)
                assert_same_tokens(got, want)
            if total - n:
                assert_same_bits(attend_last(*trimmed), attend_last(*never), f"trim {n}")
            grown = tq.append(trimmed[0], new_k), tq.append(trimmed[1], new_v)
            other = tq.append(never[0], new_k), tq.append(never[1], new_v)
            assert_same_tokens(grown[0], other[0])
            assert_same_tokens(grown[1], other[1])
            if n in (1, 7, 31, 32):
                assert_same_bits(attend_last(*grown, 5), attend_last(*other, 5), f"trim {n} and go on")

    def test_after_one_long_call(self) -> None:
        x = vectors((1, 1, 230, DIM), 1)
        tokens = fill(x, tq.make_codec(DIM, 4), "key")
        for n in range(1, 103):
            # The chunk of 230 is still in the ring, so even 102 tokens are exact here.
            assert_same_tokens(tq.trim(tokens, n), fill(x[:, :, : 230 - n], tokens.codec, "key"))

    def test_nothing_and_everything(self) -> None:
        x = vectors((2, 1, 170, DIM), 1)
        tokens = fill(x, tq.make_codec(DIM, 4), "key")
        assert_same_tokens(tq.trim(tokens, 0), tokens)
        none = tq.trim(tokens, 170)
        assert none.lengths == (0, 0)
        assert none.packed.factors is None
        # Other tokens fix other factors afterwards.
        loud = x * mx.array((2.0 ** (np.arange(DIM) % 4)).astype(np.float16))
        assert_same_tokens(tq.append(none, loud), fill(loud, tokens.codec, "key"))

    def test_per_row(self) -> None:
        """Speculative decoding: five drafted, three rejected in row 0 and one in row 1, and on."""
        for total in (60, 94, 125, 160):
            k, v = vectors((2, 1, total, DIM), 1), vectors((2, 1, total, DIM), 2)
            draft = [vectors((2, 1, 5, DIM), seed) for seed in (3, 4)]
            after = [vectors((2, 1, 3, DIM), seed) for seed in (5, 6)]
            got = [
                tq.append(tq.trim(tq.append(tokens, d), (3, 1)), a)
                for tokens, d, a in zip(cache(k, v), draft, after, strict=True)
            ]
            assert got[0].lengths == (total + 5, total + 7)
            out = attend_last(got[0], got[1], 3)
            for b, kept in enumerate((2, 4)):
                parts = [
                    mx.concatenate([x[b : b + 1], d[b : b + 1, :, :kept], a[b : b + 1]], axis=2)
                    for x, d, a in zip((k, v), draft, after, strict=True)
                ]
                never = cache(*parts)
                assert_same_tokens(tq.select_rows(got[0])[b], never[0])
                assert_same_tokens(tq.select_rows(got[1])[b], never[1])
                q = vectors((2, 2, 3, DIM), 77)[b : b + 1]
                assert_same_bits(out[b : b + 1], tq.attend(q, *never, 0.3, mask="causal"), f"row {b}")

    def test_verification_attends_to_the_prefix(self) -> None:
        """Drafted tokens once attended to each other only."""
        k, v = vectors((1, 1, 200, DIM), 1), vectors((1, 1, 200, DIM), 2)
        other = mx.concatenate([vectors((1, 1, 195, DIM), 9), v[:, :, 195:]], axis=2)
        assert differs(attend_last(*cache(k, v), 5), attend_last(*cache(k, other), 5))
        other = mx.concatenate([vectors((1, 1, 195, DIM), 9), k[:, :, 195:]], axis=2)
        assert differs(attend_last(*cache(k, v), 5), attend_last(*cache(other, v), 5))

    @SLOW_PROPERTY
    @given(st.integers(1, 240), st.lists(st.tuples(st.integers(1, 33), st.integers(0, 32)), min_size=1, max_size=12))
    def test_repeated_drafts(self, start: int, rounds: list[tuple[int, int]]) -> None:
        """Each round appends some tokens and takes at most those back; the row equals one that never had them."""
        codec = tq.make_codec(8, 4)
        rng = np.random.default_rng(start)
        kept = rng.standard_normal((1, 1, start, 8)).astype(np.float16)
        tokens = fill(mx.array(kept), codec, "key")
        for drafted, rejected in rounds:
            new = rng.standard_normal((1, 1, drafted, 8)).astype(np.float16)
            tokens = tq.trim(tq.append(tokens, mx.array(new)), min(rejected, drafted))
            kept = np.concatenate([kept, new[:, :, : drafted - min(rejected, drafted)]], axis=2)
            assert_same_tokens(tokens, fill(mx.array(kept), codec, "key"))

    @pytest.mark.parametrize("n", [33, 64, 65, 100, 129, 250, 390])
    def test_a_deep_trim_is_right_but_not_exact(self, n: int) -> None:
        """Raw tokens that are gone come back dequantized, so what follows is close, and all kept tiles are equal."""
        total = 400
        k, v = vectors((1, 1, total, 64), 1), vectors((1, 1, total, 64), 2)
        codec = tq.make_codec(64, 6)
        ring = []
        for x, role in ((k, "key"), (v, "value")):
            tokens = fill(x[:, :, :272], codec, role)
            ring.append(append_all(tokens, [x[:, :, t : t + 1] for t in range(272, total)]))
        trimmed = [tq.trim(tokens, n) for tokens in ring]
        want = [fill(x[:, :, : total - n], codec, role) for x, role in ((k, "key"), (v, "value"))]
        for got, never in zip(trimmed, want, strict=True):
            assert got.lengths == never.lengths
            tiles = tq.packed_tiles(total - n)
            assert got.packed.words.shape[2] == tiles
            if tiles:
                for name, array in never.packed.arrays().items():
                    assert_same_bits(getattr(got.packed, name), array, name)
            # Every needed token is there again, and near what it was: 6 bits of a coordinate.
            raw = tq.raw_tokens(got, mx.float32)
            assert relative_error(raw, float64(tq.raw_tokens(never, mx.float32))) < 0.05
        if n in (100, 129, 250):
            # At these depths the ring of 128 cannot hold the reopened tile.
            assert differs(tq.raw_tokens(trimmed[0]), tq.raw_tokens(want[0]))
        more = [vectors((1, 1, 100, 64), seed) for seed in (3, 4)]
        got_out, want_out = (
            attend_last(*[tq.append(t, x) for t, x in zip(tokens, more, strict=True)], scale=0.125)
            for tokens in (trimmed, want)
        )
        assert relative_error(got_out, float64(want_out)) < 0.05

    @pytest.mark.parametrize("n", [-1, 41, (1, 2, 3), (0, 41), (-1, 0)])
    def test_refused(self, n: int | tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="cannot trim"):
            tq.trim(fill(vectors((2, 1, 40, DIM), 0), tq.make_codec(DIM, 4), "key"), n)


class TestImmutable:
    """An object handed out must not change when the cache goes on."""

    def test_append_and_trim_leave_the_old_object_alone(self) -> None:
        tokens = fill(vectors((2, 1, 130, DIM), 0), tq.make_codec(DIM, 4), "key")
        before = {name: bits_of(a) for name, a in tokens.packed.arrays().items()}
        first, recent, lengths, held = bits_of(tokens.first), bits_of(tokens.recent), tokens.lengths, tokens.held
        tq.append(tokens, vectors((2, 1, 300, DIM), 1))
        tq.append(tokens, vectors((2, 1, 3, DIM), 1), counts=(1, 3))
        tq.trim(tokens, (100, 3))
        q = vectors((2, 2, 1, DIM), 2)
        tq.scores(q, tokens, 0.3)
        assert tokens.lengths is lengths
        assert tokens.held is held
        assert lengths == (130, 130)
        assert (bits_of(tokens.first) == first).all()
        assert (bits_of(tokens.recent) == recent).all()
        for name, array in tokens.packed.arrays().items():
            assert (bits_of(array) == before[name]).all()
        with pytest.raises(AttributeError):
            tokens.lengths = (1, 1)  # type: ignore[misc]

    def test_a_chunk_that_changes_afterwards(self) -> None:
        x = vectors((1, 1, 20, DIM), 0)
        want = fill(vectors((1, 1, 20, DIM), 0), tq.make_codec(DIM, 4), "key")
        got = fill(x, tq.make_codec(DIM, 4), "key")
        x[:] = 0
        assert_same_tokens(got, want)


def test_arrays_round_trip_through_a_file(tmp_path: object) -> None:
    """Prefix reuse: save, load, append, attend equals going on without the file."""
    codec = tq.make_codec(DIM, 5)
    lengths = (150, 40)
    both = []
    for role, seed in (("key", 1), ("value", 2)):
        both.append(fill(vectors((2, 2, 150, DIM), seed, mx.bfloat16), codec, role, counts=lengths))
    loaded = []
    for tokens in both:
        path = f"{tmp_path}/{tokens.role}.safetensors"
        packed = {f"packed.{name}": a for name, a in tokens.packed.arrays().items()}
        mx.save_safetensors(path, {"first": tokens.first, "recent": tokens.recent, **packed})
        arrays = mx.load(path)
        loaded.append(
            replace(
                tokens,
                first=arrays["first"],
                recent=arrays["recent"],
                packed=tq.Packed(**{n.removeprefix("packed."): a for n, a in arrays.items() if "packed." in n}),
            )
        )
    more = [vectors((2, 2, 90, DIM), seed, mx.bfloat16) for seed in (3, 4)]
    kept = [tq.append(t, x, (90, 2)) for t, x in zip(both, more, strict=True)]
    reused = [tq.append(t, x, (90, 2)) for t, x in zip(loaded, more, strict=True)]
    for got, want in zip(reused, kept, strict=True):
        assert_same_tokens(got, want)
    assert_same_bits(attend_last(reused[0], reused[1], 2), attend_last(kept[0], kept[1], 2))


class TestRawTokens:
    @pytest.mark.parametrize("total", [3, 90, 95, 96, 250])
    def test_packed_tokens_are_dequantized_and_others_the_models_own(self, total: int) -> None:
        """However many raw tokens the ring still holds: the way they came must not show."""
        x = vectors((1, 2, total, DIM), 0)
        codec = tq.make_codec(DIM, 6)
        tokens = fill(x, codec, "key")
        raw = tq.raw_tokens(tokens)
        singles = append_all(empty_like(tokens), [x[:, :, t : t + 1] for t in range(total)])
        assert_same_bits(tq.raw_tokens(singles), raw)
        tiled = 64 * tq.packed_tiles(total)
        assert raw.shape == (1, 2, total, DIM)
        assert_same_bits(raw[:, :, :4], x[:, :, :4])
        assert_same_bits(raw[:, :, tiled:], x[:, :, tiled:])
        if tiled:
            assert 0 < relative_error(raw[:, :, 4:tiled], float64(x[:, :, 4:tiled])) < 0.05
            want = tq.dequantize(tokens.packed, codec, mx.float16).reshape(1, 2, tiled, DIM)
            assert_same_bits(raw[:, :, 4:tiled], want[:, :, 4:])

    def test_ragged(self) -> None:
        x = vectors((2, 1, 100, DIM), 1)
        raw = tq.raw_tokens(fill(x, tq.make_codec(DIM, 4), "value", counts=(100, 7)), mx.float32)
        assert raw.dtype == mx.float32
        for b, n in enumerate((100, 7)):
            alone = fill(x[b : b + 1, :, 100 - n :], tq.make_codec(DIM, 4), "value")
            assert_same_bits(raw[b : b + 1, :, :n], tq.raw_tokens(alone, mx.float32))
        assert_same_bits(raw[1, :, :7], x[1, :, 93:].astype(mx.float32))
        assert not np.array(raw[1, :, 7:]).any()


class TestMemory:
    def test_nbytes_counts_every_array(self) -> None:
        tokens = fill(vectors((2, 2, 300, 64), 0), tq.make_codec(64, 4, kind="prod"), "key")
        arrays = [tokens.first, tokens.recent, *tokens.packed.arrays().values()]
        assert tokens.nbytes == sum(a.nbytes for a in arrays)
        assert len(tokens.packed.arrays()) == 7

    @pytest.mark.parametrize(("bits", "bytes_per_token"), [(1, 8 + 2), (3, 24 + 2), (4, 32 + 2), (8, 64 + 2)])
    def test_growth_per_token_is_the_packed_part(self, bits: int, bytes_per_token: int) -> None:
        """Values: words and one fp16 scale a token; the raw part is constant."""
        codec = tq.make_codec(64, bits)
        x = vectors((1, 1, 1000, 64), 0)
        sizes = []
        for n in (352, 352 + 640):
            tokens = fill(x[:, :, : n - 200], codec, "value")
            sizes.append(append_all(tokens, [x[:, :, t : t + 1] for t in range(n - 200, n)]).nbytes)
        assert sizes[1] - sizes[0] == 640 * bytes_per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "keys"}, "role must be"),
        ({"role": "value", "kind": "prod"}, 'values need kind="mse"'),
        ({"role": "value", "factors": mx.zeros((2, DIM), mx.int8)}, "factors belong to keys"),
        ({"role": "key", "factors": mx.zeros((3, DIM), mx.int8)}, "factors must be"),
    ],
)
def test_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    codec = tq.make_codec(DIM, 4, kind=arguments.get("kind", "mse"))
    with pytest.raises(ValueError, match=message):
        tq.empty_tokens(codec, arguments["role"], 1, 2, mx.float16, arguments.get("factors"))


@pytest.mark.parametrize(
    ("shape", "counts", "message"),
    [
        ((2, 1, 3, DIM + 1), None, "x must be"),
        ((1, 1, 3, DIM), None, "x must be"),
        ((2, 2, 3, DIM), None, "x must be"),
        ((2, 3, DIM), None, "x must be"),
        ((2, 1, 3, DIM), (3,), "counts must be"),
        ((2, 1, 3, DIM), (3, 4), "counts must be"),
        ((2, 1, 3, DIM), (-1, 3), "counts must be"),
    ],
)
def test_refused_by_append(shape: tuple[int, ...], counts: tuple[int, ...] | None, message: str) -> None:
    tokens = tq.empty_tokens(tq.make_codec(DIM, 4), "key", 2, 1, mx.float16)
    with pytest.raises(ValueError, match=message):
        tq.append(tokens, mx.zeros(shape, mx.float16), counts)


@PROPERTY
@given(st.integers(0, 5000))
def test_tiles_never_shrink_as_a_row_grows(n: int) -> None:
    assert all(0 <= b - a <= 1 for a, b in pairwise(map(tq.packed_tiles, range(n, n + 3))))
