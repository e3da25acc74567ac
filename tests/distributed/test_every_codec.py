"""Every codec on tensor parallelism: models learn, ranks agree, bytes are counted.

On data-parallel gradients: test_data_parallel_hooks.py; between pipeline stages: test_pipeline_schedules.py.
"""

from contextlib import nullcontext

import torch

from tests.distributed.spawn import spawn
from tests.distributed.test_tensor_parallel_model import BATCH, _digest
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.distributed.transport_audit import TransportAudit, total_of

TENSOR = ("identity", "int8", "int4:group=32", "int5/int6", "sdp4bit", "tah-quant")
SHAPED = "int6:group=32,normalize=standardize"
SCATTERED = ("identity", "int5/int6", "taco")
"""With sequence parallelism: gathers and sums of parts are other collectives, of whatever codec."""
STEPS = 5


def tensor_worker(rank: int, world_size: int) -> dict[str, dict]:
    """A few iterations with each codec, with some of them under sequence parallelism."""
    start_model_parallel(world_size)
    found = {}
    for spec in (*TENSOR, SHAPED, "taco"):
        sequence_parallel = spec in SCATTERED
        run = run_with(spec)
        model = build_tiny_gpt(rank, world_size, run, torch.bfloat16, sequence_parallel=sequence_parallel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        audit, losses, rows = TransportAudit(world_size), [], None
        for step in range(STEPS):
            with audit if step == 0 else nullcontext():
                loss = model(**batch(0, rank, BATCH)).float().mean()
                loss.backward()
                for parameter in model.parameters():
                    if getattr(parameter, "sequence_parallel", False):
                        torch.distributed.all_reduce(parameter.grad)
            rows = rows or run.ledger.rows()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        replicated = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
        found[spec] = {
            "losses": losses,
            "replicas": [_digest(parameter) for parameter in replicated],
            "sent": audit.sent if not sequence_parallel else None,
            "counted": total_of(rows),
            "kinds": {row["kind"] for row in rows if row["traffic"] != "tp.other"},
        }
    return found


def test_every_codec_trains() -> None:
    """TAH-Quant's own control among them: each codec trains, with the same bits on both ranks."""
    first, second = spawn(tensor_worker, 2)
    assert len(first) == len(TENSOR) + 2
    for name, mine in first.items():
        other = second[name]
        assert mine["losses"] == other["losses"] and mine["replicas"] == other["replicas"], name
        assert mine["losses"][-1] < mine["losses"][0] - 0.2, (name, mine["losses"])
        assert mine["kinds"] == {"compressed"}, name
        assert mine["sent"] in (None, mine["counted"]), name
