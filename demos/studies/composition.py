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

Added after the first two models were run, because the first token is up to a thousand
times as long as others and so makes up nearly all of the second moment:

- *whitened, tokens alike*: in the metric of the other tokens, each at length 1; with 20
  random rotations of its own.

Of blocks that normalise the stream (MiniLM), coupling compares what their branches add
before the norms; *block(X) − X*, which holds −I, has a row of its own.

`composition.md` says what each outcome means; it was committed before this was run. Two
files of results for each model, in `demos/studies/results/composition`; what is there
is not run again. Minutes for each model, the time of 20 texts with 600 dimensions;
`--texts 5 --rotated 1` for wider ones. `SMALL=1`: seconds, of a text and three blocks.
"""

import argparse
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

import tl_coupling as tlc
from paths import distinct_texts, interval
from shared_directions import keep
from study_names import model_name
from tl_coupling.measures import in_metric, mean_random_coupling, random_rotations
from tl_coupling.pictures import labels

# What is drawn, and what it is called there.
DRAWN = {
    "raw": "as it is",
    "without identity": "without the identity",
    "without large directions": "nor large directions",
    "identity alone": "identity alone",
    "whitened": "whitened",
    "turned": "turned",
}
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
TOKENS_ALIKE = "whitened, tokens alike"
TOKENS_ALIKE_AT_RANDOM = "whitened, tokens alike, at random"
# By what is turned, its random rotations.
ROTATIONS_OF = {WHITENED: AT_RANDOM, TOKENS_ALIKE: TOKENS_ALIKE_AT_RANDOM}
OF_TOKENS_ALIKE = "-tokens-alike"
Stack = Float[Tensor, "n_layers d d"]
Row = dict[str, float | str]


def above_chance(J: Stack) -> float:
    """Return the mean coupling of different layers, less that of random subspaces."""
    return tlc.comparisons.jacobian_coupling(J, K).mean() - mean_random_coupling(K)


@dataclass(frozen=True)
class Amount:
    """How many texts are measured, and how many of these in metrics turned at random.

    Metrics are taken from N_TEXTS texts in any case.
    """

    texts: int
    rotated: int


def rows_of(model: nn.Module, name: str, amount: Amount) -> Iterator[Row]:
    """Yield coupling of every text after every change."""
    for text, J, trace, others in jacobians_of_texts(model, name, amount.texts):
        metric = tlc.measures.stream_metric(others, SHRINKAGE)
        generator = torch.Generator().manual_seed(text)
        changed = changes(J, metric, others, generator)
        values = {
            change: above_chance(J_changed) for change, J_changed in changed.items()
        }
        values["u·v of the top ten pairs"] = mean_overlap_of_pairs(J)
        if normalises(trace):
            whole = tlc.block_jacobians(trace, LAYERS, progress=False)
            values["block(X) − X"] = above_chance(whole)
        for change, coupling in values.items():
            yield row_of(name, text, change, coupling)
        if name == "trained" and text < amount.rotated:
            yield from at_random(J, metric, text, AT_RANDOM)


def rows_of_tokens_alike(model: nn.Module, name: str, amount: Amount) -> Iterator[Row]:
    """Yield coupling of every text in the metric in which all tokens count the same."""
    for text, J, _, others in jacobians_of_texts(model, name, amount.texts):
        metric = tlc.measures.stream_metric(tokens_alike(others), SHRINKAGE)
        coupling = above_chance(in_metric(J, metric))
        yield row_of(name, text, TOKENS_ALIKE, coupling)
        share = share_of_first_tokens(others)
        yield row_of(name, text, "share of the first tokens", share)
        if name == "trained" and text < amount.rotated:
            yield from at_random(J, metric, text, TOKENS_ALIKE_AT_RANDOM)


def jacobians_of_texts(
    model: nn.Module, name: str, n_texts: int
) -> Iterator[tuple[int, Stack, tlc.Trace, list[tlc.Trace]]]:
    """Yield each text's number, Jacobians and trace, and the traces of the others."""
    texts = distinct_texts(N_TEXTS)
    traces = [tlc.trace(model, text) for text in tqdm(texts, desc=f"{name}: traces")]
    measured = traces[:n_texts]
    for i, trace in enumerate(tqdm(measured, desc=f"{name}: texts")):
        # Those that coupling compares.
        J = tlc.block_jacobians(trace, LAYERS, function="branches", progress=False)
        yield i, J, trace, traces[:i] + traces[i + 1 :]


