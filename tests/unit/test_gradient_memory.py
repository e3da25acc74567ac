"""Memories of gradient compressors in checkpoints: restored at their layout, else dropped."""

from types import SimpleNamespace

import pytest
import torch

from megatron.compression.data_parallel.checkpoint import KEY, GradientMemory
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.data_parallel.config import check_memory
from megatron.compression.errors import CompressionConfigError
from tests.unit.one_rank import config, one_rank  # noqa: F401


class Remembering(GradientSync):
    """Remembers two tensors of one parameter."""

    def __init__(self, numel: int) -> None:
        self.values = {"memory": torch.zeros(numel), "other": torch.zeros(2, dtype=torch.bfloat16)}

    def start(self):
        """Nothing is summed here."""

    def state(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state


def memory_of(
    spec: str | None, log: list[str], numel: int = 8, nodes: int = 1, sharded: bool = True
) -> GradientMemory:
    """Return the memory of a run with one bucket.

    Args:
        spec: the compressor's; None: a run without one.
        log: takes the lines of its log.
        numel: values of the bucket's one parameter.
        nodes: of the data-parallel ranks.
        sharded: with the distributed optimizer.
    """
    topology = SimpleNamespace(nodes=nodes, local=1)
    span = ParameterSpan("weight", torch.nn.Parameter(torch.zeros(numel)), 0, numel)
    bucket = GradientBucket(torch.zeros(numel), (span,), 1.0, sharded, topology, None)
    return GradientMemory(spec, [(Remembering(numel), bucket)], log.append)


def tensors(memory: GradientMemory) -> list[torch.Tensor]:
    """Return what compressors remember: of the one bucket, or nothing without a compressor."""
    return [values for sync, _ in memory._syncs for values in sync.values.values()]


def saved_state(spec: str | None, **layout: int) -> dict:
    """Return what a run puts into a checkpoint; it remembers ones and twos.

    Args:
        spec: the compressor's.
        layout: arguments of ``memory_of``.
    """
    memory = memory_of(spec, [], **layout)
    for number, values in enumerate(tensors(memory), start=1):
        values.fill_(number)
    state: dict = {}
    memory.add_to(state, False)
    return state


def resume(memory: GradientMemory, saved: dict) -> None:
    """Read a checkpoint as Megatron does: plain values, then the tensors that are asked for."""
    memory.loaded({name: value for name, value in saved.items() if name != KEY})
    requested: dict = {}
    memory.add_to(requested, True)
    tensors = {}
    for name in requested.get(KEY, {}):
        tensors[name] = saved[KEY][name].data.clone()
    memory.loaded({KEY: tensors})


def test_the_same_layout_restores_every_tensor() -> None:
    log: list[str] = []
    memory = memory_of("tagc", log)
    resume(memory, saved_state("tagc"))
    assert [values.unique().tolist() for values in tensors(memory)] == [[1.0], [2.0]]
    assert log == ["data-parallel compression: tagc: every rank restored its memory"]


@pytest.mark.parametrize(
    ("spec", "saved", "layout", "line"),
    [
        (
            "tagc",
            "tagc",
            {"numel": 9},
            "ranks, nodes, buckets or parameters: the memory of tagc starts",
        ),
        ("tagc", "tagc", {"nodes": 2}, "ranks, nodes, buckets or parameters: the memory of tagc"),
        ("tagc", "tagc", {"sharded": False}, "ranks, nodes, buckets or parameters: the memory of"),
        (
            "tagc",
            "tagc:bits=8",
            {},
            "tagc:bits=8 saved its memory: the memory of tagc starts from zero",
        ),
        ("tagc", None, {}, "holds no memory of gradients: the memory of tagc starts from zero"),
        (None, "tagc", {}, "the memory that tagc saved is dropped"),
    ],
)
def test_another_layout_or_compressor_starts_from_zero(spec, saved, layout, line) -> None:
    log: list[str] = []
    memory = memory_of(spec, log)
    resume(memory, saved_state(saved, **layout))
    assert not any(values.any() for values in tensors(memory))
    (only_line,) = log
    assert line in only_line


def test_without_a_compressor_before_and_after_nothing_is_logged() -> None:
    log: list[str] = []
    memory = memory_of(None, log)
    resume(memory, saved_state(None))
    assert not any(values.any() for values in tensors(memory))
    assert not log


TAGC = SimpleNamespace(has_memory=True, name="tagc")


def test_an_own_loop_is_refused_a_loss_by_the_token() -> None:
    """The model's config says so, where there are no flags."""
    message = r"--calculate-per-token-loss divides .* tagc adds"
    with pytest.raises(CompressionConfigError, match=message):
        check_memory(TAGC, config(calculate_per_token_loss=True))


def test_another_loss_is_accepted() -> None:
    check_memory(TAGC, config())


def test_a_compressor_without_memory_accepts_any_loss() -> None:
    check_memory(SimpleNamespace(has_memory=False), config(calculate_per_token_loss=True))
