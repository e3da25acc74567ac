"""What the settings of every dimension of parallelism have in common."""

import contextlib
import functools
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, Codec, parse_codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.communication.policy import Rule
from megatron.compression.errors import CompressionConfigError, naming


def _arguments() -> dict[str, str]:
    kinds = {"tp": "Tensor", "pp": "Pipeline", "cp": "Context", "ep": "Expert", "dp": "Data"}
    found = {"--taco": "TensorParallelConfig(compression='taco')"}
    for short, kind in kinds.items():
        second = "WEIGHTS" if short == "dp" else "BACKWARD"
        found[f"--{short}-compression"] = f"{kind}ParallelConfig.compression"
        found[f"--{short}-compression {second}"] = f"{kind}ParallelConfig.{second.lower()}"
    for name in ("layers", "overlap"):
        found[f"--tp-compression-{name}"] = f"TensorParallelConfig.{name}"
    for name in ("loss_budget", "start_iteration", "transport", "error_bound", "report"):
        found[f"--compression-{name.replace('_', '-')}"] = f"CompressionConfig.{name}"
    found["--compression-min-mb"] = "min_mb"
    found["--validate-uncompressed"] = "CompressionConfig.validate_uncompressed"
    found["--caat-net-sync-fraction"] = "CaatNetConfig.sync_fraction"
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


ARGUMENTS = _arguments()
"""Flag, and a flag with its second value -> the argument that is the same in Python; longer ones first."""


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """Have what is refused name arguments, for who gives no flags."""
    try:
        yield
    except CompressionConfigError as error:
        text = str(error)
        for flag, argument in ARGUMENTS.items():
            text = re.sub(rf"{flag}(?![\w-])", argument, text)
        raise CompressionConfigError(text) from None


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Have what ``naming_arguments`` refuses name flags again, for who gives them."""
    try:
        yield
    except CompressionConfigError as error:
        text = str(error)
        for flag, argument in ARGUMENTS.items():
            text = re.sub(rf"(?<![\w.]){re.escape(argument)}(?!\w)", flag, text)
        raise CompressionConfigError(text) from None


def named_by_arguments[Settings: type](settings: Settings) -> Settings:
    """Have a class of settings name its arguments where it refuses one."""
    made = settings.__init__

    def __init__(self: Any, **given: Any) -> None:
        with naming_arguments():
            made(self, **given)

    settings.__init__ = functools.wraps(made)(__init__)  # type: ignore[misc]
    return settings


def codec_of(spec: str | None, flag: str) -> Codec | None:
    """The codec that a flag's value names; None: uncompressed.

    Raises: CompressionConfigError: there is none; the message names the flag.
    """
    if spec in (None, "none"):
        return None
    name = spec.partition(":")[0]
    if name in GRADIENT_COMPRESSORS.names() and CODECS.entry(name) is None:
        raise CompressionConfigError(
            f"{flag} {spec}: {name} compresses gradients of weights only; choose a codec"
        )
    with naming(flag):
        return parse_codec(spec)


def refuse_flags(args: Namespace, reasons: Mapping[str, str], fix: str) -> None:
    """Refuse each of Megatron's flags that is set, by ``reasons``: argument -> what it does."""
    for name, reason in reasons.items():
        if getattr(args, name, None):
            raise CompressionConfigError(f"--{name.replace('_', '-')} {reason}; {fix}")


def refuse_cuda_graphs(args: Namespace, flag: str) -> None:
    """Refuse graphs that would replay what is sent.

    Raises: CompressionConfigError: with the flag, the reason and the fix.
    """
    if args.cuda_graph_impl != "none":
        raise CompressionConfigError(
            f"{flag} chooses and counts on the host, which a replayed graph leaves out; drop "
            f"--cuda-graph-impl or {flag}"
        )


def refuse_fp16(args: Namespace, flag: str, codecs: Iterable[Codec | None]) -> None:
    """Refuse a lossless codec where activations or weights are fp16.

    Raises: CompressionConfigError: with the flag, the reason and the fix.
    """
    if args.fp16 and any(codec is not None and codec.lossless for codec in codecs):
        raise CompressionConfigError(
            f"{flag} lossless shortens exponents of 8 bits, and fp16 has 5; use --bf16 or another codec"
        )


@dataclass(frozen=True, kw_only=True)
class Dimension:
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
        """Replace a recipe's name by its codecs. Raises: CompressionConfigError: another dimension's."""
        compression, other = expand(self.flag, self.compression, self.specs[1])
        object.__setattr__(self, "compression", compression)
        if hasattr(self, "backward"):
            object.__setattr__(self, "backward", other)
        if self.min_mb is not None and not (math.isfinite(self.min_mb) and self.min_mb >= 0):
            raise CompressionConfigError(f"--compression-min-mb {self.min_mb} must be a number of MiB >= 0")

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

    def idle_reason(self, ranks: int) -> str | None:
        """Why an enabled compression has nothing to do on so many ranks, or None."""
        return self.idle if self.enabled and ranks == 1 else None


@dataclass(frozen=True, kw_only=True)
class SentOnce(Dimension):
    """A dimension whose messages are encoded once on each way: no sum is encoded again after them."""

    backward: str | None = None

    messages: ClassVar[str]
    """What is sent, for errors."""
    traffic: ClassVar[str]
    """Of the policy's two traffic classes, before ``.forward`` and ``.backward``."""

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def rules(self, start_iteration: int) -> dict[str, Rule]:
        """For the policy."""
        return {
            f"{self.traffic}.{way}": Rule(codec, self.min_bytes, start_iteration=start_iteration)
            for way, codec in (("forward", self.forward_codec), ("backward", self.backward_codec))
        }
