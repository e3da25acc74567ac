"""Attention under context parallelism against the same attention on one process, and over codecs."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.communication import Ledger, Policy, Rule, Run, Transports
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import device_of, transformer_config
from tests.distributed.transport_audit import TransportAudit, total_of

SEQUENCE = 48
BATCH = 2
HEADS = 4
GROUPS = 2
WIDTH = 8
VALUES = SEQUENCE * BATCH * GROUPS * 2 * WIDTH  # of all ranks' keys and values


@dataclass(frozen=True)
class Identity64(IdentityCodec):
    """The identity in fp64, sums included."""

    def payload_bytes(self, shape) -> int:
        return 8 * math.prod(shape)

    def encode(self, x):
        return x.double().reshape(len(x), -1).contiguous().view(torch.uint8)

    def decode(self, payloads, shape, dtype, out=None):
        return payloads.contiguous().view(torch.float64).reshape(len(payloads), *shape).to(dtype)

    def decode_sum(self, payloads, shape, dtype, scale=1.0, out=None):
        return (
            torch.stack([self.decode(one, shape, torch.float64) for one in payloads])
            .sum(0)
            .to(dtype)
        )


def build(ranks: int, kind, run: Run | None = None):
    """An attention of one rank, or of one among ``ranks`` with ``run``'s compression."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron.compression.context_parallel.config import ContextParallelConfig
    from megatron.compression.context_parallel.hooks import ContextParallel
    from megatron.compression.torch_native.attention import SDPACoreAttention

    class Collection:
        cp = dist.group.WORLD

    sizes = dict(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS)
    config = transformer_config(
        1,
        **sizes,
        context_parallel_size=ranks,
        attention_backend=AttnBackend.unfused,  # others sum gradients in any order on GPUs
    )
    attention = SDPACoreAttention(config, 1, kind, "self", pg_collection=Collection)
    if run is not None:
        # Any enabled setting: which codec encodes is the policy's.
        enabled = ContextParallelConfig(compression="int8")
        ContextParallel(enabled, run, lambda line: None).attach([attention])
    return attention


def run_of(codec: Codec | None, transport: str) -> Run:
    """A run that compresses both directions with one codec."""
    ledger = Ledger()
    policy = Policy({name: Rule(codec) for name in ("cp.forward", "cp.backward")}, ledger)
    return Run(policy, ledger, transports=Transports(transport))


def attention_worker(rank: int, world_size: int, transport: str = "collective") -> dict:
    """For each mask and each of fp64's codecs the largest difference from one process; in bf16 the bits of
    each codec; ledgers and what torch.distributed was given."""
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.compression.context_parallel.gather import chunks_of, distributed, in_order

    generator = torch.Generator().manual_seed(0)
    shapes = [(SEQUENCE, BATCH, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    shapes.append((SEQUENCE, BATCH, HEADS * WIDTH))
    device = device_of(rank)
    complete = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes
    ]
    assert torch.equal(in_order(distributed(complete[3], world_size), world_size), complete[3])
    rows = torch.cat(
        [
            torch.arange(SEQUENCE).chunk(2 * world_size)[number]
            for number in chunks_of(rank, world_size)
        ]
    )
    documents = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)[None, None]
    documents = documents.repeat(BATCH, 1, 1, 1)
    documents[1, :, 20:, :20] = True  # a document ends there
    causal = AttnMaskType.causal

    def results(attention, mask, dtype, rows=slice(None)) -> list[torch.Tensor]:
        *inputs, upstream = (tensor[rows].to(dtype) for tensor in complete)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        output = attention(*inputs, None if mask is None else mask[:, :, rows])
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    def own(codec: Codec | None, kind, mask, dtype) -> tuple[list[torch.Tensor], list[dict]]:
        run = run_of(codec, transport)
        attention = build(world_size, kind, run)
        with TransportAudit(world_size) as audit:
            actual = results(attention, mask, dtype, rows)
        assert transport != "collective" or total_of(run.ledger.rows()) == audit.sent
        return actual, run.ledger.rows()

    exact = {}
    for name, kind, mask in (
        ("causal", causal, None),
        ("documents", causal, documents),
        ("all", AttnMaskType.no_mask, None),
    ):
        expected = results(build(1, kind), mask, torch.float64)
        for codec in (None, Identity64()):
            got, ledger = own(codec, kind, mask, torch.float64)
            apart = max(
                float((a - b[rows]).abs().max()) for a, b in zip(got, expected, strict=True)
            )
            exact[name, codec is None] = apart, ledger
    bits = {
        spec: own(spec and parse_codec(spec), causal, None, torch.bfloat16)
        for spec in (None, "lossless", "int8")
    }
    return {
        "exact": exact,
        "bits": {
            spec: ([one.detach().float().cpu() for one in actual], ledger)
            for spec, (actual, ledger) in bits.items()
        },
    }


def check_ranks(by_rank: list[dict]) -> None:
    """What every rank of ``attention_worker`` returned; payloads may have travelled in any way."""
    world_size = len(by_rank)
    for actual in by_rank:
        assert len(actual["exact"]) == 6
        for (_, plain), (apart, ledger) in actual["exact"].items():
            assert apart < 1e-12
            for traffic in ("cp.forward", "cp.backward"):
                rows = [row for row in ledger if row["traffic"] == traffic]
                assert {row["kind"] for row in rows} == {"off" if plain else "compressed"}
                for column in ("sent_bytes", "plain_bytes"):
                    assert (
                        sum(row[column] for row in rows)
                        == 8 * VALUES * (world_size - 1) // world_size
                    )
        (none, _), (lossless, _), (int8, _) = actual["bits"].values()
        # Two addends have one sum; of three, gloo and NCCL round in between.
        same = slice(None) if world_size == 2 else slice(2)
        assert all(map(torch.equal, none[same], lossless[same]))
        for exact, coarse in zip(none, int8, strict=True):
            assert 0 < (coarse - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_what_one_process_does(world_size: int) -> None:
    """In fp64 to 1e-12, through the identity codec too; in bf16 with lossless bit for bit, with int8 nearly.
    Every byte is in the ledger."""
    by_rank = spawn(attention_worker, world_size)
    check_ranks(by_rank)
    for actual in by_rank:
        _, ledger = actual["bits"]["int8"]
        sent, plain = (sum(row[name] for row in ledger) for name in ("sent_bytes", "plain_bytes"))
        assert sent < 0.6 * plain
