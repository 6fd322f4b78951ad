"""What is measured of a model on prompts, against HuggingFace, naive formulas, and the
library's single measures.
"""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.prompts import as_prompts
from tl_coupling.studies.surveys import Settings, measure_prompts

PROMPTS = [
    tlc.Prompt("w3 w14 w15 w92 w65 w35 w89 w79", "long", "recall"),
    tlc.Prompt("w5 w6 w7", "short"),
]
TOKENS = {"long": tiny.TOKENS, "short": [5, 6, 7]}
SMALL = Settings(k=(2, 4), n_singular_values=6)
BACKENDS = [
    "bridge",
    pytest.param(
        "hooked", marks=[pytest.mark.both_lines, tiny.needs_hooked_transformer]
    ),
]
# HuggingFace turns positions and softmax to float32 on the way, whatever the model's
# dtype.
RTOL = 1e-6
MEASURES = (
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
)


@pytest.fixture(scope="module")
def hf_model():
    return tiny.huggingface_model("gpt_neox", dtype=torch.float64)


@pytest.fixture(scope="module")
def model(hf_model, tokenizer_folder):
    return tiny.bridge(hf_model, tokenizer_folder)


@pytest.fixture(scope="module")
def measured(model):
    return measure_prompts(model, PROMPTS, SMALL)


def huggingface_loss(hf_model: torch.nn.Module, tokens: list[int]) -> float:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return float(hf_model(ids, labels=ids).loss)


