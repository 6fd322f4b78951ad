"""All measures of one prompt's trajectories in one object, and its file."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by, warn_caller
from tl_coupling.blocks import Trace
from tl_coupling.models import JacobianLens, usable_lens
from tl_coupling.progress import Progress
from tl_coupling.results import Saved, ShortTable, plural, tidy_table
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.trajectories import shapes
from tl_coupling.trajectories.lenses import check_lens
from tl_coupling.trajectories.predictions import (
    Linearisation,
    Perturbation,
    linearisation,
    perturbation,
)

if TYPE_CHECKING:
    import pandas
    import xarray

# Logits that are in memory at a time: 64 MiB in float32.
_LOGITS_IN_MEMORY = 2**24
# Measures of every token, as `TrajectoryResult` names them, and in words.
SHAPES = {
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "equidistance": "equidistance",
}
# All others are numbers without a unit.
_UNITS = {
    "norm": "residual stream",
    "step_length": "residual stream",
    "trajectory": "residual stream",
    "one_step": "residual stream",
    "product": "residual stream",
    "closed_form": "residual stream",
    "logit_lens_entropy": "nat",
}
_PARTS = ("linearisation", "perturbation")


@made_by("trajectories.measure_trajectory(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class TrajectoryResult(Saved):
    """Hold the shapes of all tokens' trajectories, and predictions of one.

    `measure_trajectory` makes it. Arrays `[… n_pos]` hold, for every token, what the
    function of the same name gives; `norm` and `step_length` are in units of the
    residual stream.

    Attributes:
        line_shape_score_windowed: of every `window` consecutive steps; entry `i` is
            centred on layer `i + window // 2`.
        logit_lens_entropy: in nats; `None` for a model without logits.
        linearisation: how well linear blocks predict one token; `None` if left out.
        perturbation: what becomes of noise at one token; `None` if left out.
        provenance: how the trace was made; JSON-able.

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
    DIMS: ClassVar = {
        **dict.fromkeys(SHAPES, "token"),
        **dict.fromkeys(("norm", "logit_lens_entropy"), "depth token"),
        **dict.fromkeys(("step_length", "line_shape_score_by_depth"), "layer token"),
        "line_shape_score_windowed": "middle_layer token",
    }

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.step_length)

    def to_dataset(self) -> "xarray.Dataset":
        """Return the result as an `xarray.Dataset`, with named axes and units.

        Everything that is not an array is in the attributes, as JSON. Made for the file
        alone are `linearisation_relative_error` and `linearisation_cosine_similarity`,
        `[prediction layer]`, and slope, intercept and R² of the least-squares line
        through `1/σ_i` against layer.
        """
        dataset = super().to_dataset()
        if self.linearisation is not None:
            dataset = dataset.assign(_accuracies(self.linearisation))
            dataset = dataset.assign(_inverse_fits(self.linearisation))
        for name, values in dataset.data_vars.items():
            values.attrs["units"] = _UNITS.get(str(name), "1")
        return dataset.assign_coords(self._coordinates())

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each depth and token.

        `step_length` is that of the step from this depth to the next, NaN at the last;
        numbers of a token's whole path are the same in all its rows.

        Example:
            >>> result = tlc.trajectories.measure_trajectory(trace, noise=False)
            >>> table = result.to_dataframe()
            >>> list(table)[:4], len(table)
            (['depth', 'token', 'norm', 'step_length'], 24)
        """
        no_step = torch.full_like(self.step_length[:1], torch.nan)
        step_length = torch.cat([self.step_length, no_step])
        columns = {
            "norm": ("depth token", self.norm),
            "step_length": ("depth token", step_length),
        }
        if self.logit_lens_entropy is not None:
            columns["logit_lens_entropy"] = ("depth token", self.logit_lens_entropy)
        columns |= {name: ("token", getattr(self, name)) for name in SHAPES}
        table = tidy_table(columns, {}, self.provenance)
        texts = self._coordinates()["token_text"][1]
        return table.assign(token_text=[texts[token] for token in table["token"]])

    def table(self) -> ShortTable:
        """Return the means over tokens, a row for each measure."""
        rows = [
            [words, _mean_cell(getattr(self, name))] for name, words in SHAPES.items()
        ]
        n_pos = len(self.line_shape_score)
        score = math.sqrt(self.n_layers)
        title = f"{self.provenance['model']}: trajectories"
        caption = (
            f"mean over {plural(n_pos, 'token')}, attention sinks included\n"
            "score of a straight line: 1\n"
            f"of random steps: √{self.n_layers} = {score:.2f}"
        )
        return ShortTable.of(title, ["measure"], ["mean"], rows, caption)

    def _coordinates(self) -> dict[str, Any]:
        """Return what stands along each axis of the dataset."""
        n_windows, n_pos = self.line_shape_score_windowed.shape
        texts = self.provenance.get("str_tokens") or [""] * n_pos
        coordinates: dict[str, Any] = {
            "depth": range(self.n_layers + 1),
            "layer": range(self.n_layers),
            # The window is odd, and has a middle step.
            "middle_layer": [i + self.window // 2 for i in range(n_windows)],
            "token": range(n_pos),
            "token_text": ("token", list(texts)),
        }
        if self.linearisation is not None:
            coordinates["prediction"] = self.linearisation.predictions
        return coordinates

    def _summary(self) -> str:
        means = ", ".join(_mean_in_words(name, getattr(self, name)) for name in SHAPES)
        parts = [name for name in _PARTS if getattr(self, name) is not None]
        contents = " and ".join(parts) or "shapes alone"
        return (
            f"{self.n_layers} layers, {len(self.line_shape_score)} tokens, "
            f"window={self.window}, means over tokens: {means}; with {contents}"
        )


def _accuracies(linear: Linearisation) -> dict[str, tuple[list[str], np.ndarray]]:
    """Return how good each prediction is at each layer."""
    names = linear.predictions
    errors = [linear.relative_error(name) for name in names]
    cosines = [linear.cosine_similarity(name) for name in names]
    axes = ["prediction", "layer"]
    return {
        "linearisation_relative_error": (axes, torch.stack(errors).cpu().numpy()),
        "linearisation_cosine_similarity": (axes, torch.stack(cosines).cpu().numpy()),
    }


def _inverse_fits(linear: Linearisation) -> dict[str, tuple[list[str], np.ndarray]]:
    """Return the lines through `1/σ_i` against layer, which take two layers."""
    if linear.singular_values is None or len(linear.singular_values) < 2:
        return {}
    # Made for the file: who reads it without this package has the lines too.
    fit = inverse_singular_value_fit(linear.singular_values)
    return {
        f"inverse_singular_value_{name}": (["i"], values.cpu().numpy())
        for name, values in vars(fit).items()
    }


def _mean_cell(values: Float[Tensor, " n_pos"]) -> str:
    """Return the mean over tokens, and for how many it is undefined."""
    # A token that does not move at a layer has no direction there, and no score.
    n_undefined = int(values.isnan().sum())
    if n_undefined == len(values):
        return "undefined"
    mean = f"{float(values.nanmean()):.3f}"
    return f"{mean} ({n_undefined} undefined)" if n_undefined else mean


def _mean_in_words(name: str, values: Float[Tensor, "..."]) -> str:
    """Return the mean over tokens, and of how many it is not known."""
    n_undefined = int(values.isnan().sum())
    undefined = f" (NaN of {n_undefined})" if n_undefined else ""
    return f"{name} {float(values.nanmean()):.3f}{undefined}"


@checked
def entropy_by_depth(
    trace: Trace, lens: JacobianLens | None = None
) -> Float[Tensor, "n_layers_plus_1 n_pos"]:
    """Return the entropy of the model's logit lens in nats, by depth and token.

    This is `logit_lens_entropy` with the model's own logits. A last depth that is
    normalised already (`final_norm=True`) is not normalised again.

    Args:
        trace: a traced prompt.
        lens: a `JacobianLens` of TransformerLens, fitted, loaded, or made by
            `product_lens`: each depth is mapped by its matrix before the logits are
            computed. Depth `l + 1`, what leaves block l, has matrix l, and the last
            depth needs none. NaN where the lens has no matrix: at depth 0, which no
            block has written, and for layers to which it was not fitted.

    Raises:
        ValueError: the model has no unembedding, or is not the lens's.
        TypeError: with a lens, the model is no `TransformerBridge`.

    Cost: `n_layers + 1` unembeddings of the prompt, of which some rows at a time are in
    memory.

    Example:
        >>> tlc.trajectories.entropy_by_depth(trace).shape
        torch.Size([3, 8])
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> tlc.trajectories.entropy_by_depth(trace, lens).isfinite().all(1)
        tensor([False,  True,  True])
    """
    x = trace.residual
    depths = list(range(trace.n_layers))
    inner_depths = x[:-1]
    if lens is not None:
        lens = usable_lens(lens)
        check_lens(lens, trace)
        # Depth l + 1 is what leaves block l.
        depths = [depth for depth in depths if depth - 1 in lens.jacobians]
        inner_depths = torch.stack(
            [lens.transport(x[depth], depth - 1) for depth in depths]
        )
    # The stream behind the last block needs no lens, and may be normalised already.
    last_logits = trace.logits(x[-1], trace.final_norm)
    rows_at_once = max(1, _LOGITS_IN_MEMORY // last_logits.shape[-1])
    entropies = [
        shapes.entropy_of(trace.logits(rows))
        # Depths and tokens in one axis.
        for rows in inner_depths.flatten(0, 1).split(rows_at_once)
    ]
    entropies.append(shapes.entropy_of(last_logits))
    read_depths = [*depths, trace.n_layers]
    read_entropies = torch.cat(entropies).reshape(len(read_depths), trace.n_pos)
    known = shapes.entropies_by_depth(read_entropies, x[read_depths])
    # Without a lens every depth can be read.
    if len(known) == len(x):
        return known
    result = known.new_full(x.shape[:2], torch.nan)
    result[read_depths] = known
    return result


def _entropy_where_known(trace: Trace) -> Float[Tensor, "n_layers_plus_1 n_pos"] | None:
    """Return `entropy_by_depth`; `None`, with a warning, for a model without logits."""
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
    """Measure a prompt's trajectories: the shapes of all, linear predictions of one.

    Args:
        trace: a traced prompt.
        position: the token that is linearised and perturbed; the last by default.
        window: steps of the windowed line-shape score, odd; 11 as in the paper, or the
            most that the model has, by default.
        linear: whether to make the `linearisation`, with its closed form.
        noise: whether to make the `perturbation`, at its default scales.
        relative_noise: whether noise is relative to the length of the embedding.
        progress: wraps the loops of both; `None`: a bar in a terminal or notebook,
            `False`: none.

    Raises:
        ValueError: a position out of range, or a window that is even, below 1 or above
            the number of layers.

    Warns where the model has no logits, so that there is no entropy, and where a
    measure is undefined (NaN).

    Cost: `n_layers + 1` unembeddings of the prompt; with `linear` a Jacobian and its
    singular values per layer; with `noise` 48 forward passes.

    Example:
        >>> result = tlc.trajectories.measure_trajectory(trace, linear=False, noise=False)
        >>> result.line_shape_score.shape
        torch.Size([8])
    """
    t = trace.position_index(position)
    x = trace.residual
    if window is None:
        # The largest odd number of at most so many steps as there are blocks.
        longest_odd = trace.n_layers - 1 + trace.n_layers % 2
        window = min(11, longest_odd)
    # First, since it refuses a window that is too long.
    windowed = shapes.line_shape_score(x, window)
    entropy = _entropy_where_known(trace)
    result = TrajectoryResult(
        line_shape_score=shapes.line_shape_score(x),
        expodistance=shapes.expodistance(x),
        equidistance=shapes.equidistance(x),
        norm=shapes.norms(x),
        step_length=shapes.step_lengths(x),
        line_shape_score_windowed=windowed,
        line_shape_score_by_depth=shapes.line_shape_score_by_depth(x),
        logit_lens_entropy=entropy,
        window=window,
        linearisation=None,
        perturbation=None,
        provenance=trace.provenance,
    )
    if linear:
        result = replace(
            result, linearisation=linearisation(trace, t, progress=progress)
        )
    if noise:
        noisy = perturbation(
            trace, position=t, relative=relative_noise, progress=progress
        )
        result = replace(result, perturbation=noisy)
    return result
