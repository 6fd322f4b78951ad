"""Are the axes of a block the model's, or the prompt's?

    python demos/studies/prompt_axes.py

Six prompts without a common subject, in English, code and German. At the last token of
each, every block of SmolLM2-135M-Instruct is decomposed, and compared with the same
block on the other prompts. An untrained twin stands beside it: norms alone give blocks
of any prompt something in common.

About five minutes on two cores.
"""

import tl_coupling as tlc

PROMPTS = (
    "What is the capital of France? The capital is",
    "The mitochondria is the powerhouse of the",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "If Anna has three apples and eats one, she has",
    "Der schnelle braune Fuchs springt über den faulen",
    "In 1969, astronauts landed for the first time on the",
)
MEASURES = ("coupling", "write_overlap", "read_overlap")
KS = (10, 50)


def main() -> None:
    """Print the mean over pairs of prompts and over layers, and by layer."""
    print(
        f"{'model':>10} {'k':>3} {'measure':>14} {'mean':>6} {'chance':>6}  last layer"
    )
    for untrained in (False, True):
        model = tlc.load_model("smollm2-135m", untrained=untrained)
        traces = [tlc.trace(model, prompt) for prompt in PROMPTS]
        result = tlc.prompt_coupling(traces, k=max(KS))
        name = "untrained" if untrained else "trained"
        for k in KS:
            for measure in MEASURES:
                mean = result.mean(k, measure)
                null = result.null(k, measure)
                last = float(result.by_layer(k, measure)[-1])
                print(
                    f"{name:>10} {k:>3} {measure:>14} {mean:6.3f} {null:6.3f}  {last:.3f}"
                )


if __name__ == "__main__":
    main()
