"""Self and context coupling, against a transcription that differentiates whole
sequences.

The witness is one `torch.autograd.functional.jacobian` of a HuggingFace layer from all
rows to all rows, cut into `J_{t1 t2}`, with numpy SVDs and a loop over pairs: no hook,
no cache, no row on its own.
"""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
import tl_coupling as tlc
from pair_jacobians import all_jacobians
from tl_coupling.jacobians import jacobians
from tl_coupling.models.loading import embedded_folder

N, K = len(tiny.TOKENS), 6
ARCHITECTURES = sorted(tiny.COMMON)


def naive_map(J_rows: list[np.ndarray], J_cols: list[np.ndarray], k: int) -> np.ndarray:
    A = np.empty((len(J_rows), len(J_cols), k, k))
    for j, J_2 in enumerate(J_cols):
        U, _, Vh = np.linalg.svd(J_2)
        for i, J_1 in enumerate(J_rows):
            A[i, j] = U[:, :k].T @ J_1 @ Vh[:k].T
    return A


def naive_measures(A: np.ndarray, S_1: np.ndarray) -> dict[str, np.ndarray]:
    n_rows, n_cols = A.shape[:2]
    values = {
        name: np.empty((n_rows, n_cols))
        for name in ("coupling", "miscoupling", "spectral_miscoupling")
    }
    for i in range(n_rows):
        for j in range(n_cols):
            off = A[i, j] - np.diag(np.diag(A[i, j]))
            values["miscoupling"][i, j] = np.linalg.norm(off)
            values["coupling"][i, j] = 1 - np.linalg.norm(off) / np.linalg.norm(A[i, j])
            values["spectral_miscoupling"][i, j] = np.linalg.norm(
                A[i, j] - np.diag(S_1[i])
            ) / np.linalg.norm(S_1[i])
    return values


def assert_is_naive(
    result: tlc.CouplingMap,
    J_rows: list[np.ndarray],
    J_cols: list[np.ndarray],
    atol: float,
) -> None:
    """Values, not matrices: the signs of singular vectors are arbitrary."""
    A = naive_map(J_rows, J_cols, result.k)
    S_1 = np.stack([np.linalg.svd(J, compute_uv=False)[: result.k] for J in J_rows])
    np.testing.assert_allclose(
        result.singular_values, S_1, rtol=0, atol=atol * S_1.max()
    )
    np.testing.assert_allclose(
        result.frobenius_norms, [np.linalg.norm(J) for J in J_rows], rtol=1e-5
    )
    np.testing.assert_allclose(
        result.matrices.abs(), np.abs(A), rtol=0, atol=10 * atol * S_1.max()
    )
    for name, values in naive_measures(A, S_1).items():
        scale = max(1.0, float(np.abs(values).max()))
        np.testing.assert_allclose(
            result.values(measure=name), values, rtol=0, atol=atol * scale, err_msg=name
        )


