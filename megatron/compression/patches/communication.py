"""What Megatron and Transformer Engine send by themselves: counted, or passed through an exchange of ours."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.compression.patches.symbols import around, follow, replace


def on_gradient_sync(record: Callable[[str, Any, str, int, int], None]) -> None:
    """Call ``record(traffic, bucket_group, operation, buffer_bytes, world_size)`` for each data-parallel
    gradient collective.

    Why: ``_ParamAndGradBucketGroup`` issues them itself and has no hook. Not reached: FSDP; compressed
    reductions, which count themselves.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def sync(start_grad_sync, self, force_all_reduce=False):
        already_dispatched = self.is_first_batch and self.grad_reduce_handle is not None
        result = start_grad_sync(self, force_all_reduce)
        if not already_dispatched:
            _record_gradient_sync(self, force_all_reduce, record)
        return result

    around(_ParamAndGradBucketGroup, "start_grad_sync", ("self", "force_all_reduce"), sync)


def _record_gradient_sync(
    bucket_group, force_all_reduce: bool, record: Callable[..., None]
) -> None:
    config, inner = bucket_group.ddp_config, functools.partial(record, "dp.gradient", bucket_group)
    for bucket in bucket_group.buckets:
        if not config.use_distributed_optimizer:
            inner("all_reduce", bucket.grad_data.nbytes, bucket_group.data_parallel_group.size())
            continue
        shards = bucket_group.intra_distributed_optimizer_instance_size
        operation = "all_reduce" if force_all_reduce else "reduce_scatter"
        inner(operation, bucket.grad_data.nbytes, shards)
        if (instances := config.num_distributed_optimizer_instances) > 1:
            record(
                "dp.outer", bucket_group, "all_reduce", bucket.grad_data.nbytes // shards, instances
            )


def on_parameter_sync(record: Callable[[Any, str, int, int], None]) -> None:
    """Call ``record(bucket_group, operation, buffer_bytes, world_size)`` for each all-gather of updated
    parameters.

    Why: as for the gradients. Not reached: FSDP, the layer-wise optimizers, and compressed gathers.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def sync(start_param_sync, self, force_sync=False):
        only_waits = force_sync and self.param_gather_handle is not None
        result = start_param_sync(self, force_sync)
        if not only_waits and self.ddp_config.use_distributed_optimizer:
            for bucket in self.buckets:
                size = self.intra_distributed_optimizer_instance_size
                record(self, "all_gather", bucket.param_data.nbytes, size)
        return result

    around(_ParamAndGradBucketGroup, "start_param_sync", ("self", "force_sync"), sync)


def on_replicated_gradient_sync(
    record: Callable[[int, int], None], after: Callable[[list], None] | None = None
) -> None:
    """Call ``record(buffer_bytes, world_size)`` for the gradients of norms and biases summed over TP ranks,
    and then ``after(chunks)``: all gradients are reduced.

    Why: ``finalize_model_grads`` sums these small gradients itself. Not reached: Megatron-FSDP.
    """
    # The package has a function of the module's name.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    def run(result: Any, given: dict) -> None:
        model, group = given["model"], given.get("tp_group")
        if group is not None and group.size() > 1:
            record(_replicated_gradient_bytes(model, given["config"]), group.size())
        if after is not None:
            after(model)

    name = "_allreduce_non_tensor_model_parallel_grads"
    follow(finalize_model_grads, name, ("model", "config", "tp_group"), run)


def _replicated_gradient_bytes(model: list, config) -> int:
    from megatron.compression.replicated_parameters import QUERY_KEY_NORMS

    total = 0
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
            summed |= config.qk_layernorm and any(part in name for part in QUERY_KEY_NORMS)
            summed |= getattr(parameter, "average_gradients_across_tp_domain", False)
            if parameter.requires_grad and summed:
                total += getattr(parameter, "main_grad", parameter).nbytes
    return total


def on_tied_embedding_gradient_sync(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for the gradient of the word embeddings where the first and
    the last pipeline stage hold a copy each (without ``--untie-embeddings-and-output-weights``).

    Why: ``finalize_model_grads`` sums it itself, once an iteration. Not reached: Megatron-FSDP.
    """
    from megatron.core.utils import get_attr_wrapped_model

    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    def run(result: Any, given: dict) -> None:
        model, ranks = given["model"], given.get("embd_group")
        if ranks is None or ranks.size() == 1:  # None: a stage in the middle
            return
        chunk = model[0] if given["pp_group"].rank() == 0 else model[-1]
        chunk = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        weight = finalize_model_grads._get_shared_word_embedding_weight(chunk, given["config"])
        gradient = getattr(weight, "main_grad", getattr(weight, "grad", None))
        if gradient is not None:
            record(gradient.nbytes, ranks.size())

    name = "_allreduce_word_embedding_grads"
    follow(finalize_model_grads, name, ("model", "config", "embd_group", "pp_group"), run)


