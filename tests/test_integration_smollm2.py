"""Real weights through mlx-vlm's documented Python use and its command line, with the hook in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turboquant_vlm.integration import TurboQuantKVCache, install, last_report, uninstall
from turboquant_vlm.integration.backend import resolve

pytestmark = [pytest.mark.weights, pytest.mark.slow]

# 161 tokens with the chat template, so that a tile is packed when the answer is written.
STORY = (
    "The lighthouse of Harrow Point was built in 1874 by the engineer Clara Whitfield. She had studied the rocks "
    "around the harbour for two years and chose a place on the western cliff, where the light could be seen from three "
    "sides. The tower is thirty-one metres high and has two hundred and seven steps. Its walls are made of grey "
    "granite, which was brought by barge from a quarry on the other side of the bay. The first lamp burned whale oil. "
    "Later keepers used paraffin, and an electric lamp was installed after the war.\n\n"
    "Who built the lighthouse of Harrow Point, and in which year?"
)


@pytest.fixture
def hooked() -> Iterator[None]:
    install()
    yield
    uninstall()


def test_the_documented_python_use(smollm2: Path, hooked: None) -> None:
    from mlx_vlm import generate, load
    from mlx_vlm.prompt_utils import apply_chat_template

    model, processor = load(str(smollm2), kv_bits=3.5, kv_quant_scheme="turboquant")
    prompt: Any = apply_chat_template(processor, model.config, STORY)
    result = generate(
        model,
        processor,
        prompt,
        kv_bits=3.5,
        kv_quant_scheme="turboquant",
        quantized_kv_start=0,
        prefill_step_size=64,
        max_tokens=24,
        temperature=0.0,
    )
    assert "Clara Whitfield" in result.text
    assert "1874" in result.text
    made = last_report()
    assert made is not None
    assert 161 <= made.tokens <= 161 + 24
    assert (len(made.converted), made.bits) == (29, (4, 3))
    assert made.last_layer is not None
    assert made.last_layer.index == 29
    assert made.left == ()
    assert made.max_context == 8192
    assert made.backend == resolve().name
    assert all(layer.kind == TurboQuantKVCache.__name__ for layer in made.converted)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "turboquant_vlm.integration.cli", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_the_command(smollm2: Path) -> None:
    flags = ["generate", "--model", str(smollm2), "--prompt", "What is the capital of France?", "--max-tokens", "10"]
    done = command(*flags, "--kv-bits", "3.5", "--quantized-kv-start", "0")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    quantized = f"29 of 30 layers quantized with TurboQuant, keys 4 bits, values 3 bits, backend {resolve().name}"
    assert quantized in done.stderr
    assert "Layer 29, the last, is kept in full precision" in done.stderr
    late = command(*flags, "--kv-bits", "3.5")
    assert late.stdout == done.stdout
    assert "nothing was quantized, 0 of 30 layers" in late.stderr
    assert "fewer than --quantized-kv-start 5000" in late.stderr


def test_batches(smollm2: Path, hooked: None) -> None:
    from mlx_vlm import batch_generate, load
    from mlx_vlm.prompt_utils import apply_chat_template

    model, processor = load(str(smollm2))
    texts = [STORY, "What is the capital of France?"]
    prompts: Any = [apply_chat_template(processor, model.config, text) for text in texts]
    out = batch_generate(model, processor, prompts=prompts, max_tokens=20, kv_bits=3.5, quantized_kv_start=0)
    assert "Clara Whitfield" in out.texts[0]
    assert "1874" in out.texts[0]
    assert "Paris" in out.texts[1]
