"""What every dimension of parallelism has in common: its settings, and what it attaches to a
model."""

import math
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, Codec, parse_codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.communication.policy import Rule
from megatron.compression.communication.site import Run
from megatron.compression.errors import (
    SettingError,
    argument,
    refused_for,
    setting,
    spelled,
)
from megatron.compression.names import (
    PYTHON_NAMES,
    Parallelism,
)

FULL_ITERATION = f"{argument('cuda_graph_impl')} full_iteration"
"""A graph of a whole iteration, for messages."""


def documented(default: Any, text: str) -> Any:
    """A field of settings with a default and a description, which is that of ``--help``."""
    return field(default=default, metadata={"help": text})


def print_on_first_rank(line: str) -> None:
    """Print a line on rank 0 of the job, or wherever there is no job."""
    # Before the ranks know each other the launcher has told each of them its number.
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(f" {line}", flush=True)


class Dimension:
    """What one kind of parallelism attaches to a model.

    Args:
        config: the dimension's settings.
        run: policy, ledger and transports of the run.
        log: prints a line; it is called on every rank.
    """

    def __init__(
        self, config: Any, run: Run, log: Callable[[str], None] = print_on_first_rank
    ) -> None:
        self.config = config
        self.run = run
        self.log = log

    # In the order in which a run calls them:

    def adopt(self, config: Any) -> None:
        """Use these settings, whose rules the policy has already; before anything is attached."""
        self.config = config

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        """The first reason why ``attach`` would refuse these chunks with compression on, or
        None."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Hook into the chunks of this stage, before they are wrapped. Collective where compression
        is on.

        Raises: CompressionConfigError: compression is on and a layer communicates in a way not
        covered.
        """

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Hook into the chunks that DDP has wrapped, with all dimensions attached. Collective."""

    def add_state(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put what a resume needs, or where to load it to, into a checkpoint's state dict."""

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``add_state`` saved. Called with every state dict that is read: first with
        the plain values alone, then with everything."""


def codec_of(spec: str | None, path: str) -> Codec | None:
    """The codec that a setting's value names.

    Args:
        spec: the value; None and ``none`` are uncompressed.
        path: the setting's, such as ``tensor_parallel.compression``.

    Raises: SettingError: no such codec, or a compressor of gradients where activations are sent.
    """
    if spec in (None, "none"):
        return None
    # A codec of the same name would be taken: sdp4bit is one, and sums gradients as well.
    name = spec.partition(":")[0]
    if name in GRADIENT_COMPRESSORS.names() and CODECS.entry(name) is None:
        raise SettingError(
            path,
            spec,
            f": {name} compresses gradients of weights only",
            f"give it to {setting('data_parallel.compression')}",
        )
    # A codec refuses a value without knowing which setting has it: the block adds the name.
    with refused_for(path):
        return parse_codec(spec, path.partition(".")[0])


def refuse_arguments(args: Any, reasons: Mapping[str, str], fix: str) -> None:
    """Refuse arguments of Megatron's that are set.

    Args:
        args: Megatron's arguments, or a model's ``TransformerConfig``.
        reasons: argument -> what it does, as a sentence that goes on from its name.
        fix: what the user can do.

    Raises: SettingError: one of them is set.
    """
    # getattr: a version of Megatron or a front end that lacks the argument cannot have it set.
    for name, reason in reasons.items():
        if getattr(args, name, None):
            raise SettingError(f"args.{name}", None, reason, fix)


def refuse_fp16(args: Namespace, path: str, codecs: Iterable[Codec | None]) -> None:
    """Refuse a lossless codec where activations or weights are fp16.

    Args:
        args: Megatron's arguments.
        path: the setting that has the codecs.
        codecs: all that it names; None is uncompressed.

    Raises: SettingError: one of them is lossless.
    """
    # The payload keeps sign and mantissa as they are and codes bf16's and fp32's exponent.
    if args.fp16 and any(codec is not None and codec.lossless for codec in codecs):
        raise SettingError(
            path,
            "lossless",
            "shortens exponents of 8 bits, and fp16 has 5",
            "use --bf16 or another codec",
        )


@dataclass(frozen=True, kw_only=True)
class DimensionConfig(ABC):
    """Settings of one dimension: plain values, checked when they are made."""

    compression: str = "none"

    min_mb: float | None = documented(
        None,
        "Smallest message that is compressed, in MiB of the uncompressed tensor over all ranks. "
        "Below some size compression costs more time than it saves. 0 compresses everything "
        "(default: 8 for tensor parallelism, 0 elsewhere).",
    )

    default_min_mb: ClassVar[float] = 0.0
    parallelism: ClassVar[Parallelism]
    """How the dimension is called."""
    idle: ClassVar[str]
    """What the log says where there is one rank, and so nothing to compress."""

    def __post_init__(self) -> None:
        """Replace the name of a recipe by its codecs, and check the values.

        Raises: SettingError: an impossible value.
        """
        with spelled(PYTHON_NAMES):
            # A recipe that changes in a later version must not change a stored run, so its codecs
            # are kept.
            first, second = expand(self.parallelism.name, self.compression, self.second_spec)
            # A frozen dataclass: this is the only place that sets its fields.
            object.__setattr__(self, "compression", first)
            object.__setattr__(self, self.parallelism.second, second)
            if self.min_mb is not None and not (math.isfinite(self.min_mb) and self.min_mb >= 0):
                raise SettingError(
                    self.path("min_mb"), self.min_mb, "is no number of MiB >= 0", "give 0 for all"
                )
            self.validate()

    @classmethod
    def path(cls, name: str) -> str:
        """The path of one of these settings in ``CompressionConfig``, for messages."""
        return f"{cls.parallelism.name}.{name}"

    @abstractmethod
    def validate(self) -> None:
        """Check what this dimension adds. Raises: SettingError: an impossible value."""

    @property
    def min_bytes(self) -> int:
        """The smallest message that is compressed, in bytes of the uncompressed tensor."""
        # Rounded up, so that 0.1 MiB is no smaller than it says.
        mebibytes = self.default_min_mb if self.min_mb is None else self.min_mb
        return math.ceil(mebibytes * 2**20)

    @property
    @abstractmethod
    def second_spec(self) -> str | None:
        """The second value of the dimension's flag; None where it is left to the first."""

    @property
    def specs(self) -> tuple[str | None, str | None]:
        """Both values of the dimension's flag."""
        return self.compression, self.second_spec

    @property
    def forward_codec(self) -> Codec | None:
        """The codec of the activations; None: uncompressed."""
        return codec_of(self.compression, self.path("compression"))

    @property
    def enabled(self) -> bool:
        """True where any traffic of this dimension is to be compressed."""
        return any(spec not in (None, "none") for spec in self.specs)

    @staticmethod
    @abstractmethod
    def ranks(args: Namespace) -> int:
        """Return how many ranks exchange something in this dimension, by Megatron's arguments."""

    @abstractmethod
    def rules(
        self, start_iteration: int | None, train_iters: int | None = None
    ) -> Mapping[str, Rule]:
        """The policy's rules by traffic class.

        Args:
            start_iteration: the first iteration that compresses; None leaves it to a compressor.
            train_iters: how long the run is, where it is known.
        """

    @abstractmethod
    def check(self, args: Namespace) -> None:
        """Refuse what would leave traffic uncompressed without a word, or break training.

        Raises: SettingError: with the reason and the fix.
        """

    @abstractmethod
    def describe(self) -> str:
        """A line for the log: what is sent, in which codec."""

    def lines(self, args: Namespace) -> list[str]:
        """The lines for the log: what is sent in which codec, or why nothing is."""
        if not self.enabled:
            return []
        if self.ranks(args) == 1:
            return [self.idle]
        return [self.describe()]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig(DimensionConfig):
    """Settings of a dimension that sends activations forward and their gradients backward."""

    backward: str | None = None

    @property
    def second_spec(self) -> str | None:
        return self.backward


