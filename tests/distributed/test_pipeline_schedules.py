"""Every schedule of megatron-core over the pipeline exchange: a lossless codec changes no bit of a gradient.

One set of spawned ranks runs all cases, each on a tiny model of its own: without compression, with payloads
of the identity codec in place of the tensors (both ways, one way, and from the next iteration on), and with
lossy codecs.
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
    """Run it compressed one way alone, before its start iteration, and with payloads of which all fit."""
    every_codec: bool = False
    """Run it with lossy codecs as well."""

    @property
    def micro_batches(self) -> int:
        """Enough to reach the steady state on every rank."""
        return 8 if self.pipeline == 4 and self.virtual else 4

    @property
    def codecs(self) -> tuple[str, ...]:
        """What the case runs with, by the names of ``SETTINGS``."""
        more = (*EXACT[2:], "lossless") if self.thorough else ()
        return (*EXACT[:2], "overflow", *more, *OTHER_CODECS * self.every_codec)


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
"""Of ``PipelineParallelConfig``."""
EXACT = ("none", "identity", "forward alone", "warm-up")
LOSSLESS = ("lossless", "overflow")
"""All payloads fit; hardly any does, and the pass is repeated."""
OTHER_CODECS = ("tah-quant", "pipeline-6bit", "taco", "sdp4bit")

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


def check_the_same(run: dict, plain: dict) -> None:
    """Gradients, training loss and forward-only loss to the bit; and no message is left."""
    assert plain["gradients"] and plain["gradients"] == run["gradients"]
    assert plain["losses"] == run["losses"] and plain["evaluation"] == run["evaluation"]
    assert run["left"] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_identity_payloads_change_no_bit(results: list[dict], case: Case) -> None:
    """Same gradients, training loss and forward-only loss; and every message was a payload, or was not."""
    for rank in results:
        plain = rank[case.name]["none"]
        sent = {(row["traffic"], row["phase"]): row for row in plain["ledger"]}
        assert sent and {row["kind"] for row in sent.values()} == {"off"}
        for name in set(EXACT) & set(case.codecs):
            run = rank[case.name][name]
            check_the_same(run, plain)
            messages = [row for row in run["ledger"] if row["operation"] == "send"]
            assert len(messages) == len(sent)
            for (
                row
            ) in messages:  # fp32 values in fp32 payloads: the same bytes, in as many messages
                kinds = {"identity": "compressed", "warm-up": "warmup", "none": "off"}
                one_way = "compressed" if row["traffic"] == "pp.forward" else "off"
                assert row["kind"] == kinds.get(name, one_way)
                uncompressed = sent[row["traffic"], row["phase"]]
                assert all(row[name] == uncompressed[name] for name in ("calls", "sent_bytes"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lossless_changes_no_bit(results: list[dict], case: Case) -> None:
    """Same gradients and losses: in fewer bytes where payloads fit; where one overflowed, on every rank a
    second pass without the codec. Evaluation is uncompressed."""
    for name in set(LOSSLESS) & set(case.codecs):
        runs = [rank[case.name][name] for rank in results]
        for rank, run in zip(results, runs, strict=True):
            plain = rank[case.name]["none"]
            check_the_same(run, plain)
            calls = {(row["phase"], row["traffic"]): row["calls"] for row in plain["ledger"]}
            sends = [row for row in run["ledger"] if row["operation"] == "send"]
            passes = [{"compressed"}, {"compressed", "overflow"}][run["repeated"]]
            for row in sends:
                assert row["kind"] in ({"overflow"} if row["phase"] == "eval" else passes)
                assert row["calls"] == calls[row["phase"], row["traffic"]]
            rows = [
                row
                for row in run["ledger"]
                if row["phase"] == "train" and row["kind"] == "compressed"
            ]
            sent, uncompressed = (
                sum(row[key] for row in rows) for key in ("sent_bytes", "plain_bytes")
            )
            assert sent < 0.9 * uncompressed or not rows
        repeated = {run["repeated"] for run in runs}
        assert repeated == {name == "overflow"} or case.tensor == 2, (
            "a message of one tile has room even so"
        )


@pytest.mark.parametrize("codec", OTHER_CODECS)
def test_any_codec(results: list[dict], codec: str) -> None:
    """Fewer bytes than uncompressed both ways, and losses near the exact ones."""
    losses = {"none": [], codec: []}
    for rank in results:
        for name in losses:
            losses[name] += rank["1F1B on 2"][name]["losses"]
        rows = rank["1F1B on 2"][codec]["ledger"]
        sent, plain = (sum(row[key] for row in rows) for key in ("sent_bytes", "plain_bytes"))
        assert 0 < sent < 0.32 * plain
    assert (
        losses[codec] == pytest.approx(losses["none"], rel=0.02) and losses[codec] != losses["none"]
    )


def test_overflow_reaches_the_first_stage(results: list[dict]) -> None:
    """Gradients that are not finite stay so through the codec: every parameter before it learns of them."""
    for rank in results:
        assert rank["overflow"]["gradients"] and not any(rank["overflow"]["finite"])
        assert all(rank["1F1B on 2"]["tah-quant"]["finite"])


def test_ambiguous_batches_are_refused(results) -> None:
    """Virtual stages on two ranks with batched messages would swap activations and gradients."""
    for rank in results:
        assert "mix up batched messages; use --overlap-p2p-communication" in rank["refusal"]


def test_messages_that_do_not_fit_are_refused(results) -> None:
    """In one line, at both ends: nobody waits for a message that is not sent."""
    for rank in results:
        line = "--pp-compression int4:normalize=standardize does not fit messages of [32, 2, 64]"
        assert rank["misfit"].startswith(line) and "\n" not in rank["misfit"]


def run_cases(rank: int, world_size: int) -> dict:
    """Every case with its codecs, and the refusal."""
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
    """One iteration and one evaluation of the case's model."""
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
    losses, repeated = [], False
    step = get_forward_backward_func()

    def passes(forward_only: bool) -> None:
        losses.clear()
        step(
            forward_step_func=_forward_step(losses, loss_scale),
            data_iterator=[_batches(rank) for _ in model] if case.virtual else _batches(rank),
            model=model if case.virtual else model[0],
            num_microbatches=case.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )

    if codec in LOSSLESS:
        overflow.begin()
    passes(forward_only=False)
    if codec in LOSSLESS:
        repeated = overflow.end()
    if repeated:
        overflow.state = State.OFF
        for chunk in model:
            chunk.zero_grad()
        passes(forward_only=False)
        overflow.state = State.ASKED
    gradients = {
        f"{number}.{parameter_name}": hash(parameter.grad.cpu().numpy().tobytes())
        for number, chunk in enumerate(model)
        for parameter_name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    finite = [bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None]
    trained, ledger.evaluating = list(losses), True
    with torch.no_grad():
        passes(forward_only=True)
    return {
        "gradients": gradients,
        "finite": finite,
        "losses": trained,
        "repeated": repeated,
        "evaluation": list(losses),
        "ledger": ledger.rows(),
        "left": len(exchange.in_flight),
    }


def _build(rank: int, case: Case) -> list:
    """The chunks of this rank: torch-native layers."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType

    transformer = transformer_config(
        case.tensor,
        num_layers=case.layers,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual,
        **dict(
            pipeline_dtype=torch.float32, deallocate_pipeline_outputs=True, deterministic_mode=True
        ),
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
    """The same tokens in every run, on the rank's device."""
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
"""By rank: {case: {codec: (gradient hashes, loss, evaluation loss, ledger rows)}}."""
