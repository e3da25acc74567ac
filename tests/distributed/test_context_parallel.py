"""Attention under context parallelism: the function of one process, and codecs."""

import functools
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
VALUES = SEQUENCE * BATCH * GROUPS * 2 * WIDTH
"""Number of all ranks' keys and values."""


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
        values = [self.decode(payload, shape, torch.float64) for payload in payloads]
        return torch.stack(values).sum(0).to(dtype)


def build(ranks: int, kind, run: Run | None = None):
    """Build one rank's attention.

    Args:
        ranks: context-parallel size.
        kind: of the mask.
        run: compresses its messages; None leaves them to Megatron.
    """
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
        # Any enabled setting will do: the policy chooses the codec.
        enabled = ContextParallelConfig(compression="int8")
        ContextParallel(enabled, run, lambda line: None).attach([attention])
    return attention


def run_of(codec: Codec | None, transport: str) -> Run:
    """Return a run that compresses both directions with one codec."""
    ledger = Ledger()
    policy = Policy({name: Rule(codec) for name in ("cp.forward", "cp.backward")}, ledger)
    return Run(policy, ledger, transports=Transports(transport))


@dataclass
class Result:
    """Results of one attention on a rank."""

    tensors: list[torch.Tensor]
    """Output, and the gradients of query, key and value."""
    ledger: list[dict]
    distance: float = 0.0
    """The largest difference from the attention of one process."""


class Inputs:
    """Queries, keys, values and the output's gradient of the whole sequence, and masks.

    Args:
        rank: this rank.
        world_size: context-parallel size.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        from megatron.core.transformer.enums import AttnMaskType

        from megatron.compression.context_parallel.gather import chunks_of, distributed, in_order

        generator = torch.Generator().manual_seed(0)
        shapes = [(SEQUENCE, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
        shapes.append((SEQUENCE, BATCH, HEADS * WIDTH))
        device = device_of(rank)
        self.complete = []
        for shape in shapes:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.complete.append(tensor.to(device))
        gradient = self.complete[3]
        assert torch.equal(in_order(distributed(gradient, world_size), world_size), gradient)
        chunks = torch.arange(SEQUENCE).chunk(2 * world_size)
        self.rows = torch.cat([chunks[number] for number in chunks_of(rank, world_size)])
        """This rank's tokens: two chunks, as causal attention is balanced by."""
        documents = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
        documents = documents[None, None].repeat(BATCH, 1, 1, 1)
        documents[1, :, 20:, :20] = True  # a document ends after 20 tokens
        self.masks = {
            "causal": (AttnMaskType.causal, None),
            "documents": (AttnMaskType.causal, documents),
            "all": (AttnMaskType.no_mask, None),
        }

    def attend(self, attention, mask, dtype: torch.dtype, rows=slice(None)) -> list[torch.Tensor]:
        """Return an attention's output and its inputs' gradients.

        Args:
            attention: of one process, or of this rank.
            mask: of the whole sequence, or None.
            dtype: of the inputs.
            rows: tokens of the queries.
        """
        *inputs, upstream = (tensor[rows].to(dtype) for tensor in self.complete)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        output = attention(*inputs, None if mask is None else mask[:, :, rows])
        return [output, *torch.autograd.grad(output, inputs, upstream)]


MASKS = ("causal", "documents", "all")
CODECS = (None, "identity")
SPECS = (None, "lossless", "int8")


def attention_worker(rank: int, world_size: int, transport: str = "collective") -> dict:
    """Run attention without a codec and with codecs; the ledger has what c10d was given.

    Args:
        rank: this rank.
        world_size: context-parallel size.
        transport: of the payloads.

    Returns:
        "fp64": {(mask, codec): result}, and "bf16": {codec: result} of the causal mask.
    """
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()
    inputs = Inputs(rank, world_size)

    def result(codec: Codec | None, mask_name: str, dtype: torch.dtype) -> Result:
        kind, mask = inputs.masks[mask_name]
        run = run_of(codec, transport)
        attention = build(world_size, kind, run)
        with TransportAudit(world_size) as audit:
            tensors = inputs.attend(attention, mask, dtype, inputs.rows)
        if transport == "collective":
            assert total_of(run.ledger.rows()) == audit.sent
        return Result(tensors, run.ledger.rows())

    fp64 = {}
    for mask_name, (kind, mask) in inputs.masks.items():
        expected = inputs.attend(build(1, kind), mask, torch.float64)
        for codec in CODECS:
            actual = result(Identity64() if codec else None, mask_name, torch.float64)
            for tensor, complete in zip(actual.tensors, expected, strict=True):
                difference = float((tensor - complete[inputs.rows]).abs().max())
                actual.distance = max(actual.distance, difference)
            actual.tensors = []
            fp64[mask_name, codec] = actual
    bf16 = {}
    for spec in SPECS:
        actual = result(spec and parse_codec(spec), "causal", torch.bfloat16)
        actual.tensors = [tensor.detach().float().cpu() for tensor in actual.tensors]
        bf16[spec] = actual
    return {"fp64": fp64, "bf16": bf16}


@functools.cache
def results(world_size: int) -> list[dict]:
    """Return the results of ``attention_worker`` by rank."""
    return spawn(attention_worker, world_size)


def check_fp64(by_rank: list[dict], mask: str, codec: str | None) -> None:
    """Assert that ranks compute what one process does, and count every byte."""
    world_size = len(by_rank)
    sent = 8 * VALUES * (world_size - 1) // world_size
    for rank in by_rank:
        actual = rank["fp64"][mask, codec]
        assert actual.distance < 1e-12
        for traffic in ("cp.forward", "cp.backward"):
            rows = [row for row in actual.ledger if row["traffic"] == traffic]
            assert {row["kind"] for row in rows} == {"compressed" if codec else "off"}
            assert sum(row["sent_bytes"] for row in rows) == sent
            assert sum(row["plain_bytes"] for row in rows) == sent


def check_lossless(by_rank: list[dict]) -> None:
    """Assert that lossless payloads change no bit."""
    # Two addends have one sum; with three, gloo and NCCL round gradients in between.
    exact_tensors = 4 if len(by_rank) == 2 else 2
    for rank in by_rank:
        expected = rank["bf16"][None].tensors[:exact_tensors]
        actual = rank["bf16"]["lossless"].tensors[:exact_tensors]
        assert all(map(torch.equal, actual, expected))


def check_int8(by_rank: list[dict]) -> None:
    """Assert that int8 changes output and gradients, and only a little."""
    for rank in by_rank:
        expected = rank["bf16"][None].tensors
        actual = rank["bf16"]["int8"].tensors
        for exact, coarse in zip(expected, actual, strict=True):
            assert 0 < (coarse - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compute_what_one_process_does(world_size: int, mask: str, codec) -> None:
    """They do in fp64 to 1e-12, without a codec and through the identity codec."""
    check_fp64(results(world_size), mask, codec)


@pytest.mark.parametrize("world_size", [2, 3])
def test_lossless_changes_no_bit(world_size: int) -> None:
    check_lossless(results(world_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_int8_changes_little(world_size: int) -> None:
    check_int8(results(world_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_int8_sends_fewer_bytes(world_size: int) -> None:
    for rank in results(world_size):
        ledger = rank["bf16"]["int8"].ledger
        sent = sum(row["sent_bytes"] for row in ledger)
        assert sent < 0.6 * sum(row["plain_bytes"] for row in ledger)
