"""Models whose weights stay in their safetensors files, and are read for a part of the
model while it computes.

Their parameters are `StoredParameter`s, which hold NaN until the weight is read.
"""

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tl_coupling.models.completeness import (
    LoadedWeights,
    load_whole,
    refuse_other_shapes,
)
from tl_coupling.models.file_tensors import tensors_in
from tl_coupling.models.model_files import FileState
from tl_coupling.models.module_state import Change
from tl_coupling.models.patched_transformers import skip_reading_weights
from tl_coupling.models.stored import Stored, StoredParameter, stored_parameters

# Components of a bridge that cut their original component's joint weight into those of
# other components.
_CUTS = {"split_qkv_matrix": ("q", "k", "v"), "split_gate_up_matrix": ("gate", "in")}
# An option of glibc's malloc.h, and what counts as large, in bytes: less than one
# prompt's stream.
_M_MMAP_THRESHOLD = -3
_LARGE = 2**16

# The weights read last. They stay in memory until those of other modules are needed, so
# that consecutive uses read them once.
_last_read: dict[StoredParameter, Tensor] = {}


def filled(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[Change]:
    """Yield changes that give modules their stored weights, in `dtype`.

    They are to be made one by one, as they come. Weights that were read for other
    modules are let go first. Must not run in two threads at once.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    # Tied weights are one parameter in several parts.
    parameters = dict.fromkeys(p for part in parts for p in stored_parameters(part))
    # Before anything is read, so that two blocks are never in memory together.
    _let_go_of_all_but(parameters, dtype)
    for parameter in parameters:
        if parameter.place is not None and parameter.is_empty:
            if parameter not in _last_read:
                _last_read[parameter] = _read(parameter.place, parameter, dtype)
            yield parameter, "data", _last_read[parameter]
    # Pieces have no place of their own, and are cut from what was read above.
    if any(parameter.place is None for parameter in parameters):
        for part in parts:
            yield from _filled_by_cutting(part, dtype)


def _let_go_of_all_but(
    parameters: Collection[nn.Parameter], dtype: torch.dtype
) -> None:
    outdated = [
        parameter
        for parameter, weight in _last_read.items()
        if parameter not in parameters or weight.dtype != dtype
    ]
    for parameter in outdated:
        del _last_read[parameter]


def _filled_by_cutting(part: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Yield changes that fill the modules whose weights a bridge's component cuts."""
    for cut, pieces in _cuts(part):
        if not any(_is_empty(p) for piece in pieces for p in piece.parameters()):
            continue
        cut_anew = cut(part.original_component)
        for full_piece, piece in zip(cut_anew, pieces, strict=True):
            for name, parameter in piece.named_parameters():
                # Where the cut is a view, it shares the joint weight's memory.
                weight = full_piece.get_parameter(name).data.to(dtype)
                assert isinstance(parameter, StoredParameter)
                _last_read[parameter] = weight
                yield parameter, "data", weight


def _is_empty(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, StoredParameter) and parameter.is_empty


def looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Say whether this is a plain table of embeddings whose rows are in a file, of which
    few are needed at a time.
    """
    is_plain_table = type(module).forward is nn.Embedding.forward
    return is_plain_table and bool(stored_parameters(module))


def looked_up(
    table: nn.Embedding, ids: Tensor, dtype: torch.dtype
) -> tuple[list[Change], Tensor]:
    """Return changes that give a table the rows of `ids` and no others, and the indices
    of `ids` among these rows.
    """
    needed_ids, indices = ids.unique(return_inverse=True)
    weight = table.weight
    assert isinstance(weight, StoredParameter)
    assert weight.place is not None
    # First the dtype that the model has, then the one it is run in: as a resident model
    # would be.
    rounded = weight.place.rows(needed_ids.tolist()).to(weight.dtype)
    rows = rounded.to(weight.device, dtype)
    # The padding row may be beyond those read; it only concerns gradients.
    return [(table, "padding_idx", None), (weight, "data", rows)], indices


def _read(place: Stored, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    with place.unchanged():
        weight = place.read()
        if weight.shape != parameter.shape:
            raise ValueError(
                f"{place.tensor.name!r} in {place.tensor.file} was "
                f"{list(parameter.shape)}, "
                f"is {list(weight.shape)}"
            )
        # Weights are rounded to the dtype that the model has.
        rounded = weight.to(parameter.dtype)
        # A copy, so that no page of the file stays mapped.
        return rounded.to(parameter.device, dtype, copy=True)


def _cuts(
    part: Any,
) -> Iterator[tuple[Callable[..., Iterable[nn.Module]], list[nn.Module]]]:
    """Yield what cuts a joint weight in a bridge's component, and the modules that hold
    the pieces, in the order of the cut.
    """
    for method, names in _CUTS.items():
        cut = getattr(part, method, None)
        if callable(cut):
            yield cut, [getattr(part, name).original_component for name in names]


def hollow_model(
    name: str, auto: Any, source: str, device: torch.device, **options: Any
) -> LoadedWeights:
    """Load a HuggingFace model whose weights stay in their files.

    transformers does what it does to any checkpoint (renames, ties, merges experts:
    those are saved again, in a temporary folder that lives as long as the model); only
    accelerate's hooks, which would read a weight at every use, are taken off.

    Args:
        name: the model's name in error messages.
        auto: HuggingFace's class, with `from_pretrained`.
        source: a hub name or a folder.
        device: where the parameters say that they are.
        **options: of `from_pretrained`.

    Raises:
        ValueError: a weight is in none of the files, or must be in memory.
        ModelError: as `load_whole`.
    """
    _return_what_is_freed()
    with ExitStack() as stack, skip_reading_weights():
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl_coupling_"))
        # accelerate's way of leaving every weight on disk, with an index of where each
        # is.
        options["device_map"] = {"": "disk"}
        options["offload_folder"] = folder
        options["use_safetensors"] = True
        loaded = load_whole(name, auto.from_pretrained, source, **options)
        # The temporary folder lives as long as the model; after an error it goes at
        # once.
        weakref.finalize(loaded.model, stack.pop_all().close)
    weakref.finalize(loaded.model, _last_read.clear)
    places = _places(loaded.model)
    # transformers does not look at the shapes of weights that it only locates.
    refuse_other_shapes(repr(name), _other_shapes(loaded.model, places))
    _remove_accelerate(loaded)
    _hollow_out(loaded, places, device)
    return loaded


def _places(model: nn.Module) -> dict[str, Stored]:
    """Return where accelerate finds each weight of a model, by the weight's path."""
    hooks = (getattr(part, "_hf_hook", None) for part in model.modules())
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    # All hooks share one index.
    weights_map = next(candidate for candidate in maps if candidate is not None)
    index: dict[str, dict[str, str]] = weights_map.dataset.index
    files = {entry["safetensors_file"] for entry in index.values()}
    states = {file: FileState.from_path(file) for file in files}
    tensors = {(tensor.file, tensor.name): tensor for tensor in tensors_in(files)}
    places = {}
    for path, entry in index.items():
        tensor = tensors[entry["safetensors_file"], entry["weight_name"]]
        places[path] = Stored(tensor, states[tensor.file])
    # A file may have either name of a weight that has two; accelerate's index of them
    # knows one direction.
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, other_name in tied.items():
        if name in places:
            places.setdefault(other_name, places[name])
    return places


def _other_shapes(
    model: nn.Module, places: Mapping[str, Stored]
) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    """Yield the names of weights with the shape that their file has, and the one that
    the model needs.
    """
    for path, parameter in model.named_parameters(remove_duplicate=False):
        shape = places[path].tensor.shape if path in places else parameter.shape
        if shape != parameter.shape:
            yield path, shape, parameter.shape


def _remove_accelerate(loaded: LoadedWeights) -> None:
    """Take accelerate's hooks off a model, and what else it put on it."""
    from accelerate.hooks import remove_hook_from_submodules

    model: Any = loaded.model
    for path in loaded.missing_of_head:
        owner, _, name = path.rpartition(".")
        hook = model.get_submodule(owner)._hf_hook
        # Accelerate would look for its weights, to put them back where they were drawn.
        hook.original_devices.pop(name, None)
    remove_hook_from_submodules(model)
    del model.hf_device_map
    for module in model.modules():
        own_forward = vars(module).get("forward")
        # accelerate has put back the class's own `forward`.
        if getattr(own_forward, "__func__", None) is type(module).forward:
            del vars(module)["forward"]


def _hollow_out(
    loaded: LoadedWeights, places: Mapping[str, Stored], device: torch.device
) -> None:
    """Put stored parameters in place of parameters on `meta`; buffers are read.

    Raises:
        ValueError: a weight is in none of the files, or in memory.
    """
    # Tied weights stay one parameter.
    replacements: dict[nn.Parameter, StoredParameter] = {}
    for path, module in loaded.model.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                buffer = places[prefix + name].read().to(buffer.dtype)
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not parameter.is_floating_point():
                raise ValueError(f"its parameter {path}.{name} is of {parameter.dtype}")
            if not parameter.is_meta:
                raise ValueError(f"its parameter {path}.{name} is in memory")
            if parameter not in replacements:
                replacements[parameter] = StoredParameter.like(parameter, device)
            replacement = replacements[parameter]
            replacement.place = places.get(prefix + name)
            is_drawn = prefix + name in loaded.missing_of_head
            if replacement.place is None and not is_drawn:
                raise ValueError(
                    f"its parameter {prefix}{name} is in none of its files"
                )
            module._parameters[name] = replacement


def hollow_cuts(model: Any) -> None:
    """Hollow out what a bridge cut from stored weights.

    Raises:
        ValueError: the bridge made anything else from them.
    """
    parts = list(dict.fromkeys([*model.modules(), *model.original_model.modules()]))
    pieces = [piece for part in parts for _, cut in _cuts(part) for piece in cut]
    for piece in pieces:
        for name, parameter in piece._parameters.items():
            if parameter is not None:
                hollow = StoredParameter.like(parameter, parameter.device)
                piece._parameters[name] = hollow
    # A bridge's containers hold parameters of the modules inside them.
    for part in parts:
        for name, tensor in {**part._parameters, **part._buffers}.items():
            if tensor is None or isinstance(tensor, StoredParameter):
                continue
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(
                    f"{name!r} of a {type(part).__name__} is made from other weights "
                    "when it is loaded"
                )


def _return_what_is_freed() -> None:
    """Have this process give large tensors back to the system when they are freed.

    Linux' C library would keep them, in pieces that the next block does not fit into:
    twice the memory was measured.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
