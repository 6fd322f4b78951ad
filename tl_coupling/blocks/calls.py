"""One block as the model called it: its module, its captured arguments, and a cache that stands in for the context."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.attention import BlockError, ProductRule
from tl_coupling.blocks.evaluation import own_arithmetic

# The names under which HuggingFace and TransformerLens blocks take a key/value cache, newest first.
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "past_kv_cache_entry")


class _KeysAndValues(Exception):
    """What a recording cache raises, with keys and values: the rest of the block need not run."""


class _UnknownToCache(BlockError, AttributeError):
    """A block asks its cache for more than keys and values; an AttributeError too, so that `hasattr` works on it."""


class _ReadOnlyCache:
    """A key/value cache that never changes, with HuggingFace's interface (`update`) and TransformerLens' (`append`).

    It puts the context in front of the new keys and values, along the position axis `dim`; without a context it raises
    the new ones as `_KeysAndValues`. With a product rule, all keys and values that the block gets are constants, and
    the rule adds the derivative of the row that moves.
    """

    is_compileable = False
    frozen = True

    def __init__(self, context: tuple[Tensor, ...] | None, dim: int, rule: ProductRule | None = None) -> None:
        self.context, self.dim, self.rule, self.uses = context, dim, rule, 0

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.uses += 1
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


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A captured argument with its floating-point tensors changed, also those inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        changed = [with_tensors(v, change) for v in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        return {k: with_tensors(v, change) for k, v in value.items()}
    return value


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
    if name in ("alibi", "position_bias"):
        return value[..., keys]
    return value


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A block and every argument that the model gave it, except the residual stream and the cache.

    `position_dim` is the position axis of its keys and values.
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    cache_argument: str | None
    takes_use_cache: bool
    position_dim: int

    @classmethod
    def captured(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple["BlockCall", Tensor]:
        """The call that a forward pre-hook saw, and the residual stream `[1 n_pos d_model]` in it."""
        original = getattr(module, "original_component", None)
        parameters = inspect.signature((module if original is None else original).forward).parameters
        arguments = dict(zip(parameters, args, strict=False)) | dict(kwargs)
        residual = arguments.pop(next(iter(parameters)))
        arguments |= dict.fromkeys(arguments.keys() & set(_CACHE_ARGUMENTS))
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = (name for name in _CACHE_ARGUMENTS if name in arguments or name in parameters)
        return cls(
            module=module,
            arguments=arguments,
            cache_argument=next(named, _CACHE_ARGUMENTS[0] if takes_any else None),
            takes_use_cache="use_cache" in parameters or "use_cache" in arguments,
            # HookedTransformer keeps keys as [batch pos head d_head], HuggingFace as [batch head pos d_head].
            position_dim=1 if original is None else -2,
        ), residual

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> "BlockCall":
        """The same call with every floating-point tensor in its arguments, given by the argument's name, changed."""
        arguments = {name: with_tensors(value, partial(change, name)) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments)

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
        """The block's output at `position`, from the row there and the keys and values of the rows before it.

        With a product rule, keys and values are constants except for the row that it is about.
        """
        cache = _ReadOnlyCache(context, self.position_dim, rule)
        with rule or nullcontext():
            output = self._with_cache(cache, x[None], position)
        if cache.uses != 1:
            raise BlockError(f"the block used its key/value cache {cache.uses} times")
        # Not [0, 0]: the derivative of a selection is a matrix of zeros with one row filled in, for every seed.
        return output.reshape(-1)

    def _with_cache(self, cache: _ReadOnlyCache, X: Float[Tensor, "n_rows d_model"], position: int | None) -> Tensor:
        if self.cache_argument is None:
            raise BlockError("the block takes no key/value cache")
        arguments = dict(self.arguments)
        if position is not None:
            arguments = {name: _row_of(name, value, position) for name, value in arguments.items()}
        arguments |= {self.cache_argument: cache} | ({"use_cache": True} if self.takes_use_cache else {})
        return hidden_states(self.module(X[None], **arguments))


class RecordedCall(NamedTuple):
    """A block's call as the model made it, with the residual streams `[1 n_pos d_model]` before and after.

    `dtypes` are those of the stream and of the weights, which may differ (Mamba's stream is in float32).
    """

    call: BlockCall
    X: Tensor
    Y: Tensor
    dtypes: frozenset[torch.dtype]

    def again(self) -> Float[Tensor, "n_pos d_model"]:
        """The block's output in the same precision, computed once more."""
        with own_arithmetic(self.call.module):
            return self.call(self.X[0])
