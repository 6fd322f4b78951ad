"""Means over prompts and tokens of measures of a user's own."""

import dataclasses

import pytest
import torch

import own_measures
import tiny
import tl_coupling as tlc
from tl_coupling.comparisons import MeanCouplingMap

PROMPTS = ["w3 w14 w15 w92", "w65 w35", "w89 w79 w3 w2 w3 w8"]
PAIRS = list(own_measures.WRITTEN_OUT.items())
OWN = list(own_measures.WRITTEN_OUT.values())
K = 4


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(
        tiny.huggingface_model("gpt_neox", num_hidden_layers=3), tokenizer_folder
    )


@pytest.fixture(scope="module")
def traces(model):
    return [tlc.trace(model, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def mean(traces):
    return tlc.mean_depth_coupling(traces, K, measures=OWN)


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_a_mean_over_prompts_is_that_of_the_name(mean, name, own):
    for k in (2, 4):
        for read in (mean.values, mean.spread, mean.by_map):
            torch.testing.assert_close(
                read(k, own), read(k, name), rtol=1e-3, atol=1e-5
            )
        assert mean.mean(k, own) == pytest.approx(mean.mean(k, name), rel=1e-4)
        ours, theirs = mean.interval(k, own), mean.interval(k, name)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    ours, theirs = (
        mean.null_interval(4, measure, seed=2, n_draws=200) for measure in (own, name)
    )
    assert ours[1] - ours[0] == pytest.approx(theirs[1] - theirs[0], rel=1e-3, abs=1e-6)
    null, closed = mean.null(4, own), mean.null(4, name)
    # Two standard deviations of one pair are at most this.
    width = ours[1] - ours[0]
    assert abs(null - closed) < 0.5 * width
    assert ours[0] < null < ours[1]
    assert abs(mean.null_p(4, own) - mean.null_p(4, name)) < 0.4


def test_the_null_of_a_mean_is_that_of_its_mean_spectra_at_every_k(mean):
    for k in (2, 4):
        expected = tlc.random_subspace_null(
            k,
            own_measures.my_energy,
            d_model=mean.d_model,
            S_1=mean.singular_values,
            frobenius_norm=mean.frobenius_norms,
        )
        found = mean.null(k, own_measures.my_energy)
        # Corners of the draws for k = 4 are other draws for k = 2.
        assert found == pytest.approx(
            float(expected.mean()), rel=1e-5 if k == 4 else 0.05
        )


def test_tokens_and_saved_maps_have_means_of_own_measures(traces, tmp_path):
    own = own_measures.my_spectral
    tokens = tlc.depth_coupling(traces[0], K, position="all", measures=[own])
    torch.testing.assert_close(
        tokens.values(3, own), tokens.values(3, "spectral_miscoupling")
    )
    both = tlc.mean_depth_coupling(traces, K, position=[-2, -1], measures=[own])
    torch.testing.assert_close(
        both.values(3, own), both.values(3, "spectral_miscoupling")
    )
    assert both.interval(3, own) == pytest.approx(
        both.interval(3, "spectral_miscoupling"), rel=1e-3
    )
    maps = [tlc.depth_coupling(trace, K) for trace in traces]
    paths = [result.save(tmp_path / f"{i}.nc") for i, result in enumerate(maps)]
    mean = tlc.mean_of_maps(
        map(tlc.CouplingMap.load, paths), measures=[own, "coupling"]
    )
    torch.testing.assert_close(
        mean.values(3, own), mean.values(3, "spectral_miscoupling")
    )
    assert mean.measures[-1] == "my_spectral"
    assert mean.measures.count("coupling") == 1
    # Means over tokens that hold it have a mean that does, and no other.
    with pytest.raises(ValueError, match=r"made without 'my_energy': give `measures="):
        MeanCouplingMap.over([tokens], measures=[own_measures.my_energy])
    assert "my_spectral" not in MeanCouplingMap.over([tokens]).measures
    assert "own_measures" not in MeanCouplingMap.over([tokens]).provenance


def test_a_saved_mean_holds_them_for_the_function_that_made_it(traces, tmp_path):
    def mine(A, S):
        return A.square().sum((-2, -1))

    made_by = mine
    mean = tlc.mean_depth_coupling(traces, K, measures=[mine])
    loaded = MeanCouplingMap.load(mean.save(tmp_path / "mean.nc"))
    assert torch.equal(loaded.values(3, mine), mean.values(3, mine))
    assert loaded.null(3, mine) == mean.null(3, mine)
    assert loaded.null_interval(3, mine) == mean.null_interval(3, mine)
    facts = loaded.provenance["own_measures"]["mine"]
    assert facts["measure_of"] == "the user's own function"
    with pytest.raises(ValueError, match="got 'mine': a measure of your own") as raised:
        loaded.mean(3, "mine")
    assert "\n" not in str(raised.value)

    def mine(A, S):
        return A.abs().sum((-2, -1))

    with pytest.raises(ValueError, match="measured with another function 'mine'"):
        loaded.mean(3, mine)
    assert loaded.mean(3, made_by) == pytest.approx(mean.mean(3, made_by))
    with pytest.raises(ValueError, match="made without 'my_coupling': give `measures="):
        loaded.mean(3, own_measures.my_coupling)
    with pytest.raises(ValueError, match="must have different names"):
        tlc.mean_depth_coupling(traces, K, measures=[mine, made_by])


def test_a_mean_without_own_measures_is_as_it_was(traces):
    plain = tlc.mean_depth_coupling(traces, K)
    beside = tlc.mean_depth_coupling(traces, K, measures=[own_measures.my_coupling])
    n = len(plain.measures)
    assert beside.measures == (*plain.measures, "my_coupling")
    for field in dataclasses.fields(plain):
        ours, theirs = getattr(plain, field.name), getattr(beside, field.name)
        if isinstance(ours, torch.Tensor):
            is_of_measures = len(ours) == n
            torch.testing.assert_close(ours, theirs[:n] if is_of_measures else theirs)


def test_a_measure_is_undefined_in_a_mean_where_it_is_for_one_prompt(traces):
    with pytest.warns(UserWarning, match="`only_of_two` is not finite"):
        mean = tlc.mean_depth_coupling(traces, K, measures=[own_measures.only_of_two])
    assert bool(mean.values(1, own_measures.only_of_two).isnan().all())
    maps = [tlc.depth_coupling(trace, K) for trace in traces]
    A = torch.stack([result.matrices[..., 0, 0] for result in maps])
    values = mean.values(3, own_measures.only_of_two)
    assert torch.equal(values.isnan(), (A < 0).any(0))
    torch.testing.assert_close(
        values, A.mean(0).where((A >= 0).all(0), torch.nan), equal_nan=True
    )


@pytest.mark.parametrize("within", ["spans", "pairs"])
def test_a_mean_holds_their_nulls_within_spans(traces, within):
    """Of draws, as wide as those of the name, and in its middle but for their error."""
    own = own_measures.WRITTEN_OUT["coupling"]
    mean = tlc.mean_depth_coupling(traces, K, measures=[own], within_ks=[3])
    low, high = mean.null_interval(3, own, within=within)
    named = mean.null_interval(3, within=within)
    assert high - low == pytest.approx(named[1] - named[0], rel=0.1)
    null, closed = (
        mean.null(3, measure, within=within) for measure in (own, "coupling")
    )
    assert low < null < high
    assert abs(null - closed) < (high - low) / 4
    with pytest.raises(ValueError, match=r"those within spans at k in \[3\]"):
        mean.null(2, own, within=within)
