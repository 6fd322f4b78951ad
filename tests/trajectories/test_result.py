"""The result of measuring a trajectory: against the functions it collects, and through
its file.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from scipy import stats

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import Trace
from tl_coupling.trajectories import TrajectoryResult, linearisation, measure_trajectory


def naive_shapes(x: np.ndarray) -> dict[str, list[float]]:
    """The paper's formulas for each token, in numpy."""
    steps = np.diff(x, axis=0)
    lengths = np.linalg.norm(steps, axis=-1)
    alpha = np.diff(np.log(np.linalg.norm(x, axis=-1)), axis=0)
    return {
        "line_shape_score": len(steps)
        / np.linalg.norm((steps / lengths[..., None]).sum(0), axis=-1),
        "expodistance": alpha.var(0) / alpha.mean(0) ** 2,
        "equidistance": lengths.std(0) / lengths.mean(0),
        "norm": np.linalg.norm(x, axis=-1),
        "step_length": lengths,
    }


def test_shapes_are_those_of_the_formulas(tiny_trace: Trace) -> None:
    result = measure_trajectory(tiny_trace, linear=False, noise=False)
    for name, expected in naive_shapes(tiny_trace.residual.double().numpy()).items():
        np.testing.assert_allclose(getattr(result, name), expected, rtol=1e-3)
    assert result.window == 1
    assert result.linearisation is result.perturbation is None
    p = tiny_trace.model(tiny_trace.tokens[None])[0].double().softmax(-1)
    np.testing.assert_allclose(
        result.logit_lens_entropy[-1], -(p * p.log()).sum(-1).detach(), atol=1e-4
    )


def test_singular_values_are_those_of_the_jacobians(tiny_trace: Trace) -> None:
    result = linearisation(tiny_trace, position=3, k=5)
    witness = tiny.huggingface_model("llama")
    for layer in range(2):
        expected = torch.linalg.svdvals(
            tiny.oracle_jacobian(witness, tiny.TOKENS, layer, 3, 3)
        )[:5]
        np.testing.assert_allclose(
            result.singular_values[layer], expected, rtol=1e-3, atol=1e-5
        )
    assert linearisation(tiny_trace, closed_form=False).singular_values is None


@pytest.mark.parametrize(
    "parts", [{}, {"linear": False, "relative_noise": False}, {"noise": False}]
)
def test_what_is_saved_is_what_is_loaded(
    tiny_trace: Trace, tmp_path: Path, parts: dict[str, bool]
) -> None:
    result = measure_trajectory(
        tiny_trace, position=2, window=1, progress=False, **parts
    )
    loaded = TrajectoryResult.load(result.save(tmp_path / "one.nc"))
    xarray.testing.assert_identical(loaded.to_dataset(), result.to_dataset())
    assert loaded.provenance == json.loads(json.dumps(result.provenance))
    assert loaded.perturbation is None or loaded.perturbation.relative == parts.get(
        "relative_noise", True
    )
    for part in ("linearisation", "perturbation"):
        ours, theirs = getattr(loaded, part), getattr(result, part)
        assert (ours is None) == (theirs is None)
        for name, value in vars(theirs).items() if theirs else ():
            are_equal = (
                torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            )
            assert are_equal(
                getattr(ours, name),
                json.loads(json.dumps(value)) if name == "provenance" else value,
            ), name
    assert repr(loaded) == repr(result)


def test_tokens_without_a_score_are_counted_where_a_mean_is_shown(tiny_trace) -> None:
    result = measure_trajectory(tiny_trace, linear=False, noise=False)
    assert "NaN" not in repr(result)
    scores = result.line_shape_score.clone()
    scores[2:4] = torch.nan
    planted = dataclasses.replace(result, line_shape_score=scores)
    assert f"{float(scores.nanmean()):.3f} (NaN of 2)" in repr(planted)


