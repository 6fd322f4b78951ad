"""The zoo's own judgement: what it calls wrong, unclear or refused, and that it forgets
no architecture.
"""

import os
import time

import pytest
import torch
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
)

import tl_coupling as tlc
from tl_coupling.blocks import BlockFunction
from zoo import measure, page, run
from zoo.measure import Finding
from zoo.models import buildable
from zoo.registry import NOT_BUILT

pytestmark = pytest.mark.both_lines


def refusal(call) -> Exception:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    return raised.value


def test_every_architecture_of_the_registry_is_built_or_said_why_not() -> None:
    assert not buildable() & NOT_BUILT.keys()
    assert SUPPORTED_ARCHITECTURES.keys() <= buildable() | NOT_BUILT.keys()


def test_a_jacobian_off_by_a_thousandth_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = measure.measure("GPT2LMHeadModel", "float32")
    assert right.verdict == "correct"
    assert right.error < 2e-6

    jacobian = BlockFunction.jacobian

    def off(block, t1: int, t2: int):
        J, way = jacobian(block, t1, t2)
        return J * (1.001 if (block.layer, t1, t2) == (1, 0, 7) else 1), way

    monkeypatch.setattr(BlockFunction, "jacobian", off)
    wrong = measure.measure("GPT2LMHeadModel", "float32")
    assert wrong.verdict == "wrong"
    assert wrong.error == pytest.approx(1e-3, rel=1e-2)
    assert "layer 1, token 0 to 7" in wrong.sentence


def test_only_a_sentence_of_the_library_that_names_the_model_is_a_refusal(
    tiny_trace: tlc.Trace, as_a_user
) -> None:
    ours = refusal(lambda: tlc.block_jacobian(tiny_trace, 9))
    assert measure.judge("LlamaForCausalLM", ours) == Finding(
        "refused", sentence=str(ours)
    )
    of_another_kind = measure.judge("HubertModel", ours)
    assert (
        of_another_kind.verdict,
        "what the model is" in of_another_kind.sentence,
    ) == ("unclear", True)
    raw = refusal(lambda: torch.zeros(2).reshape(2, "x"))
    assert measure.judge("LlamaForCausalLM", raw).verdict == "unclear"
    for text in ("wanted a Bridge, got Bridge", "two\nlines", ""):
        ours.args = (text,)
        assert measure.judge("LlamaForCausalLM", ours).verdict == "unclear"


@pytest.mark.long("starts processes")
def test_a_crash_and_a_hang_end_one_architecture_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake(name: str, _: str) -> Finding:
        if name == "crashes":
            os._exit(3)
        if name == "hangs":
            time.sleep(60)
        return Finding("correct", 0.0)

    monkeypatch.setattr(run, "measure", fake)
    monkeypatch.setattr(run, "TIME_LIMIT", 1.0)
    rows = dict(run.measure_all(["crashes", "fine", "hangs"], jobs=2))
    assert {name: page.verdict(row) for name, row in rows.items()} == {
        "crashes": "unclear",
        "fine": "correct",
        "hangs": "unclear",
    }
    assert "status 3" in rows["crashes"]["float32"]["sentence"]
    assert "1 s" in rows["hangs"]["bfloat16"]["sentence"]
    assert page.failed({"4": rows})
    assert not page.failed({"4": {"fine": rows["fine"]}})
    assert [
        line
        for line in page.page({"4": rows}).splitlines()
        if line.startswith("| fine |")
    ] == ["| fine | correct |  | 0e+00 | 0e+00 | 0e+00 |  |"]
