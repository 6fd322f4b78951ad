"""`trace`: one forward pass that records the residual stream and how every block was called."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.blocks import tails
from tl_coupling.blocks.functions import BlockFunction
from tl_coupling.blocks.gate import Remarks
from tl_coupling.blocks.recording import record, user_hooks
from tl_coupling.border import FloatDtype, checked
from tl_coupling.models import context_length, describe_kind, describe_model, str_tokens, tokenize
from tl_coupling.prompts import Prompt

_ONE_PROMPT = "trace prompts one at a time; token ids are whole numbers"


@dataclass(frozen=True, eq=False)
class Trace:
    """The trajectory of every token through one model, and the block functions along it.

    Attributes:
        model: the TransformerLens model that was run.
        tokens: token ids, `[n_pos]`.
        str_tokens: the same tokens as text.
        residual: the residual stream, `[n_layers+1 n_pos d_model]`: entry 0 is what enters block 0, entry `l + 1` what
            leaves block `l`. The last entry is normalised if `final_norm`.
        blocks: one `BlockFunction` for each layer.
        final_norm: whether the last block function includes the final norm.
        provenance: how all this was made; JSON-able.
    """

    model: nn.Module
    tokens: Int[Tensor, " n_pos"]
    str_tokens: tuple[str, ...]
    residual: Float[Tensor, "n_layers_plus_1 n_pos d_model"]
    blocks: tuple[BlockFunction, ...]
    final_norm: bool
    provenance: dict[str, Any]

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def n_pos(self) -> int:
        """Number of tokens."""
        return self.residual.shape[1]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.residual.shape[2]

    def layer_index(self, layer: int, name: str = "layer") -> int:
        """A layer counted from 0; negative ones count from the end."""
        return _index(layer, self.n_layers, name, f"{self.n_layers}-block model")

    def position_index(self, position: int, name: str = "position") -> int:
        """A token position counted from 0; negative ones count from the end."""
        return _index(position, self.n_pos, name, f"{self.n_pos}-token prompt")

    @checked
    def logits(self, x: Float[Tensor, "*batch d_model"], normalised: bool = False) -> Float[Tensor, "*batch d_vocab"]:
        """Logits of a residual stream: what the model computes from it after its last block.

        With `normalised`, `x` has already passed the final norm.

        Raises:
            ValueError: the model has no logits for every token, or they do not follow from what leaves its last block;
                `normalised`, but the model has no final norm; no rows, or rows of another width than the model's.

        Cost: embedding and unembedding of the rows. The first call for a model also runs all of it once, and once more
            if `normalised`.
        """
        return tails.logits(self.model, self.tokens, x, normalised)

    def __repr__(self) -> str:
        return (
            f"Trace({self.provenance['model']!r}, n_layers={self.n_layers}, n_pos={self.n_pos}, "
            f"d_model={self.d_model}, final_norm={self.final_norm}, tokens={list(self.str_tokens)})"
        )


def _one_stream(model: nn.Module) -> None:
    """Raise unless this is a TransformerLens model with one residual stream that draws no random numbers."""
    if not hasattr(model, "cfg"):
        raise TypeError(
            f"wanted a TransformerLens model (TransformerBridge or HookedTransformer), got {type(model).__name__}; "
            "`tl_coupling.load_model(name)` makes one"
        )
    if kind := describe_kind(model):
        raise ValueError(f"is {kind}")
    for name, module in model.named_modules():
        if module.training and (what := _drawn_at_random(module)):
            raise ValueError(f"must draw no random numbers, {name or 'it'} is in train mode with {what}: call .eval()")


def _drawn_at_random(module: nn.Module) -> str | None:
    """The setting for which a module in train mode draws random numbers."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"p = {module.p}" if module.p > 0 else None
    # HuggingFace's attention and mixtures keep theirs as numbers.
    drawn = (
        f"{name} = {value}"
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and any(word in name for word in ("drop", "jitter"))
    )
    return next(drawn, None)


