"""Measure what quantization costs: ``python -m turboquant_vlm.integration.quality``.

Three parts, each on its own or all with ``--all``:

* by default, a real model: SmolLM2-135M-Instruct reads windows of English prose with teacher forcing, once with a
  float16 cache, once with each quantized cache in every layer; next-token distributions are compared position by
  position,
* ``--synthetic``: the attention output on made-up caches with awkward keys,
* ``--memory``: the bytes that real caches hold at 3.5 bits.

Progress goes to standard error, Markdown tables to standard output, and all numbers to the file of ``--json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from .bits import ALLOWED_BITS
from .quality_attention import float_cache, packed_cache, upstream_cache
from .quality_memory import measure_memory
from .quality_model import Llama, load_llama
from .quality_report import (
    OURS,
    UPSTREAM,
    Record,
    environment,
    memory_record,
    quality_record,
    synthetic_record,
    tables,
)
from .quality_statistics import Comparison, Summary, compare, summarize
from .quality_synthetic import BITS, TOKENS, measure_synthetic
from .weights import MANIFEST, Log, say, smollm2

PROSE = Path(__file__).with_name("prose.txt")
MODEL = "SmolLM2-135M-Instruct"
DEFAULT_BITS = ((4, 4), (4, 3), (3, 4), (3, 3), (8, 4))

Bits = tuple[int, int]


def windows_of(text: str, folder: Path, windows: int, tokens: int) -> list[list[int]]:
    """The first windows of a text, one after the other, as token ids of the model in ``folder``.

    Raises:
        ValueError: the text is too short.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < windows * tokens:
        raise ValueError(
            f"{windows} windows of {tokens} tokens need {windows * tokens} tokens; the text has {len(ids)}"
        )
    return [ids[start : start + tokens] for start in range(0, windows * tokens, tokens)]


def measure_model(
    model: Llama, windows: list[list[int]], bits: Sequence[Bits], upstream: bool = True, log: Log = say
) -> list[tuple[str, Bits, Summary]]:
    """Run every window with a float cache and with each quantized one, and compare.

    bits: of keys and values. upstream: measure mlx-vlm's codec beside this project's.
    Returns (cache, bits, summary) in the order of ``bits``, this project's before mlx-vlm's.
    """
    expected = []
    for number, tokens in enumerate(windows, 1):
        started = time.monotonic()
        expected.append(model.hidden(tokens, float_cache))
        log(f"float16, window {number} of {len(windows)}: {time.monotonic() - started:.0f} s")
    measured = []
    for pair in bits:
        caches = {OURS: packed_cache(*pair)}
        if upstream:
            caches[UPSTREAM] = upstream_cache(*pair)
        for name, attention in caches.items():
            comparisons: list[Comparison] = []
            for number, (tokens, hidden) in enumerate(zip(windows, expected, strict=True), 1):
                started = time.monotonic()
                comparisons.append(compare(model, hidden, model.hidden(tokens, attention), tokens))
                log(
                    f"{name} {pair[0]}/{pair[1]}, window {number} of {len(windows)}: "
                    f"KL {comparisons[-1].kl.mean():.5f} nats, {time.monotonic() - started:.0f} s"
                )
            measured.append((name, pair, summarize(comparisons)))
    return measured


def model_part(args: argparse.Namespace) -> Record:
    """The first part, from the command line's arguments."""
    folder = smollm2()
    text = (args.text or PROSE).read_text(encoding="utf-8")
    windows = windows_of(text, folder, args.windows, args.tokens)
    say(f"{MODEL}, {args.windows} windows of {args.tokens} tokens")
    measured = measure_model(load_llama(folder), windows, args.bits)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return {
        "model": MODEL,
        "weights_sha256": manifest["files"]["model.safetensors"]["sha256"],
        "text": args.text.name if args.text else PROSE.name,
        "text_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "windows": args.windows,
        "tokens": args.tokens,
        "rows": [quality_record(*row) for row in measured],
    }


def synthetic_part(args: argparse.Namespace) -> Record:
    """The second part."""
    rows = [synthetic_record(case, errors) for case, errors in measure_synthetic(seeds=args.seeds)]
    return {"tokens": TOKENS, "bits": BITS, "seeds": args.seeds, "rows": rows}


def memory_part(_: argparse.Namespace) -> Record:
    """The third part."""
    return {"bits": 3.5, "rows": [memory_record(memory) for memory in measure_memory()]}


def parse_bits(text: str) -> Bits:
    """``4/3`` as (4, 3): bits per coordinate of keys and values."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) in ALLOWED_BITS for part in parts):
        raise argparse.ArgumentTypeError(
            f"bits are KEYS/VALUES, each 1 to 6 or 8 per coordinate, such as 4/3; got {text!r}"
        )
    return int(parts[0]), int(parts[1])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _window_length(text: str) -> int:
    # The last token has no next one, so a window of one token measures no perplexity.
    if _positive(text) < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2; got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turboquant_vlm.integration.quality",
        description="Measure what a quantized cache costs in quality and saves in memory.",
    )
    parser.add_argument("--windows", type=_positive, default=4, help="windows of text (default: %(default)s)")
    parser.add_argument("--tokens", type=_window_length, default=1024, help="tokens of a window (default: %(default)s)")
    parser.add_argument(
        "--bits", type=parse_bits, nargs="+", default=list(DEFAULT_BITS), metavar="K/V", help="bits of keys and values"
    )
    parser.add_argument("--text", type=Path, help="a text file to read instead of the prose that comes with this")
    parser.add_argument("--seeds", type=_positive, default=8, help="synthetic caches of a kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--synthetic", action="store_true", help="measure synthetic caches instead of the model")
    parser.add_argument("--memory", action="store_true", help="count the bytes of caches instead")
    parser.add_argument("--all", action="store_true", help="all three parts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = _parser()
    args = parser.parse_args(argv)
    result: Record = {"environment": environment()}
    try:
        if args.memory or args.all:
            result["memory"] = memory_part(args)
        if args.synthetic or args.all:
            result["synthetic"] = synthetic_part(args)
        if args.all or not (args.memory or args.synthetic):
            result["model"] = model_part(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(tables(result).values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
