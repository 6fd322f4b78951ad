"""What users call refuses whatever does not fit in one line, and takes what they mean
all the same.
"""

import inspect
import operator
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import pytest
import torch
import xarray
from jaxtyping import Float
from torch import Tensor, nn

import tl_coupling as tlc
from public_api import public_names
from tl_coupling import comparisons, directions, dynamics, trajectories
from tl_coupling.arguments import checked, kinds

MADE = (tlc.CouplingMap, tlc.Prompt, tlc.Settings, tlc.Spectrum, tlc.Survey)
ASKED = (tlc.CouplingMap, tlc.Spectrum, tlc.influence.Influence)
ASKED += (trajectories.Linearisation, trajectories.ResidualAlignment)
# Functions of a table, which call its columns x and y.
OF_COLUMNS = {"linear_fit"}
SQUARE = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
# What is taken for a lens of TransformerLens.
LENS = types.SimpleNamespace(
    jacobians={0: SQUARE},
    n_prompts=1,
    d_model=2,
    metadata={},
    transport=torch.matmul,
    validate_model=print,
)


class Foreign:
    """What no annotation asks for."""


def public() -> Iterator[Callable[..., Any]]:
    """Every public function, classes that users make, methods of what they are
    given.
    """
    yield from (
        value
        for value in public_names().values()
        if isinstance(value, types.FunctionType)
    )
    yield from (cls.__init__ for cls in MADE)
    for cls in ASKED:
        functions = (
            getattr(value, "__func__", value)
            for name, value in vars(cls).items()
            if name[0] != "_"
        )
        yield from filter(inspect.isfunction, functions)


PUBLIC = {
    f.__qualname__: f
    for f in public()
    if f.__name__[0] != "_" or f.__name__ == "__init__"
}
PUBLIC = {
    name: f
    for name, f in PUBLIC.items()
    if set(inspect.signature(f).parameters) - {"self", "cls"}
}


@pytest.fixture(scope="module")
def depth(tiny_trace: tlc.Trace) -> tlc.CouplingMap:
    return tlc.depth_coupling(tiny_trace, k=2)


