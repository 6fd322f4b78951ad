"""The main path on a device other than the CPU; `test_devices` runs this file in a
process of its own.

Every number is compared with the one that the CPU gives, and so are the ways in which
Jacobians were evaluated: a cheap way that fails for mixing devices would otherwise be
passed over for a dearer one, and nobody would notice.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from markupsafe import Markup
from torch import Tensor, nn

import second_device
import tiny
import tl_coupling as tlc
import vision_models
from tl_coupling import plots
from tl_coupling.comparisons import maps
from tl_coupling.measures import MEASURES, alignment_matrices, subspace_overlap
from tl_coupling.report import page, parts
from tl_coupling.results import saved
from tl_coupling.trajectories import (
    entropy_by_depth,
    measure_trajectory,
    predictions,
    residual_alignment,
    shapes,
    trajectory_pca,
)
from zoo.models import hooked_transformer

# A GPU where there is one: `python -m pytest tests/support/on_second_device.py`.
SECOND = torch.device("cuda") if torch.cuda.is_available() else second_device.install()
K, TOKENS = 4, tiny.TOKENS[:4]
# A standard block with shared keys; a custom autograd Function, which rules out
# torch.func; experts; a cheap way that is wrong; recurrence; attention that reads both
# ways and takes no key/value cache.
ARCHITECTURES = ("llama", "bloom", "mixtral", "gemma4", "mamba", "bert")


def agree(
    compute: Callable[..., dict[str, Any]], make: Callable[[], nn.Module], *given: Any
) -> None:
    """Check that a model on the CPU and one of the same weights on the second device
    give the same, and that tensors stay there.
    """
    on_cpu, on_second = compute(make(), *given), compute(make().to(SECOND), *given)
    assert on_cpu.keys() == on_second.keys()
    for name, expected in on_cpu.items():
        got = on_second[name]
        if isinstance(expected, Tensor):
            assert got.device.type == SECOND.type, name
            size = float(expected.double().nan_to_num().norm())
            torch.testing.assert_close(
                got.cpu(),
                expected,
                rtol=1e-4,
                atol=1e-4 * (size + 1e-3),
                equal_nan=True,
                msg=name,
            )
        elif isinstance(expected, float):
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-6, nan_ok=True), name
        else:
            assert got == expected, name


def of_jacobians(
    model: nn.Module, given: Any, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Trace, and Jacobians in every way that the architecture allows."""
    trace = tlc.trace(model, given, dtype=dtype)
    last, v = (
        trace.n_pos - 1,
        torch.linspace(-1, 1, trace.d_model, dtype=trace.residual.dtype),
    )
    v = v.to(trace.residual)
    influence = tlc.cross_token_influence(trace)
    return {
        "residual": trace.residual,
        "f(X)": trace.blocks[0](trace.residual[0]),
        "J": tlc.block_jacobians(trace),
        "J across tokens": tlc.block_jacobian(
            trace, 1, input_position=1, output_position=last - 1
        ),
        "J from a later token": tlc.block_jacobian(
            trace, 1, input_position=last, output_position=1
        ),
        "J in chunks": tlc.block_jacobian(trace, 0, chunk_size=7),
        "vjp": tlc.block_vjp(trace, 1, v, input_position=1),
        "jvp": tlc.block_jvp(trace, 1, v, input_position=1),
        "influence": influence.frobenius_norm,
        "effective rank": influence.effective_rank,
        "paths": influence.provenance["paths"]
        | tlc.depth_coupling(trace, K).provenance["paths"],
        "remarks": trace.provenance["remarks"],
        "causal": trace.is_causal,
    }


