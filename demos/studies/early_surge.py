"""Why coupling surges in the first steps of a small language model, and over what that holds.

    python demos/studies/early_surge.py --out out/surge

Small Pythias are trained from several seeds, widths, depths and learning rates, and coupling of their layers is
measured at log-spaced steps. For the seeds of the first, further numbers tell explanations apart: is J dominated by a
few directions, do all layers share one, is it that of frequent tokens, or do the blocks share one map? Last, training
is tampered with (`surge_interventions.py`): a cause taken away should take the surge with it.

What is finished is kept: a second run trains and measures only what is missing.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xarray
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import surge_probes as probes
import tl_coupling as tlc
from small_models import (
    Corpus,
    TrainingConfig,
    add_training_options,
    build_corpus,
    checkpoint_steps,
    config_of,
    passages,
    read_documents,
    train,
)
from surge_interventions import INTERVENTIONS, intervene
from surge_report import draw, report
from tl_coupling.files import file_name, output_folder, write_atomically
from tl_coupling.models import ModelError
from tl_coupling.surveys.checkpoints import local_checkpoints
from tl_coupling.surveys.measurements import loss
from tl_coupling.surveys.units import Folder, Unit, load_unit

# Training windows whose loss gradients are taken, and how many directions of theirs count as the leading ones.
WINDOWS, LEADING = 8, 20
# Where interventions and the double width end, for time: the surge is over by the first, the peak past by the second.
INTERVENED_UNTIL, WIDE_UNTIL = 32, 128


@dataclass(frozen=True)
class Run:
    """One training run: what is varied in it, how it is trained, and the steps to measure.

    `kind` is "base" (measured with all probes), "variant", or "intervention" (`variant` names it).
    """

    variant: str
    config: TrainingConfig
    steps: tuple[int, ...]
    kind: str = "variant"

    @property
    def name(self) -> str:
        """The variant and the seed."""
        return f"{self.variant}, seed {self.config.seed}"


@dataclass(frozen=True)
class Study:
    """What all runs share: the text, the passages that are measured, the number of singular vectors, the folder."""

    corpus: Corpus
    prompts: tuple[str, ...]
    k: int
    out: Path


def runs_of(base: TrainingConfig, steps: tuple[int, ...], seeds: int) -> list[Run]:
    """The base from every seed, one thing changed at a time, then the interventions, from two seeds where there are.

    Depth is varied at half the width, for time.
    """
    narrow = replace(base, width=base.width // 2, n_heads=max(1, base.n_heads // 2))
    wide = replace(base, width=2 * base.width, n_heads=2 * base.n_heads)
    first = [replace(base, seed=base.seed + i) for i in range(seeds)]
    found = [Run("base", config, steps, "base") for config in first]
    found += [
        Run(f"learning rate {base.learning_rate / 4:g}", replace(base, learning_rate=base.learning_rate / 4), steps),
        Run("warm-up over 100 steps", replace(base, warmup=100), steps),
        _until(WIDE_UNTIL, Run(f"width {wide.width}", wide, steps)),
        Run(f"width {narrow.width}", narrow, steps),
    ]
    for n_layers in (max(2, base.n_layers - 2), base.n_layers + 2):
        config = replace(narrow, n_layers=n_layers)
        found.append(Run(f"width {narrow.width}, {n_layers} blocks", config, steps))
    # The rotations are the seed's as well.
    interventions = [Run(name, config, steps, "intervention") for name in INTERVENTIONS for config in first[:2]]
    return [*found, *(_until(INTERVENED_UNTIL, run) for run in interventions)]


def _until(last: int, run: Run) -> Run:
    steps = tuple(step for step in run.steps if step <= last)
    return replace(run, config=replace(run.config, steps=max(steps)), steps=steps)


def one_run(run: Run, study: Study) -> xarray.Dataset:
    """Train and measure one run. One thread: other runs have the other cores.

    Raises:
        ModelError: a checkpoint could not be measured.
    """
    torch.set_num_threads(1)
    # Once more: this may be a process of its own.
    disable_progress_bar()
    plan = {
        "run": run.name,
        "training": asdict(run.config),
        "text": study.corpus.digest,
        "prompts": study.prompts,
        "k": study.k,
    }
    if run.kind == "intervention":
        units = [Unit("intervention", {"steps": run.steps})]
        measure = partial(intervened, run, study)
    else:
        checkpoints = local_checkpoints(train(run.config, study.corpus, study.out / "runs"))
        units = [Unit(f"step{step}", {"step": step}) for step in run.steps]
        measure = partial(measured, run, study, checkpoints)
    with output_folder(study.out / "measured" / file_name(run.name)) as folder:
        for outcome in Folder(folder, plan).run(units, measure, False):
            if outcome.error is not None:
                raise ModelError(f"{run.name}, {outcome.unit.key}: {outcome.error}")
        data = xarray.concat([load_unit(folder, unit) for unit in units], "checkpoint")
    return data.assign_coords(
        run=run.name, variant=run.variant, kind=run.kind, seed=run.config.seed, training=json.dumps(asdict(run.config))
    )


def intervened(run: Run, study: Study, _: Unit) -> xarray.Dataset:
    """One run of tampered training, all its steps."""
    return intervene(run.variant, run.config, study.corpus, study.prompts, run.steps, study.k)


def measured(run: Run, study: Study, checkpoints: dict[int, Path], unit: Unit) -> xarray.Dataset:
    """Coupling and loss at one checkpoint, `[checkpoint prompt]`; for the base also what tells explanations apart."""
    step = unit.what["step"]
    model = tlc.load_model(str(checkpoints[step]), device="cpu")
    traces = [tlc.trace(model, prompt) for prompt in study.prompts]
    J = torch.stack([tlc.block_jacobians(trace) for trace in traces]).double()
    found = [
        {
            "coupling": probes.mean_coupling(one, study.k),
            "cosine_of_jacobians": probes.mean_cosine(one),
            "loss": loss(trace),
        }
        for one, trace in zip(J, traces, strict=True)
    ]
    if run.kind == "base":
        environment = environment_of(AutoModelForCausalLM.from_pretrained(checkpoints[step]), study.corpus, run.config)
        generator = torch.Generator().manual_seed(step)
        found = [row | explain(one, environment, study.k, generator) for row, one in zip(found, J, strict=True)]
    dims = ("checkpoint", "prompt")
    return xarray.Dataset({name: (dims, [[row[name] for row in found]]) for name in found[0]}, {"checkpoint": [step]})


@dataclass(frozen=True)
class Environment:
    """What the blocks of a model learn from, over windows of the text.

    Attributes:
        feedback: the leading directions of the loss gradient at each block's output, over tokens.
        inputs: the leading principal components of each block's normed input.
        cosine_of_gradients: mean cosine of the gradients (over all tokens at once) between blocks.
        frequent: the direction of frequent tokens, `frequency_direction`.
    """

    feedback: Float[Tensor, "n_layers d m"]
    inputs: Float[Tensor, "n_layers d m"]
    cosine_of_gradients: float
    frequent: Float[Tensor, " d"]


def environment_of(model: Any, corpus: Corpus, config: TrainingConfig) -> Environment:
    """Gradients and inputs over evenly spread windows of the text, the same for every seed."""
    starts = torch.linspace(0, len(corpus.tokens) - config.n_ctx, WINDOWS).long()
    gradients, inputs = gradients_and_inputs(model, corpus.tokens[starts[:, None] + torch.arange(config.n_ctx)])
    counts = torch.bincount(corpus.tokens, minlength=config.vocabulary).double()
    unembedding = model.get_output_embeddings().weight.detach().double()
    return Environment(
        feedback=torch.stack([probes.leading_directions(g, LEADING) for g in gradients]),
        inputs=torch.stack([probes.leading_directions(n - n.mean(0), LEADING) for n in inputs]),
        cosine_of_gradients=probes.mean_cosine(gradients),
        frequent=probes.frequency_direction(unembedding, counts / counts.sum()),
    )


def gradients_and_inputs(
    model: Any, tokens: Int[Tensor, "n_windows n_ctx"]
) -> tuple[Float[Tensor, "n_layers n d"], Float[Tensor, "n_layers n d"]]:
    """Loss gradients at every block's output, and normed inputs of its MLP: all tokens but each window's last.

    That one predicts nothing: its gradient is zero.
    """
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for block in model.gpt_neox.layers:
        block.register_forward_hook(keep)
        block.post_attention_layernorm.register_forward_hook(lambda _, __, normed: inputs.append(normed.detach()))
    logits = model(tokens).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = [output.grad[:, :-1].flatten(0, 1) for output in outputs if output.grad is not None]
    return torch.stack(gradients).double(), torch.stack([n[:, :-1].flatten(0, 1) for n in inputs]).double()


def explain(
    J: Float[Tensor, "n_layers d d"], environment: Environment, k: int, generator: torch.Generator
) -> dict[str, float]:
    """Every probe of one prompt's Jacobians, by name; `surge_report.PROBES` says what each is."""
    spectrum = tlc.svd(J)
    U, V = spectrum.U[..., :k], spectrum.Vh[:, :k].mT
    of_frequent = torch.nn.functional.cosine_similarity(U[..., 0], environment.frequent[None])
    return {
        "participation_ratio": float(tlc.spectra.participation_ratio(spectrum.S).mean()),
        "sigma_1_share": probes.sigma_1_share(spectrum.S),
        "coupling_of_random_vectors": probes.mean_coupling(probes.with_random_vectors(J, generator), k),
        "coupling_without_own_top": probes.mean_coupling(probes.without_own_top(J), k),
        "coupling_without_shared_1": probes.mean_coupling(probes.without_shared_directions(J, 1), k),
        "coupling_without_shared_5": probes.mean_coupling(probes.without_shared_directions(J, 5), k),
        "coupling_without_shared_map": probes.coupling_without_shared_map(J, k),
        "cosine_with_frequent": float(of_frequent.abs().mean()),
        "left_in_feedback": probes.mean_overlap(environment.feedback, U),
        "right_in_inputs": probes.mean_overlap(environment.inputs, V),
        "cosine_of_gradients": environment.cosine_of_gradients,
    }