def fitting(
    function: Callable[..., Any], trace: tlc.Trace, depth: tlc.CouplingMap
) -> dict[str, Any]:
    """What a function cannot be called without, of the right kind and nothing more: it
    is never run.
    """
    by_name = {
        **{
            "trace": trace,
            "traces": [trace],
            "maps": [depth],
            "model": trace.model,
            "layer": 0,
            "k": 1,
            "n": 1,
            "prediction": "input",
        },
        **{
            "J": SQUARE,
            "J_1": SQUARE,
            "A": SQUARE,
            "S": torch.ones(2),
            "S_1": torch.ones(2),
            "S_2": torch.ones(2),
            "cosines": SQUARE,
            "x": torch.ones(3, 4),
        },
        **{
            "spectrum_2": tlc.svd(SQUARE),
            "U": SQUARE,
            "Vh": SQUARE,
            "result": depth,
            "results": {},
            "runs": {},
        },
        **{
            "data": xarray.Dataset(),
            "table": pandas.DataFrame(),
            "scores": "loss",
            "controls": ["z"],
            "subsets": {},
        },
        **{
            "survey": tlc.Survey(["a"], ["b"]),
            "prompts": ["b"],
            "settings": tlc.Settings(),
            "models": ["a"],
        },
        **{
            "folder": "f",
            "path": "f",
            "name": "f",
            "source": "f",
            "id": "a",
            "prompt": "b",
            "y": "score",
        },
        **{
            "blocks": [torch.nn.Identity()],
            "run": print,
            "str_tokens": ["a"],
            "values": torch.ones(1),
            "unembed": torch.exp,
            "r": 1,
            "times": torch.exp,
            "transposed": torch.exp,
            "shape": (2, 2),
            "generator": torch.Generator(),
            "frobenius_norm": torch.ones(()),
        },
        **{
            "vector": torch.ones(2),
            "workers": 1,
            "n_classes": 1,
            "rank": 1,
            "a": [depth],
            "b": [depth],
            "first": np.ones(3),
            "second": np.ones(3),
            "p": np.ones(3),
            "comparison": object.__new__(comparisons.Comparison),
            "spectra": tlc.svd(SQUARE[None]),
            "directions": object.__new__(directions.Directions),
            "subspace": object.__new__(directions.Subspace),
        },
        **{name: getattr(depth, name) for name in depth.__dataclass_fields__},
    }
    owner = {cls.__name__: cls for cls in ASKED + MADE}.get(
        function.__qualname__.partition(".")[0]
    )
    by_name |= {"self": owner and object.__new__(owner), "cls": owner}
    by_name |= {"x": "coupling"} if function.__name__ in OF_COLUMNS else {}
    by_name |= {
        "bootstrap": {"x": np.ones((3, 2)), "y": np.ones(3)},
        **{
            f"jacobian_{name}": {"J": SQUARE[None]}
            for name in ("coupling", "eigenvalues", "products")
        },
        "plot_ablation": {"result": object.__new__(directions.Ablation)},
        "plot_rotation": {"result": object.__new__(directions.Rotation)},
        "plot_steering": {"result": object.__new__(directions.Steering)},
        "plot_subspace": {"result": object.__new__(directions.Subspace)},
        "lens_audit": {"lens": LENS},
        "plot_lens_audit": {"result": object.__new__(trajectories.LensAudit)},
        "plot_product_map": {"result": object.__new__(dynamics.ProductMap)},
        "then": {"M": SQUARE},
        "without_shared": {"J": SQUARE[None]},
        "draws_of_random_subspaces": {"d_model": 2},
        "coupled_gradient": {"S": torch.ones(1, 2), "error": torch.ones(2)},
        "coupling_of_jacobians": {"J": torch.ones(2, 2, 2)},
        "in_metric": {"metric": torch.eye(2)},
        "gradient_prediction": {"error": torch.ones(trace.d_model)},
        "inverse_singular_value_fit": {"S": torch.ones(2, 2)},
        "prompts_per_task": {"prompts": [tlc.Prompt("b", "a")]},
        "show_layers_by_token": {"values": torch.ones(1, 1)},
        "plot_alignment_matrices": {
            "result": object.__new__(trajectories.ResidualAlignment)
        },
        **{
            f"plot_prompt_{name}": {
                "result": object.__new__(comparisons.PromptCoupling)
            }
            for name in ("coupling", "map")
        },
        **{
            f"plot_{name}": {"result": object.__new__(comparisons.Carriers)}
            for name in ("carriers", "carriers_by_depth")
        },
        "plot_redundancy": {"correlations": xarray.Dataset()},
        "plot_spread": {"result": object.__new__(comparisons.MeanCouplingMap)},
        **{
            f"plot_{name}": {
                "result": object.__new__(tlc.generalization.Generalization)
            }
            for name in ("generalization", "forest", "k_sweep")
        },
    }.get(function.__name__, {})
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: by_name[p.name]
        for p in parameters
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }


@pytest.mark.parametrize("function", PUBLIC.values(), ids=PUBLIC)
def test_every_parameter_refuses_what_is_of_no_kind_it_takes(
    function: Callable[..., Any], tiny_trace: tlc.Trace, depth: tlc.CouplingMap
) -> None:
    needed = fitting(function, tiny_trace, depth)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls") or parameter.annotation is Any:
            continue
        # What has been made a keyword of its own by `**options`.
        name = "frequency" if parameter.kind is parameter.VAR_KEYWORD else name
        for wrong in (
            Foreign(),
            1j,
            {1.5},
            b"bytes",
            [[None]],
            {None: Foreign()},
            *([] if "Callable" in str(parameter) else [Foreign]),
        ):
            with pytest.raises((TypeError, ValueError)) as error:
                function(**needed | {name: wrong})
            message = str(error.value)
            assert message.startswith(f"`{name}` must be "), (wrong, message)
            assert ", got " in message
            assert "\n" not in message


def test_classes_of_every_room_say_how_they_are_made() -> None:
    # Fewer would mean that the test below looks at nothing.
    assert len(kinds.MAKERS) == 32
    assert {tlc.Trace, tlc.Spectrum, tlc.Survey, nn.Module} <= kinds.MAKERS.keys()


@pytest.mark.parametrize("maker", kinds.MAKERS.values())
def test_what_an_error_says_makes_one_is_there(maker: str) -> None:
    function = operator.attrgetter(maker.partition("(")[0])(tlc)
    arguments = maker.partition("(")[2].replace("…", "")
    names = set(re.findall(r"\w+", arguments))
    assert names - {"text"} <= set(inspect.signature(function).parameters)


def test_the_whole_api_is_there() -> None:
    # Fewer would mean that the test above looks at nothing.
    assert len(PUBLIC) > 90
    assert {
        "svd",
        "plot_coupling",
        "html_report",
        "Settings.__init__",
        "CouplingMap.values",
        "bootstrap",
    } <= set(PUBLIC)


