"""Are blocks linear maps? A linear step, which can hardly hold, and one that can.

    python demos/studies/linear_steps.py --out out/linear_steps
    python demos/studies/linear_steps.py --out out/linear_steps --table  # only prints

A *linear step* predicts what a block adds by its Jacobian, `f(x) ≈ J x`. A block that
normalises first hardly depends on the length of its token, so `J x` is near 0 whatever
the block does: the prediction is that of no step, trained or not.

*Differences* can be predicted: `f(x + s Δ) − f(x) ≈ s J Δ`, where Δ leads from the last
token's stream to that of another token of the same text (the middle one), or of the
next text's last token, at the same depth; other tokens are held as they are. The
Jacobian is right, so the error must vanish as s does: at s = 0.01 the test is passed
unless it is wrong, and at s = 1 it says whether one linear map holds from one state of
the stream to another. A prediction of no difference has a relative error of 1.

20 texts and the start page's prompt, which stands apart; SmolLM2-135M-Instruct and its
untrained twin. Intervals are 95 % t intervals over texts of means over blocks. What is
there is not run again; the findings cite `demos/studies/results/linear_steps`. Minutes
of one core; `SMALL=1`: seconds, on fewer texts and blocks.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

import tl_coupling as tlc
from paths import TWINS, distinct_texts, interval
from shared_directions import keep

IS_SMALL = bool(os.environ.get("SMALL"))
N_TEXTS = 2 if IS_SMALL else 20
LAYERS = slice(0, 2 if IS_SMALL else None)
PROMPT = "What is the capital of France? The capital is"
SHARES = (0.01, 0.1, 0.3, 1.0)
Row = dict[str, float | str]
Stream = Float[Tensor, " d_model"]


def cosine(a: Stream, b: Stream) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(torch.cosine_similarity(a, b, dim=0))


def linear_step(trace: tlc.Trace, layer: int) -> Row:
    """Return how well `x + J x` predicts the next state, beside x itself.

    Errors are relative to the length of the next state.
    """
    x, after = trace.residual[layer : layer + 2, -1].double()
    added = after - x
    image = tlc.block_jvp(trace, layer, x.float()).double()
    return {
        "to": "linear step",
        "share": 1.0,
        "error": float((added - image).norm() / after.norm()),
        "error_of_none": float(added.norm() / after.norm()),
        "cosine": cosine(image, added),
    }


def differences(trace: tlc.Trace, layer: int, target: Stream, to: str) -> Iterator[Row]:
    """Yield how well J predicts what the block adds on the way to another state.

    Errors are relative to the length of the difference of what is added.
    """
    x = trace.residual[layer, -1]
    step = target - x
    # Tokens that are the same have one embedding: nothing is to be predicted.
    if not step.any():
        return
    image = tlc.block_jvp(trace, layer, step).double()
    shares = torch.tensor((0.0, *SHARES))
    rows = x + shares[:, None] * step
    last = trace.residual.shape[1] - 1
    outputs = trace.blocks[layer].outputs_in_place(rows, last)
    added = outputs.double() - rows.double()
    for share, after in zip(SHARES, added[1:], strict=True):
        difference = after - added[0]
        error = (difference - share * image).norm() / difference.norm()
        yield {
            "to": to,
            "share": share,
            "error": float(error),
            "error_of_none": 1.0,
            "cosine": cosine(image, difference),
        }


def rows_of(trace: tlc.Trace, other: tlc.Trace) -> Iterator[Row]:
    """Yield all measures of every block; `other` is the trace of another text."""
    middle = trace.residual.shape[1] // 2
    for layer in range(trace.n_layers)[LAYERS]:
        yield {"layer": layer} | linear_step(trace, layer)
        targets = {
            "another token": trace.residual[layer, middle],
            "another text": other.residual[layer, -1],
        }
        for to, target in targets.items():
            for row in differences(trace, layer, target, to):
                yield {"layer": layer} | row


def measured(name: str, texts: Sequence[str]) -> pandas.DataFrame:
    """Measure a model and its untrained twin on each text, with the next one beside it."""
    tables = []
    for twin, untrained in TWINS.items():
        model = tlc.load_model(name, untrained=untrained)
        traces = [tlc.trace(model, text) for text in texts]
        others = [*traces[1:], traces[0]]
        pairs = list(zip(traces, others, strict=True))
        for number, (trace, other) in enumerate(tqdm(pairs, desc=twin)):
            table = pandas.DataFrame(rows_of(trace, other))
            table.insert(0, "model", twin)
            table.insert(1, "text", number)
            tables.append(table)
    return pandas.concat(tables)


def report(table: pandas.DataFrame) -> str:
    """Return means over blocks: of the prompt, which is text 0, and over the other texts
    with intervals.
    """
    keys = ["to", "share", "model"]
    by_text = table.groupby([*keys, "text"], sort=False).mean(numeric_only=True)
    by_text = by_text.drop(columns="layer").reset_index()
    is_prompt = by_text["text"] == 0
    of_prompt = by_text[is_prompt].set_index(keys).drop(columns="text")
    of_texts = by_text[~is_prompt].drop(columns="text")
    intervals = of_texts.groupby(keys, sort=False).agg(interval)
    return "\n".join(
        [
            f"the prompt {PROMPT!r}, means over blocks",
            of_prompt.round(3).to_string(),
            f"\nmeans over {by_text['text'].nunique() - 1} texts [95 % t]",
            intervals.to_string(),
        ]
    )


def main() -> None:
    """Measure what is not there yet, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("out/linear_steps"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    path = arguments.out / "measured.csv"
    if not arguments.table and not path.exists():
        texts = [PROMPT, *distinct_texts(N_TEXTS)]
        keep(measured(arguments.model, texts), path)
    print(report(pandas.read_csv(path)))


if __name__ == "__main__":
    main()
