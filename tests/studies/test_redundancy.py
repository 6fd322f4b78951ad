"""Changed models against HuggingFace models changed in the same way."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import BlockFunction
from tl_coupling.jacobians import decomposed
from tl_coupling.studies.redundancy import CHANGES, layer_redundancy, shared_directions

OTHER = [7, 7, 1, 50, 2]


@pytest.fixture
def four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep enough that a change in the middle has layers before and after it."""
    monkeypatch.setattr(tiny, "N_LAYERS", 4)
    for architecture, config in tiny.configs(4).items():
        monkeypatch.setitem(tiny.CONFIGS, architecture, config)


def reordered(
    hf_model: nn.Module, order: list[int], merged: tuple[int, int] | None = None
) -> nn.Module:
    """A copy of the model with its layers in this order; `merged`: the first has the
    mean of both state dicts.
    """
    model = copy.deepcopy(hf_model)
    layers = tiny.layers_of(model)
    if merged:
        first, second = (layers[i].state_dict() for i in merged)
        layers[merged[0]].load_state_dict(
            {name: (first[name] + second[name]) / 2 for name in first}
        )
    in_order = [layers[i] for i in order]
    types = getattr(model.config, "layer_types", None)
    if types is not None:
        model.config.layer_types = [types[i] for i in order]
    while len(layers):
        del layers[-1]
    layers.extend(in_order)
    return model


@torch.no_grad()
def hf_loss(hf_model: nn.Module, tokens: list[int]) -> float:
    logits = hf_model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return float(-logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].mean())


def expected(
    hf_model: nn.Module, tokens: list[int], merge: bool = True
) -> dict[str, Any]:
    n = len(tiny.layers_of(hf_model))
    layers = list(range(n))
    swaps = [[*layers[:i], i + 1, i, *layers[i + 2 :]] for i in range(n - 1)]
    losses: dict[str, Any] = {
        "loss": hf_loss(hf_model, tokens),
        "loss_dropped": [
            hf_loss(reordered(hf_model, layers[:i] + layers[i + 1 :]), tokens)
            for i in range(n)
        ],
        "loss_swapped": [
            hf_loss(reordered(hf_model, order), tokens) for order in swaps
        ],
    }
    if merge:
        losses["loss_merged"] = [
            hf_loss(
                reordered(hf_model, layers[: i + 1] + layers[i + 2 :], (i, i + 1)),
                tokens,
            )
            for i in range(n - 1)
        ]
    return losses


def assert_agree(
    data: xarray.Dataset,
    hf_model: nn.Module,
    prompts: list[list[int]],
    merge: bool = True,
) -> None:
    for i, tokens in enumerate(prompts):
        for name, values in expected(hf_model, tokens, merge).items():
            np.testing.assert_allclose(
                data[name].values[i], values, rtol=0, atol=2e-5, err_msg=name
            )


def words(tokens: list[int]) -> str:
    return " ".join(f"w{i}" for i in tokens)


def bridged(architecture: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    hf_model = tiny.huggingface_model(architecture)
    return hf_model, tiny.bridge(hf_model, folder)


# Losses


@pytest.mark.parametrize(
    "architecture", ["gpt2", "gpt_neox", "llama", "mistral", "mixtral", "bloom", "opt"]
)
def test_losses_equal_those_of_a_huggingface_model_with_its_layers_changed(
    architecture: str, tokenizer_folder: Path, four_layers: None
) -> None:
    hf_model, model = bridged(architecture, tokenizer_folder)
    prompts = [tiny.TOKENS, OTHER]
    data = layer_redundancy(model, [words(p) for p in prompts], k=[4], progress=False)
    assert data.sizes == {"prompt": 2, "k": 1, "layer": 4, "pair": 3}
    assert_agree(data, hf_model, prompts)
    changes = np.concatenate(
        [(data[f"loss_{change}"] - data.loss).values.ravel() for change in CHANGES]
    )
    assert np.abs(changes).min() > 1e-3


@pytest.mark.both_lines
@tiny.needs_hooked_transformer
@pytest.mark.parametrize(
    ("architecture", "name"), [("gpt2", "gpt2"), ("gpt_neox", "EleutherAI/pythia-14m")]
)
def test_losses_of_a_hooked_transformer(
    architecture: str, name: str, hub: Path
) -> None:
    model = tlc.load_model(name, backend="hooked")
    data = layer_redundancy(model, words(tiny.TOKENS), k=[4])
    assert_agree(data, tiny.huggingface_model(architecture), [tiny.TOKENS])


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("gemma2", "'sliding_attention' and 'full_attention'"),
        ("gpt_neo", "'global' and 'local'"),
    ],
)
def test_windowed_and_full_attention_are_swapped_but_not_merged(
    architecture: str, setting: str, tokenizer_folder: Path, four_layers: None
) -> None:
    hf_model, model = bridged(architecture, tokenizer_folder)
    with pytest.warns(
        UserWarning,
        match=f"3 of 3 pairs cannot be merged.*layers 0 and 1 differ in .*{setting}",
    ):
        data = layer_redundancy(model, words(tiny.TOKENS), k=[4])
    assert data.loss_merged.isnull().all()
    assert sorted(json.loads(data.attrs["not_merged"])) == ["0", "1", "2"]
    assert_agree(data, hf_model, [tiny.TOKENS], merge=False)


