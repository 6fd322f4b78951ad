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
from tl_coupling.studies.redundancy import redundancy_correlations

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


pytestmark = pytest.mark.usefixtures("pyplot_untouched")


CHANGES = ("dropped", "swapped", "merged")


def rows_of(fig: Figure) -> dict[str, list]:
    """Axes by depth, against coupling and against influence, for each change."""
    return {name: fig.axes[3 * i : 3 * i + 3] for i, name in enumerate(CHANGES)}


def test_changes_stand_at_their_layer_or_between_two():
    data = made()
    rows = rows_of(plot_redundancy(data))
    titles = [axes[0].get_title() for axes in rows.values()]
    assert titles == ["block dropped", "neighbours swapped", "neighbours merged"]
    for change, (depth, *_) in rows.items():
        expected = (data[f"loss_{change}"].values - data.loss.values[:, None]).mean(0)
        line = depth.lines[0]
        first = 0 if change == "dropped" else 0.5
        np.testing.assert_array_equal(
            line.get_xdata(), np.arange(len(expected)) + first
        )
        np.testing.assert_allclose(line.get_ydata(), expected)
        assert depth.get_ylabel() == "nats per token"
        assert depth.get_yscale() == "linear"


def test_bars_are_t_intervals_over_prompts():
    data = made()
    changes = data.loss_dropped.values - data.loss.values[:, None]
    bars = plot_redundancy(data).axes[0].collections[0].get_segments()
    for layer in range(8):
        low, high = stats.t.interval(
            0.95, 4, changes[:, layer].mean(), stats.sem(changes[:, layer])
        )
        np.testing.assert_allclose(bars[layer], [(layer, low), (layer, high)])


def test_points_stand_at_coupling_and_influence():
    data = made()
    rows = rows_of(plot_redundancy(data, k=5))
    means = data.mean("prompt")
    _, coupling, influence = rows["dropped"]
    of_pairs = [
        (means.block_influence.values[i] + means.block_influence.values[i + 1]) / 2
        for i in range(7)
    ]
    expected = {
        "dropped": (means.coupling_with_others.sel(k=5), means.block_influence),
        "swapped": (means.coupling_of_pair.sel(k=5), of_pairs),
        "merged": (means.coupling_of_pair.sel(k=5), of_pairs),
    }
    for change, (_, *axes) in rows.items():
        for ax, x in zip(axes, expected[change], strict=True):
            np.testing.assert_allclose(ax.lines[0].get_xdata(), x)
            np.testing.assert_allclose(
                ax.lines[0].get_ydata(), (means[f"loss_{change}"] - means.loss).values
            )
    hollow = next(
        line for line in coupling.lines if line.get_markerfacecolor() == "white"
    )
    np.testing.assert_allclose(
        hollow.get_xdata(), means.coupling_with_others.sel(k=5).values[[0, -1]]
    )
    last_row = rows["merged"]
    assert r"coupling $1 - \tilde{m}$ (k = 5)" in " ".join(
        last_row[1].get_xlabel().split()
    )
    assert any(list(line.get_xdata()) == [0.1056, 0.1056] for line in coupling.lines)
    assert influence.get_xscale() == "log"


def test_an_axis_is_logarithmic_where_one_block_costs_far_more():
    data = made()
    rng = np.random.default_rng(3)
    losses = data.loss.values[:, None] + 0.02 * rng.random((5, 8))
    losses[:, 0] += 4.0
    fig = plot_redundancy(data.assign(loss_dropped=(("prompt", "layer"), losses)))
    change = (losses - data.loss.values[:, None]).mean(0)
    for ax in fig.axes[:3]:
        assert ax.get_yscale() == "symlog"
        assert ax.get_ylim()[1] > change[0]
        ticks = [text.get_text() for text in ax.get_yticklabels()]
        assert ticks == ["0", "0.01", "0.1", "1"]
    assert {ax.get_yscale() for ax in fig.axes[3:]} == {"linear"}


def test_changes_of_one_size_are_all_inside():
    for ax in plot_redundancy(made()).axes:
        low, high = ax.get_ylim()
        values = ax.lines[0].get_ydata()
        assert low < min(values) <= max(values) < high


def test_every_point_is_inside_its_panel():
    """Some pairs of neighbours are coupled more than any layer with all others; what
    random subspaces give is inside, where it moves no limit.
    """
    data = made()
    of_pairs = np.broadcast_to(np.linspace(0.4, 2.0, 7), data.coupling_of_pair.shape)
    data = data.assign(
        coupling_of_pair=(data.coupling_of_pair.dims, of_pairs),
        null_coupling=("k", [0.6, 0.6]),
    )
    for ax in plot_redundancy(data).axes:
        low, high = ax.get_xlim()
        places = ax.lines[0].get_xdata()
        assert low < min(places) <= max(places) < high


def test_titles_say_the_correlations():
    data = made()
    rho = redundancy_correlations(data).sel(k=10, change="swapped")
    _, coupling, influence = rows_of(plot_redundancy(data))["swapped"]
    for ax, values in ((coupling, rho.coupling), (influence, rho.block_influence)):
        of_all, of_inner = (float(values.sel(blocks=name)) for name in ("all", "inner"))
        expected = f"ρ {of_all:+.2f}\ninner {of_inner:+.2f}"
        assert ax.get_title() == expected.replace("-", "−")
    # Six blocks have four inner ones: too few for a rank correlation.
    few = plot_redundancy(made(n_layers=6)).axes[1].get_title()
    assert few.startswith("ρ")
    assert "inner" not in few


def test_projections_and_exits_are_drawn_by_depth_alone():
    data = made()
    rng = np.random.default_rng(1)
    data["loss_projected"] = (("prompt", "k", "layer"), 3 + rng.random((5, 2, 8)))
    data["loss_exited"] = (("prompt", "layer"), 3 + rng.random((5, 8)))
    axes = plot_redundancy(data, k=5).axes[9:]
    titles = [ax.get_title() for ax in axes]
    assert titles == [
        "projected onto 5\nshared directions",
        "early exit\nafter the block",
    ]
    means = data.sel(k=5).mean("prompt")
    for ax, name in zip(axes, ("projected", "exited"), strict=True):
        np.testing.assert_array_equal(ax.lines[0].get_xdata(), range(8))
        np.testing.assert_allclose(
            ax.lines[0].get_ydata(), (means[f"loss_{name}"] - means.loss).values
        )


def test_heading_names_model_and_prompts():
    words = plot_redundancy(made()).get_suptitle()
    assert "tiny $x$" in words
    assert "means over 5 prompts" in words


def test_one_prompt_has_no_bars_and_no_interval():
    fig = plot_redundancy(made(n_prompts=1))
    assert not fig.axes[0].collections
    assert "[" not in fig.axes[1].get_title()
    assert "[" not in fig.get_suptitle()


def test_what_could_not_be_merged_is_not_drawn():
    data = made()
    some = data.assign(loss_merged=data.loss_merged.where(data.pair != 2))
    drawn = rows_of(plot_redundancy(some))["merged"][0].lines[0].get_ydata()
    assert np.isnan(drawn).tolist() == [False, False, True, False, False, False, False]
    none = data.assign(loss_merged=data.loss_merged * np.nan)
    assert len(plot_redundancy(none).axes) == 6


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
