"""What Megatron and Transformer Engine send by themselves: counted, or passed through an exchange
of ours.

A replaced function serves the run of the object that it was given (running.py), and does what the
original does where that object has none.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.compression.patches import running
from megatron.compression.patches.symbols import around, extend, follow, replace


def on_gradient_sync(record: Callable[[Any, str, Any, str, int, int], None]) -> None:
    """Call ``record(run, traffic, bucket_group, operation, buffer_bytes, world_size)`` for each
    data-parallel gradient collective of a bucket group that is marked with a run.

    Why: ``_ParamAndGradBucketGroup`` issues them itself and has no hook. Not reached: FSDP;
    compressed reductions, which count themselves.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    parameters = ("force_all_reduce",)
    extend(_ParamAndGradBucketGroup, "start_grad_sync", parameters, _counting_gradients, record)


def _counting_gradients(start_grad_sync: Callable, calls: list[Callable]) -> Callable:
    def wrapper(self, force_all_reduce=False):
        # As megatron-core has it: in the first batch a bucket may have been dispatched by hand.
        already_dispatched = self.is_first_batch and self.grad_reduce_handle is not None
        result = start_grad_sync(self, force_all_reduce)
        run = running.run_of(self)
        if run is not None and not already_dispatched:
            for record in calls:
                _record_gradient_sync(self, force_all_reduce, functools.partial(record, run))
        return result

    return wrapper