@pytest.fixture(scope="module")
def llama(tokenizer_folder):
    hf_model = tiny.huggingface_model("llama", dtype=torch.float64)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    return trace, [
        all_jacobians(hf_model, layer, tiny.TOKENS)
        for layer in tiny.layers_of(hf_model)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_inputs_of_one_output(architecture, tokenizer_folder):
    """Every architecture: the shared pull-back equals the oracle, pair by pair."""
    hf_model = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    for t2 in (N - 1, 3):
        J, path = trace.blocks[1].jacobians(range(t2 + 1), t2)
        assert path.startswith("query_local")
        for t1 in (0, t2 - 1, t2):
            oracle = tiny.oracle_jacobian(hf_model, tiny.TOKENS, 1, t1, t2)
            scale = max(float(oracle.norm()), 1e-2 * float(torch.stack(J).norm()))
            assert float((J[t1] - oracle).norm()) <= 3e-6 * scale, (t1, t2)


@pytest.mark.parametrize("layers", [(0, 1), (1, 1), (1, 0)])
def test_self_coupling(llama, layers):
    trace, J = llama
    result = tlc.self_coupling(trace, *layers, k=K)
    rows, cols = ([J[layer][t, t] for t in range(N)] for layer in layers)
    assert_is_naive(result, rows, cols, 1e-6)
    assert (result.kind, result.row_layers, result.col_layers) == (
        "self",
        (layers[0],) * N,
        (layers[1],) * N,
    )
    assert result.row_positions == result.col_positions == tuple(range(N))


@pytest.mark.parametrize("fixed", ["input", "output"])
@pytest.mark.parametrize("position", [0, 3, N - 1])
def test_context_coupling(llama, fixed, position):
    trace, J = llama
    allowed = range(position, N) if fixed == "input" else range(position + 1)
    if len(allowed) < 2:
        with pytest.raises(
            ValueError, match="compares at least two tokens, here there is 1"
        ):
            tlc.context_coupling(trace, 0, 1, fixed=fixed, position=position, k=K)
        return
    result = tlc.context_coupling(trace, 0, 1, fixed=fixed, position=position, k=K)
    pairs = [(position, t) if fixed == "input" else (t, position) for t in allowed]
    assert_is_naive(
        result, [J[0][pair] for pair in pairs], [J[1][pair] for pair in pairs], 1e-6
    )
    assert result.row_positions == result.col_positions == tuple(allowed)
    assert (result.kind, result.provenance["fixed"], result.provenance["position"]) == (
        "context",
        fixed,
        position,
    )


def test_a_selection_is_a_part_of_the_whole(llama):
    trace, _ = llama
    all_positions = tlc.self_coupling(trace, 0, 1, k=K)
    part = tlc.self_coupling(trace, 0, 1, positions=[5, -1, 2], k=K)
    assert part.row_positions == (5, N - 1, 2)
    torch.testing.assert_close(
        part.coupling(), all_positions.coupling()[[5, N - 1, 2]][:, [5, N - 1, 2]]
    )
    all_positions = tlc.context_coupling(trace, 1, 1, fixed="output", position=6, k=K)
    part = tlc.context_coupling(
        trace, 1, 1, fixed="output", position=6, positions=[6, 0], k=K
    )
    torch.testing.assert_close(
        part.coupling(), all_positions.coupling()[[6, 0]][:, [6, 0]]
    )


def test_defaults(llama):
    trace, _ = llama
    assert tlc.context_coupling(trace, 0, k=2).row_positions == tuple(range(N))
    assert tlc.context_coupling(trace, 0, fixed="input", k=2).row_positions == tuple(
        range(N)
    )
    assert set(tlc.self_coupling(trace, -1, k=2).col_layers) == {1}
    assert tlc.self_coupling(trace, 1, k=2, orientation="vju").orientation == "vju"


def test_small_batches_and_chunks_change_nothing(llama, monkeypatch):
    trace, _ = llama
    one = [
        tlc.self_coupling(trace, 0, 1, k=K),
        tlc.context_coupling(trace, 0, 1, fixed="output", k=K),
        tlc.context_coupling(trace, 0, 1, fixed="input", k=K),
    ]
    monkeypatch.setattr(jacobians, "BATCH_BUDGET", 3 * tiny.D_MODEL**2)
    other = [
        tlc.self_coupling(trace, 0, 1, k=K, chunk_size=7),
        tlc.context_coupling(trace, 0, 1, fixed="output", k=K, chunk_size=7),
        tlc.context_coupling(trace, 0, 1, fixed="input", k=K, chunk_size=7),
    ]
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(
            a.matrices.abs(), b.matrices.abs(), rtol=0, atol=1e-10
        )
        torch.testing.assert_close(
            a.singular_values, b.singular_values, rtol=0, atol=1e-10
        )


def test_a_block_whose_rows_meet_elsewhere_takes_the_full_sequence(tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    model.blocks[1].mlp.register_forward_hook(
        lambda _, args, out: out + args[0].mean(1, keepdim=True)
    )
    trace = tlc.trace(model, tiny.TOKENS)
    J, path = trace.blocks[1].jacobians([0, 4, 5], 5)
    assert path == "full_sequence"
    for J_1, t1 in zip(J, (0, 4, 5), strict=True):
        one, way = trace.blocks[1].jacobian(t1, 5)
        assert way == "full_sequence"
        torch.testing.assert_close(J_1, one, rtol=0, atol=1e-5)


def test_progress_counts_jacobians(llama):
    seen: list[int] = []

    def progress(numbers):
        for number in numbers:
            yield number
            seen.append(number)

    tlc.self_coupling(llama[0], 0, 1, k=2, progress=progress)
    assert seen == list(range(2 * N))
    seen.clear()
    tlc.self_coupling(llama[0], 1, k=2, progress=progress)
    assert seen == list(range(N))


def test_bad_input(llama, tokenizer_folder):
    trace, _ = llama
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    one_token = tlc.trace(model, [5])
    for call in (
        lambda: tlc.self_coupling(one_token, 0),
        lambda: tlc.context_coupling(one_token, 0, fixed="input"),
    ):
        with pytest.raises(
            ValueError,
            match="compares at least two tokens, here there is 1: use a longer prompt",
        ):
            call()
    with pytest.raises(
        ValueError, match=r"must lie in \[0, 3\], where causality .* got \[4\]"
    ):
        tlc.context_coupling(trace, 0, fixed="output", position=3, positions=[0, 4])
    with pytest.raises(
        ValueError, match=r"must lie in \[3, 7\], where causality .* got \[0\]"
    ):
        tlc.context_coupling(trace, 0, fixed="input", position=3, positions=[0, 4])
    with pytest.raises(ValueError, match=r"must name at least two tokens, got \[3\]"):
        tlc.self_coupling(trace, 0, positions=[3])
    for chunk_size in (0, -1):
        with pytest.raises(ValueError, match="`chunk_size` must be at least 1"):
            tlc.context_coupling(trace, 0, k=2, chunk_size=chunk_size)
    with pytest.raises(ValueError, match="name each token once"):
        tlc.self_coupling(trace, 0, positions=[7, -1])
    with pytest.raises(ValueError, match=r"`positions` must lie in \[-8, 7\]"):
        tlc.self_coupling(trace, 0, positions=[0, 8])
    with pytest.raises(ValueError, match=r"`other_layer` must lie in \[-2, 1\]"):
        tlc.self_coupling(trace, 0, 2)
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 32\]"):
        tlc.self_coupling(trace, 0, k=33)
    with pytest.raises(ValueError, match="`layers` is empty"):
        tlc.cross_token_influence(trace, layers=[])
    with pytest.raises(
        ValueError, match="the prompt has 40 tokens, this model's context holds 32"
    ):
        tlc.self_coupling(tlc.trace(model, [5] * 40), 0)


@pytest.mark.usefixtures("as_a_user")
def test_unknown_end(llama):
    for fixed in ("both", "", None):
        with pytest.raises(
            ValueError, match=f'`fixed` must be "input" or "output", got {fixed!r}'
        ):
            tlc.context_coupling(llama[0], 0, fixed=fixed)


@pytest.mark.usefixtures("as_a_user")
def test_what_is_no_whole_number(llama):
    for call in (
        lambda: tlc.self_coupling(llama[0], 0.5),
        lambda: tlc.self_coupling(llama[0], True),
        lambda: tlc.self_coupling(llama[0], 0, positions=[1.5, 2]),
        lambda: tlc.self_coupling(llama[0], 0, positions="01"),
        lambda: tlc.self_coupling(llama[0], 0, k=2, chunk_size=1.5),
        lambda: tlc.context_coupling(llama[0], 0, k=2, chunk_size=1.5),
    ):
        with pytest.raises(
            TypeError, match=r"must be a (list of )?whole numbers?( or None)?, got"
        ):
            call()


@pytest.fixture(scope="module")
def paris(smollm2):
    """The paper's prompt on the embedded model, and every J of two layers by the
    transcription.
    """
    trace = tlc.trace(smollm2, "What is the capital of France? The capital is")
    hf_model = AutoModelForCausalLM.from_pretrained(
        embedded_folder(), attn_implementation="eager"
    ).eval()
    layers = 8, 9
    return (
        trace,
        layers,
        [
            all_jacobians(hf_model, hf_model.model.layers[i], trace.tokens.tolist())
            for i in layers
        ],
    )


@pytest.mark.long("differentiates SmolLM2 between all tokens")
@pytest.mark.xdist_group("smollm2-pairs")
@pytest.mark.parametrize("case", ["self", "input", "output"])
def test_smollm2_maps_equal_the_transcription(paris, case):
    trace, layers, J = paris
    n = trace.n_pos
    if case == "self":
        result = tlc.self_coupling(trace, *layers, k=50)
        pairs = [(t, t) for t in range(n)]
    else:
        result = tlc.context_coupling(
            trace, *layers, fixed=case, position=0 if case == "input" else n - 1, k=50
        )
        pairs = [(0, t) if case == "input" else (t, n - 1) for t in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is_naive(
            result, [J[0][pair] for pair in pairs], [J[1][pair] for pair in pairs], 1e-4
        )
