"""`trace` and `trace_modules`: one forward pass that records the residual stream and
how every block was called.
"""

import operator
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from tl_coupling.arguments import FloatDtype, Text, checked, made_by
from tl_coupling.blocks import tails
from tl_coupling.blocks.arithmetic import (
    exact_arithmetic,
    is_out_of_memory,
    own_arithmetic,
)
from tl_coupling.blocks.passages import Passage
from tl_coupling.blocks.streamed import without_blocks
from tl_coupling.gradients.function import BlockFunction
from tl_coupling.gradients.remarks import Remarks
from tl_coupling.models import (
    ModelInput,
    describe_kind,
    describe_model,
    describe_modules,
    facts_of,
    is_bridge,
    missing_head,
    model_input,
)
from tl_coupling.prompts import Prompt
from tl_coupling.traces.sweeps import Sweep

_ONE_INPUT = "trace prompts one at a time; token ids are whole numbers"
_Input = str | os.PathLike[str] | Prompt | Image.Image | Sequence[int]


@made_by("trace(model, prompt)")
@dataclass(frozen=True, eq=False)
class Trace:
    """The trajectory of every token through one model, and `blocks`, the function of
    each layer along it.

    `residual[0]` is what enters block 0, `residual[l + 1]` what leaves block `l`; the
    last entry is normalised if `final_norm`, and the last block function includes that
    norm. `provenance`, how all this was made, is JSON-able.

    `tokens` are token ids, or `None` where the model reads something else; `str_tokens`
    names the tokens: their text, or `cls` and the `row,column` of each patch of an
    image, whose `pixels` are kept.

    Example:
        >>> trace = tlc.trace(model, "w3 w14 w15 w92")
        >>> trace.n_layers, trace.n_pos, trace.d_model, trace.str_tokens
        (2, 4, 32, ('w3', 'w14', 'w15', 'w92'))
    """

    model: nn.Module
    tokens: Int[Tensor, " n_pos"] | None
    str_tokens: tuple[str, ...]
    residual: Float[Tensor, "n_layers_plus_1 n_pos d_model"]
    blocks: Sequence[BlockFunction]
    final_norm: bool
    provenance: dict[str, Any]
    pixels: Float[Tensor, "1 channels height width"] | None = None

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

    @property
    def is_streamed(self) -> bool:
        """Whether the model's weights stay on disk, and are read block by block."""
        return facts_of(self.model).is_streamed

    @cached_property
    def is_causal(self) -> bool:
        """Whether no token acts on an earlier one, in any block. Costs at most one
        forward pass of all blocks.
        """
        # Every later row is another one: does the first change?
        heads = (
            block(torch.cat([block.X[:1], -block.X[1:]]))[0] for block in self.blocks
        )
        pairs = zip(heads, self.blocks, strict=True)
        return all(
            bool((y - f.step[0]).norm() <= 1e-5 * (f.step[0].norm() + f.X[0].norm()))
            for y, f in pairs
        )

    def layer_index(self, layer: int, name: str = "layer") -> int:
        """A layer counted from 0; negative ones count from the end."""
        return _index(layer, self.n_layers, name, f"{self.n_layers}-block model")

    def position_index(self, position: int, name: str = "position") -> int:
        """A token position counted from 0; negative ones count from the end."""
        return _index(position, self.n_pos, name, f"{self.n_pos}-token prompt")

    @checked
    def logits(
        self, x: Float[Tensor, "*batch d_model"], normalised: bool = False
    ) -> Float[Tensor, "*batch d_vocab"]:
        """What the model computes from a residual stream after its last block, or its
        final norm if `normalised`.

        In float32, or float64 for a model in float64. Of an image classifier, the
        logits of its classes with `x` as the class token.

        Raises:
            ValueError: the model has no logits for every token, or they do not follow
                from what leaves its last block; `normalised`, but the model has no
                final norm; no rows, rows of another width than the model's, or entries
                that are not finite.

        Cost: embedding and unembedding of the rows; one run of the model at the first
        call, two if `normalised`.
        """
        batch = self.pixels if self.tokens is None else self.tokens[None]
        if batch is None:
            raise ValueError(
                "modules were traced, not a model: it is not known how logits follow from their stream"
            )
        return tails.logits(self.model, batch, x, normalised)

    def __repr__(self) -> str:
        return (
            f"Trace({self.provenance['model']!r}, n_layers={self.n_layers}, n_pos={self.n_pos}, "
            f"d_model={self.d_model}, final_norm={self.final_norm}, tokens={list(self.str_tokens)})"
        )