def test_the_dataset_names_axes_units_and_derived_values(tiny_trace: Trace) -> None:
    result = measure_trajectory(tiny_trace, position=-1)
    data = result.to_dataset()
    linear = result.linearisation
    for name in ("one_step", "product", "closed_form", "previous", "input"):
        of_prediction = data.sel(prediction=name)
        np.testing.assert_array_equal(
            of_prediction.linearisation_relative_error, linear.relative_error(name)
        )
        np.testing.assert_array_equal(
            of_prediction.linearisation_cosine_similarity,
            linear.cosine_similarity(name),
        )
    assert data.norm.attrs["units"] == "residual stream"
    assert data.logit_lens_entropy.attrs["units"] == "nat"
    assert data.token_text.values.tolist() == list(tiny_trace.str_tokens)
    assert data.sizes["scale"] == 6
    for i in (0, 1):
        line = stats.linregress([0, 1], 1 / linear.singular_values[:, i].numpy())
        np.testing.assert_allclose(
            data.inverse_singular_value_slope[i], line.slope, rtol=1e-6
        )


def test_repr_fits_in_three_lines(tiny_trace: Trace) -> None:
    result = measure_trajectory(tiny_trace)
    for part in (result, result.linearisation, result.perturbation):
        assert len(repr(part)) <= 3 * 120
        assert "\n" not in repr(part)
    assert "2 layers, 8 tokens, window=1" in repr(result)
    assert "k=32" in repr(result.linearisation)
    assert "6 scales × 8 samples × 3 depths" in repr(result.perturbation)


def test_the_bars_are_the_callers_or_none(
    tiny_trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    measure_trajectory(
        tiny_trace, progress=lambda items: seen.append(len(items)) or items
    )
    assert seen == [2, 48]
    measure_trajectory(tiny_trace, progress=False)
    assert "%" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 8}, r"`position` must lie in \[-8, 7\]"),
        ({"window": 2}, "`window` must be an odd number of steps, got 2"),
        (
            {"window": 3},
            "`window` must be at most 2 for these trajectories of 2 steps, got 3",
        ),
    ],
)
def test_bad_options_are_refused(
    tiny_trace: Trace, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_trajectory(tiny_trace, **options)


def test_a_model_without_logits_has_no_entropy(
    tiny_trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("the model has no unembedding")

    monkeypatch.setattr(Trace, "logits", refuse)
    with pytest.warns(
        UserWarning, match="no logit-lens entropy: the model has no unembedding"
    ):
        result = measure_trajectory(tiny_trace, linear=False, noise=False)
    assert result.logit_lens_entropy is None
    assert "logit_lens_entropy" not in result.to_dataset()
    assert (
        TrajectoryResult.load(result.save(tmp_path / "one.nc")).logit_lens_entropy
        is None
    )


def test_other_files_are_refused(tiny_trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "text.nc").write_text("no netCDF")
    tlc.depth_coupling(tiny_trace, 3).save(tmp_path / "map.nc")
    for name in ("text", "map"):
        with pytest.raises(
            ValueError,
            match=rf"{name}.nc is not a file that `TrajectoryResult.save` wrote",
        ):
            TrajectoryResult.load(tmp_path / f"{name}.nc")
    with pytest.raises(FileNotFoundError):
        TrajectoryResult.load(tmp_path / "nowhere.nc")


@pytest.mark.parametrize("left_out", ["norm", "line_shape_score", None])
def test_files_that_lack_something_are_refused(
    tiny_trace: Trace, tmp_path: Path, left_out: str | None
) -> None:
    data = measure_trajectory(tiny_trace, linear=False, noise=False).to_dataset()
    data = (
        xarray.Dataset(attrs={"provenance": "{}", "window": 1})
        if left_out is None
        else data.drop_vars(left_out)
    )
    data.to_netcdf(tmp_path / "less.nc", engine="netcdf4")
    with pytest.raises(ValueError, match="is not a file that"):
        TrajectoryResult.load(tmp_path / "less.nc")
