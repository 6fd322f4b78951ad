"""One block as the model called it: its module, its captured arguments, and a cache that stands in for the context."""

import inspect
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.expansions import BlockError, ProductRule

# The names under which HuggingFace and TransformerLens blocks take a key/value cache, newest first.
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "past_kv_cache_entry")


class _KeysAndValues(Exception):
    """What a recording cache raises, with keys and values: the rest of the block need not run."""


class _UnknownToCache(BlockError, AttributeError):
    """A block asks its cache for more than keys and values; an AttributeError too, so that `hasattr` works on it."""


class _ReadOnlyCache:
    """A key/value cache that never changes, with HuggingFace's interface (`update`) and TransformerLens' (`append`).

    It puts the context in front of the new keys and values, along the position axis `dim`; without one it raises the
    new ones as `_KeysAndValues`. With a product rule they are constants, and the rule adds the moving row's derivative.
    """

    is_compileable = False
    frozen = True

    def __init__(self, context: tuple[Tensor, ...] | None, dim: int, rule: ProductRule | None = None) -> None:
        self.context, self.dim, self.rule = context, dim, rule

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if self.context is None:
            raise _KeysAndValues(keys, values)
        if self.rule is not None:
            if self.rule.moved is None:
                self.rule.set(keys, values, self.dim)
            keys, values = keys.detach(), values.detach()
        return torch.cat([self.context[0], keys], self.dim), torch.cat([self.context[1], values], self.dim)

    append = update

    @property
    def past_keys(self) -> Tensor:
        return torch.empty(1, 0, 0, 1) if self.context is None else self.context[0]

    def get_seq_length(self, *_: object) -> int:
        return self.past_keys.shape[self.dim]

    def get_max_cache_shape(self, *_: object) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        raise _UnknownToCache(f"the block asks its key/value cache for {name!r}")


def hidden_states(output: Any) -> Tensor:
    """The residual stream in what a block returned (some return tuples)."""
    return output[0] if isinstance(output, tuple | list) else output


