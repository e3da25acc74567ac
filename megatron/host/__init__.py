"""Stand-ins where the machine has no CUDA device: Megatron's own training loop runs on CPU tensors over gloo.

`install()` must run before `megatron.training` is imported. Symbols are replaced through
`megatron.compression.patches`: cuda.py has torch's, engine.py Megatron's and the arguments of a CPU run.
"""

from argparse import Namespace

_active = False
_training = False


def is_active() -> bool:
    """True once `install()` has put the CPU stand-ins in place in this process."""
    return _active


def install(training: bool = True) -> bool:
    """Make Megatron runnable on this machine. Idempotent.

    Args:
        training: Megatron's own training loop as well; False leaves megatron.training alone, for loops over
            megatron-core.
    Returns: True where the CPU stand-ins are in place, False where CUDA is present (nothing replaced).
    """
    global _active, _training
    import torch

    if not _active and torch.cuda.is_available():
        return False
    from megatron.host import cuda, engine

    if not _active:
        cuda.install()
        _active = True
        if not training:
            engine.install_core()
    if training and not _training:
        _training = True
        engine.install()
    return True


def cpu_argument_overrides(args: Namespace) -> list[str]:
    """Set in `args` what a CPU run needs; a line for each change. Once they are validated."""
    from megatron.host import engine

    return engine.cpu_argument_overrides(args)
