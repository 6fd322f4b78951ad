"""Is what blocks share more needed than what they do not? Do their directions act more?

    python demos/studies/shared_directions.py --out out/directions
    python demos/studies/shared_directions.py --models smollm2-135m path/to/model.gguf
    python demos/studies/shared_directions.py --out out/directions --table  # only prints

**Ablation.** The ten directions that the blocks of a model read most in common, and the
ten that they write, are found on 16 texts. On 40 others they are removed at the blocks
between the first two and the last two, all together, and the loss is compared with that
of controls of the same rank. What differs between the groups, and how it is seen:

- *the energy that is removed*, since shared directions hold much of it: "principal"
  removes most of all, "norm_matched" as much at each token as the shared ones would
  take there, and the removed share is printed;
- *the gains of the blocks along them*: "unshared" has the same gains, and is orthogonal
  to what is shared. If it is as needed, being shared says nothing;
- *the first token*, into which attention sinks, and whose stream is many times longer:
  everything is done with it and without it;
- *one subspace for all blocks, or one for each*: "random" and "norm_matched" are one.

If the claim were false, the shared subspace would cost what "unshared" and "principal"
cost, or less. Where a removal leaves a model that predicts worse than a uniform
distribution, more or less damage says little: on the write side the same is done at
every third of these blocks alone, with five draws. Intervals over prompts do not say
how draws of a control differ; the smallest and the largest mean of a draw do.

**Steering.** The stream before three blocks is moved along the ten directions that they
read most, by a tenth of its length, at the last token of each of the 40 texts. Controls:
random directions, random mixtures of the ten, directions of small gain, and directions
drawn as the stream varies. Directions come from another text than those steered.

Texts are paragraphs of Python's own documentation, which every Python brings. Those of
the committed removals at all blocks have one beginning twice, which `ablate` takes no
more: now they are distinct. Results are one file for each model and step; what is there
is not run again. Those that the findings cite are in
`demos/studies/results/shared_directions`. About an hour of one core for
SmolLM2-135M-Instruct; `SMALL=1`: a minute.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import pandas
from torch import nn

import tl_coupling as tlc
from tl_coupling.files import write_atomically

IS_SMALL = bool(os.environ.get("SMALL"))
N_FOUND_ON = 2 if IS_SMALL else 16
N_TESTED_ON = 2 if IS_SMALL else 40
N_DRAWS = 2 if IS_SMALL else 20
N_DRAWS_AT_FEWER_BLOCKS = 2 if IS_SMALL else 5
RANK = 10
SIDES: tuple[Literal["read", "write"], ...] = ("read", "write")
EVERY = 3
SCALE = 0.1
K = 10
FEWEST_WORDS = 30
# Paragraphs are cut: what matters is how many there are.
N_WORDS = 12
N_WORDS_STEERED = 8


def texts(n_words: int) -> list[str]:
    """Return beginnings of paragraphs of Python's documentation, each of one topic."""
    found = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            words = paragraph.split()
            is_prose = len(words) >= FEWEST_WORDS and words[0].isalpha()
            if is_prose and words[0][0].isupper():
                found.append(" ".join(words[:n_words]))
                break
    return found


def ablation(model: nn.Module, name: str, folder: Path) -> None:
    """Remove what blocks share from what they read and write, and keep the results."""
    found_on = texts(N_WORDS)[:N_FOUND_ON]
    tested_on = list(dict.fromkeys(texts(N_WORDS)[N_FOUND_ON:]))[:N_TESTED_ON]
    traces = (tlc.trace(model, text) for text in found_on)
    subspace = tlc.directions.shared_subspace(traces, rank=RANK, k=K)
    print(subspace)
    print("cosines of halves of the texts:")
    for side, cosines in zip(("read", "write"), subspace.cosines, strict=True):
        print(f"  {side}: {', '.join(f'{float(c):.2f}' for c in cosines)}")
    middle = subspace.layers[2:-2] or subspace.layers
    # What the findings state comes first: with the first token left as it is.
    runs = [(side, first, middle, N_DRAWS, "") for first in (1, 0) for side in SIDES]
    fewer = ("write", 1, middle[::EVERY], N_DRAWS_AT_FEWER_BLOCKS, f"-every-{EVERY}")
    for side, first_position, layers, n_draws, ending in [*runs, fewer]:
        path = folder / f"{name}-{side}-{first_position}{ending}.csv"
        if path.exists():
            continue
        result = tlc.directions.ablate(
            model,
            tested_on,
            subspace,
            layers,
            side,
            first_position=first_position,
            n_draws=n_draws,
        )
        table = result.to_dataframe()
        table.insert(0, "loss", float(result.loss.mean()))
        table.insert(0, "first_token", "kept" if first_position else "changed")
        table.insert(0, "side", side)
        table.insert(0, "model", name)
        keep(table, path)


def steering(model: nn.Module, name: str, folder: Path) -> None:
    """Steer along the directions that three blocks read, and keep the results."""
    distinct = list(dict.fromkeys(texts(N_WORDS_STEERED)))
    found_on, *tested_on = distinct[: N_TESTED_ON + 1]
    traced = tlc.trace(model, found_on)
    n = traced.n_layers
    for layer in dict.fromkeys((n // 6, n // 2, 5 * n // 6)):
        path = folder / f"{name}-steered-{layer}.csv"
        if path.exists():
            continue
        directions = tlc.directions.directions_of(traced, layer, K)
        result = tlc.directions.steer(
            model, tested_on, directions, [SCALE], n_draws=N_DRAWS
        )
        table = result.to_dataframe()
        table.insert(0, "layer", layer)
        table.insert(0, "model", name)
        keep(table, path)


def keep(table: pandas.DataFrame, path: Path) -> None:
    """Write a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, lambda unfinished: table.round(5).to_csv(unfinished, index=False)
    )


def show(folder: Path) -> None:
    """Print the results that are there."""
    for path in sorted(folder.glob("*.csv")):
        table = pandas.read_csv(path)
        print(f"\n{path.stem}")
        print(table.drop(columns=["model"]).round(4).to_string(index=False))


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--out", type=Path, default=Path("out/directions"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    for source in [] if arguments.table else arguments.models:
        model = tlc.load_model(source)
        name = Path(source).stem
        ablation(model, name, arguments.out)
        steering(model, name, arguments.out)
    show(arguments.out)


if __name__ == "__main__":
    main()
