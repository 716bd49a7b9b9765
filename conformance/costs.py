"""What decoding and coding cost: operations per code element and bytes per token, of each kernel, beside mlx-vlm's own.

    python -m turboquant_vlm.conformance.costs [--step decode] [--json] [--dim 128] [--widths 4,3]

The kernels' final Metal text is counted as :mod:`.metal_host.count` says. Costs are marginal: the counts of two
lengths, subtracted, so that fixed costs cancel; ``fixed`` has those, for the whole launch. An element is one code of
the packed cache: a token has ``2 * D * kv_heads`` of them, whatever the number of query heads.

mlx-vlm decodes in one kernel up to 2048 tokens, and in two passes beyond; both are counted. What MLX itself does around
the kernels is left out, in its favour: the rotation of the query and of the output, and the copy of the packed cache
that MLX makes for a kernel when the cache has spare room and more than one head.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turboquant_vlm import reference
from turboquant_vlm.fast import launch, metal

from .metal_host import (
    Launch,
    Marginal,
    Recorder,
    count_unavailable_reason,
    counted_outputs,
    mlx_vlm_kernels,
    per_kernel,
    sum_of,
    unavailable_reason,
)

_TYPES = re.compile(r"(?:_(?:bool|float|float16_t|bfloat16_t|u?int(?:8|16|32|64)_t))+$")
SHORT, LONG = (1024, 2048), (3072, 4096)
"""Two lengths for the marginal cost: where mlx-vlm takes one pass, and where it takes two."""
TILES = (128, 256)
"""Two lengths of a chunk that is coded."""


@dataclass(frozen=True)
class Case:
    """One shape of decoding: a batch of one, one query token."""

    dim: int
    key_bits: int
    value_bits: int
    query_heads: int = 8
    kv_heads: int = 2

    @property
    def elements(self) -> int:
        """Code elements per token."""
        return 2 * self.dim * self.kv_heads

    def __str__(self) -> str:
        return f"D={self.dim} K{self.key_bits} V{self.value_bits} GQA {self.query_heads // self.kv_heads}"

    def tensors(self, tokens: int) -> tuple[mx.array, mx.array, mx.array]:
        """One query token, keys and values, in float16."""
        rng = np.random.default_rng(tokens)
        heads = (self.query_heads, self.kv_heads, self.kv_heads)
        lengths = (1, tokens, tokens)
        made = [
            mx.array(rng.standard_normal((1, h, n, self.dim), dtype=np.float32)).astype(mx.float16)
            for h, n in zip(heads, lengths, strict=True)
        ]
        return made[0], made[1], made[2]


Source = Callable[[Case, int], Sequence[Launch]]
"""The launches of one decode step over so many tokens."""


@dataclass(frozen=True)
class Row:
    """One kernel of one implementation at one case; ``kernel`` is ``all`` for the sum over a step's kernels."""

    step: str
    source: str
    case: Case
    tokens: tuple[int, int]
    kernel: str
    marginal: Marginal

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "step": self.step,
            "source": self.source,
            **asdict(self.case),
            "tokens": list(self.tokens),
            "kernel": self.kernel,
            "operations_per_element": self.marginal.total,
            "fused_operations_per_element": self.marginal.fused_total,
            "issued_operations_per_element": self.marginal.issued,
            "address_per_element": self.marginal.address,
            "by_category": {k: v for k, v in self.marginal.operations.items() if v},
            "distinct_bytes_per_token": self.marginal.distinct_bytes_per_token,
            "requested_bytes_per_token": self.marginal.bytes_per_token,
            "fixed_operations": self.marginal.fixed,
            "threads": self.marginal.threads,
            "registers": self.marginal.registers,
        }


