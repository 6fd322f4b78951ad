"""The two patches of transformers.

It reads weights that are only to be located. A model that is left on disk
(`device_map={"": "disk"}`) is materialised all the same: each weight is read, cast to
the dtype of the model, and let go again (`core_model_loading.spawn_materialize`, seen in
transformers 5.23; no option keeps it from doing so). Of a model of 0.8 billion weights in
bfloat16, loading takes twice as long, and 1 GB more.

It says of a checkpoint which tensors it left out, but for those that a class declares
harmless by a pattern of names (`_keys_to_ignore_on_load_unexpected`), those that met
another one under the same name, and, where there is an adapter, all of the base model
(seen in 5.23; `output_loading_info` is all that can be asked for). So its own steps are
noted.

`tests/models/test_patched_transformers.py` fails once a patch can go.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from tl_coupling.arguments import shared_changes


class Weight(NamedTuple):
    """A weight of a model, or a buffer of its state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_parameter: bool


class Place(NamedTuple):
    """Where transformers puts a tensor of a checkpoint.

    Attributes:
        weight: the name of a weight, which the model may lack.
        pattern: which names the conversion takes up that makes the weight from this
            tensor and others; None for a tensor that is the weight.
    """

    weight: str
    pattern: str | None


class Reading(NamedTuple):
    """What transformers read of the files of a model, or of an adapter.

    Attributes:
        files: their paths.
        places: of each tensor of the files, by its name.
        weights: of the model, by name, as they were when it was read.
        report: what transformers says of it: `missing_keys`, `mismatched_keys`,
            `conversion_errors`.
        quantization: the configuration of the quantisation that the checkpoint was
            saved in; None for floating point.
        unpacked_patterns: the patterns of the conversions that take codes and their
            scales together.
    """

    files: tuple[str, ...]
    places: Mapping[str, Place]
    weights: Mapping[str, Weight]
    report: Any
    quantization: Any = None
    unpacked_patterns: frozenset[str] = frozenset()


@contextmanager
def noted_readings() -> Iterator[list[Reading]]:
    """Note what transformers reads in this thread: a model, and an adapter beside it.

    A reading is in the list once its tensors are in the model, also where transformers
    fails afterwards.
    """
    from transformers import PreTrainedModel, core_model_loading

    # Not there in versions that do it otherwise: then nothing is noted.
    rename = getattr(core_model_loading, "rename_source_key", None)
    read = getattr(PreTrainedModel, "_load_pretrained_model", None)
    readings: list[Reading] = []
    if rename is None or read is None:
        yield readings
        return
    thread = threading.get_ident()
    places: dict[str, Place] = {}

    def renamed(key: str, *arguments: Any, **options: Any) -> tuple[str, str | None]:
        renaming = rename(key, *arguments, **options)
        if threading.get_ident() == thread:
            # It asks twice for some: the last answer is taken.
            places[key] = Place(*renaming)
        return renaming

    def noted(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return read(*arguments, **options)
        bound = signature(read).bind(*arguments, **options).arguments
        weights = weights_of(bound["model"])
        places.clear()
        result = read(*arguments, **options)
        config = bound["load_config"]
        files = tuple(map(str, bound["checkpoint_files"] or ()))
        readings.append(
            Reading(
                files=files,
                places=dict(places),
                weights=weights,
                report=result[0],
                quantization=_quantization(config),
                unpacked_patterns=_unpacked_patterns(config),
            )
        )
        return result

    with shared_changes(
        patch.object(core_model_loading, "rename_source_key", renamed),
        patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(noted)),
    ):
        yield readings


def weights_of(model: nn.Module) -> dict[str, Weight]:
    """Return the weights of a model's state by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: Weight(tensor.dtype, tuple(tensor.shape), name in parameters)
        for name, tensor in model.state_dict().items()
        # Entries that are no tensors (`_extra_state`) have no dtype.
        if isinstance(tensor, torch.Tensor)
    }


def _quantization(load_config: Any) -> Any:
    quantizer = load_config.hf_quantizer
    # One that quantises on loading reads floating point.
    if quantizer is None or not quantizer.pre_quantized:
        return None
    return quantizer.quantization_config


def _unpacked_patterns(load_config: Any) -> frozenset[str]:
    """Return what the operations of a quantiser take up."""
    return frozenset(
        pattern
        for conversion in load_config.weight_mapping or ()
        for operation in getattr(conversion, "operations", ())
        if getattr(operation, "hf_quantizer", None) is not None
        for pattern in conversion.source_patterns
    )


class _Located(torch.Tensor):
    """A weight on `meta`, and what would read it."""

    read: Callable[[], torch.Tensor]


@contextmanager
def skip_reading_weights() -> Iterator[None]:
    """Keep transformers from reading, in this thread, what it would only cast to
    another dtype and let go again. What it merges into other weights it does read, and
    buffers, which stay in memory.
    """
    from transformers import core_model_loading

    # Versions without them need the time and the memory, and locate the same weights.
    read = getattr(core_model_loading, "spawn_materialize", None)
    put = getattr(core_model_loading, "set_param_for_module", None)
    if read is None or put is None:
        yield
        return
    thread = threading.get_ident()

    def locate(
        pool: object,
        tensor: Any,
        device: object = None,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> object:
        job = read(pool, tensor, device, dtype, **options)
        is_one_tensor = options.get("tensor_idx") is None
        is_whole = options.get("sharding_op") is None
        is_plain = is_one_tensor and is_whole and hasattr(tensor, "get_shape")
        is_mine = threading.get_ident() == thread
        if not is_plain or dtype is None or not is_mine or not callable(job):
            return job
        empty = torch.empty(tensor.get_shape(), dtype=dtype, device="meta")
        located = empty.as_subclass(_Located)
        located.read = job
        return located

    def put_in_memory(model: object, name: str, value: object, *others: Any) -> None:
        put(
            model, name, value.read() if isinstance(value, _Located) else value, *others
        )

    with shared_changes(
        patch.object(core_model_loading, "spawn_materialize", locate),
        patch.object(core_model_loading, "set_param_for_module", put_in_memory),
    ):
        yield
