"""Kinds of fault that shipped in other caches and passed their tests, on every backend that runs here.

Each test names the kind. The right value is the same work done the plain way on the same backend, or the reference's.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.conformance import host_target, metal_host
from turboquant_vlm.conformance.backend import from_mx
from turboquant_vlm.conformance.compare import compare

BITS = (1, 2, 3, 4, 5, 6, 8)
BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(
        host_target,
        id="metal",
        marks=pytest.mark.skipif(
            not metal_host.available(),
            reason=f"{metal_host.unavailable_reason()}: the Metal kernels were not executed",
        ),
    ),
]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def store(
    backend: Any, role: str, x: mx.array, bits: int = 4, chunks: tuple[int, ...] = (), counts: Any = None
) -> reference.Tokens:
    tokens = backend.empty_tokens(backend.make_codec(x.shape[3], bits), role, x.shape[0], x.shape[1], x.dtype)
    at = 0
    for size in chunks or (x.shape[2],):
        tokens = backend.append(tokens, x[:, :, at : at + size], counts=counts)
        at += size
    return tokens


def same(want: mx.array, got: mx.array) -> None:
    difference = compare("result", from_mx(want), from_mx(got))
    assert difference is None, str(difference)


def same_codes(want: reference.Tokens, got: reference.Tokens) -> None:
    for name, array in want.packed.arrays().items():
        same(array, got.packed.arrays()[name])


def equal_rows(backend: Any, q: mx.array, x: mx.array, lengths: list[int], **arguments: Any) -> None:
    """A left-padded batch against each row alone, on the same backend."""
    longest = x.shape[2]
    pads = [longest - n for n in lengths]
    keys, values = (store(backend, role, x, counts=lengths) for role in ("key", "value"))
    out = backend.attend(q, keys, values, 0.2, left_padding=pads, **arguments)
    for b, n in enumerate(lengths):
        if n == 0:
            assert not bool(mx.any(out[b] != 0))
            continue
        alone = [store(backend, role, x[b : b + 1, :, longest - n :]) for role in ("key", "value")]
        mask = arguments.get("mask")
        if isinstance(mask, mx.array):
            arguments = arguments | {"mask": mask[b : b + 1, ..., pads[b] :]}
        same(backend.attend(q[b : b + 1], *alone, 0.2, **arguments), out[b : b + 1])
        arguments = arguments | {"mask": mask}


@pytest.mark.parametrize("bits", BITS)
def test_codes_do_not_depend_on_how_many_tokens_come_per_call(backend: Any, bits: int) -> None:
    x = normal(2, 1, 168, 80)
    for role in ("key", "value"):
        same_codes(store(backend, role, x, bits), store(backend, role, x, bits, chunks=(1,) * 168))


def test_decode_rotates_as_prefill_does(backend: Any) -> None:
    x = normal(1, 2, 113, 64)
    q = normal(1, 4, 1, 64, seed=1)
    at_once = [store(backend, role, x) for role in ("key", "value")]
    in_two = [store(backend, role, x, chunks=(112, 1)) for role in ("key", "value")]
    same(backend.attend(q, *at_once, 0.1), backend.attend(q, *in_two, 0.1))


@pytest.mark.parametrize("group", [1, 4])
def test_masked_decode_of_one_token(backend: Any, group: int) -> None:
    """L = 1 with an explicit mask over the left padding."""
    x, lengths = normal(2, 1, 140, 64), [140, 101]
    allowed = np.ones((2, 1, 1, 140), bool)
    allowed[1, ..., :39] = False
    for bits in (2, 3, 4):
        keys, values = (store(backend, role, x, bits, counts=lengths) for role in ("key", "value"))
        q = normal(2, group, 1, 64, seed=2)
        want = backend.attend(q, keys, values, 0.2, left_padding=[0, 39])
        same(want, backend.attend(q, keys, values, 0.2, mask=mx.array(allowed), left_padding=[0, 39]))


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (256, 256), (512, 512), (192, 128)])
def test_pairs_of_widths_and_head_sizes(backend: Any, dim: int, value_dim: int) -> None:
    for key_bits, value_bits in ((8, 2), (3, 5), (1, 6)):
        k, v = normal(1, 1, 100, dim), normal(1, 1, 100, value_dim, seed=1)
        q = normal(1, 2, 1, dim, seed=2)
        keys, values = store(backend, "key", k, key_bits), store(backend, "value", v, value_bits)
        got = backend.attend(q, keys, values, dim**-0.5)
        same(reference.attend(q, keys, values, dim**-0.5), got)
        assert got.shape == (1, 2, 1, value_dim)


def test_a_batch_is_its_rows(backend: Any) -> None:
    equal_rows(backend, normal(3, 4, 2, 64, seed=1), normal(3, 2, 168, 64), [168, 168, 168], mask="causal")


def test_strides_dtypes_and_laziness_change_nothing(backend: Any) -> None:
    x = normal(1, 2, 120, 64, dtype=mx.bfloat16)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    q = normal(1, 3, 4, 64, seed=1, dtype=mx.bfloat16)
    want = backend.attend(q.transpose(0, 2, 1, 3), keys, values, 0.1, mask="causal") * 2
    strided = mx.concatenate([q, q], axis=3)[..., :64].transpose(0, 2, 1, 3)
    chained = backend.attend(strided + 0, keys, values, 0.1, mask="causal") * 2
    mx.eval(want, chained)
    assert chained.dtype == mx.bfloat16
    same(want, chained)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_four_axes_over_grouped_heads(backend: Any, kind: str) -> None:
    x = normal(2, 8, 16, 64)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    q = normal(2, 40, 16, 64, seed=1)
    lower = np.tril(np.ones((16, 16), bool))
    if kind == "bool":
        mask = mx.array(np.broadcast_to(lower, (2, 1, 16, 16)).copy())
    else:
        mask = mx.array(np.broadcast_to(np.where(lower, 0, -np.inf), (2, 40, 16, 16)).astype(np.float32))
    same(backend.attend(q, keys, values, 0.1, mask="causal"), backend.attend(q, keys, values, 0.1, mask=mask))


@pytest.mark.parametrize(("lengths", "queries"), [([168, 163, 137], 1), ([168, 163, 137], 4), ([9, 0], 3)])
def test_left_padded_rows(backend: Any, lengths: list[int], queries: int) -> None:
    batch, longest = len(lengths), max(lengths)
    equal_rows(backend, normal(batch, 2, queries, 64, seed=1), normal(batch, 1, longest, 64), lengths, mask="causal")


def test_rows_join_and_leave_a_batch(backend: Any) -> None:
    x = normal(3, 1, 200, 64)
    rows = [store(backend, "key", x[b : b + 1, :, :n]) for b, n in enumerate((200, 100, 3))]
    batch = backend.append(backend.stack_rows(rows), normal(3, 1, 2, 64, seed=5))
    left = backend.append(backend.stack_rows(backend.select_rows(batch)[1:]), normal(2, 1, 95, 64, seed=6))
    for b, n in enumerate((100, 3), start=1):
        alone = backend.append(
            backend.append(store(backend, "key", x[b : b + 1, :, :n]), normal(3, 1, 2, 64, seed=5)[b : b + 1]),
            normal(2, 1, 95, 64, seed=6)[b - 1 : b],
        )
        row = backend.select_rows(left)[b - 1]
        same_codes(alone, row)
        assert row.lengths == alone.lengths


def test_a_row_that_is_all_padding_in_a_chunk(backend: Any) -> None:
    x = normal(2, 1, 3, 64)
    keys, values = (store(backend, role, x, counts=[3, 0]) for role in ("key", "value"))
    out = backend.attend(normal(2, 2, 3, 64, seed=1), keys, values, 0.1, mask="causal", left_padding=[0, 3])
    assert bool(mx.all(mx.isfinite(out)))
    assert not bool(mx.any(out[1] != 0))


@pytest.mark.parametrize("heads", [64, 128])
def test_many_query_heads_of_one_kv_head(backend: Any, heads: int) -> None:
    x = normal(1, 1, 100, 64)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    q = normal(1, heads, 1, 64, seed=1)
    out = backend.attend(q, keys, values, 0.1)
    same(backend.attend(q[:, heads - 3 : heads - 2], keys, values, 0.1), out[:, heads - 3 : heads - 2])


@pytest.mark.parametrize("norm", [0.0, 1e-7, 1e3, 7e4, 1e6])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_norms_of_any_size(backend: Any, norm: float, dtype: mx.Dtype) -> None:
    """Scales neither overflow nor vanish; what float16 cannot hold is infinite before it comes here, and gives NaN."""
    direction = np.random.default_rng(0).standard_normal((1, 1, 96, 64))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    x = mx.array((direction * norm).astype(np.float32)).astype(dtype)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    q = normal(1, 1, 1, 64, dtype=dtype)
    got = backend.attend(q, keys, values, 1e-3)
    same(reference.attend(q, keys, values, 1e-3), got)
    assert bool(mx.all(mx.isfinite(got))) == bool(mx.all(mx.isfinite(x)))


@pytest.mark.parametrize("queries", [1, 5])
def test_sinks_count_once(backend: Any, queries: int) -> None:
    """However many splits there are; -inf is no sink."""
    x = normal(1, 1, 1100, 64)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    q = normal(1, 3, queries, 64, seed=1)
    plain = backend.attend(q, keys, values, 0.2, mask="causal")
    with_sinks = backend.attend(q, keys, values, 0.2, mask="causal", sinks=mx.array([-np.inf, 0.0, 8.0]))
    same(plain[:, :1], with_sinks[:, :1])
    scores = np.array(backend.scores(q, keys, 0.2, mask="causal")).astype(np.float64)
    den = np.where(scores > -(2**31), 2.0 ** (scores / 4096), 0).sum(-1)
    for head, sink in ((1, 0.0), (2, 8.0)):
        ratio = np.array(with_sinks[0, head].astype(mx.float32)) / np.array(plain[0, head].astype(mx.float32))
        expected = den[0, head] / (den[0, head] + np.exp(sink))
        assert np.median(ratio, axis=-1) == pytest.approx(expected, rel=2e-2)


def test_a_window_over_a_long_context(backend: Any) -> None:
    x = normal(1, 1, 1000, 64)
    q = normal(1, 2, 2, 64, seed=1)
    keys, values = (store(backend, role, x) for role in ("key", "value"))
    got = backend.attend(q, keys, values, 0.2, mask="causal", window=128)
    inside = np.zeros((1, 1, 2, 1000), bool)
    for row, position in enumerate((998, 999)):
        inside[..., row, position - 127 : position + 1] = True
    same(backend.attend(q, keys, values, 0.2, mask=mx.array(inside)), got)


def test_rejected_drafts_leave_no_trace(backend: Any) -> None:
    x, draft = normal(2, 1, 158, 64), normal(2, 1, 5, 64, seed=7)
    never = store(backend, "key", x)
    drafted = backend.trim(backend.append(never, draft), (3, 1))
    row = backend.select_rows(drafted)[0]
    alone = backend.append(backend.select_rows(never)[0], draft[:1, :, :2])
    more = normal(1, 1, 70, 64, seed=8)
    same_codes(backend.append(alone, more), backend.append(row, more))
    values = store(backend, "value", x)
    verify = normal(2, 2, 5, 64, seed=9)
    stores = backend.append(never, draft), backend.append(values, draft)
    out = backend.attend(verify, *stores, 0.2, mask="causal")
    other = store(backend, "key", normal(2, 1, 158, 64, seed=10)), store(backend, "value", x)
    changed = backend.attend(verify, *(backend.append(t, draft) for t in other), 0.2, mask="causal")
    assert not mx.array_equal(out, changed), "the verify step must see the prefix"
