"""What the hardware does: constants as measured, or a cluster as the user describes it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.compression.errors import InputError

Curve = tuple[tuple[float, float], ...]
"""(bytes that one rank sends, microseconds), bytes rising."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Link:
    """How long collectives take over one kind of link, by what a rank sends."""

    curves: Mapping[str, Curve]
    """By operation; ``all_to_all x2`` of a payload shared between two communicators, ``all_to_all copied`` of
    one that copy engines carry through host memory."""
    ranks: int
    """Of the group that the curves were measured on."""
    fused: bool = False
    """Peers read each other's memory, so that codecs can travel in one kernel (symmetric memory)."""
    copied: bool = False
    """Inside a node copy engines carry payloads through host memory (``--compression-transport host``)."""
    tcp: bool = False
    """Compressed payloads take two communicators by default."""
    overlap_loss: float = 0.1
    """How much of the shorter one comes back where a message and a GEMM run at once."""
    copied_loss: float = 0.0
    """The same where copy engines carry the message."""

    @classmethod
    def of(cls, bandwidth: float, latency: float, **flags: bool) -> "Link":
        """The alpha-beta line.

        Args:
            bandwidth: GB/s that each GPU sends while it receives as much.
            latency: microseconds of one message between two GPUs.
        """
        line = ((0.0, latency), (1e9, latency + 1e6 / bandwidth))
        curves = {
            name: ((0.0, 2 * latency), line[1]) if name == "all_reduce" else line for name in OPERATIONS
        }
        return cls(curves, ranks=2, **flags)

    def faster(self, factor: float) -> "Link":
        """The same latencies, ``factor`` times the bandwidth."""
        scaled = {
            name: tuple((sent, curve[0][1] + (us - curve[0][1]) / factor) for sent, us in curve)
            for name, curve in self.curves.items()
        }
        return replace(self, curves=scaled)

    def milliseconds(
        self, operation: str, sent: float, ranks: int, communicators: int = 1, copied: bool = False
    ) -> float:
        """Of one collective in a group of ``ranks`` in which each sends ``sent`` bytes.

        Between measured sizes linear in the bytes, beyond the largest at its last slope; the latency, that is
        the smallest message's time, grows with the rounds that a larger group takes.
        """
        if ranks < 2 or sent <= 0:
            return 0.0
        curve = self.curve(operation, communicators, copied)
        more = _rounds(operation, ranks) / _rounds(operation, self.ranks) - 1
        return (_interpolate(curve, sent) + curve[0][1] * max(more, 0.0)) / 1e3

    def curve(self, operation: str, communicators: int = 1, copied: bool = False) -> Curve:
        """The measured one; for what was not measured that of the nearest kind, by bytes sent."""
        alike = {"send": ["all_to_all"], "reduce_scatter": ["all_gather"]}.get(operation, [])
        way = "copied" if copied else f"x{communicators}"
        names = [name for one in (operation, *alike) for name in (f"{one} {way}", one)]
        names += ["all_reduce", *self.curves]
        return self.curves[next(name for name in names if name in self.curves)]

    @property
    def bandwidth(self) -> float:
        """Bytes a millisecond that a rank sends in large all-reduces."""
        (few, early), (many, late) = self.curve("all_reduce")[-2:]
        return (many - few) / max(late - early, 1e-9) * 1e3


def _rounds(operation: str, ranks: int) -> float:
    """Messages one after the other: trees, pairs for all-to-all."""
    if operation == "send":
        return 1.0
    return ranks - 1.0 if operation == "all_to_all" else math.ceil(math.log2(ranks))


