"""Settings of context parallelism: which codec, for keys and values and for their gradients."""

from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

from megatron.compression.dimension import SentOnce, refuse_fp16
from megatron.compression.errors import CompressionConfigError


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig(SentOnce):
    """Compression of the keys, values and their gradients that attention exchanges over a sequence."""

    flag: ClassVar[str] = "--cp-compression"
    traffic: ClassVar[str] = "cp"
    messages: ClassVar[str] = "what attention gathers"
    idle: ClassVar[str] = (
        "--cp-compression has no effect here: --context-parallel-size is 1, so no keys and values are sent"
    )

    compression: str = "none"
    """Codec of the keys and values that ranks with parts of a sequence gather; none = uncompressed."""

    backward: str | None = None
    """Codec of their gradients; by default what ``compression`` names for its gradients."""

    @staticmethod
    def ranks(args: Namespace) -> int:
        return args.context_parallel_size

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        refuse_fp16(args, self.flag, (self.forward_codec, self.backward_codec))
        if args.context_parallel_size == 1:
            return
        if args.transformer_impl != "local":
            raise CompressionConfigError(
                f"{self.flag} needs --transformer-impl local: Transformer Engine's attention passes keys and "
                "values on in a ring of its own, out of a codec's reach; add that flag, or drop "
                f"{self.flag}"
            )

    def describe(self) -> str:
        there, back = self.there_and_back
        return f"context parallelism gathers keys and values as {there}, sums their gradients as {back}"
