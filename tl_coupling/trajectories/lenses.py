"""How blocks act together, as a lens that TransformerLens reads."""

import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Text, at_least, checked, described
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import block_jacobians, pulled_back
from tl_coupling.models import (
    UsableLens,
    check_lens_fits,
    check_takes_lens,
    described_for_lens,
    jacobian_lens,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import DifferentPrompts

# In a lens's metadata: TransformerLens merges lenses of one estimator only.
ESTIMATOR = "tl_coupling.product_of_blocks"
# The same estimate as `JacobianLens.fit` makes.
LATER_ESTIMATOR = "jacobian_lens"
# The tokens that a token's effects are on.
Tokens = Literal["same", "later"]
# TransformerLens's default.
SKIPPED = 16
# Facts that the metadata take from the provenance of a trace, if it has them.
_TRACE_FACTS = (
    "weights_digest",
    "checkpoint",
    "untrained",
    "hooks",
    "spliced",
    "versions",
)
SEVERAL_TRACES = "an iterable of traced prompts: `trace(model, prompt)` makes one"


@checked
def product_lens(
    traces: Annotated[Iterable[object], SEVERAL_TRACES],
    position: int = -1,
    *,
    tokens: Tokens = "same",
    skip_first_positions: Annotated[int, at_least(0)] = SKIPPED,
    corpus: Text | None = None,
    progress: Progress | None = None,
) -> UsableLens:
    r"""Return a mean over prompts of how blocks act together, as TransformerLens's lens.

    With `tokens="same"`, the mean product of blocks at one token t of each prompt p,

    .. math::

        P_l = \frac1n \sum_{p=1}^n (I + J^{L-1}_{tt}) \cdots (I + J^{l+1}_{tt})

    at every layer l but the last: the derivative of the stream that leaves the last
    block by the stream that leaves block l, along the token's own stream. In a causal
    model that is exact, because no path leads from a token to itself by another.

    With `tokens="later"`, what TransformerLens's `JacobianLens.fit` estimates on the
    same prompts: the effects of a token on itself and on all later ones, summed, and
    their mean over tokens,

    .. math::

        P_l = \frac1n \sum_{p=1}^n \frac1{|V|} \sum_{t \in V} \sum_{t' \in V, t' \ge t}
        \frac{\partial h^L_{t'}}{\partial h^{l+1}_t}

    for the tokens V of a prompt without the first `skip_first_positions` and the last.
    Gradients are pulled back through one block after the other, at the tokens of V
    alone. Both are the same where V is a single token.

    Of a trace of `trace_modules` the lens has the matrices, and no model that it could
    be read with.

    The lens is TransformerLens's own class: `lens.readout(model, prompt)`, `lens.save`
    and its interventions work. Its metadata name the `estimator`, so that
    `JacobianLens.merge` refuses to mix the two.

    Args:
        traces: prompts traced with one model, with raw weights and without
            `final_norm`; of a generator one is held at a time. `fit` puts a BOS token
            first: trace `model.to_tokens(prompt)` for the same tokens.
        position: the token of each prompt with `tokens="same"`; the last by default.
        tokens: whether effects on the same token or on all later ones too are meant.
        skip_first_positions: with `tokens="later"`, how many tokens at the start are
            left out, 16 as in `fit`. A prompt that has none left is skipped with a
            warning, as there.
        corpus: a name for the prompts, for the metadata.
        progress: wraps the loop over prompts: `progress=tqdm.tqdm`. By default a bar in
            a terminal or notebook; `False` for none.

    Raises:
        ValueError: no trace, a prompt twice, or none that is long enough; one with
            `final_norm`, of another model, of a model of one block, or of one whose
            tokens act on earlier ones; a negative `skip_first_positions`; and what TransformerLens
            says of models that its lens does not read.
        TypeError: something that is not a trace, or of a model that is neither a
            `TransformerBridge` nor one of HuggingFace, such as a HookedTransformer.

    Cost: at the same token the Jacobians of all blocks but the first for each prompt,
    and `2 L d³` flops in float64; memory for `L d²` numbers in float64, three times. For
    later tokens `d` backward passes of these blocks over V, and memory for `|V| d²`
    numbers besides (`python -m benchmarks.lens` compares it with `fit`).

    Example:
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> lens, lens.metadata["estimator"]
        (JacobianLens(layers=0..0 (1), d_model=32, n_prompts=1), 'tl_coupling.product_of_blocks')
        >>> lens.readout(model, trace.tokens[None]).lens_topk_indices[0].shape
        torch.Size([8, 10])
        >>> tlc.trajectories.product_lens([trace], tokens="later", skip_first_positions=2)
        JacobianLens(layers=0..0 (1), d_model=32, n_prompts=1)
    """
    estimate = LensEstimate(tokens, position, skip_first_positions)
    total: Tensor | None = None
    first: Trace | None = None
    n_prompts = 0
    different = DifferentPrompts("traces")
    for item in with_progress(traces, progress, "prompts"):
        trace = checked_trace(item, first)
        different.add_traced(trace)
        if first is None:
            check_takes_lens(trace.model, trace.d_model)
            first = trace
        if not estimate.has_tokens(trace):
            warnings.warn(
                f"a prompt of {trace.n_pos} tokens is skipped: with "
                f"`skip_first_positions={skip_first_positions}` and without its last "
                "token none is left",
                stacklevel=2,
            )
            continue
        matrices = estimate.of_prompt(trace)
        total = matrices if total is None else total + matrices
        n_prompts += 1
    if first is None:
        raise ValueError("`traces` is empty: wanted at least one traced prompt")
    if total is None:
        raise ValueError(
            "every prompt of `traces` is too short: wanted at least "
            f"{skip_first_positions + 2} tokens, or a smaller `skip_first_positions`"
        )
    # The key is the layer whose output the matrix maps.
    means = dict(enumerate(total / n_prompts))
    metadata = {
        **_metadata(first, n_prompts, corpus),
        **estimate.metadata(),
    }
    return jacobian_lens(means, n_prompts, metadata)


class LensEstimate(NamedTuple):
    """What a lens is the mean of: the arguments of `product_lens`."""

    tokens: Tokens
    position: int
    skip_first_positions: int

    @classmethod
    def of_lens(cls, lens: UsableLens) -> "LensEstimate":
        """Return what a lens says that it is the mean of; by default what `fit` makes.

        Raises:
            ValueError: it is of an estimator that is not known here, or does not say
                what it left out.
            TypeError: its metadata are no mapping.
        """
        metadata = metadata_of(lens)
        estimator = metadata.get("estimator", LATER_ESTIMATOR)
        if estimator == ESTIMATOR:
            return cls("same", _whole_number(metadata, "position"), SKIPPED)
        if estimator != LATER_ESTIMATOR:
            raise ValueError(
                f"`lens` must be of the estimators {ESTIMATOR!r} or "
                f"{LATER_ESTIMATOR!r}, got {estimator!r}"
            )
        default = {"skip_first_positions": SKIPPED}
        skipped = _whole_number({**default, **metadata}, "skip_first_positions")
        if skipped < 0:
            raise ValueError(
                '`lens.metadata["skip_first_positions"]` must be at least 0, got '
                f"{skipped}"
            )
        return cls("later", -1, skipped)

    def has_tokens(self, trace: Trace) -> bool:
        """Say whether a prompt is long enough."""
        if self.tokens == "same":
            return True
        return trace.n_pos > self.skip_first_positions + 1

    def of_prompt(self, trace: Trace) -> Float[Tensor, "n_maps d_model d_model"]:
        """Return the matrices of one prompt, in float64: of all layers but the last."""
        if self.tokens == "later":
            return _effects_on_later(trace, self.skip_first_positions)
        # The map of layer l begins behind its block: the first block is in none.
        later = range(1, trace.n_layers)
        J = block_jacobians(trace, later, position=self.position, progress=False)
        return _products(J)

    def metadata(self) -> dict[str, Any]:
        """Return what a lens says of it."""
        if self.tokens == "same":
            return {"estimator": ESTIMATOR, "position": self.position}
        return {
            "estimator": LATER_ESTIMATOR,
            "skip_first_positions": self.skip_first_positions,
        }


def _effects_on_later(
    trace: Trace, skip_first_positions: int
) -> Float[Tensor, "n_maps d_model d_model"]:
    """Return the mean effect of a token on itself and later ones, by layer."""
    X = trace.blocks[0].X
    d_model = trace.d_model
    n_valid = trace.n_pos - 1 - skip_first_positions
    identity = torch.eye(d_model, dtype=X.dtype, device=X.device)
    # Effects on all valid tokens are summed: each begins with the identity.
    gradients = identity[:, None].repeat(1, n_valid, 1)
    means = X.new_empty(trace.n_layers - 1, d_model, d_model, dtype=torch.float64)
    for pulled in pulled_back(trace, gradients, skip_first_positions, 1):
        # The input of a block is the output of the one before.
        means[pulled.layer - 1] = pulled.gradients.mean(1, dtype=torch.float64)
    return means


def metadata_of(lens: UsableLens) -> Mapping[str, Any]:
    """Return what a lens says of itself; raise TypeError unless it is a mapping."""
    if not isinstance(lens.metadata, Mapping):
        raise TypeError(
            "`lens.metadata` must be a mapping from names to facts, got "
            f"{described(lens.metadata)}: an empty one says nothing"
        )
    return lens.metadata


def _whole_number(metadata: Mapping[str, Any], name: str) -> int:
    """Return a fact that is a whole number; raise ValueError for any other."""
    fact = metadata.get(name)
    if not isinstance(fact, Integral) or isinstance(fact, bool):
        raise ValueError(
            f"`lens.metadata[{name!r}]` must be a whole number, got {described(fact)}"
        )
    return int(fact)


def check_matrices_of(lens: UsableLens, d_model: int) -> None:
    """Raise unless every matrix of a lens is `[d_model d_model]`, of finite numbers.

    Raises:
        TypeError: something that is no dense tensor of real numbers.
        ValueError: a matrix of another shape, or with NaN or infinite entries.
    """
    for layer, matrix in lens.jacobians.items():
        name = f"`lens.jacobians[{layer!r}]`"
        is_dense = isinstance(matrix, Tensor) and matrix.layout is torch.strided
        if not is_dense or matrix.is_complex():
            raise TypeError(
                f"{name} must be a dense tensor of real numbers, got "
                f"{described(matrix)}"
            )
        if matrix.shape != (d_model, d_model):
            raise ValueError(
                f"{name} must be as wide as the model, [{d_model} {d_model}], got "
                f"{list(matrix.shape)}"
            )
        if not bool(matrix.isfinite().all()):
            raise ValueError(
                f"{name} has NaN or infinite entries: a lens maps the stream by it"
            )


def check_lens(lens: UsableLens, trace: Trace) -> None:
    """Raise ValueError or TypeError unless a lens is of the model of a trace."""
    # Read by TransformerLens too.
    metadata = metadata_of(lens)
    check_lens_fits(lens, trace.model)
    check_matrices_of(lens, trace.d_model)
    # A lens that TransformerLens fitted says none.
    digest = metadata.get("weights_digest")
    if digest not in (None, trace.provenance.get("weights_digest")):
        raise ValueError(
            "`lens` is of a model of the same name with other weights: make it of the "
            "model that was traced"
        )


def checked_trace(item: object, first: Trace | None) -> Trace:
    """Return the trace; raise unless it is one of the first one's model."""
    if not isinstance(item, Trace):
        raise TypeError(
            "`traces` must be an iterable of traces, got "
            f"{type(item).__name__}: trace the prompts first, "
            "`(tl_coupling.trace(model, prompt) for prompt in prompts)`"
        )
    if first is not None and item.model is not first.model:
        raise ValueError("`traces` must be of one model, got two")
    if item.n_layers < 2:
        raise ValueError(
            "`traces` must be of a model of at least 2 blocks, got 1: a lens maps what "
            "leaves a block to what leaves the last one"
        )
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


def _metadata(trace: Trace, n_prompts: int, corpus: str | None) -> dict[str, Any]:
    """Return what a lens says of itself."""
    trace_facts = {
        name: trace.provenance[name]
        for name in _TRACE_FACTS
        if name in trace.provenance
    }
    return {
        **described_for_lens(trace.model),
        **trace_facts,
        "corpus": corpus,
        "n_prompts": n_prompts,
    }
