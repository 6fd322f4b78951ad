"""Models whose weights stay in their safetensors files, and are read for a part of the
model while it computes.

The parameters of such a model are hollow: of full shape, on the device where they will
be computed, but a single NaN in memory, so that what is computed without their weights
is never mistaken for a number.
"""

import ctypes
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeGuard
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tl_coupling.models.completeness import LoadedWeights, load_whole
from tl_coupling.models.loaded import Change, ModelError
from tl_coupling.models.model_files import FileState

# Components of a bridge that cut their original component's joint weight into those of
# other components.
_CUTS = {"split_qkv_matrix": ("q", "k", "v"), "split_gate_up_matrix": ("gate", "in")}
# An option of glibc's malloc.h, and what counts as large, in bytes: less than one
# prompt's stream.
_M_MMAP_THRESHOLD, _LARGE = -3, 2**16


class Stored(NamedTuple):
    """Where a weight is kept: a safetensors file, the tensor's name in it, and the
    file's state when it was loaded.

    ModelError where the file is no longer in that state: what was read before it
    changed is of another model.
    """

    file: str
    name: str
    state: FileState

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which the weight is read and copied; ModelError if its file
        changes before the end.
        """
        self._check()
        yield
        self._check()

    def _check(self) -> None:
        try:
            has_changed = FileState.of(self.file) != self.state
        except FileNotFoundError:
            has_changed = True
        if has_changed:
            raise ModelError(
                f"{self.file} was changed, replaced or removed after the model was loaded, whose weights are read "
                "from it as they are needed: load the model again, and measure again"
            )

    def read(self) -> Tensor:
        """The tensor, as a map of the file: it takes memory once it is used, and until
        it is let go.
        """
        from safetensors import safe_open

        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name)

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Some rows of the tensor; the others are not read."""
        from safetensors import safe_open

        with self.unchanged(), safe_open(self.file, "pt") as file:
            whole = file.get_slice(self.name)
            return torch.cat([whole[i : i + 1] for i in indices])


# Of each module that itself has hollow parameters, where their weights are; None for
# those cut from others.
_stored: WeakKeyDictionary[nn.Module, dict[str, Stored | None]] = WeakKeyDictionary()
# The weights read last. They stay in memory until others are wanted, so that
# consecutive uses read them once.
_kept: dict[nn.Parameter, Tensor] = {}


def is_hollow(module: nn.Module) -> bool:
    """Whether weights of the module, or of one inside it, are elsewhere."""
    return bool(_stored) and any(part in _stored for part in module.modules())


