"""Measures of coupling as objects: the value of A, its null, its name and label.

To add a measure, write a class here (`value`, `corner_values`, `null`), and put its
name into `MeasureName` and an instance at the end of `MEASURES`. Nothing else lists
measures. A function of one's own becomes a measure where a name is looked up,
`measure_named`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, warn_caller
from tl_coupling.measures.matrices import (
    Norm,
    captured_energy,
    miscoupling,
    nan_where_zero,
    normalized_miscoupling,
    off_diagonal,
    require_finite,
    spectral_miscoupling,
    top_values,
)
from tl_coupling.measures.moments import Moments
from tl_coupling.measures.own_functions import (
    MeasureFunction,
    call_function,
    function_name,
    nan_where_not_finite,
    source_digest,
)

# Entries of the matrices whose measures are computed at once (float64: 32 MiB).
_MOST_ENTRIES = 2**22

MeasureName = Literal[
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
    "released_norm",
    "released_trace",
]


@dataclass(frozen=True)
class Corners:
    """Sums over the corners `A[:k, :k]` of coupling matrices, for every k at once.

    In float64, with the axes of A's batch and then k. Norms are NaN where they are 0.

    Attributes:
        A: the matrices.
        diagonal: the entries `a_kk`.
        s: singular values `s_k` of J_1.
        off_diagonal: `Σ_{i≠j≤k} a_ij²`.
        size: `‖A_k‖_F`.
        size_or_nan: the same, as a denominator.
        length_or_nan: `‖s_{1,k}‖₂`, as a denominator.
    """

    A: Float[Tensor, "*batch k k"]
    diagonal: Float[Tensor, "*batch k"]
    s: Float[Tensor, "*#batch k"]
    off_diagonal: Float[Tensor, "*batch k"]
    size: Float[Tensor, "*batch k"]
    size_or_nan: Float[Tensor, "*batch k"]
    length_or_nan: Float[Tensor, "*#batch k"]


@dataclass(frozen=True)
class Measure(ABC):
    """A measure of coupling: what it is of a matrix A, and what it is by chance.

    `measure_named` gives one, with options where it has any.

    Attributes:
        name: in files, tables and arguments.
        label: in figures, with TeX between dollar signs.
        words: in tables of plain text.
        p: norm of the singular values in the denominator, where there is one.
        absolute: whether it is of the absolute values of A's entries.
        takes_options: whether `p` and `absolute` may be chosen.
        bounded: whether it lies in [0, 1].
        null_tends_to: what the null comes near to for a large k, where it is the same
            for every J_1; None where it depends on J_1.

    Example:
        >>> coupling = tlc.measures.measure_named("coupling")
        >>> coupling.bounded, coupling.label
        (True, 'coupling $1 - \\\\tilde{m}$')
        >>> A = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> coupling.value(A, torch.tensor([2.0, 1.0]))
        tensor(1.)
    """

    name: str
    label: str
    words: str
    p: Norm = 2
    absolute: bool = False
    takes_options: bool = False
    bounded: bool = False
    null_tends_to: int | None = None

    @abstractmethod
    def value(
        self, A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
    ) -> Float[Tensor, "*batch"]:
        """Return the measure of coupling matrices, given their J_1's singular values."""

    @abstractmethod
    def corner_values(self, corners: Corners) -> Float[Tensor, "*batch k"]:
        """Return the measure of every corner `A[:k, :k]`."""

    def null(self, moments: Moments) -> Float[Tensor, "*batch"] | None:
        """Return its root mean square over random A with these moments.

        None where no closed form is known: then it is that of draws, `null_of_draws`.
        """
        del moments
        return None

    def null_of_draws(
        self, values: Float[Tensor, "n_draws ..."]
    ) -> Float[Tensor, "..."]:
        """Return of drawn values what `null` is of all that could be drawn."""
        return values.square().mean(0).sqrt()

    def root_mean_square(
        self, values: Float[Tensor, "n_draws ..."]
    ) -> Float[Tensor, "..."]:
        """Return `null_of_draws`, whose earlier name this is."""
        warn_caller(
            "`Measure.root_mean_square` is called `null_of_draws` now: use that name",
            DeprecationWarning,
        )
        return self.null_of_draws(values)

    def null_of_any_jacobian(self, k: int) -> Float[Tensor, ""] | None:
        """Return the null of random frames if it is the same for every J_1, or None."""
        del k  # Of most measures it depends on J_1.
        return None

    def label_at(self, k: int) -> str:
        """Return the label with k and the options."""
        if not self.takes_options:
            return f"{self.label} (k = {k})"
        entries = ", |A|" if self.absolute else ""
        return f"{self.label} (k = {k}, p = {self.p:g}{entries})"

    @property
    def formula(self) -> tuple[object, ...]:
        """What measures have in common that are the same numbers under two names."""
        return type(self), self.p, self.absolute


