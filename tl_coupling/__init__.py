"""Transformer block coupling and residual-stream trajectories for TransformerLens
models.

The names that most analyses need are here; the rest is in the rooms, such as
`tlc.plots` or `tlc.generalization`. `tlc.` and tab shows twenty of them, which the API
reference begins with, and the rooms; `tlc.__all__` has all. Everything is imported when
it is first used, from where `__init__.pyi` says, which type checkers read too.

The examples of the reference are run by `make check`, on tiny random models. They share
these names, for which any model, prompts, survey and sweep will do::

    import torch
    import tl_coupling as tlc

    model = tlc.load_model("smollm2-135m")  # in the tests a Llama of 2 blocks, of width 32
    trace = tlc.trace(model, "What is the capital of France? The capital is")  # there 8 tokens
    image_trace = tlc.trace(tlc.load_model("google/vit-base-patch16-224"), "image.png")
    prompts = tlc.load_prompts("prompts.jsonl")  # there 4, of 2 tasks
    data = tlc.run_survey(tlc.Survey({"a": "models/width8/step2"}, prompts))  # there of 6 models
    sweep = tlc.checkpoint_sweep("models/width16", prompts=prompts)  # a folder of checkpoints
"""

import ast
import importlib
import sys
from difflib import get_close_matches
from pathlib import Path

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
# The module that holds each name; that of a room is this package.
_HOMES = {
    alias.name: statement.module
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
# Names of earlier versions, which warn: no list has them.
_EARLIER_HOMES = {"run": "tl_coupling.surveys"}
# What `tlc.` shows on tab beside the rooms, in the order of use; the API reference begins
# with it.
_FRONT = (
    "load_model",
    "load_prompts",
    "trace",
    "trace_modules",
    "block_jacobian",
    "depth_coupling",
    "mean_depth_coupling",
    "self_coupling",
    "prompt_coupling",
    "CouplingMap",
    "compare",
    "carriers",
    "line_shape_score",
    "plot_coupling",
    "plot_trajectories",
    "portrait",
    "write_report",
    "Survey",
    "run_survey",
    "checkpoint_sweep",
)
__all__ = [name for name, home in _HOMES.items() if home != __name__]


def __getattr__(name: str) -> object:
    home = (_HOMES | _EARLIER_HOMES).get(name)
    if home is None:
        # As Python says it of any module.
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(
            message + _similar_in_words(name), name=name, obj=sys.modules[__name__]
        )
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(home), name)


def _similar_in_words(name: str) -> str:
    """Say where a name is that is not here, or which ones are like it."""
    # Python, IPython and others look for their own marks, which are no names of ours.
    if name.startswith("_"):
        return ""
    paths: dict[str, str] = {known: f"{__name__}.{known}" for known in _HOMES}
    for room_name, home in _HOMES.items():
        if home == __name__:
            room = importlib.import_module(f"{__name__}.{room_name}")
            for known in room.__all__:
                paths.setdefault(known, f"{__name__}.{room_name}.{known}")
    if name in paths:
        return f": it is {paths[name]}"
    similar = get_close_matches(name, paths, cutoff=0.8)
    if not similar:
        return ""
    return f": similar names are {', '.join(paths[known] for known in similar)}"


def __dir__() -> list[str]:
    rooms = [name for name, home in _HOMES.items() if home == __name__]
    return sorted([*_FRONT, *rooms])
