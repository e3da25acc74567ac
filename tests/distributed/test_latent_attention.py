"""Multi-latent attention and multi-token prediction over two tensor-parallel ranks.

They are compared with one process.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import batch, build_tiny_gpt, run_with, start_model_parallel
from tests.distributed.transport_audit import TransportAudit, total_of

LATENT = dict(
    multi_latent_attention=True,
    qk_layernorm=True,
    normalization="RMSNorm",
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=24,
)
"""Multi-latent attention with sizes that differ from each other."""
MODEL = dict(**LATENT, mtp_num_layers=1)
"""It predicts a second token as well."""
LAYOUTS = {
    "query latent": dict(q_lora_rank=12, sequence_parallel=False),
    "no query latent": dict(q_lora_rank=None, sequence_parallel=True, rope_type="rope"),
}
TACO = "taco:format=int8"
CORE_ATTENTION = "megatron-core's attention"
"""TACO with megatron-core's own attention, as Transformer Engine's layers have it.

Its projections are whole on each rank.
"""


@dataclass(frozen=True)
class Result:
    """Results of one pass forward and backward on a rank."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """Gradients of whole parameters, of all ranks' parts."""
    rows: list[dict]
    """The ledger, without what is never compressed."""


def whole_gradient(parameter: torch.nn.Parameter, sequence_parallel: bool) -> torch.Tensor:
    """Return the gradient of the whole parameter, of all ranks' parts."""
    gradient = parameter.grad
    if dist.get_world_size() > 1 and getattr(parameter, "tensor_model_parallel", False):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        return torch.cat(parts, dim=parameter.partition_dim)
    if sequence_parallel and getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(gradient)
    return gradient


def latent_worker(rank: int, world_size: int) -> dict[tuple[str, str], Result]:
    """Return the results by layout and codec."""
    start_model_parallel(world_size)
    results = {}
    for layout, settings in LAYOUTS.items():
        changes = {**MODEL, **settings}
        if world_size == 1:
            changes["sequence_parallel"] = False
            codecs = ["none"]
        else:
            codecs = ["none", "identity", TACO]
            if changes["sequence_parallel"]:
                codecs.append(CORE_ATTENTION)
        for codec in codecs:
            results[layout, codec] = run_model(rank, world_size, codec, changes)
    return results


def run_model(rank: int, world_size: int, codec: str, changes: dict) -> Result:
    """Run a model forward and backward; the ledger has the bytes that c10d was given.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        codec: a spec, or ``CORE_ATTENTION``.
        changes: of the model's config.
    """
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron.compression.tensor_parallel import hooks

    run = run_with(TACO if codec == CORE_ATTENTION else codec)
    model = build_tiny_gpt(rank, world_size, run, torch.float32, attach=False, **changes)
    if codec == CORE_ATTENTION:
        for module in model.modules():
            if isinstance(module, MLASelfAttention):
                module.__class__ = MLASelfAttention
    hooks.TensorParallel(run.config, run).attach([model])
    with TransportAudit(world_size) as audit:
        loss = model(**batch(0, rank)).mean()
        loss.backward()
    if not torch.cuda.is_available():  # there, payloads travel past c10d
        assert total_of(run.ledger.rows()) == audit.sent, codec
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = whole_gradient(parameter, changes["sequence_parallel"]).cpu()
    rows = [row for row in run.ledger.rows() if row["traffic"] != "tp.other"]
    return Result(float(loss.detach()), gradients, rows)


@pytest.fixture(scope="module")
def serial() -> dict[tuple[str, str], Result]:
    """Results of one process."""
    return spawn(latent_worker, 1)[0]


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], Result]]:
    """Results of two ranks."""
    return spawn(latent_worker, 2)


@pytest.mark.parametrize("codec", ["none", "identity"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_what_one_does(layout: str, codec: str, serial, ranks) -> None:
    expected = serial[layout, "none"]
    assert any("linear_kv_down_proj" in name for name in expected.gradients)
    assert any("eh_proj" in name for name in expected.gradients), "no second token"
    for rank in ranks:
        actual = rank[layout, codec]
        assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(
                actual.gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taco_computes_nearly_what_one_process_does(layout: str, serial, ranks) -> None:
    expected = serial[layout, "none"]
    for rank in ranks:
        actual = rank[layout, TACO]
        assert actual.loss == pytest.approx(expected.loss, rel=0.003)
        assert actual.loss != expected.loss, "nothing was compressed"
        for name, gradient in expected.gradients.items():
            assert (actual.gradients[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taco_compresses_every_message(layout: str, ranks) -> None:
    for rank in ranks:
        kinds = {(row["traffic"], row["kind"]) for row in rank[layout, TACO].rows}
        assert kinds == {("tp.forward", "compressed"), ("tp.backward", "compressed")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_equal_gradients_with_taco(layout: str, ranks) -> None:
    first = ranks[0][layout, TACO].gradients
    for rank in ranks:
        for name, gradient in rank[layout, TACO].gradients.items():
            assert torch.equal(gradient, first[name]), name


def test_megatron_cores_attention_has_the_bits_and_bytes_of_ours(ranks) -> None:
    for rank in ranks:
        cores = rank["no query latent", CORE_ATTENTION]
        ours = rank["no query latent", TACO]
        assert cores.loss == ours.loss
        assert cores.rows == ours.rows
        for name, gradient in ours.gradients.items():
            assert torch.equal(cores.gradients[name], gradient), name
