"""What the tests share: the real weights, fetched once for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from turboquant_vlm.integration import weights


@pytest.fixture(scope="session")
def missing() -> Callable[[str], NoReturn]:
    """End a test whose real weights could not be had: a failure where ``CI`` is set, elsewhere a skip."""

    def end(reason: object) -> NoReturn:
        if os.environ.get("CI"):
            pytest.fail(f"the real weights are missing, so nothing was checked on them: {reason}")
        pytest.skip(f"not checked on real weights: {reason}")

    return end


@pytest.fixture(scope="session")
def smollm2(missing: Callable[[str], NoReturn]) -> Path:
    """Model folder of SmolLM2-135M-Instruct (Llama, 30 layers, 9 query and 3 kv heads, D=64, bfloat16)."""
    try:
        return weights.smollm2()
    except weights.WeightsError as error:
        missing(str(error))
