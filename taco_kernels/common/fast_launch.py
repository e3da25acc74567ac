"""Launches that find the compiled kernel without Triton's ``kernel[grid](...)``.

That call binds the arguments, asks of each what the kernel is specialised on, writes the answers and the
options as text, and looks the compiled kernel up by it: most of what a launch costs the host. Here a
``Launch`` holds the kernel, the grid and every argument that stays the same. What a call adds, tensors and a
few integers, is looked up by what Triton 3.6 specialises on: a tensor by its dtype and by whether its address
divides by 16, an integer marked ``do_not_specialize`` by its width. The first call with an answer goes
through Triton, and the kernel that Triton chose is kept for the next.

Everything goes through Triton where that would not do: under the interpreter, in another version of Triton,
on other than CUDA devices, in debug mode, and while launch hooks or instrumentation (profilers) are on.
"""

from collections.abc import Sequence

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

KNOWN_TRITON = "3.6."
"""Versions whose launcher and specialisation this module follows."""
_MOST_LAUNCHES = 4096  # kept by start()
_INT32, _INT64 = 2**31, 2**63
_ALIGNED = 16  # bytes; Triton specialises on addresses that divide by it

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_runtime, _compilation, _run = knobs.runtime, knobs.compilation, JITFunction.run
_enter_hook, _exit_hook = _runtime.launch_enter_hook, _runtime.launch_exit_hook
_plain = False
"""Whether every launch goes through Triton; for tests."""


def supported() -> bool:
    """Whether this Triton and this torch have what a fast launch uses."""
    found = _current_device is not None and _current_stream is not None
    chains = all(
        isinstance(getattr(hook, "calls", None), list) for hook in (_enter_hook, _exit_hook)
    )
    return found and chains and triton.__version__.startswith(KNOWN_TRITON)


_SUPPORTED = supported()


def _watched() -> bool:
    """Whether something that only Triton's own launch serves has been switched on."""
    return bool(
        _plain
        or _enter_hook.calls
        or _exit_hook.calls
        or _runtime.launch_enter_hook is not _enter_hook
        or _runtime.launch_exit_hook is not _exit_hook
        or _runtime.debug
        or _compilation.instrumentation_mode
        or JITFunction.run is not _run
    )


class Launch:
    """A kernel with its grid and all arguments but the first tensors and the last integers.

    Args:
        kernel: what ``triton.jit`` made. Its parameters are, in this order: the tensors of a call, ``fixed``,
            the integers of a call, constexprs.
        grid: programs along one to three axes.
        fixed: arguments that are the same in each call: integers, tuples of them, floats, tensors (whose
            memory must stay where it is).
        constants: constexpr parameters and compiler options by name.
    """

    __slots__ = ("_compiled", "_grid", "_plain", "constants", "fixed", "grid", "kernel")

    def __init__(
        self, kernel, grid: Sequence[int], fixed: tuple, constants: dict[str, object]
    ) -> None:
        self.kernel, self.grid, self.fixed, self.constants = kernel, tuple(grid), fixed, constants
        self._grid = (*self.grid, 1, 1)[:3]
        self._plain = not (_SUPPORTED and isinstance(kernel, JITFunction))
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], late: tuple[int, ...] = ()) -> None:
        """Start the kernel on the current device, where ``tensors`` are, and stream. ``late``: integers, of
        parameters marked ``do_not_specialize``; others raise TypeError."""
        if self._plain:
            self.kernel[self.grid](*tensors, *self.fixed, *late, **self.constants)
            return
        device = _current_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            *[tensor.dtype for tensor in tensors],
            *[tensor.get_device() for tensor in tensors],
            *[not address % _ALIGNED for address in addresses],
            *[
                0 if -_INT32 <= n < _INT32 else 1 if n < _INT64 else 2 if n < 2 * _INT64 else 3
                for n in late
            ],
        )
        found = self._compiled.get(key)
        if found is None or self.kernel.pre_run_hooks or _watched():
            self._through_triton(key, tensors, late)
            return
        launch, options, fixed, constants, _ = found
        launch(
            *self._grid, _current_stream(device), *options, *addresses, *fixed, *late, *constants
        )

    def _through_triton(
        self, key: tuple, tensors: Sequence[torch.Tensor], late: tuple[int, ...]
    ) -> None:
        """Launch as usual, and keep the kernel that was chosen if the next call may use it."""
        kernel = self.kernel
        constants = self._check(kernel, len(tensors), late)
        chosen = kernel[self.grid](*tensors, *self.fixed, *late, **self.constants)
        if chosen is None or kernel.pre_run_hooks or _watched() or key in self._compiled:
            return
        from triton.backends.nvidia.driver import CudaLauncher

        run = chosen.run
        if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
            self._plain = True
            return
        # no scratch memory, twice; after the metadata the hooks' argument, and the hooks
        others = None, None, chosen.packed_metadata, None, None, None
        options = chosen.function, run.launch_cooperative_grid, run.launch_pdl, *others
        fixed = tuple(
            arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in self.fixed
        )
        # the C function expects constants and ignores them; the chosen kernel is kept alive
        self._compiled[key] = run.launch, options, fixed, constants, chosen

    def _check(self, kernel: JITFunction, tensors: int, late: tuple[int, ...]) -> tuple:
        """The constexpr arguments in order; raises TypeError as ``__call__`` says."""
        first = tensors + len(self.fixed)
        after = first + len(late)
        names = [parameter.name for parameter in kernel.params[after:]]
        if missing := [name for name in names if name not in self.constants]:
            raise TypeError(
                f"{kernel}: no constants for {missing}; constexprs must be the last parameters"
            )
        for parameter, value in zip(kernel.params[first:after], late, strict=True):
            if type(value) is not int or not parameter.do_not_specialize:
                raise TypeError(
                    f"{kernel}: {parameter.name}={value!r} changes from call to call: pass an int, and name "
                    "it in triton.jit(do_not_specialize=...)"
                )
        return tuple(self.constants[name] for name in names)


_launches: dict[tuple, Launch] = {}


def start(
    kernel,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    fixed: tuple,
    late: tuple[int, ...] = (),
    **constants: object,
) -> None:
    """Start ``kernel`` with a ``Launch`` of its own for each grid, ``fixed`` and ``constants``, for callers
    that keep none. ``fixed`` must be hashable and few: sizes and strides, not what differs in each call."""
    key = (id(kernel), grid, fixed, *constants.values(), *constants)
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _MOST_LAUNCHES:  # sizes that never come back
            _launches.clear()
        launch = _launches[key] = Launch(kernel, grid, fixed, constants)
    launch(tensors, late)
