"""Surveys: models by checkpoints by prompts, resumed, extended, refused; every executor
gives the same values.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling.models import ModelError, with_own_modules
from tl_coupling.prompts import Prompt
from tl_coupling.studies.surveys import Settings, measure_prompts
from tl_coupling.studies.surveys.checkpoints import step_order
from tl_coupling.studies.surveys.executors import process_pool
from tl_coupling.studies.surveys.results import open_survey
from tl_coupling.studies.surveys.survey import Survey, run_survey
from tl_coupling.studies.surveys.units import Folder, Unit

PROMPTS = [
    Prompt("w3 w14 w15 w92", "sums-0", "sums"),
    Prompt("w5 w6 w7", "sums-1", "sums"),
    Prompt("w9 w8 w7 w6 w5", "riddles-0", "riddles"),
]
SETTINGS = Settings(k=(2, 4), n_singular_values=6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two architectures, one with three blocks; and a training run with two
    checkpoints.
    """
    folder = tmp_path_factory.mktemp("models")
    model_of = {
        "two": tiny.huggingface_model("llama"),
        "three": tiny.huggingface_model("gpt_neox", 1, num_hidden_layers=3),
    }
    for name, model in model_of.items():
        model.save_pretrained(folder / name)
        tiny.save_tokenizer(folder / name)
    for step in (0, 100):
        tiny.huggingface_model("gpt_neox", step).save_pretrained(
            folder / "run" / f"step{step}"
        )
        tiny.save_tokenizer(folder / "run" / f"step{step}")
    return {name: str(folder / name) for name in ("two", "three", "run")}


@pytest.fixture(scope="module")
def survey(models: dict[str, str]) -> Survey:
    return Survey(
        {name: models[name] for name in ("two", "three")},
        PROMPTS,
        settings=SETTINGS,
        prompts_per_unit=2,
    )


@pytest.fixture(scope="module")
def undisturbed(
    survey: Survey, tmp_path_factory: pytest.TempPathFactory
) -> xarray.Dataset:
    return run_survey(survey, tmp_path_factory.mktemp("undisturbed")).load()


def values_of(data: xarray.Dataset) -> xarray.Dataset:
    """All but how long it took."""
    return data.drop_vars(["seconds", "peak_memory"]).load()


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


def test_a_unit_is_one_model_and_checkpoint_with_some_prompts(survey: Survey) -> None:
    units = {unit.key: unit.subject["prompts"] for unit in survey.units()}
    assert units == {
        "two@main+0": [0, 2],
        "two@main+2": [2, 3],
        "three@main+0": [0, 2],
        "three@main+2": [2, 3],
    }
    undivided = replace(survey, prompts_per_unit=None).units()
    assert {unit.key: unit.subject["prompts"] for unit in undivided} == {
        "two@main": [0, 3],
        "three@main": [0, 3],
    }


def test_values_are_those_of_each_model_alone(
    models: dict[str, str], undisturbed: xarray.Dataset
) -> None:
    assert dict(undisturbed.coupling.sizes) == {
        "model": 2,
        "checkpoint": 1,
        "prompt": 3,
        "k": 2,
        "layer": 3,
        "other_layer": 3,
    }
    assert undisturbed.task.values.tolist() == ["sums", "sums", "riddles"]
    assert undisturbed.text.values.tolist() == [prompt.prompt for prompt in PROMPTS]
    for name, n_layers in (("two", 2), ("three", 3)):
        model = with_own_modules(tlc.load_model(models[name]))
        alone = measure_prompts(model, PROMPTS, SETTINGS)
        here = undisturbed.sel(model=name, checkpoint="main")
        assert int(here.n_layers) == n_layers
        assert int(here.d_model) == tiny.D_MODEL
        assert (
            int(here.n_parameters) == json.loads(alone.attrs["provenance"])["n_params"]
        )
        for variable in alone.data_vars:
            kept = (
                here[variable]
                .reindex_like(alone[variable])
                .transpose(*alone[variable].dims)
            )
            np.testing.assert_array_equal(kept, alone[variable], err_msg=str(variable))
    assert undisturbed.coupling.sel(model="two").isel(layer=2).isnull().all()
    assert json.loads(undisturbed.attrs["failed"]) == {}
    assert "provenance_by_unit" not in undisturbed.attrs