def together(found: Sequence[xarray.Dataset], study: Study, base: TrainingConfig) -> xarray.Dataset:
    """All runs along `run`; NaN where a run was not measured at a step, or not with a probe."""
    data = xarray.concat(found, "run", data_vars="all", coords="all", join="outer").sortby("checkpoint")
    data = data.assign_coords(text=("prompt", list(study.prompts)))
    return data.assign_attrs(
        k=study.k,
        null=float(tlc.random_subspace_null(study.k)),
        leading=LEADING,
        d_model=base.width,
        model=f"GPT-NeoX trained here: {base.n_layers} blocks of width {base.width}, rate {base.learning_rate:g}",
        text_digest=study.corpus.digest,
        versions=json.dumps({"tl_coupling": tlc.__version__, "torch": torch.__version__}),
    )


def study_here(base: TrainingConfig, arguments: argparse.Namespace) -> xarray.Dataset:
    """All runs, `jobs` at a time in processes of their own.

    Raises:
        ValueError: no seeds, jobs or blocks enough, or steps at which no checkpoint lies.
    """
    if min(arguments.seeds, arguments.jobs) < 1:
        raise ValueError(f"`--seeds` and `--jobs` must be at least 1, got {arguments.seeds} and {arguments.jobs}")
    if base.n_layers < 4:
        raise ValueError(f"`--n-layers` must be at least 4: a map that others share wants others, got {base.n_layers}")
    if not 2 <= arguments.k <= base.width // 2:
        raise ValueError(f"`--k` must lie in [2, {base.width // 2}] (half the width is a variant), got {arguments.k}")
    there = checkpoint_steps(base.steps)
    wanted = arguments.at or [step for step in there if step & (step - 1) == 0 or step == base.steps]
    if 0 not in wanted or not set(wanted) <= set(there):
        raise ValueError(f"`--at` must hold 0, and steps with a checkpoint, {list(there)}, got {wanted}")
    corpus = build_corpus(read_documents(arguments.text), base.vocabulary)
    prompts = passages(corpus.held_out, corpus.tokenizer, arguments.prompts, base.n_ctx)
    study = Study(corpus, tuple(prompts), arguments.k, arguments.out)
    runs = runs_of(base, tuple(sorted(set(wanted))), arguments.seeds)
    work = partial(one_run, study=study)
    # Closed before an error is shown: a bar does not end its line.
    with tqdm(desc="runs", total=len(runs)) as bar:
        if arguments.jobs == 1:
            return together(_counted(map(work, runs), bar), study, base)
        # Threads that share the cores of others wait for each other at every operation; processes of one do not.
        with tlc.surveys.process_pool(arguments.jobs) as pool:
            return together(_counted(pool.map(work, runs), bar), study, base)


