"""Transformer Engine's communication functions, and where late weight gradients have to be complete."""

import importlib
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow, replace

_MODULES = ("linear", "layernorm_linear", "base")


def through_exchanges(exchanges: Any) -> None:
    """Have TE's linear layers communicate through ``exchanges`` (its ``all_reduce``, ``reduce_scatter`` and
    ``gather`` wrap the originals).

    Why: the layers keep their fused norms, fp8 recipes and overlap only if they call the collectives
    themselves; each module holds them by name. Not reached: attention's context parallelism, which has names
    of its own; ``LayerNormMLP`` and the operation fuser, which Megatron's layers do not use; userbuffers
    (``--tp-comm-overlap``).

    Raises: PatchError: TE's functions have other parameters in this version.
    """
    scatter = ("inp", "tp_group", "async_op", "output")
    functions = (
        ("allreduce", ("inp", "tp_group", "async_op"), exchanges.all_reduce),
        ("reduce_scatter_along_first_dim", scatter, exchanges.reduce_scatter),
        ("gather_along_first_dim", ("inp", "process_group", "async_op", "quantizer"), exchanges.gather),
    )
    for short in _MODULES:
        module = importlib.import_module(f"transformer_engine.pytorch.module.{short}")
        for name, parameters, wrap in functions:
            if short != "base" or name == "gather_along_first_dim":
                replace(module, name, parameters, wrap)


def on_magnitude_reduction(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for each all-reduce of the largest magnitudes that delayed
    scaling keeps.

    Why: TE issues them itself, some tens of values a layer in each pass. Not reached: those of current
    scaling, one value a tensor, which its C++ code issues past torch.distributed.
    """
    import torch

    quantization = importlib.import_module("transformer_engine.pytorch.quantization")

    def run(result: Any, given: dict) -> None:
        record(given["tensor"].nbytes, torch.distributed.get_world_size(given["group"]))

    name = "reduce_tensor_across_group_op_max"
    follow(quantization.FP8GlobalStateManager, name, ("tensor", "group"), run)


def before_gradient_sync(complete: Callable[[], None]) -> None:
    """Call ``complete()`` before a bucket's gradients are reduced during a backward pass.

    Why: a weight gradient that is added late to ``main_grad`` has to be there. Not reached: reductions after
    the backward pass; FSDP.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def wrap(register_grad_ready):
        def wrapper(self, param, *args, **kwargs):
            ready, expected = self.per_param_grad_ready_counts, self.golden_per_param_grad_ready_counts
            if self.is_last_microbatch and sum(ready.values()) + 1 >= sum(expected.values()):
                complete()
            return register_grad_ready(self, param, *args, **kwargs)

        return wrapper

    replace(_ParamAndGradBucketGroup, "register_grad_ready", ("self", "param"), wrap)
