"""How much every run of neighbouring blocks amplifies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.dynamics.conjugation import (
    divided,
    log_largest_singular_value,
    rotated,
)
from tl_coupling.dynamics.usable_jacobians import check_steps, usable_jacobians
from tl_coupling.jacobians import block_jacobians, chosen_layers
from tl_coupling.measures import seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import Saved, tidy_table

if TYPE_CHECKING:
    import pandas


@made_by("dynamics.product_map(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class ProductMap(Saved):
    """log σ₁ of the product of blocks l to m, for every l ≤ m, with its null.

    Rows are the last block m, columns the first block l; NaN where l > m.

    Attributes:
        log_largest: natural logarithm of σ₁ of `(I + J^m) … (I + J^l)`.
        null_log_largest: the same of conjugated blocks, `[n_draws n_layers n_layers]`;
            see `Products`.
        layers: the blocks.
        position: the token, from 0.
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.dynamics.product_map(trace)
        >>> result.log_largest.isnan().tolist()
        [[False, True], [False, False]]
        >>> tlc.dynamics.ProductMap.load(result.save("map.nc")).layers
        (0, 1)
    """

    log_largest: Float[Tensor, "n_layers n_layers"]
    null_log_largest: Float[Tensor, "n_draws n_layers n_layers"]
    layers: tuple[int, ...]
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "log_largest": "last first",
        "null_log_largest": "draw last first",
        "layers": "first",
    }

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each last block and each first one before it.

        Example:
            >>> table = tlc.dynamics.product_map(trace).to_dataframe()
            >>> list(table)[:4], len(table)
            (['last', 'first', 'log_largest', 'alignment_gain'], 3)
        """
        columns = {
            "log_largest": ("last first", self.log_largest),
            "alignment_gain": ("last first", self.alignment_gain),
        }
        axes = {"last": self.layers, "first": self.layers}
        table = tidy_table(columns, axes, self.provenance)
        # No product begins behind its end. The table has a row for every entry, row by row.
        is_product = torch.ones_like(self.log_largest, dtype=torch.bool).tril()
        return table[is_product.flatten().cpu().numpy()].reset_index(drop=True)

    def _summary(self) -> str:
        return (
            f"{len(self.layers)} blocks at token {self.position}; "
            f"log σ₁ of all {float(self.log_largest[-1, 0]):.2f}, "
            f"alignment gain {float(self.alignment_gain[-1, 0]):+.2f}"
        )

    @property
    def alignment_gain(self) -> Float[Tensor, "n_layers n_layers"]:
        """log σ₁ minus its mean over conjugated products; 0 where l = m, NaN for l > m."""
        return self.log_largest - self.null_log_largest.mean(0)


@checked
def product_map(
    trace: Trace,
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    n_draws: Count = 2,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> ProductMap:
    r"""Measure how much every run of neighbouring blocks amplifies, at one token.

    .. math:: \log \sigma_1\big((I + J^m) \cdots (I + J^l)\big), \qquad l \le m

    Args:
        trace: a traced prompt.
        layers: the blocks, the first to run first; all by default.
        position: the token; the last by default.
        n_draws: how many maps of conjugated blocks are drawn; see `Products`.
        seed: of the draws.
        progress: as in `depth_coupling`.

    Raises:
        ValueError: a layer or position out of range, or a block that nothing passes,
            with J = −I.

    Cost: as `block_jacobians`; then for each of the `L (L + 1) / 2` products, and again
    for each draw, two d×d products; memory for L matrices.

    Example:
        >>> tlc.dynamics.product_map(trace).alignment_gain.shape
        torch.Size([2, 2])
    """
    selected_layers = chosen_layers(trace, layers)
    t = trace.position_index(position)
    J = block_jacobians(trace, selected_layers, position=t, progress=progress)
    check_steps(J, selected_layers)
    steps = usable_jacobians(J).clone()
    steps.diagonal(dim1=-2, dim2=-1).add_(1)
    step_values = torch.linalg.svdvals(steps)
    generator = seeded(seed)
    n_layers = len(selected_layers)
    # The first map is of the blocks themselves, the others are draws.
    maps = torch.full((n_draws + 1, n_layers, n_layers), torch.nan).double()
    for draw in with_progress(range(n_draws + 1), progress, "products of runs"):
        _fill(maps[draw], steps, step_values if draw else None, generator)
    return ProductMap(
        log_largest=maps[0],
        null_log_largest=maps[1:],
        layers=tuple(selected_layers),
        position=t,
        provenance={**trace.provenance, "seed": seed, "n_draws": n_draws},
    )


def _fill(
    log_largest: Float[Tensor, "n_layers n_layers"],
    steps: Float[Tensor, "n_layers d d"],
    conjugated_values: Float[Tensor, "n_layers d"] | None,
    generator: torch.Generator,
) -> None:
    """Write log σ₁ of every run into a map: of the blocks, or of conjugated ones.

    All products that end in a block are multiplied by the next together.
    """
    n_layers, d, _ = steps.shape
    products = steps.new_empty(n_layers, d, d)
    log_divisors = torch.zeros(n_layers, dtype=torch.float64)
    for last in range(n_layers):
        # The run that begins with this block is nothing so far.
        products[last] = torch.eye(d, device=steps.device)
        # Runs stand side by side, `[d, run · d]`: one product with the block serves
        # all.
        earlier_products = rearrange(products[: last + 1], "run d e -> d (run e)")
        if conjugated_values is None:
            longer_products = steps[last] @ earlier_products
        else:
            longer_products = conjugated_values[last][:, None] * rotated(
                earlier_products, generator
            )
        products[: last + 1] = rearrange(longer_products, "d (run e) -> run d e", e=d)
        for first in range(last + 1):
            P, log_size = divided(products[first])
            products[first] = P
            # The logarithms of a run's divisors are added back below.
            log_divisors[first] += log_size
            quotient_log = log_largest_singular_value(P.mT @ P)
            log_largest[last, first] = quotient_log + float(log_divisors[first])
