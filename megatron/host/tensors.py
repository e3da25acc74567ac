"""Tensors that Megatron asks to live on "cuda" are made on the CPU.

The factory functions are wrapped one by one. A TorchFunctionMode would reach the same call sites with one
class, but it intercepts every other operation as well: a tiny model's iteration takes a quarter longer.
"""

import torch
from torch.utils._device import _device_constructors

from megatron.compression.patches import put, replace

CPU = torch.device("cpu")

# Factories that megatron.core and megatron.training call with device="cuda" (or a torch.device of it).
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory):
    """Wrap a tensor factory: device "cuda" means the CPU, pinned memory means ordinary memory."""

    def wrapper(*args, **kwargs):
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _type_on_gpu(original):
    """Tensor.type(): the optimizers sort parameters by names such as 'torch.cuda.FloatTensor'."""

    def type(self, dtype=None, *args, **kwargs):
        if dtype is not None or args or kwargs:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type


def _to_cpu(original):
    def to(self, *args, **kwargs):
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def install() -> None:
    """Wrap the factories and the Tensor methods that move a tensor to the device."""
    _device_constructors()  # torch keeps this set, which `with torch.device("meta")` looks originals up in
    for name in FACTORIES:
        replace(torch, name, (), _on_cpu)
    tensor = torch.Tensor
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        replace(tensor, name, (), _on_cpu)
    replace(tensor, "to", (), _to_cpu)
    replace(tensor, "type", (), _type_on_gpu)
    # Module.cuda() goes through Tensor.cuda(); both mean "where it is already".
    put(tensor, "cuda", lambda self, *args, **kwargs: self, "it is on the device")
    put(tensor, "pin_memory", lambda self, *args, **kwargs: self, "there is nothing to pin for")
    put(tensor, "record_stream", lambda self, stream: None, "there are no streams")