def of_comparisons(model: nn.Module, given: Any) -> dict[str, Any]:
    """Spectra, coupling across depth and tokens, its measures, nulls and means."""
    trace = tlc.trace(model, given)
    J = tlc.block_jacobians(trace)
    spectrum, full = tlc.svd(J, K), tlc.svd(J)
    of_J_1: dict[str, Any] = {
        "d_model": trace.d_model,
        "S_1": full.S,
        "frobenius_norm": full.S.norm(dim=-1),
    }
    values: dict[str, Any] = {
        "S": spectrum.S,
        "A": tlc.coupling_matrix(J, spectrum, K).abs(),
        "reconstructed": full.U @ full.S.diag_embed() @ full.Vh,
        "null": tlc.random_subspace_null(K, "spectral_miscoupling", **of_J_1).float(),
        "absolute null": tlc.random_subspace_null(
            K, "spectral_miscoupling", absolute=True, **of_J_1
        ).float(),
        "non-normality": tlc.spectra.non_normality(J),
        "asymmetry": tlc.spectra.asymmetry(J),
        "rank": tlc.spectra.effective_rank(full.S),
        "overlap": subspace_overlap(alignment_matrices(spectrum)),
    }
    maps = {
        "depth": tlc.depth_coupling(trace, K, orientation="vju"),
        "mean": tlc.mean_depth_coupling([trace, tlc.trace(model, given[:3])], K),
        "self": tlc.self_coupling(trace, 0, 1, k=K),
        "fixed input": tlc.context_coupling(trace, 0, 1, fixed="input", k=K),
        "fixed output": tlc.context_coupling(trace, 0, 1, fixed="output", k=K),
    }
    for name, result in maps.items():
        for measure in MEASURES:
            values[f"{name} {measure}"] = result.values(3, measure)
            values[f"{name} {measure} mean"] = result.mean(3, measure)
        values |= {
            f"{name} null": result.null(
                3, "spectral_miscoupling", absolute=name == "depth"
            )
        }
        values |= {
            f"{name} locality": result.locality_profile(),
            f"{name} repr": bool(repr(result)),
        }
    return values | {
        "spread": maps["mean"].spread(),
        "spread of mean": maps["mean"].spread_of_mean(),
    }


def of_trajectories(model: nn.Module, given: Any) -> dict[str, Any]:
    """Every measure of the stream itself, logits among them."""
    trace = tlc.trace(model, given)
    result = measure_trajectory(trace, position=2)
    aligned, pca = (
        residual_alignment(trace, n_classes=3),
        trajectory_pca(trace.residual),
    )
    names = (
        "line_shape_score",
        "expodistance",
        "equidistance",
        "norm",
        "step_length",
        "line_shape_score_by_depth",
    )
    values = {name: getattr(result, name) for name in names}
    for name in ("one_step", "product", "closed_form", "singular_values"):
        values[name] = getattr(result.linearisation, name)
    return values | {
        "perturbation": result.perturbation.cosine_similarity,
        "alignment": aligned.within_blocks(),
        "across": aligned.across_blocks(),
        "tail energy": aligned.tail_energy,
        "summary of alignment": list(aligned.summary()),
        "explained": pca.explained_variance_ratio,
        "logits": trace.logits(trace.residual[-1]),
        "entropy": entropy_by_depth(trace),
        "reprs": [len(repr(one)) > 0 for one in (trace, result, aligned)],
    }


@pytest.fixture(scope="module")
def llama(tokenizer_folder: Path) -> Callable[[], nn.Module]:
    return lambda: tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # What the ways remark on is compared.
def test_jacobians(architecture: str, tokenizer_folder: Path) -> None:
    hf_model = tiny.huggingface_model(architecture)
    agree(of_jacobians, lambda: tiny.bridge(hf_model, tokenizer_folder), TOKENS)


