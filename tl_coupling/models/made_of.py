"""What a bridge was made of, and whether somebody has changed the bridge since."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tl_coupling.models.own_model import OwnModel


class _TensorState(NamedTuple):
    """What shows that a tensor was changed: by torch, which counts changes, and where it
    is the bridge's own by its norm as well, because a change of `.data` is not counted.
    """

    address: int
    version: int
    norm: float


@dataclass(frozen=True)
class MadeOf:
    """The HuggingFace model that a bridge was made of.

    Attributes:
        own_model: that model, with its own modules.
        states: those of the bridge's tensors when it was made.
    """

    own_model: OwnModel
    states: dict[str, _TensorState]

    @classmethod
    def from_bridge(
        cls, bridge: nn.Module, own_model: OwnModel, paths: Mapping[nn.Module, str]
    ) -> "MadeOf":
        """Remember what a bridge was made of, as it has just been made.

        Args:
            bridge: around modules like those of the model.
            own_model: the model.
            paths: of the modules that the bridge was put around, before it was.

        Cost: reading the weights that the two do not share.
        """
        own_model.path_of_blocks = _path_of_blocks(bridge, paths)
        return cls(own_model, _states(bridge, own_model))

    def is_changed(self, bridge: nn.Module) -> bool:
        """Say whether the bridge's weights or modules are others than when it was made."""
        return _states(bridge, self.own_model) != self.states


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module of a model."""
    return {module: path for path, module in model.named_modules()}


def _path_of_blocks(bridge: Any, paths: Mapping[nn.Module, str]) -> str | None:
    """Return the path of the list of blocks in the model that a bridge was put around;
    None where its blocks are not that model's.
    """
    blocks: Any = getattr(bridge, "blocks", ())
    originals = [getattr(block, "original_component", block) for block in blocks]
    lists = {paths.get(block, "").rpartition(".")[0] for block in originals}
    return lists.pop() if len(lists) == 1 else None


def _states(bridge: nn.Module, own_model: OwnModel) -> dict[str, _TensorState]:
    shared = {id(parameter) for parameter in own_model.parameters()}
    return {
        name: _state(parameter, is_shared=id(parameter) in shared)
        for name, parameter in bridge.named_parameters()
    }


def _state(tensor: Tensor, is_shared: bool) -> _TensorState:
    version = -1 if tensor.is_inference() else tensor._version
    norm = 0.0
    if not is_shared and tensor.is_floating_point() and not tensor.is_meta:
        norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    address = 0 if tensor.is_meta else tensor.data_ptr()
    return _TensorState(address, version, norm)
