"""What a run of Megatron's training loop lends to its reporter."""

from megatron.compression.report.writers import Writers


def megatron_writers() -> Writers:
    """The trackers of this run on the rank that writes, all None elsewhere.

    Not every version of Megatron knows MLflow.
    """
    from megatron.training import global_vars

    mlflow_writer = getattr(global_vars, "get_mlflow_writer", lambda: None)
    return Writers(global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), mlflow_writer())


def megatron_seconds() -> float:
    """Seconds spent in training iterations so far: what "elapsed time per iteration" is taken from.

    Evaluation and saving are not in it. Current right behind ``training_log`` at a log interval.
    """
    from megatron.training import get_timers

    return get_timers()("interval-time", log_level=0).active_time()
