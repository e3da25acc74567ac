"""The collectives of W tensor-parallel ranks on one device, with the arithmetic of the real ones.

Everything that is sent is encoded and decoded by the project's codecs, with the random numbers that
megatron.compression.collectives gives them, so a simulated all-reduce has the bits of a real one.
"""

from collections.abc import Callable

import torch

import taco_kernels
from scripts.accuracy.settings import TENSOR_FP8, Setting, parse_codec
from taco_kernels import CodecConfig, Stream

_MASK = 2**64 - 1
_compiling = [False]


def compile_elementwise(value: bool) -> None:
    """Whether what is not one of the codecs' kernels is compiled on CUDA tensors (process-wide)."""
    _compiling[0] = value


def _fused(function: Callable) -> Callable:
    """``function``, compiled if that is wanted: many passes over large tensors become two."""
    compiled = torch.compile(function, dynamic=False)

    def call(x: torch.Tensor, *arguments):
        with torch.no_grad():
            return (compiled if _compiling[0] and x.is_cuda else function)(x, *arguments)

    return call


def rounding_key(*numbers: int) -> int:
    """64-bit seed of one exchange's random rounding from (seed, step, ...): splitmix64, folded."""
    key = 0
    for number in numbers:
        key = (key ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


class Exchange:
    """Sums the ranks' partial sums, gathers their slices, as a setting says.

    Call ``start`` before every forward: the exchanges of a pass are numbered in the order in which they
    happen, and number and step make their random numbers.

    Args:
        setting: form and codecs.
        seed: of the random rounding.
    """

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting = setting
        self.seed = seed
        self.world_size = setting.world_size
        forward1, forward2, backward1, backward2 = (parse_codec(codec) for codec in setting.codecs())
        self.codecs = {"forward": (forward1, forward2), "backward": (backward1, backward2)}
        self.step = self.number = 0

    def start(self, step: int) -> None:
        """Begin the forward of a step."""
        self.step, self.number = step, 0

    def key(self) -> int:
        """Seed of the next exchange."""
        self.number += 1
        return rounding_key(self.seed, self.step, self.number)

    def reduce(self, partials: torch.Tensor, direction: str, whole: bool = False) -> torch.Tensor:
        """[W, T, h] of the ranks -> their sum [T, h]: an all-reduce, or a reduce-scatter's shards together.

        Args:
            partials: rank w's partial sum at [w].
            direction: forward or backward.
            whole: an all-reduce also with sequence parallelism.
        """
        hop1, hop2 = self.codecs[direction]
        key = self.key()
        shape, dtype = partials.shape[1:], partials.dtype
        if hop2 is None or (self.setting.sequence_parallel and not whole):
            return reduce_once(partials, hop1, key, dtype)
        world_size = partials.shape[0]
        if same_groups(hop1, hop2) and not self.setting.remove_mean:
            wires, second = encode_partials(partials, hop1, key), Stream(key, world_size)
            total = taco_kernels.decode_sum_encode(
                wires, hop1, shape.numel(), Stream(key, 0), second, config_out=hop2
            )
            return taco_kernels.decode(total[None], hop2, shape, dtype, second)
        total = reduce_once(partials, hop1, key, torch.float32)
        return self._send(total, hop2, Stream(key, world_size), dtype)

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """What every rank has of x [T, h] after the all-gather of its slices."""
        codec = self.codecs[direction][1]
        return self._send(x, codec, Stream(self.key(), 0), x.dtype)

    def _send(self, x: torch.Tensor, codec, random: Stream, dtype: torch.dtype) -> torch.Tensor:
        if not self.setting.remove_mean:
            return send(x, codec, random, dtype)
        own, mean = split_mean(x)
        return add_mean(send(own, codec, random, torch.float32), mean, dtype)


@_fused
def split_mean(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, h] without its mean over the tokens, fp32, and that mean in bf16's precision."""
    mean = x.float().mean(dim=0).bfloat16().float()
    return x.float() - mean, mean


@_fused
def add_mean(x: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of split_mean."""
    return (x + mean).to(dtype)


def same_groups(a: object, b: object) -> bool:
    """Whether sums of one codec's groups can be encoded by the other in the Hadamard domain."""
    if not (isinstance(a, CodecConfig) and isinstance(b, CodecConfig)):
        return False
    return (a.group_size, a.hadamard) == (b.group_size, b.hadamard)


def encode_partials(partials: torch.Tensor, config: CodecConfig, key: int) -> torch.Tensor:
    """uint8[W, bytes]: every rank's partial sum, rank w's with its own stream of random numbers."""
    world_size, numel = partials.shape[0], partials[0].numel()
    if config.rounding == "nearest" and numel % config.group_size == 0:
        return taco_kernels.encode(partials, config, world_size)
    wires = partials.new_empty(world_size, config.wire_bytes(numel), dtype=torch.uint8)
    for w in range(world_size):
        taco_kernels.encode(partials[w], config, 1, Stream(key, w), out=wires[w : w + 1])
    return wires


def reduce_once(partials: torch.Tensor, codec, key: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum [W, T, h] in fp32 with one encoding of each; without a codec, of the values themselves."""
    if codec is None:
        return partials.sum(dim=0, dtype=dtype)  # bf16 sums run in fp32 and are rounded once
    if codec == TENSOR_FP8:
        return sum_tensor_fp8(partials, dtype)
    wires = encode_partials(partials, codec, key)
    return taco_kernels.decode_sum(wires, codec, partials.shape[1:], dtype, Stream(key, 0))


def send(x: torch.Tensor, codec, random: Stream, dtype: torch.dtype) -> torch.Tensor:
    """x after one encoding."""
    if codec is None:
        return x.to(dtype, copy=True)
    if codec == TENSOR_FP8:
        return sum_tensor_fp8(x[None], dtype)
    wire = taco_kernels.encode(x, codec, 1, random)
    return taco_kernels.decode(wire, codec, x.shape, dtype, random)


@_fused
def sum_tensor_fp8(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum over the first dimension in fp32, each summand in fp8-e4m3 with its largest magnitude at 448."""
    total = None
    for partial in partials.unbind():
        scale = partial.abs().amax().float().clamp(min=1e-30) / 448
        codes = (partial.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        total = codes.float() * scale if total is None else total + codes.float() * scale
    return total.to(dtype)
