"""Differentiable coupling: its value against the library's, its gradient against finite
differences, and what it does to a model.
"""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc

K = 4
IDS = torch.tensor([[1, 5, 3, 9, 2, 7]])


def gpt2() -> nn.Module:
    return tiny.huggingface_model("gpt2", dtype=torch.float64)


def objective(model: nn.Module, **options: object) -> Tensor:
    return tlc.training.coupling(
        tiny.layers_of(model), lambda: model(IDS), K, **options
    )


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("positions", [(-1,), (1, 4)])
def test_the_value_is_that_of_depth_coupling(
    architecture: str, positions: tuple[int, ...]
) -> None:
    model = tiny.huggingface_model(architecture, dtype=torch.float64)
    blocks = tiny.layers_of(model)
    value = tlc.training.coupling(blocks, lambda: model(IDS), K, positions=positions)
    trace = tlc.trace_modules(blocks, lambda: model(IDS))
    means = [tlc.depth_coupling(trace, K, position).mean() for position in positions]
    # HuggingFace's norms compute in float32, whatever the model is in.
    assert value.item() == pytest.approx(sum(means) / len(means), abs=1e-6)


def jacobians(model: nn.Module) -> list[Tensor]:
    """`∂ f(X)_T / ∂ x_T` of each block, by differentiating twice nothing: one row after
    the other, through the block as the model calls it.
    """
    calls: list[tuple[nn.Module, Tensor, dict[str, object]]] = []
    hooks = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(
                (module, args[0].detach(), kwargs)
            ),
            with_kwargs=True,
        )
        for block in tiny.layers_of(model)
    ]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    found = []
    for block, X, kwargs in calls:

        def added(row: Tensor, block=block, X=X, kwargs=kwargs) -> Tensor:
            stream = torch.cat([X[:, :-1], row[None, None]], 1)
            output = block(stream, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
            return output[0, -1] - row

        found.append(torch.autograd.functional.jacobian(added, X[0, -1]))
    return found


def naive_coupling(J: list[Tensor], frames: list[Tensor]) -> float:
    values = []
    for row, J_1 in enumerate(J):
        for column, J_2 in enumerate(frames):
            if row == column:
                continue
            U, _, Vh = torch.linalg.svd(J_2)
            A = U[:, :K].T @ J_1 @ Vh[:K].T
            off = A - torch.diag(torch.diag(A))
            values.append(1 - off.norm() / A.norm())
    return float(torch.stack(values).mean())


@pytest.mark.parametrize("frames", ["detached", "differentiated"])
def test_the_gradient_is_that_of_finite_differences(
    frames: Literal["detached", "differentiated"],
) -> None:
    """Along three random directions in the space of all parameters."""
    model = gpt2()
    parameters = list(model.parameters())
    objective(model, frames=frames).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    fixed = jacobians(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        directions = [
            torch.randn(p.shape, generator=generator, dtype=p.dtype)
            * p.norm()
            / math.sqrt(p.numel())
            for p in parameters
        ]
        predicted = sum(
            float((g * v).sum()) for g, v in zip(gradients, directions, strict=True)
        )
        step = 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, v in zip(parameters, directions, strict=True):
                    p.add_(v, alpha=sign * step)
            J = jacobians(model)
            values.append(naive_coupling(J, fixed if frames == "detached" else J))
            with torch.no_grad():
                for p, v in zip(parameters, directions, strict=True):
                    p.sub_(v, alpha=sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        assert predicted == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_constant_activations_leave_blocks_before_alone() -> None:
    model = gpt2()
    value = objective(model, activations="detached")
    value.backward()
    assert model.get_input_embeddings().weight.grad is None
    assert all(
        p.grad is not None for p in tiny.layers_of(model)[0].parameters() if p.ndim > 1
    )
    whole = gpt2()
    objective(whole).backward()
    assert whole.get_input_embeddings().weight.grad is not None


def test_gradients_accumulate_and_autocast_changes_nothing() -> None:
    model = tiny.huggingface_model("llama").train()
    objective(model).backward()
    once = [p.grad.clone() for p in tiny.layers_of(model).parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        value = objective(model)
    value.backward()
    for p, gradient in zip(tiny.layers_of(model).parameters(), once, strict=True):
        assert torch.allclose(p.grad, 2 * gradient, rtol=1e-4, atol=1e-6)
    assert model.training


def test_chunks_change_nothing() -> None:
    model = gpt2()
    assert objective(model, chunk_size=5).item() == pytest.approx(
        objective(model).item(), abs=1e-12
    )


def test_bad_input_is_refused() -> None:
    model = gpt2()
    blocks = tiny.layers_of(model)
    with pytest.raises(ValueError, match="`blocks` must be two or more"):
        tlc.training.coupling(blocks[:1], lambda: model(IDS), K)
    with pytest.raises(ValueError, match="`blocks` is empty"):
        tlc.training.jacobians([], lambda: model(IDS))
    with pytest.raises(ValueError, match="`J` has NaN or infinite entries"):
        tlc.training.coupling_of_jacobians(torch.full((2, 4, 4), torch.nan), 2)
    with pytest.raises(ValueError, match="`positions` must be within"):
        objective(model, positions=(9,))
    with pytest.raises(ValueError, match="must call each of the 2 blocks once"):
        tlc.training.coupling(blocks, lambda: None, K)


# --- blocks that add nothing, and numbers of any size


class Mlp(nn.Module):
    """`Y = X + B tanh(A X)`, in float64; its gain is `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 24, dtype=torch.float64)
        self.outer = nn.Linear(24, 12, dtype=torch.float64)
        with torch.no_grad():
            self.outer.weight *= scale
            self.outer.bias *= scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))

    def jacobian(self, x: Tensor) -> Tensor:
        """`B diag(1 − tanh²) A`."""
        slopes = 1 - torch.tanh(self.inner(x)).square()
        return (self.outer.weight * slopes) @ self.inner.weight


def mlps(*scales: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp(scale) for scale in scales])


def mlp_jacobians(network: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Of the blocks that add something, at the last token."""
    found = []
    with torch.no_grad():
        for block in network:
            found.append(block.jacobian(x[0, -1]))
            x = block(x)
    return [J for J in found if J.any()]


def gradients_of(network: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()
    ]


@pytest.mark.parametrize("frames", ["detached", "differentiated"])
def test_a_block_that_adds_nothing_is_left_out(
    frames: Literal["detached", "differentiated"],
) -> None:
    """As a zero-initialised output projection makes it: value and gradient are those of
    the other blocks, by a loop and by differences.
    """
    network = mlps(1, 0, 1, 1)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"undefined for 6 of 12 pairs.*others"):
        value = tlc.training.coupling(network, lambda: network(x), K, frames=frames)
    fixed = mlp_jacobians(network, x)
    assert len(fixed) == 3
    assert value.item() == pytest.approx(naive_coupling(fixed, fixed), abs=1e-12)
    value.backward()
    for weight, gradient in zip(
        network.parameters(), gradients_of(network), strict=True
    ):
        assert gradient.isfinite().all()
        if weight is network[1].outer.weight:
            # It moves its block away from 0, where that counts.
            continue
        quotients = []
        place = (0,) * weight.ndim
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight[place] += step
                J = mlp_jacobians(network, x)
                quotients.append(
                    naive_coupling(J, fixed if frames == "detached" else J)
                )
                weight[place] -= step
        slope = (quotients[0] - quotients[1]) / 2e-5
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("scales", [(0, 0, 0), (1, 0, 0)])
def test_where_no_two_blocks_add_something_a_step_is_moved_by_the_loss_alone(
    scales: tuple[float, ...],
) -> None:
    network = mlps(*scales)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    with pytest.warns(UserWarning, match="6 of 6 pairs.*0 stands for the mean"):
        value = tlc.training.coupling(network, lambda: network(x), K)
    assert value.item() == 0
    (network(x).square().sum() - value).backward()
    together = gradients_of(network)
    network.zero_grad()
    network(x).square().sum().backward()
    assert all(map(torch.equal, together, gradients_of(network)))


def test_a_position_at_which_no_two_blocks_add_something_is_left_out() -> None:
    class Gated(Mlp):
        """Adds nothing where the first entry of the stream is below 0."""

        def forward(self, x: Tensor) -> Tensor:
            added = super().forward(x) - x
            return x + added * (x[..., :1] > 0)

    torch.manual_seed(0)
    network = nn.Sequential(Gated(), Gated())
    x = torch.randn(1, 2, 12, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([-9.0, 9.0])
    with pytest.warns(UserWarning, match=r"undefined for 2 of 4 pairs.*others"):
        both = tlc.training.coupling(network, lambda: network(x), K, positions=(0, 1))
    last = tlc.training.coupling(network, lambda: network(x), K, positions=(1,))
    assert both.item() == pytest.approx(last.item(), abs=1e-12)


def test_pairs_that_do_not_meet_are_left_out() -> None:
    """Two Jacobians act within one half of the stream each, the third in both."""
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(3, 8, 8, dtype=torch.float64, generator=generator)
    J[0, 4:] = J[0, :, 4:] = 0
    J[1, :4] = J[1, :, :4] = 0
    values = []
    for row, column in [(0, 2), (1, 2), (2, 0), (2, 1)]:
        U, _, Vh = torch.linalg.svd(J[column])
        A = U[:, :K].T @ J[row] @ Vh[:K].T
        values.append(1 - (A - A.diag().diag()).norm() / A.norm())
    J.requires_grad_()
    with pytest.warns(UserWarning, match="undefined for 2 of 6 pairs"):
        value = tlc.training.coupling_of_jacobians(J, K)
    assert value.item() == pytest.approx(float(sum(values)) / 4, abs=1e-12)
    value.backward()
    assert J.grad.isfinite().all()


def test_jacobians_of_one_frame_are_coupled_by_1() -> None:
    """In float32 too, and with a gradient: m̃ is least there."""
    generator = torch.Generator().manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(8, 8, generator=generator))
    gains = torch.tensor([[8.0, 7, 6, 5, 4, 3, 2, 1], [9.0, 5, 4, 3, 2.5, 2, 1, 0.5]])
    J = (U @ gains.diag_embed() @ Vh).requires_grad_()
    value = tlc.training.coupling_of_jacobians(J, K)
    assert value.item() == pytest.approx(1, abs=1e-6)
    value.backward()
    assert J.grad.isfinite().all()
    # Exactly, of diagonal ones.
    J = gains.diag_embed().requires_grad_()
    value = tlc.training.coupling_of_jacobians(J, K)
    assert value.item() == 1
    value.backward()
    assert J.grad.isfinite().all()


@pytest.mark.parametrize("frames", ["detached", "differentiated"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e36, 1e-36])
def test_coupling_has_no_scale(
    scale: float, frames: Literal["detached", "differentiated"]
) -> None:
    """Of float32: all Jacobians, or one of them, in other units."""
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(3, 12, 12, generator=generator)
    one = torch.tensor([1.0, scale, 1.0])[:, None, None]
    results = []
    for factor in (torch.tensor(1.0), torch.tensor(scale), one):
        x = (factor * J).requires_grad_()
        value = tlc.training.coupling_of_jacobians(x, K, frames=frames)
        value.backward()
        results.append((value.item(), x.grad * factor))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-3, atol=1e-5)


def test_coupling_of_blocks_has_no_scale() -> None:
    network = mlps(1, 1, 1e30)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    J = mlp_jacobians(network, x)
    network.float()
    value = tlc.training.coupling(network, lambda: network(x.float()), K)
    assert value.item() == pytest.approx(naive_coupling(J, J), abs=1e-5)
    value.backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(network))
    # Beside a skip, numbers this small are rounded; but they are numbers.
    network = mlps(1, 1e-30, 1e-30).float()
    value = tlc.training.coupling(network, lambda: network(x.float()), K)
    assert 0 < value.item() < 1
    value.backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(network))


