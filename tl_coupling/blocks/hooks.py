"""What a user has put on a model, by the names that TransformerLens knows: hooks, and
modules in the place of hook points.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import nn

from tl_coupling.arguments import shared_changes
from tl_coupling.models import (
    backward_hooks_on,
    hooks_on,
    is_of_user,
    module_digest,
)

# Where a module keeps the hooks on its forward pass.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WRAPPED = "_original_component"
# How `OwnModel` calls the model that it holds.
_OWN = "original_model."
# Digits of a checksum in a text, and the text where there is none.
_DIGITS = 16
_UNKNOWN = "(weights not known)"


def hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of hook points and modules with a hook of the user's, which is
    part of what is measured.

    Hook points of a bridge have several names: the one of HookedTransformer is given.
    """
    return _named(model, _has_hook)


def backward_hooks_of_user(model: nn.Module) -> list[str]:
    """Return the names of those with a hook on gradients."""
    return _named(model, _has_backward_hook)


@contextmanager
def without_hooks_of_user(model: nn.Module) -> Iterator[None]:
    """Run a model without the hooks that `hooks_of_user` lists, in this context."""
    with shared_changes() as undo:
        for part in filter(_has_hook, model.modules()):
            kept = {name: vars(part)[name] for name in _HOOKS}
            undo.callback(vars(part).update, kept)
            of_user = {handle.hook.id for handle in _lens_hooks(part, "fwd_hooks")}
            for name, hooks in kept.items():
                vars(part)[name] = OrderedDict(
                    (key, hook)
                    for key, hook in hooks.items()
                    if key not in of_user and not is_of_user(hook)
                )
        yield


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
    """Return the path of a module as a user writes it, without wrappers."""
    parts = path.removeprefix(_OWN).split(".")
    return ".".join(part for part in parts if part != _WRAPPED)


def spliced_modules(model: nn.Module) -> dict[str, str]:
    """Return the modules that stand where hook points would (an SAE of SAELens), by the
    name of the place: their class, and a checksum of their weights, or that these are not
    known.
    """
    spliced: dict[str, str] = {}
    for path, module in model.named_modules():
        # Hook points are named so in both classes of TransformerLens.
        is_place = path.rpartition(".")[2].startswith("hook_")
        if is_place and not _is_hook_point(module):
            digest = module_digest(module)
            known = _UNKNOWN if digest is None else digest[:_DIGITS]
            spliced[path_of_user(path)] = f"{type(module).__name__} {known}"
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
    has_forward_hook = bool(_lens_hooks(module, "fwd_hooks"))
    return (
        has_forward_hook
        or any(map(is_of_user, hooks_on(module)))
        or _has_backward_hook(module)
    )


def _has_backward_hook(module: nn.Module) -> bool:
    has_hook = bool(_lens_hooks(module, "bwd_hooks"))
    return has_hook or any(map(is_of_user, backward_hooks_on(module)))


def _lens_hooks(module: nn.Module, direction: str) -> list[Any]:
    """Return the handles of the user's hooks on a hook point."""
    handles: list[Any] = getattr(module, direction, None) or []
    # Some components of a bridge have hooks of TransformerLens' own (OPT's MLP).
    return [
        handle
        for handle in handles
        if not getattr(handle, "is_permanent", False)
        or is_of_user(getattr(handle, "user_hook", None))
    ]