def _record_gradient_sync(
    bucket_group, force_all_reduce: bool, record: Callable[..., None]
) -> None:
    config = bucket_group.ddp_config
    for bucket in bucket_group.buckets:
        nbytes = bucket.grad_data.nbytes
        if not config.use_distributed_optimizer:
            ranks = bucket_group.data_parallel_group.size()
            record("dp.gradient", bucket_group, "all_reduce", nbytes, ranks)
            continue
        # The distributed optimizer reduces within an instance, and sums the shards over the
        # instances.
        shards = bucket_group.intra_distributed_optimizer_instance_size
        operation = "all_reduce" if force_all_reduce else "reduce_scatter"
        record("dp.gradient", bucket_group, operation, nbytes, shards)
        instances = config.num_distributed_optimizer_instances
        if instances > 1:
            record("dp.outer", bucket_group, "all_reduce", nbytes // shards, instances)


def on_parameter_sync(record: Callable[[Any, str, Any, str, int, int], None]) -> None:
    """Call ``record(run, "dp.weight", bucket_group, operation, buffer_bytes, world_size)`` for each
    all-gather of updated parameters of a bucket group that is marked with a run.

    Why: as for the gradients. Not reached: FSDP, the layer-wise optimizers, and compressed gathers.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    parameters = ("force_sync",)
    extend(_ParamAndGradBucketGroup, "start_param_sync", parameters, _counting_weights, record)


def _counting_weights(start_param_sync: Callable, calls: list[Callable]) -> Callable:
    def wrapper(self, force_sync=False):
        # A gather that is under way is waited for: nothing is sent.
        only_waits = force_sync and self.param_gather_handle is not None
        result = start_param_sync(self, force_sync)
        run = running.run_of(self)
        if run is None or only_waits or not self.ddp_config.use_distributed_optimizer:
            return result
        ranks = self.intra_distributed_optimizer_instance_size
        for record in calls:
            for bucket in self.buckets:
                record(run, "dp.weight", self, "all_gather", bucket.param_data.nbytes, ranks)
        return result

    return wrapper


def on_replicated_gradient_sync(after: Callable[[Any, list], None]) -> None:
    """Count the gradients of norms and biases that are summed over TP ranks, and then call
    ``after(run, chunks)``: all gradients of the chunks are reduced.

    Why: ``finalize_model_grads`` sums these small gradients itself. Not reached: Megatron-FSDP.
    """
    # The package has a function of the module's name.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    name = "_allreduce_non_tensor_model_parallel_grads"
    parameters = ("model", "config", "tp_group")
    extend(finalize_model_grads, name, parameters, _counting_replicated_gradients, after)


def _counting_replicated_gradients(allreduce: Callable, calls: list[Callable]) -> Callable:
    def wrapper(model, config, tp_group=None):
        result = allreduce(model, config, tp_group)
        run = running.run_of_model(model)
        if run is None:
            return result
        if tp_group is not None and tp_group.size() > 1:
            nbytes = _replicated_gradient_bytes(model, config)
            run.ledger.record_uncompressed(
                "tp.other", "exact", "all_reduce", nbytes, tp_group.size()
            )
        for after in calls:
            after(run, model)
        return result

    return wrapper


def _replicated_gradient_bytes(model: list, config) -> int:
    from megatron.compression.replicated_parameters import QUERY_KEY_NORMS

    total = 0
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            # megatron-core's own three conditions, in its order.
            summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
            summed |= config.qk_layernorm and any(norm in name for norm in QUERY_KEY_NORMS)
            summed |= getattr(parameter, "average_gradients_across_tp_domain", False)
            if parameter.requires_grad and summed:
                total += getattr(parameter, "main_grad", parameter).nbytes
    return total


def count_tied_embedding_gradient_syncs() -> None:
    """Count the sum of the word embeddings' gradients where the first and the last pipeline stage
    hold a copy each (without ``--untie-embeddings-and-output-weights``).

    Why: ``finalize_model_grads`` sums it itself, once an iteration. Not reached: Megatron-FSDP.
    """
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    name = "_allreduce_word_embedding_grads"
    parameters = ("model", "config", "embd_group", "pp_group")
    follow(finalize_model_grads, name, parameters, _after_tied_embedding_gradient_sync)


def _after_tied_embedding_gradient_sync(result: Any, arguments: dict) -> None:
    from megatron.core.utils import get_attr_wrapped_model

    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    model = arguments["model"]
    ranks = arguments.get("embd_group")
    run = running.run_of_model(model)
    if run is None or ranks is None or ranks.size() == 1:  # no group: a stage in the middle
        return
    # The first stage has the word embeddings in its first chunk, the last one in its last.
    chunk = model[0] if arguments["pp_group"].rank() == 0 else model[-1]
    chunk = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    weight = finalize_model_grads._get_shared_word_embedding_weight(chunk, arguments["config"])
    # A stage without a gradient (frozen embeddings) sends nothing.
    gradient = getattr(weight, "main_grad", getattr(weight, "grad", None))
    if gradient is not None:
        run.ledger.record_uncompressed(
            "pp.other", "exact", "all_reduce", gradient.nbytes, ranks.size()
        )


def through_token_exchange(exchange: Any) -> None:
    """Have megatron-core's dispatchers communicate through ``exchange`` (its ``all_to_all``,
    ``gather`` and ``reduce_scatter`` take the original function first), the process's: dispatchers
    have their run's sites.

    Why: the dispatchers' methods permute and sort, and call three functions of their module for the
    sending alone, as shared experts do. Not reached: DeepEP, HybridEP and NCCL-EP, whose kernels
    send.
    """
    moe = "megatron.core.transformer.moe"
    modules = [
        importlib.import_module(f"{moe}.{name}") for name in ("token_dispatcher", "shared_experts")
    ]
    region = "sequence_parallel_region"
    for name, parameters, call in (
        (
            "all_to_all",
            ("input_", "group", "output_split_sizes_", "input_split_sizes"),
            exchange.all_to_all,
        ),
        (
            f"gather_from_{region}",
            ("input_", "group", "output_split_sizes", "use_global_buffer"),
            exchange.gather,
        ),
        (
            f"reduce_scatter_to_{region}",
            ("input_", "group", "input_split_sizes"),
            exchange.reduce_scatter,
        ),
    ):
        for module in modules:
            if hasattr(module, name):
                around(module, name, parameters, call)


def through_regions(calls: Mapping[str, Callable]) -> None:
    """Have multi-latent attention and multi-token prediction gather and scatter through ``calls``,
    by name.

    Why: their methods call functions of their module between linear layers. Not reached:
        generation.
    """
    for short in ("multi_latent_attention", "multi_token_prediction"):
        module = importlib.import_module(f"megatron.core.transformer.{short}")
        for name, call in calls.items():
            if hasattr(module, name):
                around(module, name, ("input_", "group"), call)


def on_router_reduction(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for a router's sums of tokens by expert, those of
    the balancing loss; and count those of the experts' biases, of the run whose model is finalized.

    Why: the router issues them itself, some values an expert each. Not reached: sinkhorn's and
    quantile balancing's; what is summed for a log line.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    name = "reduce_from_tensor_model_parallel_region"
    extend(moe_utils, name, ("input_", "group"), _counting_router_sums, record)
    expert_bias = ("model", "config", "tp_dp_cp_group")
    replace(finalize, "_update_router_expert_bias", expert_bias, _updating_expert_bias)
    parameters = ("tokens_per_expert", "tp_dp_cp_group")
    follow(finalize, "get_updated_expert_bias", parameters, _after_expert_bias)


def _counting_router_sums(reduce: Callable, calls: list[Callable]) -> Callable:
    def wrapper(input_, group=None):
        result = reduce(input_, group)
        if group is not None and group.size() > 1:
            for record in calls:
                record(input_.nbytes, group.size())
        return result

    return wrapper


def _updating_expert_bias(update: Callable) -> Callable:
    def wrapper(model, config, tp_dp_cp_group=None):
        with running.at_work(running.run_of_model(model)):
            return update(model, config, tp_dp_cp_group)

    return wrapper


def _after_expert_bias(result: Any, arguments: dict) -> None:
    run = running.current()
    group = arguments.get("tp_dp_cp_group")
    if run is not None and group is not None and group.size() > 1:
        nbytes = arguments["tokens_per_expert"].nbytes
        run.ledger.record_uncompressed("ep.other", "exact", "all_reduce", nbytes, group.size())


def through_pipeline_exchange() -> None:
    """Have the ``pipeline_exchange`` of a run send what the pipeline stages of its model send each
    other.

    Schedules put their model's run to work, and what a pass has sent has arrived when it returns.
    Without a schedule the communicator's configuration tells the run.

    Why: all schedules go through ``P2PCommunicator._communicate``, and the training loop passes no
    communicator of its own to them. Not reached: the exchange of shapes under
    ``--variable-seq-lengths`` (24 bytes a tensor); the end of passes that raise.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    for short in ("without_interleaving", "with_interleaving"):
        name = f"forward_backward_pipelining_{short}"
        replace(schedules, name, ("forward_step_func", "model", "forward_only"), _scheduling)
    expected = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")
    replace(P2PCommunicator, "_communicate", (*expected, "wait_on_reqs"), _communicating)


