"""A survey of random models, in the shape that surveys of real ones have."""

from collections.abc import Sequence

import numpy as np
import xarray

KS = (5, 10)


def survey(
    coupling: np.ndarray | None = None,
    *,
    n_models: int = 8,
    n_prompts: int = 6,
    checkpoints: Sequence[str] = ("main",),
    seed: int = 0,
) -> xarray.Dataset:
    """`coupling` is `[model prompt]`, the same at each checkpoint; at the second k it
    is 0.05 less.
    """
    rng = np.random.default_rng(seed)
    if coupling is None:
        coupling = (
            0.3
            + 0.4 * rng.random((n_models, 1))
            + 0.05 * rng.standard_normal((n_models, n_prompts))
        )
    n_models, n_prompts = coupling.shape
    n = n_models, len(checkpoints), n_prompts
    dims = ("model", "checkpoint", "prompt")
    x = np.broadcast_to(
        (coupling[:, None, :, None] - np.array([0, 0.05])), (*n, len(KS))
    ).copy()
    null = np.broadcast_to(1 - np.sqrt(1 - 1 / np.array(KS)), x.shape)
    return xarray.Dataset(
        {
            "mean_coupling": ((*dims, "k"), x),
            "null_coupling": ((*dims, "k"), null),
            "loss": (dims, 3 + rng.random(n)),
            "n_pos": (dims, np.broadcast_to(rng.permutation(n_prompts) + 4, n)),
            "n_layers": (dims[:2], rng.integers(4, 40, n[:2])),
            "d_model": (dims[:2], rng.integers(64, 4096, n[:2])),
            "n_parameters": (dims[:2], 10 ** (7 + 3 * rng.random(n[:2]))),
        },
        {
            "model": [f"org/m{i}" for i in range(n_models)],
            "checkpoint": list(checkpoints),
            "prompt": [f"p{i}" for i in range(n_prompts)],
            "k": list(KS),
            "task": (
                "prompt",
                ["arc" if i < n_prompts // 2 else "mmlu" for i in range(n_prompts)],
            ),
        },
    )
