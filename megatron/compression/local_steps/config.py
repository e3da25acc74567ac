"""Settings of local steps between data centres, and what they need of Megatron's arguments.

LocalStepsConfig(data_centres=2, data_centre=0, address="10.0.0.1:29400")
    # --data-centres 2 --data-centre-rank 0 --outer-address 10.0.0.1:29400
"""

import math
from argparse import Namespace
from dataclasses import dataclass, fields

from megatron.compression.codecs import Codec
from megatron.compression.dimension import codec_of, documented, refuse_arguments
from megatron.compression.errors import SettingError, argument, setting, spelled
from megatron.compression.local_steps.schedule import Schedule
from megatron.compression.names import PYTHON_NAMES

SECTION = "local_steps"
_FLAG = setting(f"{SECTION}.data_centres")

# Megatron's argument -> why local steps cannot have it
_REFUSED = {
    "use_torch_fsdp2": "keeps no fp32 masters that the anchor could be compared with",
    "use_megatron_fsdp": "keeps its masters in buffers of its own",
    "use_layer_wise_distributed_optimizer": "keeps whole masters instead of shards",
    "use_precision_aware_optimizer": "keeps the masters inside its own kernel",
    "optimizer_cpu_offload": "keeps the masters in another optimizer's memory",
    "overlap_param_gather_with_optimizer_step": "gathers weights before a round has changed them",
    "optimizer_cuda_graph": "replays the optimizer's step from masters that were captured",
    "fp8_param_gather": "keeps weights in fp8, which the anchor cannot be put into",
    "fp4_param_gather": "keeps weights in fp4, which the anchor cannot be put into",
    "async_save": "writes a checkpoint while training goes on, and the anchor is in the weights "
    "only until it is saved",
    "moe_router_enable_expert_bias": "adapts biases to a data centre's own tokens, which no round "
    "would bring together",
    "iterations_to_skip": "leaves out iterations, and with them rounds",
    "hybrid_context_parallel": "cuts batches in its own way, which has no share a data centre",
    "phase_transition_iterations": "counts samples in its own way, which has no share a data "
    "centre",
    "perform_rl_step": "makes its own samples",
    "rampup_batch_size": "changes the samples of an iteration, which decide a data centre's share",
}


