"""Correct kernels on the Metal host runner equal NumPy, and raise no finding."""

import mlx.core as mx
import numpy as np
import pytest

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

pytestmark = pytest.mark.skipif(not metal_host.available(), reason=str(metal_host.unavailable_reason()))

RNG = np.random.default_rng(7)


def kernel(source, inputs=("a",), outputs=("o",), **options):
    names = {"input_names": list(inputs), "output_names": list(outputs)}
    return mx.fast.metal_kernel(name="t", source=source, **names, **options)


def clean(k, **call):
    """Runs a kernel in three orders of its threads; the outputs of all agree and there are no faults."""
    runs = [metal_host.host_run(k, order=order, **call) for order in ("forward", "reverse", "shuffle:3")]
    for r in runs:
        assert r.completed
        assert not r.findings.errors, str(r.findings)
        for mine, first in zip(r.outputs, runs[0].outputs, strict=True):
            assert mx.array_equal(mine, first, equal_nan=True).item()
    return runs[0].outputs


def call(n, shape, dtype=mx.float32, group=64, **more):
    return dict(
        {"grid": (n, 1, 1), "threadgroup": (group, 1, 1), "output_shapes": [shape], "output_dtypes": [dtype]}, **more
    )


@pytest.mark.parametrize("n", [1, 31, 64, 137, 300])
def test_vector_add_with_a_ragged_edge(n):
    k = kernel("uint i = thread_position_in_grid.x; o[i] = a[i] + b[i];", ("a", "b"))
    a, b = RNG.standard_normal((2, n)).astype(np.float32)
    (o,) = clean(k, inputs=[mx.array(a), mx.array(b)], **call(n, (n,)))
    np.testing.assert_array_equal(np.array(o), a + b)


def test_bound_checked_rounded_up_grid():
    k = kernel("uint i = thread_position_in_grid.x; if (i >= uint(a_shape[0])) return; o[i] = a[i] * 2.0;")
    a = RNG.standard_normal(100).astype(np.float32)
    (o,) = clean(k, inputs=[mx.array(a)], **call(128, (100,)))
    np.testing.assert_array_equal(np.array(o), a * 2)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32])
@pytest.mark.parametrize(("name", "fold"), [("sum", np.sum), ("max", np.max), ("min", np.min)])
def test_simd_reductions(dtype, name, fold):
    k = kernel(f"uint i = thread_position_in_grid.x; auto s = simd_{name}(a[i]); if (i % 32 == 0) o[i / 32] = s;")
    a = RNG.integers(0, 1000, 128).astype(dtype)
    (o,) = clean(k, inputs=[mx.array(a)], **call(128, (4,), mx.array(a).dtype))
    np.testing.assert_array_equal(np.array(o), fold(a.reshape(4, 32), axis=1))


def test_simd_bit_operations_shuffles_and_votes():
    source = """
    uint i = thread_position_in_grid.x;
    uint v = a[i];
    o[i * 10 + 0] = simd_and(v);
    o[i * 10 + 1] = simd_or(v);
    o[i * 10 + 2] = simd_xor(v);
    o[i * 10 + 3] = simd_shuffle_xor(v, 5);
    o[i * 10 + 4] = simd_shuffle(v, ushort(31 - i));
    o[i * 10 + 5] = simd_broadcast(v, 7);
    o[i * 10 + 6] = uint(ulong(simd_ballot((v & 1) != 0)));
    o[i * 10 + 7] = simd_prefix_inclusive_sum(v);
    o[i * 10 + 8] = simd_prefix_exclusive_sum(v);
    uint down = simd_shuffle_down(v, 3), up = simd_shuffle_up(v, 3);
    o[i * 10 + 9] = (i < 29 ? down : 0) + (i >= 3 ? up : 0) + uint(simd_all(v < 1000)) + uint(simd_any(v > 999));
    """
    a = RNG.integers(0, 900, 32).astype(np.uint32)
    (o,) = clean(kernel(source), inputs=[mx.array(a)], **call(32, (32, 10), mx.uint32, 32))
    lanes = np.arange(32)
    down = np.where(lanes < 29, a[np.minimum(lanes + 3, 31)], 0)
    up = np.where(lanes >= 3, a[np.maximum(lanes - 3, 0)], 0)
    ballot = sum(int(v & 1) << i for i, v in enumerate(a))
    expected = np.stack(
        [
            np.full(32, np.bitwise_and.reduce(a)),
            np.full(32, np.bitwise_or.reduce(a)),
            np.full(32, np.bitwise_xor.reduce(a)),
            a[lanes ^ 5],
            a[31 - lanes],
            np.full(32, a[7]),
            np.full(32, ballot),
            np.cumsum(a),
            np.cumsum(a) - a,
            down + up + 1,
        ],
        axis=1,
    )
    np.testing.assert_array_equal(np.array(o), expected)


