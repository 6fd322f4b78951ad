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
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.stairs import tensors_in
from tl_coupling.blocks.tangents import Base, Tangent, relative_to_one_base
from tl_coupling.interrupts import hear_interrupts

aten = torch.ops.aten
# The same entries in the same order; `detach` hides nothing from a record.
_COPIES = {"alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh"}
_VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"}
# What has a slope of zero nearly everywhere, which nobody can mean.
_ROUNDS = {"round", "floor", "ceil", "trunc", "frac"}
_QUANTIZES = {"quantize_per_tensor", "quantize_per_channel"}
# Of one tangent (float32: 1 GiB): the MLP of a model of 70 billion parameters fits.
_MOST_ENTRIES = 2**28


class Operation(NamedTuple):
    """An operation as it ran."""

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Any]

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
            args=tuple(_replaced(self.args, replaced)),
            outputs=_replaced(self.outputs, replaced),
        )

    def repeated(self, replaced: Mapping[int, Tensor]) -> Sequence[Any]:
        """Return what it gives for other tensors in the place of those of these ids."""
        return _sequence(self.function(*_replaced(self.args, replaced), **self.kwargs))


class _InPlace(BlockError):
    """An operation changes what depends on the token, in place."""


# A mode, because the operations are those of the block's own code.
class Record(TorchDispatchMode):
    """Context that notes the operations on what depends on `x`, in order.

    The tensors are kept: no other one gets their ids.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
        self.operations: list[Operation] = []
        self._dependent = {id(x)}
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
        if self._is_paused or not self._depends([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_floating_point():
            raise BlockError("the block reads a value of its stream as a number")
        if func._schema.is_mutable:
            return self._note_in_place(func, args, kwargs)
        output = func(*args, **kwargs)
        self._note(Operation(func, args, kwargs, _sequence(output)))
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
            for value in [self.x, *noted]
        )

    def _depends(self, values: Sequence[Any]) -> bool:
        """Say whether any tensor among values depends on x."""
        return any(id(tensor) in self._dependent for tensor in tensors_in(values))

    def constant(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one that does not depend on x."""
        self._is_paused = True
        try:
            return tensor.detach()
        finally:
            self._is_paused = False


def recorded_jacobian(
    function: Callable[[Tensor, Record], Tensor], x: Float[Tensor, " d"]
) -> tuple[Float[Tensor, " d_out"], Float[Tensor, "d_out d"]]:
    """Return a function's value at x, and its Jacobian.

    Args:
        function: of x, and of the record that is made while it runs, for what it wants
            to be constant.
        x: where it is differentiated.

    Raises:
        BlockError: an operation has no derivative, or none that torch knows.
    """
    # Not what others hold: operations on that would be noted as well.
    x = x.detach().clone()
    try:
        with Record(x) as record:
            y = function(x, record)
    except _InPlace:
        # torch writes such operations out of place, at a cost for each operation.
        with Record(x) as record:
            y = torch.func.functionalize(lambda x: function(x, record))(x)
    return y, _Pushforward(record, y).jacobian()


