"""Jacobians that several measurements of one trace ask for, computed once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from tl_coupling.gradients import Path
from tl_coupling.jacobians.connections import AnyFunction, Connection
from tl_coupling.jacobians.memory import fits_in_memory
from tl_coupling.jacobians.shelf import Shelf
from tl_coupling.traces import Trace

# What `jacobians_of_output` gives: matrices, and the way to them.
Matrices = tuple[Sequence[Tensor], Path]
# Layer, t1 and t2.
_Ends = tuple[int, int, int]
_current: ContextVar["HeldJacobians | None"] = ContextVar("held", default=None)


class HeldJacobians:
    """The Jacobians of one trace that will be asked for again, once they are computed.

    Rounding depends on which Jacobians are computed together. So those are the same
    that are of the same group: a layer, input positions and an output position.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._asked_again: set[_Ends] = set()
        self._shelves: dict[object, tuple[Shelf, Path]] = {}

    def expect(self, connections: Iterable[Connection]) -> None:
        """Hold the Jacobians of these connections from when they are computed."""
        self._asked_again.update(map(_ends, connections))

    def __contains__(self, key: object) -> bool:
        return key in self._shelves

    def get(
        self,
        key: object,
        group: Sequence[Connection],
        compute: Callable[[], Matrices],
    ) -> Matrices:
        """Return the Jacobians of a group, computed unless they are held."""
        if key in self._shelves:
            shelf, path = self._shelves[key]
            return [shelf.take(i) for i in range(len(group))], path
        matrices, path = compute()
        if self._asked_again.issuperset(map(_ends, group)):
            n_bytes = len(self._asked_again) * matrices[0].nbytes
            block = self.trace.blocks[group[0].layer].call.module
            shelf = Shelf(len(group), matrices[0], fits_in_memory(n_bytes, block))
            shelf.put(0, torch.stack(list(matrices)))
            self._shelves[key] = shelf, path
        return matrices, path


def key_of(
    group: Sequence[Connection], chunk_size: int | None, function: AnyFunction
) -> object:
    """Return what a group of connections with one output is held by."""
    return (*map(_ends, group), chunk_size, function)


def held_of(trace: Trace) -> HeldJacobians | None:
    """Return what is held of a trace at this point of the program."""
    held = _current.get()
    return held if held is not None and held.trace is trace else None


@contextmanager
def each_once(trace: Trace, connections: Iterable[Connection]) -> Iterator[None]:
    """Compute each of these Jacobians once within the block, however often it's asked.

    They are held in memory, or in a temporary file where they do not fit, until the
    block ends. A block within another adds to what is held.
    """
    held = held_of(trace)
    if held is not None:
        held.expect(connections)
        yield
        return
    held = HeldJacobians(trace)
    held.expect(connections)
    token = _current.set(held)
    try:
        yield
    finally:
        _current.reset(token)


def _ends(connection: Connection) -> _Ends:
    return connection.layer, connection.input_position, connection.output_position
