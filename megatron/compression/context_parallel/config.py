"""Settings of context parallelism: which codec, for keys and values and for their gradients.

ContextParallelConfig(compression="int8")        # on the command line: --cp-compression int8
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

from megatron.compression.dimension import SentOnce, documented, refuse_fp16
from megatron.compression.errors import SettingError, argument, setting
from megatron.compression.names import PARALLELISMS, Parallelism


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig(SentOnce):
    """Compression of the keys, values and their gradients that attention exchanges over a
    sequence."""

    parallelism: ClassVar[Parallelism] = PARALLELISMS["context_parallel"]
    messages: ClassVar[str] = "what attention gathers"
    idle: ClassVar[str] = (
        f"{setting('context_parallel.compression')} has no effect here: "
        f"{argument('context_parallel_size')} is 1, so no keys and values are sent"
    )

    compression: str = documented(
        "none",
        "Codec of the keys and values that the ranks of a sequence gather; none = uncompressed.",
    )

    backward: str | None = documented(
        None, "codec of their gradients (default: what SPEC itself prescribes for gradients)."
    )

    @staticmethod
    def ranks(args: Namespace) -> int:
        return args.context_parallel_size

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        refuse_fp16(args, self.path("compression"), (self.forward_codec, self.backward_codec))
        if args.context_parallel_size == 1:
            return
        # Torch-native layers gather keys and values by a collective of ours, which a codec can
        # encode.
        if args.transformer_impl != "local":
            raise SettingError(
                self.path("compression"),
                None,
                f"needs {argument('transformer_impl')} local: Transformer Engine's attention "
                "passes keys and values on in a ring of its own, out of a codec's reach",
                f"add that flag, or drop {setting(self.path('compression'))}",
            )

    def describe(self) -> str:
        forward, backward = self.codec_names
        return f"context parallelism: keys and values as {forward}, their gradients as {backward}"