TREE = """
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    threadgroup int part[128];
    part[l] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint width = threads_per_threadgroup.x / 2; width > 0; width /= 2) {
      if (l < width) part[l] += part[l + width];
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (l == 0) o[threadgroup_position_in_grid.x] = part[0];
"""


def test_threadgroup_reduction_with_barriers():
    a = RNG.integers(-1000, 1000, 512).astype(np.int32)
    (o,) = clean(kernel(TREE), inputs=[mx.array(a)], **call(512, (4,), mx.int32, 128))
    np.testing.assert_array_equal(np.array(o), a.reshape(4, 128).sum(axis=1))


def test_two_dimensional_threadgroup_array_and_a_template_function():
    header = """
    template <typename T> T turn(const threadgroup T* row, uint at) { return row[at]; }
    """
    source = """
    uint x = thread_position_in_threadgroup.x, y = thread_position_in_threadgroup.y;
    threadgroup float tile[8][9], scale;
    if (x == 0 && y == 0) scale = 2.0f;
    tile[y][x] = a[y * 8 + x];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[y * 8 + x] = turn<float>(&tile[x][0], y) * scale;
    """
    a = RNG.standard_normal((8, 8)).astype(np.float32)
    sizes = {"grid": (8, 8, 1), "threadgroup": (8, 8, 1), "output_shapes": [(8, 8)], "output_dtypes": [mx.float32]}
    (o,) = clean(kernel(source, header=header), inputs=[mx.array(a)], **sizes)
    np.testing.assert_array_equal(np.array(o), a.T * 2)


def test_atomics_on_device_and_threadgroup_memory():
    source = """
    threadgroup atomic_uint bins[4];
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    if (l < 4) atomic_store_explicit(&bins[l], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&bins[a[i] & 3], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l < 4) atomic_fetch_add_explicit(&o[l], atomic_load_explicit(&bins[l], memory_order_relaxed),
                                         memory_order_relaxed);
    atomic_fetch_max_explicit(&o[4], a[i], memory_order_relaxed);
    """
    a = RNG.integers(0, 1000, 300).astype(np.uint32)
    (o,) = clean(kernel(source, atomic_outputs=True), inputs=[mx.array(a)], init_value=0, **call(300, (5,), mx.uint32))
    np.testing.assert_array_equal(np.array(o), [*np.bincount(a & 3, minlength=4), a.max()])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_small_floats_round_each_operation(dtype):
    source = """
    uint i = thread_position_in_grid.x;
    T x = a[i], y = b[i];
    o[4 * i] = x + y; o[4 * i + 1] = x * y; o[4 * i + 2] = x / y; o[4 * i + 3] = T(float(x) * 3.0 - 1.0);
    """
    a, b = (mx.array(RNG.standard_normal(200).astype(np.float32) * 8).astype(dtype) for _ in range(2))
    (o,) = clean(kernel(source, ("a", "b")), inputs=[a, b], template=[("T", dtype)], **call(200, (200, 4), dtype))
    wide_a, wide_b = a.astype(mx.float32), b.astype(mx.float32)
    rows = [wide_a + wide_b, wide_a * wide_b, wide_a / wide_b, wide_a * 3 - 1]
    assert mx.array_equal(o, mx.stack(rows, axis=1).astype(dtype)).item()


