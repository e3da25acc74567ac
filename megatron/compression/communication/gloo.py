"""The end of a process that has communicated over gloo."""

import atexit
import contextlib
import functools
import threading
import time
from pathlib import Path

import torch

_SECONDS = 0.05
"""From one look at the threads to the next."""
_QUIET_LOOKS = 4
"""Looks in a row at which no thread runs: by then they have dropped the tensors of the collectives
that have just ended."""
_MOST_LOOKS = 100
"""A process ends after these even so."""
_THREAD = "pt_gloo"
"""How torch's names of gloo's threads begin (``pt_gloo_runloop``), from torch 2.11 on."""


@functools.cache
def wait_at_exit() -> None:
    """Let this process wait at its end where threads of gloo run. Idempotent.

    Gloo's threads drop a collective's tensors after its end, and need Python's lock for it. Before
    Python 3.14 the process aborts where the interpreter ends first (pytorch/pytorch#190489).
    ``destroy_process_group`` does not help: whoever still holds a group keeps its threads.
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    quiet = 0
    for _ in range(_MOST_LOOKS):
        states = _states()
        # A process that has used no gloo has none, and ends at once.
        if not states or quiet == _QUIET_LOOKS:
            return
        # On a busy host a thread may wait for a CPU longer than all looks take: it counts as
        # running.
        quiet = 0 if "R" in states else quiet + 1
        time.sleep(_SECONDS)


def _states() -> list[str]:
    """Return the state of each thread of gloo, R for one that runs or waits for a CPU."""
    prefix = _THREAD
    python_threads: set[int | None] = set()
    if torch.__version__.startswith("2.10."):
        # Gloo's threads are named as the process is there: all that Python has not started.
        prefix = Path("/proc/self/comm").read_text().strip()
        python_threads = {thread.native_id for thread in threading.enumerate()}
    states = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            # 1234 (pt_gloo_runloop) S ...: the name may hold spaces and brackets.
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith(prefix) and int(task.name) not in python_threads:
                states.append(rest.split()[0])
    return states
