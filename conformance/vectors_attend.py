"""The vectors of sections 4 and 5 for plain queries: scores and decode."""

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
    scale_by,
    sum4,
    values_of,
    zeros,
)
from .inputs import Spec
from .oracle_numbers import Array

BITS = (1, 2, 3, 4, 5, 6, 8)
INF = float("inf")


def _kv(
    n: int, dim: int, seed: int, heads: int = 1, batch: int = 1, dtype: str = "float16", **more: Any
) -> Spec:
    return sum4(seed, batch, heads, n, dim, dtype=dtype, **more)


def scores() -> Group:
    g = Group("scores")
    for bits in BITS:
        for kind in ("mse", "prod") if 2 <= bits <= 6 else ("mse",):
            keys = keys_of(
                bits, _kv(100, 12, bits, edits=[scale_by(3, 0, 0, None, 5), add(3, 0, 0, None, 1)]), kind=kind
            )
            g.attend(
                f"{kind}-{bits}",
                "a large factor makes every rounding on the way to F visible",
                "first_tokens outlier_channel"
                + (" prod" if kind == "prod" else "")
                + (" int8" if bits == 8 else ""),
                keys,
                values_of(4, zeros(1, 1, 100, 8, dtype="float16")),
                sum4(50 + bits, 1, 1, 2, 12),
                scale=20000.0,
                scores=True,
                quick=bits in (3, 8),
            )
    wide = _kv(97, 1024, 1, dtype="float32")
    g.attend(
        "wide",
        "D = 1024: the sums of dot14 and of W c exceed 2^24 and are rounded to float32",
        "rounding_tie",
        keys_of(8, wide),
        values_of(4, zeros(1, 1, 97, 8)),
        sum4(2, 1, 1, 1, 1024),
        scale=100.0,
        scores=True,
        quick=True,
    )
    aligned = integers(5, 8000, 8191, 1, 1, 97, 1024)
    g.attend(
        "wide-aligned",
        "all products of one sign: the largest sums int32 has to hold",
        "overflow huge_norm",
        keys_of(6, aligned),
        values_of(4, zeros(1, 1, 97, 8)),
        integers(6, 8000, 8191, 1, 1, 1, 1024),
        scale=3e-7,
        scores=True,
        quick=True,
    )
    for bits in (3, 8):
        g.attend(
            f"wide-visible-{bits}",
            "logits near 2^27 show all 24 bits of the float32 sums",
            "rounding_tie",
            keys_of(bits, integers(7, -8191, 8191, 1, 1, 160, 1024)),
            values_of(4, zeros(1, 1, 160, 8)),
            integers(8, -8191, 8191, 1, 2, 1, 1024),
            scale=1.5e-5,
            scores=True,
            quick=True,
        )
    for power in (-12, 12, 15, 16, 40, 200):
        scale = UNIT_SCALE * 2.0 ** min(power, 18)
        exponent = power - min(power, 18)
        keys = keys_of(4, _kv(98, 8, 3, dtype="float32", exponent=min(exponent, 100)))
        g.attend(
            f"clamp-2^{power}",
            "each part of F is limited to 2^28, then their sum",
            "overflow huge_norm" if power > 12 else "tiny_norm",
            keys,
            values_of(4, zeros(1, 1, 98, 8)),
            sum4(4, 1, 1, 1, 8, exponent=max(0, exponent - 100)),
            scale=scale,
            scores=True,
            quick=power == 16,
        )
    for exponent in (-100, 100):
        g.attend(
            f"exponent-{exponent}",
            "the exponent given to logit is limited to -100 .. 60",
            "tiny_norm huge_norm",
            keys_of(3, _kv(97, 8, 8, dtype="float32", exponent=exponent)),
            values_of(4, zeros(1, 1, 97, 8)),
            sum4(9, 1, 1, 1, 8, exponent=-exponent),
            scale=2.0**10,
            scores=True,
        )
    g.attend(
        "zero-query",
        "all logits are zero",
        "zero_vector equal_logits",
        keys_of(4, _kv(100, 12, 5)),
        values_of(4, _kv(100, 12, 6)),
        zeros(1, 2, 1, 12, dtype="float16"),
        scores=True,
    )
    given = integers(4, -3, 3, 1, 2, 20, dtype="int8")
    g.attend(
        "factors",
        "U takes 2^-f, the code already carries 2^f",
        "given_factors gqa",
        keys_of(5, _kv(98, 20, 9, heads=2), factors=given),
        values_of(2, _kv(98, 8, 7, heads=2)),
        sum4(1, 1, 4, 1, 20, dtype="float16"),
        scale=500.0,
        scores=True,
        quick=True,
    )
    g.attend(
        "causal-padding",
        "positions beyond a row, future tokens and padding queries are -2^31",
        "causal all_padding",
        keys_of(4, _kv(5, 8, 1)),
        values_of(4, _kv(5, 8, 2)),
        sum4(3, 1, 1, 8, 8, dtype="float16"),
        mask="causal",
        scores=True,
    )
    for dtype in ("bfloat16", "float32"):
        g.attend(
            f"patterns-{dtype}",
            "keys and query of every exponent",
            "huge_norm tiny_norm",
            keys_of(4, patterns(21, 1, 1, 100, 16, dtype=dtype)),
            values_of(4, patterns(22, 1, 1, 100, 16, dtype=dtype)),
            patterns(23, 1, 2, 3, 16, dtype=dtype),
            scores=True,
        )
    return g


