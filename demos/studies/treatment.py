"""Does coupling promote generalization? Coupling as the treatment.

    python demos/studies/treatment.py --out out/study-treatment
    python demos/studies/treatment.py --out out/study-treatment-small --small

Models that generalize better are coupled more, the paper reports; what would follow if
coupling were changed is not known from that. Here an objective beside the loss changes
it: models of one seed (initial weights, order of the data, text) are trained on the loss
alone, with coupling raised, and with coupling lowered.

A penalty on Jacobians does something whatever it asks for. So each treated model has
placebos, of the same Jacobians of the same inputs. One asks every block for its own
random frames, which never change, in place of another block's singular vectors. The
other, twisted, asks for coupling itself, of Jacobians whose sides were turned by
rotations of each block's own: all the same, but for the axes in which blocks meet. At
each step the gradient of a placebo gets, in every tensor, the length that the gradient
of its treated twin had. What the treatment does beyond both is what coupling does.

`treatment.md` says what is compared, and which sentence each outcome earns; it was
committed before the models were trained. Models that are finished are kept: a second
run does what is missing, and the statistics anew. Each part of the study has a table of
its models; what is printed is of all parts in the folder, and `--table` only prints.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import xarray
from einops import einsum, reduce
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from tl_coupling.files import file_name, output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from loss_marks import mean_loss, windows_of
from treatment_report import MADE_OF, MOVED, draw, print_report, tables_of_part

LOSS_ALONE = "loss alone"
LESS_IDENTITY = "less identity"
TERM_FACTS = ["term_value", "own_length", "cosine", "whole_length"]
# By treatment: the sign of its term in the objective.
TREATMENTS = {"up": -1.0, "down": 1.0}
PLACEBOS = ("placebo", "twisted")
# The study's parts, in the order in which they are trained: the primary one first.
PARTS = ("little", "enough", "speed", "identity", "rate", "dose")
# Of the learning rate, to see what a model does that is only slower or faster.
SPEEDS = (0.8, 1.25)
OPTIONS: list[tuple[str, Any, str]] = [
    (
        "out",
        Path("out/study-treatment"),
        "folder for measurements, statistics, figures",
    ),
    ("parts", list(PARTS), "of the study"),
    ("seeds", 16, "of initial weights, order of the data, and text; paired"),
    ("other-seeds", 8, "of the parts but the first"),
    ("little", 16384, "tokens to learn from where there is little text"),
    ("learning-rate", 4e-3, "after the warm-up; a cosine takes it to 0"),
    ("other-rate", 2e-3, "of the part `rate`"),
    ("weight", 0.5, "of coupling in the objective"),
    ("other-weight", 0.125, "of the part `dose`"),
    ("every", 4, "steps, of which one has the term"),
    ("width", 48, "of the models"),
    ("n-layers", 4, "blocks"),
    ("steps", 1000, "of training"),
    ("warmup", 50, "steps"),
    ("weight-decay", 0.1, "AdamW's"),
    ("vocabulary", 300, "entries of the tokenizer"),
    ("n-ctx", 64, "tokens in a window and a passage"),
    ("batch", 8, "windows in a step"),
    ("windows", 64, "of the learned text on which the training loss is taken"),
    ("held-out", 192, "windows on which the held-out loss is taken"),
    ("passages", 6, "held-out passages that are measured"),
    ("evaluate", 20, "steps between losses"),
    ("measure", 100, "steps between measurements of coupling"),
    ("first-seed", 0, "the first of the seeds"),
    ("k", 8, "singular vectors"),
    ("jobs", os.cpu_count() or 1, "families of models at a time, one thread each"),
]
SMALL = {
    "seeds": 2,
    "little": 1024,
    "width": 16,
    "n_layers": 2,
    "steps": 40,
    "warmup": 5,
    "windows": 8,
    "held_out": 8,
    "other_seeds": 2,
    "passages": 2,
    "measure": 20,
    "k": 4,
}


@dataclass(frozen=True)
class Family:
    """What is trained one after the other: a model, or a treated one and its placebos.

    Attributes:
        part: of the study.
        text: "little" or "enough".
        arm: "loss alone", "up", "down" or "less identity".
        weight: of the term in the objective.
        config: how the models are trained.
        speed: by what the learning rate is multiplied.
        placebos: of a treatment.
    """

    part: str
    text: str
    arm: str
    weight: float
    config: small.TrainingConfig
    speed: float = 1.0
    placebos: tuple[str, ...] = ()


@dataclass(frozen=True)
class Design:
    """What all models of the study share."""

    corpus: small.Corpus
    little: int
    n_windows: int
    held_out: Int[Tensor, "n n_ctx"]
    passages: Int[Tensor, "n n_ctx"]
    k: int
    every: int
    evaluate: int
    measure: int
    out: Path
    n_held_out: int | None = None

    def text_of(self, family: Family) -> small.Corpus:
        """Return what a model learns from; little text is another one for each seed."""
        if family.text == "enough":
            return self.corpus
        n_pieces = self.little // small.PIECE
        return self.corpus.subset(self.little, family.config.seed * n_pieces)

    def held_out_of(self, seed: int) -> Int[Tensor, "n n_ctx"]:
        """Return the held-out windows of a seed's models: all, or so many that are drawn."""
        if self.n_held_out is None:
            return self.held_out
        generator = torch.Generator().manual_seed(seed + 3_000_000)
        drawn = torch.randperm(len(self.held_out), generator=generator)
        return self.held_out[drawn[: self.n_held_out]]


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `--small` changes the defaults of some."""
    parser = small.parser_of(str(__doc__), OPTIONS)
    parser.add_argument(
        "--table", type=Path, help="a folder whose results are only printed"
    )
    return small.parsed(parser, argv, SMALL)


def check_counts(arguments: argparse.Namespace, seeds: Sequence[str]) -> None:
    """Raise ValueError where an option is out of range; `seeds` are names of options."""
    for name in (*seeds, "jobs", "every", "evaluate", "measure"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least 1")
    if not 1 <= arguments.k < arguments.width:
        raise ValueError(
            f"`--k` must lie in [1, {arguments.width - 1}], got {arguments.k}"
        )


def families_of(arguments: argparse.Namespace) -> list[Family]:
    """Return all families, those of the primary part first.

    Raises:
        ValueError: an option out of range, or an unknown part.
    """
    check_counts(arguments, ("seeds", "other_seeds"))
    if unknown := set(arguments.parts) - set(PARTS):
        raise ValueError(
            f"`--parts` must be of {', '.join(PARTS)}, got {sorted(unknown)}"
        )
    names = ("width", "n_layers", "steps", "warmup", "weight_decay", "vocabulary")
    shared = {name: getattr(arguments, name) for name in (*names, "n_ctx", "batch")}
    base = small.TrainingConfig(
        **shared,
        n_heads=max(1, arguments.width // 16),
        learning_rate=arguments.learning_rate,
        final_rate=0.0,
    )
    other_rate = replace(base, learning_rate=arguments.other_rate)
    families = {
        part: partial(Family, part, "enough" if part == "enough" else "little")
        for part in PARTS
    }

    def arms(
        part: str,
        weight: float,
        config: small.TrainingConfig,
        placebos: tuple[str, ...] = PLACEBOS[:1],
    ) -> list[Family]:
        of_part = families[part]
        alone = of_part(LOSS_ALONE, weight, config)
        treated = [of_part(arm, weight, config, 1.0, placebos) for arm in TREATMENTS]
        return [alone, *treated]

    weight = arguments.weight
    of_parts = {
        "little": arms("little", weight, base, PLACEBOS),
        "enough": arms("enough", weight, base),
        "speed": [
            families["speed"](LOSS_ALONE, weight, base, speed)
            for speed in (1.0, *SPEEDS)
        ],
        "identity": [
            families["identity"](arm, weight, base)
            for arm in (LOSS_ALONE, LESS_IDENTITY)
        ],
        "rate": arms("rate", weight, other_rate),
        "dose": arms("dose", arguments.other_weight, base),
    }
    n_seeds = dict.fromkeys(PARTS, arguments.other_seeds)
    n_seeds["little"] = arguments.seeds
    return [
        replace(family, config=replace(family.config, seed=arguments.first_seed + i))
        for part in PARTS
        if part in arguments.parts
        for i in range(n_seeds[part])
        for family in of_parts[part]
    ]


def family_measured(family: Family, design: Design) -> list[xarray.Dataset]:
    """Train and measure the models of a family, on one thread, or load those that were
    finished before.
    """
    torch.set_num_threads(1)
    # Again, because this may be a process of its own.
    disable_progress_bar()
    first = kept_run(family, design, family.arm, None)
    # A placebo takes the lengths of gradients from its treated twin.
    lengths = torch.from_numpy(first["gradient_length"].to_numpy())
    placebos = [f"{placebo} {family.arm}" for placebo in family.placebos]
    return [first, *[kept_run(family, design, arm, lengths) for arm in placebos]]


def kept_run(
    family: Family,
    design: Design,
    arm: str,
    lengths: Float[Tensor, "term tensor"] | None,
) -> xarray.Dataset:
    """Return one model's measurements from its file, or make them and write it."""
    text = design.text_of(family)
    # Loss alone has no weight: one run serves all parts.
    weight = 0.0 if arm == LOSS_ALONE else family.weight
    config = replace(
        family.config, learning_rate=family.config.learning_rate * family.speed
    )
    held_out = design.held_out_of(config.seed)
    digest = small.digest_of(
        asdict(config),
        arm,
        weight,
        text.digest,
        (design.k, design.every, design.evaluate, design.measure),
        (held_out.tolist(), design.n_windows, design.passages.tolist()),
        None if lengths is None else lengths.tolist(),
        tlc.__version__,
    )
    name = file_name(f"{family.text}-{arm}-seed{config.seed}")
    data = small.kept(
        design.out / "measured" / f"{name}-{digest}.nc",
        lambda: trained(config, design, text, arm, weight, lengths),
    )
    known = {
        "part": family.part,
        "text": family.text,
        "arm": arm if family.speed == 1 else f"{arm} × {family.speed:g}",
        "weight": family.weight,
        "learning_rate": family.config.learning_rate,
        "seed": config.seed,
    }
    return data.assign_coords(known)


