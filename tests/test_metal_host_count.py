"""Operation counts of kernels whose counts are known by hand."""

import mlx.core as mx
import numpy as np
import pytest

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

from turboquant_vlm.conformance.metal_host import count, count_build, count_ir, record  # noqa: E402

_missing = metal_host.unavailable_reason() or count.count_unavailable_reason()
needs_clang = pytest.mark.skipif(_missing is not None, reason=f"the operation counts were not checked: {_missing}")

N = 64
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def counted(body, n=N, group=N, inputs=None, dtype=mx.float32, out=None, before=""):
    inputs = [mx.arange(N).astype(mx.float32)] if inputs is None else inputs
    kernel = mx.fast.metal_kernel(
        name="counted", input_names=[f"a{i}" if i else "a" for i in range(len(inputs))], output_names=["o"],
        source="uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n" + body, header=before,
    )  # fmt: skip
    dispatch = metal_host.capture(
        lambda *xs: kernel(
            inputs=list(xs), grid=(n, 1, 1), threadgroup=(group, 1, 1), output_shapes=[(out or n,)],
            output_dtypes=[dtype],
        )[0],
        *inputs,
    )  # fmt: skip
    return count.count_operations(dispatch, inputs)


def per_thread(counts):
    return {k: v / counts.threads for k, v in counts.operations.items() if v}


LOAD_STORE = {"device_load": 1.0, "device_store": 1.0}
KNOWN = {
    "copy": ("o[i] = a[i];", {}),
    "ten fused multiply-adds": (
        "float v = a[i]; for (int k = 0; k < 10; ++k) v = fma(v, 1.5f, 0.5f); o[i] = v;",
        {"fma": 10.0},
    ),
    "multiply and add stay two": ("o[i] = a[i] * 3.0f + 1.5f;", {"float": 2.0}),
    "integer multiply": ("uint v = as_type<uint>(a[i]); o[i] = as_type<float>(v * (v | 1u));",
                         {"int": 1.0, "int_multiply": 1.0}),
    "high half": ("uint v = as_type<uint>(a[i]); o[i] = as_type<float>(mulhi(v, v));", {"int_multiply": 1.0}),
    "shift, mask, xor": ("uint v = as_type<uint>(a[i]); o[i] = as_type<float>((v ^ 0x55u) >> 4 & 0xFF0Fu);",
                         {"int": 3.0}),
    "64 bits": ("ulong v = ulong(as_type<uint>(a[i])) * 0x123456789ul; o[i] = as_type<float>(uint(v >> 40));",
                {"int64": 2.0, "conversion": 1.0}),
    "conversion": ("o[i] = float(as_type<int>(a[i]));", {"conversion": 1.0}),
    "rint": ("o[i] = rint(a[i]);", {"float": 1.0}),
    "compare and select are one": ("float v = a[i]; o[i] = v > 3.0f ? v : 7.0f;", {"compare": 1.0}),
    "minimum": ("o[i] = min(a[i], 3.0f);", {"compare": 1.0}),
    "exp": ("o[i] = exp(a[i]);", {"special": 1.0}),
    "rsqrt": ("o[i] = rsqrt(a[i]);", {"special": 1.0}),
    "division": ("o[i] = 3.0f / a[i];", {"special": 1.0}),
    "leading zeros": ("o[i] = as_type<float>(clz(as_type<uint>(a[i])));", {"int": 1.0}),
    "bit field": ("o[i] = as_type<float>(extract_bits(as_type<uint>(a[i]), 4u, 5u));", {"int": 1.0}),
    "simd sum": ("o[i] = simd_sum(a[i]);", {"simd": 1.0}),
    "shuffle": ("o[i] = simd_shuffle_xor(a[i], ushort(1));", {"simd": 1.0}),
    "simd sum of a vector": ("float4 v = float4(a[i]); o[i] = simd_sum(v).x;", {"simd": 1.0}),
    "all four of them": ("float4 v = simd_sum(float4(a[i], 1, 2, 3)); o[i] = v.x + v.y + v.z + v.w;",
                         {"simd": 4.0, "float": 3.0}),
    "barrier and threadgroup memory": (
        f"threadgroup float s[64]; s[l] = a[i]; {BARRIER} o[i] = s[l ^ 1];",
        {"barrier": 1.0, "threadgroup_load": 1.0, "threadgroup_store": 1.0, "int": 1.0},
    ),
    "atomic": ("device atomic_uint* n = (device atomic_uint*)o; "
               "atomic_fetch_or_explicit(n + i, as_type<uint>(a[i]), memory_order_relaxed);",
               {"atomic": 1.0, "int": 1.0, "device_load": 2.0}),
    "table": ("o[i] = a[i] + table[as_type<uint>(a[i]) & 7];", {"float": 1.0, "int": 1.0, "constant_load": 1.0}),
    "helper function": ("o[i] = twice(a[i]);", {"float": 1.0}),
    "helper that is not inlined": ("o[i] = apart(a[i]);", {"float": 1.0, "branch": 1.0}),
    "vector loads count once per four bytes": (
        "uint4 v = ((const device uint4*)a)[i & 15]; o[i] = as_type<float>(v.x ^ v.y ^ v.z ^ v.w);",
        {"device_load": 4.0, "int": 4.0},
    ),
}  # fmt: skip
HEADER = """
constant float table[8] = {1, 2, 3, 4, 5, 6, 7, 9};
inline float twice(float v) { return v * 2.5f; }
__attribute__((noinline)) float apart(float v) { return v * 2.5f; }
"""


