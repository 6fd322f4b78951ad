"""The state in which blocks are traced and evaluated, undone afterwards; and reverse
mode in chunks that fit in memory.

Matmul precision, attention kernels and hooks belong to the process, weights to the
model: one measurement has them at a time, in whichever thread it runs. Ctrl-C takes
effect at once; changes are undone on its way out.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_coupling.arguments import defaults_of_model, measuring, shared_changes
from tl_coupling.interrupts import interrupts_held
from tl_coupling.models import (
    Change,
    OwnModel,
    attributes_set,
    dequantising,
    eager_experts,
    facts_of,
    filled,
    has_packed_parts,
    holds_stored_weights,
    input_device,
    is_packed,
    left_as_found,
    looked_up,
    looks_up,
    refuse_offloaded,
)

# States that the measuring thread has entered and not yet left: device, dtype, and the
# modules' ids.
_entered: set[tuple[object, ...]] = set()
# A seed that nobody else uses.
_SEED = 0x7C_0FFEE
# torch's messages on the CPU, where it raises a plain RuntimeError; CUDA and MPS have a
# class of their own.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
)
# The arguments of a call, by place and by name.
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Attributes of a module that `forwards_replaced` changes.
_OWN_CALL = {"forward", "_forward_hooks", "_forward_pre_hooks"}


@contextmanager
def forwards_replaced(
    forwards: Mapping[nn.Module, Callable[..., object]],
) -> Iterator[None]:
    """Give modules other `forward`s in this context, and no hooks: those of the blocks
    have acted on the stream.
    """
    with shared_changes() as undo:
        for module, forward in forwards.items():
            # An instance has a `forward` of its own where accelerate put one.
            own_call = {
                name: vars(module)[name] for name in _OWN_CALL & vars(module).keys()
            }
            undo.callback(vars(module).update, own_call)
            # The class's own `forward` shows again.
            undo.callback(vars(module).pop, "forward", None)
            vars(module).update(
                forward=forward,
                _forward_hooks=OrderedDict(),
                _forward_pre_hooks=OrderedDict(),
            )
        yield


@contextmanager
def mean_weights(first: nn.Module, second: nn.Module) -> Iterator[None]:
    """Give each parameter of `first` the mean of its own values and `second`'s in this
    context. Costs a copy of the weights.

    Raises:
        ModelError: weights are where accelerate brings them in.
    """
    # The mean would be overwritten by the weights that are brought in.
    refuse_offloaded(first, "merging blocks")
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    with attributes_set((p, "data", (p.data + q.data) / 2) for p, q in pairs):
        yield


@contextmanager
def exact_arithmetic(
    device: torch.device,
    modules: Sequence[nn.Module] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Compute without gradients for parameters and compiled code, with attention in plain
    operations, and with the modules in `dtype`, as `measuring`.

    One thread at a time.
    """
    with measuring():
        state = (device, dtype, *map(id, modules))
        # Entering again would look through all modules for what is done already.
        if state in _entered:
            yield
            return
        with shared_changes() as undo, ExitStack() as stack:
            with interrupts_held():
                # Weights are constants: gradients of parameters would fill memory.
                stack.enter_context(torch.no_grad())
                # Fused kernels have no forward mode, and each rounds in its own way.
                undo.enter_context(sdpa_kernel(SDPBackend.MATH))
                undo.enter_context(_not_compiled())
                undo.enter_context(left_as_found(modules))
                if modules:
                    # A block that draws at random shall draw others than in the trace.
                    torch.default_generator.manual_seed(_SEED)
                undo.callback(_forget_graphs, modules)
                if dtype is not None:
                    # Tensors that are made within torch.func end with it; weights must
                    # not.
                    with temporarily_clear_interpreter_stack():
                        changes = _computing_in(modules, dtype)
                        stack.enter_context(attributes_set(changes))
                    stack.enter_context(defaults_of_model(None, dtype))
                undo.callback(_entered.discard, state)
                _entered.add(state)
            try:
                yield
            finally:
                with interrupts_held():
                    stack.close()


