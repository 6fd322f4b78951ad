"""Do rotated blocks cost less where their coupling is kept?

    python demos/studies/rotation.py --out out/rotation
    python demos/studies/rotation.py --out out/rotation --table  # only prints

What blocks 2 to 27 of SmolLM2-135M-Instruct write, read, or both is rotated by 10 to 90
degrees, on 8 paragraphs of Python's documentation: all blocks *together* by one
rotation, which keeps coupling, or *apart*, each by its own, which destroys it; *shrunk*
is the control that loses as much and adds nothing. Then each block is rotated alone, by
90 degrees, beside its coupling to the others. `rotation.md` says what each outcome
means; it was committed before this was run.

Rotations of one kind move the stream further where steps of blocks add up: the share
`‖Σ f‖² / Σ ‖f‖²` of the steps is printed, which is 1 where they are orthogonal.

Results are a file for each part; what is there is not run again. Those that the
findings cite are in `demos/studies/results/rotation`. Five minutes of one core;
`SMALL=1`: seconds, of two texts and blocks.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas
from scipy import stats
from torch import nn
from tqdm import tqdm

import tl_coupling as tlc
from paths import distinct_texts, interval
from shared_directions import keep

IS_SMALL = bool(os.environ.get("SMALL"))
N_TEXTS = 2 if IS_SMALL else 8
N_TEXTS_ALONE = 1 if IS_SMALL else 3
N_DRAWS = 2 if IS_SMALL else 3
N_DRAWS_ALONE = 1 if IS_SMALL else 2
ANGLES = (45.0,) if IS_SMALL else (10.0, 20.0, 45.0, 90.0)
LAYERS = slice(2, 4) if IS_SMALL else slice(2, -2)
LAYERS_ALONE = slice(0, 3) if IS_SMALL else slice(None)
RotatedSide = Literal["write", "read", "both"]
SIDES: tuple[RotatedSide, ...] = ("write", "read", "both")
K = 10
Row = dict[str, float | str]


def together_and_apart(side: RotatedSide, model: nn.Module) -> Iterator[Row]:
    """Yield the effect on each text of each rotation of the middle blocks."""
    texts = distinct_texts(N_TEXTS)
    layers = range(model.cfg.n_layers)[LAYERS]
    for angle in tqdm(ANGLES, desc=side):
        result = tlc.directions.rotate(
            model,
            texts,
            layers,
            side,
            angle=angle,
            first_position=1,
            n_draws=N_DRAWS,
        )
        for kind in dict.fromkeys(result.kinds):
            for text, change in enumerate(result.of(kind)):
                yield {
                    "side": side,
                    "angle": angle,
                    "kind": kind,
                    "text": text,
                    "loss": float(result.loss[text]),
                    "loss_change": change,
                }


def alone(model: nn.Module) -> Iterator[Row]:
    """Yield the cost of each block's rotation, means over texts, and its coupling."""
    texts = distinct_texts(N_TEXTS_ALONE)
    traces = [tlc.trace(model, text) for text in texts]
    maps = [tlc.depth_coupling(traced, K, progress=False) for traced in traces]
    for layer in tqdm(range(model.cfg.n_layers)[LAYERS_ALONE], desc="alone"):
        result = tlc.directions.rotate(
            model, texts, [layer], first_position=1, n_draws=N_DRAWS_ALONE
        )
        profiles = [float(coupling.profile(layer).nanmean()) for coupling in maps]
        yield {
            "layer": layer,
            "alone": result.of("alone").mean(),
            "shrunk": result.of("shrunk").mean(),
            "coupling": float(np.mean(profiles)),
        }


def steps(model: nn.Module) -> Iterator[Row]:
    """Yield how far the steps of the middle blocks add up, a row for each text."""
    for i, text in enumerate(distinct_texts(N_TEXTS)):
        stream = tlc.trace(model, text).residual[:, 1:].double()
        f = stream.diff(dim=0)[LAYERS]
        total = f.sum(0).square().sum(-1) / f.square().sum(-1).sum(0)
        yield {"text": i, "addition": float(total.mean())}


PARTS: dict[str, Callable[[nn.Module], Iterator[Row]]] = {
    "steps": steps,
    **{side: partial(together_and_apart, side) for side in SIDES},
    "alone": alone,
}


def table_of_blocks(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return means over texts with intervals, and that of together less apart."""
    wide = rows.pivot_table(
        index=["side", "angle", "text"], columns="kind", values="loss_change"
    )
    wide["together − apart"] = wide["together"] - wide["apart"]
    columns = ["together", "apart", "shrunk", "together − apart"]
    table = wide[columns].groupby(["side", "angle"], sort=False).agg(interval)
    return table.reindex([side for side in SIDES if side in set(rows["side"])], level=0)


def rank_correlations(rows: pandas.DataFrame) -> dict[str, float]:
    """Return Spearman's ρ over blocks of the cost alone, plain and given the distance
    from the middle.
    """
    middle = (rows["layer"].min() + rows["layer"].max()) / 2
    ranks = rows.assign(
        distance=(rows["layer"] - middle).abs(), added=rows["alone"] - rows["shrunk"]
    ).rank()

    def given_distance(first: str, second: str) -> float:
        rest = [
            stats.linregress(ranks["distance"], ranks[name]) for name in (first, second)
        ]
        residuals = [
            ranks[name] - fit.slope * ranks["distance"]
            for name, fit in zip((first, second), rest, strict=True)
        ]
        return float(np.corrcoef(*residuals)[0, 1])

    found = {}
    for first, second in (
        ("alone", "coupling"),
        ("shrunk", "coupling"),
        ("added", "coupling"),
        ("alone", "shrunk"),
    ):
        name = f"{first} with {second}"
        found[name] = float(ranks[first].corr(ranks[second]))
        found[f"{name}, given the distance"] = given_distance(first, second)
    return found


def show(folder: Path) -> None:
    """Print what is there."""
    parts = {
        name: pandas.read_csv(path)
        for name in PARTS
        if (path := folder / f"{name}.csv").exists()
    }
    if "steps" in parts:
        print(f"steps add up: {interval(parts['steps']['addition'])}, 1 if orthogonal")
    sides = [parts[side] for side in SIDES if side in parts]
    if sides:
        rows = pandas.concat(sides)
        loss = rows.drop_duplicates("text")["loss"].mean()
        print(f"loss {loss:.2f}; of a uniform prediction {math.log(49_152):.2f}")
        print("change in loss, nats per token, means over texts [95 % t]")
        print(table_of_blocks(rows).to_string())
    if "alone" in parts:
        print("\nrank correlations over blocks")
        for name, value in rank_correlations(parts["alone"]).items():
            print(f"  {name}: {value:+.2f}")


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("out/rotation"))
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="which run"
    )
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    missing = [
        name for name in arguments.parts if not (arguments.out / f"{name}.csv").exists()
    ]
    if missing and not arguments.table:
        model = tlc.load_model(arguments.model)
        for name in missing:
            rows = pandas.DataFrame(PARTS[name](model))
            keep(rows, arguments.out / f"{name}.csv")
    show(arguments.out)


if __name__ == "__main__":
    main()
