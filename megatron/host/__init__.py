"""Stand-ins where the machine has no CUDA device: Megatron's own training loop runs on CPU tensors over gloo.

`install()` must run before `megatron.training` is imported. Each module replaces symbols of one kind, through
`megatron.compression.patches`:
    devices.py    torch.cuda: device, memory, streams, events
    tensors.py    device="cuda" in tensor factories, Tensor.cuda, Tensor.to, Tensor.type
    rng.py        torch.cuda random state and Megatron's RNG tracker
    groups.py     gloo's process groups
    engine.py     symbols of megatron.training and megatron.core
    overrides.py  arguments that a CPU run needs
"""

from megatron.host.overrides import cpu_argument_overrides

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
    from megatron.host import devices, engine, groups, rng, tensors

    if not _active:
        devices.install()
        tensors.install()
        rng.install()
        groups.install()
        _active = True
        if not training:
            engine.install_core()
    if training and not _training:
        _training = True
        engine.install()
    return True
