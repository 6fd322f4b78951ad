"""Jacobians of several blocks, and on several prompts, all at once.

Blocks of one kind differ in their weights alone, prompts of one length in their streams.
What one of them runs is recorded as a graph of operations (`graphs`), and repeated under
`torch.func.vmap` with the weights and streams of all: an operation is launched once, not
once for each. A GPU, which waits for launches, gains by that; a CPU does not.

Each block runs by its own call first: only those with the same graph go together. Of
each the same is checked as of one alone (`gate`), by its own traced step, against the
full sequence, and read for all together; what fails goes singly, and so do the first
block's own checks, by its own backward pass.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.function import BlockFunction, Path, other_rows
from tl_coupling.blocks.gate import (
    Reference,
    is_another_step,
    is_same_product,
    is_same_value,
    random_direction,
    random_output,
)
from tl_coupling.blocks.graphs import Graph
from tl_coupling.blocks.hooks import backward_hooks_of_user
from tl_coupling.blocks.lost_gradients import tensors_in
from tl_coupling.blocks.records import Record, jacobian_of_operations
from tl_coupling.blocks.skip_path import LargeResponse, large_stream
from tl_coupling.blocks.slopes import converges

# The way to Jacobians that are computed together.
TOGETHER: Path = "token_local_recorded"
# Blocks by layer, each on several prompts.
Grid = Sequence[Sequence[BlockFunction]]
# By layer and prompt; None of what goes singly.
Jacobians = list[list[Tensor | None]]


def jacobians_together(blocks: Grid, t: int) -> Jacobians:
    """Return `J_{tt}` of blocks on prompts of one length, by layer and prompt, of each
    that can be computed together with others; None of those that must be computed
    alone. Each of the first keeps its reference and its `large_response`.

    Args:
        blocks: by layer, each on the same prompts.
        t: the position.

    Raises:
        StepError, DerivativeError: as `BlockFunction.refer_to`, of the first block of
            each kind.

    Cost: a forward pass of each block; beside it about as many kernel launches as for
    one block, and the arithmetic of all; memory for a copy of their weights.
    """
    results: Jacobians = [[None] * len(row) for row in blocks]
    for layers, graphs in _kinds(blocks):
        rows = [blocks[layer] for layer in layers]
        if sum(map(len, rows)) < 2:
            continue
        rows[0][0].refer_to([t])
        try:
            differs = [
                torch.stack([block.differs_from_recorded_call() for block in row])
                for row in rows
            ]
            with rows[0][0].evaluation():
                together = _Together(rows, graphs, t)
                jacobians = together.jacobians(torch.stack(differs))
        except BlockError:
            continue
        except Exception as error:
            # A foreign block may raise anything under vmap.
            if is_out_of_memory(error):
                raise
            _remark_on_failure(rows[0][0], error)
            continue
        for layer, of_layer in zip(layers, jacobians, strict=True):
            results[layer] = of_layer
    return results


def _remark_on_failure(block: BlockFunction, error: Exception) -> None:
    kind = type(error).__name__
    message = " ".join(str(error).split())[:200]
    block.remarks.add(
        f"together: {kind}",
        f"blocks like that of layer {block.layer} could not be computed together "
        f"({kind}: {message}), so each was computed alone",
    )


def _kinds(blocks: Grid) -> list[tuple[list[int], list[Graph]]]:
    """Return the layers of blocks that are computed together, with their graphs."""
    kinds: list[tuple[list[int], list[Graph]]] = []
    for layer, row in enumerate(blocks):
        graph = None
        if _are_on_alike_prompts(row):
            with suppress(BlockError):
                graph = _graph(row[0])
        if graph is None:
            continue
        for layers, graphs in kinds:
            if _is_one_kind(row, graph, blocks[layers[0]], graphs[0]):
                layers.append(layer)
                graphs.append(graph)
                break
        else:
            kinds.append(([layer], [graph]))
    return kinds


def _graph(block: BlockFunction) -> Graph:
    """Return the operations by which a block makes f(X), keys and values of X.

    Raises:
        BlockError: it is not computed together with others.
    """
    # Norms around a block are its own, so that such blocks cannot be computed together.
    if block.norm is not None or block.stream_norms is not None:
        raise BlockError("f is more than a block")
    if backward_hooks_of_user(block.call.module):
        raise BlockError("hooks change gradients")

    def added(X: Tensor, _: Record) -> tuple[Tensor, ...]:
        Y, keys_and_values = block.added_with_context(X)
        return Y, *keys_and_values

    with block.evaluation():
        try:
            return Graph(added, [block.X])
        except BlockError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BlockError("the block fails as it is recorded") from error


def _is_one_kind(
    row: Sequence[BlockFunction],
    graph: Graph,
    other_row: Sequence[BlockFunction],
    other_graph: Graph,
) -> bool:
    """Say whether two blocks differ in tensors alone."""
    if graph.signature != other_graph.signature:
        return False
    modules, other_modules = (
        [type(part) for part in block.call.module.modules()]
        for block in (row[0], other_row[0])
    )
    return modules == other_modules and row[0].own_dtype == other_row[0].own_dtype


def _are_on_alike_prompts(row: Sequence[BlockFunction]) -> bool:
    """Say whether a block is called in the same way on all prompts."""
    forms = [_form(block.call.arguments) for block in row]
    return all(
        block.X.shape == row[0].X.shape
        and block.call.module is row[0].call.module
        and not block.call.state
        and form == forms[0]
        for block, form in zip(row, forms, strict=True)
    )


def _form(value: Any) -> object:
    """Return arguments with the kinds of tensors in their place."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: _form(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_form(entry) for entry in value]
    return value