@dataclass(frozen=True, kw_only=True)
class SentOnce(ActivationConfig):
    """A dimension whose messages are encoded once in each direction: no sum is encoded again after
    them."""

    messages: ClassVar[str]
    """What is sent, for errors."""

    def validate(self) -> None:
        for name, spec in (("compression", self.compression), ("backward", self.backward)):
            # FIRST/SECOND is for a collective that encodes a sum again: here is no second exchange.
            if "/" in (spec or ""):
                raise SettingError(
                    self.path(name),
                    spec,
                    f": {self.messages} is sent once, so one codec encodes it",
                    f"give one; the gradients' codec is {setting(self.path('backward'))}",
                )
            codec_of(spec, self.path(name))

    @property
    def backward_codec(self) -> Codec | None:
        """The codec of the gradients; None: uncompressed."""
        if self.backward is not None:
            return codec_of(self.backward, self.path("backward"))
        # No gradients' codec is given: the activations' codec knows which one suits their
        # gradients (TAH-Quant's is plain 6 bits), and uncompressed activations imply uncompressed
        # gradients.
        if self.forward_codec is None:
            return None
        return self.forward_codec.backward

    @property
    def codec_names(self) -> tuple[str, str]:
        """The names of the forward and of the backward codec, for the log."""
        forward = self.forward_codec
        backward = self.backward_codec
        return (
            "uncompressed" if forward is None else forward.name,
            "uncompressed" if backward is None else backward.name,
        )

    def rules(
        self, start_iteration: int | None, train_iters: int | None = None
    ) -> dict[str, Rule[Codec | None]]:
        # None means "from the first iteration on" here; only compressors of gradients have a start
        # of their own.
        start = start_iteration or 0
        traffic = self.parallelism.traffic
        return {
            f"{traffic}forward": Rule(self.forward_codec, self.min_bytes, start_iteration=start),
            f"{traffic}backward": Rule(self.backward_codec, self.min_bytes, start_iteration=start),
        }
