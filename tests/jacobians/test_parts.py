"""Components of block Jacobians: against autograd through hook points, with the other
parts held constant, and against the whole.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import moe

import tiny
import tl_coupling as tlc
from zoo.oracle import Oracle

pytestmark = pytest.mark.both_lines

LAYER, LAST = 1, 7
# Grouped queries, biases, soft caps and norms behind branches, a mixture, branches side
# by side, attention that TransformerLens does not read, and attention that holds the
# skip connection and a norm.
KINDS = ("llama", "gpt2", "gemma2", "mixtral", "phi", "gpt_neo", "bloom", "bert")


def relative_error(value: Tensor, expected: Tensor, scale: Tensor) -> float:
    return float((value - expected).norm() / scale.norm())


@contextmanager
def held_constant(
    block: nn.Module, head: int | None, keeps_mlp: bool
) -> Iterator[None]:
    """Let gradients through one head, or none, and through the MLP or not."""

    def only_head(_: nn.Module, __: object, z: Tensor) -> Tensor:
        kept = torch.zeros_like(z)
        if head is not None:
            by_head = kept.reshape(*z.shape[:2], tiny.CONFIGS["gpt2"]["n_head"], -1)
            by_head[:, :, head] = 1
            kept = by_head.reshape(z.shape)
        return kept * z + (1 - kept) * z.detach()

    with ExitStack() as hooks:
        hooks.enter_context(block.attn.hook_z.register_forward_hook(only_head))
        if not keeps_mlp:
            # Of BERT, hook_out is behind the skip connection.
            point = getattr(block.mlp, "hook_post", None) or block.mlp.hook_out
            hooks.enter_context(
                point.register_forward_hook(lambda _, __, output: output.detach())
            )
        yield


@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.parametrize("architecture", KINDS)
def test_components_are_autograds_with_the_other_parts_held_constant(
    architecture: str, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    parts = tlc.block_parts(tlc.trace(model, tiny.TOKENS), LAYER)
    inputs = {"input": torch.tensor([tiny.TOKENS]), "use_cache": False}
    if architecture == "bert":
        del inputs["use_cache"]
    oracle = Oracle(model, "blocks", inputs)

    def jacobian(head: int | None = None, keeps_mlp: bool = False) -> Tensor:
        with held_constant(model.blocks[LAYER], head, keeps_mlp):
            return oracle.jacobians(LAYER, [(LAST, LAST)])[LAST, LAST]

    J = oracle.jacobians(LAYER, [(LAST, LAST)])[LAST, LAST]
    skip = jacobian()
    n_heads = model.cfg.n_heads
    expected = {f"L1H{head}": jacobian(head) - skip for head in range(n_heads)}
    expected["1_mlp_out"] = jacobian(keeps_mlp=True) - skip
    rest = J - skip - sum(expected.values())
    if architecture != "phi":
        expected["1_mlp∘attn"] = rest
    if architecture == "bert":
        expected["1_skip"] = skip
    assert parts.labels == tuple(expected)
    for label, component in expected.items():
        assert relative_error(parts[label], component, J) < 5e-6, label
        assert float(component.norm()) > 1e-2 * float(J.norm()), label


# Queries that share keys as rows of one product, attention of torch's own function,
# experts that write in place, latent keys, products without an axis for sequences.
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        ("mistral", "sdpa"),
        ("phi3", "sdpa"),
        ("mixtral", "eager"),
        ("mixtral", "sdpa"),
        ("falcon", "eager"),
        ("bloom", "eager"),
        pytest.param("deepseek_v3", "eager", marks=tiny.LONG),
        pytest.param("deepseek_v3", "sdpa", marks=tiny.LONG),
        pytest.param("gpt_oss", "eager", marks=tiny.LONG),
        pytest.param("llama4", "sdpa", marks=tiny.LONG),
        pytest.param("jamba", "eager", marks=tiny.LONG),
        pytest.param("granitemoehybrid", "sdpa", marks=tiny.LONG),
    ],
)
def test_heads_of_huggingface_modules_are_those_of_a_bridge(
    architecture: str, attention: str, tokenizer_folder: Path
) -> None:
    """Which has a hook point on each head."""
    model = tiny.huggingface_model(architecture)
    bridge = tiny.bridge(model, tokenizer_folder)
    expected = tlc.block_parts(tlc.trace(bridge, tiny.TOKENS), LAYER)
    if attention != model.config._attn_implementation:
        model.set_attn_implementation(attention)
    parts = tlc.block_parts(tlc.trace(model, tiny.TOKENS), LAYER)
    assert parts.labels == expected.labels
    J = expected.matrices.sum(0)
    for label in parts.labels:
        assert relative_error(parts[label], expected[label], J) < 5e-6, label


def test_experts_are_the_same_by_the_product_that_stands_in_for_torchs(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes its own where torch has none for groups: on older GPUs."""
    model = tiny.bridge(tiny.huggingface_model("mixtral"), tokenizer_folder)
    expected = tlc.block_parts(tlc.trace(model, tiny.TOKENS), LAYER)
    frozen = tlc.dynamics.frozen_jacobian(tlc.trace(model, tiny.TOKENS), LAYER)
    calls = []

    def has_none(*arguments: Tensor) -> bool:
        calls.append(arguments)
        return False

    monkeypatch.setattr(moe, "_can_use_grouped_mm", has_none)
    trace = tlc.trace(model, tiny.TOKENS)
    parts = tlc.block_parts(trace, LAYER)
    assert calls
    assert parts.labels == expected.labels
    J = expected.matrices.sum(0)
    for label in parts.labels:
        assert relative_error(parts[label], expected[label], J) < 5e-6, label
    again = tlc.dynamics.frozen_jacobian(trace, LAYER)
    assert relative_error(again, frozen, frozen) < 5e-6


