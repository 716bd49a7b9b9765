"""A backend against the reference over shapes: the same inputs, every bit of scores and outputs.

    python -m turboquant_vlm.conformance.sweep --backend conformance.host_target --count 2000 --jobs 2

Vectors say what is right; the sweep says that it stays right over head sizes, widths, groups of heads, lengths around
tile and split boundaries, rows of different length, masks, sinks and windows. A case is a pure function of its index.
The shapes of kernels come from a short list and the lengths do not, because on a GPU each new kernel is compiled first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from turboquant_vlm import reference

from .backend import from_mx, load_backend
from .compare import compare

BITS = (1, 2, 3, 4, 5, 6, 8)
DIMS = (64, 72, 80, 96, 100, 112, 120, 128, 160, 176, 192, 200, 256, 320, 512, 576)
QUERIES = (1, 2, 3, 4, 8, 16, 33, 100)
LENGTHS: tuple[int, ...] = (
    1,
    3,
    4,
    5,
    33,
    63,
    64,
    65,
    95,
    96,
    97,
    127,
    128,
    129,
    159,
    160,
    161,
    223,
    224,
    255,
    256,
    257,
    287,
    288,
    289,
    320,
)
LONG: tuple[int, ...] = (351, 352, 353, 511, 512, 513, 543, 544, 545, 767, 768, 769, 1023, 1024, 1025, 1056)
VERY_LONG: tuple[int, ...] = (1087, 1088, 1281, 1537, 2049, 2080)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
MASKS = ("none", "causal", "bool", "additive")


@dataclass(frozen=True)
class Shape:
    """One case of the sweep. lengths: tokens of each row; mask: one of `MASKS`."""

    index: int
    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    kind: str
    dtype: mx.Dtype
    heads: int
    group: int
    queries: int
    lengths: tuple[int, ...]
    mask: str
    sinks: bool
    window: int | None

    def __str__(self) -> str:
        return (
            f"sweep/{self.index}: D={self.key_dim}/{self.value_dim} bits={self.key_bits}/{self.value_bits} {self.kind} "
            f"{str(self.dtype).rpartition('.')[2]} heads={self.heads}x{self.group} L={self.queries} "
            f"lengths={list(self.lengths)} mask={self.mask} sinks={self.sinks} window={self.window}"
        )


def kernels() -> list[dict[str, Any]]:
    """The kernel shapes: every pair of widths, every head size, every number of queries; few of their combinations."""
    plain: dict[str, Any] = {
        "key_dim": 64,
        "value_dim": 64,
        "key_bits": 4,
        "value_bits": 4,
        "kind": "mse",
        "dtype": mx.float16,
        "heads": 1,
        "group": 1,
        "queries": 1,
        "mask": "none",
        "sinks": False,
        "window": None,
    }
    out = [plain | {"key_bits": k, "value_bits": v} for k in BITS for v in BITS]
    for at, dim in enumerate(DIMS):
        widths = ((4, 3), (3, 4), (8, 4), (2, 2))[at % 4]
        out.append(
            plain | {"key_dim": dim, "value_dim": dim, "key_bits": widths[0], "value_bits": widths[1], "group": 2}
        )
    out += [
        plain | {"queries": n, "mask": mask, "group": 2, "heads": 2}
        for n in QUERIES
        for mask in (("causal",) if n in (3, 33) else ("causal", "bool"))
    ]
    out += [plain | {"kind": "prod", "key_bits": bits, "queries": 2, "mask": "causal"} for bits in (2, 3, 4, 5, 6)]
    out += [
        plain | {"dtype": dtype, "mask": mask, "sinks": sinks, "group": 4, "queries": n, "window": window}
        for dtype, mask, sinks, n, window in (
            (mx.bfloat16, "additive", True, 4, None),
            (mx.float32, "additive", False, 16, 100),
            (mx.bfloat16, "causal", True, 1, 128),
            (mx.float32, "bool", True, 2, None),
        )
    ]
    out += [
        plain | {"key_dim": 192, "value_dim": 128, "group": 3, "mask": "causal", "queries": 2},
        plain | {"key_dim": 96, "value_dim": 64, "key_bits": 5, "value_bits": 6, "group": 7},
        plain | {"key_dim": 576, "value_dim": 512, "group": 16},
        plain | {"key_dim": 80, "value_dim": 80, "key_bits": 3, "value_bits": 3, "group": 128},
        plain | {"key_dim": 128, "value_dim": 128, "key_bits": 4, "value_bits": 3, "group": 4},
        plain | {"key_dim": 8, "value_dim": 8, "queries": 3, "mask": "causal"},
        plain | {"key_dim": 100, "value_dim": 12, "key_bits": 3, "value_bits": 1, "queries": 8, "mask": "causal"},
        plain | {"group": 64, "mask": "none", "sinks": True},
    ]
    return out


def shapes(count: int) -> Iterator[Shape]:
    """The first `count` cases: every kernel shape in turn, each time with other lengths, rows and windows."""
    known = kernels()
    for index in range(count):
        rng = np.random.default_rng([index, 20504])
        kernel = known[index % len(known)]
        heavy = kernel["key_dim"] * kernel["group"] * kernel["queries"] > 8192
        lengths = LENGTHS if heavy or index % 3 else LENGTHS + LONG
        if index % 29 == 0 and not heavy:
            lengths = VERY_LONG
        rows = 1 if heavy or lengths is VERY_LONG else int(rng.choice((1, 1, 2, 3, 4)))
        # Rows of one length now and then, rows shorter than the new tokens too.
        chosen = [int(n) for n in rng.choice(lengths, rows, replace=index % 2 == 0)]
        if rows > 1 and index % 7 == 0:
            chosen[-1] = 0
        window = kernel["window"] if index % 2 else None
        if kernel["mask"] == "causal" and index % 5 == 0:
            window = int(rng.choice((1, 40, 64, 130, 300)))
        yield Shape(index=index, lengths=tuple(chosen), **(kernel | {"window": window}))


def _values(rng: np.random.Generator, shape: Sequence[int], dtype: mx.Dtype, key: bool) -> mx.array:
    x: Any = rng.standard_normal(tuple(shape)).astype(np.float32)
    if key:
        # A part common to all keys and channels of different size, as models have them.
        x = x * np.exp(rng.standard_normal(shape[-1])).astype(np.float32) + 4 * rng.standard_normal(shape[-1])
    return mx.array(x.astype(np.float32)).astype(dtype)


def inputs(shape: Shape, backend: ModuleType) -> dict[str, Any]:
    """The arguments of `attend` for a case; keys and values are coded by `backend`."""
    rng = np.random.default_rng([shape.index, 874])
    batch, longest, new = len(shape.lengths), max(shape.lengths), shape.queries
    padding = [longest - n for n in shape.lengths]
    out: dict[str, Any] = {"scale": float(shape.key_dim**-0.5), "window": shape.window}
    for name, role, dim, bits, kind in (
        ("keys", "key", shape.key_dim, shape.key_bits, shape.kind),
        ("values", "value", shape.value_dim, shape.value_bits, "mse"),
    ):
        codec = backend.make_codec(dim, bits, seed=shape.index % 5, kind=kind)
        tokens = backend.empty_tokens(codec, role, batch, shape.heads, shape.dtype)
        x = _values(rng, (batch, shape.heads, max(longest, 1), dim), shape.dtype, role == "key")
        # The prompt, then the new tokens: the ring holds what their queries read raw.
        cut = max(0, longest - new)
        if cut:
            counts = [max(0, cut - p) for p in padding]
            tokens = backend.append(tokens, x[:, :, :cut], counts=counts)
        if longest:
            counts = [n - max(0, cut - p) for n, p in zip(shape.lengths, padding, strict=True)]
            tokens = backend.append(tokens, x[:, :, cut:longest], counts=counts)
        out[name] = tokens
    heads = shape.heads * shape.group
    out["q"] = _values(rng, (batch, heads, new, shape.key_dim), shape.dtype, False)
    out["left_padding"] = padding if any(padding) or shape.index % 2 else None
    out["mask"] = None
    if shape.mask == "causal":
        out["mask"] = "causal"
    elif shape.mask != "none" and longest:
        of_heads, of_queries = (1, heads)[shape.index % 2], (1, new)[shape.index // 2 % 2]
        kept = rng.random((batch, of_heads, of_queries, longest)) > 0.3
        out["mask"] = mx.array(kept)
        if shape.mask == "additive":
            numbers = np.where(kept, 3 * rng.standard_normal(kept.shape), -np.inf).astype(np.float32)
            out["mask"] = mx.array(numbers).astype(shape.dtype)
    out["sinks"] = mx.array(rng.standard_normal(heads).astype(np.float32) * 4) if shape.sinks else None
    return out


def differences(shape: Shape, backend: ModuleType, other: ModuleType = reference) -> list[str]:
    """What differs between two backends in one case: codes, scores and outputs, bit by bit."""
    ours, theirs = inputs(shape, backend), inputs(shape, other)
    problems: list[Any] = []
    for name in ("keys", "values"):
        for field, array in theirs[name].packed.arrays().items():
            got = ours[name].packed.arrays().get(field)
            if got is None:
                problems.append(f"{name}.{field} is missing")
            else:
                problems.append(compare(f"{name}.{field}", from_mx(array), from_mx(got)))
    want, have = (b.attend(**i) for b, i in ((other, theirs), (backend, ours)))
    problems.append(compare("output", from_mx(want), from_mx(have)))
    for arguments in (ours, theirs):
        del arguments["values"], arguments["sinks"]
    want, have = (b.scores(**i) for b, i in ((other, theirs), (backend, ours)))
    problems.append(compare("scores", from_mx(want), from_mx(have)))
    return [str(p) for p in problems if p is not None]


def run(backend: ModuleType, count: int, part: int = 0, parts: int = 1, start: int = 0) -> tuple[int, list[str]]:
    """Cases run and what failed, one line each. With parts > 1 only every parts-th kernel shape."""
    ran, failed = 0, []
    known = len(kernels())
    for shape in shapes(count):
        if shape.index < start or shape.index % known % parts != part:
            continue
        try:
            problems = differences(shape, backend)
        except Exception as error:
            problems = [f"raised {type(error).__name__}: {error}"]
        ran += 1
        failed += [f"{shape}\n    {problem}" for problem in problems]
    return ran, failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0 if every case agrees, 1 if not."""
    p = argparse.ArgumentParser(prog="python -m turboquant_vlm.conformance.sweep", description=__doc__)
    p.add_argument("--backend", default="fast", help="a module of turboquant_vlm (default: fast)")
    p.add_argument("--count", type=int, default=500, metavar="N", help="cases (default: 500)")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    p.add_argument("--part", default="0/1", metavar="I/N", help="only every N-th kernel shape, from the I-th")
    args = p.parse_args(argv)
    part, parts = (int(n) for n in args.part.split("/"))
    if args.count < 1 or args.jobs < 1 or not 0 <= part < parts:
        p.error(f"--count and --jobs must be at least 1 and --part I/N with I < N; got {args}")
    began = time.monotonic()
    if args.jobs > 1:
        return _in_processes(args.backend, args.count, args.jobs)
    ran, failed = run(load_backend(args.backend), args.count, part, parts)
    for line in failed[:20]:
        print(line)
    print(
        f"{args.backend}: {ran - len({f.split(':')[0] for f in failed})} of {ran} cases agree with the reference "
        f"({time.monotonic() - began:.0f} s)"
    )
    return 1 if failed or not ran else 0


def _in_processes(backend: str, count: int, jobs: int) -> int:
    command = [sys.executable, "-m", "turboquant_vlm.conformance.sweep", "--backend", backend, "--count", str(count)]
    running = [subprocess.Popen([*command, "--part", f"{i}/{jobs}"]) for i in range(jobs)]
    return max([process.wait() for process in running])


if __name__ == "__main__":
    sys.exit(main())
