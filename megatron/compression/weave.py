"""Weaves compression into a Megatron run: config, model hooks, patches, and the report."""

from argparse import Namespace
from functools import partial

from megatron.core import parallel_state
from megatron.training import get_tensorboard_writer, print_rank_0
from megatron.training.models.gpt import GPTModelConfig

from megatron.compression import patches
from megatron.compression.arguments import (
    compression_config_from_args,
    idle_reason,
    pipeline_idle_reason,
    uncounted,
    validation_line,
)
from megatron.compression.data_parallel.bind import bind_data_parallel, record_uncompressed
from megatron.compression.data_parallel.checkpoint import GradientState
from megatron.compression.data_parallel.checks import idle_reason as data_parallel_idle_reason
from megatron.compression.data_parallel.codecs import describe_data_parallel
from megatron.compression.data_parallel.replicas import align_gradients
from megatron.compression.data_parallel.weights import copy_masters
from megatron.compression.pipeline_parallel.codecs import describe_pipeline
from megatron.compression.pipeline_parallel.exchange import PipelineExchange
from megatron.compression.reporter import Reporter, check_report_directory
from megatron.compression.resumed import say_changed_settings
from megatron.compression.runtime import CompressionRuntime
from megatron.compression.tensor_parallel.bind import bind_compression
from megatron.compression.tensor_parallel.caat_net_checks import OtherWeights, check_checkpoint
from megatron.compression.tensor_parallel.guarded_run import GuardedRun
from megatron.compression.tensor_parallel.rounding_keys import KeysOfTraining
from megatron.compression.tensor_parallel.spec import gpt_layer_spec, is_dense_local


def weave(args: Namespace, model_config: GPTModelConfig) -> tuple[CompressionRuntime, Reporter]:
    """Hook compression and the byte ledger into the run that ``args`` and ``model_config`` describe.

    Without a compression flag the hooks only count. Call it once, before ``pretrain``.

    Args:
        args: parsed and validated flags.
        model_config: gets our layer spec and a pre-wrap hook.

    Returns:
        The runtime (the forward step keeps its ``iteration``) and the reporter (``finish`` it at the end).

    Raises:
        CompressionConfigError: a setting that cannot be honoured.
    """
    config = compression_config_from_args(args)
    check_report_directory(config.report.compression_report, resuming=args.load is not None)
    runtime = CompressionRuntime(config)
    if config.report.compression_report:
        runtime.probe.interval = args.log_interval
    if model_config.transformer_layer_spec is None:
        model_config.transformer_layer_spec = gpt_layer_spec
    model_config.pre_wrap_hooks.append(partial(bind_compression, runtime=runtime))
    model_config.post_wrap_hooks.append(partial(bind_data_parallel, runtime=runtime))
    reporter = Reporter(
        runtime,
        log_interval=args.log_interval,
        train_iters=args.train_iters,
        settings=_settings(args),
        tensorboard=get_tensorboard_writer(),
    )
    _install_patches(runtime, reporter, args)
    for line in _announcement(args, config, runtime, model_config):
        print_rank_0(line)
    return runtime, reporter


def _install_patches(runtime: CompressionRuntime, reporter: Reporter, args: Namespace) -> None:
    ledger = runtime.ledger
    on_checkpoint = [
        partial(check_checkpoint, args=args),
        partial(say_changed_settings, args=args, say=print_rank_0),
    ]
    on_read = [OtherWeights(args, print_rank_0).on_checkpoint_read]
    if runtime.guard is not None:
        guarded = GuardedRun(runtime.guard, args, args.log_interval)
        on_checkpoint.append(guarded.on_checkpoint_args)

        def on_training_log(iteration, losses):
            reporter.on_training_log(iteration, losses)
            guarded.on_training_log(iteration, losses)

        patches.on_training_log(on_training_log)
    else:
        patches.on_training_log(reporter.on_training_log)
    patches.on_checkpoint_args(*on_checkpoint)
    _follow_evaluations(runtime, reporter)
    patches.on_gradient_sync(partial(record_uncompressed, ledger, "dp.gradient"))
    patches.on_parameter_sync(partial(record_uncompressed, ledger, "dp.weight"))
    if runtime.weight_codec is not None:
        patches.on_master_copy(copy_masters)
    if runtime.gradient_sync is not None:
        state = GradientState(args, runtime.gradient_syncs)

        def add_state(state_dict, is_loading):
            if "optimizer" in state_dict:
                state.add_to(state_dict, is_loading)

        patches.around_checkpoint_state(add_state)
        on_read.append(state.loaded)
    patches.on_checkpoint_read(*on_read)
    patches.on_replicated_gradient_sync(
        partial(ledger.record_uncompressed, "tp.other", "exact", "all_reduce"), align_gradients
    )
    patches.on_tied_embedding_gradient_sync(
        partial(ledger.record_uncompressed, "pp.other", "exact", "all_reduce")
    )
    exchange = PipelineExchange(
        runtime.config.pipeline_parallel,
        ledger,
        runtime.probe,
        partial(current_iteration, args),
        args.seed,
        partial(parallel_state.get_data_parallel_rank, with_context_parallel=True),
        validate_uncompressed=runtime.config.validate_uncompressed,
    )
    patches.through_pipeline_exchange(exchange)
    patches.around_schedules(exchange.begin, exchange.finish)


