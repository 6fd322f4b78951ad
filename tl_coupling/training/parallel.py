"""What training in several processes makes of a model: a wrapper around it, or weights of
which each process holds a part.
"""

from torch import nn

# Wrappers that compute what the module in them does, and the attribute that holds it. By
# name: most of their libraries are not installed, or take seconds to import.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "lightning.fabric.wrappers._FabricModule": "module",
    "lightning_fabric.wrappers._FabricModule": "module",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in wrappers of training in parallel, and of `torch.compile`.

    Their own call would wait for other processes. What other modules have as `.module`
    is a part of them.
    """
    for cls in type(model).__mro__:
        attribute = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if attribute is not None:
            return unwrapped(getattr(model, attribute))
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError where each process holds a part of the weights: a call would wait
    for the others to give theirs.
    """
    for module in model.modules():
        refuse_sharded_weights(module)


def refuse_sharded_weights(module: nn.Module) -> None:
    """Do the same for a module's own weights, not for those of its parts."""
    sharding = _sharding(module)
    if sharding is not None:
        raise ValueError(
            f"the weights of {type(module).__name__} are spread over processes by "
            f"{sharding}, and a measurement would wait for all of them: measure "
            "checkpoints that are saved whole (`checkpoint_sweep`), or train with DDP"
        )


def _sharding(module: nn.Module) -> str | None:
    """Return what spreads a module's weights over processes; None for usual ones."""
    # FSDP marks each module in it, of both versions.
    is_in_fsdp = getattr(module, "_is_fsdp_managed_module", False)
    if is_in_fsdp or type(module).__name__ == "FullyShardedDataParallel":
        return "FSDP"
    for weight in module._parameters.values():
        if hasattr(weight, "ds_id"):
            return "DeepSpeed's ZeRO-3"
        if type(weight).__name__ == "DTensor":
            return "a DTensor"
    return None
