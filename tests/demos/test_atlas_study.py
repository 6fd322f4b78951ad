"""What the atlas shows: a small run, and what its page says of the committed maps."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray

import atlas
import small_models as small
import tl_coupling as tlc

MAPS = Path(atlas.__file__).parent / "results" / "atlas"
TRAINED = ("Gemma-3-270M", "MiniLM-L6", "Qwen2.5-Coder-0.5B", "SmolLM2-135M")
K = 10


def mean_of(maps: xarray.Dataset) -> xarray.DataArray:
    """The mean over pairs of different layers, at k = 10."""
    values = maps["coupling"].sel(k=K)
    is_own = values["layer"] == values["other_layer"]
    return values.where(~is_own).mean(["layer", "other_layer"])


@pytest.mark.long("trains a small model")
def test_a_small_run_is_kept(
    folder_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"w{i} w{i + 1} w{i + 2}", "task": f"task {i % 2}"}
        for i in range(2 * atlas.N_OF_TASK)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(atlas, "KS", (3, 5))
    out = tmp_path / "out"
    arguments = ["--models", str(folder_model), "--prompts", str(prompts)]
    arguments += ["--steps", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["atlas.py", *arguments])
    atlas.main()
    small_maps = tlc.generalization.task_maps(tlc.open_survey(out / atlas.SMALL_MODEL))
    assert small_maps["checkpoint"].values.tolist() == [0, 1, 2]
    assert small_maps["n_prompts"].values.ravel().tolist() == [atlas.N_PASSAGES] * 3
    maps = tlc.generalization.task_maps(tlc.open_survey(out / folder_model.name))
    assert maps["checkpoint"].values.tolist() == ["main", "untrained"]
    assert maps["task"].values.tolist() == ["task 0", "task 1"]
    # What is there is not measured again.
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*.nc")}
    monkeypatch.setattr(small, "learn", None)
    atlas.main()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.nc")} == written


@pytest.mark.parametrize("model", TRAINED)
def test_trained_models_are_above_chance_and_twins_at_chance(model: str) -> None:
    maps = xarray.load_dataset(MAPS / f"{model}.nc")
    assert not maps.attrs
    assert (maps["n_prompts"] == atlas.N_OF_TASK).all()
    assert maps.sizes["task"] == 6
    chance = 1 - np.sqrt(1 - 1 / K)
    means = mean_of(maps).squeeze("model")
    assert (means.sel(checkpoint="main") > 1.2 * chance).all()
    twins = means.sel(checkpoint="untrained")
    np.testing.assert_allclose(twins, chance, atol=0.05 * chance)


def test_means_differ_between_models_more_than_between_tasks() -> None:
    means = [
        mean_of(xarray.load_dataset(MAPS / f"{model}.nc")).sel(checkpoint="main")
        for model in TRAINED
    ]
    of_models = [float(mean.mean()) for mean in means]
    of_tasks = [float(np.ptp(mean.values)) for mean in means]
    assert np.ptp(of_models) > 4 * max(of_tasks)


def test_the_small_model_has_sixteen_steps() -> None:
    maps = xarray.load_dataset(MAPS / f"{atlas.SMALL_MODEL}.nc")
    assert maps.sizes["checkpoint"] == len(small.checkpoint_steps(512)) == 16


def test_the_committed_maps_are_small() -> None:
    assert sum(path.stat().st_size for path in MAPS.glob("*.nc")) < 400_000