class _Pushforward:
    """Tangents of the values of a record, from its input on."""

    def __init__(self, record: Record, y: Tensor) -> None:
        self._record = record
        self._y = y
        self._tangents = {id(record.x): Tangent.of_base(record.x)}
        # Of a view, the value whose entries it has.
        self._viewed: dict[int, int] = {}
        # Of values that went through a product.
        self._bases: dict[int, Base] = {}
        self._root = self._tangents[id(record.x)].base

    def jacobian(self) -> Float[Tensor, "d_out d"]:
        """Return `dy / dx`."""
        for operation in self._needed_operations():
            hear_interrupts()
            self._check_size(operation)
            self._push(operation)
        if id(self._y) not in self._tangents:
            raise BlockError("the output does not depend on the token")
        tangent = self._tangents[id(self._y)]
        while tangent.base is not self._root:
            tangent = tangent.relative_to_origin()
        return tangent.filled().reshape(self._root.n, -1).mT.contiguous()

    def _check_size(self, operation: Operation) -> None:
        """Raise BlockError where tangents take more memory than another way would."""
        sizes = [output.numel() for output in tensors_in(operation.outputs)]
        widest = max(sizes, default=0)
        if self._root.n * widest > _MOST_ENTRIES:
            raise BlockError(
                "the tangents of a value do not fit in the memory for them"
            )

    def _needed_operations(self) -> list[Operation]:
        """Return the operations on which y depends, in order."""
        needed = []
        wanted = {id(self._y)}
        for operation in reversed(self._record.operations):
            if any(id(output) in wanted for output in operation.outputs):
                needed.append(operation)
                wanted.update(map(id, tensors_in(operation.args)))
        return needed[::-1]

    def _push(self, operation: Operation) -> None:
        """Give an operation's outputs their tangents."""
        inputs = self._inputs(operation)
        name = operation.name
        if not inputs or _makes_constants(name):
            return
        outputs = list(tensors_in(operation.outputs))
        is_whole = not any(map(_has_slope, outputs))
        is_counted = any(output.dtype != torch.bool for output in outputs)
        is_rounded = name == "_to_copy" and is_whole and is_counted
        if name in _ROUNDS | _QUANTIZES or is_rounded:
            raise BlockError(f"the block calls `{name}`, which has no slope")
        if is_whole:
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
        """Return the arguments that depend on x, each once."""
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

    # Operations by which entries stay as they are

    def _keep_entries(self, operation: Operation) -> None:
        value = operation.args[0]
        (output,) = operation.outputs
        self._tangents[id(output)] = self._of(value).reshaped(output)
        if output.dtype == value.dtype:
            self._viewed[id(output)] = self._viewed.get(id(value), id(value))

    def _move(
        self, operation: Operation, move: Callable[[Tensor, int], Tensor]
    ) -> bool:
        (output,) = operation.outputs
        tangent = self._of(operation.args[0]).moved(output.shape, move)
        self._tangents[id(output)] = tangent
        return True

    def _transpose(self, operation: Operation) -> bool:
        first, second = operation.args[1:3]
        return self._move(
            operation,
            lambda x, n: x.transpose(_shifted(first, n), _shifted(second, n)),
        )

    def _transpose_matrix(self, operation: Operation) -> bool:
        if operation.args[0].ndim < 2:
            self._keep_entries(operation)
            return True
        return self._move(operation, lambda x, _: x.mT)

    def _permute(self, operation: Operation) -> bool:
        value, order = operation.args[:2]
        axes = [axis % value.ndim for axis in order]
        return self._move(
            operation,
            lambda x, n: x.permute(*range(n), *(axis + n for axis in axes)),
        )

    def _slice(self, operation: Operation) -> bool:
        _, dim, *bounds = [*operation.args, 0][: max(2, len(operation.args))]
        return self._move(
            operation,
            lambda x, n: aten.slice(x, _shifted(dim, n), *bounds),
        )

    def _select(self, operation: Operation) -> bool:
        dim, index = operation.args[1:3]
        return self._move(operation, lambda x, n: x.select(_shifted(dim, n), index))

    def _expand(self, operation: Operation) -> bool:
        (output,) = operation.outputs
        value = operation.args[0]
        if output.shape == value.shape:
            self._keep_entries(operation)
            return True
        missing = [1] * (output.ndim - value.ndim)

        def expand(x: Tensor, n: int) -> Tensor:
            x = x.reshape(*x.shape[:n], *missing, *value.shape)
            return x.expand(*x.shape[:n], *output.shape)

        return self._move(operation, expand)

    def _split(self, operation: Operation) -> bool:
        value = operation.args[0]
        dim = [*operation.args, operation.kwargs.get("dim", 0)][2] % value.ndim
        sizes = [output.shape[dim] for output in operation.outputs]
        for output, stop in zip(operation.outputs, accumulate(sizes), strict=True):
            part = operation._replace(outputs=[output])
            self._narrow(part, dim, stop - output.shape[dim], output.shape[dim])
        return True

    def _narrow(self, operation: Operation, dim: int, start: int, length: int) -> None:
        self._move(operation, lambda x, n: x.narrow(dim + n, start, length))

    def _concatenate(self, operation: Operation) -> bool:
        parts = operation.args[0]
        dim = [*operation.args, operation.kwargs.get("dim", 0)][1]
        (output,) = operation.outputs
        # An empty part of one axis fits beside any other.
        parts = [part for part in parts if part.ndim == output.ndim]
        tangents = self._on_one_base([p for p in parts if not self._is_constant(p)])
        base = next(iter(tangents.values())).base
        dense = [
            tangents[id(part)].filled()
            if id(part) in tangents
            else part.new_zeros(()).expand(base.n, *part.shape)
            for part in parts
        ]
        self._set(output, base, torch.cat(dense, dim % output.ndim + 1))
        return True

    def _copy(self, operation: Operation) -> bool:
        _, value = operation.args[:2]
        (output,) = operation.outputs
        # All that was there before is gone.
        if not self._is_constant(value):
            self._tangents[id(output)] = self._of(value).scaled(1.0, output.shape)
        return True

    def _write_slice(self, operation: Operation) -> bool:
        """Push through a tensor of which a slice has been replaced."""
        value, source, *place = operation.args
        (output,) = operation.outputs
        dim, *bounds = place or [0]
        given = [part for part in (value, source) if not self._is_constant(part)]
        tangents = self._on_one_base(given)
        base = next(iter(tangents.values())).base
        whole, part = (
            tangents[id(written)].filled()
            if id(written) in tangents
            else output.new_zeros(base.n, *written.shape)
            for written in (value, source)
        )
        dim = dim % output.ndim + 1
        self._set(output, base, aten.slice_scatter(whole, part, dim, *bounds))
        return True

    # Sums, products, and attention's softmax

    def _sum(self, operation: Operation) -> bool:
        return self._reduce(operation, torch.sum)

    def _mean(self, operation: Operation) -> bool:
        return self._reduce(operation, torch.mean)

    def _reduce(self, operation: Operation, reduce: Callable[..., Tensor]) -> bool:
        value = operation.args[0]
        (output,) = operation.outputs
        tangent = self._of(value)
        dims = operation.args[1] if len(operation.args) > 1 else None
        if isinstance(dims, int):
            dims = [dims]
        dims = [dim % value.ndim for dim in dims or range(value.ndim)]
        is_diagonal = tangent.dense is None and not tangent.rank_one
        if is_diagonal and output.numel() == 1 and tangent.diagonal is not None:
            share = output.numel() / value.numel() if reduce is torch.mean else 1
            dense = (share * tangent.diagonal).reshape(-1, *output.shape)
        else:
            reduced = reduce(tangent.filled(), [dim + 1 for dim in dims])
            dense = reduced.reshape(-1, *output.shape)
        self._set(output, tangent.base, dense.to(output.dtype))
        return True

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
        # One base for all products of a value, whatever views lead to it.
        viewed = self._viewed.get(id(left), id(left))
        if viewed not in self._bases:
            self._bases[viewed] = Tangent.of_base(left, self._of(left)).base
        dense = right.reshape(right.shape[-2], *output.shape)
        self._set(output, self._bases[viewed], dense)
        return True

    def _multiply_batches(self, operation: Operation) -> bool:
        left, right = operation.args[:2]
        (output,) = operation.outputs
        if not self._is_constant(right):
            return False
        if self._multiply_row(left, right, output):
            return True
        tangent = self._of(left)
        n_batches, n_rows, _ = left.shape
        rows = tangent.filled().movedim(0, 1).reshape(n_batches, -1, left.shape[-1])
        dense = torch.bmm(rows, right).reshape(n_batches, -1, n_rows, right.shape[-1])
        self._set(output, tangent.base, dense.movedim(1, 0))
        return True

    def _multiply_groups(self, operation: Operation) -> bool:
        """Push rows through the matrix of each one's group: a mixture of experts."""
        left, right = operation.args[:2]
        ends = [*operation.args, operation.kwargs.get("offs")][2]
        (output,) = operation.outputs
        is_grouped = left.ndim == 2 and right.ndim == 3 and isinstance(ends, Tensor)
        if not is_grouped or not self._is_constant(right):
            return False
        tangent = self._of(left)
        rows = tangent.filled()
        dense = rows.new_zeros(len(rows), *output.shape)
        start = 0
        for matrix, end in zip(right, ends.tolist(), strict=True):
            if end > start:
                dense[:, start:end] = rows[:, start:end] @ matrix
            start = end
        self._set(output, tangent.base, dense)
        return True

    def _softmax(self, operation: Operation) -> bool:
        value, dim = operation.args[:2]
        (output,) = operation.outputs
        tangent = self._of(value)
        weighted = output * tangent.filled()
        total = weighted.sum(dim % value.ndim + 1, keepdim=True)
        self._set(output, tangent.base, weighted - output * total)
        return True

    def _layer_norm(self, operation: Operation) -> bool:
        value, shape, weight, *_ = operation.args
        if value.numel() != torch.Size(shape).numel() or not self._is_constant(weight):
            return False
        output, mean, reciprocal = operation.outputs
        normalised = (value - mean) * reciprocal
        gain = reciprocal.expand_as(value)
        if weight is not None:
            gain = gain * weight
        own = Tangent.of_base(value, self._of(value))
        d = value.numel()
        own.diagonal = gain
        own.rank_one = [
            (-normalised.reshape(-1) / d, normalised * gain),
            (-torch.ones_like(value).reshape(-1) / d, gain),
        ]
        self._tangents[id(output)] = own.relative_to_origin()
        return True

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
        tangents = self._on_one_base(inputs)
        total: Tangent | None = None
        for value, slope in zip(inputs, slopes, strict=True):
            term = tangents[id(value)].scaled(slope, output.shape)
            total = term if total is None else total + term
        assert total is not None
        self._tangents[id(output)] = total

    def _push_by_torch(self, operation: Operation, inputs: list[Tensor]) -> None:
        """Push all tangents through an operation together, by torch's forward mode."""
        tangents = self._on_one_base(inputs)
        base = next(iter(tangents.values())).base
        ids = [id(value) for value in inputs]
        places = [
            place
            for place, output in enumerate(operation.outputs)
            if isinstance(output, Tensor) and _has_slope(output)
        ]

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            outputs = operation.repeated(dict(zip(ids, values, strict=True)))
            return tuple(outputs[place] for place in places)

        def push(*directions: Tensor) -> Any:
            return torch.func.jvp(function, tuple(inputs), directions)[1]

        try:
            pushed = torch.func.vmap(push)(*(tangents[i].filled() for i in ids))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BlockError(
                f"torch does not push through `{operation.name}`"
            ) from None
        for place, dense in zip(places, pushed, strict=True):
            self._set(operation.outputs[place], base, dense)

    def _on_one_base(self, values: Sequence[Tensor]) -> dict[int, Tangent]:
        """Return tangents of values relative to one base, by the values' ids."""
        tangents = relative_to_one_base([self._of(value) for value in values])
        return {id(value): t for value, t in zip(values, tangents, strict=True)}

    def _set(self, output: Tensor, base: Base, dense: Tensor) -> None:
        self._tangents[id(output)] = Tangent(base, output.shape, dense=dense)


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


def _makes_constants(name: str) -> bool:
    """Say whether an operation takes nothing but a shape from what it gets."""
    return name in ("fill", "zero") or name.startswith("new_") or name.endswith("_like")


def _has_slope(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _sequence(output: Any) -> Sequence[Any]:
    return output if isinstance(output, list | tuple) else (output,)


def _replaced(values: Sequence[Any], replaced: Mapping[int, Tensor]) -> list[Any]:
    """Return values with other tensors in the place of those of these ids."""
    results: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            results.append(_replaced(value, replaced))
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
    "expand": _Pushforward._expand,
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
    "_softmax": _Pushforward._softmax,
    "native_layer_norm": _Pushforward._layer_norm,
}
