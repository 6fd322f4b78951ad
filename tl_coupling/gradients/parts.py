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
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks import (
    PRODUCTS,
    BlockError,
    Context,
    hidden_states,
    is_out_of_memory,
)
from tl_coupling.gradients.evaluation import for_seeds, reverse_mode, vjp

# How well a norm is reproduced where it is recognised, and each head's Jacobians where
# heads are taken one by one.
_NORM_TOLERANCE, _HEADS_TOLERANCE = 1e-5, 1e-4
# Of a part: a norm's, attention's, or a matrix for each input.
Jacobian = Any


class Part(NamedTuple):
    """One call of a module within a block, on one token; `context` is entered to repeat
    it.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    context: Callable[[], AbstractContextManager[Any]]

    @property
    def inputs(self) -> dict[int | str, Tensor]:
        """The arguments that are one row of activations."""
        given: dict[Any, Any] = dict(enumerate(self.args)) | self.kwargs
        return {at: value for at, value in given.items() if _is_row(value)}

    @property
    def value(self) -> Tensor:
        """The row that it gave."""
        return hidden_states(self.output)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The same again; or on other rows."""
        new: dict[Any, Any] = (
            dict(zip(self.inputs, inputs, strict=True)) if inputs else {}
        )
        args = [new.pop(at, value) for at, value in enumerate(self.args)]
        with self.context():
            return hidden_states(self.module(*args, **self.kwargs | new))

    def between(self, names: Sequence[str], last: str) -> Callable[..., Tensor]:
        """What the hook point `last` sees, as a function of shifts at other hook
        points.
        """

        def value(*shifts: Tensor) -> Tensor:
            seen: list[Tensor] = []
            with ExitStack() as hooks:
                for name, shift in zip(names, shifts, strict=True):
                    point = getattr(self.module, name)
                    hooks.enter_context(
                        point.register_forward_hook(
                            lambda _, __, z, s=shift: z + s.view_as(z)
                        )
                    )
                hooks.enter_context(
                    getattr(self.module, last).register_forward_hook(
                        lambda _, __, z: seen.append(z)
                    )
                )
                self()
            if len(seen) != 1:
                raise BlockError(f"{last} did not fire once")
            return seen[0].reshape(-1)

        return value


class Norm(NamedTuple):
    """The Jacobian `diag(gain) (I − basisᵀ basis)`."""

    gain: Float[Tensor, " d"]
    basis: Float[Tensor, "n_directions d"]

    def of_rows(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """What it does to each row."""
        return torch.addmm(rows, rows @ self.basis.mT, self.basis, alpha=-1).mul_(
            self.gain
        )

    def before(self, J: Float[Tensor, "d_out d"]) -> Float[Tensor, "d_out d"]:
        """J times this."""
        J = J * self.gain
        return J.addmm_(J @ self.basis.mT, self.basis, alpha=-1)


class Attention(NamedTuple):
    """The Jacobian `W_Oᵀ dz`; `dz` is that of all heads' outputs."""

    part: Part
    W_O: Float[Tensor, "d_z d_model"]
    dz: Float[Tensor, "d_z d_model"]


def jacobian_of_part(part: Part, context: Context, chunk_size: int | None) -> Jacobian:
    """The Jacobian of a part within a block that is called in this context."""
    return (
        _norm(part)
        or _mlp(part)
        or _attention(part, context)
        or _by_reverse_mode(part, chunk_size)
    )


def _is_row(value: Any) -> bool:
    floats = (
        isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3)
    )
    return floats and value[..., 0].numel() == 1


def _weights(
    part: Part, names: Sequence[str], hook_points: Sequence[str]
) -> list[Tensor] | None:
    """TransformerLens' weights by name, of a part with one input that has them all, and
    these hook points.
    """

    def known(name: str) -> Any:
        # Bridges of other kinds of attention refuse, each with an error of its own.
        try:
            return getattr(part.module, name, None)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    weights = [known(name) for name in names]
    complete = all(isinstance(W, Tensor) for W in weights) and all(
        known(name) is not None for name in hook_points
    )
    return weights if complete and len(part.inputs) == 1 else None


