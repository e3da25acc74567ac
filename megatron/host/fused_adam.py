"""torch's Adam as one kernel a step on GPUs (CUDA only).

Without Transformer Engine and apex, Megatron constructs `torch.optim.AdamW` with torch's defaults, whose step
reads and writes every tensor of the optimizer about twenty times. `fused=True` makes it seven.
"""

import functools
import importlib

import torch


def fuse(optimizer: torch.optim.Optimizer | None) -> bool:
    """Let torch's own Adam or AdamW step with its fused kernel, if all its parameters are on CUDA devices.

    To be called before the first step. Returns whether it does now.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False  # subclasses step in their own way
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params or not all(param.is_cuda and param.is_floating_point() for param in params):
        return False
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=None)
    optimizer.register_load_state_dict_pre_hook(_keep_fused)
    return True


def _keep_fused(optimizer: torch.optim.Optimizer, state_dict: dict) -> dict:
    """A checkpoint of an unfused run does not undo it; torch places the steps by what the groups say."""
    groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def fuse_torch_adam() -> None:
    """Have every Megatron optimizer `fuse` the one it is given. Idempotent."""
    base = importlib.import_module("megatron.core.optimizer.optimizer").MegatronOptimizer
    original = base.__init__
    if getattr(original, "_fuses_torch_adam", False):
        return

    @functools.wraps(original)
    def __init__(self, optimizer, *args, **kwargs):
        fuse(optimizer)
        original(self, optimizer, *args, **kwargs)

    __init__._fuses_torch_adam = True
    base.__init__ = __init__
