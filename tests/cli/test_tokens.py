"""`tl-coupling tokens` as a user meets it."""

import json
from pathlib import Path

import pytest
import torch
import xarray

import tiny
import tl_coupling as tlc

PROMPT = "w3 w14 w15 w92"
MAPS = {"self", "fixed-input", "fixed-output"}


def coupling(J_1: torch.Tensor, J_2: torch.Tensor, k: int) -> float:
    """The paper's 1 − m̃, written down again."""
    U, _, Vh = torch.linalg.svd(J_2.double())
    A = U[:, :k].T @ J_1.double() @ Vh[:k].T
    return 1 - float((A - A.diag().diag()).norm() / A.norm())


def jacobian(layer: int, t1: int, t2: int) -> torch.Tensor:
    """By autograd through the HuggingFace model."""
    return tiny.oracle_jacobian(
        tiny.huggingface_model("llama"), [3, 14, 15, 92], layer, t1, t2
    )


def test_results_pictures_and_table(call, folder_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = call(
        "tokens",
        model=folder_model,
        prompt=PROMPT,
        k=[4, 8],
        untrained=True,
        out=out,
        drawn=True,
    )
    pictures = {f"{name}-{ending}.png" for name in MAPS for ending in ("k4", "k8")} | {
        "self-matrices.png",
        "influence.png",
    }
    results = {
        f"{name}{suffix}.nc"
        for name in MAPS | {"influence"}
        for suffix in ("", "-untrained")
    }
    assert {path.name for path in out.iterdir()} == pictures | results | {
        "summary.json"
    }
    assert "warning" not in done.err

    summary = json.loads((out / "summary.json").read_text())
    maps = {name: tlc.CouplingMap.load(out / f"{name}.nc") for name in MAPS}
    # Two layers: the ones in the middle are both.
    pairs = {
        "self": [((t, t), (s, s)) for t in range(4) for s in range(4)],
        "fixed-input": [((0, t), (0, s)) for t in range(4) for s in range(4)],
        "fixed-output": [((t, 3), (s, 3)) for t in range(4) for s in range(4)],
    }
    for name, result in maps.items():
        J_1, J_2 = (
            {ends: jacobian(layer, *ends) for ends, _ in pairs[name]}
            for layer in (0, 1)
        )
        expected = [coupling(J_1[row], J_2[col], 4) for row, col in pairs[name]]
        assert result.coupling(4).flatten().tolist() == pytest.approx(
            expected, abs=1e-4
        )
        mean = sum(expected) / len(expected)
        assert summary["mean"]["trained"][name]["4"] == pytest.approx(mean, abs=1e-4)
        assert f"{result.mean(4):.3f}" in done.out
        twin = tlc.CouplingMap.load(out / f"{name}-untrained.nc")
        assert twin.provenance["untrained"] is True
        assert f"{twin.mean(8):.3f}" in done.out
        assert summary["mean"]["untrained"][name]["8"] == pytest.approx(twin.mean(8))
        assert summary["null"][name]["4"] == pytest.approx(1 - 0.75**0.5, abs=0.01)
        assert 0 < summary["captured_energy"]["trained"][name]["4"] <= 1

    assert set(summary["seconds"]["untrained"]) == {"loading", "trace", "measuring"}
    assert summary["seconds"]["trained"]["measuring"] > 0
    with xarray.open_dataset(out / "influence.nc") as influence:
        norm = influence.sel(layer=1, source_position=2)["frobenius_norm"].item()
        assert influence.attrs["output_position"] == 3
        means = influence["frobenius_norm"].mean("layer").values.tolist()
    assert norm == pytest.approx(float(jacobian(1, 2, 3).norm()), rel=1e-4)
    assert summary["influence"]["trained"]["frobenius_norm"] == pytest.approx(means)


def test_chosen_layers_and_tokens(call, folder_model: Path, tmp_path: Path) -> None:
    layers = {"layer": 1, "other_layer": 0}
    tokens = {"position": 2, "input_position": 1, "positions": [3, 0, -2, 1]}
    options = {"model": folder_model, "prompt": PROMPT, "k": 4, "out": tmp_path}
    call("tokens", **options, **layers, **tokens)
    maps = {name: tlc.CouplingMap.load(tmp_path / f"{name}.nc") for name in MAPS}
    assert {(m.row_layers[0], m.col_layers[0]) for m in maps.values()} == {(1, 0)}
    # In the order asked for; in context maps without those that causality forbids.
    assert {name: m.row_positions for name, m in maps.items()} == {
        "self": (3, 0, 2, 1),
        "fixed-input": (3, 2, 1),
        "fixed-output": (0, 2, 1),
    }
    assert maps["fixed-input"].provenance["position"] == 1
    assert maps["fixed-output"].provenance["position"] == 2
    assert not list(tmp_path.glob("*-untrained*"))
    with xarray.open_dataset(tmp_path / "influence.nc") as influence:
        assert influence["source_position"].values.tolist() == [0, 1, 2]


def test_help_has_examples(call) -> None:
    text = call("tokens", "--help").out
    assert "Examples:" in text
    assert "--input-position" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "`--k` must be at least 1, got 0"),
        (["--k", "33"], "`k` must lie in [1, 32]"),
        (["--prompt", "w1"], "use a longer prompt"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "w1 " * 40], "context holds 32"),
        (["--position", "3"], "`position` must lie in [-3, 2]"),
        (["--position", "0"], "compares at least two tokens"),
        (["--input-position", "-4"], "`input_position` must lie in [-3, 2]"),
        (["--positions", "7"], "`positions` must lie in [-3, 2]"),
        (["--layer", "2"], "`layer` must lie in [-2, 1]"),
        (["--other-layer", "-3"], "`other_layer` must lie in [-2, 1]"),
        (["--orientation", "juv"], "'ujv', 'vju'"),
        (["--model", "no-such/model"], "could not load 'no-such/model'"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    refused, folder_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = {"model": folder_model, "prompt": "w1 w2 w3", "k": 4}
    options["out"] = tmp_path / "out"
    assert message in refused("tokens", options, arguments)
