"""One suite for all backends: every vector and the sweep, on the reference and on the Metal text run on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turboquant_vlm.conformance import metal_host, vectors

SWEEP = 960
JOBS = min(4, os.cpu_count() or 1)
GROUPS = sorted({case["group"] for case in vectors()})
METAL = "conformance.host_target"
METAL_HERE = pytest.mark.skipif(
    not metal_host.available(),
    reason=f"{metal_host.unavailable_reason()}: the Metal kernels were not executed",
)
BACKENDS = ["reference", pytest.param(METAL, marks=[METAL_HERE, pytest.mark.slow])]


def side_by_side(commands: Sequence[Sequence[str]]) -> list[str]:
    """Runs Python modules in processes of their own; their output. Kernels of one share compile beside another's."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        for command in commands
    ]
    return [process.communicate()[0] for process in running]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of all vectors by backend, each computed once."""
    found: dict[str, dict[str, Any]] = {}

    def of(backend: str) -> dict[str, Any]:
        if backend not in found:
            folder: Path = tmp_path_factory.mktemp("results")
            files = [folder / f"{i}.json" for i in range(JOBS)]
            shares = [f"{i}/{JOBS}" for i in range(JOBS)]
            output = side_by_side(
                [
                    ["turboquant_vlm.conformance", "--backend", backend, "--part", share, "--json", str(file)]
                    for share, file in zip(shares, files, strict=True)
                ]
            )
            assert all(file.exists() for file in files), "\n".join(output)
            parts = [json.loads(file.read_text()) for file in files]
            groups: dict[str, list[int]] = {name: [0, 0] for name in GROUPS}
            for part in parts:
                for name, counts in part["groups"].items():
                    groups[name][0] += counts["passed"]
                    groups[name][1] += counts["total"]
            found[backend] = {"groups": groups, "failures": [f for part in parts for f in part["failures"]]}
        return found[backend]

    return of


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors(backend: str, group: str, results: Any) -> None:
    expected = sum(case["group"] == group for case in vectors())
    passed, total = results(backend)["groups"][group]
    ids = {case["id"] for case in vectors() if case["group"] == group}
    assert (passed, total) == (expected, expected), [f for f in results(backend)["failures"] if f["id"] in ids]


@METAL_HERE
@pytest.mark.slow
def test_sweep() -> None:
    """Shapes of kernels, lengths, rows, masks: the Metal text against the reference, in several thread orders."""
    command = ["turboquant_vlm.conformance.sweep", "--backend", METAL, "--count", str(SWEEP)]
    output = side_by_side([[*command, "--part", f"{i}/{JOBS}"] for i in range(JOBS)])
    verdicts = [text.strip().splitlines()[-1] for text in output]
    counts = [verdict.split(": ", 1)[1].split() for verdict in verdicts]
    assert all(words[0] == words[2] for words in counts), "\n".join(output)
    assert sum(int(words[2]) for words in counts) == SWEEP


def test_at_least_two_thousand_cases() -> None:
    assert len(vectors()) + SWEEP >= 2000
