"""What coupling may be good for: what a model loses without a block, its order, its own
directions, or its end.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import Count, Seed, checked, warn_caller
from tl_coupling.blocks import differ_in, mean_weights
from tl_coupling.comparisons import depth_coupling
from tl_coupling.jacobians import block_jacobian
from tl_coupling.measures import Orientation, random_subspace_null
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompt
from tl_coupling.spectra import svd
from tl_coupling.statistics import LEVEL, percentile_interval, rank_correlation_of_rows
from tl_coupling.surveys import Settings, as_prompts, loss
from tl_coupling.traces import Trace, trace
from tl_coupling.trajectories import direction_cosine

__all__ = ["layer_redundancy", "redundancy_correlations"]

CHANGES = ("dropped", "swapped", "merged")
_BLOCKS = ("all", "inner")


@checked
def layer_redundancy(
    model: nn.Module,
    prompts: str | Prompt | Sequence[str | Prompt],
    *,
    k: Sequence[int] = (10, 30, 50),
    position: int = -1,
    orientation: Orientation = "ujv",
    prepend_bos: bool | None = None,
    progress: Progress | None = None,
) -> xarray.Dataset:
    """Loss without each block, with neighbours swapped or merged, projected, or cut
    short, beside the blocks' coupling.

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
        prompts: texts, or `Prompt` objects, of at least two tokens.
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
        ValueError: a model of one block, no prompts, a prompt of one token, k out of
            range; it names the prompt.

    Cost: for each prompt a depth coupling, its Jacobians and SVDs once more, `(3 + n_k)
    L² / 2` block evaluations and `(4 + n_k) L` unembeddings; memory for `(3 + n_k) L`
    residual streams and one more block. Half precision is upcast block by block, but
    not in the unembedding: small differences in loss are lost in the rounding of the
    logits.

    Example:
        >>> data = tlc.redundancy.layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,))
        >>> (data.loss_dropped - data.loss).sizes
        Frozen({'prompt': 2, 'layer': 2})

    Source: Men et al. 2024 (ShortGPT), eq. 1, for block influence. Aubry et al. 2025,
    table 2, say that coupling explains why models can be merged, pruned, projected,
    permuted and left early, and measure none of it; what is projected onto is our
    reading. `redundancy_correlations` tests the first, the second and the fourth.
    """
    named = as_prompts(prompts)
    settings = Settings(
        k=tuple(k), position=position, orientation=orientation, prepend_bos=prepend_bos
    )
    measured: list[xarray.Dataset] = []
    not_merged: dict[int, str] = {}
    for prompt in with_progress(named, progress, "redundancy"):
        try:
            data, reasons = _of_prompt(
                trace(model, prompt.prompt, prepend_bos=prepend_bos), settings
            )
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error
        measured.append(data)
        not_merged |= reasons
    data = xarray.concat(measured, "prompt", combine_attrs="drop_conflicts")
    if not_merged:
        pair, reason = next(iter(not_merged.items()))
        why = f"layers {pair} and {pair + 1} differ in {reason}"
        warn_caller(
            f"{len(not_merged)} of {data.sizes['pair']} pairs cannot be merged, their loss is NaN; {why}"
        )
    said = {
        "model": str(data.attrs["model"]),
        "orientation": orientation,
        "position": position,
    }
    data.attrs = said | {
        "not_merged": json.dumps(not_merged),
        "provenance": json.dumps(data.attrs),
    }
    data = data.assign(
        null_coupling=("k", [float(random_subspace_null(one)) for one in settings.k])
    )
    return data.assign_coords(
        prompt=[p.id for p in named], task=("prompt", [p.task or "" for p in named])
    )


@checked
def redundancy_correlations(
    data: xarray.Dataset, *, n_resamples: Count = 1000, seed: Seed = 0
) -> xarray.Dataset:
    """Rank correlation, over layers or pairs, of the change in loss with coupling and
    with block influence.

    Spearman's ρ of means over prompts of `layer_redundancy`'s `data`: of drops with
    `coupling_with_others` and `block_influence`, of swaps and merges with
    `coupling_of_pair` and the mean influence of the two blocks. If coupled blocks are
    redundant, ρ with coupling is negative; if influence predicts the cost, ρ with it is
    positive.

    Intervals are 95 % percentiles of a bootstrap over prompts, all measures together.
    Layers are not resampled: they are the whole model. So an interval says how far ρ
    might move on other prompts, not what another model would show.

    Returns:
        a Dataset with dims `change` ("dropped", "swapped", "merged"), `blocks` ("all",
        "inner": without the first and the last block, which often dominate), `k`, and
        `bound` ("lower", "upper"):

        - `coupling`, `[change blocks k]`, and `block_influence`, `[change blocks]`: ρ;
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
    drawn = np.random.default_rng(seed).integers(0, n_prompts, (n_resamples, n_prompts))
    # How often each prompt counts: row 0 is the data as they are, the others the
    # bootstrap.
    weights = (
        np.stack(
            [
                np.bincount(row, minlength=n_prompts)
                for row in (np.arange(n_prompts), *drawn)
            ]
        )
        / n_prompts
    )
    n, rho = [], []
    for change, blocks in product(CHANGES, _BLOCKS):
        loss_change, of_coupling, of_influence = change_and_predictors(data, change)
        kept = np.isfinite(loss_change).all(0)
        kept[[0, -1]] &= blocks == "all"
        n.append(kept.sum())
        means, *predictors = (
            weights @ one[:, kept] for one in (loss_change, *of_coupling, of_influence)
        )
        rho.append([rank_correlation_of_rows(one, means) for one in predictors])
    by_change = np.reshape(rho, (len(CHANGES), len(_BLOCKS), -1, len(weights)))
    coupling, influence = by_change[:, :, :-1], by_change[:, :, -1]
    advantage = np.abs(coupling) - np.abs(influence)[:, :, None]
    variables: dict[str, Any] = {
        "n": (("change", "blocks"), np.reshape(n, by_change.shape[:2]))
    }
    for name, values in (
        ("coupling", coupling),
        ("block_influence", influence),
        ("advantage", advantage),
    ):
        dims = ("change", "blocks", "k")[: values.ndim - 1]
        low_high = np.moveaxis(
            percentile_interval(np.moveaxis(values[..., 1:], -1, 0)), 0, -1
        )
        variables[name] = (dims, values[..., 0])
        variables[f"{name}_interval"] = (
            (*dims, "bound"),
            np.where(n_prompts > 1, low_high, np.nan),
        )
    coords = {
        "change": list(CHANGES),
        "blocks": list(_BLOCKS),
        "k": data["k"].values,
        "bound": ["lower", "upper"],
    }
    attrs = {
        "level": LEVEL,
        "n_resamples": n_resamples,
        "seed": seed,
        "n_prompts": n_prompts,
    }
    return xarray.Dataset(
        variables, coords, attrs | {"provenance": data.attrs.get("provenance", "{}")}
    )


