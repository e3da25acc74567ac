"""CAAT-Net sends the shared channels' bytes and no others; replicas agree; text is generated as trained."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from tests.distributed.caat_net_setup import BATCH, caat_run, fill_parameters
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    batch,
    build_tiny_gpt,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

NEW_TOKENS = 5
FP8, INT8 = "taco", "int8:scales=single"
TRAFFIC_CASES = [(1.0, "none"), (0.5, "none"), (0.25, "none"), (0.5, FP8), (0.5, INT8)]


def traffic_worker(rank: int, world_size: int) -> list[dict]:
    """``train_twice`` for each case, over what the audit sees: what c10d is given."""
    start_model_parallel(world_size)
    return [train_twice(rank, world_size, *case, transport="collective") for case in TRAFFIC_CASES]


def train_twice(
    rank: int, world_size: int, fraction: float, codec: str, size: int = BATCH, transport: str = "auto"
) -> dict:
    """Two bf16 training iterations on ``size`` sequences, with the bytes that c10d was given.

    Returns:
        Bytes by operation, the ledger's rows, losses, and what the rank holds: replicated parameters, the
        stream's channels behind the last layer.
    """
    from megatron.compression.caat_net.gradients import sum_rank_local_gradients

    run = caat_run(fraction, codec, transport=transport)
    model = build_tiny_gpt(rank, world_size, run, torch.bfloat16)
    streams: list[torch.Tensor] = []
    model.decoder.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with TransportAudit(world_size) as audit:
        for _ in range(2):
            loss = model(**batch(0, rank, size)).float().mean()
            loss.backward()
            sum_rank_local_gradients([model], model.pg_collection.tp, run.ledger)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    shared = int(HIDDEN * fraction)
    last = streams[-1].detach().float().cpu()
    return {
        "audit": audit.sent,
        "rows": run.ledger.rows(),
        "losses": losses,
        "replicated": {
            name: p.detach().float().cpu()
            for name, p in model.named_parameters()
            if not getattr(p, "tensor_model_parallel", False)
        },
        "shared": last[..., :shared],
        "private": last[..., shared:],
    }


def sent_in(rows: list[dict], *channels: str) -> int:
    return sum(row["sent_bytes"] for row in rows if row["traffic"] in channels)


def check_traffic(by_rank: list[list[dict]]) -> None:
    """The hand count of the bytes, that c10d was given just these, and what ranks still have in common."""
    iterations, world_size, cases = 2, len(by_rank), TRAFFIC_CASES
    results = list(zip(*by_rank, strict=True))
    full = iterations * SEQUENCE * BATCH * HIDDEN * 2 * 2 * (world_size - 1) // world_size  # an all-reduce
    embeddings = full  # each way: their output forward, the gradient of the streams' copies backward
    layers = 2 * LAYERS * full

    def encoded(fraction: float, spec: str) -> int:
        """Bytes of a compressed all-reduce: all-to-all and all-gather of W padded pieces."""
        config = parse_codec(spec).config
        values = config.chunk_numel(int(SEQUENCE * BATCH * HIDDEN * fraction), world_size)
        return 2 * (world_size - 1) * config.wire_bytes(values)

    expected = {  # messages: a layer's two and the embeddings', in each direction
        0: layers + embeddings,
        1: 0.5 * layers + embeddings,
        2: 0.25 * layers + embeddings,
        3: iterations * (2 * LAYERS * encoded(0.5, FP8) + encoded(1.0, FP8)),
        4: iterations * (2 * LAYERS * encoded(0.5, INT8) + encoded(1.0, INT8)),
    }
    for case, ranks in enumerate(results):
        for result in ranks:
            assert total_of(result["rows"]) == result["audit"], cases[case]
            for channel in ("tp.forward", "tp.backward"):
                assert sent_in(result["rows"], channel) == expected[case], (cases[case], channel)
            assert result["losses"][1] < result["losses"][0]
        first, *others = ranks
        for other in others:
            assert first["losses"] == other["losses"]
            for name, value in first["replicated"].items():
                assert torch.equal(value, other["replicated"][name]), (cases[case], name)
            assert torch.equal(first["shared"], other["shared"])
            assert first["private"].numel() == 0 or not torch.equal(first["private"], other["private"])


def two_ranks_worker(rank: int, world_size: int) -> dict:
    """Everything that two ranks do here, in one process each."""
    return {
        "traffic": traffic_worker(rank, world_size),
        "generation": _generate(rank, world_size),
        "evaluation": _evaluate(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """Each rank's results."""
    return spawn(two_ranks_worker, 2)


