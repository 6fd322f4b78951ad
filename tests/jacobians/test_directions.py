"""What a block reads and writes, by hooks of TransformerLens on its whole forward pass."""

import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.jacobians import BlockDirections, block_directions

pytestmark = pytest.mark.both_lines


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.mark.parametrize("layer", [0, -1])
def test_hook_points_are_where_the_directions_act(model, layer):
    """Pushed along `read` at one hook point, the stream moves along `write` at the other."""
    trace = tlc.trace(model, tiny.TOKENS)
    directions = block_directions(trace, layer, k=3, position=5)
    tokens = trace.tokens[None]
    epsilon = 1e-2

    def written(push: torch.Tensor) -> torch.Tensor:
        seen = {}

        def add(stream, hook):
            stream = stream.clone()
            stream[0, 5] += push
            return stream

        def see(stream, hook):
            seen["stream"] = stream[0, 5].detach().clone()

        hooks = [
            (directions.read_hook_point, add),
            (directions.write_hook_point, see),
        ]
        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=hooks)
        return seen["stream"]

    for i in range(3):
        push = epsilon * directions.read[:, i]
        # What the stream carries past the block is the push itself.
        step = (written(push) - written(-push)) / (2 * epsilon) - directions.read[:, i]
        expected = directions.gains[i] * directions.write[:, i]
        torch.testing.assert_close(step, expected, atol=2e-3, rtol=1e-2)


def test_directions_are_saved_and_refused(model, tmp_path):
    trace = tlc.trace(model, tiny.TOKENS)
    directions = block_directions(trace, 1, k=2)
    loaded = BlockDirections.load(directions.save(tmp_path / "directions.nc"))
    torch.testing.assert_close(loaded.read, directions.read)
    assert loaded.write_hook_point == "blocks.1.hook_resid_post"
    assert "read at blocks.1.hook_resid_pre" in repr(loaded)
    with pytest.raises(ValueError, match="k"):
        block_directions(trace, 1, k=33)


def test_a_factored_matrix_reads_and_writes_as_its_spectrum():
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    spectrum = tlc.svd(J, 3)
    factored = spectrum.factored()
    x = torch.randn(6, generator=generator, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(J)
    expected = (U[..., :3] * S[:, None, :3]) @ Vh[:, :3] @ x
    torch.testing.assert_close((x @ factored.AB), expected)
    torch.testing.assert_close(
        factored.AB, ((U[..., :3] * S[:, None, :3]) @ Vh[:, :3]).mT
    )
    # TransformerLens's U is what is read, its V what is written.
    their_U, their_S, their_V = factored.svd()
    torch.testing.assert_close(their_S, spectrum.S)
    reads = (their_U.mT @ spectrum.read).abs()
    writes = (their_V.mT @ spectrum.write).abs()
    ones = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    torch.testing.assert_close(reads, ones)
    torch.testing.assert_close(writes, ones)