def path_of(hf_model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """`[depth token d_model]`: what enters each layer of the HuggingFace model, and
    what leaves the last.
    """
    seen: list[torch.Tensor] = []
    layers = tiny.layers_of(hf_model)

    def first(x: Any) -> torch.Tensor:
        return x[0] if isinstance(x, tuple) else x

    handles = [
        layer.register_forward_pre_hook(lambda _, x: seen.append(first(x)))
        for layer in layers
    ]
    handles.append(
        layers[-1].register_forward_hook(lambda _, __, y: seen.append(first(y)))
    )
    with torch.no_grad():
        hf_model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return np.stack([x[0].numpy() for x in seen])


def test_dims_and_coordinates_are_as_documented(measured) -> None:
    pairs = ("prompt", "k", "layer", "other_layer")
    expected = {name: pairs for name in MEASURES}
    expected |= {
        f"{kind}_{name}": ("prompt", "k")
        for name in MEASURES
        for kind in ("mean", "null")
    }
    expected |= {
        "locality": ("prompt", "k", "distance"),
        "singular_values": ("prompt", "layer", "singular_value"),
    }
    shapes = ("line_shape_score", "expodistance", "equidistance")
    expected |= {
        name + end: ("prompt",) for name in shapes for end in ("", "_all_tokens")
    }
    expected |= {
        "windowed_line_shape_score": ("prompt", "window"),
        "loss": ("prompt",),
        "n_pos": ("prompt",),
    }
    expected |= {"remarks": ("prompt",)}
    expected |= dict.fromkeys(("norm", "logit_lens_entropy"), ("prompt", "depth"))
    expected |= dict.fromkeys(
        ("step_length", "line_shape_score_by_depth"), ("prompt", "layer")
    )
    assert {
        name: values.dims for name, values in measured.data_vars.items()
    } == expected
    coordinates = {
        name: values.values.tolist() for name, values in measured.coords.items()
    }
    assert coordinates == {
        "prompt": ["long", "short"],
        "task": ["recall", ""],
        "k": [2, 4],
        "layer": [0, 1],
        "other_layer": [0, 1],
        "depth": [0, 1, 2],
        "distance": [0, 1],
        "singular_value": [1, 2, 3, 4, 5, 6],
        "window": [0, 1],
    }
    assert measured["n_pos"].values.tolist() == [8, 3]
    provenance = json.loads(measured.attrs["provenance"])
    assert provenance["backend"] == "bridge"
    assert provenance["dtype"] == "float64"
    assert not {"tokens", "prompt", "str_tokens"} & provenance.keys()


def test_profiles_are_medians_over_tokens_of_the_paths(measured, hf_model) -> None:
    for prompt, tokens in TOKENS.items():
        of, x = measured.sel(prompt=prompt), path_of(hf_model, tokens)
        steps = np.diff(x, axis=0)
        lengths = np.linalg.norm(steps, axis=-1)
        sums = np.linalg.norm((steps / lengths[..., None]).cumsum(0), axis=-1)
        wanted = {"norm": np.linalg.norm(x, axis=-1), "step_length": lengths}
        wanted["line_shape_score_by_depth"] = np.arange(1, 3)[:, None] / sums
        for name, values in wanted.items():
            np.testing.assert_allclose(of[name], np.median(values, axis=1), rtol=1e-5)
        with torch.no_grad():
            p = hf_model(torch.tensor([tokens])).logits[0].double().softmax(-1).numpy()
        np.testing.assert_allclose(
            of["logit_lens_entropy"][-1], np.median(-(p * np.log(p)).sum(-1)), rtol=1e-5
        )
        assert (of["logit_lens_entropy"] <= np.log(p.shape[-1])).all()


def test_couplings_are_those_of_the_naive_formulas(measured, hf_model) -> None:
    for prompt, tokens in TOKENS.items():
        t = len(tokens) - 1
        J = [
            tiny.oracle_jacobian(hf_model, tokens, layer, t, t).numpy()
            for layer in range(2)
        ]
        svds = [np.linalg.svd(j) for j in J]
        of = measured.sel(prompt=prompt)
        np.testing.assert_allclose(
            of["singular_values"], [svd[1][:6] for svd in svds], rtol=RTOL
        )
        for k in (2, 4):
            values = {name: np.zeros((2, 2)) for name in MEASURES}
            for row in range(2):
                for col in range(2):
                    U, _, Vh = svds[col]
                    s = svds[row][1][:k]
                    A = U[:, :k].T @ J[row] @ Vh[:k].T
                    m, norm = np.linalg.norm(A - np.diag(np.diag(A))), np.linalg.norm(A)
                    values["miscoupling"][row, col] = m
                    values["normalized_miscoupling"][row, col] = m / norm
                    values["coupling"][row, col] = 1 - m / norm
                    values["spectral_miscoupling"][row, col] = np.linalg.norm(
                        A - np.diag(s)
                    ) / np.linalg.norm(s)
                    values["captured_energy"][row, col] = norm / np.linalg.norm(s)
            for name, expected in values.items():
                np.testing.assert_allclose(
                    of[name].sel(k=k), expected, rtol=RTOL, atol=RTOL, err_msg=name
                )
                mean = (expected[0, 1] + expected[1, 0]) / 2
                assert float(of[f"mean_{name}"].sel(k=k)) == pytest.approx(
                    mean, rel=RTOL
                )
            # Layers 0 and 1 are one apart, and a layer is coupled with itself exactly.
            between = (values["coupling"][0, 1] + values["coupling"][1, 0]) / 2
            np.testing.assert_allclose(of["locality"].sel(k=k), [1, between], rtol=RTOL)
            assert float(of["null_coupling"].sel(k=k)) == pytest.approx(
                1 - math.sqrt(1 - 1 / k), rel=1e-9
            )


def test_shapes_are_those_of_huggingfaces_own_hidden_states(measured, hf_model) -> None:
    for prompt, tokens in TOKENS.items():
        x = path_of(hf_model, tokens)
        steps = np.diff(x, axis=0)
        lengths = np.linalg.norm(steps, axis=-1)
        rates = np.diff(np.log(np.linalg.norm(x, axis=-1)), axis=0)
        expected = {
            "line_shape_score": 2
            / np.linalg.norm((steps / lengths[..., None]).sum(0), axis=-1),
            "expodistance": rates.var(0) / rates.mean(0) ** 2,
            "equidistance": lengths.std(0) / lengths.mean(0),
        }
        of = measured.sel(prompt=prompt)
        for name, values in expected.items():
            assert float(of[name]) == pytest.approx(values[-1], rel=RTOL)
            assert float(of[f"{name}_all_tokens"]) == pytest.approx(
                values.mean(), rel=RTOL
            )
        # Two blocks leave room for windows of one step only, and one step is straight.
        np.testing.assert_allclose(of["windowed_line_shape_score"], [1, 1], rtol=RTOL)
    assert measured.attrs["window"] == 1


def test_loss_is_huggingfaces_own(measured, hf_model) -> None:
    for prompt, tokens in TOKENS.items():
        assert float(measured["loss"].sel(prompt=prompt)) == pytest.approx(
            huggingface_loss(hf_model, tokens), rel=1e-6
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prepend_bos", [False, True])
def test_loss_counts_a_bos_token_only_where_there_is_one(
    hub, backend: str, prepend_bos: bool
) -> None:
    model = tlc.load_model("EleutherAI/pythia-14m", backend=backend)
    data = measure_prompts(model, PROMPTS, Settings(k=(2,), prepend_bos=prepend_bos))
    tokens = [0] * prepend_bos + TOKENS["short"]
    expected = huggingface_loss(tiny.huggingface_model("gpt_neox"), tokens)
    assert float(data["loss"][1]) == pytest.approx(expected, rel=1e-5)
    assert int(data["n_pos"][1]) == len(tokens)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(k=(3,), orientation="vju", position=1, n_singular_values=1),
        Settings(k=(4, 2, 7), final_norm=True, n_singular_values=100),
    ],
)
def test_settings_reach_the_measures(model, settings: Settings) -> None:
    data = measure_prompts(model, PROMPTS, settings)
    assert data["k"].values.tolist() == list(settings.k)
    # As many as are asked for, as many as the largest k needs, as many as there are.
    assert data.sizes["singular_value"] == (
        3 if settings.n_singular_values == 1 else tiny.D_MODEL
    )
    for prompt in PROMPTS:
        traced = tlc.trace(model, prompt.prompt, final_norm=settings.final_norm)
        of = data.sel(prompt=prompt.id)
        for k in settings.k:
            result = tlc.depth_coupling(
                traced, k, settings.position, settings.orientation
            )
            for name in MEASURES:
                np.testing.assert_allclose(
                    of[name].sel(k=k), result.values(k, name), rtol=1e-7, atol=1e-9
                )
                assert float(of[f"null_{name}"].sel(k=k)) == pytest.approx(
                    result.null(k, name), rel=1e-9
                )
        score = tlc.line_shape_score(traced.residual)[settings.position]
        assert float(of["line_shape_score"]) == pytest.approx(float(score), rel=1e-9)
    assert data.attrs["orientation"] == settings.orientation