def test_traffic_and_replicas(two_ranks) -> None:
    """See ``check_traffic``."""
    check_traffic([rank["traffic"] for rank in two_ranks])


def _generate(rank: int, world_size: int) -> dict:
    """Greedy tokens twice, and each step's logits beside those of a training forward of the whole text."""
    from megatron.compression.generation import generate_greedily, next_token_logits

    run = caat_run(0.5)
    run.ledger.evaluating = True
    model = build_tiny_gpt(rank, world_size, run)
    fill_parameters(model, rank)
    group, prompt = model.pg_collection.tp, [3, 1, 4]
    with TransportAudit(world_size) as audit:
        tokens = generate_greedily(model, prompt, NEW_TOKENS, VOCABULARY, group, run.ledger)
    rows = run.ledger.rows()
    again = generate_greedily(model, prompt, NEW_TOKENS, VOCABULARY, group, run.ledger)
    text = torch.tensor([prompt + tokens])
    steps = torch.stack(
        [next_token_logits(model, text[:, :length], group, run.ledger)[0] for length in range(3, 8)]
    )
    model.train()
    positions = torch.arange(text.shape[1])[None]
    losses = model(text[:, :-1], positions[:, :-1], None, labels=text[:, 1:].contiguous())[0]
    return {
        "tokens": tokens,
        "again": again,
        "losses": losses.detach(),
        "losses_of_steps": torch.nn.functional.cross_entropy(steps, text[0, 3:8], reduction="none"),
        "greedy": steps.argmax(-1).tolist(),
        "audit": audit.sent,
        "rows": rows,
    }


def _evaluate(rank: int, world_size: int) -> list[torch.Tensor]:
    """Losses without a codec, with one, and with one that --validate-uncompressed leaves out."""
    losses = []
    for codec, leave_out in (("none", False), (FP8, False), (FP8, True)):
        run = caat_run(0.5, codec, validate_uncompressed=leave_out)
        run.ledger.evaluating = True
        model = build_tiny_gpt(rank, world_size, run)
        fill_parameters(model, rank)
        losses.append(model(**batch(0, rank, 1)).detach())
    return losses


def test_uncompressed_validation_is_the_same_model(two_ranks) -> None:
    """The codec alone is left out: private channels stay private."""
    for rank in two_ranks:
        without, coded, left_out = rank["evaluation"]
        assert torch.equal(without, left_out) and not torch.equal(without, coded)


def test_generation(two_ranks) -> None:
    """Same text twice and on all ranks; logits as in training; its traffic counted and the hand count."""
    first, second = (rank["generation"] for rank in two_ranks)
    assert first["tokens"] == first["again"] == second["tokens"] == first["greedy"]
    assert len(set(first["tokens"])) > 1
    torch.testing.assert_close(first["losses_of_steps"], first["losses"][2:], rtol=1e-5, atol=1e-5)
    assert total_of(first["rows"]) == first["audit"]
    assert {row["phase"] for row in first["rows"]} == {"eval"}
    forwards = sum(range(3, 3 + NEW_TOKENS))  # tokens that went through the layers
    values = forwards * HIDDEN * (1 + 2 * LAYERS * 0.5)  # the embedding in whole, the layers' outputs by half
    assert sent_in(first["rows"], "tp.forward") == 4 * values  # fp32, 2 (W - 1) / W = 1
    assert sent_in(first["rows"], "tp.other") == NEW_TOKENS * VOCABULARY * 4 // 2
