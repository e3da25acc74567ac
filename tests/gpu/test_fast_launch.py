"""Fast launches on a GPU: the bits of Triton's own launches, on the current device and stream."""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from taco_kernels.common import fast_launch
from taco_kernels.taco import CodecConfig, launch
from tests.gpu.devices import needs
from tests.kernels.wires.lossless import bits


@contextmanager
def only_fast_launches():
    """Fail on a launch that goes through Triton."""

    def refuse(self, *_) -> None:
        raise AssertionError(f"{self.kernel} went through Triton")

    with mock.patch.object(fast_launch.Launch, "_through_triton", refuse):
        yield


@pytest.mark.skipif(
    os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    reason="streams share a queue with CUDA_DEVICE_MAX_CONNECTIONS=1; unset it",
)
def test_side_stream() -> None:
    """A kernel on another stream waits for that stream, and for it alone."""
    config = CodecConfig("int8")
    side = torch.cuda.Stream()
    x = torch.zeros(2**16, device="cuda")
    new = torch.randn(2**16, device="cuda")
    expected = launch.encode(new, config)
    assert not torch.equal(launch.encode(x, config), expected)
    torch.cuda.synchronize()
    with only_fast_launches(), torch.cuda.stream(side):
        launch.encode(x, config)  # its memory is there for the next
        torch.cuda._sleep(2_000_000_000)  # about a second
        x.copy_(new)
        late = launch.encode(x, config)
    early = launch.encode(new, config)  # on the default stream
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the default stream waited for the other"
    side.synchronize()
    assert torch.equal(late, expected)
    assert torch.equal(early, expected)


@pytest.mark.multigpu
@needs(2, shared=False)
def test_second_device() -> None:
    """Devices have kernels of their own; alternating between them changes nothing."""
    config = CodecConfig("int8")
    x = torch.randn(1000, 128).bfloat16()
    wires = []
    for device in (0, 1, 0, 1, 0, 1):
        with torch.cuda.device(device):
            wire = launch.encode(x.to(device), config)
            wires.append((wire.cpu(), launch.decode(wire, config, x.shape, x.dtype).cpu()))
            assert wire.device.index == device
    first_wire, first_decoded = wires[0]
    for wire, decoded in wires[1:]:
        assert torch.equal(wire, first_wire)
        assert torch.equal(bits(decoded), bits(first_decoded))
    with only_fast_launches(), torch.cuda.device(1):
        assert torch.equal(launch.encode(x.to(1), config).cpu(), first_wire)


def test_wrong_device_is_an_error() -> None:
    """A tensor of the host never reaches a kernel, whatever was launched before."""
    config = CodecConfig("int8")
    x = torch.randn(1024, device="cuda")
    for _ in range(3):
        wire = launch.encode(x, config)
    with pytest.raises(ValueError, match="cannot be accessed"):
        launch.decode(wire, config, x.shape, x.dtype, x.cpu())
    assert torch.equal(launch.encode(x, config), wire)
