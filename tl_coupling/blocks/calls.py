"""One block as the model called it: its module, its captured arguments, and its
evaluation on one row.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.arithmetic import map_tensors
from tl_coupling.blocks.contexts import (
    BlockError,
    Context,
    KeysAndValues,
    ReadOnlyCache,
)
from tl_coupling.models import Change, attributes_set

# The layouts of a residual stream of one sequence, as einops writes them: "1" is the axis
# of sequences, "n" that of positions, "d" that of the width. The second has positions
# first, as torch's own encoder.
_LAYOUTS: dict[str, Callable[[torch.Size], bool]] = {
    "1 n d": lambda shape: len(shape) == 3 and shape[0] == 1,
    "n 1 d": lambda shape: len(shape) == 3 and shape[1] == 1,
    "n d": lambda shape: len(shape) == 2,
}
_USUAL_CACHE_ARGUMENT = "past_key_values"
_NEWEST_CACHE_ARGUMENT = "cache"
# The names under which HuggingFace and TransformerLens blocks take a key/value cache,
# newest first: transformers 5.24 ignores the older name beside the newer one.
_CACHE_ARGUMENTS = (
    _NEWEST_CACHE_ARGUMENT,
    _USUAL_CACHE_ARGUMENT,
    "past_key_value",
    "layer_past",
    "past_kv_cache_entry",
)
# The attention of TransformerLens 4.3 does not know the newest name, by which the blocks
# of transformers 5.24 pass a cache on. They pass this one on as it is, and it reads it.
_CACHE_ARGUMENT_OF_BRIDGES = "layer_past"


def hidden_states(output: object) -> Tensor:
    """Return the residual stream in what a block returned (some return tuples)."""
    stream = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(stream, Tensor):
        raise ValueError(
            "wanted blocks that return the residual stream, alone or first in a tuple, "
            f"got a {type(output).__name__}"
        )
    return stream


def stand_in(
    output_of: Callable[[Tensor], Tensor], length: int
) -> Callable[..., object]:
    """Return a function that is called in the place of a block, and returns `output_of`
    the stream as the block would: first in a tuple of a length, or alone (0).
    """

    def forward(first: Tensor | None = None, *_: object, **named: Any) -> object:
        entering = named["hidden_states"] if first is None else first
        stream = output_of(entering)
        return stream if length == 0 else (stream, *[None] * (length - 1))

    return forward


def _row_of(
    name: str, value: Any, position: int, n_keys: int, n_queries: int = 1
) -> Any:
    """Return a block argument for the queries from `position` on: their own rows, and
    the first `n_keys` keys.
    """
    row = slice(position, position + n_queries)
    keys = slice(0, n_keys)
    match name:
        case _ if value is None:
            return None
        case "attention_mask" | "causal_mask" if isinstance(value, Tensor):
            has_rows = value.ndim == 4 and value.shape[-2] > 1
            return value[..., row, keys] if has_rows else value[..., keys]
        case "position_ids" | "cache_position":
            return value[..., row]
        case "position_embeddings" if isinstance(value, tuple | list):
            return type(value)(part[..., row, :] for part in value)
        case "position_embeddings" | "shortformer_pos_embed":
            return value[:, row]
        case "alibi" | "position_bias":
            return value[..., keys]
    return value


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A block and every argument that the model gave it, except the residual stream and
    the cache.

    `layout` is that of the residual stream in the call, which is `[n_pos d_model]`
    everywhere else. `state` makes its modules be called as they were: in the same mode,
    with hooks that were there for the time of the forward pass alone.

    Example:
        >>> call = trace.blocks[0].call
        >>> torch.allclose(call(trace.residual[0]), trace.residual[1], atol=1e-5)
        True
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    cache_arguments: tuple[str, ...]
    takes_use_cache: bool
    position_dim: int  # Of keys and values.
    layout: str = "1 n d"
    dropped_cache: str | None = None  # The argument that held keys and values.
    state: tuple[Change, ...] = ()

    @classmethod
    def captured(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["BlockCall", Tensor]:
        """Return the call that a forward pre-hook saw, and the residual stream in it."""
        # A bridge's block takes `*args`; the names stand in what it wraps.
        original = getattr(module, "original_component", None)
        forward = module.forward if original is None else original.forward
        parameters = inspect.signature(forward).parameters
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        residual = arguments.pop(next(iter(parameters)), None)
        if not isinstance(residual, Tensor) or len(args) > len(parameters):
            raise ValueError(
                "wanted blocks that take the residual stream first, "
                f"{type(module).__name__} does not"
            )
        # The first embedding, as an argument of every block, is the stream itself, to
        # which blocks may add in place.
        apart = partial(_copied_from, residual)
        arguments = {
            name: map_tensors(value, apart) for name, value in arguments.items()
        }
        dropped_cache = None
        for name in arguments.keys() & set(_CACHE_ARGUMENTS):
            if _holds_keys(arguments[name], module):
                dropped_cache = name
            arguments[name] = None
        # A block that filled a cache would meet it again in the next call.
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        call = cls(
            module,
            arguments,
            cache_arguments=_cache_arguments(module, parameters, arguments),
            takes_use_cache="use_cache" in parameters or "use_cache" in arguments,
            position_dim=_position_dim(module),
            layout=_layout(residual),
            dropped_cache=dropped_cache,
        )
        return call, residual

    def as_recorded(self) -> AbstractContextManager[None]:
        """Return the context in which the block is called as it was."""
        return attributes_set(self.state) if self.state else nullcontext()

    def masked_rows(self) -> set[int]:
        """Return the rows from which the attention mask hides every key.

        Such a mask adds the lowest number to all scores, or is False.
        """
        rows: set[int] = set()
        for name, mask in self.arguments.items():
            if "mask" not in name or not isinstance(mask, Tensor) or mask.ndim != 4:
                continue
            lowest: bool | float = False
            if mask.is_floating_point():
                lowest = torch.finfo(mask.dtype).min / 2
            # The axes are batch, head, query and key.
            hides_all = (mask <= lowest).all(-1).flatten(0, 1).any(0)
            rows |= set(hides_all.nonzero().flatten().tolist())
        return rows

    def holds(self, residual: Tensor) -> bool:
        """Say whether this is a residual stream of one sequence in the layout of the
        call.
        """
        return _LAYOUTS[self.layout](residual.shape)

    @property
    def has_sequence_axis(self) -> bool:
        """Whether the block is called on an axis of sequences, of which there is one."""
        return "1" in self.layout

    def rows(self, output: object) -> Float[Tensor, "n_rows d_model"]:
        """Return the residual stream in what the block took or returned."""
        return rearrange(hidden_states(output), f"{self.layout} -> n d")

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return the block's output for the whole sequence.

        X stays as it is, also where the block adds to it in place.
        """
        return self.rows(self.module(self._laid_out(X.clone()), **self.arguments))

    def _laid_out(self, X: Float[Tensor, "n_rows d_model"]) -> Tensor:
        return rearrange(X, f"n d -> {self.layout}")

    def keys_and_values(
        self, X: Float[Tensor, "n_rows d_model"], position: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the rows X: the whole sequence, or the one row
        at `position`.
        """
        recording = Context(None, self.position_dim, 0)
        try:
            self._run(recording, self._laid_out(X.clone()), len(X), position, 1)
        except KeysAndValues as recorded:
            keys, values = recorded.args
            return keys, values
        raise _no_context()

    def output_with_context(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> tuple[Float[Tensor, "n_pos d_model"], tuple[Tensor, Tensor]]:
        """Return the block's output for the whole sequence, and its keys and values.

        Raises:
            BlockError: it does not give them.
        """
        recording = Context(None, self.position_dim, 0)
        recording.runs_on = True
        Y = self._run(recording, self._laid_out(X.clone()), len(X), None, 1)
        if len(recording.seen) != 2:
            raise _no_context()
        keys, values = recording.seen
        return self.rows(Y), (keys, values)

    def outputs(
        self, streams: Float[Tensor, "n_streams n_pos d_model"]
    ) -> Float[Tensor, "n_streams n_pos d_model"]:
        """Return the block's output for each of several sequences, by one call.

        Raises:
            BlockError: it is not called with an axis of sequences, or does not give one
                output for each.
        """
        if not self.has_sequence_axis:
            raise BlockError("the block takes one sequence at a time")
        layout = self.layout.replace("1", "s")
        # A block may add to what it gets in place.
        laid_out = rearrange(streams, f"s n d -> {layout}").clone()
        output = hidden_states(self.module(laid_out, **self.arguments))
        if output.shape != laid_out.shape:
            raise BlockError("the block gives another number of sequences than it got")
        return rearrange(output, f"{layout} -> s n d")

    def row(
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...]
    ) -> Float[Tensor, " d_model"]:
        """Return the block's output at `position`, from the row there and the keys and
        values of other rows.
        """
        row_context = self.context(position, context)
        # Not [0, 0]: the derivative of a selection is a matrix of zeros with one row
        # filled in, for every seed.
        output = self.row_output(x[None].clone(), row_context).reshape(-1)
        if len(row_context.seen) < 2:
            raise _no_context()
        return output

    def context(self, position: int, rows: tuple[Tensor, ...]) -> Context:
        """Return the keys and values of other rows, for the row at `position`."""
        return Context(rows, self.position_dim, position)

    def row_output(
        self, X: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return the block's output for rows that all stand at the context's place: one
        of activations, or any number of tangents.

        A block that adds to the stream in place changes X: rows that are needed later
        are given as a copy.
        """
        assert context.rows is not None
        n_keys = context.rows[0].shape[self.position_dim] + 1
        stream = self._laid_out(X)
        output = self._run(context, stream, len(X), context.before, n_keys)
        return output.reshape(X.shape)

    def row_outputs(
        self, rows: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return the block's output at the context's place for each of several rows,
        which do not see each other, by one call.

        Raises:
            BlockError: the block is not called with an axis of sequences, or does not
                ask for keys and values.
        """
        if not self.has_sequence_axis:
            raise BlockError("the block takes one sequence at a time")
        assert context.rows is not None
        layout = self.layout.replace("1", "s")
        laid_out = rearrange(rows[:, None], f"s n d -> {layout}").clone()
        n_keys = context.rows[0].shape[self.position_dim] + 1
        output = self._run(context, laid_out, 1, context.before, n_keys)
        if len(context.seen) < 2:
            raise _no_context()
        return output.reshape(rows.shape)

    def following_outputs(
        self, X: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return the block's output for the rows that follow the context's.

        They stand one after the other, and see each other as the block lets them.

        Raises:
            BlockError: the block does not ask for keys and values.
        """
        n_rows = len(X)
        start = context.before
        stream = self._laid_out(X.clone())
        output = self._run(context, stream, n_rows, start, start + n_rows, n_rows)
        if len(context.seen) < 2:
            raise _no_context()
        return self.rows(output)

    def _run(
        self,
        context: Context,
        stream: Tensor,
        n_rows: int,
        position: int | None,
        n_keys: int,
        n_queries: int = 1,
    ) -> Tensor:
        """Run the block on a stream in its layout, of sequences of `n_rows` rows.

        Those stand at `n_queries` places from `position` on.
        """
        arguments = dict(self.arguments)
        if position is not None:
            for name, value in self.arguments.items():
                arguments[name] = _row_of(name, value, position, n_keys, n_queries)
        for name in self.cache_arguments:
            arguments[name] = ReadOnlyCache(context)
        if self.cache_arguments and self.takes_use_cache:
            arguments["use_cache"] = True
        with context.entered(n_rows):
            return hidden_states(self.module(stream, **arguments))


def _holds_keys(cache: Any, module: nn.Module) -> bool:
    """Say whether a cache holds keys and values, before the block has added its own, or
    places for them (static ones).
    """
    if cache is None:
        return False
    # Static caches have places for all positions from the start.
    if getattr(cache, "is_compileable", False):
        return True
    past_keys = getattr(cache, "past_keys", None)
    if isinstance(past_keys, Tensor):
        return past_keys.numel() > 0
    if hasattr(cache, "get_seq_length"):
        layers = [getattr(part, "layer_idx", None) for part in module.modules()]
        layer = next((index for index in layers if isinstance(index, int)), 0)
        return int(cache.get_seq_length(layer)) > 0
    return True


def _cache_arguments(
    module: nn.Module,
    parameters: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, object],
) -> tuple[str, ...]:
    """Return the names under which a block takes a key/value cache; none if it takes
    none.
    """
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in _CACHE_ARGUMENTS:
        if name not in arguments and name not in parameters:
            continue
        is_newest = name == _NEWEST_CACHE_ARGUMENT
        if is_newest and takes_any and _wraps_huggingface(module):
            return name, _CACHE_ARGUMENT_OF_BRIDGES
        return (name,)
    # It is passed on to attention, which knows the usual name.
    return (_USUAL_CACHE_ARGUMENT,) if takes_any else ()


def _wraps_huggingface(module: nn.Module) -> bool:
    """Say whether this is a bridge's block, around one of HuggingFace's."""
    return getattr(module, "original_component", None) is not None


def _position_dim(module: nn.Module) -> int:
    """Return the axis of positions in a block's keys and values.

    HookedTransformer keeps keys as [batch pos head d_head], HuggingFace as [batch head
    pos d_head].
    """
    if _wraps_huggingface(module):
        return -2
    return 1 if type(module).__module__.startswith("transformer_lens") else -2


def _layout(residual: Tensor) -> str:
    """Return the layout that a residual stream has; the usual one if it has none of
    them, which is refused later.
    """
    for layout, fits in _LAYOUTS.items():
        if fits(residual.shape):
            return layout
    return BlockCall.layout


def _copied_from(stream: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it has the memory of the stream."""
    shared = tensor.untyped_storage().data_ptr() == stream.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def _no_context() -> BlockError:
    return BlockError(
        "the block takes no key/value cache, and its attention is not two products"
    )


class RecordedCall(NamedTuple):
    """A block's call as the model made it, with the residual streams `[n_pos d_model]`
    before and after.

    `dtypes` are those of the stream and of the weights; Mamba's stream is in float32.
    """

    call: BlockCall
    X: Tensor
    Y: Tensor
    dtypes: frozenset[torch.dtype]


def differ_in(
    first: BlockCall, second: BlockCall, layers: tuple[int, int]
) -> str | None:
    """Say where two blocks are of different kinds, so that the mean of their weights is
    no block; `None` if nowhere.

    Blocks of one kind have the same modules with the same settings (window, rotary or
    not, scale), parameters of the same names and shapes, the same buffers, and are
    called with the same arguments (mask, positions).
    """
    a = first.module
    b = second.module
    shapes = _float_shapes(a)
    return (
        _difference("module", _classes(a), _classes(b))
        or _setting_that_differs(a, b, layers)
        or _difference("parameter", shapes, _float_shapes(b))
        or _integer_parameters(shapes)
        or _difference("buffer", dict(a.named_buffers()), dict(b.named_buffers()))
        or argument_that_differs(first, second)
    )


def argument_that_differs(first: BlockCall, second: BlockCall) -> str | None:
    """Return the first argument that is not the same in two calls of a block; `None` if
    all are.
    """
    return _difference("argument", first.arguments, second.arguments)


def _classes(block: nn.Module) -> dict[str, type]:
    return {name: type(part) for name, part in block.named_modules()}


def _float_shapes(block: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shapes of a block's parameters; None for those of whole numbers."""
    return {
        name: parameter.shape if parameter.is_floating_point() else None
        for name, parameter in block.named_parameters()
    }


def _integer_parameters(shapes: Mapping[str, torch.Size | None]) -> str | None:
    has_integers = None in shapes.values()
    return "parameters that are not floating-point numbers" if has_integers else None


def _setting_that_differs(
    first: nn.Module, second: nn.Module, layers: tuple[int, int]
) -> str | None:
    """Return the first plain attribute in which two blocks of the same modules differ,
    except in naming their own layers.
    """
    counterparts = dict(second.named_modules())
    for path, part in first.named_modules():
        settings = _settings(part)
        other_settings = _settings(counterparts[path])
        for name in settings | other_settings:
            a = settings.get(name)
            b = other_settings.get(name)
            if not _same_setting(a, b, *layers):
                return f"{name}, {a!r} and {b!r}, of module {path!r}"
    return None


def _settings(part: nn.Module) -> dict[str, int | float | str]:
    attributes = vars(part).items()
    return {name: v for name, v in attributes if isinstance(v, int | float | str)}


def _same_setting(a: object, b: object, layer_a: int, layer_b: int) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return _erase_layer(a, layer_a) == _erase_layer(b, layer_b)
    if type(a) is int and type(b) is int and a - layer_a == b - layer_b:
        return True
    return bool(a == b)


def _erase_layer(text: str, layer: int) -> str:
    return re.sub(rf"\b{layer}\b", "layer", text)


def _difference(
    kind: str, first: Mapping[str, object], second: Mapping[str, object]
) -> str | None:
    """Return the first name under which two mappings hold different things, or one of
    them nothing.
    """
    for name in {**first, **second}:
        is_in_both = name in first and name in second
        if not is_in_both or not _equal(first[name], second[name]):
            return f"{kind} {name!r}"
    return None


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _difference("", a, b) is None
    return a is b or bool(a == b)
