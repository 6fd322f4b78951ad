"""Each Jacobian is computed once and decomposed once, whoever reads it, and coupling
matrices are those of the formula.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import BlockFunction
from tl_coupling.comparisons import decomposed_layers, depth_maps
from tl_coupling.jacobians import (
    Connection,
    Decomposed,
    JacobianOptions,
    caching_trace,
    couple,
    decompose,
    decompose_sides,
    decomposed,
)

pytestmark = pytest.mark.both_lines

N = len(tiny.TOKENS)
LAST = N - 1
K = 4


@dataclass
class Counts:
    """How often each Jacobian was computed, and each matrix decomposed."""

    jacobians: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    svds: Counter[bytes] = field(default_factory=Counter)
    singular_values: Counter[bytes] = field(default_factory=Counter)

    def totals(self) -> tuple[int, int, int]:
        """Return how many there were of each kind."""
        return (
            self.jacobians.total(),
            self.svds.total(),
            self.singular_values.total(),
        )


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    compute = BlockFunction.jacobians

    def counted(block: BlockFunction, inputs: list[int], output: int, *more: object):
        counts.jacobians.update((block.layer, t1, output) for t1 in inputs)
        return compute(block, inputs, output, *more)

    monkeypatch.setattr(BlockFunction, "jacobians", counted)
    for name, seen in (
        ("svd", counts.svds),
        ("singular_values", counts.singular_values),
    ):
        decompose_batch = getattr(decomposed, name)
        monkeypatch.setattr(decomposed, name, counting(decompose_batch, seen))
    return counts


def counting(function: Callable, seen: Counter[bytes]) -> Callable:
    """Return the function, which notes each matrix of the batches that it is given."""

    def with_notes(J: Tensor, *more: object) -> object:
        seen.update(matrix.numpy().tobytes() for matrix in J)
        return function(J, *more)

    return with_notes


def test_two_orientations_take_one_decomposition(
    tiny_trace: tlc.Trace, counts: Counts
) -> None:
    tlc.comparisons.depth_coupling_by_orientation(tiny_trace, K)
    layers = range(tiny.N_LAYERS)
    assert counts.jacobians == Counter((layer, LAST, LAST) for layer in layers)
    assert counts.totals() == (tiny.N_LAYERS, tiny.N_LAYERS, 0)


@pytest.mark.parametrize(
    "compare",
    [
        tlc.self_coupling,
        lambda *layers, **options: tlc.context_coupling(
            *layers, fixed="input", **options
        ),
        lambda *layers, **options: tlc.context_coupling(
            *layers, fixed="output", **options
        ),
    ],
    ids=["self", "fixed input", "fixed output"],
)
@pytest.mark.parametrize(
    ("layers", "expected"), [((1, 1), (N, N, 0)), ((0, 1), (2 * N, N, N))]
)
def test_token_maps_decompose_columns_and_take_the_rows_singular_values(
    tiny_trace: tlc.Trace,
    counts: Counts,
    compare: Callable,
    layers: tuple[int, int],
    expected: tuple[int, int, int],
) -> None:
    compare(tiny_trace, *layers, k=K)
    assert counts.totals() == expected
    assert set(counts.jacobians.values()) == {1}


def test_several_readers_of_one_decomposition(
    tiny_trace: tlc.Trace, counts: Counts
) -> None:
    (layers,) = decomposed_layers([tiny_trace], K)
    totals_before = counts.totals()
    assert totals_before == (tiny.N_LAYERS, tiny.N_LAYERS, 0)
    maps = depth_maps(layers, ("ujv", "vju"))
    again = depth_maps(layers, ("ujv",))
    assert torch.equal(again["ujv"].matrices, maps["ujv"].matrices)
    assert layers.leading.U.shape == (tiny.N_LAYERS, tiny.D_MODEL, K)
    for layer in range(tiny.N_LAYERS):
        S = torch.linalg.svdvals(layers.jacobian(layer))
        torch.testing.assert_close(S[: K + 1], layers.spectra.S[layer])
        torch.testing.assert_close(S.norm(), layers.frobenius_norms[layer])
    assert counts.totals() == totals_before
    expected = tlc.depth_coupling(tiny_trace, K)
    assert torch.equal(maps["ujv"].matrices, expected.matrices)
    assert maps["ujv"].provenance == expected.provenance


def test_what_is_not_kept_says_so(tiny_trace: tlc.Trace) -> None:
    connections = [Connection(layer, LAST, LAST, LAST) for layer in (1, 0)]
    of_layers = decompose(tiny_trace, connections, K)
    J = tlc.block_jacobians(tiny_trace, [1, 0], function="branches")
    torch.testing.assert_close(of_layers.leading.S, torch.linalg.svdvals(J)[:, :K])
    assert of_layers.spectra.k == K + 1
    assert len(of_layers.paths) == len(of_layers) == len(connections)
    with pytest.raises(ValueError, match="these Jacobians were not kept"):
        of_layers.jacobian(0)


def test_rows_in_passing_are_those_of_the_layers(tiny_trace: tlc.Trace) -> None:
    connections = [Connection(layer, LAST, LAST, LAST) for layer in (1, 0)]
    # A layer that is computed on two tokens at once would round otherwise.
    columns = [Connection(0, 0, 0, 0)]
    options = JacobianOptions()
    in_passing, _ = decompose_sides(tiny_trace, connections, columns, K, options)
    rows = list(in_passing)
    J = tlc.block_jacobians(tiny_trace, [1, 0], function="branches")
    assert torch.equal(torch.cat([row.J for row in rows]), J)
    S = torch.cat([row.singular_values for row in rows])
    torch.testing.assert_close(S, torch.linalg.svdvals(J))
    norms = torch.cat([row.frobenius_norms for row in rows])
    torch.testing.assert_close(norms, torch.linalg.matrix_norm(J))
    assert [list(row.paths) for row in rows] == [[str(c)] for c in connections]


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("orientation", ["ujv", "vju"])
@pytest.mark.parametrize("rows_are_columns", [True, False])
def test_coupling_matrices_are_those_of_the_formula(
    k: int, orientation: str, rows_are_columns: bool
) -> None:
    """A naive transcription in float64; signs of singular vectors are arbitrary."""
    rng = np.random.default_rng(k)
    d = 7
    J_columns = rng.standard_normal((3, d, d))
    J_rows = J_columns if rows_are_columns else rng.standard_normal((5, d, d))
    columns = decomposed_from(J_columns, k)
    rows = columns if rows_are_columns else decomposed_from(J_rows, k)
    coupled = couple(rows.rows(), len(rows), columns, (orientation,))
    A = coupled.matrices[orientation].numpy()
    assert A.shape == (len(J_rows), len(J_columns), k, k)
    for column, J_2 in enumerate(J_columns):
        U, _, Vh = np.linalg.svd(J_2)
        left, right = U[:, :k], Vh[:k].T
        if orientation == "vju":
            left, right = right, left
        for row, J_1 in enumerate(J_rows):
            expected = left.T @ J_1 @ right
            np.testing.assert_allclose(
                np.abs(A[row, column]), np.abs(expected), atol=1e-12
            )
            # Vectors change their signs in pairs.
            np.testing.assert_allclose(
                np.diag(A[row, column]), np.diag(expected), atol=1e-12
            )
    S = np.linalg.svd(J_rows, compute_uv=False)
    np.testing.assert_allclose(coupled.singular_values, S[:, :k], atol=1e-12)
    norms = np.sqrt((S**2).sum(1))
    np.testing.assert_allclose(coupled.frobenius_norms, norms, rtol=1e-12)


def decomposed_from(J: np.ndarray, k: int) -> Decomposed:
    connections = [Connection(layer, 0, 0, 0) for layer in range(len(J))]
    return Decomposed.from_jacobians(torch.from_numpy(J), connections, k)


def test_with_a_cache_each_jacobian_is_computed_once(
    tiny_trace: tlc.Trace, counts: Counts
) -> None:
    def measured(trace: tlc.Trace) -> list[object]:
        depth = tlc.depth_coupling(trace, K)
        of_tokens = tlc.self_coupling(trace, 0, 1, k=K)
        context = tlc.context_coupling(trace, 0, 1, fixed="output", k=K)
        influence = tlc.cross_token_influence(trace)
        maps = [depth, of_tokens, context]
        return [*(each_map.matrices for each_map in maps), influence.effective_rank]

    expected = measured(tiny_trace)
    n_alone = counts.totals()[0]
    counts.jacobians.clear()
    outputs = [Connection(layer, t, LAST, t) for layer in (0, 1) for t in range(N)]
    cached = caching_trace(tiny_trace, outputs)
    # One that has a cache keeps more in it.
    assert caching_trace(cached, [Connection(0, 0, 0, 0)]) is cached
    found = measured(cached)
    assert all(map(torch.equal, found, expected))
    # Depth and self share two; the fixed output shares all of its with the influence.
    assert counts.totals()[0] == n_alone - 2 - 2 * N
    # Of the connections from the last token to itself, one Jacobian is computed alone
    # and one with those of the other tokens.
    twice = {(layer, LAST, LAST): 2 for layer in (0, 1)}
    assert {ends: n for ends, n in counts.jacobians.items() if n > 1} == twice
    counts.jacobians.clear()
    measured(tiny_trace)
    assert counts.totals()[0] == n_alone


def test_prompts_of_a_model_in_memory_are_taken_together() -> None:
    """Its blocks are the same in each trace, which has a model of its own."""
    model = tiny.huggingface_model("llama")
    other = tiny.huggingface_model("llama")
    connections = [Connection(0, 0, 0, 0)]
    wanted = [
        (tlc.trace(one, tokens), connections)
        for one, tokens in (
            (model, [1, 2, 3]),
            (model, [3, 2, 1]),
            (other, [1, 2, 3]),
            (other, [1, 2]),
        )
    ]
    groups = decomposed.taken_together(wanted, JacobianOptions(batch=4))
    assert [len(group) for group in groups] == [2, 1, 1]
