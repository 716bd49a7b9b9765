"""The vectors of what a query may read: several query rows, masks, sinks, windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .build import (
    UNIT_SCALE,
    Group,
    integers,
    keys_of,
    literal,
    sum4,
    values_of,
    zeros,
)
from .inputs import Spec

BITS = (1, 2, 3, 4, 5, 6, 8)
INF = float("inf")


def plain_tokens(
    n: int, dim: int, seed: int, heads: int = 1, batch: int = 1, dtype: str = "float16", **more: Any
) -> Spec:
    """Keys or values of `n` tokens."""
    return sum4(seed, batch, heads, n, dim, dtype=dtype, **more)


def multi_row() -> Group:
    g = Group("multi-row")
    for n, length in (
        (5, 5),
        (40, 3),
        (96, 2),
        (97, 3),
        (130, 100),
        (161, 8),
        (200, 64),
        (224, 33),
        (300, 5),
    ):
        for mask in (None, "causal"):
            g.attend(
                f"{n}-{length}-{mask or 'full'}",
                "each query decides by its own position what it reads packed",
                "tile_boundary chunking" + (" causal" if mask else ""),
                keys_of(3, plain_tokens(n, 8, n)),
                values_of(4, plain_tokens(n, 8, n + 1)),
                sum4(n + 2, 1, 2, length, 8),
                mask=mask,
                scores=length < 9,
                quick=(n, length) in ((97, 3), (161, 8)) and mask == "causal",
            )
    g.attend(
        "rows-equal-single",
        "the last of five queries equals a single query",
        "chunking",
        keys_of(4, plain_tokens(224, 12, 8)),
        values_of(4, plain_tokens(224, 12, 9)),
        sum4(5, 2 - 1, 2, 5, 12, dtype="bfloat16"),
        mask="causal",
    )
    g.attend(
        "both-ways",
        "without a mask early queries read up to 17 tiles raw: every order of merging shows",
        "long split_tree",
        keys_of(4, plain_tokens(1100, 8, 8)),
        values_of(4, plain_tokens(1100, 8, 9)),
        sum4(5, 1, 1, 1050, 8),
        quick=True,
    )
    g.attend(
        "more-queries-than-tokens",
        "queries before position 0 are padding: zeros",
        "all_padding causal",
        keys_of(4, plain_tokens(3, 8, 8)),
        values_of(4, plain_tokens(3, 8, 9)),
        sum4(5, 1, 2, 7, 8),
        mask="causal",
        quick=True,
    )
    return g


def masks() -> Group:
    g = Group("masks")
    batch, heads, per, length, n = 2, 2, 2, 3, 100
    full = (batch, heads * per, length, n)
    kv: dict[str, Any] = {"heads": heads, "batch": batch}
    keys, values = keys_of(4, plain_tokens(n, 8, 1, **kv)), values_of(3, plain_tokens(n, 8, 2, **kv))
    q = sum4(3, batch, heads * per, length, 8, dtype="float16")

    def with_mask(name: str, comment: str, flags: str, mask: Spec, quick: bool = False) -> None:
        g.attend(name, comment, flags, keys, values, q, mask=mask, scores=True, quick=quick)

    shapes: list[tuple[int, ...]] = [
        (),
        (n,),
        (1,),
        (length, n),
        (length, 1),
        (heads * per, length, n),
        (1, length, n),
        (heads * per, 1, n),
        full,
        (batch, 1, length, n),
        (1, 1, 1, n),
        (batch, 1, 1, 1),
    ]
    five = [(batch, heads, per, length, n), (batch, 1, 1, length, n), (1, heads, 1, 1, n), (1, 1, per, 1, 1)]
    for k, shape in enumerate([*shapes, *five]):
        flags = "rank5_mask gqa" if len(shape) == 5 else "low_rank_mask" if len(shape) < 4 else "bool_mask"
        label = "x".join(map(str, shape)) or "scalar"
        with_mask(
            f"bool-{label}",
            "which axes a mask is aligned to",
            f"{flags} bool_mask",
            integers(60 + k, 0, 3, *shape, dtype="bool"),
            quick=len(shape) in (3, 5),
        )
        if k % 2 == 0:
            with_mask(
                f"additive-{label}",
                "an additive mask, aligned alike",
                f"{flags} additive_mask",
                sum4(80 + k, *shape, dtype="float16", exponent=2),
                quick=len(shape) == 5,
            )
    with_mask(
        "scalar-false",
        "nothing is allowed: zeros",
        "all_masked_row low_rank_mask",
        literal(np.zeros((), bool), "bool"),
    )
    tiles = np.ones((length, n), bool)
    tiles[0, :64] = False
    tiles[1, 64:] = False
    tiles[2, 4:] = False
    with_mask(
        "whole-tiles",
        "a tile without an allowed token is the identity",
        "bool_mask tile_boundary first_tokens",
        literal(tiles, "bool"),
        True,
    )
    rows = np.ones((length, n), bool)
    rows[1] = False
    with_mask(
        "empty-row",
        "a query that may attend to nothing gives zeros",
        "all_masked_row",
        literal(rows, "bool"),
        True,
    )
    one = np.zeros((length, n), bool)
    one[0, 70], one[1, 4], one[2, 3] = True, True, True
    with_mask(
        "one-token",
        "a single allowed token: packed, raw, first",
        "bool_mask first_tokens",
        literal(one, "bool"),
    )
    for dtype in ("float16", "bfloat16", "float32"):
        extreme = np.zeros((length, n), np.float32)
        extreme[0, ::3] = -65504
        extreme[0, 1::7] = 65504
        extreme[1, ::2] = -INF
        extreme[2, 5] = 3.0e38 if dtype == "float32" else 60000
        extreme[2, 6] = 2.0**-14
        extreme[2, 7:20] = np.linspace(-1, 1, 13)
        with_mask(
            f"extreme-{dtype}",
            "large finite values, -inf, an overflowing product",
            "additive_mask overflow",
            literal(extreme, dtype),
            dtype == "float32",
        )
    odd = np.zeros((length, n), np.float32)
    odd[0, 8] = np.nan
    odd[1, 9] = INF
    odd[2, 10] = -INF
    with_mask(
        "nan-inf",
        "NaN is poison, +inf is the clamp, -inf forbids",
        "additive_mask non_finite",
        literal(odd),
        True,
    )
    g.attend(
        "nan-not-allowed",
        "NaN where the window forbids does not matter",
        "additive_mask non_finite window",
        keys,
        values,
        q,
        mask=literal(odd),
        window=50,
        scores=False,
        quick=True,
    )
    ties = np.zeros((1, n), np.float32)
    ties[0] = (np.arange(n) - 50) * 2.0**-13
    with_mask(
        "additive-rounding",
        "v log2e 2^12 is rounded once in float32 and once to an integer",
        "additive_mask rounding_tie",
        literal(ties),
    )
    g.attend(
        "additive-clamp",
        "F plus a mask is limited to 2^28 again",
        "additive_mask overflow",
        keys,
        values,
        q,
        scale=1e5,
        mask=literal(np.full((1, n), 4e4)),
        scores=True,
    )
    return g


def sinks() -> Group:
    g = Group("sinks")
    for n in (1, 97, 300, 700):
        for length in (1, 5):
            if length > n:
                continue
            sink = literal([-INF, 0.0, 8.0, -30.0, 3.25, 100.0])
            g.attend(
                f"{n}-{length}",
                "one sink per query head, counted once however many splits there are",
                "sink gqa split_tree",
                keys_of(4, plain_tokens(n, 8, n, heads=2)),
                values_of(4, plain_tokens(n, 8, n + 1, heads=2)),
                sum4(3, 1, 6, length, 8),
                sinks=sink,
                mask="causal",
                quick=n in (97, 300) and length == 1,
            )
    for n, length in ((1100, 1), (1350, 2)):
        g.attend(
            f"{n}-{length}",
            "beyond 1,024 tokens groups of splits are joined later: the sink still counts once",
            "sink gqa split_tree",
            keys_of(4, plain_tokens(n, 8, n, heads=2)),
            values_of(4, plain_tokens(n, 8, n + 1, heads=2)),
            sum4(3, 1, 6, length, 8),
            sinks=literal([-INF, 0.0, 8.0, -30.0, 3.25, 5.0]),
            mask="causal",
        )
    extreme = [1e30, float("inf"), -1e30, 3e38, float("nan"), -INF]
    data = plain_tokens(97, 8, 4)
    g.attend(
        "extreme",
        "overflow and +inf are the clamp, NaN makes NaN, -inf is no sink",
        "sink overflow non_finite",
        keys_of(4, data),
        values_of(4, data),
        sum4(3, 1, 6, 1, 8, dtype="float32"),
        sinks=literal(extreme),
        quick=True,
    )
    for dtype in ("float16", "bfloat16"):
        g.attend(
            f"dtype-{dtype}",
            "sinks are widened to float32 first",
            "sink dtype_cast",
            keys_of(4, data),
            values_of(4, data),
            sum4(3, 1, 4, 1, 8, dtype="float32"),
            sinks=sum4(8, 4, dtype=dtype, exponent=1),
        )
    g.attend(
        "nothing-allowed",
        "a query that may attend to no token gives zeros, sink or not, NaN or not",
        "sink all_masked_row non_finite",
        keys_of(4, data),
        values_of(4, data),
        sum4(3, 1, 2, 1, 8, dtype="float32"),
        sinks=literal([2.0, float("nan")]),
        mask=literal(np.zeros(97, bool), "bool"),
        quick=True,
    )
    g.attend(
        "all-padding",
        "padding queries ignore the sink",
        "sink all_padding",
        keys_of(4, plain_tokens(2, 8, 4)),
        values_of(4, plain_tokens(2, 8, 4)),
        sum4(3, 1, 2, 4, 8, dtype="float32"),
        sinks=literal([2.0, -1.0]),
        mask="causal",
    )
    flat = zeros(1, 1, 70, 8)
    steps_of_sink = [k / 4096 * UNIT_SCALE for k in (0, 1, 4096, 4097, -1, -4096, 13 * 4096, 14 * 4096)]
    g.attend(
        "exponent-steps",
        "the sink's exponent is the ceiling of its own logit",
        "sink boundary_tie equal_logits",
        keys_of(4, flat),
        values_of(4, sum4(1, 1, 1, 70, 8)),
        zeros(1, 8, 1, 8),
        sinks=literal(steps_of_sink),
        quick=True,
    )
    return g


def window() -> Group:
    g = Group("window")
    for w in (1, 2, 31, 32, 64, 65, 95, 96, 128, 200, 1000):
        g.attend(
            f"{w}",
            "i - j < window; the first tokens leave the window like all others",
            "window first_tokens tile_boundary",
            keys_of(4, plain_tokens(230, 8, 1)),
            values_of(3, plain_tokens(230, 8, 2)),
            sum4(3, 1, 2, 3, 8),
            window=w,
            mask="causal",
            quick=w in (65, 200),
        )
    for w, length in ((300, 2), (515, 1), (513, 3)):
        g.attend(
            f"long-{w}-{length}",
            "whole splits lie before the window of all queries, or of some",
            "window split_tree",
            keys_of(4, plain_tokens(1100, 8, 1)),
            values_of(3, plain_tokens(1100, 8, 2)),
            sum4(3, 1, 2, length, 8),
            window=w,
            mask="causal",
        )
    g.attend(
        "no-mask",
        "without a causal mask the future is inside the window",
        "window",
        keys_of(4, plain_tokens(130, 8, 1)),
        values_of(3, plain_tokens(130, 8, 2)),
        sum4(3, 1, 2, 30, 8, dtype="float16"),
        window=5,
        quick=True,
    )
    g.attend(
        "with-mask",
        "window and array mask together; some queries have nothing left",
        "window bool_mask all_masked_row",
        keys_of(4, plain_tokens(130, 8, 1)),
        values_of(3, plain_tokens(130, 8, 2)),
        sum4(3, 1, 2, 30, 8, dtype="float16"),
        window=2,
        mask=integers(4, 0, 1, 30, 130, dtype="bool"),
        quick=True,
    )
    g.attend(
        "with-sink",
        "window and sink",
        "window sink",
        keys_of(4, plain_tokens(1000, 8, 1)),
        values_of(3, plain_tokens(1000, 8, 2)),
        sum4(3, 1, 2, 1, 8),
        window=128,
        mask="causal",
        sinks=literal([1.0, -2.0]),
    )
    return g


GROUPS = (multi_row, masks, sinks, window)
