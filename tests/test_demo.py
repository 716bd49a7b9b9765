"""The demo: the command line that it builds, and its answer on the real weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turboquant_vlm.integration import cli, demo
from turboquant_vlm.integration.weights import WeightsError

Commands = list[list[str]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """What the demo hands to the command line, which is not run."""
    seen: Commands = []

    def record(argv: list[str]) -> int:
        seen.append(list(argv))
        return 0

    monkeypatch.setattr(cli, "main", record)
    monkeypatch.setattr(demo, "smollm2", lambda: tmp_path)
    return seen


def test_defaults_ask_the_built_in_question_with_a_quantized_cache(commands: Commands, tmp_path: Path) -> None:
    assert demo.main([]) == 0
    (command,) = commands
    assert command[0] == "generate"
    assert {
        f"--model={tmp_path}",
        f"--prompt={demo.built_in_prompt()}",
        "--kv-bits=3.5",
        "--quantized-kv-start=0",
        "--max-tokens=40",
        "--temperature=0",
    } <= set(command)


def test_own_flags_replace_defaults_and_other_flags_pass_through(commands: Commands) -> None:
    prompt = "--is this a flag?"
    flags = ["--max-tokens=5", "--kv-bits", "2.5", "--model", "m", "--kv-key-bits", "4", "--temperature", "0.5"]
    assert demo.main([f"--prompt={prompt}", *flags]) == 0
    (command,) = commands
    assert {f"--prompt={prompt}", "--model=m", "--max-tokens=5", "--kv-bits=2.5"} <= set(command)
    # A later flag wins over the demo's own.
    assert command[-4:] == ["--kv-key-bits", "4", "--temperature", "0.5"]


def test_an_empty_prompt_is_not_replaced(commands: Commands) -> None:
    demo.main(["--prompt", ""])
    assert "--prompt=" in commands[0]


def test_missing_weights_end_with_status_1_and_the_reason(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline() -> Path:
        raise WeightsError("no network")

    monkeypatch.setattr(demo, "smollm2", offline)
    assert demo.main([]) == 1
    assert "no network" in capsys.readouterr().err
    assert not commands


def test_status_of_generate_is_the_demo_s(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda argv: 3)
    assert demo.main([]) == 3


def test_the_answer_stands_among_the_packed_tokens() -> None:
    """Up to 95 of the last tokens stay raw: the answer must lie well before them, and the question after."""
    words = demo.built_in_prompt().split()
    assert words.index("Whitfield.") < len(words) - 200
    assert words[-12:] == [
        *("Question:", "Who", "built", "the", "lighthouse", "of"),
        *("Harrow", "Point,", "and", "in", "which", "year?"),
    ]


@pytest.mark.weights
@pytest.mark.slow
def test_demo_answers_from_the_text_with_a_quantized_cache(smollm2: Path) -> None:
    command = [sys.executable, "-m", "turboquant_vlm.integration.cli", "demo", "--max-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = done.stdout.rpartition("<|im_start|>assistant")[2]
    assert "Whitfield" in answer
    assert "1874" in answer
    report = re.search(r"(\d+) of 30 layers quantized .* keys 4 bits, values 3 bits", done.stderr)
    assert report, done.stderr
    assert report[1] == "29"
