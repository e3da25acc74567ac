"""Message sizes at which one way overtakes another.

Measured on four NVIDIA H200 of one host (NVLink, 18 links each), torch 2.11.0, triton 3.6.0, NCCL 2.28.9, on
2026-11-21, world size 4; docs/benchmarks.md has the tables. Other world sizes take the same values.

There is no size from which on ``--taco-transport auto`` prefers torch.distributed to symmetric memory: NCCL's
all-to-all and all-gather of one byte a value took 165 us at 1 MiB, 218 at 64 and 701 at 256, where the whole
all-reduce takes 17, 224 and 711, and the codec's kernels come on top (about 90 us at 64 MiB, 350 at 256).
"""

ONE_SHOT_UP_TO = 256 * 2**10
"""Bytes of the uncompressed tensor up to which an all-reduce goes one-shot: level with the two-shot at
0.25 MiB (15.7 us both, int8) and behind at 1 MiB (19.9 us against 17.1)."""
