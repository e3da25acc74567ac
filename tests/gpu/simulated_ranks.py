"""Several ranks of a symmetric-memory channel on one device, and what their collectives should return."""

from collections.abc import Callable

import torch

from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import CodecConfig, decode, decode_sum, decode_sum_encode, encode


def simulated_channels(world_size: int, programs: int, timeout: float = 20.0) -> list[Channel]:
    """One channel's end for each of ``world_size`` ranks, all in this device's memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = channel_bytes(world_size, programs)
    memory = torch.zeros(world_size, size, dtype=torch.uint8, device=device)
    addresses = [memory[rank].data_ptr() for rank in range(world_size)]
    channels = [Channel(addresses, rank, device, programs, timeout) for rank in range(world_size)]
    channels[0].__dict__["memory_owner"] = memory  # keep it alive
    torch.cuda.synchronize()
    return channels


def on_all_ranks(channels: list[Channel], call) -> list[torch.Tensor]:
    """``call(rank, channel)`` on a stream for each rank, so that the kernels run at the same time."""
    current, results = torch.cuda.current_stream(), []
    for rank, channel in enumerate(channels):
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(call(rank, channel))
    torch.cuda.synchronize()
    return results


def expected_all_reduce(
    xs: list[torch.Tensor], config: CodecConfig, config_out: CodecConfig | None = None
) -> torch.Tensor:
    """Two exchanges with the codec's own kernels; between two ranks without a ``config_out`` one."""
    world_size, x = len(xs), xs[0]
    if world_size == 2 and config_out is None:
        return decode_sum(torch.cat([encode(x, config) for x in xs]), config, x.shape, x.dtype)
    config_out = config_out or config
    piece = config.chunk_numel(x.numel(), world_size)
    wires = [encode(x, config, world_size) for x in xs]
    pieces = [torch.stack([wire[p] for wire in wires]) for p in range(world_size)]
    own = [decode_sum_encode(wires, config, piece, config_out=config_out) for wires in pieces]
    return decode(torch.stack(own), config_out, x.shape, x.dtype)


def expected_reduce_scatter(xs: list[torch.Tensor], config: CodecConfig) -> list[torch.Tensor]:
    """Each rank's slice, with the codec's own kernels."""
    world_size, x = len(xs), xs[0]
    shape = (x.shape[0] // world_size, *x.shape[1:])
    results = []
    for p in range(world_size):
        wires = [encode(x.reshape(world_size, -1)[p], config) for x in xs]
        results.append(decode_sum(torch.cat(wires), config, shape, x.dtype))
    return results


def collective_cases(
    xs: list[torch.Tensor], config: CodecConfig, second: CodecConfig
) -> list[tuple[Callable[[int, Channel], torch.Tensor], list[torch.Tensor]]]:
    """Collectives as calls of a rank and its channel, and what each rank should have of them, by the codec's
    own kernels; ``second``: config of an all-reduce's second exchange."""
    world_size, shape, dtype, wires = (
        len(xs),
        xs[0].shape,
        xs[0].dtype,
        [encode(x, config) for x in xs],
    )
    summed, in_two = ([expected_all_reduce(xs, config, to)] * world_size for to in (None, second))
    gathered = [torch.cat([decode(wire, config, shape, dtype) for wire in wires])] * world_size
    return [
        (lambda r, c: collectives.all_reduce(c, xs[r], config), summed),
        (
            lambda r, c: collectives.reduce_scatter(c, xs[r], config),
            expected_reduce_scatter(xs, config),
        ),
        (lambda r, c: collectives.all_reduce(c, xs[r], config, config_out=second), in_two),
        (lambda r, c: collectives.all_gather_encoded(c, wires[r], shape, dtype, config), gathered),
        (lambda r, c: collectives.all_reduce(c, xs[r], config), summed),
    ]
