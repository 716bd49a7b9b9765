"""Writes ``vectors/*.json`` from the oracle: ``python -m turboquant_vlm.conformance.generate [folder]``.

The output depends on nothing but this package, so running it again changes no byte.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import (
    vectors_attend,
    vectors_batch,
    vectors_codec,
    vectors_masks,
    vectors_non_finite,
    vectors_stages,
    vectors_tokens,
)
from .build import Group
from .cases import Case, evaluate

FOLDER = Path(__file__).parent / "vectors"
CONTRACT = 1


def groups() -> list[Group]:
    """All groups of vectors, without their expected arrays."""
    modules = (
        vectors_codec,
        vectors_stages,
        vectors_attend,
        vectors_masks,
        vectors_non_finite,
        vectors_tokens,
        vectors_batch,
    )
    return [make() for module in modules for make in module.GROUPS]


def expected(case: Case) -> dict[str, Any]:
    """The expected arrays of a case as JSON, or the expected error."""
    if case["op"] == "error":
        return {"error": {"type": "ValueError", "mentions": case["inputs"]["mentions"]}}
    return {name: words.to_json() for name, words in evaluate(case).items()}


def text_of(group: Group) -> str:
    """The file of a group: one vector a line, so that a changed vector is a changed line."""
    lines = [json.dumps({**case, "expected": expected(case)}, separators=(",", ":")) for case in group.cases]
    head = json.dumps({"contract": CONTRACT, "group": group.name, "schema": "README.md"})
    return head[:-1] + ', "vectors": [\n' + ",\n".join(lines) + "\n]}\n"


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = set()
    for group in groups():
        path = folder / f"{group.name}.json"
        path.write_text(text_of(group), encoding="utf-8")
        wanted.add(path.name)
        print(f"{path.name}: {len(group.cases)} vectors, {path.stat().st_size} bytes")
    for stale in folder.glob("*.json"):
        if stale.name not in wanted:
            stale.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
