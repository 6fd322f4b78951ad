"""A portrait of a prompt: what is measured, of which layers and which tokens."""

import math
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import xarray

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import BlockFunction
from tl_coupling.jacobians import decomposed
from tl_coupling.progress import JoinedLoops
from tl_coupling.trajectories import measure_trajectory


@pytest.fixture(scope="module")
def short_trace(tiny_trace: tlc.Trace) -> tlc.Trace:
    """Three tokens, where how many there are does not matter."""
    return tlc.trace(tiny_trace.model, tiny.TOKENS[:3])


@pytest.mark.parametrize("final_norm", [False, True])
def test_the_lens_reads_the_models_own_prediction_at_the_end(
    tokenizer_folder: Path, final_norm: bool
) -> None:
    hf_model = tiny.huggingface_model("llama")
    trace = tlc.trace(
        tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS, final_norm=final_norm
    )
    measured = tlc.portrait(trace, k=(4,))
    with torch.no_grad():
        logits = hf_model(torch.tensor([tiny.TOKENS])).logits[0].double()
    for position, row in enumerate(logits.tolist()):
        largest = max(row)
        weights = [math.exp(value - largest) for value in row]
        entropy = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
        assert float(measured.entropy[-1, position]) == pytest.approx(entropy, abs=1e-4)
    assert measured.entropy.shape == (tiny.N_LAYERS + 1, len(tiny.TOKENS))


def test_soft_capped_logits(tokenizer_folder: Path) -> None:
    trace = tlc.trace(
        tiny.bridge(tiny.huggingface_model("gemma2"), tokenizer_folder), tiny.TOKENS
    )
    hf_model = tiny.huggingface_model("gemma2")
    assert hf_model.config.final_logit_softcapping
    with torch.no_grad():
        p = hf_model(torch.tensor([tiny.TOKENS])).logits[0].softmax(-1)
    expected = -(p * p.log()).sum(-1)
    with (
        pytest.warns(UserWarning, match="participation ratio is undefined"),
        pytest.warns(UserWarning, match="effective rank is undefined"),
    ):
        assert tlc.portrait(trace, k=(4,)).entropy[-1].tolist() == pytest.approx(
            expected.tolist(), abs=1e-4
        )


@pytest.mark.both_lines
@tiny.needs_hooked_transformer
def test_the_lens_of_a_hooked_transformer(hub: Path) -> None:
    bridge, hooked = (
        tlc.load_model("gpt2", backend=backend) for backend in ("bridge", "hooked")
    )
    first, again = (
        tlc.portrait(tlc.trace(model, tiny.TOKENS), k=(4,)).entropy
        for model in (bridge, hooked)
    )
    torch.testing.assert_close(first, again, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ({}, (0, 1)),
        ({"layer": 1}, (1, 1)),
        ({"layer": 0}, (0, 1)),
        ({"other_layer": -1}, (0, 1)),
        ({"other_layer": 0}, (0, 0)),
        ({"layer": -1, "other_layer": 0}, (1, 0)),
    ],
)
def test_the_pair_of_layers(
    short_trace: tlc.Trace, given: dict[str, int], pair: tuple[int, int]
) -> None:
    measured = tlc.portrait(short_trace, k=(4,), **given)
    for result in measured.tokens.values():
        assert (set(result.row_layers), set(result.col_layers)) == (
            {pair[0]},
            {pair[1]},
        )


def test_what_is_held_and_what_varies(tiny_trace: tlc.Trace) -> None:
    measured = tlc.portrait(tiny_trace, k=(8, 4), position=-2, input_position=3)
    assert measured.ks == (4, 8)
    assert measured.depth.k == 8
    assert measured.depth.row_positions == (6, 6)
    assert measured.tokens["self"].row_positions == tuple(range(8))
    assert measured.tokens["fixed input"].row_positions == tuple(range(3, 8))
    assert measured.tokens["fixed output"].row_positions == tuple(range(7))
    assert measured.influence.output_position == 6


def test_it_holds_the_shapes_of_the_trajectories(tiny_trace: tlc.Trace) -> None:
    trajectory = tlc.portrait(tiny_trace, k=(4,)).trajectory
    alone = measure_trajectory(tiny_trace, linear=False, noise=False)
    assert trajectory.linearisation is None
    assert trajectory.perturbation is None
    xarray.testing.assert_identical(trajectory.to_dataset(), alone.to_dataset())


def test_its_entropy_is_that_of_its_trajectory(tiny_trace: tlc.Trace) -> None:
    measured = tlc.portrait(tiny_trace, k=(4,))
    assert measured.entropy is measured.trajectory.logit_lens_entropy
    assert measured.entropy is not None


def test_across_tokens_it_is_the_token_portrait(tiny_trace: tlc.Trace) -> None:
    portrait = tlc.portrait(tiny_trace, k=(4, 6), position=4, input_position=2, layer=0)
    across_tokens = tlc.portraits.token_portrait(
        tiny_trace, 0, 1, k=4, position=4, input_position=2
    )
    assert (
        list(across_tokens.maps)
        == list(portrait.tokens)
        == ["self", "fixed input", "fixed output"]
    )
    expected = {
        "self": tlc.self_coupling(tiny_trace, 0, 1, k=4),
        "fixed input": tlc.context_coupling(
            tiny_trace, 0, 1, k=4, fixed="input", position=2
        ),
        "fixed output": tlc.context_coupling(
            tiny_trace, 0, 1, k=4, fixed="output", position=4
        ),
    }
    for name, result in expected.items():
        torch.testing.assert_close(
            across_tokens.maps[name].coupling(), result.coupling()
        )
        torch.testing.assert_close(portrait.tokens[name].coupling(), result.coupling())
    torch.testing.assert_close(
        across_tokens.influence.frobenius_norm, portrait.influence.frobenius_norm
    )
    assert across_tokens.influence.output_position == 4


