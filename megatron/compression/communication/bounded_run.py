"""The error bound in a training run: decides at the log interval, says so once, survives a checkpoint."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.communication.error_bound import ErrorBound, SiteTraffic


class BoundedRun:
    """Follows a run's log lines and checkpoints."""

    def __init__(self, bound: ErrorBound, log_interval: int) -> None:
        bound.interval = log_interval
        self.bound = bound

    def on_training_log(self, iteration: int, losses: dict[str, torch.Tensor] | None = None) -> None:
        """Decide at the log interval; the last rank prints what goes uncompressed from now on."""
        if iteration % self.bound.interval:
            return
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        new = _of_all_ranks(self.bound.decide(group), parallel_state.get_pipeline_model_parallel_group())
        self.bound.tripped.update(new)
        for (site, traffic), error in sorted(new.items()):
            past = f"has a relative error of {error:.4g}, past --compression-error-bound {self.bound.bound:g}"
            _say(f"{site} {traffic} {past}; it goes uncompressed after iteration {iteration}")

    def restore(self, saved: Sequence[Sequence] | None) -> None:
        """Continue with the decisions of the run that wrote a checkpoint."""
        self.bound.restore(saved or [])
        if saved:
            sites = ", ".join(f"{site} {traffic}" for site, traffic, _ in saved)
            _say(f"uncompressed as when the checkpoint was saved: {sites}")


def _say(line: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f" compression: {line}", flush=True)


def _of_all_ranks(decisions: dict[SiteTraffic, float], group: dist.ProcessGroup) -> dict[SiteTraffic, float]:
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
