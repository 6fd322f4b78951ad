"""Why coupling surges in the first steps of a small language model, and how far that
holds.

    python demos/studies/early_surge.py --out out/surge

Sixteen minutes of two busy cores. Tables and measurements that the findings cite are in
`demos/studies/results/surge`.

Small Pythias are trained from several seeds and with several widths, depths and
learning rates, and the coupling of their layers is measured at log-spaced steps. For
the seeds of the base, further numbers tell explanations apart: is J dominated by a few
directions, do all layers share one, is it the direction of frequent tokens, or do the
blocks share one map? Finally, training is changed (`surge_interventions.py`): with its
cause removed, the surge should disappear.

Finished runs are kept: a second call trains and measures only what is missing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pandas
import torch
import xarray
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from tl_coupling.files import file_name, output_folder, write_atomically
from tl_coupling.measures import without_shared, without_top
from tl_coupling.studies.surveys import local_checkpoints, loss

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
import surge_probes as probes
from surge_interventions import INTERVENTIONS, intervene
from surge_report import draw, report

# Training windows whose loss gradients are taken, and how many of their directions
# count as the leading ones.
WINDOWS = 8
LEADING = 20
# Where interventions and the double width stop, to save time: the surge, and the peak,
# are over by then.
INTERVENED_UNTIL = 32
WIDE_UNTIL = 128


@dataclass(frozen=True)
class Run:
    """One training run: what is varied, how it is trained, and the steps to measure.

    `kind` is "base" (measured with all probes), "variant", or "intervention" (`variant`
    names it).
    """

    variant: str
    config: small.TrainingConfig
    steps: tuple[int, ...]
    kind: str = "variant"

    def until(self, last: int) -> "Run":
        """Return the same run, stopped at a step."""
        steps = tuple(step for step in self.steps if step <= last)
        return replace(self, config=replace(self.config, steps=max(steps)), steps=steps)


@dataclass(frozen=True)
class Study:
    """What all runs share: the text, the passages that are measured, the number of
    singular vectors, the folder.
    """

    corpus: small.Corpus
    prompts: tuple[str, ...]
    k: int
    out: Path


def runs_of(
    base: small.TrainingConfig, steps: tuple[int, ...], seeds: int
) -> list[Run]:
    """Return the base from every seed; one change at a time; the interventions, from at
    most two seeds.

    Depth is varied at half the width, to save time.
    """
    narrow = replace(base, width=base.width // 2, n_heads=max(1, base.n_heads // 2))
    wide = replace(base, width=2 * base.width, n_heads=2 * base.n_heads)
    rate = base.learning_rate / 4
    seeded = [replace(base, seed=base.seed + i) for i in range(seeds)]
    return [
        *(Run("base", config, steps, "base") for config in seeded),
        Run(f"learning rate {rate:g}", replace(base, learning_rate=rate), steps),
        Run("warm-up over 100 steps", replace(base, warmup=100), steps),
        Run(f"width {wide.width}", wide, steps).until(WIDE_UNTIL),
        Run(f"width {narrow.width}", narrow, steps),
        *(
            Run(
                f"width {narrow.width}, {n_layers} blocks",
                replace(narrow, n_layers=n_layers),
                steps,
            )
            for n_layers in (max(2, base.n_layers - 2), base.n_layers + 2)
        ),
        # The seed also draws the rotations.
        *(
            Run(name, config, steps, "intervention").until(INTERVENED_UNTIL)
            for name in INTERVENTIONS
            for config in seeded[:2]
        ),
    ]


def one_run(run: Run, study: Study) -> xarray.Dataset:
    """Train and measure one run, or load it if that was done before."""
    torch.set_num_threads(1)
    # Again, because this may be a process of its own.
    disable_progress_bar()
    name = f"{run.variant}, seed {run.config.seed}"
    training = json.dumps(asdict(run.config))
    digest = small.digest_of(
        name,
        training,
        run.steps,
        study.corpus.digest,
        study.prompts,
        study.k,
        tlc.__version__,
    )

    def compute() -> xarray.Dataset:
        if run.kind == "intervention":
            data = intervene(
                run.variant, run.config, study.corpus, study.prompts, run.steps, study.k
            )
        else:
            checkpoints = local_checkpoints(
                small.train(run.config, study.corpus, study.out / "runs")
            )
            data = xarray.concat(
                [measured(run, study, step, checkpoints[step]) for step in run.steps],
                "checkpoint",
            )
        return data.assign_coords(
            run=name,
            variant=run.variant,
            kind=run.kind,
            seed=run.config.seed,
            training=training,
        )

    return small.kept(
        study.out / "measured" / f"{file_name(name)}-{digest}.nc", compute
    )


def measured(run: Run, study: Study, step: int, checkpoint: Path) -> xarray.Dataset:
    """Coupling and loss at one checkpoint, `[checkpoint prompt]`; for the base, also
    what tells explanations apart.
    """
    model = tlc.load_model(str(checkpoint), device="cpu")
    traces = [tlc.trace(model, prompt) for prompt in study.prompts]
    J = torch.stack([tlc.block_jacobians(trace) for trace in traces]).double()
    rows = [
        {
            "coupling": probes.mean_coupling(jacobians, study.k),
            "cosine_of_jacobians": probes.mean_cosine(jacobians),
            "loss": loss(trace),
        }
        for jacobians, trace in zip(J, traces, strict=True)
    ]
    if run.kind == "base":
        environment = environment_of(
            AutoModelForCausalLM.from_pretrained(checkpoint), study.corpus, run.config
        )
        generator = torch.Generator().manual_seed(step)
        rows = [
            row | explain(jacobians, environment, study.k, generator)
            for row, jacobians in zip(rows, J, strict=True)
        ]
    return probes.dataset([rows], [step])


@dataclass(frozen=True)
class Environment:
    """What the blocks of a model learn from, over windows of the text.

    Attributes:
        feedback: the leading directions of the loss gradient at each block's output,
            over tokens.
        inputs: the leading principal components of each block's normed input.
        cosine_of_gradients: mean cosine of the gradients (over all tokens at once)
            between blocks.
        frequent: the direction of frequent tokens, `frequency_direction`.
    """

    feedback: Float[Tensor, "n_layers d m"]
    inputs: Float[Tensor, "n_layers d m"]
    cosine_of_gradients: float
    frequent: Float[Tensor, " d"]


def environment_of(
    model: Any, corpus: small.Corpus, config: small.TrainingConfig
) -> Environment:
    """Gradients and inputs over evenly spread windows of the text, the same for every
    seed.
    """
    starts = torch.linspace(0, len(corpus.tokens) - config.n_ctx, WINDOWS).long()
    gradients, inputs = gradients_and_inputs(
        model, corpus.tokens[starts[:, None] + torch.arange(config.n_ctx)]
    )
    counts = torch.bincount(corpus.tokens, minlength=config.vocabulary).double()
    unembedding = model.get_output_embeddings().weight.detach().double()
    return Environment(
        feedback=torch.stack(
            [probes.leading_directions(g, LEADING) for g in gradients]
        ),
        inputs=torch.stack(
            [probes.leading_directions(n - n.mean(0), LEADING) for n in inputs]
        ),
        cosine_of_gradients=probes.mean_cosine(gradients),
        frequent=probes.frequency_direction(unembedding, counts / counts.sum()),
    )


def gradients_and_inputs(
    model: Any, tokens: Int[Tensor, "n_windows n_ctx"]
) -> tuple[Float[Tensor, "n_layers n d"], Float[Tensor, "n_layers n d"]]:
    """Loss gradients at every block's output, and normed inputs of its MLP: all tokens
    but each window's last.

    That one predicts nothing: its gradient is zero.
    """
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for block in model.gpt_neox.layers:
        block.register_forward_hook(keep)
        block.post_attention_layernorm.register_forward_hook(
            lambda _, __, normed: inputs.append(normed.detach())
        )
    logits = model(tokens).logits[:, :-1]
    nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    gradients = [
        output.grad[:, :-1].flatten(0, 1)
        for output in outputs
        if output.grad is not None
    ]
    return torch.stack(gradients).double(), torch.stack(
        [n[:, :-1].flatten(0, 1) for n in inputs]
    ).double()


def explain(
    J: Float[Tensor, "n_layers d d"],
    environment: Environment,
    k: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """Every probe of one prompt's Jacobians, by name; `surge_report.PROBES` says what
    each is.
    """
    spectrum = tlc.svd(J)
    U = spectrum.U[..., :k]
    V = spectrum.Vh[:, :k].mT
    of_frequent = nn.functional.cosine_similarity(U[..., 0], environment.frequent[None])
    return {
        "participation_ratio": float(
            tlc.spectra.participation_ratio(spectrum.S).mean()
        ),
        "sigma_1_share": probes.sigma_1_share(spectrum.S),
        "coupling_of_random_vectors": probes.mean_coupling(
            probes.with_random_vectors(J, generator), k
        ),
        "coupling_without_own_top": probes.mean_coupling(without_top(J, 1), k),
        "coupling_without_shared_1": probes.mean_coupling(without_shared(J, 1), k),
        "coupling_without_shared_5": probes.mean_coupling(without_shared(J, 5), k),
        "coupling_without_shared_map": probes.coupling_without_shared_map(J, k),
        "cosine_with_frequent": float(of_frequent.abs().mean()),
        "left_in_feedback": probes.mean_overlap(environment.feedback, U),
        "right_in_inputs": probes.mean_overlap(environment.inputs, V),
        "cosine_of_gradients": environment.cosine_of_gradients,
    }


def together(
    measurements: Sequence[xarray.Dataset], study: Study, base: small.TrainingConfig
) -> xarray.Dataset:
    """All runs along `run`; NaN where a run was not measured at a step, or not with a
    probe.
    """
    data = xarray.concat(
        measurements, "run", data_vars="all", coords="all", join="outer"
    ).sortby("checkpoint")
    data = data.assign_coords(text=("prompt", list(study.prompts)))
    return data.assign_attrs(
        k=study.k,
        null=float(tlc.random_subspace_null(study.k)),
        leading=LEADING,
        d_model=base.width,
        model=(
            f"GPT-NeoX trained here: {base.n_layers} blocks of width "
            f"{base.width}, rate {base.learning_rate:g}"
        ),
        text_digest=study.corpus.digest,
        versions=json.dumps(
            {"tl_coupling": tlc.__version__, "torch": torch.__version__}
        ),
    )


def study_here(
    base: small.TrainingConfig, arguments: argparse.Namespace
) -> xarray.Dataset:
    """All runs, `jobs` at a time.

    Raises:
        ValueError: too few blocks, k out of range, or steps without a checkpoint.
    """
    if base.n_layers < 4:
        raise ValueError(
            f"`--n-layers` must be at least 4: a map shared by others "
            f"needs others, got {base.n_layers}"
        )
    if not 2 <= arguments.k <= base.width // 2:
        raise ValueError(
            f"`--k` must lie in [2, {base.width // 2}] (half the width is "
            f"a variant), got {arguments.k}"
        )
    saved_steps = small.checkpoint_steps(base.steps)
    steps = arguments.at or [
        step for step in saved_steps if step & (step - 1) == 0 or step == base.steps
    ]
    if 0 not in steps or not set(steps) <= set(saved_steps):
        raise ValueError(
            f"`--at` must hold 0, and steps with a checkpoint, {list(saved_steps)}, "
            f"got {steps}"
        )
    corpus = small.build_corpus(small.read_documents(arguments.text), base.vocabulary)
    prompts = small.passages(
        corpus.held_out, corpus.tokenizer, arguments.prompts, base.n_ctx
    )
    study = Study(corpus, tuple(prompts), arguments.k, arguments.out)
    runs = runs_of(base, tuple(sorted(set(steps))), arguments.seeds)
    # The bar ends before an error is printed.
    with (
        small.parallel_map(arguments.jobs) as mapped,
        tqdm(desc="runs", total=len(runs)) as bar,
    ):
        measurements = []
        for of_run in mapped(partial(one_run, study=study), runs):
            measurements.append(of_run)
            bar.update()
    return together(measurements, study, base)


def table_of_runs(data: xarray.Dataset) -> pandas.DataFrame:
    """Return a row for each run and step that was measured: means over the prompts."""
    means = data.mean("prompt").reset_coords(["variant", "kind", "seed"])
    table = means.drop_vars("training").to_dataframe().reset_index()
    first = ["run", "variant", "kind", "seed", "checkpoint"]
    columns = [*first, *(name for name in table if name not in first)]
    return table[columns].dropna(subset=["coupling"]).round(5)


def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    base = small.config_of(arguments)
    with output_folder(arguments.out) as out:
        data = study_here(base, arguments)
        paths = [
            write_atomically(
                out / "surge.nc", partial(data.to_netcdf, engine="netcdf4")
            )
        ]
        paths.append(
            write_atomically(
                out / "surge.png", partial(draw(data).savefig, dpi=120, format="png")
            )
        )
        table = table_of_runs(data)
        paths.append(
            write_atomically(
                out / "measured.csv", lambda path: table.to_csv(path, index=False)
            )
        )
        written = Console(width=180, file=StringIO())
        report(data, written)
        text = written.file.getvalue()
        paths.append(
            write_atomically(out / "report.txt", lambda path: path.write_text(text))
        )
    # Tables of a dozen steps: better wrapped by a narrow terminal than cut off.
    console = Console(width=max(180, Console().width))
    report(data, console)
    console.print("\n".join(map(str, paths)), highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = small.training_parser(str(__doc__), "out/surge", seeds=3, prompts=4)
    parser.add_argument("--k", type=int, default=5, help="singular vectors (default 5)")
    parser.add_argument(
        "--at",
        type=int,
        nargs="+",
        help="steps to measure (default 0, 1, 2, 4, 8, … and the last)",
    )
    arguments = parser.parse_args(argv)
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
