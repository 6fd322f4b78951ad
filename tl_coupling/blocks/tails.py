"""What a model does after its last block: norms, scales, heads, soft caps. It is run
with its blocks replaced.

Each block's `forward` returns a given residual stream, and the model itself computes
what follows, whatever it is. What comes before (embedding, masks, rotations) is cheap
and has no effect, which is checked once for each model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import forwards_replaced, own_arithmetic
from tl_coupling.blocks.calls import hidden_states, stand_in
from tl_coupling.models import (
    BlockOutputs,
    ModelInput,
    OwnModel,
    facts_of,
    input_device,
    is_bridge,
    missing_head,
)


def logits(
    model: nn.Module,
    model_input: ModelInput,
    x: Float[Tensor, "*batch d_model"],
    normalised: bool = False,
) -> Float[Tensor, "*batch d_vocab"]:
    """Return the logits of residual rows `x`, as `Trace.logits` does.

    Rows are computed in batches, as tokens of as many texts. Which prompt it is has no
    effect on the logits.
    """
    lacking = missing_head(model)
    if lacking:
        raise ValueError(
            f"this model's head is random, because its weights are {lacking}: it has "
            "no logits and no losses"
        )
    with own_arithmetic(model):
        outputs = _checked_outputs(model, model_input)
        _check_rows(x, outputs.empty_stream.shape[-1])
        skipped = [final_norm(model, model_input)] if normalised else []
        rows = x.reshape(-1, x.shape[-1])
        batch_logits = [
            _tail(model, model_input, batch, outputs, skipped)
            for batch in rows.split(model_input.n_rows_at_once)
        ]
        return torch.cat(batch_logits).reshape(*x.shape[:-1], -1)


def _check_rows(x: Tensor, d_model: int) -> None:
    if x.shape[-1] != d_model or x.numel() == 0:
        raise ValueError(
            f"`x` must be a residual stream [*batch {d_model}], one row or more, got "
            f"{list(x.shape)}"
        )
    if not bool(x.isfinite().all()):
        raise ValueError(
            "`x` must be finite, got NaN or infinite entries: it has no logits"
        )


def final_norm(model: nn.Module, model_input: ModelInput) -> nn.Module:
    """Return the norm between the last block and HuggingFace's `hidden_states[-1]`; of
    a HookedTransformer, its last norm.

    BERT, and OPT with post-norm, have none. Costs one forward pass of the model the
    first time, nothing later.

    Raises:
        ValueError: the model has no such norm.
    """
    norm: Any = getattr(model, "ln_final", None)
    if facts_of(model).has_final_norm:
        return norm
    with own_arithmetic(model), _watched(model) as returned:
        _, raw = _run(model, model_input, output_hidden_states=True)
        X = returned[-1].stream
        # A HookedTransformer has none; `ln_final` is what it applies to X.
        states = getattr(raw, "hidden_states", None)
        if norm is None or (states and torch.equal(states[-1], X)):
            raise ValueError(
                "`final_norm=True` needs a norm after the last block, and this model "
                "has none: leave it off"
            )
        if states and not is_close(norm(X), states[-1], X.dtype):
            raise ValueError(
                "`final_norm=True` needs the norm between the last block and "
                "HuggingFace's `hidden_states[-1]`, which `ln_final` of this model is "
                "not: leave it off"
            )
    facts_of(model).has_final_norm = True
    return norm


def runnable(model: nn.Module) -> AbstractContextManager[None]:
    """Run a model in this context without a final norm that the bridge has and
    HuggingFace has not (OPT with post-norm), which would fail.
    """
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}
    if isinstance(model, OwnModel):
        return nullcontext()
    norm: Any = getattr(model, "ln_final", None)
    if is_bridge(model) and norm is not None:
        original = getattr(norm, "original_component", norm)
        if original is None:
            forwards[norm] = _identity
    return forwards_replaced(forwards)


def _checked_outputs(model: nn.Module, model_input: ModelInput) -> BlockOutputs:
    """Return what the model's blocks return.

    The tail is checked against the model's own logits, once for each model.

    Raises:
        ValueError: its logits do not follow from what leaves its last block.
    """
    facts = facts_of(model)
    dtype = next(model.parameters()).dtype
    if facts.block_outputs is not None and facts.block_outputs.dtype == dtype:
        return facts.block_outputs
    # Two rows at least, so that they can be swapped.
    model_input = model_input.of_several_rows()
    with _watched(model) as returned:
        expected = _logits(model, model_input)
    X = returned[-1].stream
    lengths = tuple(output.length for output in returned)
    outputs = BlockOutputs(dtype, lengths, X.new_empty(0, X.shape[-1]))
    # In reverse, because rows must not depend on where they are.
    reversed_logits = _tail(model, model_input, X[0].flip(0), outputs)
    computed = reversed_logits.flip(0)[: len(expected)]
    if not is_close(computed, expected, X.dtype):
        error = float((computed - expected).norm() / expected.norm())
        raise ValueError(
            "this model's logits do not follow, token by token, from what leaves its "
            f"last block: they differ by {error:.1%}; logits, losses and the logit "
            "lens are not available for it"
        )
    facts.block_outputs = outputs
    return outputs


def _tail(
    model: Any,
    model_input: ModelInput,
    rows: Float[Tensor, "n_rows d_model"],
    outputs: BlockOutputs,
    skipped: Sequence[nn.Module] = (),
) -> Float[Tensor, "n_rows d_vocab"]:
    """Return the logits of the model with `rows` as each block's output, and without the
    modules `skipped`.
    """
    stream = model_input.stream(rows)

    def replaced(entering: Tensor) -> Tensor:
        # A copy: what comes next may work in place.
        return stream.to(entering.device, outputs.empty_stream.dtype, copy=True)

    forwards = {
        block: stand_in(replaced, length)
        for block, length in zip(model.blocks, outputs.lengths, strict=True)
    }
    forwards |= dict.fromkeys(skipped, _identity)
    with forwards_replaced(forwards):
        return _logits(model, model_input.of_rows(len(rows)))


def _logits(
    model: nn.Module, model_input: ModelInput
) -> Float[Tensor, "n_rows d_vocab"]:
    """Return the model's logits for every row, in float32 or float64."""
    output, raw = _run(model, model_input)
    # A bridge returns the last hidden state of a model without a head as its logits.
    has_no_head = hasattr(raw, "last_hidden_state") and not hasattr(raw, "logits")
    rows = None
    shown = "none"
    if isinstance(output, Tensor) and not has_no_head:
        rows = model_input.rows_of_logits(output)
        shown = f"logits of shape {list(output.shape)}"
    if rows is None:
        name = type(getattr(model, "original_model", model)).__name__
        raise ValueError(
            f"wanted a model with logits for {model_input.wanted_logits}, {name} gives "
            f"{shown}: load it with {model_input.head} head"
        )
    return rows if rows.dtype == torch.float64 else rows.float()