def row_of(model: str, text: int, change: str, coupling: float, draw: int = 0) -> Row:
    """Return a row of the table of results."""
    return {
        "model": model,
        "text": text,
        "change": change,
        "draw": draw,
        "coupling": coupling,
    }


def normalises(trace: tlc.Trace) -> bool:
    """Return whether a block normalises the stream itself, as BERT's do."""
    J = [
        tlc.block_jacobian(trace, 0, function=function)
        for function in ("block", "branches")
    ]
    return not torch.equal(*J)


def tokens_alike(traces: Sequence[tlc.Trace]) -> Iterator[SimpleNamespace]:
    """Yield the streams of traces at length 1, without their first tokens."""
    for trace in traces:
        stream = torch.nn.functional.normalize(trace.residual[:, 1:], dim=-1)
        yield SimpleNamespace(residual=stream)


def share_of_first_tokens(traces: Sequence[tlc.Trace]) -> float:
    """Return the share that first tokens have of the stream's second moment."""
    of_first = sum(float(t.residual[:, 0].double().square().sum()) for t in traces)
    return of_first / sum(float(t.residual.double().square().sum()) for t in traces)


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


def at_random(
    J: Stack, metric: Float[Tensor, "d d"], text: int, change: str
) -> Iterator[Row]:
    """Yield coupling in the metric turned by random rotations, the same for all texts."""
    generator = torch.Generator().manual_seed(1_000_000)
    for draw in tqdm(range(N_ROTATIONS), desc="rotations", leave=False):
        Q = random_rotations(len(metric), generator=generator)
        turned = Q @ metric @ Q.mT
        coupling = above_chance(in_metric(J, turned))
        yield row_of("trained", text, change, coupling, draw)


