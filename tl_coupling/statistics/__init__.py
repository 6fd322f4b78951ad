"""Intervals, permutations and fits: pure arrays and tables."""

# ruff: noqa: F401
from tl_coupling.statistics.intervals import (
    LEVEL,
    Interval,
    RankCorrelation,
    block_permutations,
    check_size,
    cluster_robust,
    crossed_mean,
    is_constant,
    percentile_interval,
    rank_correlation,
    rank_correlation_of_rows,
    resamples,
    t_interval,
)
