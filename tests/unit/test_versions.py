"""What is said and refused under versions of torch, Triton and megatron-core that were not tried."""

import pytest
import torch
import triton

from megatron.compression import CompressionConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.fsdp2 import attach
from megatron.compression.session import Host, Session


class LoopThatKeepsLines(Host):
    """A loop that keeps lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def unknown_triton(monkeypatch) -> None:
    """A GPU, and a Triton that has never been tried."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.11.2")


SLOW = "fast kernel launches are off, since Triton 3.11.2 is none of 3.6 to 3.9: each launch takes the host 22 "


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_slow_launches_are_said_once_where_anything_is_compressed(
    codec: str, unknown_triton
) -> None:
    host = LoopThatKeepsLines()
    session = Session(CompressionConfig(data_parallel=DataParallelConfig(compression=codec)), host)
    session.attach_wrapped([])
    slow = [line for line in host.lines if line.startswith(f"compression: {SLOW}")]
    assert len(slow) == (codec == "int8")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_slow_launches_are_said_under_fsdp2(codec: str, unknown_triton) -> None:
    lines: list[str] = []
    with pytest.raises(Exception, match="call fully_shard"):
        attach(torch.nn.Linear(2, 2), gather="none", reduce=codec, log=lines.append)
    slow = [line for line in lines if line.startswith(f"compression: FSDP2: {SLOW}")]
    assert len(slow) == (codec == "int8")
