"""One forward and backward of a small mixture of experts, in every layout: gradients and bytes."""

import gc
from argparse import Namespace

import pytest
import torch

from tests.distributed.spawn import spawn, spawned
from tests.distributed.test_latent_attention import LATENT
from tests.distributed.tiny_gpt import HIDDEN, batch, build_gpt, device_of, transformer_config
from tests.distributed.transport_audit import TransportAudit, total_of

EXPERTS = dict(
    **dict(num_moe_experts=4, moe_router_topk=2, add_bias_linear=False, gated_linear_unit=True),
    **dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, num_layers=1),
    **dict(moe_token_dispatcher_type="alltoall", normalization="RMSNorm"),
)
PADDED = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
SHARED = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True)
FEW = dict(moe_router_topk=1, moe_router_pre_softmax=True)
GATHERED = dict(moe_token_dispatcher_type="allgather")

LAYOUTS = {
    "tensor 2, expert 2": ((2, 2, 2), SHARED),
    "tensor 2, expert 2, padded, shared": (
        (2, 2, 2),
        dict(SHARED, **PADDED, moe_shared_expert_overlap=True),
    ),
    "tensor 2, expert 2 of whole experts, latent attention": (
        (2, 1, 2),
        dict(LATENT, q_lora_rank=12, moe_expert_capacity_factor=0.5),
    ),
    "expert 2, gathered": ((1, 1, 2), GATHERED),
    "tensor 2, expert 2, gathered by four": ((2, 2, 2), GATHERED),
    "expert 4, some without a token": ((1, 1, 4), FEW),
    "tensor 2, expert 2, some without a token": ((2, 2, 2), FEW),
    "tensor 2 alone": ((2, 2, 1), {}),
}
CODECS = ("none", "identity", "int8:group=64")


def _build(sizes: tuple[int, int, int], settings: dict):
    """The tiny model of this rank; the same weights each time."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    tensor, expert_tensor, expert = sizes
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(1234)
    layout = dict(
        expert_tensor_parallel_size=expert_tensor,
        expert_model_parallel_size=expert,
        sequence_parallel=tensor > 1,
    )
    return build_gpt(transformer_config(tensor, **EXPERTS | layout | settings)).to(device_of(0))


def _pass(model, replica: int, few: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and gradients by name; with ``few`` tokens no rank has one for every expert."""
    inputs = batch(replica, 0, 1) if few else batch(0, 0)
    if few:
        inputs = {name: one[..., :2] for name, one in inputs.items()}
        inputs["attention_mask"] = inputs["attention_mask"][..., :2, :]
    loss = model(**inputs).mean()
    loss.backward()
    actual = {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }
    model.zero_grad()
    return float(loss), actual