def test_changes_of_jacobians_reach_the_measures(model) -> None:
    """Coupling without multiples of the identity, in the metric of all prompts."""
    settings = Settings(k=(3,), without="identity", metric="stream")
    data = measure_prompts(model, PROMPTS, settings)
    traces = [tlc.trace(model, prompt.prompt) for prompt in PROMPTS]
    M = tlc.measures.stream_metric(traces)
    for prompt, traced in zip(PROMPTS, traces, strict=True):
        J = tlc.measures.without_identity(tlc.block_jacobians(traced))
        expected = tlc.comparisons.jacobian_coupling(tlc.measures.in_metric(J, M), 3)
        np.testing.assert_allclose(
            data["coupling"].sel(prompt=prompt.id, k=3), expected.coupling(), rtol=1e-5
        )
    assert settings.as_plan()["metric"] == "stream"
    assert "metric" not in Settings(k=(3,)).as_plan()
    with pytest.raises(ValueError, match="leave `prompts_per_unit` out"):
        tlc.Survey("gpt2", PROMPTS, settings=settings, prompts_per_unit=1)


def test_products_in_place_of_jacobians_give_the_same_coupling(model) -> None:
    settings = Settings(k=(2, 3), orientation=("ujv", "vju"), window=1)
    exact = measure_prompts(model, PROMPTS, settings)
    by_products = replace(settings, method="products")
    found = measure_prompts(model, PROMPTS, by_products)
    assert json.loads(found.attrs["provenance"])["method"] == "products"
    np.testing.assert_allclose(found["coupling"], exact["coupling"], atol=1e-4)
    np.testing.assert_allclose(
        found["mean_coupling"], exact["mean_coupling"], atol=1e-4
    )
    assert by_products.as_plan()["method"] == "products"
    # Surveys that were begun before there was a choice go on.
    assert "method" not in settings.as_plan()
    with pytest.raises(ValueError, match="need the Jacobians"):
        Settings(method="products", metric="stream")


