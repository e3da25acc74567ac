"""Settings of expert parallelism: which codec, for which direction.

ExpertParallelConfig(compression="int8")         # on the command line: --ep-compression int8
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

from megatron.compression.communication.collectives import why_not_rows
from megatron.compression.dimension import SentOnce, documented
from megatron.compression.errors import SettingError, argument, setting
from megatron.compression.expert_parallel.flex import FLEX, refuse_settings_of_flex
from megatron.compression.graphs import refuse_host_counts, refuse_host_splits
from megatron.compression.names import PARALLELISMS, Parallelism


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig(SentOnce):
    """Compression of the tokens that go to experts and back, and of their gradients."""

    parallelism: ClassVar[Parallelism] = PARALLELISMS["expert_parallel"]
    messages: ClassVar[str] = "a token"
    idle: ClassVar[str] = (
        f"{setting('expert_parallel.compression')} has no effect here: "
        f"{argument('expert_model_parallel_size')} is 1, so no rank has other experts"
    )

    compression: str = documented(
        "none",
        "Codec of the tokens that go to experts (dispatch) and come back (combine), or the recipe "
        "experts-8bit; none = uncompressed. Router probabilities and indices are always exact.",
    )

    backward: str | None = documented(
        None,
        "codec of the gradients in both directions (default: what SPEC itself prescribes for "
        "gradients).",
    )

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Return how many ranks exchange tokens: those with other experts, and with the all-gather
        dispatcher those with other parts of the same experts as well."""
        if args.num_experts is None:
            return 1
        # What flex sends between ranks that share an expert is tensor parallelism's once it is
        # switched to alltoall.
        if args.moe_token_dispatcher_type in ("alltoall", FLEX):
            return args.expert_model_parallel_size
        # Before Megatron has checked its arguments the first is None.
        sharing = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        return args.expert_model_parallel_size * sharing

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        flag = setting(self.path("compression"))
        if args.num_experts is None:
            raise SettingError(
                self.path("compression"),
                None,
                "given, but the model has no experts",
                f"add {argument('num_experts')}, or drop it",
            )
        if args.expert_model_parallel_size > 1:
            refuse_settings_of_flex(args, self.path("compression"))
        # From megatron-core 0.20 on: a dispatcher that shortens messages itself.
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
            dtype = getattr(args, name, "bf16")
            if dtype != "bf16":
                raise SettingError(
                    f"args.{name}",
                    dtype,
                    f"shortens what {flag} would encode",
                    "use bf16, or drop one of them",
                )
        # The all-to-all has as many tokens as the router says, which no graph can hold.
        refuse_host_splits(args, flag)
        if args.expert_model_parallel_size > 1:
            refuse_host_counts(args, flag)
        # A token is a row: a codec has to fit the row's number of values.
        values = args.moe_latent_size or args.hidden_size
        for name, codec in (("compression", self.forward_codec), ("backward", self.backward_codec)):
            if codec is not None and (reason := why_not_rows(codec, values)):
                raise SettingError(self.path(name), codec.name, reason)

    def describe(self) -> str:
        forward, backward = self.codec_names
        return (
            f"expert parallelism: tokens to experts and back as {forward}, their gradients as "
            f"{backward}"
        )

    def lines(self, args: Namespace) -> list[str]:
        """The lines for the log, one more where tensor parallelism's codec sends tokens, too."""
        lines = super().lines(args)
        alltoall = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
        if lines and alltoall and (args.expert_tensor_parallel_size or 1) > 1:
            lines.append(
                "ranks that share an expert send each other tokens with the codec of "
                f"{setting('tensor_parallel.compression')}"
            )
        return lines
