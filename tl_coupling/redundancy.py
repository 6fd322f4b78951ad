"""What coupling may be good for: how much of the loss depends on a block, or on the order of two neighbours."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks import Trace, trace
from tl_coupling.blocks.calls import differ_in
from tl_coupling.blocks.evaluation import mean_weights
from tl_coupling.border import Count, Seed, checked, warn_caller
from tl_coupling.comparisons import depth_coupling
from tl_coupling.coupling import Orientation, random_subspace_null
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompt
from tl_coupling.statistics import LEVEL, rank_correlation_of_rows
from tl_coupling.surveys.measurements import Settings, as_prompts, loss
from tl_coupling.trajectories.shapes import direction_cosine

if TYPE_CHECKING:
    import xarray

CHANGES = ("dropped", "swapped", "merged")


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
) -> "xarray.Dataset":
    """Loss without each block, with neighbours swapped, and with neighbours merged, beside the blocks' coupling.

    - dropped `l`: `X^{l+1} = X^l`, the skip connection alone;
    - swapped `(l, l+1)`: block `l+1` first, then block `l`;
    - merged `(l, l+1)`: one block in place of two: block `l` with each parameter the mean of the two blocks' (without
      alignment: heads, neurons and experts are averaged by index). The stream also loses one step, so compare with the
      better of the two drops: two equal blocks merge into a drop of one.

    Later blocks run on the changed stream. Every block keeps the arguments that the model gave it (mask, positions).
    The model is left unchanged.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts or `Prompt`s of at least two tokens.
        k: numbers of top singular vectors.
        position: the token whose Jacobians are compared; the last by default. Losses are over all tokens.
        orientation: "ujv" or "vju".
        prepend_bos: whether text gets a BOS token; `None` follows the tokenizer.
        progress: wraps the loop over prompts; `None`: a bar in a terminal or notebook, `False`: none.

    Returns:
        a Dataset with dims `prompt`, `k`, `layer`, and `pair`, whose coordinate is the first layer of the pair:

        - `loss`, `[prompt]`; `loss_dropped`, `[prompt layer]`; `loss_swapped` and `loss_merged`, `[prompt pair]`: mean
          negative log-likelihood per token, in nats. Blocks of different kinds (windowed and full attention, dense and
          mixture of experts) cannot be merged: NaN, a warning, and the reason in the attribute `not_merged`;
        - `block_influence`, `[prompt layer]`: `1 − mean_t cos(X^l_t, X^{l+1}_t)` over the tokens t (Men et al. 2024);
        - `coupling_of_pair`, `[prompt k pair]`: mean of the pair's two couplings, either block giving the singular
          vectors; `coupling_with_others`, `[prompt k layer]`: mean over all other layers, both ways;
        - `null_coupling`, `[k]`: what random subspaces would give; `n_pos`, `[prompt]`: number of tokens.

    Raises:
        ValueError: a model of one block, no prompts, a prompt of one token, k out of range; it names the prompt.

    Cost: for each prompt a depth coupling, `1.5 L²` block evaluations and `3 L` unembeddings; memory for `3 L` residual
    streams and one more block. Half precision is upcast block by block, but not in the unembedding: small differences
    in loss are lost in the rounding of the logits.

    Example:
        >>> data = layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,))
        >>> (data.loss_dropped - data.loss).sizes
        Frozen({'prompt': 2, 'layer': 2})

    Source: block influence is eq. 1 of Men et al. 2024 (ShortGPT). That strongly coupled blocks can stand in for each
    other is a conjecture; `redundancy_correlations` tests it.
    """
    import xarray

    named = as_prompts(prompts)
    settings = Settings(k=tuple(k), position=position, orientation=orientation, prepend_bos=prepend_bos)
    measured: list[xarray.Dataset] = []
    provenances: list[dict[str, Any]] = []
    not_merged: dict[int, str] = {}
    for prompt in with_progress(named, progress, "redundancy"):
        try:
            traced = trace(model, prompt.prompt, prepend_bos=prepend_bos)
            data, reasons = _of_prompt(traced, settings)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error
        measured.append(data)
        provenances.append(traced.provenance)
        not_merged |= reasons
    if not_merged:
        pair, reason = next(iter(not_merged.items()))
        warn_caller(
            f"{len(not_merged)} of {measured[0].sizes['pair']} pairs cannot be merged, their loss is NaN; layers "
            f"{pair} and {pair + 1} differ in {reason}"
        )
    common = {key: v for key, v in provenances[0].items() if all(p.get(key) == v for p in provenances)}
    return (
        xarray.concat(measured, "prompt", combine_attrs="drop_conflicts")
        .assign(null_coupling=("k", [float(random_subspace_null(one)) for one in settings.k]))
        .assign_coords(prompt=[p.id for p in named], task=("prompt", [p.task or "" for p in named]))
        .assign_attrs(
            model=str(common["model"]),
            orientation=orientation,
            position=position,
            not_merged=json.dumps(not_merged),
            provenance=json.dumps(common),
        )
    )


@checked
def redundancy_correlations(data: "xarray.Dataset", *, n_resamples: Count = 1000, seed: Seed = 0) -> "xarray.Dataset":
    """Rank correlation, over layers or pairs, of the change in loss with coupling and with block influence.

    Spearman's ρ of means over prompts of `layer_redundancy`'s `data`. Drops are ranked over layers, by
    `coupling_with_others` and `block_influence`; swaps and merges over pairs, by `coupling_of_pair` and the mean
    influence of the two blocks.
    If coupled blocks are redundant, ρ with coupling is negative; if influence predicts the cost, ρ with it is positive.

    The intervals are 95 % percentile intervals of a bootstrap over prompts, with loss, coupling and influence resampled
    together. Layers are not resampled: they are the whole model, not a sample. So an interval says how far ρ might move
    on other prompts, not whether another model would show it.

    Returns:
        a Dataset with dims `change` ("dropped", "swapped", "merged"), `blocks` ("all", "inner": without the first and
        the last block, which often dominate), `k`, and `bound` ("lower", "upper"):

        - `coupling`, `[change blocks k]`, and `block_influence`, `[change blocks]`: ρ;
        - `advantage`, `[change blocks k]`: |ρ| of coupling minus |ρ| of block influence, positive where coupling ranks
          better, whatever the signs;
        - `coupling_interval`, `block_influence_interval`, `advantage_interval`: the same with `bound` last;
        - `n`, `[change blocks]`: how many layers or pairs were ranked. Below three, or where all are equal, ρ is NaN,
          and with one prompt the intervals are. Pairs that could not be merged are left out.

    Raises:
        ValueError: `data` is not what `layer_redundancy` returns, `n_resamples` is below 1.

    Example:
        >>> rho = redundancy_correlations(layer_redundancy(model, ["w1 w2 w3", "w4 w5 w6"], k=(4,)))
        >>> int(rho.n.sel(change="dropped", blocks="all"))
        2
    """
    import xarray

    check_redundancy(data)
    n_prompts = data.sizes["prompt"]
    drawn = np.random.default_rng(seed).integers(0, n_prompts, (n_resamples, n_prompts))
    # How often each prompt counts: row 0 is the data as they are, the others the bootstrap.
    weights = np.stack([np.bincount(row, minlength=n_prompts) for row in (np.arange(n_prompts), *drawn)]) / n_prompts
    blocks = ("all", "inner")
    coords = {"change": list(CHANGES), "blocks": list(blocks), "k": data["k"].values, "bound": ["lower", "upper"]}
    shape = (len(CHANGES), len(blocks))
    n = np.zeros(shape, int)
    coupling, influence = np.empty((*shape, data.sizes["k"], len(weights))), np.empty((*shape, len(weights)))
    for i, change in enumerate(CHANGES):
        loss_change, of_coupling, of_influence = change_and_predictors(data, change)
        for j in range(len(blocks)):
            kept = np.isfinite(loss_change).all(0)
            kept[[0, -1]] &= blocks[j] == "all"
            n[i, j] = kept.sum()
            means = weights @ loss_change[:, kept]
            coupling[i, j] = [rank_correlation_of_rows(weights @ one[:, kept], means) for one in of_coupling]
            influence[i, j] = rank_correlation_of_rows(weights @ of_influence[:, kept], means)
    variables: dict[str, Any] = {"n": (("change", "blocks"), n)}
    advantage = np.abs(coupling) - np.abs(influence)[..., None, :]
    for name, values in (("coupling", coupling), ("block_influence", influence), ("advantage", advantage)):
        dims = ("change", "blocks", "k")[: values.ndim - 1]
        variables[name] = (dims, values[..., 0])
        bounds = np.quantile(values[..., 1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=-1)
        bounds = np.full_like(bounds, np.nan) if n_prompts == 1 else bounds
        variables[f"{name}_interval"] = ((*dims, "bound"), np.moveaxis(bounds, 0, -1))
    attrs = {"level": LEVEL, "n_resamples": n_resamples, "seed": seed, "n_prompts": n_prompts}
    return xarray.Dataset(variables, coords, attrs | {"provenance": data.attrs.get("provenance", "{}")})


def change_and_predictors(
    data: "xarray.Dataset", change: str
) -> tuple[Float[np.ndarray, "n_prompts n"], Float[np.ndarray, "n_k n_prompts n"], Float[np.ndarray, "n_prompts n"]]:
    """Change in loss, coupling and block influence at each layer or pair, as `redundancy_correlations` ranks them."""
    dim, name = ("layer", "coupling_with_others") if change == "dropped" else ("pair", "coupling_of_pair")
    loss_change = (data[f"loss_{change}"] - data["loss"]).transpose("prompt", dim).values
    influence = data["block_influence"].transpose("prompt", "layer").values
    if dim == "pair":
        influence = (influence[:, 1:] + influence[:, :-1]) / 2
    return loss_change, data[name].transpose("k", "prompt", dim).values, influence


def check_redundancy(data: Any) -> None:
    """Raise unless `data` is what `layer_redundancy` returns."""
    wanted = {"loss", "block_influence", "coupling_of_pair", "coupling_with_others"}
    if missing := wanted - set(getattr(data, "data_vars", ())):
        raise ValueError(f"wanted what `layer_redundancy` returns, got data without {', '.join(sorted(missing))}")


def _of_prompt(traced: Trace, settings: Settings) -> tuple["xarray.Dataset", dict[int, str]]:
    """One prompt's dataset; and why pairs were not merged, by their first layer."""
    import xarray

    if traced.n_layers < 2:
        raise ValueError(f"wanted a model of at least 2 blocks, to swap and to merge, got {traced.n_layers}")
    if traced.n_pos < 2:
        raise ValueError(f"wanted at least 2 tokens, to predict one from the other, got {traced.n_pos}")
    result = depth_coupling(traced, max(settings.k), settings.position, settings.orientation, progress=False)
    coupling = np.stack([result.coupling(k).cpu().numpy() for k in settings.k])
    coupling = (coupling + coupling.swapaxes(1, 2)) / 2
    stream, changed, reasons = _changed_streams(traced)
    losses = {change: loss(replace(traced, residual=X[None])) for change, X in changed.items()}
    dims = {"dropped": "layer", "swapped": "pair", "merged": "pair"}
    coords = {"k": list(settings.k), "layer": range(traced.n_layers), "pair": range(traced.n_layers - 1)}
    own = np.diagonal(coupling, axis1=1, axis2=2)
    data = xarray.Dataset(
        {
            "loss": ((), loss(replace(traced, residual=stream[-1:]))),
            **{
                f"loss_{change}": (dim, [losses.get((change, layer), float("nan")) for layer in coords[dim]])
                for change, dim in dims.items()
            },
            "block_influence": ("layer", (1 - direction_cosine(stream[:-1], stream[1:]).mean(1)).cpu().numpy()),
            "coupling_of_pair": (("k", "pair"), np.diagonal(coupling, offset=1, axis1=1, axis2=2)),
            "coupling_with_others": (("k", "layer"), (coupling.sum(2) - own) / (traced.n_layers - 1)),
            "n_pos": ((), traced.n_pos),
        },
        coords,
    )
    return data, reasons