def test_last_term_is_the_product_of_the_others(tiny_trace: tlc.Trace) -> None:
    parts = tlc.block_parts(tiny_trace, 0, position=3)
    attention = sum(parts[f"L0H{head}"] for head in range(4))
    product = parts["0_mlp_out"] @ attention
    assert relative_error(parts["0_mlp∘attn"], product, product) < 1e-5
    assert float(product.norm()) > 0.1


def test_branches_of_a_block_that_normalises_have_no_skip(
    tokenizer_folder: Path,
) -> None:
    hf_model = tiny.huggingface_model("bert")
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        parts = tlc.block_parts(trace, LAYER, function="branches")
    J = tlc.block_jacobian(trace, LAYER, function="branches")
    assert relative_error(parts.matrices.sum(0), J, J) < 1e-5
    assert "1_skip" not in parts.labels


def test_result_is_saved_and_knows_its_labels(
    tiny_trace: tlc.Trace, tmp_path: Path
) -> None:
    parts = tlc.block_parts(tiny_trace, -1, position=-2)
    assert (parts.layer, parts.position) == (1, 6)
    loaded = tlc.jacobians.BlockParts.load(parts.save(tmp_path / "parts.nc"))
    assert loaded.labels == parts.labels
    assert loaded.matrices.equal(parts.matrices)
    assert loaded.provenance == parts.provenance
    with pytest.raises(KeyError, match="L1H9"):
        parts["L1H9"]
    with pytest.raises(ValueError, match="labels"):
        tlc.jacobians.BlockParts(parts.matrices, ("a",), 1, 6, {})


def test_a_block_that_is_zero_is_said_to_be_zero(tokenizer_folder: Path) -> None:
    hf_model = tiny.huggingface_model("llama")
    zero, silent = tiny.layers_of(hf_model)
    for projection in (zero.self_attn.o_proj, zero.mlp.down_proj):
        projection.weight.data.zero_()
    silent.self_attn.o_proj.weight.data.zero_()
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    with pytest.raises(
        ValueError, match="layer 0: the block's Jacobian at token 7 is "
    ):
        tlc.block_parts(trace, 0)
    # Its MLP acts, its attention does not.
    with pytest.raises(ValueError, match="one attention that writes to the stream"):
        tlc.block_parts(trace, 1)
    assert (tlc.dynamics.leading_eigenvalues(trace, 0, 3) == 0).all()


