"""Two sets of maps: the difference of what each map says by itself."""

import re

import numpy as np
import pytest
import torch
from scipy import stats

import tiny
import tl_coupling as tlc
from tl_coupling.comparisons import Comparison, CouplingMap, MeanCouplingMap

K = 5
PROMPTS = ["w3 w14 w15 w92", "w65 w35", "w89 w79 w3 w2 w3 w8"]
OTHERS = ["w46 w26 w43", "w38 w32 w79 w5"]


def doubled(stream: torch.Tensor, hook: object) -> torch.Tensor:
    return 2 * stream


HOOKS = [("blocks.0.hook_out", doubled)]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(
        tiny.huggingface_model("gpt_neox", num_hidden_layers=3), tokenizer_folder
    )


def maps_of(model: torch.nn.Module, prompts: list[str]) -> list[CouplingMap]:
    return [tlc.depth_coupling(tlc.trace(model, prompt), K) for prompt in prompts]


@pytest.fixture(scope="module")
def maps(model) -> list[CouplingMap]:
    return maps_of(model, PROMPTS)


@pytest.fixture(scope="module")
def hooked(model) -> list[CouplingMap]:
    with (
        model.hooks(fwd_hooks=HOOKS),
        pytest.warns(UserWarning, match="the block multiplies the stream by 2"),
    ):
        return maps_of(model, PROMPTS)


def stacked(maps: list[CouplingMap], k: int) -> np.ndarray:
    return np.stack([result.coupling(k).double().numpy() for result in maps])


@pytest.mark.parametrize("k", [2, K])
def test_a_hook_is_compared_prompt_by_prompt(maps, hooked, k):
    comparison = tlc.compare(maps, hooked, k)
    assert comparison.paired
    assert comparison.n_prompts == (3, 3)
    first, second = stacked(maps, k), stacked(hooked, k)
    theirs = stats.ttest_rel(second, first)
    ends = theirs.confidence_interval(0.95)
    different = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(comparison.values[0], first.mean(0), rtol=1e-6)
    np.testing.assert_allclose(comparison.differences, (second - first).mean(0))
    for end, expected in zip(comparison.intervals.numpy(), ends, strict=True):
        np.testing.assert_allclose(end[different], expected[different], rtol=1e-6)
    of_means = stats.ttest_rel(
        second[:, different].mean(1), first[:, different].mean(1)
    )
    low, high = of_means.confidence_interval(0.95)
    # Means of maps are taken in float32.
    assert comparison.interval == pytest.approx((low, high), abs=1e-6)
    assert comparison.degrees_of_freedom == 2
    assert comparison.mean_difference != 0
    # TransformerLens has two names for it, and this is the one that is typed most.
    assert comparison.names[1].endswith("(hooks on blocks.0.hook_resid_post)")
    smallest = np.nanmin(theirs.pvalue[different])
    assert float(comparison.corrected_p.nan_to_num(2).min()) == pytest.approx(
        min(1, 6 * smallest), rel=1e-6
    )
    assert comparison.corrected_p.diagonal().isnan().all()


def test_a_model_does_not_differ_from_itself(maps):
    comparison = tlc.compare(iter(maps), maps)
    assert not comparison.differences.any()
    assert comparison.interval == (0, 0)
    assert not comparison.differing().any()


def test_other_prompts_are_not_paired(model, maps):
    others = maps_of(model, OTHERS)
    comparison = tlc.compare(maps, others)
    assert not comparison.paired
    assert comparison.n_prompts == (3, 2)
    different = ~np.eye(3, dtype=bool)
    first, second = stacked(maps, K), stacked(others, K)
    theirs = stats.ttest_ind(
        second[:, different].mean(1), first[:, different].mean(1), equal_var=False
    )
    assert comparison.mean_p == pytest.approx(theirs.pvalue, rel=1e-3)
    assert comparison.degrees_of_freedom == pytest.approx(theirs.df, rel=1e-3)


