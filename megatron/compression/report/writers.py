"""Scalars for the experiment trackers that a run has."""

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
        if not scalars:
            return
        if self.tensorboard is not None:
            for tag, value in scalars.items():
                self.tensorboard.add_scalar(tag, value, iteration)
        if self.wandb is not None:
            self.wandb.log(scalars, iteration)
        if self.mlflow is not None:
            self.mlflow.log_metrics(scalars, step=iteration)