def of_frozen_jacobians(
    model: nn.Module, given: Any, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Trace, and what is held constant."""
    trace = tlc.trace(model, given, dtype=dtype)
    return {
        "J": tlc.dynamics.frozen_jacobian(trace, 1, input_position=1),
        "bias": tlc.dynamics.frozen_bias(trace, 1),
        "model": tlc.dynamics.model_jacobian(trace, function="frozen"),
        "difference": tlc.comparisons.frozen_coupling(trace, K).differences,
    }


@pytest.mark.parametrize("architecture", ["gpt2"])
def test_frozen_jacobians(architecture: str, tokenizer_folder: Path) -> None:
    hf_model = tiny.huggingface_model(architecture)
    agree(of_frozen_jacobians, lambda: tiny.bridge(hf_model, tokenizer_folder), TOKENS)


@tiny.needs_hooked_transformer
@pytest.mark.filterwarnings("ignore")
def test_jacobians_of_a_hooked_transformer() -> None:
    name = "HookedTransformer, gated MLP, rotary, grouped"
    agree(of_jacobians, lambda: hooked_transformer(name, 2, torch.float32), TOKENS)


@pytest.mark.filterwarnings("ignore")
def test_weights_in_half_precision_and_jacobians_in_double(
    tokenizer_folder: Path,
) -> None:
    hf_model = tiny.huggingface_model("llama", dtype=torch.bfloat16)
    agree(
        of_jacobians,
        lambda: tiny.bridge(hf_model, tokenizer_folder),
        TOKENS,
        torch.float64,
    )


@pytest.mark.filterwarnings("ignore")
def test_images() -> None:
    agree(
        of_jacobians,
        lambda: vision_models.vit("ViTForImageClassification")[0],
        vision_models.pixels(),
    )


def test_comparisons(llama: Callable[[], nn.Module]) -> None:
    agree(of_comparisons, llama, tiny.TOKENS[:4])


def test_trajectories(llama: Callable[[], nn.Module]) -> None:
    agree(of_trajectories, llama, TOKENS[:4])


def of_interventions(model: nn.Module, given: Any) -> dict[str, Any]:
    """What is done to the stream, and read off it, through the model's own hooks."""
    prompts = ["w1 w2 w3 w8", "w4 w5 w6 w9 w10"]
    traces = [tlc.trace(model, prompt) for prompt in (*prompts, given)]
    subspace = tlc.directions.shared_subspace(traces, 2)
    directions = tlc.directions.directions_of(traces[0], 1, k=2)
    rotated = tlc.directions.rotate(model, prompts, n_draws=2)
    ablated = tlc.directions.ablate(model, prompts, subspace, n_draws=2)
    steered = tlc.directions.steer(model, prompts, directions, [0.5])
    lens = tlc.trajectories.product_lens(traces)
    decoded = tlc.directions.decode(traces[0], 0, k=2, lens=lens, others=traces[1:])
    return {
        "rotated": float(rotated.loss_change[0].mean()),
        "ablated": float(ablated.loss_change[0].mean()),
        "steered": float(steered.kl.mean()),
        "decoded": decoded.to_dataframe()["kurtosis_exceeded_by_random"].tolist(),
    }


@pytest.mark.filterwarnings("ignore")  # Of few prompts.
def test_interventions(llama: Callable[[], nn.Module]) -> None:
    agree(of_interventions, llama, TOKENS)


def of_products(model: nn.Module, given: Any) -> dict[str, Any]:
    """Triplets and derivatives without matrices, and coupling in a metric."""
    trace = tlc.trace(model, given)
    M = tlc.measures.stream_metric([trace])
    lens = tlc.trajectories.product_lens(
        [trace], tokens="later", skip_first_positions=1
    )
    by_products = tlc.depth_coupling(trace, 2, method="products")
    return {
        "spectrum": tlc.block_spectrum(trace, 1, 2).S,
        "products": by_products.coupling(),
        "way": by_products.provenance["svd"][:25],
        "metric": tlc.depth_coupling(trace, K, metric=M).coupling(),
        "metric on the CPU": tlc.depth_coupling(trace, K, metric=M.cpu()).coupling(),
        "model": tlc.dynamics.model_jacobian(trace),
        "lens": float(lens.jacobians[0].norm()),
    }


def test_products(tokenizer_folder: Path) -> None:
    """Of blocks that are wide enough for a Krylov space."""
    wide = {"hidden_size": 96, "intermediate_size": 128}
    hf_model = tiny.huggingface_model("llama", **wide)
    agree(of_products, lambda: tiny.bridge(hf_model, tokenizer_folder), TOKENS)


def test_modules_without_a_model() -> None:
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, norm_first=True).eval().to(SECOND)
        for _ in range(2)
    ]
    x = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(0)).to(SECOND)
    traced = tlc.trace_modules(layers, lambda: layers[1](layers[0](x)))
    assert tlc.depth_coupling(traced, k=4).coupling().device.type == SECOND.type


def test_a_model_that_is_loaded_there(folder_model: Path) -> None:
    model = tlc.load_model(str(folder_model), device=SECOND)
    assert {parameter.device.type for parameter in model.parameters()} == {SECOND.type}
    assert tlc.trace(model, "w3 w14 w15").residual.device.type == SECOND.type


def split(model: nn.Module) -> nn.Module:
    """Return the model with its last block and norm on the second device, and
    accelerate's hooks, as by `device_map`.
    """
    for part, device in (
        (model.blocks[-1], SECOND),
        (model.ln_final, SECOND),
        (model.unembed, "cpu"),
    ):
        part.to(device)
        add_hook_to_module(part.original_component, AlignDevicesHook(device))
    return model


