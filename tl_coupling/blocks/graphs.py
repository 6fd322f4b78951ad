"""The operations of a call as they ran, to be repeated with other tensors.

Blocks of one kind differ in their weights alone, and prompts of one length in their
streams: what ran for one of them is computed for all of them together, each operation
once (`batches`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.lost_gradients import tensors_in
from tl_coupling.blocks.records import (
    Operation,
    Record,
    has_no_slope,
    has_slope,
    makes_constants,
    replaced_values,
    sequence_of,
)

aten = torch.ops.aten
# The form of their output, and not its entries alone, depends on the numbers that they
# get, or on chance.
_UNREPEATABLE = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
}
# Operations that become `reshape`, so that a batch may have any layout in memory.
_RESHAPED = {aten.view.default, aten._unsafe_view.default}


@cache
def _is_repeatable(function: OpOverload) -> bool:
    return not _UNREPEATABLE & set(function.tags)


class Graph:
    """The operations of one call of a function of tensors, in order.

    Attributes:
        operations: all that ran.
        inputs: what the function was called on.
        outputs: what it returned.
        leaves: the tensors that no operation gave: the inputs, and weights and
            arguments in the order in which they are met.
        signature: equal for calls that differ in the entries of their leaves alone.

    Raises:
        BlockError: the function reads a value as a number, draws at random, or stops
            gradients of its inputs.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
    ) -> None:
        with Record(inputs, notes_all=True) as record:
            self.outputs = function(*inputs, record)
        self.operations = record.operations
        self.inputs = inputs
        self.leaves: list[Tensor] = []
        # Where each tensor comes from, by its id.
        self._sources: dict[int, object] = {}
        self._dependent = set(map(id, inputs))
        for x in inputs:
            self._source(x)
        steps = [self._described(operation) for operation in self.operations]
        self.signature = (steps, [self._source(output) for output in self.outputs])

    def repeated(
        self, replaced: Mapping[int, Tensor]
    ) -> tuple[list[Operation], list[Tensor]]:
        """Return the operations, and the outputs, with other tensors in the place of
        leaves of these ids.
        """
        values = dict(replaced)
        operations = []
        for operation in self.operations:
            args = tuple(replaced_values(operation.args, values))
            kwargs = dict(
                zip(
                    operation.kwargs,
                    replaced_values(list(operation.kwargs.values()), values),
                    strict=True,
                )
            )
            function = operation.function
            if function in _RESHAPED:
                function = aten.reshape.default
            outputs = sequence_of(function(*args, **kwargs))
            pairs = zip(tensors_in(operation.outputs), tensors_in(outputs), strict=True)
            values |= {id(old): new for old, new in pairs}
            operations.append(
                Operation(function, args, kwargs, outputs, operation.is_cut)
            )
        return operations, [values[id(output)] for output in self.outputs]

    def _described(self, operation: Operation) -> object:
        """Return what an operation is, but for the entries of tensors."""
        function, args, kwargs, outputs, is_cut = operation
        arguments = [*args, *kwargs.values()]
        if not _is_repeatable(function):
            raise BlockError(f"`{operation.name}` is not the same for other numbers")
        described = self._structure(arguments)
        if any(id(tensor) in self._dependent for tensor in tensors_in(arguments)):
            if not is_cut and (operation.name == "detach" or has_no_slope(operation)):
                raise BlockError(f"`{operation.name}` stops the stream's gradient")
            if not makes_constants(operation.name):
                followed = filter(has_slope, tensors_in(outputs))
                self._dependent.update(map(id, followed))
        place = len(self._sources)
        for i, output in enumerate(tensors_in(outputs)):
            self._sources[id(output)] = (place, i)
        return function, described, tuple(kwargs), is_cut

    def _structure(self, value: Any) -> object:
        """Return arguments with the sources of tensors in their place."""
        if isinstance(value, Tensor):
            return self._source(value)
        if isinstance(value, list | tuple):
            return [self._structure(entry) for entry in value]
        return value

    def _source(self, tensor: Tensor) -> object:
        """Return where a tensor comes from; one that nothing gave is a new leaf."""
        if id(tensor) not in self._sources:
            kind = (tensor.shape, tensor.dtype, tensor.device)
            self._sources[id(tensor)] = (len(self.leaves), kind)
            self.leaves.append(tensor)
        return self._sources[id(tensor)]
