"""What the blocks up to each depth do together, beside what unrelated blocks would."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Seed, at_least, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.dynamics.conjugation import (
    conjugated_grams,
    generator_of,
    log_largest_of_product,
    log_largest_singular_value,
)
from tl_coupling.dynamics.factored import FactoredProduct, step_matrix
from tl_coupling.dynamics.usable_jacobians import check_steps, usable_jacobians
from tl_coupling.jacobians import (
    block_jacobians,
    chosen_layers,
    named_layers,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import TURNED_BLOCKS, Saved, ShortTable, plural
from tl_coupling.spectra import effective_rank, parallel_map, participation_ratio
from tl_coupling.statistics import prediction_interval, simultaneous_band

if TYPE_CHECKING:
    import pandas

# A short table shows about so many.
_N_DEPTHS_SHOWN = 6
# Fewer have no spread.
Draws = Annotated[int, at_least(2)]


@made_by("dynamics.products(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Products(Saved):
    """Singular values of the products of blocks, by depth, with their nulls.

    `P_l = (I + J^l) … (I + J^1)`, at one token.

    Attributes:
        log_singular_values: natural logarithms of all singular values of P_l, from
            large to small; −∞ of zeros.
        block_log_singular_values: the same of each `I + J^l` by itself.
        null_log_largest: of products of conjugated blocks `Q_l (I + J^l) Q_lᵀ`, each
            with a Haar-random rotation of its own: log σ₁. Singular values, eigenvalues
            and departure from normality of every block are as they were; only how the
            blocks stand to each other is destroyed.
        null_participation_ratio: the participation ratio of the same products.
        shuffled_log_largest: log σ₁ of all blocks, multiplied in random orders.
        layers: the blocks, the first to run first.
        position: the token, from 0.
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.dynamics.products(trace)
        >>> result.log_singular_values.shape, result.alignment_gain.shape
        (torch.Size([2, 32]), torch.Size([2]))
        >>> tlc.dynamics.Products.load(result.save("products.nc")).layers
        (0, 1)
    """

    log_singular_values: Float[Tensor, "n_layers d_model"]
    block_log_singular_values: Float[Tensor, "n_layers d_model"]
    null_log_largest: Float[Tensor, "n_draws n_layers"]
    null_participation_ratio: Float[Tensor, "n_draws n_layers"]
    shuffled_log_largest: Float[Tensor, " n_draws"]
    layers: tuple[int, ...]
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "log_singular_values": "layer singular",
        "block_log_singular_values": "layer singular",
        "null_log_largest": "draw layer",
        "null_participation_ratio": "draw layer",
        "shuffled_log_largest": "draw",
        "layers": "layer",
    }

    def table(self) -> ShortTable:
        """Return the products up to about six depths, beside those of turned blocks."""
        n_layers = len(self.layers)
        # Every sixth part of the depth, and the last layer in any case.
        step = max(1, n_layers // _N_DEPTHS_SHOWN)
        shown_layers = sorted({*range(step - 1, n_layers, step), n_layers - 1})
        rows: list[list[object]] = []
        for i in shown_layers:
            low, high = self.alignment_gain_interval[i].tolist()
            null_ratio = float(self.null_participation_ratio[:, i].mean())
            rows.append(
                [
                    self.layers[i],
                    f"{float(self.log_largest[i]):.2f}",
                    f"{float(self.alignment_gain[i]):+.2f}",
                    f"{low:+.2f} to {high:+.2f}",
                    f"{float(self.participation_ratio[i]):.1f}",
                    f"{null_ratio:.1f}",
                ]
            )
        n_draws = len(self.null_log_largest)
        title = (
            f"{self.provenance.get('model')}: products of {plural(n_layers, 'block')}"
        )
        caption = (
            f"gain: log σ₁ minus that of {TURNED_BLOCKS}, {n_draws} draws, with "
            "95 % of them\ndirections: participation ratio, and that of "
            f"{TURNED_BLOCKS}"
        )
        numbers = ["to layer", "log σ₁", "gain", "95 %", "directions", "random"]
        return ShortTable.of(title, [], numbers, rows, caption)

    def _summary(self) -> str:
        low, high = self.alignment_gain_interval[-1].tolist()
        return (
            f"{len(self.layers)} blocks at token {self.position}; "
            f"log σ₁ {float(self.log_largest[-1]):.2f}, alignment gain "
            f"{float(self.alignment_gain[-1]):+.2f} [{low:+.2f}, {high:+.2f}]"
        )

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each layer up to which blocks are multiplied.

        Example:
            >>> table = tlc.dynamics.products(trace).to_dataframe()
            >>> list(table)[:4], len(table)
            (['layer', 'log_largest', 'alignment_gain', 'alignment_gain_low'], 2)
        """
        import pandas

        low, high = self.alignment_gain_interval.unbind(-1)
        columns = {
            "log_largest": self.log_largest,
            "alignment_gain": self.alignment_gain,
            "alignment_gain_low": low,
            "alignment_gain_high": high,
            "effective_rank": self.effective_rank,
            "participation_ratio": self.participation_ratio,
            "null_participation_ratio": self.null_participation_ratio.mean(0),
        }
        numbers = {name: values.tolist() for name, values in columns.items()}
        return pandas.DataFrame({"layer": self.layers, **numbers})

    @property
    def log_largest(self) -> Float[Tensor, " n_layers"]:
        """log σ₁ of the product up to each layer."""
        return self.log_singular_values[:, 0]

    @property
    def alignment_gain(self) -> Float[Tensor, " n_layers"]:
        """log σ₁ of each product minus its mean over conjugated products, in nats.

        Above 0 where what one block amplifies most is what the next amplify, too.
        """
        return self.log_largest - self.null_log_largest.mean(0)

    @property
    def alignment_gain_interval(self) -> Float[Tensor, "n_layers 2"]:
        """The gain over each end of the 95 % band of conjugated products.

        It excludes 0 where log σ₁ lies outside the band in which one more draw would
        lie with 95 % (t interval of a new draw).
        """
        low, high = self.null_interval.unbind(-1)
        return torch.stack([self.log_largest - high, self.log_largest - low], dim=-1)

    @property
    def null_interval(self) -> Float[Tensor, "n_layers 2"]:
        """Interval in which one more conjugated product's log σ₁ lies with 95 %."""
        ends = prediction_interval(self.null_log_largest.numpy())
        return torch.from_numpy(ends.T.copy())

    @property
    def null_band(self) -> Float[Tensor, "n_layers 2"]:
        """Band in which one more conjugated product lies at all depths, with 95 %.

        Depths of one product go together, so the question whether a whole line is
        unusual needs this band, not `null_interval`, which is for one depth chosen
        beforehand. See `statistics.intervals.simultaneous_band`; 20 draws or more.
        Raises ValueError for two, which give no band.
        """
        ends = simultaneous_band(self.null_log_largest.numpy())
        return torch.from_numpy(ends.T.copy())

    @property
    def log_mean_square(self) -> Float[Tensor, " n_layers"]:
        """`log(‖P‖_F² / d)`: the mean gain in energy over all input directions."""
        d_model = self.log_singular_values.shape[1]
        squares = 2 * self.log_singular_values
        # In logarithms, as squares of long products overflow.
        return squares.logsumexp(-1) - math.log(d_model)

    @property
    def growth_rates(self) -> Float[Tensor, "n_layers d_model"]:
        """`log σ_i / l`: growth per block, whose limits are Lyapunov exponents."""
        log_singular_values = self.log_singular_values
        n_blocks = torch.arange(
            1, len(self.layers) + 1, device=log_singular_values.device
        )
        # The product up to the first layer is of one block.
        return log_singular_values / n_blocks[:, None]

    @property
    def participation_ratio(self) -> Float[Tensor, " n_layers"]:
        """`(Σσ²)²/Σσ⁴` of each product; see `spectra.participation_ratio`."""
        return participation_ratio(self._relative())

    @property
    def effective_rank(self) -> Float[Tensor, " n_layers"]:
        """The exponential of the entropy of σ_i/Σσ; see `spectra.effective_rank`."""
        return effective_rank(self._relative())

    def _relative(self) -> Float[Tensor, "n_layers d_model"]:
        """Singular values divided by the largest, which cannot overflow; zeros of zero."""
        log_largest = self.log_largest[:, None]
        relative = (self.log_singular_values - log_largest).exp()
        # A zero product gives −∞ − (−∞), which is NaN; its relative values are 0.
        return relative.where(log_largest != -torch.inf, 0.0)


