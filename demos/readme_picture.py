"""The picture at the top of README: coupling of every two layers of SmolLM2-135M,
trained and untrained.
"""

from pathlib import Path

import tl_coupling as tlc

K = 10
PROMPT = "What is the capital of France? The capital is"

trained, untrained = [
    tlc.depth_coupling(
        tlc.trace(tlc.load_model("smollm2-135m", untrained=is_untrained), PROMPT), k=K
    )
    for is_untrained in (False, True)
]
ax = tlc.plot_coupling(trained, untrained=untrained)
ax.figure.suptitle(
    f"Coupling between layers of SmolLM2-135M (random subspaces: {trained.null():.3f})"
)
ax.figure.savefig(Path(__file__).parents[1] / "docs" / "coupling.png", dpi=90)
