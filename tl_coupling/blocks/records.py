"""The Jacobian of a function of one row from the record of its operations.

The operations of a block on one token are recorded as they run, beneath autograd, and
the derivative of each is applied to tangents (`tangents`), from the token on. Whatever
library wrote the block, its norms stay diagonals and terms of rank one, and its
projections and its MLP become products of matrices. An operation without a rule of its
own goes through `torch.func.jvp`.

Nothing here knows norms, MLPs or heads. Where rows meet in attention is said by
`contexts`. A record is compared with the full sequence like every cheap way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.lost_gradients import tensors_in
from tl_coupling.blocks.tangents import (
    Base,
    Tangent,
    Term,
    bases_of,
    check_size,
    coarsened,
    dense_term,
)

aten = torch.ops.aten
# The same entries in the same order; `detach` hides nothing from a record.
_COPIES = {"alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh"}
_VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"}
# These have a slope of zero nearly everywhere, which nobody can mean.
_ROUNDS = {"round", "floor", "ceil", "trunc", "frac"}
_QUANTIZES = {"quantize_per_tensor", "quantize_per_channel"}
# A value is narrow if it has at most so many times the entries of the widest base that
# it comes from.
_NARROW = 4


class Operation(NamedTuple):
    """An operation as it ran. One that `is_cut` gives constants: nothing is pushed
    through it.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Any]
    is_cut: bool = False

    @property
    def name(self) -> str:
        """Its name without the overload."""
        return self.function._schema.name.split("::")[1]

    def values(self) -> Iterator[Tensor]:
        """Yield the tensors that it took and gave."""
        return tensors_in([self.args, self.outputs])

    def with_values(self, replaced: Mapping[int, Tensor]) -> "Operation":
        """Return it with other tensors in the place of those of these ids."""
        return self._replace(
            args=tuple(replaced_values(self.args, replaced)),
            outputs=replaced_values(self.outputs, replaced),
        )

    def repeated(self, replaced: Mapping[int, Tensor]) -> Sequence[Any]:
        """Return what it gives for other tensors in the place of those of these ids."""
        return sequence_of(
            self.function(*replaced_values(self.args, replaced), **self.kwargs)
        )


class _InPlace(BlockError):
    """An operation changes what depends on the token, in place."""


