"""Replacements inside megatron-core where it has no extension point. Nowhere else is a symbol replaced.

Each seam names its symbol, why it is replaced and what it does not reach. ``replace`` refuses a symbol that
does not look as expected (another megatron-core), wraps a symbol once, and logs a line.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class SeamError(RuntimeError):
    """The symbol to replace is not what this version of the project expects."""


def replace(owner: Any, name: str, expected_parameters: tuple[str, ...], wrap: Callable) -> None:
    """Wrap ``owner.name`` once.

    Args:
        owner: module or class.
        name: the function's attribute name.
        expected_parameters: parameters that the function must have.
        wrap: takes the original and returns the replacement.

    Raises:
        SeamError: there is no such function, or it lacks a parameter.
    """
    where = f"{getattr(owner, '__module__', '') or ''}.{owner.__name__}.{name}".lstrip(".")
    original = getattr(owner, name, None)
    if not callable(original):
        raise SeamError(f"{where} does not exist in this megatron-core; install the pinned version")
    if getattr(original, "_megatron_taco_seam", False):  # already wrapped: wrap the original anew
        original = original.__wrapped__
    missing = set(expected_parameters) - set(inspect.signature(original).parameters)
    if missing:
        raise SeamError(
            f"{where} has no parameter {', '.join(sorted(missing))}; install the pinned megatron-core"
        )
    replacement = functools.wraps(original)(wrap(original))
    replacement._megatron_taco_seam = True
    setattr(owner, name, replacement)
    logger.info("seam: %s", where)


def on_training_log(after: Callable[[int, dict], None]) -> None:
    """Call ``after(iteration, loss_dict)`` behind each ``training_log``: once an iteration.

    Why: our log line and TensorBoard scalars belong right behind Megatron's, and the loop calls the function
    by name. Not reached: losses of iterations that were skipped.
    """
    from megatron.training import training

    def wrap(training_log):
        signature = inspect.signature(training_log)

        def wrapper(*args, **kwargs):
            result = training_log(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            after(bound["iteration"], bound["loss_dict"])
            return result

        return wrapper

    replace(training, "training_log", ("loss_dict", "iteration"), wrap)


def on_checkpoint_args(*after: Callable[[Any], None]) -> None:
    """Call each ``after(checkpoint_args)`` when a checkpoint's arguments have been checked: once a resume.

    Why: Megatron saves its arguments with a checkpoint and hands them to nobody on the way back. Not reached:
    ``--finetune`` and ``--pretrained-checkpoint``, which begin anew (see ``on_checkpoint_read``).
    """
    from megatron.training import checkpointing

    def wrap(check_checkpoint_args):
        def wrapper(checkpoint_args, *args, **kwargs):
            check_checkpoint_args(checkpoint_args, *args, **kwargs)
            for one in after:
                one(checkpoint_args)

        return wrapper

    replace(checkpointing, "check_checkpoint_args", ("checkpoint_args",), wrap)


def around_evaluate(before: Callable[[str], None], after: Callable[[dict | None], None]) -> None:
    """Call ``before(split)`` and ``after(losses)`` around each ``evaluate``; split is valid or test.

    Why: evaluation traffic is kept apart from the iterations', and the report shows the validation loss. Two
    symbols, because only ``evaluate_and_print_results`` knows the split and only ``evaluate`` returns the
    losses.
    Not reached: callers that imported them by name (megatron.training has none).
    """
    from megatron.training import training

    split = "valid"

    def wrap_printing(evaluate_and_print_results):
        def wrapper(prefix, *args, **kwargs):
            nonlocal split
            split = "test" if prefix.endswith("test set") else "valid"
            return evaluate_and_print_results(prefix, *args, **kwargs)

        return wrapper

    def wrap(evaluate):
        def wrapper(*args, **kwargs):
            before(split)
            losses = None
            try:
                result = evaluate(*args, **kwargs)
                losses = result[0]
            finally:
                after(losses)
            return result

        return wrapper

    replace(training, "evaluate_and_print_results", ("prefix",), wrap_printing)
    replace(training, "evaluate", ("forward_step_func", "data_iterator", "model"), wrap)


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


def around_checkpoint_state(add: Callable[[dict, bool], None]) -> None:
    """Call ``add(state_dict, is_loading)`` for each checkpoint that is put together to be saved or loaded
    with its optimizer.

    Why: checkpoints have no place for the state of a run's own parts. Not reached: checkpoints without
    optimizer state (``--no-save-optim``, ``--no-load-optim``, ``--finetune``).
    """
    from megatron.training import checkpointing

    def wrap(generate_state_dict):
        signature = inspect.signature(generate_state_dict)

        def wrapper(*args, **kwargs):
            state_dict = generate_state_dict(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            if "optimizer" in state_dict:
                add(state_dict, (bound.get("optim_sd_kwargs") or {}).get("is_loading", False))
            return state_dict

        return wrapper

    replace(checkpointing, "generate_state_dict", ("optimizer", "optim_sd_kwargs"), wrap)


def on_checkpoint_read(*after: Callable[[dict | None, str | None], None]) -> None:
    """Call each ``after(state_dict, path)`` with what has been read of a checkpoint; None: there is none.

    Why: it is the one place that every load comes through, ``--finetune`` too, before anything is checked.
    The arguments alone are read first, then everything. Not reached: what reads files by itself.
    """
    from megatron.training import checkpointing

    def wrap(load_base_checkpoint):
        def wrapper(*args, **kwargs):
            result = load_base_checkpoint(*args, **kwargs)
            for one in after:
                one(result[0], result[1])
            return result

        return wrapper

    replace(checkpointing, "_load_base_checkpoint", ("rank0",), wrap)


def on_master_copy(take: Callable[[Any], bool]) -> None:
    """Call ``take(optimizer)`` where the distributed optimizer copies its masters over the weights.

    Where it returns True, it has taken them and Megatron's own copy is left out. Why: a weight difference
    needs the weights before the update, and that copy is where the owner's are overwritten. Not reached:
    optimizers that write the weights themselves (precision-aware), FSDP, fp32 parameters.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def wrap(copy_main_params):
        def wrapper(self):
            if self.is_stub_optimizer or not take(self):
                copy_main_params(self)

        return wrapper

    replace(DistributedOptimizer, "_copy_main_params_to_model_params", ("self",), wrap)


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

    def wrap(all_reduce_gradients):
        def wrapper(model, config, tp_group=None):
            all_reduce_gradients(model, config, tp_group)
            if tp_group is not None and tp_group.size() > 1:
                record(_replicated_gradient_bytes(model, config), tp_group.size())
            if after is not None:
                after(model)

        return wrapper

    name = "_allreduce_non_tensor_model_parallel_grads"
    replace(finalize_model_grads, name, ("model", "config", "tp_group"), wrap)


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

    def wrap(all_reduce_gradients):
        def wrapper(model, config, embd_group=None, pp_group=None):
            all_reduce_gradients(model, config, embd_group, pp_group)
            if embd_group is None or embd_group.size() == 1:  # None: a stage in the middle
                return
            chunk = model[0] if pp_group.rank() == 0 else model[-1]
            chunk = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
            weight = finalize_model_grads._get_shared_word_embedding_weight(chunk, config)
            gradient = getattr(weight, "main_grad", getattr(weight, "grad", None))
            if gradient is not None:
                record(gradient.nbytes, embd_group.size())

        return wrapper

    name = "_allreduce_word_embedding_grads"
    replace(finalize_model_grads, name, ("model", "config", "embd_group", "pp_group"), wrap)


