"""Everything of torch's DDP that is not public: which settings get past its communication hook.

DDP offers ``register_comm_hook``: it gives a bucket of gradients, and waits for a future of their
average. What it sends besides, and whether it calls the hook at all, is in attributes that are not
public. Each is read with a default, so that another torch, which may lack one, is not refused.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.data_parallel.compressor import GradientCompressor
from megatron.compression.errors import CompressionConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of gradients that codecs encode; others go uncompressed."""


def check_supported(
    model: DistributedDataParallel, compressor: GradientCompressor | None, hook_name: str
) -> None:
    """Refuse a model whose gradients would get past the hook, or be wrong behind it.

    Args:
        model: what DDP has wrapped.
        compressor: of its gradients; None: uncompressed.
        hook_name: the qualified name of the hook that is going to be registered.

    Raises:
        CompressionConfigError: with the setting, the reason and the fix.
    """
    refusal = _refused_hook(model, hook_name) or _refused_setting(model)
    if refusal is None and compressor is not None:
        refusal = _refused_gradients(model, compressor)
    if refusal is not None:
        raise CompressionConfigError(f"attach(): {refusal}")


def _refused_hook(model: DistributedDataParallel, hook_name: str) -> str | None:
    """Return why DDP has no place for a hook."""
    # DDP's own mixed precision is a hook as well.
    for hook, _ in getattr(model, "_comm_hooks", ()):
        name = getattr(hook, "__qualname__", str(hook))
        if name == hook_name:
            return "the model is attached already; attach() once, also after close()"
        return (
            f"the model has a communication hook, {name}, and DDP takes one; drop "
            "register_comm_hook() or mixed_precision="
        )
    if getattr(model, "_use_python_reducer", False):
        return (
            "torch._dynamo.config.optimize_ddp python_reducer calls hooks without buckets; use "
            "ddp_optimizer"
        )
    return None


def _refused_setting(model: DistributedDataParallel) -> str | None:
    """Return which setting of DDP's has gradients get past its hook, or be wrong behind it."""
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            return f"{name or 'the module'} has sparse gradients; drop sparse=True"
    if getattr(model, "_delay_all_reduce_params", ()):
        return "delay_all_reduce_named_params sends gradients past the hook; drop it"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "skip_all_reduce_unused_params=True leaves out buckets that others wait for; drop it"
    if getattr(model, "is_multi_device_module", False):
        return "the model is on several devices, and its hook works on one; use one a process"
    if _has_larger_mesh(model):
        # Parameters that tensor-parallel ranks hold alike would be rounded beside other neighbours
        # on each of them, and drift apart.
        return (
            "device_mesh is part of a larger mesh, whose other ranks hold some parameters alike; "
            "use fully_shard() and megatron.compression.fsdp2"
        )
    return None


def _has_larger_mesh(model: DistributedDataParallel) -> bool:
    """Return whether the process group was given as a dimension of a larger mesh."""
    mesh = getattr(model, "device_mesh", None)
    # A mesh by itself is another way to give the group.
    root_of = getattr(mesh, "_get_root_mesh", None)
    return root_of is not None and root_of() != mesh


def _refused_gradients(
    model: DistributedDataParallel, compressor: GradientCompressor
) -> str | None:
    """Return which gradients a compressor cannot work with."""
    if not (compressor.has_memory or compressor.lossless):
        return None
    for name, parameter in trained_parameters(model).items():
        if parameter.dtype != torch.float16:
            continue
        if compressor.lossless:
            return (
                f"{name} has fp16 gradients, and lossless shortens bf16 and fp32; use bf16, or "
                "reduce='int8'"
            )
        return (
            f"{name} has fp16 gradients, too coarse to take the loss scale out of them; use bf16, "
            "or no compressor with a memory"
        )
    return None


def check_join(model: DistributedDataParallel) -> None:
    """Refuse ``model.join(divide_by_initial_world_size=False)``, at the begin of a pass.

    A hook is not told how many ranks still train, so it divides by all of them, as torch's own do.

    Raises:
        CompressionConfigError: the model is in such a ``join``.
    """
    config = getattr(model, "_join_config", None)
    if config is None or not config.enable:
        return
    if not getattr(model, "_divide_by_initial_world_size", True):
        raise CompressionConfigError(
            "join(divide_by_initial_world_size=False) divides by the ranks that still train, which "
            "a communication hook is not told; drop it, or attach()"
        )


def trained_parameters(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that DDP reduces gradients of, by their names in ``model.module``."""
    # Frozen parameters, and those that the user has told DDP to leave alone, are in no bucket.
    ignored = getattr(model, "parameters_to_ignore", ())
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
