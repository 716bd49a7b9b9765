"""Negative controls: a judge that cannot say no is worth nothing.

Each mutant is a copy of the reference with one deliberate mistake in its text, one that a port could make.  The
conformance suite has to refuse every one of them, and to accept the copy without a mistake.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from reference_helpers import differs, vectors

import turboquant_vlm.reference as reference
from turboquant_vlm.conformance import run_suite

Load = Callable[["Mutant | None"], ModuleType]
SOURCE = Path(reference.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One replacement of text in one file of the reference; `old` occurs exactly once."""

    name: str
    file: str
    old: str
    new: str


# The first two of the remaining splits are merged, then the result with the next.
IN_SEQUENCE = """        a, x = parts
        head = merge(a[:, :, :1], x[:, :, :1], a[:, :, 1:2], x[:, :, 1:2])
        parts = tuple(mx.concatenate([h, rest[:, :, 2:]], axis=2) for h, rest in zip(head, parts, strict=True))
        continue
"""

MUTANTS = [
    # Numbers.
    Mutant(
        "snap rounds halves up", "integers.py", "mx.round(x * pow2(bits - e))", "mx.floor(x * pow2(bits - e) + 0.5)"
    ),
    Mutant("snap keeps NaN", "integers.py", "x = mx.where(finite, x, 0.0)", "x = mx.where(mx.isnan(x), 1.0, x)"),
    Mutant("zero threshold of snap", "integers.py", "zero = largest < 2.0**-80", "zero = largest < 2.0**-70"),
    Mutant(
        "shift rounds halves up",
        "integers.py",
        "above = (remainder > half) | (tie & odd)",
        "above = remainder >= half",
    ),
    Mutant(
        "sticky bit of the scale lost",
        "integers.py",
        "(unit - shift + k).astype(mx.int64), sticky)",
        "(unit - shift + k).astype(mx.int64))",
    ),
    Mutant("scale has no subnormals", "integers.py", "mx.maximum(e - 11, -24)", "mx.maximum(e - 11, -23)"),
    Mutant(
        "scale overflows to infinity",
        "integers.py",
        "mx.where((unit > 5) | (bits > 0x7BFF), 0x7BFF, bits)",
        "mx.where((unit > 5) | (bits > 0x7BFF), 0x7C00, bits)",
    ),
    Mutant("root of eight bits less", "codec.py", "isqrt(square << 16)", "(isqrt(square) << 8)"),
    Mutant("halves without rounding", "integers.py", "high = (n + 64) >> 7", "high = n >> 7"),
    # Rotation and codebook.
    Mutant("signs of another seed", "rotation.py", "state = (seed << 32)", "state = ((seed + 1) << 32)"),
    Mutant("signs from the top bit", "rotation.py", "-1 if z >> bit & 1", "-1 if z >> (63 - bit) & 1"),
    Mutant(
        "Sylvester outside, Paley inside",
        "rotation.py",
        "return np.kron(matrix, sylvester)",
        "return np.kron(sylvester, matrix)",
    ),
    Mutant("Paley transposed", "rotation.py", "matrix[1:, 0] = -1", "matrix[0, 1:] = -1"),
    Mutant(
        "rotation not transposed back",
        "rotation.py",
        "_matvec(y, hadamard(dim)) * signs",
        "_matvec(y, hadamard(dim).T) * signs",
    ),
    Mutant("boundary belongs to the upper code", "codec.py", "(y > threshold.astype", "(y >= threshold.astype"),
    Mutant(
        "boundary rounds to nearest",
        "codec.py",
        "(rho * int(lower + upper)) >> 16",
        "(rho * int(lower + upper) + 32768) >> 16",
    ),
    Mutant(
        "eight bits truncate",
        "codec.py",
        "(254 * mx.abs(y) + largest) // mx.maximum(2 * largest, 1)",
        "(127 * mx.abs(y)) // mx.maximum(largest, 1)",
    ),
    # Layout.
    Mutant(
        "spare planes of three bits in reverse",
        "packing.py",
        "[(nibbles[..., 3, :] >> j) & 1 for j in range(3)]",
        "[(nibbles[..., 3, :] >> (2 - j)) & 1 for j in range(3)]",
    ),
    Mutant(
        "sign bit inverted",
        "codec.py",
        "mx.where(index < half, 2 * half - 1 - index, index - half)",
        "mx.where(index < half, half - 1 - index, index)",
    ),
    Mutant("rank counts from the sign's side", "codec.py", "2 * half - 1 - index, index", "half + index, index"),
    Mutant(
        "upper bits first",
        "packing.py",
        "[pack(codes & 15, 4), pack(codes >> 4, bits - 4)]",
        "[pack(codes >> 4, bits - 4), pack(codes & 15, 4)]",
    ),
    # Keys: base, factors, scale.
    Mutant(
        "scale is the norm, not unbiased",
        "codec.py",
        "half_from_ratio(coded.square, coded.inner,",
        "half_from_ratio(coded.inner, codec.dim * mx.sum(coded.centroids.astype(mx.int64) ** 2, -1, keepdims=True),",
    ),
    Mutant(
        "exponent of the base off by one",
        "codec.py",
        "top[..., 0, 0].astype(mx.int16)",
        "(top[..., 0, 0] + 1).astype(mx.int16)",
    ),
    Mutant(
        "base truncates",
        "codec.py",
        "mx.round(mx.sum(aligned, axis=-2, keepdims=True) / TILE)",
        "mx.floor(mx.sum(aligned, axis=-2, keepdims=True) / TILE)",
    ),
    Mutant("factors take equality", "codec.py", "(threshold * scaled < total)", "(threshold * scaled <= total)"),
    Mutant(
        "factors measured in every tile's place",
        "codec.py",
        "channel_factors(residual[..., :TILE, :])",
        "channel_factors(residual[..., -TILE:, :])",
    ),
    Mutant(
        "factors the wrong way round", "codec.py", "enlarged * pow2(factors.astype", "enlarged * pow2(-factors.astype"
    ),
    Mutant("non-finite vector keeps its residual", "codec.py", "    residual = mx.where(finite, residual, 0)\n", ""),
    Mutant(
        "second signs equal the first",
        "codec.py",
        "y2 = rotate(z2, codec.seed, stream=1)",
        "y2 = rotate(z2, codec.seed, stream=0)",
    ),
    # What a query reads.
    Mutant("lag one token too short", "types.py", "LAG = 32", "LAG = 31"),
    Mutant(
        "query reads packed one token too early",
        "attention.py",
        "* TILE + LAG <= positions[:, None] + 1",
        "* TILE + LAG - 1 <= positions[:, None] + 1",
    ),
    Mutant("first tokens one short", "attention.py", "complete & (j >= FIRST)", "complete & (j >= FIRST - 1)"),
    Mutant(
        "tiles shifted by one token",
        "tokens.py",
        "recent.shape[2] - after + old * TILE, new - old",
        "recent.shape[2] - after + old * TILE + 1, new - old",
    ),
    Mutant(
        "left padding of a chunk kept", "tokens.py", "x[b : b + 1, :, length - real[b] :]", "x[b : b + 1, :, : real[b]]"
    ),
    Mutant(
        "left padding of a mask ignored",
        "masks.py",
        "part[..., padding[row] : padding[row] + lengths[row]]",
        "part[..., : lengths[row]]",
    ),
    Mutant("causal without the token itself", "masks.py", "allowed & (j <= i)", "allowed & ((j < i) | (i == 0))"),
    Mutant("window one too wide", "masks.py", "(i - j < view.window)", "(i - j <= view.window)"),
    Mutant("a ring too short to take 32 tokens back", "types.py", "RING = 128", "RING = 126"),
    # Logits.
    Mutant(
        "query heads interleaved instead of grouped",
        "attention.py",
        "prepare_query(q.reshape(heads, group * queries, q.shape[2])",
        "prepare_query(q.reshape(group, heads, queries, -1).swapaxes(0, 1).reshape(heads, group * queries, -1)",
    ),
    Mutant(
        "factor missing on the query",
        "query.py",
        "divided * pow2(-keys.packed.factors[0]",
        "divided * pow2(0 * keys.packed.factors[0]",
    ),
    Mutant("query not scaled to base two", "query.py", "np.float32(scale * LOG2_E)", "np.float32(scale)"),
    Mutant("query rotated with 13 bits", "query.py", "rotated, h, _ = snap(v, 12)", "rotated, h, _ = snap(v, 13)"),
    Mutant("raw keys at 13 bits", "attention.py", "RAW_KEY_BITS = 14", "RAW_KEY_BITS = 13"),
    Mutant(
        "logits round halves up",
        "query.py",
        "mx.round(y * pow2(mx.clip(exponent, -100, 60)))",
        "mx.floor(y * pow2(mx.clip(exponent, -100, 60)) + 0.5)",
    ),
    Mutant("logits not clamped", "query.py", "LIMIT = 2**28", "LIMIT = 2**29"),
    Mutant(
        "base left out of the logit",
        "attention.py",
        "total = total + mx.repeat(of_tile, TILE, axis=2)",
        "total = total + 0 * mx.repeat(of_tile, TILE, axis=2)",
    ),
    Mutant(
        "sign code left out of the logit",
        "attention.py",
        "total + _code_logits(query.twice, query.twice_exponent, signs, sign_scales)",
        "total",
    ),
    Mutant("additive mask in base e", "masks.py", "known * LOG2_E_FLOAT32 * 4096.0", "known * 4096.0"),
    # Softmax.
    Mutant(
        "exponent of a tile is a floor",
        "attention.py",
        "exponent = (largest + (2**FRACTION - 1)) >> FRACTION",
        "exponent = (largest >> FRACTION) + 1",
    ),
    Mutant(
        "weights truncate",
        "attention.py",
        "mx.where(s > 13, 0, mx.round(product)",
        "mx.where(s > 13, 0, mx.floor(product)",
    ),
    Mutant("shares truncate", "attention.py", "mx.round(u * pow2(13 - e))", "mx.floor(u * pow2(13 - e))"),
    Mutant(
        "sink dropped", "attention.py", "    if sinks is not None:\n        per_row", "    if False:\n        per_row"
    ),
    Mutant(
        "sink counted twice",
        "attention.py",
        "weight = _weight((e << FRACTION) - logits).astype(mx.float32)",
        "weight = 2 * _weight((e << FRACTION) - logits).astype(mx.float32)",
    ),
    Mutant(
        "sink in base e",
        "attention.py",
        "logits, _ = additive_logits(sink)",
        "logits, _ = additive_logits(sink / 1.442695)",
    ),
    Mutant("splits of two tiles", "attention.py", "SPLIT = 4", "SPLIT = 2"),
    Mutant("splits of eight tiles", "attention.py", "SPLIT = 4", "SPLIT = 8"),
    Mutant("splits in sequence instead of a tree", "attention.py", "        a, x = parts\n", IN_SEQUENCE),
    Mutant(
        "tree over halves instead of neighbours",
        "attention.py",
        "merge(a[:, :, 0::2], x[:, :, 0::2], a[:, :, 1::2], x[:, :, 1::2])",
        "merge(*(h for n in [a.shape[2] // 2] for h in (a[:, :, :n], x[:, :, :n], a[:, :, n:], x[:, :, n:])))",
    ),
    Mutant("identity is not neutral", "integers.py", "IDENTITY_EXPONENT = -(2**20)", "IDENTITY_EXPONENT = 0"),
    Mutant("merge keeps what is far below", "integers.py", "(k < -40)", "(k < -60)"),
    Mutant("merge at the smaller exponent", "integers.py", "m = mx.maximum(x, y)", "m = mx.minimum(x, y)"),
    # Output.
    Mutant(
        "quotient truncates",
        "integers.py",
        "quotient * mantissa_b != scaled)\n    k = drop",
        "quotient * mantissa_b < 0)\n    k = drop",
    ),
    Mutant(
        "negative zero",
        "integers.py",
        "mx.where(top < -100, 0.0, mx.where(numerator < 0, -y, y))",
        "mx.where(numerator < 0, -y, y)",
    ),
    Mutant(
        "poison of values unseen",
        "attention.py",
        "poison = poison | bad.reshape(heads, -1, logits.shape[2])",
        "poison = poison | (0 * bad.reshape(heads, -1, logits.shape[2])).astype(mx.bool_)",
    ),
    Mutant(
        "poison of masked tokens",
        "attention.py",
        "mx.any(allowed & poison, axis=-1, keepdims=True)",
        "mx.any(poison, axis=-1, keepdims=True)",
    ),
    Mutant(
        "poison wins over nothing allowed",
        "attention.py",
        "out = mx.where(mx.any(allowed, axis=-1, keepdims=True), out, 0.0)",
        "out = out + 0",
    ),
]

