"""The vectors of sections 4 and 5: scores, decode, several query rows, masks, sinks, windows, non-finite inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .build import (
    UNIT_SCALE,
    Group,
    add,
    compact,
    integers,
    keys_of,
    literal,
    one_hot,
    one_hot_values,
    patterns,
    put,
    scale_by,
    sum4,
    values_of,
    zeros,
)
from .inputs import Spec, load
from .oracle_numbers import Array

BITS = (1, 2, 3, 4, 5, 6, 8)
INF = float("inf")


def _kv(n: int, dim: int, seed: int, heads: int = 1, batch: int = 1, dtype: str = "float16", **more: Any) -> Spec:
    return sum4(seed, batch, heads, n, dim, dtype=dtype, **more)


def scores() -> Group:
    g = Group("scores")
    for bits in BITS:
        for kind in ("mse", "prod") if 2 <= bits <= 6 else ("mse",):
            keys = keys_of(bits, _kv(100, 12, bits, edits=[scale_by(3, 0, 0, None, 5), add(3, 0, 0, None, 1)]), kind=kind)
            g.attend(
                f"{kind}-{bits}", "a large factor makes every rounding on the way to F visible",
                "first_tokens outlier_channel" + (" prod" if kind == "prod" else "") + (" int8" if bits == 8 else ""),
                keys, values_of(4, zeros(1, 1, 100, 8, dtype="float16")), sum4(50 + bits, 1, 1, 2, 12), scale=20000.0,
                scores=True, quick=bits in (3, 8),
            )
    wide = _kv(97, 1024, 1, dtype="float32")
    g.attend(
        "wide", "D = 1024: the sums of dot14 and of W c exceed 2^24 and are rounded to float32", "rounding_tie",
        keys_of(8, wide), values_of(4, zeros(1, 1, 97, 8)), sum4(2, 1, 1, 1, 1024), scale=100.0, scores=True, quick=True,
    )
    aligned = integers(5, 8000, 8191, 1, 1, 97, 1024)
    g.attend(
        "wide-aligned", "all products of one sign: the largest sums int32 has to hold", "overflow huge_norm",
        keys_of(6, aligned), values_of(4, zeros(1, 1, 97, 8)), integers(6, 8000, 8191, 1, 1, 1, 1024), scale=3e-7, scores=True,
        quick=True,
    )
    for bits in (3, 8):
        g.attend(
            f"wide-visible-{bits}", "logits near 2^27 show all 24 bits of the float32 sums", "rounding_tie",
            keys_of(bits, integers(7, -8191, 8191, 1, 1, 160, 1024)), values_of(4, zeros(1, 1, 160, 8)),
            integers(8, -8191, 8191, 1, 2, 1, 1024), scale=1.5e-5, scores=True, quick=True,
        )
    for power in (-12, 12, 15, 16, 40, 200):
        scale = UNIT_SCALE * 2.0 ** min(power, 18)
        exponent = power - min(power, 18)
        keys = keys_of(4, _kv(98, 8, 3, dtype="float32", exponent=min(exponent, 100)))
        g.attend(
            f"clamp-2^{power}", "each part of F is limited to 2^28, then their sum", "overflow huge_norm" if power > 12 else "tiny_norm",
            keys, values_of(4, zeros(1, 1, 98, 8)), sum4(4, 1, 1, 1, 8, exponent=max(0, exponent - 100)), scale=scale,
            scores=True, quick=power == 16,
        )
    for exponent in (-100, 100):
        g.attend(
            f"exponent-{exponent}", "the exponent given to logit is limited to -100 .. 60", "tiny_norm huge_norm",
            keys_of(3, _kv(97, 8, 8, dtype="float32", exponent=exponent)), values_of(4, zeros(1, 1, 97, 8)),
            sum4(9, 1, 1, 1, 8, exponent=-exponent), scale=2.0**10, scores=True,
        )
    g.attend("zero-query", "all logits are zero", "zero_vector equal_logits", keys_of(4, _kv(100, 12, 5)), values_of(4, _kv(100, 12, 6)), zeros(1, 2, 1, 12, dtype="float16"), scores=True)
    given = integers(4, -3, 3, 1, 2, 20, dtype="int8")
    g.attend("factors", "U takes 2^-f, the code already carries 2^f", "given_factors gqa", keys_of(5, _kv(98, 20, 9, heads=2), factors=given), values_of(2, _kv(98, 8, 7, heads=2)), sum4(1, 1, 4, 1, 20, dtype="float16"), scale=500.0, scores=True, quick=True)
    g.attend("causal-padding", "positions beyond a row, future tokens and padding queries are -2^31", "causal all_padding", keys_of(4, _kv(5, 8, 1)), values_of(4, _kv(5, 8, 2)), sum4(3, 1, 1, 8, 8, dtype="float16"), mask="causal", scores=True)
    for dtype in ("bfloat16", "float32"):
        g.attend(f"patterns-{dtype}", "keys and query of every exponent", "huge_norm tiny_norm", keys_of(4, patterns(21, 1, 1, 100, 16, dtype=dtype)), values_of(4, patterns(22, 1, 1, 100, 16, dtype=dtype)), patterns(23, 1, 2, 3, 16, dtype=dtype), scores=True)
    return g


def decode() -> Group:
    g = Group("decode")
    lengths = (1, 2, 4, 5, 31, 32, 63, 64, 65, 95, 96, 97, 127, 128, 159, 160, 161, 223, 224, 255, 256, 257, 288, 352, 416)
    for n in lengths:
        bits = BITS[n % 7]
        g.attend(
            f"length-{n}", "one query around the lengths where a tile is packed, a tile begins, a split begins",
            "tile_boundary first_tokens split_tree", keys_of(bits, _kv(n, 12, n)), values_of(BITS[(n // 7) % 7], _kv(n, 8, n + 1000)),
            sum4(n + 2000, 1, 2, 1, 12, dtype="float32"), scores=n < 130, arrays=n in (96, 97, 160), quick=n in (5, 95, 96, 97, 160, 288),
        )
    for n in (1023, 1024, 1025, 1026, 1344):
        g.attend(
            f"length-{n}", "16, 17 and 21 tiles: 4, 5 and 6 splits in the tree", "long split_tree tile_boundary",
            keys_of(4, _kv(n, 8, n)), values_of(3, _kv(n, 8, n + 1)), sum4(n + 2, 1, 3, 1, 8, dtype="float32"), quick=n == 1344,
        )
    g.attend("long-flat", "equal logits over 21 tiles: only the values' roundings differ", "long split_tree equal_logits", keys_of(4, _kv(1344, 8, 3)), values_of(8, _kv(1344, 12, 4, dtype="float32", edits=[scale_by(-9, 0, 0, [0, 700], None)])), zeros(1, 1, 1, 8), quick=True)
    g.attend("long-spread", "logits spread over tens of powers of two: den is rounded in the order of the merges", "long split_tree", keys_of(4, _kv(1344, 8, 3, edits=[scale_by(2, 0, 0, [256, 512], None)])), values_of(8, _kv(1344, 8, 4)), sum4(5, 1, 4, 1, 8, exponent=2), scale=1.0, quick=True)
    cancel = np.zeros((98, 8), np.float32)
    cancel[4:64, 2] = np.where(np.arange(60) % 2, 1024.0, -1024.0)
    cancel[64:, 1] = cancel[:4, 3] = 2.0**-45
    g.attend("packed-cancels", "packed values that cancel are the identity, whatever their exponent", "zero_vector equal_logits", keys_of(4, zeros(1, 1, 98, 8)), values_of(8, compact(cancel[None, None])), zeros(1, 1, 1, 8), quick=True)
    for kb in BITS:
        for vb in BITS:
            g.attend(
                f"widths-{kb}-{vb}", "key and value widths in every combination", "mixed_widths" + (" int8" if 8 in (kb, vb) else ""),
                keys_of(kb, _kv(98, 8, 10 * kb + vb, dtype="bfloat16")), values_of(vb, _kv(98, 8, 100 * kb + vb, dtype="bfloat16")),
                sum4(kb + vb, 1, 1, 1, 8), quick=kb == vb == 3,
            )
    for dk, dv in ((192, 128), (128, 192), (64, 80), (12, 100), (576, 512), (8, 256)):
        g.attend(f"dims-{dk}-{dv}", "value heads of another size than key heads", "mixed_dims", keys_of(4, _kv(97, dk, 1)), values_of(2, _kv(97, dv, 2)), sum4(3, 1, 1, 1, dk, dtype="float32"), quick=dk == 12)
    for heads, per in ((1, 8), (2, 4), (3, 2), (1, 128), (2, 64)):
        g.attend(f"gqa-{heads}x{per}", "query head h reads kv head h // group", "gqa", keys_of(4, _kv(97, 8, 1, heads=heads)), values_of(3, _kv(97, 8, 2, heads=heads)), sum4(3, 1, heads * per, 1, 8, dtype="float32"), quick=(heads, per) == (3, 2))
    for bits in range(2, 7):
        g.attend(f"prod-{bits}", "the inner-product codec", "prod", keys_of(bits, _kv(160, 20, bits), kind="prod", seed=4), values_of(4, _kv(160, 12, 9), seed=4), sum4(1, 1, 2, 1, 20, dtype="float32"), quick=bits == 3)
    for dtype in ("float16", "bfloat16", "float32"):
        for q_dtype in ("float16", "bfloat16", "float32"):
            g.attend(f"dtypes-{dtype}-{q_dtype}", "the output has the dtype of the query", "dtype_cast", keys_of(4, _kv(97, 8, 1, dtype=dtype)), values_of(4, _kv(97, 8, 2, dtype=dtype)), sum4(3, 1, 1, 1, 8, dtype=q_dtype))
    for exponent in (-70, -20, 14, 15, 16, 17, 100, 127):
        values = values_of(4, _kv(97, 8, 2, dtype="float32", exponent=exponent))
        for q_dtype in ("float16", "float32"):
            g.attend(f"values-2^{exponent}-{q_dtype}", "outputs that underflow, overflow, or lie on fp16's edge", "dtype_cast overflow huge_norm tiny_norm", keys_of(4, _kv(97, 8, 1, dtype="float32")), values, sum4(3, 1, 1, 1, 8, dtype=q_dtype))
    _hand_made(g)
    return g


def _hand_made(g: Group) -> None:
    """Logits set to chosen integers: with a = 1 and q = 1 in coordinate 0, F is 2^12 times the key's coordinate 0."""
    one = one_hot([0], 1, 1, 1, 8)

    def by_logits(name: str, comment: str, flags: str, f: list[int], values: Array, mask: Any = None, quick: bool = False) -> None:
        keys = compact(one_hot_values([v / 4096 for v in f], 8)[None, None])
        g.attend(name, comment, flags, keys_of(4, keys), values_of(8, compact(values[None, None])), one, scale=UNIT_SCALE, mask=mask, scores=True, quick=quick)

    eye = np.eye(8, dtype=np.float32)
    by_logits("weights-steps", "E is the ceiling of the largest logit; one token one unit of F apart from the next", "equal_logits boundary_tie", [0, 1, 4095, 4096, -1, -4095, -4096, -8192], eye, quick=True)
    by_logits("weights-below", "all logits negative: the ceiling is towards plus infinity", "boundary_tie", [-1, -4095, -4096, -4097, -8191, -8192], eye[:6])
    by_logits("weights-end", "13 and 14 powers of two below the tile's exponent", "boundary_tie", [0, -12 * 4096, -13 * 4096, -13 * 4096 - 1, -14 * 4096 + 1, -14 * 4096, -14 * 4096 - 1, -13 * 4096 + 4095], eye, quick=True)
    for k in range(4):
        f = [0, *(-((i * 73 + k * 911) % 4096) - 4096 * (i % 14) for i in range(1, 40))]
        by_logits(f"weights-tables-{k}", "entries of both tables at many shifts", "rounding_tie", f, np.tile(eye, (5, 1)) * np.linspace(0.1, 3, 40)[:, None], quick=k == 0)
    large = load(integers(4, 7900, 8191, 95, 8))
    by_logits("largest-sums", "weights near 63/64 and values near 2^13: both halves of the raw sum round to float32", "rounding_tie equal_logits", [-93] * 95, large, quick=True)
    n = 200
    hidden = np.ones((1, n), bool)
    hidden[0, 4:192] = False
    # Tile 0's four raw tokens carry coordinate 0, the last tile coordinate 1, so each sum shows the other's shift alone.
    values = np.zeros((n, 8), np.float32)
    values[:4, 0] = 1
    values[192:, 1] = 1
    for gap in (39, 40, 41, 42):
        f = [0] * 4 + [gap * 4096] * (n - 4)
        by_logits(f"shift-{gap}", "a sum more than 40 powers of two below the other is dropped", "first_tokens split_tree", f, values, literal(hidden, "bool"), quick=gap in (40, 41))
    n = 130
    hidden = np.ones((1, n), bool)
    hidden[0, 4:64] = False
    for step in (36, 37, 38, 39, 40):
        small = np.zeros((n, 8), np.float32)
        small[:4] = [2.0**-12, 1, 0, 0, 0, 0, 0, 0]
        small[64:, 1] = 1
        f = [0] * 64 + [step * 4096] * 64 + [2 * step * 4096] * 2
        by_logits(f"flush-{step}", "a merged sum below 2^-64 becomes zero", "first_tokens tiny_norm", f, small, literal(hidden, "bool"), quick=step == 38)
    cancel = np.zeros((96, 8), np.float32)
    cancel[:, 0] = np.where(np.arange(96) % 2, 1.0, -1.0)
    cancel[:, 1] = np.where(np.arange(96) < 64, 1.0, -2.0)
    by_logits("cancel", "sums that cancel to zero inside a tile and between tiles are +0", "zero_vector equal_logits", [0] * 96, cancel, quick=True)
    far = one_hot_values([1.0] * 70, 8, 2)
    far[3] = [2.0**60, 0, 0, 0, 0, 0, 0, 0]
    far[10] = [0, 2.0**-60, 0, 0, 0, 0, 0, 0]
    by_logits("exponents-in-tile", "value exponents far apart inside one tile", "huge_norm tiny_norm", [0] * 70, far)
    far = one_hot_values([1.0] * 70, 8, 2)
    far[5] = [0, 2.0**40, 0, 0, 0, 0, 0, 0]
    by_logits("weight-zero-large-value", "a token of weight zero does not raise the exponent of the values", "huge_norm", [0] * 5 + [-20 * 4096] + [0] * 64, far, quick=True)


