"""One block as the model called it: its module, its captured arguments, and its
evaluation on one row.
"""

import inspect
import re
from collections.abc import Callable, Mapping
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

# The layouts of a residual stream of one sequence: the last with positions first, as in
# torch's own encoder.
_LAYOUTS: dict[str, Callable[[torch.Size], bool]] = {
    "1 n d": lambda shape: len(shape) == 3 and shape[0] == 1,
    "n 1 d": lambda shape: len(shape) == 3 and shape[1] == 1,
    "n d": lambda shape: len(shape) == 2,
}
# The names under which HuggingFace and TransformerLens blocks take a key/value cache,
# newest first.
_CACHE_ARGUMENTS = (
    "past_key_values",
    "past_key_value",
    "layer_past",
    "past_kv_cache_entry",
)


def hidden_states(output: Any) -> Tensor:
    """The residual stream in what a block returned (some return tuples)."""
    found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor):
        kind = type(output).__name__
        raise ValueError(
            f"wanted blocks that return the residual stream, alone or first in a tuple, got a {kind}"
        )
    return found


def as_block_output(stream: Tensor, length: int) -> object:
    """Return a stream as a block does: first in a tuple of a length, or alone (0)."""
    if length == 0:
        return stream
    return (stream, *[None] * (length - 1))


