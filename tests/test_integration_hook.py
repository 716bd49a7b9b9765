"""The hook: whichever order things are imported in, activation as mlx-vlm documents it, and no trace left behind."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_vlm
import pytest
from mlx_vlm import apc, apc_adapters, kv_quant, turboquant
from mlx_vlm.generate import ar, common
from mlx_vlm.models import base
from mlx_vlm.models import cache as kinds

from turboquant_vlm.integration import (
    BatchTurboQuantKVCache,
    TurboQuantKVCache,
    UnsupportedMlxVlm,
    active,
    backend,
    hook,
    install,
    support,
    uninstall,
)
from turboquant_vlm.integration.backend import VARIABLE

# The objects of mlx-vlm, before any test puts the hook in.
UPSTREAM = turboquant.TurboQuantKVCache
UPSTREAM_BATCH = turboquant.BatchTurboQuantKVCache


@pytest.fixture
def hooked() -> Iterator[None]:
    install()
    yield
    uninstall()


def python(script: str) -> str:
    """Standard output of a script in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Order


CHECK = """
from turboquant_vlm.integration import TurboQuantKVCache
from mlx_vlm import turboquant
from mlx_vlm.generate import common
from mlx_vlm.models import base
from mlx_vlm.models.llama import language
names = [turboquant.TurboQuantKVCache, common.TurboQuantKVCache, base.TurboQuantKVCache]
assert all(name is TurboQuantKVCache for name in names), names
assert language.scaled_dot_product_attention is base.scaled_dot_product_attention
import mlx.core as mx
caches = [common.cache.KVCache() for _ in range(4)]
common.maybe_quantize_kv_cache(caches, 0, 64, 3.5)
assert [type(c) is TurboQuantKVCache for c in caches] == [True, True, True, False], caches
cache = caches[0]
x = mx.zeros((1, 1, 3, 64))
k, v = cache.update_and_fetch(x, x)
language.scaled_dot_product_attention(x, k, v, cache, 1.0, 'causal', sinks=mx.zeros(1))
print('served')
"""


@pytest.mark.parametrize(
    "imports",
    [
        "from turboquant_vlm.integration import install; install(); import mlx_vlm",
        "import mlx_vlm; from turboquant_vlm.integration import install; install()",
        "from mlx_vlm.models.llama import language; from turboquant_vlm.integration import install; install()",
        "from mlx_vlm.generate.common import TurboQuantKVCache as early\n"
        "from turboquant_vlm.integration import install; install(); install()\n"
        "from turboquant_vlm.integration import TurboQuantKVCache as ours; assert issubclass(ours, early)",
        "from turboquant_vlm.integration import install, uninstall; install(); uninstall(); install()",
    ],
)
def test_any_order_of_imports(imports: str) -> None:
    assert python(f"{imports}\n{CHECK}") == "served\n"


def test_importing_the_package_imports_neither_mlx_nor_mlx_vlm() -> None:
    script = "import sys, turboquant_vlm.integration; print({'mlx', 'mlx_vlm', 'scipy'} & set(sys.modules))"
    assert python(script) == "set()\n"


# Removal


def snapshot() -> dict[tuple[str, str], int]:
    """Identity of every attribute of every loaded mlx_vlm module, and of what the prefix cache has registered."""
    found = {
        (name, attribute): id(value)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "mlx_vlm" and module is not None
        for attribute, value in vars(module).items()
    }
    found |= {("capability", cls.__qualname__): hash(value) for cls, value in apc_adapters._CAPABILITY.items()}
    return found


@pytest.mark.parametrize("registered", [True, False])
def test_uninstall_leaves_no_difference(registered: bool) -> None:
    uninstall()
    importlib.import_module("mlx_vlm.models.glm4_moe_lite.language")
    if registered:
        apc_adapters.register_default_capabilities()
    before = snapshot()
    install()
    during = snapshot()
    assert {key for key in before if before[key] != during.get(key)}
    uninstall()
    assert snapshot() == before
    assert not active()
    uninstall()
    assert snapshot() == before


def test_modules_imported_meanwhile_are_cleaned_too() -> None:
    script = """
from turboquant_vlm.integration import install, uninstall
from mlx_vlm.models import base
original = base.scaled_dot_product_attention
install()
from mlx_vlm.models.llama import language
assert language.scaled_dot_product_attention is not original
uninstall()
assert language.scaled_dot_product_attention is original is base.scaled_dot_product_attention
print('clean')
"""
    assert python(script) == "clean\n"


