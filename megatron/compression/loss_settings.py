"""The loss meter's settings: when it measures, where it cannot, what the log says of it.

``loss_meter.py`` is what measures. Nothing of megatron-core is imported here: settings are read
without it.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron.compression import graphs
from megatron.compression.dimension import refuse_arguments
from megatron.compression.errors import SettingError, setting
from megatron.compression.names import ACTIVATIONS

if TYPE_CHECKING:
    from megatron.compression.config import CompressionConfig

AUTO = "auto"
"""``--compression-loss-interval`` without a number: the meter takes about ``SHARE`` of the time."""
SHARE = 0.01
"""Part of the training time that the meter may take by itself."""


def check(args: Namespace, config: "CompressionConfig") -> None:
    """Refuse a loss meter where its passes would change training, or measure something else.

    Args:
        args: Megatron's.
        config: of the run.

    Raises:
        SettingError: with the reason and the fix.
    """
    if config.loss_interval is None:
        return
    name = setting("loss_interval")
    graphs.refuse_by_layer(args, name, "passes micro-batches forward once more")
    if getattr(args, "fp8", None) and args.fp8_recipe == "delayed":
        raise SettingError(
            "args.fp8_recipe",
            "delayed",
            f"remembers the largest values of each pass, also of those of {name}",
            f"choose another recipe, or drop {name}",
        )
    refuse_arguments(args, _STATEFUL, f"drop it or {name}")


_KEEPS_LOGITS = (
    f"keeps the largest logits of each pass, also of those of {setting('loss_interval')}"
)
_OWN_GATHERS = f"gathers weights in passes that {setting('loss_interval')} does not follow"
_OFFLOADS = f"moves activations in passes that {setting('loss_interval')} does not follow"
_STATEFUL = {
    "qk_clip": _KEEPS_LOGITS,
    "log_max_attention_logit": _KEEPS_LOGITS,
    "use_torch_fsdp2": _OWN_GATHERS,
    "use_megatron_fsdp": _OWN_GATHERS,
    "cpu_offloading_num_layers": _OFFLOADS,
    "fine_grained_activation_offloading": _OFFLOADS,
    "moe_paged_stash": _OFFLOADS,
    "moe_expert_rank_capacity_factor": _OFFLOADS,
    "hybrid_context_parallel": "divides sequences anew in each micro-batch",
    "modelopt_enabled": "changes the shapes of messages in each step",
}
"""Megatron's argument -> why the meter cannot pass micro-batches forward beside it."""


def lines(args: Namespace, config: "CompressionConfig") -> list[str]:
    """Return for the log what the meter does and what it does not see.

    Args:
        args: Megatron's.
        config: of the run.
    """
    interval = config.loss_interval
    if interval is None:
        return []
    if not sees_messages(args, config):
        return [
            f"{setting('loss_interval')} has no effect here: no activations are sent compressed"
        ]
    frequency = f"every {interval} iterations"
    if interval == 1:
        frequency = "in every iteration"
    if interval == AUTO:
        frequency = f"as often as takes {100 * SHARE:g} % of the time"
    return [
        f"{frequency} the last micro-batch passes forward with and without codecs, to measure what they "
        "cost in loss; not seen: codecs of gradients, and what rounding does to the weights over "
        "time"
    ]


def sees_messages(args: Namespace, config: "CompressionConfig") -> bool:
    """Return whether a run sends activations that are compressed, or may be.

    Args:
        args: Megatron's.
        config: of the run.
    """
    for name in ACTIVATIONS:
        dimension = getattr(config, name)
        if dimension.ranks(args) > 1 and (dimension.enabled or name in config.auto):
            return True
    return False


def share_of_time(args: Namespace, micro_batches: int, passed: int) -> float:
    """Return the part of an iteration's time that a measurement of two passes takes.

    A backward pass takes twice a forward pass. The first micro-batch reaches the last of P stages
    after P - 1 steps, in a measurement as in an iteration.

    Args:
        args: Megatron's.
        micro_batches: of an iteration.
        passed: micro-batches of a measurement.
    """
    stages = args.pipeline_model_parallel_size
    # A virtual stage has 1 / chunks of a stage's layers, and so takes that part of its time.
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    # In forward passes of one micro-batch through one stage.
    fill = (stages - 1) / chunks
    return 2 * (passed + fill) / (3 * (micro_batches + fill))


def passed_micro_batches(args: Namespace, model_config: Any) -> int:
    """Return how many micro-batches a measurement passes forward: one, or with virtual stages as
    many as the interleaved schedule needs.

    Args:
        args: Megatron's.
        model_config: of the model.
    """
    if not getattr(args, "virtual_pipeline_model_parallel_size", None):
        return 1
    return model_config.microbatch_group_size_per_vp_stage
