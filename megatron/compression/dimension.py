"""What every dimension of parallelism has in common: its settings, and what it attaches to a model."""

import contextlib
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, Codec, parse_codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.communication.policy import Rule
from megatron.compression.communication.site import Run
from megatron.compression.errors import CompressionConfigError, SettingError, naming
from megatron.compression.names import FLAG_NAMES, FLAGS, PYTHON_NAMES, Names


def _arguments() -> dict[str, str]:
    """Flag, or flag and second value -> the argument that is the same in Python; longer ones first."""
    found = {"--taco": "TensorParallelConfig(compression='taco')"}
    for flag, paths in FLAGS.items():
        for path in paths:
            part, _, name = path.rpartition(".")
            second = f" {name.upper()}" if path != paths[0] else ""
            owner = part.title().replace("_", "") if part else "Compression"
            found[flag + second] = name if name == "min_mb" else f"{owner}Config.{name}"
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


ARGUMENTS = _arguments()


@contextlib.contextmanager
def renaming(names: Mapping[str, str], spelling: Names | None = None) -> Iterator[None]:
    """Put other names into what a ``CompressionConfigError`` says, the first that matches first; a
    ``SettingError`` has its own way, ``spelling``."""
    try:
        yield
    except CompressionConfigError as error:
        if spelling is not None:
            error.names = spelling
            if isinstance(error, SettingError):
                raise
        text = str(error)
        for old, new in names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, text)
        raise CompressionConfigError(text) from None


naming_arguments = partial(renaming, ARGUMENTS, PYTHON_NAMES)
"""Has what is refused name arguments, for who gives no flags."""
naming_flags = partial(
    renaming, {argument: flag for flag, argument in ARGUMENTS.items()}, FLAG_NAMES
)
"""Has what ``naming_arguments`` refuses name flags again, for who gives them."""


