"""Coupling across prompts: one layer on every two prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
)

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.comparisons.null_means import (
    draws_needed,
    draws_of_rows,
    means_of_draws,
    quantile_interval,
    rise_together,
)
from tl_coupling.comparisons.pairs import SeveralTraces, as_trace
from tl_coupling.jacobians import (
    Connection,
    Decomposed,
    JacobianOptions,
    MemoryLimit,
    chosen_layers,
    decompose_each,
)
from tl_coupling.measures import (
    AnyMeasure,
    Measure,
    MeasureFunction,
    MeasureName,
    draws_of_nuclear_overlap,
    measure_named,
    nuclear_overlap,
    random_subspace_null,
    seeded,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import DifferentPrompts, Saved, prompt_name
from tl_coupling.spectra import Spectrum, check_k, fitting_k

if TYPE_CHECKING:
    import pandas
    import xarray

PromptMeasure: TypeAlias = Annotated[
    Measure | Literal[MeasureName, "write_overlap", "read_overlap"] | MeasureFunction,
    "a measure of your own is given as the function itself",
]
PerPrompts = Float[Tensor, "n_layers n_prompts n_prompts"]
# Measures that a saved file holds for every pair of prompts, beside the matrices.
_SAVED_MEASURES: tuple[Literal["coupling", "write_overlap", "read_overlap"], ...] = (
    "coupling",
    "write_overlap",
    "read_overlap",
)


@made_by("prompt_coupling(traces)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class PromptCoupling(Saved):
    """One layer's Jacobians on every two prompts, for each of several layers.

    Three measures of each pair, each with its null:

    * `"coupling"`, `1 − m̃(A)`: whether the top k singular vectors of the layer on one
      prompt (column) diagonalise its Jacobian on another (row). All other measures of a
      coupling matrix can be asked for, too.
    * `"write_overlap"`, `‖S₁U₁ᵀU₂S₂‖_* / (‖s₁‖ ‖s₂‖)`: whether the layer writes in the
      same directions. See `measures.nuclear_overlap`.
    * `"read_overlap"`: the same of V, the directions that the layer reads.

    Attributes:
        matrices: `A = U_{q,k}ᵀ J_p V_{q,k}`, `[n_layers n_prompts n_prompts k k]`; rows
            are the prompts p of the Jacobian, columns those of the singular vectors.
        write_cosines, read_cosines: `U_pᵀ U_q` and `V_pᵀ V_q`, of the same shape.
        singular_values: of each J, `[n_layers n_prompts k]`, largest first.
        frobenius_norms: of each J, `[n_layers n_prompts]`.
        d_model: size of the Jacobians.
        layers: counted from 0.
        prompts: the texts, or other names.
        positions: the token of each prompt, counted from 0.
        provenance: what all prompts have in common, the remarks on any of them, and
            `paths`, the way to each Jacobian, by prompt; JSON-able.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> result = tlc.prompt_coupling(traces, k=4)
        >>> result.values().shape, result.by_layer(2, "write_overlap").shape
        (torch.Size([2, 4, 4]), torch.Size([2]))
        >>> tlc.comparisons.PromptCoupling.load(result.save("p.nc")).mean() == result.mean()
        True
    """

    matrices: Float[Tensor, "n_layers n_prompts n_prompts k k"]
    write_cosines: Float[Tensor, "n_layers n_prompts n_prompts k k"]
    read_cosines: Float[Tensor, "n_layers n_prompts n_prompts k k"]
    singular_values: Float[Tensor, "n_layers n_prompts k"]
    frobenius_norms: Float[Tensor, "n_layers n_prompts"]
    d_model: Count
    layers: tuple[int, ...]
    prompts: tuple[str, ...]
    positions: tuple[int, ...]
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        **dict.fromkeys(
            ("matrices", "write_cosines", "read_cosines"), "layer row col i j"
        ),
        "singular_values": "layer row i",
        "frobenius_norms": "layer row",
        "layers": "layer",
        "prompts": "row",
        "positions": "row",
    }

    @property
    def k(self) -> int:
        """The largest k that can be asked for."""
        return self.matrices.shape[-1]

    @property
    def n_prompts(self) -> int:
        """How many prompts are compared."""
        return self.matrices.shape[1]

    @checked
    def values(
        self, k: int | None = None, measure: PromptMeasure = "coupling"
    ) -> PerPrompts:
        """Return a measure of every two prompts, for each layer.

        A prompt with itself has the largest value: 1 for coupling and overlaps.

        Args:
            k: how many top singular vectors; as many as are held by default.
            measure: a measure of A, as in `CouplingMap.values`, "write_overlap" or
                "read_overlap".
        """
        k = self._k(k)
        # Rows of a pair are the first prompt, columns the second: S is read along both.
        S = self.singular_values
        if measure == "write_overlap":
            cosines = self.write_cosines[..., :k, :k]
            return nuclear_overlap(cosines, S[:, :, None], S[:, None])
        if measure == "read_overlap":
            cosines = self.read_cosines[..., :k, :k]
            return nuclear_overlap(cosines, S[:, :, None], S[:, None])
        return measure_named(measure).value(self.matrices[..., :k, :k], S[:, :, None])

    @checked
    def by_layer(
        self, k: int | None = None, measure: PromptMeasure = "coupling"
    ) -> Float[Tensor, " n_layers"]:
        """Return the mean of a measure over pairs of different prompts, by layer."""
        return self._mean_over_pairs(self.values(k, measure))

    @checked
    def mean(self, k: int | None = None, measure: PromptMeasure = "coupling") -> float:
        """Return the mean of a measure over layers and pairs of different prompts."""
        return float(self.by_layer(k, measure).mean())

    @checked
    def null_by_layer(
        self,
        k: int | None = None,
        measure: PromptMeasure = "coupling",
        *,
        n_draws: Count = 20,
        seed: Seed = 0,
    ) -> Float[Tensor, " n_layers"]:
        """Return what `by_layer` would be if every prompt had Haar-random bases.

        The singular values stay as they are. Of measures of A it is the closed form of
        `random_subspace_null`; of overlaps, for which there is none, the mean of draws.

        Args:
            k, measure: as in `values`.
            n_draws: for overlaps, how many.
            seed: for overlaps, of the random numbers.

        Cost: for overlaps the singular values of a k×k matrix for each layer, pair of
        prompts and draw.
        """
        k = self._k(k)
        S = self.singular_values.cpu()
        if measure == "write_overlap" or measure == "read_overlap":
            draws = self._draws_of_overlaps(k, n_draws, seeded(seed))
            return reduce(draws, "draw layer pair -> layer", "mean")
        row_nulls = random_subspace_null(
            k,
            measure,
            d_model=self.d_model,
            S_1=S,
            frobenius_norm=self.frobenius_norms.cpu(),
        )
        # A measure whose null is the same for every J_1 has one number for all rows.
        return reduce(row_nulls.expand(S.shape[:2]), "layer row -> layer", "mean")

    @checked
    def null_interval_by_layer(
        self,
        k: int | None = None,
        measure: PromptMeasure = "coupling",
        *,
        n_draws: Count | None = None,
        seed: Seed = 0,
    ) -> Float[Tensor, "n_layers 2"]:
        """Return where 95 % of `by_layer` would lie with Haar-random bases.

        Bases of different prompts are drawn by themselves. All pairs that one prompt's
        bases are in (a column) are taken to rise and fall together, and of two prompts
        both pairs: the interval is as wide as it can be, or wider.

        Args:
            k, measure, seed: as in `null_by_layer`.
            n_draws: for each column, combined anew thousands of times. By default as
                many as leave the ends known to a twentieth of the width; of overlaps
                20, which leave them known to an eighth.

        Cost: two QR decompositions of `[d_model, k]` a draw; for overlaps as in
        `null_by_layer`.

        Example:
            >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
            >>> result = tlc.prompt_coupling(traces, k=4)
            >>> low, high = result.null_interval_by_layer()[0]
            >>> bool(low < result.null() < high)
            True
        """
        k = self._k(k)
        generator = seeded(seed)
        if measure == "write_overlap" or measure == "read_overlap":
            draws = self._draws_of_overlaps(k, n_draws or 20, generator)
            # Sorted, pairs rise and fall together.
            layer_draws = reduce(
                draws.sort(0).values, "draw layer pair -> draw layer", "mean"
            )
        else:
            layer_draws = self._draws_of_layers(
                k, measure, n_draws or draws_needed(self.n_prompts, "space"), generator
            )
        names = [(0, prompt) for prompt in range(self.n_prompts)]
        together = rise_together(names, names, self._differ())
        intervals = [
            quantile_interval(
                means_of_draws(
                    draws[:, None], self._differ(), generator, together=together
                )
            )
            for draws in layer_draws.unbind(1)
        ]
        return torch.tensor(intervals, dtype=torch.float64)

    def _draws_of_overlaps(
        self, k: int, n_draws: int, generator: torch.Generator
    ) -> Float[Tensor, "n_draws n_layers n_pairs"]:
        """Draw the overlap of every two prompts, with random bases."""
        S = self.singular_values.cpu()
        # Both sides, and both orders of a pair, have the same null.
        first, second = torch.triu_indices(self.n_prompts, self.n_prompts, 1)
        return draws_of_nuclear_overlap(
            S[:, first, :k],
            S[:, second, :k],
            # A draw's bases serve all layers and pairs.
            n_draws,
            d_model=self.d_model,
            generator=generator,
        )

    def _draws_of_layers(
        self,
        k: int,
        measure: AnyMeasure,
        n_draws: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "n_draws n_layers"]:
        """Draw what a column of each layer has in the mean, with random bases."""
        n_rows = len(self.layers) * self.n_prompts
        S = rearrange(self.singular_values.cpu().double(), "l prompt i -> (l prompt) i")
        norms = rearrange(self.frobenius_norms.cpu(), "l prompt -> (l prompt)")
        nulls = random_subspace_null(
            k, measure, d_model=self.d_model, S_1=S, frobenius_norm=norms
        )
        draws = draws_of_rows(
            measure_named(measure),
            k,
            n_draws,
            self.d_model,
            S,
            norms,
            nulls.double().expand(n_rows),
            generator,
        )
        return reduce(draws, "draw (l prompt) -> draw l", "mean", prompt=self.n_prompts)

    @checked
    def null(
        self,
        k: int | None = None,
        measure: PromptMeasure = "coupling",
        *,
        n_draws: Count = 20,
        seed: Seed = 0,
    ) -> float:
        """Return the mean of `null_by_layer` over the layers; arguments as there."""
        nulls = self.null_by_layer(k, measure, n_draws=n_draws, seed=seed)
        return float(nulls.mean())

    def to_dataset(self) -> "xarray.Dataset":
        """Return the result as an `xarray.Dataset`: what `save` writes.

        Beside the matrices it has `coupling`, `write_overlap` and `read_overlap` of
        every two prompts at the largest k, `[layer row col]`, and `…_null` of each,
        `[layer]`.

        Example:
            >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
            >>> data = tlc.prompt_coupling(traces, k=4).to_dataset()
            >>> data["coupling"].sel(layer=1).shape, data["write_overlap_null"].shape
            ((4, 4), (2,))
        """
        dataset = super().to_dataset()
        # `prompts` names the rows. Columns are the same prompts, on another axis.
        dataset = dataset.assign_coords(other_prompt=("col", list(self.prompts)))
        arrays: dict[str, tuple[list[str], Any]] = {}
        for measure in _SAVED_MEASURES:
            values = self.values(measure=measure).cpu().numpy()
            nulls = self.null_by_layer(measure=measure).cpu().numpy()
            arrays[measure] = (["layer", "row", "col"], values)
            arrays[f"{measure}_null"] = (["layer"], nulls)
        return dataset.assign(arrays)

    @checked
    def to_dataframe(self, ks: Sequence[int] | None = None) -> "pandas.DataFrame":
        """Return a tidy table: one row for each k, layer and pair of different prompts.

        Columns are `k`, `layer`, `prompt` (of the Jacobian), `other_prompt` (of the
        singular vectors), and each measure with its null.

        Args:
            ks: numbers of singular vectors; the largest by default.

        Example:
            >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
            >>> table = tlc.prompt_coupling(traces, k=4).to_dataframe([2, 4])
            >>> len(table), list(table)[:4]
            (48, ['k', 'layer', 'prompt', 'other_prompt'])
        """
        import pandas

        rows: list[dict[str, object]] = []
        for k in [self.k] if ks is None else ks:
            values = {name: self.values(k, name).tolist() for name in _SAVED_MEASURES}
            nulls = {
                name: self.null_by_layer(k, name).tolist() for name in _SAVED_MEASURES
            }
            rows.extend(
                {
                    "k": k,
                    "layer": layer,
                    "prompt": self.prompts[row],
                    "other_prompt": self.prompts[column],
                    **{name: values[name][i][row][column] for name in _SAVED_MEASURES},
                    **{f"{name}_null": nulls[name][i] for name in _SAVED_MEASURES},
                }
                for i, layer in enumerate(self.layers)
                for row in range(self.n_prompts)
                for column in range(self.n_prompts)
                if row != column
            )
        return pandas.DataFrame(rows)

    def _summary(self) -> str:
        return (
            f"{len(self.layers)} layers, {self.n_prompts} prompts, k≤{self.k}; "
            f"at k={self.k}: mean coupling {self.mean():.3f}, null {self.null():.3f}"
        )

    def _mean_over_pairs(self, values: PerPrompts) -> Float[Tensor, " n_layers"]:
        """Return the mean over pairs of different prompts."""
        # `[n_layers n_pairs]`: a prompt with itself, where every measure is 1, is left
        # out.
        return values[:, self._differ().to(values.device)].mean(-1)

    def _differ(self) -> Bool[Tensor, "n_prompts n_prompts"]:
        """Say which pairs are of different prompts."""
        return ~torch.eye(self.n_prompts, dtype=torch.bool)

    def _k(self, k: int | None) -> int:
        """Return k, by default the largest; ValueError for one that is not held."""
        k = self.k if k is None else k
        check_k(k, self.k, self.d_model)
        return k


@checked
def prompt_coupling(
    traces: SeveralTraces,
    layers: int | Sequence[int] | None = None,
    k: int | None = None,
    position: int = -1,
    *,
    chunk_size: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> PromptCoupling:
    r"""Coupling across prompts: each layer's Jacobians on every two prompts.

    .. math::

        A^l_{p q} = U_{q,k}^\top J^l_p V_{q,k}, \qquad
        \frac{\|S_p U_p^\top U_q S_q\|_*}{\|s_p\| \|s_q\|}

    Are the axes of a layer the model's, or the prompt's? The axes are the model's as
    far as the values are high. Two things that are not 0 must be known beside them:
    the null, random bases with the same singular values, and the untrained twin, whose
    Jacobians on two prompts have the same random weights in them.

    Args:
        traces: at least two prompts, traced with one model; an iterator is read to its
            end.
        layers: one, or several; all by default.
        k: how many top singular vectors; 50, or all of a narrower model, by default.
        position: the token of each prompt; the last by default.
        chunk_size, max_memory: as in `depth_coupling`.
        progress: wraps the loop over layers: `progress=tqdm.tqdm`. By default a bar in
            a terminal or notebook; `False` for none.

    Returns:
        a `PromptCoupling`.

    Raises:
        ValueError: fewer than two prompts; a prompt twice; prompts of different models,
            or traced in different ways; k, a layer or a position out of range.
        TypeError: something that is not a trace.

    Warnings as in `depth_coupling`.

    Cost: a Jacobian and an SVD for each layer and prompt, and `2 n² k d²` flops a layer
    for n prompts; memory for one layer's Jacobians, `n d²` numbers, and for the result,
    `3 L n² k²`.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> result = tlc.prompt_coupling(traces, layers=1, k=4)
        >>> result.values(2).shape, round(result.null(2), 3)
        (torch.Size([1, 4, 4]), 0.293)
    """
    traced = [as_trace(item) for item in traces]
    different = _different(traced)
    k = fitting_k(k, traced[0].d_model)
    # One layer keeps its axis in the result.
    if isinstance(layers, int):
        layers = [layers]
    selected_layers = chosen_layers(traced[0], layers)
    positions = [trace.position_index(position) for trace in traced]
    # The bar counts layers, and Jacobians within one have none.
    options = JacobianOptions(chunk_size, max_memory, progress=False)
    layer_pairs: list[_LayerPairs] = []
    paths: list[dict[str, str]] = [{} for _ in traced]
    for layer in with_progress(selected_layers, progress, "layers"):
        decomposed = _decomposed(traced, layer, positions, k, options)
        layer_pairs.append(_compared(decomposed))
        for prompt_paths, prompt_jacobian in zip(paths, decomposed, strict=True):
            prompt_paths.update(prompt_jacobian.paths)
    return PromptCoupling(
        matrices=torch.stack([pairs.matrices for pairs in layer_pairs]),
        write_cosines=torch.stack([pairs.write_cosines for pairs in layer_pairs]),
        read_cosines=torch.stack([pairs.read_cosines for pairs in layer_pairs]),
        singular_values=torch.stack([pairs.S for pairs in layer_pairs]),
        frobenius_norms=torch.stack([pairs.norms for pairs in layer_pairs]),
        d_model=traced[0].d_model,
        layers=tuple(selected_layers),
        prompts=tuple(prompt_name(trace.provenance) for trace in traced),
        positions=tuple(positions),
        provenance={
            **different.provenance,
            "str_tokens_at_position": [
                trace.str_tokens[t] for trace, t in zip(traced, positions, strict=True)
            ],
            "paths": paths,
        },
    )


class _LayerPairs(NamedTuple):
    """What is kept of one layer: matrices of pairs, and the spectrum of each prompt."""

    matrices: Float[Tensor, "n n k k"]
    write_cosines: Float[Tensor, "n n k k"]
    read_cosines: Float[Tensor, "n n k k"]
    S: Float[Tensor, "n k"]
    norms: Float[Tensor, " n"]


def _decomposed(
    traces: Sequence[Trace],
    layer: int,
    positions: Sequence[int],
    k: int,
    options: JacobianOptions,
) -> list[Decomposed]:
    """Decompose and keep one layer's Jacobian on each prompt."""
    wanted = [
        (trace, [Connection(layer, t, t, t)])
        for trace, t in zip(traces, positions, strict=True)
    ]
    decomposed = list(decompose_each(wanted, k, options))
    for prompt_jacobian in decomposed:
        prompt_jacobian.check_cut()
    return decomposed


