"""The picture at the top of README: coupling of every two layers of SmolLM2-135M,
trained and untrained.
"""

from pathlib import Path

from matplotlib.figure import Figure

import tl_coupling as tlc

K = 10
PROMPT = "What is the capital of France? The capital is"

figure = Figure(figsize=(10, 4.6), layout="compressed")
for name, ax in zip(("trained", "untrained"), figure.subplots(1, 2), strict=True):
    model = tlc.load_model("smollm2-135m", untrained=name == "untrained")
    result = tlc.depth_coupling(tlc.trace(model, PROMPT), k=K)
    # One scale for both: what the trained model's other diagonals reach.
    tlc.plot_coupling(result, vmax=0.6, ax=ax).set_title(
        f"{name}: mean {result.mean():.2f}"
    )
figure.suptitle(
    f"Coupling between layers of SmolLM2-135M (random subspaces: {result.null():.2f})"
)
figure.savefig(Path(__file__).parents[1] / "docs" / "coupling.png", dpi=90)
