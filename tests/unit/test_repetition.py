"""Training passes that are repeated: what Megatron's loop keeps, how often, and where they cannot be."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine, tensor_parallel
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine

from megatron.compression import CompressionConfigError, flags, repetition
from megatron.compression.codecs import parse_codec
from megatron.compression.communication import Ledger, Policy, Rule, Run
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.communication.overflow import Overflow, State, encode
from megatron.compression.patches import loop, running
from tests.unit.megatron_args import parsed
from tests.unit.one_rank import one_rank  # noqa: F401


class Loop:
    """Megatron's training loop: micro-batches are numbers, and a pass draws random ones."""

    def __init__(self, monkeypatch, mode: RerunMode) -> None:
        self.begun, self.answers = 0, []
        tracker = tensor_parallel.get_cuda_rng_tracker()
        self._draw = lambda: torch.rand(()).item()
        self.machine = RerunStateMachine(
            state_save_func=lambda: {"states": tracker.get_states()},
            state_restore_func=lambda saved: tracker.set_states(saved["states"]),
            mode=mode,
        )
        self._tracker, self._data = tracker, RerunDataIterator(iter(range(100)))
        monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", self.machine)
        name = "should_run_forward_backward"
        monkeypatch.setattr(
            RerunStateMachine, name, getattr(RerunStateMachine, name)
        )  # put back behind it
        run = run_of()
        repeats = SimpleNamespace(begin=self._begin, end=lambda: self.answers.pop(0))
        run.session = SimpleNamespace(run=run, repetition=repeats)
        self._run = run
        running.open_run(run)
        loop.repeat_passes()

    def _begin(self) -> None:
        self.begun += 1

    def step(self, *losses: float) -> list[tuple]:
        """Micro-batches and random numbers of its passes, whose losses are these."""
        passes = []
        while self.machine.should_run_forward_backward(self._data):
            with self._tracker.fork():
                drawn = self._draw()
            passes.append((next(self._data), next(self._data), drawn, self._draw()))
            loss = torch.tensor(losses[len(passes) - 1])
            self.machine.validate_result(loss, torch.isnan, "loss", tolerance=0.0, fatal=True)
        self.machine.should_checkpoint_and_exit()
        return passes


def test_a_repeated_pass_is_the_same(monkeypatch) -> None:
    """Data, random numbers; a NaN of the first pass is forgotten, one of the second is looked into."""
    loop, nan = Loop(monkeypatch, RerunMode.VALIDATE_RESULTS), float("nan")
    seen = []
    for answers, losses in (
        ([False], [1.0]),
        ([True, False], [nan, 1.0]),
        ([False], [1.0]),
        ([True, False], [nan, nan, nan]),
    ):
        loop.answers = answers
        passes = loop.step(*losses)
        assert passes == passes[:1] * len(losses) and not loop.answers
        seen.append(passes[0])
    assert [data for data, *_ in seen] == [0, 2, 4, 6] and len({drawn for *_, drawn in seen}) == 4
    assert loop.begun == 4 and loop.machine.checkpoint_requested


def session_of(args, config, run: Run, lines: list[str]) -> SimpleNamespace:
    """A session with these settings and arguments."""
    host = SimpleNamespace(arguments=args, log=lines.append)
    return SimpleNamespace(config=config, run=run, host=host)


def run_of() -> Run:
    ledger = Ledger()
    return Run(Policy({}, ledger, meter=ErrorMeter(0.1, 1)), ledger)


def test_steps_without_lossless_after_a_repeated_one(monkeypatch) -> None:
    """8, then 16, then 8 again once a step has needed no repetition; what it has observed is forgotten."""
    lines, overflowed, run = [], [True, True, False, True], run_of()
    repeats = repetition.Repetition(run, lines.append)

    overflow = run.overflow

    def end() -> bool:
        overflow.state = State.ASKED
        return overflowed.pop(0)

    monkeypatch.setattr(overflow, "end", end)
    x, off = torch.randn(256), [0]
    while overflowed:
        repeats.begin()
        if overflow.state is State.OFF:
            off[-1] += 1
            assert not repeats.end() and overflow.state is State.ASKED
            continue
        assert run.policy.meter.due("site", "tp.forward", len(overflowed))
        run.policy.meter.measure("site", "tp.forward", x, parse_codec("int8"))
        if repeats.end():
            off.append(0)
            assert overflow.state is State.OFF, "in the repeated pass"
            assert not repeats.end() and overflow.state is State.ASKED
    assert (
        off == [0, 8, 16, 0]
        and len(lines) == 3
        and "the next 16 iterations are uncompressed" in lines[1]
    )
    assert [row["samples"] for row in run.policy.meter.rows()] == [1]