def decode() -> Group:
    g = Group("decode")
    lengths = (
        1,
        2,
        4,
        5,
        31,
        32,
        63,
        64,
        65,
        95,
        96,
        97,
        127,
        128,
        159,
        160,
        161,
        223,
        224,
        255,
        256,
        257,
        288,
        352,
        416,
    )
    for n in lengths:
        bits = BITS[n % 7]
        g.attend(
            f"length-{n}",
            "one query around the lengths where a tile is packed, a tile begins, a split begins",
            "tile_boundary first_tokens split_tree" + (" tail_tile" if n % 64 else ""),
            keys_of(bits, _kv(n, 12, n)),
            values_of(BITS[(n // 7) % 7], _kv(n, 8, n + 1000)),
            sum4(n + 2000, 1, 2, 1, 12, dtype="float32"),
            scores=n < 130,
            arrays=n in (96, 97, 160),
            quick=n in (5, 95, 96, 97, 160, 288),
        )
    for n in (1023, 1024, 1025, 1026, 1344):
        g.attend(
            f"length-{n}",
            "16, 17 and 21 tiles: 4, 5 and 6 splits in the tree",
            "long split_tree tile_boundary",
            keys_of(4, _kv(n, 8, n)),
            values_of(3, _kv(n, 8, n + 1)),
            sum4(n + 2, 1, 3, 1, 8, dtype="float32"),
            quick=n == 1344,
        )
    g.attend(
        "long-flat",
        "equal logits over 21 tiles: only the values' roundings differ",
        "long split_tree equal_logits",
        keys_of(4, _kv(1344, 8, 3)),
        values_of(8, _kv(1344, 12, 4, dtype="float32", edits=[scale_by(-9, 0, 0, [0, 700], None)])),
        zeros(1, 1, 1, 8),
        quick=True,
    )
    g.attend(
        "long-spread",
        "logits spread over tens of powers of two: den is rounded in the order of the merges",
        "long split_tree",
        keys_of(4, _kv(1344, 8, 3, edits=[scale_by(2, 0, 0, [256, 512], None)])),
        values_of(8, _kv(1344, 8, 4)),
        sum4(5, 1, 4, 1, 8, exponent=2),
        scale=1.0,
        quick=True,
    )
    cancel = np.zeros((98, 8), np.float32)
    cancel[4:64, 2] = np.where(np.arange(60) % 2, 1024.0, -1024.0)
    cancel[64:, 1] = cancel[:4, 3] = 2.0**-45
    g.attend(
        "packed-cancels",
        "packed values that cancel are the identity, whatever their exponent",
        "zero_vector equal_logits",
        keys_of(4, zeros(1, 1, 98, 8)),
        values_of(8, compact(cancel[None, None])),
        zeros(1, 1, 1, 8),
        quick=True,
    )
    for kb in BITS:
        for vb in BITS:
            g.attend(
                f"widths-{kb}-{vb}",
                "key and value widths in every combination",
                "mixed_widths" + (" int8" if 8 in (kb, vb) else ""),
                keys_of(kb, _kv(98, 8, 10 * kb + vb, dtype="bfloat16")),
                values_of(vb, _kv(98, 8, 100 * kb + vb, dtype="bfloat16")),
                sum4(kb + vb, 1, 1, 1, 8),
                quick=kb == vb == 3,
            )
    for dk, dv in ((192, 128), (128, 192), (64, 80), (12, 100), (576, 512), (8, 256)):
        g.attend(
            f"dims-{dk}-{dv}",
            "value heads of another size than key heads",
            "mixed_dims",
            keys_of(4, _kv(97, dk, 1)),
            values_of(2, _kv(97, dv, 2)),
            sum4(3, 1, 1, 1, dk, dtype="float32"),
            quick=dk == 12,
        )
    for heads, per in ((1, 8), (2, 4), (3, 2), (1, 128), (2, 64)):
        g.attend(
            f"gqa-{heads}x{per}",
            "query head h reads kv head h // group",
            "gqa",
            keys_of(4, _kv(97, 8, 1, heads=heads)),
            values_of(3, _kv(97, 8, 2, heads=heads)),
            sum4(3, 1, heads * per, 1, 8, dtype="float32"),
            quick=(heads, per) == (3, 2),
        )
    for bits in range(2, 7):
        g.attend(
            f"prod-{bits}",
            "the inner-product codec",
            "prod",
            keys_of(bits, _kv(160, 20, bits), kind="prod", seed=4),
            values_of(4, _kv(160, 12, 9), seed=4),
            sum4(1, 1, 2, 1, 20, dtype="float32"),
            quick=bits == 3,
        )
    for dtype in ("float16", "bfloat16", "float32"):
        for q_dtype in ("float16", "bfloat16", "float32"):
            g.attend(
                f"dtypes-{dtype}-{q_dtype}",
                "the output has the dtype of the query",
                "dtype_cast",
                keys_of(4, _kv(97, 8, 1, dtype=dtype)),
                values_of(4, _kv(97, 8, 2, dtype=dtype)),
                sum4(3, 1, 1, 1, 8, dtype=q_dtype),
            )
    for exponent in (-70, -20, 14, 15, 16, 17, 100, 127):
        values = values_of(4, _kv(97, 8, 2, dtype="float32", exponent=exponent))
        for q_dtype in ("float16", "float32"):
            g.attend(
                f"values-2^{exponent}-{q_dtype}",
                "outputs that underflow, overflow, or lie on fp16's edge",
                "dtype_cast overflow huge_norm tiny_norm",
                keys_of(4, _kv(97, 8, 1, dtype="float32")),
                values,
                sum4(3, 1, 1, 1, 8, dtype=q_dtype),
            )
    _hand_made(g)
    return g


def _hand_made(g: Group) -> None:
    """Logits set by hand: with a = 1 and q one-hot at 0, F is 2^12 times the key's coordinate 0."""
    one = one_hot([0], 1, 1, 1, 8)

    def by_logits(
        name: str,
        comment: str,
        flags: str,
        f: list[int],
        values: Array | Spec,
        mask: Any = None,
        quick: bool = False,
    ) -> None:
        data = values if isinstance(values, dict) else compact(values[None, None])
        keys = compact(one_hot_values([v / 4096 for v in f], 8)[None, None])
        g.attend(
            name,
            comment,
            flags,
            keys_of(4, keys),
            values_of(8, data),
            one,
            scale=UNIT_SCALE,
            mask=mask,
            scores=True,
            quick=quick,
        )

    eye = np.eye(8, dtype=np.float32)
    by_logits(
        "weights-steps",
        "E is the ceiling of the largest logit; one token one unit of F apart from the next",
        "equal_logits boundary_tie",
        [0, 1, 4095, 4096, -1, -4095, -4096, -8192],
        eye,
        quick=True,
    )
    by_logits(
        "weights-below",
        "all logits negative: the ceiling is towards plus infinity",
        "boundary_tie",
        [-1, -4095, -4096, -4097, -8191, -8192],
        eye[:6],
    )
    by_logits(
        "weights-end",
        "13 and 14 powers of two below the tile's exponent",
        "boundary_tie",
        [
            0,
            -12 * 4096,
            -13 * 4096,
            -13 * 4096 - 1,
            -14 * 4096 + 1,
            -14 * 4096,
            -14 * 4096 - 1,
            -13 * 4096 + 4095,
        ],
        eye,
        quick=True,
    )
    for k in range(4):
        f = [0, *(-((i * 73 + k * 911) % 4096) - 4096 * (i % 14) for i in range(1, 40))]
        by_logits(
            f"weights-tables-{k}",
            "entries of both tables at many shifts",
            "rounding_tie",
            f,
            np.tile(eye, (5, 1)) * np.linspace(0.1, 3, 40)[:, None],
            quick=k == 0,
        )
    large = integers(4, 7900, 8191, 1, 1, 95, 64)
    by_logits(
        "largest-sums",
        "weights near 63/64 and values near 2^13: both halves of the raw sum round to float32",
        "rounding_tie",
        [-93 - i % 20 for i in range(95)],
        large,
        quick=True,
    )
    n = 200
    hidden = np.ones((1, n), bool)
    hidden[0, 4:192] = False
    # Tile 0's four raw tokens carry coordinate 0, the last tile coordinate 1, so each sum shows the other's
    # shift alone.
    values = np.zeros((n, 8), np.float32)
    values[:4, 0] = 1
    values[192:, 1] = 1
    for gap in (39, 40, 41, 42):
        f = [0] * 4 + [gap * 4096] * (n - 4)
        by_logits(
            f"shift-{gap}",
            "a sum more than 40 powers of two below the other is dropped",
            "first_tokens split_tree",
            f,
            values,
            literal(hidden, "bool"),
            quick=gap in (40, 41),
        )
    n = 130
    hidden = np.ones((1, n), bool)
    hidden[0, 4:64] = False
    for step in (36, 37, 38, 39, 40):
        small = np.zeros((n, 8), np.float32)
        small[:4] = [2.0**-12, 1, 0, 0, 0, 0, 0, 0]
        small[64:, 1] = 1
        f = [0] * 64 + [step * 4096] * 64 + [2 * step * 4096] * 2
        by_logits(
            f"flush-{step}",
            "a merged sum below 2^-64 becomes zero",
            "first_tokens tiny_norm",
            f,
            small,
            literal(hidden, "bool"),
            quick=step == 38,
        )
    cancel = np.zeros((96, 8), np.float32)
    cancel[:, 0] = np.where(np.arange(96) % 2, 1.0, -1.0)
    cancel[:, 1] = np.where(np.arange(96) < 64, 1.0, -2.0)
    by_logits(
        "cancel",
        "sums that cancel to zero inside a tile and between tiles are +0",
        "zero_vector equal_logits",
        [0] * 96,
        cancel,
        quick=True,
    )
    far = one_hot_values([1.0] * 70, 8, 2)
    far[3] = [2.0**60, 0, 0, 0, 0, 0, 0, 0]
    far[10] = [0, 2.0**-60, 0, 0, 0, 0, 0, 0]
    by_logits(
        "exponents-in-tile", "value exponents far apart inside one tile", "huge_norm tiny_norm", [0] * 70, far
    )
    far = one_hot_values([1.0] * 70, 8, 2)
    far[5] = [0, 2.0**40, 0, 0, 0, 0, 0, 0]
    by_logits(
        "weight-zero-large-value",
        "a token of weight zero does not raise the exponent of the values",
        "huge_norm",
        [0] * 5 + [-20 * 4096] + [0] * 64,
        far,
        quick=True,
    )


GROUPS = (scores, decode)