@needs_clang
@pytest.mark.parametrize("name", KNOWN)
def test_known_counts(name):
    body, expected = KNOWN[name]
    assert per_thread(counted(body, before=HEADER)) == {**LOAD_STORE, **expected}


@needs_clang
@pytest.mark.parametrize(("dtype", "conversions"), [(mx.float16, 1), (mx.bfloat16, 1), (mx.float32, 0)])
def test_sixteen_bit_floats_convert_once(dtype, conversions):
    counts = counted("o[i] = float(a[i]) * 3.0f;", inputs=[mx.arange(N).astype(dtype)])
    assert per_thread(counts) == {
        **LOAD_STORE, "float": 1.0, **({"conversion": 1.0} if conversions else {})
    }  # fmt: skip


@needs_clang
def test_a_loop_of_run_time_length_counts_each_turn():
    body = "float v = a[i]; for (int k = 0; k < turns; ++k) v = fma(v, a[(i + k) & 63], 1.0f); o[i] = v;"
    inputs = [mx.arange(N).astype(mx.float32), mx.array([100.0] * 20)]
    turns = [counted(body.replace("turns", f"int(a1[0]) + {k}"), inputs=inputs) for k in (0, 10)]
    assert [c.operations["fma"] for c in turns] == [100 * N, 110 * N]
    assert [c.operations["device_load"] for c in turns] == [(100 + 1 + 1) * N, (110 + 1 + 1) * N]


@needs_clang
def test_a_branch_counts_what_its_threads_do():
    counts = counted("float v = a[i]; if (i < 16) { v = fma(v, v, v); o[i + 16] = fma(v, v, 1.0f); }", out=80)
    assert counts.operations["fma"] == 2 * 16
    assert counts.operations["device_store"] == 16
    assert counts.operations["branch"] == N
    # The first simdgroup waits for its sixteen lanes; the second skips the branch.
    within = sum(counts.operations[c] for c in ("fma", "int", "device_load", "device_store"))
    assert counts.issued == counts.total + within


@needs_clang
def test_fusible_pairs():
    multiply = counted("o[i] = a[i] * 3.0f + 1.5f;")
    assert (multiply.total, multiply.fused_total) == (4 * N, 3 * N)
    mask = counted("o[i] = as_type<float>(as_type<uint>(a[i]) >> 4 & 0xF0Fu);")
    assert (mask.total, mask.fused_total) == (4 * N, 3 * N)


@needs_clang
def test_bytes_by_buffer():
    shared = counted("o[i] = a[i & 7] + float(a1[i]);", inputs=[mx.arange(N).astype(mx.float32),
                                                              mx.arange(N).astype(mx.uint8)])  # fmt: skip
    a, b, o = shared.buffers
    assert (a.name, a.loads, a.bytes_read, a.distinct_read) == ("a", N, 4 * N, 4 * 8)
    assert (b.name, b.loads, b.bytes_read, b.distinct_read) == ("a1", N, N, N)
    assert (o.name, o.stores, o.bytes_written, o.distinct_written) == ("o", N, 4 * N, 4 * N)
    assert (shared.distinct_bytes_read, shared.bytes_read) == (32 + N, 5 * N)


@needs_clang
def test_small_inputs_are_constant():
    counts = counted("o[i] = a1[0] * a[i];", inputs=[mx.arange(N).astype(mx.float32), mx.array([2.0])])
    assert per_thread(counts) == {**LOAD_STORE, "float": 1.0, "constant_load": 1.0}
    assert [b.constant for b in counts.buffers] == [False, True, False]


@needs_clang
def test_counting_computes_what_a_run_computes_and_repeats():
    body = f"""
    threadgroup float s[64]; s[l] = exp(a[i] * -0.1f); {BARRIER}
    float sum = 0; for (uint k = 0; k < 64; ++k) sum += s[(k + l) & 63];
    uint4 v = as_type<uint4>(float4(sum, a[i], 2, 3)) >> 1u;
    simd_vote vote = simd_ballot(i & 1);
    o[i] = simd_sum(sum) + float(v.y) + rint(sum) + float(ulong(vote)) + (vote.all() ? 1.0f : 0.0f);
    """
    source = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n" + body
    kernel = mx.fast.metal_kernel(name="both", input_names=["a"], output_names=["o"], source=source)
    sizes = {"grid": (N, 1, 1), "threadgroup": (N, 1, 1), "output_shapes": [(N,)], "output_dtypes": [mx.float32]}
    a = mx.arange(N).astype(mx.float32)
    recorder = record.Recorder()
    (out,) = recorder(kernel, inputs=[a], **sizes)
    (launch,) = recorder.launches
    first, second = (count.count_operations(launch.dispatch, launch.inputs) for _ in range(2))
    assert first == second
    assert first.issued == first.total
    np.testing.assert_array_equal(np.array(first.outputs[0]), np.array(out))
    assert "both" in launch.name
    assert record.counted_outputs(launch.dispatch, launch.inputs)[0].tolist() == out.tolist()


