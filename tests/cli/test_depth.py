"""The command as a user meets it: files, exit status, one line when something is
wrong.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import nn

import tl_coupling as tlc
from command_line import typed
from tl_coupling.measures import MEASURES


@pytest.mark.long("starts a process")
def test_depth_writes_results_and_pictures_and_prints_a_table(
    folder_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    options = typed(
        model=folder_model, prompt="w3 w14 w15", k=[4, 8], untrained=True, out=out
    )
    # In a process of its own, as the other commands are not: the entry point is tried
    # as well.
    command = [sys.executable, "-m", "tl_coupling", "depth", *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
        check=True,
    )
    expected = {
        "depth.nc", "depth-untrained.nc", "summary.json", "coupling-k4.png", "coupling-k8.png",
        "matrices.png", "locality.png", "singular_values.png",
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == expected
    # Two pixels for each that a page of 740 pixels has.
    with Image.open(out / "coupling-k8.png") as picture:
        assert picture.width == 2 * 740
    result = tlc.CouplingMap.load(out / "depth.nc")
    again = tlc.depth_coupling(
        tlc.trace(tlc.load_model(str(folder_model)), "w3 w14 w15"), k=8
    )
    assert abs(result.mean(4) - again.mean(4)) < 1e-5
    summary = json.loads((out / "summary.json").read_text())
    assert summary["mean"]["trained"]["prompt"]["4"] == pytest.approx(result.mean(4))
    assert summary["provenance"]["untrained"]["untrained"] is True
    assert f"{result.mean(8):.3f}" in done.stdout
    assert f"{result.null(8):.3f}" in done.stdout


def test_many_prompts(call, folder_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a/1", "prompt": "w3 w4"}\n\n{"prompt": "w5 w6 w7"}\n')
    options = ["--model", folder_model, "--prompts", file, "--k", 2, "--k", 4]
    done = call("depth", *options, "--out", tmp_path / "out", "--untrained", drawn=True)
    files = {path.name for path in (tmp_path / "out").rglob("*.nc")}
    assert files == {"depth.nc", "depth-untrained.nc"}
    assert {
        f"{measure}-k{k}.png" for measure in ("coupling", "spread") for k in (2, 4)
    } < {path.name for path in (tmp_path / "out").iterdir()}
    mean = tlc.CouplingMap.load(tmp_path / "out" / "depth.nc")
    model = tlc.load_model(str(folder_model))
    maps = [
        tlc.depth_coupling(tlc.trace(model, text), 4) for text in ("w3 w4", "w5 w6 w7")
    ]
    torch.testing.assert_close(
        mean.coupling(2), (maps[0].coupling(2) + maps[1].coupling(2)) / 2
    )
    spread = abs(maps[0].mean(2) - maps[1].mean(2)) / 2**0.5
    assert f"{mean.mean(2):.3f} ± {spread:.3f}" in done.out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["mean"]["trained"]["a/1"]["2"] == pytest.approx(
        maps[0].mean(2), abs=1e-5
    )
    assert summary["mean_over_prompts"]["trained"]["2"] == pytest.approx(mean.mean(2))
    assert summary["standard_deviation_over_prompts"]["trained"]["2"] == pytest.approx(
        spread, abs=1e-5
    )
    call("depth", *options, "--out", tmp_path / "maps", "--save-maps")
    saved = {
        path.name: tlc.CouplingMap.load(path)
        for path in (tmp_path / "maps" / "maps" / "trained").iterdir()
    }
    assert {name: m.provenance["tokens"] for name, m in saved.items()} == {
        "a%2F1.nc": [3, 4],
        "3.nc": [5, 6, 7],
    }


def test_a_narrow_model_takes_what_fits(
    call, folder_model: Path, tmp_path: Path
) -> None:
    done = call(
        "depth",
        *typed(model=folder_model, prompt="w3 w4", out=tmp_path),
        drawn=True,
    )
    assert "warning: the model has width 32: k = 32 is used" in done.err
    assert {path.name for path in tmp_path.glob("coupling-*.png")} == {
        f"coupling-k{k}.png" for k in (10, 30, 32)
    }


def test_help_has_examples(call) -> None:
    assert "depth" in call("--help").out
    assert "Examples:" in call("depth", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "`--k` must be at least 1, got 0"),
        (["--k", "33"], "`k` must lie in [1, 32]"),
        (["--prompt", ""], "the prompt is empty"),
        (["--position", "5"], "must lie in [-2, 1]"),
        (["--orientation", "juv"], "'ujv', 'vju'"),
        (["--backend", "hook"], "'hook' is not one of 'auto', 'bridge', 'hooked'"),
        (["--model", "no-such/model"], "could not load 'no-such/model'"),
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--prompts", "{file}", "--prompt", "w1"], "not both"),
        (["--prompts", "{file}"], "prompts.jsonl, line 2"),
        (["--out", "{file}/out"], "cannot write to the output folder"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    refused, folder_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"}\n{"promt": "w2"}\n')
    options = {"model": folder_model, "k": 4, "out": tmp_path / "out"}
    if "--prompts" not in arguments:
        options["prompt"] = "w1 w2"
    with_paths = [part.replace("{file}", str(file)) for part in arguments]
    assert message in refused("depth", options, with_paths)


@pytest.mark.parametrize(
    "arguments",
    [
        ["depth", "--nonsense"],
        ["depth", "--k", "many"],
        ["depth", "--prompts", "no-such-file.jsonl"],
        ["depth", "--model", "no-such/model", "--out", "{tmp}"],
    ],
)
def test_debug_shows_a_traceback_of_bad_usage_and_bad_files(
    call, tmp_path: Path, arguments: list[str]
) -> None:
    with_paths = [part.replace("{tmp}", str(tmp_path)) for part in arguments]
    errors = call("--debug", *with_paths, status=2).err
    # A slow machine says what takes long.
    shown = errors.removeprefix("loading no-such/model …\n")
    assert shown.startswith("Traceback")
    assert errors.splitlines()[-1].startswith("tl-coupling: ")
    assert "Traceback" not in call(*with_paths, status=2).err


def test_debug_as_the_value_of_an_option_is_not_the_flag(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "k": 0, "out": tmp_path}
    errors = call("depth", "--prompt", "--debug", status=2, **options).err
    assert "`--k` must be at least 1, got 0" in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/version").exists(),
    reason="root may write anywhere",
)
def test_a_folder_that_cannot_be_written_is_said_before_the_model_is_loaded(
    call,
) -> None:
    # /proc refuses even root.
    errors = call(
        "depth", "--model", "no-such/model", "--out", "/proc/tl_coupling", status=2
    ).err
    assert "cannot write to the output folder" in errors


@pytest.mark.long("measures SmolLM2 and its twin")
def test_the_embedded_model_beats_null_and_twin(
    call, smollm2: nn.Module, tmp_path: Path
) -> None:
    output = call("depth", "--untrained", "--out", tmp_path).out
    summary = json.loads((tmp_path / "summary.json").read_text())
    trained, untrained = (
        summary["mean"][run]["prompt"]["10"] for run in ("trained", "untrained")
    )
    assert trained > 3 * summary["null"]["10"]
    assert trained > 3 * untrained
    # It is what `make demo` runs: README shows what that prints, and names what it
    # writes.
    readme = (
        (Path(__file__).parents[2] / "README.md")
        .read_text()
        .partition("make demo")[2]
        .partition("pip install")[0]
    )
    shown = re.search(r"```text\n(.+?)```", readme, re.DOTALL)
    assert shown
    expected, got = (
        re.findall(r"│ +(\d+) │ +(\S+) │ +(\S+) │ +(\S+) │", text)
        for text in (shown[1], output)
    )
    assert len(expected) == 3
    for numbers, others in zip(expected, got, strict=True):
        assert [*map(float, numbers)] == pytest.approx(
            [*map(float, others)], abs=0.0015
        )
    short = readme.replace("`-k30`", "`coupling-k30.png`").replace(
        "`-k50`", "`coupling-k50.png`"
    )
    assert set(re.findall(r"`([\w-]+\.\w+)`", short)) == {
        path.name for path in tmp_path.iterdir()
    }


def test_what_is_done_to_jacobians_is_an_option(
    call, folder_model: Path, tmp_path: Path
) -> None:
    """The map is that of `depth_coupling`, in the metric of both prompts' streams."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w3 w4"}\n{"prompt": "w5 w6 w7"}\n')
    options = {"model": folder_model, "prompts": file, "k": [4]}
    options |= {"without": "identity", "metric": "stream"}
    done = call("depth", **options, out=tmp_path / "out")
    assert "without the identity" in done.out
    model = tlc.load_model(str(folder_model))
    traces = [tlc.trace(model, text) for text in ("w3 w4", "w5 w6 w7")]
    M = tlc.measures.stream_metric(traces)
    expected = tlc.mean_depth_coupling(traces, 4, without="identity", metric=M)
    found = tlc.CouplingMap.load(tmp_path / "out" / "depth.nc")
    torch.testing.assert_close(found.coupling(), expected.coupling())
    assert found.provenance["metric"] == expected.provenance["metric"]


