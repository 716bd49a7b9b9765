"""The exchange of Metal's words for CUDA's; running the result needs an NVIDIA card."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from turboquant_vlm import reference
from turboquant_vlm.conformance import cuda_target, run_suite
from turboquant_vlm.fast import kernels, launch, metal

METAL_WORDS = re.compile(
    r"\bthreadgroup\b|\bdevice\b|\bthread \w|\bconstant\b|_in_grid|_in_threadgroup|_in_simdgroup|mem_flags|metal::"
    r"|\b(?:float2|uint2|char2)\("
)


def built() -> list[kernels.Kernel]:
    """Kernels of every template, without running them."""
    seen = []

    def recording(kernel: object, **call: object) -> object:
        seen.append(kernels.source_of(kernel))
        return [mx.zeros(s, dtype=d) for s, d in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    x = mx.array(np.random.default_rng(0).standard_normal((1, 1, 1200, 64)).astype(np.float32))
    keys, values = (
        reference.append(reference.empty_tokens(reference.make_codec(64, 4), role, 1, 1, mx.float32), x)
        for role in ("key", "value")
    )
    with launch.using(recording):
        metal.attend(x[:, :, :1], keys, values, 0.1, sinks=mx.array([0.0]))
        metal.attend(x[:, :, :2], keys, values, 0.1, mask=mx.zeros((1, 1)))
        metal.scores(x[:, :, :1], keys, 0.1)
        packed = metal.quantize(x[0, :, :64], reference.make_codec(64, 3, kind="prod"), base=True)
        metal.dequantize(packed, reference.make_codec(64, 3, kind="prod"))
    return seen


def test_no_word_of_metal_is_left() -> None:
    found = built()
    assert {k.name.split("_")[1] for k in found} >= {"attend", "merge", "scores", "encode", "dequantize"}
    for kernel in found:
        for text, body in ((kernel.header, False), (kernel.body, True)):
            cuda = re.sub(r"//[^\n]*", "", cuda_target.cuda_text(text, body))
            left = METAL_WORDS.search(cuda)
            assert left is None, (kernel.name, left)
        shared = len(re.findall(r"^\s*threadgroup [\w ]+ \w+\[", kernel.body, re.MULTILINE))
        assert shared > 0
        assert cuda_target.cuda_text(kernel.body, True).count("__shared__") == shared


def test_without_a_card_the_target_says_so() -> None:
    if mx.cuda.is_available():
        pytest.skip("an NVIDIA card is here: what happens without one was not checked")
    x = mx.zeros((64, 64))
    with pytest.raises(RuntimeError, match="no CUDA device"):
        cuda_target.quantize(x, reference.make_codec(64, 4))


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device: the CUDA text was not run")
def test_the_vectors_of_the_device_check_agree_on_cuda() -> None:
    result = run_suite(cuda_target, gate=True)
    assert result.passed, result.verdict()
