"""What the intervals and p across models hold on synthetic studies whose truth is
known.

    python -m benchmarks.statistics            # or: make bench-statistics

Coverage: of the slope 1 of y = x + e over normal models, alone or in families: a part
of x and of e, with the intra-class correlation as its variance, is the same for all
models of a family. Of models alone e also has a variance of .2 + x² (scores at a floor
vary less), or Student's t with three degrees of freedom. Wanted of the interval that a
study gives: .93 to .97 wherever it is marked. Familywise error: scores that have
nothing to do with coupling, looked at with every k, measure, task and subset. Chance:
untrained models in the intervals of their nulls, and shares of coupling in random
vectors. Nothing here is tuned: each design is in the table, and seeds are numbers of
studies.

Exits with status 1 if what is wanted is missed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
import xarray
from rich.progress import track
from rich.table import Table

from benchmarks import chance, related_models
from benchmarks.timing import console, environment, write
from tl_coupling.statistics import (
    cluster_robust,
    percentile_interval,
    resamples,
    t_interval,
)
from tl_coupling.statistics.attenuation import attenuation
from tl_coupling.statistics.familywise import ALL_PROMPTS, familywise
from tl_coupling.studies.generalization import linear_fit
from tl_coupling.studies.generalization.associations import resampled

WILD = "wild cluster bootstrap"
WANTED = (0.93, 0.97)
MOST_FALSE = 0.06
ICC = 0.7
SLOPE = 1.0
N_PROMPTS = 5


# What errors of models are, given x and as many draws from a normal distribution.
ERRORS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "variance .2 + x²": lambda x, rng: (
        np.sqrt(0.2 + x**2) * rng.standard_normal(len(x))
    ),
    "t with 3 df": lambda x, rng: rng.standard_t(3, len(x)),
}


class Design(NamedTuple):
    """Sizes of the families of a study, whether its interval must hold, and the errors
    of `ERRORS`; normal ones without a name.
    """

    sizes: tuple[int, ...]
    is_wanted: bool = False
    errors: str = ""

    @property
    def is_of_families(self) -> bool:
        return max(self.sizes) > 1

    @property
    def families(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def __str__(self) -> str:
        n = sum(self.sizes)
        sizes = " to ".join(map(str, sorted({min(self.sizes), max(self.sizes)})))
        if not self.is_of_families:
            return f"{n} models" + (f", {self.errors}" if self.errors else "")
        return f"{n} models in {len(self.sizes)} families of {sizes}"


COVERED = (
    *(Design((1,) * n, is_wanted=n in (6, 12, 24)) for n in (4, 5, 6, 8, 12, 24)),
    *(Design((1,) * n, True, errors) for errors in ERRORS for n in (6, 12, 24)),
    *(Design((4,) * n, is_wanted=n in (3, 6)) for n in (2, 3, 6, 12)),
    Design((8, 4, 4, 3, 2, 1, 1, 1)),
)
LOOKED_AT = (Design((1,) * 12, True), Design((4,) * 3, True), Design((4,) * 6, True))
KS = (5, 10, 20, 30, 50)
MEASURES = ("coupling", "miscoupling", "captured_energy")
TASKS = ("arc", "gsm8k", "mmlu")
SUBSETS = {"best": "score > 0", "deep": "n_layers > 0"}


def related(design: Design, rng: np.random.Generator, *more: int) -> np.ndarray:
    """Draw standard normal values of models, `[n …]`, correlated within families."""
    share = ICC if design.is_of_families else 0.0
    of_families = rng.standard_normal((len(design.sizes), *more))[design.families]
    return np.sqrt(share) * of_families + np.sqrt(1 - share) * rng.standard_normal(
        (len(design.families), *more)
    )


def drawn(design: Design, seed: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return x and y of a study, and the generator for what is drawn after them."""
    rng = np.random.default_rng((seed, *design.sizes))
    x = related(design, rng)
    errors = ERRORS[design.errors](x, rng) if design.errors else related(design, rng)
    return x, SLOPE * x + errors, rng


