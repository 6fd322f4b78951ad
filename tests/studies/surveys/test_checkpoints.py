"""Sweeps over checkpoints: from a local folder and by genuine names, failing, killed,
and taken up again.
"""

import gc
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray

import tiny
import tl_coupling as tlc
from tl_coupling.models import with_own_modules
from tl_coupling.prompts import as_prompts
from tl_coupling.studies.surveys import (
    Settings,
    checkpoint_sweep,
    checkpoints,
    local_checkpoints,
    measure_prompts,
    pythia_steps,
    survey,
)
from tl_coupling.studies.surveys.units import Unit

BACKENDS = ["bridge", pytest.param("hooked", marks=tiny.needs_hooked_transformer)]
PROMPTS = ["w3 w14 w15 w92", "w5 w6 w7"]
SETTINGS = Settings(k=(2, 4), n_singular_values=6)
PYTHIA = "EleutherAI/pythia-14m"
# Of the checkpoints in the hub's cache, by step and by revision.
SEEDS = {"main": 0, "step0": 1, 0: 1, "step1000": 2, 1000: 2}


def save_checkpoints(folder: Path, names: dict[str, int]) -> Path:
    for name, seed in names.items():
        tiny.huggingface_model("gpt_neox", seed).save_pretrained(folder / name)
        tiny.save_tokenizer(folder / name)
    return folder


