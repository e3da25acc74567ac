"""Every schedule of megatron-core over the pipeline exchange: lossless codecs change no bit.

One set of spawned ranks runs all cases, each on a tiny model of its own: without compression, with
payloads of the identity codec in place of the tensors (both ways, one way, and from the next
iteration on), and with lossy codecs.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from tests.distributed.spawn import spawned
from tests.distributed.tiny_gpt import batch, build_gpt, device_of, transformer_config

WORLD = 4
MICRO_BATCH = 2
SEQUENCE = 32


@dataclass(frozen=True)
class Case:
    """One schedule."""

    name: str
    pipeline: int
    tensor: int = 1
    layers: int = 4
    virtual: int | None = None
    changes: dict = field(default_factory=dict)
    """Fields of the ``TransformerConfig``."""
    thorough: bool = False
    """Also run compressed one way, before the start iteration, and with payloads that all fit."""
    every_codec: bool = False
    """Run it with lossy codecs as well."""

    @property
    def micro_batches(self) -> int:
        """Enough to reach the steady state on every rank."""
        return 8 if self.pipeline == 4 and self.virtual else 4

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that the case runs with, by the names of ``SETTINGS``."""
        codecs = ["none", "identity", "overflow"]
        if self.thorough:
            codecs += ["forward alone", "warm-up", "lossless"]
        if self.every_codec:
            codecs += LOSSY
        return tuple(codecs)


SETTINGS = {
    "none": {},
    "identity": {"compression": "identity"},
    "forward alone": {"compression": "identity", "backward": "none"},
    "warm-up": {"compression": "identity"},
    "tah-quant": {"compression": "tah-quant"},
    "pipeline-6bit": {"compression": "pipeline-6bit"},
    "taco": {"compression": "taco"},
    "sdp4bit": {"compression": "sdp4bit"},
    "lossless": {"compression": "lossless"},
    "overflow": {"compression": "lossless:escapes=1e-6"},
    "misfit": {"compression": "int4:normalize=standardize"},
}
"""Fields of ``PipelineParallelConfig``."""
EXACT = ("none", "identity", "forward alone", "warm-up")
LOSSLESS = ("lossless", "overflow")
"""The lossless codec where all payloads fit, and where hardly any does: that pass is repeated."""
LOSSY = ("tah-quant", "pipeline-6bit", "taco", "sdp4bit")

ASYNC = dict(overlap_p2p_comm=True, batch_p2p_comm=False)
THROUGHOUT = dict(**ASYNC, overlap_p2p_comm_warmup_flush=True)
LENGTHS = dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
UNEVEN = dict(**ASYNC, num_layers_in_first_pipeline_stage=4)
CASES = (
    Case("1F1B on 2", 2, thorough=True, every_codec=True),
    Case("1F1B on 4", 4),
    Case("sequence parallel", 2, tensor=2, changes=dict(sequence_parallel=True)),
    Case("uneven stages", 2, layers=3, changes=dict(num_layers_in_first_pipeline_stage=1)),
    Case("variable lengths", 2, changes=LENGTHS),
    Case("virtual on 2, overlapped", 2, virtual=2, changes=ASYNC),
    Case("virtual and uneven", 2, layers=6, virtual=2, changes=UNEVEN),
    Case("virtual on 4, overlapped", 4, layers=8, virtual=2, changes=ASYNC, thorough=True),
    Case("virtual on 4, overlapped throughout", 4, layers=8, virtual=2, changes=THROUGHOUT),
    Case("virtual on 4, batched", 4, layers=8, virtual=2),
    Case("virtual on 4, unbatched", 4, layers=8, virtual=2, changes=dict(batch_p2p_comm=False)),
)


THOROUGH_CASES = tuple(case for case in CASES if case.thorough)


def check_the_same(run: dict, uncompressed: dict) -> None:
    """Assert equal bits of gradients and losses, and that no message is left in flight."""
    assert uncompressed["gradients"]
    assert run["gradients"] == uncompressed["gradients"]
    assert run["losses"] == uncompressed["losses"]
    assert run["evaluation"] == uncompressed["evaluation"]
    assert run["messages in flight"] == 0