def layers_worker(rank: int, world_size: int, layouts: dict = LAYOUTS) -> dict[str, dict]:
    """By layout: by codec the loss, the relative error of the gradients and both counts of bytes."""
    from megatron.core import parallel_state

    from megatron.compression import CompressionConfig, attach
    from megatron.compression.expert_parallel.config import ExpertParallelConfig
    from megatron.compression.tensor_parallel.config import TensorParallelConfig

    results = {}
    for layout, (sizes, settings) in layouts.items():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes[0],
            expert_tensor_parallel_size=sizes[1],
            expert_model_parallel_size=sizes[2],
        )
        losses = {}
        gradients = {}
        counted = {}
        for codec in CODECS:
            tensors = {} if codec == "none" else dict(compression=codec, min_mb=0.0)
            seen = (
                {} if codec == "none" else dict(transport="collective")
            )  # by what counts the bytes
            model = _build(sizes, settings)
            config = CompressionConfig(
                tensor_parallel=TensorParallelConfig(**tensors),
                expert_parallel=ExpertParallelConfig(compression=codec),
                **seen,
            )
            compression = attach([model], config, log=lambda line: None)
            with TransportAudit() as audit:
                losses[codec], gradients[codec] = _pass(
                    model, rank // sizes[0], few="without" in layout
                )
            counted[codec] = audit.sent, compression.ledger.rows()
            if codec == "identity":
                first = model, compression.ledger
        errors = {
            codec: _error(actual, gradients["none"], codec) for codec, actual in gradients.items()
        }
        model, ledger = first  # behind it another run was attached
        _pass(model, rank // sizes[0], few="without" in layout)
        twice = [_compressed(counted["identity"][1]), _compressed(ledger.rows())]
        results[layout] = errors | {"losses": losses, "counted": counted, "twice": twice}
        parallel_state.destroy_model_parallel()
        gc.collect()
    return results


def _compressed(rows: list[dict]) -> int:
    return sum(
        row["sent_bytes"]
        for row in rows
        if row["kind"] == "compressed" and row["traffic"] != "tp.other"
    )


def _error(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], codec: str) -> float:
    """Relative, over all parameters; of a lossy codec but the router's, whose choices are not continuous."""
    assert actual.keys() == exact.keys()
    names = [name for name in exact if "router" not in name or codec == "identity"]
    assert codec != "identity" or any("router" in name for name in names)
    squares = sum(float((actual[name] - exact[name]).double().square().sum()) for name in names)
    return (squares / sum(float(exact[name].double().square().sum()) for name in names)) ** 0.5


def check_counts(counted: dict) -> None:
    """What torch.distributed was given, by operation; all of the tokens are payloads, in fewer bytes."""
    for codec, (audit, rows) in counted.items():
        assert total_of(rows) == audit, codec
        tokens = [row for row in rows if row["traffic"] in ("ep.forward", "ep.backward")]
        assert {row["kind"] for row in tokens} <= {"off" if codec == "none" else "compressed"}
        sent, plain = (sum(row[key] for row in tokens) for key in ("sent_bytes", "plain_bytes"))
        if codec.startswith("int8") and plain:  # 64 codes and a scale; a token's end at 16 bytes
            assert 66 / 256 <= sent / plain <= 80 / 256


def lengths_worker(rank: int, world_size: int, min_mb: float) -> tuple[float, float, set[str]]:
    """Ranks with sequences of 32 and of 8 tokens: losses with the identity codec and without a codec, and
    how tokens went."""
    from megatron.core import parallel_state

    from megatron.compression import CompressionConfig, attach
    from megatron.compression.expert_parallel.config import ExpertParallelConfig

    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    length = 32 if rank == 0 else 8
    inputs = {name: values[..., :length] for name, values in batch(rank, 0).items()}
    inputs["attention_mask"] = inputs["attention_mask"][..., :length, :]
    losses = []
    for codec in ("none", "identity"):
        model = _build((1, 1, 2), {})
        experts = ExpertParallelConfig(
            compression=codec, min_mb=None if codec == "none" else min_mb
        )
        config = CompressionConfig(expert_parallel=experts)
        compression = attach([model], config, log=lambda line: None)
        loss = model(**inputs).mean()
        loss.backward()
        losses.append(float(loss.detach()))
    rows = compression.ledger.rows()
    return *losses, {row["kind"] for row in rows if row["traffic"].startswith("ep.f")}


ranks = spawned(layers_worker, 4)
"""What each of four ranks found."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(ranks: list[dict], layout: str) -> None:
    """The identity codec changes no bit of megatron-core's own; int8 little. But four ranks' sum, by the
    all-gather dispatcher, is formed in gloo's order or in ours."""
    for rank in ranks:
        actual = rank[layout]
        if layout == "tensor 2, expert 2, gathered by four":
            assert actual["identity"] < 1e-6
            assert actual["losses"]["identity"] == pytest.approx(actual["losses"]["none"], rel=1e-6)
        else:
            assert (
                actual["identity"] == 0 and actual["losses"]["identity"] == actual["losses"]["none"]
            )
        assert 0 < rank[layout]["int8:group=64"] < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_in_the_ledger(ranks: list[dict], layout: str) -> None:
    """Of every codec, and without one."""
    for rank in ranks:
        check_counts(rank[layout]["counted"])


