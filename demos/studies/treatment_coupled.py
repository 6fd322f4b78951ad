"""Does coupling promote generalization? The treatment again, where models are coupled.

    python demos/studies/treatment_coupled.py --out out/study-treatment-coupled
    python demos/studies/treatment_coupled.py --table demos/studies/results/treatment_coupled

In the first study (`treatment.py`) the loss alone left models near chance, so that there
was no coupling to lower, and what the treatment did to speed was part of what was
compared. At a quarter of the learning rate models stay coupled. Here coupling is raised
and lowered in these; each treated model has a twisted twin, of the same Jacobians and as
long gradients, and a model on the loss alone that is as slow.

`treatment_coupled.md` says what is compared, and which sentence each outcome earns; it
was reviewed and committed before the models of the part `coupled` were trained. The part
`pilot` has other seeds: from it the speed and the number of seeds were chosen. Models
that are finished are kept: a second run does what is missing. Each seed's curves are
written, and everything that is printed is made from them.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
import treatment
from loss_marks import windows_of
from tl_coupling.files import output_folder, write_atomically
from treatment_coupled_report import (
    AS_FAST,
    SEEDS,
    SPEED_OF_UP,
    draw,
    print_report,
)

PARTS = ("pilot", "coupled")
# Of the learning rate, of loss alone: from those of the pilot the speed was chosen.
SPEEDS = {"pilot": (0.8, 0.9), "coupled": (SPEED_OF_UP,)}
SLOW_ARMS = [f"{treatment.LOSS_ALONE} × {speed:g}" for speed in SPEEDS["pilot"]]
WRITTEN = ("pilot", AS_FAST, "coupled")
# No seed is in two parts, or in the first study; each has another text.
FIRST_SEEDS = {"pilot": 100, "coupled": min(SEEDS)}
OWN_OPTIONS: list[tuple[str, Any, str]] = [
    ("out", Path("out/study-treatment-coupled"), "folder for all results"),
    ("parts", list(PARTS), "of the study"),
    ("pilot-seeds", 4, "of the part `pilot`"),
    ("seeds", len(SEEDS), "of the part `coupled`"),
    ("learning-rate", 1e-3, "after the warm-up; a cosine takes it to 0"),
]
OF_OTHER_PARTS = {"other-seeds", "other-rate", "other-weight", "first-seed"}
OPTIONS = OWN_OPTIONS + [
    option
    for option in treatment.OPTIONS
    if option[0] not in OF_OTHER_PARTS | {own[0] for own in OWN_OPTIONS}
]
SMALL = {
    name: value for name, value in treatment.SMALL.items() if name != "other_seeds"
} | {"pilot_seeds": 2}


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    parser = small.parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, SMALL)


def families_of(arguments: argparse.Namespace) -> list[treatment.Family]:
    """Return all families, those of the pilot first.

    Raises:
        ValueError: an option out of range, or an unknown part.
    """
    if unknown := set(arguments.parts) - set(PARTS):
        raise ValueError(
            f"`--parts` must be of {', '.join(PARTS)}, got {sorted(unknown)}"
        )
    treatment.check_counts(arguments, ("seeds", "pilot_seeds"))
    names = ("width", "n_layers", "steps", "warmup", "weight_decay", "vocabulary")
    config = small.TrainingConfig(
        **{name: getattr(arguments, name) for name in (*names, "n_ctx", "batch")},
        n_heads=max(1, arguments.width // 16),
        learning_rate=arguments.learning_rate,
        final_rate=0.0,
    )
    n_seeds = {"pilot": arguments.pilot_seeds, "coupled": arguments.seeds}
    families = []
    for part in PARTS:
        if part not in arguments.parts:
            continue
        for i in range(n_seeds[part]):
            seeded = replace(config, seed=FIRST_SEEDS[part] + i)
            of_seed = partial(
                treatment.Family,
                part,
                "little",
                weight=arguments.weight,
                config=seeded,
            )
            families += [
                of_seed(treatment.LOSS_ALONE),
                *[of_seed(arm, placebos=("twisted",)) for arm in treatment.TREATMENTS],
                *[of_seed(treatment.LOSS_ALONE, speed=s) for s in SPEEDS[part]],
            ]
    return families


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    families = families_of(arguments)
    with output_folder(arguments.out) as out:
        design = treatment.design_of(arguments, out)
        held_out = design.corpus.held_out_tokens
        # Of the pilot, held-out windows are the same for all seeds.
        drawn = replace(
            design,
            held_out=windows_of(held_out, arguments.n_ctx, len(held_out)),
            n_held_out=arguments.held_out,
        )
        paths = []
        for part, of_part in (("pilot", design), ("coupled", drawn)):
            own = [family for family in families if family.part == part]
            if own:
                table = treatment.measured_table(own, of_part, arguments.jobs)
                paths += treatment.write_tables(table, out)
            if own and part == "pilot":
                # The slow arms set a band that is not that of the part `coupled`.
                as_fast = table[~table["arm"].isin(SLOW_ARMS)].assign(part=AS_FAST)
                paths += treatment.write_tables(as_fast, out)
        print_tables(out)
        figure = draw(*read(out))
        save = partial(figure.savefig, dpi=200, format="png")
        paths.append(write_atomically(out / "treatment_coupled.png", save))
    print(*paths, sep="\n")


def read(folder: Path) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Return the models' outcomes, and coupling and losses on the way, of all parts.

    The pilot's outcomes are taken twice: with all of its arms, and without the slow ones,
    which set another band than that of the part `coupled`.

    Raises:
        ValueError: there are none.
    """
    return (
        treatment.read_tables(folder, "models", WRITTEN),
        treatment.read_tables(folder, "curves", WRITTEN),
    )


def print_tables(folder: Path) -> None:
    """Print the report of what is in a folder."""
    seeds = treatment.read_tables(folder, "seeds", WRITTEN)
    print_report(read(folder)[0], seeds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        folder = arguments.table
        return small.status_of(lambda: print_tables(folder))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
