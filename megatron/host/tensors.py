"""Tensors that Megatron asks to live on "cuda" are made on the CPU.

The factory functions are wrapped one by one. A TorchFunctionMode would reach the same call sites with one
class, but it intercepts every other operation as well: a tiny model's iteration takes a quarter longer.
"""

import functools

import torch
from torch.utils._device import _device_constructors

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

    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _wrap_type(original):
    """Tensor.type(): the optimizers sort parameters by names such as 'torch.cuda.FloatTensor'."""

    @functools.wraps(original)
    def type(self, dtype=None, *args, **kwargs):
        if dtype is not None or args or kwargs:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type


def _wrap_to(original):
    @functools.wraps(original)
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
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor = torch.Tensor
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.to = _wrap_to(tensor.to)
    tensor.type = _wrap_type(tensor.type)
    # Module.cuda() goes through Tensor.cuda(); both mean "where it is already".
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