WHOLE = {
    "random_subspace_null": ["k"],
    "depth_coupling": ["k"],
    "depth_coupling_by_orientation": ["k", "position"],
    "mean_depth_coupling": ["k"],
    "self_coupling": ["layer", "other_layer", "k"],
    "svd": ["k"],
    "redundancy_correlations": ["n_resamples", "seed"],
    "perturbation": ["n_samples", "seed", "position"],
    "plot_singular_values": ["n"],
    "load_prompts": ["n", "seed"],
    "Survey.__init__": ["prompts_per_unit"],
    "Settings.__init__": ["position", "window", "n_singular_values"],
    "generalization_study": ["k", "n_resamples", "seed"],
}


@pytest.mark.parametrize(
    ("name", "parameter"),
    [(name, number) for name, numbers in WHOLE.items() for number in numbers],
)
def test_whole_numbers_are_neither_fractions_nor_truth_values_nor_text(
    name: str, parameter: str, tiny_trace: tlc.Trace, depth: tlc.CouplingMap
) -> None:
    function = PUBLIC[name]
    needed = fitting(function, tiny_trace, depth)
    for wrong in (
        2.5,
        2.0,
        True,
        np.bool_(True),
        "2",
        float("nan"),
        torch.tensor(2),
        np.array([2]),
    ):
        with pytest.raises(
            TypeError, match=rf"^`{parameter}` must be a whole number( or None)?, got "
        ):
            function(**needed | {parameter: wrong})


