"""What a resumed run does otherwise than the one that wrote its checkpoint."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields

from megatron.compression.config import (
    DataParallelCompression,
    PipelineParallelCompression,
    TensorParallelCompression,
)
from megatron.compression.config_errors import flag_name

SAME_RESULTS = ("taco_transport", "taco_communicators", "taco_overlap_chunks", "dp_communicators")
"""Settings that change how fast bytes travel, not which."""


def changed_settings(saved: Namespace, args: Namespace) -> list[str]:
    """``--taco-scales single -> signed`` for every setting of a codec that the checkpoint's arguments have
    and the run's do not share."""
    found = []
    for config_class in (TensorParallelCompression, PipelineParallelCompression, DataParallelCompression):
        for name in (field.name for field in fields(config_class)):
            if name in SAME_RESULTS or not (hasattr(saved, name) and hasattr(args, name)):
                continue
            before, now = getattr(saved, name), getattr(args, name)
            if before != now:
                found.append(f"{flag_name(name)} {before} -> {now}")
    return found


def say_changed_settings(saved: Namespace, args: Namespace, say: Callable[[str], None]) -> None:
    """One line, where there is anything to say: what ``auto`` stands for may change between versions."""
    if changed := changed_settings(saved, args):
        say(f"compression: other settings than the checkpoint's: {', '.join(changed)}")
