"""The end of a process whose threads of gloo still hold tensors."""

import sys

import pytest

from tests.distributed.launch import environment, launched

SCRIPT = """
import sys, threading, time
import torch, torch.distributed as dist
from megatron.compression.communication import Ledger, Policy, Run

class Slow(torch.Tensor):
    def __del__(self):  # keeps the thread of gloo that drops the last reference at work
        if threading.get_ident() != main:
            dropped.set()
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            print("dropped", flush=True)

main, dropped = threading.get_ident(), threading.Event()
Run(Policy({}, ledger := Ledger()), ledger)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
while not dropped.is_set():
    dist.all_reduce(torch.ones(2**20).as_subclass(Slow), async_op=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_threads_of_gloo_drop_their_tensors_before_the_interpreter_ends() -> None:
    """Else the process aborts; the exit status stays the script's."""
    run = launched([sys.executable, "-c", SCRIPT], environment()).finish(60)
    assert run.returncode == 3 and "dropped" in run.output, run.output[-2000:]