def mlx_vlm_decode(case: Case, tokens: int) -> list[Launch]:
    """The kernels that mlx-vlm's TurboQuant cache launches for one query token, with keys and values of two widths."""
    from mlx_vlm import turboquant

    query, keys, values = case.tensors(tokens)
    bits = (case.key_bits + case.value_bits) / 2
    cache = turboquant.TurboQuantKVCache(bits=bits, key_bits=case.key_bits, value_bits=case.value_bits)
    states = cache.update_and_fetch(keys, values)
    recorder = Recorder(counted_outputs)
    with mlx_vlm_kernels(recorder):
        mx.eval(cache.decode_attention(query, *states, scale=case.dim**-0.5))
    return recorder.launches


def mlx_vlm_encode(case: Case, tokens: int) -> list[Launch]:
    """The kernels that mlx-vlm's TurboQuant cache launches to code a chunk of keys and values."""
    from mlx_vlm import turboquant

    _, keys, values = case.tensors(tokens)
    bits = (case.key_bits + case.value_bits) / 2
    cache = turboquant.TurboQuantKVCache(bits=bits, key_bits=case.key_bits, value_bits=case.value_bits)
    recorder = Recorder(counted_outputs)
    with mlx_vlm_kernels(recorder):
        mx.eval(cache.update_and_fetch(keys, values))
    return recorder.launches


def our_decode(case: Case, tokens: int) -> list[Launch]:
    """The kernels that our Metal target launches for one query token; the tokens were coded by the reference."""
    query, k, v = case.tensors(tokens)
    keys, values = reference.append_pair(*_empty(case), k, v)
    recorder = Recorder(counted_outputs)
    with launch.using(recorder):
        mx.eval(metal.attend(query, keys, values, case.dim**-0.5, "causal"))
    return recorder.launches


def our_encode(case: Case, tokens: int) -> list[Launch]:
    """The kernels that our Metal target launches to code whole tiles of keys and values."""
    _, k, v = case.tensors(tokens + reference.LAG)
    recorder = Recorder(counted_outputs)
    with launch.using(recorder):
        keys, values = metal.append_pair(*_empty(case), k, v)
        mx.eval([*keys.packed.arrays().values(), *values.packed.arrays().values()])
    return recorder.launches


def _empty(case: Case) -> tuple[reference.Tokens, reference.Tokens]:
    key, value = (reference.make_codec(case.dim, bits) for bits in (case.key_bits, case.value_bits))
    return (
        reference.empty_tokens(key, "key", 1, case.kv_heads, mx.float16),
        reference.empty_tokens(value, "value", 1, case.kv_heads, mx.float16),
    )


@dataclass(frozen=True)
class Compared:
    """One implementation, and the pairs of lengths to compare: within a pair, the same kernels run."""

    launches: Source
    lengths: tuple[tuple[int, int], ...] = (SHORT, LONG)


SOURCES: dict[str, dict[str, Compared]] = {
    "decode": {"mlx-vlm": Compared(mlx_vlm_decode), "ours": Compared(our_decode, ((512, 1024), LONG))},
    "encode": {"mlx-vlm": Compared(mlx_vlm_encode, (TILES,)), "ours": Compared(our_encode, (TILES,))},
}
"""What is compared, by step and name."""


def _short(name: str) -> str:
    """A kernel's name without the types and constants that MLX appends."""
    return _TYPES.sub("", name.split("__")[0])


def rows(
    source: str, case: Case, tokens: tuple[int, int], launches: Source | None = None, step: str = "decode"
) -> list[Row]:
    """One row for each kernel of a step, and their sum when there are several."""
    make = launches or SOURCES[step][source].launches
    parts = per_kernel(lambda n: make(case, n), *tokens, case.elements)
    if not parts:
        raise ValueError(f"{source} launches no kernel for {case}")
    found = [Row(step, source, case, tokens, _short(p.kernels[0]), p) for p in parts]
    return [*found, Row(step, source, case, tokens, "all", sum_of(parts))] if len(parts) > 1 else found


