"""`tl-coupling trajectory` as a user meets it."""

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray
from torch import nn

import tiny
from tl_coupling.trajectories import TrajectoryResult

PROMPT, TOKENS = "w3 w14 w15 w92", [3, 14, 15, 92]


@pytest.fixture(scope="module")
def still_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second block writes nothing: a step of length 0."""
    folder = tmp_path_factory.mktemp("still")
    hf_model: Any = tiny.huggingface_model("llama")
    layer = tiny.layers_of(hf_model)[1]
    for weights in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weights.data.zero_()
    hf_model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


def stream_and_entropy() -> tuple[list[torch.Tensor], list[float]]:
    """The residual stream of the HuggingFace model, and the entropy of its own
    prediction at every token.
    """
    hf_model: Any = tiny.huggingface_model("llama")
    streams: list[torch.Tensor] = []
    layers = tiny.layers_of(hf_model)
    handles = [
        layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: streams.append(args[0][0]), with_kwargs=True
        )
    ]
    for layer in layers:
        handles.append(
            layer.register_forward_hook(
                lambda _, __, out: streams.append(
                    (out[0] if isinstance(out, tuple) else out)[0]
                )
            )
        )
    with torch.no_grad():
        logits = hf_model(torch.tensor([TOKENS]), use_cache=False).logits[0].double()
    for handle in handles:
        handle.remove()
    p = logits.softmax(-1)
    return [x.reshape(len(TOKENS), -1).double() for x in streams], (
        -(p * p.log()).sum(-1)
    ).tolist()


def shapes(x: list[torch.Tensor], token: int) -> dict[str, float]:
    """The paper's formulas, written down again."""
    path = [state[token] for state in x]
    steps = [after - before for before, after in pairwise(path)]
    alpha = [
        math.log(float(after.norm() / before.norm()))
        for before, after in pairwise(path)
    ]
    lengths = [float(step.norm()) for step in steps]
    return {
        "line_shape_score": len(steps)
        / float(sum((step / step.norm() for step in steps), 0 * steps[0]).norm()),
        "expodistance": statistics.pvariance(alpha) / statistics.fmean(alpha) ** 2,
        "equidistance": statistics.pstdev(lengths) / statistics.fmean(lengths),
    }