@pytest.mark.parametrize("wrong", [2.5, True, float("nan"), torch.tensor(2), [0.5]])
def test_positions_are_whole_numbers_or_lists_of_them(
    tiny_trace: tlc.Trace, wrong: object
) -> None:
    message = (
        '^`position` must be a whole number, a list of whole numbers or "all", got '
    )
    with pytest.raises(TypeError, match=message):
        tlc.depth_coupling(tiny_trace, 2, wrong)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda t: tlc.svd([[1.0]]),
            TypeError,
            r"`J` must be a floating-point torch tensor \[… d_out d_in\], got a list",
        ),
        (
            lambda t: tlc.svd(torch.eye(2, dtype=torch.int64)),
            TypeError,
            r"got a tensor of torch.int64 and shape \[2 2\]: con",
        ),
        (
            lambda t: tlc.svd(torch.ones(3)),
            ValueError,
            r"`J` must have shape \[… d_out d_in\], got \[3\]",
        ),
        (
            lambda t: tlc.miscoupling(torch.ones(3, 4)),
            ValueError,
            r"`A` must have shape \[… k k\], got \[3 4\]",
        ),
        (
            lambda t: tlc.miscoupling(torch.full((2, 2), torch.nan)),
            ValueError,
            "`A` has NaN or infinite entries",
        ),
        (
            lambda t: tlc.coupling_matrix(torch.eye(3), tlc.svd(SQUARE), 1),
            ValueError,
            r"`spectrum_2` must be of \[3 3\] matrices like `J_1`, got \[2, 2\]",
        ),
        (
            lambda t: tlc.coupling_matrix(SQUARE.double(), tlc.svd(SQUARE), 1),
            TypeError,
            "one dtype, got torch.float64 and",
        ),
        (
            lambda t: tlc.coupling_matrix(
                SQUARE.expand(3, 2, 2), tlc.svd(SQUARE.expand(5, 2, 2)), 1
            ),
            ValueError,
            r"batch axes that fit, got \[3\] and \[5\]",
        ),
        (
            lambda t: tlc.captured_energy(torch.ones(3, 2, 2), torch.ones(5, 2)),
            ValueError,
            r"`S_1` must have shape \[… n\] with batch = \[3\] as in `A`, got \[5 2\]",
        ),
        (
            lambda t: tlc.generalization.bootstrap(np.ones((3, 2)), np.ones(4)),
            ValueError,
            r"`y` must have shape \[n_models\] with n_models = 3 as in `x`, got \[4\]",
        ),
        (
            lambda t: tlc.generalization.bootstrap("xyz", [1.0]),
            TypeError,
            r"`x` must be a floating-point array \[n_models n_prompts\]",
        ),
        (
            lambda t: tlc.trajectories.norms([[1.0]]),
            TypeError,
            r"`x` must be a floating-point torch tensor \[n_layers\+1 … d_model\], got a list",
        ),
        (
            lambda t: tlc.random_subspace_null(1.5),
            TypeError,
            "`k` must be a whole number, got 1.5",
        ),
        (
            lambda t: tlc.random_subspace_null(True),
            TypeError,
            "`k` must be a whole number, got True",
        ),
        (
            lambda t: tlc.random_subspace_null(0),
            ValueError,
            "`k` must be at least 1, got 0",
        ),
        (
            lambda t: tlc.Settings(k=5),
            TypeError,
            "`k` must be a list of whole numbers, got 5",
        ),
        (
            lambda t: tlc.Settings(k=(2.5,)),
            TypeError,
            r"`k` must be a list of whole numbers, got \(2.5,\)",
        ),
        (
            lambda t: tlc.Settings(k=(True,)),
            TypeError,
            r"`k` must be a list of whole numbers, got \(True,\)",
        ),
        (
            lambda t: tlc.Settings(position="x"),
            TypeError,
            "`position` must be a whole number, got 'x'",
        ),
        (
            lambda t: tlc.Settings(n_singular_values=-5),
            ValueError,
            "`n_singular_values` must be at least 1, got -5",
        ),
        (lambda t: tlc.Survey("", ["b"]), ValueError, "`models` must not be empty"),
        (lambda t: tlc.Survey([""], ["b"]), ValueError, "`models` must not be empty"),
        (lambda t: tlc.Survey(5, ["b"]), TypeError, "`models` must be .*, got 5"),
        (
            lambda t: tlc.Survey(["a"], 5),
            TypeError,
            "`prompts` must be .*, got 5: `tl_coupling.Prompt",
        ),
        (lambda t: tlc.Survey(["a"], [""]), ValueError, "the prompt is empty"),
        (
            lambda t: tlc.Survey(["a"], ["b"], dtype="float32"),
            TypeError,
            "`dtype` must be a torch.dtype, got 'float32'",
        ),
        (
            lambda t: tlc.Survey(["a"], ["b"], dtype=torch.int32),
            ValueError,
            "`dtype` must be a floating-point dtype",
        ),
        (
            lambda t: tlc.Survey(["a"], ["b"], device="gpu"),
            ValueError,
            '`device` must be a device such as "cpu"',
        ),
        (
            lambda t: tlc.Survey(["a"], ["b"], [1, 1]),
            ValueError,
            "`checkpoints` must be all steps or all revisions",
        ),
        (
            lambda t: tlc.Survey(["a"], ["b"], settings={"k": 3}),
            TypeError,
            r"`settings` must be a Settings, got {'k': 3}: `tl_coupling.Settings\(k=…\)` makes one",
        ),
        (
            lambda t: tlc.run_survey(tlc.Survey(["a"], ["b"]), executor=5),
            TypeError,
            "`executor` must be an Executor or None, got 5",
        ),
        (
            lambda t: tlc.run_survey(tlc.Survey(["a"], ["b"]), folder=""),
            ValueError,
            "`folder` must not be empty",
        ),
        (
            lambda t: tlc.run_survey(tlc.Survey("gpt2", "w1"), "/nope/\0"),
            ValueError,
            "`folder` must be a path without null characters, which no file can have",
        ),
        (
            lambda t: tlc.Survey(["gpt2", "a\0b"], "w1"),
            ValueError,
            "`models` must be a path without null characters",
        ),
        (
            lambda t: tlc.load_prompts(Path("a\0b")),
            ValueError,
            "`source` must be a path without null characters",
        ),
        (
            lambda t: tlc.portrait(t, k=3),
            TypeError,
            "`k` must be a list of whole numbers or None, got 3",
        ),
        (lambda t: tlc.Prompt("", "a"), ValueError, "the prompt is empty"),
        (lambda t: tlc.Prompt(id="a"), ValueError, "the prompt is empty"),
        (
            lambda t: tlc.surveys.measure_prompts(nn.Linear(2, 2), "a", tlc.Settings()),
            TypeError,
            "wanted a TransformerLens model",
        ),
        (
            lambda t: tlc.depth_coupling(t.model),
            TypeError,
            r"`trace` must be a .*Trace, got TransformerBridge: "
            r"`tl_coupling.trace\(model, prompt\)` makes one",
        ),
        (
            lambda t: tlc.depth_coupling(t, layers="01"),
            TypeError,
            "`layers` must be a list of whole numbers or None, got '01'",
        ),
        (
            lambda t: tlc.depth_coupling(t, layers={0, 1}),
            TypeError,
            r"`layers` must be a list of .*, got \{0, 1\}",
        ),
        (
            lambda t: tlc.plot_coupling(t),
            TypeError,
            r"`result` must be a CouplingMap, got Trace: .*depth_coupling",
        ),
        (
            lambda t: tlc.surveys.pythia_steps(first=None),
            TypeError,
            "`first` must be a whole number, got None",
        ),
        (lambda t: tlc.svd(), TypeError, "^svd: missing a required argument: 'J'"),
    ],
)
def test_what_was_raw_or_taken(
    call: Callable[[tlc.Trace], Any],
    kind: type[Exception],
    message: str,
    tiny_trace: tlc.Trace,
) -> None:
    with pytest.raises(kind, match=message) as error:
        call(tiny_trace)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_of_colours_are_finite(value: float, tiny_trace: tlc.Trace) -> None:
    result = tlc.depth_coupling(tiny_trace, k=2)
    of_tokens = tlc.self_coupling(tiny_trace, 0, k=2)
    for name, draw in {
        "vmin": lambda: tlc.plot_coupling(result, vmin=value),
        "vmax": lambda: tlc.plot_coupling(result, vmax=value),
        "threshold": lambda: tlc.plot_adjacency(result, threshold=value),
    }.items():
        with pytest.raises(ValueError, match=f"^`{name}` must be finite, got {value}$"):
            draw()
    for draw in (
        lambda: tlc.plot_coupling_matrices(result, vmax=value),
        lambda: tlc.interactive.show_token_coupling(of_tokens, vmax=value),
    ):
        with pytest.raises(
            ValueError, match=f"^`vmax` must be above 0 and finite, got {value}$"
        ):
            draw()
    with pytest.raises(
        ValueError, match=r"`vmin` must lie below `vmax`, got 1.0 and 0.5"
    ):
        tlc.plot_coupling(result, vmin=1, vmax=0.5)
    with pytest.raises(
        ValueError,
        match="`cmap` must be a colour map that matplotlib knows, got 'nonsense'",
    ):
        tlc.plot_coupling(result, cmap="nonsense")


