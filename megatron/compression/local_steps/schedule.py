"""Which fragment of the weights is exchanged when, by the number of iterations alone.

Rounds count iterations, not successful optimizer steps: an iteration that one data centre skips,
for a gradient that is not finite, would otherwise move its rounds against the others'.

With H local steps, P fragments and a delay of D iterations, fragment p is sent after the iterations
that are (p + 1) H / P modulo H, and applied D iterations later. For H = 6, P = 2, D = 1:

    iteration    1   2   3   4   5   6   7   8   9  10  11  12  13
    fragment 0           send apply          send apply
    fragment 1                       send apply              send apply
"""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When fragments are sent and applied.

    Args:
        steps: H, the local steps between two exchanges of the same fragment.
        fragments: P, the fragments of the weights, at most ``steps``.
        delay: D, the iterations from sending to applying, below ``steps``.
    """

    steps: int
    fragments: int = 1
    delay: int = 0

    def starting(self, iteration: int) -> list[int]:
        """Return the fragments that are sent after ``iteration`` iterations of the run."""
        if iteration < 1:
            return []
        phase = iteration % self.steps
        return [fragment for fragment in range(self.fragments) if self._phase_of(fragment) == phase]

    def ending(self, iteration: int) -> list[int]:
        """Return the fragments that are applied after ``iteration`` iterations of the run."""
        return self.starting(iteration - self.delay)

    def _phase_of(self, fragment: int) -> int:
        """Return the iteration within H after which a fragment is sent; 0 is the last one."""
        return (fragment + 1) * self.steps // self.fragments % self.steps


def fragment_bounds(values: int, fragments: int, tail: int = 0) -> list[tuple[int, int]]:
    """Return begin and end of each fragment of a vector: equal parts, as far as the tail allows.

    Args:
        values: length of the vector.
        fragments: number of fragments.
        tail: values at the end that stay together in the last fragment. They have copies on other
            pipeline stages, whose vectors are of other lengths.
    """
    if fragments == 1:
        return [(0, values)]
    # A fragment's part of the vector, or as much more as the tail is long.
    last_begin = min(values - values // fragments, values - tail)
    # The fragments before the last one share what is before it.
    before = fragments - 1
    cuts = [number * last_begin // before for number in range(fragments)]
    return [*itertools.pairwise(cuts), (last_begin, values)]
