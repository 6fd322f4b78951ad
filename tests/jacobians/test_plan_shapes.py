"""`plan` of blocks in the shapes of large models, which hold no weights here, against
the seconds that `benchmarks.gpu` committed.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import tl_coupling as tlc
from benchmarks.gpu import SHAPES
from tl_coupling.jacobians.matrix_free import N_PROBES

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
RUNS = {
    (name, run["shape"]): run
    for name in ("large_shapes", "gpu")
    for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]
}
EXPERTS = "mixtral-8x7b"
ALL_SHAPES = SHAPES | {"qwen2.5-0.5b": ("Qwen2", 896, 4864, 14, 2, 24)}


class OnCuda(nn.Parameter):
    """A parameter that says it is on a GPU."""

    device = torch.device("cuda")


def empty_blocks(shape: str, dtype: torch.dtype) -> nn.Module:
    """Return the blocks of a model in a shape, on no device."""
    family, width, d_mlp, n_heads, n_key_heads, n_layers = ALL_SHAPES[shape]
    d_head = 128 if width >= 2048 else width // n_heads
    config = getattr(transformers, f"{family}Config")(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=d_mlp,
        num_hidden_layers=1,
        num_attention_heads=n_heads,
        num_key_value_heads=n_key_heads,
        head_dim=d_head,
    )
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    (block,) = whole.base_model.layers
    model = nn.Module()
    model.blocks = nn.ModuleList([block] * n_layers)
    config.d_model = width
    model.cfg = config
    return model


def planned(name: str, run: dict, k: int) -> tlc.jacobians.Plan:
    dtype = getattr(torch, run["dtype_of_weights"])
    model = empty_blocks(run["shape"], dtype)
    if name == "gpu":
        # The first parameter that a model has says where it is.
        model.where = OnCuda(torch.empty(0, dtype=dtype))
    return tlc.plan(model, k, run["n_pos"])


def n_products(run: dict) -> int:
    """How many products the ten triplets took: two for each vector of each step, and
    those of the last step.
    """
    k = run["k_of_products"]
    width = k + 8
    return 2 * run["steps"]["triplets"] * width + width + k


@pytest.mark.parametrize(("name", "shape"), RUNS)
def test_auto_takes_the_method_that_was_measured_to_be_faster(name, shape):
    """In a depth coupling: J and its SVD of each block, or triplets, and as many more
    products as the norms and the matrices A take.
    """
    run = RUNS[name, shape]
    k = run["k_of_products"]
    seconds = run["seconds"]
    by_jacobians = seconds["jacobian"] + seconds["svd"]
    of_product = seconds["triplets"] / n_products(run)
    by_products = seconds["triplets"] + (N_PROBES + run["n_layers"] * k) * of_product
    assert by_jacobians < by_products
    assert planned(name, run, k).cheaper == "jacobians"


@pytest.mark.parametrize("shape", [shape for name, shape in RUNS if name == "gpu"])
def test_one_triplet_on_a_gpu_is_taken_as_it_was_measured(shape):
    run = RUNS["gpu", shape]
    seconds = run["seconds"]
    by_jacobians = seconds["jacobian"] + seconds["svd"]
    of_product = seconds["triplets"] / n_products(run)
    by_products = seconds["largest"] + (N_PROBES + run["n_layers"]) * of_product
    assert by_jacobians < by_products
    assert planned("gpu", run, 1).cheaper == "jacobians"


def test_the_largest_singular_values_of_a_small_model_are_taken_as_was_measured():
    (run,) = json.loads((RESULTS / "largest.json").read_text())["runs"]
    assert run["ratios"]["token_local_recorded"] < 1
    model = empty_blocks("qwen2.5-0.5b", torch.float32)
    assert len(model.blocks) == len(run["layers"])
    assert tlc.plan(model, run["k"], run["n_pos"]).cheaper == "jacobians"


def test_rows_are_as_slow_as_was_measured():
    """Flops of ten triplets beside those of Jacobians of linear parts."""
    slowness: dict[str, list[float]] = {"large_shapes": [], "gpu": []}
    for (name, shape), run in RUNS.items():
        if shape == EXPERTS:
            continue
        row = 2 * run["weights_of_block"]
        of_rows = n_products(run) * row / run["seconds"]["triplets"]
        of_jacobians = run["planned_tflop"]["jacobians"] / run["seconds"]["jacobian"]
        slowness[name].append(of_jacobians * 1e12 / of_rows)
    ranges = {
        name: [round(pick(values), 1) for pick in (min, max)]
        for name, values in slowness.items()
    }
    assert ranges == {"large_shapes": [7.6, 8.4], "gpu": [10.2, 48.9]}


@pytest.mark.parametrize("shape", [shape for name, shape in RUNS if name != "gpu"])
def test_shapes_without_weights_are_planned_as_those_with(shape):
    """The Jacobians' stage was planned before a record took them; `test_budget` counts
    that one.
    """
    run = RUNS["large_shapes", shape]
    of_jacobians = run["planned_tflop"]["jacobians"] * run["n_layers"]
    for k, by_method in run["planned_tflop_of_model"].items():
        flops = planned("large_shapes", run, int(k)).flops
        of_others = sum(flops.values()) - flops["jacobians"]
        assert of_others / 1e12 == pytest.approx(
            by_method["jacobians"] - of_jacobians, rel=1e-3
        )