def test_every_half_converts_both_ways():
    source = "uint i = thread_position_in_grid.x; float f = a[i]; o[i] = f; p[i] = half(f);"
    bits = np.arange(65536, dtype=np.uint16)
    k = kernel(source, outputs=("o", "p"))
    sizes = {"grid": (65536, 1, 1), "threadgroup": (512, 1, 1)}
    r = metal_host.host_run(
        k, inputs=[mx.array(bits.view(np.float16))], output_shapes=[bits.shape] * 2,
        output_dtypes=[mx.float32, mx.float16], **sizes,
    )  # fmt: skip
    assert not r.findings.errors
    numbers = ~np.isnan(bits.view(np.float16))
    np.testing.assert_array_equal(np.array(r.outputs[0]), bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.array(r.outputs[1]).view(np.uint16)[numbers], bits[numbers])


def test_float_to_half_and_bfloat_round_to_nearest_even():
    source = "uint i = thread_position_in_grid.x; o[i] = half(a[i]); p[i] = bfloat(a[i]);"
    raw = RNG.integers(0, 1 << 32, 4000, dtype=np.uint32)
    raw[:8] = [0x33000000, 0x33000001, 0x38800000, 0x387FE000, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x00000000]
    a = mx.array(raw.view(np.float32))
    k = kernel(source, outputs=("o", "p"))
    o, p = clean(
        k, inputs=[a], grid=(4000, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(4000,)] * 2,
        output_dtypes=[mx.float16, mx.bfloat16],
    )  # fmt: skip
    assert mx.array_equal(o, a.astype(mx.float16), equal_nan=True).item()
    assert mx.array_equal(p, a.astype(mx.bfloat16), equal_nan=True).item()


def test_uint4_unpack_and_swizzles():
    source = """
    uint i = thread_position_in_grid.x;
    uint4 words = ((const device uint4*)a)[i];
    uint4 low = words & 0xFu, high = (words >> 28);
    uint4 mixed = uint4(low.wz, high.xy);
    mixed.yx = mixed.xy;
    mixed.zw += uint2(1, 2);
    ((device uint4*)o)[i] = mixed;
    """
    a = RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    (o,) = clean(kernel(source), inputs=[mx.array(a)], **call(16, (16, 4), mx.uint32))
    w = a.reshape(16, 4)
    np.testing.assert_array_equal(
        np.array(o), np.stack([w[:, 2] & 15, w[:, 3] & 15, (w[:, 0] >> 28) + 1, (w[:, 1] >> 28) + 2], axis=1)
    )