def test_prompts_and_units_can_be_shared_out_otherwise(
    survey: Survey, undisturbed: xarray.Dataset
) -> None:
    """Without a folder the results are in memory, and nothing is left behind."""
    data = run_survey(replace(survey, prompts_per_unit=None))
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))


def test_results_are_opened_lazily_only_if_they_are_larger_than_memory(
    survey: Survey,
    tmp_path: Path,
    undisturbed: xarray.Dataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = run_survey(survey, tmp_path)
    variables = ("coupling", "loss", "singular_values")
    assert not any(data[name].chunks for name in variables)
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))
    size = sum(path.stat().st_size for path in tmp_path.glob("*.nc"))
    monkeypatch.setattr("tl_coupling.studies.surveys.results._memory", lambda: size)
    lazily = open_survey(tmp_path)
    assert all(lazily[name].chunks for name in variables)
    xarray.testing.assert_identical(values_of(lazily), values_of(undisturbed))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"take 0\.0 GiB, over half .*: pip install \"tl-coupling\[survey",
    ):
        open_survey(tmp_path)
    monkeypatch.undo()
    xarray.testing.assert_identical(open_survey(tmp_path), data)


_WITHOUT_DASK = """
import sys
sys.modules["dask"] = None
import tl_coupling as tlc
print(tlc.open_survey(sys.argv[1]).sizes["model"])
"""


@pytest.mark.long("starts a process")
def test_results_open_where_dask_is_not_installed(
    survey: Survey, tmp_path: Path
) -> None:
    run_survey(survey, tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DASK, tmp_path], capture_output=True, text=True
    )
    assert (ended.stdout.strip(), ended.returncode) == ("2", 0), ended.stderr[-500:]


@pytest.mark.long("starts worker processes")
def test_a_process_pool_gives_the_same_bits(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    with process_pool(2) as executor:
        data = run_survey(survey, tmp_path, executor)
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))


@pytest.mark.long("starts a dask cluster")
def test_dask_gives_the_same_bits(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
    }
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        data = run_survey(survey, tmp_path, client)
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))


# Where the tests and what they share can be imported from.
TESTS = Path(__file__).parents[2]
# Where a process of its own finds this file, what tests share, and the zoo.
PATHS = (Path(__file__).parent, Path(tiny.__file__).parent, TESTS)

_DRIVER = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_survey import PROMPTS, SETTINGS
from tl_coupling.studies.surveys.executors import process_pool
from tl_coupling.studies.surveys.survey import Survey, run_survey

if __name__ == "__main__":
    survey = Survey(json.loads(sys.argv[1]), PROMPTS, settings=SETTINGS, prompts_per_unit=2)
    with process_pool(1) as executor:
        run_survey(survey, sys.argv[2], executor)
