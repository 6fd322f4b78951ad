"""Draw what the examples of some docstrings draw, with the names that they share:
`python examples.py --figures FOLDER tl_coupling.plots.plot_spread …`.

SmolLM2-135M-Instruct on four prompts; for surveys and sweeps, small models that this
trains for seconds.
"""

import argparse
import doctest
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from transformers import LlamaConfig, LlamaForCausalLM

import pages
import tl_coupling as tlc
from public_api import public_names

WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64)
STEPS = (0, 2, 4, 8, 16, 32, 64)
PROMPTS = {
    "capitals": [
        "What is the capital of France? The capital is",
        "What is the capital of Peru? The capital is",
    ],
    "sums": [
        "Ann has 3 apples and buys 4 more. Now she has",
        "A train leaves at 3 and takes 2 hours. It arrives at",
    ],
}


def write_prompts() -> None:
    """Write the prompts to `prompts.jsonl`, as p0, p1, …"""
    texts = [(task, text) for task, texts in PROMPTS.items() for text in texts]
    lines = [
        json.dumps({"id": f"p{number}", "task": task, "prompt": text})
        for number, (task, text) in enumerate(texts)
    ]
    Path("prompts.jsonl").write_text("\n".join(lines))


def train(tokenizer: Any) -> None:
    """Train a model of each width on the prompts, and save it at some steps."""
    everything = " ".join(text for texts in PROMPTS.values() for text in texts)
    text = tokenizer(everything, return_tensors="pt").input_ids
    for width in WIDTHS:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=6,
            num_attention_heads=2,
        )
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(max(STEPS) + 1):
            if step in STEPS:
                folder = f"models/width{width}/step{step}"
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            model(text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def shared_names() -> dict[str, Any]:
    """Return what the docstring of the package says that examples share."""
    write_prompts()
    model = tlc.load_model("smollm2-135m")
    train(model.tokenizer)
    prompts = tlc.load_prompts("prompts.jsonl")
    settings = tlc.Settings(k=(2, 4), window=3)
    last = {f"width {width}": f"models/width{width}/step64" for width in WIDTHS}
    return {
        "torch": torch,
        "tlc": tlc,
        "model": model,
        "trace": tlc.trace(model, PROMPTS["capitals"][0]),
        "prompts": prompts,
        "data": tlc.run_survey(tlc.Survey(last, prompts, settings=settings), "survey"),
        "sweep": tlc.checkpoint_sweep(
            "models/width16", prompts=prompts, settings=settings, folder="sweep"
        ),
    }


def draw(names: list[str], figures: Path) -> None:
    shared = shared_names()
    for name in names:
        text = inspect.getdoc(public_names()[name]) or ""
        namespace = dict(shared)
        for example in doctest.DocTestParser().get_examples(text):
            exec(example.source, namespace)
        pages.save_figures([plt.gcf()], [name.rpartition(".")[2]], figures)
        plt.close("all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    draw(given.names, given.figures)
