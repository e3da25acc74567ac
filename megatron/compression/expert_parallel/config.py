"""Settings of expert parallelism: which codec, for which direction."""

from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

from megatron.compression.communication.collectives import why_not_rows
from megatron.compression.dimension import SentOnce
from megatron.compression.errors import CompressionConfigError
from megatron.compression.graphs import refuse_host_splits


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig(SentOnce):
    """Compression of the tokens that go to experts and back, and of their gradients."""

    flag: ClassVar[str] = "--ep-compression"
    traffic: ClassVar[str] = "ep"
    messages: ClassVar[str] = "a token"
    idle: ClassVar[str] = (
        "--ep-compression has no effect here: --expert-model-parallel-size is 1, so no rank has other experts"
    )

    compression: str = "none"
    """Codec of tokens on their way to experts (dispatch) and back (combine), or the recipe experts-8bit;
    none = uncompressed. Router probabilities and indices are always exact."""

    backward: str | None = None
    """Codec of the gradients on both ways; by default what ``compression`` names for its gradients."""

    @staticmethod
    def ranks(args: Namespace) -> int:
        """But for the all-to-all's they may hold parts of experts as well."""
        if args.num_experts is None:
            return 1
        if args.moe_token_dispatcher_type == "alltoall":
            return args.expert_model_parallel_size
        # Before Megatron has checked its arguments the first is None.
        sharing = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        return args.expert_model_parallel_size * sharing

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        if args.num_experts is None:
            raise CompressionConfigError(
                f"{self.flag} given, but the model has no experts; add --num-experts, or drop it"
            )
        dispatcher = args.moe_token_dispatcher_type
        if dispatcher == "flex":
            raise CompressionConfigError(
                f"--moe-token-dispatcher-type flex ({args.moe_flex_dispatcher_backend}) sends tokens inside "
                f"its kernels, past torch.distributed and {self.flag}; use alltoall or allgather, or drop it"
            )
        refuse_host_splits(args, self.flag)
        values = args.moe_latent_size or args.hidden_size
        for flag, codec in (
            (self.flag, self.forward_codec),
            (self.backward_flag, self.backward_codec),
        ):
            if codec is not None and (reason := why_not_rows(codec, values)):
                raise CompressionConfigError(f"{flag} {codec.name} {reason}")

    def describe(self) -> str:
        there, back = self.there_and_back
        return f"tokens travel to experts and back as {there}, their gradients as {back}"

    def lines(self, args: Namespace) -> list[str]:
        lines = super().lines(args)
        alltoall = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
        if lines and alltoall and (args.expert_tensor_parallel_size or 1) > 1:
            lines.append(
                "ranks that share an expert send each other tokens as --tp-compression says"
            )
        return lines
