"""Settings of pipeline parallelism: which codec, for which messages."""

import functools
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.compression.codecs import Codec
from megatron.compression.dimension import SentOnce, refuse_fp16
from megatron.compression.errors import CompressionConfigError
from megatron.compression.graphs import FULL, whole_iterations


@dataclass(frozen=True, kw_only=True)
class PipelineParallelConfig(SentOnce):
    """Compression of the activations and their gradients that go from stage to stage."""

    flag: ClassVar[str] = "--pp-compression"
    traffic: ClassVar[str] = "pp"
    messages: ClassVar[str] = "a message between stages"
    idle: ClassVar[str] = (
        "--pp-compression has no effect here: --pipeline-model-parallel-size is 1, so there is one stage"
    )

    compression: str = "none"
    """Codec of what stages send each other, or the recipe pipeline-6bit; none = uncompressed."""

    backward: str | None = None
    """Codec of the gradients that go back; by default what ``compression`` names for its gradients."""

    @staticmethod
    def ranks(args: Namespace) -> int:
        return args.pipeline_model_parallel_size

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        refuse_fp16(args, self.flag, (self.forward_codec, self.backward_codec))
        if args.pipeline_model_parallel_size == 1:
            return
        if whole_iterations(args) and not args.overlap_p2p_comm:
            raise CompressionConfigError(
                f"{FULL}: without virtual stages the host waits for the device after each message, which no "
                "graph can capture; add --num-virtual-stages-per-pipeline-rank 2 without "
                f"--no-overlap-p2p-communication, or drop {self.flag}"
            )
        ranks = args.context_parallel_size
        if args.sequence_parallel:
            ranks *= args.tensor_model_parallel_size
        shape = args.seq_length // ranks, args.micro_batch_size, args.hidden_size
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        for codec in (self.forward_codec, self.backward_codec):
            if codec is not None:
                message_bytes(codec, shape, dtype)

    def describe(self) -> str:
        there, back = self.there_and_back
        return f"pipeline stages send {there}, back {back}"


@functools.lru_cache(maxsize=256)
def message_bytes(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of the payload of a message ``[tokens, samples, channels]``, the same at both ends."""
    try:
        return codec.message_bytes(shape, dtype)
    except ValueError as error:
        raise CompressionConfigError(
            f"--pp-compression {codec.name} does not fit messages of {list(shape)} (tokens, samples, "
            f"channels): {error}; change the codec's settings or choose another codec"
        ) from None
