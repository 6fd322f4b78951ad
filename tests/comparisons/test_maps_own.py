"""Measures of a user's own wherever a name is taken: those that have names, written out
in plain torch, beside themselves.
"""

import json

import pytest
import torch

import own_measures
import tiny
import tl_coupling as tlc
from made_up_results import random_map
from tl_coupling.comparisons import Comparison, CouplingMap, PromptCoupling

PAIRS = list(own_measures.WRITTEN_OUT.items())
PROMPTS = ["w3 w14 w15 w92", "w65 w35", "w89 w79 w3 w2 w3 w8"]
K = 5


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(
        tiny.huggingface_model("gpt_neox", num_hidden_layers=3), tokenizer_folder
    )


@pytest.fixture(scope="module")
def maps(model):
    return [tlc.depth_coupling(tlc.trace(model, prompt), K) for prompt in PROMPTS]


@pytest.mark.parametrize(("name", "own"), PAIRS)
@pytest.mark.parametrize("kind", ["depth", "self"])
def test_a_map_reads_an_own_measure_as_the_one_with_a_name(name, own, kind):
    result = random_map((0, 2, 5, 7), kind=kind)
    for k in (2, 5):
        for read in (
            lambda measure, k=k: result.values(k, measure),
            lambda measure, k=k: torch.tensor(result.mean(k, measure, False)),
        ):
            torch.testing.assert_close(read(own), read(name), equal_nan=True)
        ours, theirs = (result.strongest(3, k, measure) for measure in (own, name))
        assert [pair[:2] for pair in ours] == [pair[:2] for pair in theirs]
    if kind == "depth":
        torch.testing.assert_close(
            result.profile(5, 2, own), result.profile(5, 2, name), equal_nan=True
        )
        torch.testing.assert_close(
            result.locality_profile(5, own),
            result.locality_profile(5, name),
            equal_nan=True,
        )
        assert result.mean(3, own) == pytest.approx(result.mean(3, name))


def spread_of_mean(result, k, own):
    """The standard deviation of one pair's values by chance, of the row that varies most."""
    draws = tlc.measures.draws_of_random_subspaces(
        k,
        500,
        d_model=result.d_model,
        S_1=result.singular_values,
        frobenius_norm=result.frobenius_norms,
        generator=torch.Generator().manual_seed(8),
    )
    S = result.singular_values[:, :k].expand(500, -1, -1)
    return float(own(draws, S).std(0).max())


@pytest.mark.parametrize(("name", "own"), PAIRS)
@pytest.mark.parametrize("within", ["space", "spans", "pairs"])
def test_nulls_intervals_and_p_are_those_of_the_name(name, own, within):
    """The draws are the same: intervals are as wide, to rounding. Where they lie is
    the mean of 400 draws here, and a root mean square in closed form there.
    """
    result = random_map((0, 2, 5, 7))
    k = 5
    options = {"within": within, "seed": 3, "n_draws": 200}
    null, closed = (
        result.null(k, own, within=within),
        result.null(k, name, within=within),
    )
    spread = spread_of_mean(result, k, own)
    # An error of four standard deviations, and what a root mean square is above the mean.
    tolerance = 4 * spread / 400**0.5 + spread**2 / max(0.2, 1 - closed, closed)
    assert abs(null - closed) < tolerance
    low, high = result.null_interval(k, own, **options)
    closed_low, closed_high = result.null_interval(k, name, **options)
    assert high - low == pytest.approx(closed_high - closed_low, rel=1e-6)
    assert low - closed_low == pytest.approx(null - closed, abs=tolerance)
    assert low < null < high
    assert result.null_interval(k, own, **options) == (low, high)
    # All pairs: own ones keep their values.
    own_values = result.values(k, own).diagonal().mean()
    expected = (3 * null + float(own_values)) / 4
    found = result.null(k, own, within=within, off_diagonal=False)
    assert found == pytest.approx(expected)
    p, closed_p = (result.null_p(k, measure, **options) for measure in (own, name))
    assert abs(p - closed_p) < 0.35
    if within == "space":
        ours, theirs = (
            result.null_interval_by_distance(k, measure, seed=3, n_draws=200)[2]
            for measure in (own, name)
        )
        torch.testing.assert_close(ours.diff(), theirs.diff())


