"""Attention under context parallelism against the same attention on one process, in fp64."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn

SEQUENCE, BATCH, HEADS, GROUPS, WIDTH = 48, 2, 4, 2, 8


def attention_worker(rank: int, world_size: int) -> dict[str, tuple[float, list]]:
    """For each kind of mask: the largest difference of output and gradients, and the collectives counted."""

    from megatron.compression import preflight

    preflight.prepare()
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.compression.torch_native import SDPACoreAttention
    from megatron.compression.torch_native.context_parallel import chunks_of, dealt, in_order

    class Collection:
        cp = dist.group.WORLD

    def config(ranks: int) -> TransformerConfig:
        sizes = dict(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS)
        return TransformerConfig(
            num_layers=1,
            **sizes,
            context_parallel_size=ranks,
            attention_dropout=0.0,
            use_cpu_initialization=True,
        )

    generator = torch.Generator().manual_seed(0)
    shapes = [(SEQUENCE, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn(SEQUENCE, BATCH, HEADS * WIDTH, generator=generator, dtype=torch.float64)
    assert torch.equal(in_order(dealt(upstream, world_size), world_size), upstream)
    rows = torch.cat(
        [torch.arange(SEQUENCE).chunk(2 * world_size)[number] for number in chunks_of(rank, world_size)]
    )
    documents = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None].repeat(BATCH, 1, 1, 1)
    documents[1, :, 20:, :20] = True  # a document ends there
    found = {}
    for name, kind, mask in (
        ("causal", AttnMaskType.causal, None),
        ("documents", AttnMaskType.causal, documents),
        ("all", AttnMaskType.no_mask, None),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in whole]
        serial = SDPACoreAttention(config(1), 1, kind, "self")(*inputs, mask)
        expected = [serial, *torch.autograd.grad(serial, inputs, upstream)]

        parts = [tensor[rows].clone().requires_grad_() for tensor in whole]
        attention, counted = (
            SDPACoreAttention(config(world_size), 1, kind, "self", pg_collection=Collection),
            [],
        )
        attention.on_exchange = lambda *call, counted=counted: counted.append(call)
        output = attention(*parts, None if mask is None else mask[:, :, rows])
        got = [output, *torch.autograd.grad(output, parts, upstream[rows])]
        apart = max(float((a - b[rows]).abs().max()) for a, b in zip(got, expected, strict=True))
        found[name] = apart, counted
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_what_one_process_does(world_size: int) -> None:
    buffer = SEQUENCE * BATCH * GROUPS * 2 * WIDTH * 8
    for found in spawn(attention_worker, world_size):
        assert set(found) == {"causal", "documents", "all"}
        for apart, counted in found.values():
            assert apart < 1e-12
            assert counted == [
                ("cp.forward", "all_gather", buffer, world_size),
                ("cp.backward", "reduce_scatter", buffer, world_size),
            ]