def test_three_dimensional_grid_with_smaller_last_threadgroups():
    source = """
    uint3 p = thread_position_in_grid, n = threads_per_grid, g = threadgroup_position_in_grid;
    uint at = (p.z * n.y + p.y) * n.x + p.x;
    uint3 local = thread_position_in_threadgroup, size = threads_per_threadgroup;
    o[at] = uint4(thread_index_in_threadgroup, size.x * size.y * size.z, (g.z * 10 + g.y) * 10 + g.x,
                  (local.z * size.y + local.y) * size.x + local.x).x * 1000
            + size.x * 100 + size.y * 10 + size.z + (p.x == g.x * dispatch_threads_per_threadgroup.x + local.x ? 0 : 7);
    """
    grid, group = (5, 7, 3), (4, 2, 2)
    (o,) = clean(
        kernel(source, inputs=("a",)), inputs=[mx.zeros((8,))], grid=grid, threadgroup=group,
        output_shapes=[(3, 7, 5)], output_dtypes=[mx.uint32],
    )  # fmt: skip
    expected = np.zeros((3, 7, 5), np.uint32)
    for z, y, x in np.ndindex(expected.shape):
        size = [min(t, n - c // t * t) for c, n, t in zip((x, y, z), grid, group, strict=True)]
        local = [c % t for c, t in zip((x, y, z), group, strict=True)]
        index = (local[2] * size[1] + local[1]) * size[0] + local[0]
        expected[z, y, x] = index * 1000 + size[0] * 100 + size[1] * 10 + size[2]
    np.testing.assert_array_equal(np.array(o), expected)


def test_small_constant_buffers_scalars_and_several_outputs():
    source = """
    uint i = thread_position_in_grid.x;
    o[i] = a[i % 3] * s + float(n);
    p[i] = n * int(i);
    """
    k = kernel(source, ("a", "s", "n"), ("o", "p"))
    a = np.array([1, 2, 3], np.float32)
    o, p = clean(
        k, inputs=[mx.array(a), 0.5, 4], grid=(10, 1, 1), threadgroup=(10, 1, 1), output_shapes=[(10,)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(o), a[np.arange(10) % 3] * 0.5 + 4)
    np.testing.assert_array_equal(np.array(p), 4 * np.arange(10))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.int64])
def test_template_arguments(flag, dtype):
    source = """
    uint i = thread_position_in_grid.x;
    constexpr int step = N + 1;
    if (FLAG) o[i] = T(int(i) * step); else o[i] = T(int(i));
    """
    (o,) = clean(
        kernel(source), inputs=[mx.zeros((1,))], template=[("T", dtype), ("N", 2), ("FLAG", flag)],
        **call(40, (40,), dtype),
    )  # fmt: skip
    assert mx.array_equal(o, (mx.arange(40) * (3 if flag else 1)).astype(dtype)).item()


def test_header_with_constant_table_and_includes():
    header = """
    #include <metal_stdlib>
    #include <metal_simdgroup>
    using namespace metal;
    constant float levels[4] = {-1.5, -0.5, 0.5, 1.5};
    #define LEVEL(i) levels[(i) & 3]
    inline float level(uint i) { return LEVEL(i); }
    """
    k = kernel("uint i = thread_position_in_grid.x; o[i] = level(a[i]);", header=header)
    a = RNG.integers(0, 100, 50).astype(np.uint32)
    (o,) = clean(k, inputs=[mx.array(a)], **call(50, (50,)))
    np.testing.assert_array_equal(np.array(o), np.array([-1.5, -0.5, 0.5, 1.5], np.float32)[a & 3])


@pytest.mark.parametrize("contiguous", [True, False])
def test_strided_inputs_follow_ensure_row_contiguous(contiguous):
    source = """
    uint i = thread_position_in_grid.x;
    o[i] = a[elem_to_loc(int64_t(i), a_shape, a_strides, a_ndim)] + int(a_strides[0]);
    """
    k = kernel(source, ensure_row_contiguous=contiguous)
    base = mx.arange(60).reshape(6, 10)
    for view, strides in ((base.T, 1), (base[::2, 3:], 20), (base[::-1], -10)):
        n = view.size
        (o,) = clean(k, inputs=[view], **call(n, (n,), mx.int32))
        first = view.shape[1] if contiguous else strides
        np.testing.assert_array_equal(np.array(o), np.array(view).ravel() + first)


def test_init_value_and_host_call_signature():
    k = kernel("uint i = thread_position_in_grid.x; if (i % 2 == 0) o[i] = a[i];")
    a = np.arange(9, dtype=np.float32)
    (o,) = metal_host.host_call(
        k, inputs=[mx.array(a)], template=None, init_value=-1, verbose=False, stream=None, **call(9, (9,))
    )
    np.testing.assert_array_equal(np.array(o), np.where(np.arange(9) % 2, -1, a))


def test_integer_functions_and_numeric_limits():
    source = """
    uint i = thread_position_in_grid.x;
    uint v = a[i];
    o[i * 8 + 0] = popcount(v);
    o[i * 8 + 1] = clz(v);
    o[i * 8 + 2] = ctz(v);
    o[i * 8 + 3] = mulhi(v, v);
    o[i * 8 + 4] = extract_bits(v, 5, 11);
    o[i * 8 + 5] = insert_bits(v, 0x7FFu, 3, 9);
    o[i * 8 + 6] = clamp(v, 100u, metal::numeric_limits<uint>::max() / 2);
    o[i * 8 + 7] = as_type<uint>(rint(as_type<float>((v & 0x007FFFFFu) | 0x40000000u)));
    """
    a = RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    a[:3] = [0, 1, 0xFFFFFFFF]
    (o,) = clean(kernel(source), inputs=[mx.array(a)], **call(64, (64, 8), mx.uint32))
    values = [int(v) for v in a]
    mask = 0x1FF << 3
    expected = [
        [
            v.bit_count(),
            32 - v.bit_length(),
            (v & -v).bit_length() - 1 if v else 32,
            v * v >> 32,
            v >> 5 & 0x7FF,
            (v & ~mask) | (0x7FF << 3 & mask),
            min(max(v, 100), 0x7FFFFFFF),
            int(np.rint(np.uint32((v & 0x7FFFFF) | 0x40000000).view(np.float32)).view(np.uint32)),
        ]
        for v in values
    ]
    np.testing.assert_array_equal(np.array(o), np.array(expected, np.uint32))


def test_unsuffixed_literals_are_float_and_nothing_is_fused():
    k = kernel("uint i = thread_position_in_grid.x; float x = a[i]; o[2 * i] = x * 0.1; o[2 * i + 1] = x * x - 0.3;")
    a = RNG.standard_normal(100).astype(np.float32)
    (o,) = clean(k, inputs=[mx.array(a)], **call(100, (100, 2)))
    np.testing.assert_array_equal(np.array(o), np.stack([a * np.float32(0.1), a * a - np.float32(0.3)], axis=1))


@pytest.mark.parametrize("flush", [True, False])
def test_float32_subnormals_are_flushed_while_a_kernel_runs(flush):
    k = kernel("uint i = thread_position_in_grid.x; o[i] = a[i] * 0.5f;")
    a = np.array([1.5e-38, 1e-40, 1.0], np.float32)
    r = metal_host.host_run(k, inputs=[mx.array(a)], flush_subnormals=flush, **call(3, (3,)))
    expected = np.where(a == 1, np.float32(0.5), np.float32(0)) if flush else a * np.float32(0.5)
    np.testing.assert_array_equal(np.array(r.outputs[0]), expected)
    assert (np.array([1e-40], np.float32) * np.float32(0.5))[0] != 0


def test_hand_written_text_with_other_attribute_types():
    source = """
    template <typename T, int N>
    [[kernel]] void twice(const device T* x [[buffer(0)]], device T* y [[buffer(1)]],
                          uint i [[thread_position_in_grid]], ushort2 at [[thread_position_in_threadgroup]]) {
      y[i] = x[i] * T(N) + T(at.y);
    }
    """
    a = np.arange(20, dtype=np.float32)
    r = metal_host.run_source(
        source, [mx.array(a)], grid=(20, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(20,)],
        output_dtypes=[mx.float32], template_arguments="float, 2",
    )  # fmt: skip
    assert not r.findings.errors
    np.testing.assert_array_equal(np.array(r.outputs[0]), a * 2)


def test_capture_names_the_text_and_sizes():
    k = kernel("o[thread_position_in_grid.x] = a[0];")
    sizes = {"grid": (40, 2, 1), "threadgroup": (8, 2, 1), "output_shapes": [(40,)], "output_dtypes": [mx.float16]}
    d = metal_host.capture(lambda x: k(inputs=[x], **sizes)[0], mx.zeros((3,), dtype=mx.float16))
    assert (d.grid, d.threadgroup, d.output_shapes, d.output_dtypes) == ((40, 2, 1), (8, 2, 1), ((40,),), (mx.float16,))
    assert "const constant float16_t* a" in d.source
    with pytest.raises(ValueError, match="it launches 0"):
        metal_host.capture(lambda x: x + 1, mx.zeros((3,)))
