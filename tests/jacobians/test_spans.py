"""Layers of one prompt that are decomposed at once: the same numbers, remarks and
errors as one after the other, and Jacobians that this process can read.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.jacobians import each_once
from tl_coupling.jacobians.connections import Connection
from tl_coupling.jacobians.spans import _of_whole_layers
from tl_coupling.spectra import SimilarRanks

HERE = os.getpid()
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux"),
]
TEXT = "w3 w14 w15 w92"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pids(monkeypatch, two_threads) -> list[int]:
    """Small Jacobians are worth a fork; whence the SVDs of this process are called."""
    monkeypatch.setattr("tl_coupling.jacobians.spans._LEAST_WORK", 1)
    known: list[int] = []

    def svd(*args: object) -> tlc.spectra.Spectrum:
        known.append(os.getpid())
        return tlc.svd(*args)

    monkeypatch.setattr("tl_coupling.jacobians.decomposed.svd", svd)
    return known


def bridge(architecture: str, folder: str, **options: int) -> torch.nn.Module:
    return tiny.bridge(tiny.huggingface_model(architecture, **options), folder)


def one_by_one(monkeypatch, trace: tlc.Trace, **options: object) -> tlc.CouplingMap:
    with monkeypatch.context() as patched:
        patched.setattr("tl_coupling.jacobians.spans._LEAST_WORK", 2**60)
        return tlc.depth_coupling(trace, 4, **options)


@pytest.mark.parametrize("architecture", ["gpt_neox", "bert"])
def test_numbers_and_remarks_are_those_of_one_by_one(
    architecture, tokenizer_folder, pids, monkeypatch
):
    model = bridge(architecture, tokenizer_folder)
    for point in model.hook_dict.values():
        # TransformerLens's own hooks in BERT are told from a user's by nothing.
        point.fwd_hooks.clear()
    with warnings.catch_warnings(record=True) as of_forks:
        warnings.simplefilter("always")
        at_once = tlc.depth_coupling(tlc.trace(model, TEXT), 4)
    assert not pids, "Jacobians were decomposed in this process"
    assert len(of_forks) == (architecture == "bert")
    with warnings.catch_warnings(record=True) as of_here:
        warnings.simplefilter("always")
        expected = one_by_one(monkeypatch, tlc.trace(model, TEXT))
    assert set(pids) == {HERE}
    torch.testing.assert_close(at_once.matrices, expected.matrices)
    torch.testing.assert_close(at_once.singular_values, expected.singular_values)
    torch.testing.assert_close(at_once.frobenius_norms, expected.frobenius_norms)
    assert at_once.provenance == expected.provenance
    assert [str(w.message) for w in of_forks] == [str(w.message) for w in of_here]
    if architecture == "bert":
        assert at_once.provenance["normalising_layers"] == [0, 1]
        assert len(at_once.provenance["remarks"]) == 2


def test_a_bar_counts_layers(tokenizer_folder, pids):
    trace = tlc.trace(bridge("gpt_neox", tokenizer_folder), TEXT)
    counted = []

    def progress(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            counted.append(item)
            yield item

    tlc.depth_coupling(trace, 4, progress=progress)
    assert len(counted) == trace.n_layers
    assert not pids


def test_the_error_is_the_one_of_one_by_one(tokenizer_folder, pids):
    model = bridge("gpt_neox", tokenizer_folder)
    trace = tlc.trace(model, TEXT)
    with torch.no_grad():
        next(model.blocks[1].parameters()).add_(1)
    with pytest.raises(tlc.gradients.StepError, match="block 1 is not the function"):
        tlc.depth_coupling(trace, 4)


def test_forks_are_not_used_where_something_would_be_lost(
    tokenizer_folder, pids, monkeypatch
):
    model = bridge("gpt_neox", tokenizer_folder)
    trace = tlc.trace(model, TEXT)
    tlc.depth_coupling(trace, 4, max_memory="1 GB")
    assert pids.pop() == HERE
    connections = [Connection(layer, 3, 3, 3) for layer in range(trace.n_layers)]
    with each_once(trace, connections):
        tlc.depth_coupling(trace, 4)
    assert pids.pop() == HERE
    torch.set_num_threads(1)
    tlc.depth_coupling(trace, 4)
    assert pids.pop() == HERE
    torch.set_num_threads(2)
    hook = model.blocks[0].register_forward_hook(lambda *_: None)
    tlc.depth_coupling(tlc.trace(model, TEXT), 4)
    assert pids.pop() == HERE
    hook.remove()
    pids.clear()
    tlc.depth_coupling(trace, 4)
    assert not pids


@pytest.mark.parametrize("is_held", [False, True])
def test_influence_of_forks_is_that_of_one_by_one(
    is_held, tokenizer_folder, two_threads, monkeypatch
):
    trace = tlc.trace(bridge("gpt_neox", tokenizer_folder), TEXT)
    known: list[int] = []

    def ranks() -> SimilarRanks:
        known.append(os.getpid())
        return SimilarRanks()

    def influence(least_work: int) -> tlc.influence.Influence:
        name = "tl_coupling.jacobians.spans._LEAST_WORK"
        monkeypatch.setattr(name, least_work)
        return tlc.cross_token_influence(trace)

    monkeypatch.setattr("tl_coupling.jacobians.decomposed.SimilarRanks", ranks)
    expected = influence(2**60)
    assert known == [HERE]
    sources = [Connection(1, t, 3, t) for t in range(4)]
    with each_once(trace, sources) if is_held else nullcontext():
        if is_held:
            tlc.context_coupling(trace, 0, 1, fixed="output", position=3, k=4)
        of_forks = influence(1)
    assert known == [HERE], "Jacobians were decomposed in this process"
    for name in tlc.influence.INFLUENCE_MEASURES:
        torch.testing.assert_close(getattr(of_forks, name), getattr(expected, name))
    assert of_forks.provenance == expected.provenance


@pytest.mark.parametrize("most", [1, 2, 3, 10])
@pytest.mark.parametrize("n_tokens_of_layers", [[1] * 7, [3, 1, 2], [5, 5], [4]])
def test_spans_hold_whole_layers(n_tokens_of_layers, most):
    connections = [
        Connection(layer, t, t, t)
        for layer, n_tokens in enumerate(n_tokens_of_layers)
        for t in range(n_tokens)
    ]
    spans = _of_whole_layers(connections, most)
    assert [i for span in spans for i in span] == list(range(len(connections)))
    layers = [{connections[i].layer for i in span} for span in spans]
    for layer in range(len(n_tokens_of_layers)):
        assert sum(layer in of_span for of_span in layers) == 1
    n_of_each = [len(of_span) for of_span in layers]
    assert len(spans) == min(most, len(n_tokens_of_layers))
    assert max(n_of_each) - min(n_of_each) <= 1
