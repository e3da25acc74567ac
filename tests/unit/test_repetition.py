"""Training passes that are repeated: what Megatron's loop keeps, how often, and where not."""

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
    """Megatron's training loop: micro-batches are numbers, and a pass draws random ones.

    Args:
        mode: what Megatron's machine does besides.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: RerunMode) -> None:
        self.begun = 0
        """How many steps the session was told of."""
        self.answers: list[bool] = []
        """Whether each of the next passes is to be repeated."""
        self._tracker = tensor_parallel.get_cuda_rng_tracker()
        self._data = RerunDataIterator(iter(range(100)))
        self.machine = RerunStateMachine(
            state_save_func=lambda: {"states": self._tracker.get_states()},
            state_restore_func=lambda saved: self._tracker.set_states(saved["states"]),
            mode=mode,
        )
        monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", self.machine)
        # monkeypatch puts the method back, which ``follow_passes`` replaces.
        name = "should_run_forward_backward"
        monkeypatch.setattr(RerunStateMachine, name, getattr(RerunStateMachine, name))
        self._run = run_of()
        repeats = SimpleNamespace(begin=self._begin, end=lambda: self.answers.pop(0))
        self._run.session = SimpleNamespace(
            run=self._run, repetition=repeats, passes_ended=lambda: None
        )
        running.open_run(self._run)
        loop.follow_passes()

    def _begin(self) -> None:
        self.begun += 1

    @staticmethod
    def _draw() -> float:
        return torch.rand(()).item()

    def step(self, *losses: float) -> list[tuple[int, int, float, float]]:
        """Return the two micro-batches and two random numbers of each pass of a step.

        Args:
            losses: of its passes, in order.
        """
        passes = []
        while self.machine.should_run_forward_backward(self._data):
            with self._tracker.fork():
                drawn = self._draw()
            passes.append((next(self._data), next(self._data), drawn, self._draw()))
            loss = torch.tensor(losses[len(passes) - 1])
            self.machine.validate_result(loss, torch.isnan, "loss", tolerance=0.0, fatal=True)
        self.machine.should_checkpoint_and_exit()
        return passes


NAN = float("nan")


class TestPasses:
    @pytest.fixture
    def loop(self, monkeypatch) -> Loop:
        return Loop(monkeypatch, RerunMode.VALIDATE_RESULTS)

    @pytest.fixture
    def begun_loop(self, loop) -> Loop:
        """A loop after its first step, in which Megatron looks into no NaN."""
        loop.answers = [False]
        loop.step(1.0)
        return loop

    def test_a_repeated_pass_has_the_same_data_and_random_numbers(self, loop) -> None:
        loop.answers = [True, False]
        first, second = loop.step(1.0, 1.0)
        assert first == second
        assert not loop.answers

    def test_a_step_that_is_not_repeated_has_one_pass(self, loop) -> None:
        loop.answers = [False]
        assert len(loop.step(1.0)) == 1
        assert not loop.answers

    def test_steps_go_on_through_data_and_random_numbers(self, loop) -> None:
        """A step takes two micro-batches, however often its pass is repeated."""
        steps = []
        for answers in ([False], [True, False], [False], [True, False]):
            loop.answers = answers
            steps.append(loop.step(1.0, 1.0)[0])
        assert [step[0] for step in steps] == [0, 2, 4, 6]
        assert len({drawn for *_, drawn in steps}) == 4
        assert loop.begun == 4

    def test_a_nan_of_a_pass_that_is_repeated_is_forgotten(self, begun_loop) -> None:
        begun_loop.answers = [True, False]
        first, second = begun_loop.step(NAN, 1.0)
        assert first == second
        assert not begun_loop.machine.checkpoint_requested
        assert not begun_loop.answers

    def test_a_nan_of_the_last_pass_is_looked_into(self, begun_loop) -> None:
        """Megatron runs the pass once more to see whether it is NaN again, and asks to stop."""
        begun_loop.answers = [True, False]
        passes = begun_loop.step(NAN, NAN, NAN)
        assert passes == [passes[0]] * 3
        assert begun_loop.machine.checkpoint_requested
        assert not begun_loop.answers


def run_of() -> Run:
    """Return a run without rules, whose error meter measures in every iteration."""
    ledger = Ledger()
    return Run(Policy({}, ledger, meter=ErrorMeter(0.1, 1)), ledger)


class TestPause:
    """Steps without lossless after a repeated one."""

    @pytest.fixture
    def trained(self, monkeypatch) -> "PausedTraining":
        """Training whose 1st, 2nd and 4th pass with lossless overflow."""
        training = PausedTraining(monkeypatch, [True, True, False, True])
        training.run_all()
        return training

    def test_it_doubles_until_a_step_needs_no_repetition(self, trained) -> None:
        """8 steps, then 16; the third overflow begins a pause, after which the test ends."""
        assert trained.paused_steps == [0, 8, 16, 0]

    def test_each_pause_is_a_line_of_the_log(self, trained) -> None:
        assert len(trained.log) == 3
        assert "the next 16 iterations are uncompressed" in trained.log[1]

    def test_errors_observed_in_a_repeated_pass_are_forgotten(self, trained) -> None:
        """Only the third pass was not repeated."""
        assert [row["samples"] for row in trained.meter.rows()] == [1]


class PausedTraining:
    """Steps of a run with lossless, whose payloads overflow as a test says.

    Args:
        overflowed: whether each pass with lossless overflows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, overflowed: list[bool]) -> None:
        self.log: list[str] = []
        self.paused_steps = [0]
        """Steps without lossless before the first repeated one, after it, after the next ..."""
        run = run_of()
        self.meter = run.policy.meter
        self._overflow = run.overflow
        self._overflowed = overflowed
        self._repeats = repetition.Repetition(run, self.log.append)
        monkeypatch.setattr(run.overflow, "end", self._end)

    def _end(self) -> bool:
        self._overflow.state = State.ASKED
        return self._overflowed.pop(0)

    def run_all(self) -> None:
        x = torch.randn(256)
        while self._overflowed:
            self._repeats.begin()
            if self._overflow.state is State.OFF:
                self.paused_steps[-1] += 1
                self._end_step()
                continue
            assert self.meter.due("site", "tp.forward", len(self._overflowed))
            self.meter.measure("site", "tp.forward", x, parse_codec("int8"))
            if self._repeats.end():
                self.paused_steps.append(0)
                assert self._overflow.state is State.OFF, "lossless is on in the repeated pass"
                self._end_step()

    def _end_step(self) -> None:
        """End a pass without lossless: it is not repeated, and the next step asks again."""
        assert not self._repeats.end()
        assert self._overflow.state is State.ASKED