class NormalizedMiscoupling(Measure):
    """`m̃(A)`, the share of A that is off its diagonal."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return `normalized_miscoupling(A)`."""
        del S_1  # A measure of A alone.
        return normalized_miscoupling(A)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return `m̃` of every corner."""
        return corners.off_diagonal.sqrt() / corners.size_or_nan

    def null(self, moments: Moments) -> Tensor:
        """Return `√E[m̃²]`, where `‖A‖_F` does not vary."""
        size_squared = nan_where_zero(moments.total, "‖A‖_F")
        return (moments.off_diagonal / size_squared).sqrt()

    def null_of_any_jacobian(self, k: int) -> Tensor:
        """Return `√(1 − 1/k)`."""
        return torch.tensor(math.sqrt(1 - 1 / k), dtype=torch.float64)


class Coupling(NormalizedMiscoupling):
    """`1 − m̃(A)`."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return `1 − normalized_miscoupling(A)`."""
        return 1 - super().value(A, S_1)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return `1 − m̃` of every corner."""
        return 1 - super().corner_values(corners)

    def null(self, moments: Moments) -> Tensor:
        """Return `1 − √E[m̃²]`."""
        return 1 - super().null(moments)

    def null_of_draws(
        self, values: Float[Tensor, "n_draws ..."]
    ) -> Float[Tensor, "..."]:
        """Return `1 − √(mean m̃²)`."""
        # It is m̃, 1 less coupling, that is squared.
        return 1 - super().null_of_draws(1 - values)

    def null_of_any_jacobian(self, k: int) -> Tensor:
        """Return `1 − √(1 − 1/k)`."""
        return 1 - super().null_of_any_jacobian(k)


class Miscoupling(Measure):
    """`m(A)`, the size of what is off A's diagonal."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return `miscoupling(A)`."""
        del S_1  # A measure of A alone.
        return miscoupling(A)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return `m` of every corner."""
        return corners.off_diagonal.sqrt()

    def null(self, moments: Moments) -> Tensor:
        """Return `√E[m²]`."""
        return moments.off_diagonal.sqrt()


class SpectralMiscoupling(Measure):
    """`m_K`, the distance of A from J_1's singular values: `spectral_miscoupling`."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return `spectral_miscoupling(A, S_1, p, absolute)`."""
        return spectral_miscoupling(A, S_1, self.p, self.absolute)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return `m_K` of every corner."""
        entries = corners.diagonal.abs() if self.absolute else corners.diagonal
        diagonal_squares = (entries - corners.s).square().cumsum(-1)
        distance = (corners.off_diagonal + diagonal_squares).sqrt()
        if self.p == 2:
            # `_corners` has the length for p = 2, and warned where it is 0.
            return distance / corners.length_or_nan
        length = corners.s.pow(self.p).cumsum(-1).pow(1 / self.p)
        return distance / nan_where_zero(length, "‖s_{1,K}‖_p")

    def null(self, moments: Moments) -> Tensor:
        """Return `√E[m_K²]`."""
        s = moments.s
        squared = (
            # `E‖A − S‖² = E‖A‖² + ‖s‖² − 2 E a · Σ s`, but for rounding at least 0.
            moments.total + s.square().sum(-1) - 2 * moments.entry * s.sum(-1)
        ).clamp_min(0)
        length = torch.linalg.vector_norm(s, ord=self.p, dim=-1)
        return squared.sqrt() / nan_where_zero(length, "‖s_{1,K}‖_p")


class CapturedEnergy(Measure):
    """`‖A‖_F / ‖s_{1,K}‖₂`, how much of J_1 lies in the subspaces of J_2."""

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return `captured_energy(A, S_1)`."""
        return captured_energy(A, S_1)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return the captured energy of every corner."""
        return corners.size / corners.length_or_nan

    def null(self, moments: Moments) -> Tensor:
        """Return `√E‖A‖_F² / ‖s_{1,K}‖₂`."""
        length = nan_where_zero(moments.s.norm(dim=-1), "‖s_{1,K}‖₂")
        return moments.total.sqrt() / length


@dataclass(frozen=True)
class OwnMeasure(Measure):
    """A function of the user's, `A, S ↦ value`, as a measure.

    Its null is the mean of draws: the sign of the values is not known, and so no root
    mean square taken.

    Attributes:
        function: takes A, `[*batch k k]`, and the k largest singular values of each
            J_1, `[*batch k]`, of one dtype; returns `[*batch]`.
        source: what tells it from other functions of its name, see `source_digest`.
    """

    function: MeasureFunction = field(kw_only=True)
    source: str | None = field(kw_only=True, default=None)

    @classmethod
    def of(cls, function: MeasureFunction) -> "OwnMeasure":
        """Return a function as a measure; ValueError where its name is missing or taken."""
        name = function_name(function)
        if name in MEASURES:
            raise ValueError(
                f"{name!r} is the name of another measure: give your function a name of "
                "its own"
            )
        source = source_digest(function)
        return cls(name, name, name, function=function, source=source)

    def value(self, A: Tensor, S_1: Tensor) -> Tensor:
        """Return what the function gives, NaN with a warning where it is not finite."""
        return nan_where_not_finite(self._called(A, S_1), self.name)

    def corner_values(self, corners: Corners) -> Tensor:
        """Return what the function gives for every corner, one k after the other."""
        k_values = range(1, corners.A.shape[-1] + 1)
        values = [self._called(corners.A[..., :k, :k], corners.s) for k in k_values]
        return nan_where_not_finite(torch.stack(values, -1), self.name)

    def null_of_draws(
        self, values: Float[Tensor, "n_draws ..."]
    ) -> Float[Tensor, "..."]:
        """Return the mean of those that are defined."""
        return values.nanmean(0)

    @property
    def formula(self) -> tuple[object, ...]:
        """What it has in common with no other: the function."""
        return type(self), self.name, self.source, self.function

    @property
    def facts(self) -> dict[str, str | None]:
        """What results say of it: that it is the user's own, and its source's digest."""
        return {"measure_of": "the user's own function", "source_sha256": self.source}

    def check_made(self, facts: Mapping[str, str | None]) -> None:
        """Raise ValueError where a result was made by another function of this name."""
        known_sources = {self.source, facts.get("source_sha256")} - {None}
        if len(known_sources) > 1:
            raise ValueError(
                f"this result was measured with another function {self.name!r}, whose "
                "source differs: measure again, or give the function that it was made with"
            )

    def _called(self, A: Tensor, S_1: Tensor) -> Tensor:
        s = top_values(S_1, A.shape[-1]).to(A)
        A = require_finite(A, "A")
        return call_function(self.function, self.name, A, s.expand(A.shape[:-1]))


# A measure by its name, or itself.
AnyMeasure: TypeAlias = Annotated[
    Measure | MeasureName | MeasureFunction,
    "a measure of your own is given as the function itself",
]
# All measures; means over prompts hold them in this order.
MEASURES: Mapping[MeasureName, Measure] = MappingProxyType(
    {
        cast(MeasureName, measure.name): measure
        for measure in (
            Coupling(
                "coupling",
                r"coupling $1 - \tilde{m}$",
                "coupling 1 − m̃",
                bounded=True,
                null_tends_to=0,
            ),
            NormalizedMiscoupling(
                "normalized_miscoupling",
                r"normalised mis-coupling $\tilde{m}$",
                "normalised mis-coupling m̃",
                bounded=True,
                null_tends_to=1,
            ),
            Miscoupling("miscoupling", "mis-coupling $m$", "mis-coupling m"),
            SpectralMiscoupling(
                "spectral_miscoupling",
                "spectral mis-coupling $m_K$",
                "spectral mis-coupling",
                takes_options=True,
            ),
            CapturedEnergy(
                "captured_energy", "captured energy", "captured energy", bounded=True
            ),
            # The authors' released code reports this measure.
            SpectralMiscoupling(
                "released_norm",
                r"$\Vert |A| - S \Vert / \Vert s \Vert_2$ of the released code",
                "‖|A| − S‖ / ‖s‖₂ of the released code",
                absolute=True,
            ),
            SpectralMiscoupling(
                "released_trace",
                r"$\Vert |A| - S \Vert / \Vert s \Vert_1$ of the released code",
                "‖|A| − S‖ / ‖s‖₁ of the released code",
                p=1,
                absolute=True,
            ),
        )
    }
)
# What results say of the user's own measures, by name.
OWN_MEASURES = "own_measures"
# Prefixes of a measure's name in the data of a survey.
_MEAN = "mean_"
_NULL = "null_"


@checked
def measure_named(
    measure: AnyMeasure, *, p: Norm = 2, absolute: bool = False
) -> Measure:
    """Return the measure of a name, with its options.

    Args:
        measure: its name; the measure itself, which is returned; or a function of one's
            own, `A, S ↦ value`, see `OwnMeasure`.
        p, absolute: of `spectral_miscoupling`; ValueError with other measures.

    Raises ValueError for a function without a name, or with that of another measure.

    Example:
        >>> tlc.measures.measure_named("spectral_miscoupling", p=1).label_at(10)
        'spectral mis-coupling $m_K$ (k = 10, p = 1)'
    """
    if isinstance(measure, Measure):
        named = measure
    elif callable(measure):
        named = OwnMeasure.of(measure)
    else:
        named = MEASURES[measure]
        if named.takes_options:
            named = replace(named, p=p, absolute=absolute)
    options_are_its_own = (
        named.takes_options and named.p == p and named.absolute == absolute
    )
    # A measure that is passed as an object has its options already.
    if (p != 2 or absolute) and not options_are_its_own:
        raise ValueError(
            "`p` and `absolute` are options of 'spectral_miscoupling', "
            f"not of {named.name!r}: leave them out"
        )
    return named


def own_measures(measures: Iterable[AnyMeasure]) -> tuple[OwnMeasure, ...]:
    """Return those that are functions of the user's, each once.

    Raises ValueError where two functions have one name.
    """
    named = [measure_named(measure) for measure in measures]
    own = tuple(measure for measure in named if isinstance(measure, OwnMeasure))
    names = [measure.name for measure in own]
    if len(set(names)) < len(names):
        raise ValueError(f"`measures` must have different names, got {names}")
    return own


def facts_of_own(measures: Iterable[Measure]) -> dict[str, Any]:
    """Return what the provenance of a result says of the user's own measures, if any."""
    facts = {
        measure.name: measure.facts
        for measure in measures
        if isinstance(measure, OwnMeasure)
    }
    return {OWN_MEASURES: facts} if facts else {}