def _counted(results: Iterable[xarray.Dataset], bar: Any) -> list[xarray.Dataset]:
    found = []
    for result in results:
        found.append(result)
        bar.update()
    return found


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every field of `TrainingConfig` is an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/surge"), help="checkpoints, netCDF and figure")
    parser.add_argument("--text", type=Path, help="what to learn; the standard library's source by default")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the base, from --seed on (default 3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: all cores)")
    parser.add_argument("--prompts", type=int, default=4, help="held-out passages (default 4)")
    parser.add_argument("--k", type=int, default=5, help="singular vectors (default 5)")
    parser.add_argument("--at", type=int, nargs="+", help="steps to measure (default 0, 1, 2, 4, 8, … and the last)")
    add_training_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, report, draw."""
    arguments = arguments_of(argv)
    # Dozens of bars, for saving and loading a few megabytes each.
    disable_progress_bar()
    try:
        base = config_of(arguments)
        with output_folder(arguments.out) as out:
            data = study_here(base, arguments)
            paths = [write_atomically(out / "surge.nc", partial(data.to_netcdf, engine="netcdf4"))]
            figure = draw(data)
            paths.append(write_atomically(out / "surge.png", partial(figure.savefig, dpi=120, format="png")))
    except (ValueError, OSError, ModelError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    # Tables of a dozen steps: rather wrapped by a narrow terminal than cut.
    console = Console(width=max(180, Console().width))
    report(data, console)
    console.print("\n".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