def _row_of(name: str, value: Any, position: int) -> Any:
    """A block argument for the query at `position` alone: its own row, and the keys up to itself."""
    rows, keys = slice(position, position + 1), slice(0, position + 1)
    if value is None:
        return None
    if name in ("attention_mask", "causal_mask") and isinstance(value, Tensor):
        return value[..., rows, keys] if value.ndim == 4 else value[..., keys]
    if name in ("position_ids", "cache_position"):
        return value[..., rows]
    if name == "position_embeddings" and isinstance(value, tuple | list):
        return type(value)(v[..., rows, :] for v in value)
    if name in ("position_embeddings", "shortformer_pos_embed"):
        return value[:, rows]
    return value[..., keys] if name in ("alibi", "position_bias") else value


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A block and every argument that the model gave it, except the residual stream and the cache."""

    module: nn.Module
    arguments: Mapping[str, Any]
    cache_argument: str | None
    takes_use_cache: bool
    position_dim: int  # Of keys and values.

    @classmethod
    def captured(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["BlockCall", Tensor]:
        """The call that a forward pre-hook saw, and the residual stream `[1 n_pos d_model]` in it."""
        original = getattr(module, "original_component", None)
        parameters = inspect.signature((module if original is None else original).forward).parameters
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        residual = arguments.pop(next(iter(parameters)))
        arguments |= dict.fromkeys(arguments.keys() & set(_CACHE_ARGUMENTS))
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = (name for name in _CACHE_ARGUMENTS if name in arguments or name in parameters)
        cache_argument = next(named, _CACHE_ARGUMENTS[0] if takes_any else None)
        takes_use_cache = "use_cache" in parameters or "use_cache" in arguments
        # HookedTransformer keeps keys as [batch pos head d_head], HuggingFace as [batch head pos d_head].
        return cls(module, arguments, cache_argument, takes_use_cache, 1 if original is None else -2), residual

    def __call__(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """The block's output for the whole sequence."""
        return hidden_states(self.module(X[None], **self.arguments))[0]

    def keys_and_values(self, X: Float[Tensor, "n_rows d_model"], position: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows X: the whole sequence, or the one row at `position`."""
        try:
            self._with_cache(_ReadOnlyCache(None, self.position_dim), X, position)
        except _KeysAndValues as found:
            return found.args
        raise BlockError("the block ignores its key/value cache")

    def row(
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...], rule: ProductRule | None = None
    ) -> Float[Tensor, " d_model"]:
        """The block's output at `position`, from the row there and the keys and values of the rows before it."""
        with rule or nullcontext():
            output = self._with_cache(_ReadOnlyCache(context, self.position_dim, rule), x[None], position)
        # Not [0, 0]: the derivative of a selection is a matrix of zeros with one row filled in, for every seed.
        return output.reshape(-1)

    def _with_cache(self, cache: _ReadOnlyCache, X: Float[Tensor, "n_rows d_model"], position: int | None) -> Tensor:
        if self.cache_argument is None:
            raise BlockError("the block takes no key/value cache")
        given = self.arguments.items()
        arguments = {name: value if position is None else _row_of(name, value, position) for name, value in given}
        arguments |= {self.cache_argument: cache} | ({"use_cache": True} if self.takes_use_cache else {})
        return hidden_states(self.module(X[None], **arguments))


class RecordedCall(NamedTuple):
    """A block's call as the model made it, with the residual streams `[1 n_pos d_model]` before and after."""

    call: BlockCall
    X: Tensor
    Y: Tensor
    dtypes: frozenset[torch.dtype]  # Of the stream and of the weights; Mamba's stream is in float32.


def differ_in(first: BlockCall, second: BlockCall, layers: tuple[int, int]) -> str | None:
    """Where two blocks are of different kinds, so that the mean of their weights is no block; `None` if nowhere.

    Blocks of one kind have the same modules with the same settings (window, rotary or not, scale), parameters of the
    same names and shapes, the same buffers, and are called with the same arguments (mask, positions).
    """
    blocks = first.module, second.module
    kinds = ({name: type(part) for name, part in block.named_modules()} for block in blocks)
    ours, theirs = ({n: p.shape if p.is_floating_point() else None for n, p in b.named_parameters()} for b in blocks)
    return (
        _difference("module", *kinds)
        or _other_setting(*blocks, layers)
        or _difference("parameter", ours, theirs)
        or ("parameters that are not floating-point numbers" if None in ours.values() else None)
        or _difference("buffer", *(dict(block.named_buffers()) for block in blocks))
        or _difference("argument", first.arguments, second.arguments)
    )


def _other_setting(first: nn.Module, second: nn.Module, layers: tuple[int, int]) -> str | None:
    """The first plain attribute in which two blocks of the same modules differ, except in naming their own layers."""
    others = dict(second.named_modules())
    for name, part in first.named_modules():
        both = part, others[name]
        ours, theirs = ({k: v for k, v in vars(one).items() if isinstance(v, int | float | str)} for one in both)
        for key in ours | theirs:
            if not _same_setting(a := ours.get(key), b := theirs.get(key), *layers):
                return f"{key}, {a!r} and {b!r}, of module {name!r}"
    return None


def _same_setting(a: Any, b: Any, layer_a: int, layer_b: int) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return re.sub(rf"\b{layer_a}\b", "layer", a) == re.sub(rf"\b{layer_b}\b", "layer", b)
    return bool(a == b) or (type(a) is type(b) is int and a - layer_a == b - layer_b)


def _difference(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first name under which two mappings hold different things, or one of them nothing."""
    names = (n for n in {**one, **other} if n not in one or n not in other or not _equal(one[n], other[n]))
    return next((f"{what} {name!r}" for name in names), None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _difference("", a, b) is None
    return a is b or bool(a == b)
