"""The vectors of ragged batches and left padding, of single limits, and of the errors of the API."""

from __future__ import annotations

from typing import Any

import numpy as np

from .build import (
    Group,
    codec,
    integers,
    keys_of,
    literal,
    one_hot,
    steps,
    sum4,
    values_of,
    zeros,
)
from .inputs import Spec
from .search import query_factor_vectors


def _data(
    columns: int, dim: int, seed: int, batch: int = 1, heads: int = 1, dtype: str = "float16", **more: Any
) -> Spec:
    return sum4(seed, batch, heads, columns, dim, dtype=dtype, **more)


def ragged() -> Group:
    g = Group("ragged")

    def run(
        name: str,
        comment: str,
        flags: str,
        plan: list[list[Any]],
        length: int,
        pads: list[int] | None = None,
        mask: Any = None,
        quick: bool = False,
        batch: int = 2,
        heads: int = 1,
        per: int = 2,
        **more: Any,
    ) -> None:
        columns = sum(s[1] for s in plan if s[0] == "append")
        keys = keys_of(4, _data(columns, 8, 1, batch, heads))
        values = values_of(3, _data(columns, 12, 2, batch, heads))
        q = sum4(3, batch, heads * per, length, 8)
        g.attend(
            name,
            comment,
            f"ragged {flags}",
            keys,
            values,
            q,
            steps=plan,
            left_padding=pads,
            mask=mask,
            scores=True,
            arrays=True,
            quick=quick,
            **more,
        )

    run(
        "two-rows",
        "rows on different sides of a tile boundary",
        "tile_boundary",
        [["append", 97, [97, 95]]],
        1,
        quick=True,
    )
    run(
        "three-rows",
        "rows of 1, 100 and 200 tokens",
        "tile_boundary causal",
        [["append", 200, [1, 100, 200]], ["append", 3, None]],
        3,
        mask="causal",
        batch=3,
        quick=True,
    )
    run(
        "empty-row",
        "a row without tokens gives zeros",
        "all_padding",
        [["append", 98, [0, 98]]],
        1,
        quick=True,
    )
    run(
        "padding-chunk",
        "a chunk that is all padding for one row",
        "all_padding chunking causal",
        [["append", 5, [0, 5]], ["append", 3, [0, 3]]],
        3,
        mask="causal",
        quick=True,
    )
    run(
        "padding-later",
        "a row that rests while another goes on: its queries stand at its last positions",
        "chunking causal",
        [["append", 100, None], ["append", 2, [2, 0]]],
        2,
        mask="causal",
        quick=True,
    )
    run(
        "short-rows",
        "rows shorter than the four first tokens",
        "first_tokens causal",
        [["append", 6, [2, 6]], ["append", 2, [1, 2]]],
        2,
        mask="causal",
        quick=True,
    )
    for pads, length in (([0, 5], 1), ([0, 5], 4), ([31, 0], 4), ([9, 0], 1)):
        n = 110
        columns = [n - p for p in pads]
        run(
            f"pads-{pads[0]}-{pads[1]}-{length}",
            "mask columns count the padding on the left",
            "left_padding bool_mask",
            [["append", n, columns]],
            length,
            pads,
            integers(7, 0, 3, 2, 1, length, n, dtype="bool"),
            quick=length == 4,
        )
        run(
            f"pads-{pads[0]}-{pads[1]}-{length}-causal",
            "a causal mask counts positions, not columns",
            "left_padding causal",
            [["append", n, columns]],
            length,
            pads,
            "causal",
        )
    run(
        "pads-additive",
        "additive mask with padding, window and sink",
        "left_padding additive_mask window sink",
        [["append", 110, [110, 90]]],
        2,
        [0, 20],
        sum4(7, 2, 1, 2, 110, dtype="float16", exponent=1),
        window=70,
        sinks=literal([0.5, -1.0]),
        quick=True,
    )
    run(
        "pads-wide",
        "more mask columns than the longest row has tokens",
        "left_padding bool_mask",
        [["append", 100, [100, 80]]],
        1,
        [7, 27],
        integers(7, 0, 1, 2, 1, 1, 107, dtype="bool"),
    )
    run(
        "trim-rows",
        "reject 3 drafts in one row and 1 in the other",
        "trim chunking causal",
        [["append", 97, [97, 94]], ["append", 5, None], ["trim", [3, 1]], ["append", 2, None]],
        2,
        mask="causal",
        quick=True,
    )
    run(
        "heads",
        "three rows, two kv heads, groups of three",
        "gqa causal",
        [["append", 130, [130, 97, 60]], ["append", 4, [4, 2, 4]]],
        4,
        mask="causal",
        batch=3,
        heads=2,
        per=3,
        quick=True,
    )
    run(
        "five-axes",
        "rank-5 mask over a ragged batch with two kv heads",
        "rank5_mask gqa left_padding",
        [["append", 40, [40, 33]]],
        3,
        [0, 7],
        integers(3, 0, 2, 2, 2, 2, 3, 40, dtype="bool"),
        heads=2,
        quick=True,
    )
    run(
        "deep-trim",
        "attend to dequantized stand-ins",
        "deep_trim long",
        [["append", 700, None], *([["append", 1, None]] * 3), ["trim", [500, 300]], ["append", 1, None]],
        1,
    )
    return g