def overflows(*tensors: torch.Tensor) -> bool:
    """Return whether a pass that sends these tensors is one that has to be repeated."""
    transport = SimpleNamespace(overflow=Overflow())
    codec = parse_codec("lossless")
    transport.overflow.begin()
    for x in tensors:
        encoded_by, *_ = encode(codec, x.bfloat16(), transport)
        assert encoded_by is codec
    result = transport.overflow.end()
    assert transport.overflow.state is State.ASKED
    return result


# Exponents spread over 60 powers of two do not fit into lossless codes; 8 values are stored as
# they are, since a code would not be shorter.
WILD = torch.randn(2, 4096) * torch.exp2(60 * torch.rand(2, 4096))


def test_a_pass_overflows_if_any_payload_does() -> None:
    assert overflows(WILD, WILD[:, :8])


def test_short_payloads_do_not_overflow() -> None:
    assert not overflows(torch.randn(2, 4096), WILD[:, :8])


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


@pytest.mark.parametrize(
    ("state", "off"),
    [
        (State.NOTED, []),
        (State.ASKED, ["pp.forward"]),
        (State.OFF, ["tp.forward", "pp.forward"]),
    ],
)
def test_where_lossless_is_off(state: State, off: list[str]) -> None:
    """Stages cannot ask each other for a repetition; updated weights are sent after the pass."""
    lossless = parse_codec("lossless")
    rules = {traffic: Rule(lossless) for traffic in ("tp.forward", "pp.forward", "dp.weight")}
    policy = Policy(rules, Ledger())
    policy.overflow.state = state
    overflowed = [name for name in policy.rules if policy.decide(name).reason == "overflow"]
    assert overflowed == off


def run_with(*words: str, log: list[str] | None = None, **megatron) -> SimpleNamespace:
    """Return a session with the rules of flags.

    Args:
        words: this project's flags.
        log: takes the lines of its log.
        megatron: arguments of Megatron, from which the run then begins.
    """
    usual = dict(rerun_mode="validate_results", fp8=None)
    args = parsed(*words, **usual | megatron)
    config = flags.resolve(args)
    run = run_of()
    run.policy.rules = config.rules()
    host = SimpleNamespace(arguments=args, log=(log if log is not None else []).append)
    return SimpleNamespace(config=config, run=run, host=host)


TP_LOSSLESS = ["--tp-compression", "lossless"]


@pytest.mark.parametrize(
    "words",
    [
        TP_LOSSLESS,
        ["--dp-compression", "lossless"],
        ["--dp-compression", "int6", *TP_LOSSLESS],
    ],
    ids=" ".join,
)
def test_steps_can_be_repeated(words) -> None:
    session = run_with(*words, pipeline_model_parallel_size=2)
    assert repetition.why_not(session.host.arguments, session.config, session.run) is None


@pytest.mark.parametrize(
    ("words", "megatron", "reason"),
    [
        (["--dp-compression", "tagc", *TP_LOSSLESS], {}, "--dp-"),
        (TP_LOSSLESS, dict(rerun_mode="disabled"), "--rerun-mode disabled"),
        (["--pp-compression", "lossless"], dict(num_experts=8), "--num-experts"),
        (TP_LOSSLESS, dict(fp8="e4m3", fp8_recipe="delayed"), "--fp8-recipe delayed"),
    ],
)
def test_where_steps_cannot_be_repeated_the_flag_is_named(words, megatron, reason) -> None:
    session = run_with(*words, pipeline_model_parallel_size=2, **megatron)
    result = repetition.why_not(session.host.arguments, session.config, session.run)
    assert result.startswith(reason)


@pytest.mark.parametrize(
    ("words", "megatron", "line"),
    [
        (TP_LOSSLESS, dict(rerun_mode="disabled"), "the host waits before each message"),
        (TP_LOSSLESS, dict(cuda_graph_impl="local"), "lossless is off: in a CUDA graph"),
        (
            ["--tp-compression", "int6;fc2=lossless"],
            dict(cuda_graph_impl="local"),
            "lossless is off",
        ),
    ],
)
def test_the_log_says_what_happens_instead_of_a_repetition(words, megatron, line) -> None:
    log = []
    session = run_with(*words, log=log)
    vars(session.host.arguments).update(megatron)
    assert repetition.follow(session) is None
    (only_line,) = log
    assert line in only_line


def test_lossless_between_stages_is_refused_where_steps_cannot_be_repeated() -> None:
    """A stage cannot ask the next one whether values fit."""
    megatron = dict(pipeline_model_parallel_size=2, rerun_mode="disabled")
    session = run_with("--pp-compression", "lossless", **megatron)
    message = r"--pp-compression lossless .*--rerun-mode disabled"
    with pytest.raises(CompressionConfigError, match=message):
        repetition.follow(session)
