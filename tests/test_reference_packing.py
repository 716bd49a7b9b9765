"""The layout of packed codes: examples written by hand from the text, and the round trip."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_helpers import PROPERTY

from turboquant_vlm.reference import supported_dims, words_per_vector
from turboquant_vlm.reference.packing import pack, unpack

BITS = (1, 2, 3, 4, 5, 6, 8)


def words(codes: list[int], bits: int) -> list[int]:
    return np.array(pack(mx.array(np.array(codes, np.int32)), bits)).tolist()


RISING = [0, 1, 2, 3, 4, 5, 6, 7]
FALLING = [7, 6, 5, 4, 3, 2, 1, 0]
MIXED = [1, 2, 4, 7, 0, 5, 3, 6]

# (bits, codes, words); every word is written lowest coordinate last, as hexadecimal numbers are.
EXAMPLES = [
    # One nibble a coordinate.
    (4, [*range(16)], [0x76543210, 0xFEDCBA98]),
    (4, [9] * 8 + [5] * 4, [0x99999999, 0x00005555]),
    # Two groups of eight in a word, the odd group in the upper two bits of each nibble.
    (2, [0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0, 3, 2, 1, 0], [0x369C369C]),
    (2, [3] * 8 + [0] * 8 + [0, 1] * 4, [0x33333333, 0x10101010]),
    # Four groups in a word.
    (1, [1] + [0] * 7 + [0, 1] + [0] * 6 + [0, 0, 1] + [0] * 5 + [0, 0, 0, 1] + [0] * 4, [0x00008421]),
    (1, [1] * 8 + [0] * 8 + [0] * 8 + [1] * 8 + [0] * 7 + [1], [0x99999999, 0x10000000]),
    # Three groups in the low bits of three words, the fourth group's bit j on top of word j.
    (3, RISING + FALLING + [0] * 8 + MIXED, [0x7ED4B218, 0x8923C5E7, 0x80808800]),
    (3, RISING, [0x76543210]),
    (3, RISING + FALLING, [0x76543210, 0x01234567]),
    (3, RISING + FALLING + MIXED, [0x76543210, 0x01234567, 0x63507421]),
    (3, [0] * 24 + [7] * 8 + RISING, [0x88888888, 0x88888888, 0x88888888, 0x76543210]),
    # The low four bits as above, then the words of the upper one or two.
    (5, [16, 1, 18, 3, 20, 5, 22, 7] + [31] * 8, [0x76543210, 0xFFFFFFFF, 0x23232323]),
    (6, [0, 17, 34, 51, 4, 21, 38, 55] + [63] * 8, [0x76543210, 0xFFFFFFFF, 0xFEDCFEDC]),
    # Two's complement bytes.
    (8, [1, -1, 127, -127, 0, 0, 0, -2], [0x817FFF01, 0xFE000000]),
]


@pytest.mark.parametrize(("bits", "codes", "want"), EXAMPLES)
def test_by_hand(bits: int, codes: list[int], want: list[int]) -> None:
    assert words(codes, bits) == want
    back = unpack(mx.array(np.array(want, np.uint32)), bits, len(codes))
    assert np.array(back).tolist() == codes


def place(codes: list[int], bits: int) -> list[int]:
    """The sentences of the text, one bit of one coordinate at a time."""
    groups = -(-len(codes) // 8)
    if bits > 4 and bits != 8:
        return place([c & 15 for c in codes], 4) + place([c >> 4 for c in codes], bits - 4)
    out = [0] * (
        -(-len(codes) // 4) if bits == 8 else {4: groups, 2: -(-groups // 2), 1: -(-groups // 4), 3: groups}[bits]
    )
    for index, code in enumerate(codes):
        group, n = divmod(index, 8)
        for bit in range(bits):
            one = code >> bit & 1
            if bits == 8:
                word, at = index // 4, 8 * (index % 4) + bit
            elif bits == 4:
                word, at = group, 4 * n + bit
            elif bits == 2:
                word, at = group // 2, 4 * n + 2 * (group % 2) + bit
            elif bits == 1:
                word, at = group // 4, 4 * n + group % 4
            elif group % 4 < 3:
                word, at = 3 * (group // 4) + group % 4, 4 * n + bit
            else:
                word, at = 3 * (group // 4) + bit, 4 * n + 3
            out[word] |= one << at
    # A full quad of 3-bit groups has three words, a partial one as many as groups.
    return out[: 3 * (groups // 4) + groups % 4] if bits == 3 else out


def random_codes(rng: np.random.Generator, dim: int, bits: int) -> np.ndarray:
    low, high = (-127, 128) if bits == 8 else (0, 2**bits)
    return rng.integers(low, high, (2, 3, dim)).astype(np.int32)


@pytest.mark.parametrize("bits", BITS)
def test_every_head_size(bits: int) -> None:
    """Placement and round trip for every supported head size, whole groups or not, and all spare bits zero."""
    rng = np.random.default_rng(bits)
    for dim in supported_dims():
        codes = random_codes(rng, dim, bits)
        packed = pack(mx.array(codes), bits)
        assert packed.dtype == mx.uint32
        assert packed.shape == (2, 3, words_per_vector(dim, bits)), dim
        assert np.array(packed)[1, 2].tolist() == place(codes[1, 2].tolist(), bits), dim
        assert (np.array(unpack(packed, bits, dim)) == codes).all(), dim


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dim", [8, 12, 20, 24, 36, 44, 72, 88, 100, 104, 120])
def test_padding_is_zero_bits(bits: int, dim: int) -> None:
    """All codes full of ones: as many ones as code bits, so none lies beyond the last coordinate."""
    packed = np.array(pack(mx.array(np.full(dim, 2**bits - 1, np.int32)), bits))
    assert sum(int(word).bit_count() for word in packed) == bits * dim


def test_words_per_vector() -> None:
    """Bytes that the memory estimates rest on; odd group counts included."""
    table = {
        64: [2, 4, 6, 8, 10, 12, 16],
        72: [3, 5, 7, 9, 12, 14, 18],
        80: [3, 5, 8, 10, 13, 15, 20],
        100: [4, 7, 10, 13, 17, 20, 25],
        128: [4, 8, 12, 16, 20, 24, 32],
        576: [18, 36, 54, 72, 90, 108, 144],
    }
    assert {dim: [words_per_vector(dim, b) for b in BITS] for dim in table} == table


@PROPERTY
@given(st.sampled_from(BITS), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_any_length(bits: int, dim: int, seed: int) -> None:
    codes = random_codes(np.random.default_rng(seed), dim, bits)
    packed = pack(mx.array(codes), bits)
    assert np.array(packed)[0, 0].tolist() == place(codes[0, 0].tolist(), bits)
    assert (np.array(unpack(packed, bits, dim)) == codes).all()
