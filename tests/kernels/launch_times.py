"""Host microseconds of a kernel launch, without a GPU: ``python -m tests.kernels.launch_times``.

The C functions that talk to the GPU's driver are stand-ins that do nothing, so that the driver's own few
microseconds are left out everywhere. Timed are whole launches, through Triton and fast, and their last step
alone, from a compiled kernel to the C function: ours, and that of torch's own static launcher, which Inductor
uses.
"""

import statistics
import time
import types
from collections.abc import Callable
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from taco_kernels.common import fast_launch
from taco_kernels.common.fast_launch import Launch
from tests.kernels.recorded_launches import Recorder, recorded_launches

LAUNCHES = 3000
ROUNDS = 15


@triton.jit(do_not_specialize=["late"])
def add_kernel(x, out, numel, stride, late, T: tl.constexpr):
    """out = x + late. Has no tuple among its arguments, which torch's launcher would not take."""
    at = tl.arange(0, T)
    tl.store(out + at, tl.load(x + at * stride, mask=at < numel) + late)


class Idle(Recorder):
    """A launcher whose C function does nothing."""

    def __init__(self) -> None:
        self.launch = lambda *arguments: None


def microseconds(call: Callable[[], None]) -> float:
    """Return what one call takes of the CPU, of LAUNCHES: what other processes take does not count."""
    begin = time.process_time()
    for _ in range(LAUNCHES):
        call()
    return (time.process_time() - begin) / LAUNCHES * 1e6


def static_launch(x: torch.Tensor, out: torch.Tensor) -> Callable[[], None] | None:
    """Return a launch by torch's static launcher; None where this torch has none of that name."""
    try:
        from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
    except ImportError:
        return None
    signature = {"x": "*fp32", "out": "*fp32", "numel": "i32", "stride": "i32", "late": "i32"}
    source = ASTSource(add_kernel, {**signature, "T": "constexpr"}, {"T": 16})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    compiled._cubin_path = ""  # never loaded
    kernel = StaticallyLaunchedCudaKernel(compiled)
    idle = types.SimpleNamespace(
        _launch_kernel=lambda *arguments: None, _unload_kernel=lambda module: None
    )
    vars(kernel).update(C_impl=idle, function=1)
    return lambda: kernel.run(1, 1, 1, 7, x, out, 16, 1, 3)


def main() -> None:
    """Print the median and the least of ROUNDS for each way."""
    x = torch.zeros(256)
    out = torch.zeros(256)
    with recorded_launches(add_kernel) as (_, device):
        device.launcher_cls = lambda source, metadata: Idle()
        prepared = Launch(add_kernel, (1,), (16, 1), dict(T=16, num_warps=1))

        def whole() -> None:
            prepared((x, out), (3,))

        def through_triton() -> None:
            with mock.patch.object(fast_launch, "_always_triton", True):
                times["through Triton"].append(microseconds(whole))

        whole()
        [(launch, packs, options, fixed, constants, _)] = prepared._compiled.values()

        def last_step() -> None:
            arguments = (x.data_ptr(), out.data_ptr(), *fixed, 3, *constants)
            if packs:
                launch(1, 1, 1, 7, *options, arguments)
            else:
                launch(1, 1, 1, 7, *options, *arguments)

        ways = {"fast": whole, "fast, last step": last_step}
        if (of_torch := static_launch(x, out)) is not None:
            ways["torch's static launcher, last step"] = of_torch
        times: dict[str, list[float]] = {name: [] for name in ("through Triton", *ways)}
        for _ in range(ROUNDS):
            through_triton()
            for name, call in ways.items():
                times[name].append(microseconds(call))
    print(f"torch {torch.__version__}, Triton {triton.__version__}: median (least), microseconds")
    for name, measured in times.items():
        print(f"  {name:36}{statistics.median(measured):6.1f} ({min(measured):.1f})")


if __name__ == "__main__":
    main()
