"""How much a line depends on single models, and on single families of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas
from jaxtyping import Float

from tl_coupling.statistics import (
    LEVEL,
    Interval,
    LinearFit,
    family_codes,
    least_squares,
    linear_fit,
    rows_to_fit,
)

# Above it p is not significant.
# Rounded, as 1 − 0.95 is not 0.05 in binary.
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
    """Fit the line of y on x without each model in turn.

    Models are named by the column `model` if there is one, else by the index;
    `families` as in `linear_fit`.

    Raises:
        ValueError: fewer than four models; as in `linear_fit`, also of the fits without
            a model.
    """
    rows = rows_to_fit(table, (x,), y)
    if len(rows) < 4:
        raise ValueError(f"leaving one model out needs at least four, got {len(rows)}")
    # `rows` has the models with both values only.
    models = table.loc[rows.index, "model"] if "model" in table else rows.index
    remaining = (
        (str(model), table.drop(index))
        for model, index in zip(models, rows.index, strict=True)
    )
    influence = least_squares(rows[y].to_numpy(), rows[x].to_numpy()).get_influence()
    # A model alone at its x has leverage 1: without it there is no slope, and its
    # distance is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = {
            "cooks_distance": influence.cooks_distance[0],
            "dfbetas": influence.dfbetas[:, 1],
        }
        line = linear_fit(table, x, y, families=families)
        return _leave_each_out("model", remaining, line, families, columns)


def leave_one_family_out(
    table: pandas.DataFrame, x: str, y: str, *, families: str
) -> LeaveOneOut:
    """Fit the line of y on x without each family of at least two models in turn.

    Raises:
        ValueError: there is no family of two models; as in `linear_fit`, also of the
            fits without a family.
    """
    codes = family_codes(table, families)
    # Without a family of one it is `leave_one_out`.
    shared_codes = np.flatnonzero(np.bincount(codes) > 1)
    if not len(shared_codes):
        raise ValueError(f"no two models have the same {families!r}")
    labels = table[families].to_numpy()
    remaining = (
        (str(labels[codes == code][0]), table[codes != code]) for code in shared_codes
    )
    line = linear_fit(table, x, y, families=families)
    return _leave_each_out("family", remaining, line, families, {})


def _leave_each_out(
    kind: str,
    remaining: Iterator[tuple[str, pandas.DataFrame]],
    line: LinearFit,
    families: str | None,
    columns: dict[str, Float[np.ndarray, " n"]],
) -> LeaveOneOut:
    """Fit the line again without each model or family, and compare it with `line`.

    `line` is the fit to all models. `remaining` yields the name of what is left out and
    the table without it. The result's table has `kind` as the name of its index, and
    `columns` before those of the fits.
    """
    names = []
    fits = []
    for name, rest in remaining:
        try:
            fit = linear_fit(rest, line.x, line.y, families=families)
        except ValueError as error:
            raise ValueError(f"without {name!r}: {error}") from None
        names.append(name)
        fits.append((fit.slope, fit.r_squared, fit.p))
    index = pandas.Index(names, name=kind)
    reduced_fits = pandas.DataFrame(fits, index, ["slope", "r_squared", "p"])
    r_squared = reduced_fits["r_squared"].to_numpy()
    changes = abs(r_squared - line.r_squared)
    has_other_sign = np.sign(reduced_fits["slope"]) != np.sign(line.slope)
    # Only what was significant with all can lose it; where p is not known (NaN) it has.
    loses_significance = ~(reduced_fits["p"] <= ALPHA) & (line.p <= ALPHA)
    return LeaveOneOut(
        table=pandas.concat([pandas.DataFrame(columns, index), reduced_fits], axis=1),
        most_influential=names[int(changes.argmax())],
        r_squared_range=(float(r_squared.min()), float(r_squared.max())),
        sign_changes=tuple(index[has_other_sign]),
        not_significant=tuple(index[loses_significance]),
    )
