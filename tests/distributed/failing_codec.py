"""A codec that fails on rank 1 alone, in training.

    FAILS_BY=exception torchrun ... pretrain_gpt.py \\
        --tp-compression tests.distributed.failing_codec:FailsLate
"""

import os
import signal
import sys
from dataclasses import dataclass

import torch

from megatron.compression.codecs.identity import IdentityCodec

FAILING_CALL = 400
"""Number of the call that fails: many more than the start makes, which tries each codec, and fewer
than the run's steps make."""

calls = 0


@dataclass(frozen=True)
class FailsLate(IdentityCodec):
    """Sends fp32 values, until rank 1 fails: by exception, exit or signal, as FAILS_BY says."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Codec.encode``."""
        global calls
        calls += 1
        if calls == FAILING_CALL and os.environ.get("RANK") == "1":
            fault = os.environ["FAILS_BY"]
            if fault == "exception":
                raise RuntimeError("boom on rank 1")
            if fault == "exit":
                sys.exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(x)
