"""The vectors of section 2: what append and trim leave behind."""

from __future__ import annotations

from typing import Any

from .build import (
    Group,
    add,
    integers,
    put,
    scale_by,
    steps,
    store,
    sum4,
)
from .inputs import Spec


def _data(
    columns: int, dim: int, seed: int, batch: int = 1, heads: int = 1, dtype: str = "float16", **more: Any
) -> Spec:
    return sum4(seed, batch, heads, columns, dim, dtype=dtype, **more)


def tokens() -> Group:
    g = Group("tokens")

    def run(
        name: str,
        comment: str,
        flags: str,
        spec: dict[str, Any],
        plan: list[list[Any]],
        plain: str | None = "float32",
        quick: bool = False,
    ) -> None:
        g.add(name, comment, flags, "tokens", {"store": spec, "steps": plan, "plain": plain}, quick)

    for n in (0, 1, 3, 4, 5, 95, 96, 97, 159, 160, 161):
        for role, bits in (("key", 3), ("value", 5)):
            run(
                f"{role}-{n}",
                "when a tile is packed, and what stays raw",
                "tile_boundary first_tokens",
                store(role, bits, _data(n, 12, n)),
                steps(n) if n else [],
                quick=n in (0, 97),
            )
    n = 230
    data = _data(
        n, 12, 3, heads=2, dtype="bfloat16", edits=[scale_by(6, 0, 0, None, 3), add(5, 0, 1, None, 4)]
    )
    chunkings: dict[str, list[int]] = {
        "whole": [n],
        "prefill-then-ones": [221, *[1] * 9],
        "sevens": [7] * 32 + [6],
        "tiles": [64, 64, 64, 38],
        "before-the-tile": [95, 1, 63, 1, 70],
        "empty-chunks": [0, 100, 0, 130, 0],
    }
    for name, sizes in chunkings.items():
        for role in ("key", "value"):
            run(
                f"chunks-{name}-{role}",
                "the same 230 tokens in other chunks: the same bits",
                "chunking",
                store(role, 4, data),
                steps(*sizes),
                quick=name == "before-the-tile",
            )
    run(
        "ones",
        "two tiles, one token at a time",
        "chunking",
        store("key", 2, _data(163, 8, 9)),
        steps(*[1] * 163),
        quick=True,
    )
    for kind, bits in (("mse", 1), ("mse", 2), ("mse", 6), ("mse", 8), ("prod", 3)):
        for dtype in ("float16", "bfloat16", "float32"):
            run(
                f"{kind}-{bits}-{dtype}",
                "widths and dtypes",
                "prod" if kind == "prod" else "word_spill",
                store("key", bits, _data(99, 20, 7, dtype=dtype), kind=kind),
                steps(99),
                plain=dtype,
            )
    given = integers(3, -3, 3, 1, 2, 12, dtype="int8")
    run(
        "given-factors",
        "given factors from the start, tile 0 does not change them",
        "given_factors",
        store("key", 4, data, factors=given),
        steps(n),
        quick=True,
    )
    run(
        "factors-once",
        "tile 0 fixes the factors for all later tiles",
        "outlier_channel",
        store("key", 4, _data(300, 12, 4, edits=[scale_by(7, 0, 0, [64, 300], 1)])),
        steps(300),
        quick=True,
    )
    run(
        "factors-second-chunk",
        "factors fixed when the second chunk completes tile 0",
        "outlier_channel chunking",
        store("key", 4, _data(200, 12, 4, edits=[scale_by(7, 0, 0, None, 1)])),
        steps(60, 140),
    )

    run(
        "factors-after-trim",
        "tile 0 is trimmed away and packed again from other tokens: measured factors are fixed anew",
        "outlier_channel trim deep_trim",
        store("key", 4, _data(200, 12, 4, edits=[scale_by(7, 0, 0, [100, 200], 2)])),
        [*steps(100), ["trim", 100], ["append", 100, None]],
        quick=True,
    )

    def trimmed(
        name: str,
        comment: str,
        flags: str,
        plan: list[list[Any]],
        columns: int,
        quick: bool = False,
        batch: int = 1,
    ) -> None:
        for role in ("key", "value"):
            run(
                f"{name}-{role}",
                comment,
                flags,
                store(role, 4, _data(columns, 12, 5, batch=batch)),
                plan,
                quick=quick,
            )

    for n, amount in (
        (200, 1),
        (200, 8),
        (200, 9),
        (200, 32),
        (96, 1),
        (160, 32),
        (224, 32),
        (5, 3),
        (4, 4),
        (97, 1),
    ):
        trimmed(
            f"trim-{n}-{amount}",
            "a trim of at most 32 tokens: tiles above are dropped",
            "trim tile_boundary",
            [*steps(n), ["trim", amount]],
            n,
            quick=(n, amount) in ((224, 32), (5, 3)),
        )
    trimmed(
        "trim-refill",
        "other tokens after a trim: the tile is packed from them",
        "trim chunking",
        [*steps(224), ["trim", 32], ["append", 40, None]],
        264,
        True,
    )
    trimmed(
        "trim-steps",
        "draft and reject, again and again",
        "trim chunking",
        [*steps(150), *([["append", 5, None], ["trim", 3]] * 8)],
        190,
        True,
    )
    trimmed(
        "trim-ones",
        "trim after tokens came one by one",
        "trim",
        [*steps(150, *[1] * 20), ["trim", 31], ["append", 31, None]],
        201,
    )
    trimmed("trim-zero", "a trim of nothing", "trim", [*steps(100), ["trim", 0]], 100)
    trimmed(
        "trim-all",
        "down to nothing and on",
        "trim deep_trim",
        [*steps(90), ["trim", 90], ["append", 100, None]],
        190,
    )
    trimmed(
        "trim-rows",
        "each row its own amount",
        "trim ragged",
        [*steps(170), ["trim", [3, 0, 32]], ["append", 5, None]],
        175,
        True,
        batch=3,
    )
    trimmed(
        "trim-exact-deep",
        "deeper than 32, while all raw tokens needed are still held",
        "deep_trim",
        [*steps(120), ["trim", 80], ["append", 90, None]],
        210,
        True,
    )
    far = [*steps(900, *[1] * 8), ["trim", 700]]
    trimmed(
        "trim-far", "raw tokens are gone: dequantized ones take their place", "deep_trim long", far, 908, True
    )
    trimmed(
        "trim-far-refill",
        "tiles packed again from dequantized tokens",
        "deep_trim long",
        [*far, ["append", 70, None]],
        978,
    )
    trimmed(
        "trim-far-first",
        "the first tokens are always raw",
        "deep_trim first_tokens long",
        [*steps(900, *[1] * 8), ["trim", 890]],
        908,
        True,
    )
    trimmed(
        "trim-far-to-two",
        "down to two of the first tokens",
        "deep_trim first_tokens long",
        [*steps(900, *[1] * 8), ["trim", 906], ["append", 3, None]],
        911,
    )
    run(
        "plain-cast",
        "dequantized, then cast: overflow to infinity",
        "dtype_cast overflow",
        store("value", 3, _data(600, 8, 3, dtype="float32", exponent=15)),
        steps(500, *[1] * 100),
        plain="float16",
    )
    run(
        "non-finite",
        "NaN and infinity inside a tile, in the first tokens and in the ring",
        "non_finite",
        store(
            "key",
            4,
            _data(
                170, 12, 3, edits=[put("nan", 0, 0, 2, 0), put("inf", 0, 0, 70, 1), put("nan", 0, 0, 169, 5)]
            ),
        ),
        steps(170),
        quick=True,
    )
    return g


GROUPS = (tokens,)
