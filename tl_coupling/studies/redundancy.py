"""What a model loses without a block, its order, its own directions, or its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import Count, Seed, checked, warn_caller
from tl_coupling.blocks import BlockFunction, Trace, differ_in, mean_weights, trace
from tl_coupling.comparisons import CouplingMap, decomposed_layers, depth_maps
from tl_coupling.jacobians import JacobianOptions
from tl_coupling.measures import Orientation, random_subspace_null
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompts, as_prompts, naming_prompt
from tl_coupling.results import DifferentPrompts
from tl_coupling.spectra import eigh
from tl_coupling.statistics import (
    LEVEL,
    is_constant,
    percentile_interval,
    rank_correlation,
    rank_correlation_of_rows,
)
from tl_coupling.studies.surveys import Settings, loss
from tl_coupling.trajectories import direction_cosine

__all__ = ["layer_redundancy", "redundancy_correlations"]

# Those whose cost coupling and block influence may predict.
CHANGES = ("dropped", "swapped", "merged")
_BLOCKS = ("all", "inner")
# The dimensions of a variable of a dataset.
Dims = str | tuple[str, ...]


@checked
def layer_redundancy(
    model: nn.Module,
    prompts: Prompts,
    *,
    k: Sequence[int] = (10, 30, 50),
    position: int = -1,
    orientation: Orientation = "ujv",
    prepend_bos: bool | None = None,
    progress: Progress | None = None,
) -> xarray.Dataset:
    """Measure what changes to blocks cost, beside how the blocks are coupled.

    Blocks are changed one or two at a time:

    - dropped `l`: `X^{l+1} = X^l`, the skip connection alone;
    - swapped `(l, l+1)`: block `l+1` first, then block `l`;
    - merged `(l, l+1)`: block `l` in place of both, each of its parameters the mean of
      the two blocks' (heads, neurons and experts are averaged by index). The stream
      also loses one step, so compare with the better of the two drops;
    - projected `l`: `X^{l+1} = X^l + f^l(X^l) P`, with P the projection onto k
      directions that all blocks share, see `shared_directions`, at the measured token.
      Of random ones k of d_model would be left: little more than a drop;
    - exited after `l`: the final norm and the unembedding read `X^{l+1}`, no later
      block runs.

    Later blocks run on the changed stream, with the arguments that the model gave them.
    The model is left unchanged.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, token ids (a list or a tensor each) or `Prompt` objects, of at
            least two tokens.
        k, position, orientation, prepend_bos: as in `Settings`. Losses are over all
            tokens, whatever the position.
        progress: wraps the loop over prompts; `None`: a bar in a terminal or notebook,
            `False`: none.

    Returns:
        a Dataset with dims `prompt`, `k`, `layer`, and `pair`, whose coordinate is the
        first layer of the pair:

        - `loss`, `[prompt]`; `loss_dropped` and `loss_exited`, `[prompt layer]`;
          `loss_swapped` and `loss_merged`, `[prompt pair]`; `loss_projected`, `[prompt
          k layer]`: mean negative log-likelihood per token, in nats. Blocks of
          different kinds (windowed and full attention, dense and mixture of experts)
          cannot be merged: NaN, a warning, and the reason in the attribute
          `not_merged`;
        - `block_influence`, `[prompt layer]`: `1 − mean_t cos(X^l_t, X^{l+1}_t)` over
          the tokens t (Men et al. 2024);
        - `coupling_of_pair`, `[prompt k pair]`: mean of the pair's two couplings,
          either block giving the singular vectors; `coupling_with_others`, `[prompt k
          layer]`: mean over all other layers, both ways;
        - `null_coupling`, `[k]`: what random subspaces would give; `n_pos`, `[prompt]`:
          number of tokens.

    Raises:
        ValueError: a model of one block, no prompts, one twice, a prompt of one token, k
            out of range; it names the prompt.

    Cost: for each prompt a depth coupling, whose Jacobians and SVDs give the shared
    directions as well, `(3 + n_k) L² / 2` block evaluations and `(4 + n_k) L`
    unembeddings; memory for `(3 + n_k) L` residual streams and one more block. Half
    precision is upcast block by block, but not in the unembedding: small differences in
    loss are lost in the rounding of the logits.

    Example:
        >>> data = tlc.redundancy.layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,))
        >>> (data.loss_dropped - data.loss).sizes
        Frozen({'prompt': 2, 'layer': 2})

    Source: Men et al. 2024 (ShortGPT), eq. 1, for block influence. Aubry et al. 2025,
    table 2, say that coupling explains why models can be merged, pruned, projected,
    permuted and left early, and measure none of it; what is projected onto is our
    reading. `redundancy_correlations` tests the first, the second and the fourth.
    """
    named_prompts = as_prompts(prompts)
    settings = Settings(
        k=tuple(k), position=position, orientation=orientation, prepend_bos=prepend_bos
    )
    measured: list[xarray.Dataset] = []
    not_merged: dict[int, str] = {}
    # Two texts may be one prompt to the model.
    different = DifferentPrompts("prompts")
    for prompt in with_progress(named_prompts, progress, "redundancy"):
        with naming_prompt(prompt):
            traced = trace(model, prompt, prepend_bos=prepend_bos)
            different.add_traced(traced, prompt.id)
            prompt_data, reasons = _measure_prompt(traced, settings)
        measured.append(prompt_data)
        not_merged |= reasons
    data = xarray.concat(measured, "prompt", combine_attrs="drop_conflicts")
    if not_merged:
        _warn_of_not_merged(not_merged, data.sizes["pair"])
    data.attrs = {
        "model": str(data.attrs["model"]),
        "orientation": orientation,
        "position": position,
        "not_merged": json.dumps(not_merged),
        "provenance": json.dumps(data.attrs),
    }
    nulls = [float(random_subspace_null(n_vectors)) for n_vectors in settings.k]
    tasks = [prompt.task or "" for prompt in named_prompts]
    return data.assign(null_coupling=("k", nulls)).assign_coords(
        prompt=[prompt.id for prompt in named_prompts], task=("prompt", tasks)
    )


def _warn_of_not_merged(reasons: dict[int, str], n_pairs: int) -> None:
    """Warn of pairs that cannot be merged; `reasons` are by their first layer."""
    pair, reason = next(iter(reasons.items()))
    warn_caller(
        f"{len(reasons)} of {n_pairs} pairs cannot be merged, their loss is NaN; "
        f"layers {pair} and {pair + 1} differ in {reason}"
    )


@checked
def redundancy_correlations(
    data: xarray.Dataset, *, n_resamples: Count = 1000, seed: Seed = 0
) -> xarray.Dataset:
    """Correlate the change in loss with coupling and with block influence.

    This is Spearman's ρ over layers, or over pairs of them, of means over prompts:
    drops are correlated with `coupling_with_others` and `block_influence`, swaps and
    merges with `coupling_of_pair` and the mean influence of the two blocks. If coupled
    blocks are redundant, ρ with coupling is negative; if influence predicts the cost, ρ
    with it is positive.

    Intervals are 95 % percentiles of a bootstrap over prompts, all measures together.
    Layers are not resampled: they are the whole model. So an interval says how far ρ
    might move on other prompts, not what another model would show.

    Args:
        data: what `layer_redundancy` returns.
        n_resamples: how many times prompts are drawn.
        seed: of the draws.

    Returns:
        a Dataset with dims `change` ("dropped", "swapped", "merged"), `blocks` ("all",
        "inner": without the first and the last block, which often dominate), `k`, and
        `bound` ("lower", "upper"):

        - `coupling`, `[change blocks k]`, and `block_influence`, `[change blocks]`: ρ;
        - `coupling_p`, `block_influence_p`: two-sided p of ρ, were the layers in any
          order: exact up to nine of them, then by a t approximation;
        - `advantage`, `[change blocks k]`: `|ρ|` of coupling minus `|ρ|` of block
          influence;
        - `coupling_interval`, `block_influence_interval`, `advantage_interval`: the
          same with `bound` last;
        - `n`, `[change blocks]`: how many layers or pairs were ranked. Below three, or
          where all are equal, ρ is NaN, and with one prompt the intervals are. Pairs
          that could not be merged are left out.

    Raises:
        ValueError: `data` is not what `layer_redundancy` returns, `n_resamples` is
            below 1.

    Example:
        >>> data = tlc.redundancy.layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,))
        >>> rho = tlc.redundancy.redundancy_correlations(data)
        >>> int(rho.n.sel(change="dropped", blocks="all"))
        2
    """
    check_redundancy(data)
    n_prompts = data.sizes["prompt"]
    weights = _weights_of_prompts(n_prompts, n_resamples, seed)
    n_ranked = np.zeros((len(CHANGES), len(_BLOCKS)), int)
    # `[change blocks predictor sample]`: a predictor for each k, then block influence;
    # the first sample is the data themselves.
    rho = np.zeros((*n_ranked.shape, data.sizes["k"] + 1, len(weights)))
    p = np.zeros(rho.shape[:-1])
    for i, j in product(range(len(CHANGES)), range(len(_BLOCKS))):
        predictors = change_and_predictors(data, CHANGES[i])
        n_ranked[i, j], rho[i, j], p[i, j] = _rank_correlations(
            *predictors, weights, inner=_BLOCKS[j] == "inner"
        )
    coupling_rho = rho[:, :, :-1]
    influence_rho = rho[:, :, -1]
    advantage = np.abs(coupling_rho) - np.abs(influence_rho)[:, :, None]
    variables = {
        "n": (("change", "blocks"), n_ranked),
        **_interval_variables("coupling", coupling_rho, n_prompts),
        **_interval_variables("block_influence", influence_rho, n_prompts),
        **_interval_variables("advantage", advantage, n_prompts),
        "coupling_p": (("change", "blocks", "k"), p[:, :, :-1]),
        "block_influence_p": (("change", "blocks"), p[:, :, -1]),
    }
    coordinates = {
        "change": list(CHANGES),
        "blocks": list(_BLOCKS),
        "k": data["k"].values,
        "bound": ["lower", "upper"],
    }
    attributes = {
        "level": LEVEL,
        "n_resamples": n_resamples,
        "seed": seed,
        "n_prompts": n_prompts,
        "provenance": data.attrs.get("provenance", "{}"),
    }
    return xarray.Dataset(variables, coordinates, attributes)


def _weights_of_prompts(n_prompts: int, n_resamples: int, seed: int) -> np.ndarray:
    """Return how much each prompt counts in each sample, `[sample prompt]`.

    The first sample is the data as they are; the others are the bootstrap.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, n_prompts, (n_resamples, n_prompts))
    samples = (np.arange(n_prompts), *drawn)
    counts = [np.bincount(sample, minlength=n_prompts) for sample in samples]
    return np.stack(counts) / n_prompts