def _interpolate(curve: Curve, x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1 or (x1, y1) == curve[-1]:
            return max(y0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return curve[0][1]


@dataclass(frozen=True)
class Constants:
    """Of one kind of GPU, from a calibration (``--measure``) or ``h200.json`` (docs/cost_model.md)."""

    device: str
    gemm_tflops: float
    """bf16 matrix products of a layer, achieved."""
    attention_tflops: float
    """Causal attention, forward and backward, the half that is computed counted."""
    memory_gbps: float
    """Bytes read and written by a large copy or optimizer step."""
    elementwise_gbps: float
    """The same of norms, activations, residuals, losses."""
    iteration_ms: float
    """Of an iteration in which nothing runs: the optimizer's synchronisations, the next batch."""
    codecs: Mapping[str, tuple[float, float, float]]
    """encode, decode, sum (of each sender's value): microseconds for 2^20 values, by name."""
    fused_us: float
    """Of a fused collective, its codec for 2^20 values."""
    launch_us: float
    """Of one codec kernel, however small."""
    host_layer_ms: float = 0.0
    """What the host needs to launch a layer of a micro-batch, forward and backward; 0: not measured."""
    host_exchange_ms: float = 0.0
    """The same for an exchange of payloads with the codec's kernels, beside what an uncompressed message
    takes; a collective has one or two."""
    host_fused_ms: float = 0.0
    """The same for a collective that is one kernel."""
    links: Mapping[str, Link] = field(default_factory=dict)

    @cached_property
    def slowest(self) -> tuple[float, float, float]:
        """For codecs that nobody has timed."""
        return tuple(max(costs) for costs in zip(*self.codecs.values(), strict=True))

    @classmethod
    def load(cls, path: Path | None = None) -> "Constants":
        """From a calibration's JSON, by default the H200's of docs/results.

        Raises: InputError: there is none, or it is something else.
        """
        path = path or Path(__file__).with_name("h200.json")
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            links = {name: _link(one) for name, one in data.pop("links").items()}
            codecs = {name: tuple(costs) for name, costs in data.pop("codecs").items()}
            for name in ("origin", "layer_ms"):  # the second of earlier versions
                data.pop(name, None)
            constants = cls(**data, codecs=codecs, links=links)
            constants._check()
        except OSError as error:
            raise InputError(f"--calibration {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"--calibration {path} is no calibration ({error}); make one with --measure"
            ) from None
        for name in ("gemm_tflops", "attention_tflops", "memory_gbps", "elementwise_gbps"):
            if not getattr(constants, name) > 0:
                raise InputError(f"--calibration {path}: {name} must be above 0")
        return constants

    def _check(self) -> None:
        """Raises: ValueError: something is no number, or missing."""
        for one in fields(self):
            if one.type is float:
                _numbers(one.name, getattr(self, one.name))
        if not self.codecs:
            raise ValueError("codecs are missing")
        for name, costs in self.codecs.items():
            if len(_numbers(name, *costs)) != 3:
                raise ValueError(f"{name}: encode, decode and sum are wanted")


def _numbers(name: str, *values: Any) -> tuple[float, ...]:
    """``values``. Raises: ValueError: one is no number of 0 or more."""
    for value in values:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}: {value!r} is no number >= 0")
    return values


def _link(data: dict[str, Any]) -> Link:
    curves = {name: rising(points) for name, points in data["curves"].items()}
    if not curves:
        raise ValueError("a link without curves")
    for name in ("ranks", "overlap_loss", "copied_loss"):
        _numbers(name, data.get(name, 0))
    if data["ranks"] < 2:
        raise ValueError(f"a link was measured on {data['ranks']} ranks; 2 or more are needed")
    return Link(curves, **{name: value for name, value in data.items() if name != "curves"})


def rising(points: list[list[float]]) -> Curve:
    """Measured points as a curve: a smaller message never takes longer than a larger one did.

    Raises: ValueError: there are none, or two of one size.
    """
    sizes = {_numbers("a curve", *point)[0] for point in points}
    if not sizes or len(sizes) < len(points) or sizes == {0}:
        raise ValueError("a curve needs points of different sizes")
    curve: list[tuple[float, float]] = []
    for sent, us in sorted(map(tuple, points), reverse=True):
        curve.append((sent, min(us, curve[-1][1] if curve else us)))
    if len(curve) == 1:
        curve.append((0.0, 0.0))
    return tuple(reversed(curve))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, the links between them, and what one GPU does."""

    gpus: int
    gpus_per_node: int
    intra: Link
    inter: Link
    constants: Constants
    memory_gb: float = 141.0
    """Of one GPU, 10^9 bytes."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise InputError(
                f"--gpus {self.gpus} and --gpus-per-node {self.gpus_per_node} must be numbers >= 1"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise InputError(f"--gpus {self.gpus} must be a multiple of --gpus-per-node {self.gpus_per_node}")

    def group(self, ranks: int, stride: int) -> "Group":
        """The ranks of a process group whose neighbours are ``stride`` GPUs apart."""
        local = min(ranks, max(1, self.gpus_per_node // stride))
        while ranks % local:
            local -= 1
        return Group(ranks, local, self)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: ``local`` of them on each node."""

    ranks: int
    local: int
    cluster: Cluster

    @property
    def nodes(self) -> int:
        return self.ranks // self.local

    @property
    def slowest(self) -> Link:
        """The link that bounds large messages."""
        return self.cluster.intra if self.nodes == 1 else self.cluster.inter
