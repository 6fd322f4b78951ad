"""`tl-coupling carriers` as a user meets it."""

import json
from pathlib import Path

import pytest

import tl_coupling as tlc
from tl_coupling.comparisons import Carriers


def test_carriers_prints_and_writes_what_the_library_gives(
    call, folder_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--model", folder_model, "--prompt", "w1 w2 w3 w4", "--k", 4]
    printed = call("carriers", *options, "--untrained", "--out", out, drawn=True).out
    trace = tlc.trace(tlc.load_model(str(folder_model)), "w1 w2 w3 w4")
    expected = tlc.carriers(trace, k=4)
    saved = Carriers.load(out / "carriers.nc")
    assert saved.excess.allclose(expected.excess, atol=1e-5)
    summary = json.loads((out / "summary.json").read_text())
    of_mlp = expected.labels.index("mlp_out")
    excess = float(expected.mean()[of_mlp])
    assert summary["mean"]["trained"]["excess"]["mlp_out"] == pytest.approx(
        excess, abs=1e-5
    )
    assert f"{excess:+.3f}" in printed
    branches = summary["branches"]["untrained"]["diagonal_share"]
    assert sum(branches.values()) == pytest.approx(1, abs=1e-5)
    assert {path.name for path in out.iterdir()} == {
        "carriers.nc",
        "carriers-untrained.nc",
        "summary.json",
        "heads.png",
        "by_depth.png",
        "by_depth-untrained.png",
    }


def test_one_layer_is_refused_before_any_work(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = ["--model", folder_model, "--prompt", "w1 w2", "--layer", 1]
    refused = call("carriers", *options, "--out", tmp_path / "out", status=2)
    assert "give --layer twice" in " ".join(refused.err.split())
    assert not (tmp_path / "out").exists()


def test_heads_with_heads_are_measured_where_they_are_asked_for(
    call, folder_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--model", folder_model, "--prompt", "w1 w2 w3 w4", "--k", 4]
    printed = call("carriers", *options, "--heads", "--out", out).out
    trace = tlc.trace(tlc.load_model(str(folder_model)), "w1 w2 w3 w4")
    expected = tlc.comparisons.head_coupling(trace, k=4)
    saved = tlc.comparisons.HeadCoupling.load(out / "head_coupling.nc")
    assert saved.coupling.allclose(expected.coupling, atol=1e-4)
    of_heads = json.loads((out / "summary.json").read_text())["heads"]["trained"]
    (pair,) = expected.strongest(1)
    assert of_heads["strongest"][0]["jacobian_of"] == pair.jacobian_of
    assert of_heads["share_above_null"] == pytest.approx(expected.share_above_null)
    assert f"{pair.jacobian_of} in {pair.vectors_of}" in " ".join(printed.split())
    assert (out / "head_pairs.png").exists()
