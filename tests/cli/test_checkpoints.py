"""`tl-coupling checkpoints` as a user meets it."""

import json
import shutil
from pathlib import Path

import pytest
import xarray

import tiny

STEPS = (0, 16, 256)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in STEPS:
        tiny.huggingface_model("gpt_neox", seed=step).save_pretrained(
            folder / f"step{step}"
        )
        tiny.save_tokenizer(folder / f"step{step}")
    return folder


def options(model: Path, out: Path) -> list[object]:
    prompt = ("--prompt", "w1 w2 w3 w4")
    return ["checkpoints", "--model", model, *prompt, "--k", 3, "--k", 8, "--out", out]


@pytest.mark.long("runs a sweep twice")
def test_a_sweep_and_its_rerun(call, run_folder: Path, tmp_path: Path) -> None:
    output = call(*options(run_folder, tmp_path)).out
    with xarray.open_dataset(tmp_path / "sweep.nc") as file:
        data = file.load()
    assert data["checkpoint"].values.tolist() == list(STEPS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    coupling = data["mean_coupling"].sel(k=3).mean("prompt").values
    assert summary["coupling"]["3"] == pytest.approx(coupling.tolist())
    assert summary["null"]["8"] == pytest.approx([1 - (1 - 1 / 8) ** 0.5] * 3)
    assert all(f"{value:.3f}" in output for value in coupling)
    results = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "checkpoints").glob("*.nc")
    }
    assert len(results) == 3
    assert (tmp_path / "emergence-k3.gif").is_file()
    call(*options(run_folder, tmp_path))
    assert {path: path.stat().st_mtime_ns for path in results} == results
    with xarray.open_dataset(tmp_path / "sweep.nc") as file:
        assert file.identical(data)


def test_means_over_all_pairs_say_so(call, run_folder: Path, tmp_path: Path) -> None:
    output = call(*options(run_folder, tmp_path), "--diagonal", "--checkpoint", 16).out
    with xarray.open_dataset(tmp_path / "sweep.nc") as data:
        assert data["mean_coupling"].sel(k=3).item() == pytest.approx(
            data["coupling"].sel(k=3).mean().item()
        )
    assert "mean over all pairs of layers, l = l' among them and 1 prompt" in " ".join(
        output.split()
    )
    assert (
        "mean over all pairs"
        in json.loads((tmp_path / "summary.json").read_text())["measure"]
    )


def test_every_choice_has_a_column_for_each_training_step(
    call, run_folder: Path, tmp_path: Path
) -> None:
    steps = ("--checkpoint", 0, "--checkpoint", 16)
    printed = call(
        *options(run_folder, tmp_path), "--all-measures", *steps, drawn=True
    ).out
    assert "every choice" in printed
    (header,) = [line for line in printed.splitlines() if "orientation" in line]
    assert header.split("┃")[5:-1:2] == ["   0 ".rjust(7), "   16 ".rjust(7)]
    assert (tmp_path / "measures.csv").exists()


def test_a_checkpoint_that_fails_is_said_and_the_status_is_1(
    call, run_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "run"
    shutil.copytree(run_folder, model)
    (model / "step16" / "model.safetensors").write_bytes(b"not weights")
    out = tmp_path / "out"
    errors = call(*options(model, out), status=1).err
    assert f"1 of 3 checkpoints of {model} failed and are left out: 16: " in " ".join(
        errors.split()
    )
    assert list(json.loads((out / "summary.json").read_text())["failed"]) == ["16"]
    shutil.copytree(run_folder / "step16", model / "step16", dirs_exist_ok=True)
    call(*options(model, out))
    assert json.loads((out / "summary.json").read_text())["checkpoints"] == list(STEPS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "7"], "has no checkpoints [7]; there are [0, 16, 256]"),
        (["--k", "99"], "`k` must lie in [1, 32]"),
        (["--model", "{tmp}"], "no checkpoints in it"),
    ],
)
def test_bad_input(
    call, run_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    options_given = [part.replace("{tmp}", str(tmp_path)) for part in arguments]
    errors = call(*options(run_folder, out), *options_given, status=2).err
    assert message in " ".join(errors.split())
    assert not (out / "sweep.nc").exists()


def test_results_of_other_settings_are_left_alone(
    call, run_folder: Path, tmp_path: Path
) -> None:
    call(*options(run_folder, tmp_path))
    bytes_before = (tmp_path / "sweep.nc").read_bytes()
    errors = call(*options(run_folder, tmp_path), "--k", 5, status=2).err
    assert "holds results of another plan" in " ".join(errors.split())
    assert (tmp_path / "sweep.nc").read_bytes() == bytes_before
