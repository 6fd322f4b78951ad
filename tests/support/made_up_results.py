"""Results of made-up numbers: what pictures are drawn of."""

import torch

import tl_coupling as tlc
from tl_coupling.blocks import BlockCall, BlockFunction, Trace
from tl_coupling.comparisons import CouplingMap

PROVENANCE = {
    "model": "tiny",
    "prompt": "It costs $5 or $6",
    "position": 3,
    "str_tokens": ["It", " costs", " $5", "\n", " ", " $6"],
    "n_layers": 20,
}
TOKENS = ("It", " costs", " $5", "\n", " ", " $6")


def random_map(
    layers=(0, 1, 2, 3), k=5, seed=0, kind="depth", **provenance
) -> CouplingMap:
    """Return a map of random 12×12 Jacobians, one for each layer (kind "depth") or for
    each token.
    """
    n = len(layers)
    J = torch.randn(
        n, 12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    spectra = tlc.svd(J, k)
    depth = kind == "depth"
    return CouplingMap(
        # A row for each J_1, a column for each spectrum.
        matrices=spectra.U.mT @ J[:, None] @ spectra.Vh.mT,
        singular_values=spectra.S,
        frobenius_norms=torch.linalg.matrix_norm(J),
        d_model=12,
        row_layers=tuple(layers) if depth else (8,) * n,
        col_layers=tuple(layers) if depth else (9,) * n,
        row_positions=(3,) * n if depth else tuple(layers),
        col_positions=(3,) * n if depth else tuple(layers),
        kind=kind,
        orientation="ujv",
        provenance=PROVENANCE | provenance,
    )


def walk(
    n_layers: int = 20, seed: int = 0, sink: int | None = None, **provenance
) -> Trace:
    """Return a trace without a model: tokens that walk at random from one point; a sink
    runs away in the middle.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(
        n_layers + 1, len(TOKENS), 8, generator=generator, dtype=torch.float64
    ).cumsum(0)
    if sink is not None:
        x[3:-2, sink] *= 300
    unused = BlockCall(torch.nn.Identity(), {}, (), False, -2)
    return Trace(
        model=torch.nn.Identity(),
        tokens=torch.arange(len(TOKENS)),
        str_tokens=TOKENS,
        residual=x,
        blocks=tuple(
            BlockFunction(layer, unused, X, 0 * X) for layer, X in enumerate(x[:-1])
        ),
        final_norm=False,
        provenance={
            "model": "tiny",
            "prompt": "It costs $5 or $6",
            "str_tokens": list(TOKENS),
        }
        | provenance,
    )
