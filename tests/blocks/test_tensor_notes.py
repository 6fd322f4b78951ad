"""Notes on tensors: by identity, and gone with them."""

import gc
import weakref

import torch

from tl_coupling.blocks.tensor_notes import TensorNotes


def test_a_note_is_of_one_tensor_and_not_of_an_equal_one() -> None:
    notes: TensorNotes[str] = TensorNotes()
    tensor = torch.ones(2)
    notes[tensor] = "here"
    assert notes.get(tensor) == "here"
    assert notes.get(torch.ones(2)) is None
    notes[tensor] = "again"
    assert notes.get(tensor) == "again"


def test_a_note_keeps_no_tensor_and_is_of_none_that_comes_where_it_was() -> None:
    notes: TensorNotes[int] = TensorNotes()
    places = set()
    for number in range(100):
        tensor = torch.ones(2)
        # Most are where an earlier one was.
        assert notes.get(tensor) is None
        places.add(id(tensor))
        notes[tensor] = number
        reference = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert reference() is None
    assert len(places) < 100
