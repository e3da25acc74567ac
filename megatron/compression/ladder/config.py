"""The setting of ladder residuals, and what it cannot be combined with."""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.turns_checks import HALVES, check_turns

FLAG = "--ladder-residual"


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """Ladder residuals (arXiv 2501.06589): another model, whose sums travel behind blocks."""

    residual: bool = False
    """Each attention and MLP reads the residual stream before the sum of the block before it has arrived.
    Another model, with checkpoints of its own; needs torch-native layers."""

    def describe(self) -> str:
        """For the log."""
        return "ladder residuals: a block reads the stream without the sum of the block before it"

    def check(self, args: Namespace, chunks: int = 1, halves: bool = False) -> None:
        """Refuse what would compute another function still, or has nothing left to hide.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        if not self.residual:
            return
        check_turns(args, FLAG)
        stages, fraction = args.pipeline_model_parallel_size, getattr(args, "caat_net_sync_fraction", 1.0)
        for refused, what, reason in (
            (
                stages > 1,
                f"--pipeline-model-parallel-size {stages}",
                "would add a pending sum at a stage's end",
            ),
            (fraction < 1, f"--caat-net-sync-fraction {fraction:g}", "has layers that wait for their sums"),
            (
                chunks > 1,
                f"--tp-compression-chunks {chunks}",
                "cuts sums that travel behind a block in whole",
            ),
            (halves, HALVES, "has sums travel behind blocks as well"),
        ):
            if refused:
                raise CompressionConfigError(f"{what} {reason}; drop it or {FLAG}")
