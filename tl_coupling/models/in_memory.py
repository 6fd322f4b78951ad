"""HuggingFace models that are in memory already: fine-tuned, with an adapter, quantised
by their own library.
"""

import copy
from typing import Any

import torch
from torch import nn

from tl_coupling.models.advice import one_line
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs, facts_of
from tl_coupling.models.loaded import is_packed, kind_of_config
from tl_coupling.models.own_model import (
    OwnModel,
    refuse_without_weights,
    without_adapter_wrapper,
)
from tl_coupling.models.tokenization import wordless_tokenizer


def is_huggingface(model: nn.Module) -> bool:
    """Say whether this is a model of transformers, or one of peft around it."""
    from transformers import PreTrainedModel

    return isinstance(without_adapter_wrapper(model), PreTrainedModel)


def own_model_of(
    hf_model: nn.Module, tokenizer: Any = None, label: str | None = None
) -> OwnModel:
    """Return what is measured of a HuggingFace model in memory: the model itself, its
    own modules in its own call.

    Nothing is copied, and nothing of the model is changed.

    Args:
        hf_model: a model of transformers, or of peft around one.
        tokenizer: of its texts; without it, prompts are token ids.
        label: what results call it; by default the name that it was loaded by.

    Raises:
        ModelError: a model of peft that puts learned tokens before the prompt, a model
            without one residual stream, or one that cannot be run.

    Cost: the first time, one run of the model on four tokens.
    """
    if getattr(
        getattr(hf_model, "active_peft_config", None), "is_prompt_learning", False
    ):
        raise ModelError(
            f"{type(hf_model).__name__} puts learned tokens before each prompt, which "
            "the blocks of its base model do not see: give the blocks to "
            "`tl_coupling.trace_modules`, and run the whole model there"
        )
    inner: Any = without_adapter_wrapper(hf_model)
    kind = kind_of_config(inner.config)
    if kind:
        raise ModelError(f"{type(inner).__name__} is {kind}")
    refuse_without_weights(hf_model, type(inner).__name__)
    name = str(label or inner.config._name_or_path or type(inner).__name__)
    facts = facts_of(hf_model)
    own_model = OwnModel(hf_model, tokenizer, name, facts.path_of_blocks)
    facts.path_of_blocks = _path_of_blocks(own_model)
    loaded_as: LoadedAs = {"model": name, "checkpoint": None, "untrained": False}
    facts_of(own_model).loaded_as = loaded_as
    return own_model


def _path_of_blocks(own_model: OwnModel) -> str | None:
    """Return where a model has its list of blocks."""
    try:
        own_model.find_blocks()
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    # A foreign model may raise anything.
    except Exception as error:
        raise ModelError(
            f"{type(own_model.original_model).__name__} could not be run for a look at "
            f"its blocks ({one_line(error)}): give them to `tl_coupling.trace_modules`"
        ) from error
    return own_model.path_of_blocks


def with_own_modules(model: nn.Module) -> nn.Module:
    """Return the HuggingFace model that a loaded bridge was made of; a streamed bridge,
    and any other model, as it is.

    It needs no comparison with the bridge on each prompt, and has no hook points but
    those of the stream.
    """
    facts = facts_of(model)
    if facts.made_of is None or facts.is_streamed:
        return model
    return facts.made_of.own_model


def bridge_of(model: nn.Module) -> Any:
    """Return a TransformerBridge for what TransformerLens alone knows: the parts of the
    stream by name, and whether its lenses fit. Any other model as it is.

    Of a HuggingFace model it is around copies of the modules, which share its tensors:
    TransformerLens rewires what it gets. It may compute something else than the model.

    Raises:
        ModelError: TransformerLens makes none.
    """
    if not isinstance(model, OwnModel):
        return model
    from transformer_lens.model_bridge import TransformerBridge

    modules = copied_modules(without_adapter_wrapper(model.original_model))
    first = next(modules.parameters())
    try:
        # The parts of attention can be seen.
        modules.set_attn_implementation("eager")
        # By that a bridge is chosen, and not every configuration names it.
        if not modules.config.architectures:
            modules.config.architectures = [type(modules).__name__]
        with torch.random.fork_rng(devices=[]):
            return TransformerBridge.boot_transformers(
                model.cfg.model_name,
                hf_model=modules,
                tokenizer=model.tokenizer or wordless_tokenizer(),
                device=first.device,
                dtype=first.dtype,
            ).eval()
    # TransformerLens raises anything.
    except Exception as error:
        raise ModelError(
            f"TransformerLens makes no bridge of {type(modules).__name__}: "
            f"{one_line(error)}"
        ) from error


def copied_modules(model: nn.Module) -> Any:
    """Return copies of the modules that share all tensors, in eval mode."""
    # `deepcopy` does not copy the objects in its memo.
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    # bitsandbytes moves scales into a layer's state when it first runs.
    states = (vars(part).get("state") for part in filter(is_packed, model.modules()))
    shared |= {id(state): state for state in states if state is not None}
    try:
        return copy.deepcopy(model, shared).eval()
    # Copying runs code of the model's own: it may raise anything.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {one_line(error)}"
        ) from error