def trained(
    config: small.TrainingConfig,
    design: Design,
    text: small.Corpus,
    arm: str,
    weight: float,
    lengths: Float[Tensor, "term tensor"] | None,
) -> xarray.Dataset:
    """Train one model and measure it on the way.

    Variables: losses `[evaluated]`; what `measured` gives, `[measured]`; of each step
    that had the term `[term]` its own value, `term_value`, the length of its gradient
    before it was scaled, `own_length`, its cosine with the loss's, `cosine`, and with
    the term's gradient before, `cosine_with_last`, and the norm of both together,
    `whole_length`; and the length in each tensor as it was added, `gradient_length`
    `[term tensor]`.
    """
    model: Any = small.new_model(config)
    term = term_of(arm, config, design.k)
    windows = penalised_windows(config, text.tokens)
    # Activations are constants to the term: it has a gradient in the blocks alone.
    parameters = list(model.gpt_neox.layers.parameters())
    terms: list[dict[str, float]] = []
    added: list[Tensor] = []
    last_added: list[Tensor] = []

    def add_gradients(step: int) -> None:
        # Not at steps after which something is measured.
        if term is None or step % design.every != design.every // 2:
            return
        value = term(model, next(windows))
        gradients = torch.autograd.grad(
            weight * value, parameters, materialize_grads=True
        )
        own = torch.stack([gradient.norm() for gradient in gradients])
        if lengths is not None:
            twin = lengths[len(added)]
            gradients = tuple(
                # A tensor without a gradient has no direction to be scaled.
                gradient * (length / gradient.norm().clamp_min(1e-12))
                for gradient, length in zip(gradients, twin, strict=True)
            )
        dot = sum(
            float((parameter.grad * gradient).sum())
            for parameter, gradient in zip(parameters, gradients, strict=True)
        )
        of_loss = norm_of([parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad.add_(gradient)
        added.append(torch.stack([gradient.norm() for gradient in gradients]))
        alike = cosine_of(gradients, last_added) if last_added else float("nan")
        last_added[:] = gradients
        whole = [p.grad for p in model.parameters() if p.grad is not None]
        terms.append(
            {
                "term_value": float(value.detach()),
                "own_length": float(own.norm()),
                "cosine": dot / max(of_loss * float(added[-1].norm()), 1e-12),
                "whole_length": norm_of(whole),
                "cosine_with_last": alike,
            }
        )

    training = windows_of(text.tokens, config.n_ctx, design.n_windows)
    held_out = design.held_out_of(config.seed)
    at_first = [parameter.detach().clone() for parameter in parameters]
    losses: dict[int, dict[str, float]] = {}
    measurements: dict[int, dict[str, float]] = {}
    batches = small.batches(config, text.tokens)
    for step, _ in small.learn(model, config, batches, add_gradients):
        is_last = step == config.steps
        if is_last or step % design.evaluate == 0:
            model.eval()
            losses[step] = {
                "training": mean_loss(model, training),
                "held_out": mean_loss(model, held_out),
            }
            model.train()
        if is_last or step % design.measure == 0:
            moved = [new - old for new, old in zip(parameters, at_first, strict=True)]
            measurements[step] = measured(model, design.passages, design.k) | {
                "weights_norm": norm_of([p.detach() for p in parameters]),
                "weights_moved": norm_of([change.detach() for change in moved]),
            }
    along_losses = pandas.DataFrame.from_dict(losses, "index").rename_axis("evaluated")
    along_measured = pandas.DataFrame.from_dict(measurements, "index")
    columns = [*TERM_FACTS, "cosine_with_last"]
    along_terms = pandas.DataFrame(terms, columns=columns).rename_axis("term")
    tensors = torch.stack(added) if added else torch.empty(0, len(parameters))
    return xarray.merge(
        [
            along_losses.add_prefix("loss_").to_xarray(),
            along_measured.rename_axis("measured").to_xarray(),
            along_terms.astype(float).to_xarray(),
            xarray.Dataset({"gradient_length": (("term", "tensor"), tensors.numpy())}),
        ]
    )


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Return the norm of all gradients together."""
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


def cosine_of(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the cosine of two gradients, each of all tensors together."""
    dot = sum(float((a * b).sum()) for a, b in zip(gradients, others, strict=True))
    return dot / max(norm_of(gradients) * norm_of(others), 1e-12)


def penalised_windows(
    config: small.TrainingConfig, tokens: Int[Tensor, " n_tokens"]
) -> Iterator[Int[Tensor, "1 n"]]:
    """Yield short texts to take Jacobians on: the same ones in every arm of a seed."""
    generator = torch.Generator().manual_seed(config.seed + 1_000_000)
    longest = config.n_ctx // 2
    while True:
        (n,) = torch.randint(min(8, longest), longest + 1, (1,), generator=generator)
        (start,) = torch.randint(len(tokens) - longest, (1,), generator=generator)
        yield tokens[start : start + n][None]


Term = Callable[[Any, Int[Tensor, "1 n"]], Float[Tensor, ""]]


def term_of(arm: str, config: small.TrainingConfig, k: int) -> Term | None:
    """Return what an arm adds to the objective, at the last token of a short text.

    Raises:
        ValueError: an unknown arm.
    """
    if arm == LOSS_ALONE:
        return None
    if arm == LESS_IDENTITY:
        return lambda model, ids: identity_share(jacobians(model, ids)).mean()
    treatment = arm.split()[-1]
    if treatment not in TREATMENTS:
        raise ValueError(f"`arm` is unknown: {arm!r}")
    sign = TREATMENTS[treatment]
    if arm == treatment:
        return lambda model, ids: (
            sign
            * tlc.training.coupling(
                model.gpt_neox.layers, lambda: model(ids), k, activations="detached"
            )
        )
    left, right = random_rotations(config)
    if arm.startswith("twisted"):
        return lambda model, ids: (
            sign
            * tlc.training.coupling_of_jacobians(
                left.mT @ jacobians(model, ids) @ right, k
            )
        )
    U, V = left[..., :k], right[..., :k]
    return lambda model, ids: sign * diagonal_in(jacobians(model, ids), U, V).mean()


def jacobians(model: Any, ids: Int[Tensor, "1 n"]) -> Float[Tensor, "n_layers d d"]:
    """Return the blocks' Jacobians at the last token, with a gradient."""
    return tlc.training.jacobians(
        model.gpt_neox.layers, lambda: model(ids), activations="detached"
    )[0]


def random_rotations(
    config: small.TrainingConfig,
) -> Float[Tensor, "side n_layers d d"]:
    """Return rotations of its own for each block, of what it writes and what it reads."""
    generator = torch.Generator().manual_seed(config.seed + 2_000_000)
    shape = (2, config.n_layers, config.width)
    return tlc.measures.random_rotations(*shape, generator=generator).float()


def diagonal_in(
    J: Float[Tensor, "n_layers d d"],
    U: Float[Tensor, "n_layers d k"],
    V: Float[Tensor, "n_layers d k"],
) -> Float[Tensor, " n_layers"]:
    """Return how far given frames diagonalise each Jacobian: the functional of coupling,
    with these in the place of another block's singular vectors.
    """
    A = einsum(U, J, V, "layer i a, layer i j, layer j b -> layer a b")
    energy = A.square()
    total = reduce(energy, "layer a b -> layer", "sum")
    diagonal = energy.diagonal(dim1=-2, dim2=-1).sum(-1)
    off_share = (total - diagonal) / total
    return 1 - off_share.clamp_min(torch.finfo(J.dtype).eps).sqrt()


def identity_share(J: Float[Tensor, "n_layers d d"]) -> Float[Tensor, " n_layers"]:
    """Return `(tr J)² / (d ‖J‖_F²)`: how much of J is a multiple of the identity."""
    trace = J.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace.square() / (J.shape[-1] * J.square().sum((-1, -2)))


def measured(model: Any, passages: Int[Tensor, "n n_ctx"], k: int) -> dict[str, float]:
    """Return what a model is made of, mean over passages, at the last token.

    Coupling; coupling of what is left of each block without its best multiple of the
    identity; that multiple's share; the energy that subspaces share, paired or not; the
    size of the Jacobians; and the line-shape score.
    """
    rows = []
    for ids in passages:
        step = tlc.training.measure(
            model.gpt_neox.layers, lambda ids=ids: model(ids[None]), k
        )
        J = tlc.block_jacobians(step.trace, progress=False)
        multiple = J.diagonal(dim1=-2, dim2=-1).mean(-1)
        rest = J - multiple[:, None, None] * torch.eye(J.shape[-1])
        without = tlc.comparisons.jacobian_coupling(rest, k)
        rows.append(
            {
                "coupling": step.coupling,
                "coupling_without_identity": without.mean(),
                "identity_share": float(identity_share(J).mean()),
                "captured_energy": step.depth.mean(measure="captured_energy"),
                "size_of_J": float(torch.linalg.matrix_norm(J).mean()),
                "line_shape_score": step.line_shape_score,
            }
        )
    return pandas.DataFrame(rows).mean().to_dict()


def table_of(runs: Sequence[xarray.Dataset]) -> pandas.DataFrame:
    """One row per model and step at which losses were taken; what is measured at fewer
    steps is missing between them, and facts of the term are means over steps.
    """
    tables = []
    for run in runs:
        losses = run[["loss_training", "loss_held_out"]].to_dataframe()
        made_of = [name for name in (*MADE_OF, *MOVED) if name in run]
        along = run[made_of].to_dataframe()[made_of].rename_axis("evaluated")
        table = losses.join(along).reset_index().rename(columns={"evaluated": "step"})
        facts = [name for name in (*TERM_FACTS, "cosine_with_last") if name in run]
        terms = run[facts].reset_coords(drop=True).to_dataframe()
        # `learn` clips at 1.
        terms["share_clipped"] = (terms["whole_length"] > 1).astype(float)
        terms["added_length"] = np.linalg.norm(run["gradient_length"], axis=1)
        # NaN of loss alone, which has no term.
        tables.append(table.assign(**terms.mean()))
    return pandas.concat(tables, ignore_index=True)


def design_of(arguments: argparse.Namespace, out: Path) -> Design:
    """Return what all models share: texts, passages, and when what is taken."""
    corpus = small.build_corpus(
        small.read_documents(arguments.text), arguments.vocabulary
    )
    held_out = windows_of(corpus.held_out_tokens, arguments.n_ctx, arguments.held_out)
    passages = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.passages, arguments.n_ctx
    )
    ids = [
        corpus.tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in passages
    ]
    shortest = min(map(len, ids))
    return Design(
        corpus,
        arguments.little,
        arguments.windows,
        held_out,
        torch.tensor([passage[:shortest] for passage in ids]),
        arguments.k,
        arguments.every,
        arguments.evaluate,
        arguments.measure,
        out,
    )


def measured_table(
    families: Sequence[Family], design: Design, jobs: int
) -> pandas.DataFrame:
    """Train and measure all families, or load what is there; see `table_of`."""
    runs: list[xarray.Dataset] = []
    with small.parallel_map(jobs) as mapped:
        results = mapped(partial(family_measured, design=design), families)
        for of_family in tqdm(results, "families", len(families)):
            runs += of_family
    return table_of(runs)


def write_tables(table: pandas.DataFrame, out: Path) -> list[Path]:
    """Write the tables of each part, and return where they are."""
    paths = []
    for part, of_part in table.groupby("part", sort=False):
        for name, of_name in tables_of_part(of_part).items():
            # Differences of losses are a thousandth of them.
            save = partial(of_name.to_csv, index=False, float_format="%.7g")
            paths.append(write_atomically(out / f"{name}-{part}.csv", save))
    return paths


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    families = families_of(arguments)
    with output_folder(arguments.out) as out:
        design = design_of(arguments, out)
        table = measured_table(families, design, arguments.jobs)
        paths = write_tables(table, out)
        # As `--table` reads them, so that both print the same.
        models = read_tables(out, "models")
        print_report(models)
        figure = draw(read_tables(out, "curves"), models, arguments.k)
        save = partial(figure.savefig, dpi=200, format="png")
        paths.append(write_atomically(out / "treatment.png", save))
    print(*paths, sep="\n")


def read_tables(
    folder: Path, name: str, parts: Sequence[str] = PARTS
) -> pandas.DataFrame:
    """Return the tables of all parts that are in a folder, in the order of the parts.

    Raises:
        ValueError: there are none.
    """
    paths = [folder / f"{name}-{part}.csv" for part in parts]
    tables = [pandas.read_csv(path) for path in paths if path.exists()]
    if not tables:
        raise ValueError(f"there are no results in {folder}: run it without --table")
    return pandas.concat(tables, ignore_index=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    if arguments.table is not None:
        folder = arguments.table
        return small.status_of(lambda: print_report(read_tables(folder, "models")))
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
