"""Surveys by measures of a user's own: in this process, in others, resumed, refused."""

import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import xarray

import own_measures
import tiny
import tl_coupling as tlc
from tl_coupling.measures import MEASURES
from tl_coupling.studies.surveys import Settings, measure_prompts
from tl_coupling.studies.surveys.executors import process_pool
from tl_coupling.studies.surveys.settings import VARIABLES
from tl_coupling.studies.surveys.survey import Survey, run_survey

PROMPTS = ["w3 w14 w15 w92", "w5 w6 w7", "w9 w8 w7 w6 w5"]
OWN = own_measures.WRITTEN_OUT
SETTINGS = Settings(
    k=(2, 4), n_singular_values=6, measures=(*MEASURES, *OWN.values()), window=1
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "three"
    tiny.huggingface_model("gpt_neox", num_hidden_layers=3).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder):
    return tlc.load_model(str(model_folder))


@pytest.fixture(scope="module")
def data(model):
    return measure_prompts(model, PROMPTS, SETTINGS)


def survey_of(folder, *own):
    settings = Settings(k=(2, 4), n_singular_values=6, measures=("coupling", *own))
    return Survey(
        {"three": str(folder)}, PROMPTS, settings=settings, prompts_per_unit=2
    )


@pytest.mark.parametrize("name", OWN)
def test_an_own_measure_is_measured_as_the_one_with_a_name(data, name):
    own = OWN[name].__name__
    for ours, theirs in ((own, name), (f"mean_{own}", f"mean_{name}")):
        assert data[ours].dims == data[theirs].dims
        np.testing.assert_allclose(data[ours], data[theirs], rtol=1e-4, atol=1e-6)
    # The mean of 400 draws, and a root mean square in closed form.
    at_4 = {
        null: data[null].sel(k=4).values for null in (f"null_{own}", f"null_{name}")
    }
    np.testing.assert_allclose(
        at_4[f"null_{own}"], at_4[f"null_{name}"], atol=0.06, rtol=0.06
    )
    whole = tlc.surveys.with_diagonal(data)
    np.testing.assert_allclose(
        whole[f"mean_{own}"], whole[f"mean_{name}"], rtol=1e-4, atol=1e-6
    )
    own_null = whole[f"null_{own}"] - data[f"null_{own}"]
    assert float(abs(own_null).max()) > 0 or own == "my_energy"
    facts = json.loads(data.attrs["provenance"])["own_measures"]
    assert facts[own]["measure_of"] == "the user's own function"