def print_on_first_rank(line: str) -> None:
    """On rank 0 of the job; anywhere without a job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f" {line}", flush=True)


class Dimension:
    """What one kind of parallelism attaches to a model; ``say`` prints a line, and is called on every
    rank."""

    def __init__(self, config: Any, run: Run, say: Any = print_on_first_rank) -> None:
        self.config, self.run, self.say = config, run, say

    def adopt(self, config: Any) -> None:
        """Use these settings, whose rules the policy has already; before anything is attached."""
        self.config = config

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        """The first reason why ``attach`` would refuse these chunks with compression on, or None."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Hook into the chunks of this stage, before they are wrapped. Collective where compression is on.

        Raises: CompressionConfigError: compression is on and a layer communicates in a way not covered.
        """

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Hook into the chunks that DDP has wrapped, with all dimensions attached. Collective."""

    def add_state(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put what a resume needs, or where to load it to, into a checkpoint's state dict."""

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Called with every state dict that has been read: the plain values alone, then everything."""


def codec_of(spec: str | None, flag: str) -> Codec | None:
    """The codec that a flag's value names; None: uncompressed."""
    if spec in (None, "none"):
        return None
    name = spec.partition(":")[0]
    if name in GRADIENT_COMPRESSORS.names() and CODECS.entry(name) is None:
        raise CompressionConfigError(
            f"{flag} {spec}: {name} compresses gradients of weights only: give it to --dp-compression"
        )
    with naming(flag):
        return parse_codec(spec, flag)


def refuse_flags(args: Namespace, reasons: Mapping[str, str], fix: str) -> None:
    """Refuse Megatron's flags that are set, by ``reasons``: argument -> what it does."""
    for name, reason in reasons.items():
        if getattr(args, name, None):
            raise CompressionConfigError(f"--{name.replace('_', '-')} {reason}; {fix}")


def refuse_fp16(args: Namespace, flag: str, codecs: Iterable[Codec | None]) -> None:
    """Raises: CompressionConfigError: a lossless codec where activations or weights are fp16."""
    if args.fp16 and any(codec is not None and codec.lossless for codec in codecs):
        raise CompressionConfigError(
            f"{flag} lossless shortens exponents of 8 bits, and fp16 has 5; use --bf16 or another codec"
        )


@dataclass(frozen=True, kw_only=True)
class DimensionConfig:
    """Settings of one dimension: plain values."""

    compression: str = "none"

    min_mb: float | None = None
    """Messages of fewer MiB (the uncompressed tensor over all ranks) are sent uncompressed: below some size
    compression costs more time than it saves. 0 compresses everything; by default 8 for tensor parallelism, 0
    elsewhere."""

    default_min_mb: ClassVar[float] = 0.0
    flag: ClassVar[str]
    """What ``compression`` is on the command line."""
    idle: ClassVar[str]
    """What is said where there is one rank, and so nothing to compress."""

    def __post_init__(self) -> None:
        """Replace a recipe's name by its codecs. Raises: CompressionConfigError: an impossible setting."""
        with naming_arguments():
            compression, other = expand(self.flag, self.compression, self.specs[1])
            object.__setattr__(self, "compression", compression)
            if hasattr(self, "backward"):
                object.__setattr__(self, "backward", other)
            if self.min_mb is not None and not (math.isfinite(self.min_mb) and self.min_mb >= 0):
                raise CompressionConfigError(
                    f"--compression-min-mb {self.min_mb} is no number of MiB >= 0"
                )
            self.validate()

    def validate(self) -> None:
        """Raises: CompressionConfigError: an impossible setting, by its flag."""

    @property
    def min_bytes(self) -> int:
        """The smallest message that is compressed."""
        return math.ceil((self.default_min_mb if self.min_mb is None else self.min_mb) * 2**20)

    @property
    def specs(self) -> tuple[str | None, str | None]:
        """Of one direction and the other; None: left to another setting."""
        return self.compression, getattr(self, "backward", None)

    @property
    def forward_codec(self) -> Codec | None:
        """Of the activations; None: uncompressed."""
        return codec_of(self.compression, self.flag)

    @property
    def enabled(self) -> bool:
        """Whether any traffic of this dimension is to be compressed."""
        return any(spec not in (None, "none") for spec in self.specs)

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Ranks that exchange something in this dimension."""
        raise NotImplementedError

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        """By traffic class, for the policy; a ``start_iteration`` of None is a compressor's own choice."""
        raise NotImplementedError

    def check(self, args: Namespace) -> None:
        """Refuse what would leave traffic uncompressed without a word, or break training.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """

    def describe(self) -> str:
        """For the log: what travels how."""
        raise NotImplementedError

    def lines(self, args: Namespace) -> list[str]:
        """For the log: what travels how, or why nothing does."""
        if not self.enabled:
            return []
        return [self.idle if self.ranks(args) == 1 else self.describe()]


@dataclass(frozen=True, kw_only=True)
class SentOnce(DimensionConfig):
    """A dimension whose messages are encoded once on each way: no sum is encoded again after them."""

    backward: str | None = None

    messages: ClassVar[str]
    """What is sent, for errors."""
    traffic: ClassVar[str]
    """Of the policy's two traffic classes, before ``.forward`` and ``.backward``."""

    def validate(self) -> None:
        for flag, text in ((self.flag, self.compression), (self.backward_flag, self.backward)):
            if "/" in (text or ""):
                raise CompressionConfigError(
                    f"{flag} {text}: {self.messages} is sent once, so one codec encodes it; the gradients' "
                    f"codec is {self.backward_flag}"
                )
            codec_of(text, flag)

    @property
    def backward_flag(self) -> str:
        """What ``backward`` is on the command line."""
        return f"{self.flag} BACKWARD"

    @property
    def backward_codec(self) -> Codec | None:
        """Of the gradients; None: uncompressed."""
        if self.backward is None:
            return self.forward_codec and self.forward_codec.backward
        return codec_of(self.backward, self.backward_flag)

    @property
    def there_and_back(self) -> tuple[str, str]:
        """Names of both codecs, for the log."""
        codecs = self.forward_codec, self.backward_codec
        there, back = (codec.name if codec else "uncompressed" for codec in codecs)
        return there, back

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        return {
            f"{self.traffic}.{way}": Rule(
                codec, self.min_bytes, start_iteration=start_iteration or 0
            )
            for way, codec in (("forward", self.forward_codec), ("backward", self.backward_codec))
        }