def huggingface_loss(seed: int, tokens: list[int]) -> float:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return float(tiny.huggingface_model("gpt_neox", seed)(ids, labels=ids).loss)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with checkpoints at steps 0, 20 and 100, and what else lies in
    such a folder.
    """
    folder = tmp_path_factory.mktemp("training") / "run0"
    (folder / "logs").mkdir(parents=True)
    (folder / "README").write_text("a run")
    return save_checkpoints(folder, {"step100": 2, "step0": 0, "step20": 1})


@pytest.fixture(scope="module")
def undisturbed(run: Path) -> xarray.Dataset:
    return checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS)


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


def test_pythia_steps_are_published_and_those_of_the_emergence_figure_begin_at_128() -> (
    None
):
    steps = pythia_steps()
    # Figure 1b's caption: 128, 256, 512, 1k, 2k, …, 128k, 143k.
    doubled = [1000 * 2**i for i in range(8)]
    assert pythia_steps(first=128) == (128, 256, 512, *doubled, 143_000)
    assert steps[:3] == (1, 2, 4)
    assert steps[9:12] == (512, 1000, 2000)
    assert steps[-2:] == (128_000, 143_000)
    assert len(steps) == 10 + 8 + 1
    # What Pythia published: 0, the powers of two up to 512, and every 1000th step.
    assert {*steps} <= {0, *(2**i for i in range(10)), *range(1000, 143_001, 1000)}
    assert list(steps) == sorted({*steps})
    assert pythia_steps(first=143_000) == (143_000,)


def test_local_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    for name in (
        "checkpoint-1000",
        "step_0000900",
        "run2-step20",
        "7",
        "last",
        "best-model",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "step5").mkdir()
    (tmp_path / "step6").write_text("a file")
    checkpoints = local_checkpoints(tmp_path)
    assert [(step, path.name) for step, path in checkpoints.items()] == [
        (7, "7"),
        (20, "run2-step20"),
        (900, "step_0000900"),
        (1000, "checkpoint-1000"),
    ]


def test_two_folders_of_one_step_and_none_at_all_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoints in it; wanted subfolders"):
        local_checkpoints(tmp_path)
    for name in ("step10", "checkpoint-010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="checkpoint-010 and step10 are both of step 10"
    ):
        local_checkpoints(tmp_path)


@pytest.mark.both_lines
def test_each_checkpoint_of_a_folder_is_measured_as_itself(
    run: Path, undisturbed: xarray.Dataset
) -> None:
    assert undisturbed["checkpoint"].values.tolist() == [0, 20, 100]
    assert {
        dims[0] for dims in (values.dims for values in undisturbed.data_vars.values())
    } == {"checkpoint"}
    for step in (0, 20, 100):
        model = with_own_modules(tlc.load_model(str(run / f"step{step}")))
        alone = measure_prompts(model, as_prompts(PROMPTS), SETTINGS)
        # xarray.testing.assert_equal is exact.
        xarray.testing.assert_equal(
            undisturbed.sel(checkpoint=step, drop=True).drop_vars("text"), alone
        )
    losses = [huggingface_loss(seed, [3, 14, 15, 92]) for seed in (0, 1, 2)]
    np.testing.assert_allclose(undisturbed["loss"][:, 0], losses, rtol=1e-5)
    assert len({round(loss, 3) for loss in losses}) == 3


def test_the_dataset_says_how_it_was_made(
    run: Path, undisturbed: xarray.Dataset
) -> None:
    assert undisturbed.attrs["model"] == str(run)
    assert undisturbed.attrs["failed"] == "{}"
    assert undisturbed.attrs["orientation"] == "ujv"
    provenance = json.loads(undisturbed.attrs["provenance"])
    assert provenance["backend"] == "huggingface"
    assert provenance["dtype"] == "float32"
    # As torch was installed: it may add a build, `+cu128`, to what it says itself.
    assert provenance["versions"]["torch"] == importlib.metadata.version("torch")
    assert "checkpoint" not in provenance


@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_the_same_weights_twice_are_said(tmp_path: Path, memory: str) -> None:
    """As EleutherAI/pythia-2.8b had them under 76 branches."""
    folder = save_checkpoints(
        tmp_path / "m", {"step0": 1, "step10": 2, "step1000": 1, "step2000": 1}
    )
    arguments = {
        "settings": SETTINGS,
        "memory": memory,
        "folder": tmp_path / "out",
        "progress": False,
    }
    message = "m@0, m@1000, m@2000 have the same weights: one model was measured 3 ti"
    with pytest.warns(UserWarning, match=message):
        data = checkpoint_sweep(folder, None, PROMPTS, **arguments)
    digests = json.loads(data.attrs["weights_digests"])
    assert list(digests) == ["m@0", "m@10", "m@1000", "m@2000"]
    if memory == "resident":
        assert digests["m@0"] == digests["m@1000"] != digests["m@10"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_sweep(folder, [0, 10], PROMPTS, **arguments)


@pytest.mark.both_lines
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", [[0, 1000], ["step1000", "main", "step0"]])
def test_genuine_names_from_the_hubs_cache(hub: Path, backend, wanted) -> None:
    data = checkpoint_sweep(PYTHIA, wanted, PROMPTS, settings=SETTINGS, backend=backend)
    assert data["checkpoint"].values.tolist() == wanted
    assert data.attrs["model"] == PYTHIA
    losses = []
    for checkpoint in wanted:
        model = tlc.load_model(PYTHIA, checkpoint=checkpoint, backend=backend)
        alone = measure_prompts(model, as_prompts(PROMPTS), SETTINGS)
        xarray.testing.assert_equal(
            data.sel(checkpoint=checkpoint, drop=True).drop_vars("text"), alone
        )
        losses.append(huggingface_loss(SEEDS[checkpoint], [5, 6, 7]))
    np.testing.assert_allclose(data["loss"][:, 1], losses, rtol=1e-5)


def test_results_are_written_and_read_back_the_same(
    run: Path, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "results"
    first = checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS, folder=folder)
    xarray.testing.assert_identical(first, undisturbed)
    state_before = state(folder)
    assert set(state_before) == {
        "plan.json",
        "planned.json",
        *(f"run0@{s}.{e}" for s in (0, 20, 100) for e in ("nc", "json")),
    }
    xarray.testing.assert_identical(
        checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS, folder=folder), first
    )
    assert state(folder) == state_before
    # A part of it, in another order, from the same folder.
    part = checkpoint_sweep(run, [100, 0], PROMPTS, settings=SETTINGS, folder=folder)
    assert state(folder) == state_before
    xarray.testing.assert_equal(part, first.sel(checkpoint=[100, 0]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": ["w1 w2"]}, "(prompts)"),
        ({"settings": Settings(k=(2,), n_singular_values=6)}, "(k)"),
        (
            {
                "settings": Settings(
                    k=(2, 4), n_singular_values=6, position=0, orientation="vju"
                )
            },
            "(orientation, position)",
        ),
        ({"dtype": torch.float64}, "(dtype)"),
        ({"backend": "bridge"}, "(backend)"),
    ],
)
def test_a_folder_of_another_sweep_is_left_alone(
    hub: Path, run: Path, tmp_path: Path, change, named: str
) -> None:
    arguments = {
        "name": run,
        "checkpoints": [0],
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "folder": tmp_path,
    }
    checkpoint_sweep(**arguments)
    state_before = state(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        checkpoint_sweep(**arguments | change)
    assert f"holds results of another plan {named}" in str(caught.value)
    assert state(tmp_path) == state_before


@pytest.mark.both_lines
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_that_fails_is_left_out_with_a_warning_and_tried_again(
    hub: Path, tmp_path: Path, backend
) -> None:
    arguments = {
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "folder": tmp_path,
        "backend": backend,
    }
    with pytest.warns(
        UserWarning,
        match=r"2 of 3 checkpoints of .*14m failed and are left out: 3: ModelError: .*checkpoint 3",
    ):
        data = checkpoint_sweep(PYTHIA, [3, 1000, 4], **arguments)
    assert data["checkpoint"].values.tolist() == [1000]
    failed = json.loads(data.attrs["failed"])
    assert failed.keys() == {"3", "4"}
    assert "at checkpoint 4" in failed["4"]
    record = json.loads((tmp_path / "EleutherAI%2Fpythia-14m@3.json").read_text())
    assert (record["what"]["checkpoint"], record["status"], record["error"]) == (
        3,
        "failed",
        failed["3"],
    )
    state_before = state(tmp_path)
    seen = []
    monitored = {
        **arguments,
        "progress": lambda units: (seen.append(unit.key) or unit for unit in units),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = checkpoint_sweep(PYTHIA, [1000], **monitored)
    assert seen == ["EleutherAI%2Fpythia-14m@1000"]
    assert again.attrs["failed"] == "{}"
    assert state(tmp_path) == state_before


def test_a_folder_that_lost_a_checkpoint_goes_on_and_comes_back(tmp_path: Path) -> None:
    run_folder = save_checkpoints(tmp_path / "run", {"step1": 1, "step2": 2})
    whole = checkpoint_sweep(run_folder, prompts=PROMPTS, settings=SETTINGS)
    weights = run_folder / "step1" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    folder = tmp_path / "results"
    with pytest.warns(UserWarning, match="1 of 2 checkpoints of .*run failed"):
        half = checkpoint_sweep(
            run_folder, prompts=PROMPTS, settings=SETTINGS, folder=folder
        )
    assert half["checkpoint"].values.tolist() == [2]
    weights.write_bytes(content)
    again = checkpoint_sweep(
        run_folder, prompts=PROMPTS, settings=SETTINGS, folder=folder
    )
    xarray.testing.assert_identical(again, whole)


def test_a_folder_that_is_not_there_is_said_before_anything_is_tried(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=f"there is no such folder: {tmp_path}/run"):
        checkpoint_sweep(tmp_path / "run", [1], PROMPTS, folder=tmp_path / "results")
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_only_what_is_cached_is_tried_after_the_first_failure(
    hub: Path, monkeypatch
) -> None:
    tried = []

    def load_and_count(*args, checkpoint, **kwargs):
        tried.append(checkpoint)
        return tlc.load_model(*args, checkpoint=checkpoint, **kwargs)

    monkeypatch.setattr(survey, "load_model", load_and_count)
    uncached = [step for step in pythia_steps() if step != 1000]
    with pytest.raises(
        tlc.ModelError,
        match=r"none of the 18 .*; 1: ModelError: could not load .*no network",
    ) as caught:
        checkpoint_sweep(PYTHIA, uncached, PROMPTS, settings=SETTINGS)
    assert tried == [1]
    assert "\n" not in str(caught.value)
    tried.clear()
    with pytest.warns(
        UserWarning,
        match=r"2 of 3 .* left out: 4: ModelError: could .*; 8: ModelError: not tried: could",
    ):
        data = checkpoint_sweep(PYTHIA, [4, 8, 1000], PROMPTS, settings=SETTINGS)
    assert tried == [4, 1000]
    assert data["checkpoint"].values.tolist() == [1000]


def test_a_sweep_is_a_survey_of_one_model(
    run: Path, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS, folder=tmp_path)
    opened = tlc.open_survey(tmp_path)
    costs = ["n_layers", "d_model", "n_parameters", "seconds", "peak_memory"]
    xarray.testing.assert_equal(
        opened.drop_vars(costs).sel(model="run0", drop=True), undisturbed
    )
    again = tlc.run_survey(
        tlc.Survey({"run0": run}, PROMPTS, settings=SETTINGS), tmp_path
    )
    xarray.testing.assert_identical(again, opened)


def test_a_folder_of_an_older_sweep_is_refused_with_what_to_do(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(
        json.dumps({"model": str(run), "backend": "auto", "k": [2, 4]})
    )
    (tmp_path / "checkpoint-0.nc").write_bytes(b"an older result")
    with pytest.raises(
        ValueError,
        match=r"was written by an older version of tl_coupling .*choose another folder",
    ):
        checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_checkpoints_that_were_measured_with_other_versions_are_named(
    run: Path, tmp_path: Path
) -> None:
    arguments = {"prompts": PROMPTS, "settings": SETTINGS, "folder": tmp_path}
    checkpoint_sweep(run, **arguments)
    path, record = tmp_path / "run0@20.nc", tmp_path / "run0@20.json"
    data = xarray.load_dataset(path)
    provenance = json.loads(data.attrs["provenance"]) | {"versions": {"torch": "1.0"}}
    data.assign_attrs(provenance=json.dumps(provenance)).to_netcdf(path)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    content = json.loads(record.read_text()) | {"sha256": checksum}
    del content["digest"]
    record.write_text(json.dumps(content))
    with pytest.warns(
        UserWarning, match="were not all measured alike: versions differ"
    ):
        swept = checkpoint_sweep(run, **arguments)
    by_unit = json.loads(swept.attrs["provenance_by_unit"])
    assert by_unit["run0@20"] == {"versions": {"torch": "1.0"}}
    version = importlib.metadata.version("torch")
    assert by_unit["run0@0"]["versions"]["torch"] == version
    assert "versions" not in json.loads(swept.attrs["provenance"])


@pytest.mark.both_lines
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            PYTHIA,
            "none of the 3 checkpoints of EleutherAI/pythia-14m could be measured; 1: "
            "ModelError: could not load",
        ),
        (
            "gpt2",
            "none of the 3 checkpoints of gpt2 could be measured; 1: ModelError: "
            "could not load 'gpt2' at",
        ),
        ("smollm2-135m", "none of the 3 checkpoints .*has no checkpoints"),
    ],
)
def test_nothing_measured_is_an_error(
    hub: Path, monkeypatch, name: str, message: str
) -> None:
    # None of the steps that are measured by default is in the cache.
    monkeypatch.setattr(checkpoints, "pythia_steps", lambda: (1, 2, 4))
    with pytest.raises(tlc.ModelError, match=message) as caught:
        checkpoint_sweep(name, prompts=PROMPTS, settings=SETTINGS)
    assert "\n" not in str(caught.value)


def test_an_error_in_measuring_names_prompt_and_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        tlc.ModelError,
        match=r"none of the 3 .*; 0: ValueError: prompt '0': `k` must lie in \[1, 32\]",
    ):
        checkpoint_sweep(
            run, prompts=PROMPTS, settings=Settings(k=(50,)), folder=tmp_path
        )
    assert json.loads((tmp_path / "run0@20.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([], "`checkpoints` is empty: wanted at least one"),
        ([1, 2, 1], "each once"),
        (["main", "main"], "each once"),
        ([1, "step1"], "all steps or all revisions"),
        ("main", "must be a list of whole numbers or strings or None, got 'main'"),
        ([True], "must be a list of whole numbers or strings or None, got [True]"),
        ([1.5], "must be a list of whole numbers or strings or None, got [1.5]"),
        ([None], "must be a list of whole numbers or strings or None, got [None]"),
    ],
)
def test_checkpoints_that_make_no_sense_are_refused_before_anything_is_loaded(
    hub: Path, run: Path, as_a_user, monkeypatch, tmp_path: Path, wanted, message: str
) -> None:
    monkeypatch.setattr(survey, "load_model", None)
    for name in (PYTHIA, run):
        with pytest.raises((ValueError, TypeError)) as caught:
            checkpoint_sweep(
                name, wanted, PROMPTS, settings=SETTINGS, folder=tmp_path / "results"
            )
        text = str(caught.value)
        assert message in text or (name == run and "has no checkpoints" in text)
    assert not (tmp_path / "results").exists()


def test_a_step_that_a_folder_does_not_have_is_said_with_those_it_has(
    run: Path,
) -> None:
    with pytest.raises(
        ValueError, match=r"has no checkpoints \[7, 8\]; there are \[0, 20, 100\]"
    ):
        checkpoint_sweep(run, [7, 0, 8], PROMPTS, settings=SETTINGS)
    with pytest.raises(ValueError, match=r"has no checkpoints \['step0'\]"):
        checkpoint_sweep(run, ["step0"], PROMPTS, settings=SETTINGS)


def test_prompts_are_checked_before_anything_is_loaded(run: Path) -> None:
    with pytest.raises(ValueError, match="`prompts` is empty"):
        checkpoint_sweep(run, prompts=[], settings=SETTINGS)


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_loaded(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to the output folder"):
        checkpoint_sweep(
            run,
            prompts=PROMPTS,
            settings=SETTINGS,
            folder=tmp_path / "file" / "results",
        )


def test_checkpoints_of_another_depth_are_not_filled_up(
    monkeypatch, tmp_path: Path
) -> None:
    save_checkpoints(tmp_path, {"step1": 1})
    monkeypatch.setitem(
        tiny.CONFIGS, "gpt_neox", {**tiny.CONFIGS["gpt_neox"], "num_hidden_layers": 3}
    )
    save_checkpoints(tmp_path, {"step2": 2})
    with pytest.raises(
        ValueError, match=r"not of one architecture; layers: \{1: 2, 2: 3\}"
    ):
        checkpoint_sweep(tmp_path, prompts=PROMPTS, settings=SETTINGS)


@pytest.mark.both_lines
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("failing", [False, True])
def test_one_model_is_in_memory_at_a_time(
    hub: Path, monkeypatch, backend, failing: bool
) -> None:
    models: list[weakref.ref] = []
    still_there: list[bool] = []

    def load_and_look(*args, **kwargs):
        still_there.extend(model() is not None for model in models)
        model = tlc.load_model(*args, **kwargs)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(survey, "load_model", load_and_look)
    settings = Settings(k=(50,)) if failing else SETTINGS
    gc.collect()
    # Or luck decides when the last model goes.
    gc.disable()
    try:
        with pytest.raises(tlc.ModelError) if failing else nullcontext():
            checkpoint_sweep(
                PYTHIA,
                ["main", "step0", "step1000"],
                PROMPTS,
                settings=settings,
                backend=backend,
            )
    finally:
        gc.enable()
    assert len(models) == 3
    assert not any(still_there)


_KILLED = """
import os, signal, sys
from tl_coupling.studies.surveys import checkpoint_sweep
from tl_coupling.studies.surveys import Settings
from tl_coupling.studies.surveys import units

