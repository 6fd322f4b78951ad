"""What a model does after its last block: norms, scales, heads, soft caps. It is run
with its blocks replaced.

Each block's `forward` returns a given residual stream, and the model itself computes
what follows, whatever it is. What comes before (embedding, masks, rotations) is cheap
and has no effect, which is checked once for each model.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.blocks.arithmetic import forwards_replaced, own_arithmetic
from tl_coupling.blocks.calls import hidden_states
from tl_coupling.models import BlockOutputs, facts_of, is_bridge, missing_head

# Token ids [1 n_pos], or pixels [1 channels height width].
Batch = Int[Tensor, "1 n_pos"] | Float[Tensor, "1 channels height width"]
_MOST_CLASSIFIED = 64  # Rows in one run of an image classifier.


def logits(
    model: nn.Module,
    batch: Batch,
    x: Float[Tensor, "*batch d_model"],
    normalised: bool = False,
) -> Float[Tensor, "*batch d_vocab"]:
    """As `Trace.logits`. Of token ids, any that the model takes, their number is that
    of rows computed at a time.
    """
    if why := missing_head(model):
        raise ValueError(
            f"this model's head is random, because its weights are {why}: it has no logits and no losses"
        )
    with own_arithmetic(model):
        outputs = _outputs(model, batch)
        d_model = outputs[-1].shape[-1]
        if x.shape[-1] != d_model or x.numel() == 0:
            wanted = f"[*batch {d_model}], one row or more"
            raise ValueError(
                f"`x` must be a residual stream {wanted}, got {list(x.shape)}"
            )
        if not bool(x.isfinite().all()):
            raise ValueError(
                "`x` must be finite, got NaN or infinite entries: it has no logits"
            )
        skipped = [final_norm(model, batch)] if normalised else []
        parts = x.reshape(-1, d_model).split(
            _MOST_CLASSIFIED if batch.is_floating_point() else batch.shape[1]
        )
        rows = torch.cat(
            [_tail(model, batch, part, outputs, skipped) for part in parts]
        )
        return rows.reshape(*x.shape[:-1], -1)


def final_norm(model: nn.Module, batch: Batch) -> nn.Module:
    """The norm between the last block and HuggingFace's `hidden_states[-1]`; of a
    HookedTransformer, its last norm.

    BERT, and OPT with post-norm, have none. Costs one forward pass of the model the
    first time, nothing later.
    """
    norm: Any = getattr(model, "ln_final", None)
    if facts_of(model).has_final_norm:
        return norm
    with own_arithmetic(model), _watched(model) as seen:
        _, raw = _run(model, batch, output_hidden_states=True)
        _, X = seen[-1]
        # A HookedTransformer has none; `ln_final` is what it applies to X.
        states = getattr(raw, "hidden_states", None)
        if norm is None or (states and torch.equal(states[-1], X)):
            raise ValueError(
                "`final_norm=True` needs a norm behind the last block, this model has none: leave it off"
            )
        if states and not _close(norm(X), states[-1], X.dtype):
            raise ValueError(
                "`final_norm=True` needs the norm between the last block and HuggingFace's `hidden_states[-1]`, which "
                "`ln_final` of this model is not: leave it off"
            )
    facts_of(model).has_final_norm = True
    return norm


def _outputs(model: nn.Module, batch: Batch) -> BlockOutputs:
    """What the model's blocks return. The tail is checked against the model's own
    logits, once for each model.
    """
    dtype = next(model.parameters()).dtype
    if (known := facts_of(model).block_outputs) is not None and known.dtype == dtype:
        return known
    # Two rows at least, so that they can be swapped.
    batch = batch.repeat(1, 2) if batch.shape[1:] == (1,) else batch
    with _watched(model) as seen:
        expected = _logits(model, batch)
    _, X = seen[-1]
    outputs = BlockOutputs(
        dtype, tuple(length for length, _ in seen), X.new_empty(0, X.shape[-1])
    )
    # In reverse, because rows must not depend on where they are.
    got = _tail(model, batch, X[0].flip(0), outputs).flip(0)[: len(expected)]
    if not _close(got, expected, X.dtype):
        error = float((got - expected).norm() / expected.norm())
        raise ValueError(
            f"this model's logits do not follow, token by token, from what leaves its last block: they differ by "
            f"{error:.1%}; logits, losses and the logit lens are not available for it"
        )
    facts_of(model).block_outputs = outputs
    return outputs


def _tail(
    model: Any,
    batch: Batch,
    X: Float[Tensor, "n_rows d_model"],
    outputs: BlockOutputs,
    skipped: Sequence[nn.Module] = (),
) -> Float[Tensor, "n_rows d_vocab"]:
    """The logits of the model with `X` as each block's output, and without the modules
    `skipped`.

    Rows are the tokens of one text, or the class tokens of as many images.
    """
    _, lengths, stream = outputs
    rows = X[:, None] if batch.is_floating_point() else X[None]
    batch = batch if batch.is_floating_point() else batch[:, : len(X)]

    def block(length: int, first: Tensor | None = None, *_: Any, **named: Any) -> Any:
        at = named["hidden_states"] if first is None else first
        # A copy: what comes next may work in place.
        given = rows.to(at.device, stream.dtype, copy=True)
        return (given, *[None] * (length - 1)) if length else given

    forwards = {
        module: partial(block, length)
        for module, length in zip(model.blocks, lengths, strict=True)
    }
    with forwards_replaced(forwards | dict.fromkeys(skipped, _identity)):
        return _logits(model, batch)


def _logits(model: nn.Module, batch: Batch) -> Float[Tensor, "n_rows d_vocab"]:
    """The model's logits for every token, or every image, in float32 or float64."""
    found, raw = _run(model, batch)
    # A bridge returns the last hidden state of a model without a head as its logits.
    none = not isinstance(found, Tensor) or (
        hasattr(raw, "last_hidden_state") and not hasattr(raw, "logits")
    )
    image = batch.is_floating_point()
    if (
        none
        or found.ndim != (2 if image else 3)
        or (not image and found.shape[:-1] != batch.shape)
    ):
        given = "none" if none else f"logits of shape {list(found.shape)}"
        name = type(getattr(model, "original_model", model)).__name__
        wanted = (
            "an image, [1 n_classes]"
            if image
            else f"every token, [1 {batch.shape[1]} d_vocab]"
        )
        head = "an image classifier's" if image else "a language-model"
        raise ValueError(
            f"wanted a model with logits for {wanted}, {name} gives {given}: load it with {head} head"
        )
    rows = found if image else found[0]
    return rows if rows.dtype == torch.float64 else rows.float()


