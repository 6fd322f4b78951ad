"""Parameters that stand for weights in files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tl_coupling.models import filled, holds_stored_weights
from tl_coupling.models.file_tensors import tensors_in
from tl_coupling.models.model_files import FileState
from tl_coupling.models.module_state import attributes_set
from tl_coupling.models.stored import Stored, StoredParameter

pytestmark = pytest.mark.both_lines

CPU = torch.device("cpu")


def module_with(weight: torch.Tensor, folder: Path) -> nn.Module:
    """A module whose one weight is in a file."""
    file = folder / "weights.safetensors"
    save_file({"weight": weight}, file)
    module = nn.Module()
    module.weight = StoredParameter.like(nn.Parameter(weight), CPU)
    (tensor,) = tensors_in([str(file)])
    module.weight.place = Stored(tensor, FileState.from_path(file))
    return module


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_weight_is_there_within_the_context_and_nan_outside(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Of one number too, which takes as much memory as its stand-in."""
    weight = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    module = module_with(weight, tmp_path)
    assert holds_stored_weights(module)
    assert module.weight.is_empty
    assert module.weight.isnan().all()
    with attributes_set(filled([module], torch.float64)):
        assert not module.weight.is_empty
        assert torch.equal(module.weight.data, weight.double())
    assert module.weight.is_empty


def test_a_weight_without_a_place_stays_nan() -> None:
    module = nn.Module()
    module.weight = StoredParameter.like(nn.Parameter(torch.ones(2)), CPU)
    with attributes_set(filled([module], torch.float32)):
        assert module.weight.isnan().all()


def test_a_module_in_memory_holds_no_stored_weights() -> None:
    assert not holds_stored_weights(nn.Linear(2, 2))
