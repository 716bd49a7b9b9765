"""Time this project's kernels beside other attentions: ``python -m turboquant_vlm.integration.benchmark``.

Contestants of a case take turns, round by round, so that a busy machine slows all of them alike; the median of the
rounds counts. Times belong to the machine they were measured on; ratios are what can be compared, and change with the
machine too. A contestant whose one call takes longer than a limit is left out, and the table says so. Progress goes
to standard error, a Markdown table to standard output, and all numbers to the file of ``--json``.

The measurement runs in a process of its own, where NumPy's matrix products use one thread each: several wait for each
other in a loop, which on a busy machine takes a hundred times as long as the product. The NumPy contestant shares its
heads among threads instead; our reference does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import fast
from .benchmark_cases import (
    NUMPY,
    OURS,
    QUERIES,
    QUICK,
    SEED,
    Case,
    Contestant,
    Data,
    Run,
    all_cases,
    contestants,
    cpus,
)
from .quality_report import Record, environment
from .weights import Log, say

CALL_LIMIT = 20.0
"""Seconds after which one call is too long."""
SLICE = 128
"""One of so many parts of a case's work is tried first."""
PRODUCT_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""How many threads NumPy's matrix products use; read when NumPy is loaded."""


@dataclass(frozen=True)
class Effort:
    """How long a measurement may take.

    rounds: at most so many per contestant.  seconds: a contestant gets no further round after so much of its own time.
    total: of everything, or None.
    """

    rounds: int
    seconds: float
    total: float | None = None


FULL = Effort(15, 10.0)
FAST = Effort(9, 0.6, 52.0)


@dataclass
class _Entry:
    contestant: Contestant
    run: Run | None = None
    times: list[float] = field(default_factory=list)
    skipped: str | None = None
    error: float | None = None


class Clock:
    """What is left of the time that a measurement may take in all."""

    def __init__(self, total: float | None) -> None:
        self._end = None if total is None else time.monotonic() + total

    def fits(self, seconds: float) -> bool:
        """Whether a call of this length can still be made."""
        return self._end is None or time.monotonic() + seconds < self._end


def timed(run: Run, count: int) -> tuple[float, Any]:
    """Seconds of a call until its result is there, and the result."""
    started = time.perf_counter()
    result = run(count)
    if not isinstance(result, np.ndarray):
        mx.eval(result)
    return time.perf_counter() - started, result


def measure(case: Case, effort: Effort, clock: Clock) -> Record:
    """All contestants of a case, in turns."""
    data = Data(case)
    entries = [_Entry(contestant) for contestant in contestants(case)]
    results = {entry.contestant.name: _first_call(entry, case, data, clock) for entry in entries}
    expected = results.get(NUMPY)
    for entry in entries:
        found = results[entry.contestant.name]
        if expected is not None and found is not None:
            entry.error = _distance(found, expected)
    del results, expected
    playing = [entry for entry in entries if entry.run is not None]
    for _ in range(effort.rounds):
        for entry in playing:
            enough = len(entry.times) >= effort.rounds or sum(entry.times) >= effort.seconds
            if entry.times and (enough or not clock.fits(max(entry.times))):
                continue
            assert entry.run is not None
            entry.times.append(timed(entry.run, case.work)[0])
    record = _case_record(case, entries)
    del data, entries, playing
    gc.collect()
    mx.clear_cache()
    return record


