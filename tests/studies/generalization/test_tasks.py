"""Mean maps of tasks, against means taken one prompt at a time."""

import math
from pathlib import Path

import numpy as np
import pytest
import xarray
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling.generalization import task_maps

KS = (2, 4)
TASKS = {"sums": ("w1 w2 w3", "w4 w5 w6 w7"), "riddles": ("w8 w9",)}
PROMPTS = [
    tlc.Prompt(text, f"{task}-{place}", task)
    for task, texts in TASKS.items()
    for place, text in enumerate(texts)
]
SETTINGS = tlc.Settings(k=KS)


@pytest.fixture(scope="module")
def model(tokenizer_folder: Path) -> nn.Module:
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


def single_map(model: nn.Module, text: str) -> tlc.CouplingMap:
    return tlc.depth_coupling(tlc.trace(model, text), k=max(KS))


def test_maps_are_means_over_the_prompts_of_a_task(model) -> None:
    maps = task_maps(tlc.surveys.measure_prompts(model, PROMPTS, SETTINGS))
    assert maps["task"].values.tolist() == list(TASKS)
    for task, texts in TASKS.items():
        of_task = maps.sel(task=task).squeeze(["model", "checkpoint"])
        assert of_task["n_prompts"].item() == len(texts)
        results = [single_map(model, text) for text in texts]
        for k in KS:
            expected = sum(result.coupling(k).numpy() for result in results)
            np.testing.assert_allclose(
                of_task["coupling"].sel(k=k), expected / len(texts), rtol=1e-5
            )
            chance = 1 - math.sqrt(1 - 1 / k)
            assert of_task["null_coupling"].sel(k=k).item() == pytest.approx(chance)


def test_prompts_without_a_task_are_one(model) -> None:
    texts = ["w1 w2", "w3 w4 w5"]
    maps = task_maps(tlc.surveys.measure_prompts(model, texts, SETTINGS))
    assert maps["task"].values.tolist() == ["all prompts"]
    assert maps["n_prompts"].item() == len(texts)


def test_a_survey_has_its_models_and_checkpoints(folder_model: Path, tmp_path) -> None:
    survey = tlc.Survey(
        {"tiny": str(folder_model)}, PROMPTS, untrained=True, settings=SETTINGS
    )
    data = tlc.run_survey(survey, tmp_path / "survey", progress=False)
    maps = task_maps(data)
    assert maps["model"].values.tolist() == ["tiny"]
    assert maps["checkpoint"].values.tolist() == ["main", "untrained"]
    values = maps["coupling"].sel(checkpoint="main", task="riddles", k=4).squeeze()
    loaded = tlc.load_model(str(folder_model))
    expected = single_map(loaded, "w8 w9").coupling(4)
    np.testing.assert_allclose(values, expected, rtol=1e-4)
    # What is by task stays as it is.
    assert task_maps(maps) is maps


def test_a_map_is_that_of_its_prompt(tiny_trace: tlc.Trace) -> None:
    result = tlc.depth_coupling(tiny_trace, k=4)
    maps = task_maps(result)
    assert maps["k"].values.tolist() == [3, 4]
    for k in (3, 4):
        np.testing.assert_array_equal(
            maps["coupling"].sel(k=k).squeeze(), result.coupling(k)
        )
        assert maps["null_coupling"].sel(k=k).item() == result.null(k)
    assert maps["checkpoint"].values.tolist() == ["main"]
    assert maps["n_prompts"].item() == 1
    tokens = tlc.self_coupling(tiny_trace, 0, 1, k=2)
    with pytest.raises(ValueError, match="wanted a map of layers"):
        task_maps(tokens)


def test_prompts_that_were_not_measured_do_not_count(model) -> None:
    data = tlc.surveys.measure_prompts(model, PROMPTS, SETTINGS)
    is_measured = data["prompt"] != "sums-1"
    maps = task_maps(data.where(is_measured))
    sums = maps.sel(task="sums").squeeze()
    assert sums["n_prompts"].item() == 1
    expected = single_map(model, "w1 w2 w3").coupling(4)
    np.testing.assert_allclose(sums["coupling"].sel(k=4), expected, rtol=1e-5)


def test_data_without_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="there is none in the data: loss"):
        task_maps(xarray.Dataset({"loss": ("prompt", [1.0])}))
