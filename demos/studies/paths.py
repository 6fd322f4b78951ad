"""Are paths through a trained model straighter, do they grow exponentially, and do they
follow the eigenvectors of the blocks?

    python demos/studies/paths.py --out out/paths
    python demos/studies/paths.py --out out/paths --table  # only prints

The paper's claims on trajectories (its sections 5.5 and 6.1), on 40 texts instead of
one, for SmolLM2-135M-Instruct and its untrained twin, which stands on the same texts:

- *shapes*: line-shape score, expodistance and equidistance of every token. The first
  token stands apart, because attention sinks into it and its stream grows in one step.
  Expodistance divides by the square of the mean growth, so it has a long tail: medians
  over tokens are compared, and then averaged over texts.
- *growth*: expodistance without the first step, the last or both, and the shares of
  variance that an exponential and a straight line explain of the stream's norm over
  depth, with and without these steps. Asked after the first results, because the ends
  of one prompt's paths were seen to make most of its expodistance.
- *eigenvectors*: how much of the last token's stream x lies in the span of the ten
  leading eigenvectors of the block that reads it, of its ten left and of its ten right
  singular vectors; and how long J x is beside J applied to a random direction. x is an
  eigenvector of J with eigenvalue 0 where J x = 0. Chance is what a random x has.
- *ranks*: how many singular values exceed 1e-5 of the largest.

If training did nothing, both models would have the same figures. Intervals are 95 % t
intervals over texts. Results are one file for each part; what is there is not run
again. Those that the findings cite are in `demos/studies/results/paths`. Six minutes
of one core; `SMALL=1`: seconds, on fewer texts and blocks.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas
import torch
from jaxtyping import Float
from scipy import stats
from torch import nn
from tqdm import tqdm

import tl_coupling as tlc
from shared_directions import keep, texts

IS_SMALL = bool(os.environ.get("SMALL"))
N_WORDS = 16
N_TEXTS = 2 if IS_SMALL else 40
N_TEXTS_DECOMPOSED = 1 if IS_SMALL else 4
LAYERS = slice(0, 2 if IS_SMALL else None)
K = 10
SMALLEST = 1e-5
MEASURES = ("line_shape_score", "expodistance", "equidistance")
# Depths of a path that has these steps.
STEPS = {
    "all": slice(None),
    "but the first": slice(1, None),
    "but the last": slice(None, -1),
    "but both": slice(1, -1),
}
TWINS = {"trained": False, "untrained": True}


def distinct_texts(n: int) -> list[str]:
    """Return the first n texts; two paragraphs begin alike."""
    return list(dict.fromkeys(texts(N_WORDS)))[:n]


def shapes(model: nn.Module) -> Iterator[dict[str, float | str]]:
    """Yield the medians over a text's first token and over its others."""
    for text in tqdm(distinct_texts(N_TEXTS), desc="texts"):
        x = tlc.trace(model, text).residual
        values = {name: getattr(tlc, name)(x) for name in MEASURES}
        for tokens, positions in (("first", slice(0, 1)), ("others", slice(1, None))):
            medians = {
                name: float(of_tokens[positions].median())
                for name, of_tokens in values.items()
            }
            yield {"text": text, "tokens": tokens, **medians}


def growth(model: nn.Module) -> Iterator[dict[str, float | str]]:
    """Yield the medians over a text's tokens but the first, for each range of depths."""
    for text in tqdm(distinct_texts(N_TEXTS), desc="texts"):
        x = tlc.trace(model, text).residual[:, 1:]
        for steps, depths in STEPS.items():
            path = x[depths]
            norms = path.double().norm(dim=-1).numpy()
            medians = {
                "expodistance": tlc.expodistance(path).median(),
                "exponential_R2": np.median(line_fit(np.log(norms))),
                "linear_R2": np.median(line_fit(norms)),
            }
            values = {name: float(median) for name, median in medians.items()}
            yield {"text": text, "steps": steps, **values}


def line_fit(
    values: Float[np.ndarray, "n_depths n_tokens"],
) -> Float[np.ndarray, " n_tokens"]:
    """Return R² of the line through each token's values over depth."""
    depths = np.arange(len(values))
    return np.array([np.corrcoef(depths, each)[0, 1] ** 2 for each in values.T])


