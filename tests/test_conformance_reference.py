"""The reference against every vector and against random cases of the oracle."""

from __future__ import annotations

import pytest

import turboquant_vlm.reference as reference
from turboquant_vlm.conformance import run_suite, vectors
from turboquant_vlm.conformance.suite import group_names

RANDOM = 300
SLICES = 6


@pytest.mark.parametrize("group", sorted({c["group"] for c in vectors()}))
def test_vectors(group: str) -> None:
    result = run_suite(reference, groups=[group])
    assert result.passed, result.verdict()


@pytest.mark.parametrize("part", range(SLICES))
def test_random_cases(part: int) -> None:
    result = run_suite(reference, groups=group_names()[-4:], random=RANDOM // SLICES, seed=1000 + part)
    assert len(result.cases) == RANDOM // SLICES
    assert result.passed, result.verdict()
