"""What is summed and gathered between replicas, and where the gradients of a pass are complete."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow, replace


def on_gradient_sync(record: Callable[[Any, str, int, int], None]) -> None:
    """Call ``record(bucket_group, operation, buffer_bytes, world_size)`` for each data-parallel gradient
    collective.

    Why: ``_ParamAndGradBucketGroup`` issues them itself and has no hook. Not reached: FSDP; compressed
    reductions, which count themselves.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def wrap(start_grad_sync):
        def wrapper(self, force_all_reduce=False):
            already_dispatched = self.is_first_batch and self.grad_reduce_handle is not None
            result = start_grad_sync(self, force_all_reduce)
            if not already_dispatched:
                _record_gradient_sync(self, force_all_reduce, functools.partial(record, self))
            return result

        return wrapper

    replace(_ParamAndGradBucketGroup, "start_grad_sync", ("self", "force_all_reduce"), wrap)


def _record_gradient_sync(
    bucket_group, force_all_reduce: bool, record: Callable[[str, int, int], None]
) -> None:
    config = bucket_group.ddp_config
    for bucket in bucket_group.buckets:
        if not config.use_distributed_optimizer:
            record("all_reduce", bucket.grad_data.nbytes, bucket_group.data_parallel_group.size())
            continue
        shards = bucket_group.intra_distributed_optimizer_instance_size
        operation = "all_reduce" if force_all_reduce else "reduce_scatter"
        record(operation, bucket.grad_data.nbytes, shards)
        if config.num_distributed_optimizer_instances > 1:
            record(
                "all_reduce", bucket.grad_data.nbytes // shards, config.num_distributed_optimizer_instances
            )


def on_parameter_sync(record: Callable[[Any, str, int, int], None]) -> None:
    """Call ``record(bucket_group, operation, buffer_bytes, world_size)`` for each all-gather of updated
    parameters.

    Why: as for the gradients. Not reached: FSDP, the layer-wise optimizers, and compressed gathers.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def wrap(start_param_sync):
        def wrapper(self, force_sync=False):
            only_waits = force_sync and self.param_gather_handle is not None
            result = start_param_sync(self, force_sync)
            if not only_waits and self.ddp_config.use_distributed_optimizer:
                for bucket in self.buckets:
                    size = self.intra_distributed_optimizer_instance_size
                    record(self, "all_gather", bucket.param_data.nbytes, size)
            return result

        return wrapper

    replace(_ParamAndGradBucketGroup, "start_param_sync", ("self", "force_sync"), wrap)


def on_replicated_gradient_sync(
    record: Callable[[int, int], None], after: Callable[[list], None] | None = None
) -> None:
    """Call ``record(buffer_bytes, world_size)`` for the gradients of norms and biases summed over TP ranks.

    Then ``after(chunks)``: all gradients of the chunks are reduced.

    Why: under sequence parallelism (and for QK norms) each rank has seen only its part of the data;
    ``finalize_model_grads`` sums these small gradients itself. Not reached: Megatron-FSDP.
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
    total = 0
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
            summed |= config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
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