# Versions and backends


@pytest.mark.parametrize("version", ["0.6.17", "0.7.11", "0.8.0", "1.0"])
def test_other_versions_are_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall()
    monkeypatch.setattr(mlx_vlm.version, "__version__", version)
    before = snapshot()
    with pytest.raises(UnsupportedMlxVlm, match=rf"versions are 0\.7\.0 to 0\.7\.10; found {version}\."):
        install()
    assert snapshot() == before
    assert not active()


def test_a_missing_name_is_noticed_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall()
    monkeypatch.delattr(kv_quant, "_is_default_split")
    before = snapshot()
    with pytest.raises(UnsupportedMlxVlm, match=r"no mlx_vlm\.kv_quant\._is_default_split"):
        install()
    assert snapshot() == before


@pytest.mark.parametrize(("version", "parts"), [("0.7.10", (0, 7, 10)), ("0.7.3.dev1", (0, 7, 3)), ("1", (1,))])
def test_versions_are_numbers(version: str, parts: tuple[int, ...]) -> None:
    assert support.parse(version) == parts


def test_upstream_keeps_the_hook_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(VARIABLE, "upstream")
    assert install() is False
    assert not active()
    assert turboquant.TurboQuantKVCache is UPSTREAM


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "backend 'cuda' is not available here; available: auto, .*reference"),
        ("mps", "unknown backend 'mps'; expected one of auto, fast, reference"),
    ],
)
def test_other_backends_are_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall()
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ValueError, match=message):
        install()
    with pytest.raises(ValueError, match=message):
        TurboQuantKVCache(3.5)
    assert not active()


def test_a_backend_can_be_chosen_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "upstream")
    try:
        assert install("reference") is True
        assert TurboQuantKVCache(3.5).backend_name == "reference"
    finally:
        backend.choose(None)
        uninstall()
    assert install() is False
    with pytest.raises(ValueError, match="unknown backend 'mps'"):
        backend.choose("mps")
    assert backend.chosen() == "upstream"


# Activation


def entries(count: int, tokens: int) -> list[Any]:
    made: list[Any] = [kinds.KVCache() for _ in range(count)]
    for cache in made:
        if tokens:
            x = mx.random.normal((1, 2, tokens, 64))
            cache.update_and_fetch(x, x)
    return made


TURBO, UNIFORM, FLOAT, HYBRID = "TurboQuantKVCache", "QuantizedKVCache", "KVCache", "HybridQuantKVCache"


@pytest.mark.parametrize(
    ("options", "tokens", "expected", "bits"),
    [
        ({"kv_bits": 3.5}, 200, [TURBO, TURBO, FLOAT], (4, 3)),
        ({"kv_bits": 2.5, "kv_quant_scheme": "uniform"}, 200, [TURBO, TURBO, FLOAT], (3, 2)),
        ({"kv_bits": 4, "kv_quant_scheme": "turboquant"}, 200, [TURBO, TURBO, FLOAT], (4, 4)),
        ({"kv_bits": 4.0, "kv_quant_scheme": "uniform"}, 200, [UNIFORM, UNIFORM, UNIFORM], None),
        ({"kv_bits": 8}, 200, [UNIFORM, UNIFORM, UNIFORM], None),
        ({"kv_bits": None}, 200, [FLOAT, FLOAT, FLOAT], None),
        ({"kv_bits": 3.5, "kv_key_bits": 8}, 200, [TURBO, TURBO, FLOAT], (8, 3)),
        ({"kv_bits": 3.5, "kv_value_bits": 2}, 200, [TURBO, TURBO, FLOAT], (4, 2)),
        ({"kv_bits": 3.5, "kv_key_bits": 3, "kv_value_bits": 4}, 200, [TURBO, TURBO, FLOAT], (3, 4)),
        ({"kv_bits": 3.5, "quantized_kv_start": 5000}, 200, [FLOAT, FLOAT, FLOAT], None),
        ({"kv_bits": 3.5, "quantized_kv_start": 200}, 200, [TURBO, TURBO, FLOAT], (4, 3)),
        ({"kv_bits": 3.5, "quantized_kv_start": 5000}, 0, [TURBO, TURBO, FLOAT], (4, 3)),
        (
            {"kv_bits": 4, "kv_key_scheme": "turboquant", "kv_value_scheme": "uniform"},
            200,
            [HYBRID, HYBRID, FLOAT],
            None,
        ),
    ],
)
@pytest.mark.usefixtures("hooked")
def test_activation(options: dict[str, Any], tokens: int, expected: list[str], bits: tuple[int, int] | None) -> None:
    caches = entries(3, tokens)
    given = {"quantized_kv_start": 0, "kv_group_size": 64, "kv_quant_scheme": "uniform", **options}
    common.maybe_quantize_kv_cache(caches, **given)
    assert [type(cache).__name__ for cache in caches] == expected
    if bits is not None:
        assert type(caches[0]) is TurboQuantKVCache
        assert (caches[0].key_bits, caches[0].value_bits) == bits
        assert caches[0].offset == tokens
        again = list(caches)
        common.maybe_quantize_kv_cache(caches, **given)
        assert all(a is b for a, b in zip(caches, again, strict=True))


