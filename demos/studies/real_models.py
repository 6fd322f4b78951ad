"""Does coupling go with loss in trained models, and why do they differ in coupling?

    python demos/studies/real_models.py --models smollm2-135m path/to/model.gguf \\
        --prompts prompts.jsonl --out out/real_models
    python demos/studies/real_models.py --out out/real_models --table  # only prints

- *prompts*: coupling at the last token beside the model's own loss on the prompt, in
  nats per token, 40 prompts of each task. Slopes over all, within tasks, and within
  tasks beside the logarithm of the number of tokens; tasks are the clusters, and all
  intervals hold together with 95 %. What else differs between prompts: the task, the
  length (the last two slopes hold them fixed), and the last token, which is mostly a
  question mark or a word. If coupling did not go with loss, the intervals would hold 0.
- *noise*: normal noise on every matrix of the blocks, at .05 to .3 of the standard
  deviation of its entries, 8 seeds; coupling and loss together. Noise of a given size
  moves both, so they would fall together whether or not one needs the other. Two things
  can part them: at one size of noise, do the seeds with more coupling have less loss?
  And *louder* blocks, whose writing matrices (or the gains behind them) are multiplied
  by a number: loss rises, and the blocks' singular vectors stay what they were, but for
  what their changed input does to them.
- *norms*: why models differ. Coupling at three sizes of the subspaces, of the trained
  model and its untrained twin, at the last and at the middle token of 20 paragraphs.
  Of the trained one also: with coefficients frozen (norm scales, attention patterns,
  gates); without each block's first singular pair; and in standard units, in which the
  stream has the same size in all dimensions (`J S` divided by S from the left, S the
  root mean square of each dimension), because a few dimensions may be much larger than
  the others, and singular vectors depend on the units. Any units that differ as much
  change singular vectors: the same sizes in a random order are the control. Last, with
  uniform gains in the blocks' norms, which also changes the model: its loss says how
  much.
- *units*: that control again, with 20 random orders of the sizes on the same
  paragraphs. One order is one draw of the control, however many texts it stands on, so
  the order is the unit: intervals are over orders, of means over texts.

`--prompts` is a file as `tl_coupling.load_prompts` takes it, with tasks; without it the
first part is left out. Other texts are paragraphs of Python's own documentation. Results
are one file for each model and part; what is there is not run again. Those that the
findings cite are in `demos/studies/results/real_models`. About an hour of one core for
SmolLM2-135M-Instruct and Gemma-3-270M together; `SMALL=1`: a minute.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

import tl_coupling as tlc
from paths import distinct_texts, interval
from shared_directions import keep
from slopes import Design, design_of
from tl_coupling.measures import mean_random_coupling
from tl_coupling.studies.surveys import loss

IS_SMALL = bool(os.environ.get("SMALL"))
N_OF_TASK = 2 if IS_SMALL else 40
N_SEEDS = 2 if IS_SMALL else 8
N_TEXTS = 1 if IS_SMALL else 20
N_TEXTS_OF_NOISE = 1 if IS_SMALL else 4
N_TEXTS_OF_LOSS = 2 if IS_SMALL else 40
N_ORDERS = 2 if IS_SMALL else 20
LAYERS = range(3) if IS_SMALL else None
DOSES = (0.05, 0.1, 0.2, 0.3)
LOUDNESS = (0.5, 0.7, 1.4, 2.0)
KS = (2, 10, 50)
K = 10
Row = dict[str, float | str]


def above_chance(result: tlc.CouplingMap, k: int = K) -> float:
    """Return the mean coupling of different layers, less that of random subspaces.

    Less their mean: `result.null` is a root mean square, which at k = 2 is .04 below.
    """
    return result.mean(k) - mean_random_coupling(k)


def coupling_of(trace: tlc.Trace, position: int = -1) -> tlc.CouplingMap:
    """Return the map of a prompt at one token."""
    return tlc.depth_coupling(
        trace, k=max(KS), position=position, layers=LAYERS, progress=False
    )


# Part 1: prompts.


def of_prompts(model: nn.Module, prompts: pandas.DataFrame) -> Iterator[Row]:
    """Yield coupling and loss of each prompt."""
    for row in tqdm(prompts.itertuples(), total=len(prompts), desc="prompts"):
        trace = tlc.trace(model, row.prompt)
        yield {
            "id": row.id,
            "task": row.task,
            "n_tokens": trace.n_pos,
            "loss": loss(trace),
            "coupling": above_chance(coupling_of(trace)),
        }


def drawn_prompts(path: Path) -> pandas.DataFrame:
    """Return as many prompts of each task, drawn at random."""
    prompts = pandas.DataFrame(
        {"id": p.id, "task": p.task, "prompt": p.prompt} for p in tlc.load_prompts(path)
    )
    return prompts.groupby("task", sort=True).sample(N_OF_TASK, random_state=0)


# What is held fixed: columns, and constants for the values of a column.
SLOPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "over all": ((), ()),
    "within tasks": ((), ("task",)),
    "within tasks, length fixed": (("log_tokens",), ("task",)),
}


def show_prompts(tables: dict[str, pandas.DataFrame]) -> None:
    """Print means by task, and the slopes of coupling on loss."""
    n_looks = len(SLOPES) * len(tables)
    for model, table in tables.items():
        print(f"\n{model}: {len(table)} prompts; means over the prompts of a task")
        columns = ["n_tokens", "loss", "coupling"]
        print(table.groupby("task")[columns].mean().round(4).to_string())
        table = table.assign(log_tokens=np.log(table["n_tokens"]))
        print(f"coupling above chance per nat of loss ({n_looks} intervals at once)")
        for name, (covariates, fixed) in SLOPES.items():
            design = design_of(table, "loss", covariates, fixed, "task")
            coupling = table["coupling"].to_numpy()
            slope = design.slope(coupling)
            low, high = slope.interval(n_looks)
            # What the slope is of a standard deviation of each, beside the rest.
            scale = correlation_of(design, coupling) / slope.estimate
            print(
                f"  {name}: {slope.estimate:+.4f} [{low:+.4f}, {high:+.4f}], "
                f"{slope.freedom:.1f} df, VIF {slope.vif:.1f}; as a correlation "
                f"{slope.estimate * scale:+.2f} [{low * scale:+.2f}, {high * scale:+.2f}]"
            )


def correlation_of(design: Design, y: Float[np.ndarray, " n"]) -> float:
    """Return the partial correlation of x and y given the design's other columns."""
    both = np.stack([design.columns[:, 0], y], 1)
    others = design.columns[:, 1:]
    left = both - others @ np.linalg.lstsq(others, both)[0]
    return float(np.corrcoef(left.T)[0, 1])


