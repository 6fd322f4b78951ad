"""`tl-coupling dynamics` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest

import tl_coupling as tlc
from tl_coupling.dynamics import Eigenvalues, ProductMap, Products

PROMPT = "w3 w14 w15 w92"


def test_the_command_saves_draws_and_prints_what_the_functions_give(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": PROMPT, "draws": 3, "seed": 5}
    done = call(
        "dynamics", "--runs", "--untrained", out=tmp_path, drawn=True, **options
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "products.nc",
        "products-untrained.nc",
        "runs.nc",
        "runs-untrained.nc",
        "eigenvalues.nc",
        "eigenvalues-untrained.nc",
        "products.png",
        "runs.png",
        "runs-untrained.png",
        "eigenvalues.png",
        "summary.json",
    }
    trace = tlc.trace(tlc.load_model(str(folder_model)), PROMPT)
    expected = tlc.dynamics.products(trace, n_draws=3, seed=5)
    saved = Products.load(tmp_path / "products.nc")
    assert saved.log_largest.tolist() == pytest.approx(expected.log_largest.tolist())
    assert saved.null_log_largest.tolist() == [
        pytest.approx(row, rel=1e-5) for row in expected.null_log_largest.tolist()
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["trained"]["alignment_gain"] == pytest.approx(
        expected.alignment_gain.tolist(), abs=1e-5
    )
    of_blocks = np.linalg.eigvals(tlc.block_jacobians(trace).double().numpy())
    assert summary["trained"]["share_left_of_zero"] == pytest.approx(
        (of_blocks.real < 0).mean(1).tolist()
    )
    assert len(summary["trained"]["shuffled_log_largest"]) == 3
    assert f"{float(expected.log_largest[-1]):.2f}" in done.out
    assert f"{float(expected.alignment_gain[-1]):+.2f}" in done.out
    assert len(ProductMap.load(tmp_path / "runs.nc").layers) == 2
    assert Eigenvalues.load(tmp_path / "eigenvalues.nc").layers == (0, 1)


def test_eigenvalues_and_runs_may_be_left_out(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": PROMPT, "draws": 3}
    call("dynamics", "--no-eigenvalues", out=tmp_path, **options)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"products.nc", "products.png", "summary.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--position", "9"], "`position` must lie in [-4, 3]"),
        (["--layers", "3"], "No such option"),
    ],
)
def test_bad_input_is_one_line(
    refused, folder_model: Path, arguments: list[str], message: str
) -> None:
    options = {"model": folder_model, "prompt": PROMPT}
    assert message in refused("dynamics", options, arguments)
