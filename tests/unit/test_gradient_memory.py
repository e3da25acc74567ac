"""Memories of gradient compressors in checkpoints: restored at their own layout, else started from zero."""

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


def _memory(spec: str | None, log: list[str], numel: int = 8, nodes: int = 1) -> GradientMemory:
    topology = SimpleNamespace(nodes=nodes, local=1)
    span = ParameterSpan("weight", torch.nn.Parameter(torch.zeros(numel)), 0, numel)
    bucket = GradientBucket(torch.zeros(numel), (span,), 1.0, True, topology, None)
    return GradientMemory(spec, [(Remembering(numel), bucket)], log.append)


def _resume(memory: GradientMemory, saved: dict) -> None:
    """As a checkpoint is read: plain values first, then what was asked for."""
    memory.loaded({name: value for name, value in saved.items() if name != KEY})
    wanted: dict = {}
    memory.add_to(wanted, True)
    memory.loaded({KEY: {name: saved[KEY][name].data.clone() for name in wanted.get(KEY, {})}})


def _saved(spec: str | None, **layout: int) -> dict:
    memory, state = _memory(spec, [], **layout), {}
    for sync, _ in memory._syncs:
        for number, values in enumerate(sync.values.values(), 1):
            values.fill_(number)
    memory.add_to(state, False)
    return state


def test_the_same_layout_restores_every_tensor() -> None:
    log: list[str] = []
    memory = _memory("tagc", log)
    _resume(memory, _saved("tagc"))
    ((sync, _),) = memory._syncs
    assert [values.unique().tolist() for values in sync.values.values()] == [[1.0], [2.0]]
    assert log == ["data-parallel compression: tagc: every rank restored its memory"]


@pytest.mark.parametrize(
    ("spec", "saved", "layout", "said"),
    [
        (
            "tagc",
            "tagc",
            {"numel": 9},
            "ranks, nodes, buckets or parameters: the memory of tagc starts",
        ),
        ("tagc", "tagc", {"nodes": 2}, "ranks, nodes, buckets or parameters: the memory of tagc"),
        (
            "tagc",
            "tagc:bits=8",
            {},
            "tagc:bits=8 saved its memory: the memory of tagc starts from zero",
        ),
        ("tagc", None, {}, "holds no memory of gradients: the memory of tagc starts from zero"),
        (None, "tagc", {}, "the memory that tagc saved is dropped"),
        (None, None, {}, None),
    ],
)
def test_another_layout_starts_from_zero(spec, saved, layout, said) -> None:
    log: list[str] = []
    memory = _memory(spec, log)
    _resume(memory, _saved(saved, **layout))
    assert not any(values.any() for sync, _ in memory._syncs for values in sync.values.values())
    assert len(log) == (said is not None) and (said is None or said in log[0])


def test_an_own_loop_is_refused_a_loss_by_the_token() -> None:
    """By the model's config: there are no flags."""
    model, compressor = (
        config(calculate_per_token_loss=True),
        SimpleNamespace(has_memory=True, name="tagc"),
    )
    with pytest.raises(
        CompressionConfigError, match=r"--calculate-per-token-loss divides .* tagc adds"
    ):
        check_memory(compressor, model)
    check_memory(compressor, config())
    check_memory(SimpleNamespace(has_memory=False), model)
