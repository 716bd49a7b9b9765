"""``turboquant-vlm demo``: mlx-vlm's own command line on real weights, with the quantized cache.

The demo adds nothing to the path that a user takes. It makes sure that SmolLM2-135M-Instruct is there and then
runs ``turboquant-vlm generate`` in this process, on a text of 545 tokens with a question at its end. The answer
stands near the front of the text, among the tokens that are packed by the time the model answers, so a cache
that lost them would be noticed. Whatever flag the demo does not know goes to ``generate`` as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files

from .weights import WeightsError, say, smollm2

# Small enough that the bar moves every few seconds on a CPU.
PREFILL_STEP = 128
ANSWER = "Clara Whitfield, in 1874"


def built_in_prompt() -> str:
    """The demo's text and question: 545 tokens with SmolLM2's chat template."""
    return files(__package__).joinpath("demo_prompt.txt").read_text(encoding="utf-8").strip()


def generate_arguments(model: str, prompt: str, options: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """The command line behind the demo.

    Args:
        model: model folder, or a name on the model hub.
        prompt: what the user says, before the chat template.
        options: the demo's own flags, as :func:`main` parses them.
        more: flags for ``generate`` that the demo does not know; they come last and so win.
    """
    settings = {
        "--model": model,
        "--prompt": prompt,
        "--max-tokens": options.max_tokens,
        "--kv-bits": options.kv_bits,
        "--quantized-kv-start": options.quantized_kv_start,
        "--prefill-step-size": PREFILL_STEP,
        "--temperature": 0,
    }
    # One word for each pair, so that a prompt which begins with a dash is not taken for a flag.
    return ["generate", *(f"{flag}={value}" for flag, value in settings.items()), "--verbose", *more]


def parser() -> argparse.ArgumentParser:
    """The demo's own flags."""
    parser = argparse.ArgumentParser(
        prog="turboquant-vlm demo",
        description="Answer a question about a text with SmolLM2-135M-Instruct and a quantized KV cache.",
        epilog="Other flags go to `turboquant-vlm generate`.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt", help="ask this in place of the built-in text and question")
    parser.add_argument("--model", help="another model folder (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--max-tokens", type=int, default=40, help="longest answer (default: %(default)s)")
    parser.add_argument("--kv-bits", type=float, default=3.5, help="bits per coordinate (default: %(default)s)")
    parser.add_argument(
        "--quantized-kv-start", type=int, default=0, help="first token to quantize (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the demo.

    Args:
        argv: flags after ``demo``.

    Returns:
        0 when the model answered, 1 when its weights could not be had (the reason is on standard error), else
        the exit status of ``generate``.
    """
    options, more = parser().parse_known_args(argv)
    try:
        model = options.model or str(smollm2())
    except WeightsError as error:
        say(f"turboquant-vlm demo: {error}")
        return 1
    # The command line imports this module, and it loads mlx-vlm, which takes seconds: the download comes first.
    from .cli import main as command_line

    say(f"Loading the model, reading the prompt and answering, with a KV cache of {options.kv_bits:g} bits.")
    say("On a CPU with two cores this takes one to two minutes; the bar counts the tokens of the prompt.")
    prompt = built_in_prompt() if options.prompt is None else options.prompt
    status = command_line(generate_arguments(model, prompt, options, more))
    if options.prompt is None and not options.model:
        say(f"The text says: {ANSWER}.")
    return status or 0
