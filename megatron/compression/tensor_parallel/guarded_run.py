"""The error guard in a training run: decides at the log interval, says so once, survives a checkpoint."""

from argparse import Namespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.tensor_parallel.guard import ErrorGuard, SiteChannel

SAVED_AS = "taco_guarded_sites"
"""Megatron saves its arguments with every checkpoint; the decisions travel there under this name."""


class GuardedRun:
    """Follows a run through the seams of ``training_log`` and ``check_checkpoint_args``.

    Args:
        guard: what the sites measure into.
        args: Megatron's global arguments, which its checkpoints hold.
        log_interval: Megatron's ``--log-interval``.
    """

    def __init__(self, guard: ErrorGuard, args: Namespace, log_interval: int) -> None:
        guard.interval = log_interval
        self.guard = guard
        self.args = args
        setattr(args, SAVED_AS, [])

    def on_training_log(self, iteration: int, losses: dict[str, torch.Tensor] | None = None) -> None:
        """Decide at the log interval; the last rank prints what goes uncompressed from now on."""
        if iteration % self.guard.interval:
            return
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        new = _of_all_ranks(self.guard.decide(group), parallel_state.get_pipeline_model_parallel_group())
        if not new:
            return
        self.guard.tripped.update(new)
        setattr(self.args, SAVED_AS, self.guard.state())
        if dist.get_rank() == dist.get_world_size() - 1:
            for (site, channel), error in sorted(new.items()):
                print(
                    f" compression: {site} {channel} has a relative error of {error:.4g}, past "
                    f"--taco-error-bound {self.guard.bound:g}; it goes uncompressed after iteration "
                    f"{iteration}",
                    flush=True,
                )

    def on_checkpoint_args(self, checkpoint_args: Namespace) -> None:
        """Continue with the decisions of the run that wrote the checkpoint."""
        saved = getattr(checkpoint_args, SAVED_AS, None) or []
        self.guard.restore(saved)
        setattr(self.args, SAVED_AS, self.guard.state())
        if saved and dist.get_rank() == dist.get_world_size() - 1:
            sites = ", ".join(f"{site} {channel}" for site, channel, _ in saved)
            print(f" compression: uncompressed as when the checkpoint was saved: {sites}", flush=True)


def _of_all_ranks(decisions: dict[SiteChannel, float], group: dist.ProcessGroup) -> dict[SiteChannel, float]:
    """The decisions of every pipeline stage: any rank may write the checkpoint, and the last one prints.

    Args:
        group: one rank of each stage; the other ranks of a stage decide alike.
    """
    if group.size() == 1:
        return decisions
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    any_new = torch.tensor(len(decisions), device=device)
    dist.all_reduce(any_new, group=group)
    if not any_new:
        return {}
    parts: list[dict] = [{}] * group.size()
    dist.all_gather_object(parts, decisions, group=group)
    return {one: error for part in parts for one, error in part.items()}
