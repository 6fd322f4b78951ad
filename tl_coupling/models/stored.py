"""Weights that stay in safetensors files, and the parameters that stand for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.file_tensors import FileTensor
from tl_coupling.models.model_files import FileState


class Stored(NamedTuple):
    """Where a weight is kept: a tensor of a safetensors file, and the file's state when
    the model was loaded.

    Reading raises ModelError where the file is no longer in that state: what was read
    before it changed belongs to another model.
    """

    tensor: FileTensor
    state: FileState

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Read and copy the weight in this context, which fails if its file changes.

        Raises:
            ModelError: the file changed before the context was left.
        """
        # Before and after: a file that changed while it was read is of neither model.
        self._check()
        yield
        self._check()

    def _check(self) -> None:
        try:
            has_changed = FileState.from_path(self.tensor.file) != self.state
        except FileNotFoundError:
            has_changed = True
        if has_changed:
            raise ModelError(
                f"{self.tensor.file} was changed, replaced or removed after the model was "
                "loaded, and its weights are read as they are needed: load the model "
                "again, and measure again"
            )

    def read(self) -> Tensor:
        """Return the tensor as a map of the file.

        It takes memory once it is used, and until it is let go.
        """
        return self.tensor.read()

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return some rows of the tensor; the others are not read."""
        from safetensors import safe_open

        with self.unchanged(), safe_open(self.tensor.file, "pt") as file:
            table = file.get_slice(self.tensor.name)
            return torch.cat([table[i : i + 1] for i in indices])


class StoredParameter(nn.Parameter):
    """A parameter of full shape that takes the memory of one number, a NaN.

    Its weight is read from `place` while the model computes. Without a place it is cut
    from another weight, or stays NaN, so that what is computed without the weight is
    never mistaken for a number.
    """

    place: Stored | None = None

    @classmethod
    def like(cls, parameter: nn.Parameter, device: torch.device) -> "StoredParameter":
        """Make one of the shape and dtype of a parameter."""
        nan = torch.full((1,), torch.nan, dtype=parameter.dtype, device=device)
        # Expanded: all entries are one number in memory.
        return cls(nan.expand(parameter.shape), parameter.requires_grad)

    @property
    def is_empty(self) -> bool:
        """Whether the weight is not in memory now."""
        # More memory than one number takes: the weight is there.
        if self.untyped_storage().nbytes() != self.element_size():
            return False
        # One number takes as much memory as its stand-in.
        return self.numel() > 1 or bool(self.isnan().all())


def stored_parameters(part: nn.Module) -> list[StoredParameter]:
    """Return a module's own stored parameters, without those of modules inside it."""
    parameters = part._parameters.values()
    return [p for p in parameters if isinstance(p, StoredParameter)]


def holds_stored_weights(module: nn.Module) -> bool:
    """Say whether weights of the module, or of one inside it, are in files."""
    return any(stored_parameters(part) for part in module.modules())