class NanoBlock(nn.Module):
    """A block as nanoGPT writes it: a fused projection, and attention by torch's own
    function, which knows the mask; with fewer keys than queries it shares them too.
    """

    def __init__(self, n_keys: int) -> None:
        super().__init__()
        self.sizes = [16, 4 * n_keys, 4 * n_keys]
        self.ln_1 = nn.LayerNorm(16)
        self.c_attn = nn.Linear(16, sum(self.sizes))
        self.c_proj = nn.Linear(16, 16)
        self.ln_2 = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))

    def forward(self, X: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(X)).split(self.sizes, dim=-1)
        )
        z = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.sizes[1] < 16
        )
        X = X + self.c_proj(z.transpose(1, 2).flatten(2))
        return X + self.mlp(self.ln_2(X))

    def head(self, X: Tensor, t: int, head: int) -> Tensor:
        """What a head adds at token t: loops and a softmax, for one sequence."""
        projected = self.c_attn(self.ln_1(X))
        q, k, v = projected.split(self.sizes, dim=-1)
        # Neighbours share their keys and values.
        shared = head * self.sizes[1] // 16
        of_head, of_keys = (
            slice(4 * head, 4 * head + 4),
            slice(4 * shared, 4 * shared + 4),
        )
        scores = torch.stack([q[t, of_head] @ k[s, of_keys] / 2 for s in range(t + 1)])
        pattern = scores.softmax(0)
        z = sum(pattern[s] * v[s, of_keys] for s in range(t + 1))
        return self.c_proj.weight[:, of_head] @ z

    def parts(self, X: Tensor, t: int) -> dict[str, Tensor]:
        """Jacobians of what each part adds, by autograd, with the others constant."""

        def stream(x: Tensor) -> Tensor:
            return torch.cat([X[:t], x[None], X[t + 1 :]])

        def attention(x: Tensor) -> Tensor:
            heads = sum(self.head(stream(x), t, head) for head in range(4))
            return heads + self.c_proj.bias

        def derivative(f: Callable[[Tensor], Tensor]) -> Tensor:
            return torch.autograd.functional.jacobian(f, X[t])

        def mlp(x: Tensor) -> Tensor:
            return self.mlp(self.ln_2(x))

        added = attention(X[t]).detach()
        heads = {
            f"H{i}": derivative(lambda x, i=i: self.head(stream(x), t, i))
            for i in range(4)
        }
        return heads | {
            "mlp_out": derivative(lambda x: mlp(x + added)),
            "mlp∘attn": derivative(lambda x: mlp(X[t] + attention(x))),
        }


@pytest.fixture(params=[4, 2, 1], ids=["is_causal", "enable_gqa", "one key"])
def nano(request: pytest.FixtureRequest) -> tuple[list[NanoBlock], tlc.Trace]:
    torch.manual_seed(3)
    blocks = [NanoBlock(request.param).double() for _ in range(2)]
    X = torch.randn(1, 6, 16, dtype=torch.float64)
    network = nn.Sequential(*blocks)
    return blocks, tlc.trace_modules(blocks, lambda: network(X))


@pytest.mark.parametrize("position", [5, 2])
def test_parts_of_nanogpt_are_autograds(
    nano: tuple[list[NanoBlock], tlc.Trace], position: int
) -> None:
    blocks, trace = nano
    for layer, block in enumerate(blocks):
        parts = tlc.block_parts(trace, layer, position)
        expected = block.parts(trace.residual[layer], position)
        assert len(parts.labels) == len(expected)
        for label, J in zip(parts.labels, parts.matrices, strict=True):
            part = label.removeprefix(f"L{layer}").removeprefix(f"{layer}_")
            torch.testing.assert_close(J, expected[part], rtol=1e-9, atol=1e-11)
        # No more expensive way than for other blocks.
        _, way = trace.blocks[layer].jacobian(position, position)
        assert way == "token_local_recorded"
    assert trace.provenance["remarks"] == []


def test_carriers_and_heads_of_nanogpt_are_those_of_autograds_parts(
    nano: tuple[list[NanoBlock], tlc.Trace],
) -> None:
    blocks, trace = nano
    parts = [block.parts(trace.residual[i], 5) for i, block in enumerate(blocks)]
    carried = tlc.carriers(trace, k=3, n_draws=2)
    J = [sum(of_block.values()) for of_block in parts]
    for row, col in ((0, 1), (1, 0)):
        U, _, Vh = torch.linalg.svd(J[col])
        A = U[:, :3].mT @ J[row] @ Vh[:3].mT
        for place, (label, J_c) in enumerate(parts[row].items()):
            assert carried.labels[place] == label
            A_c = U[:, :3].mT @ J_c @ Vh[:3].mT
            share = (A_c * A).sum() / A.square().sum()
            assert float(carried.energy_share[row, col, place]) == pytest.approx(
                float(share), abs=1e-6
            )
    coupled = tlc.comparisons.head_coupling(trace, k=2)
    heads = [of_block[f"H{i}"] for of_block in parts for i in range(4)]
    for row, J_1 in enumerate(heads):
        for col, J_2 in enumerate(heads):
            U, _, Vh = torch.linalg.svd(J_2)
            A = U[:, :2].mT @ J_1 @ Vh[:2].mT
            off_diagonal = A - A.diagonal().diag()
            expected = 1 - float(off_diagonal.norm() / A.norm())
            assert float(coupled.coupling[row, col]) == pytest.approx(
                expected, abs=1e-6
            )