def _compared(decomposed: Sequence[Decomposed]) -> _LayerPairs:
    """Compare one layer's Jacobians on every two prompts."""
    # The frames of all prompts at this layer are one batch.
    spectra = Spectrum.cat([prompt_jacobian.leading for prompt_jacobian in decomposed])
    U = spectra.U
    V = spectra.Vh.mT
    rows = []
    for prompt_jacobian in decomposed:
        J = prompt_jacobian.jacobian(0)
        # The Jacobian of one prompt in the frames of each: a row of the map.
        rows.append(U.mT @ (J @ V))
    return _LayerPairs(
        matrices=torch.stack(rows),
        write_cosines=einsum(U, U, "row d i, col d j -> row col i j"),
        read_cosines=einsum(V, V, "row d i, col d j -> row col i j"),
        S=spectra.S,
        norms=torch.cat(
            [prompt_jacobian.frobenius_norms for prompt_jacobian in decomposed]
        ),
    )


def _different(traces: Sequence[Trace]) -> DifferentPrompts:
    """Return the prompts; ValueError for fewer than two, for one twice, and unless all
    are of one model, traced in one way.
    """
    if len(traces) < 2:
        raise ValueError(
            f"`traces` must be of at least two prompts, got {len(traces)}: coupling "
            "across prompts compares them"
        )
    # A prompt that came twice would make a pair of equal Jacobians.
    prompts = DifferentPrompts("traces")
    for trace in traces:
        prompts.add_traced(trace)
    return prompts