@pytest.mark.usefixtures("hooked")
def test_two_layers_are_both_quantized() -> None:
    caches = entries(2, 100)
    common.maybe_quantize_kv_cache(caches, 0, 64, 3.5)
    assert all(type(cache) is TurboQuantKVCache for cache in caches)


@pytest.mark.usefixtures("hooked")
def test_refused_widths_say_which_flag() -> None:
    with pytest.raises(ValueError, match="got kv_key_bits=7"):
        common.maybe_quantize_kv_cache(entries(3, 100), 0, 64, 3.5, kv_key_bits=7)


def every_kind() -> dict[str, Any]:
    """One filled cache of every class in mlx_vlm.models.cache, and nested ones."""
    x = mx.random.normal((1, 2, 100, 64))

    def fill(cache: Any) -> Any:
        cache.update_and_fetch(x, x)
        return cache

    arrays = kinds.ArraysCache(2)
    arrays[0] = mx.zeros((1, 3, 4))
    static = kinds.StaticPrefixKVCache(256)
    made = {
        "ArraysCache": arrays,
        "BatchKVCache": fill(kinds.BatchKVCache([0])),
        "BatchPoolingCache": kinds.BatchPoolingCache(4, [0]),
        "BatchQuantizedKVCache": fill(kinds.BatchQuantizedKVCache([0])),
        "BatchRotatingKVCache": fill(kinds.BatchRotatingKVCache(64, [0])),
        "BufferedRotatingKVCache": fill(kinds.BufferedRotatingKVCache(64)),
        "CacheList": kinds.CacheList(fill(kinds.KVCache()), fill(kinds.RotatingKVCache(64)), fill(kinds.KVCache())),
        "ChunkedKVCache": fill(kinds.ChunkedKVCache(256)),
        "ConcatenateKVCache": fill(kinds.ConcatenateKVCache()),
        "KVCache": fill(kinds.KVCache()),
        "PoolingCache": kinds.PoolingCache(4),
        "QuantizedKVCache": fill(kinds.QuantizedKVCache()),
        "RotatingKVCache": fill(kinds.RotatingKVCache(64)),
        "SimpleKVCache": fill(kinds.SimpleKVCache()),
        "StaticPrefixKVCache": fill(static),
    }
    missing = {
        name
        for name, cls in vars(kinds).items()
        if isinstance(cls, type) and issubclass(cls, kinds._BaseCache) and cls is not kinds._BaseCache
    } - set(made)
    assert missing <= {"TurboQuantKVCache", "BatchTurboQuantKVCache"}, f"new classes in mlx-vlm: {missing}"
    made["list"] = [fill(kinds.KVCache()), fill(kinds.RotatingKVCache(64)), [fill(kinds.KVCache())]]
    made["tuple"] = (fill(kinds.KVCache()), arrays)
    return made


@pytest.mark.usefixtures("hooked")
def test_a_mixed_list_of_every_class() -> None:
    given = every_kind()
    caches = [*given.values(), kinds.KVCache()]
    common.maybe_quantize_kv_cache(caches, 0, 64, 3.5)
    after = dict(zip(given, caches, strict=False))
    for name in sorted(set(given) - {"CacheList", "list", "tuple", "KVCache"}):
        assert after[name] is given[name], name
    assert type(after["KVCache"]) is TurboQuantKVCache

    def types(children: Any) -> list[str]:
        return [type(child).__name__ for child in children]

    assert types(after["CacheList"].caches) == [TURBO, "RotatingKVCache", TURBO]
    assert types(after["list"]) == [TURBO, "RotatingKVCache", "list"]
    assert types(after["list"][2]) == [TURBO]
    assert types(after["tuple"]) == [TURBO, "ArraysCache"]
    assert type(caches[-1]) is kinds.KVCache
    turned = [after["KVCache"], after["CacheList"].caches[0], after["list"][0], after["list"][2][0], after["tuple"][0]]
    assert all(type(cache) is TurboQuantKVCache and cache.offset == 100 for cache in turned)