def test_a_block_that_writes_nothing_can_go(tokenizer_folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        hf_model = tiny.huggingface_model("llama", dtype=dtype)
        for name, parameter in tiny.layers_of(hf_model)[1].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.data.zero_()
        with (
            pytest.warns(UserWarning, match="is above the rank of layer 1"),
            pytest.warns(UserWarning, match="the measure is undefined there"),
        ):
            data = layer_redundancy(
                tiny.bridge(hf_model, tokenizer_folder), words(tiny.TOKENS), k=[4]
            )
        assert data.loss_dropped[0, 1] == data.loss[0]
        assert abs(data.block_influence[0, 1]) < 1e-12
        assert abs(data.loss_dropped[0, 0] - data.loss[0]) > 1e-3
        assert data.block_influence[0, 0] > 1e-3


def test_equal_blocks_swap_for_nothing_and_merge_into_a_drop_of_one(
    tokenizer_folder: Path,
) -> None:
    hf_model = tiny.huggingface_model("llama")
    first, second = tiny.layers_of(hf_model)
    second.load_state_dict(first.state_dict())
    data = layer_redundancy(
        tiny.bridge(hf_model, tokenizer_folder), words(tiny.TOKENS), k=[4]
    )
    assert data.loss_swapped[0, 0] == data.loss[0]
    assert (
        data.loss_merged[0, 0]
        == data.loss_dropped[0, 0]
        == data.loss_dropped[0, 1]
        != data.loss[0]
    )


def test_block_influence_is_one_minus_the_mean_cosine_of_input_and_output(
    tokenizer_folder: Path, four_layers: None
) -> None:
    hf_model, model = bridged("gpt2", tokenizer_folder)
    states: list[torch.Tensor] = []
    for layer in tiny.layers_of(hf_model):
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    tiny.layers_of(hf_model)[-1].register_forward_hook(
        lambda _, __, out: states.append(
            (out[0] if isinstance(out, tuple) else out).reshape(len(tiny.TOKENS), -1)
        )
    )
    with torch.no_grad():
        hf_model(torch.tensor([tiny.TOKENS]))
    cosines = [
        torch.cosine_similarity(x, y, dim=-1).mean() for x, y in pairwise(states)
    ]
    data = layer_redundancy(model, words(tiny.TOKENS), k=[4])
    np.testing.assert_allclose(
        data.block_influence[0], 1 - np.array(cosines), atol=1e-6
    )


def test_coupling_is_averaged_over_both_orders(
    tokenizer_folder: Path, four_layers: None
) -> None:
    _, model = bridged("llama", tokenizer_folder)
    data = layer_redundancy(
        model, words(tiny.TOKENS), k=[3, 8], position=4, orientation="vju"
    )
    for i, k in enumerate((3, 8)):
        C = (
            tlc.depth_coupling(tlc.trace(model, tiny.TOKENS), 8, 4, "vju")
            .coupling(k)
            .tolist()
        )
        pairs = [(C[i][i + 1] + C[i + 1][i]) / 2 for i in range(3)]
        with_others = [
            np.mean([x for j in range(4) if j != i for x in (C[i][j], C[j][i])])
            for i in range(4)
        ]
        np.testing.assert_allclose(data.coupling_of_pair[0, i], pairs, atol=1e-6)
        np.testing.assert_allclose(
            data.coupling_with_others[0, i], with_others, atol=1e-6
        )
        assert float(data.null_coupling[i]) == pytest.approx(1 - (1 - 1 / k) ** 0.5)


def test_each_jacobian_is_computed_and_decomposed_once(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coupling and shared directions read one decomposition."""
    computed: list[tuple[int, int, int]] = []
    decomposed_matrices: list[bytes] = []
    compute = BlockFunction.jacobians
    svd = decomposed.svd

    def counted_jacobians(
        block: BlockFunction, inputs: list[int], output: int, *options: object
    ) -> object:
        computed.extend((block.layer, t1, output) for t1 in inputs)
        return compute(block, inputs, output, *options)

    def counted_svd(J: torch.Tensor, n_triplets: int) -> object:
        decomposed_matrices.extend(matrix.numpy().tobytes() for matrix in J)
        return svd(J, n_triplets)

    monkeypatch.setattr(BlockFunction, "jacobians", counted_jacobians)
    monkeypatch.setattr(decomposed, "svd", counted_svd)
    layer_redundancy(tiny_trace.model, words(tiny.TOKENS), k=[4, 8], progress=False)
    last = len(tiny.TOKENS) - 1
    assert computed == [(layer, last, last) for layer in range(tiny.N_LAYERS)]
    assert len(set(decomposed_matrices)) == len(decomposed_matrices) == tiny.N_LAYERS


def test_the_dataset_says_what_it_is_and_can_be_written(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    _, model = bridged("llama", tokenizer_folder)
    prompts = [tlc.Prompt("w1 w2 w3", "a", "counting"), tlc.Prompt("w9 w8", "b", None)]
    seen: list[str] = []
    data = layer_redundancy(
        model,
        prompts,
        k=[4],
        progress=lambda todo: (seen.append(p.id) or p for p in todo),
    )
    assert seen == ["a", "b"] == data.prompt.values.tolist()
    assert data.task.values.tolist() == ["counting", ""]
    assert data.n_pos.values.tolist() == [3, 2]
    provenance = json.loads(data.attrs["provenance"])
    assert provenance["architecture"] == "LlamaForCausalLM"
    assert "tokens" not in provenance
    data.to_netcdf(tmp_path / "data.nc", engine="netcdf4")
    xarray.testing.assert_identical(
        xarray.load_dataset(tmp_path / "data.nc", engine="netcdf4"), data
    )


def last_blocks_removed(hf_model: nn.Module, n_kept: int) -> nn.Module:
    return reordered(hf_model, list(range(n_kept)))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_an_exit_is_a_model_without_its_last_blocks(
    architecture: str, tokenizer_folder: Path, four_layers: None
) -> None:
    hf_model, model = bridged(architecture, tokenizer_folder)
    data = layer_redundancy(model, words(tiny.TOKENS), k=[4])
    losses = [
        hf_loss(last_blocks_removed(hf_model, n), tiny.TOKENS) for n in (1, 2, 3, 4)
    ]
    np.testing.assert_allclose(data.loss_exited[0], losses, atol=2e-5)
    assert data.loss_exited[0, 3] == data.loss[0]


@torch.no_grad()
def projected_loss(
    hf_model: nn.Module, tokens: list[int], layer: int, P: torch.Tensor
) -> float:
    """With a hook on a HuggingFace layer that projects what it adds."""

    def project(_: Any, args: Any, out: Any) -> Any:
        X = args[0]
        Y = out[0] if isinstance(out, tuple) else out
        Y = X + (Y - X) @ P
        return (Y, *out[1:]) if isinstance(out, tuple) else Y

    handle = tiny.layers_of(hf_model)[layer].register_forward_hook(project)
    try:
        return hf_loss(hf_model, tokens)
    finally:
        handle.remove()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_projected_block_writes_into_the_directions_that_jacobians_by_autograd_share(
    architecture: str, tokenizer_folder: Path, four_layers: None
) -> None:
    hf_model, model = bridged(architecture, tokenizer_folder)
    data = layer_redundancy(model, words(tiny.TOKENS), k=[3, tiny.D_MODEL], position=4)
    Js = [
        tiny.oracle_jacobian(hf_model, tiny.TOKENS, layer, 4, 4).double()
        for layer in range(4)
    ]
    spans = [torch.linalg.svd(J).U[:, :3] for J in Js]
    values, vectors = np.linalg.eigh(sum(U @ U.mT for U in spans).numpy())
    assert values[-3] - values[-4] > 0.1
    P = torch.from_numpy(vectors[:, -3:] @ vectors[:, -3:].T).float()
    for layer in range(4):
        expected_loss = projected_loss(hf_model, tiny.TOKENS, layer, P)
        np.testing.assert_allclose(
            data.loss_projected.sel(k=3)[0, layer], expected_loss, atol=1e-4
        )
        assert abs(expected_loss - float(data.loss_dropped[0, layer])) > 1e-4
    # Onto all directions there are, nothing is lost.
    np.testing.assert_allclose(
        data.loss_projected.sel(k=tiny.D_MODEL)[0], float(data.loss[0]), atol=2e-5
    )


def test_what_all_blocks_share_comes_first() -> None:
    """One direction common to all, the others random: it is found, and the sum of
    squared cosines is the largest.
    """
    rng = torch.Generator().manual_seed(0)
    common = torch.nn.functional.normalize(
        torch.randn(12, 1, generator=rng, dtype=torch.float64), dim=0
    )
    spans = [
        torch.cat([common, torch.randn(12, 3, generator=rng, dtype=torch.float64)], 1)
        for _ in range(5)
    ]
    U = torch.stack([torch.linalg.qr(span).Q for span in spans])
    Q = shared_directions(U)
    torch.testing.assert_close(
        (Q[:, :1].mT @ common).abs(), torch.ones(1, 1, dtype=torch.float64)
    )
    torch.testing.assert_close(Q.mT @ Q, torch.eye(4, dtype=torch.float64))
    captured = (Q.mT @ U).square().sum()
    for _ in range(200):
        perturbed = torch.linalg.qr(
            Q + 0.3 * torch.randn(12, 4, generator=rng, dtype=torch.float64)
        ).Q
        assert (perturbed.mT @ U).square().sum() <= captured + 1e-12


# The model afterwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_also_by_an_error(
    dtype: torch.dtype, fails: bool, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model("gpt2", dtype=dtype), tokenizer_folder)
    parameters = {
        name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()
    }
    originals = [p.detach().float() for p in model.blocks[0].parameters()]
    merged: list[bool] = []

    def notice(module: nn.Module, _: Any) -> None:
        merged.append(
            any(
                not torch.equal(p.float(), q)
                for p, q in zip(module.parameters(), originals, strict=True)
            )
        )
        if fails and merged[-1]:
            raise RuntimeError("out of memory")

    model.blocks[0].register_forward_pre_hook(notice)
    if not fails:
        layer_redundancy(model, words(tiny.TOKENS), k=[4])
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            layer_redundancy(model, words(tiny.TOKENS), k=[4])
    assert any(merged)
    for name, p in model.named_parameters():
        assert p.dtype == dtype
        assert p.data_ptr() == parameters[name][0]
        assert torch.equal(p, parameters[name][1])


# Bad input


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "`prompts` is empty"),
        (["w1 w2", "w1"], {"k": [4]}, "prompt '1': wanted at least 2 tokens"),
        (["w1 w2"], {"k": [33]}, r"prompt '0': `k` must lie in \[1, 32\]"),
        (["w1 w2"], {"k": []}, "`k` must be different whole numbers"),
        (["w1 w2"], {"k": [0, 4]}, "`k` must be at least 1, got 0"),
        (["w1 w2"], {"k": [4], "position": 2}, "prompt '0': `position` must lie in"),
    ],
)
def test_bad_input_is_one_line(
    prompts: list[str],
    options: dict[str, Any],
    message: str,
    tiny_trace: tlc.Trace,
    as_a_user: None,
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        layer_redundancy(tiny_trace.model, prompts, **options)
    assert "\n" not in str(error.value)


def test_one_block_has_no_neighbour(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        tiny.CONFIGS, "llama", tiny.CONFIGS["llama"] | {"num_hidden_layers": 1}
    )
    _, model = bridged("llama", tokenizer_folder)
    with pytest.raises(
        ValueError, match="prompt '0': wanted a model of at least 2 blocks"
    ):
        layer_redundancy(model, "w1 w2", k=[4])
