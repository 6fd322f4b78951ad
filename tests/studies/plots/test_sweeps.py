"""What the pictures of sweeps hold: means, bands, nulls, maps, labels; and that they
leave pyplot alone.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from matplotlib.collections import LineCollection
from PIL import Image
from scipy import stats

from made_up_results import random_map
from tl_coupling.pictures.labels import off_screen
from tl_coupling.studies.plots.growth import plot_growth, plot_shapes
from tl_coupling.studies.plots.sweeps import (
    animate_coupling,
    plot_adjacency_strip,
    plot_coupling_strip,
    plot_emergence,
)

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
KS = (5, 10)


def sweep(steps=STEPS, n_prompts=4, seed=0, n_layers=6, **changed) -> xarray.Dataset:
    """A sweep of random numbers, as `checkpoint_sweep` returns it."""
    rng = np.random.default_rng(seed)
    n = len(steps), n_prompts
    variables = {
        "coupling": (
            ("checkpoint", "prompt", "k", "layer", "other_layer"),
            rng.random((*n, 2, n_layers, n_layers)),
        ),
        "mean_coupling": (("checkpoint", "prompt", "k"), rng.random((*n, 2))),
        "null_coupling": (
            ("checkpoint", "prompt", "k"),
            np.broadcast_to([0.1056, 0.0513], (*n, 2)),
        ),
        "mean_spectral_miscoupling": (
            ("checkpoint", "prompt", "k"),
            rng.random((*n, 2)),
        ),
        "null_spectral_miscoupling": (
            ("checkpoint", "prompt", "k"),
            rng.random((*n, 2)),
        ),
        "spectral_miscoupling": (
            ("checkpoint", "prompt", "k", "layer", "other_layer"),
            3 * rng.random((*n, 2, n_layers, n_layers)),
        ),
        "loss": (("checkpoint", "prompt"), 8 - rng.random(n)),
        "line_shape_score_all_tokens": (("checkpoint", "prompt"), 1 + rng.random(n)),
        "windowed_line_shape_score": (
            ("checkpoint", "prompt", "window"),
            1 + rng.random((*n, n_layers - 4)),
        ),
        "expodistance": (("checkpoint", "prompt"), rng.lognormal(size=n)),
        "norm": (
            ("checkpoint", "prompt", "depth"),
            rng.lognormal(size=(*n, n_layers + 1)),
        ),
    }
    coords = {
        "checkpoint": list(steps),
        "prompt": [str(i) for i in range(n_prompts)],
        "k": list(KS),
        "layer": range(n_layers),
        "other_layer": range(n_layers),
        "depth": range(n_layers + 1),
        "window": range(2, n_layers - 2),
    }
    return xarray.Dataset(
        variables | changed, coords, {"model": "tiny $x$", "window": 5}
    )


def seeds(n=3, **changed) -> xarray.Dataset:
    return xarray.concat(
        [sweep(seed=seed, **changed) for seed in range(n)],
        "seed",
        combine_attrs="override",
    )


pytestmark = pytest.mark.usefixtures("pyplot_untouched")


def named_lines(ax) -> dict:
    return {
        line.get_label(): line
        for line in ax.lines
        if not line.get_label().startswith("_")
    }


def band(ax) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the first band at each step."""
    path = ax.collections[0].get_paths()[0].vertices
    ends = {x: sorted(set(path[path[:, 0] == x, 1])) for x in path[:, 0]}
    return np.array([ends[step][0] for step in STEPS]), np.array(
        [ends[step][-1] for step in STEPS]
    )


# plot_emergence