def test_k_of_1_is_refused() -> None:
    """There coupling is 1, and has no gradient."""
    J = torch.randn(2, 8, 8)
    with pytest.raises(ValueError, match="`k` must be at least 2, got 1"):
        tlc.training.coupling_of_jacobians(J, 1)
    network = mlps(1, 1)
    with pytest.raises(ValueError, match="`k` must be at least 2, got 1"):
        tlc.training.coupling(network, lambda: pytest.fail("was run"), 1)
    with (
        pytest.warns(UserWarning, match="has width 1"),
        pytest.raises(ValueError, match="`k` must be at least 2"),
    ):
        tlc.training.coupling_of_jacobians(J[:, :1, :1])


class PostNorm(nn.Module):
    """`Y = norm(H + mlp(H))`, `H = norm(X + A X)`, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.mix = nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x + self.mix(x))
        return self.norms[1](h + self.mlp(h))

    def branches(self, x: Tensor) -> Tensor:
        h = self.norms[0](x + self.mix(x))
        return self.mix(x) + self.mlp(h)


def test_of_post_norm_blocks_it_is_that_of_their_branches() -> None:
    """Not of `block(X) − X`, which holds −I: value, and gradient by differences."""
    torch.manual_seed(0)
    network = nn.Sequential(*[PostNorm() for _ in range(3)]).double()
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    constant = {"frames": "differentiated", "activations": "differentiated"}

    def naive() -> float:
        J = []
        stream = x
        with torch.no_grad():
            for block in network:
                J.append(
                    torch.autograd.functional.jacobian(block.branches, stream[0, -1])
                )
                stream = block(stream)
        return naive_coupling(J, J)

    with pytest.warns(UserWarning, match="normalises the stream itself"):
        value = tlc.training.coupling(list(network), lambda: network(x), K, **constant)
    assert value.item() == pytest.approx(naive(), abs=1e-10)
    value.backward()
    weight = network[0].mix.weight
    assert weight.grad is not None
    predicted = float(weight.grad[2, 5])
    quotients = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight[2, 5] += step
            quotients.append(naive())
            weight[2, 5] -= step
    slope = (quotients[0] - quotients[1]) / 2e-5
    assert predicted == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_what_is_not_the_function_that_ran_is_refused() -> None:
    """A prefix that lies in a cache, dropout in eval mode, several inputs, 16 bits."""
    model = tiny.huggingface_model("llama")
    model.set_attn_implementation("sdpa")
    blocks = tiny.layers_of(model)
    name = tiny.cache_argument(model)
    for n_known in (3, 5):
        output = model(IDS[:, :n_known], use_cache=True)
        cached = {name: getattr(output, name)}
        with pytest.raises(tlc.gradients.StepError, match="with a key/value cache"):
            tlc.training.jacobians(
                blocks,
                lambda: model(IDS[:, n_known:], **cached),  # noqa: B023
            )

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.dropout(torch.tanh(super().forward(x)), 0.3)

    network = nn.Sequential(Dropping(12, 12), Dropping(12, 12))
    x = torch.randn(1, 3, 12)
    with pytest.raises(tlc.gradients.StepError, match="draws random numbers"):
        tlc.training.coupling(list(network), lambda: network(x), K)
    with pytest.raises(
        ValueError, match=r"one input, got a stream of shape \[2, 6, 32\]"
    ):
        tlc.training.jacobians(blocks, lambda: model(IDS.repeat(2, 1)))
    half = tiny.huggingface_model("llama", dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="`J` must be float32 or float64"):
        objective(half)


def test_what_measure_refuses_is_refused() -> None:
    """Modules that are not the blocks of one stream, and one of them twice."""
    model = tiny.huggingface_model("llama")
    layers = tiny.layers_of(model)
    attentions = [layer.self_attn for layer in layers]
    not_blocks = {
        r"output of block 0 is changed before": [
            attentions,
            [layer.mlp for layer in layers],
            [layers[0].self_attn, layers[0]],
            [layers[0].self_attn, layers[1]],
        ],
        r"blocks once, in their order|in the order": [
            [layers[0], layers[0]],
            [layers[0], layers[1], layers[0]],
            [layers[1], layers[0]],
            [layers[0], layers[0].self_attn],
        ],
    }
    for refused in (tlc.training.measure, tlc.training.coupling):
        for message, lists in not_blocks.items():
            for blocks in lists:
                with pytest.raises(ValueError, match=message):
                    refused(blocks, lambda: model(IDS), K)
    with pytest.raises(ValueError, match="output of block 0 is changed before"):
        tlc.training.jacobians(attentions, lambda: model(IDS))
    narrow = nn.Sequential(nn.Linear(12, 1), nn.Linear(1, 12))
    x = torch.randn(1, 3, 12)
    with pytest.raises(ValueError, match=r"block 0 takes \[1, 3, 12\] and gives"):
        tlc.training.coupling(narrow, lambda: narrow(x), K)


def test_a_block_that_runs_twice_is_given_twice() -> None:
    """As to `measure`: weights that are shared by layers (ALBERT)."""
    torch.manual_seed(0)
    block = Mlp()
    network = nn.Sequential(block, block)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    value = tlc.training.coupling([block, block], lambda: network(x), K)
    J = mlp_jacobians(network, x)
    assert value.item() == pytest.approx(naive_coupling(J, J), abs=1e-10)
    step = tlc.training.measure([block, block], lambda: network(x), K)
    assert value.item() == pytest.approx(step.coupling, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_within_run_is_off_in_blocks(dtype: torch.dtype) -> None:
    """Also where it rounds what enters the first of them."""
    model = tiny.huggingface_model("llama")
    blocks = tiny.layers_of(model)

    def run() -> None:
        with torch.autocast("cpu", dtype):
            model(IDS)

    value = tlc.training.coupling(blocks, run, K)
    assert value.item() == pytest.approx(objective(model).item(), abs=1e-6)
    depth = tlc.training.measure(blocks, run, K)
    assert value.item() == pytest.approx(depth.coupling, abs=1e-6)
    project = nn.Linear(8, 12)
    network = nn.Sequential(*[PostNorm() for _ in range(2)])
    x = torch.randn(1, 4, 8)

    def projected() -> None:
        with torch.autocast("cpu", dtype):
            network(project(x))

    J = tlc.training.jacobians(list(network), projected)
    rounded = project(x).to(dtype).float()
    expected = tlc.training.jacobians(list(network), lambda: network(rounded))
    torch.testing.assert_close(J, expected, atol=0.05, rtol=0.05)


# --- what it does to a model


class Block(nn.Module):
    """Attention and MLP of width 64, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(2))
        self.qkv = nn.Linear(64, 192, bias=False)
        self.out = nn.Linear(64, 64, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(n, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(n, t, 64))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.positions = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.7 / math.sqrt(parameter.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def coupling_after(sign: int, n_steps: int = 100) -> float:
    """Coupling on text that was not trained on, after steps up (1) or down (−1)."""
    torch.manual_seed(0)
    model = Model()
    text = torch.tensor(list((__doc__ or "").encode()) * 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, step / 10)
        places = torch.randint(0, len(text) - 33, (8,), generator=generator)
        ids = torch.stack([text[i : i + 33] for i in places.tolist()])
        loss = nn.functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
        if sign:
            objective = tlc.training.coupling(
                model.blocks,
                lambda ids=ids: model(ids[:1, :16]),
                8,
                activations="detached",
            )
            loss = loss - sign * objective
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = torch.tensor(list(b"A sentence that nobody trained on.")[:16])[None]
    return tlc.training.measure(model.blocks, lambda: model(held_out), 8).coupling


@pytest.mark.long("trains three small models")
def test_a_hundred_steps_move_coupling_up_and_down() -> None:
    untouched = coupling_after(0)
    up, down = coupling_after(1), coupling_after(-1)
    assert up > 0.6, (up, untouched, down)
    assert down < 0.08, (up, untouched, down)
    assert down < untouched < up


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_jacobians_are_those_of_the_library_and_have_gradients(
    architecture: str,
) -> None:
    """Against `block_jacobians`, and difference quotients of it in one weight."""
    model = tiny.huggingface_model(architecture, dtype=torch.float64)
    blocks = tiny.layers_of(model)

    def run() -> object:
        return model(IDS)

    def of_library() -> Tensor:
        trace = tlc.trace_modules(blocks, run)
        return torch.stack([tlc.block_jacobians(trace, position=t) for t in (2, -1)])

    J = tlc.training.jacobians(blocks, run, positions=(2, -1))
    torch.testing.assert_close(J, of_library(), rtol=1e-5, atol=1e-6)
    weights = torch.randn(J.shape, dtype=J.dtype)
    weight = next(p for p in blocks[-1].parameters() if p.dim() == 2)
    (gradient,) = torch.autograd.grad((J * weights).sum(), weight)
    step = 1e-3
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[0, 0] += sign * step
            values.append(float((of_library() * weights).sum()))
            weight[0, 0] -= sign * step
    quotient = (values[0] - values[1]) / (2 * step)
    assert float(gradient[0, 0]) == pytest.approx(quotient, rel=1e-2, abs=1e-3)
