"""Each model in a fresh process: its peak of memory is its own, and a crash ends that
one alone.
"""

import logging
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real.registry import RealModel


def in_own_process(model: RealModel, cache: Path) -> dict[str, Any]:
    """Return the outcome of one model, as JSON has it; the peak of memory is that of a
    fresh process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_quiet) as pool:
        try:
            return pool.submit(outcome_of, model, cache).result()
        except BrokenProcessPool:
            return _not_measured(
                model,
                "the process that measured it was killed; is there memory for it?",
            )


def outcome_of(model: RealModel, cache: Path) -> dict[str, Any]:
    """Return the outcome of one model; weights that cannot be had or loaded are one
    that is refused.
    """
    from real.measure import measure
    from real.weights import WeightsError
    from tl_coupling.models import ModelError

    try:
        return asdict(measure(model, cache, figures=cache))
    except (WeightsError, ModelError, OSError) as error:
        return _not_measured(model, " ".join(str(error).split()))


def _not_measured(model: RealModel, reason: str) -> dict[str, Any]:
    from real.measure import Outcome

    return asdict(
        Outcome(model.name, model.licence, model.source, model.sha256, refused=[reason])
    )


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