def test_emergence_draws_mean_null_and_loss():
    data = sweep()
    coupling, loss = plot_emergence(data, k=5).axes
    line = coupling.lines[0]
    np.testing.assert_array_equal(line.get_xdata(), STEPS)
    np.testing.assert_allclose(
        line.get_ydata(), data.mean_coupling.values[:, :, 0].mean(1)
    )
    np.testing.assert_allclose(loss.lines[0].get_ydata(), data.loss.values.mean(1))
    np.testing.assert_allclose(
        named_lines(coupling)["random subspaces, 0.106"].get_ydata(), 0.1056
    )
    assert coupling.get_ylabel() == r"mean coupling $1 - \tilde{m}$ (k = 5)"
    assert loss.get_ylabel() == "loss (nats per token)"
    assert loss.get_xlabel() == "training step"


def test_a_band_has_what_random_subspaces_give_at_some_steps():
    """As wide as that of a map with the same spectra; without spectra there is none."""
    (ax, _) = plot_emergence(sweep(), k=5).axes
    assert "95 % of random" not in legend_of(ax)
    S = np.random.default_rng(0).uniform(1, 3, (len(STEPS), 4, 6, 10)).cumsum(-1)
    dims = ("checkpoint", "prompt", "layer", "singular_value")
    data = sweep(singular_values=(dims, S[..., ::-1]))
    data.attrs["provenance"] = '{"d_model": 12}'
    (ax, _) = plot_emergence(data, k=5).axes
    assert "95 % of random" in legend_of(ax)
    null_band = ax.collections[-1].get_paths()[0].vertices
    spectra = torch.from_numpy(S[-1, ..., ::-1].mean(0))
    layers = random_map(layers=range(6), k=10)
    layers = dataclasses.replace(
        layers, singular_values=spectra, frobenius_norms=spectra.norm(dim=1)
    )
    ends = np.unique(null_band[null_band[:, 0] == STEPS[-1], 1])[[0, -1]]
    np.testing.assert_allclose(ends, layers.null_interval(5), rtol=0.02)


def legend_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_many_steps_have_bands_at_a_dozen_of_them():
    steps = range(100)
    data = sweep(steps=steps, n_prompts=1)
    spectra = np.broadcast_to(np.arange(10, 0, -1.0), (100, 1, 6, 10))
    dims = ("checkpoint", "prompt", "layer", "singular_value")
    data = data.assign(singular_values=(dims, spectra))
    data.attrs["provenance"] = '{"d_model": 12}'
    (ax, _) = plot_emergence(data).axes
    drawn = set(ax.collections[-1].get_paths()[0].vertices[:, 0])
    assert {0, 99} <= drawn
    assert len(drawn) <= 13


def test_emergence_takes_the_largest_common_k_by_default():
    (ax, _) = plot_emergence({"a": sweep(), "b": sweep().sel(k=[5])}).axes
    assert "k = 5" in ax.get_ylabel()
    assert "k = 10" in plot_emergence(sweep()).axes[0].get_ylabel()


def test_step_0_has_a_place_on_the_logarithmic_axis_and_a_ring():
    (ax, _) = plot_emergence(sweep()).axes
    assert ax.get_xscale() == "symlog"
    assert ax.get_xlim()[0] < 0
    (ring,) = [line for line in ax.lines if line.get_label() == "_untrained"]
    assert ring.get_xdata()[0] == 0
    assert "untrained, step 0" in [
        text.get_text() for text in ax.get_legend().get_texts()
    ]
    (ax, _) = plot_emergence(sweep(steps=STEPS[1:])).axes
    assert ax.get_xscale() == "log"
    assert "untrained, step 0" not in [
        text.get_text() for text in ax.get_legend().get_texts()
    ]


def test_lines_go_in_the_order_of_the_steps():
    data = sweep()
    shuffled = data.isel(checkpoint=[3, 0, 2, 1, *range(4, 10)])
    for ax, same in zip(
        plot_emergence(data).axes, plot_emergence(shuffled).axes, strict=True
    ):
        np.testing.assert_array_equal(
            same.lines[0].get_xydata(), ax.lines[0].get_xydata()
        )


