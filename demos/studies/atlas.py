"""What the atlas shows: maps of trained models, of their untrained twins, and of one
small model while it learns.

    python demos/studies/atlas.py --models smollm2-135m path/to/model.gguf \\
        --prompts prompts.jsonl --out out/atlas
    tl-coupling atlas out/atlas --out demos/studies/results/atlas

Every model and its twin are measured on the same prompts, four of each task of a JSONL
file, and the checkpoints of a small Pythia, which learns the standard library's source
here, on passages that it has not seen. Each has a folder of a survey in `--out`; what is
there is not measured again, and other surveys may be put beside them. The second command
draws the page of all of them.

A prompt takes a few seconds for each model and its twin.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tl_coupling as tlc
from study_names import model_name

sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small

KS = (3, 10, 30)
N_OF_TASK = 4
N_PASSAGES = 4
SMALL_MODEL = "Pythia of 6 layers"
TEXT = "Python source"


def run(
    name: str,
    models: Mapping[str, str | Path],
    prompts: Sequence[tlc.Prompt],
    folder: Path,
    untrained: bool,
) -> None:
    """Measure what is not there yet."""
    settings = tlc.Settings(k=KS, window=3, measures=("coupling",))
    survey = tlc.Survey(models, prompts, untrained=untrained, settings=settings)
    tlc.run_survey(survey, folder / name, progress=True)


def run_small_model(config: small.TrainingConfig, folder: Path) -> None:
    """Train the small model, and measure its checkpoints."""
    corpus = small.build_corpus(small.read_documents(), config.vocabulary)
    checkpoints = small.train(config, corpus, folder / "training")
    passages = small.passages(
        corpus.held_out, corpus.tokenizer, N_PASSAGES, config.n_ctx
    )
    prompts = [
        tlc.Prompt(passage, f"passage-{i}", TEXT) for i, passage in enumerate(passages)
    ]
    run(SMALL_MODEL, {SMALL_MODEL: checkpoints}, prompts, folder, untrained=False)


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--prompts", type=Path, help="a JSONL file with tasks")
    parser.add_argument("--steps", type=int, default=small.TrainingConfig.steps)
    parser.add_argument("--out", type=Path, default=Path("out/atlas"))
    arguments = parser.parse_args()
    run_small_model(small.TrainingConfig(steps=arguments.steps), arguments.out)
    if arguments.prompts is not None:
        prompts = tlc.prompts.prompts_per_task(
            tlc.load_prompts(arguments.prompts), N_OF_TASK
        )
        for source in arguments.models:
            name = model_name(Path(source).stem)
            run(name, {name: source}, prompts, arguments.out, untrained=True)


if __name__ == "__main__":
    main()
