"""What the picture of redundancy holds: changes in loss, bands, predictors,
correlations, labels.
"""

import json

import numpy as np
import pytest
import xarray
from matplotlib.figure import Figure
from scipy import stats

from tl_coupling import plots
from tl_coupling.redundancy import redundancy_correlations

KS = (5, 10)


def made(n_prompts: int = 5, n_layers: int = 8) -> xarray.Dataset:
    rng = np.random.default_rng(0)
    pairs = n_layers - 1
    return xarray.Dataset(
        {
            "loss": ("prompt", 3 + rng.random(n_prompts)),
            "loss_dropped": (
                ("prompt", "layer"),
                3 + rng.random((n_prompts, n_layers)),
            ),
            "loss_swapped": (("prompt", "pair"), 3 + rng.random((n_prompts, pairs))),
            "loss_merged": (("prompt", "pair"), 3 + rng.random((n_prompts, pairs))),
            "block_influence": (("prompt", "layer"), rng.random((n_prompts, n_layers))),
            "coupling_of_pair": (
                ("prompt", "k", "pair"),
                rng.random((n_prompts, 2, pairs)),
            ),
            "coupling_with_others": (
                ("prompt", "k", "layer"),
                rng.random((n_prompts, 2, n_layers)),
            ),
            "null_coupling": ("k", [0.1056, 0.0513]),
        },
        {
            "k": list(KS),
            "layer": range(n_layers),
            "pair": range(pairs),
            "prompt": range(n_prompts),
        },
        {"provenance": json.dumps({"model": "tiny $x$"})},
    )


def plot_redundancy(data: xarray.Dataset, **options) -> Figure:
    return plots.plot_redundancy(data, redundancy_correlations(data), **options)


pytestmark = [pytest.mark.on_3_only, pytest.mark.usefixtures("pyplot_untouched")]


def named_lines(ax) -> dict:
    return {
        line.get_label().split(":")[0]: line
        for line in ax.lines
        if not line.get_label().startswith("_")
    }


def test_changes_stand_at_their_layer_or_between_two():
    data = made()
    depth = plot_redundancy(data).axes[0]
    lines = named_lines(depth)
    assert list(lines) == ["dropped", "swapped", "merged"]
    np.testing.assert_array_equal(lines["dropped"].get_xdata(), range(8))
    np.testing.assert_array_equal(lines["swapped"].get_xdata(), np.arange(7) + 0.5)
    for change, line in lines.items():
        expected = (data[f"loss_{change}"].values - data.loss.values[:, None]).mean(0)
        np.testing.assert_allclose(line.get_ydata(), expected)
    assert depth.get_ylabel() == "change in loss (nats per token)"
    assert depth.get_yscale() == "symlog"


def test_bands_are_t_intervals_over_prompts():
    data = made()
    changes = data.loss_dropped.values - data.loss.values[:, None]
    path = plot_redundancy(data).axes[0].collections[0].get_paths()[0].vertices
    for layer in range(8):
        low, high = stats.t.interval(
            0.95, 4, changes[:, layer].mean(), stats.sem(changes[:, layer])
        )
        ends = path[path[:, 0] == layer, 1]
        np.testing.assert_allclose((ends.min(), ends.max()), (low, high))


def test_points_stand_at_coupling_and_influence():
    data = made()
    _, coupling, influence = plot_redundancy(data, k=5).axes
    means = data.mean("prompt")
    np.testing.assert_allclose(
        named_lines(coupling)["dropped"].get_xdata(),
        means.coupling_with_others.sel(k=5).values,
    )
    np.testing.assert_allclose(
        named_lines(coupling)["merged"].get_xdata(),
        means.coupling_of_pair.sel(k=5).values,
    )
    np.testing.assert_allclose(
        named_lines(influence)["dropped"].get_xdata(), means.block_influence.values
    )
    of_pairs = [
        (means.block_influence.values[i] + means.block_influence.values[i + 1]) / 2
        for i in range(7)
    ]
    np.testing.assert_allclose(named_lines(influence)["swapped"].get_xdata(), of_pairs)
    for ax in (coupling, influence):
        for change, line in named_lines(ax).items():
            np.testing.assert_allclose(
                line.get_ydata(), (means[f"loss_{change}"] - means.loss).values
            )
    hollow = next(
        line for line in coupling.lines if line.get_markerfacecolor() == "white"
    )
    np.testing.assert_allclose(
        hollow.get_xdata(), means.coupling_with_others.sel(k=5).values[[0, -1]]
    )
    assert r"coupling $1 - \tilde{m}$ (k = 5)" in coupling.get_xlabel()
    assert any(list(line.get_xdata()) == [0.1056, 0.1056] for line in coupling.lines)


def test_labels_say_the_correlations():
    data = made()
    rho = redundancy_correlations(data).sel(k=10, change="swapped")
    label = plot_redundancy(data).axes[1].get_legend().get_texts()[1].get_text()
    for blocks in ("all", "inner"):
        of_block = rho.sel(blocks=blocks)
        assert (
            f"{float(of_block.coupling):+.2f} [{float(of_block.coupling_interval[0]):+.2f}, "
            in label
        )
    influence = plot_redundancy(data).axes[2].get_legend().get_texts()[1].get_text()
    assert f"{float(rho.block_influence.sel(blocks='all')):+.2f} [" in influence


def test_projections_and_exits_are_drawn_by_depth_alone():
    data = made()
    rng = np.random.default_rng(1)
    data["loss_projected"] = (("prompt", "k", "layer"), 3 + rng.random((5, 2, 8)))
    data["loss_exited"] = (("prompt", "layer"), 3 + rng.random((5, 8)))
    depth, coupling, influence = plot_redundancy(data, k=5).axes
    lines = named_lines(depth)
    assert list(lines)[3:] == ["projected onto 5 shared directions", "left after it"]
    means = data.sel(k=5).mean("prompt")
    for line, name in zip(
        list(lines.values())[3:], ("projected", "exited"), strict=True
    ):
        np.testing.assert_array_equal(line.get_xdata(), range(8))
        np.testing.assert_allclose(
            line.get_ydata(), (means[f"loss_{name}"] - means.loss).values
        )
    assert (
        list(named_lines(coupling))
        == list(named_lines(influence))
        == ["dropped", "swapped", "merged"]
    )


def test_heading_names_model_and_prompts():
    words = plot_redundancy(made()).get_suptitle()
    assert "tiny $x$" in words
    assert "mean over 5 prompts" in words


def test_one_prompt_has_no_band_and_no_interval():
    depth, coupling, _ = plot_redundancy(made(n_prompts=1)).axes
    assert not depth.collections
    assert "[" not in coupling.get_legend().get_texts()[0].get_text()


def test_what_could_not_be_merged_is_not_drawn():
    data = made()
    some = data.assign(loss_merged=data.loss_merged.where(data.pair != 2))
    drawn = named_lines(plot_redundancy(some).axes[0])["merged"].get_ydata()
    assert np.isnan(drawn).tolist() == [False, False, True, False, False, False, False]
    none = data.assign(loss_merged=data.loss_merged * np.nan)
    for ax in plot_redundancy(none).axes:
        assert list(named_lines(ax)) == ["dropped", "swapped"]


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"`k` must be among \[5, 10\], got 7"):
        plot_redundancy(made(), k=7)
    with pytest.raises(ValueError, match="got data without block_influence"):
        plots.plot_redundancy(
            made().drop_vars("block_influence"), redundancy_correlations(made())
        )


def test_it_renders_and_takes_a_figure():
    fig = Figure()
    assert plot_redundancy(made(n_layers=2), fig=fig) is fig
    fig.canvas.draw()
