"""Runs vectors and random cases against a backend and gathers what differs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .backend import load_backend, observe
from .cases import Case, evaluate
from .compare import Difference, Words, compare
from .gate_cases import GATE
from .random_cases import random_case

FOLDER = Path(__file__).parent / "vectors"
RUN = 16
RANDOM_GROUPS = ("random quantize", "random dequantize", "random tokens", "random attend")


class UnknownGroup(ValueError):
    """A group that no vector and no random case belongs to."""


@dataclass(frozen=True)
class CaseResult:
    """One case: its differences (empty if it passed), as lines to show."""

    id: str
    group: str
    comment: str
    seconds: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass
class Result:
    """What a run found."""

    backend: str
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(c.passed for c in self.cases)

    @property
    def failures(self) -> list[CaseResult]:
        return [c for c in self.cases if not c.passed]

    def groups(self) -> dict[str, tuple[int, int, float]]:
        """Per group: passed, total, seconds, in the order of the run."""
        out: dict[str, tuple[int, int, float]] = {}
        for c in self.cases:
            passed, total, seconds = out.get(c.group, (0, 0, 0.0))
            out[c.group] = (passed + c.passed, total + 1, seconds + c.seconds)
        return out

    def table(self) -> str:
        lines = [f"{'group':<18} {'passed':>11} {'seconds':>8}"]
        for name, (passed, total, seconds) in self.groups().items():
            mark = "" if passed == total else "  FAILED"
            lines.append(f"{name:<18} {f'{passed}/{total}':>11} {seconds:>8.2f}{mark}")
        return "\n".join(lines)

    def verdict(self) -> str:
        """One line, and the first difference if there is one."""
        if not self.cases:
            return f"{self.backend}: no cases ran"
        if self.passed:
            return f"{self.backend} agrees with the contract in all {len(self.cases)} cases."
        first = self.failures[0]
        lines = [
            f"{self.backend} DIFFERS from the contract in {len(self.failures)} of {len(self.cases)} cases.",
            f"First: {first.id} ({first.comment})",
            *(f"  {line}" for line in first.problems),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "passed": self.passed,
            "groups": {n: {"passed": p, "total": t, "seconds": s} for n, (p, t, s) in self.groups().items()},
            "failures": [
                {"id": c.id, "comment": c.comment, "problems": list(c.problems)} for c in self.failures
            ],
        }


@cache
def vectors() -> tuple[Case, ...]:
    """All committed vectors; the groups in alphabetical order."""
    out: list[Case] = []
    for path in sorted(FOLDER.glob("*.json")):
        out += json.loads(path.read_text(encoding="utf-8"))["vectors"]
    return tuple(out)


def gate_vectors() -> tuple[Case, ...]:
    """The vectors of the device check (`gate_cases.GATE`), in its order."""
    by_id = {case["id"]: case for case in vectors()}
    return tuple(by_id[name] for name in GATE)


def group_names() -> list[str]:
    """Every group a run can be limited to."""
    return [*dict.fromkeys(c["group"] for c in vectors()), *RANDOM_GROUPS]


def check(case: Case, backend: Any) -> list[str]:
    """The differences of one case. A backend that raises is a difference with its message."""
    if case["op"] == "error":
        return _check_error(case, backend)
    # The oracle runs first and outside the guard: if it raises, the judge is at fault, not the backend.
    expected = case.get("expected") or evaluate(case)
    try:
        got = observe(case, backend)
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
    problems: list[str] = []
    for name, want in expected.items():
        if name not in got:
            problems.append(f"{name}: missing from the backend's result")
            continue
        difference = _difference(name, want, got[name], case)
        if difference is not None:
            problems.append(str(difference))
    return problems


def _difference(name: str, want: Words | dict[str, Any], got: Words, case: Case) -> Difference | None:
    if isinstance(want, Words):
        return compare(name, want, got)
    if "hex" in want:
        return compare(name, Words.from_json(want), got)
    if (want["dtype"], tuple(want["shape"]), want["sha256"]) == (got.dtype, got.shape, got.sha256()):
        return None
    found = compare(name, evaluate(case)[name], got)
    return found or Difference(
        name, "equals the oracle but not the vector: run turboquant_vlm.conformance.generate"
    )


def _check_error(case: Case, backend: Any) -> list[str]:
    mentions = case["inputs"]["mentions"]
    try:
        observe(case, backend)
    except ValueError as error:
        missing = [word for word in mentions if word not in str(error)]
        return [f"ValueError does not mention {', '.join(missing)}: {error}"] if missing else []
    except Exception as error:
        return [f"raised {type(error).__name__} instead of ValueError: {error}"]
    return [f"accepted what has to be refused with a ValueError that names {', '.join(mentions)}"]


def _cases(groups: Iterable[str] | None, random: int, seed: int, quick: bool, gate: bool) -> Iterable[Case]:
    wanted = None if groups is None else set(groups)
    if wanted is not None:
        unknown = wanted - set(group_names())
        if unknown:
            raise UnknownGroup(
                f"group must be one of {', '.join(group_names())}; got {', '.join(sorted(unknown))}"
            )
    for case in gate_vectors() if gate else vectors():
        if (wanted is None or case["group"] in wanted) and (case.get("quick") or not quick):
            yield case
    for index in range(random):
        case = random_case(seed, index)
        if wanted is None or case["group"] in wanted:
            yield case


def run_suite(
    backend: ModuleType | Any | str,
    groups: Iterable[str] | None = None,
    random: int = 0,
    seed: int = 0,
    quick: bool = False,
    progress: Callable[[CaseResult], None] | None = None,
    stop_at_first: bool = False,
    gate: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Result:
    """Run vectors and ``random`` random cases against ``backend``, a module or the name of one.

    ``groups`` limits the run; ``quick`` runs a subset of the vectors, about ten seconds long, that was picked
    to notice as many kinds of fault as possible; ``gate`` those of the device check; ``stop_at_first`` ends at the
    first failure; ``part`` (i, n) takes the i-th of n shares, for n processes side by side. Raises UnknownBackend or
    UnknownGroup for a wrong name.
    """
    module = load_backend(backend) if isinstance(backend, str) else backend
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    result = Result(name)
    for index, case in enumerate(_cases(groups, random, seed, quick, gate)):
        # Neighbours share a kernel, so shares are made of runs of neighbours.
        if index // RUN % part[1] != part[0]:
            continue
        start = time.perf_counter()
        problems = check(case, module)
        took = time.perf_counter() - start
        done = CaseResult(case["id"], case["group"], case["comment"], took, tuple(problems))
        result.cases.append(done)
        if progress is not None:
            progress(done)
        if stop_at_first and problems:
            break
    return result
