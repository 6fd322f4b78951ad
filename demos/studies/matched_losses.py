"""Models trained here and measured where their losses are alike: what two studies
share.

Coupling surges early and falls again, at losses that hardly depend on the model. At one
step, or at the end, models are at different places on that curve; at one loss they are
not.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import xarray
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import small_models as small
import tl_coupling as tlc
from loss_marks import LossMarks
from tl_coupling.files import file_name, write_atomically
from tl_coupling.measures import MeasureName

UNTRAINED = "untrained"
END = "end"
# Both are 1 for blocks that share their singular vectors, so that both can be counted
# from chance.
MEASURES: tuple[MeasureName, ...] = ("coupling", "captured_energy")


@dataclass(frozen=True)
class Run:
    """One model: how it is trained, on what, where it is measured, and what else its
    rows say of it.
    """

    config: small.TrainingConfig
    corpus: small.Corpus
    marks: LossMarks
    known: Mapping[str, float | str]

    @property
    def cost(self) -> float:
        """Grows with the time that training takes."""
        return self.config.steps * self.config.n_layers * self.config.width**1.5


@dataclass(frozen=True)
class Study:
    """What all runs share.

    Attributes:
        marks: names of the runs' losses to be reached, in order.
        sizes: numbers of singular vectors by name, as they are or (below 1) as a share
            of the width.
        prompts, out: held-out passages, measured at their last token; the folder.
    """

    marks: tuple[str, ...]
    sizes: Mapping[str, float]
    prompts: tuple[str, ...]
    out: Path

    def k_of(self, width: int) -> dict[str, int]:
        """Return the number of singular vectors of each size for models of that width."""
        return {
            name: round(size if size >= 1 else size * width)
            for name, size in self.sizes.items()
        }


def sizes_of(
    ks: Sequence[int], shares: Sequence[float], widths: Sequence[int]
) -> dict[str, float]:
    """Sizes by name: "K = 8", "K = d/8".

    Raises:
        ValueError: one that is below 2 or above a width.
    """
    sizes = {f"K = {k}": float(k) for k in ks} | {
        f"K = d/{1 / share:g}": share for share in shares
    }
    for name, size in sizes.items():
        for width in (min(widths), max(widths)):
            if not 2 <= (k := round(size if size >= 1 else size * width)) <= width:
                raise ValueError(
                    f"`--k` and `--share` must give 2 to {width} vectors at "
                    f"width {width}; {name} gives {k}"
                )
    return sizes


def all_runs(runs: Sequence[Run], study: Study, jobs: int) -> list[xarray.Dataset]:
    """All that is measured, in the order of the runs; `jobs` at a time, the longest
    first.
    """
    order = sorted(range(len(runs)), key=lambda i: -runs[i].cost)
    by_place = {}
    # The bar ends before an error is printed.
    with (
        small.parallel_map(jobs) as mapped,
        tqdm(desc="models", total=len(runs)) as bar,
    ):
        for i, measured in zip(
            order,
            mapped(partial(one_run, study=study), [runs[i] for i in order]),
            strict=True,
        ):
            by_place[i] = measured
            bar.update()
    return [by_place[i] for i in range(len(runs))]


def one_run(run: Run, study: Study) -> xarray.Dataset:
    """Train and measure one model, on one thread, or load it if that was done before.

    Variables: `value`, `[mark prompt size measure]`; `null`, what random subspaces
    would give, `[mark size measure]`; by `mark` its `step` and every loss of the run's
    marks, as `loss_…`. At a mark they lie between those of the two checkpoints around
    it, linearly in the loss that is marked. NaN where a mark was never reached.
    """
    torch.set_num_threads(1)
    # Again, because this may be a process of its own.
    disable_progress_bar()
    config = run.config
    shared = study.marks, dict(study.sizes), study.prompts, MEASURES, tlc.__version__
    digest = small.digest_of(
        asdict(config), run.corpus.digest, run.marks.digest, *shared
    )
    name = f"width{config.width}-layers{config.n_layers}-seed{config.seed}"
    return small.kept(
        study.out / "measured" / f"{file_name(name)}-{digest}.nc",
        partial(train_and_measure, run, study),
    )


def train_and_measure(run: Run, study: Study) -> xarray.Dataset:
    """Return the same, always computed."""
    folder = small.train(
        run.config, run.corpus, study.out / "models", checkpoints=run.marks
    )
    training = json.loads((folder / "training.json").read_text())
    evaluated = {int(step): losses for step, losses in training["evaluated"].items()}
    last = max(evaluated)
    around = {UNTRAINED: (0, 0)}
    around |= {
        name: steps
        for name, (_, steps) in zip(study.marks, training["reached"], strict=True)
    }
    around |= {END: (last, last)}
    k_of = study.k_of(run.config.width)
    measured = {
        step: measure(folder / f"step{step}", study.prompts, k_of).assign(
            step=float(step), **{f"loss_{name}": x for name, x in losses.items()}
        )
        for step, losses in evaluated.items()
        if any(step in steps for steps in around.values() if steps is not None)
    }
    unknown = xarray.full_like(measured[0], np.nan)
    rows = [
        (
            unknown
            if steps is None
            else between(
                *[measured[step] for step in steps],
                f"loss_{run.marks.of}",
                dict(zip(study.marks, run.marks.values, strict=True)).get(mark),
            )
        ).assign_coords(mark=mark)
        for mark, steps in around.items()
    ]
    known = {"run": folder.name, "n_parameters": parameters_of(run.config), **run.known}
    known |= {name: getattr(run.config, name) for name in ("width", "n_layers", "seed")}
    return (
        xarray.concat(rows, "mark")
        .assign_coords(k=("size", list(k_of.values())))
        .assign_coords(known)
    )


def between(
    before: xarray.Dataset, after: xarray.Dataset, loss: str, value: float | None
) -> xarray.Dataset:
    """Return what two checkpoints have where a loss is a value between theirs, linearly
    in the loss; what the later one has where there is none, or they are the same.
    """
    fall = float(before[loss] - after[loss])
    if value is None or fall <= 0:
        return after
    share = (float(before[loss]) - value) / fall
    return before + (after - before) * share


def parameters_of(config: small.TrainingConfig) -> int:
    """Of the blocks, without embeddings: what capacity is counted in."""
    return sum(p.numel() for p in small.new_model(config).gpt_neox.layers.parameters())


def measure(
    checkpoint: Path, prompts: Sequence[str], k_of: Mapping[str, int]
) -> xarray.Dataset:
    """Every measure at every size, mean over pairs of different layers, at the last
    token of each prompt.
    """
    model = tlc.load_model(str(checkpoint), device="cpu")
    maps = [
        tlc.depth_coupling(tlc.trace(model, prompt), k=max(k_of.values()))
        for prompt in prompts
    ]
    values = [
        [[coupling_map.mean(k, measure=m) for m in MEASURES] for k in k_of.values()]
        for coupling_map in maps
    ]
    nulls = [
        [np.mean([coupling_map.null(k, m) for coupling_map in maps]) for m in MEASURES]
        for k in k_of.values()
    ]
    dims = ("size", "measure")
    coordinates = {"size": list(k_of), "measure": list(MEASURES)}
    return xarray.Dataset(
        {"value": (("prompt", *dims), values), "null": (dims, nulls)}, coordinates
    )


def table_of(measurements: Sequence[xarray.Dataset]) -> pandas.DataFrame:
    """One row per model, mark, size and measure: mean over prompts, and all that is
    known.

    `above_chance` is `(value − null) / (1 − null)`: 0 for random subspaces, 1 where all
    blocks share singular vectors, so that values with different nulls can be compared.
    """
    rows = [
        of_run.mean("prompt").to_dataframe().reset_index() for of_run in measurements
    ]
    table = pandas.concat(rows, ignore_index=True)
    return table.assign(
        above_chance=(table["value"] - table["null"]) / (1 - table["null"])
    )


def spread_out(
    rows: pandas.DataFrame,
    kinds: Sequence[str],
    marks: Sequence[str],
    text_of: Callable[[pandas.Series], str],
) -> str:
    """As text: a line for each kind of model, a column for each mark; how many of a
    kind `reached` it, if few.
    """
    n_seeds = rows["reached"].max()
    lines = []
    for kind, of_marks in rows.groupby(kinds, sort=False):
        line = dict(zip(kinds, kind, strict=True))
        for _, row in of_marks.iterrows():
            few = (
                ""
                if row["reached"] == n_seeds
                else f" ({row['reached']:.0f} of {n_seeds:.0f})"
            )
            line[row["mark"]] = text_of(row) + few if row["reached"] else "not reached"
        lines.append(line)
    return pandas.DataFrame(lines)[[*kinds, *marks]].to_string(
        index=False, float_format="{:.3g}".format
    )


def write(
    out: Path,
    measurements: Sequence[xarray.Dataset],
    tables: Mapping[str, pandas.DataFrame],
    **attrs: Any,
) -> list[Path]:
    """`study.nc`, everything along `run`, and the tables as CSV."""
    data = xarray.concat(
        measurements, "run", data_vars="all", coords="all"
    ).assign_attrs(
        versions=json.dumps(
            {"tl_coupling": tlc.__version__, "torch": torch.__version__}
        ),
        **attrs,
    )
    paths = [
        write_atomically(out / "study.nc", partial(data.to_netcdf, engine="netcdf4"))
    ]
    return paths + [
        write_atomically(out / f"{name}.csv", partial(table.to_csv, index=False))
        for name, table in tables.items()
    ]
