"""The transformer block of a ladder (Ladder-Residual, arXiv 2501.06589).

With blocks f_0 (attention), f_1 (MLP), f_2, ..., their norms n_i and the residual stream x_0 before them:

    x_(i+1) = x_i + f_i(n_i(x_(i-1)))        x_(-1) = x_0

f_i is a sum over the ranks. The next block does not read it, so it travels behind that whole block, in the
backward as in the forward. What the final norm reads has all sums.
"""

from megatron.compression.ladder.config import FLAG, LadderConfig
from megatron.compression.tensor_parallel.block import TurnsBlock, blocks_of


class LadderBlock(TurnsBlock):
    """A lane is the stream without the last sum, the other with it."""

    flag = FLAG
    own_residual = False
    check = LadderConfig(residual=True).check

    def _lanes(self, hidden_states):
        return hidden_states, hidden_states

    def _joined(self, lanes, batch):
        return lanes[1]

    def _blocks(self, layers, arguments, lanes, batch):
        return [
            block for layer in layers for block in blocks_of(layer, arguments, self._draws(layer, [batch], 1))
        ]
