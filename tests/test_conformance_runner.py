"""The runner: what it says of good, broken, raising and unknown backends; vectors are reproducible."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

import turboquant_vlm.reference as reference
from turboquant_vlm.conformance import run_suite, vectors
from turboquant_vlm.conformance.__main__ import main
from turboquant_vlm.conformance.cases import FLAGS, Case
from turboquant_vlm.conformance.generate import groups, text_of
from turboquant_vlm.conformance.random_cases import random_case
from turboquant_vlm.conformance.suite import FOLDER, UnknownGroup, check

API = (
    "make_codec", "supported_dim", "quantize", "dequantize",
    "empty_tokens", "append", "trim", "raw_tokens", "scores", "attend",
)  # fmt: skip


def wrapped(**changed: Any) -> ModuleType:
    """A backend that is the reference but for the given functions."""
    module = ModuleType("turboquant_vlm.wrapped")
    for name in API:
        setattr(module, name, changed.get(name, getattr(reference, name)))
    return module


def flip_last_bit(a: mx.array) -> mx.array:
    """``a`` with the lowest bit of its last element flipped."""
    unsigned = {2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    flat = mx.contiguous(a).reshape(-1).view(unsigned)
    mask = (mx.arange(flat.size) == flat.size - 1).astype(unsigned)
    return mx.bitwise_xor(flat, mask).view(a.dtype).reshape(a.shape)


def broken_attend(*args: Any, **kwargs: Any) -> mx.array:
    return flip_last_bit(reference.attend(*args, **kwargs))


@pytest.fixture
def installed() -> Iterator[Any]:
    """Makes a module reachable as a backend of a given name."""
    names: list[str] = []

    def install(name: str, module: ModuleType) -> None:
        sys.modules[f"turboquant_vlm.{name}"] = module
        names.append(name)

    yield install
    for name in names:
        del sys.modules[f"turboquant_vlm.{name}"]


def vector(identifier: str) -> Case:
    return next(c for c in vectors() if c["id"] == identifier)


def test_quick_vectors_pass_on_the_reference() -> None:
    result = run_suite(reference, quick=True)
    assert result.passed, result.verdict()
    assert {c["group"] for c in vectors()} == set(result.groups()) | {"codebook", "limits"}


def test_one_flipped_bit_of_the_output_fails_every_attend_vector() -> None:
    result = run_suite(wrapped(attend=broken_attend), groups=["sinks"])
    assert not result.passed
    # A flipped NaN can stay NaN, so not every case has to notice.
    assert len(result.failures) > 0.8 * len(result.cases)
    assert "1 of" in result.failures[0].problems[0]


def test_one_flipped_bit_of_a_stored_word_is_noticed() -> None:
    def quantize(*args: Any, **kwargs: Any) -> Any:
        packed = reference.quantize(*args, **kwargs)
        return replace(packed, words=flip_last_bit(packed.words))

    result = run_suite(wrapped(quantize=quantize), groups=["packing"])
    assert len(result.failures) == len(result.cases)


def test_one_flipped_bit_of_a_scale_in_a_cache_is_noticed() -> None:
    def append(tokens: Any, x: mx.array, counts: Any = None) -> Any:
        new = reference.append(tokens, x, counts=counts)
        if new.packed.scales.size == 0:
            return new
        return replace(new, packed=replace(new.packed, scales=flip_last_bit(new.packed.scales)))

    result = run_suite(wrapped(append=append), groups=["tokens"])
    assert 0 < len(result.failures) < len(result.cases)
    assert any("scales" in p for f in result.failures for p in f.problems)


def test_exit_codes_and_the_printed_difference(
    installed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed("broken", wrapped(attend=broken_attend))
    report = tmp_path / "result.json"
    assert main(["--backend", "broken", "--group", "window", "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "window" in printed
    assert "FAILED" in printed
    assert "First: window/" in printed
    assert "elements differ" in printed
    data = json.loads(report.read_text())
    assert not data["passed"]
    assert data["failures"]
    assert main(["--backend", "reference", "--group", "window"]) == 0
    assert "agrees with the contract" in capsys.readouterr().out


def test_a_raising_backend_fails_with_its_message() -> None:
    def attend(*args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("no such kernel")

    result = run_suite(wrapped(attend=attend), groups=["window"])
    assert len(result.failures) == len(result.cases)
    assert result.failures[0].problems == ("raised RuntimeError: no such kernel",)


def test_a_lazily_raising_result_fails_too() -> None:
    def attend(*args: Any, **kwargs: Any) -> None:
        return None

    assert not run_suite(wrapped(attend=attend), groups=["window"]).passed


def test_wrong_errors_are_noticed() -> None:
    def accepting(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> Any:
        return None

    def vague(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> Any:
        raise ValueError("bad codec")

    def other(dim: int, bits: int, seed: int = 0, kind: str = "mse") -> Any:
        raise KeyError(dim)

    case = vector("errors/dim-90")
    assert check(case, wrapped(make_codec=accepting)) == [
        "accepted what has to be refused with a ValueError that names dim, 90"
    ]
    assert check(case, wrapped(make_codec=vague)) == ["ValueError does not mention dim, 90: bad codec"]
    assert check(case, wrapped(make_codec=other)) == ["raised KeyError instead of ValueError: 90"]
    assert check(case, reference) == []


def test_unknown_names_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "fancy"]) == 2
    assert "got 'fancy'" in capsys.readouterr().err
    assert main(["--backend", "conformance"]) == 2
    assert "lacks make_codec" in capsys.readouterr().err
    assert main(["--group", "snaps"]) == 2
    message = capsys.readouterr().err
    assert "got snaps" in message
    assert "snap, sinks" not in message
    assert "--group must be one of" in message
    assert main(["--random", "-1"]) == 2
    with pytest.raises(UnknownGroup, match="got nothing"):
        run_suite(reference, groups=["nothing"])
    with pytest.raises(SystemExit):
        main(["--device", "tpu"])


def test_list_names_vectors_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--group", "errors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(c["group"] == "errors" for c in vectors())
    assert any("prod needs 2 to 6 bits" in line for line in lines)


def test_random_cases_depend_on_seed_and_index_only() -> None:
    assert random_case(3, 5) == random_case(3, 5)
    assert random_case(3, 5) != random_case(3, 6)
    assert random_case(3, 5) != random_case(4, 5)
    assert json.loads(json.dumps(random_case(3, 5))) == random_case(3, 5)


def test_a_run_limited_to_a_random_group_runs_only_that() -> None:
    result = run_suite(reference, groups=["random quantize"], random=30, seed=1)
    assert set(result.groups()) == {"random quantize"}
    assert result.passed, result.verdict()


def test_stop_at_first_ends_the_run() -> None:
    assert len(run_suite(wrapped(attend=broken_attend), groups=["window"], stop_at_first=True).failures) == 1


def test_vectors_have_ids_reasons_and_known_flags() -> None:
    identifiers = [c["id"] for c in vectors()]
    assert len(set(identifiers)) == len(identifiers) > 1000
    used: set[str] = set()
    for case in vectors():
        assert case["comment"]
        assert case["flags"]
        assert case["expected"]
        used |= set(case["flags"])
    assert used == FLAGS


def test_generating_again_gives_the_same_files() -> None:
    made = {group.name: text_of(group) for group in groups()}
    on_disk = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert made.keys() == on_disk.keys()
    assert [name for name in made if made[name] != on_disk[name]] == []
    assert sum(map(len, made.values())) < 2_000_000