def _scheduling(schedule: Callable) -> Callable:
    def wrapper(*, model, **arguments):
        run = running.run_of_model(model)
        with running.at_work(run):
            result = schedule(model=model, **arguments)
        if run is not None and run.pipeline_exchange is not None:
            run.pipeline_exchange.finish()
        return result

    return wrapper


def _communicating(communicate: Callable) -> Callable:
    def wrapper(
        self,
        *,
        tensor_send_next,
        tensor_send_prev,
        recv_prev,
        recv_next,
        tensor_shape,
        wait_on_reqs=True,
    ):
        run = running.current(otherwise=running.run_of(self.config))
        # A run without stages, and an object of no run, send by megatron-core's own method.
        send = functools.partial(communicate, self)
        if run is not None and run.pipeline_exchange is not None:
            send = functools.partial(run.pipeline_exchange, self, send)
        return send(
            tensor_send_next=tensor_send_next,
            tensor_send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )

    return wrapper


def through_exchanges(all_reduce: Callable, reduce_scatter: Callable, gather: Callable) -> None:
    """Have TE's linear layers communicate through functions that wrap the originals.

    Why: the layers keep their fused norms, fp8 recipes and overlap only if they call the
    collectives themselves. Not reached: attention's context parallelism; ``LayerNormMLP`` and the
    operation fuser, which Megatron's layers do not use; userbuffers (``--tp-comm-overlap``).

    Args:
        all_reduce: makes of TE's ``allreduce`` what stands for it.
        reduce_scatter: the same of ``reduce_scatter_along_first_dim``.
        gather: the same of ``gather_along_first_dim``.
    """
    gather_parameters = ("inp", "process_group", "async_op", "quantizer")
    scatter_parameters = ("inp", "tp_group", "async_op", "output")
    for short in ("linear", "layernorm_linear", "base"):
        module = importlib.import_module(f"transformer_engine.pytorch.module.{short}")
        replace(module, "gather_along_first_dim", gather_parameters, gather)
        # Names are imported into each of these modules; replacing them where they are defined does
        # nothing.
        if short == "base":  # it holds no other of the three
            continue
        replace(module, "allreduce", ("inp", "tp_group", "async_op"), all_reduce)
        replace(module, "reduce_scatter_along_first_dim", scatter_parameters, reduce_scatter)


