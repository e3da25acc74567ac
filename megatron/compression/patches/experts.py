"""What token dispatchers of mixtures of experts send, and what their routers sum."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow, replace


def through_token_exchange(exchange: Any) -> None:
    """Have megatron-core's dispatchers communicate through ``exchange`` (its ``all_to_all``, ``gather`` and
    ``reduce_scatter`` take the original function first).

    Why: the dispatchers' methods permute and sort beside what they send, and call three functions of their
    module for the sending alone; shared experts that run beside the dispatcher call two of them. Not reached:
    DeepEP, HybridEP and NCCL-EP, whose kernels send.
    """
    moe = "megatron.core.transformer.moe"
    modules = [importlib.import_module(f"{moe}.{name}") for name in ("token_dispatcher", "shared_experts")]

    def through(take: Callable) -> Callable:
        def wrap(original):
            return functools.partial(take, original)

        return wrap

    splits = ("output_split_sizes", "use_global_buffer")
    for name, parameters, take in (
        ("all_to_all", ("group", "input_", "output_split_sizes_", "input_split_sizes"), exchange.all_to_all),
        ("gather_from_sequence_parallel_region", ("input_", "group", *splits), exchange.gather),
        (
            "reduce_scatter_to_sequence_parallel_region",
            ("input_", "group", "input_split_sizes"),
            exchange.reduce_scatter,
        ),
    ):
        for module in modules:
            if hasattr(module, name):
                replace(module, name, parameters, through(take))


def on_router_reduction(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for the sums of tokens by expert: those of the balancing loss
    and of the experts' biases.

    Why: the router issues them itself, some values an expert each. Not reached: sinkhorn's and quantile
    balancing's; what is summed for a log line.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    def loads(result: Any, given: dict) -> None:
        if given["group"].size() > 1:
            record(given["input_"].nbytes, given["group"].size())

    def biases(result: Any, given: dict) -> None:
        group = given.get("tp_dp_cp_group")
        if group is not None and group.size() > 1:
            record(given["tokens_per_expert"].nbytes, group.size())

    follow(moe_utils, "reduce_from_tensor_model_parallel_region", ("input_", "group"), loads)
    follow(finalize, "get_updated_expert_bias", ("tokens_per_expert", "tp_dp_cp_group"), biases)
