"""What measures of coupling would be if the singular vectors of J_2 were random.

Three nulls, each with less left to chance. A measure that exceeds one of them is not
explained by what it keeps.

* "space": `U_2`, `V_2` are any orthonormal frames of the whole space (Haar-random,
  independent). Keeps J_1.
* "spans": any orthonormal bases of the spans that J_2's own vectors have, left and
  right independently: `A → Qᵀ A R`. Keeps how much of J_1 those spans hold, and so
  `‖A‖_F`.
* "pairs": both bases turned alike, `A → Qᵀ A Q`. Keeps also which left direction
  belongs to which right one, and leaves to chance only the choice of axes: coupling
  above this null is coupling of singular directions, one by one.

Closed forms are root mean squares, which for m̃ lie above the mean: of `1 − √(1 − 1/k)`
the mean coupling of random subspaces is 1.138 times at k = 2, 1.061 times at k = 3 and
1.005 times at k = 10, where A is Gaussian, as for a flat spectrum in many dimensions
(`mean_random_coupling`). `draws_of_random_subspaces` gives means and quantiles of any
other spectrum.
"""

import math
from collections.abc import Collection, Iterator
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.measures.matrices import Norm, require_finite, top_values
from tl_coupling.measures.measure import (
    MEASURES,
    AnyMeasure,
    Measure,
    measure_named,
    measures_at_every_k,
)
from tl_coupling.measures.moments import (
    mean_absolute_entry,
    moments_in_space,
    moments_in_spans,
    remaining_value,
)
from tl_coupling.spectra import check_k

Null = Literal["space", "spans", "pairs"]
# On a CPU torch takes the last 32 bits of a larger seed; seeds of 64 bits overflow.
_N_SEEDS = 2**32
# Numbers in memory at once.
_MOST_NUMBERS = 2**22
# Draws of a null without a closed form. Its error is a twentieth of the spread of one
# pair's values: as much as `null_interval` leaves unknown.
_N_DRAWS = 400


@checked
def random_subspace_null(
    k: Count,
    measure: AnyMeasure = "coupling",
    *,
    d_model: Count | None = None,
    S_1: Float[Tensor, "*batch n"] | None = None,
    frobenius_norm: Float[Tensor, "*batch"] | None = None,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "..."]:
    r"""Return what a measure would be if the singular vectors of `J_2` were random.

    The null "space", in root mean square. `U_2` and `V_2` are independent Haar-random
    frames. The entries of A are then exchangeable, whatever `J_1` is:

    .. math:: \mathbb{E}[\tilde m^2] = 1 - \frac1k

    and with `E a_ij² = ‖J_1‖_F²/d²`

    * miscoupling: `E[m²] = (k² − k) ‖J_1‖_F² / d²`;
    * captured energy: `k ‖J_1‖_F / (d ‖s_{1,k}‖₂)`;
    * spectral: `E‖A − S_{1,k}‖² = k² ‖J_1‖_F² / d² + ‖s_{1,k}‖₂² − 2 E|a| Σ s_i`, with
      `E|a| = 0` unless `absolute`.

    `E|a| = E|uᵀ J_1 v| = E|u_1| · E‖J_1 v‖` is a one-dimensional integral; the singular
    values that are not given are taken as equal, with the energy that remains of
    `frobenius_norm`. The mean coupling of random subspaces is a little above this root
    mean square: 1.138 times at k = 2, 1.005 times at k = 10 (where A is Gaussian).

    Args:
        k: size of A.
        measure: `"coupling"` gives `1 − √(1 − 1/k)`: 0.051 at k = 10, 0.010 at k = 50.
            A function of one's own has no closed form: its null is the mean of 400
            draws, `draws_of_random_subspaces`, with the same random numbers at each
            call.
        d_model, S_1, frobenius_norm: of J_1; needed by the measures that depend on it.
        p, absolute: as in `measure_of`.

    Raises:
        ValueError: k above `d_model`, or what the measure needs is missing; `p` or
            `absolute` of a measure without such options.

    Example:
        >>> tlc.random_subspace_null(10)
        tensor(0.0513, dtype=torch.float64)
        >>> S_1 = torch.ones(40)
        >>> J_1 = {"d_model": 40, "S_1": S_1, "frobenius_norm": S_1.norm()}
        >>> tlc.random_subspace_null(10, "captured_energy", **J_1)
        tensor(0.5000, dtype=torch.float64)
    """
    if d_model is not None:
        check_k(k, d_model)
    measured = measure_named(measure, p=p, absolute=absolute)
    known_null = measured.null_of_any_jacobian(k)
    if known_null is not None:
        return known_null
    if d_model is None or S_1 is None or frobenius_norm is None:
        raise ValueError(
            f"the null of {measured.name!r} depends on J_1: "
            "give d_model, S_1 and frobenius_norm"
        )
    s = top_values(S_1, k).double()
    norm = frobenius_norm.double()
    # A signed entry is 0 in the mean.
    entry = torch.zeros_like(norm)
    if measured.absolute:
        entry = mean_absolute_entry(S_1.double(), norm, d_model)
    null = measured.null(moments_in_space(s, d_model, norm, entry))
    if null is not None:
        return null
    values = draws_of_measure(
        measured,
        k,
        _N_DRAWS,
        d_model=d_model,
        S_1=S_1,
        frobenius_norm=frobenius_norm,
        generator=seeded(0),
    )
    return measured.null_of_draws(values)