def multi_row() -> Group:
    g = Group("multi-row")
    for n, length in ((5, 5), (40, 3), (96, 2), (97, 3), (130, 100), (161, 8), (200, 64), (224, 33), (300, 5)):
        for mask in (None, "causal"):
            g.attend(
                f"{n}-{length}-{mask or 'full'}", "each query decides by its own position what it reads packed", "tile_boundary chunking" + (" causal" if mask else ""),
                keys_of(3, _kv(n, 8, n)), values_of(4, _kv(n, 8, n + 1)), sum4(n + 2, 1, 2, length, 8), mask=mask,
                scores=length < 9, quick=(n, length) in ((97, 3), (161, 8)) and mask == "causal",
            )
    g.attend("rows-equal-single", "the last of five queries equals a single query", "chunking", keys_of(4, _kv(224, 12, 8)), values_of(4, _kv(224, 12, 9)), sum4(5, 2 - 1, 2, 5, 12, dtype="bfloat16"), mask="causal")
    g.attend("both-ways", "without a mask early queries read up to 17 tiles raw: every order of merging shows", "long split_tree", keys_of(4, _kv(1100, 8, 8)), values_of(4, _kv(1100, 8, 9)), sum4(5, 1, 1, 1050, 8), quick=True)
    g.attend("more-queries-than-tokens", "queries before position 0 are padding: zeros", "all_padding causal", keys_of(4, _kv(3, 8, 8)), values_of(4, _kv(3, 8, 9)), sum4(5, 1, 2, 7, 8), mask="causal", quick=True)
    return g