def test_tables_and_pictures_take_the_function(data):
    table = tlc.surveys.measure_table(data)
    ours, theirs = (
        table[table.measure == measure]["mean"].to_numpy()
        for measure in ("my_coupling", "coupling")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    own = own_measures.my_coupling
    figure = tlc.plots.plot_prompts(data, k=4, measure=own)
    assert figure.axes[0].get_ylabel() == "my coupling (k = 4)"
    assert (
        "my coupling"
        in tlc.plots.plot_quartiles(data, k=4, measure=own).axes[0].get_xlabel()
    )
    with pytest.raises(ValueError, match="got 'my_coupling': a measure of your own"):
        tlc.plots.plot_quartiles(data, measure="my_coupling")
    with pytest.raises(ValueError, match="no 'mean_signed_trace' in the survey"):
        tlc.plots.plot_prompts(data, measure=own_measures.signed_trace)


def test_checkpoints_are_drawn_by_the_function(model_folder):
    own = own_measures.my_coupling
    sweeps = []
    data = measure_prompts(
        tlc.load_model(str(model_folder)),
        PROMPTS[:1],
        Settings(k=(2,), window=1, measures=("coupling", own)),
    )
    sweep = xarray.concat([data, data], "checkpoint").assign_coords(checkpoint=[0, 2])
    sweeps.append(tlc.plots.plot_emergence(sweep, measure=own))
    assert sweeps[0].axes[0].get_ylabel() == "mean my_coupling (k = 2)"
    for plot in (tlc.plots.plot_coupling_strip, tlc.plots.plot_adjacency_strip):
        figure = plot(sweep, measure=own)
        assert "my_coupling (k = 2)" in figure.axes[-1].get_ylabel() + str(
            [
                text.get_text()
                for text in figure.findobj(match=lambda a: hasattr(a, "get_text"))
            ]
        )


def test_scores_are_compared_with_an_own_measure():
    rng = np.random.default_rng(0)
    coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * rng.random((5, 4, 1))
    dims = ("model", "prompt", "k")
    coords = {"model": list("abcde"), "k": [10]}
    variables = ("mean_coupling", "mean_my_coupling", "null_my_coupling")
    data = xarray.Dataset({name: (dims, coupling) for name in variables}, coords)
    data["n_pos"] = (dims[:2], rng.integers(3, 9, (5, 4)))
    import pandas

    scores = pandas.DataFrame({"model": list("abcde"), "score": [30, 35, 41, 43, 52]})
    study = tlc.generalization.generalization_study(
        data, scores, measure=own_measures.my_coupling, n_resamples=50
    )
    named = tlc.generalization.generalization_study(data, scores, n_resamples=50)
    assert study.measure == "my_coupling"
    assert study.association.linear.slope == pytest.approx(
        named.association.linear.slope
    )
    # Nothing is left out for the name that a study looks up inside.
    assert study.left_out == named.left_out
    for model, relation in named.prompt_length.items():
        assert study.prompt_length[model].rho == pytest.approx(relation.rho)
    assert len(study.prompt_length) == 5
    correlations = tlc.generalization.prompt_correlations(
        data, measure=own_measures.my_coupling, n_resamples=20
    )
    assert correlations["a"].rho == pytest.approx(named.prompt_length["a"].rho)
    means = tlc.generalization.task_means(
        data, measure=own_measures.my_coupling, n_resamples=20
    )
    assert means.attrs["measure"] == "my_coupling"
    ax = tlc.plots.plot_generalization(study)
    assert "my_coupling (k = 10)" in ax.get_xlabel()


@pytest.mark.long("starts a worker process")
def test_other_processes_give_the_same_values(model_folder, tmp_path):
    own = own_measures.signed_trace
    survey = survey_of(model_folder, own)
    here = run_survey(survey, tmp_path / "here", progress=False)
    with process_pool(1) as pool:
        there = run_survey(survey, tmp_path / "there", pool, progress=False)
    for name in ("signed_trace", "mean_signed_trace", "null_signed_trace"):
        np.testing.assert_allclose(there[name], here[name], rtol=1e-6, atol=1e-9)
    plan = json.loads((tmp_path / "there" / "plan.json").read_text())
    assert plan["measures"] == ["coupling", "signed_trace"]
    assert (
        plan["own_measures"]["signed_trace"]["measure_of"] == "the user's own function"
    )
    opened = tlc.open_survey(tmp_path / "there")
    assert "mean_signed_trace" in opened


def test_a_function_that_cannot_be_sent_is_refused_in_one_line(model_folder, tmp_path):
    def local(A, S):
        return A.sum((-2, -1))

    survey = survey_of(model_folder, local)
    for make_pool in (process_pool, ProcessPoolExecutor):
        with make_pool(1) as pool:
            with pytest.raises(
                ValueError, match="`local` cannot be sent to other"
            ) as raised:
                run_survey(survey, tmp_path / "there", pool, progress=False)
            assert "\n" not in str(raised.value)
    # Threads of this process have it.
    with ThreadPoolExecutor(1) as pool:
        data = run_survey(survey, tmp_path / "threads", pool, progress=False)
    assert bool(data["mean_local"].notnull().all())


def test_another_function_of_the_name_is_another_plan(model_folder, tmp_path):
    def mine(A, S):
        return A.sum((-2, -1))

    run_survey(survey_of(model_folder, mine), tmp_path / "survey", progress=False)
    again = run_survey(
        survey_of(model_folder, mine), tmp_path / "survey", progress=False
    )
    assert "mean_mine" in again

    def mine(A, S):
        return A.abs().sum((-2, -1))

    with pytest.raises(ValueError, match=r"results of another plan \(own_measures\)"):
        run_survey(survey_of(model_folder, mine), tmp_path / "survey", progress=False)


def test_settings_refuse_names_that_mean_something_else(data):
    def loss(A, S):
        return A.sum((-2, -1))

    def mean_of_mine(A, S):
        return A.sum((-2, -1))

    for function in (loss, mean_of_mine):
        with pytest.raises(ValueError, match=f"under the name '{function.__name__}'"):
            Settings(measures=(function,))
    with pytest.raises(ValueError, match="must be different ones"):
        Settings(measures=(own_measures.my_coupling, own_measures.my_coupling))
    with pytest.raises(ValueError, match="got 'mine': a measure of your own"):
        Settings(measures=("mine",))
    spectral = tlc.measures.measure_named("spectral_miscoupling", p=1)
    with pytest.raises(ValueError, match="give its name, and the options as"):
        Settings(measures=(spectral,))
    assert Settings(measures=(spectral,), p=1).measures == ("spectral_miscoupling",)
    assert Settings(measures=(MEASURES["coupling"],)).measures == ("coupling",)
    assert replace(SETTINGS, k=(3,)).measures == SETTINGS.measures


def test_every_variable_of_the_data_is_a_name_that_is_taken(model_folder, model):
    settings = Settings(
        k=(2,), orientation=("ujv", "vju"), dynamics=True, carriers=True
    )
    names = set(measure_prompts(model, PROMPTS[:1], settings).variables)
    names |= set(
        run_survey(
            Survey({"three": str(model_folder)}, PROMPTS[:1], settings=settings),
            progress=False,
        ).variables
    )
    of_measures = {
        f"{prefix}{name}" for name in MEASURES for prefix in ("", "mean_", "null_")
    }
    assert names - of_measures <= VARIABLES
