"""What other standard methods cover for models in families, beside the one that is
used: why it is that one.

Each takes the slope of the pooled line, but the means of families theirs, and gives
half the width of its interval.
"""

import numpy as np
from scipy import stats

# Webb's six points: Rademacher's two give three families only eight different draws.
WEBB = np.sqrt([0.5, 1.0, 1.5])
N_WILD = 399


def half_widths(
    x: np.ndarray, y: np.ndarray, families: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Estimate and half width of the interval, by the name of the method."""
    n = len(x)
    n_families = families.max() + 1
    design = np.column_stack([np.ones(n), x])
    slope = (np.linalg.pinv(design) @ y)[1]
    intervals = {}
    for name, power, scale in (
        ("CR1", 0.0, n_families / (n_families - 1) * (n - 1) / (n - 2)),
        ("CR2", 0.5, 1.0),
        ("CR3", 1.0, (n_families - 1) / n_families),
    ):
        weights = np.sqrt(scale) * sandwich(design, families, power)
        error = np.sqrt(((weights @ y) ** 2).sum())
        products = weights @ weights.T
        freedom = np.trace(products) ** 2 / (products**2).sum()
        intervals[f"{name}, t(G − 1)"] = (
            slope,
            stats.t.ppf(0.975, n_families - 1) * error,
        )
        if power:
            intervals[f"{name}, Satterthwaite"] = (
                slope,
                stats.t.ppf(0.975, freedom) * error,
            )
    if n_families > 2:
        sizes = np.bincount(families)
        line = stats.linregress(
            *(np.bincount(families, values) / sizes for values in (x, y))
        )
        intervals["family means, t(G − 2)"] = (
            line.slope,
            stats.t.ppf(0.975, n_families - 2) * line.stderr,
        )
    return intervals


def sandwich(design: np.ndarray, families: np.ndarray, power: float) -> np.ndarray:
    """Return what each family's part of the slope's error is of y: `B X_gᵀ (I −
    H_gg)^(−power) (I − H)_g`, one row each.
    """
    bread = np.linalg.inv(design.T @ design)
    annihilator = np.eye(len(design)) - design @ bread @ design.T
    parts = []
    for family in range(families.max() + 1):
        own = families == family
        values, vectors = np.linalg.eigh(annihilator[np.ix_(own, own)])
        powers = np.where(values > 1e-9, np.maximum(values, 1e-9) ** -power, 0.0)
        parts.append(
            (bread @ design[own].T)[1]
            @ (vectors * powers)
            @ vectors.T
            @ annihilator[own]
        )
    return np.array(parts)


def wild_holds(
    x: np.ndarray,
    y: np.ndarray,
    families: np.ndarray,
    slope: float,
    rng: np.random.Generator,
) -> bool:
    """Whether the wild cluster bootstrap's interval holds a slope: its p of that slope,
    null imposed, exceeds .05.

    CR1 t statistics of `y − slope · x`, residuals of each family times one of Webb's
    points. Source: Cameron, Gelbach and Miller 2008, *Bootstrap-based improvements for
    inference with clustered errors*; Webb 2023.
    """
    centred = x - x.mean()
    n_families = families.max() + 1
    y = y - slope * x
    weights = np.concatenate([-WEBB, WEBB])[rng.integers(6, size=(N_WILD, n_families))]
    ys = np.vstack([y, y.mean() + weights[:, families] * (y - y.mean())])
    slopes = ys @ centred / (centred @ centred)
    residuals = ys - ys.mean(1, keepdims=True) - slopes[:, None] * centred
    scores = (residuals * centred) @ (families[:, None] == np.arange(n_families))
    t = np.abs(slopes) / np.sqrt((scores**2).sum(1))
    return bool((1 + (t[1:] >= t[0]).sum()) / (1 + N_WILD) > 0.05)
