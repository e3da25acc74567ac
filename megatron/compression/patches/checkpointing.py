"""What is saved with a checkpoint and read back."""

from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow


def on_checkpoint_args(*after: Callable[[Any], None]) -> None:
    """Call each ``after(checkpoint_args)`` when a checkpoint's arguments have been checked: once a resume.

    Why: Megatron saves its arguments with a checkpoint and hands them to nobody on the way back. Not reached:
    ``--finetune`` and ``--pretrained-checkpoint``, which begin anew (see ``on_checkpoint_read``).
    """
    from megatron.training import checkpointing

    def run(result: Any, given: dict) -> None:
        for one in after:
            one(given["checkpoint_args"])

    follow(checkpointing, "check_checkpoint_args", ("checkpoint_args",), run)


def around_checkpoint_state(add: Callable[[dict, bool], None]) -> None:
    """Call ``add(state_dict, is_loading)`` for each checkpoint that is put together to be saved or loaded.

    Why: checkpoints have no place for the state of a run's own parts. Without "optimizer" in the state
    (``--no-save-optim``, ``--no-load-optim``, ``--finetune``) the checkpoint holds weights alone: ``add`` has
    to look.
    """
    from megatron.training import checkpointing

    def run(state_dict: dict, given: dict) -> None:
        add(state_dict, (given.get("optim_sd_kwargs") or {}).get("is_loading", False))

    follow(checkpointing, "generate_state_dict", ("optimizer", "optim_sd_kwargs"), run)


def on_checkpoint_read(*after: Callable[[dict | None, str | None], None]) -> None:
    """Call each ``after(state_dict, path)`` with what has been read of a checkpoint; None: there is none.

    Why: it is the one place that every load comes through, ``--finetune`` too, before anything is checked.
    The arguments alone are read first, then everything. Not reached: what reads files by itself.
    """
    from megatron.training import checkpointing

    def run(result: tuple, given: dict) -> None:
        for one in after:
            one(result[0], result[1])

    follow(checkpointing, "_load_base_checkpoint", ("rank0",), run)