@pytest.mark.parametrize("final_norm", [False, True])
def test_a_model_on_two_devices(
    llama: Callable[[], nn.Module], final_norm: bool
) -> None:
    on_cpu = tlc.trace(llama(), TOKENS, final_norm=final_norm)
    halves = tlc.trace(split(llama()), TOKENS, final_norm=final_norm)
    assert [block.X.device.type for block in halves.blocks] == ["cpu", SECOND.type]
    assert tlc.block_jacobian(halves, 1).device.type == SECOND.type
    torch.testing.assert_close(halves.residual, on_cpu.residual, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        tlc.block_jacobians(halves), tlc.block_jacobians(on_cpu), rtol=1e-4, atol=1e-4
    )
    on_second, expected = (tlc.depth_coupling(trace, K) for trace in (halves, on_cpu))
    torch.testing.assert_close(
        on_second.coupling(), expected.coupling(), rtol=1e-3, atol=1e-4
    )
    assert on_second.provenance["paths"] == expected.provenance["paths"]
    assert not halves.provenance["remarks"]
    x = on_cpu.residual[-1]
    torch.testing.assert_close(
        halves.logits(x, final_norm), on_cpu.logits(x, final_norm), rtol=1e-4, atol=1e-4
    )
    other_way = (
        tlc.self_coupling(halves, 1, 0, k=K),
        tlc.self_coupling(on_cpu, 1, 0, k=K),
    )
    torch.testing.assert_close(
        *(one.coupling() for one in other_way), rtol=1e-3, atol=1e-4
    )


def test_modules_on_two_devices() -> None:
    class There(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(src.to(self.linear1.weight.device), *args, **kwargs)

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [There(16, 2, 32, norm_first=True).eval() for _ in range(3)]

    def measured(layers: list[nn.Module]) -> tlc.CouplingMap:
        x = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(0))
        return tlc.depth_coupling(
            tlc.trace_modules(layers, lambda: nn.Sequential(*layers)(x)), k=K
        )

    halves = layers()
    halves[0].to(SECOND), halves[2].to(SECOND)
    # What takes any keyword is tried with keys and values.
    with pytest.warns(UserWarning, match="a more expensive way was used"):
        on_second, on_cpu = measured(halves), measured(layers())
    torch.testing.assert_close(
        on_second.coupling().cpu(), on_cpu.coupling(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_weights_stay_on_the_disk(folder_model: Path) -> None:
    def load(device: torch.device | str) -> nn.Module:
        return tlc.load_model(str(folder_model), device=device, memory="stream")

    on_cpu, on_second = (
        of_jacobians(load(device), TOKENS) for device in ("cpu", SECOND)
    )
    for name in ("residual", "J", "J across tokens", "vjp"):
        assert on_second[name].device.type == SECOND.type
        torch.testing.assert_close(
            on_second[name].cpu(), on_cpu[name], rtol=1e-4, atol=1e-5
        )
    assert on_second["paths"] == on_cpu["paths"]


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_top_of_a_large_spectrum(decay: float) -> None:
    noise = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))
    J = noise * torch.arange(1, 301) ** -decay
    on_cpu, on_second = tlc.svd(J, 8), tlc.svd(J.to(SECOND), 8)
    torch.testing.assert_close(on_second.S.cpu(), on_cpu.S, rtol=1e-5, atol=0)
    # What a device does less exactly is not made up for by a full SVD in silence.
    assert (on_second.steps > 0).tolist() == (on_cpu.steps > 0).tolist()
    images = (on_second.U.mT @ J.to(SECOND) @ on_second.Vh.mT).cpu()
    torch.testing.assert_close(images, on_cpu.S.diag_embed(), rtol=1e-3, atol=1e-3)


