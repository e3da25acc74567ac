"""Settings of pipeline parallelism: which codec, for which messages.

PipelineParallelConfig(compression="pipeline-6bit")     # on the command line: --pp-compression
pipeline-6bit
"""

import functools
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.compression.codecs import Codec
from megatron.compression.dimension import SentOnce, documented, refuse_fp16
from megatron.compression.errors import SettingError, argument, setting
from megatron.compression.graphs import whole_iterations
from megatron.compression.names import PARALLELISMS, Parallelism


@dataclass(frozen=True, kw_only=True)
class PipelineParallelConfig(SentOnce):
    """Compression of the activations and their gradients that go from stage to stage."""

    parallelism: ClassVar[Parallelism] = PARALLELISMS["pipeline_parallel"]
    messages: ClassVar[str] = "a message between stages"
    idle: ClassVar[str] = (
        f"{setting('pipeline_parallel.compression')} has no effect here: "
        f"{argument('pipeline_model_parallel_size')} is 1, so there is one stage"
    )

    compression: str = documented(
        "none",
        "Codec of what stages send each other, or the recipe pipeline-6bit; none = uncompressed.",
    )

    backward: str | None = documented(
        None,
        "codec of the gradients that go back (default: what SPEC itself prescribes for gradients).",
    )

    @staticmethod
    def ranks(args: Namespace) -> int:
        return args.pipeline_model_parallel_size

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        path = self.path("compression")
        refuse_fp16(args, path, (self.forward_codec, self.backward_codec))
        if args.pipeline_model_parallel_size == 1:
            return
        if whole_iterations(args) and not args.overlap_p2p_comm:
            raise SettingError(
                "args.cuda_graph_impl",
                "full_iteration",
                ": without virtual stages the host waits for the device after each message, which "
                "no graph can capture",
                f"add {argument('num_virtual_stages_per_pipeline_rank')} 2 without "
                f"--no-overlap-p2p-communication, or drop {setting(path)}",
            )
        # A stage's message is its part of the sequence: [tokens, samples, channels].
        sequence_ranks = args.context_parallel_size
        if args.sequence_parallel:
            sequence_ranks *= args.tensor_model_parallel_size
        shape = args.seq_length // sequence_ranks, args.micro_batch_size, args.hidden_size
        if args.bf16:
            dtype = torch.bfloat16
        elif args.fp16:
            dtype = torch.float16
        else:
            dtype = torch.float32
        # A codec that does not fit the messages is refused here, on all ranks, rather than in the
        # first exchange.
        for codec in (self.forward_codec, self.backward_codec):
            if codec is not None:
                message_bytes(codec, shape, dtype)

    def describe(self) -> str:
        forward, backward = self.codec_names
        return f"pipeline parallelism: activations as {forward}, gradients as {backward}"


@functools.lru_cache(maxsize=256)
def message_bytes(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many bytes the payload of a message between stages has; the same at both ends.

    Args:
        codec: what encodes it.
        shape: ``[tokens, samples, channels]``.
        dtype: the message's.

    Raises: SettingError: the codec cannot encode that shape.
    """
    # Both ends compute this from the shape: a payload is received into a buffer of its size.
    try:
        return codec.message_bytes(shape, dtype)
    except ValueError as error:
        raise SettingError(
            "pipeline_parallel.compression",
            codec.name,
            f"does not fit messages of {list(shape)} (tokens, samples, channels): {error}",
            "change the codec's settings or choose another codec",
        ) from None