# No vector trims tile 0 away and then fixes other factors, so the suite is blind to this one.
STALE_FACTORS = Mutant(
    "factors survive the trim of their tile",
    "tokens.py",
    "    packed = _first_tiles(tokens.packed, tiles)\n    if tiles == 0 and not tokens.factors_given:",
    "    packed = _first_tiles(tokens.packed, tiles)\n    if False:",
)

# Changes that leave every bit alone; the suite must not notice them, or it would judge more than the contract.
HARMLESS = [
    Mutant("another block size", "attention.py", "BLOCK = 2**22", "BLOCK = 2**12"),
    Mutant("a longer ring", "types.py", "RING = 128", "RING = 192"),
]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Imports a copy of the reference with a mutant's text, under a name of its own."""
    name = "turboquant_mutant"

    def build(mutant: Mutant | None) -> ModuleType:
        folder = tmp_path / name
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = folder / mutant.file
            text = path.read_text(encoding="utf-8")
            assert text.count(mutant.old) == 1, f"{mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}"
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        assert module.attend.__module__ == f"{name}.attention"
        return module

    yield build
    for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[loaded]


def test_names_are_unique() -> None:
    names = [m.name for m in [*MUTANTS, STALE_FACTORS, *HARMLESS]]
    assert len(set(names)) == len(names)


