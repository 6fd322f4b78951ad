"""What is coupling made of? Multiples of the identity, large directions of the stream,
and what is left in a metric in which no direction is large.

    python demos/studies/composition.py --models smollm2-135m path/to/model.gguf
    python demos/studies/composition.py --table  # only prints

Coupling at the last token of 20 paragraphs of Python's documentation, k = 10, above the
mean of random subspaces, of the same Jacobians after each of these:

- *raw*: as they are;
- *without identity*: less each block's best multiple of the identity, `(tr J / d) I`;
- *without large directions*: as before, and less the mean direction of the stream and
  its eight largest dimensions, on both sides;
- *whitened*: in the metric in which the stream is isotropic, which is taken from the
  other texts; with and without the identity; and in the metric of the second moment
  itself, the other way round;
- *whitened at random*: in the same metric, turned by a random rotation, 20 times. A
  change of basis that is as far from orthogonal moves singular vectors in any case:
  these 20 say how much of that whitening would do whatever it knew of the stream;
- *turned*: each Jacobian's sides turned by rotations of its own: chance;
- *identity alone*: the same, but for the multiple of the identity, which is put back:
  how much coupling that multiple makes by itself;
- *planted*: Jacobians with the same singular values and one common set of directions in
  the whitened coordinates: what the study prints where blocks are alike in one basis.

`composition.md` says what each outcome means; it was committed before this was run. One
file of results for each model, in `demos/studies/results/composition`; what is there is
not run again. Minutes for each model; `SMALL=1`: seconds, of a text and three blocks.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

import tl_coupling as tlc
from paths import distinct_texts, interval
from shared_directions import keep
from tl_coupling.measures import in_metric, mean_random_coupling, random_rotations

IS_SMALL = bool(os.environ.get("SMALL"))
N_TEXTS = 2 if IS_SMALL else 20
N_TEXTS_OF_ROTATIONS = 1 if IS_SMALL else 5
N_ROTATIONS = 2 if IS_SMALL else 20
LAYERS = range(3) if IS_SMALL else None
K = 10
N_LARGEST = 8
SHRINKAGE = 0.01
WHITENED = "whitened"
AT_RANDOM = "whitened at random"
Stack = Float[Tensor, "n_layers d d"]
Row = dict[str, float | str]


def above_chance(J: Stack) -> float:
    """Return the mean coupling of different layers, less that of random subspaces."""
    return tlc.comparisons.jacobian_coupling(J, K).mean() - mean_random_coupling(K)


def rows_of(model: nn.Module, name: str) -> Iterator[Row]:
    """Yield coupling of every text after every change."""
    texts = distinct_texts(N_TEXTS)
    traces = [tlc.trace(model, text) for text in tqdm(texts, desc=f"{name}: traces")]
    for i, trace in enumerate(tqdm(traces, desc=f"{name}: texts")):
        others = traces[:i] + traces[i + 1 :]
        metric = tlc.measures.stream_metric(others, SHRINKAGE)
        J = tlc.block_jacobians(trace, LAYERS, progress=False)
        generator = torch.Generator().manual_seed(i)
        for change, changed in changes(J, metric, others, generator).items():
            yield {
                "model": name,
                "text": i,
                "change": change,
                "draw": 0,
                "coupling": above_chance(changed),
            }
        yield {
            "model": name,
            "text": i,
            "change": "u·v of the top ten pairs",
            "draw": 0,
            "coupling": mean_overlap_of_pairs(J),
        }
        if name == "trained" and i < N_TEXTS_OF_ROTATIONS:
            yield from at_random(J, metric, i)


def changes(
    J: Stack,
    metric: Float[Tensor, "d d"],
    others: Sequence[tlc.Trace],
    generator: torch.Generator,
) -> Mapping[str, Stack]:
    """Return the Jacobians after each change."""
    n_layers, d = J.shape[:2]
    rest = tlc.measures.without_identity(J)
    multiples = J - rest
    left, right = random_rotations(2, n_layers, d, generator=generator).float()
    projector = without_large_directions(others, d).float()
    alike = planted(J, metric, generator)
    return {
        "raw": J,
        "without identity": rest,
        "without large directions": projector @ rest @ projector,
        WHITENED: in_metric(J, metric),
        "whitened, without identity": in_metric(rest, metric),
        "whitened, shrinkage 0.1": in_metric(
            J, tlc.measures.stream_metric(others, 0.1)
        ),
        "in the second moment": in_metric(J, torch.linalg.inv(metric)),
        "turned": left @ J @ right,
        "identity alone": multiples + left @ rest @ right,
        "planted": alike,
        "planted, whitened": in_metric(alike, metric),
    }


def without_large_directions(
    traces: Sequence[tlc.Trace], d: int
) -> Float[Tensor, "d d"]:
    """Return the projector on what is orthogonal to the stream's mean direction, and to
    its largest dimensions, of all tokens but the first.
    """
    rows = torch.cat([trace.residual[:, 1:].flatten(0, 1) for trace in traces]).double()
    unit = torch.nn.functional.normalize(rows, dim=1)
    largest = unit.square().mean(0).topk(N_LARGEST).indices
    removed = torch.cat([unit.mean(0)[:, None], torch.eye(d).double()[:, largest]], 1)
    Q = torch.linalg.qr(removed).Q
    return torch.eye(d).double() - Q @ Q.mT


def planted(
    J: Stack, metric: Float[Tensor, "d d"], generator: torch.Generator
) -> Stack:
    """Return maps with J's singular values and common directions once they are whitened."""
    U, V = random_rotations(2, J.shape[-1], generator=generator).float()
    common = U * torch.linalg.svdvals(J)[:, None] @ V.mT
    # Back from the coordinates in which M is the identity.
    return in_metric(common, torch.linalg.inv(metric))


