"""The cost table, on mlx-vlm's decode kernels, whose costs are known by hand."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from turboquant_vlm.conformance import costs, metal_host

VERSION = "0.7.10"
REPOSITORY = Path(__file__).parent.parent


def _installed():
    try:
        return importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        return None


_missing = (
    metal_host.unavailable_reason()
    or metal_host.count_unavailable_reason()
    or (None if _installed() == VERSION else f"the costs are those of mlx-vlm {VERSION}; {_installed()} is installed")
)
needs_counts = pytest.mark.skipif(_missing is not None, reason=f"the costs of mlx-vlm were not checked: {_missing}")


@needs_counts
@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [(costs.SHORT, ["fused_mse_sdpa_k4_v4_d128"]), (costs.LONG, ["mse_sdpa_2pass1_k4_v4_d128", "mse_sdpa_2pass2"])],
)
def test_mlx_vlm_at_128(tokens, kernels):
    found = costs.rows("mlx-vlm", costs.Case(128, 4, 4), tokens)
    assert [r.kernel for r in found] == [f"turboquant_{k}" for k in kernels] + (["all"] if len(kernels) > 1 else [])
    cost = found[-1].marginal
    # By lane and token: four products, three sums and the norm of the score; five for the softmax, its maximum apart;
    # four of each of four values. A lane has eight elements of a token, and each of four query heads repeats it all.
    by_hand = {
        "float": 4 + 3 + 1 + 4 + 4 * 4, "special": 2, "simd": 1, "conversion": 2, "device_load": 2 + 4 + 8,
        "device_store": 0, "threadgroup_load": 0, "barrier": 0,
    }  # fmt: skip
    assert {c: cost.operations[c] for c in by_hand} == {c: n / 8 * 4 for c, n in by_hand.items()}
    # Words and half-precision norms of two heads; bytes, table and norms as every head asks for them.
    assert cost.distinct_bytes_per_token == 2 * (64 + 2) * 2
    assert cost.bytes_per_token == 8 * 32 * (4 * 1 + 8 * 4 + 2 * 2)
    assert 28 <= cost.total <= 32
    assert 24 <= cost.fused_total < cost.total


@needs_counts
def test_odd_widths_cost_more_operations_and_fewer_bytes():
    (equal,), (odd,) = (costs.rows("mlx-vlm", costs.Case(128, 4, v), costs.SHORT) for v in (4, 3))
    assert odd.marginal.fused_total > equal.marginal.fused_total
    assert odd.marginal.distinct_bytes_per_token == 2 * (64 + 48 + 4)


@needs_counts
def test_the_command_prints_a_table_and_json(capsys):
    assert costs.main(["--dim", "64", "--widths", "4,4"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split()[:2] == ["source", "case"]
    assert "turboquant_fused_mse_sdpa_k4_v4_d64" in text
    assert costs.main(["--dim", "64", "--widths", "4,4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(r["source"], r["dim"], r["value_bits"]) for r in found if r["source"] == "mlx-vlm"} == {("mlx-vlm", 64, 4)}
    assert all(r["operations_per_element"] == pytest.approx(sum(r["by_category"].values())) for r in found)


@needs_counts
def test_launches_of_any_source_are_counted():
    (given,) = costs.rows("given", costs.Case(64, 4, 4), (64, 128), costs.mlx_vlm_decode)
    (known,) = costs.rows("mlx-vlm", costs.Case(64, 4, 4), (64, 128))
    assert given.marginal == known.marginal
    with pytest.raises(ValueError, match="launches no kernel"):
        costs.rows("none", costs.Case(64, 4, 4), (64, 128), lambda case, tokens: [])


def test_without_clang_the_command_says_why(monkeypatch, capsys):
    monkeypatch.setattr(costs, "unavailable_reason", lambda: None)
    monkeypatch.setattr(costs, "count_unavailable_reason", lambda: "there is no clang++")
    assert costs.main([]) == 2
    assert "no clang++" in capsys.readouterr().err


def test_wrong_widths_are_refused(capsys):
    with pytest.raises(SystemExit):
        costs.main(["--widths", "4"])
    assert "such as 4,3" in capsys.readouterr().err


def test_the_table_in_the_docs_is_that_of_the_committed_file():
    found = json.loads((REPOSITORY / "docs" / "measurements" / "costs.json").read_text(encoding="utf-8"))
    assert costs.markdown(found) in (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_decode_takes_fewer_operations_than_mlx_vlm():
    """In the committed file, at every head size and width, also when only mlx-vlm's pairs count as one."""
    found = json.loads((REPOSITORY / "docs" / "measurements" / "costs.json").read_text(encoding="utf-8"))
    steps = [row for row in found if row["step"] == "decode" and "2pass2" not in row["kernel"]]
    ours = [row for row in steps if row["source"] == "ours"]
    assert len(ours) >= 2 * 3 * 4
    for mine in ours:
        shape = ("dim", "key_bits", "value_bits")
        theirs = [r for r in steps if r["source"] == "mlx-vlm" and all(r[k] == mine[k] for k in shape)]
        assert mine["operations_per_element"] < min(r["fused_operations_per_element"] for r in theirs)


@needs_counts
@pytest.mark.parametrize("widths", [(4, 4), (4, 3)])
def test_our_decode_kernels_take_fewer_operations(widths):
    case = costs.Case(128, *widths)
    theirs = costs.rows("mlx-vlm", case, costs.SHORT)[-1].marginal
    for tokens in costs.SOURCES["decode"]["ours"].lengths:
        assert costs.rows("ours", case, tokens)[-1].marginal.total < theirs.fused_total
