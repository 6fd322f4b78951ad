"""HuggingFace's own blocks in float64, at the stream that was measured: neither a
bridge nor tl_coupling has a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.oracle import Oracle

# How far each row is moved for the finite difference, relative to its size. In float64
# rounding is 1e-11 of the slope and curvature, which is 60 % over a hundredth of
# Gemma's stream, 1e-10.
_MOVE = 1e-6


class InFloat64(TorchFunctionMode):
    """Float64 wherever a module asks for float32: HuggingFace's norms and softmax do,
    whatever the model is in.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(
            *map(_promoted, args),
            **{name: _promoted(value) for name, value in (kwargs or {}).items()},
        )


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Exact:
    """What float64 says of one J of one block at one token, the skip left out."""

    products: Float[Tensor, "n_probes d_model"]
    image: Float[Tensor, " d_model"]


def in_float64(model: nn.Module, blocks: str) -> nn.Module:
    """Return the model itself, converted to float64, and its blocks made to compute in
    float64 throughout.

    Not the whole model: rotary embeddings are tables in float32, for the model that was
    measured as well.
    """
    module: Any
    for module in model.double().get_submodule(blocks):
        module.forward = _promoting(module.forward)
    return model


class ExactOracle:
    """One prompt on a model of `in_float64`: `uᵀ J` by autograd, and `J v` by a central
    finite difference.

    `residual` is the stream that entered each block where it was measured: there the
    derivative is taken, so that it is the derivative, and not the point, that is
    compared. `plain` is the same model in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        blocks: str,
        inputs: Mapping[str, Any],
        residual: Float[Tensor, "n_layers n_pos d"],
    ) -> None:
        self.residual = residual.double()
        self.oracle = Oracle(model, blocks, inputs, self.residual)
        self.in_float32 = Oracle(plain, blocks, inputs, residual)

    def at(
        self,
        position: int,
        left: Mapping[int, Float[Tensor, "n_probes d_model"]],
        right: Mapping[int, Float[Tensor, " d_model"]],
        steps: Mapping[int, tuple[Tensor, Tensor]],
    ) -> dict[int, Exact]:
        """`left[layer] J` and `J right[layer]` of each layer at one token; `steps` are
        those of `steps(layers)`.
        """
        images = self._finite_differences(position, right)
        return {
            layer: Exact(_products(*steps[layer], position, u), images[layer])
            for layer, u in left.items()
        }

    def steps(self, layers: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """`(X, Y)` of each block, X a leaf of the graph of Y: one forward pass for
        all.
        """
        return dict(zip(layers, self.oracle.steps(layers), strict=True))

    def products_in_float32(
        self, layer: int, position: int, left: Float[Tensor, "n_probes d_model"]
    ) -> Float[Tensor, "n_probes d_model"]:
        """`left J` by autograd over HuggingFace's block in float32: what that precision
        can give at this point.
        """
        [(X, Y)] = self.in_float32.steps([layer])
        return _products(X, Y, position, left.float()).double()

    def _finite_differences(
        self, position: int, right: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Two forward passes for all layers: each block reads a stream of its own, so
        all are moved at once.
        """
        moves = torch.zeros_like(self.residual)
        for layer, v in right.items():
            size = self.residual[layer, position].norm() / v.norm()
            moves[layer, position] = _MOVE * size * v
        sides = []
        for sign in (1, -1):
            self.oracle.residual = self.residual + sign * moves
            with torch.no_grad():
                sides.append(self.steps(list(right)))
        self.oracle.residual = self.residual
        up, down = sides
        images = {}
        for layer, v in right.items():
            length = moves[layer, position].norm() / v.norm()
            slope = (up[layer][1][0, position] - down[layer][1][0, position]) / (
                2 * length
            )
            images[layer] = slope - v
        return images


def _products(
    X: Tensor, Y: Tensor, position: int, left: Tensor
) -> Float[Tensor, "n_probes d_model"]:
    y = Y[0, position]
    rows = [
        torch.autograd.grad(y, X, u, retain_graph=True)[0][0, position] - u
        for u in left
    ]
    return torch.stack(rows)


def _promoting(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    return call