@pytest.mark.filterwarnings("ignore:.*these trajectories have one step")
@pytest.mark.parametrize(
    ("n_layers", "wanted", "width"), [(1, 11, 1), (4, 11, 3), (5, 11, 5), (5, 3, 3)]
)
def test_windows_fit_the_depth(
    monkeypatch, tokenizer_folder, n_layers: int, wanted: int, width: int
) -> None:
    monkeypatch.setitem(
        tiny.CONFIGS,
        "gpt_neox",
        {**tiny.CONFIGS["gpt_neox"], "num_hidden_layers": n_layers},
    )
    model = tiny.bridge(tiny.huggingface_model("gpt_neox"), tokenizer_folder)
    data = measure_prompts(model, PROMPTS[:1], Settings(k=(2,), window=wanted))
    assert data.attrs["window"] == width
    # The first window is centred on the layer that has width // 2 layers before it, and
    # so on.
    centres = list(range(width // 2, n_layers - width // 2))
    assert data["window"].values.tolist() == centres
    x = tlc.trace(model, PROMPTS[0].prompt).residual
    expected = [
        float(tlc.line_shape_score(x[c - width // 2 : c + width // 2 + 2]).mean())
        for c in centres
    ]
    np.testing.assert_allclose(
        data["windowed_line_shape_score"][0], expected, rtol=1e-6
    )
    # A model of one block has no pairs of different ones.
    assert data["mean_coupling"].isnull().all() == (n_layers == 1)


def test_one_token_has_no_loss_but_everything_else(model) -> None:
    data = measure_prompts(model, [*PROMPTS, tlc.Prompt("w9", "one")], SMALL)
    of = data.sel(prompt="one")
    assert np.isnan(of["loss"])
    assert not any(of[name].isnull().any() for name in of.data_vars if name != "loss")
    assert not data["loss"][:2].isnull().any()


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (
            PROMPTS,
            Settings(k=(2, 33)),
            r"prompt 'long': `k` must lie in \[1, 32\].*got 33",
        ),
        (
            PROMPTS,
            Settings(k=(2,), position=5),
            r"prompt 'short': `position` must lie in \[-3, 2\].*got 5",
        ),
    ],
)
def test_an_error_names_the_prompt(
    model, prompts, settings: Settings, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        measure_prompts(model, prompts, settings)
    assert "\n" not in str(caught.value)


def test_prompts_that_are_too_long_are_named_before_any_is_measured(
    model, monkeypatch
) -> None:
    monkeypatch.setattr(
        "tl_coupling.studies.surveys.measurements.trace",
        lambda *_, **__: pytest.fail("measured"),
    )
    many = [
        tlc.Prompt(" ".join([f"w{i}"] * (20 + 20 * (i % 2))), f"p{i}")
        for i in range(14)
    ]
    with pytest.raises(
        ValueError,
        match=r"^7 of 14 prompts have more tokens than .* holds, 32: 'p1' \(40\), .*, …; shorten",
    ):
        measure_prompts(model, many, SMALL)


def test_progress_wraps_the_prompts(model) -> None:
    seen = []

    def progress(prompts):
        for prompt in prompts:
            seen.append(prompt.id)
            yield prompt

    measure_prompts(model, PROMPTS, SMALL, progress)
    assert seen == ["long", "short"]


def test_texts_become_numbered_prompts() -> None:
    assert as_prompts("one text") == [tlc.Prompt("one text", "0")]
    assert as_prompts(PROMPTS[0]) == [PROMPTS[0]]
    assert as_prompts(["a", PROMPTS[1], "c"]) == [
        tlc.Prompt("a", "0"),
        PROMPTS[1],
        tlc.Prompt("c", "2"),
    ]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "empty"),
        ([tlc.Prompt("a", "x"), tlc.Prompt("b", "x")], "ids"),
        (["a", tlc.Prompt("b", "0")], "ids"),
    ],
)
def test_prompts_that_cannot_be_told_apart_are_refused(prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_prompts(prompts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": ()}, "`k` must be different whole numbers, one or more"),
        ({"k": (2, 0)}, "`k` must be at least 1, got 0"),
        ({"k": (2, 2)}, "`k`"),
        ({"window": 4}, "`window` must be an odd number of steps, got 4"),
        ({"window": -1}, "`window`"),
        ({"orientation": "juv"}, "`orientation`"),
    ],
)
def test_settings_that_no_model_fits_are_refused_at_once(
    as_a_user, values: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)


def test_settings_survive_json() -> None:
    plan = SMALL.as_plan()
    assert json.loads(json.dumps(plan)) == plan
    added_later = {"without": "identity", "metric": "stream", "method": "auto"}
    whole = replace(SMALL, dynamics=True, carriers=True, **added_later).as_plan()
    # How many are computed by one call changes no result, and no plan.
    assert replace(SMALL, batch=3).as_plan() == plan
    assert whole.keys() == Settings.__dataclass_fields__.keys() - {"batch"}


@pytest.mark.parametrize("orientation", ["ujv", ("ujv", "vju")])
def test_a_prompt_computes_and_decomposes_each_jacobian_once(
    model, monkeypatch, orientation
) -> None:
    from tl_coupling.jacobians import decomposed

    computed = []
    n_decomposed = []

    def counted_jacobians(*arguments, **options):
        for jacobian in compute(*arguments, **options):
            computed.append(jacobian)
            yield jacobian

    def counted_svd(J, *arguments, **options):
        n_decomposed.append(J.shape[:-2].numel())
        return decompose(J, *arguments, **options)

    compute = decomposed.jacobians_of
    decompose = decomposed.svd
    monkeypatch.setattr(decomposed, "jacobians_of", counted_jacobians)
    monkeypatch.setattr(decomposed, "svd", counted_svd)
    settings = Settings(k=(2, 4), orientation=orientation)
    data = measure_prompts(model, PROMPTS[:1], settings, progress=False)
    assert len(computed) == data.sizes["layer"]
    assert sum(n_decomposed) == data.sizes["layer"]


def test_products_of_blocks_are_those_of_the_room_and_wanted_only_where_asked(model):
    settings = Settings(k=(2,), window=1, dynamics=True)
    data = measure_prompts(model, PROMPTS[:2], settings)
    result = tlc.dynamics.products(tlc.trace(model, PROMPTS[1]))
    of_prompt = data.isel(prompt=1)
    assert np.allclose(of_prompt["log_largest"], result.log_largest)
    assert np.allclose(of_prompt["alignment_gain"], result.alignment_gain)
    low = of_prompt["alignment_gain_low"]
    assert np.allclose(low, result.alignment_gain_interval[:, 0])
    without = measure_prompts(model, PROMPTS[:1], Settings(k=(2,), window=1))
    assert "log_largest" not in without
    assert "dynamics" not in Settings().as_plan()
    assert settings.as_plan()["dynamics"] is True


def test_what_branches_carry_is_measured_only_where_asked(model):
    settings = Settings(k=(2, 4), window=1, carriers=True)
    data = measure_prompts(model, PROMPTS[:2], settings)
    whole = tlc.carriers(tlc.trace(model, PROMPTS[1]), k=2)
    result = whole.by_branch()
    of_prompt = data.isel(prompt=1)
    assert of_prompt["branch"].values.tolist() == list(result.labels)
    for name, share in (
        ("carried_share", "diagonal_share"),
        ("jacobian_share", "jacobian_share"),
    ):
        assert of_prompt[name].dims == ("layer", "branch")
        assert np.allclose(of_prompt[name], result.by_layer(share))
    # Heads are summed up by hand.
    heads = [label.startswith("H") for label in whole.labels]
    shares = whole.by_layer("diagonal_share")[:, heads].sum(-1)
    assert np.allclose(of_prompt["carried_share"].sel(branch="attn_out"), shares)
    low, high = result.null_interval("mlp_out")
    of_mlp = of_prompt.sel(branch="mlp_out")
    assert float(of_mlp["null_excess_low"]) == pytest.approx(low)
    assert float(of_mlp["null_excess_high"]) == pytest.approx(high)
    without = measure_prompts(model, PROMPTS[:1], Settings(k=(2,), window=1))
    assert "carried_share" not in without
    assert "carriers" not in Settings().as_plan()
