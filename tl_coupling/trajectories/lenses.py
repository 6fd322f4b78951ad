"""Products of blocks as a lens that TransformerLens reads."""

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Text, checked
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import block_jacobians
from tl_coupling.models import (
    JacobianLens,
    check_takes_lens,
    described_for_lens,
    jacobian_lens,
)
from tl_coupling.progress import Progress, with_progress

# In a lens's metadata: TransformerLens merges lenses of one estimator only.
ESTIMATOR = "tl_coupling.product_of_blocks"
# What the metadata take from the provenance of a trace, where it says so.
_TRACE_FACTS = ("weights_digest", "checkpoint", "untrained", "hooks", "spliced")
_SEVERAL_TRACES = "an iterable of traced prompts: `trace(model, prompt)` makes one"


@checked
def product_lens(
    traces: Annotated[Iterable[object], _SEVERAL_TRACES],
    position: int = -1,
    *,
    corpus: Text | None = None,
    progress: Progress | None = None,
) -> JacobianLens:
    r"""Return the mean product of blocks over prompts, as TransformerLens's lens.

    .. math::

        P_l = \frac1n \sum_{p=1}^n (I + J^{L-1}_{tt}) \cdots (I + J^{l+1}_{tt})

    for one token t of each prompt p, at every layer l but the last: the derivative of
    the stream that leaves the last block by the stream that leaves block l, at the same
    token. In a causal model that is exact, because no path leads from a token to itself
    by another. TransformerLens's `JacobianLens.fit` sums the effects of a token on
    itself and on all later tokens that it does not leave out, and takes the mean over
    tokens: both are the same where a single token is left, as in a prompt of n tokens
    with `skip_first_positions=n - 2`, whose last it leaves out.

    The lens is TransformerLens's own class: `lens.readout(model, prompt)`, `lens.save`
    and its interventions work. Its metadata say that the `estimator` is another, so
    that `JacobianLens.merge` refuses to mix the two.

    Args:
        traces: prompts traced with one model, with raw weights and without
            `final_norm`; of a generator one is held at a time.
        position: the token of each prompt; the last by default.
        corpus: a name for the prompts, for the metadata.
        progress: wraps the loop over prompts: `progress=tqdm.tqdm`. By default a bar in
            a terminal or notebook; `False` for none.

    Raises:
        ValueError: no trace; one with `final_norm`, of another model, or of a model
            whose tokens act on earlier ones; and what TransformerLens says of models
            that its lens does not read.
        TypeError: something that is not a trace, or not of a `TransformerBridge`.

    Cost: the Jacobians of all blocks but the first for each prompt, and `2 L d³` flops
    in float64; memory for `L d²` numbers in float64, three times.

    Example:
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> lens, lens.metadata["estimator"]
        (JacobianLens(layers=0..0 (1), d_model=32, n_prompts=1), 'tl_coupling.product_of_blocks')
        >>> lens.readout(model, trace.tokens[None]).lens_topk_indices[0].shape
        torch.Size([8, 10])
    """
    total: Tensor | None = None
    first: Trace | None = None
    n_prompts = 0
    for item in with_progress(traces, progress, "prompts"):
        trace = _fitting(item, first)
        if first is None:
            check_takes_lens(trace.model, trace.d_model)
            first = trace
        # The map of layer l begins behind its block: the first block is in none.
        later = range(1, trace.n_layers)
        J = block_jacobians(trace, later, position=position, progress=False)
        products = _products(J)
        total = products if total is None else total + products
        n_prompts += 1
    if total is None or first is None:
        raise ValueError("`traces` is empty: wanted at least one traced prompt")
    # The key is the layer whose output the matrix maps.
    means = dict(enumerate(total / n_prompts))
    metadata = _metadata(first, position, n_prompts, corpus)
    return jacobian_lens(means, n_prompts, metadata)


def check_lens(lens: JacobianLens, trace: Trace) -> None:
    """Raise ValueError or TypeError unless a lens is of the model of a trace."""
    lens.validate_model(trace.model)
    # A lens that TransformerLens fitted says none.
    digest = lens.metadata.get("weights_digest")
    if digest not in (None, trace.provenance.get("weights_digest")):
        raise ValueError(
            "`lens` is of a model of the same name with other weights: make it of the "
            "model that was traced"
        )


def _fitting(item: object, first: Trace | None) -> Trace:
    """Return the trace; raise unless it is one of the first one's model."""
    if not isinstance(item, Trace):
        raise TypeError(
            "`traces` must be an iterable of traces, got "
            f"{type(item).__name__}: trace the prompts first, "
            "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
        )
    if first is not None and item.model is not first.model:
        raise ValueError("`traces` must be of one model, got two")
    if item.final_norm:
        raise ValueError(
            "`traces` must end before the final norm, which a lens applies itself: "
            "leave `final_norm` off"
        )
    if not item.is_causal:
        raise ValueError(
            "`traces` must be of a causal model: here tokens act on earlier ones, and "
            "the product of one token's Jacobians is not its derivative"
        )
    return item


def _products(
    J: Float[Tensor, "n_later d_model d_model"],
) -> Float[Tensor, "n_later d_model d_model"]:
    """Return `(I + J[-1]) ⋯ (I + J[i])` for each i, in float64."""
    identity = torch.eye(J.shape[-1], dtype=torch.float64, device=J.device)
    product = identity
    products = []
    for J_of_layer in J.flip(0):
        # From the last block down: one more block acts before all that are there.
        product = product @ (identity + J_of_layer.double())
        products.append(product)
    return torch.stack(products).flip(0)


def _metadata(
    trace: Trace, position: int, n_prompts: int, corpus: str | None
) -> dict[str, Any]:
    """Return what a lens says of itself."""
    trace_facts = {
        name: trace.provenance[name]
        for name in _TRACE_FACTS
        if name in trace.provenance
    }
    return {
        **described_for_lens(trace.model),
        **trace_facts,
        "estimator": ESTIMATOR,
        "position": position,
        "corpus": corpus,
        "n_prompts": n_prompts,
    }
