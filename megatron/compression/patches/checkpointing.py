"""What is saved with a checkpoint and read back."""

import inspect
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import replace


def on_checkpoint_args(*after: Callable[[Any], None]) -> None:
    """Call each ``after(checkpoint_args)`` when a checkpoint's arguments have been checked: once a resume.

    Why: Megatron saves its arguments with a checkpoint and hands them to nobody on the way back. Not reached:
    ``--finetune`` and ``--pretrained-checkpoint``, which begin anew (see ``on_checkpoint_read``).
    """
    from megatron.training import checkpointing

    def wrap(check_checkpoint_args):
        def wrapper(checkpoint_args, *args, **kwargs):
            check_checkpoint_args(checkpoint_args, *args, **kwargs)
            for one in after:
                one(checkpoint_args)

        return wrapper

    replace(checkpointing, "check_checkpoint_args", ("checkpoint_args",), wrap)


def around_checkpoint_state(add: Callable[[dict, bool], None]) -> None:
    """Call ``add(state_dict, is_loading)`` for each checkpoint that is put together to be saved or loaded.

    Why: checkpoints have no place for the state of a run's own parts. Without "optimizer" in the state
    (``--no-save-optim``, ``--no-load-optim``, ``--finetune``) the checkpoint holds weights alone: ``add`` has
    to look.
    """
    from megatron.training import checkpointing

    def wrap(generate_state_dict):
        signature = inspect.signature(generate_state_dict)

        def wrapper(*args, **kwargs):
            state_dict = generate_state_dict(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            add(state_dict, (bound.get("optim_sd_kwargs") or {}).get("is_loading", False))
            return state_dict

        return wrapper

    replace(checkpointing, "generate_state_dict", ("optimizer", "optim_sd_kwargs"), wrap)


def on_checkpoint_read(*after: Callable[[dict | None, str | None], None]) -> None:
    """Call each ``after(state_dict, path)`` with what has been read of a checkpoint; None: there is none.

    Why: it is the one place that every load comes through, ``--finetune`` too, before anything is checked.
    The arguments alone are read first, then everything. Not reached: what reads files by itself.
    """
    from megatron.training import checkpointing

    def wrap(load_base_checkpoint):
        def wrapper(*args, **kwargs):
            result = load_base_checkpoint(*args, **kwargs)
            for one in after:
                one(result[0], result[1])
            return result

        return wrapper

    replace(checkpointing, "_load_base_checkpoint", ("rank0",), wrap)