def coverage(
    design: Design, n_studies: int, n_resampled: int, n_resamples: int
) -> dict[str, Any]:
    """Share of the studies in which the interval of each method holds the slope; the
    bootstrap's of the first ones.
    """
    families = design.families
    covered = {}
    widths = []

    def count(method: str, interval: Sequence[float]) -> None:
        covered.setdefault(method, []).append(interval[0] <= SLOPE <= interval[1])

    for seed in range(n_studies):
        x, y, rng = drawn(design, seed)
        intervals = t_intervals(x, y, families)
        for method, interval in intervals.items():
            count(method, interval)
        widths.append(np.ptp(intervals["of the study"]) / np.ptp(intervals["textbook"]))
        if seed < n_resampled:
            # Prompts that all models find as hard: they change no slope.
            bootstrap = resampled(
                x[:, None] + rng.standard_normal(N_PROMPTS),
                y,
                families,
                n_resamples=n_resamples,
                seed=seed,
            )
            count("bootstrap", bootstrap.slope)
            count("percentiles", plain_percentiles(x, y, families, n_resamples, rng))
    shares = {
        method: float(np.mean(is_covered)) for method, is_covered in covered.items()
    }
    return {
        "design": str(design),
        "is_wanted": design.is_wanted,
        "coverage": shares,
        "width": float(np.median(widths)),
    }


