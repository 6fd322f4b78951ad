"""`python -m attack`: kill, interrupt, starve and damage surveys, call functions beside
each other, and say what came of it.
"""

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from same_bits import round_alike

# Read when torch is imported: values are compared bit for bit.
round_alike()
# Read when transformers is imported: nothing is looked up on the hub.
_HUB = tempfile.TemporaryDirectory(prefix="tl_coupling_attack_")
os.environ |= {
    "HF_HOME": _HUB.name,
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
}
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

FAULTS = ("wrong value", "recomputed or lost", "hang", "traceback", "left behind")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attack",
        description=__doc__,
        epilog="exit status 1: something was found",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of all that is random but the machine's own timing",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of the usual number of attacks, at least one of each",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="only attacks whose name contains one of these",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep counts and findings as JSON"
    )
    options = parser.parse_args()
    # A process that a script starts in its background ignores Ctrl-C: no interrupt would
    # ever hit.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    import torch
    from tqdm import tqdm
    from transformers.utils.logging import disable_progress_bar

    # Processes are forked: no threads.
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0
    disable_progress_bar()
    from attack.calls import changed_arguments, threads
    from attack.changes import (
        changes_under_resident_models,
        changes_under_streamed_models,
    )
    from attack.damage import damaged_folders
    from attack.disks import full_disks
    from attack.hostile import hostile_inputs
    from attack.interrupts import (
        interrupts_of_commands,
        interrupts_of_measurements,
        interrupts_of_runs,
    )
    from attack.kills import kills, kills_of_workers
    from attack.plans import orphans_of_an_earlier_plan, racing_plans
    from attack.saved_files import damaged_results
    from attack.subject import Subject

    attacks: dict[str, tuple[Callable[..., Iterator[list[str]]], int]] = {
        "kills of runs": (kills, 140),
        "kills of workers": (kills_of_workers, 10),
        "interrupts of measurements": (interrupts_of_measurements, 400),
        "interrupts of runs": (interrupts_of_runs, 90),
        "interrupts of commands": (interrupts_of_commands, 10),
        "damaged folders": (damaged_folders, 60),
        "racing plans": (racing_plans, 20),
        "orphans of an earlier plan": (orphans_of_an_earlier_plan, 20),
        "changes under streamed models": (changes_under_streamed_models, 20),
        "changes under resident models": (changes_under_resident_models, 20),
        "full disks": (full_disks, 40),
        "hostile inputs": (hostile_inputs, 100),
        "changed arguments": (changed_arguments, 110),
        "threads": (threads, 60),
        "damaged saved files": (damaged_results, 180),
    }
    rows, findings = {}, []
    with tempfile.TemporaryDirectory(prefix="tl_coupling_attack_") as root:
        subject = Subject(Path(root))
        for name, (attack, usual) in attacks.items():
            if options.only and not any(part in name for part in options.only):
                continue
            n, start = max(1, round(usual * options.share)), time.perf_counter()
            rng = random.Random(f"{options.seed} {name}")
            faults = [
                fault
                for trial in tqdm(attack(subject, rng, n), name, n, disable=None)
                for fault in trial
            ]
            counts = {
                fault: sum(one.startswith(fault) for one in faults) for fault in FAULTS
            }
            counts["other"] = len(faults) - sum(counts.values())
            rows[name] = {
                "attacks": n,
                **counts,
                "seconds": round(time.perf_counter() - start),
            }
            # At once: a run of all takes a quarter of an hour.
            print(
                "\n".join([f"{name}: {n} attacks, {len(faults)} findings", *faults]),
                flush=True,
            )
            findings += faults
    print(table(rows))
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(
            json.dumps(
                {"seed": options.seed, "attacks": rows, "findings": findings}, indent=1
            )
        )
    return int(bool(findings))


def table(rows: dict[str, dict[str, int]]) -> str:
    """Return a line for every attack, with how often each fault was found."""
    heads = list(next(iter(rows.values())))
    lines = [
        ["", *heads],
        *([name, *(str(row[head]) for head in heads)] for name, row in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *other_widths = widths
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, other_widths)])
        for name, *cells in lines
    )


if __name__ == "__main__":
    sys.exit(main())
