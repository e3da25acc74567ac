"""Stand-ins where the machine has no CUDA device: Megatron's own training loop runs on CPU tensors over gloo.

`install()` must run before `megatron.training` is imported. Each module replaces symbols of one kind, through
`megatron.compression.patches`:
    devices.py    torch.cuda: device, memory, streams, events
    tensors.py    device="cuda" in tensor factories, Tensor.cuda, Tensor.to, Tensor.type
    rng.py        torch.cuda random state and Megatron's RNG tracker
    engine.py     symbols of megatron.training and megatron.core
    overrides.py  arguments that a CPU run needs
"""

from megatron.host.overrides import cpu_argument_overrides

__all__ = ["cpu_argument_overrides", "install", "is_active"]

_active = False


def is_active() -> bool:
    """True once `install()` has put the CPU stand-ins in place in this process."""
    return _active


def install() -> bool:
    """Make Megatron's training loop runnable on this machine. Idempotent.

    Returns: True where the CPU stand-ins are in place, False where CUDA is present (nothing replaced).
    """
    global _active
    import torch

    if _active or torch.cuda.is_available():
        return _active
    from megatron.host import devices, engine, rng, tensors

    devices.install()
    tensors.install()
    rng.install()
    engine.install()
    _active = True
    return True