def mean_overlap_of_pairs(J: Stack) -> float:
    """Return the mean of `u_i · v_i` over the top pairs: below 0 where blocks erase what
    they read.
    """
    spectrum = tlc.svd(J, K)
    return float((spectrum.U * spectrum.Vh.mT).sum(-2).mean())


def at_random(J: Stack, metric: Float[Tensor, "d d"], text: int) -> Iterator[Row]:
    """Yield coupling in the metric turned by random rotations, the same for all texts."""
    generator = torch.Generator().manual_seed(1_000_000)
    for draw in tqdm(range(N_ROTATIONS), desc="rotations", leave=False):
        Q = random_rotations(len(metric), generator=generator)
        turned = Q @ metric @ Q.mT
        yield {
            "model": "trained",
            "text": text,
            "change": AT_RANDOM,
            "draw": draw,
            "coupling": above_chance(in_metric(J, turned)),
        }


def show(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print means over texts, and what whitening does beside random metrics."""
    for source, table in tables.items():
        print(f"\n{source}: coupling above chance, k = {K}, means over texts [95 % t]")
        once = table[table["change"] != AT_RANDOM]
        printed = once.groupby(["change", "model"], sort=False)["coupling"].agg(
            interval
        )
        print(printed.unstack("model")[["trained", "untrained"]].to_string())
        print(share_of_identity(once))
        print(beside_random_metrics(table))


def share_of_identity(table: pandas.DataFrame) -> str:
    """Say how much of coupling goes with multiples of the identity."""
    trained = table[table["model"] == "trained"]
    wide = trained.pivot_table(index="text", columns="change", values="coupling")
    share = 1 - wide["without identity"] / wide["raw"]
    return f"share that goes with the identity: {interval(share)}"


def beside_random_metrics(table: pandas.DataFrame) -> str:
    """Say where whitening lies among metrics that were turned at random."""
    trained = table[table["model"] == "trained"]
    drawn = trained[trained["change"] == AT_RANDOM]
    of_draws = drawn.groupby("draw")["coupling"].mean()
    same_texts = trained["text"].isin(drawn["text"])
    whitened = trained[same_texts & (trained["change"] == WHITENED)]["coupling"].mean()
    raw = trained[same_texts & (trained["change"] == "raw")]["coupling"].mean()
    p = (1 + int((of_draws <= whitened).sum())) / (1 + len(of_draws))
    return (
        f"on {drawn['text'].nunique()} texts: raw {raw:.4f}, whitened {whitened:.4f}, in "
        f"{len(of_draws)} metrics turned at random {of_draws.mean():.4f} "
        f"({of_draws.min():.4f} to {of_draws.max():.4f}); p that whitening is no lower: "
        f"{p:.3f}"
    )


def run(source: str, folder: Path) -> None:
    """Measure a model and its twin, unless that was done."""
    path = folder / f"{Path(source).stem}.csv"
    if path.exists():
        return
    rows: list[Row] = []
    for name in ("trained", "untrained"):
        model = tlc.load_model(source, untrained=name == "untrained")
        rows += rows_of(model, name)
    keep(pandas.DataFrame(rows), path)


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--out", type=Path, default=Path("out/composition"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    if not arguments.table:
        for source in arguments.models:
            run(source, arguments.out)
    paths = sorted(arguments.out.glob("*.csv"))
    if not paths:
        parser.error(f"there are no results in {arguments.out}: run it without --table")
    show({path.stem: pandas.read_csv(path) for path in paths})


if __name__ == "__main__":
    main()