def through_token_exchange(exchange: Any) -> None:
    """Have megatron-core's dispatchers communicate through ``exchange`` (its ``all_to_all``, ``gather`` and
    ``reduce_scatter`` take the original function first).

    Why: the dispatchers' methods permute and sort, and call three functions of their module for the sending
    alone, as shared experts do. Not reached: DeepEP, HybridEP and NCCL-EP, whose kernels send.
    """
    moe = "megatron.core.transformer.moe"
    modules = [
        importlib.import_module(f"{moe}.{name}") for name in ("token_dispatcher", "shared_experts")
    ]

    given, region = ("input_", "group"), "sequence_parallel_region"
    for name, parameters, take in (
        ("all_to_all", (*given, "output_split_sizes_", "input_split_sizes"), exchange.all_to_all),
        (
            f"gather_from_{region}",
            (*given, "output_split_sizes", "use_global_buffer"),
            exchange.gather,
        ),
        (f"reduce_scatter_to_{region}", (*given, "input_split_sizes"), exchange.reduce_scatter),
    ):
        for module in modules:
            if hasattr(module, name):
                around(module, name, parameters, take)


def through_regions(calls: Mapping[str, Callable]) -> None:
    """Have multi-latent attention and multi-token prediction gather and scatter through ``calls``, by name.

    Why: their methods call functions of their module between linear layers. Not reached: generation.
    """
    for short in ("multi_latent_attention", "multi_token_prediction"):
        module = importlib.import_module(f"megatron.core.transformer.{short}")
        for name, call in calls.items():
            if hasattr(module, name):
                around(module, name, ("input_", "group"), call)


def on_router_reduction(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for the sums of tokens by expert: those of the balancing loss
    and of the experts' biases.

    Why: the router issues them itself, some values an expert each. Not reached: sinkhorn's and quantile
    balancing's; what is summed for a log line.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    for module, name, (tensor, ranks) in (
        (moe_utils, "reduce_from_tensor_model_parallel_region", ("input_", "group")),
        (finalize, "get_updated_expert_bias", ("tokens_per_expert", "tp_dp_cp_group")),
    ):

        def run(result: Any, given: dict, tensor=tensor, ranks=ranks) -> None:
            group = given.get(ranks)
            if group is not None and group.size() > 1:
                record(given[tensor].nbytes, group.size())

        follow(module, name, (tensor, ranks), run)


def after_schedules(after: Callable[[], None]) -> None:
    """Call ``after()`` after each forward-backward pass over pipeline stages.

    Why: what a pass has sent must have arrived when it returns. Not reached: passes that raise; one stage.
    """
    from megatron.core.pipeline_parallel import schedules

    for name in ("without_interleaving", "with_interleaving"):
        schedule, parameters = (
            f"forward_backward_pipelining_{name}",
            ("forward_step_func", "forward_only"),
        )
        follow(schedules, schedule, parameters, lambda result, given: after())


def through_pipeline_exchange(exchange: Callable) -> None:
    """Have ``exchange(communicator, original, **arguments)`` send what pipeline stages send each other.

    Why: all schedules go through ``P2PCommunicator._communicate``, and the training loop passes no
    communicator of its own to them. Not reached: the exchange of shapes under ``--variable-seq-lengths``
    (24 bytes a tensor).
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def communicate(original, self, **arguments):
        return exchange(self, functools.partial(original, self), **arguments)

    expected = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")
    around(P2PCommunicator, "_communicate", (*expected, "wait_on_reqs"), communicate)


def through_exchanges(exchanges: Any) -> None:
    """Have TE's linear layers communicate through ``exchanges`` (its ``all_reduce``, ``reduce_scatter`` and
    ``gather`` wrap the originals).

    Why: the layers keep their fused norms, fp8 recipes and overlap only if they call the collectives
    themselves. Not reached: attention's context parallelism; ``LayerNormMLP`` and the operation fuser, which
    Megatron's layers do not use; userbuffers (``--tp-comm-overlap``).
    """
    scatter = ("inp", "tp_group", "async_op", "output")
    functions = (
        ("allreduce", ("inp", "tp_group", "async_op"), exchanges.all_reduce),
        ("reduce_scatter_along_first_dim", scatter, exchanges.reduce_scatter),
        (
            "gather_along_first_dim",
            ("inp", "process_group", "async_op", "quantizer"),
            exchanges.gather,
        ),
    )
    for short in ("linear", "layernorm_linear", "base"):
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


def skip_in_layer_graphs(ours: Callable[[Callable], bool]) -> None:
    """Leave our forward pre-hooks out where a layer's CUDA graph is replayed.

    Why: ``CudaGraphManager`` calls the hooks of the modules that a graph holds and refuses all but DDP's; a
    replay has no forward that ours could note. Not reached: Transformer Engine's graphs, which call none.
    """
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    def call(call_ddp_preforward_hook, self, module):
        hooks = module._forward_pre_hooks
        if not any(map(ours, hooks.values())):
            return call_ddp_preforward_hook(self, module)
        module._forward_pre_hooks = {key: hook for key, hook in hooks.items() if not ours(hook)}
        try:
            call_ddp_preforward_hook(self, module)
        finally:
            module._forward_pre_hooks = hooks

    around(CudaGraphManager, "call_ddp_preforward_hook", ("self", "module"), call)


def before_gradient_sync(complete: Callable[[], None]) -> None:
    """Call ``complete()`` before a bucket's gradients are reduced during a backward pass.

    Why: a weight gradient that is added late to ``main_grad`` has to be there. Not reached: reductions after
    the backward pass; FSDP.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def ready(register_grad_ready, self, *args, **kwargs):
        counts, expected = self.per_param_grad_ready_counts, self.golden_per_param_grad_ready_counts
        if self.is_last_microbatch and sum(counts.values()) + 1 >= sum(expected.values()):
            complete()
        return register_grad_ready(self, *args, **kwargs)

    around(_ParamAndGradBucketGroup, "register_grad_ready", ("self", "param"), ready)