def t_intervals(
    x: np.ndarray, y: np.ndarray, families: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Of the slope: as a study has it, as textbooks have it (independent, of one
    variance), and within families.
    """
    columns = np.column_stack([np.ones(len(x)), x])
    intervals = {
        "textbook": textbook_interval(columns, y),
        "of the study": one_t_interval(columns, y, families),
    }
    if families.max() + 1 == len(x):
        return intervals
    several = np.bincount(families)[families] > 1
    own = np.flatnonzero(np.bincount(families) > 1)
    fixed = np.column_stack(
        [np.ones(several.sum()), x[several], families[several, None] == own[1:]]
    )
    return intervals | {
        "within families": one_t_interval(fixed, y[several], families[several])
    }


def textbook_interval(design: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    bread = np.linalg.inv(design.T @ design)
    coefficients = bread @ design.T @ y
    residuals = y - design @ coefficients
    freedom = float(len(y) - design.shape[1])
    variance = residuals @ residuals / freedom * bread[1, 1]
    return t_interval(coefficients[1], np.sqrt(variance), freedom)


def one_t_interval(
    design: np.ndarray, y: np.ndarray, families: np.ndarray
) -> tuple[float, float]:
    coefficients = np.linalg.pinv(design) @ y
    errors, freedoms = cluster_robust(design, y - design @ coefficients, families)
    return t_interval(coefficients[1], errors[1], freedoms[1])


def plain_percentiles(
    x: np.ndarray,
    y: np.ndarray,
    families: np.ndarray,
    n_resamples: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the usual bootstrap of models, whatever family they are of."""
    slopes = []
    for drawn in resamples(len(x), n_resamples, rng):
        dx = x[drawn] - x[drawn].mean(1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes.append((dx * y[drawn]).sum(1) / (dx * dx).sum(1))
    drawn_slopes = np.concatenate(slopes)
    return percentile_interval(drawn_slopes[np.isfinite(drawn_slopes)])


def others(design: Design, n_studies: int) -> dict[str, Any]:
    """Coverage of other methods on the same studies, and the median width of their
    intervals over the study's.
    """
    covered = {}
    widths = {}
    for seed in range(n_studies):
        x, y, rng = drawn(design, seed)
        low, high = one_t_interval(
            np.column_stack([np.ones(len(x)), x]), y, design.families
        )
        for method, (slope, half) in related_models.half_widths(
            x, y, design.families
        ).items():
            covered.setdefault(method, []).append(abs(slope - SLOPE) <= half)
            widths.setdefault(method, []).append(2 * half / (high - low))
        covered.setdefault(WILD, []).append(
            related_models.wild_holds(x, y, design.families, SLOPE, rng)
        )
    shares = {
        method: float(np.mean(is_covered)) for method, is_covered in covered.items()
    }
    figures = {"design": str(design), "is_wanted": False, "coverage": shares}
    return figures | {
        "width": {
            method: float(np.median(of_studies))
            for method, of_studies in widths.items()
        }
    }


def false_positives(
    design: Design, n_studies: int, n_permutations: int
) -> dict[str, Any]:
    """Share of the studies that find something where there is nothing: by one p for all
    tests, and by each its own.
    """
    smallest_p = []
    for seed in range(n_studies):
        rng = np.random.default_rng((seed, *design.sizes))
        n = len(design.families)
        # Half of the variance of coupling is the same at every k, measure and prompt.
        means = {
            measure: (("row", "prompt", "k"), unrelated(design, rng))
            for measure in MEASURES
        }
        rows = xarray.Dataset(means, {"k": list(KS)})
        scores = related(design, rng, 1 + len(TASKS)) + related(design, rng, 1)
        table = pandas.DataFrame(scores, columns=["score", *TASKS]).assign(
            n_layers=rng.standard_normal(n)
        )
        prompts = {ALL_PROMPTS: np.ones(2 * len(TASKS), bool)}
        prompts |= {
            task: np.arange(2 * len(TASKS)) // 2 == i for i, task in enumerate(TASKS)
        }
        names = {ALL_PROMPTS: "score"} | {task: task for task in TASKS}
        families = design.families if design.is_of_families else None
        look = {
            "look": (KS[-1], MEASURES[0]),
            "n_permutations": n_permutations,
            "seed": seed,
        }
        measures = {measure: measure for measure in MEASURES}
        result = familywise(
            rows, measures, table, prompts, names, SUBSETS, families, **look
        )
        at_every_k = result.table.query(
            "task == 'all prompts' and subset == 'all models' and measure == 'coupling'"
        )
        smallest_p.append(
            (
                result.smallest_p,
                result.p,
                result.table["p"].min(),
                at_every_k["p"].min(),
            )
        )
    names = (
        "max-statistic, any look",
        "max-statistic, first look",
        "own p, any look",
        "own p, any of five k",
    )
    shares = dict(
        zip(names, (np.array(smallest_p) <= 0.05).mean(0).tolist(), strict=True)
    )
    n_looks = (1 + len(TASKS)) * (1 + len(SUBSETS)) * len(MEASURES) * len(KS)
    return {
        "design": str(design),
        "is_wanted": design.is_wanted,
        "n_looks": n_looks,
        "false_positives": shares,
    }


def unrelated(design: Design, rng: np.random.Generator) -> np.ndarray:
    own = related(design, rng, 1, 1) + related(design, rng, 2 * len(TASKS), 1)
    return own + related(design, rng, 1, len(KS))


def attenuations(n_studies: int) -> Iterator[dict[str, Any]]:
    """Slopes, raw and corrected, by the share of noise in the models' means; of those
    that are corrected, the share, and how often their interval holds the slope.
    """
    for reliability in (0.9, 0.8, 0.7, 0.5):
        slopes = []
        covered = []
        for seed in range(n_studies):
            rng = np.random.default_rng(seed)
            truth = rng.standard_normal(36)
            noise = np.sqrt(
                (1 - reliability) / reliability * N_PROMPTS
            ) * rng.standard_normal((36, N_PROMPTS))
            x = truth[:, None] + noise
            y = SLOPE * truth + 0.3 * rng.standard_normal(36)
            line = linear_fit(pandas.DataFrame({"x": x.mean(1), "y": y}), "x", "y")
            noise_of_prompts = attenuation(x, y, line, seed=seed)
            slopes.append(
                (noise_of_prompts.reliability, line.slope, noise_of_prompts.slope)
            )
            low, high = noise_of_prompts.slope_interval
            if np.isfinite(low):
                covered.append(low <= SLOPE <= high)
        estimated, raw, corrected = np.nanmedian(slopes, 0).tolist()
        yield {
            "reliability": reliability,
            "said": estimated,
            "raw": raw,
            "corrected": corrected,
            "share_corrected": len(covered) / n_studies,
            "coverage": float(np.mean(covered)),
        }


def tables(results: dict[str, Any]) -> list[Table]:
    """Coverage, familywise error and attenuation."""
    low, high = WANTED
    covered = _table(
        f"coverage of the 95 % interval of the slope, intra-class correlation {ICC}",
        results["coverage"],
        "coverage",
        (
            "of the study",
            "bootstrap",
            "textbook",
            "percentiles",
            "within families",
        ),
        f"of the study: t, HC2 or cluster-robust; * wanted {low} "
        f"to {high}; width over the textbook's, which takes models to be independent "
        f"and of one variance · bootstrap: of families if any, "
        f"expanded percentiles; given from six models or families on "
        f"· {results['n_studies']} studies, bootstraps of "
        f"the first {results['n_resampled']}",
    )
    false = _table(
        f"false positives at .05 among {results['familywise'][0]['n_looks']} tests",
        results["familywise"],
        "false_positives",
        list(results["familywise"][0]["false_positives"]),
        (
            f"* wanted at most {MOST_FALSE} · {results['n_looked_at']} "
            f"studies, {results['n_permutations']} permutations"
        ),
    )
    corrected = Table(
        title=f"medians of 36 models on {N_PROMPTS} prompts, slope 1",
    )
    columns = {
        "reliability": "true reliability",
        "said": "reliability said",
        "raw": "raw slope",
        "corrected": "corrected slope",
        "share_corrected": "share corrected",
        "coverage": "coverage",
    }
    # Older results lack the last two.
    names = [name for name in columns if name in results["attenuation"][0]]
    for name in names:
        corrected.add_column(
            columns[name], justify="left" if name == "reliability" else "right"
        )
    for row in results["attenuation"]:
        corrected.add_row(*(f"{row[name]:.2f}" for name in names))
    other_methods = Table(
        "",
        title="other methods for families: coverage, and width over that of the study's interval",
    )
    rows = results["others"]
    for row in rows:
        other_methods.add_column(row["design"], justify="right")
    for method in max((row["coverage"] for row in rows), key=len):
        cells = (row["coverage"].get(method) for row in rows)
        widths = (
            f" × {row['width'][method]:.2f}" if method in row["width"] else ""
            for row in rows
        )
        pairs = zip(cells, widths, strict=True)
        other_methods.add_row(
            method,
            *("" if share is None else f"{share:.3f}{width}" for share, width in pairs),
        )
    shown = [covered, other_methods, false, corrected]
    # Older results lack both.
    if "untrained" in results:
        shown += _tables_of_chance(results)
    return shown


def _tables_of_chance(results: dict[str, Any]) -> list[Table]:
    untrained = Table(
        "",
        title="mean coupling of untrained models within `null_interval`",
        caption=f"wanted at least {chance.LEAST} · {results['n_untrained']} models",
    )
    cases = list(results["untrained"][0]["coverage"])
    for case in cases:
        untrained.add_column(case, justify="right")
    untrained.add_column("error of the middle, in widths", justify="right")
    for row in results["untrained"]:
        cells = [f"{row['coverage'][case]:.3f}" for case in cases]
        untrained.add_row(row["design"], *cells, f"{row['error_of_middle']:.3f}")
    carried = Table(
        "",
        "coverage",
        "of one seed and component, at least",
        title="mean excess in random vectors within `Carriers.null_interval`",
        caption=f"wanted at least {chance.LEAST_CARRIED}",
    )
    for row in results["carried"]:
        carried.add_row(row["design"], f"{row['coverage']:.3f}", f"{row['least']:.3f}")
    return [untrained, carried]


def _table(
    title: str,
    rows: list[dict[str, Any]],
    key: str,
    columns: Sequence[str],
    caption: str,
) -> Table:
    table = Table("", title=title, caption=caption)
    for name in columns:
        table.add_column(name, justify="right")
    if "width" in rows[0]:
        table.add_column("width", justify="right")
    for row in rows:
        mark = " *" if row["is_wanted"] else ""
        cells = [
            f"{row[key][name]:.3f}" if name in row[key] else "" for name in columns
        ]
        if "width" in row:
            cells.append(f"× {row['width']:.2f}")
        table.add_row(row["design"], cells[0] + mark, *cells[1:])
    return table


def missed(results: dict[str, Any]) -> list[str]:
    """Return what is wanted and was not found."""
    low, high = WANTED
    coverages = (
        (row["design"], row["coverage"]["of the study"])
        for row in results["coverage"]
        if row["is_wanted"]
    )
    lines = [
        f"{name}: coverage {share:.3f}, wanted {low} to {high}"
        for name, share in coverages
        if not low <= share <= high
    ]
    name = "max-statistic, any look"
    false = (
        (row["design"], row["false_positives"][name])
        for row in results["familywise"]
        if row["is_wanted"]
    )
    lines += [
        f"{of}: {share:.3f} false positives, at most {MOST_FALSE}"
        for of, share in false
        if share > MOST_FALSE
    ]
    lines += [
        f"{row['design']}, {case}: coverage {share:.3f}, at least {chance.LEAST}"
        for row in results.get("untrained", [])
        for case, share in row["coverage"].items()
        if share < chance.LEAST
    ]
    return lines + [
        f"carriers, {row['design']}: coverage {row['coverage']:.3f}, "
        f"at least {chance.LEAST_CARRIED}"
        for row in results.get("carried", [])
        if row["coverage"] < chance.LEAST_CARRIED
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--studies", type=int, default=4000, help="of each design, for t intervals"
    )
    parser.add_argument(
        "--resampled", type=int, default=500, help="of these, how many are resampled"
    )
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument(
        "--looked-at",
        type=int,
        default=2000,
        help="studies of each design, for familywise error",
    )
    parser.add_argument("--permutations", type=int, default=99)
    parser.add_argument(
        "--untrained",
        type=int,
        default=20,
        help="untrained models of each kind and depth; 0 leaves chance out",
    )
    parser.add_argument("--out", type=Path, help="folder for statistics.json")
    options = parser.parse_args(arguments)
    shown = console()
    results: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "n_studies": options.studies,
        "n_resampled": options.resampled,
        "n_looked_at": options.looked_at,
        "n_permutations": options.permutations,
        "coverage": [
            coverage(design, options.studies, options.resampled, options.resamples)
            for design in track(COVERED, "coverage", console=shown)
        ],
        "others": [
            others(design, max(1, options.studies // 2))
            for design in track(
                [study for study in COVERED if study.is_of_families],
                "other methods",
                console=shown,
            )
        ],
        "familywise": [
            false_positives(design, options.looked_at, options.permutations)
            for design in track(LOOKED_AT, "familywise", console=shown)
        ],
        "attenuation": list(attenuations(max(1, options.resampled // 5))),
    }
    if options.untrained:
        results |= {
            "n_untrained": options.untrained,
            "untrained": list(chance.null_coverage(options.untrained)),
            "carried": list(chance.carried_coverage(n_seeds=5, n_means=1000)),
        }
    shown.print(*tables(results))
    if options.out:
        shown.print(f"wrote {write(options.out, 'statistics', results)}")
    shown.print(*missed(results), sep="\n")
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
