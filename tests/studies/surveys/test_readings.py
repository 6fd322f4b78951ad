"""One survey read under every choice, against numpy over its maps and against surveys
that were measured that way.
"""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import xarray

import tiny
import tl_coupling as tlc
from tl_coupling.measures import MEASURES
from tl_coupling.studies.surveys import (
    measure_prompts,
    measure_table,
    select_orientation,
    with_diagonal,
)

PROMPTS = ["w3 w14 w15 w92 w65", "w5 w6 w7"]
EVERY = tlc.Settings(k=(2, 4), orientation=("ujv", "vju"), measures=tuple(MEASURES))
RELEASED = {"released_norm": 2, "released_trace": 1}


@pytest.fixture(scope="module")
def hf_model():
    return tiny.huggingface_model("gpt_neox")


@pytest.fixture(scope="module")
def model(hf_model, tokenizer_folder):
    return tiny.bridge(hf_model, tokenizer_folder)


@pytest.fixture(scope="module")
def measured(model) -> xarray.Dataset:
    return measure_prompts(model, PROMPTS, EVERY)


def test_one_run_holds_what_the_released_code_reports_in_both_orientations(
    measured, hf_model
) -> None:
    """Its own lines, on HuggingFace's Jacobians."""
    assert measured.attrs["orientation"] == "ujv, vju"
    for prompt, text in enumerate(PROMPTS):
        tokens = [int(word[1:]) for word in text.split()]
        t = len(tokens) - 1
        J = [
            tiny.oracle_jacobian(hf_model, tokens, layer, t, t).double().numpy()
            for layer in range(2)
        ]
        svds = [np.linalg.svd(jacobian) for jacobian in J]
        for orientation in ("ujv", "vju"):
            for row, col, k in np.ndindex(2, 2, 2):
                K, (U, _, Vh), s = 2 * (k + 1), svds[col], svds[row][1][: 2 * (k + 1)]
                left, right = (
                    (U[:, :K].T, Vh[:K].T)
                    if orientation == "ujv"
                    else (Vh[:K], U[:, :K])
                )
                distance = np.linalg.norm(np.abs(left @ J[row] @ right) - np.diag(s))
                for name, p in RELEASED.items():
                    got = float(
                        measured[name].sel(orientation=orientation)[prompt, k, row, col]
                    )
                    assert got == pytest.approx(
                        distance / np.linalg.norm(s, p), abs=1e-4
                    )


def test_the_provenance_outlives_decompositions_that_took_other_ways(
    model, monkeypatch
) -> None:
    """How many steps an SVD took depends on the prompt; a survey without a provenance
    cannot be opened.
    """
    numbers = itertools.count()
    monkeypatch.setattr(
        tlc.Spectrum, "method", property(lambda _: f"{next(numbers)} steps")
    )
    assert (
        json.loads(
            measure_prompts(model, PROMPTS, tlc.Settings(k=(2,))).attrs["provenance"]
        )["d_model"]
        == tiny.D_MODEL
    )


@pytest.mark.parametrize("p", [1, 3])
def test_options_of_the_spectral_measure_reach_it(model, p: int) -> None:
    data = measure_prompts(
        model,
        PROMPTS[:1],
        tlc.Settings(k=(3,), p=p, absolute=True, measures=("spectral_miscoupling",)),
    )
    result = tlc.depth_coupling(tlc.trace(model, PROMPTS[0]), 10)
    expected = result.spectral_miscoupling(3, p, True)
    np.testing.assert_allclose(data["spectral_miscoupling"][0, 0], expected, rtol=1e-6)
    null = result.null(3, "spectral_miscoupling", p=p, absolute=True)
    assert data["null_spectral_miscoupling"].item() == pytest.approx(null, rel=1e-6)
    assert (data.attrs["p"], data.attrs["absolute"]) == (p, 1)
    assert "coupling" not in data


def test_the_diagonal_can_be_chosen_before_and_after(model, measured) -> None:
    with_it = measure_prompts(model, PROMPTS, tlc.Settings(k=(2, 4), diagonal=True))
    without = select_orientation(measured)[list(with_it.data_vars)]
    xarray.testing.assert_allclose(with_diagonal(without), with_it, rtol=1e-5)
    xarray.testing.assert_allclose(with_diagonal(with_it, False), without, rtol=1e-5)
    assert with_diagonal(with_it) is with_it
    maps = with_it["coupling"].values
    np.testing.assert_allclose(with_it["mean_coupling"], maps.mean((-2, -1)), rtol=1e-6)
    # By (1 − c) / L more.
    c = without["mean_coupling"]
    np.testing.assert_allclose(with_it["mean_coupling"] - c, (1 - c) / 2, rtol=1e-4)
    null = 1 - np.sqrt(1 - 1 / np.array([2, 4]))
    np.testing.assert_allclose(
        with_it["null_coupling"],
        np.broadcast_to(null + (1 - null) / 2, (2, 2)),
        rtol=1e-6,
    )