def test_results_pictures_and_table(call, folder_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = call(
        "trajectory",
        model=folder_model,
        prompt=PROMPT,
        untrained=True,
        out=out,
        drawn=True,
    )
    written = {path.name for path in out.iterdir()}
    assert written == {
        "trajectory.nc",
        "trajectory-untrained.nc",
        "summary.json",
        "trajectories.png",
        "metrics.png",
        "linearisation.png",
        "inverse_singular_values.png",
        "perturbation.png",
    }
    assert "warning" not in done.err
    trained, untrained = (
        xarray.load_dataset(out / f"trajectory{run}.nc") for run in ("", "-untrained")
    )
    assert trained["token_text"].values.tolist() == ["w3", "w14", "w15", "w92"]
    assert json.loads(untrained.attrs["provenance"])["untrained"] is True
    assert TrajectoryResult.load(out / "trajectory.nc").linearisation.position == 3

    x, entropy = stream_and_entropy()
    expected = [shapes(x, token) for token in range(4)]
    summary = json.loads((out / "summary.json").read_text())
    for name in expected[0]:
        values = [of_token[name] for of_token in expected]
        assert trained[name].values.tolist() == pytest.approx(values, rel=1e-3)
        assert summary["tokens"]["trained"][name] == pytest.approx(values, rel=1e-3)
        assert summary["mean"]["trained"][name] == pytest.approx(
            statistics.fmean(values), rel=1e-3
        )
        for run_data in (trained, untrained):
            assert f"{run_data[name].mean().item():.3f}" in done.out
    assert summary["window"] == 1
    assert summary["seconds"]["untrained"]["measures"] > 0

    assert trained["norm"].sel(depth=2, token=1).item() == pytest.approx(
        float(x[2][1].norm()), rel=1e-4
    )
    assert trained["step_length"].sel(layer=1, token=3).item() == pytest.approx(
        float((x[2] - x[1])[3].norm()), rel=1e-4
    )
    # A single step is straight; all steps together are the score itself.
    assert trained["line_shape_score_windowed"].values == pytest.approx(1)
    assert trained["line_shape_score_by_depth"].sel(layer=1).values == pytest.approx(
        trained["line_shape_score"].values
    )
    assert trained["logit_lens_entropy"].sel(depth=2).values.tolist() == pytest.approx(
        entropy, abs=1e-4
    )

    J = tiny.oracle_jacobian(tiny.huggingface_model("llama"), TOKENS, 1, 3, 3).double()
    error = float((x[1][3] + J @ x[1][3] - x[2][3]).norm() / x[2][3].norm())
    found = (
        trained["linearisation_relative_error"]
        .sel(prediction="one_step", layer=1)
        .item()
    )
    assert found == pytest.approx(error, rel=1e-3)
    sigma = trained["singular_values"].sel(layer=1)[:3].values
    assert sigma == pytest.approx(torch.linalg.svdvals(J)[:3].numpy(), rel=1e-3)
    noisy = trained["cosine_similarity"].mean("sample").sel(depth=0)
    assert noisy.sel(scale=1.0).item() == pytest.approx(2**-0.5, abs=0.15)
    assert (noisy.diff("scale") < 0).all()


def test_final_norm_is_not_applied_twice(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": PROMPT, "position": 1, "window": 1}
    options |= {"final_norm": True, "no_perturbation": True}
    call("trajectory", **options, out=tmp_path)
    assert not (tmp_path / "perturbation.png").exists()
    data = xarray.load_dataset(tmp_path / "trajectory.nc")
    assert "cosine_similarity" not in data
    assert json.loads(data.attrs["provenance"])["final_norm"] is True
    assert json.loads(data.attrs["linearisation"])["position"] == 1
    x, entropy = stream_and_entropy()
    hf_model: Any = tiny.huggingface_model("llama")
    assert data["logit_lens_entropy"].sel(depth=2).values.tolist() == pytest.approx(
        entropy, abs=1e-4
    )
    with torch.no_grad():
        last = hf_model.model.norm(x[2].float())
        first = hf_model.lm_head(hf_model.model.norm(x[0].float())).double().softmax(-1)
    assert data["norm"].sel(depth=2).values == pytest.approx(
        last.norm(dim=-1).numpy(), rel=1e-4
    )
    lens = -(first * first.log()).sum(-1)
    assert data["logit_lens_entropy"].sel(depth=0).values == pytest.approx(
        lens.numpy(), abs=1e-4
    )


def test_undefined_values_are_said(call, still_model: Path, tmp_path: Path) -> None:
    options = {"model": still_model, "prompt": PROMPT, "no_perturbation": True}
    done = call("trajectory", **options, out=tmp_path)
    row = next(
        line
        for line in done.out.splitlines()
        if "line-shape score" in line and "undefined" in line
    )
    assert "nan" not in row
    assert "length 0" in done.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mean"]["trained"]["line_shape_score"] is None
    assert summary["undefined_tokens"]["trained"] == {
        "line_shape_score": [0, 1, 2, 3], "expodistance": [], "equidistance": [],
    }  # fmt: skip
    # One step of two: population standard deviation over mean is 1.
    assert summary["mean"]["trained"]["equidistance"] == pytest.approx(1)


def test_one_token_has_a_trajectory_and_no_components(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompt": "w3", "no_perturbation": True}
    done = call("trajectory", **options, out=tmp_path)
    assert "trajectories.png is left out" in done.err
    names = {path.name for path in tmp_path.iterdir()}
    assert "trajectories.png" not in names
    assert {"trajectory.nc", "summary.json", "metrics.png"} <= names


def test_help_has_examples(call) -> None:
    text = call("trajectory", "--help").out
    assert "Examples:" in text
    assert "--no-perturbation" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "4"], "`window` must be an odd number of steps, got 4"),
        (
            ["--window", "3"],
            "`window` must be at most 2 for these trajectories of 2 steps, got 3",
        ),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "w1 " * 40], "context holds 32"),
        (["--position", "3"], "`position` must lie in [-3, 2]"),
        (["--model", "no-such/model"], "could not load 'no-such/model'"),
        (["--backend", "hook"], "'hook' is not one of 'auto', 'bridge', 'hooked'"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    refused, folder_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = {"model": folder_model, "prompt": "w1 w2 w3", "out": tmp_path / "out"}
    assert message in refused("trajectory", options, arguments)


@pytest.mark.long("measures SmolLM2 and its twin")
def test_the_embedded_model_is_straighter_than_its_twin(
    call, smollm2: nn.Module, tmp_path: Path
) -> None:
    done = call("trajectory", "--untrained", "--no-perturbation", "--out", tmp_path)
    mean = json.loads((tmp_path / "summary.json").read_text())["mean"]
    assert mean["trained"]["line_shape_score"] < mean["untrained"]["line_shape_score"]
    assert f"√30 = {30**0.5:.2f}" in done.out