def check_exact_messages(run: dict, uncompressed: dict, expected_kind: dict[str, str]) -> None:
    """Assert that a run with fp32 payloads sends the bytes and the messages of an uncompressed one.

    Args:
        run: a rank's result with the identity codec.
        uncompressed: the rank's result without a codec.
        expected_kind: of the ledger, by traffic class.
    """
    expected = {(row["traffic"], row["phase"]): row for row in uncompressed["ledger"]}
    sends = [row for row in run["ledger"] if row["operation"] == "send"]
    assert len(sends) == len(expected)
    for row in sends:
        assert row["kind"] == expected_kind[row["traffic"]]
        uncompressed_row = expected[row["traffic"], row["phase"]]
        assert row["calls"] == uncompressed_row["calls"]
        assert row["sent_bytes"] == uncompressed_row["sent_bytes"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_uncompressed_messages_are_counted_as_off(results: list[dict], case: Case) -> None:
    for rank in results:
        run = rank[case.name]["none"]
        assert {row["kind"] for row in run["ledger"]} == {"off"}
        check_the_same(run, run)
        check_exact_messages(run, run, {"pp.forward": "off", "pp.backward": "off"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_identity_payloads_change_no_bit(results: list[dict], case: Case) -> None:
    for rank in results:
        run = rank[case.name]["identity"]
        uncompressed = rank[case.name]["none"]
        check_the_same(run, uncompressed)
        kinds = {"pp.forward": "compressed", "pp.backward": "compressed"}
        check_exact_messages(run, uncompressed, kinds)


@pytest.mark.parametrize("case", THOROUGH_CASES, ids=lambda case: case.name)
def test_payloads_forward_alone_change_no_bit(results: list[dict], case: Case) -> None:
    for rank in results:
        run = rank[case.name]["forward alone"]
        uncompressed = rank[case.name]["none"]
        check_the_same(run, uncompressed)
        kinds = {"pp.forward": "compressed", "pp.backward": "off"}
        check_exact_messages(run, uncompressed, kinds)


@pytest.mark.parametrize("case", THOROUGH_CASES, ids=lambda case: case.name)
def test_nothing_is_compressed_before_the_start_iteration(results: list[dict], case: Case) -> None:
    for rank in results:
        run = rank[case.name]["warm-up"]
        uncompressed = rank[case.name]["none"]
        check_the_same(run, uncompressed)
        kinds = {"pp.forward": "warmup", "pp.backward": "warmup"}
        check_exact_messages(run, uncompressed, kinds)


def check_lossless(run: dict, uncompressed: dict) -> None:
    """Assert the bits of the uncompressed run, and kinds and number of the messages.

    A repeated pass goes without the codec, and evaluation is uncompressed.
    """
    check_the_same(run, uncompressed)
    calls = {(row["phase"], row["traffic"]): row["calls"] for row in uncompressed["ledger"]}
    kinds = {"eval": {"overflow"}, "train": {"compressed"}}
    if run["repeated"]:
        kinds["train"] = {"compressed", "overflow"}
    for row in run["ledger"]:
        if row["operation"] == "send":
            assert row["kind"] in kinds[row["phase"]]
            assert row["calls"] == calls[row["phase"], row["traffic"]]
    check_payloads_are_smaller(run["ledger"])


def check_payloads_are_smaller(ledger: list[dict]) -> None:
    """Assert that training's payloads, where there are any, have fewer bytes than the tensors."""
    compressed = [row for row in ledger if row["kind"] == "compressed"]
    rows = [row for row in compressed if row["phase"] == "train"]
    if rows:
        sent = sum(row["sent_bytes"] for row in rows)
        assert sent < 0.9 * sum(row["plain_bytes"] for row in rows)


@pytest.mark.parametrize("case", THOROUGH_CASES, ids=lambda case: case.name)
def test_lossless_payloads_that_fit_change_no_bit(results: list[dict], case: Case) -> None:
    for rank in results:
        check_lossless(rank[case.name]["lossless"], rank[case.name]["none"])
    assert not any(rank[case.name]["lossless"]["repeated"] for rank in results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lossless_payloads_that_overflow_change_no_bit(results: list[dict], case: Case) -> None:
    """Every rank runs a second pass without the codec after an overflow."""
    for rank in results:
        check_lossless(rank[case.name]["overflow"], rank[case.name]["none"])
    if case.tensor == 1:  # with two tensor ranks a message is one tile, which has room even so
        assert all(rank[case.name]["overflow"]["repeated"] for rank in results)


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codec_sends_fewer_bytes(results: list[dict], codec: str) -> None:
    for rank in results:
        rows = rank["1F1B on 2"][codec]["ledger"]
        sent = sum(row["sent_bytes"] for row in rows)
        assert 0 < sent < 0.32 * sum(row["plain_bytes"] for row in rows)


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codec_has_losses_near_the_exact_ones(results: list[dict], codec: str) -> None:
    exact = []
    lossy = []
    for rank in results:
        exact += rank["1F1B on 2"]["none"]["losses"]
        lossy += rank["1F1B on 2"][codec]["losses"]
    assert lossy == pytest.approx(exact, rel=0.02)
    assert lossy != exact, "nothing was compressed"


def test_overflow_reaches_the_first_stage(results: list[dict]) -> None:
    """Gradients that are not finite stay so through the codec: every parameter before has them."""
    for rank in results:
        assert rank["overflow"]["gradients"]
        assert not any(rank["overflow"]["finite"])
        assert all(rank["1F1B on 2"]["tah-quant"]["finite"])


def test_ambiguous_batches_are_refused(results: list[dict]) -> None:
    """Virtual stages on two ranks with batched messages would swap activations and gradients."""
    for rank in results:
        assert "mix up batched messages; use --overlap-p2p-communication" in rank["refusal"]


def test_messages_that_do_not_fit_are_refused(results: list[dict]) -> None:
    """The refusal is one line at both ends: no rank waits for a message that is not sent."""
    for rank in results:
        line = "--pp-compression int4:normalize=standardize does not fit messages of [32, 2, 64]"
        assert rank["misfit"].startswith(line)
        assert "\n" not in rank["misfit"]


def run_cases(rank: int, world_size: int) -> dict:
    """Run every case with its codecs, and the refusals."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron.compression.errors import CompressionConfigError

    original = P2PCommunicator._communicate
    results = {}
    for case in CASES:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tensor,
            pipeline_model_parallel_size=case.pipeline,
            virtual_pipeline_model_parallel_size=case.virtual,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        results[case.name] = {codec: _step(rank, case, codec) for codec in case.codecs}
        if case is CASES[0]:
            results["overflow"] = _step(rank, case, "tah-quant", loss_scale=float("inf"))
            with pytest.raises(CompressionConfigError) as refused:
                _step(rank, case, "misfit")
            results["misfit"] = str(refused.value)
        P2PCommunicator._communicate = original
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(CompressionConfigError) as refused:
        _step(rank, Case("ambiguous", 2, virtual=2), "none")
    results["refusal"] = str(refused.value)
    return results


def _step(rank: int, case: Case, codec: str, loss_scale: float = 1.0) -> dict:
    """Run one iteration and one evaluation of the case's model.

    Args:
        rank: this rank.
        case: the schedule.
        codec: name in ``SETTINGS``.
        loss_scale: factor of every loss.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.compression.communication import Ledger, Policy, Run
    from megatron.compression.communication.overflow import State
    from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
    from megatron.compression.pipeline_parallel.hooks import PipelineParallel

    ledger = Ledger()
    config = PipelineParallelConfig(**SETTINGS[codec])
    policy = Policy(config.rules(int(codec == "warm-up")), ledger)
    run = Run(policy, ledger)
    overflow = run.overflow
    pipeline = PipelineParallel(config, run)
    exchange = pipeline.exchange
    model = _build(rank, case)
    pipeline.attach(model)
    step = get_forward_backward_func()

    def passes(forward_only: bool) -> list[float]:
        losses = []
        data = [_batches(rank) for _ in model]
        step(
            forward_step_func=_forward_step(losses, loss_scale),
            data_iterator=data if case.virtual else data[0],
            model=model if case.virtual else model[0],
            num_microbatches=case.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        return losses

    if codec in LOSSLESS:
        overflow.begin()
    losses = passes(forward_only=False)
    # As Megatron's training step: a pass in which a payload overflowed is repeated uncompressed.
    repeated = codec in LOSSLESS and overflow.end()
    if repeated:
        overflow.state = State.OFF
        for chunk in model:
            chunk.zero_grad()
        losses = passes(forward_only=False)
        overflow.state = State.ASKED
    gradients = _gradients(model)
    hashes = {name: hash(gradient.cpu().numpy().tobytes()) for name, gradient in gradients.items()}
    ledger.phase = "eval"
    with torch.no_grad():
        evaluation = passes(forward_only=True)
    return {
        "gradients": hashes,
        "finite": [bool(gradient.isfinite().all()) for gradient in gradients.values()],
        "losses": losses,
        "repeated": repeated,
        "evaluation": evaluation,
        "ledger": ledger.rows(),
        "messages in flight": len(exchange.in_flight),
    }


def _gradients(chunks: list) -> dict[str, torch.Tensor]:
    """Return every gradient by chunk and parameter."""
    gradients = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                gradients[f"{number}.{name}"] = parameter.grad
    return gradients


def _build(rank: int, case: Case) -> list:
    """Build the chunks of this rank, of torch-native layers."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType

    transformer = transformer_config(
        case.tensor,
        num_layers=case.layers,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        deterministic_mode=True,
        **case.changes,
    )
    chunks = []
    for stage in range(case.virtual or 1):
        vp_stage = stage if case.virtual else None
        torch.manual_seed(7 + stage)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = build_gpt(transformer, first, last, vp_stage)
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk.to(device_of(rank)))
    return chunks


def _batches(rank: int):
    """Yield the same tokens in every run, on the rank's device."""
    return (batch(step, rank, MICRO_BATCH) for step in itertools.count())


def _forward_step(losses: list, loss_scale: float):
    def loss_func(output):
        loss = output.float().mean() * loss_scale
        losses.append(float(loss.detach()))
        return loss, {"loss": loss.detach().clone()}

    def forward_step(data_iterator, model):
        arguments = next(data_iterator)
        return model(**arguments), loss_func

    return forward_step


results = spawned(run_cases, WORLD)
"""Results by rank: {case: {codec: results of ``_step``}}."""