@dataclass(frozen=True, kw_only=True)
class LocalStepsConfig:
    """Local steps between data centres, with an outer optimizer (DiLoCo, arXiv 2311.08105)."""

    data_centres: int = documented(
        1,
        "Number of data centres. With 2 or more, each is a job of its own that takes local steps; "
        "they exchange differences of weights, not gradients. --global-batch-size is each data "
        "centre's. Needs --data-centre-rank and --outer-address.",
    )

    data_centre: int | None = documented(
        None, "Number of this data centre, from 0; the same on all ranks of its job."
    )

    address: str | None = documented(
        None,
        "HOST:PORT by which all data centres reach rank 0 of data centre 0, where they meet.",
    )

    steps: int = documented(
        100,
        "Local steps H, in iterations, between two exchanges of the same weights (default: 100; "
        "DiLoCo, arXiv 2311.08105, takes 500, Streaming DiLoCo, arXiv 2501.18512, 30 and 100).",
    )

    compression: str = documented(
        "int4",
        "Codec of the differences, with a memory of what encoding loses; none = fp32 (default: "
        "int4, four bits as Streaming DiLoCo, arXiv 2501.18512).",
    )

    learning_rate: float = documented(
        0.7,
        "Learning rate of the outer optimizer (default: 0.7, DiLoCo, arXiv 2311.08105). 1 with "
        "--outer-momentum 0 averages the weights.",
    )

    momentum: float = documented(
        0.9,
        "Nesterov momentum of the outer optimizer (default: 0.9, DiLoCo, arXiv 2311.08105).",
    )

    fragments: int = documented(
        1,
        "Parts of the weights that are exchanged one after the other within H (default: 1; "
        "Streaming DiLoCo, arXiv 2501.18512, sends fragments of three layers).",
    )

    delay: int = documented(
        0,
        "Iterations that go on while an exchange is under way, before it is applied; 0 waits for "
        "it (default: 0; Streaming DiLoCo, arXiv 2501.18512, figure 10, finds values below 5 safe).",
    )

    mixing: float | None = documented(
        None,
        "Share of the local weights where an exchange is applied; the rest is the anchor (default: "
        "0.5 with --outer-delay, as Streaming DiLoCo, arXiv 2501.18512; else 0).",
    )

    timeout_minutes: float = documented(
        5.0,
        "Minutes to wait for another data centre before the run ends with an error; below "
        "--distributed-timeout-minutes.",
    )

    def __post_init__(self) -> None:
        """Check the values. Raises: SettingError: one is impossible, or would do nothing."""
        with spelled(PYTHON_NAMES):
            self._check_values()
            self._refuse_idle()

    def _require(self, name: str, valid: bool, reason: str, fix: str) -> None:
        if not valid:
            raise SettingError(f"{SECTION}.{name}", getattr(self, name), reason, fix)

    def _check_values(self) -> None:
        require = self._require
        require("data_centres", self.data_centres >= 1, "must be at least 1", "give 2 or more")
        require("steps", self.steps >= 1, "must be at least 1", "give 100")
        rate_is_valid = 0 < self.learning_rate < math.inf
        require("learning_rate", rate_is_valid, "must be above 0", "give 0.7")
        require("momentum", 0 <= self.momentum < 1, "must be in [0, 1)", "give 0.9")
        fragments_fit = 1 <= self.fragments <= self.steps
        require(
            "fragments", fragments_fit, f"must be in 1 to {self.steps}, the local steps", "lower it"
        )
        delay_fits = 0 <= self.delay < self.steps
        require("delay", delay_fits, f"must be below {self.steps}, the local steps", "lower it")
        mixing_is_valid = self.mixing is None or 0 <= self.mixing < 1
        require("mixing", mixing_is_valid, "must be in [0, 1)", "give 0.5")
        require("timeout_minutes", self.timeout_minutes > 0, "must be above 0", "give 5")
        codec = self.codec
        if codec is not None and (codec.lossless or codec.sees_shape):
            reason = "needs tokens and channels, which a vector of weights has not"
            if codec.lossless:
                reason = "keeps bits of 16-bit values, and differences are fp32"
            raise SettingError(f"{SECTION}.compression", codec.name, reason, "use int4 or none")

    def _refuse_idle(self) -> None:
        """Refuse a setting that nothing uses, and data centres that cannot find each other."""
        if not self.enabled:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise SettingError(
                        f"{SECTION}.{field.name}",
                        getattr(self, field.name),
                        "given, but nothing uses it",
                        f"add {_FLAG} 2 or more, or drop it",
                    )
            return
        number_is_valid = self.data_centre is not None and (
            0 <= self.data_centre < self.data_centres
        )
        last = self.data_centres - 1
        self._require(
            "data_centre", number_is_valid, f"must be a number from 0 to {last}", "add it"
        )
        host, _, port = (self.address or "").rpartition(":")
        self._require("address", bool(host) and port.isdecimal(), "must be HOST:PORT", "add it")

    @property
    def enabled(self) -> bool:
        """True where there is another data centre."""
        return self.data_centres > 1

    @property
    def codec(self) -> Codec | None:
        """The codec of the differences; None: fp32."""
        return codec_of(self.compression, f"{SECTION}.compression")

    @property
    def schedule(self) -> Schedule:
        """When fragments are sent and applied."""
        return Schedule(self.steps, self.fragments, self.delay)

    @property
    def local_share(self) -> float:
        """The share of the local weights where an exchange is applied."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.delay else 0.0

    def common(self) -> dict[str, object]:
        """Return the settings that all data centres must share, by flag."""
        return {
            "--data-centres": self.data_centres,
            "--local-steps": self.steps,
            "--outer-compression": "none" if self.codec is None else self.codec.name,
            "--outer-lr": self.learning_rate,
            "--outer-momentum": self.momentum,
            "--outer-fragments": self.fragments,
            "--outer-delay": self.delay,
            "--outer-mixing": self.local_share,
        }

    def check(self, args: Namespace) -> None:
        """Refuse Megatron's arguments that local steps cannot have.

        Raises: SettingError: with the reason and the fix.
        """
        if not self.enabled:
            return
        refuse_arguments(args, _REFUSED, f"drop it or {_FLAG}")
        self._check_optimizer(args)
        self._check_model_and_data(args)
        limit = getattr(args, "distributed_timeout_minutes", math.inf)
        if self.timeout_minutes >= limit:
            raise SettingError(
                f"{SECTION}.timeout_minutes",
                f"{self.timeout_minutes:g}",
                f"is not below {argument('distributed_timeout_minutes')} {limit:g}: ranks that "
                "wait for a slower one of their own data centre would be ended first",
                "lower it, or raise the other",
            )

    def _check_optimizer(self, args: Namespace) -> None:
        """Refuse optimizers whose shards would be sent several times."""
        if not args.use_distributed_optimizer:
            raise SettingError(
                f"{SECTION}.data_centres",
                self.data_centres,
                "needs shards: without them every data-parallel rank would send all weights",
                f"add {argument('use_distributed_optimizer')}",
            )
        instances = args.num_distributed_optimizer_instances
        if instances > 1:
            raise SettingError(
                "args.num_distributed_optimizer_instances",
                instances,
                "would send each difference once an instance",
                f"drop it: with {_FLAG} each data centre is a job of its own",
            )

    def _check_model_and_data(self, args: Namespace) -> None:
        """Refuse samples that data centres cannot share, and state that has no place in a
        checkpoint."""
        tied = not getattr(args, "untie_embeddings_and_output_weights", True)
        if tied and getattr(args, "mtp_num_layers", None) and args.pipeline_model_parallel_size > 1:
            raise SettingError(
                "args.mtp_num_layers",
                args.mtp_num_layers,
                "with tied embeddings over pipeline stages has no checkpoint in megatron-core, "
                "which says what tensor parallelism cuts",
                f"add {argument('untie_embeddings_and_output_weights')}",
            )
        if getattr(args, "dataloader_type", None) not in (None, "single", "external"):
            raise SettingError(
                "args.dataloader_type",
                args.dataloader_type,
                "draws samples at random on each side, the same ones",
                "use single",
            )
        if args.save and args.ckpt_format != "torch_dist":
            raise SettingError(
                "args.ckpt_format",
                args.ckpt_format,
                "has no place for the anchor",
                f"use {argument('ckpt_format')} torch_dist, or drop {argument('save')}",
            )

    def lines(self, args: Namespace) -> list[str]:
        """The lines for the log; none with one data centre."""
        if not self.enabled:
            return []
        codec = "fp32" if self.codec is None else f"{self.codec.name} with a residual memory"
        momentum = f"Nesterov momentum {self.momentum:g}" if self.momentum else "no momentum"
        lines = [
            f"local steps: data centre {self.data_centre} of {self.data_centres}: {self.steps} "
            f"iterations a round, differences in {codec}; outer learning rate "
            f"{self.learning_rate:g}, {momentum}"
        ]
        if self.fragments > 1 or self.delay:
            parts = "all weights" if self.fragments == 1 else f"{self.fragments} fragments in turn"
            lines.append(
                f"local steps: {parts} sent in each round, and applied {self.delay} iterations "
                f"later, with {self.local_share:g} of the local weights"
            )
        batch = getattr(args, "global_batch_size", None)
        if batch is not None:
            lines.append(
                f"local steps: {batch} samples an iteration here, {batch * self.data_centres} in "
                "all data centres"
            )
        rest = (args.train_iters or 0) % self.steps
        if rest:
            lines.append(
                f"local steps: {args.train_iters} iterations are no multiple of {self.steps}: the "
                f"last {rest} end in no round"
            )
        return lines
