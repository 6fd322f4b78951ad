"""Jacobians of every pair of tokens by plain autograd over the whole sequence."""

from typing import Any

import numpy as np
import torch
from torch import nn


def all_jacobians(
    hf_model: nn.Module, layer: nn.Module, tokens: list[int]
) -> np.ndarray:
    """`J[t1, t2]` of one HuggingFace layer for every pair of tokens, `[n n d d]`."""
    call: dict[str, Any] = {}

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call["args"], call["kwargs"] = args, kwargs

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        hf_model(torch.tensor([tokens]), use_cache=False)
    handle.remove()
    first, *others = call["args"] or (call["kwargs"].pop("hidden_states"),)

    def block(X: torch.Tensor) -> torch.Tensor:
        output = layer(X[None], *others, **call["kwargs"])
        return (output[0] if isinstance(output, tuple) else output)[0] - X

    X = first[0].detach()
    J = [
        torch.autograd.functional.jacobian(
            lambda X, t=t: block(X)[t], X, vectorize=True
        )
        for t in range(len(X))
    ]
    return torch.stack(J).permute(2, 0, 1, 3).double().numpy()