def eigenvectors(model: nn.Module) -> Iterator[dict[str, float | str]]:
    """Yield what of the stream lies where in each block, for the last token."""
    for text in tqdm(distinct_texts(N_TEXTS_DECOMPOSED), desc="texts"):
        trace = tlc.trace(model, text)
        layers = range(trace.n_layers)[LAYERS]
        jacobians = tlc.block_jacobians(trace, layers, progress=False)
        for layer, jacobian in zip(layers, jacobians, strict=True):
            x = trace.residual[layer, -1]
            yield {"text": text, "layer": layer} | of_block(jacobian, x)


def of_block(
    jacobian: Float[torch.Tensor, "d_model d_model"],
    x: Float[torch.Tensor, " d_model"],
) -> dict[str, float]:
    """Return shares of ‖x‖² in the leading subspaces of one block, the length of J x
    and the rank of J.
    """
    J = jacobian.double().numpy()
    direction = x.double().numpy() / float(x.double().norm())
    U, sigma, Vh = np.linalg.svd(J)
    random_length = np.sqrt((sigma**2).mean())
    return {
        "eigenvectors": share(direction, leading_eigenvectors(J)),
        "write": share(direction, U[:, :K]),
        "read": share(direction, Vh[:K].T),
        "length_of_Jx": float(np.linalg.norm(J @ direction) / random_length),
        "rank": int((sigma > SMALLEST * sigma[0]).sum()),
    }


def leading_eigenvectors(
    J: Float[np.ndarray, "d_model d_model"],
) -> np.ndarray:
    """Return an orthonormal basis of the eigenvectors with the K largest |λ|; a pair of
    conjugate ones is not parted.
    """
    values, vectors = np.linalg.eig(J)
    order = np.argsort(-np.abs(values), kind="stable")
    last = values[order[K - 1]]
    parts_a_pair = np.isclose(values[order[K]], last.conj()) and last.imag != 0
    basis, _ = np.linalg.qr(vectors[:, order[: K + parts_a_pair]])
    return basis


def share(direction: Float[np.ndarray, " d_model"], basis: np.ndarray) -> float:
    """Return the share of a unit vector's square that lies in the span of a basis."""
    return float((np.abs(basis.conj().T @ direction) ** 2).sum())


PARTS: dict[str, Callable[[nn.Module], Iterator[dict[str, float | str]]]] = {
    "shapes": shapes,
    "growth": growth,
    "eigenvectors": eigenvectors,
}


# Of tokens, and of steps: what a part has several of.
KINDS = ("tokens", "steps")


def of_text(part: pandas.DataFrame) -> pandas.DataFrame:
    """Return one row for each model and text (and kind of token): means over layers."""
    groups = [name for name in (*KINDS, "model", "text") if name in part]
    return part.groupby(groups, sort=False).mean(numeric_only=True).reset_index()


def interval(values: pandas.Series) -> str:
    """Return a mean over texts with its 95 % t interval."""
    mean = values.mean()
    if len(values) < 3:
        return f"{mean:.4g}"
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return f"{mean:.4g} [{mean - half:.4g}, {mean + half:.4g}]"


def show(folder: Path) -> None:
    """Print the means over texts of what is there."""
    for path in sorted(folder.glob("*.csv")):
        by_text = of_text(pandas.read_csv(path))
        groups = [name for name in (*KINDS, "model") if name in by_text]
        values = by_text.drop(columns=["text", "layer"], errors="ignore")
        print(f"\n{path.stem}: means over {by_text['text'].nunique()} texts [95 % t]")
        table = values.groupby(groups, sort=False).agg(interval)
        print(table.T.to_string())


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("out/paths"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    for name, part in PARTS.items():
        path = arguments.out / f"{name}.csv"
        if arguments.table or path.exists():
            continue
        tables = []
        for twin, untrained in TWINS.items():
            model = tlc.load_model(arguments.model, untrained=untrained)
            table = pandas.DataFrame(part(model))
            table.insert(0, "model", twin)
            tables.append(table)
        keep(pandas.concat(tables), path)
    show(arguments.out)


if __name__ == "__main__":
    main()
