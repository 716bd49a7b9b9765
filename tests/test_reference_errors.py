"""Bad and empty input: an error that names the argument, the value and what is allowed, or an empty answer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from turboquant_vlm import reference


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("64", 4), "dim must be an integer from 8 to 1024; got dim='64'"),
        ((64.0, 4), r"got dim=64\.0"),
        ((None, 4), "got dim=None"),
        ((True, 4), "got dim=True"),
        ((64, "4"), "supports 1 to 6 or 8 bits per coordinate; got bits='4'"),
        ((64, 3.5), r"got bits=3\.5"),
        ((64, None), "got bits=None"),
        ((64, True), "got bits=True"),
        ((64, 4, 1.5), r"seed must be an integer from 0 to 2147483647; got seed=1\.5"),
        ((64, 4, 2**31), "got seed=2147483648"),
    ],
)
def test_codecs_that_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.make_codec(*arguments)


def test_no_vectors_to_quantize() -> None:
    with pytest.raises(ValueError, match=r"x holds no vectors: shape \(0, 64\)"):
        reference.quantize(mx.zeros((0, 64)), reference.make_codec(64, 4))


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_queries_give_an_empty_answer(tokens: int) -> None:
    codec = reference.make_codec(64, 4)
    keys = reference.empty_tokens(codec, "key", 2, 1, mx.float16)
    values = reference.empty_tokens(reference.make_codec(32, 4), "value", 2, 1, mx.float16)
    keys = reference.append(keys, mx.ones((2, 1, tokens, 64)))
    values = reference.append(values, mx.ones((2, 1, tokens, 32)))
    q = mx.zeros((2, 3, 0, 64), mx.bfloat16)
    out = reference.attend(q, keys, values, 0.1, "causal")
    assert out.shape == (2, 3, 0, 32)
    assert out.dtype == mx.bfloat16
    assert reference.scores(q, keys, 0.1).shape == (2, 3, 0, tokens)


def test_rows_that_do_not_match_are_not_stacked() -> None:
    rows = [reference.empty_tokens(reference.make_codec(64, 4, seed), "key", 1, 1, mx.float16) for seed in (0, 1)]
    with pytest.raises(ValueError, match=r"rows must share codec, role, .* got 2 kinds"):
        reference.stack_rows(rows)
    with pytest.raises(ValueError, match="got 0 kinds"):
        reference.stack_rows([])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "batch and heads must be at least 1; got batch=0"),
        ({"heads": 0}, "got batch=1, heads=0"),
        ({"dtype": mx.int32}, "dtype must be float16, bfloat16 or float32"),
        ({"factors": mx.full((1, 64), 9, mx.int8)}, "factors must be int8 from -3 to 3"),
        ({"factors": mx.full((1, 64), 0.5)}, "factors must be int8 from -3 to 3; got mlx.core.float32"),
    ],
)
def test_tokens_that_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"role": "key", "batch": 1, "heads": 1, "dtype": mx.float16, **changed}
    with pytest.raises(ValueError, match=message):
        reference.empty_tokens(reference.make_codec(64, 4), **arguments)
