"""Devices by their names."""

import torch

from tl_coupling.models.errors import ModelError


def named_device(device: str | torch.device) -> torch.device:
    """Return a device by its name, whether or not this machine has it.

    Raises:
        ModelError: no device has that name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ModelError(
            '`device` must be a torch device ("cpu", "cuda", "cuda:1", "mps", …), got '
            f"{device!r}"
        ) from None


def present_device(device: str | torch.device | None) -> torch.device:
    """Return a device that this machine has, by default CUDA or else the CPU.

    Raises:
        ModelError: the machine does not have it, or it holds no weights.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    present = named_device(device)
    try:
        # torch knows every kind of device by name; only making a tensor tells whether
        # it is there.
        torch.empty(0, device=present)
    except (RuntimeError, AssertionError, ImportError) as error:
        cause = str(error).split("\n")[0].split(". ")[0]
        raise ModelError(
            f"`device` must be one that this machine has, got {str(present)!r} "
            f"({cause})"
        ) from None
    if present.type == "meta":
        raise ModelError("`device` must be one that holds weights, got 'meta'")
    return present