class _SweepTrace(Trace):
    """A trace whose blocks, a `Sweep`, run when they are first asked for."""

    blocks: Sweep

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @cached_property
    def residual(self) -> Float[Tensor, "n_layers_plus_1 n_pos d_model"]:
        return self.blocks.residual()

    @property
    def n_pos(self) -> int:
        return len(self.blocks.embedded)

    @property
    def d_model(self) -> int:
        return self.blocks.embedded.shape[1]


def _one_stream(model: nn.Module) -> None:
    """Raise unless this is a TransformerLens model with one residual stream that draws
    no random numbers.
    """
    if not hasattr(model, "cfg"):
        raise TypeError(
            f"wanted a TransformerLens model (TransformerBridge or HookedTransformer), got {type(model).__name__}; "
            "`tl_coupling.load_model(name)` makes one, and `tl_coupling.trace_modules` takes any residual network"
        )
    if kind := describe_kind(model):
        raise ValueError(f"is {kind}")
    _computes_the_same(model)


def _computes_the_same(model: nn.Module) -> None:
    """Raise unless a call of the model changes nothing and draws nothing, and its code
    can be followed.
    """
    for name, module in model.named_modules():
        part = name or "it"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"must be modules in Python, {part} is compiled by torch.jit: give what it was made from"
            )
        if not module.training:
            continue
        if drawn := _drawn_at_random(module):
            raise ValueError(
                f"must draw no random numbers, {part} is in train mode with {drawn}: call .eval()"
            )
        if (
            isinstance(module, nn.modules.batchnorm._NormBase)
            and module.track_running_stats
        ):
            raise ValueError(
                f"must be the same in every call, {part} is a {type(module).__name__} in train mode, which changes its "
                "running statistics: call .eval()"
            )


