"""Statistics of arrays and tables: intervals, permutations and fits, which know nothing
of models.
"""

# ruff: noqa: F401
from tl_coupling.statistics.attenuation import WANTED, Attenuation, attenuation
from tl_coupling.statistics.expressions import columns_of, evaluate
from tl_coupling.statistics.familywise import (
    ALL_MODELS,
    ALL_PROMPTS,
    Familywise,
    familywise,
)
from tl_coupling.statistics.fits import (
    ExponentialFit,
    LinearFit,
    Subset,
    check_not_repeated,
    complete_rows,
    covariate_fits,
    exponential_fit,
    family_codes,
    fits_within,
    least_squares,
    linear_fit,
    rows_to_fit,
    subset_fits,
    subset_mask,
)
from tl_coupling.statistics.intervals import (
    LEVEL,
    Interval,
    RankCorrelation,
    block_permutations,
    check_size,
    cluster_robust,
    crossed_mean,
    is_constant,
    orders_of_blocks,
    percentile_interval,
    prediction_interval,
    rank_correlation,
    rank_correlation_of_rows,
    resamples,
    simultaneous_band,
    t_interval,
)
from tl_coupling.statistics.mean_differences import (
    Difference,
    holm,
    paired_difference,
    unpaired_difference,
)

__all__ = [
    "LinearFit",
    "holm",
    "linear_fit",
    "paired_difference",
    "unpaired_difference",
]
__dir__ = __all__.copy
