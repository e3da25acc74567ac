"""Random state: the CPU's default generator plays the part of the device's generator."""

import contextlib

import torch

from megatron.compression.patches import put


def _get_state(*_args, **_kwargs) -> torch.Tensor:
    """For torch.cuda.get_rng_state and megatron's _get_cuda_rng_state: a uint8 copy of the state."""
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, *_args, **_kwargs) -> None:
    """For torch.cuda.set_rng_state and megatron's _set_cuda_rng_state."""
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    """For torch.cuda.manual_seed. (torch.manual_seed itself calls manual_seed_all, which stays as it is.)"""
    torch.default_generator.manual_seed(int(seed))


@contextlib.contextmanager
def _fork(self, name: str = "model-parallel-rng"):
    """For CudaRNGStatesTracker.fork: draw from the named state inside, restore the outer state after.

    Megatron's own warns when the CPU state moves inside, which is the purpose here. Nested forks keep the
    outer name's state up to date, as Megatron's do. Raises: KeyError if `name` was never added.
    """
    if name not in self.states_:
        raise KeyError(f"rng state {name!r} was never added to the tracker")
    outer_name, outer_state = self._current_state_name, _get_state()
    if outer_name != "default-rng":
        self.states_[outer_name] = outer_state
    _set_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = _get_state()
        _set_state(self.states_[outer_name] if outer_name != "default-rng" else outer_state)
        self._current_state_name = outer_name


def install() -> None:
    """Replace torch.cuda's random-state functions. Megatron's tracker follows in engine.install()."""
    why = "the CPU's generator is the device's"
    for module in (torch.cuda, torch.cuda.random):
        put(module, "get_rng_state", _get_state, why)
        put(module, "set_rng_state", _set_state, why)
        put(module, "manual_seed", _manual_seed, why)


def install_tracker(random_module) -> None:
    """Replace the tracker's state access in `megatron.core.tensor_parallel.random`."""
    why = "the tracker keeps the CPU generator's states"
    put(random_module, "_get_cuda_rng_state", _get_state, why)
    put(random_module, "_set_cuda_rng_state", _set_state, why)
    put(random_module.CudaRNGStatesTracker, "fork", _fork, why)
