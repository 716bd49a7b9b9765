"""Bit widths: which are allowed, and what a fractional ``kv_bits`` means.

A fractional width is shorthand for two integer widths: 3.5 is 4-bit keys and 3-bit values, 2.5 is 3-bit keys and
2-bit values. mlx-vlm gives the extra bit to the values. Keys decide which tokens are attended to, and with the extra
bit on the keys the next-token distribution stays two to three times closer (KL) to the float cache. Widths named
explicitly for keys or values always win.
"""

from __future__ import annotations

import math

ALLOWED_BITS = (1, 2, 3, 4, 5, 6, 8)
UNSUPPORTED = "TurboQuant supports 1 to 6 or 8 bits per coordinate"
_TOLERANCE = 1e-6


def _is_integer(bits: float) -> bool:
    return math.isclose(bits, round(bits), abs_tol=_TOLERANCE)


def _check(width: float, named: str) -> int:
    """``width`` as an int, or a ValueError that says which argument (``named``) asked for it."""
    if not _is_integer(width) or round(width) not in ALLOWED_BITS:
        raise ValueError(f"{UNSUPPORTED}; got {named}")
    return round(width)


def resolve_kv_bits(
    bits: float, key_bits: float | None = None, value_bits: float | None = None
) -> tuple[float, float, float]:
    """(nominal, key, value) widths in bits per coordinate.

    Same signature and return type as ``mlx_vlm.turboquant.resolve_kv_bits``, which it replaces. Key and value widths
    are whole numbers, as floats because mlx-vlm's policies carry floats. ValueError names the argument at fault.
    """
    bits = float(bits)
    half_step = _is_integer(2 * bits)
    if (key_bits is None or value_bits is None) and not half_step:
        raise ValueError(f"{UNSUPPORTED}, or a half step between two of them; got kv_bits={bits:g}")
    whole = _is_integer(bits)
    default = f"kv_bits={bits:g}"
    if not whole:
        default += f" ({math.ceil(bits)}-bit keys, {math.floor(bits)}-bit values)"
    key = (
        _check(math.ceil(bits - _TOLERANCE), default)
        if key_bits is None
        else _check(float(key_bits), f"kv_key_bits={float(key_bits):g}")
    )
    value = (
        _check(math.floor(bits + _TOLERANCE), default)
        if value_bits is None
        else _check(float(value_bits), f"kv_value_bits={float(value_bits):g}")
    )
    return bits, float(key), float(value)


def is_default_split(bits: float, key_bits: float, value_bits: float) -> bool:
    """Whether (key_bits, value_bits) is what ``bits`` alone would give, so that it need not be written down.

    Replaces ``mlx_vlm.kv_quant._is_default_split``: a policy written and read back must keep its widths.
    """
    whole = _is_integer(bits)
    key = bits if whole else math.ceil(bits)
    value = bits if whole else math.floor(bits)
    return math.isclose(key_bits, key, abs_tol=_TOLERANCE) and math.isclose(value_bits, value, abs_tol=_TOLERANCE)
