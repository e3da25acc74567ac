"""Several ranks of a symmetric-memory channel on one device, and their collectives' results."""

from collections.abc import Callable

import torch

from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.channel import Channel, channel_bytes
from taco_kernels.taco import CodecConfig, decode, decode_sum, decode_sum_encode, encode

Call = Callable[[int, Channel], torch.Tensor]
"""A collective, called with a rank and its channel."""


def simulated_channels(world_size: int, programs: int, timeout: float = 20.0) -> list[Channel]:
    """One channel's end for each rank, all in this device's memory.

    Args:
        world_size: ranks.
        programs: that may run at once on each; all ranks' must fit on the device together.
        timeout: seconds that a program waits for a peer.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    size = channel_bytes(world_size, programs)
    memory = torch.zeros(world_size, size, dtype=torch.uint8, device=device)
    addresses = [memory[rank].data_ptr() for rank in range(world_size)]
    channels = [Channel(addresses, rank, device, programs, timeout) for rank in range(world_size)]
    channels[0].__dict__["memory_owner"] = memory  # keep it alive
    torch.cuda.synchronize()
    return channels


def on_all_ranks(channels: list[Channel], call: Call) -> list[torch.Tensor]:
    """Call on a stream for each rank: kernels run at the same time. Return the ranks' results."""
    current = torch.cuda.current_stream()
    results = []
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
    """Return the sum by two exchanges with the codec's own kernels.

    Two ranks without a second codec exchange once.

    Args:
        xs: each rank's tensor.
        config: of the codec.
        config_out: of the second exchange.
    """
    world_size = len(xs)
    x = xs[0]
    if world_size == 2 and config_out is None:
        return decode_sum(torch.cat([encode(x, config) for x in xs]), config, x.shape, x.dtype)
    config_out = config_out or config
    piece = config.chunk_numel(x.numel(), world_size)
    wires = [encode(x, config, world_size) for x in xs]
    sums = []
    for owner in range(world_size):
        received = torch.stack([wire[owner] for wire in wires])
        sums.append(decode_sum_encode(received, config, piece, config_out=config_out))
    return decode(torch.stack(sums), config_out, x.shape, x.dtype)


def expected_reduce_scatter(xs: list[torch.Tensor], config: CodecConfig) -> list[torch.Tensor]:
    """Return each rank's slice, with the codec's own kernels."""
    world_size = len(xs)
    x = xs[0]
    shape = (x.shape[0] // world_size, *x.shape[1:])
    results = []
    for owner in range(world_size):
        wires = [encode(x.reshape(world_size, -1)[owner], config) for x in xs]
        results.append(decode_sum(torch.cat(wires), config, shape, x.dtype))
    return results


def collective_cases(
    xs: list[torch.Tensor], config: CodecConfig, second: CodecConfig
) -> list[tuple[Call, list[torch.Tensor]]]:
    """Collectives, and what each rank should have of them, by the codec's own kernels.

    Args:
        xs: each rank's tensor.
        config: of the codec.
        second: of an all-reduce's second exchange.
    """
    world_size = len(xs)
    shape = xs[0].shape
    dtype = xs[0].dtype
    wires = [encode(x, config) for x in xs]

    def all_reduce(rank: int, channel: Channel) -> torch.Tensor:
        return collectives.all_reduce(channel, xs[rank], config)

    def all_reduce_in_two(rank: int, channel: Channel) -> torch.Tensor:
        return collectives.all_reduce(channel, xs[rank], config, config_out=second)

    def reduce_scatter(rank: int, channel: Channel) -> torch.Tensor:
        return collectives.reduce_scatter(channel, xs[rank], config)

    def all_gather(rank: int, channel: Channel) -> torch.Tensor:
        return collectives.all_gather_encoded(channel, wires[rank], shape, dtype, config)

    summed = [expected_all_reduce(xs, config)] * world_size
    summed_in_two = [expected_all_reduce(xs, config, second)] * world_size
    gathered = [torch.cat([decode(wire, config, shape, dtype) for wire in wires])] * world_size
    return [
        (all_reduce, summed),
        (reduce_scatter, expected_reduce_scatter(xs, config)),
        (all_reduce_in_two, summed_in_two),
        (all_gather, gathered),
        (all_reduce, summed),  # finds the slots as the others have left them
    ]