def test_the_table_is_the_means_of_the_maps(measured) -> None:
    table = measure_table(measured)
    assert len(table) == len(MEASURES) * 2 * 2 * 2
    is_off_diagonal = ~np.eye(2, dtype=bool)
    for row in table.itertuples():
        maps = measured[row.measure].sel(orientation=row.orientation, k=row.k).values
        means = (
            maps.mean((1, 2))
            if row.pairs == "all"
            else maps[:, is_off_diagonal].mean(1)
        )
        assert row.mean == pytest.approx(means.mean(), rel=1e-6, abs=1e-7)
        assert row.spread == pytest.approx(means.std(ddof=1), rel=1e-4, abs=1e-7)
        assert math.isfinite(row.null)
    one = measure_table(select_orientation(measured, "vju").isel(prompt=[0]))
    assert set(one["orientation"]) == {"vju"}
    assert one["spread"].isna().all()


def test_statistics_and_pictures_follow_the_choice(measured) -> None:
    models = list("abcd")
    several = [
        measured.map(lambda x, i=i: x * (1 + 0.1 * i) if x.dtype.kind == "f" else x)
        for i in range(4)
    ]
    data = xarray.concat(several, "model").assign_coords(model=models)
    scores = pandas.DataFrame({"model": models, "score": [1.0, 2, 4, 5]})
    study = tlc.generalization.generalization_study(
        data, scores, k=4, diagonal=True, n_resamples=50
    )
    means = (
        data["coupling"]
        .sel(k=4, orientation="ujv")
        .mean(("prompt", "layer", "other_layer"))
    )
    np.testing.assert_allclose(study.table["coupling"], means, rtol=1e-6)
    sweep = with_diagonal(select_orientation(measured)).expand_dims(checkpoint=[1])
    with tlc.plots.off_screen():
        for chosen, said in (
            (sweep, "over all pairs of layers"),
            (with_diagonal(sweep, False), "over pairs of different"),
        ):
            assert said in tlc.plots.plot_emergence(chosen).get_suptitle()


def test_a_shallower_model_is_read_over_its_own_layers(model, measured) -> None:
    """Beside a deeper one it is filled up with NaN."""
    deep = measured.isel(orientation=0).reindex(layer=range(5), other_layer=range(5))
    joined = xarray.concat([deep, deep], "model").assign(n_layers=("model", [2, 2]))
    expected = with_diagonal(select_orientation(measured))["null_coupling"]
    np.testing.assert_allclose(
        with_diagonal(joined)["null_coupling"][0], expected, rtol=1e-6
    )


def test_folders_of_before_these_could_be_chosen_can_go_on(
    folder_model: Path, tmp_path: Path
) -> None:
    survey = tlc.Survey(folder_model, PROMPTS[:1], settings=tlc.Settings(k=(2,)))
    before = tlc.run_survey(survey, tmp_path, progress=False)
    plan = json.loads((tmp_path / "plan.json").read_text())
    # As written before these could be chosen.
    for name in ("measures", "p", "absolute", "diagonal", "digest"):
        del plan[name]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for file in set(tmp_path.glob("*.json")) - {tmp_path / "plan.json"}:
        content = json.loads(file.read_text())
        file.write_text(
            json.dumps(
                {
                    name: value
                    for name, value in content.items()
                    if name not in ("plan", "digest")
                }
            )
        )
    xarray.testing.assert_identical(
        tlc.run_survey(survey, tmp_path, progress=False), before
    )
    with pytest.raises(
        ValueError,
        match=r"holds results of another plan \(diagonal\): wanted .*true.* found .*false",
    ):
        tlc.run_survey(
            tlc.Survey(
                folder_model, PROMPTS[:1], settings=tlc.Settings(k=(2,), diagonal=True)
            ),
            tmp_path,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"orientation": ()}, "`orientation` must be different ones, one or more, got"),
        ({"orientation": ("ujv", "ujv")}, "`orientation` must be different ones"),
        ({"measures": ()}, "`measures` must be different ones"),
        ({"measures": ("at",)}, "`measures"),
        ({"p": 0.5}, "`p` must be at least 1"),
    ],
)
def test_choices_that_there_are_not(as_a_user, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.Settings(**given)


def test_what_was_not_measured_is_said(measured) -> None:
    with pytest.raises(ValueError, match="'vju' was not measured; there is ujv"):
        select_orientation(select_orientation(measured), "vju")
    with pytest.raises(ValueError, match="there is no map 'coupling' in the data"):
        with_diagonal(measured.drop_vars("coupling"))
