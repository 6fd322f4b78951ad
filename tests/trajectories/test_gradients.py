"""The gradient at a token, and the formula of full coupling, against autograd."""

from pathlib import Path

import pytest
import torch

import tiny
import tl_coupling as tlc
from linear_blocks import D, L, affine_trace, coupled
from random_matrices import gaussian
from tl_coupling.trajectories import coupled_gradient, gradient_prediction


def descent(A: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Minus the gradient of `½ ‖x^L − y‖²` at every depth of `x^{l+1} = x^l + A_l x^l`,
    by autograd.
    """
    stream = [x.clone().requires_grad_()]
    for matrix in A:
        stream.append(stream[-1] + matrix @ stream[-1])
    loss = (stream[-1] - y).square().sum() / 2
    return [-gradient for gradient in torch.autograd.grad(loss, stream)]


def test_the_formula_is_autograd_where_blocks_are_coupled():
    A, U, S = coupled()
    x, y = gaussian(D, seed=1), gaussian(D, seed=2)
    expected = descent(A, y, x)
    error = expected[-1]
    torch.testing.assert_close(
        coupled_gradient(U, S, error), torch.stack(expected), rtol=1e-10, atol=1e-10
    )
    # As the paper prints it, for one S at all layers; the sum runs over all directions.
    S_of_all = S[:1].expand(L, D)
    A = U * S_of_all[:, None] @ U.mT
    paper = sum(
        U[:, j] * (1 + S_of_all[0, j]) ** L * (U[:, j] @ error) for j in range(D)
    )
    torch.testing.assert_close(
        coupled_gradient(U, S_of_all, error)[0], paper, rtol=1e-10, atol=1e-10
    )
    end = x
    for matrix in A:
        end = end + matrix @ end
    torch.testing.assert_close(
        descent(A, end + error, x)[0], paper, rtol=1e-10, atol=1e-10
    )


def test_fewer_directions_leave_the_rest_as_it_is():
    _, U, S = coupled()
    error = gaussian(D, seed=2)
    few = coupled_gradient(U[:, :2], S[:, :2], error)
    changed = few - error
    torch.testing.assert_close(
        changed @ U[:, 2:],
        torch.zeros(L + 1, D - 2, dtype=torch.float64),
        atol=1e-12,
        rtol=0,
    )
    torch.testing.assert_close(few @ U[:, :2], coupled_gradient(U, S, error) @ U[:, :2])


def test_a_prediction_is_exact_for_coupled_blocks_and_the_chain_rule_for_any():
    A, _, _ = coupled()
    trace, y = affine_trace(A), gaussian(D, seed=2)
    expected = torch.stack(descent(A, y, trace.residual[0, -1]))
    prediction = gradient_prediction(trace, y - trace.residual[-1, -1])
    for part in (prediction.exact, prediction.coupled):
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        prediction.cosine_similarity, torch.ones(L + 1, dtype=torch.float64)
    )
    A = gaussian(L, D, D, seed=7)
    trace = affine_trace(A)
    expected = torch.stack(descent(A, y, trace.residual[0, -1]))
    prediction = gradient_prediction(trace, y - trace.residual[-1, -1])
    torch.testing.assert_close(prediction.exact, expected, rtol=1e-6, atol=1e-6)
    assert float(prediction.cosine_similarity[0]) < 0.9
    assert "if the blocks were coupled" in repr(prediction)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_of_the_last_token_it_is_the_whole_gradient(
    tokenizer_folder: Path, architecture: str
):
    """HuggingFace's own embeddings, differentiated through the whole model."""
    witness = tiny.huggingface_model(architecture)
    trace = tlc.trace(
        tiny.bridge(witness, tokenizer_folder), tiny.TOKENS, final_norm=True
    )
    embedded = (
        witness.get_input_embeddings()(torch.tensor([tiny.TOKENS]))
        .detach()
        .requires_grad_()
    )
    end = witness(
        inputs_embeds=embedded, use_cache=False, output_hidden_states=True
    ).hidden_states[-1][0, -1]
    y = gaussian(tiny.D_MODEL).float()
    (gradient,) = torch.autograd.grad((end - y).square().sum() / 2, embedded)
    prediction = gradient_prediction(trace, (y - end).detach())
    torch.testing.assert_close(
        prediction.exact[0].float(), -gradient[0, -1], rtol=1e-3, atol=1e-4
    )


def test_bad_input_is_one_line(tiny_trace: tlc.Trace):
    error = tiny_trace.residual[-1, -1]
    for arguments, message in (
        (
            {"error": error[:5]},
            r"`error` must have shape \[32\], the width of the stream, got \[5\]",
        ),
        ({"error": error, "k": 40}, r"`k` must lie in \[1, 32\]"),
        ({"error": error, "position": 8}, r"`position` must lie in \[-8, 7\]"),
        ({"error": error, "reference_layer": 2}, r"\[-2, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            gradient_prediction(tiny_trace, **arguments)


def test_errors_that_are_not_finite_are_refused(tiny_trace: tlc.Trace) -> None:
    with pytest.raises(ValueError, match=r"`error` must be finite in torch\.float64"):
        tlc.trajectories.gradient_prediction(tiny_trace, torch.full((32,), torch.nan))
    arguments = {"U": torch.eye(2), "S": torch.ones(3, 2), "error": torch.ones(2)}
    for name, values in arguments.items():
        broken = arguments | {name: torch.full_like(values, torch.inf)}
        with pytest.raises(
            ValueError, match=rf"`{name}` must be finite in torch\.float32"
        ):
            tlc.trajectories.coupled_gradient(**broken)