def _rank_correlations(
    loss_change: np.ndarray,
    coupling: np.ndarray,
    influence: np.ndarray,
    weights: np.ndarray,
    *,
    inner: bool,
) -> tuple[int, np.ndarray, list[float]]:
    """Correlate the change in loss with each predictor, in every sample of prompts.

    Args:
        loss_change: `[prompt n]`, of n layers or pairs.
        coupling: `[k prompt n]`.
        influence: `[prompt n]`.
        weights: how much each prompt counts, `[sample prompt]`.
        inner: whether to leave out the first and the last layer or pair.

    Returns:
        how many layers or pairs were ranked, ρ, `[predictor sample]`: with coupling at
        each k, then with influence; and the p of the first sample, by predictor.
    """
    # Pairs that could not be merged have a loss of NaN.
    is_ranked = np.isfinite(loss_change).all(0)
    if inner:
        is_ranked[[0, -1]] = False
    # `[sample n]`: of every sample the means over its prompts are ranked.
    means = weights @ loss_change[:, is_ranked]
    predictor_means = [
        weights @ predictor[:, is_ranked] for predictor in (*coupling, influence)
    ]
    rho = [rank_correlation_of_rows(x, means) for x in predictor_means]
    p = [_p_of_rho(x[0], means[0]) for x in predictor_means]
    return int(is_ranked.sum()), np.stack(rho), p


