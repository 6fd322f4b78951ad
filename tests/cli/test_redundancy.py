"""`tl-coupling redundancy` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray

import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.huggingface_model("gpt_neox", seed=16).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


def test_redundancy_prints_what_each_block_costs(
    call, model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3 w4"}\n{"prompt": "w9 w8 w7"}\n')
    out = tmp_path / "out"
    options = ["--model", model, "--prompts", prompts, "--k", 4]
    printed = call("redundancy", *options, "--out", out, drawn=True).out
    data = xarray.load_dataset(out / "redundancy.nc")
    summary = json.loads((out / "summary.json").read_text())
    changes = ("dropped", "swapped", "merged", "projected", "exited")
    assert list(summary["change_in_loss"]) == list(changes)
    for change in changes:
        cost_of_prompts = data.sel(k=4)[f"loss_{change}"] - data.loss
        cost = cost_of_prompts.mean("prompt").values
        np.testing.assert_allclose(summary["change_in_loss"][change], cost, atol=1e-12)
        assert f"{cost[0]:+.3f}" in printed
    assert {path.name for path in out.iterdir()} == {
        "redundancy.nc",
        "correlations.nc",
        "summary.json",
        "redundancy-k4.png",
    }


def test_a_k_beyond_the_width_is_refused(call, model: Path, tmp_path: Path) -> None:
    options = ["--model", model, "--prompt", "w1 w2", "--k", 99]
    refused = call("redundancy", *options, "--out", tmp_path / "out", status=2)
    assert "`k` must lie in [1, 32]" in " ".join(refused.err.split())