def change_and_predictors(
    data: xarray.Dataset, change: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Change in loss, `[prompt n]`, coupling, `[k prompt n]`, and influence, `[prompt
    n]`, at each layer or pair.
    """
    dim, name = (
        ("layer", "coupling_with_others")
        if change == "dropped"
        else ("pair", "coupling_of_pair")
    )
    loss_change = (
        (data[f"loss_{change}"] - data["loss"]).transpose("prompt", dim).values
    )
    influence = data["block_influence"].transpose("prompt", "layer").values
    if dim == "pair":
        influence = (influence[:, 1:] + influence[:, :-1]) / 2
    return loss_change, data[name].transpose("k", "prompt", dim).values, influence


def check_redundancy(data: Any) -> None:
    """Raise unless `data` is what `layer_redundancy` returns."""
    wanted = {"loss", "block_influence", "coupling_of_pair", "coupling_with_others"}
    if missing := wanted - set(getattr(data, "data_vars", ())):
        raise ValueError(
            f"wanted what `layer_redundancy` returns, got data without {', '.join(sorted(missing))}"
        )


def _of_prompt(
    traced: Trace, settings: Settings
) -> tuple[xarray.Dataset, dict[int, str]]:
    """One prompt's dataset, with its provenance; and why pairs were not merged, by
    their first layer.
    """
    if (n_layers := traced.n_layers) < 2:
        raise ValueError(
            f"wanted a model of at least 2 blocks, to swap and to merge, got {n_layers}"
        )
    if traced.n_pos < 2:
        raise ValueError(
            f"wanted at least 2 tokens, to predict one from the other, got {traced.n_pos}"
        )
    result = depth_coupling(
        traced,
        max(settings.k),
        settings.position,
        settings.orientations[0],
        progress=False,
    )
    coupling = np.stack([result.coupling(k).cpu().numpy() for k in settings.k])
    coupling = (coupling + coupling.swapaxes(1, 2)) / 2
    t = settings.position
    Js = (
        block_jacobian(traced, layer, position=t, function="branches")
        for layer in range(n_layers)
    )
    U = torch.stack([svd(J, max(settings.k)).U for J in Js])
    directions = {
        k: shared_directions(U[..., :k]).to(traced.residual) for k in settings.k
    }
    stream, changed, reasons = _changed_streams(traced, directions)
    own, of_pair = (
        np.diagonal(coupling, offset, axis1=1, axis2=2) for offset in (0, 1)
    )
    coords = {
        "k": list(settings.k),
        "layer": range(n_layers),
        "pair": range(n_layers - 1),
    }

    def loss_of(X: Tensor | None) -> float:
        return np.nan if X is None else loss(replace(traced, residual=X[None]))

    variables: dict[str, Any] = {"loss": ((), loss_of(stream[-1]))}
    for change in CHANGES:
        dim = "layer" if change == "dropped" else "pair"
        variables[f"loss_{change}"] = (
            dim,
            [loss_of(changed.get((change, layer))) for layer in coords[dim]],
        )
    projected = [
        [loss_of(changed[f"projected {k}", layer]) for layer in coords["layer"]]
        for k in settings.k
    ]
    variables |= {
        "loss_projected": (("k", "layer"), projected),
        "loss_exited": ("layer", [loss_of(X) for X in stream[1:]]),
        "block_influence": (
            "layer",
            (1 - direction_cosine(stream[:-1], stream[1:]).mean(1)).cpu().numpy(),
        ),
        "coupling_of_pair": (("k", "pair"), of_pair),
        "coupling_with_others": (
            ("k", "layer"),
            (coupling.sum(2) - own) / (n_layers - 1),
        ),
        "n_pos": ((), traced.n_pos),
    }
    return xarray.Dataset(variables, coords, traced.provenance), reasons


@checked
def shared_directions(
    U: Float[Tensor, "n_layers d_model k"],
) -> Float[Tensor, "d_model k"]:
    """The k directions closest to those that all blocks write into: leading
    eigenvectors of `Σ_l U_l U_lᵀ`.

    U holds the top k left singular vectors of every block's Jacobian. All blocks count
    the same, and so do the directions of each. Returns orthonormal columns, the most
    shared first. Cost: one eigendecomposition.

    Example:
        >>> axes = torch.eye(3)
        >>> shared_directions(torch.stack([axes[:, [0, 1]], axes[:, [0, 2]], axes[:, [0, 2]]])).abs()
        tensor([[1., 0.],
                [0., 0.],
                [0., 1.]])
    """
    n_shared = U.shape[-1]
    all_of_them = U.double().transpose(0, 1).flatten(1)
    return (
        torch.linalg.eigh(all_of_them @ all_of_them.mT)
        .eigenvectors[:, -n_shared:]
        .flip(1)
        .to(U)
    )


def _changed_streams(
    traced: Trace, directions: dict[int, Tensor]
) -> tuple[Tensor, dict[tuple[str, int], Tensor], dict[int, str]]:
    """The residual stream; what leaves the last block after each change, by change and
    layer; why pairs are missing.

    The stream is computed anew: that of a half-precision model is rounded after every
    block, and the absence of that rounding must not count as an effect of the change.
    """
    stream = [traced.residual[0]]
    changed: dict[tuple[str, int], Tensor] = {}
    reasons: dict[int, str] = {}
    for layer, block in enumerate(traced.blocks):
        # All streams go through a block together, so that a half-precision block is
        # upcast once.
        with block.evaluation():
            changed = {change: block.call(X) for change, X in changed.items()}
            changed["dropped", layer] = stream[layer]
            if layer > 0:
                first, X = traced.blocks[layer - 1], stream[layer - 1]
                with first.evaluation():
                    changed["swapped", layer - 1] = first.call(block.call(X))
                if (
                    reason := differ_in(
                        first.call, block.call, (first.layer, block.layer)
                    )
                ) is None:
                    with (
                        first.evaluation(),
                        mean_weights(first.call.module, block.call.module),
                    ):
                        changed["merged", layer - 1] = first.call(X)
                else:
                    reasons[layer - 1] = reason
            stream.append(block.call(stream[layer]))
            for k, Q in directions.items():
                changed[f"projected {k}", layer] = (
                    stream[layer] + (stream[layer + 1] - stream[layer]) @ Q @ Q.mT
                )
    return torch.stack(stream), changed, reasons
