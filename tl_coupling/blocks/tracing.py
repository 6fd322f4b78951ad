"""`trace` and `trace_modules`: one forward pass that records the residual stream and
how every block was called.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from tl_coupling.arguments import FloatDtype, Text, checked
from tl_coupling.blocks import tails
from tl_coupling.blocks.agreement import measured_pass
from tl_coupling.blocks.arithmetic import (
    autocast_off_within,
    exact_arithmetic,
    own_arithmetic,
)
from tl_coupling.blocks.forward_passes import ForwardPass
from tl_coupling.blocks.function import BlockFunction
from tl_coupling.blocks.hooks import hooks_of_user, spliced_modules
from tl_coupling.blocks.remarks import Remarks
from tl_coupling.blocks.requirements import check_computes_the_same, check_one_stream
from tl_coupling.blocks.sweeps import Sweep
from tl_coupling.blocks.trace import StreamedTrace, Trace
from tl_coupling.models import (
    ModelInput,
    describe_model,
    describe_modules,
    facts_of,
    is_huggingface,
    missing_head,
    model_input,
    own_model_of,
    refuse_without_weights,
)
from tl_coupling.prompts import Prompt
from tl_coupling.results import INPUT_DIGEST, digest_of

_ONE_INPUT = "trace prompts one at a time; token ids are whole numbers"
_Input = str | os.PathLike[str] | Prompt | Image.Image | Sequence[int]


@checked
def trace(
    model: Annotated[nn.Module, check_one_stream],
    prompt: Annotated[
        _Input
        | Int[Tensor, "*batch n_pos"]
        | Float[Tensor, "*pixels"]
        | Mapping[str, Any],
        _ONE_INPUT,
    ],
    *,
    tokenizer: Any = None,
    prepend_bos: bool | None = None,
    final_norm: bool = False,
    dtype: FloatDtype | None = None,
) -> Trace:
    r"""Run the model once and keep its residual stream and its blocks as functions.

    .. math:: X^l = X^{l-1} + f^l(X^{l-1})

    `trace.residual[l]` is `X^l`, `trace.blocks[l]` is `f^{l+1}`: Aubry et al. 2025, eq.
    6, count from one. A model that runs its blocks several times has a layer for each
    call.

    Weights, hooks, and modules in the place of hook points (an SAE of SAELens), which
    are part of what is measured and listed in the provenance, must stay as they are
    until the trace has been measured: a block that is another function by then raises
    `StepError`, one whose derivative disagrees with a finite difference
    `DerivativeError`. Autocast, TF32 and fused attention are off, and what was compiled
    runs as it was written.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode, or a HuggingFace
            model in memory (fine-tuned, with an adapter of peft), which is measured in
            eval mode by its own modules, and left as it is. Measured as it is:
            processed weights (`center_writing_weights`) raise a warning, because
            they change the residual stream.
        prompt: text, a `Prompt`, or token ids (`[n_pos]` or `[1 n_pos]`), taken as they
            are; or what a tokenizer returns (`BatchEncoding`). One prompt, unpadded. For
            a vision model an image: pixels (`[1 channels
            height width]`, taken as they are), a PIL image or a file, which the
            processor saved with the model prepares. Its patches are the tokens, after
            the class token. An image of at most 2²⁶ pixels (8,192 × 8,192) is turned
            upright, as its EXIF orientation says. Greys of 16 bits are scaled to 8; of
            frames one is read, CMYK becomes RGB, transparency is ignored: with a
            remark.
        tokenizer: of a HuggingFace model in memory; without it, give token ids. Others
            have theirs.
        prepend_bos: whether text gets a BOS token; `None` follows the tokenizer as it
            was published, not TransformerLens, which may put one first. Tokens that the
            tokenizer appends are left off, except for bidirectional models (BERT).
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
        >>> Y = trace.residual[0] + trace.blocks[0](trace.residual[0])
        >>> torch.allclose(Y, trace.residual[1], atol=1e-5)
        True
    """
    if is_huggingface(model):
        model = own_model_of(model, tokenizer)
        check_one_stream(model)
    elif tokenizer is not None:
        raise ValueError(
            f"`tokenizer` is for HuggingFace models, {type(model).__name__} has its own: "
            "leave it out"
        )
    if isinstance(prompt, Prompt):
        prompt = prompt.content
    traced_input = model_input(model, prompt, prepend_bos)
    dtype = _precision(dtype, next(model.parameters()).dtype)
    # Looked for before the pass, so that a model without one is refused at once.
    norm = tails.final_norm(model, traced_input) if final_norm else None
    measured = measured_pass(model, traced_input, dtype)
    if final_norm and measured.model is not model:
        norm = tails.final_norm(measured.model, traced_input)

    def names(n_pos: int) -> tuple[str, ...]:
        return traced_input.str_tokens(measured.model, n_pos)

    def describe(entering: Tensor) -> dict[str, object]:
        return describe_model(measured.model, entering)

    recording = _Recording(
        measured.model,
        measured.forward_pass,
        dtype,
        names,
        describe,
        norm,
        traced_input,
        measured.remark,
        measured.own_pass,
    )
    return recording.trace()


@runtime_checkable
class Envoy(Protocol):
    """A module as nnsight and nnterp wrap it."""

    _module: nn.Module


@checked
def trace_modules(
    blocks: Sequence[nn.Module | Envoy] | nn.ModuleList | nn.Sequential | Envoy,
    run: Callable[[], object],
    *,
    name: Text | None = None,
    str_tokens: Sequence[str] | None = None,
    dtype: FloatDtype | None = None,
) -> Trace:
    """Trace any residual network, such as timm's, HuggingFace's or plain PyTorch.

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
            place: what is stored is never changed. Of nnsight's envoys, the modules
            that they wrap are taken.
        run: runs the model once, on one input: `lambda: model(x)`. It must call every
            block, each on what the one before gave. Blocks run without autocast.
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
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> layers = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
        >>> encoder = torch.nn.Sequential(*layers).eval()
        >>> x = torch.randn(5, 1, 16)
        >>> traced = tlc.trace_modules(layers, lambda: encoder(x), name="encoder")
        >>> tlc.depth_coupling(traced, k=4).coupling().shape
        torch.Size([3, 3])
    """
    modules = _unwrapped(blocks)
    # They are looked through, and their weights described, as one model.
    model = nn.ModuleList(modules)
    refuse_without_weights(model, "`blocks`")
    try:
        check_computes_the_same(model)
    except ValueError as error:
        raise ValueError(f"`blocks` {error}") from None
    with own_arithmetic(model), autocast_off_within(modules):
        forward_pass = ForwardPass.record(model, modules, run)
    dtype = _precision(dtype, forward_pass.calls[0].X.dtype)
    network = name or type(modules[0]).__name__

    def names(n_pos: int) -> tuple[str, ...]:
        if str_tokens is None:
            return tuple(map(str, range(n_pos)))
        if len(str_tokens) != n_pos:
            raise ValueError(
                f"`str_tokens` must name {n_pos} tokens, got {len(str_tokens)} names"
            )
        return tuple(str_tokens)

    def describe(entering: Tensor) -> dict[str, object]:
        return describe_modules(model, network, entering)

    traced = _Recording(model, forward_pass, dtype, names, describe).trace()
    # A post-norm network would otherwise be compared as if −I were its own.
    for block in traced.blocks:
        block.remark_on_norms()
    return traced


def _unwrapped(
    blocks: Iterable[nn.Module | Envoy] | Envoy,
) -> list[nn.Module]:
    """Return modules, of envoys those that they wrap; raise unless there is one."""
    several = _module_of(blocks)
    if not isinstance(several, Iterable):
        raise TypeError(
            f"`blocks` must be several modules, got one {type(several).__name__}: give "
            "them in a list"
        )
    modules = [_module_of(block) for block in several]
    if not modules:
        raise ValueError("`blocks` is empty: wanted at least one module")
    return modules


def _module_of(block: Any) -> Any:
    # A module may have a part of that name.
    is_wrapped = isinstance(block, Envoy) and not isinstance(block, nn.Module)
    return block._module if is_wrapped else block


def _precision(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Return the precision of block functions: what was asked for, or float64 for a
    model in float64 and float32 for any other.
    """
    # 16 bits leave a Jacobian three digits, and its cut at k none.
    if dtype is None:
        return torch.float64 if own == torch.float64 else torch.float32
    if torch.finfo(dtype).bits < 32:
        raise ValueError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")
    return dtype