def _changed_streams(
    traced: Trace,
) -> tuple[Float[Tensor, "n_layers_plus_1 n_pos d_model"], dict[tuple[str, int], Tensor], dict[int, str]]:
    """The residual stream; what leaves the last block after each change, by change and layer; why pairs are missing.

    The unchanged stream is computed anew: that of a half-precision model is rounded after every block, and the absence
    of that rounding must not count as an effect of the change.
    """
    stream = [traced.residual[0]]
    changed: dict[tuple[str, int], Tensor] = {}
    reasons: dict[int, str] = {}
    for layer, block in enumerate(traced.blocks):
        # All streams go through a block together, so that a half-precision block is upcast once.
        with block.evaluation():
            changed = {change: block.call(X) for change, X in changed.items()}
            changed["dropped", layer] = stream[layer]
            if layer > 0:
                first, X = traced.blocks[layer - 1], stream[layer - 1]
                with first.evaluation():
                    changed["swapped", layer - 1] = first.call(block.call(X))
                if (reason := differ_in(first.call, block.call, (first.layer, block.layer))) is None:
                    with first.evaluation(), mean_weights(first.call.module, block.call.module):
                        changed["merged", layer - 1] = first.call(X)
                else:
                    reasons[layer - 1] = reason
            stream.append(block.call(stream[layer]))
    return torch.stack(stream), changed, reasons
