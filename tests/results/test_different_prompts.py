"""One prompt is not several: what takes prompts refuses one that comes twice, whatever it
is called, and takes the same prompt of two models.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc
from public_api import public_names
from tl_coupling.results import DifferentPrompts, digest_of

TEXTS = ["w3 w14 w15 w92", "w65 w35 w8 w9", "w9 w7 w93 w2", "w46 w26 w43 w38"]
TWICE = "one prompt is there twice, as "
K = 4
# By the words of a signature that stand for several prompts.
SEVERAL = {"traces", "maps", "prompts", "others", "positions"}


@pytest.fixture(scope="module")
def model(tokenizer_folder) -> nn.Module:
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


class Prompts:
    """Prompts of a model, in the forms that functions take."""

    def __init__(self, model: nn.Module, prompts: Sequence[Any]) -> None:
        self.model = model
        self.given = prompts
        self.texts = [
            prompt if isinstance(prompt, str) else " ".join(f"w{i}" for i in prompt)
            for prompt in prompts
        ]
        self.traces = [tlc.trace(model, prompt) for prompt in prompts]

    @property
    def maps(self) -> list[tlc.CouplingMap]:
        return [tlc.depth_coupling(trace, K) for trace in self.traces]

    @property
    def hf_model(self) -> nn.Module:
        return self.model.original_model


def lens_of(model: nn.Module) -> Any:
    return tlc.trajectories.product_lens([tlc.trace(model, "w1 w2")])


def subspace_of(model: nn.Module) -> Any:
    return tlc.directions.shared_subspace([tlc.trace(model, "w1 w2")], rank=1, k=2)


def coupled_at(prompts: Prompts) -> torch.Tensor:
    """Return mean coupling at one token for each prompt, the last where it is one twice."""
    ids = prompts.traces[0].tokens[None]
    n = len(prompts.given)
    positions = [-1, len(ids[0]) - 1] if len(set(prompts.texts)) < n else range(n)
    network = prompts.hf_model
    return tlc.training.coupling(
        list(network.model.layers),
        lambda: network(ids, use_cache=False),
        K,
        positions=positions,
    )


def survey_of(prompts: Prompts) -> tlc.Survey:
    return tlc.Survey({"tiny": "no/such/model"}, prompts.texts)


CALLS: dict[str, Callable[[Prompts], object]] = {
    "tl_coupling.mean_depth_coupling": lambda p: tlc.mean_depth_coupling(
        iter(p.traces), K
    ),
    "tl_coupling.mean_of_maps": lambda p: tlc.mean_of_maps(p.maps),
    "tl_coupling.comparisons.MeanCouplingMap": lambda p: (
        tlc.comparisons.MeanCouplingMap.over(iter(p.maps))
    ),
    "tl_coupling.compare": lambda p: tlc.compare(p.maps, p.maps),
    "tl_coupling.prompt_coupling": lambda p: tlc.prompt_coupling(p.traces, k=K),
    "tl_coupling.measures.stream_metric": lambda p: tlc.measures.stream_metric(
        p.traces
    ),
    "tl_coupling.trajectories.product_lens": lambda p: tlc.trajectories.product_lens(
        p.traces
    ),
    "tl_coupling.trajectories.lens_audit": lambda p: tlc.trajectories.lens_audit(
        lens_of(p.model), p.traces
    ),
    "tl_coupling.directions.shared_subspace": lambda p: tlc.directions.shared_subspace(
        p.traces, rank=1, k=2
    ),
    "tl_coupling.directions.decode": lambda p: tlc.directions.decode(
        p.traces[0], 1, k=1, n_draws=1, others=p.traces[1:]
    ),
    "tl_coupling.directions.ablate": lambda p: tlc.directions.ablate(
        p.model, p.texts, subspace_of(p.model), n_draws=1
    ),
    "tl_coupling.directions.rotate": lambda p: tlc.directions.rotate(
        p.model, p.texts, n_draws=1
    ),
    "tl_coupling.directions.steer": lambda p: tlc.directions.steer(
        p.model,
        p.texts,
        tlc.directions.directions_of(p.traces[0], 1, k=1),
        [0.1],
        n_draws=1,
    ),
    "tl_coupling.redundancy.layer_redundancy": lambda p: (
        tlc.redundancy.layer_redundancy(p.model, p.texts, k=[2])
    ),
    "tl_coupling.surveys.measure_prompts": lambda p: tlc.surveys.measure_prompts(
        p.model, p.texts, tlc.Settings(k=(2,))
    ),
    "tl_coupling.Survey": survey_of,
    "tl_coupling.training.CouplingCallback": lambda p: tlc.training.CouplingCallback(
        p.texts, k=K
    ),
    "tl_coupling.training.coupling": coupled_at,
}
NOT_SEVERAL = {
    "tl_coupling.checkpoint_sweep": "makes a Survey of its prompts",
    "tl_coupling.surveys.precision_sweep": "makes a Survey of its prompts",
    "tl_coupling.prompts.prompts_per_task": "draws, and takes no mean",
    "tl_coupling.training.jacobians": "is what training.coupling calls",
    "tl_coupling.comparisons.layer_pair": "of tokens of one prompt, each once",
    "tl_coupling.context_coupling": "of tokens of one prompt, each once",
    "tl_coupling.self_coupling": "of tokens of one prompt, each once",
    "tl_coupling.portraits.token_portrait": "of tokens of one prompt, each once",
    "tl_coupling.portraits.TokenPortrait": "holds maps of one prompt",
    "tl_coupling.comparisons.PromptCoupling": "is what prompt_coupling makes",
    "tl_coupling.directions.Ablation": "is what directions.ablate makes",
    "tl_coupling.directions.Rotation": "is what directions.rotate makes",
    "tl_coupling.directions.Steering": "is what directions.steer makes",
    "tl_coupling.plot_coupling_matrices": "draws a part of a result",
    "tl_coupling.plot_trajectories": "draws a part of a result",
    "tl_coupling.plots.plot_trajectory_metrics": "draws a part of a result",
    "tl_coupling.interactive.show_layers_by_token": "draws a part of a result",
}


def test_every_function_of_several_prompts_is_here() -> None:
    taking = {
        name
        for name, public in public_names().items()
        if not (inspect.isclass(public) and issubclass(public, Exception))
        and SEVERAL & inspect.signature(public).parameters.keys()
    }
    assert taking <= CALLS.keys() | NOT_SEVERAL.keys()
    assert not CALLS.keys() & NOT_SEVERAL.keys()
    assert CALLS.keys() | NOT_SEVERAL.keys() <= public_names().keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_prompt_twice_is_refused_in_a_line(model, name, as_a_user) -> None:
    with pytest.raises(ValueError, match=r"twice") as error:
        CALLS[name](Prompts(model, [*TEXTS[:2], TEXTS[0]]))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_different_prompts_are_taken(model, name, as_a_user) -> None:
    CALLS[name](Prompts(model, TEXTS))


@pytest.mark.parametrize(
    "name",
    [
        "tl_coupling.mean_depth_coupling",
        "tl_coupling.mean_of_maps",
        "tl_coupling.compare",
        "tl_coupling.measures.stream_metric",
        "tl_coupling.trajectories.product_lens",
        "tl_coupling.trajectories.lens_audit",
    ],
)
def test_token_ids_and_their_text_are_one_prompt(model, name) -> None:
    with pytest.raises(ValueError, match=TWICE):
        CALLS[name](Prompts(model, [TEXTS[0], TEXTS[1], [3, 14, 15, 92]]))


# --- the digest


def test_a_trace_says_what_entered_its_blocks(model) -> None:
    first, again = (tlc.trace(model, text) for text in (TEXTS[0], [3, 14, 15, 92]))
    assert first.provenance["input_digest"] == digest_of(first.residual[0])
    assert again.provenance["input_digest"] == first.provenance["input_digest"]
    in_float64 = tlc.trace(model, TEXTS[0], dtype=torch.float64)
    assert in_float64.provenance["input_digest"] == first.provenance["input_digest"]


def network_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, norm_first=True) for _ in range(3)]
    return nn.Sequential(*layers).eval()


def traced(network: nn.Sequential, x: torch.Tensor) -> tlc.Trace:
    return tlc.trace_modules(list(network), lambda: network(x))


def test_inputs_of_modules_are_told_by_what_entered_the_first() -> None:
    network = network_of(0)
    x, y = torch.randn(2, 5, 1, 16).unbind()
    same = [traced(network, x), traced(network, x.clone())]
    maps = [tlc.depth_coupling(trace, K) for trace in same]
    for repeated in (
        lambda: tlc.mean_depth_coupling(same, K),
        lambda: tlc.mean_of_maps(maps),
        lambda: tlc.measures.stream_metric(same),
    ):
        with pytest.raises(ValueError, match=TWICE):
            repeated()
    mean = tlc.mean_depth_coupling([same[0], traced(network, y)], K)
    assert math.isfinite(mean.interval()[0])


def test_a_map_that_says_nothing_is_told_by_its_numbers(model) -> None:
    J = [tlc.block_jacobians(tlc.trace(model, text)) for text in TEXTS[:2]]
    maps = [tlc.comparisons.jacobian_coupling(of_prompt, K) for of_prompt in J]
    assert tlc.mean_of_maps(maps).n_prompts == 2
    with pytest.raises(ValueError, match=TWICE + "'0' and '1'"):
        tlc.mean_of_maps([maps[0], maps[0]])


def test_linear_blocks_are_alike_on_different_prompts() -> None:
    """Equal maps are no reason to take two prompts for one."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    torch.manual_seed(0)
    network = nn.Sequential(*[Linear() for _ in range(3)])
    traces = [traced(network, x) for x in torch.randn(2, 5, 1, 16)]
    maps = [tlc.depth_coupling(trace, K) for trace in traces]
    torch.testing.assert_close(maps[0].matrices.abs(), maps[1].matrices.abs())
    assert tlc.mean_of_maps(maps).n_prompts == 2


