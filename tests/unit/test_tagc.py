"""TAGC's settings, its choice of layers, and its packed sums."""

from types import SimpleNamespace

import pytest
import torch

from megatron.compression.data_parallel.codec_gradients import parse_gradient_compressor
from megatron.compression.data_parallel.compressor import ParameterSpan
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tagc.parts import BitmapPart, is_compressed, parse_layers
from taco_kernels import bitmap_sparse
from tests.kernels.test_bitmap_sparse import gradients


def first_compressed(config: DataParallelConfig, start, iterations, traffic="dp.gradient") -> int:
    """Return the iteration from which on a traffic class is compressed.

    Args:
        config: settings of data parallelism.
        start: --compression-start-iteration, None without it.
        iterations: how many the run has, None where that is unknown.
        traffic: the traffic class.
    """
    return config.rules(start, iterations)[traffic].start_iteration


TAGC = DataParallelConfig(compression="tagc", weights="int8")


@pytest.mark.parametrize(("iterations", "start"), [(None, 0), (0, 0), (400, 80), (100_000, 1000)])
def test_a_fifth_of_the_run_but_at_most_1000_iterations_are_uncompressed(iterations, start):
    assert first_compressed(TAGC, None, iterations) == start


@pytest.mark.parametrize("start", [0, 7])
def test_a_start_that_is_set_counts(start: int) -> None:
    assert first_compressed(TAGC, start, 400) == start


def test_weights_are_compressed_from_the_start() -> None:
    assert first_compressed(TAGC, None, 400, "dp.weight") == 0


def test_a_start_that_is_set_counts_for_weights_too() -> None:
    assert first_compressed(TAGC, 7, 400, "dp.weight") == 7


def test_other_codecs_begin_at_once() -> None:
    assert first_compressed(DataParallelConfig(compression="int8"), None, 400) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("sparsity=0.3", r"sparsity=0.3 must lie in \[0.5, 0.98\]"),
        ("wire=bits", "wire=bits must be packed or sketch"),
        ("wire=sketch,bits=8", "bits=8 must be 16, 32 with wire=sketch"),
        ("layers=mlp+norm", r"layers=mlp\+norm: 'norm' is unknown"),
        ("gruop=4", "no setting 'gruop'; choose among sparsity"),
    ],
)
def test_impossible_settings(settings: str, message: str) -> None:
    with pytest.raises(CompressionConfigError, match=message):
        parse_gradient_compressor(f"tagc:{settings}")


@pytest.mark.parametrize(
    ("name", "shape", "chosen"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 4), {"mlp", "mlp+attention", "all"}),
        (
            "chunk1.decoder.layers.0.self_attention.linear_qkv.weight",
            (4, 4),
            {"mlp+attention", "all"},
        ),
        ("embedding.word_embeddings.weight", (4, 4), {"all"}),
        ("mtp.layers.0.eh_proj.weight", (4, 4), {"all"}),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4,), set()),
    ],
)
def test_layers_are_chosen_by_the_names_of_their_matrices(name, shape, chosen) -> None:
    """``all`` takes matrices of no kind, too; a bias is never compressed."""
    span = ParameterSpan(name, torch.nn.Parameter(torch.zeros(shape)), 0, 4)
    for layers in ("mlp", "mlp+attention", "all"):
        assert is_compressed(span, parse_layers(layers)) == (layers in chosen)


RANKS = 4
NUMEL = 40_960


@pytest.fixture(scope="module")
def summed() -> SimpleNamespace:
    """The exact and the decoded sum, what memories hold, and the union of what ranks send."""
    topology = SimpleNamespace(world_size=RANKS, local=RANKS)
    x = gradients(RANKS, NUMEL)
    for rank in range(RANKS):
        is_foreign = torch.arange(RANKS) != rank
        x[rank].view(-1, RANKS)[:, is_foreign] = 0.0
    wires = []
    remembered = torch.zeros(NUMEL)
    for row in x:
        part = BitmapPart([0], NUMEL, x.device, topology, keep=0.2, bits=16)
        part.add_memory(row[None].clone())
        wires.append(part.encode(None)[0])
        remembered += part.memory[0]
    # The last rank adds up; what finds no room stays in its memory.
    before = part.memory[0].clone()
    wire = part.add_up(torch.stack(wires), 0, 1, RANKS)
    remembered += part.memory[0] - before
    return SimpleNamespace(
        exact=x.sum(0),
        total=part.decode(wire[None], 0, RANKS),
        remembered=remembered,
        union=bitmap_sparse.decode_sum(torch.stack(wires), part.layout),
    )


class TestUnionWithoutRoom:
    """A sum of four ranks' values that have no index in common, as of embeddings of other tokens.

    Each rank sends a fifth of its values; a sum has room for fewer than their union.
    """

    def test_nothing_is_lost(self, summed) -> None:
        """The sum and all memories together are the sum of the gradients."""
        torch.testing.assert_close(
            summed.total + summed.remembered, summed.exact, rtol=0, atol=1e-6
        )

    def test_the_union_has_more_values_than_are_sent(self, summed) -> None:
        assert 0.59 < (summed.total != 0).float().mean() < 0.61
        assert (summed.union != 0).float().mean() > 0.79

    def test_the_smallest_values_wait(self, summed) -> None:
        """A value that waits is at most as large as those that are sent, up to rounding."""
        is_sent = summed.total != 0
        waiting = summed.union[~is_sent & (summed.union != 0)].abs()
        assert waiting.max() <= summed.union[is_sent].abs().min() * 1.01, "those at the end wait"


def test_a_sketch_larger_than_the_gradients_is_refused() -> None:
    topology = SimpleNamespace(world_size=16)
    bucket = SimpleNamespace(topology=topology, gradients=torch.zeros(1, dtype=torch.bfloat16))
    message = r"^tagc:wire=sketch: sketches of 16 ranks have 21\.\d+ bits a value, a gradient 16; "
    with pytest.raises(CompressionConfigError, match=message + "give wire"):
        parse_gradient_compressor("tagc:wire=sketch").sketch(bucket)