run, folder, when = sys.argv[1:]

def progress(todo):
    for unit in todo:
        if when == "between" and unit.subject["checkpoint"] == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        yield unit

if when != "between":
    # As a result, or its record, is about to get its name.
    replace = os.replace
    def killed(source, target):
        if os.path.basename(target) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = killed

checkpoint_sweep(run, None, ["w3 w14 w15 w92", "w5 w6 w7"],
                 settings=Settings(k=(2, 4), n_singular_values=6), folder=folder, progress=progress)
"""


@pytest.mark.long("kills processes")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize(
    ("when", "left_over"), [("between", 0), ("run0@20.nc", 1), ("run0@20.json", 1)]
)
def test_a_sweep_that_was_killed_goes_on_to_the_same_bits(
    run: Path, undisturbed: xarray.Dataset, tmp_path: Path, when: str, left_over: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(run), str(tmp_path), when],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-500:]
    state_before = state(tmp_path)
    finished = {
        name: content
        for name, content in state_before.items()
        if name in ("run0@0.nc", "run0@0.json")
    }
    assert len(finished) == 2
    assert "run0@100.nc" not in state_before
    assert sum(name.startswith(".") for name in state_before) == left_over
    again = checkpoint_sweep(run, prompts=PROMPTS, settings=SETTINGS, folder=tmp_path)
    xarray.testing.assert_identical(again, undisturbed)
    for name in undisturbed.data_vars:
        assert again[name].values.tobytes() == undisturbed[name].values.tobytes()
    after = state(tmp_path)
    assert {name: after[name] for name in finished} == finished
    assert not any(name.startswith(".") for name in after)


def test_progress_wraps_the_checkpoints(run: Path) -> None:
    seen: list[object] = []

    def progress(units: Iterable[Unit]) -> Iterator[Unit]:
        for unit in units:
            seen.append(unit.subject["checkpoint"])
            yield unit

    checkpoint_sweep(run, [20, 0], PROMPTS, settings=SETTINGS, progress=progress)
    assert seen == [20, 0]


def test_an_executor_gives_the_same_values(
    run: Path, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as executor:
        data = checkpoint_sweep(
            run, prompts=PROMPTS, settings=SETTINGS, folder=tmp_path, executor=executor
        )
    xarray.testing.assert_identical(data, undisturbed)


def test_a_local_folder_is_the_same_however_its_path_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"prompts": PROMPTS, "settings": SETTINGS, "folder": tmp_path}
    checkpoint_sweep(run, [0], **arguments)
    state_before = state(tmp_path)
    monkeypatch.chdir(run.parent)
    checkpoint_sweep(run.name, [0], **arguments)
    assert state(tmp_path) == state_before
