"""The trajectory of every token through a model, and its blocks as functions along it."""

import html
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.arguments import cached_property, checked, made_by
from tl_coupling.blocks import tails
from tl_coupling.blocks.function import BlockFunction
from tl_coupling.blocks.sweeps import Sweep
from tl_coupling.models import ModelInput, Pixels, TokenIds, facts_of
from tl_coupling.results import (
    SEQUENTIAL,
    ShortTable,
    first_rows,
    plural,
    small_map_html,
)


@made_by("trace(model, prompt)")
@dataclass(frozen=True, eq=False)
class Trace:
    """The trajectory of every token through one model, and `blocks`, the function of
    each layer along it.

    `residual[0]` is what enters block 0, `residual[l + 1]` what leaves block `l`; the
    last entry is normalised if `final_norm`, and the last block function includes that
    norm. `provenance`, how all this was made, is JSON-able.

    `tokens` are token ids, or `None` where the model reads something else; `str_tokens`
    names the tokens: their text, or `cls` and the `row,column` of each patch of an
    image, whose `pixels` are kept.

    Example:
        >>> trace = tlc.trace(model, "w3 w14 w15 w92")
        >>> trace.n_layers, trace.n_pos, trace.d_model, trace.str_tokens
        (2, 4, 32, ('w3', 'w14', 'w15', 'w92'))
    """

    model: nn.Module
    tokens: Int[Tensor, " n_pos"] | None
    str_tokens: tuple[str, ...]
    residual: Float[Tensor, "n_layers_plus_1 n_pos d_model"]
    blocks: Sequence[BlockFunction]
    final_norm: bool
    provenance: dict[str, Any]
    pixels: Float[Tensor, "1 channels height width"] | None = None
    # A `JacobianCache`, of a room above this one, in what `jacobians.caching_trace`
    # returns; a trace that was just made has none.
    jacobian_cache: Any = field(default=None, init=False, repr=False)

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def n_pos(self) -> int:
        """Number of tokens."""
        return self.residual.shape[1]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.residual.shape[2]

    @property
    def is_streamed(self) -> bool:
        """Whether the model's weights stay on disk, and are read block by block."""
        return facts_of(self.model).is_streamed

    @cached_property
    def is_causal(self) -> bool:
        """Whether no token acts on an earlier one, in any block. Costs at most one
        forward pass of all blocks, two for a model in bfloat16 or float16.
        """
        return all(map(_first_row_stays, self.blocks))

    def layer_index(self, layer: int, name: str = "layer") -> int:
        """Return a layer counted from 0; negative ones count from the end."""
        return _index(layer, self.n_layers, name, f"{self.n_layers}-block model")

    def position_index(self, position: int, name: str = "position") -> int:
        """Return a token position counted from 0; negative ones count from the end."""
        return _index(position, self.n_pos, name, f"{self.n_pos}-token prompt")

    @checked
    def logits(
        self, x: Float[Tensor, "*batch d_model"], normalised: bool = False
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Return what the model computes from a residual stream after its last block, or
        after its final norm if `normalised`.

        In float32, or float64 for a model in float64. Of an image classifier, the
        logits of its classes with `x` as the class token.

        Raises:
            ValueError: the model has no logits for every token, or they do not follow
                from what leaves its last block; `normalised`, but the model has no
                final norm; no rows, rows of another width than the model's, or entries
                that are not finite.

        Cost: embedding and unembedding of the rows; one run of the model at the first
        call, two if `normalised`.
        """
        if self._input is None:
            raise ValueError(
                "modules were traced, not a model: it is not known how logits follow "
                "from their stream"
            )
        return tails.logits(self.model, self._input, x, normalised)

    @property
    def _input(self) -> ModelInput | None:
        """What the model ran on; None where modules were traced."""
        # Made anew: a trace keeps no input but what its results name.
        if self.tokens is not None:
            return TokenIds(self.tokens[None])
        if self.pixels is not None:
            return Pixels(self.pixels)
        return None

    def table(self) -> ShortTable:
        """Return a short table of ‖x‖, the norm of each token's residual stream: before
        the first block, halfway, and after the last.

        A notebook shows it, with a small map of all layers.
        """
        norms = self._norms()
        columns: dict[str, Sequence[object]] = {
            "position": range(self.n_pos),
            "token": list(map(repr, self.str_tokens)),
        }
        for layer in sorted({0, self.n_layers // 2, self.n_layers}):
            columns[f"‖x‖ after {layer} blocks"] = norms[layer].tolist()
        title = f"trajectories of {plural(self.n_pos, 'token')}"
        model = self.provenance["model"]
        return first_rows(f"{title}: {model}", columns, long_one="residual")

    def _norms(self) -> Float[Tensor, "n_layers_plus_1 n_pos"]:
        return torch.linalg.vector_norm(self.residual.detach().cpu().double(), dim=-1)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + self._small_picture()

    def _small_picture(self) -> str:
        """Return a map of ‖x‖ as HTML; nothing where it is nowhere defined, or 0."""
        # Of a first token it can be a hundred times that of others.
        logs = self._norms().log10()
        defined = logs[logs.isfinite()]
        if not len(defined):
            return ""
        low, high = float(defined.min()), float(defined.max())
        caption = (
            f"‖x‖ from {10**low:.3g} (dark) to {10**high:.3g} (bright), as logarithms; "
            "row: blocks before it; column: token; grey: 0 or undefined"
        )
        # Where all are the same there is no scale between them.
        ends = (low, high if high > low else low + 1)
        pixels = logs.where(logs.isfinite(), torch.nan).numpy()
        return small_map_html(pixels, ends, SEQUENTIAL, caption)

    def __repr__(self) -> str:
        return (
            f"Trace({self.provenance['model']!r}, n_layers={self.n_layers}, "
            f"n_pos={self.n_pos}, d_model={self.d_model}, "
            f"final_norm={self.final_norm}, tokens={list(self.str_tokens)})"
        )


class StreamedTrace(Trace):
    """A trace of a streamed model, whose blocks run when they are first asked for."""

    blocks: Sweep

    # Looking at a trace runs no model.
    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"

    # Not the dataclass's own, which would need the residual stream.
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @cached_property
    def residual(self) -> Float[Tensor, "n_layers_plus_1 n_pos d_model"]:
        """The residual stream; the blocks run for it, unless they have."""
        return self.blocks.residual()

    @property
    def n_pos(self) -> int:
        """Number of tokens."""
        return len(self.blocks.embedded)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.blocks.embedded.shape[1]


def _first_row_stays(block: BlockFunction) -> bool:
    """Say whether a block adds the same to the first row if every later row is another."""
    # The same lengths, so that a norm or a guard behaves as it does at X.
    changed = torch.cat([block.X[:1], -block.X[1:]])
    first_row = block(changed)[0]

    def is_near(step: Tensor) -> bool:
        # Rows that do not meet still share products, which round with their neighbours.
        tolerance = 1e-5 * (step.norm() + block.X[0].norm())
        return bool((first_row - step).norm() <= tolerance)

    # A step that was recorded in another dtype has that one's rounding, and one before
    # a change of weights is another.
    return is_near(block.step[0]) or is_near(block(block.X)[0])


def _index(value: int, size: int, name: str, owner: str) -> int:
    index = operator.index(value)
    if not -size <= index < size:
        raise ValueError(
            f"`{name}` must lie in [{-size}, {size - 1}] for this {owner}, got {index}"
        )
    return index % size
