"""Which model is measured: a bridge, or the HuggingFace model that it was made of where
the bridge computes something else.

TransformerLens' components call attention of their own, and split fused projections. So
what the model was given beside its weights (hooks, masks, attention functions, adapters,
settings) may be lost. On each prompt the stream that enters the blocks, what each block
adds to it, and the logits are compared with those of the model's own call.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks import tails
from tl_coupling.blocks.arithmetic import (
    exact_arithmetic,
    is_out_of_memory,
    model_left_as_found,
)
from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.forward_passes import ForwardPass, read_together
from tl_coupling.blocks.gate import SHARE_OF_STREAM, TOLERANCE, is_within
from tl_coupling.blocks.hooks import hooks_of_user, without_hooks_of_user
from tl_coupling.blocks.recording import recorded_pass
from tl_coupling.models import MadeOf, ModelInput, facts_of

# So many of the last rows have their logits compared.
_N_ROWS = 2
_OWN_MODULES = "measured by the HuggingFace model's own modules: {}"


class MeasuredPass(NamedTuple):
    """Which model is measured, what its blocks did, and what there is to say of it.

    `own_pass` is that of the model that a streamed bridge was made of; its blocks are
    compared when their weights are read.
    """

    model: nn.Module
    forward_pass: ForwardPass
    remark: str | None = None
    own_pass: ForwardPass | None = None


def measured_pass(
    model: nn.Module, model_input: ModelInput, dtype: torch.dtype
) -> MeasuredPass:
    """Run a model on an input, and say which one is measured.

    Args:
        model: a bridge that computes something else than the HuggingFace model that it
            was made of gives way to that one; any other model is measured itself.
        model_input: what it runs on.
        dtype: the precision in which blocks are measured.

    Raises:
        ValueError: the model fails; or a bridge with hooks of the user's, which would be
            lost, computes something else than the model that it was made of.

    Cost: one pass of the model up to its unembedding. For a bridge whose model is
    known, one of that model too, and a few rows through the bridge's unembedding; one
    more of the blocks of both where weights are in 16 bits.
    """
    made_of = facts_of(model).made_of
    if made_of is None:
        return MeasuredPass(model, recorded_pass(model, model_input, dtype))
    if facts_of(model).is_streamed:
        forward_pass = recorded_pass(model, model_input, dtype)
        own_pass = recorded_pass(made_of.own_model, model_input, dtype)
        if not _enters_the_same(forward_pass, own_pass, dtype):
            raise lost_in_bridge("another stream enters the blocks")
        return MeasuredPass(model, forward_pass, own_pass=own_pass)
    return _BesideItsModel(model, made_of, model_input, dtype).measured()


class _BesideItsModel:
    """A bridge beside the model that it was made of, on one input."""

    def __init__(
        self,
        bridge: nn.Module,
        made_of: MadeOf,
        model_input: ModelInput,
        dtype: torch.dtype,
    ) -> None:
        self._bridge = bridge
        self._made_of = made_of
        self._input = model_input
        self._dtype = dtype

    def measured(self) -> MeasuredPass:
        """Return the pass of the one that is measured."""
        own_model = self._made_of.own_model
        with model_left_as_found(self._bridge), model_left_as_found(own_model):
            return self._measured()

    def _measured(self) -> MeasuredPass:
        try:
            own_pass, logits = self._own_pass()
        except ValueError as error:
            remark = f"it could not be compared with the model it was made of: {error}"
            return MeasuredPass(self._bridge, self._pass_of_bridge(), remark)
        hooks = hooks_of_user(self._bridge)
        try:
            with without_hooks_of_user(self._bridge):
                forward_pass = self._pass_of_bridge()
                problem = self._difference(forward_pass, own_pass, logits)
        except ValueError as error:
            problem = str(error)
        if problem is None:
            if hooks:
                forward_pass = self._pass_of_bridge()
            return MeasuredPass(self._bridge, forward_pass)
        if self._made_of.is_changed(self._bridge):
            remark = (
                "this bridge was changed since it was made, and is measured as it is: "
                f"beside the model that it was made of, {problem}"
            )
            return MeasuredPass(self._bridge, self._pass_of_bridge(), remark)
        if hooks:
            raise ValueError(
                f"beside the model that this bridge was made of, {problem}, and that "
                f"model has not the bridge's hooks ({', '.join(hooks)}): put them on the "
                "HuggingFace model's modules, and trace that"
            )
        remark = _OWN_MODULES.format(f"in a TransformerBridge around it, {problem}")
        return MeasuredPass(self._made_of.own_model, own_pass, remark)

    def _pass_of_bridge(self) -> ForwardPass:
        return recorded_pass(self._bridge, self._input, self._dtype)

    def _own_pass(self) -> tuple[ForwardPass, Tensor | None]:
        """Return what the model's own blocks do in its own call, and its logits."""
        outputs: list[Any] = []

        def note(_: nn.Module, __: object, output: object) -> None:
            outputs.append(output)

        own_model = self._made_of.own_model
        with shared_changes(own_model.register_forward_hook(note)):
            own_pass = recorded_pass(own_model, self._input, self._dtype)
        logits = getattr(outputs[-1], "logits", None)
        return own_pass, logits if isinstance(logits, Tensor) else None

    def _difference(
        self, forward_pass: ForwardPass, own_pass: ForwardPass, logits: Tensor | None
    ) -> str | None:
        """Say what the bridge computes otherwise; None where nothing is."""
        n_layers = len(own_pass.calls)
        if len(forward_pass.calls) != n_layers:
            return f"{len(forward_pass.calls)} blocks run, and not {n_layers}"
        if not _enters_the_same(forward_pass, own_pass, self._dtype):
            return "another stream enters the blocks"
        seen_equal = _recorded_the_same(forward_pass, own_pass, self._dtype)
        for layer, is_seen_equal in enumerate(seen_equal):
            # Rounding grows from block to block, and in 16 bits hides what is to be seen.
            if is_seen_equal or _adds_the_same(
                forward_pass, own_pass, layer, self._dtype
            ):
                continue
            return f"block {layer} adds something else to the stream"
        if logits is not None and not self._has_logits(own_pass, logits):
            return "the logits are others"
        return None

    def _has_logits(
        self, own_pass: ForwardPass, own_logits: Float[Tensor, "n_texts *n_pos d_vocab"]
    ) -> bool:
        """Say whether the bridge makes the model's logits of what leaves the last block;
        true where it refuses to make any.
        """
        expected = self._input.rows_of_logits(own_logits)
        if expected is None:
            return True
        leaving = own_pass.calls[-1].Y
        rows = leaving[-_N_ROWS:]
        if len(expected) != len(leaving):
            # An image classifier reads its class token, the first.
            rows = leaving[: len(expected)]
        try:
            logits = tails.logits(self._bridge, self._input, rows.to(self._dtype))
        except ValueError:
            return True
        own_rows = expected[-len(rows) :].to(logits)
        return tails.is_close(logits, own_rows, own_logits.dtype)


