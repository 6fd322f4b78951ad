"""Traces of models whose weights stay in their files, beside those in memory."""

from pathlib import Path

import pytest
import torch

import tiny
import tl_coupling as tlc


@pytest.mark.parametrize("final_norm", [False, True])
def test_streams_and_steps_are_those_of_the_model_in_memory(
    folder_model: Path, final_norm: bool
) -> None:
    streamed, in_memory = (
        tlc.trace(
            tlc.load_model(str(folder_model), memory=memory),
            tiny.TOKENS,
            final_norm=final_norm,
        )
        for memory in ("stream", "resident")
    )
    torch.testing.assert_close(streamed.residual, in_memory.residual)
    for block, expected in zip(streamed.blocks, in_memory.blocks, strict=True):
        torch.testing.assert_close(block.X, expected.X)
        torch.testing.assert_close(block.step, expected.step)


def test_looking_at_a_streamed_trace_runs_no_block(folder_model: Path) -> None:
    trace = tlc.trace(tlc.load_model(str(folder_model), memory="stream"), tiny.TOKENS)
    assert "Trace(" in trace._repr_html_()
    assert "residual" not in vars(trace)
