"""The Metal kernels' text on an NVIDIA card: the same bodies, with Metal's words exchanged for CUDA's.

A backend for `python -m turboquant_vlm.conformance --backend conformance.cuda_target` on an `mlx[cuda13]` installation.
It shows that the text gives the contract's bits on real parallel hardware; it is not tuned and serves nobody. Nothing
of the logic is rewritten: qualifiers of address spaces go, positions and barriers get their CUDA names, and
`cuda_words.cuh` defines the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from turboquant_vlm.fast import kernels, launch, metal
from turboquant_vlm.reference import __all__ as _names

WORDS = Path(__file__).with_name("cuda_words.cuh")
_CLOSE = "}  // namespace turboquant\nusing namespace turboquant;\n"
_EXCHANGED = {
    r'_Pragma\("clang loop unroll\(full\)"\)': '_Pragma("unroll")',
    r"\b(?:threadgroup|device|thread|constant) ": "",
    r"\b(float2|uint2|char2)\(": r"tq_\1(",
    r"\bthreadgroup_barrier\([^()]*\)": "__syncthreads()",
    r"\bsimdgroup_barrier\([^()]*\)": "__syncwarp()",
    r"\bthread_position_in_threadgroup\b": "threadIdx",
    r"\bthreadgroup_position_in_grid\b": "blockIdx",
    r"\bthread_index_in_simdgroup\b": "(threadIdx.x & 31)",
    r"\bsimdgroup_index_in_threadgroup\b": "(threadIdx.x >> 5)",
}
_SHARED = re.compile(r"^(\s*)threadgroup (?=[\w ]+? \w+\[)", re.MULTILINE)
_FUNCTION = re.compile(r"^inline ", re.MULTILINE)


def cuda_text(text: str, body: bool) -> str:
    """Metal text as CUDA text. body: the inside of a kernel function, where threadgroup arrays are declared."""
    text = _SHARED.sub(r"\1__shared__ ", text) if body else _FUNCTION.sub("__device__ inline ", text)
    for word, other in _EXCHANGED.items():
        text = re.sub(word, other, text)
    return text


@functools.cache
def cuda_kernel(kernel: kernels.Kernel) -> Callable[..., Any]:
    """A kernel as an object of `mx.fast.cuda_kernel`."""
    header = WORDS.read_text(encoding="utf-8") + cuda_text(kernel.header, body=False) + _CLOSE
    made: Any = mx.fast.cuda_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=cuda_text(kernel.body, body=True),
        header=header,
    )
    return made


def on_cuda(kernel: Callable[..., Any], **call: Any) -> Any:
    """A launcher for NVIDIA cards. Raises RuntimeError where MLX has none."""
    if not mx.cuda.is_available():
        raise RuntimeError("MLX has no CUDA device here; the CUDA text of the kernels cannot run")
    return cuda_kernel(kernels.source_of(kernel))(**call)


def __getattr__(name: str) -> Any:
    if name not in _names:
        raise AttributeError(name)
    return launch.through(on_cuda, getattr(metal, name))
