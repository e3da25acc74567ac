"""Random numbers that both ends of a message agree on without telling each other."""

from collections import Counter

from taco_kernels import Stream

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


class MessageStreams:
    """Addresses of random numbers for the messages between pipeline stages.

    A message is named by the job's seed, the iteration, its direction, the stage that sends it, and how many
    it has sent that way in this iteration; the transport keeps the order, so sender and receiver count alike.
    Nothing is drawn and nothing has to be saved: a resumed run begins an iteration as the interrupted one
    did. Tensor-parallel ranks, whose stages hold replicas, share the numbers; data-parallel ones, whose
    rounding errors should average out, have their own.

    Args:
        seed: the job's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._iteration = -1
        self._counts: Counter = Counter()

    def next(self, iteration: int, backward: bool, sender: int, sent: bool, replica: int = 0) -> Stream:
        """Address for the next message of a direction.

        Args:
            iteration: all ranks are in it.
            backward: gradients, else activations.
            sender: pipeline rank that sends it.
            sent: by this rank (else it receives it).
            replica: data-parallel rank of both ends.
        """
        if iteration != self._iteration:
            self._iteration = iteration
            self._counts.clear()
        number = self._counts[backward, sent]
        self._counts[backward, sent] += 1
        key = (self.seed * _MIX[0] + iteration * _MIX[1] + replica * _MIX[2]) & _MASK
        return Stream(key, number << 32 | sender << 1 | backward)
