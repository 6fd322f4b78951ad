"""Notes on tensors that do not keep them alive."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

_Note = TypeVar("_Note")


class TensorNotes(Generic[_Note]):
    """A note on each of some tensors, told by identity.

    Nothing is called when a tensor goes, unlike in torch's weak dictionaries: an
    interrupt that comes in a destructor is lost.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], _Note]] = {}

    def __setitem__(self, tensor: Tensor, note: _Note) -> None:
        self._notes[id(tensor)] = (weakref.ref(tensor), note)

    def get(self, tensor: Tensor) -> _Note | None:
        """Return the note on a tensor, or None."""
        reference, note = self._notes.get(id(tensor), (None, None))
        # Another tensor may be where one was that is gone.
        return note if reference is not None and reference() is tensor else None
