"""Stand-ins for kernels: modules written to a folder, most of them the reference with one fault."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.conformance.backend import from_mx
from turboquant_vlm.fast import targets
from turboquant_vlm.fast.targets import Target

_HEAD = """\
import functools, os, sys, time
import mlx.core as mx
from dataclasses import replace
from turboquant_vlm import reference
from turboquant_vlm.reference import *
from turboquant_vlm.reference import ALLOWED_BITS, FIRST, LAG, RING, TILE

armed = False
calls = 0
"""
FAULTS = {
    "none": "",
    # The text of the Metal kernels, run on the processor.
    "hosted": """
from turboquant_vlm.conformance.metal_host import host_call
from turboquant_vlm.fast import launch
from turboquant_vlm.fast.metal import *
launch.set_default(host_call)
""",
    "hosted, one wrong bit": """
from turboquant_vlm.conformance.metal_host import host_call
from turboquant_vlm.fast import launch
from turboquant_vlm.fast.metal import *

def flips(kernel, **call):
    first, *rest = host_call(kernel, **call)
    words = mx.contiguous(first).reshape(-1).view(mx.uint8)
    return [(words ^ (mx.arange(words.size) == 2)).view(first.dtype).reshape(first.shape), *rest]

launch.set_default(flips)
""",
    "does not compile": """
@functools.wraps(reference.attend)
def attend(*args, **kwargs):
    raise RuntimeError("Unable to build metal library from source\\nerror: no such type")
""",
    "one wrong bit": """
@functools.wraps(reference.attend)
def attend(*args, **kwargs):
    out = reference.attend(*args, **kwargs)
    words = mx.contiguous(out).reshape(-1).view(mx.uint8)
    return (words ^ (mx.arange(words.size) == 5)).view(out.dtype).reshape(out.shape) if words.size else out
""",
    "aborts": """
@functools.wraps(reference.append)
def append(*args, **kwargs):
    os.abort()
""",
    "hangs": """
@functools.wraps(reference.append)
def append(*args, **kwargs):
    time.sleep(600)
""",
    "leaves early": """
@functools.wraps(reference.append)
def append(*args, **kwargs):
    os._exit(0)
""",
    "leaves on import": "sys.exit(0)\n",
    "cannot be imported": "import module_that_nobody_has\n",
    "another signature": """
def attend(q, keys, values, scale, **options):
    return reference.attend(q, keys, values, scale, **options)
""",
    "lacks a function": "del stack_rows\n",
    "noise": "print('half a line', end='')\nprint('turboquant-gate {', file=sys.stdout)\n",
    "third attend": """
@functools.wraps(reference.attend)
def attend(*args, **kwargs):
    global calls
    calls += armed
    if calls == 3:
        raise RuntimeError("pipeline state could not be made")
    return reference.attend(*args, **kwargs)
""",
    "second attend, when computed": """
@functools.wraps(reference.attend)
def attend(*args, **kwargs):
    global calls
    calls += armed
    out = reference.attend(*args, **kwargs)
    if calls == 2:
        mx.save(__file__ + ".npy", mx.zeros(10000))
        late = mx.load(__file__ + ".npy")
        os.truncate(__file__ + ".npy", 200)
        return out + late[0].astype(out.dtype)
    return out
""",
    "refuses what is right": """
@functools.wraps(reference.attend)
def attend(*args, **kwargs):
    if armed:
        raise ValueError("output_shapes must not be empty")
    return reference.attend(*args, **kwargs)
""",
}


class Fakes:
    """Writes faulty modules into a folder that this process and its children import from."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        self._names: list[str] = []
        folder.mkdir()
        patch.syspath_prepend(str(folder))

    def target(self, fault: str, name: str = "metal") -> Target:
        """A target whose module has ``fault``, one of `FAULTS`."""
        module = f"turboquant_fake_{len(self._names)}_{abs(hash(fault)) % 10**6}"
        self._names.append(module)
        self.path(module).write_text(_HEAD + FAULTS[fault])
        importlib.invalidate_caches()
        return Target(name, module)

    def path(self, module: str) -> Path:
        return self.folder / f"{module}.py"

    def serve(self, *fakes: Target) -> None:
        """Make these the only targets."""
        self._patch.setattr(targets, "TARGETS", fakes)

    def unload(self) -> None:
        for name in self._names:
            sys.modules.pop(name, None)


def noise(shape: Sequence[int], seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float16))


def generation(functions: Any, steps: int = 6) -> list[Any]:
    """The words of a prefill of 150 tokens and ``steps`` decoded ones, with D = 12, 4-bit keys and 3-bit values."""
    keys = functions.empty_tokens(functions.make_codec(12, 4), "key", 1, 2, mx.float16)
    values = functions.empty_tokens(functions.make_codec(12, 3, seed=1), "value", 1, 2, mx.float16)
    out = []
    for step, count in enumerate([150] + [1] * steps):
        keys = functions.append(keys, noise((1, 2, count, 12), 10 * step))
        values = functions.append(values, noise((1, 2, count, 12), 10 * step + 1))
        queries = noise((1, 4, count, 12), 10 * step + 2)
        mask = "causal" if count > 1 else None
        out.append(from_mx(functions.attend(queries, keys, values, 0.3, mask=mask)))
    out.append(from_mx(functions.raw_tokens(functions.trim(keys, 3))))
    return out


def same_bits(functions: Any) -> bool:
    """Whether a generation gives the reference's bits."""
    pairs = zip(generation(functions), generation(reference), strict=True)
    return all(got.dtype == want.dtype and np.array_equal(got.words, want.words) for got, want in pairs)