def check_adds_the_same(
    call: BlockCall,
    own_call: BlockCall,
    X: Float[Tensor, "n_pos d_model"],
    Y: Float[Tensor, "n_pos d_model"],
    layer: int,
) -> None:
    """Raise ValueError unless a block of a streamed bridge, without hooks of the user's,
    makes of X what the model's own block makes of it; with them it makes Y.
    """
    if hooks_of_user(call.module):
        with without_hooks_of_user(call.module):
            Y = _output(call, X)
    if not bool(_is_equal(Y - X, _output(own_call, X) - X, X)):
        raise lost_in_bridge(f"block {layer} adds something else to the stream")


def lost_in_bridge(problem: str) -> ValueError:
    """Return the error where a streamed bridge computes something else than its model."""
    return ValueError(
        f"in a TransformerBridge around this model, {problem}: load it as a whole "
        '(without `memory="stream"`), which is then measured by its own modules'
    )


def _enters_the_same(
    forward_pass: ForwardPass, own_pass: ForwardPass, dtype: torch.dtype
) -> bool:
    """Say whether the same stream enters the first block of both."""
    embedded = own_pass.calls[0].X.to(dtype)
    return bool(_is_equal(forward_pass.calls[0].X.to(dtype), embedded, embedded))


def _recorded_the_same(
    forward_pass: ForwardPass, own_pass: ForwardPass, dtype: torch.dtype
) -> list[bool]:
    """Say for each block whether both passes saw it add the same to the stream."""
    results = []
    for recorded, own in zip(forward_pass.calls, own_pass.calls, strict=True):
        step = recorded.Y.to(dtype) - recorded.X.to(dtype)
        own_stream = own.X.to(dtype)
        own_step = own.Y.to(dtype) - own_stream
        is_coarse = any(torch.finfo(d).bits < 32 for d in recorded.dtypes | own.dtypes)
        is_equal = _is_equal(step, own_step, own_stream)
        results.append(is_equal & (not is_coarse))
    return read_together(results).tolist()


def _adds_the_same(
    forward_pass: ForwardPass, own_pass: ForwardPass, layer: int, dtype: torch.dtype
) -> bool:
    """Say whether a block of both adds the same to one stream."""
    stream = own_pass.calls[layer].X.to(dtype)
    try:
        output = _output(forward_pass.call(layer, dtype), stream)
        own_output = _output(own_pass.call(layer, dtype), stream)
    except Exception as error:
        # A foreign block may raise anything.
        if is_out_of_memory(error):
            raise
        return False
    return bool(_is_equal(output - stream, own_output - stream, stream))


def _output(
    call: BlockCall, stream: Float[Tensor, "n_pos d_model"]
) -> Float[Tensor, "n_pos d_model"]:
    arithmetic = exact_arithmetic(stream.device, [call.module], stream.dtype)
    with arithmetic, call.as_recorded():
        return call(stream)


def _is_equal(
    step: Float[Tensor, "n_pos d_model"],
    own_step: Float[Tensor, "n_pos d_model"],
    stream: Float[Tensor, "n_pos d_model"],
) -> Bool[Tensor, ""]:
    """Say whether each row is the same, up to rounding: as a cheap way to a Jacobian is
    held to.
    """
    if step.shape != own_step.shape:
        return torch.zeros((), dtype=torch.bool, device=own_step.device)
    error = (step.to(own_step.device) - own_step).norm(dim=1)
    scale = own_step.norm(dim=1) + SHARE_OF_STREAM * stream.norm(dim=1)
    return is_within(error, TOLERANCE * scale).all()