@checked
def products(
    trace: Trace,
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    n_draws: Draws = 20,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Products:
    r"""Measure the product of all blocks up to each depth, at one token.

    .. math:: P_l = (I + J^l) \cdots (I + J^1)

    P_l is the derivative of the stream after block l with respect to the stream before
    the first, along the token's own stream. Coupled blocks amplify the same directions
    again and again: log σ₁ is then larger, and fewer directions carry the product, than
    the blocks' own singular values would give. The alignment gain says by how much.

    Args:
        trace: a traced prompt.
        layers: the blocks of the product, the first to run first; all by default.
        position: the token; the last by default.
        n_draws: how many conjugated products, and how many orders of the blocks, are
            drawn.
        seed: of the draws.
        progress: as in `depth_coupling`.

    Raises:
        ValueError: a layer or position out of range, fewer than two draws, or a block
            that nothing passes, with J = −I.

    Cost: as `block_jacobians`; for each block about two SVDs without vectors in float64,
    and for each draw a rotation and a d×d product in float32.

    Example:
        >>> result = tlc.dynamics.products(trace, n_draws=20)
        >>> bool(result.alignment_gain[0].abs() < 1e-5)  # of one block
        True

    Source: stable products as in `FactoredProduct`; the null is this package's.
    """
    selected_layers = chosen_layers(trace, layers)
    t = trace.position_index(position)
    J = block_jacobians(trace, selected_layers, position=t, progress=progress)
    return jacobian_products(
        J,
        layers=selected_layers,
        position=t,
        n_draws=n_draws,
        seed=seed,
        provenance=trace.provenance,
        progress=progress,
    )


@checked
def jacobian_products(
    J: Float[Tensor, "n_layers d_model d_model"],
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    n_draws: Draws = 20,
    seed: Seed = 0,
    provenance: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Products:
    """Measure the product of given Jacobians, as `products` does.

    Args:
        J: Jacobians of blocks without their skip connections, the first to run first.
        layers: what they are called; from 0 on by default.
        position: the token that they are of.
        n_draws: as in `products`.
        seed: as in `products`.
        provenance: what the result should say of where they are from.
        progress: as in `products`.

    Raises:
        ValueError: no Jacobians, without entries or with some that are not finite, J =
            −I (nothing passes such a block), more or fewer layers, fewer than two draws.

    Cost: as `products`, without the Jacobians.

    Example:
        >>> J = tlc.measures.without_top(tlc.block_jacobians(trace), 1)
        >>> tlc.dynamics.jacobian_products(J).log_largest.shape
        torch.Size([2])
    """
    names = named_layers(J, layers)
    J = usable_jacobians(J)
    # A step of zero would make both nulls zero, and the gain NaN.
    check_steps(J, names)
    blocks = with_progress(J.unbind(), progress, "products of blocks")
    identity = FactoredProduct.identity(J.shape[-1], J.device)
    spectra = parallel_map(_spectra, _depth_products(blocks, identity), J.device)
    product_spectra = torch.stack([product for product, _ in spectra])
    block_spectra = torch.stack([block for _, block in spectra])
    # Draws are products in J's own precision.
    null = _Null(J, block_spectra.exp().to(J), seed)
    # Only numbers are handed to the threads: each makes its own matrices.
    numbers = with_progress(range(n_draws), progress, "unrelated blocks")
    draws = parallel_map(null.draw, numbers, J.device)
    return Products(
        log_singular_values=product_spectra.cpu(),
        block_log_singular_values=block_spectra.cpu(),
        null_log_largest=torch.stack([draw.log_largest for draw in draws]),
        null_participation_ratio=torch.stack(
            [draw.participation_ratio for draw in draws]
        ),
        shuffled_log_largest=torch.tensor(
            [draw.shuffled for draw in draws], dtype=torch.float64
        ),
        layers=tuple(names),
        position=position,
        provenance={**(provenance or {}), "seed": seed, "n_draws": n_draws},
    )


def _depth_products(
    J: Iterable[Float[Tensor, "d d"]], product: FactoredProduct
) -> Iterator[tuple[FactoredProduct, Float[Tensor, "d d"]]]:
    """Yield the product of the blocks up to each, and the block's own `I + J`."""
    for jacobian in J:
        step = step_matrix(jacobian)
        product = product.then(step)
        yield product, step


def _spectra(
    up_to_layer: tuple[FactoredProduct, Float[Tensor, "d d"]],
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Return the logarithms of the product's singular values, and of the block's."""
    product, step = up_to_layer
    return product.log_singular_values(), torch.linalg.svdvals(step).log()


class _Draw(NamedTuple):
    """A draw of the two nulls."""

    log_largest: Float[Tensor, " n_layers"]
    participation_ratio: Float[Tensor, " n_layers"]
    shuffled: float


@dataclass(frozen=True, eq=False)
class _Null:
    """What blocks without a relation to each other would do, and without an order."""

    J: Float[Tensor, "n_layers d d"]
    step_values: Float[Tensor, "n_layers d"]
    seed: int

    def draw(self, i: int) -> _Draw:
        """Return the i-th draw: the same whichever thread computes it."""
        # Each draw has a generator of its own, as threads finish in any order.
        generator = generator_of(self.seed, i)
        layer_values = []
        for gram, log_divisor in conjugated_grams(self.step_values, generator):
            log_largest = log_largest_singular_value(gram) + log_divisor
            # (Σσ²)² / Σσ⁴ by trace and norm of PᵀP: no singular value is computed.
            ratio = float(gram.trace().square() / gram.square().sum())
            layer_values.append((log_largest, ratio))
        values = torch.tensor(layer_values, dtype=torch.float64)
        return _Draw(values[:, 0], values[:, 1], self._shuffled(generator))

    def _shuffled(self, generator: torch.Generator) -> float:
        """Return log σ₁ of all blocks, multiplied in a random order."""
        order = torch.randperm(len(self.J), generator=generator).tolist()
        return log_largest_of_product([self.J[i] for i in order])