def _norm(part: Part) -> Norm | None:
    """The Jacobian of a part that computes `w ⊙ (x − mean) / scale + b`, with or
    without the mean.
    """
    if len(part.inputs) != 1 or any(p.ndim > 1 for p in part.module.parameters()):
        return None
    (x,) = part.inputs.values()
    if (d := x.shape[-1]) < 3 or part.value.shape != x.shape:
        return None
    # Rows whose normalised values are known: of mean zero, and so large that ε beside
    # the variance does not matter; with the other sign and twice as large; moved by a
    # constant, to see whether the mean is subtracted; and small, to see ε. Powers of
    # two, because HuggingFace normalises in float32, whatever the model is in.
    probe = x.new_tensor(
        [2.0, -1.0, -1.0] * (d % 2) + [1.0, -1.0] * ((d - 3 * (d % 2)) // 2)
    )
    rows = torch.stack([1024 * probe, -2048 * probe, 1024 * probe + 512, probe / 512])
    plus, minus, moved, small = part(rows.reshape(*x.shape[:-2], 4, d)).reshape(4, d)
    size, b = probe.square().mean(), (plus + minus) / 2
    w = (plus - b) * size.sqrt() / probe
    shrunk = (small - b) @ (plus - b) / (plus - b).square().sum()
    epsilon = (size / 512**2 * (shrunk**-2 - 1)).clamp_min(0)
    centred = _close(moved, plus)
    c = (x - x.mean() if centred else x).flatten()
    per_scale = (c.square().mean() + epsilon).rsqrt()
    if not _close(per_scale * w * c + b, part.value.flatten()):
        return None
    basis = [per_scale * c, torch.ones_like(c)] if centred else [per_scale * c]
    return Norm(per_scale * w, torch.stack(basis) / d**0.5)


def _close(got: Tensor, expected: Tensor, tolerance: float = _NORM_TOLERANCE) -> bool:
    return bool((got - expected).norm() <= tolerance * expected.norm())


def _mlp(part: Part) -> list[Tensor] | None:
    """The Jacobian of a standard MLP."""
    gated = getattr(part.module, "W_gate", None) is not None
    names = ("hook_pre", "hook_pre_linear") if gated else ("hook_pre",)
    weights = _weights(
        part,
        ("W_out", "W_gate", "W_in") if gated else ("W_out", "W_in"),
        (*names, "hook_post"),
    )
    if weights is None:
        return None
    W_out, *W = weights
    shifts = [W_out.new_zeros(len(W_out)) for _ in W]
    h, pull_back = vjp(part.between(names, "hook_post"), *shifts)
    slopes = pull_back(torch.ones_like(h))
    inner = slopes[0][:, None] * W[0].mT
    for slope, other in zip(slopes[1:], W[1:], strict=True):
        inner.addcmul_(slope[:, None], other.mT)
    return [W_out.mT @ inner]


def _attention(part: Part, context: Context) -> Attention | None:
    """The Jacobian of attention whose heads meet in W_O alone."""
    # HookedTransformer repeats keys and values of shared heads in W_K and W_V.
    shared = "_" if hasattr(part.module, "_W_K") else ""
    names = ("hook_q", "hook_k", "hook_v")
    weights = _weights(
        part, ("W_O", "W_Q", f"{shared}W_K", f"{shared}W_V"), (*names, "hook_z")
    )
    if weights is None:
        return None
    W_O, W_Q, W_K, W_V = weights
    (n_heads, d_head, _), n_shared = W_O.shape, len(W_K)
    if len(W_Q) != n_heads or n_heads % n_shared:
        return None
    group = n_heads // n_shared
    with _OwnRow(context):
        z, pull_back = vjp(
            part.between(names, "hook_z"),
            *(W.new_zeros(W[:, 0].numel()) for W in (W_Q, W_K, W_V)),
        )
    if len(z) != n_heads * d_head:
        return None
    # Heads do not meet: a seed reads the same entry of many heads, one of each group
    # that shares keys and values. The last seed reads all at once, and tells whether
    # that is so.
    seeds = torch.eye(group * d_head, dtype=z.dtype, device=z.device).reshape(
        -1, 1, group, d_head
    )
    seeds = seeds.expand(-1, n_shared, -1, -1).reshape(group * d_head, -1)
    mixed = torch.randn(
        len(z), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(z)
    of_q, *of_shared = for_seeds(pull_back, torch.cat([seeds, mixed[None]]))
    G_q = (
        of_q[:-1]
        .reshape(group, d_head, n_shared, group, -1)
        .diagonal(dim1=0, dim2=3)
        .permute(1, 3, 0, 2)
    )
    G_k, G_v = (
        of[:-1].reshape(group, d_head, n_shared, -1).permute(2, 0, 1, 3).flatten(1, 2)
        for of in of_shared
    )
    together = [mixed.reshape(n_heads, 1, d_head) @ G_q.flatten(0, 1)]
    together += [mixed.reshape(n_shared, 1, -1) @ G for G in (G_k, G_v)]
    expected = torch.cat([of_q[-1], *(of[-1] for of in of_shared)])
    if not _close(
        torch.cat([one.flatten() for one in together]), expected, _HEADS_TOLERANCE
    ):
        return None
    dz = (G_q.flatten(0, 1) @ W_Q.mT).reshape(n_shared, group * d_head, -1)
    dz = dz.baddbmm_(G_k, W_K.mT).baddbmm_(G_v, W_V.mT)
    return Attention(part, W_O.flatten(0, 1), dz.flatten(0, 1))


class _OwnRow(TorchFunctionMode):
    """Attention's two products, `q Kᵀ` and `P V`, with keys and values that are
    constants but for the token's own row.

    Reverse mode would find a gradient for every row and every seed. That row's is
    added, by the product rule `d(q kᵀ) = dq kᵀ + q dkᵀ`, as a term of value zero.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.products = context, 0

    def __enter__(self) -> "_OwnRow":
        self.context.moved = []
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.context.moved = None
        if exception[0] is None and self.products != 2:
            raise BlockError(
                "the block's attention is not q Kᵀ and P V by two matrix products"
            )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        moved, at = self.context.moved, self.context.before
        if func not in PRODUCTS or not moved or self.products == len(moved):
            return func(*args, **(kwargs or {}))
        left, right = args
        self.products += 1
        values = self.products == 2
        own = right.select(-2 if values else -1, at)
        new = moved[values] if self.context.dim == -2 else moved[values].transpose(1, 2)
        if own.shape[1] % new.shape[1]:
            raise BlockError(
                "keys or values are changed between the cache and the attention's products"
            )
        new = new.repeat_interleave(own.shape[1] // new.shape[1], dim=1)
        if values:
            change = left[..., at : at + 1].detach() * (new - new.detach())
        else:
            scores = (left.detach() * (new - new.detach())).sum(-1, keepdim=True)
            change = nn.functional.pad(scores, (at, right.shape[-1] - 1 - at))
        return _times_constant(left, right) + change


class _TimesConstant(torch.autograd.Function):
    """`left @ right`, `[… 1 n] [… n m]`, for a constant `right`, which the backward
    pass does not copy for every seed.

    PyTorch's own rule for a batched matmul expands the factor without a batch; here the
    seeds become rows of `left`.
    """

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (right,) = ctx.saved_tensors
        return _times_constant(grad, right.mT), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], left: Tensor, right: Tensor
    ) -> tuple[Tensor, int]:
        return (left.movedim(in_dims[0], -2).squeeze(-3) @ right).unsqueeze(-3), -2


_times_constant = _TimesConstant.apply


def _by_reverse_mode(part: Part, chunk_size: int | None) -> list[Tensor]:
    """A Jacobian for each input of a part, whatever it is."""

    def function(*rows: Tensor) -> Tensor:
        return part(*rows).reshape(-1)

    return reverse_mode(
        function,
        tuple(part.inputs.values()),
        lambda *of: [one.flatten(1) for one in of],
        4,
        chunk_size,
    )[1]
