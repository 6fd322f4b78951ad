"""How much a line depends on single models, and on single families of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas

from tl_coupling.statistics import LEVEL, Interval
from tl_coupling.statistics.fits import (
    LinearFit,
    family_codes,
    least_squares,
    linear_fit,
    rows_to_fit,
)

# Above it p is not significant.
ALPHA = round(1 - LEVEL, 4)


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The linear fit without each model, or each family, in turn.

    Attributes:
        table: by model or family, `slope`, `r_squared` and `p` of the fit without it;
            of models before these `cooks_distance`; `dfbetas`, by how many standard
            errors it moves the slope.
        most_influential, r_squared_range: without which R² changes most; smallest and
            largest R² without one.
        sign_changes, not_significant: without which the slope has the other sign, or p
            first exceeds 0.05.
    """

    table: pandas.DataFrame = field(repr=False)
    most_influential: str
    r_squared_range: Interval
    sign_changes: tuple[str, ...]
    not_significant: tuple[str, ...]


def leave_one_out(
    table: pandas.DataFrame, x: str, y: str, *, families: str | None = None
) -> LeaveOneOut:
    """How much the linear fit of y on x depends on each model: the column `model` if
    there is one, else the index.

    Errors as in `linear_fit`, also of the fits without a model, and for fewer than four
    models. `families` as there.
    """
    rows = rows_to_fit(table, (x,), y)
    if len(rows) < 4:
        raise ValueError(f"leaving one model out needs at least four, got {len(rows)}")
    names = [
        str(name)
        for name in (table.loc[rows.index, "model"] if "model" in table else rows.index)
    ]
    kept = (
        (name, table.drop(index)) for name, index in zip(names, rows.index, strict=True)
    )
    influence = least_squares(rows[y].to_numpy(), rows[x].to_numpy()).get_influence()
    # A model alone at its x has leverage 1: without it there is no slope, and its
    # distance is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = {
            "cooks_distance": influence.cooks_distance[0],
            "dfbetas": influence.dfbetas[:, 1],
        }
        return _left_out(
            "model", kept, linear_fit(table, x, y, families=families), families, columns
        )


def leave_one_family_out(
    table: pandas.DataFrame, x: str, y: str, *, families: str
) -> LeaveOneOut:
    """How much the linear fit of y on x depends on each family of at least two models.

    Errors as in `linear_fit`, also of the fits without a family, and where there is
    none of two models.
    """
    codes = family_codes(table, families)
    several = np.flatnonzero(np.bincount(codes) > 1)
    if not len(several):
        raise ValueError(f"no two models have the same {families!r}")
    names = [str(table[families].to_numpy()[codes == code][0]) for code in several]
    kept = (
        (name, table[codes != code]) for name, code in zip(names, several, strict=True)
    )
    return _left_out(
        "family", kept, linear_fit(table, x, y, families=families), families, {}
    )


def _left_out(
    kind: str,
    kept: Iterator[tuple[str, pandas.DataFrame]],
    whole: LinearFit,
    families: str | None,
    columns: dict[str, np.ndarray],
) -> LeaveOneOut:
    """The fits to what is kept without each, beside that to the whole; `columns` stand
    first in the table.
    """
    names, without = [], []
    for name, rest in kept:
        try:
            fit = linear_fit(rest, whole.x, whole.y, families=families)
        except ValueError as error:
            raise ValueError(f"without {name!r}: {error}") from None
        names.append(name)
        without.append((fit.slope, fit.r_squared, fit.p))
    found = pandas.DataFrame(
        without, pandas.Index(names, name=kind), ["slope", "r_squared", "p"]
    )
    found = pandas.concat([pandas.DataFrame(columns, found.index), found], axis=1)
    r_squared = found["r_squared"].to_numpy()
    most = names[int(abs(r_squared - whole.r_squared).argmax())]
    sign_changes = tuple(found.index[np.sign(found["slope"]) != np.sign(whole.slope)])
    not_significant = tuple(found.index[(found["p"] > ALPHA) & (whole.p <= ALPHA)])
    return LeaveOneOut(
        found,
        most,
        (float(r_squared.min()), float(r_squared.max())),
        sign_changes,
        not_significant,
    )
