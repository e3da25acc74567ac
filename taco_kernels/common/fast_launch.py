"""Launches that find the compiled kernel without Triton's ``kernel[grid](...)``.

That call binds the arguments, asks of each what the kernel is specialised on, writes the answers
and the options as text, and looks the compiled kernel up by it: most of what a launch costs the
host. Here a ``Launch`` holds the kernel, the grid and every argument that stays the same. What a
call adds, tensors and a few integers, is looked up by what Triton specialises on: a tensor by its
dtype and by whether its address divides by 16, an integer marked ``do_not_specialize`` by its
width. The first call with an answer goes through Triton, and the kernel that Triton chose is kept
for the next::

    call 1    key is new  ->  kernel[grid](...)   binds, specialises, compiles; its choice is kept by key
    call 2    key known   ->  the launcher's C function, with the addresses of this call

The C function's arguments differ between versions of Triton. They are not listed here: a copy of
the compiled kernel's launcher is called once with markers, and what it passes on is the layout::

    Triton 3.6:      x y z stream | function ... metadata, hooks | argument argument ...
    3.7 to 3.9:      x y z stream | function metadata ... types  | (argument, argument, ...)
                     this call's  | fixed for the kernel         | this call's

A launcher that passes anything else has no layout, and its kernels go through Triton. torch has a
launcher of its own (``torch._inductor.runtime.static_triton_launcher``). It is not used: it takes
no tuples as arguments and knows neither cooperative nor dependent launches, and from a compiled
kernel to the C function it takes 0.9 us where this takes 0.6 (``tests.kernels.launch_times``).

Everything goes through Triton where that would not do: under the interpreter, in a version of
Triton that has not been tried, on other than CUDA devices, in debug mode, and while launch hooks or
instrumentation (profilers) are on. ``slow_launches`` tells the user.
"""

import copy
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import jit
from triton.runtime.jit import JITFunction

KNOWN_TRITON = ((3, 6), (3, 9))
"""The first and the last series of Triton that the tests have been run with."""
_MOST_LAUNCHES = 4096
"""Launches that start() keeps."""
_WIDTHS = (-(2**31), 2**31, 2**63, 2**64)
"""Triton passes integers as int64 below the first of these, int32 up to the second, int64, uint64.
"""
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


def unsupported() -> str | None:
    """Return what keeps this Triton or this torch from fast launches; None: nothing."""
    if not _is_known(triton.__version__):
        first, last = (".".join(map(str, series)) for series in KNOWN_TRITON)
        return f"Triton {triton.__version__} is none of {first} to {last}"
    if _current_device is None or _current_stream is None:
        return f"torch {torch.__version__} has no function that returns the current stream"
    # In known versions a hook is a chain with a list of calls, empty where nobody listens.
    for hook in (_enter_hook, _exit_hook):
        if not isinstance(getattr(hook, "calls", None), list):
            return f"the launch hooks of Triton {triton.__version__} are no chains"
    if not _watchable():
        return f"Triton {triton.__version__} has other settings"
    if not _specialises_as_known():
        return f"Triton {triton.__version__} specialises kernels on something else"
    return None


def _is_known(version: str) -> bool:
    """Return whether a version of Triton is in a series that has been tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    series = (int(numbers[1]), int(numbers[2]))
    return KNOWN_TRITON[0] <= series <= KNOWN_TRITON[1]


def _watchable() -> bool:
    """Return whether Triton has the settings that ``_watched`` reads."""
    runtime = all(hasattr(_runtime, name) for name in ("debug", "add_stages_inspection_hook"))
    return runtime and hasattr(_compilation, "instrumentation_mode")


class _Address:
    """A tensor for Triton's specialisation: an address of bf16 values."""

    dtype = torch.bfloat16

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _specialises_as_known() -> bool:
    """Return whether Triton's own function tells apart what a ``Launch``'s key does, and no more."""
    specialise = getattr(jit, "native_specialize_impl", None)
    backend = getattr(jit, "BaseBackend", None)
    if specialise is None or backend is None:
        return False
    late_types = [
        specialise(backend, number, False, False, True)
        for number in (-(2**31) - 1, -(2**31), 0, 1, 16, 2**31 - 1, 2**31, 2**63 - 1, 2**63)
    ]
    widths = [None] * len(late_types)
    if late_types != list(
        zip(["i64", "i32", "i32", "i32", "i32", "i32", "i64", "i64", "u64"], widths, strict=True)
    ):
        return False
    aligned = {specialise(backend, _Address(2**n), False, True, True) for n in range(4, 48)}
    unaligned = {specialise(backend, _Address(8 * n), False, True, True) for n in (1, 3, 2**40 + 1)}
    return len(aligned) == 1 and len(unaligned) == 1 and aligned != unaligned


_SUPPORTED = unsupported() is None


