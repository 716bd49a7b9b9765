"""The measurements as JSON-ready dictionaries and as Markdown tables.

The tables are made from the dictionaries alone, so a stored JSON file gives the same tables again. Numbers are rounded
to six significant digits: what is beyond them differs between machines. Seconds and paths are left out for the same
reason.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from .quality_memory import Memory
from .quality_statistics import Summary
from .quality_synthetic import Case, Errors, dtype_name

Record = dict[str, Any]

PACKAGES = ("mlx", "mlx-vlm", "numpy")
OURS, UPSTREAM = "turboquant-vlm", "mlx-vlm"


def environment() -> Record:
    """Versions and the processor, without names or paths of this machine."""
    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quality_record(cache: str, bits: tuple[int, int], summary: Summary) -> Record:
    """One row of the model's table; bits of keys and values."""
    return {"cache": cache, "key_bits": bits[0], "value_bits": bits[1], **_rounded(asdict(summary))}


def synthetic_record(case: Case, errors: list[Errors]) -> Record:
    """One kind of synthetic cache: the lists run over seeds."""
    columns = {name: [getattr(e, name) for e in errors] for name in asdict(errors[0])}
    head = {"dim": case.dim, "dtype": dtype_name(case.dtype), "constant": case.constant, "shape": case.shape}
    return {**head, **_rounded(columns)}


def memory_record(memory: Memory) -> Record:
    """One size of cache."""
    head = {"dim": memory.dim, "tokens": memory.tokens, "bytes": memory.held, "float16_bytes": memory.float16}
    return {**head, "saved": _rounded(memory.saved), "parts": memory.parts}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return value


def tables(result: Record) -> dict[str, str]:
    """Markdown tables of the parts that a result holds, by part."""
    made = {}
    if "model" in result:
        made["model"] = _model_table(result["model"]["rows"])
    if "synthetic" in result:
        made["synthetic"] = _synthetic_table(result["synthetic"]["rows"])
    if "memory" in result:
        made["memory"] = _memory_table(result["memory"]["rows"])
    return made


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _model_table(rows: list[Record]) -> str:
    header = ["bits K/V", "cache", "KL, nats", "windows", "second half", "same top token", "perplexity"]
    body = [["16/16", "float16", "0", "", "0", "100 %", f"{rows[0]['float_perplexity']:.3f}"]]
    body += [
        [
            f"{r['key_bits']}/{r['value_bits']}",
            r["cache"],
            f"{r['kl']:.5f}",
            f"{min(r['kl_windows']):.5f} to {max(r['kl_windows']):.5f}",
            f"{r['late_kl']:.5f}",
            f"{100 * r['top1']:.2f} %",
            f"{r['perplexity']:.3f}",
        ]
        for r in rows
    ]
    return _table(header, body)


def _synthetic_table(rows: list[Record]) -> str:
    header = ["D", "cache", "constant part", "against float", "plain TurboQuant", "against the codes", "raw snap aside"]
    body = [
        [
            str(r["dim"]),
            r["dtype"],
            r["shape"] if r["shape"] == "none" else f"{r['constant']:g}, {r['shape']}",
            _mean_and_max(r["float_error"], 3),
            f"{min(r['plain_error']):.2f} to {max(r['plain_error']):.2f}",
            _mean_and_max(r["codes_error"], 5),
            _mean_and_max(r["snapped_error"], 5),
        ]
        for r in rows
    ]
    return _table(header, body)


def _mean_and_max(values: list[float], digits: int) -> str:
    return f"{sum(values) / len(values):.{digits}f} ({max(values):.{digits}f})"


def _memory_table(rows: list[Record]) -> str:
    dims = sorted({r["dim"] for r in rows})
    saved = {(r["dim"], r["tokens"]): r["saved"] for r in rows}
    body = [
        [f"{tokens:,}", *(f"{100 * saved[dim, tokens]:.2f} %" for dim in dims)]
        for tokens in sorted({r["tokens"] for r in rows})
    ]
    return _table(["tokens", *(f"D={dim}" for dim in dims)], body)