def test_a_planted_difference_is_found(model):
    """Forty prompts of two kinds of map, of which one pair alone is moved."""
    result = tlc.depth_coupling(tlc.trace(model, PROMPTS[0]), K)
    generator = torch.Generator().manual_seed(0)

    def noisy(prompt: int, moved: float) -> CouplingMap:
        noise = torch.randn(result.matrices.shape, generator=generator)
        matrices = result.matrices + 0.05 * result.matrices.abs().mean() * noise
        matrices[2, 0] += moved * torch.diag_embed(matrices[2, 0].diagonal())
        tokens = {"tokens": [prompt], "input_digest": str(prompt)}
        provenance = result.provenance | tokens | {"prompt": str(prompt)}
        return CouplingMap(
            **vars(result) | {"matrices": matrices, "provenance": provenance}
        )

    first = [noisy(prompt, 0) for prompt in range(40)]
    second = [noisy(prompt, 1) for prompt in range(40)]
    differing = tlc.compare(first, second).differing()
    assert differing.nonzero().tolist() == [[2, 0]]


def test_one_map_beside_another_has_no_interval(maps, hooked):
    with pytest.warns(UserWarning, match="single samples .* has no interval"):
        comparison = tlc.compare(maps[0], hooked[0])
    assert "no interval of a single prompt" in repr(comparison)
    assert "nan" not in repr(comparison)
    assert comparison.n_prompts == (1, 1)
    assert np.isnan(comparison.interval).all()
    assert not comparison.differing().any()
    expected = hooked[0].mean() - maps[0].mean()
    assert comparison.mean_difference == pytest.approx(expected)


def test_it_is_saved_and_read_again(maps, hooked, tmp_path):
    comparison = tlc.compare(maps, hooked)
    again = Comparison.load(comparison.save(tmp_path / "comparison.nc"))
    assert repr(again) == repr(comparison)
    assert again.paired is True
    torch.testing.assert_close(again.intervals, comparison.intervals, equal_nan=True)


def test_what_cannot_be_compared_is_refused(model, maps, tokenizer_folder):
    with pytest.raises(ValueError, match="share 2 of 3 and 2 prompts"):
        tlc.compare(maps, maps[1:])
    with pytest.raises(ValueError, match="share 3 of 3 and 3 prompts, or have them in"):
        tlc.compare(maps, maps[::-1])
    with pytest.raises(ValueError, match="`a` is empty"):
        tlc.compare([], maps)
    with pytest.raises(ValueError, match="`b` is a mean over prompts"):
        tlc.compare(maps, MeanCouplingMap.over(maps))
    with pytest.raises(
        TypeError, match=r"`b` must be .* got 3: a coupling map, or maps of several"
    ):
        tlc.compare(maps, 3)
    with pytest.raises(TypeError, match=re.escape("got a str in it")):
        tlc.compare(maps, ["map"])
    deeper = tiny.bridge(tiny.huggingface_model("gpt_neox"), tokenizer_folder)
    with pytest.raises(
        ValueError, match=r"same row_layers, got \(0, 1, 2\) and \(0, 1\)"
    ):
        tlc.compare(maps, maps_of(deeper, PROMPTS))
    tokens = tlc.self_coupling(tlc.trace(model, PROMPTS[0]), 0, k=K)
    with pytest.raises(ValueError, match=r"kind 'depth' .* got one of kind 'self'"):
        tlc.compare(tokens, maps)


def test_the_picture_has_both_maps_on_one_scale(maps, hooked):
    comparison = tlc.compare(maps, hooked, 2)
    fig = tlc.plot_comparison(comparison)
    first, second, difference = (ax.images[0] for ax in fig.axes[:3])
    assert first.get_clim() == second.get_clim()
    low, high = difference.get_clim()
    assert low == -high
    own = np.eye(3, dtype=bool)
    drawn = np.ma.filled(difference.get_array().astype(float), np.nan)
    np.testing.assert_allclose(drawn[~own], comparison.differences.numpy()[~own])
    assert np.isnan(drawn[own]).all()
    mean = f"{comparison.mean_difference:+.3f}".replace("-", "−")
    assert mean in fig.get_suptitle()
    assert "dots: 0 of 6 pairs differ" in fig.get_suptitle()
    assert {bool(ax.patch.get_hatch()) for ax in fig.axes[:3]} == {True}


def test_two_positions_of_the_same_prompts_are_told_apart(model):
    sides = [
        [tlc.depth_coupling(tlc.trace(model, text), K, position) for text in PROMPTS]
        for position in (0, 1)
    ]
    comparison = tlc.compare(*sides)
    assert comparison.paired
    first, second = comparison.names
    assert first.endswith("(token 0)")
    assert second.endswith("(token 1)")