def test_a_planted_coupling_is_told_from_chance_by_an_own_measure():
    """Blocks with common axes: the trace is far above its null of 0."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.linalg.qr(torch.randn(2, 12, 12, generator=generator).double()).Q
    gains = torch.linspace(3, 0.1, 12).double()
    J = frames[0] * gains @ frames[1].mT + 0.01 * torch.randn(
        4, 12, 12, generator=generator
    )
    spectra = tlc.svd(J, 4)
    chance = random_map(k=4)
    result = CouplingMap(
        **vars(chance)
        | {
            "matrices": spectra.U.mT @ J[:, None] @ spectra.Vh.mT,
            "singular_values": spectra.S,
            "frobenius_norms": torch.linalg.matrix_norm(J),
        }
    )
    assert result.mean(4, own_measures.signed_trace) > 0.9
    assert result.null_p(4, own_measures.signed_trace) < 0.001
    low, high = result.null_interval(4, own_measures.signed_trace)
    assert low < 0 < high < 0.5
    assert chance.null_p(4, own_measures.signed_trace) > 0.01


def test_undefined_values_are_left_out_with_a_warning():
    result = random_map()
    with pytest.warns(UserWarning, match="`only_of_two` is not finite for"):
        values = result.values(3, own_measures.only_of_two)
    different = values[~torch.eye(4, dtype=torch.bool)]
    assert different.isnan().any()
    message = (
        f"only_of_two is undefined for {int(different.isnan().sum())} of 12 pairs: the"
    )
    with (
        pytest.warns(UserWarning, match="is not finite"),
        pytest.warns(UserWarning, match=message),
    ):
        mean = result.mean(3, own_measures.only_of_two)
    assert mean == pytest.approx(float(different.nanmean()))


def test_what_is_saved_is_measured_again_with_the_function_and_not_by_its_name(
    tmp_path,
):
    result = random_map()
    loaded = CouplingMap.load(result.save(tmp_path / "map.nc"))
    own = own_measures.signed_trace
    assert torch.equal(loaded.values(3, own), result.values(3, own))
    with pytest.raises(
        ValueError, match="got 'signed_trace': a measure of your own"
    ) as raised:
        loaded.values(3, "signed_trace")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_compare_gives_the_same_p_and_interval(maps, model, name, own, tmp_path):
    others = [
        tlc.depth_coupling(tlc.trace(model, prompt), K)
        for prompt in ("w46 w26", "w5 w8")
    ]
    ours, theirs = (tlc.compare(maps, others, 4, measure) for measure in (own, name))
    assert ours.mean_p == pytest.approx(theirs.mean_p, rel=1e-3)
    torch.testing.assert_close(
        ours.mean_interval, theirs.mean_interval, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        ours.corrected_p, theirs.corrected_p, rtol=1e-2, atol=1e-4, equal_nan=True
    )
    assert ours.measure == own.__name__
    loaded = Comparison.load(ours.save(tmp_path / "comparison.nc"))
    assert loaded.measure == own.__name__
    facts = loaded.provenance["own_measures"][own.__name__]
    assert facts["measure_of"] == "the user's own function"
    assert own.__name__ in loaded.table().title
    assert own.__name__ in repr(loaded)
    figure = tlc.plot_comparison(loaded)
    assert any(own.__name__ in ax.get_xlabel() + ax.get_ylabel() for ax in figure.axes)
    assert "own_measures" not in theirs.provenance


def test_prompts_are_compared_by_an_own_measure(model, tmp_path):
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS]
    result = tlc.prompt_coupling(traces, k=4)
    for name, own in PAIRS:
        for read in (result.values, result.by_layer):
            torch.testing.assert_close(read(3, own), read(3, name))
        assert result.mean(3, own) == pytest.approx(result.mean(3, name), rel=1e-5)
        ours, theirs = (
            result.null_interval_by_layer(3, measure, n_draws=50)
            for measure in (own, name)
        )
        torch.testing.assert_close(ours.diff(dim=1), theirs.diff(dim=1))
        assert bool((ours[:, 0] < result.null_by_layer(3, own)).all())
    assert (
        tlc.plots.plot_prompt_coupling(result, measure=own).get_ylabel() == own.__name__
    )
    loaded = PromptCoupling.load(result.save(tmp_path / "prompts.nc"))
    with pytest.raises(ValueError, match="got 'my_coupling': a measure of your own"):
        loaded.values(3, "my_coupling")


def test_maps_are_drawn_by_an_own_measure():
    result = random_map()
    ax = tlc.plot_coupling(result, measure=own_measures.signed_trace)
    low, high = ax.images[0].get_clim()
    values = result.values(5, own_measures.signed_trace)
    different = values[~torch.eye(4, dtype=torch.bool)]
    # Negative values have colours of their own.
    assert low <= float(different.min()) < 0 < float(different.max()) <= high
    bar = ax.figure.axes[-1]
    assert bar.get_ylabel() == "signed_trace"
    arcs = tlc.plot_adjacency(result, measure=own_measures.my_coupling)
    assert len(arcs.collections) == 1
    view = tlc.interactive.show_token_coupling(
        random_map(kind="self"), measure=own_measures.my_coupling
    )
    assert "my_coupling" in view._repr_html_()
    assert json.dumps(result.provenance)
