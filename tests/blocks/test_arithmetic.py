"""The state in which blocks are evaluated: precision, threads, interrupts; and that it
is gone afterwards.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc
from attack.interrupts import state_of
from tl_coupling.blocks.arithmetic import exact_arithmetic

pytestmark = pytest.mark.both_lines

LAST = 7
CPU = torch.device("cpu")


@pytest.fixture
def model(tokenizer_folder: Path) -> nn.Module:
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


# Precision


def test_switches_are_off_inside_and_as_before_outside() -> None:
    original = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            with exact_arithmetic(CPU):
                assert not torch.is_autocast_enabled("cpu")
                assert not torch.is_inference_mode_enabled()
                assert torch.backends.cudnn.conv.fp32_precision == "ieee"
                assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
                a = torch.randn(64, 64)
                torch.testing.assert_close(
                    (a @ a).double(), a.double() @ a.double(), rtol=1e-4, atol=1e-4
                )
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(original)


def test_a_trace_made_in_inference_mode_can_be_differentiated(model: nn.Module) -> None:
    with torch.inference_mode():
        trace = tlc.trace(model, tiny.TOKENS)
    assert torch.equal(
        tlc.block_jacobian(trace, 1),
        tlc.block_jacobian(tlc.trace(model, tiny.TOKENS), 1),
    )


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt_neox", "qwen3", "gemma2", "phi"]
)
def test_rotary_embeddings_of_a_bfloat16_model_are_made_anew(
    architecture: str, tokenizer_folder: Path
) -> None:
    """They are handed to the blocks in bfloat16; in float32 the block function has them
    unrounded.
    """
    hf_model = tiny.huggingface_model(architecture, dtype=torch.bfloat16)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    X = trace.residual[1][None]
    stream = tiny.layers_of(upcast := hf_model.float())[1].register_forward_pre_hook(
        lambda _, args, kwargs: (
            ((X, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": X})
        ),
        with_kwargs=True,
    )
    for t1, t2 in ((LAST, LAST), (2, 5)):
        expected = tiny.oracle_jacobian(upcast, tiny.TOKENS, 1, t1, t2)
        J = tlc.block_jacobian(trace, 1, input_position=t1, output_position=t2)
        assert float((J - expected).norm()) <= 1e-5 * float(expected.norm())
    stream.remove()
    assert trace.provenance["rounded_arguments"] == []


def test_what_cannot_be_made_anew_is_said(tokenizer_folder: Path) -> None:
    trace = tlc.trace(
        tiny.bridge(
            tiny.huggingface_model("bloom", dtype=torch.bfloat16), tokenizer_folder
        ),
        tiny.TOKENS,
    )
    assert trace.provenance["rounded_arguments"] == ["alibi"]
    assert (
        tlc.trace(trace.model.float(), tiny.TOKENS).provenance["rounded_arguments"]
        == []
    )


def test_a_mixture_in_float64(tokenizer_folder: Path) -> None:
    """HuggingFace's grouped experts take no float64; asked for, the model and the
    blocks use the eager ones.
    """
    hf_model = tiny.huggingface_model("mixtral")
    model = tiny.bridge(hf_model, tokenizer_folder)
    used = model.blocks[1].mlp.original_component.experts.config._experts_implementation
    expected = tiny.oracle_jacobian(hf_model, tiny.TOKENS, 1, LAST, LAST)
    J = tlc.block_jacobian(tlc.trace(model, tiny.TOKENS, dtype=torch.float64), 1)
    assert J.dtype == torch.float64
    torch.testing.assert_close(J.float(), expected, rtol=1e-4, atol=1e-5)
    double = tiny.bridge(hf_model.double(), tokenizer_folder)
    J = tlc.block_jacobian(tlc.trace(double, tiny.TOKENS), 1)
    torch.testing.assert_close(J.float(), expected, rtol=1e-4, atol=1e-5)
    assert (
        model.blocks[1].mlp.original_component.experts.config._experts_implementation
        == used
    )


# Threads


def test_threads_that_measure_one_model_get_what_one_alone_gets(
    tokenizer_folder: Path,
) -> None:
    """In bfloat16, so that weights are swapped while blocks are evaluated."""
    model = tiny.bridge(
        tiny.huggingface_model("llama", dtype=torch.bfloat16), tokenizer_folder
    )
    prompts = [[(7 * i + j) % tiny.VOCAB for j in range(8)] for i in range(8)]

    def coupling(tokens: list[int]) -> torch.Tensor:
        return tlc.depth_coupling(tlc.trace(model, tokens), k=4).matrices

    alone = [coupling(tokens) for tokens in prompts]
    original_state = state_of(model)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(coupling, prompts))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert state_of(model) == original_state


# Whatever happens


def test_the_model_and_the_process_are_as_before_after_an_error_anywhere(
    tokenizer_folder: Path,
) -> None:
    """An error at the n-th call of any module, for every n until none comes."""
    model = tiny.bridge(
        tiny.huggingface_model("llama", dtype=torch.bfloat16), tokenizer_folder
    )

    def measured() -> torch.Tensor:
        trace = tlc.trace(model, tiny.TOKENS)
        return tlc.cross_token_influence(trace, 3).frobenius_norm + float(
            tlc.block_jacobian(trace, 1).sum()
        )

    expected = measured()
    module = model.blocks[1].mlp
    failures = 0
    for n in range(1, 500):
        calls = iter(range(n))

        def fail(*_: object, calls=calls) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        handle = module.register_forward_hook(fail)
        original_state = state_of(model)
        try:
            measured()
            break
        except KeyboardInterrupt:
            failures += 1
        finally:
            assert state_of(model) == original_state
            handle.remove()
    assert failures >= 8
    assert torch.equal(measured(), expected)


def test_an_interrupt_at_any_moment_leaves_everything_as_it_was(
    tokenizer_folder: Path,
) -> None:
    """A real signal after random delays; what is measured afterwards is what was
    measured before.
    """
    model = tiny.bridge(
        tiny.huggingface_model("llama", dtype=torch.bfloat16), tokenizer_folder
    )

    def measured() -> torch.Tensor:
        trace = tlc.trace(model, tiny.TOKENS)
        J = tlc.block_jacobian(trace, 1, input_position=2)
        return J + tlc.depth_coupling(trace, k=4).matrices.sum()

    expected, interrupted = measured(), 0
    original_state = state_of(model)
    delays = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 0.05
    for delay in delays.tolist():
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while timer.is_alive():
                measured()
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        assert state_of(model) == original_state
    assert interrupted == len(delays)
    assert torch.equal(measured(), expected)