def test_products_in_place_of_jacobians_are_an_option(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": "w3 w4 w5", "k": [2]}
    call("depth", **options, method="products", out=tmp_path / "out")
    found = tlc.CouplingMap.load(tmp_path / "out" / "depth.nc")
    assert "Krylov" in found.provenance["svd"]
    model = tlc.load_model(str(folder_model))
    expected = tlc.depth_coupling(tlc.trace(model, "w3 w4 w5"), 2)
    torch.testing.assert_close(found.coupling(), expected.coupling(), rtol=0, atol=1e-4)
    options |= {"without": "identity", "method": "products"}
    refused = call("depth", **options, out=tmp_path / "refused", status=2)
    assert "need the Jacobians" in " ".join(refused.err.split())


def test_every_choice_in_one_table(call, folder_model: Path, tmp_path: Path) -> None:
    """With the twin, over two prompts; the orientation that was asked for is that of
    the maps.
    """
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w3 w4"}\n{"prompt": "w5 w6 w7"}\n')
    options = {"model": folder_model, "prompts": file, "k": [2, 4]}
    options |= {"orientation": "vju", "untrained": True}
    options |= {"all_measures": True, "diagonal": True}
    done = call("depth", **options, out=tmp_path / "out")
    rows = pandas.read_csv(tmp_path / "out" / "measures.csv")
    assert len(rows) == len(MEASURES) * 2 * 2 * 2 * 2
    model = tlc.load_model(str(folder_model))
    traces = [tlc.trace(model, text) for text in ("w3 w4", "w5 w6 w7")]
    for orientation, measure, off in itertools.product(
        ("ujv", "vju"), MEASURES, (True, False)
    ):
        maps = [
            tlc.depth_coupling(trace, 4, orientation=orientation) for trace in traces
        ]
        query = (
            f"measure == '{measure}' and orientation == '{orientation}' "
            f"and k == 2 and checkpoint == 'trained'"
        )
        row = rows.query(
            f"{query} and pairs == '{'different' if off else 'all'}'"
        ).squeeze()
        means = [of_prompt.mean(2, measure, off_diagonal=off) for of_prompt in maps]
        assert row["mean"] == pytest.approx(sum(means) / 2, rel=1e-4)
        assert row["spread"] == pytest.approx(
            statistics.stdev(means), rel=1e-2, abs=1e-6
        )
        assert row["null"] == pytest.approx(
            sum(of_prompt.null(2, measure, off_diagonal=off) for of_prompt in maps) / 2,
            rel=1e-4,
        )
        assert re.search(
            rf"{measure} .*{orientation} .*{'different' if off else 'all'} .*{row['mean']:.3f}",
            done.out,
        )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    result = tlc.CouplingMap.load(tmp_path / "out" / "depth.nc")
    assert result.orientation == "vju"
    assert summary["mean_over_prompts"]["trained"]["2"] == pytest.approx(
        result.mean(2, off_diagonal=False)
    )
    assert summary["null"]["2"] == pytest.approx(result.null(2, off_diagonal=False))
    low, high = summary["null_interval"]["2"]
    assert low < summary["null"]["2"] < high
    p = result.null_p(2, off_diagonal=False)
    assert summary["null_p"]["trained"]["2"] == p
    p_of_twin = summary["null_p"]["untrained"]["2"]
    # Below the table, with the test.
    shown = " ".join(done.out.split())
    assert f"p of so large a mean: {p:.2g} (k = 2)" in shown
    assert f"p of the mean of untrained: {p_of_twin:.2g} (k = 2)" in shown
    assert "random subspaces, one-sided, all prompts as one draw" in shown
    assert "mean over all pairs of layers, l = l' among them" in " ".join(
        done.out.split()
    )


@pytest.fixture
def three_prompts(tmp_path: Path) -> Path:
    file = tmp_path / "three.jsonl"
    texts = ("w3 w4", "w5 w6 w7", "w9 w2 w1")
    file.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return file


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_interval_over_prompts_is_that_of_a_t_test(
    call, folder_model: Path, tmp_path: Path, three_prompts: Path, diagonal: bool
) -> None:
    options = {"model": folder_model, "prompts": three_prompts, "k": [2, 4]}
    if diagonal:
        options["diagonal"] = True
    done = call("depth", **options, out=tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    values = [means["2"] for means in summary["mean"]["trained"].values()]
    assert len(values) == 3
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert summary["interval_over_prompts"]["trained"]["2"] == pytest.approx(
        [low, high], rel=1e-6
    )
    assert f"± {statistics.stdev(values):.3f} [{low:.3f}, {high:.3f}]" in done.out
    if not diagonal:
        mean = tlc.CouplingMap.load(tmp_path / "out" / "depth.nc")
        assert mean.interval(2) == pytest.approx((low, high), abs=1e-5)


def test_saved_maps_are_averaged_as_the_prompts_were(
    call, folder_model: Path, tmp_path: Path, three_prompts: Path
) -> None:
    options = {"prompts": three_prompts, "k": [2, 4], "save_maps": True}
    measured = call("depth", **options, model=folder_model, out=tmp_path / "out")
    folder = tmp_path / "out" / "maps" / "trained"
    first, *others = sorted(folder.iterdir())
    averaged = call(
        "depth", "--maps", first, "--maps", others[0], "--maps", others[1],
        "--k", 2, "--k", 4, "--out", tmp_path / "mean",
    )  # fmt: skip
    table = measured.out.partition("wrote to")[0]
    assert averaged.out.partition("wrote to")[0] == table
    of_folder = call("depth", "--maps", folder, "--k", 4, "--out", tmp_path / "folder")
    row = next(line for line in table.splitlines() if re.search(r"│ +4 │", line))
    numbers = re.findall(r"\d\.\d{3}", row)
    assert numbers
    assert set(numbers) <= set(re.findall(r"\d\.\d{3}", of_folder.out))
    mean = tlc.CouplingMap.load(tmp_path / "mean" / "depth.nc")
    expected = tlc.mean_of_maps(tlc.CouplingMap.load(file) for file in (first, *others))
    assert torch.equal(mean.coupling(2), expected.coupling(2))
    summary = json.loads((tmp_path / "mean" / "summary.json").read_text())
    assert set(summary["mean"]["trained"]) == {*map(str, (first, *others))}
    # One map is itself, and so is a mean.
    call("depth", "--maps", first, "--out", tmp_path / "one")
    alone = tlc.CouplingMap.load(tmp_path / "one" / "depth.nc")
    assert torch.equal(alone.matrices, tlc.CouplingMap.load(first).matrices)
    file = tmp_path / "mean" / "depth.nc"
    again = call("depth", "--maps", file, "--k", 4, "--out", tmp_path / "again")
    assert set(numbers) <= set(re.findall(r"\d\.\d{3}", again.out))
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["mean"]["trained"] == {str(file): {"4": mean.mean(4)}}
    assert summary["interval_over_prompts"]["trained"]["4"] == list(mean.interval(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"untrained": True}, "give --maps or --untrained, not both"),
        ({"prompt": "w1"}, "give --maps or --prompt, not both"),
        ({"model": "gpt2"}, "give --maps or --model, not both"),
        ({"position": 0}, "give --maps or --position, not both"),
        ({"maps": ["{file}", "{file}"]}, "give each map once"),
        ({"maps": "{empty}"}, "has no maps, files that end in .nc"),
        ({"maps": "no-such.nc"}, "no-such.nc"),
        ({"maps": "{file}", "k": 99}, "`k` must lie in [1, 2]"),
        ({"maps": "{file}", "k": [2, 3]}, "`k` must lie in [1, 2]"),
        ({"maps": "{file}", "orientation": "vju"}, "is of orientation 'ujv'"),
        ({"maps": ["{file}", "{again}"]}, "one prompt is there twice"),
    ],
)
def test_maps_that_cannot_be_averaged_are_refused(
    refused,
    folder_model: Path,
    tmp_path: Path,
    options: dict[str, object],
    message: str,
) -> None:
    model = tlc.load_model(str(folder_model))
    file = tlc.depth_coupling(tlc.trace(model, "w1 w2"), 2).save(tmp_path / "a.nc")
    empty = tmp_path / "empty"
    empty.mkdir()
    again = tmp_path / "b.nc"
    again.write_bytes(file.read_bytes())
    paths = {"{file}": file, "{again}": again, "{empty}": empty}
    maps = options.get("maps", file)
    if isinstance(maps, list):
        maps = [paths[name] for name in maps]
    options = options | {
        "maps": paths.get(maps, maps) if isinstance(maps, str) else maps
    }
    assert message in refused("depth", options | {"out": tmp_path / "out"}, [])
