"""What a user has put on a model, by the names that TransformerLens knows: hooks, and
modules in the place of hook points.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from tl_coupling.models import weights_digest

# Hooks of these packages are how a model computes, and no intervention of the user's.
_PACKAGES_OF_MODELS = ("transformer_lens", "transformers", "accelerate", "torch")
_WRAPPED = "_original_component"
# Of a checksum, in words.
_DIGITS = 16


def hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of hook points and modules with a hook of the user's, which is
    part of what is measured.

    Hook points of a bridge have several names: the one of HookedTransformer is given.
    """
    return _named(model, _has_hook)


def backward_hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of those with a hook on gradients."""
    return _named(model, _has_backward_hook)


def names_of_hook_points(model: nn.Module) -> dict[int, str]:
    """Return the names of a bridge's hook points, by id: HookedTransformer's, for those
    that have one beside the bridge's own.
    """
    names: dict[int, str] = {}
    for part in model.modules():
        aliases: Mapping[str, str | list[str]] = getattr(part, "hook_aliases", {})
        for alias, target in aliases.items():
            for path in [target] if isinstance(target, str) else target:
                point = _attribute_at(part, path)
                name = getattr(point, "name", None)
                if name is not None:
                    names[id(point)] = name.removesuffix(path) + alias
                    break
    return names


def _attribute_at(part: nn.Module, path: str) -> object:
    """Return what a component has there; bridges of other kinds refuse, each with an
    error of its own.
    """
    try:
        return attrgetter(path)(part)
    except Exception:
        return None


def path_of_user(path: str) -> str:
    """Return the path of a module as a user writes it, without a bridge's wrappers."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)


def spliced_modules(model: nn.Module) -> dict[str, str]:
    """Return the modules that stand where hook points would (an SAE of SAELens), by the
    name of the place: their class, and a checksum of their weights.
    """
    spliced: dict[str, str] = {}
    for path, module in model.named_modules():
        # Hook points are named so in both classes of TransformerLens.
        is_place = path.rpartition(".")[2].startswith("hook_")
        if is_place and not _is_hook_point(module):
            digest = weights_digest(module) or ""
            name = f"{type(module).__name__} {digest[:_DIGITS]}"
            spliced[path_of_user(path)] = name.strip()
    return spliced


def _is_hook_point(module: nn.Module) -> bool:
    return hasattr(module, "fwd_hooks")


def _named(model: nn.Module, is_meant: Callable[[nn.Module], bool]) -> list[str]:
    found = [(path, part) for path, part in model.named_modules() if is_meant(part)]
    # Names of all points take longer than to find that none has a hook.
    names = names_of_hook_points(model) if found else {}
    return [
        names.get(id(part))
        or _name_of_hook_point(part)
        or path_of_user(path)
        or type(part).__name__
        for path, part in found
    ]


def _name_of_hook_point(module: Any) -> str | None:
    return module.name if _is_hook_point(module) else None


def _has_hook(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    has_forward_hook = getattr(module, "fwd_hooks", None) or any(map(_is_users, hooks))
    return bool(has_forward_hook) or _has_backward_hook(module)


def _has_backward_hook(module: nn.Module) -> bool:
    hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    return bool(getattr(module, "bwd_hooks", None)) or any(map(_is_users, hooks))


def _is_users(hook: Callable[..., object]) -> bool:
    function = getattr(hook, "func", hook)  # Of a `functools.partial`.
    package = str(getattr(function, "__module__", "")).split(".")[0]
    return package not in _PACKAGES_OF_MODELS