def test_controls_are_different() -> None:
    coupling = 0.1 * np.arange(1, 6)[:, None, None] + 0.01 * np.arange(4)[:, None]
    data = xarray.Dataset(
        {"mean_coupling": (("model", "prompt", "k"), coupling)},
        {"model": list("abcde"), "k": [10]},
    )
    scores = pandas.DataFrame(
        {"model": list("abcde"), "score": [30, 35, 41, 43, 52], "z": [3, 1, 4, 1, 5]}
    )
    with pytest.raises(
        ValueError, match=r"`controls` must be different columns, got \['z', 'z'\]"
    ):
        tlc.generalization.generalization_study(
            data, scores, controls=["z", "z"], n_resamples=10
        )


# --- what is meant all the same


def test_numpys_numbers_are_numbers() -> None:
    settings = tlc.Settings(
        k=np.array([4, 2]), position=np.int64(-2), n_singular_values=np.int32(3)
    )
    assert settings == tlc.Settings(k=(4, 2), position=-2, n_singular_values=3)
    assert {
        type(value)
        for value in (*settings.k, settings.position, settings.n_singular_values)
    } == {int}
    assert tlc.svd(SQUARE, np.int64(1)).k == 1
    assert tlc.random_subspace_null(np.int64(4)) == tlc.random_subspace_null(4)
    assert tlc.Survey(["a"], ["b"], np.array([10, 20])).checkpoints == [10, 20]


def test_numpy_arrays_are_tensors() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3, 4))
    for view in (x, x[::-1], np.broadcast_to(x[:, :1], x.shape)):
        assert torch.equal(
            tlc.line_shape_score(view), tlc.line_shape_score(torch.tensor(view.copy()))
        )
    A = np.array([[2.0, 1.0], [1.0, 2.0]], dtype=np.float32)
    assert tlc.miscoupling(A).item() == pytest.approx(np.sqrt(2))
    assert tlc.miscoupling(A).dtype == torch.float32


def test_lists_of_numbers_are_arrays_where_arrays_are_wanted() -> None:
    x, y = [[1, 2], [3, 5], [4, 4], [7, 8]], [2, 3, 5, 9]
    with pytest.warns(UserWarning, match="too few to resample"):
        of_arrays = tlc.generalization.bootstrap(
            np.array(x, float), np.array(y, float), n_resamples=20
        )
    of_tensors = (torch.tensor(x), torch.tensor(y))
    for columns in ((x, y), of_tensors, (x, pandas.Series(y))):
        with pytest.warns(UserWarning, match="too few to resample"):
            result = tlc.generalization.bootstrap(*columns, n_resamples=20)
        assert result.slope == of_arrays.slope


