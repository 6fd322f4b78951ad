"""`tl-coupling directions` as a user meets it."""

import json
from pathlib import Path

import pytest

import tl_coupling as tlc
from tl_coupling.directions import Ablation, Decoded, Steering

TEXTS = ["w1 w2 w3 w4", "w5 w6 w7", "w9 w8 w7 w6", "w3 w2 w1"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": text, "prompt": text}) for text in TEXTS]
    path.write_text("\n".join(lines))
    return path


def test_directions_prints_and_writes_what_the_library_gives(
    call, folder_model: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--model", folder_model, "--prompts", prompts_file, "--layer", 0]
    options += ["--k", 2, "--draws", 2, "--rank", 2, "--steer", "--ablate"]
    printed = call("directions", *options, "--out", out, drawn=True).out
    model = tlc.load_model(str(folder_model))
    first, *others = (tlc.trace(model, text) for text in TEXTS)
    expected = tlc.directions.decode(first, 0, 2, others=others, n_draws=2)
    saved = Decoded.load(out / "decoded.nc")
    assert saved.texts == expected.texts
    assert saved.kurtosis.allclose(expected.kurtosis, atol=1e-4)
    assert expected.texts_of(2, 0, 0)[0].strip() in printed
    assert Steering.load(out / "steering.nc").prompts == tuple(TEXTS[1:])
    assert Ablation.load(out / "ablation.nc").prompts == tuple(TEXTS[2:])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ablation"][0]["kind"] == "shared"
    assert summary["steering"][0]["kind"] == "direction"
    assert {path.name for path in out.iterdir()} == {
        "decoded.nc",
        "steering.nc",
        "subspace.nc",
        "ablation.nc",
        "summary.json",
        "steering.png",
        "subspace.png",
        "ablation.png",
    }


def test_one_prompt_is_decoded_and_not_steered(
    call, folder_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--model", folder_model, "--prompt", "w1 w2 w3", "--draws", 2]
    call("directions", *options, "--k", 2, "--out", out)
    assert {path.name for path in out.iterdir()} == {"decoded.nc", "summary.json"}
    refused = call("directions", *options, "--steer", "--out", tmp_path / "b", status=2)
    assert "need several prompts" in " ".join(refused.err.split())
    assert not (tmp_path / "b").exists()
