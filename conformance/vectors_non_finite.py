"""The vectors of NaN and infinity: what they reach, and what they do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from .build import Group, keys_of, literal, put, sum4, values_of
from .vectors_masks import plain_tokens

_ROLES = (("key", 1), ("value", 2))


def non_finite() -> Group:
    g = Group("non-finite")
    n, dim = 100, 8

    def faulty(
        name: str,
        comment: str,
        where: str,
        edits: list[Any],
        mask: Any = None,
        bits: int = 4,
        kind: str = "mse",
        quick: bool = False,
    ) -> None:
        k = plain_tokens(n, dim, 1, heads=2, edits=edits if where == "key" else None)
        v = plain_tokens(n, dim, 2, heads=2, edits=edits if where == "value" else None)
        q = sum4(3, 1, 4, 2, dim, dtype="float16", edits=edits if where == "query" else None)
        g.attend(
            name,
            comment,
            "non_finite" + (" prod" if kind == "prod" else ""),
            keys_of(bits, k, kind=kind),
            values_of(bits, v),
            q,
            mask=mask,
            scores=True,
            arrays=where == "key" and mask is None and "nan" in name,
            quick=quick,
        )

    skip = np.ones((1, n), bool)
    for bad in ("nan", "inf", "-inf"):
        for label, j in (("first", 2), ("packed", 20), ("raw", 80)):
            edits = [put(bad, 0, 0, j, 3)]
            faulty(
                f"key-{label}-{bad}",
                "poison for the queries of one kv head",
                "key",
                edits,
                quick=bad == "nan",
            )
            faulty(
                f"value-{label}-{bad}",
                "NaN for the queries of one kv head; scores stay",
                "value",
                edits,
                quick=bad == "inf",
            )
            hidden = skip.copy()
            hidden[0, j] = False
            faulty(
                f"key-{label}-{bad}-hidden",
                "a token that is not allowed cannot poison",
                "key",
                edits,
                literal(hidden, "bool"),
                quick=bad == "nan",
            )
            faulty(
                f"value-{label}-{bad}-hidden",
                "nor can its value",
                "value",
                edits,
                literal(hidden, "bool"),
                quick=bad == "inf",
            )
        faulty(
            f"query-{bad}",
            "a non-finite query gives NaN, the others are untouched",
            "query",
            [put(bad, 0, 1, 0, 4)],
            quick=bad == "inf",
        )
    faulty(
        "prod-key",
        "poison through the inner-product codec",
        "key",
        [put("nan", 0, 1, 33, 0)],
        kind="prod",
        quick=True,
    )
    for where in ("key", "value"):
        edits = [put("nan", 0, 0, 600, 3)]
        long = [plain_tokens(1100, dim, seed, heads=2, edits=edits if where == role else None) for role, seed in _ROLES]
        g.attend(
            f"{where}-early-split",
            "met in a split long before the last one",
            "non_finite split_tree",
            keys_of(4, long[0]),
            values_of(4, long[1]),
            sum4(3, 1, 4, 1, dim, dtype="float16"),
        )
    faulty("int8-key", "poison with 8-bit codes", "key", [put("inf", 0, 1, 33, 0)], bits=8)
    hidden = np.zeros((1, n), bool)
    faulty(
        "query-nothing-allowed",
        "zeros, whatever else holds",
        "query",
        [put("nan", 0, 1, 0, 4)],
        literal(hidden, "bool"),
        quick=True,
    )
    faulty(
        "causal",
        "only queries at or after a bad token see it",
        "key",
        [put("nan", 0, 0, n - 1, 0)],
        "causal",
        quick=True,
    )
    q = sum4(3, 1, 1, 1, dim, exponent=120)
    g.attend(
        "query-overflow",
        "a query that overflows when scaled is non-finite",
        "non_finite overflow huge_norm",
        keys_of(4, plain_tokens(n, dim, 1)),
        values_of(4, plain_tokens(n, dim, 2)),
        q,
        scale=1000.0,
        scores=True,
        quick=True,
    )
    all_bad = plain_tokens(n, dim, 1, edits=[put("nan", 0, 0, None, 0)])
    g.attend(
        "all-keys",
        "every key of every tile is non-finite",
        "non_finite",
        keys_of(4, all_bad),
        values_of(4, plain_tokens(n, dim, 2)),
        sum4(3, 1, 1, 1, dim),
        scores=True,
        arrays=True,
    )
    return g


GROUPS = (non_finite,)
