"""Faulty kernels on the Metal host runner: each planted fault is found, and named with its line.

``@@`` in a kernel marks the line that the finding has to name.
"""

import mlx.core as mx
import numpy as np
import pytest

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

pytestmark = pytest.mark.skipif(not metal_host.available(), reason=str(metal_host.unavailable_reason()))

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HEAD = """kernel void planted(const device float* a [[buffer(0)]], device float* o [[buffer(1)]],
    uint i [[thread_position_in_grid]], uint l [[thread_position_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
"""


def plant(body, n=64, group=64, out=64, a=None, dtype=mx.float32, source=None, **options):
    """Runs a planted kernel; gives the result and the marked line."""
    text = source or HEAD + body + "\n}\n"
    marked = [k for k, row in enumerate(text.splitlines(), 1) if "@@" in row]
    a = mx.arange(64).astype(mx.float32) if a is None else a
    r = metal_host.run_source(
        text.replace("@@", "//"), [a], grid=(n, 1, 1), threadgroup=(group, 1, 1), output_shapes=[(out,)],
        output_dtypes=[dtype], **options,
    )  # fmt: skip
    return r, marked[0] if marked else None


FAULTS = {
    "read right of an input": ("out_of_bounds_read", "float v = a[i + 1]; @@\n o[i] = v;", {}),
    "read left of an input": ("out_of_bounds_read", "float v = a[int(i) - 1]; @@\n o[i] = v;", {}),
    "read far to the right": ("out_of_bounds_read", "float v = a[i + 10000000]; @@\n o[i] = v;", {}),
    "vector read over the end": (
        "out_of_bounds_read",
        "float4 v = *(const device float4*)(a + 4 * (i / 4)); \n"
        "if (i == 63) v = *(const device float4*)(a + i + 1); @@\n o[i] = v.x;",
        {},
    ),
    "write right of an output": ("out_of_bounds_write", "o[i + (i == 63 ? 1 : 0)] = a[i]; @@", {}),
    "write left of an output": ("out_of_bounds_write", "o[int(i) - 1] = a[i]; @@", {}),
    "threadgroup read over the end": (
        "out_of_bounds_read",
        f"threadgroup float s[64]; threadgroup float* p = s; p[l] = a[i]; {BARRIER}\n o[i] = p[l + 1]; @@",
        {},
    ),
    "index of a threadgroup array": (
        "array_bounds",
        f"threadgroup float s[64]; s[l] = a[i]; {BARRIER}\n o[i] = s[l + 1]; @@",
        {},
    ),
    "index of a private array": ("array_bounds", "float t[4] = {1, 2, 3, 4};\n o[i] = t[i & 7]; @@", {}),
    "uninitialised threadgroup memory": (
        "uninitialized_threadgroup_read",
        f"threadgroup float s[64]; if (l < 63) s[l] = a[i]; {BARRIER}\n o[i] = s[63 - l]; @@",
        {},
    ),
    "threadgroup memory of the group before": (
        "uninitialized_threadgroup_read",
        f"threadgroup float s[32]; if (g == 0) s[l] = a[i]; {BARRIER}\n o[i] = s[31 - l]; @@",
        {"group": 32},
    ),
    "output read before it is written": ("uninitialized_output_read", "o[i] += a[i]; @@", {}),
    "missing barrier, read after write": (
        "race_read_write",
        "threadgroup float s[64]; s[l] = a[i];\n o[i] = s[63 - l]; @@",
        {},
    ),
    "missing barrier, write after read": (
        "race_read_write",
        f"threadgroup float s[64]; s[l] = a[i]; {BARRIER}\n float v = s[63 - l];\n s[l] = v; @@\n o[i] = v;",
        {},
    ),
    "barrier for the wrong memory": (
        "race_read_write",
        "threadgroup float s[64]; s[l] = a[i]; threadgroup_barrier(mem_flags::mem_device);\n o[i] = s[63 - l]; @@",
        {},
    ),
    "two writers": ("race_write_write", "threadgroup float s[1];\n s[0] = a[i]; @@\n o[i] = a[i];", {}),
    "two writers of one output element": ("race_write_write", "o[i] = 0.0f;\n o[i & 31] = a[i]; @@", {}),
    "packed nibbles by two threads": (
        "race_write_write",
        "device uchar* bytes = (device uchar*)o; if (l < 32) o[i] = 0; simdgroup_barrier(mem_flags::mem_device);\n"
        "if (l < 32) bytes[l / 2] = uchar(l); @@",
        {"out": 32},
    ),
    "simdgroup barrier between simdgroups": (
        "race_read_write",
        "threadgroup float s[64]; s[l] = a[i]; simdgroup_barrier(mem_flags::mem_threadgroup);\n o[i] = s[63 - l]; @@",
        {},
    ),
    "plain read beside atomic updates": (
        "race_read_write",
        "device atomic_uint* n = (device atomic_uint*)o;\n"
        "atomic_fetch_add_explicit(n + 1, 1u, memory_order_relaxed);\n"
        "if (l == 5) n[0].tq_value = as_type<uint>(o[1]); @@",
        {"out": 2, "init_value": 0},
    ),
    "writes of two threadgroups": ("race_across_threadgroups", "o[l] = a[i]; @@", {"group": 32, "out": 32}),
    "read of another threadgroup's output": (
        "race_across_threadgroups",
        "o[i] = a[i]; threadgroup_barrier(mem_flags::mem_device);\n if (g == 1) o[i] = o[i - 32]; @@",
        {"group": 32},
    ),
    "barrier in one branch": (
        "barrier_divergence",
        f"if (l < 32)\n {BARRIER} @@\n o[i] = a[i];",
        {},
    ),
    "barrier after some threads returned": (
        "barrier_divergence",
        f"o[i] = a[i]; if (l >= 60) return;\n {BARRIER} @@",
        {},
    ),
    "two different barriers": (
        "barrier_divergence",
        f"if (l & 1) {{\n {BARRIER} @@\n }} else {{\n {BARRIER}\n }} o[i] = a[i];",
        {},
    ),
    "simd sum in one branch": (
        "simd_divergence",
        "float v = a[i];\n if (lane < 16)\n v = simd_sum(v); @@\n o[i] = v;",
        {},
    ),
    "simd sum after lanes returned": (
        "simd_divergence",
        "o[i] = a[i]; if (i >= 50) return;\n o[i] = simd_sum(a[i]); @@",
        {},
    ),
    "shuffle from a lane that is not there": (
        "simd_inactive_lane",
        "o[i] = simd_shuffle_xor(a[i], ushort(16)); @@",
        {"n": 20, "out": 20},
    ),
    "order of a floating-point simd sum": ("float_order", "o[i] = simd_sum(1.0f / (a[i] + 1.0f)); @@", {}),
    "endless loop": ("hang", "uint k = i;\n while (k != 1000001) k += 2; @@\n o[i] = float(k);", {"timeout": 0.3}),
    "endless barriers": ("hang", f"while (true) {{\n {BARRIER} @@\n }} o[i] = 1;", {"timeout": 0.3}),
    "null pointer": (
        "null_pointer",
        "device float* p = nullptr; if (a[0] > 100) p = o;\n o[i] = 1; p[i] = a[i]; @@",
        {},
    ),
    "private memory without end": (
        "crash",
        None,
        {
            "source": HEAD[:-1]
            + " @@\n float big[400000];\n for (uint k = 0; k < 400000; k += 99) big[(k + i) % 400000] = a[i];\n"
            + " o[i] = big[i];\n}\n"
        },
    ),
    "shift by the width": ("shift", "uint s = uint(a[i]);\n o[i] = float(1u << s); @@", {}),
    "signed overflow": ("overflow", "int v = 0x7FFFFFF0;\n v += int(a[i]); @@\n o[i] = float(v);", {}),
    "division by zero": ("division", "int v = int(a[i]);\n o[i] = float(100 / v); @@", {}),
    "float beyond the integer type": ("float_to_int", "float v = a[i] * 1e9f;\n o[i] = float(int(v)); @@", {}),
    "misaligned vector": ("misaligned", "float2 v = *(const device float2*)(a + (i & 1)); @@\n o[i] = v.x;", {}),
    "too much threadgroup memory": (
        "threadgroup_memory",
        "threadgroup float s[9000]; @@\n s[l] = a[i]; o[i] = s[l];",
        {},
    ),
    "write to an input": ("write_to_input", "device float* p = (device float*)a;\n p[i] = 1; @@\n o[i] = 1;", {}),
    "function called from two branches": (
        "simd_divergence",
        None,
        {
            "source": "inline float total(float v) {\n  return simd_sum(v); @@\n}\n"
            + HEAD
            + "float v; if (lane & 1) {\n v = total(a[i]);\n } else {\n v = total(2.0f * a[i]);\n }\n o[i] = v; }\n"
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_with_its_line(fault):
    kind, body, options = FAULTS[fault]
    r, line = plant(body, **options)
    found = r.findings.of(kind)
    assert found, f"{fault} was not found; found {r.findings}"
    assert line in {f.line for f in found}, str(r.findings)
    assert f"{line}: {kind}" in str(r.findings)


def test_out_of_bounds_names_buffer_index_and_thread():
    r, _ = plant("o[i] = a[i + 3];")
    (f,) = r.findings.of("out_of_bounds_read")
    assert (f.buffer, f.index, f.thread) == ("a", 64, "thread (61, 0, 0) of threadgroup (0, 0, 0)")
    assert not r.completed


def test_race_names_both_lines_and_threads():
    r, _ = plant("threadgroup float s[64];\n s[l] = a[i];\n o[i] = s[63 - l];")
    (f,) = r.findings.of("race_read_write")[:1]
    assert ({f.line, f.other_line}, f.buffer) == ({5, 6}, "s")
    assert f.thread != f.other_thread


def test_unwritten_output_names_the_parameter_and_the_first_element():
    r, _ = plant("if (i != 17) o[i] = a[i];")
    (f,) = r.findings.of("unwritten_output")
    assert (f.buffer, f.index, f.line, f.detail) == ("o", 17, 1, "1 of 64 elements")
    assert np.isnan(np.array(r.outputs[0])[17])


def test_faults_on_neighbouring_bytes_are_not_races():
    r, _ = plant("device uchar* bytes = (device uchar*)o; bytes[l] = uchar(l);", out=16)
    assert not r.findings.errors, str(r.findings)
    np.testing.assert_array_equal(np.array(r.outputs[0]).view(np.uint8), np.arange(64))


def test_float_atomics_are_noted_and_integer_ones_are_not():
    text = "device atomic_{0}* n = (device atomic_{0}*)o; atomic_fetch_add_explicit(n, {1}, memory_order_relaxed);"
    r, _ = plant(text.format("float", "a[i]"), out=1, init_value=0)
    assert r.findings.kinds == {"float_order"}
    r, _ = plant(text.format("uint", "1u"), out=1, init_value=0)
    assert not len(r.findings)


def test_float_order_changes_the_result_of_a_simd_sum():
    a = mx.array(np.random.default_rng(1).standard_normal(64).astype(np.float32))
    sums = {
        np.array(plant("o[i] = simd_sum(a[i]);", a=a, simd_float_order=order)[0].outputs[0]).tobytes()
        for order in ("tree", "forward", "reverse", "shuffle:1", "shuffle:2")
    }
    assert len(sums) > 1


def test_float_sums_that_are_exact_do_not_depend_on_the_order():
    r, _ = plant("o[i] = simd_sum(a[i]) + float(simd_sum(int(i)));")
    assert not len(r.findings)


def test_outputs_that_depend_on_the_thread_order_are_named():
    source = HEAD + "threadgroup float s[1]; s[0] = a[i]; " + BARRIER + " o[i] = s[0];\n}\n"
    d = metal_host.Dispatch(source, "x", (64, 1, 1), (64, 1, 1), ((64,),), (mx.float32,))
    r = metal_host.run_orders(d, [mx.arange(64).astype(mx.float32)])
    assert {"order_dependence", "race_write_write"} <= r.findings.kinds


def test_checks_choose_what_is_reported():
    body = "threadgroup float s[64]; s[l] = a[i];\n o[i] = s[63 - l];"
    assert plant(body, checks=["unwritten_output"])[0].findings.kinds == set()
    assert plant(body, checks=False)[0].findings.kinds == set()
    with pytest.raises(ValueError, match="checks must name kinds"):
        plant(body, checks=["speed"])


def test_large_threadgroups_are_noted_and_impossible_ones_refused():
    r, _ = plant("o[i] = 1;", n=1024, group=1024, out=1024)
    assert r.findings.kinds == {"threadgroup_size"}
    assert not r.findings.errors
    with pytest.raises(ValueError, match="at most 1024 threads"):
        plant("o[i] = 1;", n=2048, group=2048, out=2048)


def test_text_that_does_not_compile_names_its_line():
    with pytest.raises(metal_host.MetalCompileError, match=r"kernel\.metal:5:"):
        plant("o[i] = 1;\n o[i] = undeclared;")
    with pytest.raises(metal_host.MetalCompileError, match="bfloat"):
        plant("bfloat b = a[i]; o[i] = b;")
    with pytest.raises(metal_host.MetalTextError, match="exactly one kernel"):
        plant(None, source="void f() {}")


def test_host_call_raises_warns_or_ignores():
    k = mx.fast.metal_kernel(
        name="short", input_names=["a"], output_names=["o"],
        source="uint i = thread_position_in_grid.x; if (i > 0) o[i] = a[i];",
    )  # fmt: skip
    call = {
        "inputs": [mx.zeros((8,))],
        "grid": (8, 1, 1),
        "threadgroup": (8, 1, 1),
        "output_shapes": [(8,)],
        "output_dtypes": [mx.float32],
    }
    with pytest.raises(metal_host.FindingsError, match=r"unwritten_output.*o\[0\]") as caught:
        metal_host.host_call(k, **call)
    assert caught.value.findings.kinds == {"unwritten_output"}
    with pytest.warns(UserWarning, match="unwritten_output"):
        metal_host.host_call(k, on_findings="warn", **call)
    assert len(metal_host.host_call(k, on_findings="ignore", **call)) == 1


TREE = f"""
    threadgroup float s[128];
    threadgroup float total[4];
    s[l] = a[i] + a[127 - i];
    {BARRIER}
    for (uint width = 64; width >= 32; width /= 2) {{
      if (l < width) s[l] += s[l + width];
      {BARRIER}
    }}
    float v = l < 32 ? s[l] : 0.0f;
    {BARRIER}
    s[127 - l] = simd_sum(v);
    {BARRIER}
    if (lane == 0) total[l / 32] = s[l];
    {BARRIER}
    float sum = total[0] + total[1] + total[2] + total[3];
    {BARRIER}
    total[l / 32 == 0 ? 3 - (l & 3) : l / 32 - 1] = 0;
    o[i] = sum;
"""


def _tree(body):
    return plant(body, n=128, group=128, out=128, a=mx.arange(128).astype(mx.float32))[0]


def test_removing_any_one_barrier_is_noticed():
    # The last statement only races with the reads before it when lanes of one simdgroup share a place: keep it sound.
    body = TREE.replace("total[l / 32 == 0 ? 3 - (l & 3) : l / 32 - 1] = 0;", "if (l < 4) total[3 - l] = 0;")
    whole = _tree(body)
    assert not whole.findings.errors, str(whole.findings)
    assert np.array(whole.outputs[0]).tolist() == [float(127 * 128)] * 128
    pieces = body.split(BARRIER)
    assert len(pieces) == 7
    for k in range(1, len(pieces)):
        mutant = BARRIER.join(pieces[:k]) + ";" + BARRIER.join(pieces[k:])
        assert _tree(mutant).findings.errors, f"without barrier {k} nothing was found"