def masks() -> Group:
    g = Group("masks")
    batch, heads, per, length, n = 2, 2, 2, 3, 100
    full = (batch, heads * per, length, n)
    kv = {"heads": heads, "batch": batch}
    keys, values = keys_of(4, _kv(n, 8, 1, **kv)), values_of(3, _kv(n, 8, 2, **kv))
    q = sum4(3, batch, heads * per, length, 8, dtype="float16")

    def with_mask(name: str, comment: str, flags: str, mask: Spec, quick: bool = False) -> None:
        g.attend(name, comment, flags, keys, values, q, mask=mask, scores=True, quick=quick)

    shapes = [(), (n,), (1,), (length, n), (length, 1), (heads * per, length, n), (1, length, n), (heads * per, 1, n), full, (batch, 1, length, n), (1, 1, 1, n), (batch, 1, 1, 1)]
    five = [(batch, heads, per, length, n), (batch, 1, 1, length, n), (1, heads, 1, 1, n), (1, 1, per, 1, 1)]
    for k, shape in enumerate(shapes + five):
        flags = "rank5_mask gqa" if len(shape) == 5 else "low_rank_mask" if len(shape) < 4 else "bool_mask"
        label = "x".join(map(str, shape)) or "scalar"
        with_mask(f"bool-{label}", "which axes a mask is aligned to", f"{flags} bool_mask", integers(60 + k, 0, 3, *shape, dtype="bool"), quick=len(shape) in (3, 5))
        if k % 2 == 0:
            with_mask(f"additive-{label}", "an additive mask, aligned alike", f"{flags} additive_mask", sum4(80 + k, *shape, dtype="float16", exponent=2), quick=len(shape) == 5)
    with_mask("scalar-false", "nothing is allowed: zeros", "all_masked_row low_rank_mask", literal(np.zeros((), bool), "bool"))
    tiles = np.ones((length, n), bool)
    tiles[0, :64] = False
    tiles[1, 64:] = False
    tiles[2, 4:] = False
    with_mask("whole-tiles", "a tile without an allowed token is the identity", "bool_mask tile_boundary first_tokens", literal(tiles, "bool"), True)
    rows = np.ones((length, n), bool)
    rows[1] = False
    with_mask("empty-row", "a query that may attend to nothing gives zeros", "all_masked_row", literal(rows, "bool"), True)
    one = np.zeros((length, n), bool)
    one[0, 70], one[1, 4], one[2, 3] = True, True, True
    with_mask("one-token", "a single allowed token: packed, raw, first", "bool_mask first_tokens", literal(one, "bool"))
    for dtype in ("float16", "bfloat16", "float32"):
        extreme = np.zeros((length, n), np.float32)
        extreme[0, ::3] = -65504
        extreme[0, 1::7] = 65504
        extreme[1, ::2] = -INF
        extreme[2, 5] = 3.0e38 if dtype == "float32" else 60000
        extreme[2, 6] = 2.0**-14
        extreme[2, 7:20] = np.linspace(-1, 1, 13)
        with_mask(f"extreme-{dtype}", "large finite values, -inf, an overflowing product", "additive_mask overflow", literal(extreme, dtype), dtype == "float32")
    odd = np.zeros((length, n), np.float32)
    odd[0, 8] = np.nan
    odd[1, 9] = INF
    odd[2, 10] = -INF
    with_mask("nan-inf", "NaN is poison, +inf is the clamp, -inf forbids", "additive_mask non_finite", literal(odd), True)
    g.attend("nan-not-allowed", "NaN where the window forbids does not matter", "additive_mask non_finite window", keys, values, q, mask=literal(odd), window=50, scores=False, quick=True)
    ties = np.zeros((1, n), np.float32)
    ties[0] = (np.arange(n) - 50) * 2.0**-13
    with_mask("additive-rounding", "v log2e 2^12 is rounded once in float32 and once to an integer", "additive_mask rounding_tie", literal(ties))
    g.attend("additive-clamp", "F plus a mask is limited to 2^28 again", "additive_mask overflow", keys, values, q, scale=1e5, mask=literal(np.full((1, n), 4e4)), scores=True)
    return g


