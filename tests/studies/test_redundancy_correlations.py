"""Rank correlations of what changes cost with coupling and block influence, against
scipy's on hand-made data.
"""

from itertools import pairwise, permutations

import numpy as np
import pytest
import xarray
from scipy import stats

from tl_coupling.studies.redundancy import CHANGES, redundancy_correlations


def made(n_prompts: int = 6, n_layers: int = 9, seed: int = 0) -> xarray.Dataset:
    """Random numbers, some tied, of the form that `layer_redundancy` returns."""
    rng = np.random.default_rng(seed)

    def tied(*shape: int) -> np.ndarray:
        return rng.integers(0, 12, shape) / 4.0

    return xarray.Dataset(
        {
            "loss": ("prompt", tied(n_prompts)),
            "loss_dropped": (("prompt", "layer"), tied(n_prompts, n_layers)),
            "loss_swapped": (("prompt", "pair"), tied(n_prompts, n_layers - 1)),
            "loss_merged": (("prompt", "pair"), tied(n_prompts, n_layers - 1)),
            "block_influence": (("prompt", "layer"), tied(n_prompts, n_layers)),
            "coupling_of_pair": (
                ("prompt", "k", "pair"),
                tied(n_prompts, 2, n_layers - 1),
            ),
            "coupling_with_others": (
                ("prompt", "k", "layer"),
                tied(n_prompts, 2, n_layers),
            ),
        },
        {
            "k": [5, 10],
            "layer": range(n_layers),
            "pair": range(n_layers - 1),
            "prompt": range(n_prompts),
        },
    )


def spearman_of(
    data: xarray.Dataset, change: str, inner: bool, k: int
) -> tuple[float, float]:
    """ρ with coupling and with block influence, by scipy."""
    cut = slice(1, -1) if inner else slice(None)
    means = data.mean("prompt")
    loss_change = (means[f"loss_{change}"] - means.loss).values[cut]
    influence = means.block_influence.values
    if change == "dropped":
        coupling = means.coupling_with_others.sel(k=k).values
    else:
        coupling = means.coupling_of_pair.sel(k=k).values
        influence = np.array([(a + b) / 2 for a, b in pairwise(influence)])
    return tuple(
        stats.spearmanr(loss_change, x[cut]).statistic for x in (coupling, influence)
    )


def test_correlations_are_those_of_scipy_over_means_of_prompts() -> None:
    # Of eight prompts, so that means of quarters are exact and ties stay ties.
    data = made(n_prompts=8)
    rho = redundancy_correlations(data, n_resamples=10)
    for change in CHANGES:
        for blocks in ("all", "inner"):
            for k in (5, 10):
                of_change = rho.sel(change=change, blocks=blocks, k=k)
                coupling, influence = spearman_of(data, change, blocks == "inner", k)
                np.testing.assert_allclose(
                    (of_change.coupling, of_change.block_influence),
                    (coupling, influence),
                    atol=1e-12,
                )
                np.testing.assert_allclose(
                    of_change.advantage, abs(coupling) - abs(influence), atol=1e-12
                )
    assert rho.n.values.tolist() == [[9, 7], [8, 6], [8, 6]]


def test_monotone_relations_have_a_correlation_of_one_and_a_point_for_an_interval() -> (
    None
):
    data = made()
    steps = np.arange(9.0)
    data["loss_dropped"] = data.loss + xarray.DataArray(steps**3, dims="layer")
    data["block_influence"] = xarray.zeros_like(
        data.block_influence
    ) + xarray.DataArray(np.exp(steps), dims="layer")
    data["coupling_with_others"] = xarray.zeros_like(
        data.coupling_with_others
    ) - xarray.DataArray(steps, dims="layer")
    of_drops = redundancy_correlations(data).sel(change="dropped", blocks="all", k=5)
    np.testing.assert_allclose(of_drops.coupling_interval, [-1, -1])
    np.testing.assert_allclose(of_drops.block_influence_interval, [1, 1])
    np.testing.assert_allclose(of_drops.advantage_interval, [0, 0], atol=1e-12)


