"""Multi-latent attention and multi-token prediction over two tensor-parallel ranks against one process."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.distributed.transport_audit import TransportAudit, total_of

LATENT = dict(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
LATENT |= dict(kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=24)
SECOND_TOKEN = dict(mtp_num_layers=1)
LAYOUTS = {
    "query latent": dict(q_lora_rank=12, sequence_parallel=False),
    "no query latent": dict(q_lora_rank=None, sequence_parallel=True, rope_type="rope"),
}
CODED = "taco:format=int8"


def whole_gradient(parameter: torch.nn.Parameter, sums: bool) -> torch.Tensor:
    """The gradient of the whole parameter, of all ranks' parts."""
    own = parameter.grad
    if dist.get_world_size() > 1 and getattr(parameter, "tensor_model_parallel", False):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=parameter.partition_dim)
    if sums and getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(own)
    return own


def latent_worker(rank: int, world_size: int) -> dict:
    """For each layout and codec: the loss, whole gradients, what was sent."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron.compression.tensor_parallel import hooks

    start_model_parallel(world_size)
    actual = {}
    for layout, settings in LAYOUTS.items():
        parallel = settings["sequence_parallel"] and world_size > 1
        codecs = ("none", "identity", CODED, f"{CODED} as Transformer Engine has it")
        for codec in codecs[: 3 + parallel] if world_size > 1 else ("none",):
            run = run_with(codec.partition(" ")[0])
            changes = {**LATENT, **SECOND_TOKEN, **settings, "sequence_parallel": parallel}
            model = build_tiny_gpt(rank, world_size, run, torch.float32, attach=False, **changes)
            for module in model.modules():
                if codec == codecs[3] and isinstance(module, MLASelfAttention):
                    module.__class__ = (
                        MLASelfAttention  # megatron-core's, with projections that are whole
                    )
            hooks.TensorParallel(run.config, run).attach([model])
            with TransportAudit(world_size) as audit:
                loss = model(**batch(0, rank)).mean()
                loss.backward()
            assert torch.cuda.is_available() or total_of(run.ledger.rows()) == audit.sent, (
                layout,
                codec,
            )
            rows = [row for row in run.ledger.rows() if row["traffic"] != "tp.other"]
            named = model.named_parameters()
            gradients = {name: whole_gradient(value, parallel).cpu() for name, value in named}
            actual[layout, codec] = float(loss.detach()), gradients, rows
    return actual


@pytest.fixture(scope="module")
def results() -> tuple[dict, list[dict]]:
    """One process, and two ranks."""
    return spawn(latent_worker, 1)[0], spawn(latent_worker, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_what_one_does(layout: str, results: tuple[dict, list[dict]]) -> None:
    """Loss and every gradient, and with the identity codec; TACO in int8 nearly. Bytes are c10d's (above)."""
    serial, ranks = results
    loss, gradients, _ = serial[layout, "none"]
    assert any("linear_kv_down_proj" in name for name in gradients)
    assert any("eh_proj" in name for name in gradients), "of the second token"
    for actual in ranks:
        for codec in ("none", "identity"):
            rank_loss, rank_gradients, _ = actual[layout, codec]
            assert rank_loss == pytest.approx(loss, rel=1e-6)
            for name, expected in gradients.items():
                torch.testing.assert_close(
                    rank_gradients[name],
                    expected,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=f"{codec} {name}",
                )
        coarse, rough, rows = actual[layout, CODED]
        assert coarse == pytest.approx(loss, rel=0.003) and coarse != loss
        kinds = {(row["traffic"], row["kind"]) for row in rows}
        assert kinds == {("tp.forward", "compressed"), ("tp.backward", "compressed")}
        for name, expected in gradients.items():
            assert (rough[name] - expected).norm() < 0.1 * expected.norm(), name
        assert all(torch.equal(rough[name], ranks[0][layout, CODED][1][name]) for name in rough)


def test_attention_of_megatron_core(results: tuple[dict, list[dict]]) -> None:
    """As Transformer Engine's layers have it: the bits and the bytes of ours."""
    for ranks in results[1]:
        (theirs,) = (key for key in ranks if "Engine" in key[1])
        (loss, gradients, rows) = ranks[theirs]
        ours = ranks[theirs[0], CODED]
        assert (loss, rows) == (ours[0], ours[2])
        assert all(torch.equal(gradients[name], value) for name, value in ours[1].items())