"""


@pytest.mark.long("kills processes")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_a_killed_process_loses_nothing_finished(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path, victim: str
) -> None:
    script, folder = tmp_path / "driver.py", tmp_path / "results"
    script.write_text(_DRIVER)
    command = [
        sys.executable,
        script,
        json.dumps(dict(survey.models)),
        folder,
        *map(str, PATHS),
    ]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(folder.glob("*+0.json")):
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.02)
    if victim == "driver":
        driver.kill()
    else:
        children = (
            Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        )
        workers = [
            int(c)
            for c in children
            if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()
        ]
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    _, errors = driver.communicate()
    if victim == "worker":
        # Its units are done again by a new one.
        assert (driver.returncode, "units failed" in errors) == (0, False)
    finished_units = {
        name: content
        for name, content in state(folder).items()
        if name.endswith(".nc") and name[0] != "."
    }
    assert finished_units
    data = run_survey(survey, folder)
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))
    units_after = {
        name: content
        for name, content in state(folder).items()
        if name in finished_units
    }
    # The worker of a driver that was killed may have finished one more, and written it
    # again.
    assert {
        name: content
        for name, content in units_after.items()
        if content == finished_units[name]
    }
    assert {name: content[0] for name, content in units_after.items()} == {
        name: content[0] for name, content in finished_units.items()
    }
    again = state(folder)
    run_survey(survey, folder)
    assert state(folder) == again


def test_checkpoints_and_untrained_twins(
    models: dict[str, str], undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    """Training steps alone are numbers; beside a model as it is they are text."""
    steps = run_survey(
        Survey({"run": models["run"]}, PROMPTS, settings=SETTINGS), tmp_path
    ).load()
    assert steps["checkpoint"].values.tolist() == [0, 100]
    swept = tlc.checkpoint_sweep(models["run"], prompts=PROMPTS, settings=SETTINGS)
    for name in ("coupling", "loss", "line_shape_score"):
        np.testing.assert_array_equal(steps[name].sel(model="run"), swept[name])
    both = Survey(
        {"run": models["run"], "two": models["two"]},
        PROMPTS,
        untrained=True,
        settings=SETTINGS,
    )
    data = run_survey(both, tmp_path).load()
    assert data["model"].values.tolist() == ["run", "two"]
    assert data["checkpoint"].values.tolist() == ["0", "100", "main", "untrained"]
    np.testing.assert_array_equal(
        data.loss.sel(model="run", checkpoint=["0", "100"]), swept.loss
    )
    np.testing.assert_array_equal(
        data.loss.sel(model="two", checkpoint="main"),
        undisturbed.loss.sel(model="two")[0],
    )
    assert data.loss.sel(model="two", checkpoint=["0", "100"]).isnull().all()
    twin = measure_prompts(
        tlc.load_model(models["two"], untrained=True), PROMPTS, SETTINGS
    )
    np.testing.assert_array_equal(
        data.loss.sel(model="two", checkpoint="untrained"), twin.loss
    )


def test_some_checkpoints_of_some_models(models: dict[str, str]) -> None:
    survey = Survey(
        {"run": models["run"], "two": models["two"]},
        PROMPTS,
        checkpoints={"run": [100]},
    )
    assert [unit.key for unit in survey.units()] == ["run@100", "two@main"]
    (alone,) = Survey([Path(models["two"])], PROMPTS).units()
    assert (
        alone.subject["model"]
        == alone.subject["source"]["name"]
        == str(Path(models["two"]).resolve())
    )
    hub = Survey(["a/b", "c"], PROMPTS, checkpoints=[1, 1000])
    assert [unit.key for unit in hub.units()] == [
        "a%2Fb@1",
        "a%2Fb@1000",
        "c@1",
        "c@1000",
    ]


def test_a_model_that_fails_fails_alone_and_a_rerun_completes(
    survey: Survey, undisturbed: xarray.Dataset, models: dict[str, str], tmp_path: Path
) -> None:
    link = tmp_path / "three"
    link.mkdir()
    broken = replace(survey, models={"two": models["two"], "three": str(link)})
    (link / "config.json").write_text("{}")
    with pytest.warns(
        UserWarning,
        match=r"2 of 4 units failed .*: three@main\+0, three@main\+2: ModelError",
    ):
        data = run_survey(broken, tmp_path / "results")
    assert data["model"].values.tolist() == ["two"]
    assert set(json.loads(data.attrs["failed"])) == {"three@main+0", "three@main+2"}
    state_before = state(tmp_path / "results")
    for path in Path(models["three"]).iterdir():
        (link / path.name).write_bytes(path.read_bytes())
    data = run_survey(broken, tmp_path / "results")
    xarray.testing.assert_equal(values_of(data), values_of(undisturbed))
    after = state(tmp_path / "results")
    assert all(
        after[name] == state_before[name]
        for name in state_before
        if name.startswith("two")
    )


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="none of the 1 units could be measured; no%2Fmodel@main: ModelError",
    ):
        run_survey(Survey(["no/model"], PROMPTS), tmp_path)
    with pytest.raises(
        ValueError, match="holds no finished results: run the survey first"
    ):
        open_survey(tmp_path)


def test_results_of_another_survey_are_not_overwritten(
    survey: Survey, models: dict[str, str], tmp_path: Path
) -> None:
    run_survey(survey, tmp_path)
    state_before = state(tmp_path)
    other_plans = {
        r"another plan \(prompts\)": replace(survey, prompts=PROMPTS[:2]),
        r"another plan \(k\)": replace(survey, settings=replace(SETTINGS, k=(3,))),
        r"another plan \(prompts_per_unit\)": replace(survey, prompts_per_unit=1),
        "as 'two', asked for is .*three': give it another name": replace(
            survey, models={"two": models["three"]}
        ),
    }
    for message, other_survey in other_plans.items():
        with pytest.raises(ValueError, match=message):
            run_survey(other_survey, tmp_path)
    with pytest.raises(ValueError, match="another plan"):
        tlc.checkpoint_sweep(
            models["run"], prompts=PROMPTS, settings=SETTINGS, folder=tmp_path
        )
    assert state(tmp_path) == state_before
    more = run_survey(replace(survey, models={"four": models["two"]}), tmp_path)
    assert more["model"].values.tolist() == ["four", "three", "two"]
    # The list of planned units grows; all else stays.
    planned, _ = state_before.pop("planned.json")
    planned_now = json.loads((tmp_path / "planned.json").read_text())["units"]
    assert planned_now == [
        *json.loads(planned)["units"],
        "four@main+0",
        "four@main+2",
    ]
    assert {
        name: content
        for name, content in state(tmp_path).items()
        if name in state_before
    } == state_before


def test_two_models_are_not_taken_together_under_one_name(
    models: dict[str, str], tmp_path: Path
) -> None:
    """Neither as two checkpoints of one, nor of two training runs whose folders have
    one name.
    """
    of_one_prompt = {"prompts": PROMPTS[:1], "settings": SETTINGS}
    run_survey(
        Survey({"name": models["run"]}, checkpoints=[100], **of_one_prompt),
        tmp_path / "results",
    )
    state_before = state(tmp_path / "results")
    message = (
        "holds results of '.*run' as 'name', asked for is '.*two': give it another name"
    )
    with pytest.raises(ValueError, match=message):
        run_survey(
            Survey({"name": models["two"]}, **of_one_prompt), tmp_path / "results"
        )
    same_named_run = tmp_path / "run"
    shutil.copytree(Path(models["run"]) / "step0", same_named_run / "step0")
    tlc.checkpoint_sweep(
        models["run"], [100], **of_one_prompt, folder=tmp_path / "sweep"
    )
    with pytest.raises(
        ValueError, match=r"as 'run', asked for is '.*run': give it another name"
    ):
        tlc.checkpoint_sweep(
            same_named_run, [0], **of_one_prompt, folder=tmp_path / "sweep"
        )
    assert state(tmp_path / "results") == state_before
    # More checkpoints of the same model are welcome, and a name under which nothing was
    # measured is free.
    more = tlc.checkpoint_sweep(
        models["run"], [0, 100], **of_one_prompt, folder=tmp_path / "sweep"
    )
    assert more["checkpoint"].values.tolist() == [0, 100]
    with pytest.warns(UserWarning, match="1 of 2 units failed"):
        run_survey(
            Survey({"two": models["two"], "three": "no/three"}, **of_one_prompt),
            tmp_path / "free",
        )
    free = run_survey(
        Survey({"three": models["three"]}, **of_one_prompt), tmp_path / "free"
    )
    assert free["model"].values.tolist() == ["three", "two"]


@pytest.fixture
def own_model(models: dict[str, str], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(models["two"], tmp_path / "own"))


def train(folder: Path) -> None:
    """Other weights in place of those that are there."""
    tiny.huggingface_model("llama", 7).save_pretrained(folder)


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w5"', '"w5000"'))


CHANGED = r"'{}' in .*own was changed, replaced or removed after this run began: restore it and run again, or measure"


@pytest.mark.long("runs many surveys")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (train, "model.safetensors"),
        (remove, "model.safetensors"),
        (change_tokens, "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_a_local_model_that_changes_between_units_is_an_error(
    own_model: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    name: str,
    memory: str,
) -> None:
    """Half of the units would be of one model, and half of another."""
    survey = Survey(
        {"own": own_model},
        PROMPTS,
        settings=SETTINGS,
        prompts_per_unit=1,
        memory=memory,
    )
    original = shutil.copytree(own_model, tmp_path / "original")

    def progress(units):
        for i, unit in enumerate(units):
            if i == 1:
                change(own_model)
            yield unit

    with pytest.warns(
        UserWarning, match=f"2 of 3 units failed .*{CHANGED.format(name)}"
    ):
        data = run_survey(survey, tmp_path / "results", progress=progress)
    first = measure_prompts(tlc.load_model(str(original)), PROMPTS[:1], SETTINGS)
    assert data.loss.isnull().squeeze().values.tolist() == [False, True, True]
    np.testing.assert_array_equal(
        data.loss.sel(prompt="sums-0").squeeze(), first.loss.squeeze()
    )
    # A later run notices as well, and goes on when the model is again what it was.
    state_before = state(tmp_path / "results")
    message = rf"holds results of .*own, where '{name}' is another file now: restore it, or measure the new model in"
    with pytest.raises(ValueError, match=message):
        run_survey(survey, tmp_path / "results")
    assert state(tmp_path / "results") == state_before
    shutil.copytree(original, own_model, dirs_exist_ok=True)
    whole = run_survey(survey, tmp_path / "results")
    expected = run_survey(replace(survey, models={"own": original}))
    np.testing.assert_array_equal(whole.coupling, expected.coupling)


def test_a_local_model_that_changes_while_it_is_loaded_is_an_error(
    own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = tlc.load_model

    def loaded(*arguments: object, **options: object) -> object:
        train(own_model)
        return load_model(*arguments, **options)

    monkeypatch.setattr("tl_coupling.studies.surveys.survey.load_model", loaded)
    with pytest.raises(ModelError, match=CHANGED.format("model.safetensors")):
        run_survey(Survey({"own": own_model}, PROMPTS[:1], settings=SETTINGS))


def touch(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path)


def copy(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def add_what_is_not_read(folder: Path) -> None:
    (folder / "README.md").write_text("about")
    (folder / "optimizer.pt").write_bytes(b"state")


@pytest.mark.long("runs many surveys")
@pytest.mark.parametrize("change", [touch, copy, add_what_is_not_read])
def test_a_model_that_is_the_same_is_not_refused(
    own_model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    survey = Survey({"own": own_model}, PROMPTS, settings=SETTINGS, prompts_per_unit=1)
    expected = run_survey(survey)

    def progress(units):
        for i, unit in enumerate(units):
            if i == 1:
                change(own_model)
            yield unit

    data = run_survey(survey, tmp_path / "results", progress=progress)
    xarray.testing.assert_identical(values_of(data), values_of(expected))
    state_before = state(tmp_path / "results")
    run_survey(survey, tmp_path / "results")
    assert state(tmp_path / "results") == state_before


def test_results_that_do_not_say_which_files_they_are_of_are_kept(
    own_model: Path, tmp_path: Path
) -> None:
    """Those of earlier versions."""
    survey = Survey({"own": own_model}, PROMPTS[:1], settings=SETTINGS)
    run_survey(survey, tmp_path / "results")
    path = tmp_path / "results" / "own@main.json"
    content = json.loads(path.read_text())
    assert set(content["files"]) >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    del content["files"], content["plan"], content["digest"]
    path.write_text(json.dumps(content))
    touch(own_model)
    state_before = state(tmp_path / "results")
    run_survey(survey, tmp_path / "results")
    assert state(tmp_path / "results") == state_before


def test_a_folder_of_something_else_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is not a folder of results: there is no plan\.json in it"
    ):
        open_survey(tmp_path)
    Folder(tmp_path, {"of": "something else"})
    with pytest.raises(
        ValueError, match="holds results of something other than a survey"
    ):
        open_survey(tmp_path)


def test_a_path_that_begins_with_a_dot_is_not_hidden(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(models["two"]).parent)
    data = run_survey(Survey(["./two"], PROMPTS[:1], settings=SETTINGS), tmp_path)
    assert data["model"].values.tolist() == ["./two"]


def test_two_spellings_of_a_path_are_not_two_models(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(models["two"]).parent)
    with pytest.raises(
        ValueError, match=r"must be different folders, got \['two', './two'\]"
    ):
        Survey(["two", "./two"], PROMPTS)
    run_survey(Survey(["two"], PROMPTS[:1], settings=SETTINGS), tmp_path)
    for spelling in ("./two", "../models0/two", models["two"]):
        spelling = spelling.replace("models0", Path.cwd().name)
        with pytest.raises(
            ValueError,
            match=r"holds results of '.*two' as 'two': ask for it by that name, got ",
        ):
            run_survey(Survey([spelling], PROMPTS[:1], settings=SETTINGS), tmp_path)
    # Names that somebody chose are meant.
    named = run_survey(
        Survey({"another": "./two"}, PROMPTS[:1], settings=SETTINGS), tmp_path
    )
    assert sorted(named["model"].values.tolist()) == ["another", "two"]


def test_threads_share_a_folder(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(3) as executor:
        data = run_survey(replace(survey, prompts_per_unit=1), tmp_path, executor)
    xarray.testing.assert_identical(values_of(data), values_of(undisturbed))


@pytest.mark.long("runs many surveys")
def test_threads_get_the_untrained_twins_that_one_alone_gets(
    models: dict[str, str],
) -> None:
    """Seeds are of the whole process."""
    with_twins = Survey(
        {"two": models["two"], "three": models["three"]},
        PROMPTS,
        settings=SETTINGS,
        untrained=True,
    )
    with_twins = replace(with_twins, prompts_per_unit=1)
    with ThreadPoolExecutor(4) as executor:
        together = run_survey(with_twins, executor=executor)
    xarray.testing.assert_identical(
        values_of(together), values_of(run_survey(with_twins))
    )


def test_revisions_are_in_the_order_of_their_steps() -> None:
    names = ["main", "step64000", "step1000", "step143000", "v10", "v2", "100", "20"]
    assert sorted(names, key=step_order) == [
        "20",
        "100",
        "main",
        "step1000",
        "step64000",
        "step143000",
        "v2",
        "v10",
    ]


def test_results_that_were_damaged_since_are_said(
    survey: Survey, tmp_path: Path
) -> None:
    run_survey(survey, tmp_path)
    path = tmp_path / "two@main+0.nc"
    path.write_bytes(path.read_bytes()[:-10])
    (tmp_path / "three@main+0.json").write_text('{"what": {}, "status": "finished"}')
    with pytest.warns(UserWarning, match="2 of 4 units in .* are missing"):
        data = open_survey(tmp_path)
    message = "its result is missing or damaged: run again"
    assert json.loads(data.attrs["failed"]) == {
        "three@main+0": message,
        "two@main+0": message,
    }
    assert data.loss.sel(model="two", checkpoint="main").isnull().values.tolist() == [
        True,
        True,
        False,
    ]
    with pytest.warns(UserWarning, match="were measured anew: two@main.0, three@main"):
        assert not run_survey(survey, tmp_path).loss.isnull().any()


@pytest.mark.parametrize("removed", [["two@main+2"], ["three@main+0", "three@main+2"]])
def test_units_without_files_are_said_to_be_missing(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path, removed: list[str]
) -> None:
    """One unit, or all of a model: as before their first run, nothing is there of it."""
    run_survey(survey, tmp_path)
    assert open_survey(tmp_path).attrs["missing"] == "[]"
    for key in removed:
        (tmp_path / f"{key}.nc").unlink()
        (tmp_path / f"{key}.json").unlink()
    with pytest.warns(
        UserWarning,
        match=rf"^{len(removed)} of 4 units in .* are missing, the first is "
        rf"'{re.escape(removed[0])}', .*: run the survey again, which keeps finished",
    ) as caught:
        data = open_survey(tmp_path)
    assert "\n" not in str(caught[0].message)
    assert Path(caught[0].filename).name == Path(__file__).name
    assert json.loads(data.attrs["missing"]) == removed
    assert data.attrs["failed"] == "{}"
    state_before = state(tmp_path)
    again = run_survey(survey, tmp_path)
    assert again.attrs["missing"] == "[]"
    assert state_before.items() <= state(tmp_path).items()
    xarray.testing.assert_identical(values_of(open_survey(tmp_path)), values_of(again))
    np.testing.assert_array_equal(again.loss, undisturbed.loss)


def test_units_of_a_survey_that_is_running_are_missing_until_they_are_finished(
    survey: Survey, tmp_path: Path
) -> None:
    counts = []

    def watched(units: list[Unit]) -> Iterator[Unit]:
        for number, unit in enumerate(units):
            if number:
                message = f"^{4 - number} of 4 units in "
                with pytest.warns(UserWarning, match=message):
                    missing = json.loads(open_survey(tmp_path).attrs["missing"])
                counts.append(len(missing))
            yield unit

    run_survey(survey, tmp_path, progress=watched)
    assert counts == [3, 2, 1]


def test_a_list_of_planned_units_that_is_damaged_is_written_anew(
    survey: Survey, tmp_path: Path
) -> None:
    run_survey(survey, tmp_path)
    path = tmp_path / "planned.json"
    content = path.read_bytes()
    for damaged in (b"", content[:-9], content.replace(b"two@", b"six@")):
        path.write_bytes(damaged)
        assert open_survey(tmp_path).attrs["missing"] == "[]"
        run_survey(survey, tmp_path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("prompts_per_unit", [2, None])
def test_units_of_different_versions_open_and_are_named(
    survey: Survey,
    undisturbed: xarray.Dataset,
    tmp_path: Path,
    prompts_per_unit: int | None,
) -> None:
    """As after an upgrade between two runs: within one model, or between two."""
    survey_in_units = replace(survey, prompts_per_unit=prompts_per_unit)
    run_survey(survey_in_units, tmp_path)
    key = survey_in_units.units()[0].key
    path, record = tmp_path / f"{key}.nc", tmp_path / f"{key}.json"
    data = xarray.load_dataset(path)
    provenance = json.loads(data.attrs["provenance"])
    versions = provenance["versions"] | {"torch": "1.0"}
    data.assign_attrs(
        provenance=json.dumps(provenance | {"versions": versions, "device": "cuda"})
    ).to_netcdf(path)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    content = json.loads(record.read_text()) | {"sha256": checksum}
    del content["digest"]
    record.write_text(json.dumps(content))
    with pytest.warns(
        UserWarning,
        match=r"were not all measured alike: device, versions differ; attrs\['provenance_by",
    ):
        opened = open_survey(tmp_path)
    by_unit = json.loads(opened.attrs["provenance_by_unit"])
    assert {unit: provenance["device"] for unit, provenance in by_unit.items()} == {
        unit.key: "cuda" if unit.key == key else "cpu"
        for unit in survey_in_units.units()
    }
    assert by_unit[key]["versions"] == versions
    common = json.loads(opened.attrs["provenance"])
    assert common["dtype"] == "float32"
    assert not {"device", "versions", "model"} & common.keys()
    np.testing.assert_array_equal(opened.coupling, undisturbed.coupling)
    with pytest.warns(UserWarning, match="were not all measured alike"):
        assert (
            run_survey(survey_in_units, tmp_path).attrs["provenance_by_unit"]
            == opened.attrs["provenance_by_unit"]
        )


def test_failures_of_earlier_runs_are_not_those_of_this_one(
    models: dict[str, str], tmp_path: Path
) -> None:
    of_one_prompt = {"prompts": PROMPTS[:1], "settings": SETTINGS}
    with pytest.warns(UserWarning, match="1 of 2 units failed"):
        run_survey(
            Survey({"two": models["two"], "thre": "no/thre"}, **of_one_prompt), tmp_path
        )
    data = run_survey(
        Survey({"two": models["two"], "three": models["three"]}, **of_one_prompt),
        tmp_path,
    )
    assert json.loads(data.attrs["failed"]) == {}
    assert json.loads(data.attrs["missing"]) == ["thre@main"]
    with pytest.warns(
        UserWarning, match="1 of 3 units in .*, the first is 'thre@main'"
    ):
        opened = open_survey(tmp_path)
    assert set(json.loads(opened.attrs["failed"])) == {"thre@main"}
    assert json.loads(opened.attrs["missing"]) == ["thre@main"]


def test_prompts_that_can_be_walked_through_once_are_kept(
    models: dict[str, str], as_a_user: None
) -> None:
    survey = Survey([models["two"]], (prompt for prompt in PROMPTS), settings=SETTINGS)
    assert (
        [len(unit.inputs.prompts) for unit in survey.units()]
        == [len(unit.inputs.prompts) for unit in survey.units()]
        == [3]
    )


def test_the_folder_of_the_command_opens_too(
    survey: Survey, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    run_survey(survey, tmp_path / "units")
    xarray.testing.assert_identical(
        values_of(open_survey(tmp_path)), values_of(undisturbed)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": []}, "`models` must be one or more names, each once, got"),
        ({"models": ["a", "a"]}, "each once, got"),
        ({"prompts": []}, "`prompts` is empty"),
        ({"prompts_per_unit": 0}, "`prompts_per_unit` must be at least 1, got 0"),
        (
            {"untrained": True, "checkpoints": [1]},
            "`untrained` cannot be combined with `checkpoints`",
        ),
        ({"models": ["./nowhere"]}, "there is no such folder: ./nowhere"),
        (
            {"checkpoints": {"b": [1]}},
            r"names models that are not surveyed: \['b'\]; there are \['a'\]",
        ),
    ],
)
def test_what_could_not_be_measured_is_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Survey(**({"models": ["a"], "prompts": PROMPTS} | given))


def test_prompts_of_a_unit_have_a_bar_of_their_own_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def measured(
        model: object,
        prompts: object,
        settings: object,
        progress: object,
        kept: object,
    ) -> None:
        seen.append(progress)
        raise ValueError("enough")

    monkeypatch.setattr(
        "tl_coupling.studies.surveys.survey.load_model", lambda **_: nn.Identity()
    )
    monkeypatch.setattr("tl_coupling.studies.surveys.survey.measured_prompts", measured)
    with ThreadPoolExecutor(1) as executor:
        for options in (
            {},
            {"progress": False},
            {"progress": iter},
            {"executor": executor},
        ):
            with pytest.raises(ModelError, match="enough"):
                run_survey(Survey(["a"], ["w1"]), **options)
    assert seen == [None, False, False, False]
