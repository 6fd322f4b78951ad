"""All measures of one prompt's trajectories in one object, and its file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import AnyPath, checked, warn_caller
from tl_coupling.files import write_atomically
from tl_coupling.progress import Progress
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.trajectories import shapes
from tl_coupling.trajectories.noise import Perturbation, perturbation
from tl_coupling.trajectories.predictions import PREDICTIONS, Linearisation, linearisation
from tl_coupling.trajectories.projections import entropy_by_depth
from tl_coupling.trajectories.shapes import Window

if TYPE_CHECKING:
    import xarray

_PAPER_WINDOW = 11
# Axes and units of the arrays of a result; those of a trajectory's shape, then those of one token.
_SHAPES = {
    "line_shape_score": (("token",), "1"),
    "expodistance": (("token",), "1"),
    "equidistance": (("token",), "1"),
    "norm": (("depth", "token"), "residual stream"),
    "step_length": (("layer", "token"), "residual stream"),
    "line_shape_score_windowed": (("middle_layer", "token"), "1"),
    "line_shape_score_by_depth": (("layer", "token"), "1"),
    "logit_lens_entropy": (("depth", "token"), "nat"),
}
_LINEAR = {
    "trajectory": (("depth", "d_model"), "residual stream"),
    "one_step": (("layer", "d_model"), "residual stream"),
    "product": (("layer", "d_model"), "residual stream"),
    "closed_form": (("layer", "d_model"), "residual stream"),
    "singular_values": (("layer", "i"), "1"),
}


@dataclass(frozen=True, eq=False)
class TrajectoryResult:
    """Shapes of all tokens' trajectories; for one token also their linear predictions and the fate of noise.

    Attributes:
        line_shape_score, expodistance, equidistance: of each token; see the functions of the same names.
        norm: `‖x^l‖` at every depth, in units of the residual stream.
        step_length: `‖x^{l+1} − x^l‖` of every layer, in the same units.
        line_shape_score_windowed: of every `window` consecutive steps; entry `i` is centred on layer `i + window // 2`.
        line_shape_score_by_depth: of the steps up to each layer.
        logit_lens_entropy: in nats, at every depth; `None` for a model without logits.
        window: steps of the windowed score.
        linearisation: of one token; `None` if it was left out.
        perturbation: of one token; `None` if it was left out.
        provenance: how it was made; JSON-able.
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
        """The result as an `xarray.Dataset`: every array with named axes and its units, provenance in the attributes.

        Beside the attributes it has `linearisation_relative_error` and `linearisation_cosine_similarity`,
        `[prediction layer]`, and slope, intercept and R² of the least-squares line through `1/σ_i` against layer.
        """
        import xarray

        n_pos = len(self.line_shape_score)
        arrays = {name: (*_SHAPES[name], getattr(self, name)) for name in _SHAPES}
        coords: dict[str, Any] = {
            "depth": range(self.n_layers + 1),
            "layer": range(self.n_layers),
            "middle_layer": [i + self.window // 2 for i in range(len(self.line_shape_score_windowed))],
            "token": range(n_pos),
            "token_text": ("token", list(self.provenance.get("str_tokens") or [""] * n_pos)),
        }
        attrs: dict[str, Any] = {"window": self.window, "provenance": json.dumps(self.provenance)}
        if (linear := self.linearisation) is not None:
            coords["prediction"] = [p for p in PREDICTIONS if p != "closed_form" or linear.closed_form is not None]
            arrays |= {name: (*_LINEAR[name], getattr(linear, name)) for name in _LINEAR}
            for measure in ("relative_error", "cosine_similarity"):
                values = torch.stack([getattr(linear, measure)(name) for name in coords["prediction"]])
                arrays[f"linearisation_{measure}"] = (("prediction", "layer"), "1", values)
            if linear.singular_values is not None and self.n_layers > 1:
                fit = inverse_singular_value_fit(linear.singular_values)
                for name in ("slope", "intercept", "r_squared"):
                    arrays[f"inverse_singular_value_{name}"] = (("i",), "1", getattr(fit, name))
            attrs["linearisation_position"] = linear.position
            if linear.reference_layer is not None:
                attrs["linearisation_reference_layer"] = linear.reference_layer
        if (noisy := self.perturbation) is not None:
            arrays["perturbation_cosine_similarity"] = (("scale", "sample", "depth"), "1", noisy.cosine_similarity)
            coords["scale"] = list(noisy.scales)
            attrs |= {"perturbation_position": noisy.position, "perturbation_seed": noisy.seed}
        return xarray.Dataset(
            {
                name: (axes, values.cpu().numpy(), {"units": units})
                for name, (axes, units, values) in arrays.items()
                if values is not None
            },
            coords,
            attrs,
        )

    @checked
    def save(self, path: AnyPath) -> Path:
        """Write the result as netCDF, whole or not at all."""
        return write_atomically(path, lambda unfinished: self.to_dataset().to_netcdf(unfinished, engine="netcdf4"))

    @classmethod
    @checked
    def load(cls, path: AnyPath) -> "TrajectoryResult":
        """Read what `save` wrote."""
        import xarray

        try:
            with xarray.open_dataset(path, engine="netcdf4") as file:
                data = file.load()
            provenance, attrs = json.loads(data.attrs["provenance"]), data.attrs
            arrays: Any = {name: torch.from_numpy(data[name].values) for name in data.data_vars}
            linear, noisy = None, None
            if "linearisation_position" in attrs:
                at = int(attrs["linearisation_position"])
                reference = attrs.get("linearisation_reference_layer")
                linear = Linearisation(
                    **{name: arrays.get(name) for name in _LINEAR},
                    reference_layer=None if reference is None else int(reference),
                    position=at,
                    provenance=provenance | {"position": at},
                )
            if "perturbation_seed" in attrs:
                at, seed = int(attrs["perturbation_position"]), int(attrs["perturbation_seed"])
                scales = tuple(data["scale"].values.tolist())
                noisy = Perturbation(
                    arrays["perturbation_cosine_similarity"], scales, at, seed, provenance | {"position": at}
                )
            return cls(
                **{name: arrays.get(name) for name in _SHAPES},
                window=int(attrs["window"]),
                linearisation=linear,
                perturbation=noisy,
                provenance=provenance,
            )
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a file that `TrajectoryResult.save` wrote, or is damaged") from error

    def __repr__(self) -> str:
        parts = [name for name in ("linearisation", "perturbation") if getattr(self, name) is not None]
        means = ", ".join(f"{name} {float(getattr(self, name).nanmean()):.3f}" for name in list(_SHAPES)[:3])
        return (
            f"TrajectoryResult(model={self.provenance.get('model')!r}, {self.n_layers} layers, "
            f"{len(self.line_shape_score)} tokens, window={self.window}, means over tokens: {means}; "
            f"with {' and '.join(parts) or 'shapes alone'})"
        )


@checked
def measure_trajectory(
    trace: Trace,
    *,
    position: int = -1,
    window: Window | None = None,
    linear: bool = True,
    noise: bool = True,
    progress: Progress | None = None,
) -> TrajectoryResult:
    """Every measure of a prompt's trajectories: shapes of all tokens; linear predictions and noise of one.

    Args:
        trace: a traced prompt.
        position: the token that is linearised and perturbed; the last by default.
        window: steps of the windowed line-shape score, odd; 11 as in the paper, or the most that the model has.
        linear: whether to make the `linearisation`, with its closed form.
        noise: whether to make the `perturbation`, with its default scales.
        progress: wraps the loops of both; `None`: a bar in a terminal or notebook, `False`: none.

    Raises:
        ValueError: a position out of range, a window that is even, below 1 or above the number of layers.

    Warns: where the model has no logits, so that there is no entropy; where a measure is undefined (NaN).

    Cost: `n_layers + 1` unembeddings of the prompt; with `linear` a Jacobian and its singular values per layer; with
    `noise` 48 forward passes.

    Example:
        >>> measure_trajectory(trace, linear=False, noise=False)
        TrajectoryResult(model='local/llama', 2 layers, 8 tokens, window=1, means over tokens: ...
    """
    t = trace.position_index(position)
    x, n = trace.residual, trace.n_layers
    if window is None:
        window = min(_PAPER_WINDOW, n - 1 + n % 2)
    windowed = shapes.line_shape_score(x, window)
    try:
        entropy = entropy_by_depth(trace)
    except ValueError as error:
        warn_caller(f"no logit-lens entropy: {error}")
        entropy = None
    return TrajectoryResult(
        line_shape_score=shapes.line_shape_score(x),
        expodistance=shapes.expodistance(x),
        equidistance=shapes.equidistance(x),
        norm=shapes.norms(x),
        step_length=shapes.step_lengths(x),
        line_shape_score_windowed=windowed,
        line_shape_score_by_depth=shapes.line_shape_score_by_depth(x),
        logit_lens_entropy=entropy,
        window=window,
        linearisation=linearisation(trace, t, progress=progress) if linear else None,
        perturbation=perturbation(trace, position=t, progress=progress) if noise else None,
        provenance=trace.provenance,
    )
