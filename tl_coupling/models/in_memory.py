"""HuggingFace models that are in memory already: fine-tuned, with an adapter, quantised
by their own library.
"""

import copy
from typing import Any

import torch
from torch import nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import facts_of
from tl_coupling.models.tokenization import wordless_tokenizer


def is_huggingface(model: nn.Module) -> bool:
    """Say whether this is a model of transformers, or one of peft around it."""
    from transformers import PreTrainedModel

    return isinstance(_without_adapter_wrapper(model), PreTrainedModel)


def bridge_around(
    hf_model: nn.Module, tokenizer: Any = None, label: str | None = None
) -> nn.Module:
    """Return a TransformerBridge that has the weights of a model in memory.

    TransformerLens rewires the modules that it gets. So it gets copies of them, which
    share the model's parameters and buffers: the model stays as it is, weights take no
    memory twice, and a later change of them is one of both.

    Args:
        hf_model: a model of transformers, or of peft around one.
        tokenizer: of its texts; without it, prompts are token ids.
        label: what results call it; by default the name that it was loaded by.

    Raises:
        ModelError: TransformerLens does not take it.
    """
    from transformer_lens.model_bridge import TransformerBridge

    inner: Any = _without_adapter_wrapper(hf_model)
    tensors = [*inner.parameters(), *inner.buffers()]
    # What is in the memo of `deepcopy` is not copied.
    modules = copy.deepcopy(inner, {id(tensor): tensor for tensor in tensors})
    # As `load_model` has it: the parts of attention can be seen.
    modules.set_attn_implementation("eager")
    name = str(label or inner.config._name_or_path or type(inner).__name__)
    first = tensors[0]
    try:
        with torch.random.fork_rng(devices=[]):
            bridge = TransformerBridge.boot_transformers(
                name,
                hf_model=modules.eval(),
                tokenizer=tokenizer or wordless_tokenizer(),
                device=first.device,
                dtype=first.dtype,
            )
    except Exception as error:
        raise ModelError(
            f"could not make a TransformerBridge of {type(inner).__name__}: {error}; "
            "`tl_coupling.trace_modules` takes its blocks"
        ) from error
    if tokenizer is None:
        bridge.tokenizer = None
    facts = facts_of(bridge)
    facts.loaded_as = {"model": name, "checkpoint": None, "untrained": False}
    if inner is not hf_model:
        facts.loaded_as["adapter"] = type(hf_model).__name__
    return bridge.eval()


def _without_adapter_wrapper(model: nn.Module) -> nn.Module:
    """Return the model in which peft has put its adapters; any other as it is."""
    base = getattr(type(model), "get_base_model", None)
    found: nn.Module = model if base is None else base(model)
    return found
