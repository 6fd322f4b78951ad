"""The state of modules: left as it was found, and as it was when a block was called."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tl_coupling.arguments import shared_changes

# An object, the name of one of its attributes, and the value that this is to have.
Change = tuple[object, str, object]
# How HuggingFace's mixtures compute their experts; the public property beside it also
# sets that of every other part.
_EXPERTS = "_experts_implementation_internal"
# Whether bitsandbytes has another layout for a layer on this processor.
_HAS_OTHER_LAYOUT = "support_avx512bf16_for_cpu"
# In which modules keep their buffers, parts and hooks.
_DICTS = (dict, OrderedDict)
# Attributes of a module that decide how it is called, beside its code.
_OF_CALL = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextmanager
def attributes_set(changes: Iterable[Change]) -> Iterator[None]:
    """Change attributes of objects in this context."""
    with shared_changes() as undo:
        for owner, name, value in changes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def eager_experts(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Yield changes for float64, in which HuggingFace's grouped experts fail."""
    if dtype != torch.float64:
        return
    for part in module.modules():
        config = vars(part).get("config")
        if getattr(config, _EXPERTS, None) not in (None, "eager"):
            yield config, _EXPERTS, "eager"


def packing_kept(module: nn.Module) -> Iterator[Change]:
    """Yield changes that keep bitsandbytes from rewriting 4-bit weights in another
    layout, and coarser, when the module is run.
    """
    for part in module.modules():
        # Its kernels for AVX512 are for bfloat16.
        if _HAS_OTHER_LAYOUT in vars(part):
            yield part, _HAS_OTHER_LAYOUT, False


# A mode, because it is the model's own code that writes.
class WeightsKept(TorchDispatchMode):
    """Context in which weights that a model writes into while it is called (RWKV divides
    some in place) are copied before, and have their values again afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights: dict[int, list[Tensor]] = {}
        for weight in model.parameters():
            if not weight.is_meta and not weight.is_inference():
                self._weights.setdefault(_storage(weight), []).append(weight)
        self._written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation; keep what it writes into, the first time."""
        is_write = func._schema.is_mutable and args and isinstance(args[0], Tensor)
        if is_write and not args[0].is_meta:
            for weight in self._weights.pop(_storage(args[0]), []):
                self._written.append((weight, weight.detach().clone()))
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        """Give the weights their values again, after the context."""
        for weight, values in self._written:
            weight.detach().copy_(values)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Found(NamedTuple):
    """A module as it was: its attributes and the dictionaries among them (buffers,
    hooks), each with a copy, and its tensors but for weights, with their contents.
    """

    dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]]
    contents: list[tuple[Tensor, int, Tensor]]


@contextmanager
def left_as_found(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules back their attributes, buffers and hooks at the end of this context,
    and torch its generator.

    A module may keep a table that it makes again for longer prompts (rotary embeddings,
    ALiBi), or count its calls.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    # A bridge has a hook point for every value, and none of them has a state.
    # Looked for in `vars`: what a part lacks, a bridge looks for in all that it wraps.
    found = [_found(part) for part in parts if "fwd_hooks" not in vars(part)]
    with shared_changes(torch.random.fork_rng(devices=[])) as undo:
        for state in found:
            undo.callback(_put_back, state)
        yield


def _found(part: nn.Module) -> _Found:
    attributes = vars(part)
    copies: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (attributes, attributes.copy())
    ]
    tensors: list[Tensor] = []
    for value in attributes.values():
        if type(value) in _DICTS:
            # Most have no hooks, and a copy of nothing is nothing.
            copies.append((value, value.copy() if value else {}))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            tensors.append(value)
    tensors += [buffer for buffer in part._buffers.values() if buffer is not None]
    # A tensor on `meta` has no contents, one of inference mode counts no changes.
    contents = [
        (tensor, tensor._version, tensor.detach().clone())
        for tensor in tensors
        if not tensor.is_meta and not tensor.is_inference()
    ]
    return _Found(copies, contents)


def _put_back(state: _Found) -> None:
    for current, found in state.dictionaries:
        if not current and not found:
            continue
        # By identity: to compare tensors would read them.
        is_as_found = current.keys() == found.keys() and all(
            map(is_, current.values(), found.values())
        )
        if not is_as_found:
            current.clear()
            current.update(found)
    for tensor, version, content in state.contents:
        if tensor._version != version:
            tensor.detach().copy_(content)


class CallState:
    """How the modules of a block were called: in train or eval mode, and with which
    hooks.

    peft puts hooks on its layers for the time of one call of the model (activated LoRA),
    and a model in train mode is traced in eval mode.
    """

    def __init__(self, block: nn.Module) -> None:
        self._attributes = [
            (part, {name: _copied(part, name) for name in _OF_CALL})
            for part in block.modules()
        ]

    def changes(self) -> tuple[Change, ...]:
        """Return what makes the modules be called as they were, where they would not be
        now.
        """
        return tuple(
            (part, name, value)
            for part, attributes in self._attributes
            for name, value in attributes.items()
            if value != _copied(part, name)
        )


def _copied(part: nn.Module, name: str) -> Any:
    """Return an attribute of a module; of hooks a copy, without those of this package."""
    # A module that torch.compile made forwards some of them.
    value = getattr(part, name)
    if not isinstance(value, dict) or not value:
        return value
    own = {
        key for hooks in _hooks(part) for key, hook in hooks.items() if _is_own(hook)
    }
    if own.isdisjoint(value):
        return type(value)(value)
    return type(value)((key, entry) for key, entry in value.items() if key not in own)


def _hooks(part: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return part._forward_hooks, part._forward_pre_hooks


def _is_own(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # Of a `functools.partial`.
    return str(getattr(function, "__module__", "")).startswith("tl_coupling.")