def test_the_interval_resamples_prompts_and_all_measures_together() -> None:
    """Two prompts have three resamples, a twice, b twice or both: the interval ends at
    the extremes of those.
    """
    data = made(n_prompts=2)
    rho = redundancy_correlations(data, n_resamples=400)
    resamples = [data.isel(prompt=[i, j]) for i, j in ((0, 0), (0, 1), (1, 1))]
    for change in CHANGES:
        of_change = rho.sel(change=change, blocks="inner", k=10)
        pairs = np.array(
            [spearman_of(resample, change, True, 10) for resample in resamples]
        )
        coupling, influence = pairs.T
        advantage = abs(coupling) - abs(influence)
        for name, values in (
            ("coupling", coupling),
            ("block_influence", influence),
            ("advantage", advantage),
        ):
            np.testing.assert_allclose(
                of_change[f"{name}_interval"], (min(values), max(values)), atol=1e-12
            )


def test_the_bootstrap_is_seeded() -> None:
    data = made()
    first, second, of_another_seed = (
        redundancy_correlations(data, n_resamples=50, seed=seed) for seed in (1, 1, 2)
    )
    xarray.testing.assert_identical(first, second)
    assert (first.coupling_interval != of_another_seed.coupling_interval).any()
    np.testing.assert_array_equal(first.coupling, of_another_seed.coupling)


def test_pairs_that_were_not_merged_are_left_out() -> None:
    data = made()
    data["loss_merged"][:, [1, 3]] = np.nan
    rho = redundancy_correlations(data, n_resamples=10).sel(
        change="merged", blocks="all", k=5
    )
    assert rho.n == 6
    merged = data.isel(pair=[0, 2, 4, 5, 6, 7])
    expected = stats.spearmanr(
        (merged.loss_merged - merged.loss).mean("prompt"),
        merged.coupling_of_pair.sel(k=5).mean("prompt"),
    ).statistic
    np.testing.assert_allclose(rho.coupling, expected)


def test_too_few_layers_or_prompts_are_nan() -> None:
    rho = redundancy_correlations(made(n_layers=4), n_resamples=10)
    assert rho.n.sel(change="dropped", blocks="inner") == 2
    assert rho.coupling.sel(change="dropped", blocks="inner").isnull().all()
    assert rho.coupling.sel(change="dropped", blocks="all").notnull().all()
    alone = redundancy_correlations(made(n_prompts=1), n_resamples=10)
    assert alone.coupling.notnull().all()
    assert alone.coupling_interval.isnull().all()
    assert alone.advantage_interval.isnull().all()


def test_correlations_want_redundancy_data() -> None:
    with pytest.raises(
        ValueError, match="got data without block_influence, coupling_of_pair"
    ):
        redundancy_correlations(
            made().drop_vars(["block_influence", "coupling_of_pair"])
        )
    with pytest.raises(ValueError, match="`n_resamples` must be at least 1, got 0"):
        redundancy_correlations(made(), n_resamples=0)


def test_each_correlation_has_the_p_of_all_orders() -> None:
    data = made(n_prompts=8, n_layers=7)
    rho = redundancy_correlations(data, n_resamples=2)
    means = data.mean("prompt")
    x = means.coupling_with_others.sel(k=5).values
    y = (means.loss_dropped - means.loss).values
    observed = abs(stats.spearmanr(x, y).statistic)
    shares = [
        abs(stats.spearmanr(x, y[list(order)]).statistic) >= observed - 1e-9
        for order in permutations(range(7))
    ]
    of_change = rho.sel(change="dropped", blocks="all", k=5)
    assert float(of_change.coupling_p) == pytest.approx(np.mean(shares))
    assert 0 < float(of_change.block_influence_p) <= 1


def test_what_is_not_defined_has_no_p() -> None:
    data = made()
    data["block_influence"][:] = 1.0
    rho = redundancy_correlations(data, n_resamples=2)
    assert np.isnan(rho.block_influence).all()
    assert np.isnan(rho.block_influence_p).all()
