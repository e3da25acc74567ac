"""TAGC over bitmap-sparse wires where the ranks choose different values."""

from types import SimpleNamespace

import torch

from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.tagc_parts import PackedPart, Sum, TagcSettings
from taco_kernels import bitmap_sparse
from taco_kernels.count_sketch import SketchConfig
from tests.kernels.test_bitmap_sparse import gradients


def test_a_union_without_room_keeps_the_largest() -> None:
    """Ranks that choose different values, as of embeddings of different tokens: the small ones wait."""
    ranks, numel = 4, 40_960
    topology = SimpleNamespace(world_size=ranks, local=ranks)
    settings = TagcSettings(0.2, frozenset({"embedding"}), "packed", SketchConfig())
    x = gradients(ranks, numel)
    for rank in range(ranks):
        x[rank].view(-1, ranks)[:, [other for other in range(ranks) if other != rank]] = 0.0
    wires, left = [], torch.zeros(numel)
    for row in x:
        feedback = ErrorFeedback()
        feedback.allocate(1, [(0, numel)], x.device)
        part = PackedPart([0], numel, settings, topology, feedback)
        part.take_notes(row[None].clone())
        wires.append(part.encode(None)[0])
        left += feedback.values()[0]
    before = feedback.values()[0]
    wire = part.add_up(torch.stack(wires), 0, Sum.OWN, Sum.ALL)
    left += feedback.values()[0] - before
    total = part.decode(wire[None], 0, Sum.ALL).values
    torch.testing.assert_close(total + left, x.sum(0), rtol=0, atol=1e-6)
    sent = total != 0
    union = bitmap_sparse.decode_sum(torch.stack(wires), part.layout)
    assert 0.59 < sent.float().mean() < 0.61 and (union != 0).float().mean() > 0.79
    waits = union[~sent & (union != 0)].abs()
    assert waits.max() <= union[sent].abs().min() * 1.01, "not those at the end"