def test_files_pictures_and_pages(
    llama: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is drawn is on the CPU by then.
    for module in (parts, page):
        monkeypatch.setattr(module, "image", lambda *_: Markup("<img>"))
    trace = tlc.trace(llama().to(SECOND), "w3 w14 w15 w92")
    portrait = tlc.portrait(trace, k=(2, K))
    depth, trajectory = portrait.depth, measure_trajectory(trace)
    for result, values in (
        (depth, "matrices"),
        (portrait.influence, "frobenius_norm"),
        (trajectory, "norm"),
    ):
        loaded = type(result).load(
            result.save(tmp_path / f"{type(result).__name__}.nc")
        )
        torch.testing.assert_close(
            getattr(loaded, values), getattr(result, values).cpu()
        )
    mean = tlc.mean_depth_coupling([trace, tlc.trace(trace.model, trace.tokens[:3])], K)
    aligned = residual_alignment(trace, n_classes=3)
    with plots.off_screen():
        for draw, drawn in {
            plots.plot_singular_values: depth,
            plots.plot_spread: mean,
            plots.plot_alignment_matrices: aligned,
            plots.plot_trajectory_metrics: trajectory,
            plots.plot_linearisation: trajectory.linearisation,
            plots.plot_perturbation: trajectory.perturbation,
            plots.plot_inverse_singular_values: trajectory,
        }.items():
            assert draw(drawn) is not None
        assert tlc.interactive.show_token_coupling(portrait.tokens["self"])
        assert tlc.report.html_report({"there": portrait}).count("<img") > 5


def test_measures_of_many_prompts(llama: Callable[[], nn.Module]) -> None:
    there, prompts = llama().to(SECOND), ["w3 w14 w15 w92"]
    for measure in (tlc.surveys.measure_prompts, tlc.redundancy.layer_redundancy):
        given = (
            (tlc.Settings(k=(K,)),) if measure is tlc.surveys.measure_prompts else ()
        )
        options = {} if given else {"k": (K,)}
        expected, got = (
            measure(model, prompts, *given, **options, progress=False)
            for model in (llama(), there)
        )
        for name, values in expected.data_vars.items():
            if values.dtype.kind == "f" and name != "peak_memory":
                np.testing.assert_allclose(
                    got[name], values, rtol=1e-3, atol=1e-5, err_msg=str(name)
                )


def _planted(module: ModuleType, right: str, wrong: str) -> ModuleType:
    """Return the module with a mistake."""
    source = Path(str(module.__file__)).read_text()
    assert right in source, (
        f"{module.__name__} has no {right!r} any more: plant the mistake elsewhere"
    )
    mistaken = ModuleType(module.__name__)
    exec(
        compile(source.replace(right, wrong), str(module.__file__), "exec"),
        vars(mistaken),
    )
    return mistaken


@pytest.mark.parametrize(
    ("module", "right", "wrong", "use"),
    [
        pytest.param(
            shapes,
            "torch.arange(1, len(unit_steps) + 1).to(unit_steps)",
            "torch.arange(1, len(unit_steps) + 1).to(unit_steps.dtype)",
            lambda module, trace: module.line_shape_score_by_depth(trace.residual),
            id="positions that are counted on the CPU",
        ),
        pytest.param(
            maps,
            "device = self.matrices.device",
            "device = None",
            lambda module, trace: module.CouplingMap(
                **vars(tlc.depth_coupling(trace, K))
            ).mean(),
            id="a mask on the CPU",
            marks=pytest.mark.skipif(
                SECOND.type == "cuda", reason="CUDA copies it, and waits"
            ),
        ),
        pytest.param(
            saved,
            "tensor = tensor.detach().cpu()",
            "tensor = tensor.detach()",
            lambda module, trace: module.Saved.to_dataset(tlc.depth_coupling(trace, K)),
            id="an array without a copy to the CPU",
        ),
        pytest.param(
            predictions,
            "torch.randn(size, dtype=torch.float64, generator=generator)",
            "torch.randn(size, device=clean.device, generator=generator)",
            lambda module, trace: module.perturbation(trace, n_samples=1),
            id="the generator of the CPU",
        ),
    ],
)
def test_mistakes_are_caught(
    llama: Callable[[], nn.Module],
    module: ModuleType,
    right: str,
    wrong: str,
    use: Callable[..., Any],
) -> None:
    on_cpu, on_second = (
        tlc.trace(model, TOKENS) for model in (llama(), llama().to(SECOND))
    )
    mistaken = _planted(module, right, wrong)
    use(mistaken, on_cpu)
    use(module, on_second)
    with pytest.raises((RuntimeError, TypeError), match=SECOND.type):
        use(mistaken, on_second)


# Of the device that stands in for a GPU.
@pytest.mark.skipif(SECOND.type == "cuda", reason="a GPU is what it is")
def test_the_device_refuses_what_cuda_refuses() -> None:
    x, on_cpu = torch.ones(3, 3, device=SECOND), torch.ones(3, 3)
    for refused in (
        lambda: x + on_cpu,
        lambda: x @ on_cpu,
        lambda: torch.cat([x, on_cpu]),
        lambda: x.masked_fill(on_cpu > 0, 0.0),
        lambda: on_cpu[x[0] > 0],
        lambda: x.numpy(),
        lambda: np.asarray(x),
        lambda: torch.randn(3, device=SECOND, generator=torch.Generator()),
        lambda: nn.functional.linear(x, on_cpu),
        lambda: torch.func.vmap(torch.func.vjp(lambda y: (y * x).sum(0), x)[1])(on_cpu),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"same device|second"):
            refused()
    assert (x * torch.tensor(2.0)).sum().item() == 18


def test_the_device_keeps_memory_as_any_other() -> None:
    x = torch.zeros(3, 4, device=SECOND)
    x[1:, ::2].T[0] += 1
    x.diagonal()[0] = 5
    assert x.tolist() == [[5, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert x.T.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    weight = nn.Parameter(torch.ones(2, device=SECOND))
    weight.data = weight.data.double()
    (weight * weight).sum().backward()
    assert weight.grad.tolist() == [2, 2]
    assert (weight.grad.dtype, weight.grad.device.type) == (torch.float64, SECOND.type)
