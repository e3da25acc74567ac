"""The setting of ladder residuals, and what it cannot be combined with."""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.turns_checks import check_turns

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

    def check(self, args: Namespace) -> None:
        """Refuse what would compute another function still; ``args`` as for ``check_turns``.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        if not self.residual:
            return
        check_turns(args, FLAG)
        if args.pipeline_model_parallel_size > 1:
            stages = f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
            raise CompressionConfigError(
                f"{stages} would add a stage's last sum before the next one reads: another function; "
                f"drop it or {FLAG}"
            )
