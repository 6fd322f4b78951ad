"""Does coupling say what a block costs, beyond what simpler properties say?

    python demos/studies/block_costs.py --models smollm2-135m path/to/model.gguf
    python demos/studies/block_costs.py --small 16  # a GPT-NeoX that is trained here
    python demos/studies/block_costs.py --table  # only prints

Blocks of several decoders are dropped, and neighbours are merged. The cost is the rise
in loss. What may predict it, in this order: block influence, the size of the Jacobian,
its multiple of the identity `tr J / d`, the energy that other blocks' subspaces capture
of it, depth and its square; then coupling with the other blocks (of merged ones, with
each other). Jacobians are those of the last token of each text.

Models differ in the scale of all of these. So costs and predictors are ranked within
each model, as normal scores. What coupling adds is asked of the part of it that a
model's own other predictors do not give, with a slope that is fitted to the other
models (leave-one-model-out). Neighbouring blocks are alike, so chance is what this part
of coupling adds after circular shifts along the blocks, drawn for each model.

`block_costs.md` says what each outcome means; it was committed before this was run. One
file for each model, in `demos/studies/results/block_costs`; what is there is not run
again. Minutes of one core for each model; `SMALL=1`: fewer and shorter texts.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas
from torch import nn
from tqdm import tqdm

import tl_coupling as tlc
from shared_directions import keep, texts
from tl_coupling.measures import mean_random_coupling

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from block_costs_report import CHANGES, print_report, read_tables

IS_SMALL = bool(os.environ.get("SMALL"))
N_WORDS = 8 if IS_SMALL else 40
N_TEXTS = 2 if IS_SMALL else 4
K = 10
N_CTX = 64
Row = dict[str, float | str]


def rows_of(model: nn.Module, held_out: Sequence[str]) -> Iterator[Row]:
    """Yield the cost of every change on every text, and what may predict it."""
    for i, text in enumerate(tqdm(held_out, desc="texts")):
        data = tlc.redundancy.layer_redundancy(model, text, k=(K,), progress=False)
        data = data.isel(prompt=0)
        of_blocks = properties(tlc.trace(model, text))
        of_blocks["influence"] = data["block_influence"].values
        predictors = {
            "dropped": {name: of_block(x) for name, x in of_blocks.items()},
            "merged": {name: of_neighbours(x) for name, x in of_blocks.items()},
        }
        for change in CHANGES:
            costs = data[f"loss_{change}"] - data["loss"]
            for layer, cost in enumerate(costs.values):
                values = {
                    name: float(x[layer]) for name, x in predictors[change].items()
                }
                yield {
                    "change": change,
                    "text": i,
                    "layer": layer,
                    "cost": float(cost),
                    **values,
                }


def properties(trace: tlc.Trace) -> dict[str, np.ndarray]:
    """Return what each block's Jacobian is like: `[n_layers]`; and each pair's coupling
    above chance and captured energy, `[n_layers n_layers]`, both ways.
    """
    J = tlc.block_jacobians(trace, function="branches", progress=False)
    result = tlc.comparisons.jacobian_coupling(J, K)
    pairs = {
        "coupling": result.coupling() - mean_random_coupling(K),
        "energy": result.captured_energy(),
    }
    return {
        "size": J.norm(dim=(1, 2)).numpy(),
        "identity": J.diagonal(dim1=1, dim2=2).mean(1).numpy(),
        **{name: ((x + x.mT) / 2).numpy() for name, x in pairs.items()},
    }


def of_block(x: np.ndarray) -> np.ndarray:
    """Return a property of each block: of pairs, the mean with all others."""
    if x.ndim == 1:
        return x
    return (x.sum(1) - x.diagonal()) / (len(x) - 1)


def of_neighbours(x: np.ndarray) -> np.ndarray:
    """Return a property of each two neighbours: of single blocks, their mean."""
    if x.ndim == 1:
        return (x[1:] + x[:-1]) / 2
    return x.diagonal(1)


def small_decoder(n_layers: int, folder: Path) -> tuple[str, list[str]]:
    """Train a deep, narrow GPT-NeoX on the standard library's source, unless that was
    done.

    Returns:
        the folder of its last checkpoint, and held-out passages.
    """
    config = small.TrainingConfig(
        width=32 if IS_SMALL else 64,
        n_layers=n_layers,
        n_heads=1 if IS_SMALL else 2,
        vocabulary=300 if IS_SMALL else 512,
        n_ctx=N_CTX,
        batch=4 if IS_SMALL else 8,
        steps=10 if IS_SMALL else 800,
        learning_rate=4e-3,
        warmup=50,
        weight_decay=0.1,
        final_rate=0.0,
    )
    corpus = small.build_corpus(small.read_documents(), config.vocabulary)
    bar = partial(tqdm, desc="training", total=config.steps)
    run = small.train(config, corpus, folder, bar, checkpoints=(config.steps,))
    held_out = small.passages(corpus.held_out, corpus.tokenizer, N_TEXTS, N_CTX)
    return str(run / f"step{config.steps}"), held_out


def run(model: str, held_out: Sequence[str], path: Path) -> None:
    """Measure a model, unless that was done."""
    if not path.exists():
        keep(pandas.DataFrame(rows_of(tlc.load_model(model), held_out)), path)


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[], help="names or files")
    parser.add_argument(
        "--small", type=int, metavar="BLOCKS", help="train a model of so many, too"
    )
    parser.add_argument("--out", type=Path, default=Path("out/block_costs"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    if not arguments.table:
        for source in arguments.models:
            paragraphs = list(dict.fromkeys(texts(N_WORDS)))[:N_TEXTS]
            run(source, paragraphs, arguments.out / f"{Path(source).stem}.csv")
        if arguments.small is not None:
            source, passages = small_decoder(arguments.small, arguments.out / "runs")
            name = f"small-{arguments.small}.csv"
            run(source, passages, arguments.out / name)
    tables = read_tables(arguments.out)
    if len(tables) < 2:
        parser.error(
            f"wanted results of two models at least in {arguments.out}, got "
            f"{len(tables)}: run it without --table"
        )
    print_report(tables)


if __name__ == "__main__":
    main()
