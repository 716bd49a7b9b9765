"""Negative controls of the kernels: every mistake planted in their text has to be noticed when the text runs.

A mutant is one template with one replacement. It runs on the host runner in small calls (`fast_probes`), and has to
give other bits than the reference, or be refused by the runner. Barriers are taken away one at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import fast_mutants_attention as of_attention
import fast_mutants_coding as of_coding
import fast_probes_coding  # noqa: F401
import pytest
from fast_mutants_attention import Mutant
from fast_probes import problems

from turboquant_vlm.conformance import host_target
from turboquant_vlm.conformance.metal_host import FindingsError, build, unavailable_reason
from turboquant_vlm.fast import kernels

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

MUTANTS = [
    *of_attention.ATTEND,
    *of_attention.MERGE,
    *of_attention.SINK,
    *of_attention.ATTENTION,
    *of_attention.WEIGH,
    *of_attention.SCORE,
    *of_coding.NUMERICS,
    *of_coding.ROTATION,
    *of_coding.PACKING,
    *of_coding.CODING,
    *of_coding.ENCODE,
    *of_coding.DEQUANTIZE,
]

BARRIER = re.compile(r" *(?:threadgroup|simdgroup)_barrier\([^;]*\);\n")
# For each barrier of a template, in the order of the text, a probe that fails without it.
BARRIERS: dict[str, tuple[str, ...]] = {
    "attend": (
        "raw",
        "raw",
        "packed",
        "raw",
        "raw",
        "raw",
        "raw",
        "raw",
        "raw",
        "raw/one worker.scores",
    ),
    "merge": ("splits/sinks",),
    "attention": ("raw",),
    "score": ("packed.scores",),
    "rotation": ("code/half", "restore/padded/4", "restore/bits/4"),
    "coding": (
        "code/base",
        "code/base",
        "code/base",
        "code/bits/2",
        "code/bits/1",
        "code/base/prod",
        "code/bits/1",
    ),
    "dequantize": ("restore/bits/1", "restore/bits/1", "restore/base/prod", "restore/base/prod"),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles mutants into a folder of their own, without optimisation: a third of the time."""
    # Kernels built before belong to another copy of the runtime.
    caches = (build.cache_folder, build.emulator_digest, build.runtime, build.build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURBOQUANT_CACHE", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(build, "_KERNEL_FLAGS", ["-O0" if flag == "-O1" else flag for flag in build._KERNEL_FLAGS])
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(autouse=True)
def text_read_again() -> Iterator[None]:
    """Kernels of a test are made from the text as the test left it."""
    kernels.forget()
    yield
    kernels.forget()


def noticed(patch: pytest.MonkeyPatch, template: str, text: str, probe: str) -> str:
    """What a probe finds when a template has this text; empty if nothing. A text that does not compile raises."""
    original = kernels.template
    kernels.forget()
    patch.setattr(kernels, "template", lambda name: text if name == template else original(name))
    # The same order of threads whatever ran before.
    patch.setattr(host_target, "_launches", itertools.count())
    try:
        return "; ".join(problems(probe, host_target))
    except FindingsError as error:
        return str(error)
    finally:
        patch.setattr(kernels, "template", original)


def mutated(mutant: Mutant) -> str:
    text = kernels.template(mutant.template)
    found = text.count(mutant.old)
    assert found == 1, f"{mutant.old!r} occurs {found} times in {mutant.template}.metal"
    return text.replace(mutant.old, mutant.new)


def without_barriers(template: str, *numbers: int) -> str:
    text = kernels.template(template)
    for place in reversed([place for n, place in enumerate(BARRIER.finditer(text)) if n in numbers]):
        text = text[: place.start()] + text[place.end() :]
    return text


def test_names_are_unique() -> None:
    names = [(m.template, m.name) for m in MUTANTS]
    assert len(set(names)) == len(names)


def test_every_barrier_is_listed() -> None:
    folder = Path(kernels.__file__).parent / "templates"
    counts = {path.stem: path.read_text(encoding="utf-8").count("_barrier(") for path in folder.glob("*.metal")}
    assert {name: count for name, count in counts.items() if count} == {k: len(v) for k, v in BARRIERS.items()}
    for template, probes in BARRIERS.items():
        assert len(BARRIER.findall(kernels.template(template))) == len(probes)


USED = sorted({p for m in MUTANTS for p in m.probes} | {p for probes in BARRIERS.values() for p in probes})


@pytest.mark.parametrize("probe", USED)
def test_the_text_itself_is_accepted(probe: str) -> None:
    assert problems(probe, host_target) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.template}: {m.name}")
def test_mistakes_are_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    text = mutated(mutant)
    assert any(noticed(monkeypatch, mutant.template, text, probe) for probe in mutant.probes), "nobody noticed"


@pytest.mark.parametrize(
    ("template", "number", "probe"),
    [(template, n, probe) for template, probes in BARRIERS.items() for n, probe in enumerate(probes)],
)
def test_missing_barriers_are_noticed(template: str, number: int, probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noticed(monkeypatch, template, without_barriers(template, number), probe)
