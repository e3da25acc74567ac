"""Random numbers that both ends of a message agree on without telling each other."""

from collections import Counter

from megatron.compression.keys import mixed_key
from taco_kernels import Stream


class MessageStreams:
    """Addresses of random numbers for the messages between pipeline stages.

    A message is named by the job's seed, the iteration, its direction, the stage that sends it, and how many
    it has sent that way in this forward-backward pass; the transport keeps the order, so sender and receiver
    count alike. Nothing is drawn and nothing has to be saved: a resumed run begins an iteration as the
    interrupted one did, and a pass that Megatron repeats rounds as it did the first time. Tensor-parallel
    ranks, whose stages hold replicas, share the numbers; data-parallel ones, whose rounding errors should
    average out, have their own.

    Args:
        seed: the job's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._counts: Counter = Counter()

    def restart(self) -> None:
        """Count anew: call it on every rank before each forward-backward pass of training."""
        self._counts.clear()

    def next(self, iteration: int, backward: bool, sender: int, sent: bool, replica: int = 0) -> Stream:
        """Address for the next message of a direction.

        Args:
            iteration: all ranks are in it.
            backward: gradients, else activations.
            sender: pipeline rank that sends it.
            sent: by this rank (else it receives it).
            replica: data-parallel rank of both ends.
        """
        number = self._counts[backward, sent]
        self._counts[backward, sent] += 1
        return Stream(mixed_key(self.seed, iteration, replica), number << 32 | sender << 1 | backward)