def table(found: Sequence[Row]) -> str:
    """The rows as text, in columns."""
    head = (
        *("source", "case", "tokens", "kernel", "ops/elem", "fused", "issued", "address", "fixed"),
        *("bytes/token", "asked/token", "threads", "regs"),
    )
    cells = [head] + [
        (
            r.source,
            str(r.case),
            f"{r.tokens[0]}-{r.tokens[1]}",
            r.kernel,
            f"{r.marginal.total:.2f}",
            f"{r.marginal.fused_total:.2f}",
            f"{r.marginal.issued:.2f}",
            f"{r.marginal.address:.2f}",
            f"{r.marginal.fixed:.0f}",
            f"{r.marginal.distinct_bytes_per_token:.0f}",
            f"{r.marginal.bytes_per_token:.0f}",
            str(r.marginal.threads),
            str(r.marginal.registers),
        )
        for r in found
    ]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    lines = []
    for row in cells:
        padded = (c.ljust(w) if k < 4 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(padded).rstrip())
    for r in found:
        parts = ", ".join(f"{k} {v:.3g}" for k, v in r.marginal.operations.items() if v) or "none"
        lines.append(f"{r.source}, {r.case}, {r.tokens[0]}-{r.tokens[1]}, {r.kernel}: {parts}")
    return "\n".join([*lines[: len(cells)], "", "Operations per element, by category:", *lines[len(cells) :]])


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The table of docs/kernels.md from the rows of a JSON file: whole steps, without the kernels they consist of."""
    lines = [
        "| step | D | K/V bits | tokens | whose | operations | fused | fixed | bytes/token | threads | values alive |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    key = ("step", "source", "dim", "key_bits", "value_bits", "tokens")
    whole = {tuple(map(str, (r[k] for k in key))) for r in found if r["kernel"] == "all"}
    for r in found:
        if r["kernel"] != "all" and tuple(map(str, (r[k] for k in key))) in whole:
            continue
        cells = (
            r["step"],
            r["dim"],
            f"{r['key_bits']}/{r['value_bits']}",
            f"{r['tokens'][0]:,} to {r['tokens'][1]:,}",
            r["source"],
            f"{r['operations_per_element']:.1f}",
            f"{r['fused_operations_per_element']:.1f}",
            f"{r['fixed_operations'] / 1e6:.2f} M",
            f"{r['distinct_bytes_per_token']:.0f}",
            f"{r['threads']:,}",
            r["registers"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _widths(text: str) -> tuple[int, int]:
    key, _, value = text.partition(",")
    if not (key.isdigit() and value.isdigit()):
        raise argparse.ArgumentTypeError(f"widths are key bits and value bits, such as 4,3; got {text!r}")
    return int(key), int(value)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="python -m turboquant_vlm.conformance.costs",
        description="Count the operations and bytes of decode kernels from their Metal text, beside mlx-vlm's.",
    )
    p.add_argument("--dim", type=int, action="append", metavar="D", help="head dimension, repeatable (default: 128)")
    p.add_argument(
        "--widths", type=_widths, action="append", metavar="K,V",
        help="bits of keys and values, repeatable (default: 4,4 and 4,3)",
    )  # fmt: skip
    p.add_argument(
        "--step", choices=tuple(SOURCES), action="append", help="what to count, repeatable (default: decode)"
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return p


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 2 when nothing can be counted on this machine."""
    args = parser().parse_args(argv)
    reason = unavailable_reason() or count_unavailable_reason()
    if reason is not None:
        print(f"costs cannot be counted here: {reason}", file=sys.stderr)
        return 2
    mx.set_default_device(mx.Device(mx.cpu))
    cases = [Case(d, k, v) for d in args.dim or [128] for k, v in args.widths or [(4, 4), (4, 3)]]
    found = [
        row
        for step in args.step or ["decode"]
        for case in cases
        for name, compared in SOURCES[step].items()
        for tokens in compared.lengths
        for row in rows(name, case, tokens, step=step)
    ]
    print(json.dumps([row.to_json() for row in found], indent=1) if args.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
