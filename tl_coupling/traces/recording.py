"""One forward pass of a TransformerLens model, up to its unembedding."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from tl_coupling.blocks import (
    Passage,
    is_out_of_memory,
    own_arithmetic,
    passage_of,
    tails,
)
from tl_coupling.models import ModelInput

# Hooks of these packages are how a model computes, and no intervention of the user's.
_PACKAGES_OF_MODELS = ("transformer_lens", "transformers", "accelerate", "torch")


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not
    needed.
    """


def recorded_passage(
    model: Any, model_input: ModelInput, dtype: torch.dtype
) -> Passage:
    """Run the model on its input, up to its unembedding, and return what its blocks did.

    A streamed model runs in `dtype`, and without its blocks.
    """

    def until_unembedding() -> None:
        with suppress(_BlocksDone):
            _run(model, model_input)

    with own_arithmetic(model, dtype), tails.runnable(model), ExitStack() as hooks:
        unembedding = getattr(model, "unembed", None)
        if isinstance(unembedding, nn.Module):
            # Before its weights are read.
            stop = unembedding.register_forward_pre_hook(_stop, prepend=True)
            hooks.enter_context(stop)
        return passage_of(model, until_unembedding, model_input.n_pos)


def _stop(*_: object) -> None:
    raise _BlocksDone


def _run(model: Any, model_input: ModelInput) -> None:
    """Run the model; ValueError if it fails without us too."""
    batch = model_input.batch.to(next(model.parameters()).device)
    options = model_input.options_of_call(model)
    try:
        model(batch, return_type=None, **options)
    except (RuntimeError, AttributeError) as error:
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


def hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of hook points and modules with a forward hook of the user's,
    which is part of what is measured.
    """
    return [
        name
        for name, module in model.named_modules()
        if getattr(module, "fwd_hooks", None) or any(map(_is_of_user, _hooks(module)))
    ]


def _hooks(module: nn.Module) -> tuple[Callable[..., object], ...]:
    return (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
    )


def _is_of_user(hook: Callable[..., object]) -> bool:
    function = getattr(hook, "func", hook)  # Of a `functools.partial`.
    package = str(getattr(function, "__module__", "")).split(".")[0]
    return package not in _PACKAGES_OF_MODELS
