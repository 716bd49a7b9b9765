"""The host runner on mlx-vlm's own Metal kernels: it finds the faults known in 0.7.10, and passes what is sound."""

import importlib.metadata

import mlx.core as mx
import numpy as np
import pytest

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

from turboquant_vlm.conformance.metal_host import record  # noqa: E402

VERSION = "0.7.10"


def _installed():
    try:
        return importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        return None


_missing = metal_host.unavailable_reason() or (
    None if _installed() == VERSION else f"the faults are those of mlx-vlm {VERSION}; {_installed()} is installed"
)
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"mlx-vlm's kernels were not run: {_missing}")


@pytest.fixture(autouse=True)
def _on_the_processor():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


class Runs:
    """A launcher that runs with checks, raises nothing, and keeps the findings by kernel."""

    def __init__(self):
        self.found = {}
        self.recorder = record.Recorder(self.execute)

    def execute(self, dispatch, inputs):
        result = metal_host.run(dispatch, inputs, timeout=60)
        name = dispatch.name.removeprefix("custom_kernel_").split("__")[0]
        self.found.setdefault(name, []).extend(result.findings.errors)
        return result.outputs


def normal(*shape, seed=3):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def append(dim, bits=4, **widths):
    """One token appended to a cache, as decoding does."""
    runs = Runs()
    with record.mlx_vlm_kernels(runs.recorder) as turboquant:
        cache = turboquant.TurboQuantKVCache(bits=bits, **widths)
        mx.eval(cache.update_and_fetch(normal(1, 2, 1, dim), normal(1, 2, 1, dim, seed=4))[0])
    return runs.found


def decode(dim, tokens, query_heads=4, kv_heads=2, **widths):
    """One query token over a packed cache, and the same without Metal."""
    from mlx_vlm import turboquant

    cache = turboquant.TurboQuantKVCache(bits=4, **widths)
    shape = (1, kv_heads, tokens, dim)
    states = cache.update_and_fetch(normal(*shape), normal(*shape, seed=4))
    query = normal(1, query_heads, 1, dim, seed=5)
    plain = cache.decode_attention(query, *states, scale=dim**-0.5)
    runs = Runs()
    with record.mlx_vlm_kernels(runs.recorder):
        out = cache.decode_attention(query, *states, scale=dim**-0.5)
        mx.eval(out)
    return runs.found, out, plain


@pytest.mark.parametrize("dim", [80, 96, 160, 192])
def test_append_sums_norms_that_no_thread_wrote(dim):
    ((name, found),) = append(dim).items()
    assert name == "turboquant_fused_kv_quantize_k4_v4"
    faults = [f for f in found if f.kind == "uninitialized_threadgroup_read"]
    assert faults, found
    assert {(f.buffer, f.text.strip()) for f in faults} == {
        ("sg_norms", "float total_sq = (sg_id == 0 && sg_lid < 8) ? sg_norms[sg_lid] : 0.0f;")
    }
    # One simdgroup for each 32 dimensions writes one norm; eight are summed.
    assert min(f.index for f in faults) == -(-dim // 32)


def test_append_with_eight_simdgroups_writes_all_norms():
    found = [f for faults in append(240).values() for f in faults]
    assert "uninitialized_threadgroup_read" not in {f.kind for f in found}


def test_tiled_score_reads_past_the_row():
    found, _, _ = decode(80, 65)
    faults = [f for f in found["turboquant_mse_score_tiled_2"] if f.kind == "out_of_bounds_read"]
    assert faults, found
    # Lanes 16 and up have no third dimension, yet read its word: behind the last row, that is behind the buffer.
    for f in faults:
        assert (f.buffer, f.text.strip()) == ("packed", "uint vv = (pt[k_words[i]] >> k_offs[i]);")
        assert f.index >= 2 * 65 * 10


@pytest.mark.parametrize("widths", [{}, {"key_bits": 4, "value_bits": 3}])
@pytest.mark.parametrize("tokens", [70, 2050])
def test_decode_at_128_has_no_fault(tokens, widths):
    found, out, plain = decode(128, tokens, query_heads=2, kv_heads=1, **widths)
    passes = ["sdpa_2pass1", "sdpa_2pass2"] if tokens > 2048 else ["fused_mse_sdpa"]
    assert len(found) == len(passes)
    assert all(any(p in name for name in found) for p in passes)
    assert not [f for faults in found.values() for f in faults]
    np.testing.assert_allclose(np.array(out), np.array(plain), atol=2e-4)