@dataclass(frozen=True, eq=False)
class _Recording:
    """What was recorded of one forward pass, from which a trace is made.

    Attributes:
        model: what ran: a model, or the blocks that were given.
        forward_pass: what its blocks did.
        dtype: the precision of block functions.
        names: from the number of tokens, what they are called.
        describe: from the stream that enters the blocks, the model's provenance.
        norm: the final norm, where it is part of the last block.
        input: what the model ran on; None where that is not known.
        remark: on which model was measured; None where there is nothing to say.
        own_pass: of the model that a streamed bridge was made of.
    """

    model: nn.Module
    forward_pass: ForwardPass
    dtype: torch.dtype
    names: Callable[[int], tuple[str, ...]]
    describe: Callable[[Tensor], dict[str, object]]
    norm: nn.Module | None = None
    input: ModelInput | None = None
    remark: str | None = None
    own_pass: ForwardPass | None = None

    def trace(self) -> Trace:
        """Make the trace: block functions in `dtype`, the last one with the norm."""
        remarks = self._first_remarks()
        if facts_of(self.model).is_streamed:
            sweep = Sweep(
                self.forward_pass, self.dtype, remarks, self.norm, self.own_pass
            )
            # Later streams are known only once the blocks have run.
            entering = sweep.embedded[None]
            str_tokens = self.names(entering.shape[1])
            return StreamedTrace(
                model=self.model,
                tokens=self._tokens,
                str_tokens=str_tokens,
                blocks=sweep,
                final_norm=self.norm is not None,
                provenance=self._provenance(entering, str_tokens, remarks),
                pixels=self._pixels,
            )
        blocks = self._block_functions(remarks)
        residual = self._residual(blocks[-1])
        str_tokens = self.names(residual.shape[1])
        return Trace(
            model=self.model,
            tokens=self._tokens,
            str_tokens=str_tokens,
            residual=residual,
            blocks=blocks,
            final_norm=self.norm is not None,
            provenance=self._provenance(residual[:-1], str_tokens, remarks),
            pixels=self._pixels,
        )

    @property
    def _tokens(self) -> Int[Tensor, " n_pos"] | None:
        return None if self.input is None else self.input.tokens

    @property
    def _pixels(self) -> Float[Tensor, "1 channels height width"] | None:
        return None if self.input is None else self.input.pixels

    def _first_remarks(self) -> Remarks:
        """Return remarks on the input and the head; later ones are added to them."""
        remarks = Remarks()
        if self.input is not None:
            for text in self.input.remarks:
                remarks.add(text, text)
        if self.remark is not None:
            remarks.add("model", self.remark)
        lacking = missing_head(self.model)
        if lacking:
            remarks.add(
                "head",
                f"the model's head is {lacking}: there are no logits, entropies or "
                "losses",
            )
        return remarks

    def _block_functions(self, remarks: Remarks) -> tuple[BlockFunction, ...]:
        last = len(self.forward_pass.calls) - 1
        return tuple(
            self._block_function(layer, self.norm if layer == last else None, remarks)
            for layer in range(last + 1)
        )

    def _block_function(
        self, layer: int, norm: nn.Module | None, remarks: Remarks
    ) -> BlockFunction:
        recorded = self.forward_pass.calls[layer]
        X = recorded.X.to(self.dtype)
        Y = recorded.Y.to(self.dtype)
        if norm is not None:
            with exact_arithmetic(X.device, [norm], self.dtype):
                Y = norm(Y[None]).reshape(Y.shape)
        # Such a call is made again in its own precision, to see whether the model changed.
        is_in_other_dtype = bool(recorded.dtypes - {self.dtype})
        return BlockFunction(
            layer,
            self.forward_pass.call(layer, self.dtype),
            X,
            step=Y - X,
            norm=norm,
            recorded=recorded if is_in_other_dtype else None,
            remarks=remarks,
        )

    def _residual(self, last: BlockFunction) -> Tensor:
        """Return the residual stream before every block and after the last."""
        stream = self.forward_pass.stream(self.dtype)
        if self.norm is not None:
            entering = stream[-2]
            # The last step already includes the norm, in the dtype of the others.
            stream[-1] = entering + last.step.to(entering.device)
        return torch.stack(stream)

    def _provenance(
        self, entering: Tensor, str_tokens: tuple[str, ...], remarks: Remarks
    ) -> dict[str, object]:
        spliced = spliced_modules(self.model)
        return {
            **self.describe(entering),
            **(self.input.provenance if self.input else {}),
            INPUT_DIGEST: digest_of(entering[0]),
            "str_tokens": list(str_tokens),
            "n_layers": len(self.forward_pass.calls),
            "final_norm": self.norm is not None,
            "linearised_in": str(self.dtype).removeprefix("torch."),
            "hooks": hooks_of_user(self.model),
            **({"spliced": spliced} if spliced else {}),
            "rounded_arguments": sorted(self.forward_pass.rounded),
            # The lists of the remarks themselves, which grow while the trace is
            # measured.
            "remarks": remarks.texts,
            "normalising_layers": remarks.normalising_layers,
        }