@contextmanager
def own_arithmetic(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    fills_at_once: bool = False,
) -> Iterator[None]:
    """Compute exactly in the precision of the module's weights: how models are traced.

    A model whose weights are on disk, or packed, computes in `dtype` (by default
    float32, or float64 if that is its own), one part after the other: each has its
    weights while it is called. With `fills_at_once` all parts but the blocks have them
    from the start: weights that are read within torch.func end with it.
    """
    weight = next(module.parameters(), torch.empty(0))
    device = input_device(module)
    facts = facts_of(module)
    with exact_arithmetic(device), ExitStack() as stack:
        stack.enter_context(model_left_as_found(module))
        # Within its own arithmetic a model has its weights already.
        lacks_weights = not facts.is_filled_when_called and (
            facts.is_streamed or has_packed_parts(module)
        )
        if lacks_weights:
            if dtype is None:
                is_double = weight.dtype == torch.float64
                dtype = torch.float64 if is_double else torch.float32
            is_filled = (facts, "is_filled_when_called", True)
            stack.enter_context(attributes_set([is_filled]))
            if fills_at_once:
                blocks = set(getattr(module, "blocks", ()))
                parts = [part for part in _parts_to_fill(module) if part not in blocks]
                stack.enter_context(exact_arithmetic(device, parts, dtype))
            else:
                stack.enter_context(_filled_when_called(module, dtype))
        experts = eager_experts(module, dtype or weight.dtype)
        stack.enter_context(attributes_set(experts))
        stack.enter_context(defaults_of_model(device, weight.dtype))
        yield


@contextmanager
def model_left_as_found(model: nn.Module) -> Iterator[None]:
    """Give a model its attributes, buffers and hooks back at the end of this context."""
    # A bridge does not list every part of the model that it wraps.
    original = getattr(model, "original_model", None)
    parts = [model] if original is None else [model, original]
    if isinstance(model, OwnModel):
        parts = [model.original_model]
    state = ("found", *map(id, parts))
    # Entering again would look through all modules for what is done already.
    if state in _entered:
        yield
        return
    with left_as_found(parts), shared_changes() as undo:
        undo.callback(_entered.discard, state)
        _entered.add(state)
        yield


