"""The command: ``python -m turboquant_vlm.conformance --backend reference --random 2000``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx

from .backend import UnknownBackend
from .suite import UnknownGroup, group_names, run_suite, vectors


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m turboquant_vlm.conformance",
        description="Compare a backend with the numerics contract, bit by bit. "
        "Exit code 0 if it agrees, 1 if not, 2 for a wrong argument.",
    )
    p.add_argument("--backend", default="reference", help="a module of turboquant_vlm (default: reference)")
    p.add_argument("--device", choices=("cpu", "gpu"), help="MLX device (default: MLX's own)")
    p.add_argument("--random", type=int, default=0, metavar="N", help="also run N random cases")
    p.add_argument("--seed", type=int, default=0, help="which stream of random cases (default: 0)")
    p.add_argument("--group", action="append", metavar="G", help="only this group; may be repeated")
    p.add_argument("--quick", action="store_true", help="a small subset of the vectors")
    p.add_argument("--gate", action="store_true", help="the vectors of the device check")
    p.add_argument("--part", default="0/1", metavar="I/N", help="only the I-th of N shares of the cases, from 0")
    p.add_argument(
        "--list", action="store_true", help="list groups, vectors and what each is for, and run nothing"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return p


def list_vectors(groups: list[str] | None) -> None:
    for case in vectors():
        if groups is None or case["group"] in groups:
            print(f"{case['id']:<40} {' '.join(case['flags']):<40} {case['comment']}")


def _part(text: str) -> tuple[int, int] | None:
    share, _, shares = text.partition("/")
    if not (share.isdigit() and shares.isdigit() and int(share) < int(shares)):
        return None
    return int(share), int(shares)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    unknown = set(args.group or ()) - set(group_names())
    if unknown:
        print(
            f"--group must be one of {', '.join(group_names())}; got {', '.join(sorted(unknown))}",
            file=sys.stderr,
        )
        return 2
    if args.random < 0 or not 0 <= args.seed < 2**63:
        print(
            f"--random must be 0 or more and --seed 0 .. 2^63 - 1; got {args.random} and {args.seed}",
            file=sys.stderr,
        )
        return 2
    part = _part(args.part)
    if part is None:
        print(f"--part must be I/N with 0 <= I < N; got {args.part}", file=sys.stderr)
        return 2
    if args.list:
        list_vectors(args.group)
        return 0
    if args.device is not None:
        device = mx.Device(mx.gpu if args.device == "gpu" else mx.cpu)
        if args.device == "gpu" and not mx.is_available(device):
            print("--device gpu: this build of MLX has no GPU here; cpu is available", file=sys.stderr)
            return 2
        mx.set_default_device(device)
    try:
        result = run_suite(args.backend, args.group, args.random, args.seed, args.quick, gate=args.gate, part=part)
    except (UnknownBackend, UnknownGroup) as error:
        print(error, file=sys.stderr)
        return 2
    print(result.table())
    print(result.verdict())
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