def test_band_over_prompts_is_the_t_interval():
    data = sweep()
    low, high = band(plot_emergence(data, k=10).axes[0])
    for i, values in enumerate(data.mean_coupling.sel(k=10).values):
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        np.testing.assert_allclose((low[i], high[i]), expected)


def test_band_over_seeds_alone_is_the_t_interval():
    data = seeds(n_prompts=1)
    low, high = band(plot_emergence(data, k=10).axes[0])
    for i, values in enumerate(data.mean_coupling.sel(k=10).values[:, :, 0].T):
        np.testing.assert_allclose(
            (low[i], high[i]), stats.ttest_1samp(values, 0).confidence_interval(0.95)
        )


def test_band_over_prompts_and_seeds_adds_their_variances():
    data = seeds()
    low, high = band(plot_emergence(data, k=10).axes[0])
    for i in range(len(STEPS)):
        table = data.mean_coupling.sel(k=10).values[:, i]
        parts = [
            (means.var(ddof=1) / len(means), len(means))
            for means in (table.mean(0), table.mean(1))
        ]
        square = sum(part for part, _ in parts)
        freedom = square**2 / sum(part**2 / (n - 1) for part, n in parts)
        half = stats.t.isf(0.025, freedom) * square**0.5
        np.testing.assert_allclose(
            (low[i], high[i]), (table.mean() - half, table.mean() + half)
        )


def test_band_covers_the_true_mean_of_seeds_and_prompts():
    rng = np.random.default_rng(5)
    n, n_seeds, n_prompts = 10, 4, 8
    covered = []
    for _ in range(40):
        of_seed, of_prompt = (
            rng.normal(0, 0.03, (n_seeds, n, 1)),
            rng.normal(0, 0.05, (1, n, n_prompts)),
        )
        values = (
            0.5 + of_seed + of_prompt + rng.normal(0, 0.01, (n_seeds, n, n_prompts))
        )
        data = seeds(n_seeds, n_prompts=n_prompts)
        data["mean_coupling"] = (
            ("seed", "checkpoint", "prompt", "k"),
            np.stack([values, values], -1),
        )
        with off_screen():
            low, high = band(plot_emergence(data).axes[0])
        covered += list((low <= 0.5) & (high >= 0.5))
    assert 0.92 <= np.mean(covered) <= 0.995


def test_no_band_for_one_prompt_and_one_seed():
    (ax, _) = plot_emergence(sweep(n_prompts=1)).axes
    assert not ax.collections
    assert "interval" not in ax.figure.get_suptitle()


def test_equal_values_give_a_band_of_no_width():
    data = sweep()
    data["mean_coupling"] = data["mean_coupling"] * 0 + 0.25
    low, high = band(plot_emergence(data).axes[0])
    np.testing.assert_array_equal((low, high), np.full((2, len(STEPS)), 0.25))


def test_title_says_over_what_the_interval_is():
    assert (
        plot_emergence(seeds())
        .get_suptitle()
        .endswith("mean and 95% interval over 4 prompts and 3 seeds")
    )
    assert (
        plot_coupling_strip(seeds())
        .get_suptitle()
        .endswith(" · mean over 4 prompts and 3 seeds")
    )
    assert (
        plot_emergence(sweep())
        .get_suptitle()
        .endswith("\ntiny $x$ · mean and 95% interval over 4 prompts")
    )


def test_prompts_of_one_token_have_no_loss():
    data = sweep()
    data["loss"] = data["loss"] * np.nan
    (ax,) = plot_emergence(data).axes
    assert ax.get_xlabel() == "training step"
    data = sweep()
    data["loss"][:, 1] = np.nan
    (_, loss) = plot_emergence(data).axes
    np.testing.assert_allclose(
        loss.lines[0].get_ydata(), data.loss.values[:, [0, 2, 3]].mean(1)
    )
    assert np.isfinite(band(loss)).all()


