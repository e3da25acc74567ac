"""Seeds for random rounding that all tensor-parallel ranks, a recomputation and a resumed run agree on."""

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name

from megatron.compression.keys import mixed_key


def draw_key() -> int:
    """A 64-bit seed for one collective.

    It comes from the ``data-parallel-rng`` state of Megatron's tracker: seeded alike on all tensor-parallel
    ranks, restored for a recomputed forward, saved in checkpoints, and used by no dense layer. torch's CPU
    generator would not do: only tensor-parallel rank 0 reads data, and its data loader draws from it. Runs on
    the host alone.
    """
    tracker, name = get_cuda_rng_tracker(), get_data_parallel_rng_tracker_name()
    state = tracker.states_[name]
    if state.numel() > 16:  # a CPU generator's state: megatron.host
        generator = torch.Generator()
        generator.set_state(state)
        key = int(torch.randint(2**62, (), generator=generator))
    else:  # a CUDA generator's: Philox seed and offset, so nothing needs to run on the device
        generator = torch.Generator("cuda")
        generator.set_state(state)
        offset = generator.get_offset()
        key = mixed_key(generator.initial_seed(), offset)
        generator.set_offset(offset + 4)
    # A new tensor: a checkpointed region may hold the old one, to restore it.
    tracker.states_[name] = generator.get_state()
    return key


class KeysOfTraining:
    """Gives training its keys back behind an evaluation, which draws some or, uncompressed, none.

    So how often and how a run validates does not change what it trains.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None

    def keep(self) -> None:
        """Call it before an evaluation."""
        self._state = get_cuda_rng_tracker().states_[get_data_parallel_rng_tracker_name()]

    def restore(self) -> None:
        """Call it behind the evaluation."""
        get_cuda_rng_tracker().states_[get_data_parallel_rng_tracker_name()] = self._state