@contextmanager
def _filled_when_called(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Give each part of a model its weights, in `dtype`, while it is called in this
    context.
    """
    device = next(model.parameters()).device

    def enter(weights: ExitStack, part: nn.Module, arguments: _Arguments) -> _Arguments:
        args, kwargs = arguments
        if looks_up(part) and args:
            changes, ids = looked_up(part, args[0], dtype)
            weights.enter_context(attributes_set(changes))
            return (ids, *args[1:]), kwargs
        weights.enter_context(exact_arithmetic(device, [part], dtype))
        return arguments

    with _entered_when_called(_parts_to_fill(model), enter):
        yield


@contextmanager
def autocast_off_within(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Call modules without autocast in this context, where their caller has it on.

    A `Trainer` in 16 bits has, in the model's own `forward`. What autocast rounded on
    the way to a module comes in the dtype of its weights again.
    """

    def enter(
        autocast: ExitStack, module: nn.Module, arguments: _Arguments
    ) -> _Arguments:
        args, kwargs = arguments
        weight = next(module.parameters(), torch.empty(0))
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        # Where it computes: weights may be elsewhere until it is called.
        device = next(tensors, weight).device.type
        if not torch.is_autocast_enabled(device):
            return arguments
        rounded = torch.get_autocast_dtype(device)
        autocast.enter_context(torch.autocast(device, enabled=False))

        def in_dtype_of_weights(x: Tensor) -> Tensor:
            return x.to(weight.dtype) if x.dtype == rounded else x

        args, kwargs = map_tensors([args, kwargs], in_dtype_of_weights)
        return args, kwargs

    with _entered_when_called(modules, enter):
        yield


@contextmanager
def _entered_when_called(
    modules: Sequence[nn.Module],
    enter: Callable[[ExitStack, nn.Module, _Arguments], _Arguments],
) -> Iterator[None]:
    """Surround each call of these modules, in this context, by contexts of its own.

    `enter` puts them on the stack of the call, and returns the call's arguments.
    """
    called: list[ExitStack] = []

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments:
        stack = ExitStack()
        called.append(stack)
        return enter(stack, module, (args, kwargs))

    def after(*_: object) -> None:
        # torch calls it as well where a hook before ours raised.
        if called:
            called.pop().close()

    with shared_changes() as hooks:
        for module in dict.fromkeys(modules):
            hook = module.register_forward_pre_hook(before, with_kwargs=True)
            hooks.enter_context(hook)
            hooks.enter_context(module.register_forward_hook(after, always_call=True))
        try:
            yield
        finally:
            while called:
                after()


def _parts_to_fill(model: Any) -> list[nn.Module]:
    """Return the parts of a model that get their weights one after the other.

    These are the blocks, tables of embeddings, of which only the rows that are looked
    up are read, and the largest modules that contain neither; of a streamed model,
    those that lack weights.
    """
    blocks = set(getattr(model, "blocks", [model]))
    is_streamed = facts_of(model).is_streamed

    def is_whole_part(module: nn.Module) -> bool:
        return module in blocks or looks_up(module)

    parts: dict[nn.Module, None] = {}
    # A bridge does not list every part of the model that it wraps.
    unvisited = [model, getattr(model, "original_model", model)]
    while unvisited:
        module = unvisited.pop()
        if not is_whole_part(module) and any(map(is_whole_part, module.modules())):
            unvisited += module.children()
        elif holds_stored_weights(module) or not is_streamed:
            parts[module] = None
    return list(parts)


def _forget_graphs(modules: Sequence[nn.Module]) -> None:
    """Detach buffers that modules have changed in place while they were differentiated."""
    for module in modules:
        for buffer in module.buffers():
            if buffer.grad_fn is not None:
                buffer.detach_()


def _not_compiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` compiled as it was written."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6 and later
    # Its import takes seconds, and whatever compiled has done it.
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    # Graphs of compiled code are guarded by dtypes and hooks, which change here.
    stance: AbstractContextManager[Any] = set_stance("force_eager")
    return stance


def _computing_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[Change]:
    """Yield changes that make modules compute in `dtype`, with weights as constants;
    HookedTransformer's norms cast to `cfg.dtype`.

    Not by `torch.func.functional_call`: a bridge reaches one module under two names,
    and would keep foreign weights.
    """
    if any(facts_of(module).is_streamed for module in modules):
        yield from filled(modules, dtype)
    for part in chain.from_iterable(module.modules() for module in modules):
        if is_packed(part):
            yield from dequantising(part, dtype)
        # `parameters()` and `buffers()` would search all parts of each part again.
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or not tensor.is_floating_point():
                continue
            if tensor.is_inference():
                yield part, name, _outside_of_inference_mode(tensor, dtype)
                continue
            # Not of a weight that is computed from others.
            if tensor.requires_grad and tensor.is_leaf:
                yield tensor, "requires_grad", False
            if tensor.dtype != dtype:
                yield tensor, "data", tensor.data.to(dtype)
        cfg = vars(part).get("cfg")
        cfg_dtype = getattr(cfg, "dtype", None)
        if isinstance(cfg_dtype, torch.dtype) and cfg_dtype != dtype:
            yield cfg, "dtype", dtype
    for module in modules:
        yield from eager_experts(module, dtype)


def _outside_of_inference_mode(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor that was made in inference mode, which autograd takes."""
    copied = tensor.clone().to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=False)
    return copied


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its floating-point tensors changed, also those inside tuples,
    lists and dicts.
    """
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if not isinstance(value, tuple | list):
        return value
    entries = [map_tensors(entry, change) for entry in value]
    is_named_tuple = hasattr(value, "_fields")
    return type(value)(*entries) if is_named_tuple else type(value)(entries)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether the error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in message for words in _OUT_OF_MEMORY
    )