def test_flags_of_a_pass() -> None:
    """Whether any payload overflowed; short ones, stored as they are, do not."""
    codec, transport = parse_codec("lossless"), SimpleNamespace(overflow=Overflow())
    overflow = transport.overflow
    wild = torch.randn(2, 4096) * torch.exp2(60 * torch.rand(2, 4096))
    for expected, tensors in (
        (False, [torch.randn(2, 4096), wild[:, :8]]),
        (True, [wild, wild[:, :8]]),
    ):
        overflow.begin()
        for x in tensors:
            assert encode(codec, x.bfloat16(), transport)[0] is codec
        assert overflow.end() is expected and overflow.state is State.ASKED


@pytest.mark.parametrize("wild", [0, 1], ids=["the first", "the second"])
def test_an_overflow_of_either_bucket_repeats_the_pass(wild: int) -> None:
    """The other bucket's payload fits; its flag neither clears nor hides the one that is set."""
    codec = parse_codec("lossless")
    buckets = [torch.randn(1, 4096).bfloat16() for _ in range(2)]
    buckets[wild] = (torch.randn(1, 4096) * torch.exp2(60 * torch.rand(1, 4096))).bfloat16()
    payloads = [codec.encode(bucket) for bucket in buckets]
    flags = [int(codec.overflow_flag(payload)) for payload in payloads]
    assert flags[wild] == 1
    assert sum(flags) == 1
    overflow = Overflow()

    overflow.begin()
    for payload in payloads:
        overflow.note(codec, payload)

    assert overflow.end() is True


def test_where_lossless_is_off() -> None:
    """Between stages unless flags are noted; everywhere in a repeated pass but for updated weights."""
    lossless = parse_codec("lossless")
    policy = Policy(
        {one: Rule(lossless) for one in ("tp.forward", "pp.forward", "dp.weight")}, Ledger()
    )
    wanted = {State.NOTED: [], State.ASKED: ["pp.forward"], State.OFF: ["tp.forward", "pp.forward"]}
    for policy.overflow.state, off in wanted.items():
        assert [one for one in policy.rules if policy.decide(one).reason == "overflow"] == off


@pytest.mark.parametrize(
    "words, megatron, reason",
    [
        (["--tp-compression", "lossless"], {}, None),
        (["--dp-compression", "lossless"], {}, None),
        (["--dp-compression", "int6", "--tp-compression", "lossless"], {}, None),
        (["--dp-compression", "tagc", "--tp-compression", "lossless"], {}, "--dp-"),
        (["--tp-compression", "lossless"], dict(rerun_mode="disabled"), "--rerun-mode disabled"),
        (["--pp-compression", "lossless"], dict(num_experts=8), "--num-experts"),
        (
            ["--tp-compression", "lossless"],
            dict(fp8="e4m3", fp8_recipe="delayed"),
            "--fp8-recipe delayed",
        ),
    ],
)
def test_where_steps_cannot_be_repeated(words, megatron, reason) -> None:
    usual = dict(rerun_mode="validate_results", fp8=None, pipeline_model_parallel_size=2)
    args = parsed(*words, **usual | megatron)
    config = flags.resolve(args)
    run = run_of()
    run.policy.rules = config.rules()
    found = repetition.why_not(args, config, run)
    assert (found is None) == (reason is None) and (found or "").startswith(reason or "")


def test_what_a_run_is_told() -> None:
    """Stages cannot ask each other, so they are refused; others wait; in CUDA graphs lossless is off."""
    lines, run = [], run_of()
    for words, megatron, said in (
        (
            ["--tp-compression", "lossless"],
            dict(rerun_mode="disabled"),
            "the host waits before each message",
        ),
        (
            ["--tp-compression", "lossless"],
            dict(cuda_graph_impl="local"),
            "lossless is off: in a CUDA graph",
        ),
        (
            ["--tp-compression", "int6;fc2=lossless"],
            dict(cuda_graph_impl="local"),
            "lossless is off",
        ),
    ):
        args = parsed(*words, rerun_mode="validate_results", fp8=None)
        run.policy.rules = (config := flags.resolve(args)).rules()
        vars(args).update(megatron)
        assert repetition.follow(session_of(args, config, run, lines)) is None
        assert said in lines.pop() and not lines
    args = parsed(
        "--pp-compression",
        "lossless",
        pipeline_model_parallel_size=2,
        rerun_mode="disabled",
        fp8=None,
    )
    run.policy.rules = (config := flags.resolve(args)).rules()
    with pytest.raises(
        CompressionConfigError, match=r"--pp-compression lossless .*--rerun-mode disabled"
    ):
        repetition.follow(session_of(args, config, run, lines))
