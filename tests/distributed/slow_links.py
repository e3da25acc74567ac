"""Runs an entrypoint whose links are slow on purpose: a collective takes time as it has bytes.

    python slow_links.py pretrain_gpt.py [--slow-payloads | --hiding-halves] <its flags>

The time is that of a clock of its own, which nothing else moves: the machine's load changes no
decision. Replaces torch.distributed's functions, which timings and training call as attributes.
Only rank 1 is slow: the other ranks have to decide as it does. Each rank prints its decision.
With --slow-payloads training meets another link than the timings did: only payloads are slow. With
--hiding-halves payloads take no time while halves of a micro-batch are interleaved.
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
    "batch_isend_irecv": lambda ops: sum(op.tensor.nbytes for op in ops if op.op is dist.isend),
}
"""Bytes that a rank of two sends, by function of torch.distributed."""
_BYTES_OF_GROUPS = {
    "_allgather_base": lambda full, *_, **__: full.nbytes // 2,
    "alltoall_base": lambda received, sent, *_, **__: sent.nbytes // 2,
}
"""The same by method of a process group: payloads call those directly."""

SECONDS_PER_KIB = 1e-3
training = False
in_halves = False
"""Whether halves of a micro-batch are interleaved now."""


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 1e-5

    def perf_counter(self) -> float:
        """Return the time in seconds; a tick passes between two calls."""
        self.now += self.tick
        return self.now


clock = Clock()


def make_slow(payloads: bool, hiding: bool) -> None:
    """Let the bytes that this rank sends take time.

    Args:
        payloads: in training only compressed payloads take time.
        hiding: in halves compressed payloads take none.
    """

    def pass_time(group, nbytes, args, kwargs) -> None:
        has_peers = group is None or group.size() > 1
        is_free = training and payloads and not _is_payload(args)
        is_hidden = hiding and in_halves and _is_payload(args)
        if has_peers and not is_free and not is_hidden:
            clock.now += nbytes(*args, **kwargs) / 1024 * SECONDS_PER_KIB

    def slow_function(original, nbytes):
        def function(*args, **kwargs):
            pass_time(kwargs.get("group"), nbytes, args, kwargs)
            return original(*args, **kwargs)

        return function

    def slow_method(original, nbytes):
        def method(group, *args, **kwargs):
            pass_time(group, nbytes, args, kwargs)
            return original(group, *args, **kwargs)

        return method

    for name, nbytes in _BYTES.items():
        setattr(dist, name, slow_function(getattr(dist, name), nbytes))
    for name, nbytes in _BYTES_OF_GROUPS.items():
        original = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, slow_method(original, nbytes))


def _is_payload(args: tuple) -> bool:
    """Return true if a call sends bytes (uint8), as compressed payloads are."""
    tensors = args
    if isinstance(args[0], list):
        tensors = [op.tensor for op in args[0]]
    return any(getattr(tensor, "dtype", None) == torch.uint8 for tensor in tensors)


def follow_halves() -> None:
    """Know whether halves are interleaved."""
    from megatron.compression.tensor_parallel import halves_block

    switch = halves_block.switch

    def switched(chunk, interleaved):
        global in_halves
        switch(chunk, interleaved)
        in_halves = interleaved

    halves_block.switch = switched


def tell_decisions() -> None:
    """Print each rank's decision at the run's end, and time with the clock above.

    Blocks are short, and ``training`` becomes true when the timings have ended.
    """
    from megatron.compression.auto import check, stopwatch
    from megatron.compression.auto.automatic import Automatic
    from megatron.compression.report import Reporter

    check.BLOCK = 2
    check.WARM_UP = 1
    check.time = clock
    stopwatch.time = clock
    begin = Automatic._begin
    initialise = Automatic.__init__
    finish = Reporter.finish
    instances = []

    def begun(self, plan, chunks):
        global training
        begin(self, plan, chunks)
        training = True

    def init(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        instances.append(self)

    def tell(self) -> None:
        finish(self)
        plan = json.dumps(asdict(instances[-1].plan))
        print(f"rank {dist.get_rank()} decided {plan}", flush=True)

    Automatic._begin = begun
    Automatic.__init__ = init
    Reporter.finish = tell


def main() -> None:
    """Read this script's own flag, then be the entrypoint."""
    entrypoint, *flags = sys.argv[1:]
    payloads = "--slow-payloads" in flags
    hiding = "--hiding-halves" in flags
    flags = [flag for flag in flags if flag not in ("--slow-payloads", "--hiding-halves")]
    if os.environ["RANK"] == "1":
        make_slow(payloads, hiding)
    if hiding:
        follow_halves()
    tell_decisions()
    sys.argv = [entrypoint, *flags]
    runpy.run_path(entrypoint, run_name="__main__")


if __name__ == "__main__":
    main()