def _arguments(block: BlockFunction) -> list[Tensor]:
    """Return the tensors among a block's arguments, in order."""
    return list(tensors_in([*block.call.arguments.values()]))


class _Stacked(NamedTuple):
    """A tensor of all blocks and prompts, and the axes along which those are; None
    where it is the same for all.
    """

    tensor: Tensor
    layer_dim: int | None
    prompt_dim: int | None


class _FullSequence(NamedTuple):
    """What the full sequence gives of all: f, `uᵀJ`, and keys and values."""

    Y: Float[Tensor, "layer prompt pos d_model"]
    rows: Float[Tensor, "layer prompt pos d_model"]
    keys_and_values: list[Tensor]


class _Together:
    """Blocks of one kind, each on the same prompts, at one position."""

    def __init__(self, blocks: Grid, graphs: Sequence[Graph], t: int) -> None:
        self.blocks = blocks
        self.graphs = graphs
        self.t = t
        self.first = blocks[0][0]
        self.X = self._stack(lambda block: block.X)
        self.u = random_output(t, self.X)
        # Numbers of `LargeResponse`, once the blocks were called on that stream.
        self.large_response: Float[Tensor, "layer prompt 3"] | None = None
        # The leaves of all blocks, by the ids of the first block's.
        self.leaves = {
            id(leaf): stacked
            for place, leaf in enumerate(graphs[0].leaves)
            if (stacked := self._stacked_leaf(place)) is not None
        }

    def jacobians(self, differs: Bool[Tensor, "layer prompt"]) -> Jacobians:
        """Return the Jacobians of those that pass the checks, which are read at once.

        Args:
            differs: which are no longer what was recorded, and so pass none.

        Raises:
            BlockError: none can be computed together.
        """
        sequence = self._on_all_rows()
        is_slope = torch.from_numpy(self._slopes_converge(sequence)).to(self.X.device)
        assert self.large_response is not None
        is_right = self._is_traced(sequence) & is_slope.reshape(self.X.shape[:2])
        is_right &= self._is_autograds(sequence) & ~differs
        for is_apart in (True, False):
            try:
                y, J = self._recorded(sequence, is_apart)
            except BlockError:
                continue
            agrees = is_right & self._agrees(sequence, y, J)
            # One reading for all.
            numbers = torch.cat([agrees[..., None], self.large_response], -1).tolist()
            if any(of_one[0] for of_layer in numbers for of_one in of_layer):
                return self._accepted(sequence, J, numbers)
        raise BlockError("no block agrees with its full sequence")

    def _accepted(self, sequence: _FullSequence, J: Tensor, numbers: Any) -> Jacobians:
        """Return what passed; each of these blocks gets its reference."""
        results: Jacobians = [[None] * len(row) for row in self.blocks]
        for layer, row in enumerate(self.blocks):
            for prompt, block in enumerate(row):
                agrees, *response_numbers = numbers[layer][prompt]
                large_response = LargeResponse.read(*response_numbers)
                # A block that cuts the stream, or normalises it, is looked at alone.
                if (
                    not agrees
                    or not large_response.passes_whole
                    or large_response.stays_small
                ):
                    continue
                Y, rows = sequence.Y[layer, prompt], sequence.rows[layer, prompt]
                block.keep_reference(self.t, Reference(Y[self.t], self.u, rows))
                block.large_response = large_response
                results[layer][prompt] = J[layer, prompt]
        return results

    # The full sequence

    def _on_all_rows(self) -> _FullSequence:
        """Compute f, its product with u, and keys and values, of all."""
        seed = torch.zeros_like(self.first.X)
        seed[self.t] = self.u

        def of_one(X: Tensor, *leaves: Tensor) -> Any:
            def added(X: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                Y, *keys_and_values = self._repeated(X, leaves)
                return Y, tuple(keys_and_values)

            vjp: Any = torch.func.vjp(added, X, has_aux=True)
            Y, pull_back, keys_and_values = vjp
            (rows,) = pull_back(seed)
            return Y, rows, *keys_and_values

        stream = _Stacked(self.X, 0, 0)
        Y, rows, *keys_and_values = _over_grid(of_one, [stream, *self.leaves.values()])
        return _FullSequence(Y, rows, keys_and_values)

    def _repeated(self, X: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return f(X), keys and values of one, of its stream and its leaves."""
        values = dict(zip(self.leaves, leaves, strict=True))
        return self.graphs[0].repeated(values | {id(self.first.X): X})[1]

    def _added_to_each(
        self, streams: Float[Tensor, "layer prompt stream pos d_model"]
    ) -> Float[Tensor, "layer prompt stream pos d_model"]:
        """Return f of several streams of each."""

        def of_one(streams: Tensor, *leaves: Tensor) -> Tensor:
            def added(X: Tensor) -> Tensor:
                return self._repeated(X, leaves)[0]

            return torch.func.vmap(added)(streams)

        stacked = _Stacked(streams, 0, 0)
        added: Tensor = _over_grid(of_one, [stacked, *self.leaves.values()])
        return added

    def _is_traced(self, sequence: _FullSequence) -> Bool[Tensor, "layer prompt"]:
        """Say which blocks add what they added when they were traced."""
        step = self._stack(lambda block: block.step)
        differs = is_another_step(
            sequence.Y[:, :, self.t],
            step[:, :, self.t],
            self.X[:, :, self.t],
            self.first.rounding_of_step,
        )
        return ~differs

    def _is_autograds(self, sequence: _FullSequence) -> Bool[Tensor, ""]:
        """Say whether the first block's own backward pass gives the same: nobody changed
        a gradient.
        """
        rows = self.first.reference(self.t).rows
        u = self.u.expand_as(rows)
        return is_same_product(sequence.rows[0, 0], rows, rows.norm(), u).all()

    def _slopes_converge(
        self, sequence: _FullSequence
    ) -> Bool[np.ndarray, " layer_prompt"]:
        """Say which blocks change as their derivatives predict (`slopes`).

        The first moves are computed together with the large streams.
        """
        X = self.X
        size = X.norm(dim=-1, keepdim=True) / math.sqrt(X.shape[-1])
        # One direction for all: they are other functions.
        V = size * random_direction(self.first.layer, 0, self.first.X).to(X)
        y = sequence.Y[:, :, self.t]
        large = large_stream(X)

        def deviations(moves: list[float]) -> Tensor:
            moved = torch.stack([torch.add(X, V, alpha=move) for move in moves], 2)
            streams = moved
            if self.large_response is None:
                streams = torch.cat([moved, large[:, :, None]], 2)
            added = self._added_to_each(streams)
            if self.large_response is None:
                self.large_response = LargeResponse.numbers(
                    added[:, :, -1] + large, large
                )
            change = added[:, :, : len(moves), self.t] - y[:, :, None]
            moved_by = moved - X[:, :, None]
            predicted = (moved_by * sequence.rows[:, :, None]).sum((-2, -1))
            return (change @ self.u - predicted).flatten(0, 1).mT

        scale = (sequence.rows * size).flatten(-2).norm(dim=-1)
        magnitude = X[:, :, self.t].norm(dim=-1) + y.norm(dim=-1)
        return converges(deviations, scale.flatten(), magnitude.flatten())

    # The token alone

    def _recorded(
        self, sequence: _FullSequence, is_apart: bool
    ) -> tuple[Tensor, Tensor]:
        """Return `f(X)[t]` and its Jacobian, of all, from a record of the first."""
        block, t = self.first, self.t
        context = block.context_of(t)
        function, _ = block.function_of_rows([t], t, context, is_apart)

        def as_outputs(x: Tensor, record: Record) -> tuple[Tensor, ...]:
            return (function(x, record),)

        graph = Graph(as_outputs, [block.X[t].clone()])
        ids = [*self.leaves, id(block.X)]
        dim, looks_ahead = block.call.position_dim, block.looks_ahead(t)

        def of_one(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            *leaves, K, V = tensors
            values = dict(zip(ids, leaves, strict=True))
            x = values[id(block.X)][t]
            values[id(graph.inputs[0])] = x
            for rows, traced in zip((K, V), context, strict=True):
                values[id(traced)] = other_rows(rows, t, dim, looks_ahead)
            operations, (y,) = graph.repeated(values)
            return y, jacobian_of_operations(operations, x, y)

        streams = [
            _Stacked(stream, 0, 0) for stream in (self.X, *sequence.keys_and_values)
        ]
        with torch.no_grad():
            y, J = _over_grid(of_one, [*self.leaves.values(), *streams])
        return y, J

    def _agrees(
        self, sequence: _FullSequence, y: Tensor, J: Tensor
    ) -> Bool[Tensor, "layer prompt"]:
        """Say which blocks have the value and the product of their full sequence."""
        is_product = is_same_product(
            self.u @ J,
            sequence.rows[:, :, self.t],
            sequence.rows.flatten(-2).norm(dim=-1),
            self.u,
        )
        value = sequence.Y[:, :, self.t]
        return is_product & is_same_value(y, value, self.X[:, :, self.t])

    # Tensors of all

    def _stack(self, of_block: Callable[[BlockFunction], Tensor]) -> Tensor:
        return torch.stack(
            [torch.stack(list(map(of_block, row))) for row in self.blocks]
        )

    def _stacked_leaf(self, place: int) -> _Stacked | None:
        """Return a leaf of all graphs; None of the stream, which is given apart."""
        rows = []
        for row, graph in zip(self.blocks, self.graphs, strict=True):
            leaf = graph.leaves[place]
            if leaf is row[0].X:
                return None
            arguments = _arguments(row[0])
            places = [i for i, x in enumerate(arguments) if x is leaf]
            of_row = [leaf] * len(row)
            if places:
                of_row = [_arguments(block)[places[0]] for block in row]
            rows.append(of_row)
        return _stacked(rows, self.X.device)


def _stacked(rows: Sequence[Sequence[Tensor]], device: torch.device) -> _Stacked:
    """Return tensors of all blocks and prompts as one."""
    first = rows[0][0]
    every = [tensor for row in rows for tensor in row]
    if all(tensor is first for tensor in every):
        return _Stacked(first, None, None)
    if first.device != device:
        # Numbers beside the tensors of a GPU: operations take one for all.
        if all(torch.equal(tensor, first) for tensor in every):
            return _Stacked(first, None, None)
        raise BlockError("blocks differ in a number")
    if all(tensor is row[0] for row in rows for tensor in row):
        return _Stacked(torch.stack([row[0] for row in rows]), 0, None)
    return _Stacked(torch.stack([torch.stack(list(row)) for row in rows]), 0, 0)


def _over_grid(function: Callable[..., Any], tensors: Sequence[_Stacked]) -> Any:
    """Return a function of all blocks and prompts, by two vmaps."""
    of_prompts = torch.func.vmap(
        function, in_dims=tuple(stacked.prompt_dim for stacked in tensors)
    )
    of_layers = torch.func.vmap(
        of_prompts, in_dims=tuple(stacked.layer_dim for stacked in tensors)
    )
    return of_layers(*(stacked.tensor for stacked in tensors))
