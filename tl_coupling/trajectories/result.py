"""All measures of one prompt's trajectories in one object, and its file."""

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import AnyPath, checked, warn_caller
from tl_coupling.progress import Progress
from tl_coupling.saved import Saved
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.traces import Trace
from tl_coupling.trajectories import shapes
from tl_coupling.trajectories.predictions import (
    PREDICTIONS,
    Linearisation,
    Perturbation,
    linearisation,
    perturbation,
)

if TYPE_CHECKING:
    import xarray

# The arrays of a result, of its parts, and those made from them for the file alone, by
# their axes.
_AXES = {
    "token": "line_shape_score expodistance equidistance",
    "depth token": "norm logit_lens_entropy",
    "layer token": "step_length line_shape_score_by_depth",
    "middle_layer token": "line_shape_score_windowed",
    "depth d_model": "trajectory",
    "layer d_model": "one_step product closed_form",
    "layer i": "singular_values",
    "scale sample depth": "cosine_similarity",
    "prediction layer": "linearisation_relative_error linearisation_cosine_similarity",
    "i": "inverse_singular_value_slope inverse_singular_value_intercept inverse_singular_value_r_squared",
}
_AXES_OF = {
    name: axes.split() for axes, names in _AXES.items() for name in names.split()
}
_UNITS = dict.fromkeys(
    ["norm", "step_length", "trajectory", "one_step", "product", "closed_form"],
    "residual stream",
)
_UNITS |= {"logit_lens_entropy": "nat"}
_OPTIONAL = ("logit_lens_entropy", "closed_form", "singular_values")
_PARTS = {"linearisation": Linearisation, "perturbation": Perturbation}


@dataclass(frozen=True, eq=False)
class TrajectoryResult(Saved):
    """Shapes of all tokens' trajectories; for one token also their linear predictions
    and the fate of noise.

    What is `[… n_pos]` is of every token, by the function of its name.
    `line_shape_score_windowed` is of every `window` consecutive steps, centred on layer
    `i + window // 2`; `norm` and `step_length` are in units of the residual stream.
    `logit_lens_entropy` is `None` for a model without logits; `linearisation` and
    `perturbation`, if left out.

    Example:
        >>> result = tlc.trajectories.measure_trajectory(trace, noise=False)
        >>> result.norm.shape, result.perturbation is None
        (torch.Size([3, 8]), True)
        >>> result.save("trajectory.nc").name
        'trajectory.nc'
    """

    line_shape_score: Float[Tensor, " n_pos"]
    expodistance: Float[Tensor, " n_pos"]
    equidistance: Float[Tensor, " n_pos"]
    norm: Float[Tensor, "n_layers_plus_1 n_pos"]
    step_length: Float[Tensor, "n_layers n_pos"]
    line_shape_score_windowed: Float[Tensor, "n_windows n_pos"]
    line_shape_score_by_depth: Float[Tensor, "n_layers n_pos"]
    logit_lens_entropy: Float[Tensor, "n_layers_plus_1 n_pos"] | None
    window: int
    linearisation: Linearisation | None
    perturbation: Perturbation | None
    provenance: dict[str, Any]

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.step_length)

    def to_dataset(self) -> "xarray.Dataset":
        """The result as an `xarray.Dataset`: arrays with named axes and units, all else
        as JSON in the attributes.

        It also has `linearisation_relative_error` and
        `linearisation_cosine_similarity`, `[prediction layer]`, and slope, intercept
        and R² of the least-squares line through `1/σ_i` against layer.
        """
        import xarray

        attrs = {"window": self.window, "provenance": json.dumps(self.provenance)}
        held = dict(vars(self))
        for name in _PARTS:
            if (part := getattr(self, name)) is not None:
                held |= vars(part)
                rest = {
                    key: value
                    for key, value in vars(part).items()
                    if key not in (*_AXES_OF, "provenance")
                }
                attrs[name] = json.dumps(rest)
        arrays = {
            name: value
            for name, value in held.items()
            if name in _AXES_OF and value is not None
        }
        n_pos = len(self.line_shape_score)
        coords: dict[str, Any] = {
            "depth": range(self.n_layers + 1),
            "layer": range(self.n_layers),
            "middle_layer": [
                i + self.window // 2 for i in range(len(self.line_shape_score_windowed))
            ],
            "token": range(n_pos),
            "token_text": (
                "token",
                list(self.provenance.get("str_tokens") or [""] * n_pos),
            ),
        }
        if (linear := self.linearisation) is not None:
            names = [
                name
                for name in PREDICTIONS
                if name != "closed_form" or linear.closed_form is not None
            ]
            coords["prediction"] = names
            arrays["linearisation_relative_error"] = torch.stack(
                [linear.relative_error(name) for name in names]
            )
            arrays["linearisation_cosine_similarity"] = torch.stack(
                [linear.cosine_similarity(name) for name in names]
            )
            if linear.singular_values is not None and self.n_layers > 1:
                fit = inverse_singular_value_fit(linear.singular_values)
                arrays |= {
                    f"inverse_singular_value_{name}": value
                    for name, value in vars(fit).items()
                }
        if self.perturbation is not None:
            coords["scale"] = list(self.perturbation.scales)
        units = {name: {"units": _UNITS.get(name, "1")} for name in arrays}
        data = {
            name: (_AXES_OF[name], values.cpu().numpy(), units[name])
            for name, values in arrays.items()
        }
        return xarray.Dataset(data, coords, attrs)

    @classmethod
    @checked
    def load(cls, path: AnyPath) -> "TrajectoryResult":
        """Read what `save` wrote; ValueError for other or damaged files."""
        import xarray

        def tensor(name: str) -> Tensor | None:
            return (
                None
                if name in _OPTIONAL and name not in data
                else torch.from_numpy(data[name].values)
            )

        def made(kind: Any, **rest: Any) -> Any:
            return kind(
                **{
                    one.name: tensor(one.name)
                    for one in fields(kind)
                    if one.name in _AXES_OF
                },
                **rest,
            )

        try:
            data = xarray.load_dataset(path, engine="netcdf4")
            provenance, parts = (
                json.loads(data.attrs["provenance"]),
                dict.fromkeys(_PARTS),
            )
            for name in _PARTS.keys() & data.attrs.keys():
                rest = json.loads(data.attrs[name])
                rest |= {"scales": tuple(rest["scales"])} if "scales" in rest else {}
                parts[name] = made(
                    _PARTS[name],
                    **rest,
                    provenance=provenance | {"position": rest["position"]},
                )
            return made(
                cls, window=int(data.attrs["window"]), provenance=provenance, **parts
            )
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is not a file that `TrajectoryResult.save` wrote, or is damaged"
            ) from error

    def __repr__(self) -> str:
        parts = [name for name in _PARTS if getattr(self, name) is not None]
        means = ", ".join(
            f"{name} {float(getattr(self, name).nanmean()):.3f}"
            for name in _AXES["token"].split()
        )
        sizes = f"{self.n_layers} layers, {len(self.line_shape_score)} tokens, window={self.window}"
        held = (
            f"means over tokens: {means}; with {' and '.join(parts) or 'shapes alone'}"
        )
        return (
            f"TrajectoryResult(model={self.provenance.get('model')!r}, {sizes}, {held})"
        )