def test_nulls_that_differ_are_drawn_for_each_sweep():
    a, b = sweep(), sweep(seed=1)
    (ax, _) = plot_emergence({"a": a, "b": b}, measure="spectral_miscoupling", k=5).axes
    lines = named_lines(ax)
    assert list(lines) == ["a", "b", "a: random subspaces", "b: random subspaces"]
    np.testing.assert_allclose(
        lines["b: random subspaces"].get_ydata(),
        b.null_spectral_miscoupling.values[:, :, 0].mean(1),
    )
    assert lines["b"].get_color() == lines["b: random subspaces"].get_color()


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        (sweep(), {"k": 7}, r"got 7; they hold \[5, 10\]"),
        (
            {"a": sweep().sel(k=[5]), "b": sweep().sel(k=[10])},
            {},
            "have no k in common",
        ),
        (
            sweep().assign_coords(checkpoint=[f"step{i}" for i in STEPS]),
            {},
            "training steps as whole numbers",
        ),
        (sweep().drop_vars("mean_coupling"), {}, "holds no 'mean_coupling'"),
        ({}, {}, "empty"),
    ],
)
def test_emergence_says_what_is_wrong(data, given, message):
    with pytest.raises(ValueError, match=message) as error:
        plot_emergence(data, **given)
    assert "\n" not in str(error.value)


# plot_coupling_strip


def test_strip_draws_a_map_for_each_checkpoint():
    data = seeds()
    fig = plot_coupling_strip(data, checkpoints=[0, 64, 256], k=5)
    panels = fig.axes[:3]
    for ax, step in zip(panels, (0, 64, 256), strict=True):
        (image,) = ax.images
        expected = data.coupling.sel(checkpoint=step, k=5).values.mean((0, 1))
        between = ~np.eye(6, dtype=bool)
        np.testing.assert_allclose(image.get_array()[between], expected[between])
        # A layer with itself is grey, and the scale is that of the others.
        assert np.ma.getmaskarray(image.get_array()).diagonal().all()
    tops = [ax.images[0].get_array().max() for ax in panels]
    assert [ax.images[0].get_clim() for ax in panels] == [(0, max(tops))] * 3
    assert [line.get_ydata()[0] for line in fig.axes[3].lines] == [0.1056] * 2
    assert [ax.get_title() for ax in panels] == [
        "step 0, untrained",
        "step 64",
        "step 256",
    ]
    assert (
        fig.axes[3].get_ylabel()
        == r"coupling $1 - \tilde{m}$ (k = 5)" + "\nline: random subspaces"
    )
    assert fig.get_supylabel() == "layer of J₁"


def test_strip_rows_are_the_layer_of_the_jacobian():
    data = sweep()
    transposed = data.transpose("other_layer", "layer", ...)
    images = [
        plot_coupling_strip(one, checkpoints=[4]).axes[0].images[0]
        for one in (data, transposed)
    ]
    np.testing.assert_allclose(images[0].get_array(), images[1].get_array())


def test_strip_takes_first_and_last_checkpoint_by_default():
    titles = [ax.get_title() for ax in plot_coupling_strip(sweep()).axes[:-1]]
    assert len(titles) == 8
    assert (titles[0], titles[-1]) == ("step 0, untrained", "step 256")


def test_strip_shares_a_scale_where_the_measure_has_no_bound():
    data = sweep()
    fig = plot_coupling_strip(
        data, checkpoints=[1, 2], measure="spectral_miscoupling", k=5
    )
    means = data.spectral_miscoupling.sel(checkpoint=[1, 2], k=5).mean("prompt").values
    top = means[:, ~np.eye(6, dtype=bool)].max()
    assert [ax.images[0].get_clim() for ax in fig.axes[:2]] == [
        (0, pytest.approx(top))
    ] * 2


