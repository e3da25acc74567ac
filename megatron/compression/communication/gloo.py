"""The end of a process that has communicated over gloo."""

import atexit
import functools
import time
from pathlib import Path

_SECONDS = 0.2
"""Long enough for a thread to drop the tensors of the collectives that have just ended."""
_THREAD = "pt_gloo"
"""How torch's names of gloo's threads begin (``pt_gloo_runloop``)."""


@functools.cache
def wait_at_exit() -> None:
    """Let this process wait at its end where threads of gloo run. Idempotent.

    Gloo's threads drop a collective's tensors after its end, and need Python's lock for it. Before
    Python 3.14 the process aborts where the interpreter ends first (pytorch/pytorch#190489).
    ``destroy_process_group`` does not help: whoever still holds a group keeps its threads.
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    # A process that has used no gloo has none, and ends at once.
    if any(name.startswith(_THREAD) for name in names):
        time.sleep(_SECONDS)
