"""A model with massive activations as large trained ones have: one channel of some tokens."""

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel

ITERATIONS = 4
CHANNEL = 5
SITE = ("decoder.layers.0.mlp.linear_fc2", "tp.forward")


def _add_massive(model: torch.nn.Module, rank: int) -> None:
    """The first layer's MLP writes 300 into a channel of every eighth token, where others have 0.01."""
    fc2 = model.decoder.layers[0].mlp.linear_fc2

    def switch_on(module, args):
        x = args[0].clone()
        x[..., 0] = 0.0
        x[::8, :, 0] = 1.0
        return (x, *args[1:])

    fc2.register_forward_pre_hook(switch_on)
    with torch.no_grad():
        fc2.weight[:, 0] = 0.0
        if rank == 0:
            fc2.weight[CHANNEL, 0] = 300.0


def worker(rank: int, world_size: int, codecs: list[str]) -> dict[str, tuple[list[float], dict]]:
    """By codec: losses of a few iterations, and what the error meter saw after the first MLP."""
    start_model_parallel(world_size)
    seen = {}
    for codec in codecs:
        run = run_with(codec)
        run.policy.meter.interval = 1
        model = build_tiny_gpt(rank, world_size, run)
        _add_massive(model, rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for iteration in range(ITERATIONS):
            run.step = iteration
            loss = model(**batch(iteration % 2, rank)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        rows = {(row["site"], row["traffic"]): row for row in run.policy.meter.rows()}
        seen[codec] = losses, rows.get(SITE, {})
    return seen


def test_massive_activations_do_not_drown_their_groups() -> None:
    """Ordinary errors with the setting, ten times as much without; one error over all values hides it."""
    seen, _ = spawn(worker, 2, ["none", "int6", "int6:outliers=on"])
    (exact, _), (_, drowned), (losses, kept) = seen.values()
    assert drowned["peak"] > 1000 and kept["peak"] > 1000
    assert drowned["relative_error"] < 0.02 and drowned["ordinary_error"] > 0.3
    assert kept["relative_error"] < 0.001 and kept["ordinary_error"] < 0.045
    assert losses == pytest.approx(exact, abs=0.02) and losses[-1] < losses[0] - 0.3
