"""The Jacobians of a block's parts, each at what it got in one call of the block on one
token.

From TransformerLens' weights and hook points:

* **a norm** `w ⊙ n + b`, `n = (x − mean) / scale`: `diag(w / scale) (I − n nᵀ/d − 1
  1ᵀ/d)`, the last term where it subtracts the mean. Any module that computes this is a
  norm;
* **an MLP** `W_outᵀ h(W_gateᵀ n, W_inᵀ n)`, h elementwise: `W_outᵀ (diag(∂h/∂pre)
  W_gateᵀ + diag(∂h/∂pre_linear) W_inᵀ)`, one large product;
* **attention** of one query: `W_Oᵀ dz`, where each head has `dz = G_q W_Qᵀ + G_k W_Kᵀ +
  G_v W_Vᵀ` with small G;
* **anything else**: what reverse mode gives for that part alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.blocks.calls import hidden_states
from tl_coupling.blocks.contexts import BlockError, Context
from tl_coupling.blocks.evaluation import PullBack, reverse_mode, vjp

# How well a norm is reproduced where it is recognised.
_NORM_TOLERANCE = 1e-5
# And each head's Jacobians where heads are taken one by one.
_HEADS_TOLERANCE = 1e-4


class Part(NamedTuple):
    """One call of a module within a block, on one token.

    `inputs` are `rows_in` its arguments. `context` is entered to repeat it.
    `meets_context` says that keys and values of other rows were met in it: it is
    attention, or holds it.
    """

    module: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    inputs: dict[int | str, Tensor]
    output: object
    context: Callable[[], AbstractContextManager[object]]
    meets_context: bool

    @property
    def value(self) -> Tensor:
        """The row that it gave."""
        return hidden_states(self.output)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the module gives for the same rows again, or for others."""
        args = list(self.args)
        kwargs = dict(self.kwargs)
        if inputs:
            for key, rows in zip(self.inputs, inputs, strict=True):
                if isinstance(key, int):
                    args[key] = rows
                else:
                    kwargs[key] = rows
        with self.context():
            return hidden_states(self.module(*args, **kwargs))

    def hook_function(self, names: Sequence[str], last: str) -> Callable[..., Tensor]:
        """Return what the hook point `last` sees, as a function of shifts elsewhere.

        The shifts are added at the hook points of these names.
        """

        def value(*shifts: Tensor) -> Tensor:
            with shared_changes() as hooks:
                for name, shift in zip(names, shifts, strict=True):
                    point = getattr(self.module, name)
                    hooks.enter_context(point.register_forward_hook(_adding(shift)))
                point = getattr(self.module, last)
                hooks.enter_context(point.register_forward_hook(_ending))
                try:
                    self()
                except _Seen as seen:
                    return seen.value.reshape(-1)
            raise BlockError(f"{last} did not fire")

        return value


class _Seen(Exception):
    """What a hook point saw: the rest of the part need not run."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _ending(_: nn.Module, __: tuple[object, ...], output: Tensor) -> None:
    """End the part's run with what a hook point gives."""
    raise _Seen(output)


def _adding(shift: Tensor) -> Callable[[nn.Module, tuple[object, ...], Tensor], Tensor]:
    """Return a forward hook that adds to what the module gives."""
    return lambda _, __, output: output + shift.view_as(output)


