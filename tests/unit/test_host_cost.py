"""What launching costs the host: how many operations it asks of torch around an exchange."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import all_reduce
from tests.unit.test_overlap import leaves, mlp_loss


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

    def decode(self, payloads, shape, dtype, out=None) -> torch.Tensor:
        return payloads.to(dtype)

    def decode_sum_encode(self, payloads, shape, into) -> torch.Tensor:
        return payloads[0]


class InPlace:
    """A transport of two ranks whose exchanges are no operation."""

    world_size = 2

    def fuses(self, codec: Codec) -> bool:
        return False

    def all_to_all(self, payloads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return payloads, None

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat((payload, payload)).view(2, -1), None


def test_an_all_reduce_is_little_more_than_its_codec_and_its_exchanges() -> None:
    x = torch.arange(8.0).view(2, 4)
    with Operations() as operations:
        total = all_reduce(x, OneOperation(), InPlace()).wait()
    assert total.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    codec, exchanges = 3, 2
    assert operations.seen.total() - codec - exchanges <= 4, operations.seen


def test_a_backward_makes_no_placeholder_anew() -> None:
    x, first, second = leaves()
    mlp_loss(x, first, second, [], None).backward()
    loss = mlp_loss(x, first, second, [], None)
    with Operations() as operations:
        loss.backward()
    made = {name: count for name, count in operations.seen.items() if "zero" in name or "fill" in name}
    assert not made, made
