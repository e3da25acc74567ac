"""Runs Megatron's own training loop on CPU tensors over gloo, where the machine has no CUDA device.

`prepare()` must run before `megatron.training` is imported. Where `torch.cuda.is_available()` is True it
applies only what GPUs need too: `use_shipped_helpers`, `make_torch_adam_resumable`, `fuse_torch_adam`.

Every stand-in lives in one of these modules, with the symbol it replaces and the reason:
    devices.py          torch.cuda: device, memory, streams, events
    tensors.py          device="cuda" in tensor factories, Tensor.cuda, Tensor.to, Tensor.type
    rng.py              torch.cuda random state and Megatron's RNG tracker
    engine.py           symbols of megatron.training and megatron.core
    overrides.py        arguments that a CPU run needs
    dataset_helpers.py  the compiled dataset helper (CPU and GPU)
    errors.py           one line for bad input (CPU and GPU)
    preflight.py        what is checked before a run (CPU and GPU)
    adam_state.py       resuming torch's Adam under the distributed optimizer (CPU and GPU)
    fused_adam.py       torch's Adam as one kernel (GPU)
    shared_gpus.py      several ranks on one GPU (GPU)
"""

from megatron.host.adam_state import make_torch_adam_resumable
from megatron.host.dataset_helpers import use_shipped_helpers
from megatron.host.errors import InputError, one_line_errors
from megatron.host.fused_adam import fuse_torch_adam
from megatron.host.overrides import cpu_argument_overrides
from megatron.host.preflight import check_megatron_core, installed_megatron_core

__all__ = [
    "InputError",
    "cpu_argument_overrides",
    "fuse_torch_adam",
    "install",
    "is_active",
    "make_torch_adam_resumable",
    "one_line_errors",
    "prepare",
    "use_shipped_helpers",
]

_active = False


def is_active() -> bool:
    """True once `install()` has put the CPU stand-ins in place in this process."""
    return _active


def prepare(pinned_megatron_core: str) -> None:
    """What an entrypoint calls first: check the version of megatron-core, then `install()`.

    Ends the process with one line where the installed version is another one.
    """
    with one_line_errors():
        check_megatron_core(pinned_megatron_core, installed_megatron_core())
        install()


def install() -> bool:
    """Make Megatron's training loop runnable on this machine. Idempotent.

    Returns: True where the CPU stand-ins are in place, False where CUDA is present (nothing replaced).
    """
    global _active
    import torch

    if _active:
        return True
    if not torch.cuda.is_available():
        from megatron.host import devices, engine, rng, tensors

        devices.install()
        tensors.install()
        rng.install()
        engine.install()
        _active = True
    use_shipped_helpers()
    make_torch_adam_resumable()
    fuse_torch_adam()
    return _active
