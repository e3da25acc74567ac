"""Runs an entrypoint whose links are slow on purpose: every collective takes time in proportion to its bytes.

    python slow_links.py pretrain_gpt.py [--slow-payloads] <its flags>

The time is that of a clock of its own, which nothing else moves: what else this machine does changes no
decision. Replaces torch.distributed's functions, which timings and training call as attributes. Only rank 1
is slow: the others have to decide as it does. Each rank prints what it has decided. With --slow-payloads
training finds another link than the timings did: payloads are slow there, and nothing else.
"""

import json
import os
import runpy
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

_BYTES = {
    "all_reduce": lambda tensor, *_, **__: tensor.nbytes,
    "reduce_scatter_tensor": lambda part, full, *_, **__: full.nbytes // 2,
    "batch_isend_irecv": lambda ops: sum(one.tensor.nbytes for one in ops if one.op is dist.isend),
}
"""What a rank of two sends."""
_BYTES_OF_GROUPS = {
    "_allgather_base": lambda full, *_, **__: full.nbytes // 2,
    "alltoall_base": lambda received, sent, *_, **__: sent.nbytes // 2,
}
"""The same by methods of a process group, which payloads call without torch.distributed's functions."""

SECONDS_PER_KIB = 1e-3
training = False


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now, self.tick = 0.0, 1e-5

    def perf_counter(self) -> float:
        """Seconds; a little passes between two looks."""
        self.now += self.tick
        return self.now


clock = Clock()


def make_slow(payloads: bool) -> None:
    """Let what this rank sends take time: in training ``payloads`` alone."""

    def slow(original, nbytes, method=False):
        def function(*args, **kwargs):
            group, given = kwargs.get("group"), args
            if method:
                group, *args = args
            alone = group is not None and group.size() == 1
            tensors = [one.tensor for one in args[0]] if isinstance(args[0], list) else args
            payload = any(getattr(tensor, "dtype", None) == torch.uint8 for tensor in tensors)
            free = training and payloads and not payload
            if not alone and not free:
                clock.now += nbytes(*args, **kwargs) / 1024 * SECONDS_PER_KIB
            return original(*given, **kwargs)

        return function

    for name, nbytes in _BYTES.items():
        setattr(dist, name, slow(getattr(dist, name), nbytes))
    for name, nbytes in _BYTES_OF_GROUPS.items():
        setattr(
            dist.ProcessGroup, name, slow(getattr(dist.ProcessGroup, name), nbytes, method=True)
        )


def tell_decisions() -> None:
    """Print each rank's decision at the run's end, know when training begins, take the time from the clock.

    Blocks are short.
    """
    from megatron.compression.auto import plan, stopwatch
    from megatron.compression.auto.automatic import Automatic
    from megatron.compression.report import Reporter

    plan.BLOCK, plan.WARM_UP = 2, 1
    plan.time = clock
    stopwatch.time = clock
    begin, created, finish = Automatic._begin, Automatic.__init__, Reporter.finish
    decided = []

    def begun(self, plan):
        global training
        begin(self, plan)
        training = True

    def init(self, *args, **kwargs):
        created(self, *args, **kwargs)
        decided.append(self)

    def tell(self) -> None:
        finish(self)
        print(f"rank {dist.get_rank()} decided {json.dumps(asdict(decided[-1].plan))}", flush=True)

    Automatic._begin, Automatic.__init__, Reporter.finish = begun, init, tell


def main() -> None:
    """Take the words of ours, then be the entrypoint."""
    entrypoint, *words = sys.argv[1:]
    payloads = "--slow-payloads" in words
    words = [word for word in words if word != "--slow-payloads"]
    if os.environ["RANK"] == "1":
        make_slow(payloads)
    tell_decisions()
    sys.argv = [entrypoint, *words]
    runpy.run_path(entrypoint, run_name="__main__")


if __name__ == "__main__":
    main()