@checked
def entropy_by_depth(trace: Trace) -> Float[Tensor, "n_layers_plus_1 n_pos"]:
    """Entropy of the logit lens in nats, at every depth and token: `logit_lens_entropy`
    with the model's own logits.

    A last depth that is normalised already (`final_norm=True`) is not normalised again.
    Raises ValueError for a model without unembedding. Cost: `n_layers + 1` unembeddings
    of the prompt.

    Example:
        >>> tlc.trajectories.entropy_by_depth(trace).shape
        torch.Size([3, 8])
    """
    before = shapes.logit_lens_entropy(trace.residual[:-1], trace.logits)
    last = shapes.logit_lens_entropy(
        trace.residual[-1:], lambda x: trace.logits(x, trace.final_norm)
    )
    return torch.cat([before, last])


def entropy_where_known(trace: Trace) -> Float[Tensor, "n_layers_plus_1 n_pos"] | None:
    """`entropy_by_depth`; `None`, with a warning, for a model without logits."""
    try:
        return entropy_by_depth(trace)
    except ValueError as error:
        warn_caller(f"no logit-lens entropy: {error}")
        return None


@checked
def measure_trajectory(
    trace: Trace,
    *,
    position: int = -1,
    window: shapes.Window | None = None,
    linear: bool = True,
    noise: bool = True,
    relative_noise: bool = True,
    progress: Progress | None = None,
) -> TrajectoryResult:
    """Every measure of a prompt's trajectories: shapes of all tokens; linear
    predictions and noise of one.

    Args:
        position: the token that is linearised and perturbed; the last by default.
        window: steps of the windowed line-shape score, odd; 11 as in the paper, or the
            most that the model has.
        linear, noise: whether to make the `linearisation` with its closed form, and the
            default `perturbation`.
        relative_noise: whether that is relative to the length of the embedding.
        progress: wraps the loops of both; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises ValueError for a position out of range, and for a window that is even, below
    1 or above the number of layers. Warns where the model has no logits, so that there
    is no entropy, and where a measure is undefined (NaN). Cost: `n_layers + 1`
    unembeddings of the prompt; with `linear` a Jacobian and its singular values per
    layer; with `noise` 48 forward passes.

    Example:
        >>> tlc.trajectories.measure_trajectory(trace, linear=False, noise=False).line_shape_score.shape
        torch.Size([8])
    """
    t, x, n = trace.position_index(position), trace.residual, trace.n_layers
    window = min(11, n - 1 + n % 2) if window is None else window
    windowed = shapes.line_shape_score(x, window)
    entropy = entropy_where_known(trace)
    of_each_token = (
        shapes.line_shape_score(x),
        shapes.expodistance(x),
        shapes.equidistance(x),
    )
    by_depth = (
        shapes.norms(x),
        shapes.step_lengths(x),
        windowed,
        shapes.line_shape_score_by_depth(x),
    )
    predicted = linearisation(trace, t, progress=progress) if linear else None
    noisy = (
        perturbation(trace, position=t, relative=relative_noise, progress=progress)
        if noise
        else None
    )
    return TrajectoryResult(
        *of_each_token, *by_depth, entropy, window, predicted, noisy, trace.provenance
    )