def _drawn_at_random(module: nn.Module) -> str | None:
    """The setting for which a module in train mode draws random numbers."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"p = {module.p}" if module.p > 0 else None
    # HuggingFace's attention and mixtures keep theirs as numbers.
    numbers = (
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
    )
    return next(
        (
            f"{name} = {value}"
            for name, value in numbers
            if "drop" in name or "jitter" in name
        ),
        None,
    )


@checked
def trace(
    model: Annotated[nn.Module, _one_stream],
    prompt: Annotated[
        _Input | Int[Tensor, "*batch n_pos"] | Float[Tensor, "*pixels"], _ONE_INPUT
    ],
    *,
    prepend_bos: bool | None = None,
    final_norm: bool = False,
    dtype: FloatDtype | None = None,
) -> Trace:
    r"""Run the model once and keep its residual stream and its blocks as functions.

    .. math:: X^l = X^{l-1} + f^l(X^{l-1})

    `trace.residual[l]` is `X^l`, `trace.blocks[l]` is `f^{l+1}`: Aubry et al. 2025, eq.
    6, count from one. A model that runs its blocks several times has a layer for each
    call.

    Weights, and hooks, which are part of what is measured and listed in the provenance,
    must stay as they are until the trace has been measured: a block that is another
    function by then raises `StepError`, one whose derivative disagrees with a finite
    difference `DerivativeError`. Autocast, TF32 and fused attention are off.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode. Measured as it
            is: processed weights (`center_writing_weights`) raise a warning, because
            they change the residual stream.
        prompt: text, a `Prompt`, or token ids (`[n_pos]` or `[1 n_pos]`), taken as they
            are. One prompt, unpadded. For a vision model an image: pixels (`[1 channels
            height width]`, taken as they are), a PIL image or a file, which the
            processor saved with the model prepares. Its patches are the tokens, after
            the class token. An image of at most 2²⁶ pixels (8,192 × 8,192) is turned
            upright, as its EXIF orientation says. Greys of 16 bits are scaled to 8; of
            frames one is read, CMYK becomes RGB, transparency is ignored: with a
            remark.
        prepend_bos: whether text gets a BOS token; `None` follows the tokenizer, not
            TransformerLens. Tokens that the tokenizer appends are left off, except for
            bidirectional models (BERT).
        final_norm: include the model's final norm in the last block, as the paper's
            code does by reading HuggingFace's `hidden_states`. Changes the last block
            only, but greatly.
        dtype: the precision in which blocks are linearised; float32 by default, float64
            for a float64 model.

    Raises:
        ValueError: an empty prompt, one longer than the context, unknown token ids, a
            model in train mode with dropout or BatchNorm, a model without a single
            residual stream, weights or activations that are not finite; an image
            without pixels or with too many, or one that cannot be decoded.

    Cost: one forward pass, to the last block; memory for `n_layers + 1` copies of the
    residual stream.

    Example:
        >>> trace = tlc.trace(model, "w3 w14 w15 w92")
        >>> trace.residual.shape
        torch.Size([3, 4, 32])
        >>> torch.allclose(trace.residual[0] + trace.blocks[0](trace.residual[0]), trace.residual[1], atol=1e-5)
        True
    """
    if isinstance(prompt, Prompt):
        prompt = Path(prompt.image) if prompt.image else prompt.prompt
    given = model_input(model, prompt, prepend_bos)
    dtype = _precision(dtype, next(model.parameters()).dtype)
    norm = tails.final_norm(model, given.batch) if final_norm else None
    passage = _record(model, given, dtype)
    return _traced(
        model,
        passage,
        dtype,
        given.str_tokens,
        partial(describe_model, model),
        norm,
        given,
    )


@checked
def trace_modules(
    blocks: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
    run: Callable[[], Any],
    *,
    name: Text | None = None,
    str_tokens: Sequence[str] | None = None,
    dtype: FloatDtype | None = None,
) -> Trace:
    """`trace` for any residual network: timm, plain PyTorch, HuggingFace's own modules,
    …

    What can be measured of a `Trace` can be measured of this one, but for logits. The
    Jacobians pass the same checks; they are computed on the full sequence where nothing
    cheaper agrees with it.

    `trace.blocks` are `f(X) = block(X) − X`, whatever a block does. Of one that
    normalises the stream itself (`x = norm(x); x = x + f(x)`, or the post-norm of BERT)
    f holds `−I`: that is noted in `provenance["remarks"]`, with a warning, and coupling
    compares what its residual branches add before their norms (`normalising_layers`).

    Args:
        blocks: modules that take the residual stream first, `[1 n_pos d_model]` (or
            `[n_pos 1 d_model]`, `[n_pos d_model]`), and return it with what they add,
            alone or first in a tuple. In the order in which they run. They may add in
            place: what is stored is never changed.
        run: runs the model once, on one input: `lambda: model(x)`. It must call every
            block, each on what the one before gave.
        name: what results call the network; by default the blocks' class.
        str_tokens: the tokens' names; their positions by default.
        dtype: as in `trace`.

    Raises:
        ValueError: blocks that are not called in this order, or that do not get the
            stream that the one before gave (the layer is named); more than one input;
            dropout or BatchNorm in train mode; modules that torch.jit compiled; a
            stream that is not finite; not as many `str_tokens` as tokens.

    Cost: one call of `run` and one forward pass of the blocks.

    Example:
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, norm_first=True).eval() for _ in range(3)]
        >>> encoder, x = torch.nn.Sequential(*layers), torch.randn(5, 1, 16)
        >>> traced = tlc.trace_modules(layers, lambda: encoder(x), name="encoder")
        >>> tlc.depth_coupling(traced, k=4).coupling().shape
        torch.Size([3, 3])
    """
    if not (blocks := list(blocks)):
        raise ValueError("`blocks` is empty: wanted at least one module")
    model = nn.ModuleList(blocks)
    try:
        _computes_the_same(model)
    except ValueError as error:
        raise ValueError(f"`blocks` {error}") from None
    with own_arithmetic(model):
        passage = Passage.of(model, blocks, run)
    dtype = _precision(dtype, passage.calls[0].X.dtype)
    describe = partial(describe_modules, model, name or type(blocks[0]).__name__)

    def names(n_pos: int) -> tuple[str, ...]:
        found = tuple(map(str, range(n_pos)) if str_tokens is None else str_tokens)
        if len(found) != n_pos:
            raise ValueError(
                f"`str_tokens` must name {n_pos} tokens, got {len(found)} names"
            )
        return found

    traced = _traced(model, passage, dtype, names, describe)
    for f in traced.blocks:
        f.remark_on_norms()
    return traced


def _precision(asked: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    dtype = asked or (torch.float64 if own == torch.float64 else torch.float32)
    if torch.finfo(dtype).bits < 32:
        raise ValueError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def _traced(
    model: nn.Module,
    passage: Passage,
    dtype: torch.dtype,
    names: Callable[[int], tuple[str, ...]],
    describe: Callable[[Tensor], dict[str, Any]],
    norm: nn.Module | None = None,
    given: ModelInput | None = None,
) -> Trace:
    """What was recorded, as block functions in `dtype`; the last one with the norm, if
    there is one.
    """
    remarks, last = Remarks(), len(passage.calls) - 1
    for remark in given.remarks if given else ():
        remarks.add(remark, remark)
    if why := missing_head(model):
        remarks.add(
            "head",
            f"the model's head is {why}: there are no logits, entropies and losses",
        )
    make: type[Trace] = Trace
    blocks: Sequence[BlockFunction]
    streams: dict[str, Any] = {}
    if facts_of(model).is_streamed:
        make, blocks = _SweepTrace, (sweep := Sweep(passage, dtype, remarks, norm))
        entering = sweep.embedded[None]
    else:
        stream = passage.stream(dtype)
        norms = [None] * last + [norm]
        blocks = tuple(
            _block_function(passage, i, dtype, remarks, one)
            for i, one in enumerate(norms)
        )
        if norm is not None:
            stream[-1] = stream[-2] + blocks[-1].step.to(stream[-2].device)
        streams["residual"] = torch.stack(stream)
        entering = streams["residual"][:-1]
    text = names(entering.shape[1])
    provenance = {
        **describe(entering),
        **(given.provenance if given else {}),
        "str_tokens": list(text),
        "n_layers": last + 1,
        "final_norm": norm is not None,
        "linearised_in": str(dtype).removeprefix("torch."),
        "hooks": _user_hooks(model),
        "rounded_arguments": sorted(passage.rounded),
        "remarks": remarks.texts,
        "normalising_layers": remarks.normalising_layers,
    }
    tokens = given.tokens if given else None
    pixels = given.batch if given and tokens is None else None
    of_all: dict[str, Any] = {
        "blocks": blocks,
        "final_norm": norm is not None,
        "provenance": provenance,
    }
    return make(
        model=model, tokens=tokens, str_tokens=text, pixels=pixels, **streams, **of_all
    )


def _block_function(
    passage: Passage,
    layer: int,
    dtype: torch.dtype,
    remarks: Remarks,
    norm: nn.Module | None,
) -> BlockFunction:
    """The block function of one call, in `dtype`."""
    recorded = passage.calls[layer]
    X, Y = recorded.X.to(dtype), recorded.Y.to(dtype)
    if norm is not None:
        with exact_arithmetic(X.device, [norm], dtype):
            Y = norm(Y[None]).reshape(Y.shape)
    other = recorded if recorded.dtypes - {dtype} else None
    return BlockFunction(
        layer, passage.call(layer, dtype), X, Y - X, norm, other, remarks
    )


def _index(value: int, size: int, name: str, what: str) -> int:
    index = operator.index(value)
    if not -size <= index < size:
        raise ValueError(
            f"`{name}` must lie in [{-size}, {size - 1}] for this {what}, got {index}"
        )
    return index % size


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not
    needed.
    """


