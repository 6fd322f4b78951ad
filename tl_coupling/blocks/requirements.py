"""What can be traced: a model with one residual stream, and modules that compute the
same in every call.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tl_coupling.models import (
    OwnModel,
    describe_kind,
    in_eval_mode,
    is_huggingface,
)


def check_one_stream(model: nn.Module) -> None:
    """Raise unless this is a TransformerLens model with one residual stream that draws
    no random numbers.
    """
    if is_huggingface(model):
        # `trace` checks it as an `OwnModel`.
        return
    if not hasattr(model, "cfg"):
        raise TypeError(
            "wanted a TransformerLens model (TransformerBridge or HookedTransformer) or "
            f"a HuggingFace one, got {type(model).__name__}; "
            "`tl_coupling.load_model(name)` makes one, and "
            "`tl_coupling.trace_modules` takes any residual network"
        )
    kind = describe_kind(model)
    if kind:
        raise ValueError(f"is {kind}")
    # It is called in eval mode.
    with in_eval_mode(model) if isinstance(model, OwnModel) else nullcontext():
        check_computes_the_same(model)


def check_computes_the_same(model: nn.Module) -> None:
    """Raise ValueError unless a call of the model changes nothing and draws nothing, and
    its code can be followed.
    """
    for name, module in model.named_modules():
        part = name or "it"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"must be modules in Python, {part} is compiled by torch.jit: give what "
                "it was made from"
            )
        # `named_parameters` would list shared weights under their first name alone.
        for weight_name, weight in module._parameters.items():
            if _is_packed(weight):
                raise ValueError(
                    f"must have weights as plain tensors, `{weight_name}` of {part} is "
                    f"a {type(weight).__name__} (torchao and others pack them so): load "
                    "the model without quantization"
                )
        # In eval mode dropout is the identity, and statistics stay.
        if not module.training:
            continue
        setting = _random_setting(module)
        if setting:
            raise ValueError(
                f"must draw no random numbers, {part} is in train mode with {setting}: "
                "call .eval()"
            )
        if _keeps_statistics(module):
            raise ValueError(
                f"must be the same in every call, {part} is a {type(module).__name__} "
                "in train mode, which changes its running statistics: call .eval()"
            )


def _is_packed(weight: Tensor | None) -> bool:
    """Say whether a weight is a foreign class that holds other tensors."""
    # torch's own wrappers (Parameter, DTensor) are tensors to autograd.
    is_foreign = not type(weight).__module__.startswith("torch.")
    return is_foreign and is_traceable_wrapper_subclass(weight)


def _random_setting(module: nn.Module) -> str | None:
    """Return the setting for which a module in train mode draws random numbers."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"p = {module.p}" if module.p > 0 else None
    # HuggingFace's attention and mixtures keep theirs as numbers.
    for name, value in vars(module).items():
        is_positive = isinstance(value, float) and value > 0
        if is_positive and ("drop" in name or "jitter" in name):
            return f"{name} = {value}"
    return None


def _keeps_statistics(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    # Without them BatchNorm depends on its batch, which is one prompt's, alone.
    return module.track_running_stats
