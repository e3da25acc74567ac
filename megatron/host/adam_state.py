"""Resume the distributed optimizer with torch's Adam, bit for bit (CPU and GPU).

Megatron expects the fused Adam of Transformer Engine or apex, whose step count lives in the parameter group.
torch's Adam keeps a `step` tensor for each parameter, and megatron-core 0.19.2's `DistributedOptimizer` trips
over it in three places on the way back from a checkpoint:

sharded_state_dict(is_loading=True)
    asks for the step of an optimizer that has not stepped yet: an assertion fails.
load_state_dict
    hands every parameter the same step tensor: one iteration adds as many steps as there are parameters.
_set_main_param_and_optimizer_states
    looks for `step` in checkpoints that keep it elsewhere, and copies into a leaf that requires a gradient.

Nothing is replaced where Transformer Engine or apex is installed.
"""

import functools
import importlib

import torch


def _has_torch_adam(distributed_optimizer) -> bool:
    return isinstance(distributed_optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that Adam has before its first step; keep what is there."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if not state:
                place = param.device if group.get("fused") or group.get("capturable") else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=place)
                state["exp_avg"] = torch.zeros_like(param.data)
                state["exp_avg_sq"] = torch.zeros_like(param.data)


def _wrap_sharded_state_dict(original):
    @functools.wraps(original)
    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, *args, **kwargs):
        if is_loading and _has_torch_adam(self):
            prime(self.optimizer)
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    return sharded_state_dict


def _wrap_load_state_dict(original):
    @functools.wraps(original)
    @torch.no_grad()
    def load_state_dict(self, state_dict):
        result = original(self, state_dict)
        if _has_torch_adam(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _wrap_set_states(original):
    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        if _has_torch_adam(self):
            group, order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][order]
            # load_state_dict has set the step already, from the parameter group.
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def make_torch_adam_resumable() -> None:
    """Repair `DistributedOptimizer` for torch's Adam. Idempotent."""
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer = module.DistributedOptimizer
    if module.HAVE_APEX_OR_TE or getattr(optimizer, "_torch_adam_resumable", False):
        return
    optimizer.sharded_state_dict = _wrap_sharded_state_dict(optimizer.sharded_state_dict)
    optimizer.load_state_dict = _wrap_load_state_dict(optimizer.load_state_dict)
    optimizer._set_main_param_and_optimizer_states = _wrap_set_states(
        optimizer._set_main_param_and_optimizer_states
    )
    optimizer._torch_adam_resumable = True