def _p_of_rho(x: np.ndarray, y: np.ndarray) -> float:
    """Return the p of Spearman's ρ; NaN where ρ is not defined."""
    # Two layers always rank alike or in reverse, and what is constant has no order.
    if len(x) < 3 or is_constant(x) or is_constant(y):
        return float("nan")
    return rank_correlation(x, y).p


def _interval_variables(
    name: str, samples: np.ndarray, n_prompts: int
) -> dict[str, tuple[Dims, np.ndarray]]:
    """Return the variables of a correlation: as the data have it, and its interval.

    Args:
        name: of the variable.
        samples: `[change blocks (k) sample]`; the first sample is the data.
        n_prompts: of one, there is no interval.
    """
    dims = ("change", "blocks", "k")[: samples.ndim - 1]
    # Without the first sample, which is the data.
    resampled = rearrange(samples[..., 1:], "... sample -> sample ...")
    bounds = rearrange(percentile_interval(resampled), "bound ... -> ... bound")
    if n_prompts == 1:
        bounds = np.full_like(bounds, np.nan)
    return {
        name: (dims, samples[..., 0]),
        f"{name}_interval": ((*dims, "bound"), bounds),
    }


def change_and_predictors(
    data: xarray.Dataset, change: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a change costs at each layer or pair, and what may predict it.

    Returns:
        the change in loss, `[prompt n]`, coupling, `[k prompt n]`, and block influence,
        `[prompt n]`.
    """
    dim = _dim_of(change)
    coupling = data["coupling_with_others" if dim == "layer" else "coupling_of_pair"]
    loss_change = data[f"loss_{change}"] - data["loss"]
    influence = data["block_influence"].transpose("prompt", "layer").values
    if dim == "pair":
        # A pair's influence is the mean of its two blocks'.
        influence = (influence[:, 1:] + influence[:, :-1]) / 2
    return (
        loss_change.transpose("prompt", dim).values,
        coupling.transpose("k", "prompt", dim).values,
        influence,
    )


def _dim_of(change: str) -> str:
    """Return what a change is made to: a layer, or a pair of neighbours."""
    return "layer" if change == "dropped" else "pair"


def check_redundancy(data: object) -> None:
    """Raise ValueError unless `data` is what `layer_redundancy` returns, and finite."""
    variables = {"loss", "block_influence", "coupling_of_pair", "coupling_with_others"}
    missing = variables - set(getattr(data, "data_vars", ()))
    if missing:
        raise ValueError(
            "wanted what `layer_redundancy` returns, "
            f"got data without {', '.join(sorted(missing))}"
        )
    # Values that were not measured are NaN, and left out.
    measured: Any = data
    infinite = [
        name
        for name in measured.data_vars
        if np.isinf(measured[name].astype(float)).any()
    ]
    if infinite:
        raise ValueError(
            f"the data hold infinite numbers, in {', '.join(infinite)}: measure again"
        )


def _measure_prompt(
    traced: Trace, settings: Settings
) -> tuple[xarray.Dataset, dict[int, str]]:
    """Measure one prompt.

    Returns:
        its dataset, with its provenance; and why pairs were not merged, by their first
        layer.
    """
    n_layers = traced.n_layers
    if n_layers < 2:
        raise ValueError(
            f"wanted a model of at least 2 blocks, to swap and to merge, got {n_layers}"
        )
    if traced.n_pos < 2:
        raise ValueError(
            "wanted at least 2 tokens, to predict one from the other, "
            f"got {traced.n_pos}"
        )
    # Read twice: for the coupling of the blocks, and for the directions they share.
    (decomposed,) = decomposed_layers(
        [traced],
        max(settings.k),
        settings.position,
        options=JacobianOptions(progress=False),
    )
    orientation = settings.orientations[0]
    depth = depth_maps(decomposed, (orientation,))[orientation]
    directions = {
        k: shared_directions(decomposed.leading.U[..., :k]).to(traced.residual)
        for k in settings.k
    }
    changed = _changed_streams(traced, directions)
    coordinates = {
        "k": list(settings.k),
        "layer": range(n_layers),
        "pair": range(n_layers - 1),
    }
    variables = {
        **_losses(traced, changed, settings.k),
        "block_influence": ("layer", _block_influence(changed.stream)),
        **_couplings(depth, settings.k),
        "n_pos": ((), traced.n_pos),
    }
    data = xarray.Dataset(variables, coordinates, traced.provenance)
    return data, changed.not_merged


def _couplings(
    depth: CouplingMap, ks: Sequence[int]
) -> dict[str, tuple[Dims, np.ndarray]]:
    """Return the coupling of neighbours, and that of each layer with all others."""
    coupling = np.stack([depth.coupling(k).cpu().numpy() for k in ks])
    # Either block of a pair gives the singular vectors once.
    both_ways = (coupling + rearrange(coupling, "k row col -> k col row")) / 2
    own = np.diagonal(both_ways, axis1=1, axis2=2)
    # A layer's coupling with itself is taken out of the sum.
    n_others = len(depth.row_layers) - 1
    return {
        "coupling_of_pair": (
            ("k", "pair"),
            np.diagonal(both_ways, offset=1, axis1=1, axis2=2),
        ),
        "coupling_with_others": (
            ("k", "layer"),
            (both_ways.sum(2) - own) / n_others,
        ),
    }


def _block_influence(stream: Float[Tensor, "depth n_pos d_model"]) -> np.ndarray:
    """Return `1 − mean_t cos(X^l_t, X^{l+1}_t)` of every layer."""
    # `[layer token]`.
    cosines = direction_cosine(stream[:-1], stream[1:])
    return (1 - cosines.mean(1)).cpu().numpy()


@checked
def shared_directions(
    U: Float[Tensor, "n_layers d_model k"],
) -> Float[Tensor, "d_model k"]:
    """Return the k directions closest to those that all blocks write into.

    They are leading eigenvectors of `Σ_l U_l U_lᵀ`, where U holds the top k left
    singular vectors of every block's Jacobian. All blocks count the same, and so do the
    directions of each. Returns orthonormal columns, the most shared first.

    Cost: one eigendecomposition.

    Example:
        >>> axes = torch.eye(3)
        >>> U = torch.stack([axes[:, [0, 1]], axes[:, [0, 2]], axes[:, [0, 2]]])
        >>> shared_directions(U).abs()
        tensor([[1., 0.],
                [0., 0.],
                [0., 1.]])
    """
    k = U.shape[-1]
    all_directions = rearrange(U.double(), "layer d k -> d (layer k)")
    # Eigenvalues ascend.
    _, eigenvectors = eigh(all_directions @ all_directions.mT)
    return eigenvectors[:, -k:].flip(1).to(U)


class _Change(NamedTuple):
    """Name a change: what is done, to which layer or to the pair that begins there."""

    kind: str
    layer: int
    n_directions: int | None = None


@dataclass(frozen=True, eq=False)
class _ChangedStreams:
    """Hold what leaves the last block after each change.

    Attributes:
        stream: the unchanged stream at every depth.
        last: what leaves the last block, `[n_pos d_model]`, by change.
        not_merged: why pairs could not be merged, by their first layer.
    """

    stream: Float[Tensor, "depth n_pos d_model"]
    last: dict[_Change, Tensor]
    not_merged: dict[int, str]


def _changed_streams(
    traced: Trace, directions: Mapping[int, Float[Tensor, "d_model k"]]
) -> _ChangedStreams:
    """Run the blocks with each change, one change at a time.

    The unchanged stream is computed anew, too: that of a half-precision model is
    rounded after every block, and the absence of that rounding must not count as an
    effect of the change.
    """
    stream = [traced.residual[0]]
    last: dict[_Change, Tensor] = {}
    not_merged: dict[int, str] = {}
    # While one of them is evaluated, its attributes are those of its call.
    differences = [_difference(*pair) for pair in pairwise(traced.blocks)]
    for layer, block in enumerate(traced.blocks):
        # All streams go through a block together, so that a half-precision block is
        # upcast once.
        with block.evaluation():
            last = {change: block.call(X) for change, X in last.items()}
            # After the line above: this change begins at this block, and goes through
            # the later ones.
            last[_Change("dropped", layer)] = stream[layer]
            # A pair is known once its second block is reached.
            if layer > 0:
                pair = layer - 1
                previous = traced.blocks[pair]
                last[_Change("swapped", pair)] = _swapped(previous, block, stream[pair])
                reason = differences[pair]
                if reason is None:
                    last[_Change("merged", pair)] = _merged(
                        previous, block, stream[pair]
                    )
                else:
                    not_merged[pair] = reason
            stream.append(block.call(stream[layer]))
            # Q is orthonormal: Q Qᵀ projects the step onto its k columns.
            step = stream[layer + 1] - stream[layer]
            for k, Q in directions.items():
                last[_Change("projected", layer, k)] = stream[layer] + step @ Q @ Q.mT
    return _ChangedStreams(torch.stack(stream), last, not_merged)


def _swapped(
    first: BlockFunction, second: BlockFunction, X: Float[Tensor, "n_pos d_model"]
) -> Float[Tensor, "n_pos d_model"]:
    """Return what two blocks make of the stream in the other order."""
    with first.evaluation():
        return first.call(second.call(X))


def _merged(
    first: BlockFunction, second: BlockFunction, X: Float[Tensor, "n_pos d_model"]
) -> Float[Tensor, "n_pos d_model"]:
    """Return what the first block makes of the stream with the mean of both weights."""
    weights = mean_weights(first.call.module, second.call.module)
    with first.evaluation(), weights:
        return first.call(X)


def _difference(first: BlockFunction, second: BlockFunction) -> str | None:
    """Say why two blocks cannot be merged; `None` if they can."""
    return differ_in(first.call, second.call, (first.layer, second.layer))


def _losses(
    traced: Trace, changed: _ChangedStreams, ks: Sequence[int]
) -> dict[str, tuple[Dims, object]]:
    """Return the loss of the prompt as it is and after each change."""
    layers = range(traced.n_layers)
    change_losses: dict[str, tuple[Dims, object]] = {}
    for kind in CHANGES:
        dim = _dim_of(kind)
        changed_layers = layers if dim == "layer" else layers[:-1]
        change_losses[f"loss_{kind}"] = (
            dim,
            [
                _loss_of(traced, changed.last.get(_Change(kind, layer)))
                for layer in changed_layers
            ],
        )
    projected = [
        [
            _loss_of(traced, changed.last[_Change("projected", layer, k)])
            for layer in layers
        ]
        for k in ks
    ]
    # Depth 0 is what enters the first block.
    exited = [_loss_of(traced, X) for X in changed.stream[1:]]
    return {
        "loss": ((), _loss_of(traced, changed.stream[-1])),
        **change_losses,
        "loss_projected": (("k", "layer"), projected),
        "loss_exited": ("layer", exited),
    }


def _loss_of(traced: Trace, X: Float[Tensor, "n_pos d_model"] | None) -> float:
    """Return the loss if X left the last block; NaN if the change was not made."""
    if X is None:
        return float("nan")
    # `loss` reads the last entry of the stream.
    return loss(replace(traced, residual=X[None]))
