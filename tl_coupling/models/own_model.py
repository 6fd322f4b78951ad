"""A HuggingFace model with its own modules: its own call, hooks and attention."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tl_coupling.arguments import cached_property, defaults_of_model, shared_changes
from tl_coupling.models.errors import ModelError
from tl_coupling.models.module_state import (
    Change,
    WeightsKept,
    attributes_set,
    eager_experts,
    left_as_found,
    packing_kept,
)

# The hook points that a model with its own modules has.
_HOOK_POINT = re.compile(r"blocks\.(?P<layer>\d+)\.hook_resid_(?P<place>pre|post)")
# A hook is called on the stream, with the hook point as the keyword argument `hook`.
_Hook = Callable[..., Tensor | None]
# Tokens of the run that shows which modules are the blocks, and sides of its image.
_N_TOKENS = 4
_SIDE = 224


@dataclass
class OwnConfig:
    """Sizes and names of a HuggingFace model, under the names that TransformerLens has.

    Attributes:
        n_layers: the number of blocks.
        d_model: the width of the residual stream.
        d_vocab: how many token ids there are; None where it reads no tokens.
        n_ctx: None, because a HuggingFace configuration says it.
        model_name: what results call it.
        architecture: its class.
        is_visual_model: whether it reads pixels.
    """

    n_layers: int
    d_model: int
    d_vocab: int | None
    n_ctx: int | None
    model_name: str
    architecture: str
    is_visual_model: bool


class OwnModel(nn.Module):
    """A HuggingFace model, measured by its own modules.

    It is called as a TransformerBridge is. The model is called as it is, in eval mode,
    and has its own mode again afterwards.

    Attributes:
        original_model: the model that was given, or one of peft around it.
        tokenizer: of its texts; None where prompts are token ids.
        path_of_blocks: of the list of its blocks, in the model without a wrapper of
            peft; None where it is looked for when it is needed.
    """

    def __init__(
        self,
        given: nn.Module,
        tokenizer: Any = None,
        name: str = "",
        path_of_blocks: str | None = None,
    ) -> None:
        super().__init__()
        self.original_model: Any = given
        self.tokenizer = tokenizer
        self.path_of_blocks = path_of_blocks
        self._name = name
        self.training = False

    def train(self, _mode: bool = True) -> "OwnModel":
        """Leave the given model in its mode: it is called in eval mode anyway."""
        return self

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in the order in which they run; as `find_blocks`."""
        return self.find_blocks()

    def find_blocks(self) -> nn.ModuleList:
        """Return the blocks, in the order in which they run.

        Cost: one run of the model on four tokens, once, where they are not known.

        Raises:
            ModelError: it has no single stack of blocks.
        """
        blocks = self._list_of_blocks()
        if blocks is None:
            self.path_of_blocks = path_of_residual_stack(self._inner, self._try_out)
            blocks = self._inner.get_submodule(self.path_of_blocks)
        return blocks

    def _list_of_blocks(self) -> Any:
        """Return the list where blocks are known to be; None where there is none."""
        if self.path_of_blocks is None:
            return None
        try:
            part = self._inner.get_submodule(self.path_of_blocks)
        except AttributeError:
            return None
        return part if isinstance(part, nn.ModuleList) else None

    @property
    def _inner(self) -> Any:
        """The model in which peft has put its adapters; any other as it is."""
        return without_adapter_wrapper(self.original_model)

    @property
    def cfg(self) -> OwnConfig:
        """Sizes and names."""
        reads_pixels = self.original_model.main_input_name == "pixel_values"
        embedding = None if reads_pixels else self._embedding
        config = self.original_model.config
        text_config = getattr(config, "text_config", None) or config
        return OwnConfig(
            n_layers=len(self.blocks),
            d_model=int(text_config.hidden_size),
            d_vocab=None if embedding is None else len(embedding.weight),
            n_ctx=None,
            model_name=self._name,
            architecture=type(self.original_model).__name__,
            is_visual_model=reads_pixels,
        )

    @property
    def _embedding(self) -> Any:
        return self.original_model.get_input_embeddings()

    def forward(
        self, batch: Tensor, return_type: str | None = "logits", **options: Any
    ) -> Any:
        """Call the model as it is, in eval mode.

        Args:
            batch: token ids or pixels.
            return_type: "logits", or None for all that it returns.
            options: further keyword arguments of the model's own call.
        """
        given = self.original_model
        changes: list[Change] = []
        # After a `Trainer` in 16 bits the model's own call has autocast; its
        # arithmetic is that of its weights here.
        if "_original_forward" in vars(given):
            changes.append((given, "forward", vars(given)["_original_forward"]))
        with in_eval_mode(given), attributes_set(changes), shared_changes() as undo:
            weights = WeightsKept(given)
            undo.callback(weights.put_back)
            with weights:
                output = given(**{given.main_input_name: batch}, **options)
        return getattr(output, "logits", None) if return_type == "logits" else output

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[tuple[str, _Hook]]) -> Iterator[None]:
        """Run functions at hook points of the stream in this context, as TransformerLens
        does.

        Args:
            fwd_hooks: the name of a hook point, `blocks.{layer}.hook_resid_pre` or
                `blocks.{layer}.hook_resid_post`, and a function of the stream there
                and of the keyword argument `hook`, whose `.name` it is.

        Raises:
            ValueError: another hook point.
        """
        with shared_changes() as handles:
            for name, function in fwd_hooks:
                match = _HOOK_POINT.fullmatch(name)
                if match is None:
                    raise ValueError(
                        "a model with its own modules has the hook points "
                        f"`blocks.LAYER.hook_resid_pre` and `…_post`, got {name!r}"
                    )
                block = self.blocks[int(match["layer"])]
                changed = partial(function, hook=SimpleNamespace(name=name))
                if match["place"] == "pre":
                    handle = block.register_forward_pre_hook(
                        partial(_change_entering, changed), with_kwargs=True
                    )
                else:
                    handle = block.register_forward_hook(
                        partial(_change_leaving, changed)
                    )
                handles.enter_context(handle)
            yield

    def _try_out(self, ids: Tensor | None = None) -> None:
        """Run the model on some input, for what its modules do."""
        given = self.original_model
        first = next(given.parameters())
        device = input_device(given)
        with (
            torch.no_grad(),
            left_as_found([given]),
            defaults_of_model(device, first.dtype),
            attributes_set(eager_experts(given, first.dtype)),
            attributes_set(packing_kept(given)),
        ):
            if self.original_model.main_input_name == "pixel_values":
                self(self._grey_image(device), return_type=None)
                return
            ids = self._some_ids() if ids is None else ids
            self(ids.to(device), return_type=None, use_cache=False)

    def _some_ids(self) -> Tensor:
        """Return a few token ids that are no padding."""
        padding = getattr(self.original_model.config, "pad_token_id", None)
        ids = [i for i in range(len(self._embedding.weight)) if i != padding]
        return torch.tensor([ids[:_N_TOKENS]])

    def _grey_image(self, device: torch.device) -> Tensor:
        config = self.original_model.config
        side = getattr(config, "image_size", _SIDE)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        n_channels = getattr(config, "num_channels", 3)
        dtype = next(self.original_model.parameters()).dtype
        return torch.zeros(1, n_channels, height, width, dtype=dtype, device=device)

    @cached_property
    def reads_both_ways(self) -> bool:
        """Whether the first token sees later ones, by two runs of the model."""
        first_rows: list[Tensor] = []

        def note(_: nn.Module, __: object, output: Any) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            first_rows.append(stream[0, 0].detach().clone())

        ids = self._some_ids()
        with shared_changes(self.blocks[-1].register_forward_hook(note)):
            self._try_out(ids)
            self._try_out(torch.cat([ids[:, :1], ids[:, 1:].flip(1)], dim=1))
        first, second = first_rows
        return not torch.equal(first, second)

    @cached_property
    def ln_final(self) -> nn.Module | None:
        """The norm after the last block; None where there is none.

        It is the module outside the blocks that first gets what leaves the last one,
        and returns a stream.
        """
        leaving: list[Tensor] = []
        norms: list[nn.Module] = []

        def left(_: nn.Module, __: object, output: Any) -> None:
            leaving.append(output if isinstance(output, Tensor) else output[0])

        def called(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if not leaving or not args or args[0] is not leaving[-1]:
                return
            is_part = not list(module.children())
            is_stream = isinstance(output, Tensor) and output.shape == args[0].shape
            if is_part and is_stream:
                norms.append(module)

        within = {part for block in self.blocks for part in block.modules()}
        with shared_changes() as hooks:
            hooks.enter_context(self.blocks[-1].register_forward_hook(left))
            for module in self.original_model.modules():
                if module not in within:
                    hooks.enter_context(module.register_forward_hook(called))
            self._try_out()
        return norms[0] if norms else None

    @property
    def unembed(self) -> nn.Module | None:
        """What makes logits; None where there are none."""
        head: nn.Module | None = self.original_model.get_output_embeddings()
        return head

    @property
    def W_U(self) -> Tensor | None:
        """The unembedding `[d_model d_vocab]`; None where the head is more than that."""
        head: Any = self.unembed
        is_plain = type(head) is nn.Linear and head.bias is None
        return head.weight.mT if is_plain else None


def _change_entering(
    function: Callable[[Tensor], Tensor | None],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a block another stream, which is its first argument."""
    if args:
        changed = function(args[0])
        return (args if changed is None else (changed, *args[1:])), kwargs
    name = next(iter(kwargs))
    changed = function(kwargs[name])
    return args, kwargs if changed is None else {**kwargs, name: changed}


def _change_leaving(
    function: Callable[[Tensor], Tensor | None],
    _: nn.Module,
    __: tuple[Any, ...],
    output: Any,
) -> Any:
    """Let a block return another stream, alone or first in a tuple."""
    if isinstance(output, Tensor):
        changed = function(output)
        return output if changed is None else changed
    changed = function(output[0])
    return output if changed is None else type(output)((changed, *output[1:]))


def adapters_in_words(model: nn.Module) -> str | None:
    """Say which adapters of a model in memory act, and at what scale; None where it has
    none.
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module)
    ]
    if not layers:
        return None
    acting: set[str] = set()
    for layer in layers:
        if getattr(layer, "disable_adapters", False) is True:
            continue
        scaling = getattr(layer, "scaling", {})
        for name in getattr(layer, "active_adapters", ()):
            scale = scaling.get(name) if isinstance(scaling, dict) else None
            acting.add(name if scale is None else f"{name} at scale {scale:.6g}")
    return ", ".join(sorted(acting)) or "off"


