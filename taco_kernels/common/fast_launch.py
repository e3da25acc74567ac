"""Launches that find the compiled kernel without Triton's ``kernel[grid](...)``.

That call binds the arguments, asks of each what the kernel is specialised on, writes the answers and the
options as text, and looks the compiled kernel up by it: most of what a launch costs the host. Here a
``Launch`` holds the kernel, the grid and every argument that stays the same. What a call adds, tensors and a
few integers, is looked up by what Triton 3.6 specialises on: a tensor by its dtype and by whether its address
divides by 16, an integer marked ``do_not_specialize`` by its width. The first call with an answer goes
through Triton, and the kernel that Triton chose is kept for the next::

    call 1    key is new  ->  kernel[grid](...)   binds, specialises, compiles; its choice is kept by key
    call 2    key known   ->  the launcher's C function, with the addresses of this call

Everything goes through Triton where that would not do: under the interpreter, in another version of Triton,
on other than CUDA devices, in debug mode, and while launch hooks or instrumentation (profilers) are on.
"""

from bisect import bisect_right
from collections.abc import Sequence

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

KNOWN_TRITON = "3.6."
"""Versions whose launcher and specialisation this module follows."""
_MOST_LAUNCHES = 4096
"""Launches that start() keeps."""
_WIDTHS = (-(2**31), 2**31, 2**63, 2**64)
"""Triton passes integers as int64 below the first of these, int32 up to the second, int64, uint64."""
_ALIGNED = 16
"""Bytes; Triton specialises on addresses that divide by it."""

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# As Triton has them before anyone changes them: see _watched.
_runtime = knobs.runtime
_compilation = knobs.compilation
_run = JITFunction.run
_enter_hook = _runtime.launch_enter_hook
_exit_hook = _runtime.launch_exit_hook

_always_triton = False
"""Whether every launch goes through Triton; for tests."""


def supported() -> bool:
    """Return True if this Triton and this torch have what a fast launch uses."""
    has_current = _current_device is not None and _current_stream is not None
    # In known versions a hook is a chain with a list of calls, empty where nobody listens.
    has_chains = all(
        isinstance(getattr(hook, "calls", None), list) for hook in (_enter_hook, _exit_hook)
    )
    return has_current and has_chains and triton.__version__.startswith(KNOWN_TRITON)


_SUPPORTED = supported()


def _watched() -> bool:
    """Return True if something is on that only Triton's own launch serves: a hook, debug mode, a patch."""
    return bool(
        _always_triton
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

    __slots__ = (
        "_compiled",
        "_grid",
        "_through_triton_only",
        "constants",
        "fixed",
        "grid",
        "kernel",
    )

    def __init__(
        self, kernel, grid: Sequence[int], fixed: tuple, constants: dict[str, object]
    ) -> None:
        self.kernel = kernel
        self.grid = tuple(grid)
        self.fixed = fixed
        self.constants = constants
        self._grid = (*self.grid, 1, 1)[:3]
        # In the interpreter a kernel is no JITFunction.
        self._through_triton_only = not (_SUPPORTED and isinstance(kernel, JITFunction))
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], late: tuple[int, ...] = ()) -> None:
        """Start the kernel on the current device and stream.

        Args:
            tensors: on the current device.
            late: integers, of parameters marked ``do_not_specialize``.

        Raises:
            TypeError: the kernel's parameters are not in the order of this class, or one of ``late`` would
                be specialised on.
        """
        if self._through_triton_only:
            self.kernel[self.grid](*tensors, *self.fixed, *late, **self.constants)
            return
        device = _current_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        # All that Triton would look at to choose the compiled kernel; a tensor's device is in it so that one
        # of another device reaches Triton, which refuses it.
        key = (
            device,
            *[tensor.dtype for tensor in tensors],
            *[tensor.get_device() for tensor in tensors],
            *[not address % _ALIGNED for address in addresses],
            *[bisect_right(_WIDTHS, number) for number in late],
        )
        compiled = self._compiled.get(key)
        if compiled is None or self.kernel.pre_run_hooks or _watched():
            self._through_triton(key, tensors, late)
            return
        # A hit: what Triton would pass to the launcher's C function, with this call's addresses.
        launch, options, fixed, constants, _ = compiled
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
        # Something watches launches, or the key is known: nothing is kept.
        if chosen is None or kernel.pre_run_hooks or _watched() or key in self._compiled:
            return
        from triton.backends.nvidia.driver import CudaLauncher

        run = chosen.run
        if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
            # Scratch memory is allocated by each launch, which only Triton's launcher does.
            self._through_triton_only = True
            return
        # The order of the launcher's C function in Triton 3.6, after grid and stream.
        options = (
            chosen.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,  # global scratch memory
            None,  # the profiler's scratch memory
            chosen.packed_metadata,
            None,  # the hooks' argument
            None,  # enter hook
            None,  # exit hook
        )
        fixed = tuple(
            arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in self.fixed
        )
        # The C function expects constants and ignores them. ``chosen`` is kept so that it stays loaded.
        self._compiled[key] = run.launch, options, fixed, constants, chosen

    def _check(self, kernel: JITFunction, tensors: int, late: tuple[int, ...]) -> tuple:
        """Return the constexpr arguments in order; raise TypeError as ``__call__`` says."""
        first = tensors + len(self.fixed)
        after = first + len(late)
        names = [parameter.name for parameter in kernel.params[after:]]
        if missing := [name for name in names if name not in self.constants]:
            raise TypeError(
                f"{kernel}: no constants for {missing}; constexprs must be the last parameters"
            )
        # What Triton specialises on by value would need a kernel for each number.
        for parameter, value in zip(kernel.params[first:after], late, strict=True):
            if type(value) is not int or not parameter.do_not_specialize:
                raise TypeError(
                    f"{kernel}: {parameter.name}={value!r} changes from call to call: "
                    "pass an int, and name it in triton.jit(do_not_specialize=...)"
                )
        return tuple(self.constants[name] for name in names)


_launches: dict[tuple, Launch] = {}
"""What ``start`` keeps, by kernel, grid, fixed arguments and constants."""


def start(
    kernel,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    fixed: tuple,
    late: tuple[int, ...] = (),
    **constants: object,
) -> None:
    """Start ``kernel`` by a ``Launch`` that is made once for each grid, ``fixed`` and ``constants``.

    For callers that keep no ``Launch`` of their own: looking it up takes about as long as the launch itself.

    Args:
        kernel: as of ``Launch``.
        grid: programs along one to three axes.
        tensors: of this call, on the current device.
        fixed: hashable and few different ones: sizes and strides, not what differs in each call.
        late: integers of this call, of parameters marked ``do_not_specialize``.
        constants: constexpr parameters and compiler options.
    """
    # By id: hashing a kernel takes long, and kernels live as long as their modules.
    key = (id(kernel), grid, fixed, *constants.values(), *constants)
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _MOST_LAUNCHES:  # sizes that never come back
            _launches.clear()
        launch = _launches[key] = Launch(kernel, grid, fixed, constants)
    launch(tensors, late)
