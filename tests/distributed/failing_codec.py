"""A codec that fails on rank 1 alone, in training: what a fault of one rank looks like.

FAILS_BY=exception torchrun ... pretrain_gpt.py --tp-compression tests.distributed.failing_codec:FailsLate
"""

import os
import signal
import sys
from dataclasses import dataclass

import torch

from megatron.compression.codecs.identity import IdentityCodec

FAILING_CALL = 20
"""The start encodes each codec once, to check it; a step of the tiny model encodes a few times."""

calls = 0


@dataclass(frozen=True)
class FailsLate(IdentityCodec):
    """Sends fp32 values, until rank 1 ends in the way that the variable FAILS_BY says."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Codec.encode``."""
        global calls
        calls += 1
        if calls == FAILING_CALL and os.environ.get("RANK") == "1":
            how = os.environ["FAILS_BY"]
            if how == "exception":
                raise RuntimeError("boom on rank 1")
            if how == "exit":
                sys.exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(x)