class Norm(NamedTuple):
    """The Jacobian `diag(gain) (I − basisᵀ basis)`."""

    gain: Float[Tensor, " d"]
    basis: Float[Tensor, "n_directions d"]

    def image(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return what it makes of each row."""
        projected = rows @ self.basis.mT
        return torch.addmm(rows, projected, self.basis, alpha=-1).mul_(self.gain)

    def composed(self, J: Float[Tensor, "d_out d"]) -> Float[Tensor, "d_out d"]:
        """Return J times this."""
        J = J * self.gain
        return J.addmm_(J @ self.basis.mT, self.basis, alpha=-1)


class Attention(NamedTuple):
    """The Jacobian `W_Oᵀ dz`; `dz` is that of all heads' outputs."""

    part: Part
    W_O: Float[Tensor, "d_z d_model"]
    dz: Float[Tensor, "d_z d_model"]
    n_heads: int


# Of a part: a norm's, attention's, or a matrix for each input.
Jacobian = Norm | Attention | list[Tensor]


def jacobian_of_part(part: Part, context: Context, chunk_size: int | None) -> Jacobian:
    """Return the Jacobian of a part within a block that is called in this context."""
    return (
        _norm(part)
        or mlp_jacobian(part)
        or _attention(part, context)
        or _reverse_mode_jacobians(part, chunk_size)
    )


def rows_in(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[int | str, Tensor]:
    """Return the arguments that are the activations of one token, by place or name."""
    arguments: dict[int | str, object] = dict(enumerate(args))
    arguments.update(kwargs)
    rows: dict[int | str, Tensor] = {}
    for key, value in arguments.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.ndim in (2, 3) and value.shape[:-1].numel() == 1:
            rows[key] = value
    return rows


def _weights(
    part: Part, names: Sequence[str], hook_points: Sequence[str]
) -> list[Tensor] | None:
    """Return TransformerLens' weights of these names.

    None, unless a part has them all, these hook points, and one input.
    """

    def attribute(name: str) -> object:
        # Bridges of other kinds of attention refuse, each with an error of its own.
        try:
            return getattr(part.module, name, None)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    attributes = [attribute(name) for name in names]
    weights = [weight for weight in attributes if isinstance(weight, Tensor)]
    if len(weights) < len(names) or len(part.inputs) != 1:
        return None
    if any(attribute(name) is None for name in hook_points):
        return None
    return weights


def _norm(part: Part) -> Norm | None:
    """Return the Jacobian of a part that is a norm.

    It is one if it computes `w ⊙ (x − mean) / scale + b`, with or without the mean.
    """
    if len(part.inputs) != 1 or any(p.ndim > 1 for p in part.module.parameters()):
        return None
    (x,) = part.inputs.values()
    d = x.shape[-1]
    if d < 3 or part.value.shape != x.shape:
        return None
    # Rows whose normalised values are known: of mean zero, and so large that ε beside
    # the variance does not matter; with the other sign and twice as large; moved by a
    # constant, to see whether the mean is subtracted; and small, to see ε. Powers of
    # two, because HuggingFace normalises in float32, whatever the model is in.
    is_odd = d % 2
    n_pairs = (d - 3 * is_odd) // 2
    probe = np.array([2.0, -1.0, -1.0] * is_odd + [1.0, -1.0] * n_pairs)
    size = float(np.square(probe).mean())
    probes = [1024 * probe, -2048 * probe, 1024 * probe + 512, probe / 512]
    constants = x.new_tensor(np.stack([*probes, size**0.5 / probe]))
    outputs = part(constants[:4].reshape(*x.shape[:-2], 4, d))
    plus, minus, moved, small = outputs.reshape(4, d)
    b = (plus + minus) / 2
    unshifted = plus - b
    w = unshifted * constants[4]
    shrunk = (small - b) @ unshifted / (unshifted @ unshifted)
    epsilon = (size / 512**2 * (shrunk**-2 - 1)).clamp_min(0)
    # Without the mean and with it; both, so that all is read at once.
    x = x.flatten()
    rows = torch.stack([x, x - x.mean()])
    per_scale = (rows.square().mean(1, keepdim=True) + epsilon).rsqrt()
    normalised = per_scale * rows
    value = part.value.flatten()
    differences = [*(torch.addcmul(b, normalised, w) - value), moved - plus]
    norms = torch.stack([*differences, value, plus]).norm(dim=1).tolist()
    *errors, moved_error, value_norm, plus_norm = norms
    subtracts_mean = moved_error <= _NORM_TOLERANCE * plus_norm
    if not errors[subtracts_mean] <= _NORM_TOLERANCE * value_norm:
        return None
    basis = [normalised[int(subtracts_mean)]]
    if subtracts_mean:
        basis.append(torch.ones_like(x))
    gain = per_scale[int(subtracts_mean)] * w
    return Norm(gain, torch.stack(basis) / d**0.5)


def mlp_jacobian(part: Part) -> list[Tensor] | None:
    """Return the Jacobian of a standard MLP."""
    weight_names = ["W_out", "W_in"]
    points = ["hook_pre"]
    if getattr(part.module, "W_gate", None) is not None:
        weight_names = ["W_out", "W_gate", "W_in"]
        points = ["hook_pre", "hook_pre_linear"]
    weights = _weights(part, weight_names, [*points, "hook_post"])
    if weights is None:
        return None
    W_out, *inner_weights = weights
    shifts = [W_out.new_zeros(len(W_out)) for _ in inner_weights]
    h, pull_back = vjp(part.hook_function(points, "hook_post"), *shifts)
    slopes = pull_back(torch.ones_like(h))
    inner = slopes[0][:, None] * inner_weights[0].mT
    for slope, W in zip(slopes[1:], inner_weights[1:], strict=True):
        inner.addcmul_(slope[:, None], W.mT)
    return [W_out.mT @ inner]


class _Heads(NamedTuple):
    """How many heads attention has, and how many keys and values they share."""

    n_heads: int
    d_head: int
    n_shared: int

    @property
    def group(self) -> int:
        """How many heads share keys and values."""
        return self.n_heads // self.n_shared


class _HeadGradients(NamedTuple):
    """The Jacobians of heads to queries, and of groups to the keys and values shared."""

    q: Float[Tensor, "n_heads d_head d_q"]
    k: Float[Tensor, "n_shared d_group d_k"]
    v: Float[Tensor, "n_shared d_group d_v"]


def _attention(part: Part, context: Context) -> Attention | None:
    """Return the Jacobian of attention whose heads meet in W_O alone.

    None for any other part: `_reverse_mode_jacobians` takes that.
    """
    # Where heads share keys and values, HookedTransformer's W_K and W_V repeat these
    # for every head; `_W_K` and `_W_V` hold them once.
    prefix = "_" if hasattr(part.module, "_W_K") else ""
    points = ("hook_q", "hook_k", "hook_v")
    weight_names = ("W_O", "W_Q", f"{prefix}W_K", f"{prefix}W_V")
    weights = _weights(part, weight_names, (*points, "hook_z"))
    if weights is None:
        return None
    W_O, W_Q, W_K, W_V = weights
    heads = _Heads(W_O.shape[0], W_O.shape[1], len(W_K))
    if len(W_Q) != heads.n_heads or heads.n_heads % heads.n_shared:
        return None
    # These are [heads, d_model, d_head]: a shift for each entry of each head.
    shifts = [W.new_zeros(W[:, 0].numel()) for W in (W_Q, W_K, W_V)]
    with context.own_row_differentiated():
        z, pull_back = vjp(part.hook_function(points, "hook_z"), *shifts)
    if len(z) != heads.n_heads * heads.d_head:
        return None
    G = _head_gradients(heads, z, pull_back)
    if G is None:
        return None
    d_group = heads.group * heads.d_head
    # G_q W_Qᵀ + G_k W_Kᵀ + G_v W_Vᵀ, for each group that shares keys and values.
    dz = torch.bmm(G.q, W_Q.mT).reshape(heads.n_shared, d_group, -1)
    dz = dz.baddbmm_(G.k, W_K.mT).baddbmm_(G.v, W_V.mT)
    return Attention(part, W_O.flatten(0, 1), dz.flatten(0, 1), heads.n_heads)


def _head_gradients(
    heads: _Heads, z: Float[Tensor, " d_z"], pull_back: PullBack
) -> _HeadGradients | None:
    """Return the Jacobians of heads that do not meet; None where they do.

    A seed reads the same entry of many heads, one of each group that shares keys and
    values. The last seed reads all at once, and tells whether that is right.
    """
    n_heads, d_head, n_shared = heads
    group = heads.group
    # z is laid out by shared head, head of its group, and entry.
    seeds = torch.eye(group * d_head, dtype=z.dtype, device=z.device)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(len(z), generator=generator, dtype=torch.float64).to(z)
    q_gradients, k_gradients, v_gradients = pull_back.batched(
        torch.cat([seeds.repeat(1, n_shared), mixed[None]])
    )
    # Of each seed, the gradient of the head that it reads.
    head_gradients = q_gradients[:-1].reshape(group, d_head, n_shared, group, -1)
    G_q = head_gradients.diagonal(dim1=0, dim2=3).permute(1, 3, 0, 2).flatten(0, 1)
    G_k = _split_by_shared_head(k_gradients[:-1], heads)
    G_v = _split_by_shared_head(v_gradients[:-1], heads)
    mixed_groups = mixed.reshape(n_shared, 1, -1)
    together = [
        torch.bmm(mixed.reshape(n_heads, 1, d_head), G_q),
        torch.bmm(mixed_groups, G_k),
        torch.bmm(mixed_groups, G_v),
    ]
    summed_heads = torch.cat([gradient.flatten() for gradient in together])
    expected = torch.cat([q_gradients[-1], k_gradients[-1], v_gradients[-1]])
    error = (summed_heads - expected).norm()
    if not bool(error <= _HEADS_TOLERANCE * expected.norm()):
        return None
    return _HeadGradients(G_q, G_k, G_v)


def _split_by_shared_head(
    gradients: Float[Tensor, "d_group d"], heads: _Heads
) -> Float[Tensor, "n_shared d_group d_shared"]:
    """Return the gradients of shared keys or values, apart for each shared head."""
    split = gradients.reshape(heads.group, heads.d_head, heads.n_shared, -1)
    return split.permute(2, 0, 1, 3).flatten(1, 2)


def _reverse_mode_jacobians(part: Part, chunk_size: int | None) -> list[Tensor]:
    """Return a Jacobian for each input of a part, whatever it is."""

    def function(*rows: Tensor) -> Tensor:
        return part(*rows).reshape(-1)

    def flatten_gradients(*gradients: Tensor) -> list[Tensor]:
        return [gradient.flatten(1) for gradient in gradients]

    inputs = tuple(part.inputs.values())
    return reverse_mode(function, inputs, flatten_gradients, 4, chunk_size)[1]
