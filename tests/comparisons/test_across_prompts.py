"""Coupling across prompts against numpy over Jacobians that were computed one by one."""

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.comparisons import PromptCoupling

K = 5
PROMPTS = ["w3 w14 w15 w92", "w65 w35", "w89 w79 w3 w2 w3 w8"]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.fixture(scope="module")
def traces(model) -> list[tlc.Trace]:
    return [tlc.trace(model, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def result(traces) -> PromptCoupling:
    return tlc.prompt_coupling(iter(traces), k=K)


def numpy_pair(J_1: np.ndarray, J_2: np.ndarray, k: int) -> dict[str, float]:
    """The measures of two matrices, from their singular vectors by numpy."""
    U_1, s_1, Vh_1 = np.linalg.svd(J_1)
    U_2, s_2, Vh_2 = np.linalg.svd(J_2)
    A = U_2[:, :k].T @ J_1 @ Vh_2[:k].T
    off = A - np.diag(np.diag(A))

    def overlap(first: np.ndarray, second: np.ndarray) -> float:
        M = np.diag(s_1[:k]) @ first.T @ second @ np.diag(s_2[:k])
        lengths = np.linalg.norm(s_1[:k]) * np.linalg.norm(s_2[:k])
        return np.linalg.norm(M, "nuc") / lengths

    return {
        "coupling": 1 - np.linalg.norm(off) / np.linalg.norm(A),
        "write_overlap": overlap(U_1[:, :k], U_2[:, :k]),
        "read_overlap": overlap(Vh_1[:k].T, Vh_2[:k].T),
    }


def test_every_pair_is_numpys(traces, result):
    J = np.stack([tlc.block_jacobians(trace).double().numpy() for trace in traces])
    for k in (2, K):
        for measure in ("coupling", "write_overlap", "read_overlap"):
            expected = [
                [
                    [numpy_pair(J_1, J_2, k)[measure] for J_2 in J[:, layer]]
                    for J_1 in J[:, layer]
                ]
                for layer in range(tiny.N_LAYERS)
            ]
            np.testing.assert_allclose(
                result.values(k, measure), expected, atol=2e-5, err_msg=measure
            )
            off = ~np.eye(len(PROMPTS), dtype=bool)
            by_layer = np.array(expected)[:, off].mean(1)
            np.testing.assert_allclose(result.by_layer(k, measure), by_layer, atol=2e-5)
            assert result.mean(k, measure) == pytest.approx(by_layer.mean(), abs=2e-5)


def test_a_prompt_with_itself_shares_all(traces):
    result = tlc.prompt_coupling(traces, layers=-1, k=K)
    assert result.layers == (tiny.N_LAYERS - 1,)
    for measure in ("coupling", "captured_energy", "write_overlap", "read_overlap"):
        of_itself = result.values(measure=measure).diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(of_itself, torch.ones(1, 3), atol=1e-5, rtol=0)


def test_a_prompt_counts_once(model, traces):
    """However it is given: a mean over different prompts would be too high."""
    again = tlc.trace(model, traces[0].tokens)
    for twice in (traces[0], tlc.trace(model, PROMPTS[0]), again):
        with pytest.raises(ValueError, match=r"is there twice, as 'w3 w14 w15 w92'"):
            tlc.prompt_coupling([*traces, twice], k=K)


def test_prompts_are_of_one_model_traced_in_one_way(model, traces):
    hook = ("blocks.0.hook_out", lambda stream, hook: 2 * stream)
    with model.hooks(fwd_hooks=[hook]):
        hooked = tlc.trace(model, "w1 w2 w3")
    with pytest.raises(ValueError, match=r"same hooks, got \[\] and \['blocks.0.hook_"):
        tlc.prompt_coupling([*traces, hooked], k=K)


def test_nulls_are_those_of_random_matrices_of_the_same_spectra():
    """Of random Jacobians every measure lies at its null."""
    generator = torch.Generator().manual_seed(0)
    n, d, k = 30, 24, 4
    J = torch.randn(n, d, d, generator=generator, dtype=torch.float64)
    spectra = tlc.svd(J, k)
    rows = [tlc.coupling_matrix(J_1.expand(n, d, d), spectra, k) for J_1 in J]
    U, V = spectra.U, spectra.Vh.mT
    result = PromptCoupling(
        matrices=torch.stack(rows)[None],
        write_cosines=(U.mT[:, None] @ U)[None],
        read_cosines=(V.mT[:, None] @ V)[None],
        singular_values=spectra.S[None],
        frobenius_norms=torch.linalg.matrix_norm(J)[None],
        d_model=d,
        layers=(0,),
        prompts=tuple(f"p{i}" for i in range(n)),
        positions=(0,) * n,
        provenance={},
    )
    for measure in ("write_overlap", "read_overlap"):
        null = result.null(measure=measure, n_draws=400)
        assert result.mean(measure=measure) == pytest.approx(null, rel=0.05)
    # In root mean square.
    squares = (1 - result.values(2)[0][~torch.eye(n, dtype=torch.bool)]).square()
    assert 1 - float(squares.mean().sqrt()) == pytest.approx(result.null(2), rel=0.06)
    assert result.null(2, "write_overlap") == result.null(2, "read_overlap")


@pytest.mark.parametrize("measure", ["coupling", "write_overlap"])
def test_intervals_of_the_null_hold_means_of_random_bases(measure):
    """Matrices of random bases, made anew: their means lie in the interval."""
    rng = np.random.default_rng(0)
    n, d, k = 4, 16, 3
    spectra = np.sort(rng.random((2, n, d)) + 0.1)[..., ::-1].copy()

    def random_result() -> tuple[PromptCoupling, np.ndarray]:
        bases = np.linalg.qr(rng.standard_normal((2, 2, n, d, d)))[0]
        U, V = bases
        J = (U * spectra[..., None, :]) @ V.swapaxes(-1, -2)
        top = {"U": U[..., :k].swapaxes(-1, -2), "V": V[..., :k]}
        tensors = {
            "matrices": top["U"][:, None] @ J[:, :, None] @ top["V"][:, None],
            "write_cosines": top["U"][:, :, None] @ U[:, None, ..., :k],
            "read_cosines": V[..., :k].swapaxes(-1, -2)[:, :, None] @ top["V"][:, None],
            "singular_values": spectra[..., :k].copy(),
            "frobenius_norms": np.linalg.norm(J, axis=(-2, -1)),
        }
        means = np.array(
            [
                np.mean(
                    [
                        numpy_pair(J[layer, p], J[layer, q], k)[measure]
                        for p in range(n)
                        for q in range(n)
                        if p != q
                    ]
                )
                for layer in range(2)
            ]
        )
        result = PromptCoupling(
            **{name: torch.from_numpy(values) for name, values in tensors.items()},
            d_model=d,
            layers=(0, 1),
            prompts=tuple("abcd"),
            positions=(0,) * n,
            provenance={},
        )
        return result, means

    result, _ = random_result()
    low, high = result.null_interval_by_layer(measure=measure, n_draws=400).T.numpy()
    means = np.stack([random_result()[1] for _ in range(200)])
    inside = ((low < means) & (means < high)).mean(0)
    assert (inside > 0.92).all(), inside
    widths = np.diff(np.quantile(means, (0.025, 0.975), axis=0), axis=0)[0]
    assert (high - low < 3 * widths).all()
    by_default = result.null_interval_by_layer(measure=measure).numpy()
    np.testing.assert_allclose(by_default.mean(1), (low + high) / 2, rtol=0.1)


def test_a_saved_result_says_all(result, tmp_path):
    loaded = PromptCoupling.load(result.save(tmp_path / "prompts.nc"))
    assert loaded.prompts == tuple(PROMPTS) == tuple(loaded.provenance["prompts"])
    assert loaded.positions == (3, 1, 5)
    assert loaded.provenance["str_tokens_at_position"] == ["w92", "w35", "w8"]
    torch.testing.assert_close(loaded.matrices, result.matrices)
    data = loaded.to_dataset()
    np.testing.assert_array_equal(
        data["read_overlap"], result.values(None, "read_overlap")
    )
    assert data["coupling"].dims == ("layer", "row", "col")
    assert list(data["other_prompt"].values) == PROMPTS
    expected = 1 - np.sqrt(1 - 1 / K)
    np.testing.assert_allclose(data["coupling_null"], expected, rtol=1e-6)
    assert "3 prompts" in repr(loaded)


def test_what_differs_between_prompts_is_recorded_of_each(model):
    """The way to its Jacobians, and remarks."""
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS]
    traces[1].provenance["remarks"].append("the second is odd")
    provenance = tlc.prompt_coupling(traces, k=K).provenance
    for t, paths in zip((3, 1, 5), provenance["paths"], strict=True):
        assert list(paths) == [f"layer {layer}, token {t}" for layer in (0, 1)]
        assert set(paths.values()) == {"token_local_recorded"}
    assert provenance["remarks"] == ["the second is odd"]
    assert provenance["model"] == traces[0].provenance["model"]
    assert "tokens" not in provenance


def test_what_cannot_be_compared_is_refused(model, traces):
    with pytest.raises(ValueError, match="at least two prompts, got 1"):
        tlc.prompt_coupling(traces[:1])
    with pytest.raises(TypeError, match="iterable of traces, got str"):
        tlc.prompt_coupling(PROMPTS)
    normed = tlc.trace(model, PROMPTS[0], final_norm=True)
    with pytest.raises(ValueError, match="the same final_norm, got False and True"):
        tlc.prompt_coupling([*traces, normed])
    with pytest.raises(ValueError, match="layer"):
        tlc.prompt_coupling(traces, layers=[2], k=K)


def test_the_table_has_a_row_for_every_pair_of_prompts(model) -> None:
    traces = [tlc.trace(model, text) for text in ("w3 w14 w15", "w9 w2", "w1 w1 w4")]
    result = tlc.prompt_coupling(traces, k=4)
    table = result.to_dataframe([2, 4])
    assert len(table) == 2 * len(result.layers) * 3 * 2
    line = table.iloc[7].to_dict()
    row = result.prompts.index(line["prompt"])
    column = result.prompts.index(line["other_prompt"])
    layer = result.layers.index(line["layer"])
    values = result.values(int(line["k"]), "read_overlap")
    assert line["read_overlap"] == pytest.approx(float(values[layer, row, column]))
    null = result.null_by_layer(int(line["k"]), "coupling")[layer]
    assert line["coupling_null"] == pytest.approx(float(null))
