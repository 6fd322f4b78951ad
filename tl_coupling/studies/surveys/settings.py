"""How prompts are measured, and what prompts are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.jacobians import AnyMethod, check_method
from tl_coupling.measures import (
    MEASURES,
    AnyMeasure,
    Measure,
    MeasureName,
    Norm,
    Orientation,
    OwnMeasure,
    Without,
    facts_of_own,
    mean_name,
    measure_named,
    null_name,
)
from tl_coupling.trajectories import Window

PAPER_PROMPT = "What is the capital of France? The capital is"
# The measures of surveys that were made before others could be chosen.
_PAPER_MEASURES: tuple[MeasureName, ...] = (
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
)
# What else the data of a survey hold, by name; a function of the user's has its own.
VARIABLES = frozenset(
    {
        *(
            "branch",
            "carried_share",
            "jacobian_share",
            "checkpoint",
            "depth",
            "distance",
        ),
        *("equidistance", "equidistance_all_tokens", "expodistance", "k", "layer"),
        *("expodistance_all_tokens", "line_shape_score", "line_shape_score_all_tokens"),
        *("line_shape_score_by_depth", "locality", "log_largest", "logit_lens_entropy"),
        *("loss", "model", "n_pos", "norm", "null_excess_high", "null_excess_low"),
        *("null_product_participation_ratio", "orientation", "other_layer", "prompt"),
        *("product_participation_ratio", "remarks", "singular_value", "task", "window"),
        *("singular_values", "step_length", "windowed_line_shape_score"),
        *("d_model", "n_layers", "n_parameters", "peak_memory", "seconds", "text"),
        *("alignment_gain", "alignment_gain_high", "alignment_gain_low"),
    }
)
IMPLIED = {
    "measures": list(_PAPER_MEASURES),
    "p": 2,
    "absolute": False,
    "diagonal": False,
}


@made_by("Settings(k=…)")
@checked
@dataclass(frozen=True)
class Settings:
    """How prompts are measured.

    Attributes:
        k: numbers of top singular vectors; one computation gives all.
        position: as in `depth_coupling`.
        orientation: `"ujv"`, `"vju"`, or both, from the same Jacobians: then they are a
            dimension of the data.
        final_norm, prepend_bos: as in `trace`.
        window: steps in a window of the line-shape score; fewer if the model has fewer
            blocks.
        n_singular_values: how many singular values are kept, or the largest k if that
            is more.
        measures: which measures of coupling. By default those of the papers;
            `tuple(measures.MEASURES)` are all, with what the released code reports,
            `"released_norm"` and `"released_trace"`. Functions of one's own are taken
            beside names, see `CouplingMap.values`; in the data they go by their names.
            For other processes they must be at the top level of a module.
        p, absolute: of `spectral_miscoupling`.
        diagonal: whether means (and their nulls) are over all pairs of layers, as in
            the paper's section 5.4; by default they are over pairs of different layers.
            A layer is coupled with itself exactly, which adds `(1 − c) / n_layers` to a
            mean coupling c: more in a shallow model. `with_diagonal` changes it
            afterwards.
        dynamics: whether products of blocks are measured too; see
            `dynamics.products`, whose 20 draws take longer than coupling.
        carriers: whether the shares of attention and MLP are measured too, at the
            smallest k; see `carriers`.
        without: as in `depth_coupling`: `"identity"` for coupling of what is left
            without multiples of the identity.
        metric: `"stream"` for coupling in `measures.stream_metric` of all prompts, in
            each model's own stream.
        method: as in `depth_coupling`: `"products"` forms no Jacobian for it, `"auto"`
            none where that takes less.
        batch: as in `depth_coupling`, of one prompt's blocks.

    Raises:
        ValueError: no k, orientation or measure, or one twice; `method="products"`
            beside `without` or `metric`, which need the Jacobians.

    Example:
        >>> settings = tlc.Settings(k=(2, 4), orientation=("ujv", "vju"), window=1)
        >>> data = tlc.surveys.measure_prompts(model, "w1 w2 w3", settings)
        >>> dict(data.mean_coupling.sizes)
        {'prompt': 1, 'orientation': 2, 'k': 2}
    """

    k: tuple[Count, ...] = (10, 30, 50)
    position: int = -1
    orientation: Orientation | tuple[Orientation, ...] = "ujv"
    final_norm: bool = False
    prepend_bos: bool | None = None
    window: Window = 11
    n_singular_values: Count = 10
    measures: tuple[AnyMeasure, ...] = _PAPER_MEASURES
    p: Norm = 2
    absolute: bool = False
    diagonal: bool = False
    dynamics: bool = False
    carriers: bool = False
    without: Without | None = None
    metric: Literal["stream"] | None = None
    method: AnyMethod = "jacobians"
    batch: Count | None = None

    def __post_init__(self) -> None:
        if not _are_different(self.k):
            raise ValueError(
                f"`k` must be different whole numbers, one or more, got {list(self.k)}"
            )
        if not _are_different(self.orientations):
            raise ValueError(
                "`orientation` must be different ones, one or more, "
                f"got {list(self.orientations)}"
            )
        names = [measure.name for measure in self.named_measures]
        if not _are_different(names):
            raise ValueError(
                f"`measures` must be different ones, one or more, got {names}"
            )
        for measure in self.own_measures:
            _check_name_is_free(measure.name)
        # Functions become measures here, once: what tells them apart is read from their
        # source, which a worker may not have.
        kept = [self._kept_measure(measure_named(measure)) for measure in self.measures]
        object.__setattr__(self, "measures", tuple(kept))
        is_changed = self.without is not None or self.metric is not None
        check_method(self.method, is_changed)

    @property
    def orientations(self) -> tuple[Orientation, ...]:
        """One orientation, or both."""
        if isinstance(self.orientation, str):
            return (self.orientation,)
        return self.orientation

    @property
    def named_measures(self) -> tuple[Measure, ...]:
        """The measures as objects, `spectral_miscoupling` with its options."""
        return tuple(self._with_options(measure) for measure in self.measures)

    def _with_options(self, measure: AnyMeasure) -> Measure:
        named = measure_named(measure)
        if named == MEASURES["spectral_miscoupling"]:
            return replace(named, p=self.p, absolute=self.absolute)
        return named

    def _kept_measure(self, measure: Measure) -> AnyMeasure:
        """Return what settings keep of a measure: its name, or the user's own itself."""
        if isinstance(measure, OwnMeasure):
            return measure
        name: MeasureName = next(name for name in MEASURES if name == measure.name)
        if measure not in (MEASURES[name], self._with_options(name)):
            raise ValueError(
                f"`measures` has {name!r} with options: give its name, and the options as "
                "`Settings(p=…, absolute=…)`"
            )
        return name

    @property
    def own_measures(self) -> tuple[OwnMeasure, ...]:
        """Those that are functions of the user's."""
        measures = self.named_measures
        return tuple(measure for measure in measures if isinstance(measure, OwnMeasure))

    def largest(self, d_model: int) -> int:
        """Return how many singular vectors are needed of a model that wide."""
        # A k beyond the width is an error of the comparison; singular values are simply
        # as many as there are.
        return max(*self.k, min(self.n_singular_values, d_model))

    def as_plan(self) -> dict[str, object]:
        """Return the settings, JSON-able."""
        plan = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        for added_later in ("dynamics", "carriers", "without", "metric", "method"):
            # Surveys that are older than these settings go on.
            if plan[added_later] in (False, None, "jacobians"):
                del plan[added_later]
        # How many are computed at a time changes no result.
        del plan["batch"]
        plan["measures"] = [measure.name for measure in self.named_measures]
        # Another function of the same name is another plan.
        return plan | facts_of_own(self.own_measures)


def _check_name_is_free(name: str) -> None:
    """Raise ValueError for a name of a function that means something else in the data."""
    if name in VARIABLES or name.startswith((mean_name(""), null_name(""))):
        raise ValueError(
            f"a survey's data hold something else under the name {name!r}: give your "
            "function a name of its own"
        )


def _are_different(values: Sequence[object]) -> bool:
    """Say whether there are values, each once."""
    return len(values) == len(set(values)) > 0