def test_two_runs_in_one_process(ranks: list[dict]) -> None:
    """The first one's tokens go through its codec and into its ledger, with another run attached, too."""
    for by_layout in ranks:
        for once, again in (actual["twice"] for actual in by_layout.values()):
            assert again == 2 * once > 0


def test_some_ranks_had_no_token(ranks: list[dict]) -> None:
    """Otherwise the layout without tokens would show nothing."""
    messages = []
    for rank in ranks:
        rows = rank["expert 4, some without a token"]["counted"]["identity"][1]
        messages += [row for row in rows if row["operation"] == "instead_of_all_to_all"]
    assert min(row["plain_bytes"] for row in messages) < max(row["plain_bytes"] for row in messages)


INT8 = "int8:group=64"
DISPATCHERS = {"all-to-all": {}, "gathered": GATHERED}
DIRECTIONS = {"neither": ("none", "none"), "gradients": ("none", INT8), "tokens": (INT8, "none")}
"""What is compressed: codecs of tokens and of their gradients."""


def directions_worker(rank: int, world_size: int, dispatcher: str) -> dict[str, tuple]:
    """By what is compressed the loss, the gradients' relative error, and the ledger's kinds of tokens
    and of their gradients."""
    from megatron.core import parallel_state

    from megatron.compression import CompressionConfig, attach
    from megatron.compression.expert_parallel.config import ExpertParallelConfig

    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    results = {}
    exact: dict[str, torch.Tensor] = {}
    for name, (forward, backward) in DIRECTIONS.items():
        model = _build((1, 1, 2), DISPATCHERS[dispatcher])
        experts = ExpertParallelConfig(compression=forward, backward=backward)
        config = CompressionConfig(expert_parallel=experts)
        compression = attach([model], config, log=lambda line: None)
        loss, gradients = _pass(model, rank, few=False)
        exact = exact or gradients
        kinds = [
            {row["kind"] for row in compression.ledger.rows() if row["traffic"] == traffic}
            for traffic in ("ep.forward", "ep.backward")
        ]
        results[name] = loss, _error(gradients, exact, forward), *kinds
    return results


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_tokens_and_their_gradients_have_codecs_of_their_own(dispatcher: str) -> None:
    """A codec of gradients alone leaves the loss as it is, one of tokens alone sends gradients as they
    are."""
    for by_direction in spawn(directions_worker, 2, dispatcher):
        exact_loss, *_ = by_direction["neither"]
        loss, error, tokens, gradients = by_direction["gradients"]
        assert loss == exact_loss
        assert 0 < error < 0.05
        assert (tokens, gradients) == ({"off"}, {"compressed"})
        loss, error, tokens, gradients = by_direction["tokens"]
        assert loss != exact_loss
        assert 0 < error < 0.05
        assert (tokens, gradients) == ({"compressed"}, {"off"})


ROUTED_MB = (32 + 8) * 2 * 2 * HIDDEN * 4 / 2**20
"""What both ranks route: two sequences each, of 32 and 8 tokens, each token to two experts, fp32."""


@pytest.mark.parametrize(
    ("min_mb", "kind"),
    [
        (0.0, "compressed"),
        (0.9 * ROUTED_MB, "compressed"),
        (1.1 * ROUTED_MB, "small"),
        (1.0, "small"),
    ],
)
def test_ranks_with_sequences_of_different_lengths_decide_alike(min_mb: float, kind: str) -> None:
    """By the tokens that all ranks route, not by a rank's own, which lie on both sides of the two thresholds in
    the middle."""
    for uncompressed, identity, kinds in spawn(lengths_worker, 2, min_mb, timeout=30):
        assert identity == uncompressed
        assert kinds == {kind}


