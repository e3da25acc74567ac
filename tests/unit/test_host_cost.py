"""The host's cost of an exchange: Python frames from a site to the wait, torch operations."""

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.communication import CommSite, Ledger, Policy, Rule, Run
from megatron.compression.tensor_parallel.functions import (
    DeferredWeightGradient,
    column_parallel_linear,
    row_parallel_linear,
)
from megatron.compression.tensor_parallel.halves import Block, interleave
from tests.unit.test_overlap import leaves, mlp_loss

OURS = str(Path(__file__).parents[2] / "megatron" / "compression" / "communication")


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class OneOperation(Codec):
    """Every call is one operation."""

    def payload_bytes(self, shape) -> int:
        return shape[0]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.uint8)

    def decode(self, payloads, shape, dtype) -> torch.Tensor:
        return payloads.to(dtype)

    def decode_sum(self, payloads, shape, dtype, scale=1.0, out=None) -> torch.Tensor:
        return payloads.sum(0, dtype=dtype)

    def decode_sum_encode(self, payloads, shape, into) -> torch.Tensor:
        return payloads[0]


class Done:
    """Of an exchange."""

    def wait(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Ranks:
    """A process group whose exchanges take what is sent for what comes."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def alltoall_base(self, received, sent, *_) -> Done:
        received.copy_(sent)
        return Done()

    def _allgather_base(self, gathered, shard, _) -> Done:
        gathered.view(self.ranks, -1).copy_(shard)
        return Done()


def site_of(ranks: int) -> CommSite:
    ledger = Ledger()
    return CommSite(
        "layer", Ranks(ranks), Run(Policy({"tp.forward": Rule(OneOperation())}, ledger), ledger)
    )


def reduced(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks, sent as a layer sends it."""
    return site.message("tp.forward", "all_reduce", x.nbytes).start(x).wait()


@pytest.mark.parametrize(("ranks", "limit"), [(2, 18), (4, 23)])
def test_an_all_reduce_enters_few_python_frames(ranks: int, limit: int) -> None:
    """Ours alone: neither torch's nor those of the codec and of the backend."""
    site = site_of(ranks)
    x = torch.arange(8.0)
    frames = []
    reduced(site, x)

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            frames.append(frame.f_code.co_qualname)

    gc.disable()  # finalizers of other tests' objects
    sys.setprofile(enter)
    try:
        reduced(site, x)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert 10 < len(frames) <= limit, frames


@pytest.mark.parametrize(
    ("ranks", "total", "sent"),
    [
        (2, [0, 2, 4, 6, 8, 10, 12, 14], {"all_gather": 8}),
        (4, [0, 1] * 4, {"all_to_all": 6, "all_gather": 6}),
    ],
)
def test_an_all_reduce_is_little_more_than_its_codec_and_its_exchanges(
    ranks: int, total: list, sent: dict[str, int]
) -> None:
    site = site_of(ranks)
    x = torch.arange(8.0)
    with Operations() as operations:
        assert reduced(site, x).tolist() == total
    calls = 2 * len(sent) + 3  # of exchanges, and of the codec
    assert operations.seen.total() - calls <= 6, operations.seen
    actual = {row["operation"]: row["sent_bytes"] for row in site.run.ledger.rows()}
    assert actual == sent | {"instead_of_all_reduce": 0}


class RankZero(Ranks):
    """One that knows which of them it is."""

    def rank(self) -> int:
        return 0


class HalvedMlp(torch.nn.Module):
    """fc1, a nonlinearity and fc2 of two ranks, over an exact codec."""

    def __init__(self) -> None:
        super().__init__()
        codec = parse_codec("identity")
        ledger = Ledger()
        policy = Policy({"tp.forward": Rule(codec), "tp.backward": Rule(codec)}, ledger)
        site = CommSite("layer", RankZero(2), Run(policy, ledger))
        self.norm = torch.nn.LayerNorm(8)
        self.first = SiteLinear(column_parallel_linear, site)
        self.second = SiteLinear(row_parallel_linear, site)
        self.first.deferred = self.second.deferred = DeferredWeightGradient(self.second)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.second(self.first(x).tanh()), None


class SiteLinear(torch.nn.Module):
    """A tensor-parallel layer that asks its site as ours do."""

    def __init__(self, function, site: CommSite) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8))
        self.function = function
        self.site = site
        self.deferred: DeferredWeightGradient | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.function is column_parallel_linear:
            messages = self.site.pair(None, "tp.backward", x.nbytes)
            assert messages.compressed
            return column_parallel_linear(x, self.weight, None, messages, False, self.deferred)
        messages = self.site.pair("tp.forward", None, x.nbytes)
        assert messages.compressed
        return row_parallel_linear(x, self.weight, messages, False, self.deferred)


def test_a_block_of_one_half_enters_few_python_frames() -> None:
    """Halves launch twice as many blocks. Frames of codec and exchanges count, both ways."""
    layers = [HalvedMlp() for _ in range(4)]
    blocks = [Block(mlp, mlp.norm, mlp.first, mlp.second) for mlp in layers for _ in range(2)]
    frames: list[str] = []

    def run() -> None:
        halves = [torch.ones(4, 1, 8, requires_grad=True) for _ in range(2)]
        first, second = interleave(blocks, halves)
        (first.sum() + second.sum()).backward()

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        ours = "/megatron/compression/" in path and "/patches/" not in path
        if event == "call" and ours:
            frames.append(frame.f_code.co_qualname)

    run()
    gc.disable()
    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert 100 < len(frames) / len(blocks) <= 130, Counter(frames)


def test_a_backward_makes_no_placeholder_anew() -> None:
    x, first, second = leaves()
    mlp_loss(x, first, second, [], None).backward()
    loss = mlp_loss(x, first, second, [], None)
    with Operations() as operations:
        loss.backward()
    made = {
        name: count for name, count in operations.seen.items() if "zero" in name or "fill" in name
    }
    assert not made, made


@pytest.mark.slow
def test_codecs_communication_fsdp2_and_ddp_need_torch_and_triton_alone() -> None:
    """megatron-core may be missing."""
    program = (
        "import sys; sys.modules['megatron.core'] = sys.modules['megatron.training'] = None\n"
        "import megatron.compression.communication, megatron.compression.codecs as codecs\n"
        "import megatron.compression.communication.topology\n"
        "import megatron.compression.communication.audit\n"
        "from megatron.compression.fsdp2.attach import DataParallelConfig, attach\n"
        "import megatron.compression.ddp\n"
        "DataParallelConfig(compression='tagc', weights='lossless').rules(0)\n"
        "print(codecs.parse_codec('int5/int6').name, len(codecs.CODECS.names()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("int5/int6") and not done.returncode, done.stderr
