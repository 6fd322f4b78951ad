"""What became of each tensor of a checkpoint: a weight, a part of one, or nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from tl_coupling.models.file_tensors import FileTensor, tensors_in
from tl_coupling.models.harmless import LeftTensor, reason_to_leave
from tl_coupling.models.patched_transformers import Place, Reading


@runtime_checkable
class OwnFormat(Protocol):
    """A file that is neither safetensors nor a pickle, such as a GGUF file."""

    def places(self, model: Any, reading: Reading) -> Mapping[FileTensor, Place]:
        """Return where in a model each tensor of the file is.

        One that is nowhere has its own name as place, which no weight has.
        """

    def refuse(self, unplaced: Sequence[str]) -> None:
        """Raise ModelError on names of tensors without a place; none is fine."""


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint's files, and what became of each.

    Attributes:
        reading: what transformers read of it.
        tensors: by name.
        left: those that the model has no place for, and cannot do without.
        replaced: those whose place in the model another tensor took, of other numbers.
    """

    reading: Reading
    tensors: Mapping[str, FileTensor]
    left: Sequence[LeftTensor]
    replaced: Sequence[FileTensor]

    @classmethod
    def from_reading(
        cls, model: Any, reading: Reading, file: OwnFormat | None = None
    ) -> "Contents":
        """Compare the files, or the one in a format of its own, with the model. Headers
        are read, and a few small tensors that may be masks, or are there twice.
        """
        if file is None:
            all_tensors = list(tensors_in(reading.files))
            # Where transformers was not seen to rename one, it has its own name.
            places = {tensor.name: Place(tensor.name, None) for tensor in all_tensors}
            places |= reading.places
        else:
            places_of_file = file.places(model, reading)
            all_tensors = list(places_of_file)
            places = {tensor.name: place for tensor, place in places_of_file.items()}
        tensors = {tensor.name: tensor for tensor in all_tensors}
        reading = reading._replace(places=places)
        unplaced = [
            tensors[name] for name in unplaced_names(reading) if name in tensors
        ]
        if not reading.files:
            # Only their names are known.
            unplaced = [FileTensor("", name, torch.float32, ()) for name in places]
        left_out = [
            LeftTensor(
                tensor,
                places[tensor.name].weight,
                model,
                reading.weights,
                reading.quantization is not None,
            )
            for tensor in unplaced
        ]
        needed = [left for left in left_out if reason_to_leave(left) is None]
        replaced = [*_overwritten(all_tensors), *_collided(tensors, reading)]
        return cls(reading, tensors, needed, replaced)

    def codes(self) -> list[FileTensor]:
        """Return tensors that are no numbers in floating point where such are needed,
        and that no quantiser has turned into some.
        """
        left = {left.tensor.name for left in self.left}
        unpacked = self._unpacked_weights()
        return [
            tensor
            for name, tensor in self.tensors.items()
            if not tensor.holds_numbers
            and (name in left or self._needs_numbers(tensor))
            and self.reading.places[name] not in unpacked
        ]

    def _needs_numbers(self, tensor: FileTensor) -> bool:
        """Say whether a tensor became numbers in floating point, or codes of such."""
        weight = self.reading.weights.get(self.reading.places[tensor.name].weight)
        if weight is None:
            return False
        # Such as which expert reads which token.
        is_whole_too = tensor.holds_whole_numbers and not weight.dtype.is_floating_point
        is_packed = weight.is_parameter and self.reading.quantization is not None
        return is_packed or not is_whole_too

    def _unpacked_weights(self) -> set[Place]:
        """Return the places of codes from which weights were made together with their
        scales, as many as there are codes.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for name in self.tensors:
            place = self.reading.places[name]
            if place.pattern in self.reading.unpacked_patterns:
                counts[place.weight][place.pattern] += 1
        return {
            Place(weight, pattern)
            for weight, count in counts.items()
            if _is_whole(count)
            for pattern in count
        }


def _is_whole(count: Counter[str]) -> bool:
    """Say whether each of the codes has all that belongs to it, by how often each
    pattern of names was met.
    """
    # Scales that are codes themselves have a scale and a table, both called nested.
    n_nested = sum("nested" in pattern for pattern in count)
    return len(count) > 1 and len(set(count.values())) == 1 and n_nested in (0, 2)


def unplaced_names(reading: Reading) -> list[str]:
    """Return the names of tensors for which a model has no weight."""
    return [
        name
        for name, place in reading.places.items()
        if place.weight not in reading.weights
    ]


def _overwritten(tensors: Iterable[FileTensor]) -> list[FileTensor]:
    """Return tensors of which another file has one of the same name and other numbers:
    the last one is read.
    """
    first: dict[str, FileTensor] = {}
    overwritten = []
    for tensor in tensors:
        earlier = first.setdefault(tensor.name, tensor)
        if earlier is not tensor and not _are_equal(earlier, tensor):
            overwritten.append(earlier)
    return overwritten


def _collided(tensors: Mapping[str, FileTensor], reading: Reading) -> list[FileTensor]:
    """Return tensors that were to become a weight which another tensor has become, of
    other numbers: one with a prefix and one without, or an old name and a new one.
    """
    by_place: dict[Place, list[FileTensor]] = defaultdict(list)
    patterns: dict[str, set[str | None]] = defaultdict(set)
    for name, tensor in tensors.items():
        place = reading.places[name]
        if place.weight not in reading.weights:
            continue
        by_place[place].append(tensor)
        patterns[place.weight].add(place.pattern)
    collided = []
    for place, (first, *others) in by_place.items():
        if place.pattern is None and len(patterns[place.weight]) > 1:
            # Beside others from which the weight is made.
            collided.append(first)
        for other in others:
            is_extra = place.pattern is None or _differ_in_prefix(first, other)
            if is_extra and not _are_equal(first, other):
                collided.append(other)
    return collided


def _differ_in_prefix(first: FileTensor, second: FileTensor) -> bool:
    """Say whether names are the same but for a prefix."""
    short, long = sorted((first.name, second.name), key=len)
    return long.endswith(f".{short}")


def _are_equal(first: FileTensor, second: FileTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.read(), second.read())
