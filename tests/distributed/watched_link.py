"""Runs a script, and prints which of its iterations met another data centre.

    watched_link.py SCRIPT ARGUMENTS

Counted are exchanges over the link, and every collective of torch.distributed over a group with
ranks of another data centre: the groups of a job know its own ranks, so the largest group is told.
With SLOW_ITERATION=N data centre 1 takes three seconds more in iteration N, with SLOWDOWN=F it takes
F of each iteration's time more, and with STOP_ITERATION=N it ends in iteration N. With
LIMIT_SECONDS=S data centre 0 waits S seconds in a round, whatever it waits at the start.
"""

import os
import sys
import time

import torch.distributed as dist

from megatron.compression.local_steps.link import DataCentreLink
from megatron.compression.session import Session
from tests.distributed.server import run_script

exchanged: list[int] = []
durations: list[float] = []
largest = 0
start = DataCentreLink.start
step_ended = Session.step_ended
last = time.monotonic()


def starting(self, payload, iteration, **kinds):
    exchanged.append(iteration)
    return start(self, payload, iteration, **kinds)


def ended(self) -> None:
    global largest, last
    iteration = self.host.iteration() + 1
    if "LIMIT_SECONDS" in os.environ and self.config.local_steps.data_centre == 0:
        self.local_steps.link.seconds = float(os.environ["LIMIT_SECONDS"])
    if self.config.local_steps.data_centre == 1:
        if os.environ.get("SLOW_ITERATION") == str(iteration):
            time.sleep(3)
        time.sleep(float(os.environ.get("SLOWDOWN", "0")) * (time.monotonic() - last))
        if os.environ.get("STOP_ITERATION") == str(iteration):
            os._exit(7)
    durations.append(time.monotonic() - last)
    step_ended(self)
    last = time.monotonic()
    groups = dist.distributed_c10d._world.pg_map
    largest = max(largest, *(group.size() for group in groups))


DataCentreLink.start = starting
Session.step_ended = ended
run_script(sys.argv[1], sys.argv[2:])
steps = " ".join(f"{seconds:.2f}" for seconds in durations)
print(f"exchanged after {exchanged}, largest group {largest}, seconds of steps {steps}", flush=True)