def _run(
    model: Any, model_input: ModelInput, **options_of_bridge: bool
) -> tuple[object, object]:
    """Return what the model returns when asked for logits, and what the HuggingFace
    model within a bridge returned.
    """
    outputs: list[object] = []
    original = model
    options: dict[str, bool] = {}
    if is_bridge(model):
        original = model.original_model
        options = options_of_bridge | model_input.options_of_call(model)
    batch = model_input.batch.to(input_device(model))

    def note(_: nn.Module, __: tuple[object, ...], output: object) -> None:
        outputs.append(output)

    with shared_changes(original.register_forward_hook(note)), runnable(model):
        return model(batch, return_type="logits", **options), outputs[0]


def _identity(x: Tensor, *_: object, **__: object) -> Tensor:
    return x


def is_close(computed: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Say whether the relative difference is within 1e-4, or twice the precision of
    `dtype`, if that is coarser.
    """
    if computed.shape != expected.shape:
        return False
    # Logits of 16 bits differ by their last bit where rows are computed in another order.
    tolerance = max(1e-4, 2 * torch.finfo(dtype).eps)
    return bool((computed - expected).norm() <= tolerance * expected.norm())


class _Returned(NamedTuple):
    """What a block returned: the length of the tuple (0 for a tensor), its stream."""

    length: int
    stream: Tensor


@contextmanager
def _watched(model: Any) -> Iterator[list[_Returned]]:
    """Watch the blocks: the list holds what each returned in the last run within the
    context.
    """
    returned: list[Any] = [None] * len(model.blocks)

    def leave(layer: int, _: nn.Module, __: tuple[object, ...], output: object) -> None:
        length = len(output) if isinstance(output, tuple | list) else 0
        returned[layer] = _Returned(length, hidden_states(output).clone())

    with shared_changes() as hooks:
        for layer, block in enumerate(model.blocks):
            hooks.enter_context(block.register_forward_hook(partial(leave, layer)))
        yield returned