def test_one_text_and_many_are_prompts(tiny_trace: tlc.Trace) -> None:
    settings = tlc.Settings(k=(2,), window=1)
    data = tlc.surveys.measure_prompts(tiny_trace.model, ["w1 w2", "w3 w4"], settings)
    assert data["prompt"].values.tolist() == ["0", "1"]
    named = tlc.surveys.measure_prompts(
        tiny_trace.model, [tlc.Prompt("w3 w4", "one")], settings
    )
    assert named["mean_coupling"].item() == data["mean_coupling"].sel(prompt="1").item()


# --- the decorator


@checked
def product(
    a: Float[Tensor, "*batch n m"],
    b: Float[Tensor, "*#batch m"],
    by: int | float | None = None,
) -> Tensor:
    return (a * b[..., None, :]).sum(-1) * (by or 1)


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        ((2, 3), (3,), True),
        ((5, 2, 3), (3,), True),
        ((5, 2, 3), (1, 3), True),
        ((5, 2, 3), (5, 3), True),
        ((4, 5, 2, 3), (5, 3), True),
        ((5, 2, 3), (4, 3), False),
        ((2, 3), (5, 3), False),
        ((2, 3), (2,), False),
        ((3,), (3,), False),
    ],
)
def test_sizes_hold_across_arguments(
    a: tuple[int, ...], b: tuple[int, ...], fits: bool
) -> None:
    if fits:
        assert product(torch.ones(a), torch.ones(b)).shape == a[:-1]
    else:
        with pytest.raises(ValueError, match=r"^`[ab]` must have shape \["):
            product(torch.ones(a), torch.ones(b))


@checked
def with_bar(progress: Callable[..., Any] | Literal[False] | None = None) -> Any:
    return progress


def test_false_stands_beside_other_kinds() -> None:
    assert (with_bar(), with_bar(False), with_bar(list)) == (None, False, list)
    for wrong in (0, 5, "x", True):
        with pytest.raises(
            (TypeError, ValueError), match=r"^`progress` must be .*False.*, got "
        ):
            with_bar(wrong)


def test_a_call_leaves_nothing_behind() -> None:
    # Sizes are those of one call.
    assert product(torch.ones(2, 3), torch.ones(3)).shape == (2,)
    assert (
        product(torch.ones(4, 5), torch.ones(5), by=np.float32(2)).tolist() == [10] * 4
    )


def test_names_and_documentation_stay() -> None:
    assert tlc.svd.__name__ == "svd"
    assert tlc.svd.__doc__.startswith("Return the singular value decomposition")
    assert list(inspect.signature(tlc.svd).parameters) == ["J", "k"]


def test_warnings_point_at_the_line_that_called(tmp_path: Path) -> None:
    still = torch.ones(3, 2, 4)
    for call in (
        lambda: tlc.line_shape_score(still),
        lambda: tlc.spectra.effective_rank(torch.zeros(2)),
        lambda: tlc.normalized_miscoupling(torch.zeros(2, 2)),
        lambda: tlc.spectra.asymmetry(torch.zeros(2, 2)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [Path(warning.filename).name for warning in caught] == [
            "test_checking.py"
        ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SQUARE.to_sparse(), "got a tensor of layout sparse_coo, of torch.float32"),
        (SQUARE.to_sparse_csr(), "a dense one is wanted"),
        (torch.nested.nested_tensor([SQUARE, SQUARE]), "got a nested tensor of"),
        (SQUARE.to("meta"), "on the device meta it has no numbers"),
        (SQUARE.to(torch.float8_e4m3fn), "convert it with `.float()`"),
        (SQUARE.tolist(), "`torch.tensor` makes one of numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|CSR)")
def test_a_tensor_has_a_number_at_every_place(as_a_user, given, message) -> None:
    for call in (
        lambda: tlc.svd(given),
        lambda: tlc.coupling_matrix(given, tlc.svd(SQUARE), 2),
        lambda: tlc.miscoupling(given),
        lambda: tlc.step_lengths(given),
        lambda: tlc.measures.without_identity(given),
        lambda: comparisons.jacobian_coupling(given),
    ):
        with pytest.raises(TypeError, match=re.escape(message)) as error:
            call()
        assert "\n" not in str(error.value)