def show(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print means over texts, and what whitening does beside random metrics."""
    for source, table in tables.items():
        print(f"\n{source}: coupling above chance, k = {K}, means over texts [95 % t]")
        once = table[~table["change"].isin(ROTATIONS_OF.values())]
        printed = once.groupby(["change", "model"], sort=False)["coupling"].agg(
            interval
        )
        print(printed.unstack("model")[["trained", "untrained"]].to_string(na_rep=""))
        print(share_of_identity(once))
        for change, turned in ROTATIONS_OF.items():
            if (table["change"] == turned).any():
                print(beside_random_metrics(table, change))


def share_of_identity(table: pandas.DataFrame) -> str:
    """Say how much of coupling goes with multiples of the identity."""
    trained = table[table["model"] == "trained"]
    wide = trained.pivot_table(index="text", columns="change", values="coupling")
    share = 1 - wide["without identity"] / wide["raw"]
    return f"share that goes with the identity: {interval(share)}"


def beside_random_metrics(table: pandas.DataFrame, change: str = WHITENED) -> str:
    """Say where whitening lies among metrics that were turned at random."""
    trained = table[table["model"] == "trained"]
    drawn = trained[trained["change"] == ROTATIONS_OF[change]]
    of_draws = drawn.groupby("draw")["coupling"].mean()
    same_texts = trained["text"].isin(drawn["text"])
    whitened = trained[same_texts & (trained["change"] == change)]["coupling"].mean()
    raw = trained[same_texts & (trained["change"] == "raw")]["coupling"].mean()
    p = (1 + int((of_draws <= whitened).sum())) / (1 + len(of_draws))
    return (
        f"on {drawn['text'].nunique()} texts: raw {raw:.4f}, {change} {whitened:.4f}, in "
        f"{len(of_draws)} metrics turned at random {of_draws.mean():.4f} "
        f"({of_draws.min():.4f} to {of_draws.max():.4f}); p that whitening is no lower: "
        f"{p:.3f}"
    )


def draw(tables: Mapping[str, pandas.DataFrame]) -> Figure:
    """Draw coupling of each model after each change, trained and untrained, with what
    whitening does in metrics turned at random.
    """
    n_rows = math.ceil(len(tables) / 2)
    figure = labels.new_figure(labels.PHONE_WIDTH, 1.2 + 1.9 * n_rows)
    grid = figure.subplots(n_rows, 2, sharex=True, sharey=True, squeeze=False)
    # The first is at the top.
    places = np.arange(len(DRAWN), 0, -1)
    for ax, (source, table) in zip(grid.flat, tables.items(), strict=False):
        # Beside each other: both may be 0.
        for name, color, shift in (
            ("trained", labels.TRAINED, 0.18),
            ("untrained", labels.UNTRAINED, -0.18),
        ):
            of_model = table[table["model"] == name]
            means, errors = zip(
                *(mean_and_error(of_model, change) for change in DRAWN), strict=True
            )
            look = {"color": color, "markersize": 4, "label": name}
            marker = labels.MARKERS[color]
            ax.errorbar(means, places + shift, xerr=errors, fmt=marker, **look)
        at_random = table[table["change"] == AT_RANDOM].groupby("draw")["coupling"]
        draws = at_random.mean()
        place = places[list(DRAWN).index(WHITENED)] - 0.45
        ax.plot(
            [draws.min(), draws.max()],
            [place, place],
            color="0.6",
            linewidth=3,
            label="metrics turned at random",
        )
        ax.axvline(0, **labels.NULL_LINE)
        n_texts = table.loc[table["change"] == "raw", "text"].nunique()
        ax.set_title(f"{model_name(source)}\n{n_texts} texts", fontsize="small")
        ax.set_yticks(places, DRAWN.values())
        ax.tick_params(labelsize="small")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in grid.flat[len(tables) :]:
        ax.remove()
    labels.legend_below(figure, grid[0, 0])
    labels.entitle(
        figure,
        "Coupling without multiples of the identity"
        f"\nand in other metrics, above chance, k = {K} · means over texts with 95 % t "
        "intervals",
    )
    return figure


def mean_and_error(table: pandas.DataFrame, change: str) -> tuple[float, float]:
    """Return the mean over texts, and half of its t interval."""
    values = table.loc[table["change"] == change, "coupling"]
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return float(values.mean()), float(half)


# Each model's parts, by how their files end.
PARTS = {"": rows_of, OF_TOKENS_ALIKE: rows_of_tokens_alike}


def run(source: str, amount: Amount, folder: Path) -> None:
    """Measure a model and its twin, unless that was done."""
    for ending, measure in PARTS.items():
        path = folder / f"{Path(source).stem}{ending}.csv"
        if path.exists():
            continue
        rows: list[Row] = []
        for name in ("trained", "untrained"):
            model = tlc.load_model(source, untrained=name == "untrained")
            rows += measure(model, name, amount)
        keep(pandas.DataFrame(rows), path)


def read_tables(folder: Path) -> dict[str, pandas.DataFrame]:
    """Return the table of each model, its parts together."""
    parts: dict[str, list[pandas.DataFrame]] = {}
    for path in sorted(folder.glob("*.csv"), key=lambda path: path.stem):
        name = path.stem.removesuffix(OF_TOKENS_ALIKE)
        parts.setdefault(name, []).append(pandas.read_csv(path))
    return {name: pandas.concat(tables) for name, tables in parts.items()}


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument(
        "--texts", type=int, default=N_TEXTS, help="texts that are measured"
    )
    parser.add_argument(
        "--rotated",
        type=int,
        default=N_TEXTS_OF_ROTATIONS,
        help="texts that are measured in metrics turned at random",
    )
    parser.add_argument("--out", type=Path, default=Path("out/composition"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    if not arguments.table:
        amount = Amount(arguments.texts, arguments.rotated)
        for source in arguments.models:
            run(source, amount, arguments.out)
    tables = read_tables(arguments.out)
    if not tables:
        parser.error(f"there are no results in {arguments.out}: run it without --table")
    show(tables)


if __name__ == "__main__":
    main()