def draws_of_measure(
    measure: Measure,
    k: int,
    n: int,
    *,
    d_model: int,
    S_1: Float[Tensor, "*batch n_values"],
    frobenius_norm: Float[Tensor, "*batch"],
    generator: torch.Generator,
) -> Float[Tensor, "n_draws ..."]:
    """Draw what a measure is of random `U_2, V_2`, n times; see
    `draws_of_random_subspaces`.
    """
    S = S_1.double()
    drawn = _random_matrices(k, n, d_model, S, frobenius_norm, generator)
    return torch.cat([measure.value(A, S) for A in drawn])


def _random_matrices(
    k: int,
    n: int,
    d_model: int,
    S_1: Float[Tensor, "*batch n_values"],
    frobenius_norm: Float[Tensor, "*batch"],
    generator: torch.Generator,
) -> Iterator[Float[Tensor, "n_some *batch k k"]]:
    """Yield what `draws_of_random_subspaces` draws, as many as fit into memory."""
    n_at_once = max(1, _MOST_NUMBERS // (frobenius_norm.numel() * k * k))
    for some in torch.arange(n).split(n_at_once):
        yield draws_of_random_subspaces(
            k,
            len(some),
            d_model=d_model,
            S_1=S_1,
            frobenius_norm=frobenius_norm,
            generator=generator,
        )


@checked
def mean_random_coupling(k: Count) -> float:
    r"""Return the mean coupling of random subspaces, where A is Gaussian.

    That is what a mean of couplings is compared with; `random_subspace_null` is a root
    mean square, further from it the smaller k is. With independent normal entries, as
    for a flat spectrum in many dimensions, the diagonal's share of `‖A‖_F²` is
    Beta-distributed with `k/2` and `b = k(k − 1)/2`, and so

    .. math::

        \mathbb{E}[1 - \tilde m] = 1 - \frac{\Gamma(b + 1/2)\, \Gamma(k^2/2)}
        {\Gamma(b)\, \Gamma((k^2 + 1)/2)} .

    Raises:
        ValueError: k below 1.

    Example:
        >>> [round(tlc.measures.mean_random_coupling(k), 4) for k in (1, 2, 10)]
        [1.0, 0.3333, 0.0516]
    """
    # Γ(b) has a pole at b = 0: a 1×1 matrix is diagonal.
    if k == 1:
        return 1.0
    off_diagonal = k * (k - 1) / 2
    size = k * k / 2
    # Logarithms are subtracted, as Γ itself overflows from 172 on.
    log_ratio = math.lgamma(off_diagonal + 0.5) - math.lgamma(off_diagonal)
    log_ratio += math.lgamma(size) - math.lgamma(size + 0.5)
    return -math.expm1(log_ratio)


def nulls_at_every_k(
    S_1: Float[Tensor, "*batch k"],
    frobenius_norm: Float[Tensor, "*batch"],
    d_model: int,
    measures: Collection[Measure] = MEASURES.values(),
) -> Float[Tensor, "n_measures k *batch"]:
    """Return `random_subspace_null` of measures at every k.

    By default of all of `MEASURES`, in this order and with default options.
    """
    S = require_finite(S_1, "S_1").double()
    norm = frobenius_norm.double()
    # The mean of an entry does not depend on k: one integral serves all.
    signed_entry = torch.zeros_like(norm)
    absolute_entry = mean_absolute_entry(S, norm, d_model)

    def null(measure: Measure, k: int) -> Tensor | None:
        known_null = measure.null_of_any_jacobian(k)
        if known_null is not None:
            return known_null.expand(norm.shape)
        entry = absolute_entry if measure.absolute else signed_entry
        return measure.null(moments_in_space(S[..., :k], d_model, norm, entry))

    def nulls(measure: Measure) -> Tensor:
        nulls_by_k = [null(measure, k) for k in range(1, S.shape[-1] + 1)]
        known_nulls = [value for value in nulls_by_k if value is not None]
        if len(known_nulls) < len(nulls_by_k):
            return _drawn_nulls_at_every_k(measure, S, norm, d_model)
        return torch.stack(known_nulls)

    return torch.stack([nulls(measure).cpu() for measure in measures])


def _drawn_nulls_at_every_k(
    measure: Measure,
    S_1: Float[Tensor, "*batch k"],
    frobenius_norm: Float[Tensor, "*batch"],
    d_model: int,
) -> Float[Tensor, "k ..."]:
    """Return a null without a closed form: every k from corners of the same draws."""
    k = S_1.shape[-1]
    drawn = _random_matrices(k, _N_DRAWS, d_model, S_1, frobenius_norm, seeded(0))
    values = [measures_at_every_k(A, S_1, (measure,))[0] for A in drawn]
    # From `[k n *batch]`: draws stand first.
    return measure.null_of_draws(torch.cat(values, 1).movedim(1, 0))


@checked
def rotation_null(
    A: Float[Tensor, "*batch k k"],
    S_1: Float[Tensor, "*#batch n"],
    measure: AnyMeasure = "coupling",
    *,
    paired: bool = True,
    p: Norm = 2,
    absolute: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""Return what a measure would be in random bases of J_2's own spans.

    The nulls "pairs" and "spans", in root mean square. With a Haar-random rotation Q of
    the k directions ("pairs"), and with independent Q and R ("spans"),

    .. math::

        \mathbb{E} \sum_i (Q^\top A Q)_{ii}^2
        = \frac{\operatorname{tr}(A)^2 + \operatorname{tr}(A^2) + \|A\|_F^2}{k + 2},
        \qquad \mathbb{E} \sum_i (Q^\top A R)_{ii}^2 = \frac{\|A\|_F^2}{k}

    The means of the entries are `tr(A) / k` and 0; `‖A‖_F` does not change. So
    independent bases leave m̃ at `√(1 − 1/k)`, as in the whole space: two blocks that
    share their spans, and no more than that, have the coupling of random subspaces.
    Paired bases leave a multiple of the identity as it is: its coupling is 1, under
    this null too.

    Args:
        A: a coupling matrix, or many.
        S_1: singular values of J_1, at least k of them.
        measure, p, absolute: as in `measure_of`.
        paired: whether left and right are turned alike.

    NaN, with a warning, where `A = 0` or `S_1 = 0` leaves the measure undefined. Cost:
    with `absolute` a decomposition and a one-dimensional integral for each A, else
    nothing. A function of one's own has no closed form: the mean of 400 draws is taken,
    of the same rotations for all A.

    Example:
        >>> A, S_1 = torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([2.0, 1.0])
        >>> null = tlc.measures.rotation_null(A, S_1, "normalized_miscoupling")
        >>> 1 - null**2, 1 - 1 / 20
        (tensor(0.9500, dtype=torch.float64), 0.95)
    """
    measured = measure_named(measure, p=p, absolute=absolute)
    s = top_values(S_1, A.shape[-1]).double()
    A = require_finite(A, "A").double()
    moments = moments_in_spans(A, s, paired=paired, absolute=measured.absolute)
    null = measured.null(moments)
    if null is not None:
        return null
    return measured.null_of_draws(_draws_in_spans(measured, A, s, paired=paired))


def _draws_in_spans(
    measure: Measure,
    A: Float[Tensor, "*batch k k"],
    s: Float[Tensor, "*#batch k"],
    *,
    paired: bool,
) -> Float[Tensor, "n_draws ..."]:
    """Draw what a measure is in random bases of J_2's spans, the same ones for all A."""
    k = A.shape[-1]
    generator = seeded(0)
    drawn = []
    for _ in range(_N_DRAWS):
        left = random_rotations(k, generator=generator)
        right = left
        if not paired:
            right = random_rotations(k, generator=generator)
        turned = left.mT.to(A) @ A @ right.to(A)
        drawn.append(measure.value(turned, s))
    return torch.stack(drawn)


def seeded(seed: int) -> torch.Generator:
    """Return a generator of random numbers; a seed of any size has its own.

    Those of 32 bits or fewer are torch's, longer ones are hashed by numpy.
    """
    if seed >= _N_SEEDS:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return torch.Generator().manual_seed(seed)


def random_rotations(
    *shape: int, columns: int | None = None, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Draw independent Haar-random orthogonal matrices, or their first columns.

    From the QR decomposition of Gaussians, in float64 (Mezzadri 2007). The last of
    `shape` is their size d; the others are a batch.

    Args:
        shape: that of the result, without `columns`: `2, 5` for two 5×5 matrices.
        columns: how many columns of each, all by default.
        generator: of the random numbers.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> Q = tlc.measures.random_rotations(2, 5, generator=generator)
        >>> torch.allclose(Q.mT @ Q, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))
        True
    """
    *batch, d = shape
    gaussian = torch.randn(
        *batch, d, columns or d, generator=generator, dtype=torch.float64
    )
    return _orthonormal(gaussian)


def _orthonormal(
    gaussian: Float[Tensor, "*batch d columns"],
) -> Float[Tensor, "*batch d columns"]:
    """Return the frames of Gaussian matrices, which are uniform."""
    Q, R = torch.linalg.qr(gaussian)
    # LAPACK's signs are a convention; those of R's diagonal make Q uniform.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


@checked
def draws_of_random_subspaces(
    k: Count,
    n: Count,
    *,
    d_model: Count,
    S_1: Float[Tensor, "*batch n_values"],
    frobenius_norm: Float[Tensor, "*batch"],
    generator: torch.Generator,
) -> Float[Tensor, "n *batch k k"]:
    """Draw n coupling matrices of random `U_2, V_2`: the null "space", one by one.

    For what its closed forms do not say. `A = Uᵀ S V`, where the singular values that
    are not given are equal, as in `random_subspace_null`. All J_1 of a batch meet the
    same frames of their own singular vectors. Cost: two QR decompositions of `[d_model,
    k]` a draw.

    Args:
        k: size of A.
        n: how many.
        d_model, S_1, frobenius_norm: of J_1; S_1 are its largest singular values.
        generator: of the random numbers.

    Raises ValueError for a k above `d_model`, and for NaN or infinite singular values.

    Example:
        >>> S_1, generator = torch.ones(40), torch.Generator().manual_seed(0)
        >>> J_1 = {"d_model": 40, "S_1": S_1, "frobenius_norm": S_1.norm()}
        >>> A = tlc.measures.draws_of_random_subspaces(
        ...     2, 4000, **J_1, generator=generator
        ... )
        >>> m = tlc.normalized_miscoupling(A)
        >>> round(float(m.square().mean().sqrt()), 2), round(float(m.mean()), 2)
        (0.71, 0.67)
    """
    check_k(k, d_model)
    s = require_finite(S_1, "S_1").double()
    n_known = s.shape[-1]
    equal_value = remaining_value(S_1.double(), frobenius_norm.double(), d_model)
    # S is `equal_value · 1` and, for the singular values that are known, the excess.
    excess = (s - equal_value[..., None])[..., None, :]
    # The larger of a draw's two frames, and of one frame times the excess of each J_1.
    n_numbers = max(2 * d_model * k, k * excess.numel())
    n_at_once = max(1, _MOST_NUMBERS // n_numbers)
    batch = (1,) * (s.ndim - 1)
    draws = s.new_empty(n, *s.shape[:-1], k, k)
    for some in draws.split(n_at_once):
        # Each draw by itself: its numbers do not depend on how many there are.
        gaussian = torch.stack(
            [
                torch.randn(2, d_model, k, generator=generator, dtype=torch.float64)
                for _ in some
            ]
        )
        U, V = (
            frames.reshape(-1, *batch, d_model, k)
            for frames in _orthonormal(gaussian).to(s.device).unbind(1)
        )
        # [k n_known] times the excess of each column, times [n_known k]
        known_part = U[..., :n_known, :].mT * excess @ V[..., :n_known, :]
        some[:] = known_part + equal_value[..., None, None] * (U.mT @ V)
    return draws