def sinks() -> Group:
    g = Group("sinks")
    for n in (1, 97, 300, 700):
        for length in (1, 5):
            if length > n:
                continue
            sink = literal([-INF, 0.0, 8.0, -30.0, 3.25, 100.0])
            g.attend(
                f"{n}-{length}", "one sink per query head, counted once however many splits there are", "sink gqa split_tree",
                keys_of(4, _kv(n, 8, n, heads=2)), values_of(4, _kv(n, 8, n + 1, heads=2)), sum4(3, 1, 6, length, 8),
                sinks=sink, mask="causal", quick=n in (97, 300) and length == 1,
            )
    extreme = [1e30, float("inf"), -1e30, 3e38, float("nan"), -INF]
    data = _kv(97, 8, 4)
    g.attend("extreme", "overflow and +inf are the clamp, NaN makes NaN, -inf is no sink", "sink overflow non_finite", keys_of(4, data), values_of(4, data), sum4(3, 1, 6, 1, 8, dtype="float32"), sinks=literal(extreme), quick=True)
    for dtype in ("float16", "bfloat16"):
        g.attend(f"dtype-{dtype}", "sinks are widened to float32 first", "sink dtype_cast", keys_of(4, data), values_of(4, data), sum4(3, 1, 4, 1, 8, dtype="float32"), sinks=sum4(8, 4, dtype=dtype, exponent=1))
    g.attend("nothing-allowed", "a query that may attend to no token gives zeros, sink or not, NaN or not", "sink all_masked_row non_finite", keys_of(4, data), values_of(4, data), sum4(3, 1, 2, 1, 8, dtype="float32"), sinks=literal([2.0, float("nan")]), mask=literal(np.zeros(97, bool), "bool"), quick=True)
    g.attend("all-padding", "padding queries ignore the sink", "sink all_padding", keys_of(4, _kv(2, 8, 4)), values_of(4, _kv(2, 8, 4)), sum4(3, 1, 2, 4, 8, dtype="float32"), sinks=literal([2.0, -1.0]), mask="causal")
    flat = zeros(1, 1, 70, 8)
    steps_of_sink = [k / 4096 * UNIT_SCALE for k in (0, 1, 4096, 4097, -1, -4096, 13 * 4096, 14 * 4096)]
    g.attend("exponent-steps", "the sink's exponent is the ceiling of its own logit", "sink boundary_tie equal_logits", keys_of(4, flat), values_of(4, sum4(1, 1, 1, 70, 8)), zeros(1, 8, 1, 8), sinks=literal(steps_of_sink), quick=True)
    return g