def _record(model: Any, given: ModelInput, dtype: torch.dtype) -> Passage:
    """Run the model on its input, up to its unembedding; in `dtype` and without its
    blocks if weights are elsewhere.
    """

    def unembed(*_: Any) -> None:
        raise _BlocksDone

    arguments = (
        {"use_cache": False} if is_bridge(model) and given.tokens is not None else {}
    )

    def run() -> None:
        try:
            model(
                given.batch.to(next(model.parameters()).device),
                return_type=None,
                **arguments,
            )
        except (RuntimeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:300]
            options = "".join(f", {name}={value}" for name, value in arguments.items())
            what = "tokens" if given.tokens is not None else "pixels"
            raise ValueError(
                f"the model itself fails when called as `model({what}{options})` ({type(error).__name__}: {said}): try "
                f"{'another dtype' if given.tokens is not None else 'pixels of the shape it was made for'}, or another "
                "version of TransformerLens"
            ) from error

    def until_unembedding() -> None:
        with suppress(_BlocksDone):
            run()

    with own_arithmetic(model, dtype), tails.runnable(model), ExitStack() as hooks:
        if isinstance(getattr(model, "unembed", None), nn.Module):
            # Before its weights are read.
            hooks.enter_context(
                model.unembed.register_forward_pre_hook(unembed, prepend=True)
            )
        n_pos = None if given.tokens is None else len(given.tokens)
        if facts_of(model).is_streamed:
            return without_blocks(model, until_unembedding, n_pos)
        return Passage.of(model, list(model.blocks), until_unembedding, n_pos)


def _user_hooks(model: nn.Module) -> list[str]:
    """Names of the hook points and modules with a forward hook of the user's; it is
    part of what is measured.
    """

    def of_user(hook: Callable[..., Any]) -> bool:
        made_in = str(getattr(getattr(hook, "func", hook), "__module__", ""))
        return made_in.split(".")[0] not in (
            "transformer_lens",
            "transformers",
            "accelerate",
            "torch",
        )

    def plain(module: nn.Module) -> tuple[Any, ...]:
        return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())

    modules = model.named_modules()
    return [
        name
        for name, part in modules
        if getattr(part, "fwd_hooks", None) or any(map(of_user, plain(part)))
    ]