def filled(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[Change]:
    """Changes that give hollow modules their weights in `dtype`; to be made one by one,
    as they come.

    Weights that were read for other modules are let go first. Must not run in two
    threads at once.
    """
    if not _stored and not _kept:
        return
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    hollow = {
        _parameter(part, name): source
        for part in parts
        for name, source in _stored.get(part, {}).items()
    }
    for parameter in [
        one for one in _kept if one not in hollow or _kept[one].dtype != dtype
    ]:
        del _kept[parameter]

    def full(parameter: nn.Parameter, weight: Tensor | None) -> Change:
        if weight is not None:
            _kept[parameter] = weight
        return parameter, "data", _kept[parameter]

    for parameter, source in hollow.items():
        if source is not None and _is_empty(parameter):
            yield full(
                parameter,
                None if parameter in _kept else _read(source, parameter, dtype),
            )
    for part in parts if None in hollow.values() else ():
        for cut, pieces in _cuts(part):
            if any(
                _is_empty(parameter)
                for piece in pieces
                for parameter in piece.parameters()
            ):
                for made, piece in zip(
                    cut(part.original_component), pieces, strict=True
                ):
                    for name, parameter in piece.named_parameters():
                        # Where the cut is a view, it shares the whole's memory.
                        yield full(parameter, made.get_parameter(name).data.to(dtype))


def _return_what_is_freed() -> None:
    """Have this process give large tensors back to the system when they are freed.

    Linux' C library would keep them, in pieces that the next block does not fit into:
    twice the memory was measured.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether this is a plain table of embeddings whose rows are elsewhere, of which
    few are wanted at a time.
    """
    return type(module).forward is nn.Embedding.forward and module in _stored


def looked_up(
    table: nn.Embedding, ids: Tensor, dtype: torch.dtype
) -> tuple[list[Change], Tensor]:
    """Changes that give a table the rows that are asked for, and no others; and which
    of those rows they are.
    """
    wanted, places = ids.unique(return_inverse=True)
    source = _stored[table]["weight"]
    assert source is not None
    rows = (
        source.rows(wanted.tolist())
        .to(table.weight.dtype)
        .to(table.weight.device, dtype)
    )
    # It only concerns gradients.
    return [(table, "padding_idx", None), (table.weight, "data", rows)], places


def _read(source: Stored, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    with source.unchanged():
        weight = source.read()
        if weight.shape != parameter.shape:
            raise ValueError(
                f"{source.name!r} in {source.file} was {list(parameter.shape)}, is {list(weight.shape)}"
            )
        # A copy, so that no page of the file stays mapped. Weights are rounded to the
        # dtype that the model has.
        rounded = (
            weight if weight.dtype == parameter.dtype else weight.to(parameter.dtype)
        )
        return rounded.to(parameter.device, dtype, copy=True)


def _parameter(part: nn.Module, name: str) -> nn.Parameter:
    parameter = part._parameters[name]
    assert parameter is not None
    return parameter


def _is_empty(parameter: Tensor) -> bool:
    return (
        parameter.untyped_storage().nbytes()
        == parameter.element_size()
        < parameter.numel() * parameter.element_size()
    )


def _cuts(
    part: Any,
) -> Iterator[tuple[Callable[..., Iterable[nn.Module]], list[nn.Module]]]:
    """What cuts a joint weight in a component of a bridge, and the modules that hold
    the pieces, in its order.
    """
    for cut, names in _CUTS.items():
        if callable(function := getattr(part, cut, None)):
            yield function, [getattr(part, name).original_component for name in names]


def hollow_model(
    name: str, auto: Any, source: str, device: torch.device, **options: Any
) -> LoadedWeights:
    """A HuggingFace model with hollow parameters; ValueError where one cannot be,
    ModelError as `load_whole`.

    transformers does what it does to any checkpoint (renames, ties, merges experts:
    those are saved again, in a temporary folder that lives as long as the model); only
    accelerate's hooks, which would read a weight at every use, are taken off.
    """
    from accelerate.hooks import remove_hook_from_submodules

    _return_what_is_freed()
    with ExitStack() as stack, _unread():
        room = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl_coupling_"))
        options |= {
            "device_map": {"": "disk"},
            "offload_folder": room,
            "use_safetensors": True,
        }
        loaded = load_whole(name, auto.from_pretrained, source, **options)
        model: Any = loaded.model
        weakref.finalize(model, stack.pop_all().close)
    weakref.finalize(model, _kept.clear)
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    index = next(one.dataset.index for one in maps if one is not None)
    for path in loaded.missing_of_head:
        owner, _, name = path.rpartition(".")
        # Accelerate would look for its weights, to put them back where they were drawn.
        getattr(model.get_submodule(owner), "_hf_hook").original_devices.pop(name, None)  # noqa: B009
    states = {
        entry["safetensors_file"]: FileState.of(entry["safetensors_file"])
        for entry in index.values()
    }
    remove_hook_from_submodules(model)
    del model.hf_device_map

    def stored(weight: str) -> Stored:
        file, name = index[weight]["safetensors_file"], index[weight]["weight_name"]
        return Stored(file, name, states[file])

    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        # What accelerate puts back is the class's own.
        if (
            getattr(vars(module).get("forward"), "__func__", None)
            is type(module).forward
        ):
            del vars(module)["forward"]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                buffer = (
                    stored(f"{path}.{name}" if path else name).read().to(buffer.dtype)
                )
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not parameter.is_meta or not parameter.is_floating_point():
                what = (
                    "in memory"
                    if parameter.is_floating_point()
                    else f"of {parameter.dtype}"
                )
                raise ValueError(f"its parameter {path}.{name} is {what}")
            if parameter not in replaced:
                replaced[parameter] = _hollow(parameter, device)
            module._parameters[name] = replaced[parameter]
            key = f"{path}.{name}" if path else name
            if key not in index and key not in loaded.missing_of_head:
                raise ValueError(f"its parameter {key} is in none of its files")
            # Without a place it stays hollow: NaN.
            _stored.setdefault(module, {})[name] = stored(key) if key in index else None
    return loaded


@contextmanager
def _unread() -> Iterator[None]:
    """Context in which transformers leaves alone what it would read, cast to another
    dtype, and let go again.

    All that it reads counts as memory until it closes the files. What it merges into
    other weights it does read.
    """
    from transformers import core_model_loading as core

    read, thread = getattr(core, "spawn_materialize", None), threading.get_ident()

    def left(
        pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **more: Any
    ) -> Any:
        plain = (
            more.get("tensor_idx") is None
            and more.get("sharding_op") is None
            and hasattr(tensor, "get_shape")
        )
        if plain and dtype is not None and threading.get_ident() == thread:
            return torch.empty(tensor.get_shape(), dtype=dtype, device="meta")
        return read(pool, tensor, device, dtype, **more)  # type: ignore[misc]

    with patch.object(core, "spawn_materialize", left) if read else nullcontext():
        yield


def hollow_cuts(model: Any) -> None:
    """Hollow out what a bridge cut from hollow parameters; ValueError where it made
    anything else from them.
    """
    parts = list(dict.fromkeys([*model.modules(), *model.original_model.modules()]))
    for piece in [
        piece for part in parts for _, pieces in _cuts(part) for piece in pieces
    ]:
        for name, parameter in piece._parameters.items():
            if parameter is not None:
                piece._parameters[name] = _hollow(parameter, parameter.device)
                _stored.setdefault(piece, {})[name] = None
    # A bridge's containers hold parameters of the modules inside them.
    hollow = {
        id(_parameter(part, name)) for part in parts for name in _stored.get(part, {})
    }
    for part in parts:
        for name, tensor in {**part._parameters, **part._buffers}.items():
            known = tensor is None or id(tensor) in hollow
            if not known and tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(
                    f"{name!r} of a {type(part).__name__} is made from other weights when it is loaded"
                )


def _hollow(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    nothing = torch.full((1,), torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
