"""Scalars for the experiment trackers that a run has, and what Megatron's loop lends to a reporter."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Writers:
    """Each None where the run has none, or where this rank does not write."""

    tensorboard: Any = None
    """A ``SummaryWriter``."""
    wandb: Any = None
    """The ``wandb`` module after its ``init``, as Megatron keeps it."""
    mlflow: Any = None
    """The ``mlflow`` module, or whatever has its ``log_metrics``."""

    def write(self, scalars: dict[str, float], iteration: int) -> None:
        """Write all scalars to each tracker at one step."""
        if self.tensorboard is not None:
            for tag, value in scalars.items():
                self.tensorboard.add_scalar(tag, value, iteration)
        if self.wandb is not None and scalars:
            self.wandb.log(scalars, iteration)
        if self.mlflow is not None and scalars:
            self.mlflow.log_metrics(scalars, step=iteration)


def megatron_writers() -> Writers:
    """The trackers of this run on the rank that writes. Not every version of Megatron knows MLflow."""
    from megatron.training import global_vars

    mlflow_writer = getattr(global_vars, "get_mlflow_writer", lambda: None)
    return Writers(global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), mlflow_writer())


def megatron_seconds() -> float:
    """Seconds in training iterations so far, without evaluation and saving: what "elapsed time per iteration"
    is taken from. Current right behind ``training_log`` at a log interval."""
    from megatron.training import get_timers

    return get_timers()("interval-time", log_level=0).active_time()
