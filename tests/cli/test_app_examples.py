"""Every example of every `--help` is run as it is printed."""

import dataclasses
import json
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast

import tiny
import tl_coupling as tlc
from command_line import printed_examples
from tl_coupling.cli import COMMANDS
from tl_coupling.models.bridges import load_bridge
from tl_coupling.models.load_request import LoadRequest
from tl_coupling.prompts import _Columns

pytestmark = pytest.mark.long("measures dozens of models")
TEXTS = (
    "What is the capital of France? The capital is",
    "The capital of France is",
    "Ann has 3 apples and buys 4 more. Now she has",
    "A train leaves at 3 and takes 2 hours. It arrives at",
)
# Models of the survey that `generalization` reads, half of them of one family.
WIDTHS = {f"EleutherAI/pythia-{32 + 8 * i}m": 32 + 8 * i for i in range(4)}
WIDTHS |= {f"width{width}": width for width in (64, 72, 80, 88)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words as tokens."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<s>", *words])}
    word_level = Tokenizer(WordLevel(vocabulary, unk_token="<s>"))
    word_level.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=word_level, bos_token="<s>")


class TinyModels:
    """Random models, in place of those that are asked for: others have other weights.

    Images are read by a vision transformer.
    """

    def __init__(self, folder: Path, vit: Path) -> None:
        self.folder = folder
        self.vit = vit

    def load(self, request: LoadRequest, device: torch.device) -> nn.Module:
        """Load a model from files, as `load_model` does."""
        folder = str(self._saved(request))
        in_folder = dataclasses.replace(
            request, name=folder, checkpoint=None, quantization=None
        )
        return load_bridge(in_folder, folder, device)

    def _saved(self, request: LoadRequest) -> Path:
        if "vit" in request.name:
            return self.vit
        parts = (request.name, request.checkpoint, request.quantization)
        name = "-".join(map(str, parts)).replace("/", "-")
        folder = self.folder / name
        if not folder.exists():
            save_model(folder, request.name)
        return folder


def save_model(folder: Path, name: str) -> None:
    """Save a random model, as deep as examples need that of that name to be."""
    n_layers = {"smollm2-135m": 30, "gpt2": 12, "gpt2.Q4_K_M.gguf": 12}.get(
        Path(name).name, 3
    )
    width = WIDTHS.get(name, 64)
    changes = {"num_hidden_layers": n_layers, "hidden_size": width}
    seed = sum(map(ord, str(folder)))
    tiny.huggingface_model("llama", seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def prompt_set(name: str, source: object) -> _Columns:
    """Return two texts in place of a set on the hub."""
    ids = [f"{name}-{number}" for number in range(2)]
    return _Columns([f"{text} {name}" for text in TEXTS[:2]], ids, [None, None])


def write_prompts(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def write_files_of_all() -> None:
    write_prompts(Path("prompts.jsonl"), TEXTS)
    write_prompts(Path("capitals.jsonl"), TEXTS[:2])
    write_prompts(Path("sums.jsonl"), TEXTS[2:])
    Image.new("RGB", (8, 16), "orange").save("cat.jpg")
    Path("gpt2.Q4_K_M.gguf").touch()


def write_maps() -> None:
    """Write what `--save-maps` leaves of another prompt."""
    folder = Path("more/maps/trained")
    folder.mkdir(parents=True)
    trace = tlc.trace(tlc.load_model("gpt2"), "Another prompt")
    tlc.depth_coupling(trace, k=50).save(folder / "0.nc")


def write_checkpoints() -> None:
    for step in (0, 1, 1000, 4000, 143000):
        save_model(Path(f"runs/my-model/step{step}"), "my-model")


def write_survey() -> None:
    """Write a survey of eight models, and scores of them."""
    survey = tlc.Survey(list(WIDTHS), TEXTS[:3], settings=tlc.Settings(k=(10, 30)))
    tlc.run_survey(survey, "survey/units", progress=False)
    scores = [f"{name},{40 + 2 * place}" for place, name in enumerate(WIDTHS)]
    Path("scores.csv").write_text("\n".join(["model,score", *scores]))


def write_survey_and_maps() -> None:
    """Write a survey, and the map of another prompt."""
    write_survey()
    write_maps()


def write_lens() -> None:
    """Write a lens that leaves out no token, as the texts are short."""
    model = tlc.load_model("gpt2")
    traces = [tlc.trace(model, text) for text in TEXTS]
    lens = tlc.trajectories.product_lens(traces, tokens="later", skip_first_positions=0)
    lens.save("lens.pt")


# What examples read and no example before them writes.
FILES = {
    "depth": write_maps,
    "checkpoints": write_checkpoints,
    "lens-audit": write_lens,
    "compare-trajectories": write_checkpoints,
    "generalization": write_survey,
    "atlas": write_survey_and_maps,
    # Of each task as many as the example draws.
    "survey": lambda: write_prompts(Path("prompts.jsonl"), map(str, range(20))),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_run_as_they_are_printed(
    call,
    command: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    folder_vit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a folder of its own. Models are loaded, and prompt sets are read, at one place
    each. What other processes and clusters would do is done here.
    """
    monkeypatch.chdir(tmp_path)
    models = TinyModels(tmp_path_factory.mktemp("models"), folder_vit)
    monkeypatch.setattr("tl_coupling.models.loading._loaded", models.load)
    monkeypatch.setattr("tl_coupling.prompts._downloaded", prompt_set)
    monkeypatch.setattr("tl_coupling.cli.survey._N_LEADERBOARD_PROMPTS", 6)
    monkeypatch.setattr("tl_coupling.cli.survey._N_SET_PROMPTS", 2)
    for executor in ("process_pool", "slurm_executor"):
        monkeypatch.setattr(
            f"tl_coupling.cli.sweeps.{executor}", lambda *_, **__: ThreadPoolExecutor(1)
        )
    write_files_of_all()
    FILES.get(command, lambda: None)()
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed_examples(call(command, "--help").out)
    assert shown
    for example in shown:
        name, *options = shlex.split(example.replace("\\\n", " "))[1:]
        assert name == command
        # It fails unless the command's status is 0.
        assert call(*map(str, (name, *options))).out
