"""`tl-coupling survey` as a user meets it."""

import json
from pathlib import Path

import pandas
import pytest
from scipy import stats

import tiny
from tl_coupling.studies.surveys import open_survey

TASKS = ("sums", "riddles")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "other")):
        tiny.huggingface_model("llama", seed).save_pretrained(folder / name)
        tiny.save_tokenizer(folder / name)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"id": f"{t}-{i}", "task": t, "prompt": f"w{i} w{i + 3} w{n} w{2 * i}"}
        for n, t in enumerate(TASKS, 7)
        for i in range(4)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def options(models: Path, prompts: Path, tmp_path: Path) -> list[object]:
    named = ("--model", models / "one", "--model", f"second={models / 'other'}")
    out = tmp_path / "out"
    return ["survey", *named, "--prompts", prompts, "--k", 3, "--k", 8, "--out", out]


def test_a_survey_by_task_and_its_rerun(
    call, options, models: Path, tmp_path: Path
) -> None:
    output = call(*options, "--per-task", 3, "--prompts-per-unit", 4, drawn=True).out
    data = open_survey(tmp_path / "out" / "units").load()
    assert data["model"].values.tolist() == [str(models / "one"), "second"]
    assert data["task"].values.tolist() == ["sums"] * 3 + ["riddles"] * 3
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = {(row["model"], row["task"]): row for row in summary["by_task"]["3"]}
    assert {task for _, task in rows} == {*TASKS, "all prompts"}
    coupling = data["mean_coupling"].sel(model="second", checkpoint="main", k=3)
    sums = coupling.values[:3]
    assert rows["second", "sums"]["mean"] == pytest.approx(float(sums.mean()))
    # Three prompts are too few to resample: the interval is Student's.
    low, high = stats.t.interval(0.95, df=2, loc=sums.mean(), scale=stats.sem(sums))
    assert rows["second", "sums"]["low"] == pytest.approx(float(low))
    assert rows["second", "sums"]["high"] == pytest.approx(float(high))
    assert rows["second", "all prompts"]["mean"] == pytest.approx(
        float(coupling.mean())
    )
    assert f"{float(coupling.mean()):.3f}" in output
    assert "seconds per prompt" in output
    pictures = {
        "tasks-k3.png",
        "tasks-k8.png",
        "quartiles.png",
        "profiles.png",
        "length.png",
    }
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == pictures
    assert len(summary["cost"]) == 2
    assert all(
        row["seconds"] > 0 and row["peak_memory"] > 10 for row in summary["cost"]
    )
    results = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "out" / "units").glob("*.nc")
    }
    assert len(results) == 4
    call(*options, "--per-task", 3, "--prompts-per-unit", 4)
    assert {path: path.stat().st_mtime_ns for path in results} == results
    # The same texts under another key are the same survey.
    renamed = tmp_path / "renamed.jsonl"
    place = options.index("--prompts") + 1
    renamed.write_text(options[place].read_text().replace('"prompt"', '"body"'))
    options[place] = renamed
    keyed = ("--prompt-key", "body")
    call(*options, *keyed, "--per-task", 3, "--prompts-per-unit", 4)
    assert {path: path.stat().st_mtime_ns for path in results} == results