# A mode, because the operations are those of the block's own code.
class Record(TorchDispatchMode):
    """Context that notes the operations on what depends on `inputs`, in order; or every
    operation, to be repeated with any other tensors (`graphs`).

    The tensors are kept: no other one gets their ids.
    """

    def __init__(self, inputs: Sequence[Tensor], notes_all: bool = False) -> None:
        super().__init__()
        self.inputs = inputs
        self.notes_all = notes_all
        self.operations: list[Operation] = []
        self._dependent = set(map(id, inputs))
        self._is_paused = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, and note it."""
        kwargs = kwargs or {}
        # `lift_fresh` gives a new tensor, even where everything is noted.
        is_new = func is aten.lift_fresh.default
        is_noted = self.notes_all and not is_new
        is_noted = is_noted or self._depends([*args, *kwargs.values()])
        if self._is_paused or not is_noted:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and (
            self.notes_all or args[0].is_floating_point()
        ):
            raise BlockError("the block reads a value of its stream as a number")
        if func._schema.is_mutable:
            return self._note_in_place(func, args, kwargs)
        output = func(*args, **kwargs)
        self._note(Operation(func, args, kwargs, sequence_of(output)))
        return output

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._dependent.update(map(id, tensors_in(operation.outputs)))

    def _note_in_place(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an operation that changes its first argument, and note it as one that
        makes a new value; what was noted before has the old one, a copy.
        """
        changed, *others = args
        packet = getattr(aten, func._schema.name.split("::")[1].removesuffix("_"), None)
        out_of_place = getattr(packet, func._overloadname, None)
        if out_of_place is None or self._shares_memory(changed):
            raise _InPlace(f"the block changes values in place ({func})")
        old = changed.clone()
        self.operations = [
            operation.with_values({id(changed): old}) for operation in self.operations
        ]
        if id(changed) in self._dependent:
            self._dependent.add(id(old))
        output = func(*args, **kwargs)
        self._note(Operation(out_of_place, (old, *others), kwargs, [changed]))
        return output

    def _shares_memory(self, tensor: Tensor) -> bool:
        """Say whether a change of a tensor changes more than that one."""
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            return True
        noted = [value for operation in self.operations for value in operation.values()]
        return any(
            value is not tensor
            and value.untyped_storage().data_ptr() == storage.data_ptr()
            for value in [*self.inputs, *noted]
        )

    def _depends(self, values: Sequence[Any]) -> bool:
        """Say whether any tensor among values depends on an input."""
        return any(id(tensor) in self._dependent for tensor in tensors_in(values))

    def constant(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one that does not depend on an input."""
        self._is_paused = True
        try:
            constant = tensor.detach()
        finally:
            self._is_paused = False
        if self.notes_all:
            detach = aten.detach.default
            self._note(Operation(detach, (tensor,), {}, [constant], is_cut=True))
        return constant


class Recorded:
    """A function's value `y` where its operations were recorded, and its tangents there.

    Args:
        function: is called as `function(*inputs, record)`, and may call
            `record.constant`. It runs twice where it writes in place.
        inputs: where it is differentiated.
        middle: is called after the run, and gives a value that `function` computed on
            the way, relative to which later tangents are written (what attention gives);
            None if there is none.

    Raises:
        BlockError: an operation has no derivative, or none that torch knows.
    """

    # Neither the function nor its tangents are differentiated by torch.
    @torch.no_grad()
    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Float[Tensor, " d"]],
        middle: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        # Copies: values are told by their ids, and the model may hold these tensors.
        inputs = [x.detach().clone() for x in inputs]
        try:
            with Record(inputs) as record:
                y = function(*inputs, record)
        except _InPlace:
            # functionalize rewrites operations in place, at a cost for each operation.
            with Record(inputs) as record:
                run = torch.func.functionalize(lambda *x: function(*x, record))
                y = run(*inputs)
        self._middle = middle()
        if self._middle is not None and torch._is_functional_tensor(self._middle):
            # functionalize wraps what was noted.
            self._middle = torch._from_functional_tensor(self._middle)
        self._pushforward = _Pushforward(record.operations, inputs, self._middle)
        self.input_bases = self._pushforward.input_bases
        self.tangent = self._pushforward.tangent_of(y)
        self.y = y.detach()

    @property
    def after_middle(self) -> Base | None:
        """The base that goes through the first product after the value on the way.

        It is that value itself, also where nothing but itself makes another of it (a
        norm); None if there is none.
        """
        return self._pushforward.after_middle

    @property
    def n_heads(self) -> int | None:
        """How many heads the value on the way has, if they are those of what goes through
        the next product.

        It is that of one row, `[1 n_heads 1 d_head]`, or has queries that share keys as
        rows, `[1 n_groups n_sharing d_head]`.
        """
        base = self.after_middle
        if self._middle is None or base is None or base.n != self._middle.numel():
            return None
        return self._middle.numel() // self._middle.shape[-1]

    @torch.no_grad()
    def jacobians(self) -> list[Float[Tensor, "d_out d"]]:
        """Return `dy / dx` of each input x."""
        return jacobians_from(self.tangent, self.input_bases, self.y)


def jacobian_of_operations(
    operations: Sequence[Operation], x: Float[Tensor, " d"], y: Float[Tensor, " d_out"]
) -> Float[Tensor, "d_out d"]:
    """Return `dy / dx` of values that operations took and gave.

    Raises:
        BlockError: as in `Recorded`.
    """
    pushforward = _Pushforward(operations, [x], None)
    tangent = pushforward.tangent_of(y)
    (J,) = jacobians_from(tangent, pushforward.input_bases, y)
    return J


def jacobians_from(
    tangent: Tangent, inputs: Sequence[Base], y: Tensor
) -> list[Float[Tensor, "d_out d"]]:
    """Return `dy / dx` of each input from the tangent of y."""
    terms = tangent.relative_to_inputs()
    return [
        terms[base].filled().mT.clone(memory_format=torch.contiguous_format)
        if base in terms
        else y.new_zeros(y.numel(), base.n)
        for base in inputs
    ]


class _Pushforward:
    """Tangents of the values that operations give, from inputs on."""

    def __init__(
        self,
        operations: Sequence[Operation],
        inputs: Sequence[Tensor],
        middle: Tensor | None,
    ) -> None:
        self._operations = operations
        self._middle_id = None if middle is None else id(middle)
        # Once they are met.
        self.middle_base: Base | None = None
        self.after_middle: Base | None = None
        self.input_bases = [Base(x.numel()) for x in inputs]
        self._tangents = {
            id(x): Tangent.of_base(base, x)
            for base, x in zip(self.input_bases, inputs, strict=True)
        }
        # The id of the value whose entries a view has, by the id of the view.
        self._viewed: dict[int, int] = {}
        # The bases of values that went through a product, by the ids of the values.
        self._bases: dict[int, Base] = {}

    def tangent_of(self, y: Tensor) -> Tangent:
        """Give every value that y needs its tangent, and return y's.

        `middle_base` and `after_middle` are known afterwards.
        """
        for operation in self._needed_operations(y):
            self._push(operation)
            if self.middle_base is None and self._middle_id is not None:
                for output in tensors_in(operation.outputs):
                    if id(output) == self._middle_id:
                        self.middle_base = self._make_base(output)
        if id(y) not in self._tangents:
            raise BlockError("the output does not depend on any input")
        return self._of(y)

    def _make_base(self, value: Tensor) -> Base:
        """Make a value a base, relative to which all that comes of it is written."""
        base = self._base_of(value)
        self._tangents[id(value)] = Tangent.of_base(base, value)
        return base

    def _needed_operations(self, y: Tensor) -> list[Operation]:
        """Return the operations on which y depends, in order."""
        needed = []
        wanted = {id(y)}
        for operation in reversed(self._operations):
            if any(id(output) in wanted for output in operation.outputs):
                needed.append(operation)
                wanted.update(map(id, tensors_in(operation.args)))
        return needed[::-1]

    def _push(self, operation: Operation) -> None:
        """Give an operation's outputs their tangents.

        A value without a tangent is a constant. A rule returns False where it does not
        apply.
        """
        inputs = self._inputs(operation)
        name = operation.name
        if not inputs or operation.is_cut or makes_constants(name):
            return
        if has_no_slope(operation):
            raise BlockError(f"the block calls `{name}`, which has no slope")
        if not any(map(has_slope, tensors_in(operation.outputs))):
            return
        rule = _RULES.get(name)
        if rule is not None and rule(self, operation):
            return
        if name in _COPIES | _VIEWS:
            self._keep_entries(operation)
        elif torch.Tag.pointwise in operation.function.tags:
            self._push_pointwise(operation, inputs)
        else:
            self._push_by_torch(operation, inputs)

    def _inputs(self, operation: Operation) -> list[Tensor]:
        """Return the arguments that depend on an input, each once."""
        arguments = {id(tensor): tensor for tensor in tensors_in(operation.args)}
        if any(
            id(t) in self._tangents for t in tensors_in([*operation.kwargs.values()])
        ):
            raise BlockError(f"`{operation.name}` takes the stream by name")
        return [t for key, t in arguments.items() if key in self._tangents]

    def _is_constant(self, value: object) -> bool:
        return id(value) not in self._tangents

    def _of(self, tensor: Tensor) -> Tangent:
        return self._tangents[id(tensor)]

    def _set(self, output: Tensor, terms: Mapping[Base, Term]) -> bool:
        self._tangents[id(output)] = Tangent(dict(terms))
        return True

    def _map(self, operation: Operation, function: Callable[[Term], Term]) -> bool:
        (output,) = operation.outputs
        value = operation.args[0]
        return self._set(output, self._of(value).mapped(function).terms)

    # Operations by which entries stay as they are

    def _keep_entries(self, operation: Operation) -> bool:
        value = operation.args[0]
        (output,) = operation.outputs
        if output.dtype != value.dtype:
            return self._map(operation, lambda term: term.to(output.dtype))
        self._viewed[id(output)] = self._viewed.get(id(value), id(value))
        return self._set(output, self._of(value).terms)

    def _move(
        self,
        operation: Operation,
        move: Callable[[Tensor, int], Tensor],
        n_kept: int,
    ) -> bool:
        value = operation.args[0]
        (output,) = operation.outputs
        moved = self._of(value).moved(value.shape, move, n_kept)
        return self._set(output, moved.terms)

    def _transpose(self, operation: Operation) -> bool:
        value, first, second = operation.args[:3]
        order = list(range(value.ndim))
        order[first], order[second] = order[second], order[first]
        return self._permute_to(operation, order)

    def _transpose_matrix(self, operation: Operation) -> bool:
        order = range(operation.args[0].ndim)
        return self._permute_to(operation, list(order)[::-1])

    def _permute(self, operation: Operation) -> bool:
        value, order = operation.args[:2]
        return self._permute_to(operation, [axis % value.ndim for axis in order])

    def _permute_to(self, operation: Operation, order: Sequence[int]) -> bool:
        shape = operation.args[0].shape
        # Axes of one entry may stand anywhere.
        long_axes = [axis for axis in order if shape[axis] > 1]
        if long_axes == sorted(long_axes):
            return self._keep_entries(operation)
        n_kept = next(i for i, axis in enumerate(order) if i != axis)
        return self._move(
            operation,
            lambda x, n: x.permute(*range(n), *(axis + n for axis in order)),
            n_kept,
        )

    def _slice(self, operation: Operation) -> bool:
        value, dim, *bounds = [*operation.args, 0][: max(2, len(operation.args))]
        if operation.outputs[0].shape == value.shape:
            return self._keep_entries(operation)
        return self._move(
            operation,
            lambda x, n: aten.slice(x, _shifted(dim, n), *bounds),
            dim % value.ndim,
        )

    def _select(self, operation: Operation) -> bool:
        value, dim, index = operation.args[:3]
        if value.shape[dim] == 1:
            return self._keep_entries(operation)
        return self._move(
            operation,
            lambda x, n: x.select(_shifted(dim, n), index),
            dim % value.ndim,
        )

    def _index(self, operation: Operation) -> bool:
        """Push through the choice of rows of a value that has one row."""
        value, indices, *_ = operation.args
        (output,) = operation.outputs
        is_of_rows = len(indices) == 1 and value.shape[0] == 1
        if not is_of_rows or output.numel() != value.numel():
            return False
        return self._keep_entries(operation)

    def _expand(self, operation: Operation) -> bool:
        (output,) = operation.outputs
        value = operation.args[0]
        if output.numel() == value.numel():
            return self._keep_entries(operation)
        aligned = (*[1] * (output.ndim - value.ndim), *value.shape)
        longer = [a for a in range(output.ndim) if aligned[a] != output.shape[a]]
        n_blocks = output.shape[: longer[0]].numel()
        if len(longer) == 1 and n_blocks > 1 and self._is_narrow(value):
            # Keys and values that heads share: so often, within a block for each.
            base = self._base_of(value)
            times = output.shape[longer[0]]
            identity = torch.eye(base.n // n_blocks).to(output)
            repeated = identity.repeat(1, times).expand(n_blocks, -1, -1)
            return self._set(output, {base: Term({n_blocks: repeated})})
        tangent = self._of(value).scaled(1.0, value.shape, output.shape)
        return self._set(output, tangent.terms)

    def _pad(self, operation: Operation) -> bool:
        value, widths, *_ = operation.args
        (output,) = operation.outputs
        if not self._is_narrow(value):
            return False
        # The last axes are padded within blocks, one for each index of the axes before
        # them.
        n_padded = len(widths) // 2
        n_blocks = value.shape[: value.ndim - n_padded].numel()
        base = self._base_of(value)
        identity = torch.eye(base.n // n_blocks).to(output)
        rows = identity.reshape(-1, *value.shape[value.ndim - n_padded :])
        padded = aten.constant_pad_nd(rows, widths).reshape(1, len(rows), -1)
        repeated = padded.expand(n_blocks, -1, -1)
        return self._set(output, {base: Term({n_blocks: repeated})})

    def _split(self, operation: Operation) -> bool:
        value = operation.args[0]
        dim = [*operation.args, operation.kwargs.get("dim", 0)][2] % value.ndim
        sizes = [output.shape[dim] for output in operation.outputs]
        for output, stop in zip(operation.outputs, accumulate(sizes), strict=True):
            part = operation._replace(outputs=[output])
            self._narrow(part, dim, stop - output.shape[dim], output.shape[dim])
        return True

    def _narrow(self, operation: Operation, dim: int, start: int, length: int) -> None:
        self._move(operation, lambda x, n: x.narrow(dim + n, start, length), dim)

    def _concatenate(self, operation: Operation) -> bool:
        parts = operation.args[0]
        dim = [*operation.args, operation.kwargs.get("dim", 0)][1]
        (output,) = operation.outputs
        # An empty part of one axis fits beside any other.
        parts = [part for part in parts if part.ndim == output.ndim]

        def concatenated(base: Base) -> Term:
            dense = [self._dense(part, base) for part in parts]
            return dense_term(torch.cat(dense, dim % output.ndim + 1))

        return self._set_of_each(operation, parts, concatenated)

    def _set_of_each(
        self,
        operation: Operation,
        values: Sequence[Tensor],
        term: Callable[[Base], Term],
    ) -> bool:
        """Set the term of each base of some values."""
        (output,) = operation.outputs
        return self._set(output, {base: term(base) for base in self._bases_of(values)})

    def _bases_of(self, values: Sequence[Tensor]) -> list[Base]:
        return bases_of(self._of(v) for v in values if not self._is_constant(v))

    def _dense(self, value: Tensor, base: Base) -> Inexact[Tensor, " n *shape"]:
        """Return the derivative of a value by a base, as one tensor."""
        tangent = self._tangents.get(id(value))
        if tangent is None or base not in tangent.terms:
            return value.new_zeros(()).expand(base.n, *value.shape)
        dense = tangent.terms[base].filled().to(value.dtype)
        return dense.reshape(base.n, *value.shape)

    def _copy(self, operation: Operation) -> bool:
        _, value = operation.args[:2]
        (output,) = operation.outputs
        # All that was there before is gone.
        if not self._is_constant(value):
            tangent = self._of(value).scaled(1.0, value.shape, output.shape)
            self._set(output, tangent.terms)
        return True

    def _write_slice(self, operation: Operation) -> bool:
        """Push through a tensor of which a slice has been replaced."""
        value, source, *place = operation.args
        (output,) = operation.outputs
        dim, *bounds = place or [0]
        dim = dim % output.ndim + 1

        def written(base: Base) -> Term:
            whole = self._dense(value, base)
            part = self._dense(source, base)
            return dense_term(aten.slice_scatter(whole, part, dim, *bounds))

        return self._set_of_each(operation, [value, source], written)

    # Sums, products, and attention's softmax

    def _sum(self, operation: Operation) -> bool:
        value = operation.args[0]
        if value.numel() == 1:
            return self._keep_entries(operation)
        dims = operation.args[1] if len(operation.args) > 1 else None
        if isinstance(dims, int):
            dims = [dims]
        dims = sorted(dim % value.ndim for dim in dims or range(value.ndim))
        n_summed = torch.Size(value.shape[dim] for dim in dims).numel()
        n_left = value.numel() // n_summed
        is_last = value.shape[dims[0] :].numel() == n_summed

        def summed(term: Term) -> Term:
            result = Term()
            for n_blocks, blocks in term.blocks.items():
                if is_last and n_left % n_blocks == 0:
                    of_each = blocks.unflatten(2, (-1, n_summed))
                    result += Term({n_blocks: of_each.sum(-1)})
                elif is_last and len(blocks) == value.numel():
                    # A diagonal one: its entries, in blocks.
                    result += Term({n_left: blocks.reshape(n_left, n_summed, 1)})
                else:
                    dense = coarsened(blocks, 1)[0].reshape(-1, *value.shape)
                    result += dense_term(dense.sum([dim + 1 for dim in dims]))
            for u, v in term.rank_one:
                of_v = v.reshape(value.shape).sum(dims).reshape(-1)
                result += Term({}, [(u, of_v)])
            return result

        dtype = operation.outputs[0].dtype
        return self._map(operation, lambda term: summed(term).to(dtype))

    def _mean(self, operation: Operation) -> bool:
        self._sum(operation)
        (output,) = operation.outputs
        share = output.numel() / operation.args[0].numel()
        mean = self._of(output).mapped(lambda term: term.scaled(share))
        return self._set(output, mean.terms)

    def _multiply_matrices(self, operation: Operation) -> bool:
        left, right = operation.args[:2]
        return self._multiply_row(left, right, operation.outputs[0])

    def _add_product(self, operation: Operation) -> bool:
        bias, left, right = operation.args[:3]
        if not self._is_constant(bias) or operation.kwargs.get("alpha", 1) != 1:
            return False
        return self._multiply_row(left, right, operation.outputs[0])

    def _multiply_row(self, left: Tensor, right: Tensor, output: Tensor) -> bool:
        """Push one row through a matrix: the row is the base of what comes out."""
        if not self._is_constant(right) or left.shape[:-1].numel() != 1:
            return False
        term = dense_term(right.reshape(right.shape[-2:]))
        base = self._base_of(left)
        middle = self.middle_base
        if middle is not None and base is not middle:
            own = self._of(left)
            if list(own.terms) == [middle]:
                # A norm of the value on the way, or another order.
                base = middle
                term = term.after(own.terms[middle])
        if middle is not None and self.after_middle is None:
            comes_from_middle = base is middle or base.comes_from([middle])
            self.after_middle = base if comes_from_middle else None
        return self._set(output, {base: term})

    def _base_of(self, value: Tensor) -> Base:
        """Return one base for all products of a value, whatever views lead to it."""
        viewed = self._viewed.get(id(value), id(value))
        if viewed not in self._bases:
            self._bases[viewed] = Base(value.numel(), self._of(value))
        return self._bases[viewed]

    def _is_narrow(self, value: Tensor) -> bool:
        """Say whether a value has not many more entries than what it comes from."""
        widest = max(base.n for base in self._of(value).terms)
        return value.numel() <= _NARROW * widest

    def _multiply_batches(self, operation: Operation) -> bool:
        left, right = operation.args[:2]
        return self._multiply_each(left, left.shape, right, operation.outputs[0])

    def _multiply_groups(self, operation: Operation) -> bool:
        """Push rows through the matrix of each one's group: a mixture of experts."""
        left, right = operation.args[:2]
        ends = [*operation.args, operation.kwargs.get("offs")][2]
        is_grouped = left.ndim == 2 and right.ndim == 3 and isinstance(ends, Tensor)
        if not is_grouped or not self._is_constant(right):
            return False
        rows = torch.arange(len(left), dtype=ends.dtype, device=ends.device)
        groups = torch.searchsorted(ends, rows, right=True)
        n_rows, n_inner = left.shape
        # Rows behind the last group are zeros, whatever they are multiplied with.
        of_rows = right[groups.clamp_max(len(right) - 1)]
        of_rows = of_rows * (groups < len(right))[:, None, None]
        shape = torch.Size((n_rows, 1, n_inner))
        return self._multiply_each(left, shape, of_rows, operation.outputs[0])

    def _multiply_each(
        self,
        left: Tensor,
        shape: torch.Size,
        right: Inexact[Tensor, "n_batches n_inner n_columns"],
        output: Tensor,
    ) -> bool:
        """Push a value, in a shape [n_batches n_rows n_inner], through the matrix of
        each batch.
        """
        if not self._is_constant(right):
            return False
        if self._multiply_row(left, right, output):
            return True
        n_batches, n_rows, _ = shape
        are_blocks = all(
            n_blocks % n_batches == 0 and not term.rank_one
            for term in self._of(left).terms.values()
            for n_blocks in term.blocks
        )
        if are_blocks or not self._is_narrow(left):
            return self._multiply_blocks(left, shape, right, output)
        # Each row of each batch by its matrix: for heads, what they do to queries.
        n_blocks = n_batches * n_rows
        blocks = right
        if n_rows > 1:
            blocks = right[:, None].expand(-1, n_rows, -1, -1).flatten(0, 1)
        return self._set(output, {self._base_of(left): Term({n_blocks: blocks})})

    def _multiply_blocks(
        self, left: Tensor, shape: torch.Size, right: Tensor, output: Tensor
    ) -> bool:
        """Multiply each batch's rows by its matrix, tangents by it as well."""
        n_batches, n_rows, n_inner = shape

        def multiplied(term: Term) -> Term:
            result = Term()
            dense = [torch.outer(u, v)[None] for u, v in term.rank_one]
            for matrices in [*term.blocks.values(), *dense]:
                kept = gcd(len(matrices), n_batches * n_rows)
                if kept % n_batches == 0:
                    blocks = coarsened(matrices, kept)
                    rows = blocks.reshape(n_batches, -1, n_inner) @ right
                    result += Term({kept: rows.reshape(kept, blocks.shape[1], -1)})
                else:
                    blocks = coarsened(matrices, 1)
                    of_batches = blocks.reshape(-1, n_batches, n_rows, n_inner)
                    check_size(len(of_batches) * output.numel())
                    rows = of_batches.transpose(0, 1).flatten(1, 2) @ right
                    product = rows.unflatten(1, (-1, n_rows)).transpose(0, 1)
                    result += dense_term(product)
            return result

        return self._set(output, self._of(left).mapped(multiplied).terms)

    def _softmax(self, operation: Operation) -> bool:
        value, dim = operation.args[:2]
        (output,) = operation.outputs
        length = value.shape[dim]
        n_rows = value.numel() // length
        if value.shape[dim:].numel() != length:
            return False
        pattern = output.reshape(-1)

        def pushed(blocks: Tensor) -> Tensor:
            weighted = blocks * pattern.reshape(len(blocks), 1, -1)
            rows = weighted.unflatten(2, (-1, length))
            total = rows.sum(-1, keepdim=True)
            of_rows = pattern.reshape(len(blocks), 1, -1, length)
            return (rows - of_rows * total).flatten(2)

        def of_term(term: Term) -> Term:
            result = Term()
            for n_blocks, blocks in term.blocks.items():
                kept = gcd(n_blocks, n_rows)
                result += Term({kept: pushed(coarsened(blocks, kept))})
            for u, v in term.rank_one:
                result.rank_one.append((u, pushed(v[None, None])[0, 0]))
            return result

        return self._map(operation, of_term)

    def _layer_norm(self, operation: Operation) -> bool:
        value, shape, weight, *_ = operation.args
        if value.numel() != torch.Size(shape).numel() or not self._is_constant(weight):
            return False
        output, mean, reciprocal = operation.outputs
        normalised = ((value - mean) * reciprocal).reshape(-1)
        gain = reciprocal.expand_as(value)
        if weight is not None:
            gain = gain * weight
        gain = gain.reshape(-1)
        d = value.numel()
        term = Term(
            {d: gain.reshape(d, 1, 1)},
            [
                (-normalised / d, normalised * gain),
                (-torch.ones_like(normalised) / d, gain),
            ],
        )
        return self._set(output, self._of(value).mapped(term.after).terms)

    # Any other operation

    def _push_pointwise(self, operation: Operation, inputs: list[Tensor]) -> None:
        """Push through an operation on each entry: by its slopes there."""
        (output,) = operation.outputs
        slopes = _known_slopes(operation, inputs)
        if slopes is None and any(value.is_complex() for value in [*inputs, output]):
            # torch's pull-back gives conjugates.
            self._push_by_torch(operation, inputs)
            return
        slopes = slopes or _slopes(operation, inputs, output)
        total = Tangent({})
        for value, slope in zip(inputs, slopes, strict=True):
            total += self._of(value).scaled(slope, value.shape, output.shape)
        self._tangents[id(output)] = total

    def _push_by_torch(self, operation: Operation, inputs: list[Tensor]) -> None:
        """Push all tangents through an operation together, by torch's forward mode."""
        ids = [id(value) for value in inputs]
        outputs = [
            (place, output)
            for place, output in enumerate(operation.outputs)
            if isinstance(output, Tensor) and has_slope(output)
        ]

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            results = operation.repeated(dict(zip(ids, values, strict=True)))
            return tuple(results[place] for place, _ in outputs)

        def push(*directions: Tensor) -> Any:
            return torch.func.jvp(function, tuple(inputs), directions)[1]

        terms: list[dict[Base, Term]] = [{} for _ in outputs]
        for base in self._bases_of(inputs):
            check_size(base.n * max(output.numel() for _, output in outputs))
            directions = [self._dense(value, base) for value in inputs]
            try:
                pushed = torch.func.vmap(push)(*directions)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise BlockError(
                    f"torch does not push through `{operation.name}`"
                ) from None
            for of_output, dense in zip(terms, pushed, strict=True):
                of_output[base] = dense_term(dense)
        for (_, output), of_output in zip(outputs, terms, strict=True):
            self._set(output, of_output)


def _known_slopes(
    operation: Operation, inputs: Sequence[Tensor]
) -> list[Tensor | float] | None:
    """Return an operation's slope in each input, where no differentiation is needed."""
    first, *others = operation.args
    if operation.kwargs or any(other is first for other in others):
        return None
    match operation.name, others:
        case "add", [_]:
            return [1.0 for _ in inputs]
        case "sub", [_]:
            return [1.0 if value is first else -1.0 for value in inputs]
        case "neg", []:
            return [-1.0]
        case "mul", [second]:
            return [_number(second if value is first else first) for value in inputs]
        case "div", [second] if len(inputs) == 1 and inputs[0] is first:
            return [_number(1 / second)]
    return None


def _number(value: object) -> Tensor | float:
    """Return a factor; whole numbers as floats."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        return float(value)
    raise BlockError(f"the block multiplies by {value!r}")


def _slopes(
    operation: Operation, inputs: Sequence[Tensor], output: Tensor
) -> list[Tensor | float]:
    """Return the slope of each entry of an output in that of each input."""
    ids = [id(value) for value in inputs]

    def function(*values: Tensor) -> Tensor:
        (result,) = operation.repeated(dict(zip(ids, values, strict=True)))
        return result

    spread = [value.expand(output.shape) for value in inputs]
    try:
        pull_back = torch.func.vjp(function, *spread)[1]
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise BlockError(f"`{operation.name}` has no derivative in torch") from None
    return list(pull_back(torch.ones_like(output)))


def has_no_slope(operation: Operation) -> bool:
    """Say whether an operation rounds, or makes whole numbers of others."""
    if operation.name in _ROUNDS | _QUANTIZES:
        return True
    outputs = list(tensors_in(operation.outputs))
    is_whole = not any(map(has_slope, outputs))
    is_counted = any(output.dtype != torch.bool for output in outputs)
    return operation.name == "_to_copy" and is_whole and is_counted


def makes_constants(name: str) -> bool:
    """Say whether an operation takes nothing but a shape from what it gets."""
    return name in ("fill", "zero") or name.startswith("new_") or name.endswith("_like")


def has_slope(value: Tensor) -> bool:
    """Say whether the entries of a tensor can be differentiated."""
    return value.is_floating_point() or value.is_complex()


def sequence_of(output: Any) -> Sequence[Any]:
    """Return what an operation gave as a sequence."""
    return output if isinstance(output, list | tuple) else (output,)


def replaced_values(values: Sequence[Any], replaced: Mapping[int, Tensor]) -> list[Any]:
    """Return values with other tensors in the place of those of these ids."""
    results: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            results.append(replaced_values(value, replaced))
        else:
            results.append(replaced.get(id(value), value))
    return results


def _shifted(axis: int, n: int) -> int:
    """Return an axis behind n others; from the end it is the same."""
    return axis + n if axis >= 0 else axis


# From an operation to whether it was pushed through.
_Rule = Callable[[_Pushforward, Operation], bool]
_RULES: dict[str, _Rule] = {
    "transpose": _Pushforward._transpose,
    "t": _Pushforward._transpose_matrix,
    "permute": _Pushforward._permute,
    "slice": _Pushforward._slice,
    "select": _Pushforward._select,
    "index": _Pushforward._index,
    "expand": _Pushforward._expand,
    "constant_pad_nd": _Pushforward._pad,
    "split": _Pushforward._split,
    "split_with_sizes": _Pushforward._split,
    "slice_scatter": _Pushforward._write_slice,
    "copy": _Pushforward._copy,
    "cat": _Pushforward._concatenate,
    "sum": _Pushforward._sum,
    "mean": _Pushforward._mean,
    "mm": _Pushforward._multiply_matrices,
    "addmm": _Pushforward._add_product,
    "bmm": _Pushforward._multiply_batches,
    "_grouped_mm": _Pushforward._multiply_groups,
    # transformers' own, where torch has none: on older GPUs, and before 2.11 for
    # tensors that are not aligned.
    "grouped_mm_fallback": _Pushforward._multiply_groups,
    "_softmax": _Pushforward._softmax,
    "native_layer_norm": _Pushforward._layer_norm,
}