def input_device(model: nn.Module) -> torch.device:
    """Return where a model takes its input: weights that accelerate has put elsewhere
    are on `meta` until they are needed.
    """
    devices = (parameter.device for parameter in model.parameters())
    at_hand = (device for device in devices if device.type != "meta")
    return next(at_hand, torch.device("cpu"))


def refuse_without_weights(module: nn.Module, name: str) -> None:
    """Raise ModelError where weights are on `meta`, and nothing brings them in.

    Args:
        module: a model, or blocks.
        name: what the error calls it.
    """
    # accelerate's hooks bring weights in while their module is called.
    if any(getattr(part, "_hf_hook", None) is not None for part in module.modules()):
        return
    for path, parameter in module.named_parameters():
        # Of a streamed model, weights are in their files.
        if type(parameter) is nn.Parameter and parameter.is_meta:
            raise ModelError(
                f"{name} must have weights, `{path}` is on the device meta, which holds "
                "no numbers: load them (`from_pretrained`, or `.to_empty(device=…)` and "
                "`load_state_dict`)"
            )


def refuse_offloaded(module: nn.Module, purpose: str) -> None:
    """Raise ModelError where accelerate keeps weights elsewhere until a module is called.

    Args:
        module: a model, or a part of one.
        purpose: what takes weights without calling their module.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(
            f"{purpose} takes weights that accelerate brings in only while their module "
            'is called: load the model with `load_model(name, memory="stream")`, or into '
            "memory"
        )


def without_adapter_wrapper(model: nn.Module) -> nn.Module:
    """Return the model in which peft has put its adapters; any other as it is."""
    base = getattr(type(model), "get_base_model", None)
    found: nn.Module = model if base is None else base(model)
    return found


def path_of_residual_stack(model: nn.Module, run: Callable[[], object]) -> str:
    """Return the path of the list of modules that pass one stream from each to the next.

    Of lists within each other it is the outermost.

    Args:
        model: it is looked through for lists.
        run: runs it once.

    Raises:
        ModelError: there is none, or there are several.
    """
    lists = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) > 0
    }
    # The first tensor that each running module got. Other modules may be called before
    # it returns.
    entered: list[Tensor | None] = []
    passed: dict[nn.Module, list[_Passed]] = {}

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        entered.append(next(tensors, None))

    def leave(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        stream = output[0] if isinstance(output, tuple | list) and output else output
        got = entered.pop()
        if got is not None and isinstance(stream, Tensor):
            passed.setdefault(module, []).append(_Passed(got, stream))

    with shared_changes() as hooks:
        members = dict.fromkeys(member for part in lists.values() for member in part)
        for member in members:
            # Around hooks of the user's, which are part of the module.
            before = member.register_forward_pre_hook(
                enter, with_kwargs=True, prepend=True
            )
            hooks.enter_context(before)
            hooks.enter_context(member.register_forward_hook(leave))
        run()
    stacks = {path: part for path, part in lists.items() if _is_stack(part, passed)}
    outermost = {
        path: part
        for path, part in stacks.items()
        if not any(path.startswith(f"{other}.") for other in stacks)
    }
    # A list of one module passes on whatever it gets.
    deep = {path: part for path, part in outermost.items() if len(part) > 1}
    chosen = deep or outermost
    if len(chosen) == 1:
        return next(iter(chosen))
    problem = "has no list of modules that pass one residual stream on"
    if chosen:
        problem = f"has several stacks of blocks ({', '.join(chosen)})"
    raise ModelError(
        f"{type(model).__name__} {problem}: give its blocks to "
        "`tl_coupling.trace_modules`"
    )


@dataclass(frozen=True)
class _Passed:
    """What a module got first, and what it returned first."""

    stream: Tensor
    output: Tensor


def _is_stack(members: nn.ModuleList, passed: dict[nn.Module, list[_Passed]]) -> bool:
    """Say whether modules pass a stream `[1 n d]` on, each to the next."""
    firsts: list[_Passed] = []
    for i, member in enumerate(members):
        # One that is there several times is called as often.
        n_before = list(members)[:i].count(member)
        calls = passed.get(member, [])
        if len(calls) <= n_before:
            return False
        firsts.append(calls[n_before])
    is_stream = all(
        call.stream.ndim >= 2 and call.stream.shape == call.output.shape
        for call in firsts
    )
    return is_stream and all(
        torch.equal(call.output, following.stream)
        for call, following in pairwise(firsts)
    )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of a model in eval mode in this context."""
    in_train_mode = [part for part in model.modules() if part.training]
    for part in in_train_mode:
        part.training = False
    try:
        yield
    finally:
        for part in in_train_mode:
            part.training = True
