"""Transformer block coupling and residual-stream trajectories for TransformerLens models.

The names that most analyses need are here; the rest is in the rooms, such as `tlc.plots` or `tlc.generalization`.
Everything is imported when it is first used, from where `__init__.pyi` says, which type checkers read too.
"""

import ast
import importlib
from pathlib import Path

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {one.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for one in node.names}
__all__ = [name for name, home in _HOMES.items() if home != __name__]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
