"""`tl-coupling compare-trajectories` as a user meets it."""

import json
from pathlib import Path

import pytest

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import expodistance, line_shape_score

STEPS = (0, 16)
PROMPT = "w1 w2 w3 w4"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in STEPS:
        model = tiny.huggingface_model("gpt_neox", seed=step)
        model.save_pretrained(folder / f"step{step}")
        tiny.save_tokenizer(folder / f"step{step}")
    return folder


def test_checkpoints_side_by_side(call, run_folder: Path, tmp_path: Path) -> None:
    steps = ["--checkpoint", 0, "--checkpoint", 16]
    options = ["--model", run_folder, *steps, "--prompt", PROMPT]
    printed = call("compare-trajectories", *options, "--out", tmp_path, drawn=True).out
    means = json.loads((tmp_path / "summary.json").read_text())["mean"]
    assert list(means) == ["step 0", "step 16"]
    for step in STEPS:
        model = tlc.load_model(str(run_folder / f"step{step}"))
        x = tlc.trace(model, PROMPT).residual
        score = float(line_shape_score(x).mean())
        of_step = means[f"step {step}"]
        assert of_step["line_shape_score"] == pytest.approx(score)
        distance = float(expodistance(x).mean())
        assert of_step["expodistance"] == pytest.approx(distance, rel=1e-4)
        assert f"{score:.3f}" in printed
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"trajectories.png", "metrics.png"}


def test_a_checkpoint_that_is_not_there_is_refused(
    call, run_folder: Path, tmp_path: Path
) -> None:
    options = ["--model", run_folder, "--prompt", "w1 w2", "--checkpoint", 7]
    refused = call(
        "compare-trajectories", *options, "--out", tmp_path / "out", status=2
    )
    expected = "has no checkpoints [7]; there are [0, 16]"
    assert expected in " ".join(refused.err.split())


def test_the_old_name_still_works_and_names_the_new_one(
    call, run_folder: Path, tmp_path: Path
) -> None:
    options = ["--model", run_folder / "step0", "--prompt", PROMPT]
    new = call("compare-trajectories", *options, "--out", tmp_path)
    old = call("trajectories", *options, "--out", tmp_path)
    assert old.out == new.out
    assert "trajectories is now called compare-trajectories" in old.err
    listed = [line.split()[0] for line in call("--help").out.splitlines() if line]
    assert "compare-trajectories" in listed
    assert "trajectories" not in listed