@pytest.mark.parametrize("checkpoints", [[3], [], [0, 5000]])
def test_strip_and_shapes_want_checkpoints_that_are_there(checkpoints):
    for plot in (plot_coupling_strip, plot_adjacency_strip, plot_shapes, plot_growth):
        with pytest.raises(ValueError, match="must be among"):
            plot(sweep(), checkpoints=checkpoints)


# plot_adjacency_strip


def arcs_of(ax) -> dict[tuple[int, int], tuple[float, float]]:
    """Values and widths of the arcs by the layers at their ends."""
    (arcs,) = [
        collection
        for collection in ax.collections
        if isinstance(collection, LineCollection)
    ]
    ends = [(round(arc[0, 0]), round(arc[-1, 0])) for arc in arcs.get_segments()]
    looks = zip(arcs.get_array(), arcs.get_linewidths(), strict=True)
    return dict(zip(ends, looks, strict=True))


def test_arcs_of_chosen_steps_are_on_one_scale():
    data = seeds()
    fig = plot_adjacency_strip(data, checkpoints=[0, 256], k=5, strongest=4)
    *panels, bar = fig.axes
    assert [ax.get_title() for ax in panels] == ["step 0, untrained", "step 256"]
    maps = (
        data.coupling.sel(k=5).mean(("seed", "prompt")).sel(checkpoint=[0, 256]).values
    )
    weights = [
        {
            (i, j): (each_map[i, j] + each_map[j, i]) / 2
            for i in range(6)
            for j in range(i + 1, 6)
        }
        for each_map in maps
    ]
    full = max(max(of_map.values()) for of_map in weights)
    for ax, expected in zip(panels, weights, strict=True):
        drawn = arcs_of(ax)
        assert set(drawn) == set(sorted(expected, key=expected.get)[-4:])
        highest = max(j - i for i, j in drawn) / 2
        assert ax.get_ylim()[1] > highest
        for pair, (value, width) in drawn.items():
            assert value == pytest.approx(expected[pair])
            assert width == pytest.approx(4 * expected[pair] / full)
    assert "4 of 15 pairs, the strongest" in fig.get_supxlabel()
    assert bar.get_ylim() == (0, pytest.approx(full))
    null = float(data.null_coupling.sel(k=5).mean())
    assert bar.lines[-1].get_ydata()[0] == pytest.approx(null)


# plot_growth


def test_growth_is_medians_against_step_and_depth():
    data = seeds()
    left, right, bar = plot_growth(data, checkpoints=[0, 256]).axes
    np.testing.assert_allclose(
        left.lines[0].get_ydata(), np.median(data.expodistance.values, axis=(0, 2))
    )
    low, high = band(left)
    quartiles = np.quantile(data.expodistance.values, (0.25, 0.75), axis=(0, 2))
    np.testing.assert_allclose((low, high), quartiles)
    for curve, step in zip(right.lines, (0, 256), strict=True):
        np.testing.assert_array_equal(curve.get_xdata(), range(7))
        expected = np.median(data.norm.sel(checkpoint=step).values, axis=(0, 1))
        np.testing.assert_allclose(curve.get_ydata(), expected)
    assert left.get_yscale() == right.get_yscale() == "log"
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "256"]
    with pytest.raises(ValueError, match="holds no 'norm'"):
        plot_growth(data.drop_vars("norm"))


@pytest.mark.parametrize("plot", [plot_shapes, plot_growth])
def test_several_models_have_a_line_each_and_the_first_its_profiles(plot):
    small, large = sweep(), sweep(seed=1, n_layers=8)
    left, right, _ = plot({"small": small, "large": large}, checkpoints=[256]).axes
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names[:2] == ["small", "large"]
    assert right.get_xlabel().endswith("(small)")
    assert len(right.lines[0].get_xdata()) < 8
    if plot is plot_shapes:
        assert {"random steps, 2.45", "random steps, 2.83"} <= set(names)


# plot_shapes