def test_every_choice_of_one_run(call, options, models: Path, tmp_path: Path) -> None:
    output = call(*options, "--n", 2, "--untrained", "--all-measures", "--diagonal").out
    with pytest.warns(UserWarning, match="have the same weights"):
        data = open_survey(tmp_path / "out" / "units").load()
    assert data["orientation"].values.tolist() == ["ujv", "vju"]
    assert data.attrs["diagonal"] == 1
    rows = pandas.read_csv(tmp_path / "out" / "measures.csv")
    # Models, checkpoints, measures, orientations, pairs, k.
    assert len(rows) == 2 * 2 * 7 * 2 * 2 * 2
    own = {
        "model": "second",
        "checkpoint": "untrained",
        "measure": "released_trace",
        "orientation": "vju",
        "k": 8,
    }
    maps = (
        data["released_trace"]
        .sel({key: value for key, value in own.items() if key in data.dims})
        .values
    )
    for pairs, values in (("all", maps), ("different", maps[:, [0, 1], [1, 0]])):
        row = rows.query(
            " and ".join(f"{key} == {value!r}" for key, value in own.items())
            + f" and pairs == '{pairs}'"
        )
        assert float(row["mean"].item()) == pytest.approx(values.mean(), rel=1e-5)
    assert "second: every choice" in output
    assert "mean over all pairs of layers, l = l' among them" in " ".join(
        output.split()
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    mean = (
        data["mean_coupling"]
        .sel(model="second", checkpoint="main", k=3, orientation="ujv")
        .mean()
    )
    assert float(mean) == pytest.approx(
        next(
            row["mean"]
            for row in summary["by_task"]["3"]
            if (row["model"], row["task"], row["checkpoint"])
            == ("second", "all prompts", "main")
        )
    )


@pytest.mark.long("starts worker processes")
def test_the_method_is_an_option(call, options, tmp_path: Path) -> None:
    call(*options, "--method", "products", "--n", 1)
    attributes = open_survey(tmp_path / "out" / "units").load().attrs
    assert json.loads(attributes["provenance"])["method"] == "products"


def test_workers_give_the_same_values(call, options, tmp_path: Path) -> None:
    call(*options, "--n", 2)
    of_one_run = open_survey(tmp_path / "out" / "units").load()
    call(*options[:-1], tmp_path / "again", "--n", 2, "--workers", 1)
    other = open_survey(tmp_path / "again" / "units").load()
    assert of_one_run.drop_vars(["seconds", "peak_memory"]).equals(
        other.drop_vars(["seconds", "peak_memory"])
    )


def test_a_model_that_fails_is_said_and_the_status_is_1(
    call, options, tmp_path: Path
) -> None:
    errors = call(*options, "--model", "no/such-model", "--n", 2, status=1).err
    assert "1 of 3 units failed and are left out: no/such-model@main" in " ".join(
        errors.split()
    )
    assert list(
        json.loads((tmp_path / "out" / "summary.json").read_text())["failed"]
    ) == ["no%2Fsuch-model@main"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompts", "no_such_set"],
            "'no_such_set' is neither a file nor a prompt set: give a JSONL file or one of arc_c",
        ),
        (["--n", "9"], "`n` must be at most 8, all the prompts of"),
        (
            ["--per-task", "5"],
            "`n` must lie in [1, 4], the prompts of the smallest task, got 5",
        ),
        (["--n", "3", "--per-task", "2"], "give --n or --per-task, not both"),
        (
            ["--workers", "2", "--slurm", "partition=x"],
            "give --workers or --slurm, not both",
        ),
        (
            ["--slurm", "partition"],
            "`--slurm` must be like partition=gpu,gpus_per_node=1,timeout_min=240, got 'part",
        ),
        (["--k", "0"], "`--k` must be at least 1, got 0"),
        (["--prompts-per-unit", "0"], "`prompts_per_unit` must be at least 1, got 0"),
        (["--orientation", "uvj"], "'ujv', 'vju'"),
    ],
)
def test_bad_input_is_one_line(
    refused, models: Path, prompts: Path, tmp_path: Path, arguments, message
) -> None:
    options = {"model": models / "one", "prompts": prompts, "out": tmp_path / "out"}
    assert message in refused("survey", options, arguments)


def test_a_model_named_twice(call, options, tmp_path: Path) -> None:
    errors = call(*options, "--model", "second=gpt2", status=2).err
    assert "must name each model once" in errors
    assert "NAME=MODEL tells two of them apart" in " ".join(errors.split())
    assert not (tmp_path / "out").exists()


def test_results_of_another_survey_are_kept(call, options, tmp_path: Path) -> None:
    call(*options, "--n", 2)
    bytes_before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    errors = call(*options, "--n", 3, status=2).err
    assert "holds results of another plan (prompts)" in " ".join(errors.split())
    assert {
        path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")
    } == bytes_before
