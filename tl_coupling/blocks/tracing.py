"""`trace`: one forward pass that records the residual stream and how every block was called."""

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.blocks import tails
from tl_coupling.blocks.calls import BlockCall, RecordedCall, hidden_states
from tl_coupling.blocks.evaluation import (
    exact_arithmetic,
    hear_interrupts,
    is_out_of_memory,
    map_tensors,
    own_arithmetic,
)
from tl_coupling.blocks.functions import BlockFunction, Remarks
from tl_coupling.border import FloatDtype, checked
from tl_coupling.models import context_length, describe_kind, describe_model, is_bridge, str_tokens, tokenize
from tl_coupling.prompts import Prompt

_ONE_PROMPT = "trace prompts one at a time; token ids are whole numbers"


@dataclass(frozen=True, eq=False)
class Trace:
    """The trajectory of every token through one model, and `blocks`, the function of each layer along it.

    `residual[0]` is what enters block 0, `residual[l + 1]` what leaves block `l`; the last entry is normalised if
    `final_norm`, and the last block function includes that norm. `provenance`, how all this was made, is JSON-able.
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
        """What the model computes from a residual stream after its last block, or its final norm if `normalised`.

        In float32, or float64 for a model in float64.

        Raises:
            ValueError: the model has no logits for every token, or they do not follow from what leaves its last block;
                `normalised`, but the model has no final norm; no rows, or rows of another width than the model's.

        Cost: embedding and unembedding of the rows; one run of the model at the first call, two if `normalised`.
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
    numbers = ((name, value) for name, value in vars(module).items() if isinstance(value, float) and value > 0)
    return next((f"{name} = {value}" for name, value in numbers if "drop" in name or "jitter" in name), None)


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

    Weights, and hooks, which are part of what is measured and listed in the provenance, must stay as they are until the
    trace has been measured: a block that is another function by then raises `StepError`, one whose derivative disagrees
    with a finite difference `DerivativeError`. Autocast, TF32 and fused attention are off.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode. Measured as it is: processed weights
            (`center_writing_weights`) raise a warning, because they change the residual stream.
        prompt: text, a `Prompt`, or token ids (`[n_pos]` or `[1 n_pos]`), taken as they are. One prompt, unpadded.
        prepend_bos: whether text gets a BOS token; `None` follows the tokenizer, not TransformerLens. Tokens that the
            tokenizer appends are left off, except for bidirectional models (BERT).
        final_norm: include the model's final norm in the last block, as the paper's code does by reading HuggingFace's
            `hidden_states`. Changes the last block only, but greatly.
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

    hooks = _user_hooks(model)
    passed = _record(model, tokens[None].to(parameter.device))
    stream = [call.X[0].to(dtype) for call in passed.calls] + [passed.calls[-1].Y[0].to(dtype)]
    _check_stream(stream, [call.Y[0].to(dtype) for call in passed.calls], model)

    remarks, n_layers = Remarks(), len(passed.calls)
    norms = {n_layers - 1: tails.final_norm(model, tokens)} if final_norm else {}
    blocks = tuple(passed.block_function(layer, dtype, remarks, norms.get(layer)) for layer in range(n_layers))
    if final_norm:
        stream[-1] = stream[-2] + blocks[-1].step
    residual, text = torch.stack(stream), str_tokens(model, tokens)
    provenance = {
        **describe_model(model, residual[:-1]),
        **tokenization,
        "prompt": prompt if isinstance(prompt, str) else None,
        "tokens": tokens.tolist(),
        "str_tokens": list(text),
        "n_layers": n_layers,
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
    least, most = int(tokens.min()), int(tokens.max())
    if d_vocab is not None and d_vocab > 0 and not 0 <= least <= most < d_vocab:
        raise ValueError(f"token ids must lie in [0, {d_vocab - 1}], got {least} … {most}")


def _check_stream(pre: list[Tensor], post: list[Tensor], model: Any) -> None:
    for layer, X in enumerate(pre):
        if not bool(torch.isfinite(X).all()):
            culprits = [f"parameter {n!r} is not finite" for n, p in model.named_parameters() if not p.isfinite().all()]
            found = next(iter(culprits), "all parameters are finite")
            raise ValueError(f"the residual stream at layer {layer} has NaN or infinite entries; {found}")
    for layer, (X, Y) in enumerate(zip(pre[1:], post, strict=True)):
        if not torch.equal(X, Y):
            again = ", where the model runs its blocks again" if layer + 1 == len(model.blocks) else ""
            changed = f"the output of block {layer % len(model.blocks)} is changed before the next block{again}"
            raise ValueError(f"{changed}: not one residual stream")


@dataclass(frozen=True, eq=False)
class _Passage:
    """Every call of a block in one forward pass, in order; `entered` are those that have not returned.

    `made` holds what modules outside the blocks produced (rotary embeddings), by the tensor's id: the tensor itself,
    its index in the output, the module and its arguments. `rounded` names the arguments that were cast as they are.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    entered: list[tuple[BlockCall, Tensor]] = field(default_factory=list)
    made: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear_interrupts()
        call, X = BlockCall.captured(module, args, kwargs)
        # A block may add to the stream in place.
        self.entered.append((call, X.detach().clone()))

    def leave(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        call, X = self.entered.pop()
        dtypes = frozenset(p.dtype for p in module.parameters() if p.is_floating_point()) | {X.dtype}
        self.calls.append(RecordedCall(call, X, hidden_states(output).detach().clone(), dtypes))

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for part, tensor in enumerate(output) if isinstance(output, tuple | list) else [(None, output)]:
            if isinstance(tensor, Tensor) and not self.entered:
                self.made.setdefault(id(tensor), (tensor, part, module, args, kwargs))

    def block_function(self, layer: int, dtype: torch.dtype, remarks: Remarks, norm: nn.Module | None) -> BlockFunction:
        """The block function of one call, in `dtype`."""
        recorded = self.calls[layer]
        X, Y = recorded.X[0].to(dtype), recorded.Y[0].to(dtype)
        if norm is not None:
            with exact_arithmetic(X.device, [norm], dtype):
                Y = norm(Y[None]).reshape(Y.shape)
        given = recorded.call.arguments.items()
        arguments = {name: map_tensors(value, partial(self._in_dtype, dtype, name)) for name, value in given}
        call = replace(recorded.call, arguments=arguments)
        return BlockFunction(layer, call, X, Y - X, norm, recorded if recorded.dtypes - {dtype} else None, remarks)

    def _in_dtype(self, dtype: torch.dtype, name: str, tensor: Tensor) -> Tensor:
        """A captured argument in `dtype`: computed again by its module in that precision, or else as it was rounded."""
        if tensor.dtype == dtype:
            return tensor
        if id(tensor) not in self.made:
            if "mask" not in name:  # Masks are exact.
                self.rounded.add(name)
            return tensor.to(dtype)
        _, part, module, *given = self.made[id(tensor)]
        args, kwargs = map_tensors(given, lambda one: one.to(dtype))
        with exact_arithmetic(tensor.device, [module], dtype):
            output = module(*args, **kwargs)
        again = output if part is None else output[part]
        return (again if again.shape == tensor.shape else tensor).to(dtype)


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not needed."""


def _record(model: Any, tokens: Int[Tensor, "1 n_pos"]) -> _Passage:
    """Run the model on token ids, up to its unembedding."""

    def unembed(*_: Any) -> None:
        raise _BlocksDone

    passage = _Passage()
    arguments = {"use_cache": False} if is_bridge(model) else {}
    inside = {id(module) for block in model.blocks for module in block.modules()}
    with own_arithmetic(model), tails.runnable(model), suppress(_BlocksDone), ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_pre_hook(passage.enter, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(passage.leave))
        # A bridge does not list every part of the model that it wraps.
        for module in {*model.modules(), *getattr(model, "original_model", model).modules()}:
            if "rotary" in type(module).__name__.lower() and id(module) not in inside:
                hooks.enter_context(module.register_forward_hook(passage.make, with_kwargs=True))
        if isinstance(getattr(model, "unembed", None), nn.Module):
            hooks.enter_context(model.unembed.register_forward_pre_hook(unembed))
        try:
            model(tokens, return_type=None, **arguments)
        except (RuntimeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:300]
            given = "".join(f", {name}={value}" for name, value in arguments.items())
            raise ValueError(
                f"the model itself fails when called as `model(tokens{given})` ({type(error).__name__}: {said}): try "
                "another dtype, or another version of TransformerLens"
            ) from error
    _check_calls(passage.calls, list(model.blocks), tokens.shape[1])
    return passage


def _check_calls(calls: list[RecordedCall], blocks: list[nn.Module], n_pos: int) -> None:
    modules = [recorded.call.module for recorded in calls]
    if not calls or modules != blocks * (len(calls) // len(blocks)):
        order = [next((i for i, block in enumerate(blocks) if block is module), "?") for module in modules]
        raise ValueError(
            f"wanted a model that calls its {len(blocks)} blocks one after the other, this one called them in the "
            f"order {order}"
        )
    for layer, (_, X, Y, _) in enumerate(calls):
        if X.ndim != 3 or X.shape[:2] != (1, n_pos) or X.shape != Y.shape:
            raise ValueError(
                f"wanted one residual stream [1 n_pos d_model] = [1 {n_pos} d_model], block {layer} takes "
                f"{list(X.shape)} and gives {list(Y.shape)}: several parallel streams (hyper-connections, AltUp), or "
                "patches, are not X + f(X) of one"
            )


def _user_hooks(model: nn.Module) -> list[str]:
    """Names of the hook points and modules with a forward hook of the user's; it is part of what is measured."""

    def of_user(hook: Callable[..., Any]) -> bool:
        made_in = str(getattr(getattr(hook, "func", hook), "__module__", ""))
        return made_in.split(".")[0] not in ("transformer_lens", "transformers", "accelerate", "torch")

    def plain(module: nn.Module) -> tuple[Any, ...]:
        return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())

    modules = model.named_modules()
    return [name for name, part in modules if getattr(part, "fwd_hooks", None) or any(map(of_user, plain(part)))]