def _first_call(entry: _Entry, case: Case, data: Data, clock: Clock) -> Any:
    """Build and warm up; the result, or None where the contestant is left out.

    A small part of the work says how long all of it may take. A warm-up of more than a second counts as a round.
    """
    entry.skipped = entry.contestant.refused(case)
    if entry.skipped is not None:
        return None
    try:
        run = entry.contestant.build(case, data)
        part = max(1, case.work // SLICE)
        if case.queries > 1:
            expected = timed(run, part)[0] * case.work / part
            # Few queries cost more each, so the estimate is on the high side.
            if expected > 2 * CALL_LIMIT:
                entry.skipped = f"one call would take about {_round(expected):.0f} s"
                return None
            if entry.contestant.name != OURS and not clock.fits(expected):
                entry.skipped = f"about {_round(expected):.0f} s a call, more than was left of --quick"
                return None
        seconds, result = timed(run, case.work)
    except Exception as error:  # another library's attention may refuse a shape; the others go on
        entry.skipped = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return None
    if seconds > CALL_LIMIT:
        entry.skipped = f"one call took {seconds:.0f} s"
        return None
    entry.run = run
    if seconds > 1:
        entry.times.append(seconds)
    return result


def _distance(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected, both of one size."""
    if not isinstance(found, np.ndarray):
        found = np.array(found.astype(mx.float32))
    found, expected = found.ravel(), expected.ravel()
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _round(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


# Records


def machine() -> Record:
    """Versions, processor, threads and instruction set, without names or paths of this machine."""
    name, _ = fast.serving()
    found: Record = {**environment(), "target": name, "threads": os.cpu_count(), "isa": "not known"}
    if name == "cpu":
        from ..fast.cpu import native

        found.update(threads=native.threads(), isa=native.isa_in_use())
    return found


def _case_record(case: Case, entries: Sequence[_Entry]) -> Record:
    ours = next((statistics.median(e.times) for e in entries if e.contestant.name == OURS and e.times), None)
    rows: list[Record] = []
    for entry in entries:
        row: Record = {"contestant": entry.contestant.name}
        if entry.skipped is not None:
            row["skipped"] = entry.skipped
        else:
            median = statistics.median(entry.times)
            row |= {
                "median": _round(median),
                "least": _round(min(entry.times)),
                "most": _round(max(entry.times)),
                "rounds": len(entry.times),
                "ratio": None if ours is None else _round(median / ours),
                "error": None if entry.error is None else _round(entry.error),
            }
        rows.append(row)
    return {**asdict(case), "queries": case.queries, "rows": rows}


def benchmark(cases: Sequence[Case], effort: Effort, log: Log = say) -> Record:
    """Measure cases; JSON-ready. Seconds are of one call; ratio: how many times as long as ours."""
    load = _round(os.getloadavg()[0], 3)
    clock = Clock(effort.total)
    settings = {"seed": SEED, "rounds": effort.rounds, "call_limit": CALL_LIMIT, "load_before": load}
    made = []
    for number, case in enumerate(cases, 1):
        log(f"{number} of {len(cases)}: {title({**asdict(case), 'queries': case.queries})}")
        made.append(measure(case, effort, clock))
    return {"environment": machine(), "settings": settings, "cases": made}


# Tables


def title(case: Record) -> str:
    """A case in a few words."""
    bits = f"D={case['dim']}, {case['key_bits']}/{case['value_bits']} bits"
    if case["step"] == "encode":
        return f"encode {case['tokens']:,} tokens, {case['kv_heads']} heads, {bits}"
    queries = "1 query" if case["queries"] == 1 else f"{case['queries']} queries"
    heads = f"{case['query_heads']}/{case['kv_heads']} heads"
    return f"{case['step']}, {queries}, {case['tokens']:,} tokens, {heads}, {bits}"


def text(result: Record) -> str:
    """The result as Markdown, from the dictionary alone."""
    here = result["environment"]
    head = (
        f"Times belong to this machine: {here['cpu']}, {here['cores']} cores, {here['threads']} threads, "
        f"{here['target']} kernels ({here['isa']}), mlx {here['mlx']}, mlx-vlm {here['mlx-vlm']}, "
        f"numpy {here['numpy']}; load {result['settings']['load_before']:g} before the run."
    )
    lines = [
        "| case | contestant | median | least to most | rounds | times ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in result["cases"]:
        name = title(case)
        for row in case["rows"]:
            lines.append("| " + " | ".join([name, row["contestant"], *_cells(row)]) + " |")
    return head + "\n\n" + "\n".join(lines)


def _cells(row: Record) -> list[str]:
    if "skipped" in row:
        return [f"skipped: {row['skipped']}", "", "", ""]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}"
    return [_time(row["median"]), f"{_time(row['least'])} to {_time(row['most'])}", str(row["rounds"]), ratio]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# The command


def _steps(value: str) -> list[str]:
    steps = value.split(",")
    if not set(steps) <= set(QUERIES):
        raise argparse.ArgumentTypeError(f"cases are some of {','.join(QUERIES)}; got {value!r}")
    return steps


def _threads(value: str) -> int:
    if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= cpus():
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {cpus()}, the CPUs at hand; got {value!r}")
    return int(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turboquant_vlm.integration.benchmark",
        description="Time this project's kernels beside other attentions.",
    )
    parser.add_argument("--quick", action="store_true", help="one case of each kind, in less than a minute")
    parser.add_argument(
        "--cases", type=_steps, default=list(QUERIES), help=f"kinds, by commas (default: {','.join(QUERIES)})"
    )
    parser.add_argument("--threads", type=_threads, help="CPUs for every contestant (default: all at hand)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """The measurement, in this process; arguments as of the command, which has seen to --threads."""
    parser = _parser()
    args = parser.parse_args(argv)
    cases = [case for case in (QUICK if args.quick else all_cases()) if case.step in args.cases]
    result = benchmark(cases, FAST if args.quick else FULL)
    if args.json:
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            parser.error(str(error))
    print(text(result))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    program = f"import sys; from {run.__module__ if __spec__ is None else __spec__.name} import run; sys.exit(run())"
    variables = os.environ | dict.fromkeys(PRODUCT_THREADS, "1")
    if args.threads is not None:
        variables["TURBOQUANT_THREADS"] = str(args.threads)
    before = os.sched_getaffinity(0) if sys.platform == "linux" else None
    try:
        if before is not None and args.threads is not None:
            os.sched_setaffinity(0, sorted(before)[: args.threads])
        return subprocess.run([sys.executable, "-c", program, *arguments], env=variables, check=False).returncode
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


if __name__ == "__main__":
    raise SystemExit(main())
