"""Which versions of mlx-vlm the hook was tested with, and the check made before it touches anything."""

from __future__ import annotations

OLDEST = (0, 7, 0)
NEWEST = (0, 7, 10)


class UnsupportedMlxVlm(RuntimeError):
    """This mlx-vlm is outside the tested range, or does not look as the hook expects. Nothing was changed."""


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


RANGE = f"{dotted(OLDEST)} to {dotted(NEWEST)}"


def parse(version: str) -> tuple[int, ...]:
    """Leading numeric parts of a version: "0.7.10.dev1" gives (0, 7, 10)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check(version: str) -> None:
    """UnsupportedMlxVlm, as one line, unless ``version`` lies in the tested range."""
    if not OLDEST <= parse(version)[:3] <= NEWEST:
        raise UnsupportedMlxVlm(f"supported mlx-vlm versions are {RANGE}; found {version}. mlx-vlm was left as it is.")
