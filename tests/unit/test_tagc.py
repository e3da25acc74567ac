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


def test_it_begins_uncompressed() -> None:
    """For a fifth of the run, at most 1000 iterations; a number of one's own counts, 0 too."""
    config = DataParallelConfig(compression="tagc", weights="int8")

    def start(given: int | None, iterations: int | None, traffic: str = "dp.gradient") -> int:
        return config.rules(given, iterations)[traffic].start_iteration

    assert [start(None, n) for n in (None, 0, 400, 100_000)] == [0, 0, 80, 1000]
    assert [start(own, 400) for own in (0, 7)] == [0, 7]
    assert (start(None, 400, "dp.weight"), start(7, 400, "dp.weight")) == (0, 7), (
        "weights need none"
    )
    assert (
        DataParallelConfig(compression="int8").rules(None, 400)["dp.gradient"].start_iteration == 0
    )


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
def test_layers(name: str, shape: tuple[int, ...], chosen: set[str]) -> None:
    """Matrices by what their names say; ``all`` takes those too that belong to no kind."""
    span = ParameterSpan(name, torch.nn.Parameter(torch.zeros(shape)), 0, 4)
    for text in ("mlp", "mlp+attention", "all"):
        assert is_compressed(span, parse_layers(text)) == (text in chosen)


def test_a_union_without_room_keeps_the_largest() -> None:
    """Ranks that choose different values, as of embeddings of different tokens: the small ones wait."""
    ranks, numel = 4, 40_960
    topology = SimpleNamespace(world_size=ranks, local=ranks)
    x = gradients(ranks, numel)
    for rank in range(ranks):
        x[rank].view(-1, ranks)[:, [other for other in range(ranks) if other != rank]] = 0.0
    wires, left = [], torch.zeros(numel)
    for row in x:
        part = BitmapPart([0], numel, x.device, topology, keep=0.2, bits=16)
        part.add_memory(row[None].clone())
        wires.append(part.encode(None)[0])
        left += part.memory[0]
    before = part.memory[0].clone()
    wire = part.add_up(torch.stack(wires), 0, 1, ranks)
    left += part.memory[0] - before
    total = part.decode(wire[None], 0, ranks)
    torch.testing.assert_close(total + left, x.sum(0), rtol=0, atol=1e-6)
    sent = total != 0
    union = bitmap_sparse.decode_sum(torch.stack(wires), part.layout)
    assert 0.59 < sent.float().mean() < 0.61 and (union != 0).float().mean() > 0.79
    waits = union[~sent & (union != 0)].abs()
    assert waits.max() <= union[sent].abs().min() * 1.01, "not those at the end"


def test_a_sketch_larger_than_the_gradients_is_refused() -> None:
    topology = SimpleNamespace(world_size=16)
    bucket = SimpleNamespace(topology=topology, gradients=torch.zeros(1, dtype=torch.bfloat16))
    expected = r"^tagc:wire=sketch: sketches of 16 ranks have 21\.\d+ bits a value, a gradient 16; give wire"
    with pytest.raises(CompressionConfigError, match=expected):
        parse_gradient_compressor("tagc:wire=sketch").sketch(bucket)