@needs_clang
def test_simd_functions_of_every_size_compute_what_a_run_computes():
    body = """
    half h = simd_max(half(a[i])); bool b = simd_shuffle_xor(i > 5, ushort(1)); float2 f = simd_sum(float2(a[i], 1));
    uchar c = simd_broadcast(uchar(i), ushort(3)); ulong u = simd_broadcast_first(ulong(i) << 33);
    o[i] = float(h) + (b ? 1.0f : 0.0f) + f.x + f.y + float(c) + float(u) + (simd_all(i < 7) ? 1.0f : 0.0f)
        + float(simd_prefix_exclusive_sum(i));
    """
    source = "uint i = thread_position_in_grid.x;\n" + body
    kernel = mx.fast.metal_kernel(name="sizes", input_names=["a"], output_names=["o"], source=source)
    sizes = {"grid": (40, 1, 1), "threadgroup": (N, 1, 1), "output_shapes": [(40,)], "output_dtypes": [mx.float32]}
    recorder = record.Recorder()
    (out,) = recorder(kernel, inputs=[mx.arange(40).astype(mx.float32)], **sizes)
    counts = count.count_operations(recorder.launches[0].dispatch, recorder.launches[0].inputs)
    np.testing.assert_array_equal(np.array(counts.outputs[0]), np.array(out))
    assert counts.operations["simd"] == 8 * 40


@needs_clang
def test_registers_grow_with_live_values():
    def body(k):
        loads = "".join(f"float v{j} = a[(i + {j}) & 63];" for j in range(k))
        return f"{loads} for (int t = 0; t < 40; ++t) {{ {BARRIER} " + "".join(
            f"v{j} = fma(v{j}, v{(j + 1) % k}, 0.5f);" for j in range(k)
        ) + "} o[i] = " + " + ".join(f"v{j}" for j in range(k)) + ";"  # fmt: skip

    few, many = counted(body(4)).registers, counted(body(24)).registers
    assert 20 <= many - few <= 24
    assert 4 <= few <= 12


@needs_clang
def test_per_element_leaves_fixed_costs_out():
    kernel = mx.fast.metal_kernel(
        name="sum", input_names=["a"], output_names=["o"],
        source="""uint l = thread_position_in_threadgroup.x; float v = exp(a[0]); uint n = a_shape[0];
        for (uint t = l; t < n; t += 32) v = fma(a[t], 2.0f, v); o[l] = rsqrt(simd_sum(v));""",
    )  # fmt: skip

    def launches(tokens):
        recorder = record.Recorder(record.counted_outputs)
        recorder(kernel, inputs=[mx.zeros((tokens,))], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)],
                 output_dtypes=[mx.float32])  # fmt: skip
        return recorder.launches

    marginal = count.per_element(launches, 1024, 2048, 1)
    assert (marginal.operations["fma"], marginal.operations["device_load"]) == (1.0, 1.0)
    assert marginal.operations["special"] == marginal.operations["simd"] == 0.0
    assert (marginal.distinct_bytes_per_token, marginal.bytes_per_token) == (4.0, 4.0)
    with pytest.raises(ValueError, match="tokens < more_tokens"):
        count.per_element(launches, 10, 10, 1)
    with pytest.raises(ValueError, match="different kernels"):
        count.per_element(lambda t: launches(t) * (t // 1024), 1024, 2048, 1)


@needs_clang
def test_text_that_does_not_compile_says_so():
    with pytest.raises(metal_host.MetalCompileError, match=r"kernel\.metal"):
        counted("o[i] = undeclared;")


@needs_clang
def test_a_fault_while_counting_is_an_error():
    with pytest.raises(RuntimeError, match="run it with checks"):
        counted("o[i] = a[i + 100000000];")


def test_without_clang_says_why(monkeypatch):
    count_build._clang.cache_clear()
    monkeypatch.setattr(count_build, "clang", lambda: None)
    try:
        assert "clang++" in count.count_unavailable_reason()
        with pytest.raises(count.NoClangError, match=r"clang\+\+"):
            count.count_operations(None, [])
    finally:
        count_build._clang.cache_clear()


def test_both_spellings_of_pointers_are_read():
    for pointer in ("float*", "ptr"):
        text = f"define void @f({pointer} %0, i32 %1) {{\n  %3 = load float, {pointer} %0, align 4\n  ret void\n}}\n"
        (function,) = count_ir.parse(text).values()
        load = function.blocks[0].instructions[0]
        assert (function.parameters, load.type, load.uses) == (("%0", "%1"), "float", ("%0",))
        assert count_build.instrument(text.replace("@f", "@tq_entry"))[1]
    with pytest.raises(count_ir.CountIRError, match="cannot read"):
        count_ir.parse("define void @f() {\n  ???\n}\n")
