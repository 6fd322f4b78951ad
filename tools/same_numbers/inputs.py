"""What both trees measure: random models, prompts and scores, written once."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

N_WORDS = 100
D_MODEL = 32
# The standard deviation of weights: blocks are then far from linear.
SPREAD = 0.15
# By name: transformers' name of the architecture, and the number of layers.
MODELS = {
    "llama": ("llama", 4),
    "gpt2": ("gpt2", 3),
    "neox": ("gpt_neox", 2),
    "qwen": ("qwen3", 3),
    "mistral": ("mistral", 2),
    "phi": ("phi", 4),
}
# Those of one model; it is no training, each is another random model.
STEPS = (0, 1, 8)
SCORES = (41, 47, 52, 45, 60, 56)
WORDS = [
    {
        "id": "long",
        "prompt": "w3 w14 w15 w92 w65 w35 w89 w79",
        "task": "first",
        "difficulty": 0.2,
    },
    {
        "id": "middle",
        "prompt": "w2 w71 w82 w81 w82 w84",
        "task": "first",
        "difficulty": 0.7,
    },
    {
        "id": "short",
        "prompt": "w1 w61 w80 w33 w98",
        "task": "second",
        "difficulty": 0.4,
    },
]
ENGLISH = [
    {"id": "paris", "prompt": "The capital of France is Paris", "task": "facts"},
    {"id": "sum", "prompt": "Two and two make four", "task": "sums"},
]


def write_inputs(folder: Path) -> None:
    """Write the models, the prompts and the scores that the scenario names."""
    disable_progress_bar()
    folder.mkdir(parents=True)
    for seed, (name, (architecture, n_layers)) in enumerate(MODELS.items()):
        _save_model(folder / name, architecture, n_layers, seed)
    for step in STEPS:
        _save_model(folder / "training" / f"step{step}", "gpt_neox", 2, seed=step)
    _write_lines(folder / "words.jsonl", [json.dumps(prompt) for prompt in WORDS])
    _write_lines(folder / "english.jsonl", [json.dumps(prompt) for prompt in ENGLISH])
    _save_lens(folder / "lens.pt", n_layers=MODELS["llama"][1])
    scores = zip(MODELS, SCORES, strict=True)
    rows = [f"{name},{score}" for name, score in scores]
    _write_lines(folder / "scores.csv", ["model,score", *rows])


def _save_model(folder: Path, architecture: str, n_layers: int, seed: int) -> None:
    import torch

    config = AutoConfig.for_model(
        architecture,
        vocab_size=N_WORDS,
        hidden_size=D_MODEL,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=D_MODEL // 4,
        intermediate_size=48,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, SPREAD)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(1, N_WORDS)}
    tokenizer = Tokenizer(WordLevel({"<s>": 0, **words}, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<s>"
    ).save_pretrained(folder)


def _save_lens(path: Path, n_layers: int) -> None:
    """Write a Jacobian lens, of no model, in the format of TransformerLens."""
    import torch

    noise = torch.randn(n_layers - 1, D_MODEL, D_MODEL)
    matrices = dict(enumerate(torch.eye(D_MODEL) + SPREAD * noise))
    # The prompts are short.
    metadata = {"skip_first_positions": 1}
    lens = {"J": matrices, "n_prompts": 3, "d_model": D_MODEL, "metadata": metadata}
    torch.save(lens, path)


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