def label_of(name: str) -> str:
    """Return the label of a measure that a result names: of the user's own, its name."""
    labels = {measure.name: measure.label for measure in MEASURES.values()}
    return labels.get(name, name)


def words_of(name: str) -> str:
    """Return the words for a measure that a result names: of the user's own, its name."""
    words = {measure.name: measure.words for measure in MEASURES.values()}
    return words.get(name, name)


def measured_in(variables: Iterable[object]) -> list[str]:
    """Return the names of measures of which a survey's data hold the mean over pairs.

    Args:
        variables: names of all variables of the data.
    """
    names = [str(variable) for variable in variables]
    return [name.removeprefix(_MEAN) for name in names if name.startswith(_MEAN)]


def mean_name(measure: str) -> str:
    """Return what a measure's mean over pairs is called in the data of a survey."""
    return f"{_MEAN}{measure}"


def null_name(measure: str) -> str:
    """Return what the mean null of a measure is called in the data of a survey."""
    return f"{_NULL}{measure}"


@checked
def measure_of(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    measure: AnyMeasure = "coupling",
    *,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""Return a measure of coupling by its name.

    The names are `"coupling"`, which is `1 − m̃`, `"normalized_miscoupling"`,
    `"miscoupling"`, `"spectral_miscoupling"`, `"captured_energy"`, and what the
    authors' released code reports, `"released_norm"` and `"released_trace"`:

    .. math:: \frac{\||A| - S_{1,K}\|_F}{\|s_{1,K}\|_p} \quad \text{with } p = 2 \text{ and } p = 1

    `p` and `absolute` are options of `"spectral_miscoupling"`; ValueError with other
    measures. A function of one's own, `A, S ↦ value`, is taken in the place of a name: it
    gets A and the k largest singular values of each J_1, `[*batch k]`.

    Example:
        >>> A, S_1 = torch.tensor([[-2.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 1.0])
        >>> tlc.measures.measure_of(A, S_1, "released_norm")
        tensor(0.)
    """
    return measure_named(measure, p=p, absolute=absolute).value(A, S_1)


def measures_at_every_k(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    measures: Collection[Measure] = MEASURES.values(),
) -> Float[Tensor, "n_measures k *batch"]:
    """Return measures of every corner of A, in float64.

    By default all of `MEASURES`, in this order and with default options.
    """
    corners = _corners(A.double(), S_1)
    values = [measure.corner_values(corners) for measure in measures]
    # The axis of k stands last in each, and second in the result.
    return torch.stack(values).movedim(-1, 1)


def measures_of_map(
    matrices: Float[Tensor, "row col k k"],
    singular_values: Float[Tensor, "row n"],
    measures: Collection[Measure] = MEASURES.values(),
) -> Float[Tensor, "n_measures k row col"]:
    """Return `measures_at_every_k` of every pair, given the singular values of each
    row's Jacobian.

    As many rows at a time as keep what is computed on the way small.
    """
    n_together = max(1, _MOST_ENTRIES // matrices[0].numel())
    S_1 = singular_values[:, None]
    rows = zip(matrices.split(n_together), S_1.split(n_together), strict=True)
    return torch.cat([measures_at_every_k(A, S, measures) for A, S in rows], 2)


def _corners(
    A: Float[Tensor, "*batch k k"], S_1: Float[Tensor, "*#batch n"]
) -> Corners:
    s = top_values(S_1, A.shape[-1]).double()
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    # Entry [k, k] of sums along both axes is the sum over the corner.
    sums_of_squares = off_diagonal(A).square().cumsum(-1).cumsum(-2)
    off = sums_of_squares.diagonal(dim1=-2, dim2=-1)
    # NaN and infinity in A are found once, for all measures.
    size = require_finite((off + diagonal.square().cumsum(-1)).sqrt(), "A")
    length = s.square().cumsum(-1).sqrt()
    return Corners(
        A,
        diagonal,
        s,
        off,
        size,
        size_or_nan=nan_where_zero(size, "‖A‖_F"),
        length_or_nan=nan_where_zero(length, "‖s_{1,K}‖₂"),
    )
