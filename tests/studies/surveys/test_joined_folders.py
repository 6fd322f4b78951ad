"""Shards of a survey, each measured in a folder of its own, are the survey that was
measured at once.
"""

import json
import shutil
from pathlib import Path

import pytest
import xarray

import tiny
import tl_coupling as tlc
from tl_coupling.prompts import Prompt

PROMPTS = [
    Prompt("w3 w14 w15 w92", "sums-0", "sums"),
    Prompt("w5 w6 w7", "sums-1", "sums"),
    Prompt("w9 w8 w7 w6 w5", "riddles-0", "riddles"),
]
SETTINGS = tlc.Settings(k=(2, 4), n_singular_values=6)
COSTS = ["seconds", "peak_memory"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    of_name = {
        "two": tiny.huggingface_model("llama"),
        "three": tiny.huggingface_model("gpt_neox", 1, num_hidden_layers=3),
        "other": tiny.huggingface_model("llama", 5),
    }
    for name, model in of_name.items():
        model.save_pretrained(folder / name)
        tiny.save_tokenizer(folder / name)
    return {name: str(folder / name) for name in of_name}


@pytest.fixture(scope="module")
def measured(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One model on some prompts and on the others, another on all; and all at once."""
    two, three = ({name: models[name]} for name in ("two", "three"))
    surveys = {
        "a": tlc.Survey(two, PROMPTS[:1], settings=SETTINGS),
        "b": tlc.Survey(two, PROMPTS[1:], settings=SETTINGS),
        "c": tlc.Survey(three, PROMPTS, settings=SETTINGS, prompts_per_unit=2),
        "whole": tlc.Survey(two | three, PROMPTS, settings=SETTINGS),
    }
    folder = tmp_path_factory.mktemp("surveys")
    for name, survey in surveys.items():
        tlc.run_survey(survey, folder / name)
    return {name: folder / name for name in surveys}


def test_shards_are_the_whole(measured: dict[str, Path]) -> None:
    whole = tlc.open_survey(measured["whole"])
    shards = [measured[name] for name in ("a", "b", "c")]
    joined = tlc.open_survey(shards)
    xarray.testing.assert_equal(joined.drop_vars(COSTS), whole.drop_vars(COSTS))
    for name in ("task", "text", "prompt"):
        assert joined[name].values.tolist() == whole[name].values.tolist()
    seconds = [float(tlc.open_survey(path).seconds.sum()) for path in shards]
    assert float(joined.seconds.sel(model="two").sum()) == pytest.approx(
        sum(seconds[:2])
    )
    assert joined.attrs["missing"] == "[]"
    for name in ("weights_digests", "models", "provenance"):
        assert json.loads(joined.attrs[name]) == json.loads(whole.attrs[name])
    xarray.testing.assert_identical(
        tlc.open_survey([shards[0]]), tlc.open_survey(shards[0])
    )


def test_what_was_not_measured_anywhere_is_missing(measured: dict[str, Path]) -> None:
    with pytest.warns(
        UserWarning, match="2 models and 3 prompts, but 1 of these pairs"
    ):
        joined = tlc.open_survey([measured["b"], measured["c"]])
    is_missing = joined.loss.sel(model="two").isnull().squeeze()
    # Prompts come in the order of the folders.
    assert joined["prompt"].values.tolist() == ["sums-1", "riddles-0", "sums-0"]
    assert is_missing.values.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("prompts", "model", "settings", "message"),
    [
        (PROMPTS[:2], "two", SETTINGS, r"prompt 'sums-0' was measured in .* and in "),
        (
            [Prompt("w1 w2", "sums-0")],
            "two",
            SETTINGS,
            "'sums-0' is another text in .*: give each prompt an id of its own",
        ),
        (
            PROMPTS[1:],
            "two",
            tlc.Settings(k=(2,), n_singular_values=6),
            "the same settings, k",
        ),
        (PROMPTS[1:], "other", SETTINGS, "two@main has other weights in .* than in "),
    ],
)
def test_what_is_no_shard_is_refused(
    models: dict[str, str],
    measured: dict[str, Path],
    tmp_path: Path,
    prompts: list[Prompt],
    model: str,
    settings: tlc.Settings,
    message: str,
) -> None:
    survey = tlc.Survey({"two": models[model]}, prompts, settings=settings)
    tlc.run_survey(survey, tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        tlc.open_survey([measured["a"], tmp_path])
    assert "\n" not in str(refused.value)


def test_a_job_that_failed_is_said_and_the_others_are_joined(
    models: dict[str, str], measured: dict[str, Path], tmp_path: Path
) -> None:
    """The others of one job array, or the one that is left of it."""
    shutil.copytree(models["other"], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    damaged = {"damaged": str(tmp_path / "damaged")}
    failed = tlc.Survey(damaged, PROMPTS, settings=SETTINGS)
    with pytest.raises(tlc.ModelError, match="none of the 1 units could be measured"):
        tlc.run_survey(failed, tmp_path / "failed", progress=False)
    again = shutil.copytree(tmp_path / "failed", tmp_path / "again")
    begun = [measured["c"], tmp_path / "failed"]
    for shards in (begun, [measured["a"], measured["b"], *begun]):
        with pytest.warns(
            UserWarning,
            match=rf"1 of {len(shards)} folders hold no finished .* first is .*failed,",
        ):
            joined = tlc.open_survey(shards)
        of_others = tlc.open_survey(shards[:-1])
        xarray.testing.assert_equal(joined, of_others)
        (unit, error), *others = json.loads(joined.attrs["failed"]).items()
        assert unit.startswith(f"{tmp_path / 'failed'}: damaged")
        assert "could not load" in error
        assert not others
        assert json.loads(joined.attrs["missing"]) == [unit]
    with pytest.raises(
        ValueError, match=r"none of 2 folders, .*: run the surveys first"
    ):
        tlc.open_survey([tmp_path / "failed", again])


def test_a_folder_given_twice_is_refused(measured: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="must be different folders of surveys"):
        tlc.open_survey([measured["a"], measured["a"]])
    with pytest.raises(ValueError, match="must be different folders of surveys"):
        tlc.open_survey([])