def on_magnitude_reduction(record: Callable[[int, int], None]) -> None:
    """Call ``record(buffer_bytes, world_size)`` for each all-reduce of the largest magnitudes that
    delayed scaling keeps.

    Why: TE issues them itself, some tens of values a layer in each pass. Not reached: those of
    current scaling, one value a tensor, which its C++ code issues past torch.distributed.
    """
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")

    name = "reduce_tensor_across_group_op_max"
    manager = quantization.FP8GlobalStateManager
    extend(manager, name, ("tensor", "group"), _counting_magnitudes, record)


def _counting_magnitudes(reduce: Callable, calls: list[Callable]) -> Callable:
    import torch

    def wrapper(tensor, group):
        result = reduce(tensor, group)
        for record in calls:
            record(tensor.nbytes, torch.distributed.get_world_size(group))
        return result

    return wrapper


def eager_only(hook: Callable) -> Callable:
    """Mark a forward pre-hook of ours, which notes what an eager forward does
    (``skip_in_layer_graphs``)."""
    hook.eager_only = True  # type: ignore[attr-defined]
    return hook


def skip_in_layer_graphs() -> None:
    """Leave forward pre-hooks that are ``eager_only`` out where a layer's CUDA graph is replayed.

    Why: ``CudaGraphManager`` calls the hooks of the modules that a graph holds and refuses all but
    DDP's; a replay has no forward that ours could note. Not reached: Transformer Engine's graphs,
    which call none.
    """
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    name = "call_ddp_preforward_hook"
    replace(CudaGraphManager, name, ("self", "module"), _without_eager_hooks)


def _without_eager_hooks(call_ddp_preforward_hook: Callable) -> Callable:
    def wrapper(self, module):
        hooks = module._forward_pre_hooks
        remaining = {key: hook for key, hook in hooks.items() if not _is_eager_only(hook)}
        if len(remaining) == len(hooks):
            return call_ddp_preforward_hook(self, module)
        module._forward_pre_hooks = remaining
        try:
            return call_ddp_preforward_hook(self, module)
        finally:
            module._forward_pre_hooks = hooks

    return wrapper


def _is_eager_only(hook: Any) -> bool:
    return getattr(hook, "eager_only", False)


def before_gradient_sync() -> None:
    """Call a run's ``before_gradient_sync`` functions before a bucket's gradients are reduced in a
    backward pass, of bucket groups that are marked with the run.

    Why: a weight gradient that is added late to ``main_grad`` has to be there. Not reached:
        reductions after
    the backward pass; FSDP.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    name = "register_grad_ready"
    replace(_ParamAndGradBucketGroup, name, ("param", "force_all_reduce"), _completing_gradients)


def _completing_gradients(register_grad_ready: Callable) -> Callable:
    def wrapper(self, param, force_all_reduce=False):
        run = running.run_of(self)
        if run is not None and run.before_gradient_sync and self.is_last_microbatch:
            # The gradient that is ready now is the last of its bucket group, whose reduction begins
            # in this call.
            ready = sum(self.per_param_grad_ready_counts.values())
            expected = sum(self.golden_per_param_grad_ready_counts.values())
            if ready + 1 >= expected:
                for complete in run.before_gradient_sync:
                    complete()
        return register_grad_ready(self, param, force_all_reduce)

    return wrapper
