"""`tl-coupling rotate` as a user meets it."""

import json
from pathlib import Path

import pytest

import tl_coupling as tlc
from tl_coupling.directions import Rotation

TEXTS = ["w1 w2 w3 w4", "w5 w6 w7", "w9 w8 w7 w6"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": t, "prompt": t}) for t in TEXTS))
    return path


def test_the_command_saves_draws_and_prints_what_the_function_gives(
    call, folder_model: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = {"model": folder_model, "prompts": prompts_file, "side": "both"}
    options |= {"angle": 40, "draws": 2, "seed": 3, "first-position": 1}
    done = call("rotate", out=out, drawn=True, **options)
    expected = tlc.directions.rotate(
        tlc.load_model(str(folder_model)),
        TEXTS,
        side="both",
        angle=40,
        first_position=1,
        n_draws=2,
        seed=3,
    )
    saved = Rotation.load(out / "rotation.nc")
    assert saved.loss_change.allclose(expected.loss_change, atol=1e-6)
    assert (saved.prompts, saved.kinds) == (tuple(TEXTS), expected.kinds)
    summary = json.loads((out / "summary.json").read_text())
    kinds = [row["kind"] for row in summary["rotations"]]
    assert kinds == ["together", "apart", "shrunk"]
    apart = float(expected.loss_change[2:4].mean())
    assert summary["rotations"][1]["loss_change"] == pytest.approx(apart, abs=1e-6)
    assert f"{apart:+.3f}" in done.out
    assert {path.name for path in out.iterdir()} == {
        "rotation.nc",
        "rotation.png",
        "summary.json",
    }


def test_one_layer_and_one_prompt_have_no_interval_and_it_is_said_once(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": TEXTS[0], "layer": 1, "draws": 1}
    done = call("rotate", out=tmp_path, drawn=True, **options)
    assert Rotation.load(tmp_path / "rotation.nc").kinds == ("alone", "shrunk")
    assert "nan" not in done.out
    assert done.err.count("has no interval") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rotations"][0]["low"] is None