# Changes of a model's weights.

# The last matrix of a branch, or the gains of the norm behind it, which would undo it.
_WRITING = ("o_proj", "down_proj")
_WRITING_BEHIND_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_LAST_NORM = "post_feedforward_layernorm"


def parameters_of(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of the blocks by name."""
    return dict(model.blocks.named_parameters())


@contextmanager
def changed(model: nn.Module, change: Callable[[nn.Module], None]) -> Iterator[None]:
    """Change the weights of the blocks, and undo it at the end."""
    kept = {name: p.detach().clone() for name, p in parameters_of(model).items()}
    try:
        with torch.no_grad():
            change(model)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters_of(model).items():
                parameter.copy_(kept[name])


def add_noise(model: nn.Module, dose: float, seed: int) -> None:
    """Add normal noise to every matrix, in units of its entries' standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters_of(model).values():
        if parameter.ndim == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += dose * parameter.std() * noise


def gain_offset(model: nn.Module) -> int:
    """Return 1 for Gemma 3, where a norm multiplies by 1 + weight, else 0."""
    return int(any(_LAST_NORM in name for name in parameters_of(model)))


def make_louder(model: nn.Module, factor: float) -> None:
    """Multiply what every branch of a Llama or Gemma 3 writes."""
    offset = gain_offset(model)
    endings = _WRITING_BEHIND_NORMS if offset else _WRITING
    for name, parameter in parameters_of(model).items():
        if any(ending in name for ending in endings):
            parameter.copy_(factor * (parameter + offset) - offset)


def make_gains_uniform(model: nn.Module) -> None:
    """Give each norm over the stream one gain: the root of the mean square of its own."""
    offset = gain_offset(model)
    for name, parameter in parameters_of(model).items():
        if "layernorm" in name:
            gain = (parameter + offset).square().mean().sqrt()
            parameter.copy_((gain - offset).expand_as(parameter))


# Part 2: noise.


def of_noise(model: nn.Module) -> Iterator[Row]:
    """Yield coupling and loss after each change."""
    yield {"change": "none", "size": 0.0, "seed": 0} | coupling_and_loss(model)
    doses = [(dose, seed) for dose in DOSES for seed in range(N_SEEDS)]
    for dose, seed in tqdm(doses, desc="noise"):
        with changed(model, lambda m, d=dose, s=seed: add_noise(m, d, s)):
            yield {"change": "noise", "size": dose, "seed": seed} | coupling_and_loss(
                model
            )
    for factor in tqdm(LOUDNESS, desc="louder"):
        with changed(model, lambda m, f=factor: make_louder(m, f)):
            yield {"change": "louder", "size": factor, "seed": 0} | coupling_and_loss(
                model
            )


def coupling_and_loss(model: nn.Module) -> dict[str, float]:
    """Return means over texts: coupling over few, loss over many."""
    found = distinct_texts(N_TEXTS_OF_LOSS)
    measured = found[:N_TEXTS_OF_NOISE]
    return {
        "loss": float(np.mean([loss(tlc.trace(model, text)) for text in found])),
        "coupling": float(
            np.mean([above_chance(coupling_of(tlc.trace(model, t))) for t in measured])
        ),
    }


def show_noise(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print loss and coupling of each change, and what seeds say at one size."""
    for model, table in tables.items():
        print(f"\n{model}: means over seeds [95 % t]")
        groups = table.groupby(["change", "size"], sort=False)[["loss", "coupling"]]
        print(groups.agg(interval).to_string())
        noisy = table[table["change"] == "noise"]
        design = design_of(noisy, "loss", fixed=("size",), cluster="seed")
        coupling = noisy["coupling"].to_numpy()
        slope = design.slope(coupling)
        low, high = slope.interval(len(tables))
        print(
            "coupling per nat of loss, at one size of noise: "
            f"{slope.estimate:+.4f} [{low:+.4f}, {high:+.4f}], {slope.freedom:.1f} df, "
            f"r = {correlation_of(design, coupling):+.2f}"
        )


# Part 3: norms.


def of_norms(model: nn.Module, twin: nn.Module) -> Iterator[Row]:
    """Yield coupling of a model, of its twin, and with other gains."""
    found = distinct_texts(N_TEXTS)
    sizes = sizes_of_dimensions([tlc.trace(model, text).residual for text in found])
    for text in tqdm(found, desc="untrained"):
        yield from of_text(twin, text, "untrained")
    for text in tqdm(found, desc="trained"):
        yield from of_text(model, text, "trained")
        yield {"model": "trained", "text": text, "token": "last"} | taken_apart(
            tlc.trace(model, text), sizes
        )
    with changed(model, make_gains_uniform):
        for text in tqdm(found, desc="uniform gains"):
            yield from of_text(model, text, "uniform gains")


def of_text(model: nn.Module, text: str, name: str) -> Iterator[Row]:
    """Yield loss and coupling at the last and at the middle token."""
    trace = tlc.trace(model, text)
    for token, position in {"last": -1, "middle": trace.n_pos // 2}.items():
        result = coupling_of(trace, position)
        by_k = {f"k={k}": above_chance(result, k) for k in KS}
        neighbours = result.coupling(K).diagonal(1).mean()
        yield {
            "model": name,
            "text": text,
            "token": token,
            "loss": loss(trace),
            **by_k,
            "neighbours": float(neighbours) - mean_random_coupling(K),
        }


def sizes_of_dimensions(
    streams: Sequence[Float[Tensor, "n_layers_plus_1 n_pos d_model"]],
) -> Float[Tensor, " d_model"]:
    """Return how large the stream is in each dimension, of all tokens but the first:
    the root of the mean square over layers and tokens of streams of one length.
    """
    rows = torch.cat([stream[:, 1:].flatten(0, 1) for stream in streams])
    return torch.nn.functional.normalize(rows, dim=1).square().mean(0).sqrt()


def taken_apart(trace: tlc.Trace, sizes: Float[Tensor, " d_model"]) -> dict[str, float]:
    """Return coupling with frozen coefficients, without the first singular pairs, and
    in coordinates in which all dimensions of the stream are alike in size.
    """
    frozen = tlc.comparisons.frozen_coupling(
        trace, k=K, layers=LAYERS, progress=False
    ).frozen
    J = tlc.block_jacobians(trace, LAYERS, progress=False)
    rest = tlc.comparisons.jacobian_coupling(tlc.measures.without_top(J, 1), k=K)
    return {
        "frozen": above_chance(frozen),
        "without σ₁": above_chance(rest),
        "standard units": coupling_in_units(J, sizes),
        "shuffled units": coupling_in_units(J, shuffled(sizes, seed=0)),
    }


def coupling_in_units(
    J: Float[Tensor, "n_layers d_model d_model"], units: Float[Tensor, " d_model"]
) -> float:
    """Return coupling above chance where each dimension is measured in its unit."""
    return above_chance(
        tlc.comparisons.jacobian_coupling(J * units / units[:, None], k=K)
    )


def shuffled(sizes: Float[Tensor, " d_model"], seed: int) -> Float[Tensor, " d_model"]:
    """Return the sizes in a random order."""
    generator = torch.Generator().manual_seed(seed)
    return sizes[torch.randperm(len(sizes), generator=generator)]


# Part 4: other orders of the units.


def of_units(model: nn.Module) -> Iterator[Row]:
    """Yield coupling in units of the sizes of other dimensions, for many orders."""
    found = distinct_texts(N_TEXTS)
    sizes = sizes_of_dimensions([tlc.trace(model, text).residual for text in found])
    for text in tqdm(found, desc="units"):
        J = tlc.block_jacobians(tlc.trace(model, text), LAYERS, progress=False)
        yield {"order": "none", "text": text, "coupling": coupling_in_units(J, sizes)}
        for seed in tqdm(range(N_ORDERS), desc="orders", leave=False):
            coupling = coupling_in_units(J, shuffled(sizes, seed))
            yield {"order": str(seed), "text": text, "coupling": coupling}


def show_units(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print coupling in each model's units and its spread over random orders of them."""
    for model, table in tables.items():
        means = table.groupby(table["order"].astype(str))["coupling"].mean()
        orders = means.drop("none")
        print(f"\n{model}: coupling above chance, each dimension in a unit of its own")
        print(f"  its own size: {means['none']:.3f}")
        print(
            f"  the size of another dimension, {len(orders)} orders [95 % t]: "
            f"{interval(orders)}, from {orders.min():.4f} to {orders.max():.4f}"
        )


def show_norms(tables: Mapping[str, pandas.DataFrame]) -> None:
    """Print coupling of each model and of what was changed in it."""
    for model, table in tables.items():
        print(f"\n{model}: coupling above chance, means over texts [95 % t]")
        values = table.drop(columns="text")
        printed = values.groupby(["model", "token"], sort=False).agg(interval)
        print(printed.T.to_string())


SHOWN = {
    "prompts": show_prompts,
    "noise": show_noise,
    "norms": show_norms,
    "units": show_units,
}


def run(source: str, prompts: pandas.DataFrame | None, folder: Path) -> None:
    """Run what is not there yet of one model."""
    name = Path(source).stem
    parts: dict[str, Callable[[nn.Module], Iterator[Row]]] = {
        "noise": of_noise,
        "norms": lambda model: of_norms(model, tlc.load_model(source, untrained=True)),
        "units": of_units,
    }
    if prompts is not None:
        parts["prompts"] = lambda model: of_prompts(model, prompts)
    missing = {
        part: measure
        for part, measure in parts.items()
        if not (folder / f"{name}-{part}.csv").exists()
    }
    model = tlc.load_model(source) if missing else None
    for part, measure in missing.items():
        keep(pandas.DataFrame(measure(model)), folder / f"{name}-{part}.csv")


def main() -> None:
    """Run what is not there yet, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--prompts", type=Path, help="a JSONL file with tasks")
    parser.add_argument("--out", type=Path, default=Path("out/real_models"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    if not arguments.table:
        path = arguments.prompts
        prompts = None if path is None else drawn_prompts(path)
        for source in arguments.models:
            run(source, prompts, arguments.out)
    elif not any(arguments.out.glob("*.csv")):
        parser.error(f"there are no results in {arguments.out}: run it without --table")
    for part, show in SHOWN.items():
        paths = sorted(arguments.out.glob(f"*-{part}.csv"))
        show(
            {
                path.stem.removesuffix(f"-{part}"): pandas.read_csv(path)
                for path in paths
            }
        )


if __name__ == "__main__":
    main()