def test_chosen_maps_of_chosen_tokens(tiny_trace: tlc.Trace) -> None:
    part = tlc.portraits.token_portrait(
        tiny_trace,
        k=2,
        position=5,
        positions=[7, 4, 0, -2],
        maps=["fixed output", "self"],
    )
    assert {name: result.row_positions for name, result in part.maps.items()} == {
        "self": (7, 4, 0, 6),
        "fixed output": (4, 0),
    }


def test_one_token_has_no_map_across_tokens(tiny_trace: tlc.Trace) -> None:
    portrait = tlc.portrait(tlc.trace(tiny_trace.model, [5]), k=(2,))
    assert portrait.tokens == {}
    with pytest.raises(ValueError, match="use a longer prompt"):
        tlc.portraits.token_portrait(portrait.trace, k=2)


def test_what_fits_and_a_short_repr(tiny_trace: tlc.Trace) -> None:
    with pytest.warns(UserWarning, match="k = 32 is used in place of the default"):
        measured = tlc.portrait(tiny_trace)
    assert measured.ks == (10, 30, 32)
    part = tlc.portraits.token_portrait(tiny_trace, k=2)
    for text in map(repr, (measured, measured.influence, measured.depth, part)):
        assert len(text) < 3 * 100
        assert "\n" not in text


def test_bad_input_says_what_was_wanted(tiny_trace: tlc.Trace) -> None:
    for call, message in (
        (lambda: tlc.portrait(tiny_trace, k=()), "`k` is empty"),
        (lambda: tlc.portrait(tiny_trace, k=(33,)), r"`k` must lie in \[1, 32\]"),
        (lambda: tlc.portrait(tiny_trace, k=(4,), layer=2), "`layer` must lie in"),
        (
            lambda: tlc.portrait(tiny_trace, k=(4,), other_layer=-3),
            "`other_layer` must lie in",
        ),
        (
            lambda: tlc.portrait(tiny_trace, k=(4,), input_position=8),
            "`input_position` must lie in",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_each_jacobian_is_computed_once(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jacobians that are computed together are counted as one computation.

    What a token does to itself is computed alone for the maps, and once more among all
    that act on it: rounding depends on which are computed together.
    """
    computations: Counter[tuple[int, tuple[int, ...], int]] = Counter()
    compute = BlockFunction.jacobians

    def counted(
        block: BlockFunction, inputs: list[int], output: int, *options: object
    ) -> object:
        computations[block.layer, tuple(inputs), output] += 1
        return compute(block, inputs, output, *options)

    monkeypatch.setattr(BlockFunction, "jacobians", counted)
    tlc.portrait(tiny_trace, k=(4, 8), position=5)
    tokens = range(len(tiny.TOKENS))
    layers = range(tiny.N_LAYERS)
    own = {(layer, (t,), t) for layer in layers for t in tokens}
    from_the_first = {(layer, (0,), t) for layer in layers for t in tokens}
    on_the_measured = {(layer, tuple(range(6)), 5) for layer in layers}
    assert computations == Counter(own | from_the_first | on_the_measured)


def test_a_matrix_is_decomposed_once_for_all_that_read_its_vectors(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column of a map is, and each layer of the map across depth."""
    n_decomposed: list[int] = []
    svd = decomposed.svd

    def counted(J: torch.Tensor, n_triplets: int) -> object:
        n_decomposed.append(len(J))
        return svd(J, n_triplets)

    monkeypatch.setattr(decomposed, "svd", counted)
    portrait = tlc.portrait(tiny_trace, k=(4, 8))
    n_columns = [len(result.col_positions) for result in portrait.tokens.values()]
    assert sum(n_decomposed) == tiny.N_LAYERS + sum(n_columns)


EVERYTHING = {"with_carriers": True, "with_products": True, "decoded_layer": 0}


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_work_of_a_portrait_is_what_its_loops_are(
    short_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    """Each part runs as many loops as were foreseen: of another number the bar would
    show the wrong part of the work.
    """
    foreseen: Counter[str] = Counter()
    run: Counter[str] = Counter()

    class Noted(JoinedLoops):
        def __init__(self, work, progress, description) -> None:
            super().__init__(work, progress, description)
            foreseen.update({name: len(loops) for name, loops in work.items()})

        def part(self, name):
            inner = super().part(name)

            def noted(items):
                run[name] += 1
                return inner(items)

            return noted

    monkeypatch.setattr("tl_coupling.portraits.JoinedLoops", Noted)
    tlc.portrait(short_trace, k=(2,), **asked)
    # Without loops of their own.
    for name in ("decoded", "trajectory"):
        foreseen.pop(name, None)
    assert run == foreseen
    assert set(run) >= {"depth", "tokens", "self", "influence"}


def test_half_of_a_portraits_steps_take_about_half_of_its_time(
    tiny_trace: tlc.Trace,
) -> None:
    """Time left is told from the steps, which are to take about as long each."""

    def ratio() -> float:
        """Return the time that half of the steps say is left, per that which was."""
        # Of this process, which others do not lengthen.
        times: list[float] = []

        def timed(items):
            for item in items:
                times.append(time.process_time())
                yield item
            times.append(time.process_time())

        tlc.portrait(tiny_trace, k=(4, 8), progress=timed)
        half = times[(len(times) - 1) // 2]
        return (half - times[0]) / (times[-1] - half)

    # The first imports and compiles.
    ratio()
    assert 0.5 < statistics.median(ratio() for _ in range(3)) < 2