@pytest.mark.usefixtures("hooked")
def test_a_cache_list_restores_ours() -> None:
    made = kinds.CacheList(TurboQuantKVCache.from_cache(entries(1, 150)[0], 3.5), entries(1, 150)[0])
    back = kinds.CacheList.from_state(made.state, made.meta_state)
    assert type(back.caches[0]) is TurboQuantKVCache
    assert back.caches[0].offset == 150


# What else mlx-vlm derives from the widths


@pytest.mark.usefixtures("hooked")
def test_policies_keep_their_widths_when_written_and_read() -> None:
    for bits, key, value, written in [
        (3.5, None, None, {}),
        (3.5, 3, 4, {"key_bits": 3.0, "value_bits": 4.0}),
        (4, 8, None, {"key_bits": 8.0, "value_bits": 4}),
    ]:
        policy = kv_quant.from_legacy(bits, "turboquant", 64, key, value)
        assert policy is not None
        config = policy.to_config()
        assert {k: v for k, v in config.items() if k.endswith("_bits")} == written
        assert kv_quant.from_config(config) == policy
    policy = kv_quant.from_legacy(3.5)
    assert policy is not None
    assert (policy.key.bits, policy.value.bits) == (4, 3)


def test_fingerprints_never_mix_the_formats() -> None:
    uninstall()
    options = {"kv_bits": 3.5, "kv_group_size": 64, "kv_quant_scheme": "turboquant", "quantized_kv_start": 0}
    plain, place = kv_quant.kv_quant_fingerprint(**options), apc.apc_disk_namespace("m", **options)
    uniform = kv_quant.kv_quant_fingerprint(4, 64, "uniform", 0)
    install()
    try:
        assert kv_quant.kv_quant_fingerprint(**options) == f"{plain}-turboquant-vlm1-k4-v3"
        assert apc.apc_disk_namespace("m", **options) != place
        other = apc.apc_disk_namespace("m", **options, kv_key_bits=3, kv_value_bits=4)
        assert other != apc.apc_disk_namespace("m", **options)
        policy = kv_quant.from_legacy(3.5)
        assert policy is not None
        assert policy.fingerprint(0).endswith("-turboquant-vlm1-k4-v3")
        assert kv_quant.kv_quant_fingerprint(4, 64, "uniform", 0) == uniform
    finally:
        uninstall()
    assert kv_quant.kv_quant_fingerprint(**options) == plain


@pytest.mark.usefixtures("hooked")
def test_prefix_cache_clones_and_stores_by_class_name() -> None:
    cache = TurboQuantKVCache.from_cache(entries(1, 200)[0], 3.5)
    assert apc_adapters.resolve_capability(cache) == apc_adapters.Capability.PAGEABLE
    targets: list[mx.array] = []
    clone = apc_adapters.clone_cache_entry(cache, min_capacity_tokens=None, eval_targets=targets)
    assert type(clone) is TurboQuantKVCache
    assert clone.meta_state == cache.meta_state
    assert all(mx.array_equal(a, b) for a, b in zip(clone.state[0], cache.state[0], strict=True))
    resolve = apc._resolve_checkpoint_class
    assert resolve(TurboQuantKVCache.__module__, TurboQuantKVCache.__qualname__) is TurboQuantKVCache


def test_mlx_vlms_own_class_refuses_our_snapshots() -> None:
    uninstall()
    cache = TurboQuantKVCache.from_cache(entries(1, 200)[0], 3.5)
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        UPSTREAM(4).prefix_cache_restore(cache.prefix_cache_snapshot())
    theirs = UPSTREAM(4)
    theirs.update_and_fetch(mx.ones((1, 1, 5, 64)), mx.ones((1, 1, 5, 64)))
    with pytest.raises(ValueError, match="expected turboquant-vlm version 1"):
        cache.prefix_cache_restore(theirs.prefix_cache_snapshot())


