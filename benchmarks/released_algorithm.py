"""Depth coupling of one prompt's last token the way the paper's released code computes
it, for comparison.

A transcription in our own words of the algorithm in github.com/sugolov/coupling (Aubry
et al. 2025). It shares no code with tl_coupling. What it keeps of the original:

* one forward pass of a HuggingFace model with its graph kept, and Jacobians of
  neighbouring `hidden_states`: the last block therefore includes the final norm;
* `J^l = ∂ hidden_states[l+1][t] / ∂ hidden_states[l][t] − I`, reverse mode through the
  whole sequence, batched over rows in `2 (T // 20) + 5` chunks;
* a full SVD of each block, one after the other;
* a Python loop over all pairs of layers for each K, both orientations, on the CPU
  whatever device the model is on.

The original reports "norm" and "trace" for both orientations. `m` and `m_normalized`
are the paper's eq. 13 and 14, read off the same A at the cost of two small norms.
Gradients are asked for with respect to activations alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

KS = (10, 30, 50)
MEASURES = ("ujv_norm", "ujv_trace", "vju_norm", "vju_trace", "m", "m_normalized")

# (U, S, Vh) as torch.linalg.svd returns them.
Decomposition = tuple[Tensor, Tensor, Tensor]


def n_chunks(n_tokens: int) -> int:
    """In how many chunks the rows of one Jacobian are computed."""
    return 2 * (n_tokens // 20) + 5


def hidden_states(model: Any, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """HuggingFace `hidden_states` of one prompt, n_layers + 1 of [1 n_pos d_model],
    with the graph between them.
    """
    embed = model.get_input_embeddings()
    embedded = embed(torch.tensor([list(token_ids)], device=embed.weight.device))
    output = model(
        inputs_embeds=embedded.detach().requires_grad_(),
        output_hidden_states=True,
        use_cache=False,
    )
    return output.hidden_states


def jacobian(before: Tensor, after: Tensor) -> Tensor:
    """Last token's Jacobian of one block without its skip, [d_model d_model], rows are
    outputs.
    """
    y = after[0, -1]
    identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
    rows = [
        torch.autograd.grad(y, before, seeds, retain_graph=True, is_grads_batched=True)[
            0
        ][:, 0, -1]
        for seeds in identity.tensor_split(n_chunks(before.shape[1]))
    ]
    return torch.cat(rows) - identity


def jacobians(states: Sequence[Tensor]) -> list[Tensor]:
    """`jacobian` of every block."""
    return [jacobian(before, after) for before, after in pairwise(states)]


def decompositions(Js: Sequence[Tensor]) -> list[Decomposition]:
    """Full SVD of every Jacobian."""
    return [tuple(torch.linalg.svd(J)) for J in Js]


def couplings(
    Js: Sequence[Tensor], svds: Sequence[Decomposition]
) -> dict[int, dict[str, Tensor]]:
    """K → measure → [n_layers n_layers]; row: J_1 (and its S), column: the block that
    gave the singular vectors.
    """
    Js = [J.cpu() for J in Js]
    svds = [(U.cpu(), S.cpu(), Vh.cpu()) for U, S, Vh in svds]
    n_layers = len(Js)
    maps = {}
    for K in KS:
        values = {measure: torch.zeros(n_layers, n_layers) for measure in MEASURES}
        tops = [(U[:, :K], Vh[:K].T) for U, _, Vh in svds]
        for i, (J, (_, S, _)) in enumerate(zip(Js, svds, strict=True)):
            for j, (U, V) in enumerate(tops):
                s = S[:K]
                diagonal = torch.diag(s)
                A = U.T @ J @ V
                B = V.T @ J @ U
                for name, M in (("ujv", A), ("vju", B)):
                    distance = torch.linalg.norm(M.abs() - diagonal)
                    values[f"{name}_norm"][i, j] = distance / torch.linalg.norm(s)
                    values[f"{name}_trace"][i, j] = distance / s.sum()
                off_diagonal = torch.linalg.norm(A - torch.diag(A.diagonal()))
                values["m"][i, j] = off_diagonal
                values["m_normalized"][i, j] = off_diagonal / torch.linalg.norm(A)
        maps[K] = values
    return maps


def depth_coupling(model: Any, token_ids: Sequence[int]) -> dict[str, Any]:
    """All of it for one prompt.

    Args:
        model: a HuggingFace causal language model in eval mode, e.g. a
            `LlamaForCausalLM`.
        token_ids: one prompt.

    Returns:
        `"coupling"`: K → measure → [n_layers n_layers] (see `couplings`); `"sigma"`:
        [n_layers d_model].
    """
    Js = jacobians(hidden_states(model, token_ids))
    svds = decompositions(Js)
    return {
        "coupling": couplings(Js, svds),
        "sigma": torch.stack([S for _, S, _ in svds]),
    }
