"""The three communication functions, and a quantizer whose tensors are gathered as bytes."""

import torch
import torch.distributed as dist


class Quantized:
    """A tensor in bytes, with one scale."""

    def __init__(self, data: torch.Tensor, scale: float) -> None:
        self._data = data
        self.scale = scale

    def dequantize(self) -> torch.Tensor:
        return (self._data.float() - 128) * self.scale


class Quantizer:
    """Bytes with a fixed scale, as delayed scaling has one that all ranks share."""

    scale = 1 / 16

    def __call__(self, x: torch.Tensor) -> Quantized:
        codes = (x / self.scale).round().clamp(-128, 127) + 128
        return Quantized(codes.to(torch.uint8), self.scale)


def allreduce(inp, tp_group=None, async_op=False):
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)


def reduce_scatter_along_first_dim(inp, tp_group, async_op=False, output=None):
    if output is None:
        output = inp.new_empty((inp.shape[0] // tp_group.size(), *inp.shape[1:]))
    handle = dist.reduce_scatter_tensor(output, inp.contiguous(), group=tp_group, async_op=async_op)
    return output, handle


def gather_along_first_dim(
    inp,
    process_group,
    async_op=False,
    quantizer=None,
    output_tensor=None,
    external_coalescing=False,
):
    if quantizer is not None and not isinstance(inp, Quantized):
        inp = quantizer(inp)
    data = inp._data if isinstance(inp, Quantized) else inp
    full = data.new_empty((data.shape[0] * process_group.size(), *data.shape[1:]))
    handle = dist.all_gather_into_tensor(
        full, data.contiguous(), group=process_group, async_op=async_op
    )
    if isinstance(inp, Quantized):
        full = Quantized(full, inp.scale)
    return full, handle
