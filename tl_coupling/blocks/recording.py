"""One forward pass of a TransformerLens model, up to its unembedding."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks import tails
from tl_coupling.blocks.arithmetic import is_out_of_memory, own_arithmetic
from tl_coupling.blocks.forward_passes import ForwardPass
from tl_coupling.blocks.streamed import streamed_passage
from tl_coupling.models import ModelInput, OwnModel, facts_of, input_device


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not
    needed.
    """


def recorded_pass(
    model: Any, model_input: ModelInput, dtype: torch.dtype
) -> ForwardPass:
    """Run the model on its input and return what its blocks did.

    TransformerLens's models run up to their unembedding. A HuggingFace model in memory
    runs to the end: peft does not take its hooks away after an exception. A streamed
    model runs in `dtype`, and without its blocks.
    """

    def until_unembedding() -> None:
        with suppress(_BlocksDone):
            _run(model, model_input)

    is_streamed = facts_of(model).is_streamed
    with own_arithmetic(model, dtype), tails.runnable(model), shared_changes() as hooks:
        unembedding = getattr(model, "unembed", None)
        to_end = isinstance(model, OwnModel) and not is_streamed
        if isinstance(unembedding, nn.Module) and not to_end:
            # Before its weights are read.
            stop = unembedding.register_forward_pre_hook(_stop, prepend=True)
            hooks.enter_context(stop)
        n_pos = model_input.n_pos
        if is_streamed:
            return streamed_passage(model, until_unembedding, n_pos)
        return ForwardPass.record(model, list(model.blocks), until_unembedding, n_pos)


def _stop(*_: object) -> None:
    raise _BlocksDone


def _run(model: Any, model_input: ModelInput) -> None:
    """Run the model; ValueError if it fails without us too."""
    # A model may have been moved since its tokenizer made the ids.
    batch = model_input.batch.to(input_device(model))
    options = model_input.options_of_call(model)
    try:
        model(batch, return_type=None, **options)
    except (RuntimeError, AttributeError, LookupError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:300]
        arguments = [f"{name}={value}" for name, value in options.items()]
        call = f"model({', '.join([model_input.kind, *arguments])})"
        raise ValueError(
            f"the model itself fails when called as `{call}` ({type(error).__name__}: "
            f"{message}): try {model_input.when_it_fails}, or another version of "
            "TransformerLens"
        ) from error
