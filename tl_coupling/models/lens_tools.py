"""TransformerLens's own tools: its Jacobian lens and its factored matrices."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import described, made_by
from tl_coupling.models.in_memory import bridge_of

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix

# Fields of HuggingFace's configurations: transformers 5 has the first, earlier versions
# the others.
_ROPE_SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling")


@made_by("trajectories.product_lens(traces)")
@runtime_checkable
class JacobianLens(Protocol):
    """What is taken for a Jacobian lens: TransformerLens's, and that of the reference
    implementation, which has no metadata.

    It holds one matrix for each layer, which maps what leaves the layer to what leaves
    the last.
    """

    jacobians: dict[int, Tensor]
    n_prompts: int
    d_model: int


@runtime_checkable
class UsableLens(JacobianLens, Protocol):
    """A `JacobianLens` with what TransformerLens's has beside the matrices."""

    metadata: dict[str, Any]

    def transport(self, residual: Tensor, layer: int) -> Tensor:
        """Return `J_layer @ x` of each row x."""

    def validate_model(self, model: Any) -> object:
        """Raise TypeError or ValueError unless the lens fits the model."""


def is_only_blocks(model: nn.Module) -> bool:
    """Say whether these are the blocks that `trace_modules` got, without a model."""
    return isinstance(model, nn.ModuleList)


def jacobian_lens(
    jacobians: Mapping[int, Float[Tensor, "d_model d_model"]],
    n_prompts: int,
    metadata: Mapping[str, Any],
) -> UsableLens:
    """Return matrices by layer as a `JacobianLens` of TransformerLens."""
    from transformer_lens.tools.analysis import JacobianLens as TheirLens

    d_model = next(iter(jacobians.values())).shape[0]
    lens: UsableLens = TheirLens(
        dict(jacobians), n_prompts=n_prompts, d_model=d_model, metadata=dict(metadata)
    )
    return lens


def usable_lens(lens: JacobianLens) -> UsableLens:
    """Return a lens as TransformerLens's own class; one of that class as it is.

    Raises:
        TypeError: its matrices are no mapping from layers to tensors.
        ValueError: it has no matrix, or one of another shape.
    """
    if isinstance(lens, UsableLens):
        return lens
    matrices = lens.jacobians
    is_mapping = isinstance(matrices, Mapping) and matrices
    if not is_mapping or not all(isinstance(J, Tensor) for J in matrices.values()):
        raise TypeError(
            "`lens.jacobians` must map layers to tensors, as TransformerLens's and the "
            f"reference implementation's do, got {described(matrices)}: save the lens, "
            "and give what `transformer_lens.tools.analysis.JacobianLens.load` reads"
        )
    try:
        return jacobian_lens(matrices, lens.n_prompts, {})
    except ValueError as error:
        raise ValueError(f"`lens` has matrices of other shapes: {error}") from None


def load_lens(name: str) -> UsableLens:
    """Load a `JacobianLens` of TransformerLens: a file of `save`, a folder that has one,
    or a name that its `from_pretrained` takes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is no lens, or damaged.
        OSError: a name that the hub does not have, or no hub.
    """
    from transformer_lens.tools.analysis import JacobianLens as TheirLens

    # `from_pretrained` asks the hub about a name that is no file.
    if Path(name).suffix == ".pt" and not Path(name).exists():
        raise FileNotFoundError(f"there is no lens at {name}: give the file of one")
    try:
        lens: UsableLens = TheirLens.from_pretrained(name)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"{name} is not a file that `JacobianLens.save` wrote, or is damaged"
        ) from error
    return lens


def check_takes_lens(model: nn.Module, d_model: int) -> None:
    """Raise what TransformerLens raises for a model that its lens does not read.

    It reads causal language models with raw weights, as bridges.
    """
    check_lens_fits(jacobian_lens({0: torch.zeros(d_model, d_model)}, 1, {}), model)


def check_lens_fits(lens: UsableLens, model: nn.Module) -> None:
    """Raise what TransformerLens raises for a lens that does not fit a model.

    Of modules that are no model, it reads nothing: the widths alone must agree.
    """
    if is_only_blocks(model):
        return
    lens.validate_model(bridge_of(model))


def described_for_lens(model: Any) -> dict[str, Any]:
    """Return what a lens says of its model, by the names that TransformerLens reads;
    nothing of modules that are no model.
    """
    if is_only_blocks(model):
        return {}
    config = getattr(getattr(model, "original_model", None), "config", None)
    return {
        "model_name": getattr(model.cfg, "model_name", None),
        "model_revision": getattr(config, "_commit_hash", None) or None,
        "target_layer": model.cfg.n_layers - 1,
        "hook_convention": "blocks.{layer}.hook_out",
        "rope": _rope(config),
    }


def _rope(config: Any) -> str | None:
    """Return the settings of rotary embeddings as text; None where there are none."""
    settings = {
        name: getattr(config, name)
        for name in _ROPE_SETTINGS
        if getattr(config, name, None) is not None
    }
    return json.dumps(settings, sort_keys=True, default=str) if settings else None


def factored_matrix(
    A: Float[Tensor, "*batch d_in k"], B: Float[Tensor, "*batch k d_out"]
) -> "FactoredMatrix":
    """Return `A @ B`, for rows x of `x @ A @ B`, as TransformerLens's `FactoredMatrix`."""
    from transformer_lens import FactoredMatrix

    return FactoredMatrix(A, B)
