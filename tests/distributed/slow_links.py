"""Runs an entrypoint whose links are slow on purpose: every collective sleeps in proportion to its bytes.

    python slow_links.py pretrain_gpt.py --slow MS_PER_KIB [--slow-payloads] <its flags>

Replaces torch.distributed's functions, which timings and training call as attributes. Only rank 1 is slow:
the others wait for it, and have to decide as it does. Each rank prints what it has decided. With
--slow-payloads training finds another link than the timings did: payloads are slow there, and nothing else.
"""

import json
import os
import runpy
import sys
import time

import torch
import torch.distributed as dist

_BYTES = {
    "all_reduce": lambda tensor, *_, **__: tensor.nbytes,
    "all_gather_into_tensor": lambda full, *_, **__: full.nbytes // 2,
    "reduce_scatter_tensor": lambda part, full, *_, **__: full.nbytes // 2,
    "all_to_all_single": lambda received, sent, *_, **__: sent.nbytes // 2,
    "batch_isend_irecv": lambda ops: sum(one.tensor.nbytes for one in ops if one.op is dist.isend),
}
"""What a rank of two sends."""

training = False


def make_slow(milliseconds_per_kib: float, payloads: bool) -> None:
    """Let what this rank sends take time."""

    def slow(original, nbytes):
        def function(*args, **kwargs):
            group = kwargs.get("group")
            alone = group is not None and group.size() == 1
            tensors = [one.tensor for one in args[0]] if isinstance(args[0], list) else args
            payload = any(getattr(tensor, "dtype", None) == torch.uint8 for tensor in tensors)
            if not alone and (payload or not (payloads and training)):
                slower = 3 if payloads and training else 1  # than whatever else this machine does
                time.sleep(slower * nbytes(*args, **kwargs) / 1024 * milliseconds_per_kib / 1000)
            return original(*args, **kwargs)

        return function

    for name, nbytes in _BYTES.items():
        setattr(dist, name, slow(getattr(dist, name), nbytes))


def tell_decisions() -> None:
    """Print each rank's decision at the run's end, and know when training begins. Turns are short."""
    from megatron.compression import patches
    from megatron.compression.auto import check
    from megatron.compression.auto.automatic import Automatic

    check.TURN, check.WARM_UP = 2, 1
    announce, created = Automatic._announce, Automatic.__init__

    def announced(self, decision):
        global training
        announce(self, decision)
        training = True

    def init(self, *args, **kwargs):
        created(self, *args, **kwargs)

        def tell() -> None:
            print(f"rank {dist.get_rank()} decided {json.dumps(self.decision.asdict())}", flush=True)

        patches.on_training_end(tell)

    Automatic._announce, Automatic.__init__ = announced, init


def main() -> None:
    """Take the words of ours, then be the entrypoint."""
    entrypoint, *words = sys.argv[1:]
    place = words.index("--slow")
    slowness = float(words[place + 1])
    del words[place : place + 2]
    payloads = "--slow-payloads" in words
    words = [word for word in words if word != "--slow-payloads"]
    if os.environ["RANK"] == "1":
        make_slow(slowness, payloads)
    tell_decisions()
    sys.argv = [entrypoint, *words]
    runpy.run_path(entrypoint, run_name="__main__")


if __name__ == "__main__":
    main()
