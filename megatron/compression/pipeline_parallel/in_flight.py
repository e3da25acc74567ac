"""Payloads on their way to another stage, for which nobody has to wait yet."""

from collections import deque

from megatron.compression.communication import Work


class SendsInFlight:
    """A bounded queue of sends, each with the payload that the transport may still read.

    A schedule waits for a send in order to free the tensor that it sends. A payload is a buffer of its own:
    kept here, it lets the computation go on (on NCCL the current stream, over gloo the host). The oldest send
    is waited for when there are too many, so that a slow link bounds the memory.

    Args:
        limit: sends that may be under way; four payloads of 4 to 6 bits are little more than one message.
    """

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._sends: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, send: Work) -> None:
        """Take in a send that has just been started, which holds its payload until it has been waited for."""
        self._sends.append(send)
        while len(self._sends) > self.limit:
            self._sends.popleft().wait()

    def flush(self) -> None:
        """Wait for all of them, in order."""
        while self._sends:
            self._sends.popleft().wait()