def errors() -> Group:
    g = Group("errors")

    def refused(name: str, comment: str, arguments: dict[str, Any], *mentions: str) -> None:
        g.add(
            name,
            comment,
            "error",
            "error",
            {"call": "make_codec", "arguments": arguments, "mentions": list(mentions)},
            quick=True,
        )

    for dim in (0, 4, 7, 10, 90, 116, 1028, 2048):
        refused(
            f"dim-{dim}",
            "a head size without a Hadamard matrix in the contract",
            {"dim": dim, "bits": 4},
            "dim",
            str(dim),
        )
    for bits in (0, 7, 9, -1):
        refused(f"bits-{bits}", "a width without a codebook", {"dim": 64, "bits": bits}, "bits", str(bits))
    for bits in (1, 7, 8):
        refused(
            f"prod-bits-{bits}",
            "prod needs 2 to 6 bits",
            {"dim": 64, "bits": bits, "kind": "prod"},
            "bits",
            str(bits),
        )
    for seed in (-1, 2**31):
        refused(
            f"seed-{seed}", "seeds are 0 .. 2^31 - 1", {"dim": 64, "bits": 4, "seed": seed}, "seed", str(seed)
        )
    refused("kind", "only mse and prod exist", {"dim": 64, "bits": 4, "kind": "mean"}, "kind", "mean")
    data = zeros(1, 1, 2, 8)
    for scale in (0.0, -1.0, 2.0**-40, 2.0**30):
        inputs = {
            "keys": keys_of(4, data),
            "values": values_of(4, data),
            "steps": steps(2),
            "q": zeros(1, 1, 1, 8),
            "scale": scale,
        }
        for call in ("attend", "scores"):
            g.add(
                f"{call}-scale-{scale:g}",
                "a = scale log2e has to lie in 2^-30 .. 2^20",
                "error",
                "error",
                {"call": call, "arguments": inputs, "mentions": ["scale"]},
                quick=call == "attend",
            )
    return g


def limits() -> Group:
    """The ends of what a scale may be, and other single cases."""
    g = Group("limits")
    data = sum4(1, 1, 1, 97, 8)
    for label, scale in (("low", 2.0**-30 / 1.4426), ("high", 2.0**20 / 1.4427), ("float64", 0.1)):
        g.attend(
            f"scale-{label}",
            "the query factor is one float64 product rounded to float32",
            "rounding_tie",
            keys_of(4, data),
            values_of(4, data),
            sum4(2, 1, 1, 2, 8),
            scale=scale,
            scores=True,
        )
    for scale in (0.1, 80**-0.5, 192**-0.5):
        q = query_factor_vectors(scale)
        g.attend(
            f"factor-{scale:.4g}",
            "queries whose 13 bits change with the last bit of the float32 factor",
            "rounding_tie",
            keys_of(4, one_hot([1, 2, 3, 4, 5, 6, 7], 1, 1, 7, 8, exponent=8)),
            values_of(4, zeros(1, 1, 7, 8)),
            literal(q[None, None]),
            scale=scale,
            scores=True,
            quick=True,
        )
    for dim in (88, 96, 112, 120, 160, 176, 200, 256, 320, 512):
        kv = sum4(dim, 1, 1, 98, dim, dtype="float16")
        g.attend(
            f"head-{dim}",
            "a head size of a known model",
            "odd_dim" if dim % 64 else "tile_boundary",
            keys_of(3, kv, seed=dim),
            values_of(2, kv, seed=dim),
            sum4(dim + 1, 1, 1, 1, dim, dtype="float16"),
        )
    g.add(
        "codec-fields",
        "the largest seed is accepted",
        "seed",
        "quantize",
        {
            "codec": codec(12, 4, 2**31 - 1),
            "x": sum4(1, 2, 12),
            "base": False,
            "factors": None,
            "dequantize": ["float32"],
        },
    )
    flat = np.tile(np.array([0.1, -0.7, 0.3, 1.9, 0, 0, 0.5, -1], np.float32), (300, 1))[None, None]
    g.attend(
        "repeated-token",
        "300 copies of one token: equal logits, one value",
        "equal_logits constant_key",
        keys_of(4, literal(flat, "float16")),
        values_of(4, literal(flat, "float16")),
        sum4(1, 1, 2, 1, 8, dtype="float16"),
        scores=True,
        quick=True,
    )
    return g


GROUPS = (ragged, limits, errors)