def test_the_copy_itself_is_accepted(load: Load) -> None:
    result = run_suite(load(None), quick=True)
    assert result.passed, result.verdict()
    assert len(result.cases) > 100


@pytest.mark.parametrize("mutant", HARMLESS, ids=lambda m: m.name)
def test_harmless_changes_are_accepted(load: Load, mutant: Mutant) -> None:
    result = run_suite(load(mutant), quick=True)
    assert result.passed, result.verdict()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mistakes_are_caught(load: Load, mutant: Mutant) -> None:
    result = run_suite(load(mutant), quick=True, stop_at_first=True)
    assert not result.passed, f"nobody noticed: {mutant.name}"
    # A mutant that merely fails to run would show nothing about the vectors.
    first = result.failures[0].problems[0]
    assert not any(error in first for error in ("SyntaxError", "NameError", "AttributeError", "TypeError")), first


def test_stale_factors_are_caught(load: Load) -> None:
    """By the tests' own expectation: a row that was emptied and filled again equals a new one."""

    def refilled_equals_new(backend: ModuleType) -> bool:
        x = vectors((1, 1, 100, 16), 0)
        loud = x * mx.array((2.0 ** (np.arange(16) % 4)).astype(np.float16))
        new = backend.append(backend.empty_tokens(backend.make_codec(16, 4), "key", 1, 1, mx.float16), loud)
        old = backend.append(backend.empty_tokens(backend.make_codec(16, 4), "key", 1, 1, mx.float16), x)
        again = backend.append(backend.trim(old, 100), loud)
        return not differs(again.packed.words, new.packed.words)

    assert refilled_equals_new(reference)
    assert not refilled_equals_new(load(STALE_FACTORS))