@checked
def trace(
    model: Annotated[nn.Module, _one_stream],
    prompt: Annotated[str | Prompt | Sequence[int] | Int[Tensor, "*batch n_pos"], _ONE_PROMPT],
    *,
    prepend_bos: bool | None = None,
    final_norm: bool = False,
    dtype: FloatDtype | None = None,
) -> Trace:
    """Run the model once and keep its residual stream and its blocks as functions.

    `X^l = X^{l−1} + f^l(X^{l−1})` (Aubry et al. 2025, eq. 6); `trace.residual[l]` is `X^l`, `trace.blocks[l]` is
    `f^{l+1}`, as the paper counts from one. A model that runs its blocks several times has a layer for each call.

    Hooks on the model are part of what is traced and measured; the provenance lists them. Weights and hooks must stay
    as they are until the trace has been measured: a block that is no longer the function that was traced raises
    `StepError`, one whose derivative disagrees with a finite difference `DerivativeError`. Autocast, TF32 and fused
    attention are off while a model is traced or measured.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode. Measured as it is: processed weights
            (`center_writing_weights`) raise a warning, because they change the residual stream.
        prompt: text, a `Prompt`, or token ids (`[n_pos]` or `[1 n_pos]`). One prompt, unpadded.
        prepend_bos: whether text gets a BOS token; `None` follows the tokenizer's own default (none for GPT-2 and
            Pythia, one for Llama), not TransformerLens'. Tokens that the tokenizer appends are left off, except for
            bidirectional models (BERT). Token ids are taken as they are.
        final_norm: include the model's final norm in the last block, as the paper's code does by reading HuggingFace's
            `hidden_states`. Changes the last block only, but greatly; off by default.
        dtype: the precision in which blocks are linearised; float32 by default, float64 for a float64 model.

    Raises:
        ValueError: an empty prompt, one longer than the context, unknown token ids, a model in train mode with dropout,
            a model without a single residual stream, weights or activations that are not finite.

    Cost: one forward pass, to the last block; memory for `n_layers + 1` copies of the residual stream.

    Example:
        >>> trace = tlc.trace(model, "w3 w14 w15 w92")
        >>> trace.residual.shape
        torch.Size([3, 4, 32])
        >>> torch.allclose(trace.residual[0] + trace.blocks[0](trace.residual[0]), trace.residual[1], atol=1e-5)
        True
    """
    prompt = prompt.prompt if isinstance(prompt, Prompt) else prompt
    tokens, tokenization = tokenize(model, prompt, prepend_bos)
    _check_tokens(model, tokens)
    parameter = next(model.parameters())
    dtype = dtype or (torch.float64 if parameter.dtype == torch.float64 else torch.float32)
    if torch.finfo(dtype).bits < 32:
        raise ValueError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")

    hooks = user_hooks(model)
    passed = record(model, tokens[None].to(parameter.device))
    stream = [call.X[0].to(dtype) for call in passed.calls] + [passed.calls[-1].Y[0].to(dtype)]
    _check_stream(stream, [call.Y[0].to(dtype) for call in passed.calls], model)

    remarks, last = Remarks(), len(passed.calls) - 1
    norms = {last: tails.final_norm(model, tokens)} if final_norm else {}
    blocks = tuple(passed.block_function(layer, dtype, remarks, norms.get(layer)) for layer in range(last + 1))
    if final_norm:
        stream[-1] = stream[-2] + blocks[-1].step
    residual, text = torch.stack(stream), str_tokens(model, tokens)
    provenance = {
        **describe_model(model, residual[:-1]),
        **tokenization,
        "prompt": prompt if isinstance(prompt, str) else None,
        "tokens": tokens.tolist(),
        "str_tokens": list(text),
        "n_layers": len(blocks),
        "final_norm": final_norm,
        "linearised_in": str(dtype).removeprefix("torch."),
        "hooks": hooks,
        "rounded_arguments": sorted(passed.rounded),
        "remarks": remarks.texts,
    }
    return Trace(model, tokens, text, residual, blocks, final_norm, provenance)


def _index(value: int, size: int, name: str, what: str) -> int:
    index = operator.index(value)
    if not -size <= index < size:
        raise ValueError(f"`{name}` must lie in [{-size}, {size - 1}] for this {what}, got {index}")
    return index % size


def _check_tokens(model: Any, tokens: Int[Tensor, " n_pos"]) -> None:
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: wanted at least one token")
    n_ctx, d_vocab = context_length(model), model.cfg.d_vocab
    if n_ctx is not None and n_ctx < len(tokens):
        raise ValueError(f"the prompt has {len(tokens)} tokens, this model's context holds {n_ctx}: shorten the prompt")
    if d_vocab is not None and d_vocab > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab:
        raise ValueError(f"token ids must lie in [0, {d_vocab - 1}], got {int(tokens.min())} … {int(tokens.max())}")


def _check_stream(pre: list[Tensor], post: list[Tensor], model: Any) -> None:
    for layer, X in enumerate(pre):
        if not bool(torch.isfinite(X).all()):
            culprits = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
            found = f"parameter {culprits[0]!r} is not finite" if culprits else "all parameters are finite"
            raise ValueError(f"the residual stream at layer {layer} has NaN or infinite entries; {found}")
    for layer, (X, Y) in enumerate(zip(pre[1:], post, strict=True)):
        if not torch.equal(X, Y):
            n_blocks = len(model.blocks)
            again = ", where the model runs its blocks again" if layer + 1 == n_blocks else ""
            raise ValueError(
                f"the output of block {layer % n_blocks} is changed before the next block{again}: not one residual "
                "stream"
            )