def at_positions(model, text: str, positions: list[int]) -> list[CouplingMap]:
    trace = tlc.trace(model, text)
    return [tlc.depth_coupling(trace, K, position) for position in positions]


def test_several_positions_of_a_prompt_are_paired_by_their_positions(model, hooked):
    text = PROMPTS[2]
    a = at_positions(model, text, [1, 3])
    with (
        model.hooks(fwd_hooks=HOOKS),
        pytest.warns(UserWarning, match="the block multiplies the stream by 2"),
    ):
        b = at_positions(model, text, [1, 3])
    with pytest.warns(
        UserWarning, match="several positions, which are not independent"
    ):
        comparison = tlc.compare(a, b)
    assert comparison.paired
    expected = stats.ttest_rel([x.mean() for x in b], [x.mean() for x in a])
    assert comparison.mean_p == pytest.approx(expected.pvalue, rel=1e-3)


@pytest.mark.parametrize("other", [[3, 1], [0, 2], [1, 2], [1], [1, 3, 4]])
def test_other_positions_of_a_prompt_are_not_its_pairs(model, other):
    text = PROMPTS[2]
    a = at_positions(model, text, [1, 3])
    with pytest.raises(ValueError, match="in another order or at other positions"):
        tlc.compare(a, at_positions(model, text, other))


def test_a_side_is_of_one_model(model, maps, hooked, tokenizer_folder):
    other = tiny.bridge(
        tiny.huggingface_model("gpt_neox", seed=1, num_hidden_layers=3),
        tokenizer_folder,
    )
    mixed = [maps[0], *maps_of(other, PROMPTS[1:])]
    with pytest.raises(ValueError, match=r"`a` must be of one model.* weights_digest"):
        tlc.compare(mixed, maps)
    with pytest.raises(ValueError, match="`b` must be of one model"):
        tlc.compare(maps, mixed)
    with pytest.raises(ValueError, match=r"same hooks, got \[\] and \['blocks.0"):
        tlc.compare([maps[0], *hooked[1:]], maps)
    normed = [
        tlc.depth_coupling(tlc.trace(model, text, final_norm=True), K)
        for text in PROMPTS[1:]
    ]
    with pytest.raises(ValueError, match="same final_norm, got False and True"):
        tlc.compare([maps[0], *normed], maps)
    # Results of earlier versions, and of streamed models, do not know their weights.
    provenance = maps[0].provenance | {"weights_digest": None}
    old = CouplingMap(**vars(maps[0]) | {"provenance": provenance})
    assert tlc.compare([old, *maps[1:]], hooked).paired


def test_a_side_is_of_one_part_of_the_blocks(model):
    parts = ["mlp_out", "attn_out"]
    a = [
        tlc.comparisons.part_coupling(tlc.trace(model, text), part, K)
        for text, part in zip(PROMPTS, parts, strict=False)
    ]
    with pytest.raises(ValueError, match="same part, got 'mlp_out' and 'attn_out'"):
        tlc.compare(a, a)


def test_a_prompt_counts_once(maps):
    with pytest.raises(
        ValueError, match=r"in `a` one prompt is there twice, as 'w3 .*': give each"
    ):
        tlc.compare([maps[0], maps[0]], maps)


def test_maps_that_do_not_say_what_they_are_of(maps, hooked):
    def unnamed(result: CouplingMap) -> CouplingMap:
        provenance = {"model": result.provenance["model"]}
        return CouplingMap(**vars(result) | {"provenance": provenance})

    sides = [unnamed(result) for result in maps], [unnamed(result) for result in hooked]
    with pytest.raises(ValueError, match="say whether they are `paired`"):
        tlc.compare(*sides)
    paired = tlc.compare(*sides, paired=True)
    assert paired.interval == tlc.compare(maps, hooked).interval
    assert not tlc.compare(*sides, paired=False).paired
    with pytest.raises(ValueError, match="as many on both sides, got 3 and 2"):
        tlc.compare(sides[0], sides[1][:2], paired=True)


def test_k_is_that_of_the_first_map(model, maps):
    wider = [tlc.depth_coupling(tlc.trace(model, text), K + 1) for text in PROMPTS]
    assert tlc.compare(maps, wider).k == K
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 5\]"):
        tlc.compare(wider, maps)
