"""The query's side of a score: snapped once, rotated once, and the fixed-point logit (docs/numerics.md, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .integers import pow2, snap
from .rotation import rotate
from .types import Tokens

LOG2_E = math.log2(math.e)
LIMIT = 2**28


@dataclass(frozen=True)
class Query:
    """Queries [Hk, M, D] of one row, ready for raw and for packed keys.

    plain: int32 [Hk, M, D], q scale log2 e in units of 2^(exponent - 13); exponent int32, finite bool [Hk, M, 1].
    rotated: int32 [Hk, M, D], at most 12 bits, for codes; rotated_exponent [Hk, M, 1] is all that belongs into `logit`.
    twice, twice_exponent: the same for the sign code of `prod`, rotated a second time.
    """

    plain: mx.array
    exponent: mx.array
    finite: mx.array
    rotated: mx.array
    rotated_exponent: mx.array
    twice: mx.array
    twice_exponent: mx.array


def query_factor(scale: float) -> float:
    """What a query is multiplied by, so that its scores are base-2 logarithms: a float32 number (section 4)."""
    return float(np.float32(scale * LOG2_E))


def prepare_query(q: mx.array, scale: float, keys: Tokens) -> Query:
    """q [Hk, M, D] of any floating dtype, for the keys of one row.

    The same rounded query meets raw keys, key bases and (divided by the channel factors) packed codes, so that a large
    part common to all keys cancels.
    """
    codec = keys.codec
    plain, exponent, finite = snap(q.astype(mx.float32) * query_factor(scale))
    divided = plain.astype(mx.float32)
    if keys.packed.factors is not None:
        divided = divided * pow2(-keys.packed.factors[0].astype(mx.int32))[:, None]
    u, g, _ = snap(divided)
    v = rotate(u, codec.seed)
    rotated, h, _ = snap(v, 12)
    twice, twice_exponent = rotated, exponent
    if codec.kind == "prod":
        u2, g2, _ = snap(v)
        twice, h2, _ = snap(rotate(u2, codec.seed, stream=1), 12)
        twice_exponent = exponent + g + g2 + h2 - 39 - codec.sign_scale_shift
    return Query(
        plain=plain,
        exponent=exponent,
        finite=finite,
        rotated=rotated,
        rotated_exponent=exponent + g + h - 26 - codec.scale_shift,
        twice=twice,
        twice_exponent=twice_exponent,
    )


def logit(y: mx.array, exponent: mx.array) -> mx.array:
    """int32 rint(y 2^exponent) within +-2^28; y float32, exponent int32 and limited to -100 .. 60."""
    return clamp28(mx.round(y * pow2(mx.clip(exponent, -100, 60))))


def clamp28(x: mx.array) -> mx.array:
    """Limit to +-2^28, as int32."""
    return mx.clip(x, -LIMIT, LIMIT).astype(mx.int32)
