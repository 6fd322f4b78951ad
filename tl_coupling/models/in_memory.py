"""HuggingFace models that are in memory already: fine-tuned, with an adapter, quantised
by their own library.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from tl_coupling.models.adapters import layers_with_adapters, merge_adapters
from tl_coupling.models.advice import one_line
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs, facts_of
from tl_coupling.models.loaded import is_packed
from tl_coupling.models.made_of import MadeOf, paths_of
from tl_coupling.models.own_model import OwnModel
from tl_coupling.models.tokenization import wordless_tokenizer
from tl_coupling.models.user_changes import changed_by_user


def is_huggingface(model: nn.Module) -> bool:
    """Say whether this is a model of transformers, or one of peft around it."""
    from transformers import PreTrainedModel

    return isinstance(_without_adapter_wrapper(model), PreTrainedModel)


def model_around(
    hf_model: nn.Module, tokenizer: Any = None, label: str | None = None
) -> nn.Module:
    """Return what is measured of a HuggingFace model in memory: a TransformerBridge that
    has its weights, or the model with its own modules.

    TransformerLens rewires the modules that it gets. So it gets copies of them, which
    share the model's parameters and buffers: the model stays as it is, weights take no
    memory twice, and a later change of them is one of both.

    A bridge calls its own attention in place of the model's, and splits fused
    projections. So a model with hooks, forwards or modules of the user's own is
    measured by its own modules, as is one of which TransformerLens makes no bridge; and
    `trace` compares each bridge with the model.

    Where a bridge would lose an adapter of peft that can be merged, the adapters are
    merged, in copies of the weights that they change; a later change of these is not
    seen.

    Args:
        hf_model: a model of transformers, or of peft around one.
        tokenizer: of its texts; without it, prompts are token ids.
        label: what results call it; by default the name that it was loaded by.

    Raises:
        ModelError: a model of peft that puts learned tokens before the prompt.
    """
    if getattr(
        getattr(hf_model, "active_peft_config", None), "is_prompt_learning", False
    ):
        raise ModelError(
            f"{type(hf_model).__name__} puts learned tokens before each prompt, which "
            "the blocks of its base model do not see: give the blocks to "
            "`tl_coupling.trace_modules`, and run the whole model there"
        )
    inner: Any = _without_adapter_wrapper(hf_model)
    name = str(label or inner.config._name_or_path or type(inner).__name__)
    own_model = OwnModel(hf_model, tokenizer, name)
    model: nn.Module = own_model
    changed = changed_by_user(hf_model)
    if changed is not None:
        own_model.reason = f"it has {changed}, which a TransformerBridge may lose"
    else:
        try:
            bridge, paths = _bridge_around(inner, tokenizer, name)
        except ModelError as error:
            own_model.reason = str(error)
        else:
            facts_of(bridge).made_of = MadeOf.from_bridge(bridge, own_model, paths)
            model = bridge
    loaded_as: LoadedAs = {"model": name, "checkpoint": None, "untrained": False}
    if inner is not hf_model:
        loaded_as["adapter"] = type(hf_model).__name__
    for one_of_both in (model, own_model):
        facts_of(one_of_both).loaded_as = loaded_as
    return model.eval()


def _bridge_around(
    inner: nn.Module, tokenizer: Any, name: str
) -> tuple[nn.Module, dict[nn.Module, str]]:
    """Return a bridge around copies of modules, and the paths that these had.

    Raises:
        ModelError: TransformerLens makes none, or would lose an adapter that is none of
            peft.
    """
    modules = copied_modules(inner)
    paths = paths_of(modules)
    called = _adapters_called(modules, modules)
    bridge = _booted(modules, tokenizer, name)
    if called - _adapters_called(modules, bridge):
        merged = _merged_copy(inner)
        paths = paths_of(merged)
        bridge = _booted(merged, tokenizer, name)
    if tokenizer is None:
        bridge.tokenizer = None
    return bridge, paths


def _merged_copy(model: nn.Module) -> Any:
    """Return copies of the modules with their adapters merged, and taken out.

    Weights that no adapter changes are shared.
    """
    layers: list[Any] = list(layers_with_adapters(model).values())
    if not all(hasattr(layer, "merge") for layer in layers):
        raise ModelError(
            f"TransformerLens splits a projection of {type(model).__name__} that has an "
            "adapter, and would lose it: merge the adapter first, or give the blocks to "
            "`tl_coupling.trace_modules`"
        )
    changed = [p for layer in layers for p in layer.base_layer.parameters()]
    merged = copied_modules(model, changed)
    merge_adapters(merged)
    return merged


def copied_modules(model: nn.Module, owned: Collection[Tensor] = ()) -> Any:
    """Return copies of the modules that share all tensors but the `owned` ones, in eval
    mode.
    """
    # What is in the memo of `deepcopy` is not copied.
    copied = {id(tensor) for tensor in owned}
    shared: dict[int, Any] = {
        id(tensor): tensor
        for tensor in (*model.parameters(), *model.buffers())
        if id(tensor) not in copied
    }
    # bitsandbytes moves scales into a layer's state when it first runs.
    states = (vars(part).get("state") for part in filter(is_packed, model.modules()))
    shared |= {id(state): state for state in states if state is not None}
    try:
        copied_model = copy.deepcopy(model, shared).eval()
    # Copying runs code of the model's own: it may raise anything.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {one_line(error)}"
        ) from error
    # After a `Trainer` in 16 bits the model's own call has autocast: this one has not.
    own_forward = vars(copied_model).pop("_original_forward", None)
    if own_forward is not None:
        copied_model.forward = own_forward
    return copied_model


def _booted(modules: Any, tokenizer: Any, name: str) -> Any:
    """Return a TransformerBridge around modules, which it rewires."""
    from transformer_lens.model_bridge import TransformerBridge

    first = next(modules.parameters())
    try:
        # As `load_model` has it: the parts of attention can be seen.
        modules.set_attn_implementation("eager")
        # By that a bridge is chosen, and not every configuration names it.
        if not modules.config.architectures:
            modules.config.architectures = [type(modules).__name__]
        with torch.random.fork_rng(devices=[]):
            return TransformerBridge.boot_transformers(
                name,
                hf_model=modules,
                tokenizer=tokenizer or wordless_tokenizer(),
                device=first.device,
                dtype=first.dtype,
            )
    except Exception as error:
        raise ModelError(
            f"could not make a TransformerBridge of {type(modules).__name__}: {error}; "
            "`tl_coupling.trace_modules` takes its blocks"
        ) from error


def _adapters_called(modules: nn.Module, model: nn.Module) -> set[nn.Module]:
    """Return the layers with an adapter that a pass of the model calls."""
    adapters = layers_with_adapters(modules).values()
    config = getattr(modules, "config", None)
    takes_ids = getattr(modules, "main_input_name", "") == "input_ids"
    if not adapters or not takes_ids or getattr(config, "is_encoder_decoder", False):
        return set()
    called: set[nn.Module] = set()
    handles = [
        module.register_forward_hook(lambda module, *_: called.add(module))
        for module in adapters
    ]
    device = next(modules.parameters()).device
    try:
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return called


def _without_adapter_wrapper(model: nn.Module) -> nn.Module:
    """Return the model in which peft has put its adapters; any other as it is."""
    base = getattr(type(model), "get_base_model", None)
    found: nn.Module = model if base is None else base(model)
    return found
