"""Several ranks of a symmetric-memory lane on one device, and what their collectives should return."""

import torch

from taco_kernels.taco import CodecConfig, decode, decode_sum, decode_sum_encode, encode
from taco_kernels.symmetric_memory.lane import Lane, lane_bytes, make_lanes


def simulated_lanes(world_size: int, programs: int, timeout: float = 20.0) -> list[Lane]:
    """One lane's end for each of ``world_size`` ranks, all in this device's memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = lane_bytes(world_size, programs)
    memory = torch.zeros(world_size, size, dtype=torch.uint8, device=device)
    addresses = [memory[rank].data_ptr() for rank in range(world_size)]
    lanes = [make_lanes(addresses, rank, device, 1, programs, timeout)[0] for rank in range(world_size)]
    lanes[0].__dict__["memory_owner"] = memory  # keep it alive
    torch.cuda.synchronize()
    return lanes


def on_all_ranks(lanes: list[Lane], call) -> list[torch.Tensor]:
    """``call(rank, lane)`` on a stream for each rank, so that the kernels run at the same time."""
    current, results = torch.cuda.current_stream(), []
    for rank, lane in enumerate(lanes):
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(call(rank, lane))
    torch.cuda.synchronize()
    return results


def expected_all_reduce(
    xs: list[torch.Tensor],
    config: CodecConfig,
    random: Stream | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """The two-shot with the codec's own kernels."""
    config_out = config_out or config
    world_size, x = len(xs), xs[0]
    piece = config.chunk_numel(x.numel(), world_size)
    wires = [encode(x, config, world_size, _plus(random, rank)) for rank, x in enumerate(xs)]
    own = [
        decode_sum_encode(
            torch.stack([wire[p] for wire in wires]),
            config,
            piece,
            _plus(random, 0, p * piece),
            _plus(random, world_size, p * piece),
            config_out=config_out,
        )
        for p in range(world_size)
    ]
    return decode(torch.stack(own), config_out, x.shape, x.dtype, _plus(random, world_size))


def expected_reduce_scatter(
    xs: list[torch.Tensor], config: CodecConfig, random: Stream | None = None
) -> list[torch.Tensor]:
    """Each rank's slice, with the codec's own kernels."""
    world_size, x = len(xs), xs[0]
    shape = (x.shape[0] // world_size, *x.shape[1:])
    shard = x.numel() // world_size
    piece = config.chunk_numel(shard)
    results = []
    for p in range(world_size):
        wires = [
            encode(x.reshape(world_size, shard)[p], config, 1, _plus(random, rank, p * piece))
            for rank, x in enumerate(xs)
        ]
        results.append(decode_sum(torch.cat(wires), config, shape, x.dtype, _plus(random, 0, p * piece)))
    return results


def encoded_slice(x: torch.Tensor, rank: int, config: CodecConfig, random: Stream | None) -> torch.Tensor:
    """A rank's wire for an all-gather."""
    return encode(x, config, 1, _plus(random, 0, rank * config.chunk_numel(x.numel())))


def expected_all_gather(
    xs: list[torch.Tensor], config: CodecConfig, random: Stream | None = None
) -> torch.Tensor:
    """All slices, with the codec's own kernels."""
    piece = config.chunk_numel(xs[0].numel())
    slices = [
        decode(
            encoded_slice(x, rank, config, random), config, x.shape, x.dtype, _plus(random, 0, rank * piece)
        )
        for rank, x in enumerate(xs)
    ]
    return torch.cat(slices)


def _plus(random: Stream | None, stream: int, offset: int = 0) -> Stream | None:
    return random and Stream(random.key, random.stream + stream, random.offset + offset)