FLEX = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")


def flex_worker(rank: int, world_size: int) -> dict:
    """A model that was built with the flex dispatcher: losses and gradients by codec, and what was
    logged."""
    from megatron.core import parallel_state

    from megatron.compression import CompressionConfig, attach
    from megatron.compression.errors import SettingError
    from megatron.compression.expert_parallel.config import ExpertParallelConfig
    from tests.distributed import deep_ep_stand_in

    deep_ep_stand_in.install()
    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    settings = SHARED | dict(moe_shared_expert_overlap=True)
    alltoall_loss, exact = _pass(_build((1, 1, 2), settings), rank, few=False)
    results: dict = {"alltoall": alltoall_loss}
    for codec in CODECS:
        lines: list[str] = []
        model = _build((1, 1, 2), settings | FLEX)
        config = CompressionConfig(expert_parallel=ExpertParallelConfig(compression=codec))
        attach([model], config, log=lines.append)
        loss, gradients = _pass(model, rank, few=False)
        (dispatcher,) = {
            type(layer.mlp.token_dispatcher).__name__ for layer in model.decoder.layers
        }
        # Flex sums a rank's experts in another order than alltoall.
        error = _error(gradients, exact, "int8" if codec == "none" else codec)
        results[codec] = loss, error, dispatcher, [line for line in lines if "flex" in line]
    model = _build((1, 1, 2), settings | FLEX)
    results["comparison"] = _compare_dispatchers(model)
    model.config.moe_expert_rank_capacity_factor = 1.5
    try:
        attach([model], config, log=lambda line: None)
    except SettingError as error:
        results["refusal"] = str(error)
    return results


def _compare_dispatchers(model) -> tuple[float, float]:
    """Return the seconds of a layer's tokens by flex and by alltoall, as auto times them."""
    from megatron.compression.auto.dispatchers import compare_dispatchers
    from megatron.compression.auto.stopwatch import Stopwatch

    args = Namespace(
        **dict(seq_length=16, context_parallel_size=1, micro_batch_size=2, hidden_size=HIDDEN),
        **dict(sequence_parallel=False, tensor_model_parallel_size=1, params_dtype=torch.float32),
        **dict(moe_latent_size=None, moe_flex_dispatcher_backend="deepep"),
        **dict(num_experts=EXPERTS["num_moe_experts"], moe_router_topk=EXPERTS["moe_router_topk"]),
    )
    comparison = compare_dispatchers(args, [model], Stopwatch())
    assert all(parameter.grad is None for parameter in model.parameters())
    return comparison.by_flex, comparison.by_alltoall


flex_ranks = spawned(flex_worker, 2)


def test_a_model_that_was_built_with_flex_gets_alltoall(flex_ranks: list[dict]) -> None:
    """Only where its tokens are compressed; the identity codec then gives the bits of alltoall."""
    for rank in flex_ranks:
        alltoall = rank["alltoall"]
        loss, error, dispatcher, lines = rank["none"]
        assert (dispatcher, lines) == ("MoEFlexTokenDispatcher", [])
        assert loss == pytest.approx(alltoall, rel=1e-5) and error < 1e-5
        loss, error, dispatcher, lines = rank["identity"]
        assert (loss, error, dispatcher) == (alltoall, 0, "CompressedAlltoAllTokenDispatcher")
        (line,) = lines
        assert "the flex dispatcher (deepep) is switched to alltoall" in line
        assert 0 < rank[INT8][1] < 0.05
        assert "works with the flex dispatcher alone" in rank["refusal"]


def test_auto_times_flex_against_alltoall(flex_ranks: list[dict]) -> None:
    """All ranks have the slowest one's time, and so come to one decision."""
    first, second = (rank["comparison"] for rank in flex_ranks)
    assert first == second
    assert min(first) > 0
