"""Tables of results: each has one, and each row is the entry that its axes name."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import tl_coupling as tlc
from tl_coupling.blocks import Trace
from tl_coupling.results import Saved, tidy_table

# What has a provenance and is no result: what is measured.
INPUTS = {"Trace", "StreamedTrace", "TokenIds", "Pixels"}
WITHOUT_PROVENANCE = {"Generalization", "CouplingOfStep"}


def classes() -> Iterator[type]:
    """Yield the public dataclasses of the package."""
    for module in pkgutil.walk_packages(tlc.__path__, "tl_coupling."):
        if module.name.endswith("__main__"):
            continue
        for name, item in vars(importlib.import_module(module.name)).items():
            is_here = inspect.isclass(item) and item.__module__ == module.name
            if is_here and dataclasses.is_dataclass(item) and not name.startswith("_"):
                yield item


def result_classes() -> dict[str, type]:
    """Return the classes of results, by name."""
    return {
        item.__name__: item
        for item in classes()
        if item.__name__ in WITHOUT_PROVENANCE
        or "provenance" in {field.name for field in dataclasses.fields(item)}
    }


def test_every_result_has_a_table() -> None:
    results = result_classes().keys() - INPUTS
    assert {"CouplingMap", "Influence", "GradientPrediction", *WITHOUT_PROVENANCE} <= (
        results
    )
    results -= {"Saved"}
    lacking = [
        name for name in results if not hasattr(result_classes()[name], "to_dataframe")
    ]
    assert lacking == []
    saved = {item.__name__ for item in classes() if issubclass(item, Saved)}
    # What results are made from is none.
    assert saved - {"Saved", "Effects"} <= results


def test_a_column_of_fewer_axes_is_repeated_along_the_others() -> None:
    table = tidy_table(
        {
            "value": ("layer token", torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
            "of_layer": ("layer", torch.tensor([10, 20])),
            "of_all": ("", torch.tensor(7.0, dtype=torch.bfloat16)),
        },
        {"layer": (5, 3)},
        {"model": "m", "tokens": [1, 2]},
    )
    expected = pandas.DataFrame(
        {
            "layer": [5, 5, 3, 3],
            "token": [0, 1, 0, 1],
            "value": [1.0, 2.0, 3.0, 4.0],
            "of_layer": [10.0, 10.0, 20.0, 20.0],
            "of_all": 7.0,
            "model": "m",
        }
    )
    pandas.testing.assert_frame_equal(table, expected, check_dtype=False)


# By result: the axes of its table, and columns as tensors `[axis …]`, read off the
# result here and not by its table.
Expected = tuple[object, dict[str, list[object]], dict[str, torch.Tensor]]


def influence(trace: Trace) -> Expected:
    result = tlc.cross_token_influence(trace, 3, layers=[1, 0])
    axes = {"layer": [1, 0], "source_position": [0, 1, 2, 3]}
    names = ("frobenius_norm", "effective_rank", "participation_ratio")
    return result, axes, {name: getattr(result, name) for name in names}


def eigenvalues(trace: Trace) -> Expected:
    result = tlc.dynamics.eigenvalues(trace, layers=[1, 0])
    axes = {"layer": [1, 0], "eigenvalue": list(range(trace.d_model))}
    null = result.null_henrici.mean(0)
    columns = {
        "real": result.values.real,
        "imaginary": result.values.imag,
        "null_real": result.null_values.real,
        "henrici": result.henrici[:, None].expand(-1, trace.d_model),
        "null_henrici": null[:, None].expand(-1, trace.d_model),
    }
    return result, axes, columns


def block_directions(trace: Trace) -> Expected:
    result = tlc.jacobians.block_directions(trace, 1, k=3)
    axes = {"direction": [0, 1, 2], "d_model": list(range(trace.d_model))}
    gains = result.gains[:, None].expand(-1, trace.d_model)
    columns = {"read": result.read.mT, "write": result.write.mT, "gain": gains}
    return result, axes, columns


def block_parts(trace: Trace) -> Expected:
    result = tlc.block_parts(trace, 1)
    J = tlc.block_jacobian(trace, 1)
    parts = [result[label] for label in result.labels]
    shares = [torch.trace(part.mT @ J) / torch.trace(J.mT @ J) for part in parts]
    norms = [torch.linalg.svdvals(part).square().sum().sqrt() for part in parts]
    columns = {"share": torch.stack(shares), "frobenius_norm": torch.stack(norms)}
    return result, {"component": list(result.labels)}, columns


def linearisation(trace: Trace) -> Expected:
    result = tlc.trajectories.linearisation(trace, k=4)
    names = ["one_step", "product", "closed_form", "previous", "input"]
    truth = result.trajectory[1:]
    predicted = torch.stack([result.predicted(name) for name in names])
    errors = (predicted - truth).norm(dim=-1) / truth.norm(dim=-1)
    cosines = torch.nn.functional.cosine_similarity(predicted, truth[None], dim=-1)
    columns = {"relative_error": errors, "cosine_similarity": cosines}
    return result, {"prediction": names, "layer": [0, 1]}, columns


def perturbation(trace: Trace) -> Expected:
    result = tlc.trajectories.perturbation(trace, (0.5, 0.1), n_samples=2)
    axes = {"scale": [0.5, 0.1], "sample": [0, 1], "depth": [0, 1, 2]}
    return result, axes, {"cosine_similarity": result.cosine_similarity}


def residual_alignment(trace: Trace) -> Expected:
    result = tlc.trajectories.residual_alignment(trace, n_classes=4)
    energies = result.singular_values.square()
    tail = energies[:, 4:].sum(1) / energies.sum(1)
    columns = {
        "vector_alignment": result.across_blocks(),
        "within_subspace_overlap": result.within_blocks("subspace_overlap")[
            :, None
        ].expand(-1, 2),
        "subspace_overlap_null": torch.full((2, 2), result.null("subspace_overlap")),
        "tail_energy": tail[:, None].expand(-1, 2),
    }
    return result, {"layer": [0, 1], "other_layer": [0, 1]}, columns


def trajectory(trace: Trace) -> Expected:
    result = tlc.trajectories.measure_trajectory(trace, noise=False)
    norms = trace.residual.norm(dim=-1)
    steps = trace.residual.diff(dim=0).norm(dim=-1)
    columns = {
        "norm": norms,
        "step_length": torch.cat([steps, torch.full_like(steps[:1], torch.nan)]),
        "line_shape_score": result.line_shape_score.expand(3, -1),
        "logit_lens_entropy": result.logit_lens_entropy,
    }
    axes = {"depth": [0, 1, 2], "token": list(range(trace.n_pos))}
    return result, axes, columns


def frozen_coupling(trace: Trace) -> Expected:
    result = tlc.comparisons.frozen_coupling(trace, k=3, layers=[1, 0])
    columns = {
        "full": tlc.depth_coupling(trace, k=3, layers=[1, 0]).coupling(),
        "frozen": result.frozen.coupling(),
        "difference": result.differences[:, None].expand(-1, 2),
    }
    return result, {"row_layer": [1, 0], "col_layer": [1, 0]}, columns


def comparison(trace: Trace) -> Expected:
    model = trace.model
    texts = ("w1 w2 w3", "w4 w5", "w6 w7 w8")
    traces = [tlc.trace(model, text) for text in texts]
    first = [tlc.depth_coupling(one, 4, layers=[1, 0]) for one in traces]
    second = [tlc.depth_coupling(one, 4, 0, layers=[1, 0]) for one in traces]
    result = tlc.compare(first, second, 2, paired=True)
    values = [
        torch.stack([of_prompt.coupling(2) for of_prompt in maps]).mean(0)
        for maps in (first, second)
    ]
    columns = {
        "first": values[0],
        "second": values[1],
        "difference": values[1] - values[0],
        "low": result.intervals[0],
        "high": result.intervals[1],
    }
    return result, {"row_layer": [1, 0], "col_layer": [1, 0]}, columns


def directions(trace: Trace) -> Expected:
    result = tlc.directions.directions_of(trace, 1, k=2)
    axes = {"direction": [0, 1], "d_model": list(range(trace.d_model))}
    return result, axes, {"value": result.vectors}


def subspace(trace: Trace) -> Expected:
    traces = [trace, tlc.trace(trace.model, "w1 w2 w3")]
    result = tlc.directions.shared_subspace(traces, rank=2, k=4)
    columns = {
        "eigenvalue": result.eigenvalues,
        "null_eigenvalue": result.null_eigenvalues.mean(1),
        "null_largest": result.null_eigenvalues.amax(1),
        "cosine": result.cosines,
    }
    return result, {"side": ["read", "write"], "direction": [0, 1]}, columns


def own_subspace(trace: Trace) -> Expected:
    result = tlc.directions.Subspace.of(torch.eye(trace.d_model)[:, :2], 0)
    unknown = {"eigenvalue": torch.full((2, 2), torch.nan)}
    return result, {"side": ["read", "write"], "direction": [0, 1]}, unknown


def gradient(trace: Trace) -> Expected:
    result = tlc.trajectories.gradient_prediction(trace, torch.ones(trace.d_model), k=8)
    columns = {
        "exact_norm": result.exact.norm(dim=1),
        "coupled_norm": result.coupled.norm(dim=1),
        "cosine_similarity": result.cosine_similarity,
    }
    return result, {"depth": [0, 1, 2]}, columns


TABLES: list[Callable[[Trace], Expected]] = [
    influence,
    eigenvalues,
    block_directions,
    block_parts,
    linearisation,
    perturbation,
    residual_alignment,
    trajectory,
    frozen_coupling,
    comparison,
    directions,
    subspace,
    own_subspace,
    gradient,
]


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_a_row_is_the_entry_that_its_axes_name(
    make: Callable[[Trace], Expected], tiny_trace: Trace
) -> None:
    result, axes, columns = make(tiny_trace)
    table: Any = result
    table = table.to_dataframe()
    assert list(table)[: len(axes)] == list(axes)
    rows = table.set_index(list(axes))
    assert rows.index.is_unique
    assert len(rows) == np.prod([len(names) for names in axes.values()])
    for name, values in columns.items():
        for place in np.ndindex(*values.shape):
            names = [axis[i] for axis, i in zip(axes.values(), place, strict=True)]
            row = rows.loc[tuple(names) if len(names) > 1 else names[0]]
            assert row[name] == pytest.approx(
                float(values[place]), rel=1e-4, abs=1e-6, nan_ok=True
            )


def test_products_of_runs_have_a_row_for_each_run(tiny_trace: Trace) -> None:
    result = tlc.dynamics.product_map(tiny_trace)
    table = result.to_dataframe()
    runs = list(zip(table["last"], table["first"], strict=True))
    assert runs == [(0, 0), (1, 0), (1, 1)]
    J = tlc.block_jacobians(tiny_trace).double()
    steps = torch.eye(tiny_trace.d_model).double() + J
    products = [steps[0], steps[1] @ steps[0], steps[1]]
    largest = [float(torch.linalg.svdvals(P)[0].log()) for P in products]
    assert table["log_largest"].tolist() == pytest.approx(largest, abs=1e-5)