def _row_of(name: str, value: Any, position: int, n_keys: int) -> Any:
    """A block argument for the query at `position` alone: its own row, and the first
    `n_keys` keys.
    """
    rows, keys = slice(position, position + 1), slice(0, n_keys)
    if value is None:
        return None
    if name in ("attention_mask", "causal_mask") and isinstance(value, Tensor):
        return (
            value[..., rows, keys]
            if value.ndim == 4 and value.shape[-2] > 1
            else value[..., keys]
        )
    if name in ("position_ids", "cache_position"):
        return value[..., rows]
    if name == "position_embeddings" and isinstance(value, tuple | list):
        return type(value)(v[..., rows, :] for v in value)
    if name in ("position_embeddings", "shortformer_pos_embed"):
        return value[:, rows]
    return value[..., keys] if name in ("alibi", "position_bias") else value


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A block and every argument that the model gave it, except the residual stream and
    the cache.

    `layout` is that of the residual stream in the call, which is `[n_pos d_model]`
    everywhere else.

    Example:
        >>> call = trace.blocks[0].call
        >>> torch.allclose(call(trace.residual[0]), trace.residual[1], atol=1e-5)
        True
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    cache_argument: str | None
    takes_use_cache: bool
    position_dim: int  # Of keys and values.
    layout: str = "1 n d"

    @classmethod
    def captured(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["BlockCall", Tensor]:
        """The call that a forward pre-hook saw, and the residual stream in it."""
        original = getattr(module, "original_component", None)
        parameters = inspect.signature(
            (module if original is None else original).forward
        ).parameters
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        residual = arguments.pop(next(iter(parameters)), None)
        if not isinstance(residual, Tensor) or len(args) > len(parameters):
            raise ValueError(
                f"wanted blocks that take the residual stream first, {type(module).__name__} does not"
            )
        # The first embedding, as an argument of every block, is the stream itself, to
        # which blocks may add in place.
        apart = partial(_copied_from, residual)
        arguments = {
            name: map_tensors(value, apart) for name, value in arguments.items()
        }
        arguments |= dict.fromkeys(arguments.keys() & set(_CACHE_ARGUMENTS))
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = (
            name for name in _CACHE_ARGUMENTS if name in arguments or name in parameters
        )
        cache_argument = next(named, _CACHE_ARGUMENTS[0] if takes_any else None)
        takes_use_cache = "use_cache" in parameters or "use_cache" in arguments
        # HookedTransformer keeps keys as [batch pos head d_head], HuggingFace as [batch
        # head pos d_head].
        position_dim = (
            1
            if original is None
            and type(module).__module__.startswith("transformer_lens")
            else -2
        )
        layout = next(
            (one for one, fits in _LAYOUTS.items() if fits(residual.shape)), cls.layout
        )
        return cls(
            module, arguments, cache_argument, takes_use_cache, position_dim, layout
        ), residual

    def holds(self, residual: Tensor) -> bool:
        """Whether this is a residual stream of one sequence in the layout of the
        call.
        """
        return _LAYOUTS[self.layout](residual.shape)

    def rows(self, output: Any) -> Float[Tensor, "n_rows d_model"]:
        """The residual stream in what the block took or returned."""
        return rearrange(hidden_states(output), f"{self.layout} -> n d")

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """The block's output for the whole sequence; X stays as it is, also where the
        block adds to it in place.
        """
        return self.rows(self.module(self._laid_out(X.clone()), **self.arguments))

    def _laid_out(self, X: Float[Tensor, "n_rows d_model"]) -> Tensor:
        return rearrange(X, f"n d -> {self.layout}")

    def keys_and_values(
        self, X: Float[Tensor, "n_rows d_model"], position: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows X: the whole sequence, or the one row at
        `position`.
        """
        try:
            self._in_context(
                Context(None, self.position_dim, 0), X.clone(), position, 1
            )
        except KeysAndValues as found:
            return found.args
        raise _no_context()

    def row(
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...]
    ) -> Float[Tensor, " d_model"]:
        """The block's output at `position`, from the row there and the keys and values
        of other rows.
        """
        around = self.context(position, context)
        # Not [0, 0]: the derivative of a selection is a matrix of zeros with one row
        # filled in, for every seed.
        output = self.at(x[None].clone(), around).reshape(-1)
        if len(around.seen) < 2:
            raise _no_context()
        return output

    def context(self, position: int, rows: tuple[Tensor, ...]) -> Context:
        """Keys and values of other rows, for the row at `position`."""
        return Context(rows, self.position_dim, position)

    def at(
        self, X: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """The block on rows that all stand at the context's place: one of activations,
        or any number of tangents.

        A block that adds to the stream in place changes X: rows that are wanted later
        are given as a copy.
        """
        assert context.rows is not None
        n_keys = context.rows[0].shape[self.position_dim] + 1
        return self._in_context(context, X, context.before, n_keys).reshape(X.shape)

    def _in_context(
        self,
        context: Context,
        X: Float[Tensor, "n_rows d_model"],
        position: int | None,
        n_keys: int,
    ) -> Tensor:
        given = self.arguments.items()
        arguments = {
            name: value if position is None else _row_of(name, value, position, n_keys)
            for name, value in given
        }
        if self.cache_argument is not None:
            arguments[self.cache_argument] = ReadOnlyCache(context)
            arguments |= {"use_cache": True} if self.takes_use_cache else {}
        with context.entered(len(X)):
            return hidden_states(self.module(self._laid_out(X), **arguments))


def _copied_from(stream: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it has the memory of the stream."""
    shared = tensor.untyped_storage().data_ptr() == stream.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def _no_context() -> BlockError:
    return BlockError(
        "the block takes no key/value cache, and its attention is not two products"
    )


class RecordedCall(NamedTuple):
    """A block's call as the model made it, with the residual streams `[n_pos d_model]`
    before and after.
    """

    call: BlockCall
    X: Tensor
    Y: Tensor
    dtypes: frozenset[
        torch.dtype
    ]  # Of the stream and of the weights; Mamba's stream is in float32.


def differ_in(
    first: BlockCall, second: BlockCall, layers: tuple[int, int]
) -> str | None:
    """Where two blocks are of different kinds, so that the mean of their weights is no
    block; `None` if nowhere.

    Blocks of one kind have the same modules with the same settings (window, rotary or
    not, scale), parameters of the same names and shapes, the same buffers, and are
    called with the same arguments (mask, positions).
    """
    blocks = first.module, second.module
    kinds = (
        {name: type(part) for name, part in block.named_modules()} for block in blocks
    )
    ours, theirs = (
        {n: p.shape if p.is_floating_point() else None for n, p in b.named_parameters()}
        for b in blocks
    )
    return (
        _difference("module", *kinds)
        or _other_setting(*blocks, layers)
        or _difference("parameter", ours, theirs)
        or (
            "parameters that are not floating-point numbers"
            if None in ours.values()
            else None
        )
        or _difference("buffer", *(dict(block.named_buffers()) for block in blocks))
        or argument_that_differs(first, second)
    )


def argument_that_differs(first: BlockCall, second: BlockCall) -> str | None:
    """The first argument that is not the same in two calls of a block; `None` if all
    are.
    """
    return _difference("argument", first.arguments, second.arguments)


def _other_setting(
    first: nn.Module, second: nn.Module, layers: tuple[int, int]
) -> str | None:
    """The first plain attribute in which two blocks of the same modules differ, except
    in naming their own layers.
    """
    others = dict(second.named_modules())
    for name, part in first.named_modules():
        both = part, others[name]
        ours, theirs = (
            {k: v for k, v in vars(one).items() if isinstance(v, int | float | str)}
            for one in both
        )
        for key in ours | theirs:
            if not _same_setting(a := ours.get(key), b := theirs.get(key), *layers):
                return f"{key}, {a!r} and {b!r}, of module {name!r}"
    return None


def _same_setting(a: Any, b: Any, layer_a: int, layer_b: int) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return re.sub(rf"\b{layer_a}\b", "layer", a) == re.sub(
            rf"\b{layer_b}\b", "layer", b
        )
    return bool(a == b) or (type(a) is type(b) is int and a - layer_a == b - layer_b)


def _difference(
    what: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> str | None:
    """The first name under which two mappings hold different things, or one of them
    nothing.
    """
    names = (
        n
        for n in {**one, **other}
        if n not in one or n not in other or not _equal(one[n], other[n])
    )
    return next((f"{what} {name!r}" for name in names), None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _difference("", a, b) is None
    return a is b or bool(a == b)
