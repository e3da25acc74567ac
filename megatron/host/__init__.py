"""Stand-ins where the machine has no CUDA device: Megatron's own training loop runs on CPU tensors
over gloo.

`install()` must run before `megatron.training` is imported. Symbols are replaced through
`megatron.compression.patches`: cuda.py has torch's, engine.py Megatron's and the arguments of a CPU
run.
"""

_active = False


def is_active() -> bool:
    """True once `install()` has put the CPU stand-ins in place in this process."""
    return _active


def install(training: bool = True) -> bool:
    """Make Megatron, or without ``training`` megatron-core alone, runnable on this machine.
    Idempotent.

    Returns: True where the CPU stand-ins are in place, False where CUDA is present (nothing
        replaced).
    """
    global _active
    import torch

    # With a GPU everything is left as it is, and nothing below is imported.
    if not _active and torch.cuda.is_available():
        return False
    from megatron.host import cuda, engine

    if not _active:
        cuda.install()
        _active = True
    if training:
        engine.install()
    else:
        engine.install_core()
    return True
