"""The comparison itself: it has to see single bits, signs of zero and shapes, and to say exactly where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboquant_vlm.conformance.compare import WORD_BITS, Words, compare


@given(st.sampled_from(sorted(WORD_BITS)), st.integers(0, 59), st.data())
def test_a_single_flipped_bit_is_found(dtype: str, at: int, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, WORD_BITS[dtype] - 1))
    words = Words.of(dtype, np.arange(60).reshape(3, 4, 5) * 3)
    flipped = words.words.copy()
    flipped.reshape(-1)[at] ^= flipped.dtype.type(1 << bit)
    difference = compare("x", words, Words(dtype, flipped))
    assert difference is not None
    assert difference.index == tuple(int(i) for i in np.unravel_index(at, (3, 4, 5)))
    assert (difference.count, difference.total) == (1, 60)


def test_the_message_names_index_words_values_and_count() -> None:
    a = Words.of("float16", np.array([[0x3C00, 0x4000], [0x4200, 0x4400]]))
    b = Words.of("float16", np.array([[0x3C00, 0x4001], [0x4200, 0x4401]]))
    assert str(compare("output", a, b)) == (
        "output[0, 1]: expected 0x4000 (2.0), got 0x4001 (2.001953125); 2 of 4 elements differ"
    )
    signed = compare("base", Words.of("int16", np.array([-3])), Words.of("int16", np.array([5])))
    assert str(signed) == "base[0]: expected 0xfffd (-3), got 0x0005 (5); 1 of 1 elements differ"


@pytest.mark.parametrize(
    ("dtype", "nans", "infinity"),
    [
        ("float16", [0x7E00, 0x7C01, 0xFFFF], 0x7C00),
        ("bfloat16", [0x7FC0, 0x7F81, 0xFFFF], 0x7F80),
        ("float32", [0x7FC00000, 0x7F800001, 0xFFFFFFFF], 0x7F800000),
    ],
)
def test_all_nans_are_one_value_and_infinity_is_none_of_them(
    dtype: str, nans: list[int], infinity: int
) -> None:
    for other in nans:
        assert compare("x", Words.of(dtype, np.array([nans[0]])), Words.of(dtype, np.array([other]))) is None
    assert (
        compare("x", Words.of(dtype, np.array([nans[1]])), Words.of(dtype, np.array([infinity]))) is not None
    )


def test_zeros_of_both_signs_differ() -> None:
    found = compare("x", Words.of("float32", np.array([0])), Words.of("float32", np.array([0x80000000])))
    assert found is not None
    assert "(0.0), got 0x80000000 (-0.0)" in str(found)


def test_dtype_and_shape_are_compared_first() -> None:
    a = Words.of("float16", np.zeros((2, 3)))
    assert (
        str(compare("x", a, Words.of("bfloat16", np.zeros((2, 3)))))
        == "x: expected dtype float16, got bfloat16"
    )
    assert (
        str(compare("x", a, Words.of("float16", np.zeros((3, 2))))) == "x: expected shape [2, 3], got [3, 2]"
    )
    assert compare("x", Words.of("int8", np.zeros((0, 3))), Words.of("int8", np.zeros((0, 3)))) is None


def test_integer_nan_patterns_are_ordinary_numbers() -> None:
    assert (
        compare("x", Words.of("uint32", np.array([0x7FC00000])), Words.of("uint32", np.array([0x7FC00001])))
        is not None
    )


@given(st.sampled_from(sorted(WORD_BITS)), st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_json_keeps_every_word(dtype: str, values: list[int]) -> None:
    words = Words.of(dtype, np.array(values, np.int64))
    assert compare("x", words, Words.from_json(words.to_json())) is None


def test_long_arrays_become_a_digest_that_a_bit_changes() -> None:
    words = Words.of("uint32", np.arange(1000))
    other = words.words.copy()
    other[999] ^= 1
    assert set(words.to_json()) == {"dtype", "shape", "sha256"}
    assert words.sha256() != Words("uint32", other).sha256()