def around_schedules(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before()`` and ``after()`` around each forward-backward pass over pipeline stages.

    Why: Megatron may repeat an iteration's pass (``--rerun-mode``), which its number alone does not tell.
    Not reached: passes that raise get no ``after``; one stage.
    """
    from megatron.core.pipeline_parallel import schedules

    def wrap(schedule):
        def wrapper(*args, **kwargs):
            before()
            result = schedule(*args, **kwargs)
            after()
            return result

        return wrapper

    for name in ("without_interleaving", "with_interleaving"):
        replace(schedules, f"forward_backward_pipelining_{name}", ("forward_step_func", "forward_only"), wrap)


def through_pipeline_exchange(exchange: Callable) -> None:
    """Have ``exchange(communicator, original, **arguments)`` send what pipeline stages send each other.

    Why: all schedules go through ``P2PCommunicator._communicate``, and the training loop passes no
    communicator of its own to them. Not reached: the exchange of shapes under ``--variable-seq-lengths``
    (24 bytes a tensor).
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def wrap(communicate):
        def wrapper(self, **kwargs):
            return exchange(self, functools.partial(communicate, self), **kwargs)

        return wrapper

    expected = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")
    replace(P2PCommunicator, "_communicate", (*expected, "wait_on_reqs"), wrap)