def _run(model: Any, batch: Batch, **of_bridge: bool) -> tuple[Any, Any]:
    """What the model returns when asked for logits, and what the HuggingFace model
    within a bridge returned.
    """
    raw: list[Any] = []
    cache = {} if batch.is_floating_point() else {"use_cache": False}
    original, arguments = (
        (model.original_model, of_bridge | cache) if is_bridge(model) else (model, {})
    )
    device = next(model.parameters()).device
    with (
        original.register_forward_hook(lambda _, __, output: raw.append(output)),
        runnable(model),
    ):
        return model(batch.to(device), return_type="logits", **arguments), raw[0]


def runnable(model: nn.Module) -> AbstractContextManager[None]:
    """Context without a final norm that the bridge has and HuggingFace has not (OPT
    with post-norm), which fails.
    """
    norm: Any = getattr(model, "ln_final", None)
    hollow = (
        is_bridge(model)
        and norm is not None
        and getattr(norm, "original_component", norm) is None
    )
    return forwards_replaced({norm: _identity} if hollow else {})


def _identity(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether the relative difference is within 1e-4, or twice the precision of
    `dtype`, if that is coarser.
    """
    tolerance = max(1e-4, 2 * torch.finfo(dtype).eps)
    return got.shape == expected.shape and bool(
        (got - expected).norm() <= tolerance * expected.norm()
    )


@contextmanager
def _watched(model: Any) -> Iterator[list[tuple[int, Tensor]]]:
    """What each block returned last in a run within the context: how long a tuple (0
    for a tensor), and its stream.
    """
    seen: list[Any] = [None] * len(model.blocks)

    def leave(layer: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        seen[layer] = (
            len(output) if isinstance(output, tuple | list) else 0,
            hidden_states(output).clone(),
        )

    with ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):
            hooks.enter_context(block.register_forward_hook(partial(leave, layer)))
        yield seen