def test_saved_maps_of_one_prompt_are_one(model, tmp_path) -> None:
    """Also those that earlier versions saved, without a digest of the input."""
    result = tlc.depth_coupling(tlc.trace(model, TEXTS[0]), K)
    paths = [result.save(tmp_path / name) for name in ("a.nc", "b.nc")]
    with pytest.raises(ValueError, match=TWICE):
        tlc.mean_of_maps(map(tlc.CouplingMap.load, paths))
    facts = {
        name: fact for name, fact in result.provenance.items() if name != "input_digest"
    }
    earlier = dataclasses.replace(result, provenance=facts)
    with pytest.raises(ValueError, match=TWICE):
        tlc.mean_of_maps([earlier, result])


def test_one_prompt_of_two_models_is_not_twice(model, tokenizer_folder) -> None:
    """Each side of a comparison has it once."""
    other = tiny.bridge(tiny.huggingface_model("llama", 1), tokenizer_folder)
    maps = [Prompts(of, TEXTS[:2]).maps for of in (model, other)]
    assert tlc.compare(*maps).paired
    with pytest.raises(ValueError, match="of the same weights_digest"):
        tlc.mean_of_maps([maps[0][0], maps[1][0]])


def test_one_prompt_at_two_tokens_is_not_twice_in_a_comparison(model) -> None:
    trace = tlc.trace(model, TEXTS[0])
    maps = [tlc.depth_coupling(trace, K, position) for position in (1, 2)]
    with pytest.warns(UserWarning, match="several positions"):
        assert tlc.compare(maps, maps).n_prompts == (2, 2)