def window() -> Group:
    g = Group("window")
    for w in (1, 2, 31, 32, 64, 65, 95, 96, 128, 200, 1000):
        g.attend(
            f"{w}", "i - j < window; the first tokens leave the window like all others", "window first_tokens tile_boundary",
            keys_of(4, _kv(230, 8, 1)), values_of(3, _kv(230, 8, 2)), sum4(3, 1, 2, 3, 8), window=w, mask="causal", quick=w in (65, 200),
        )
    g.attend("no-mask", "without a causal mask the future is inside the window", "window", keys_of(4, _kv(130, 8, 1)), values_of(3, _kv(130, 8, 2)), sum4(3, 1, 2, 30, 8, dtype="float16"), window=5, quick=True)
    g.attend("with-mask", "window and array mask together; some queries have nothing left", "window bool_mask all_masked_row", keys_of(4, _kv(130, 8, 1)), values_of(3, _kv(130, 8, 2)), sum4(3, 1, 2, 30, 8, dtype="float16"), window=2, mask=integers(4, 0, 1, 30, 130, dtype="bool"), quick=True)
    g.attend("with-sink", "window and sink", "window sink", keys_of(4, _kv(1000, 8, 1)), values_of(3, _kv(1000, 8, 2)), sum4(3, 1, 2, 1, 8), window=128, mask="causal", sinks=literal([1.0, -2.0]))
    return g