def _follow_evaluations(runtime: CompressionRuntime, reporter: Reporter) -> None:
    codec, keys = runtime.tensor_parallel_codec, KeysOfTraining()
    if codec is None or not codec.rounds_randomly:
        patches.around_evaluate(reporter.before_evaluate, reporter.after_evaluate)
        return

    def before(split: str) -> None:
        keys.keep()
        reporter.before_evaluate(split)

    def after(losses: dict | None) -> None:
        keys.restore()
        reporter.after_evaluate(losses)

    patches.around_evaluate(before, after)


def current_iteration(args: Namespace) -> int:
    """Zero-based; known before the first message. A run that only evaluates sets args.iteration alone."""
    return max(getattr(args, "curr_iteration", 0), args.iteration)


def _announcement(args, config, runtime, model_config) -> list[str]:
    settings = config.tensor_parallel
    lines = []
    if not is_dense_local(model_config.transformer):
        lines.append(
            "compression: this model's tensor-parallel traffic is not counted (not a dense local GPT)"
        )
    lines += [f"compression: {line}" for line in uncounted(args)]
    if reason := idle_reason(config, args.tensor_model_parallel_size):
        lines.append(f"compression: {reason}")
    elif settings.enabled:
        chosen = " (--tp-compression auto)" if settings.tp_compression == "auto" else ""
        line = f"compression: tensor parallelism uses {runtime.tensor_parallel_codec.name}{chosen}"
        line += f", messages of at least {settings.taco_min_message_mb:g} MiB"
        if settings.taco_start_iteration:
            line += f", from iteration {settings.taco_start_iteration}"
        if settings.layers is not None:
            line += f", layers {settings.taco_layers}"
        if runtime.backward_codec is not None:
            line += f", gradients {settings.taco_backward_format}"
        if settings.taco_error_bound is not None:
            line += f", while its error is at most {settings.taco_error_bound:g}"
        lines.append(line)
    if reason := data_parallel_idle_reason(
        config.data_parallel, args.data_parallel_size * args.context_parallel_size
    ):
        lines.append(f"compression: {reason}")
    elif config.data_parallel.enabled:
        lines.append(f"compression: {describe_data_parallel(config.data_parallel)}")
    if reason := pipeline_idle_reason(config, args.pipeline_model_parallel_size):
        lines.append(f"compression: {reason}")
    elif config.pipeline_parallel.enabled:
        lines.append(f"compression: {describe_pipeline(config.pipeline_parallel)}")
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if line := validation_line(config, *sizes):
        lines.append(f"compression: {line}")
    if config.caat_net.enabled:
        lines.append(
            f"compression: CAAT-Net sums {config.caat_net.shared_channels(args.hidden_size)} of "
            f"{args.hidden_size} channels of each row-parallel output over "
            f"{args.tensor_model_parallel_size} ranks; its checkpoints belong to both numbers"
        )
    return lines


def _settings(args: Namespace) -> dict:
    """The flags that describe the run in a report."""
    names = (
        "tp_compression taco_format taco_group_size taco_scales taco_rounding taco_min_message_mb "
        "taco_start_iteration taco_overlap_chunks taco_transport taco_communicators taco_layers "
        "taco_backward_format taco_error_bound "
        "pp_compression pp_backward_compression tah_tile_size tah_high_bits tah_low_bits tah_high_ratio "
        "tah_allocation tah_transform tah_backward_bits tah_backward_tile_size tah_start_iteration "
        "pp_taco_format pp_taco_group_size pp_scales pp_group_size pp_normalize pp_rounding "
        "pp_backward_rounding "
        "caat_net_sync_fraction validate_uncompressed "
        "dp_compression quantized_weights weight_quantization_bits wq_group_size weight_difference "
        "quantized_gradients gradient_quantization_bits_intra gq_group_size_intra "
        "gradient_quantization_bits_inter gq_group_size_inter hadamard_transform gradient_alltoall_pipeline "
        "gradients_quantization_start_iteration dp_intra_node_size dp_communicators dp_error_feedback "
        "dp_error_feedback_average tagc_sparsity tagc_wire tagc_layers tagc_sketch_ratio tagc_bits "
        "accumulate_allreduce_grads_in_fp32 overlap_grad_reduce overlap_param_gather "
        "tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size num_layers hidden_size "
        "num_attention_heads seq_length micro_batch_size global_batch_size train_iters params_dtype seed "
        "sequence_parallel use_distributed_optimizer world_size"
    )
    return {name: str(getattr(args, name)) for name in names.split()}