def slow_launches() -> str | None:
    """Return a line for the user where fast launches are off and kernels run; None: they are on."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    reason = unsupported()
    if reason is None and _layout_of_launcher() is None:
        reason = f"the launcher of Triton {triton.__version__} has another form"
    if reason is None:
        return None
    return (
        f"fast kernel launches are off, since {reason}: each launch takes the host 22 to 39 us instead of "
        "10 to 16, which slows small models down; install the torch and Triton of constraints.txt"
    )


def _watched() -> bool:
    """Return True if something is on that only Triton's own launch serves: a hook, debug mode, a
    patch."""
    return bool(
        _always_triton
        or _enter_hook.calls
        or _exit_hook.calls
        or _runtime.launch_enter_hook is not _enter_hook
        or _runtime.launch_exit_hook is not _exit_hook
        or _runtime.debug
        or _runtime.add_stages_inspection_hook is not None
        or _compilation.instrumentation_mode
        or JITFunction.run is not _run
    )


class _Layout(NamedTuple):
    """What a launcher passes to its C function between this call's grid and stream and its
    arguments."""

    options: tuple
    packs: bool
    """Whether the kernel's arguments are one tuple; else they follow one by one."""


def _layout_of(launcher: Any, function: Any, metadata: Any) -> _Layout | None:
    """Return what a launcher passes on, by calling a copy of it that passes it to us.

    Args:
        launcher: of a compiled kernel; it allocates no scratch memory.
        function: the kernel's handle.
        metadata: the kernel's ``packed_metadata``.

    Returns: None where it is not grid, stream, something fixed, and the kernel's arguments.
    """
    passed: list[tuple] = []
    observed = copy.copy(launcher)
    observed.launch = lambda *arguments: passed.append(arguments)
    call = [object() for _ in range(4)]  # x, y, z, stream
    arguments = (object(), object())
    no_hooks = (None, None, None)  # what the hooks are called with, enter hook, exit hook
    try:
        observed(*call, function, metadata, *no_hooks, *arguments)
    except Exception:  # an unknown launcher may want anything of its arguments
        return None
    if len(passed) != 1 or list(passed[0][:4]) != call:
        return None
    rest = passed[0][4:]
    if rest[-2:] == arguments:
        layout = _Layout(rest[:-2], False)
    elif rest and isinstance(rest[-1], tuple) and rest[-1] == arguments:
        layout = _Layout(rest[:-1], True)
    else:
        return None
    for option in layout.options:
        if any(option is marker for marker in (*call, *arguments)):
            return None
    return layout


def _layout_of_launcher() -> _Layout | None:
    """Return the layout of Triton's launcher for CUDA, without a kernel: whether it has one."""
    from triton.backends.nvidia.driver import CudaLauncher

    class Empty(CudaLauncher):
        """Has no scratch memory, no instrumentation, and nothing that a launcher is made of."""

        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> int:
            if name.startswith("__"):
                raise AttributeError(name)
            return 0

    return _layout_of(Empty(), 0, (1, 1, 0))


class Launch:
    """A kernel with its grid and all arguments but the first tensors and the last integers.

    Args:
        kernel: what ``triton.jit`` made. Its parameters are, in this order: the tensors of a call,
            ``fixed``, the integers of a call, constexprs.
        grid: programs along one to three axes.
        fixed: arguments that are the same in each call: integers, tuples of them, floats, tensors
            (whose memory must stay where it is).
        constants: constexpr parameters and compiler options by name. ``enable_fp_fusion`` is False
            unless it is among them: a product and a sum that the compiler joins are rounded once,
            which the definitions do not, and what Triton does by default depends on its version.
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
        self.constants = {"enable_fp_fusion": False, **constants}
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
            TypeError: the kernel's parameters are not in the order of this class, or one of
                ``late`` would be specialised on.
        """
        if self._through_triton_only:
            self.kernel[self.grid](*tensors, *self.fixed, *late, **self.constants)
            return
        device = _current_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        # All that Triton would look at to choose the compiled kernel; a tensor's device is in it so
        # that one of another device reaches Triton, which refuses it.
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
        launch, packs, options, fixed, constants, _ = compiled
        stream = _current_stream(device)
        if packs:
            arguments = (*addresses, *fixed, *late, *constants)
            launch(*self._grid, stream, *options, arguments)
        else:
            launch(*self._grid, stream, *options, *addresses, *fixed, *late, *constants)

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

        launcher = chosen.run
        # Scratch memory is allocated by each launch, which only Triton's launcher does.
        if (
            not isinstance(launcher, CudaLauncher)
            or launcher.global_scratch_size
            or launcher.profile_scratch_size
            or getattr(launcher, "gsan_enabled", False)
        ):
            self._through_triton_only = True
            return
        layout = _layout_of(launcher, chosen.function, chosen.packed_metadata)
        if layout is None:
            self._through_triton_only = True
            return
        fixed = tuple(
            arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in self.fixed
        )
        # The C function expects constants and ignores them. ``chosen`` is kept so that it stays
        # loaded.
        self._compiled[key] = (
            launcher.launch,
            layout.packs,
            layout.options,
            fixed,
            constants,
            chosen,
        )

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
    """Start ``kernel`` by a ``Launch`` that is made once for each grid, ``fixed`` and
    ``constants``.

    For callers that keep no ``Launch`` of their own: looking it up takes about as long as the
    launch itself.

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