def non_finite() -> Group:
    g = Group("non-finite")
    n, dim = 100, 8

    def faulty(name: str, comment: str, where: str, edits: list[Any], mask: Any = None, bits: int = 4, kind: str = "mse", quick: bool = False) -> None:
        k = _kv(n, dim, 1, heads=2, edits=edits if where == "key" else None)
        v = _kv(n, dim, 2, heads=2, edits=edits if where == "value" else None)
        q = sum4(3, 1, 4, 2, dim, dtype="float16", edits=edits if where == "query" else None)
        g.attend(name, comment, "non_finite" + (" prod" if kind == "prod" else ""), keys_of(bits, k, kind=kind), values_of(bits, v), q, mask=mask, scores=True, arrays=where == "key" and mask is None and "nan" in name, quick=quick)

    skip = np.ones((1, n), bool)
    for bad in ("nan", "inf", "-inf"):
        for label, j in (("first", 2), ("packed", 20), ("raw", 80)):
            edits = [put(bad, 0, 0, j, 3)]
            faulty(f"key-{label}-{bad}", "poison for the queries of one kv head", "key", edits, quick=bad == "nan")
            faulty(f"value-{label}-{bad}", "NaN for the queries of one kv head; scores stay", "value", edits, quick=bad == "inf")
            hidden = skip.copy()
            hidden[0, j] = False
            faulty(f"key-{label}-{bad}-hidden", "a token that is not allowed cannot poison", "key", edits, literal(hidden, "bool"), quick=bad == "nan")
            faulty(f"value-{label}-{bad}-hidden", "nor can its value", "value", edits, literal(hidden, "bool"), quick=bad == "inf")
        faulty(f"query-{bad}", "a non-finite query gives NaN, the others are untouched", "query", [put(bad, 0, 1, 0, 4)], quick=bad == "inf")
    faulty("prod-key", "poison through the inner-product codec", "key", [put("nan", 0, 1, 33, 0)], kind="prod", quick=True)
    faulty("int8-key", "poison with 8-bit codes", "key", [put("inf", 0, 1, 33, 0)], bits=8)
    hidden = np.zeros((1, n), bool)
    faulty("query-nothing-allowed", "zeros, whatever else holds", "query", [put("nan", 0, 1, 0, 4)], literal(hidden, "bool"), quick=True)
    faulty("causal", "only queries at or after a bad token see it", "key", [put("nan", 0, 0, n - 1, 0)], "causal", quick=True)
    q = sum4(3, 1, 1, 1, dim, exponent=120)
    g.attend("query-overflow", "a query that overflows when scaled is non-finite", "non_finite overflow huge_norm", keys_of(4, _kv(n, dim, 1)), values_of(4, _kv(n, dim, 2)), q, scale=1000.0, scores=True, quick=True)
    all_bad = _kv(n, dim, 1, edits=[put("nan", 0, 0, None, 0)])
    g.attend("all-keys", "every key of every tile is non-finite", "non_finite", keys_of(4, all_bad), values_of(4, _kv(n, dim, 2)), sum4(3, 1, 1, 1, dim), scores=True, arrays=True)
    return g


GROUPS = (scores, decode, multi_row, masks, sinks, window, non_finite)
