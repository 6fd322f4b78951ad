"""The command `atlas` as a user meets it."""

import base64
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

import tl_coupling as tlc

PROMPTS = [
    tlc.Prompt("w1 w2 w3", "a", "sums"),
    tlc.Prompt("w4 w5", "b", "sums"),
    tlc.Prompt("w6 w7", "c", "riddles"),
]


@pytest.fixture
def maps(folder_model: Path, tmp_path: Path) -> Path:
    """A folder with a survey, a map that was saved, and another result."""
    folder = tmp_path / "maps"
    survey = tlc.Survey(
        {"tiny": str(folder_model)}, PROMPTS, settings=tlc.Settings(k=(3, 4))
    )
    tlc.run_survey(survey, folder / "of tasks", progress=False)
    trace = tlc.trace(tlc.load_model(str(folder_model)), "w8 w9 w10")
    (folder / "more").mkdir()
    tlc.depth_coupling(trace, k=4).save(folder / "more" / "0.nc")
    return folder


def figures(page: Path) -> dict[str, Any]:
    (numbers,) = re.findall('data-atlas="([^"]*)"', page.read_text(encoding="utf-8"))
    held: dict[str, Any] = json.loads(html.unescape(numbers))["figures"]
    return held


def held_values(figure: dict[str, Any]) -> np.ndarray:
    """`[n_ks n_layers n_layers]`, of the first run."""
    n = len(figure["rows"])
    codes = np.frombuffer(base64.b64decode(figure["runs"][0]["values"]), "<u2")
    return codes.reshape(-1, n, n) / 65534


def test_the_page_holds_what_was_saved(call, maps: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "atlas.html"
    done = call("atlas", maps=maps, out=out)
    assert [path.name for path in out.parent.iterdir()] == ["atlas.html"]
    assert "maps of 0, of tasks" in done.out
    held = figures(out)
    assert len(held) == 3
    data = tlc.open_survey(maps / "of tasks")["coupling"].squeeze()
    expected = data.sel(prompt=["a", "b"]).mean("prompt")
    np.testing.assert_allclose(held_values(held["tiny/sums"]), expected, rtol=0.02)
    (name,) = set(held) - {"tiny/sums", "tiny/riddles"}
    assert name.endswith("/w8 w9 w10")
    result = tlc.CouplingMap.load(maps / "more" / "0.nc")
    expected_of_map = np.stack([result.coupling(k) for k in (3, 4)])
    np.testing.assert_allclose(held_values(held[name]), expected_of_map, rtol=0.02)


def test_means_that_were_saved_give_the_same_values(
    call, maps: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    means = tmp_path / "means"
    call("atlas", maps=maps, save_means=means, out=first)
    assert sorted(path.name for path in means.iterdir()) == ["0.nc", "of tasks.nc"]
    for path in means.iterdir():
        # Nothing of the machine that measured.
        assert not xarray.load_dataset(path).attrs
    call("atlas", maps=means, out=second)
    for name, figure in figures(first).items():
        np.testing.assert_allclose(
            held_values(figures(second)[name]), held_values(figure), atol=2e-5
        )


def test_what_is_no_map_is_left_out_with_a_warning(
    call, maps: Path, folder_model: Path, tmp_path: Path
) -> None:
    model = tlc.load_model(str(folder_model))
    trace = tlc.trace(model, "w1 w2")
    tlc.trajectories.residual_alignment(trace, 2).save(maps / "path.nc")
    # A survey that was begun just now.
    (maps / "begun").mkdir()
    shutil.copy(maps / "of tasks" / "plan.json", maps / "begun")
    done = call("atlas", maps=maps, out=tmp_path / "atlas.html")
    warned = " ".join(done.err.split())
    assert "path.nc is left out: a ResidualAlignment, no map" in warned
    assert "begun holds no finished results" in warned
    assert len(figures(tmp_path / "atlas.html")) == 3


def test_bad_input_is_one_line(refused, maps: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no survey and no saved map" in refused(
        "atlas", {"maps": empty, "out": out}, []
    )
    missing = {"maps": tmp_path / "missing", "out": out}
    assert "there is no such file or folder" in refused("atlas", missing, [])
    assert "`k` = 9 was not measured" in refused(
        "atlas", {"maps": maps, "k": 9, "out": out}, []
    )
    (empty / "broken.nc").write_text("no netCDF")
    assert "not a netCDF file" in refused("atlas", {"maps": empty, "out": out}, [])