@pytest.mark.usefixtures("hooked")
def test_prefix_rows_merge_into_a_batch() -> None:
    rows = [TurboQuantKVCache.from_cache(entries(1, n)[0], 3.5) for n in (150, 100)]
    merged = apc_adapters.merge_cache_entries([rows[0], kinds.KVCache(), rows[1]], [150, 0, 100])
    assert type(merged) is BatchTurboQuantKVCache
    assert merged.offset.tolist() == [150, 0, 100]
    assert apc_adapters.merge_cache_entries([rows[0], rows[1]], [150, 99]) is None


@pytest.mark.usefixtures("hooked")
def test_batches_are_built_from_ours() -> None:
    class Model:
        layers = (0, 1, 2)

    made = ar._make_cache(Model(), [0, 3], kv_bits=3.5)
    assert [type(c).__name__ for c in made] == ["BatchTurboQuantKVCache"] * 2 + ["BatchKVCache"]
    assert type(made[0]) is BatchTurboQuantKVCache
    assert (made[0].key_bits, made[0].value_bits) == (4, 3)


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("floats_first", [True, False])
def test_float_and_quantized_batches_join(floats_first: bool) -> None:
    x = mx.random.normal((1, 2, 150, 64))
    quantized, floats = BatchTurboQuantKVCache([0], 3.5), kinds.BatchKVCache([0])
    for cache, count in ((quantized, 150), (floats, 60)):
        cache.update_and_fetch(x[:, :, :count], x[:, :, :count])
    pair = [[floats], [quantized]] if floats_first else [[quantized], [floats]]
    (joined,) = ar._extend_cache(*pair)
    assert type(joined) is BatchTurboQuantKVCache
    assert joined.offset.tolist() == ([60, 150] if floats_first else [150, 60])
    plain = ar._extend_cache([floats], [kinds.BatchKVCache([0])])
    assert type(plain[0]) is kinds.BatchKVCache


# Attention through the hook


@pytest.mark.usefixtures("hooked")
def test_attention_passes_other_caches_through() -> None:
    q, x = mx.random.normal((1, 4, 1, 64)), mx.random.normal((1, 2, 20, 64))
    expected = mx.fast.scaled_dot_product_attention(q, x, x, scale=0.1)
    assert mx.array_equal(base.scaled_dot_product_attention(q, x, x, None, 0.1, None), expected)
    uniform = kinds.QuantizedKVCache(bits=8)
    k, v = uniform.update_and_fetch(x, x)
    assert mx.allclose(base.scaled_dot_product_attention(q, k, v, uniform, 0.1, None), expected, atol=0.02)
    with pytest.raises(ValueError, match="does not support attention sinks"):
        base.scaled_dot_product_attention(q, k, v, uniform, 0.1, None, sinks=mx.zeros(4))


@pytest.mark.usefixtures("hooked")
def test_shared_keys_are_recognised_without_their_cache() -> None:
    cache = TurboQuantKVCache.from_cache(entries(1, 150)[0], 3.5)
    x = mx.random.normal((1, 2, 1, 64))
    k, v = cache.update_and_fetch(x, x)
    q = mx.random.normal((1, 4, 1, 64))
    for other in (None, kinds.KVCache(), cache):
        out = base.scaled_dot_product_attention(q, k, v, other, 0.1, None)
        assert mx.array_equal(out, cache.quantized_attention(q, scale=0.1))


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("queries", [1, 5])
def test_sinks_reach_packed_attention(queries: int) -> None:
    cache = TurboQuantKVCache.from_cache(entries(1, 150)[0], 3.5)
    x = mx.random.normal((1, 2, queries, 64))
    k, v = cache.update_and_fetch(x, x)
    q = mx.random.normal((1, 4, queries, 64))

    def out(sinks: mx.array | None) -> mx.array:
        return base.scaled_dot_product_attention(q, k, v, cache, 0.1, "causal", sinks=sinks)

    assert mx.array_equal(out(mx.full((4,), -mx.inf)), out(None))
    assert not mx.array_equal(out(mx.array([8.0] * 4)), out(None))


def test_nothing_is_exchanged_twice() -> None:
    uninstall()
    assert install() is True
    pairs = list(hook._exchanged)
    assert install() is True
    assert hook._exchanged == pairs
    uninstall()
    assert turboquant.BatchTurboQuantKVCache is UPSTREAM_BATCH
