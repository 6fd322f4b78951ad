"""`tl-coupling trajectories` and `redundancy` as a user meets them."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import expodistance, line_shape_score

pytestmark = pytest.mark.on_4_only


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (0, 16):
        tiny.huggingface_model("gpt_neox", seed=step).save_pretrained(
            folder / f"step{step}"
        )
        tiny.save_tokenizer(folder / f"step{step}")
    return folder


def test_checkpoints_side_by_side(call, run_folder: Path, tmp_path: Path) -> None:
    steps = ("--checkpoint", 0, "--checkpoint", 16)
    said = call(
        "trajectories",
        "--model",
        run_folder,
        *steps,
        "--prompt",
        "w1 w2 w3 w4",
        "--out",
        tmp_path,
    ).out
    means = json.loads((tmp_path / "summary.json").read_text())["mean"]
    assert list(means) == ["step 0", "step 16"]
    for step in (0, 16):
        x = tlc.trace(
            tlc.load_model(str(run_folder / f"step{step}")), "w1 w2 w3 w4"
        ).residual
        assert means[f"step {step}"]["line_shape_score"] == pytest.approx(
            float(line_shape_score(x).mean())
        )
        assert means[f"step {step}"]["expodistance"] == pytest.approx(
            float(expodistance(x).mean()), rel=1e-4
        )
        assert f"{float(line_shape_score(x).mean()):.3f}" in said
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "trajectories.png",
        "metrics.png",
    }


def test_redundancy_prints_what_each_block_costs(
    call, run_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1 w2 w3 w4"}\n{"prompt": "w9 w8 w7"}\n')
    out = tmp_path / "out"
    said = call(
        "redundancy",
        "--model",
        run_folder / "step16",
        "--prompts",
        file,
        "--k",
        4,
        "--out",
        out,
    ).out
    data = xarray.load_dataset(out / "redundancy.nc")
    summary = json.loads((out / "summary.json").read_text())
    changes = ("dropped", "swapped", "merged", "projected", "exited")
    assert list(summary["change_in_loss"]) == list(changes)
    for change in changes:
        wanted = (data.sel(k=4)[f"loss_{change}"] - data.loss).mean("prompt").values
        np.testing.assert_allclose(
            summary["change_in_loss"][change], wanted, atol=1e-12
        )
        assert f"{wanted[0]:+.3f}" in said
    assert {path.name for path in out.iterdir()} == {
        "redundancy.nc",
        "correlations.nc",
        "summary.json",
        "redundancy-k4.png",
    }


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            "trajectories",
            ["--checkpoint", "7"],
            "has no checkpoints [7]; there are [0, 16]",
        ),
        ("redundancy", ["--k", "99", "--checkpoint", "16"], "`k` must lie in [1, 32]"),
    ],
)
def test_bad_input(
    call,
    run_folder: Path,
    tmp_path: Path,
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    model = run_folder if command == "trajectories" else run_folder / "step16"
    given = arguments if command == "trajectories" else arguments[:2]
    said = call(
        command,
        "--model",
        model,
        "--prompt",
        "w1 w2",
        *given,
        "--out",
        tmp_path / "out",
        status=2,
    ).err
    assert message in " ".join(said.split())