def test_shapes_against_step_and_depth():
    data = seeds()
    fig = plot_shapes(data, checkpoints=[0, 16, 256])
    left, right, bar = fig.axes
    np.testing.assert_allclose(
        left.lines[0].get_ydata(), data.line_shape_score_all_tokens.values.mean((0, 2))
    )
    assert named_lines(left)["random steps, 2.45"].get_ydata()[0] == pytest.approx(
        6**0.5
    )
    curves = right.lines[:3]
    for curve, step in zip(curves, (0, 16, 256), strict=True):
        np.testing.assert_array_equal(curve.get_xdata(), [2, 3])
        expected = data.windowed_line_shape_score.sel(checkpoint=step).values.mean(
            (0, 1)
        )
        np.testing.assert_allclose(curve.get_ydata(), expected)
    assert len({curve.get_color() for curve in curves}) == 3
    assert right.get_xlabel() == "middle layer of 5 steps"
    assert right.get_xlim() == (-0.5, 5.5)
    assert list(named_lines(right)) == ["random steps, 2.24"]
    assert right.lines[-1].get_ydata()[0] == pytest.approx(5**0.5)
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "16", "256"]
    assert left.get_ylim()[0] == right.get_ylim()[0] == 1


def test_ticks_are_steps_that_were_measured_and_have_room():
    published = (
        0,
        *(2**i for i in range(10)),
        *(1000 * 2**i for i in range(8)),
        143_000,
    )
    for steps, expected in (
        ((100, 200, 300), "100 200 300"),
        (published, "0 4 32 256 2k 16k 143k"),
        ((7,), "7"),
    ):
        (_, ax) = plot_emergence(sweep(steps=steps)).axes
        assert " ".join(text.get_text() for text in ax.get_xticklabels()) == expected
        assert not len(ax.xaxis.get_minorticklocs())


def test_a_model_of_one_window_is_drawn_over_all_its_layers():
    data = sweep(n_layers=5)
    assert data.sizes["window"] == 1
    right = plot_shapes(data).axes[1]
    right.figure.canvas.draw()
    assert len([tick for tick in right.get_xticks() if 0 <= tick <= 4]) > 3


def test_pictures_render_and_take_a_figure():
    from matplotlib.figure import Figure

    for plot in (
        plot_emergence,
        plot_coupling_strip,
        plot_adjacency_strip,
        plot_shapes,
        plot_growth,
    ):
        fig = Figure()
        assert plot(seeds(), fig=fig) is fig
        fig.canvas.draw()


def test_titles_leave_out_the_name_of_a_temporary_folder():
    folder = Path(tempfile.gettempdir())
    data = sweep().assign_attrs(model=str(folder / "tmpa1b2c3" / "width64"))
    words = plot_emergence(data).get_suptitle().splitlines()
    assert words[1].startswith("width64 · ")
    kept = sweep().assign_attrs(model=str(folder / "runs" / "width64"))
    assert "\nruns/width64 · " in plot_emergence(kept).get_suptitle()


def test_the_animation_has_a_frame_for_each_checkpoint(tmp_path: Path) -> None:
    data = sweep()
    animation = animate_coupling(data, k=int(data["k"][0]))
    file = tmp_path / "emergence.gif"
    animation.save(file, writer="pillow", dpi=40)
    steps = data["checkpoint"].values.tolist()
    with Image.open(file) as picture:
        assert picture.n_frames == len(steps)
    # The last frame shows the last checkpoint.
    (drawn,) = animation._fig.axes[0].images
    expected = data["coupling"].sel(k=data["k"][0], checkpoint=steps[-1])
    for dim in ("prompt", "seed"):
        if dim in expected.dims:
            expected = expected.mean(dim)
    shown = np.asarray(drawn.get_array())
    off_diagonal = ~np.eye(len(shown), dtype=bool)
    assert np.allclose(
        shown[off_diagonal],
        expected.transpose("layer", "other_layer").values[off_diagonal],
    )
