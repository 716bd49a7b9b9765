"""The strict pass of the Metal host runner, and how it translates, builds and keeps kernels."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

metal_host = pytest.importorskip("turboquant_vlm.conformance.metal_host")

from turboquant_vlm.conformance.metal_host import build, strict, translate  # noqa: E402

needs_clang = pytest.mark.skipif(strict.clang() is None, reason="clang++ is not installed")
needs_compiler = pytest.mark.skipif(not metal_host.available(), reason=str(metal_host.unavailable_reason()))

HEAD = """kernel void k(const device float* a [[buffer(0)]], device float* o [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
"""


def check(body, before=""):
    text = before + HEAD + body + "\n}\n"
    marked = [n for n, row in enumerate(text.splitlines(), 1) if "@@" in row]
    r = metal_host.strict_check(text.replace("@@", "//"))
    assert r.skipped is None
    return r.findings, marked[0] if marked else None


@needs_clang
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("address_space", "threadgroup float s[32];\n device float* p = s; @@\n p[i] = 1;"),
        ("address_space", "threadgroup float s[32];\n threadgroup float* t = o; @@\n t[i] = s[i];"),
        ("address_space", "float x = take(a); \n threadgroup float s[4]; x += take(s); @@\n o[i] = x;"),
        ("address_space", "float t[4];\n const device float* p = t; @@\n o[i] = p[0];"),
        ("strict", "o[i] = absent; @@"),
        ("conversion", "ushort n = ushort(i);\n uchar b = n; @@\n o[i] = float(b);"),
        ("conversion", "float v = a[i];\n int n = v; @@\n o[i] = float(n);"),
        ("conversion", "float v = a[i];\n half n = v; @@\n o[i] = n;"),
        ("conversion", "uint v = i;\n o[i] = v; @@"),
    ],
)
def test_strict_pass_names_the_line(kind, body):
    found, line = check(body, before="template <typename T> T take(const device T* p) { return p[0]; }\n")
    assert (kind, line) in {(f.kind, f.line) for f in found}, str(found)
    assert found.of(kind)[0].is_error == (kind != "conversion")


@needs_clang
def test_strict_pass_accepts_sound_text():
    body = """
    threadgroup float s[32], one;
    threadgroup atomic_uint count;
    uint4 w = uint4(1, 2, 3, 4) & 0xFu;
    vec<float, 4> v = vec<float, 4>(a[i], 1.0, 2.0, 3.0) * 0.5;
    v.xy = v.wz;
    s[i & 31] = v.x + simd_sum(v.y);
    atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    half h = half(a[i]);
    o[i] = s[31] + float(w.z) + float(h) + rint(v.z) + as_type<float>(i) + float(ulong(simd_ballot(true)));
    """
    found, _ = check(body)
    assert not len(found), str(found)


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_strict_pass_takes_captured_templates(dtype):
    k = mx.fast.metal_kernel(
        name="s", input_names=["a"], output_names=["o"],
        source="uint i = thread_position_in_grid.x; o[i] = T(float(a[i]) * float(a_shape[0]));",
    )  # fmt: skip
    sizes = {"grid": (9, 1, 1), "threadgroup": (9, 1, 1), "output_shapes": [(9,)], "output_dtypes": [dtype]}
    d = metal_host.capture(lambda x: k(inputs=[x], template=[("T", dtype)], **sizes)[0], mx.zeros((9,), dtype=dtype))
    r = metal_host.strict_check(d)
    assert r.skipped is None
    assert not len(r.findings), str(r.findings)


def test_strict_pass_without_clang_says_why(monkeypatch):
    monkeypatch.setattr(strict, "clang", lambda: None)
    r = metal_host.strict_check(HEAD + "}")
    assert "clang++" in r.skipped


@pytest.mark.parametrize(
    ("literal", "translated"),
    [
        ("1.0", "1.0f"), ("1.", "1.f"), (".5", ".5f"), ("1e3", "1e3f"), ("1.5e-3", "1.5e-3f"), ("2.0f", "2.0f"),
        ("1.0h", "half(1.0f)"), ("3", "3"), ("3u", "3u"), ("0x1F", "0x1F"), ("0x1p-3", "0x1p-3f"), ("7ul", "7ul"),
    ],
)  # fmt: skip
def test_literals(literal, translated):
    assert f"float x = {translated};" in translate.translate(f"{HEAD} float x = {literal}; }}").code


def test_translation_keeps_the_lines():
    text = HEAD + "threadgroup vec<float, 4> s\n [2]\n [3], t;\n float4 v; v.xy = v.yx;\n// threadgroup float c;\n}\n"
    t = translate.translate(text)
    assert t.code.splitlines()[1:][5] == " float4 v; v.template tq_ref<0, 1>() = v.template tq_get<1, 0>();"
    assert [(p.name, p.buffer, p.attribute) for p in t.parameters] == [
        ("a", 0, None), ("o", 1, None), ("i", None, "thread_position_in_grid"),
    ]  # fmt: skip


def test_kinds_agree_with_the_emulator():
    text = (build.EMULATOR / "interface.h").read_text()
    enum = text.split("enum tq_kind")[1].split("{")[1].split("}")[0]
    names = [n.strip() for n in enum.split(",")]
    assert names[-1] == "TQ_KINDS"
    assert len(names) - 1 == len(metal_host.KINDS)


_SCRIPT = """
import mlx.core as mx
from turboquant_vlm.conformance import metal_host
r = metal_host.run_source(
    "kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = float(i) * NUMBER; }"
    .replace("NUMBER", "0.25"), [], grid=(40, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(40,)],
    output_dtypes=[mx.float32])
assert not r.findings.errors, r.findings
print(float(r.outputs[0][39]))
"""


@needs_compiler
def test_two_processes_fill_one_cache(tmp_path):
    env = {**os.environ, "TURBOQUANT_CACHE": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", _SCRIPT], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    assert [r.communicate()[0].decode().strip() for r in runs] == ["9.75", "9.75"]
    assert len(list((tmp_path / "metal_host").glob("kernel-*.so"))) == 1
    assert not list(tmp_path.rglob(".*"))


@needs_compiler
def test_a_cache_that_cannot_be_written_falls_back(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    env = {**os.environ, "TURBOQUANT_CACHE": str(blocked), "XDG_CACHE_HOME": str(blocked), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "9.75"


def test_no_compiler_gives_a_reason(monkeypatch):
    build.compiler.cache_clear()
    monkeypatch.setenv("TURBOQUANT_CXX", "no-such-compiler")
    try:
        assert "no-such-compiler" in metal_host.unavailable_reason()
        assert not metal_host.available()
    finally:
        build.compiler.cache_clear()


@needs_compiler
def test_ucontext_switching_agrees(tmp_path):
    """The portable way to switch stacks, for machines without the hand-written one."""
    source = (build.EMULATOR / "fiber.h").read_text()
    assert "TQ_UCONTEXT" in source
    env = {**os.environ, "TURBOQUANT_CACHE": str(tmp_path)}
    script = "from turboquant_vlm.conformance.metal_host import build\nbuild._RUNTIME_FLAGS.append('-DTQ_UCONTEXT')\n"
    done = subprocess.run([sys.executable, "-c", script + _SCRIPT], env=env, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "9.75"


@needs_compiler
def test_a_fault_does_not_disturb_later_runs():
    for body, ok in (("o[i] = a[i + 1000];", False), ("o[i] = a[i];", True)) * 3:
        r = metal_host.run_source(
            HEAD + body + "\n}", [mx.arange(32).astype(mx.float32)], grid=(32, 1, 1), threadgroup=(32, 1, 1),
            output_shapes=[(32,)], output_dtypes=[mx.float32],
        )  # fmt: skip
        assert r.completed == ok
        if ok:
            np.testing.assert_array_equal(np.array(r.outputs[0]), np.arange(32))