def test_a_callback_finds_two_texts_that_are_one_prompt(
    model, tokenizer_folder
) -> None:
    """When it reads them: before the first step of training."""
    from transformers import PreTrainedTokenizerFast

    callback = tlc.training.CouplingCallback(
        ["w1 w2 w3", "w1  w2  w3"],
        k=K,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tokenizer_folder),
    )
    with pytest.raises(ValueError, match=TWICE + "'w1 w2 w3' and 'w1  w2  w3'"):
        callback.step(0, tiny.huggingface_model("llama").eval())


def test_a_name_is_a_prompt_where_nothing_else_is_known() -> None:
    different = DifferentPrompts("prompts")
    different.add({"prompt": "a"}, "first")
    different.add({"image": {"name": "a"}}, "an image")
    # Two images of one name.
    different.add({"image": {"name": "a", "pixels_sha256": "1"}}, "another")
    different.add({"prompt": "a", "tokens": [1]}, "of known tokens")
    with pytest.raises(ValueError, match=TWICE + "'first' and 'second'"):
        different.add({"prompt": "a"}, "second")
    assert len(different) == 4


def test_what_a_model_is_called_with_beside_a_prompt_is_of_the_prompt(model) -> None:
    ids = torch.tensor([tiny.TOKENS[:4]])
    plain = tlc.trace(model, {"input_ids": ids})
    shifted = {"input_ids": ids, "position_ids": torch.tensor([[0, 2, 4, 6]])}
    maps = [tlc.depth_coupling(t, K) for t in (plain, tlc.trace(model, shifted))]
    assert tlc.mean_of_maps(maps).n_prompts == 2
    with pytest.raises(ValueError, match=TWICE):
        tlc.mean_of_maps([maps[1], tlc.depth_coupling(tlc.trace(model, shifted), K)])
