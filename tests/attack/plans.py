"""Two plans for one folder: runs that race for it, and jobs that the run of an earlier
plan has left.
"""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tl_coupling as tlc
from attack.child import DONE, REFUSED, Child
from attack.subject import PROMPTS, Finished, Subject, check_run, without_costs

_KILLED = -signal.SIGKILL


def racing_plans(subject: Subject, rng: random.Random, n: int) -> Iterator[list[str]]:
    """Two surveys whose units have the same names, started at nearly the same time; one
    may be killed.

    Whichever comes second is refused, then and later, and the results are those of one
    plan.
    """
    surveys = [subject.survey, _other_survey(subject)]
    wholes = [
        without_costs(tlc.run_survey(survey, progress=False)) for survey in surveys
    ]
    for _ in range(n):
        folder = subject.new_folder()
        event = f"a race for {folder.name}"
        children = []
        for survey in rng.sample(surveys, 2):
            children.append(
                Child(partial(tlc.run_survey, survey, folder, progress=False))
            )
            children[-1].wait(rng.uniform(0, 0.5) * subject.seconds)
        if rng.random() < 0.3:
            rng.choice(children).signal(signal.SIGKILL)
        faults = [
            fault
            for child in children
            for fault in child.faults(event, (DONE, REFUSED, _KILLED))
        ]
        statuses = []
        for survey, whole in zip(surveys, wholes, strict=True):
            again = Child(partial(check_run, survey, folder, whole))
            faults += again.faults(f"run again after {event}", (DONE, REFUSED))
            statuses.append(again.status)
        if not faults and sorted(statuses) != [DONE, REFUSED]:
            faults.append(f"status {statuses}: both plans run again after {event}")
        yield faults


def orphans_of_an_earlier_plan(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Jobs of a run that is gone go on, or begin, while another survey is run in its
    folder.
    """
    for _ in range(n):
        folder = subject.new_folder()
        event = f"orphans in {folder.name}"
        jobs = _jobs_left_in(folder, _other_survey(subject))
        work = partial(_work_off, rng.sample(jobs, len(jobs)))
        # Either may come first.
        is_first = rng.random() < 0.5
        orphans = Child(work) if is_first else None
        if orphans is not None:
            orphans.wait(rng.uniform(0, 0.2) * subject.seconds)
        child = subject.start(folder)
        if orphans is None:
            child.wait(rng.uniform(0, 1) * subject.seconds)
            orphans = Child(work)
        if rng.random() < 0.3:
            orphans.wait(rng.uniform(0, 1) * subject.seconds)
            orphans.signal(signal.SIGKILL)
        faults = child.faults(event, (DONE, REFUSED)) + orphans.faults(
            event, (DONE, _KILLED)
        )
        # Where the orphans finished a unit before the run began, the folder is of their
        # plan.
        if child.status == DONE:
            faults += subject.faults(folder, Finished(), event)
            faults += subject.completed(folder, event) + subject.faults(
                folder, Finished(), event
            )
        yield faults


def _other_survey(subject: Subject) -> tlc.Survey:
    """Another plan: units of the same names, of other prompts."""
    return replace(subject.survey, prompts=PROMPTS[::-1])


class _Cluster:
    """Keeps what it is given, and loses its driver."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *arguments: Any) -> "Future[Any]":
        self.jobs.append(partial(fn, *arguments))
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("the driver is gone"))
        return future


def _jobs_left_in(folder: Path, survey: tlc.Survey) -> list[Callable[[], Any]]:
    cluster = _Cluster()
    # Not one unit has been measured.
    with suppress(tlc.ModelError):
        tlc.run_survey(survey, folder, cluster, progress=False)
    return cluster.jobs


def _work_off(jobs: list[Callable[[], Any]]) -> None:
    for job in jobs:
        job()
