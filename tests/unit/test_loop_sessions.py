"""Megatron's loop tells the session of the model that it works with, not the one opened last."""

import contextlib
from collections.abc import Iterator

import pytest
from megatron.training import checkpointing, one_logger_utils, training

from megatron.compression.patches import loop, running, symbols


class Chunk:
    """A model chunk."""


class OpenRun:
    """The run of a session."""

    def __init__(self, session: "Session") -> None:
        self.session = session


class Session:
    """Notes what it is told.

    Args:
        name: tells it from others in the notes.
        told: takes (name, event, values ...), of all sessions.
    """

    awaits_provided_chunks = False
    split = "valid"

    def __init__(self, name: str, told: list[tuple]) -> None:
        self.name = name
        self.told = told
        self.model = [Chunk()]
        self.run = OpenRun(self)
        running.claim(self.model, self.run)

    def anchor_in_weights(self) -> contextlib.nullcontext:
        """One data centre: the weights are what they are."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def training_step(self, step_arguments: dict) -> Iterator[None]:
        """Check that a step is told of by its model."""
        assert step_arguments["model"] is self.model
        yield

    def __getattr__(self, event: str):
        return lambda *values: self.told.append((self.name, event, *values))


def _train(forward_step_func, model, optimizer):
    training.train_step(forward_step_func, None, model)
    training.training_log({"loss": 1}, None, None, 1, None, None, False, None, None, None, None)
    training.evaluate_and_print_results("on test set", None, None, model, 1, None, None)
    checkpointing.generate_state_dict(None, model, optimizer, None, None)
    one_logger_utils.finish()


def _train_step(forward_step_func, data_iterator, model, forward_backward_func=None):
    forward_step_func()


def _evaluate(forward_step_func, data_iterator, model, *args):
    return {"loss": 2}, None


def _evaluate_and_print(prefix, forward_step_func, data_iterator, model, *args):
    training.evaluate(forward_step_func, data_iterator, model)


def _load_checkpoint(ddp_model, *args):
    checkpointing.check_checkpoint_args("arguments")
    checkpointing._load_base_checkpoint("folder", None)


def _training_log(loss_dict, a, b, iteration, c, d, skipped_iter, e, f, g, h):
    """Nothing."""


def _generate_state_dict(args, model, optimizer, scheduler, rng_state, optim_sd_kwargs=None):
    return {"state": "of a checkpoint"}


@pytest.fixture
def told(monkeypatch) -> list[tuple]:
    """The list of what sessions are told; stand-ins replace Megatron's functions."""
    monkeypatch.setattr(running, "_open", {})
    monkeypatch.setattr(running, "_at_work", [])
    for owner, name, function in (
        (training, "train", _train),
        (training, "train_step", _train_step),
        (training, "evaluate", _evaluate),
        (training, "evaluate_and_print_results", _evaluate_and_print),
        (training, "training_log", _training_log),
        (training, "load_checkpoint", _load_checkpoint),
        (checkpointing, "load_checkpoint", _load_checkpoint),
        (checkpointing, "generate_state_dict", _generate_state_dict),
        (checkpointing, "check_checkpoint_args", lambda checkpoint_args: None),
        (checkpointing, "_load_base_checkpoint", lambda load_dir, args, rank0=False: ("read", 1)),
        (one_logger_utils, "finish", lambda: None),
    ):
        symbols._replacements.pop((owner, name), None)
        monkeypatch.setattr(owner, name, function)
    loop.tell_sessions()
    yield []
    symbols.take_out()


def test_a_training_tells_the_session_of_its_model(told) -> None:
    """The other session, which was opened last, hears nothing."""
    first = Session("first", told)
    _last = Session("last", told)
    at_work = []
    training.train(lambda: at_work.append(running.current()), first.model, "optimizer")
    assert at_work == [first.run]
    assert told == [
        ("first", "training_begins", "optimizer"),
        ("first", "step_ended"),
        ("first", "iteration_ends", 1, {"loss": 1}),
        ("first", "evaluation_begins"),
        ("first", "evaluation_ends", {"loss": 2}),
        ("first", "add_state", {"state": "of a checkpoint"}, False, "optimizer"),
        ("first", "training_ends"),
    ]
    assert first.split == "test"


def test_a_checkpoint_is_read_by_the_session_of_its_model(told) -> None:
    first = Session("first", told)
    _last = Session("last", told)
    training.load_checkpoint(first.model, None)
    assert told == [
        ("first", "check_checkpoint_arguments", "arguments"),
        ("first", "checkpoint_read", "read"),
    ]


def test_a_model_of_no_session_tells_nobody(told) -> None:
    """A reference model that is trained or loaded beside a session's."""
    _session = Session("only", told)
    training.train(lambda: None, [Chunk()], None)
    training.load_checkpoint([Chunk()], None)
    assert told == []


def test_outside_of_every_model_the_session_opened_last_is_told(told) -> None:
    """So it is in an own loop around Megatron's functions."""
    _first = Session("first", told)
    _last = Session("last", told)
    one_logger_utils.finish()
    assert told == [("last", "training_ends")]


def test_a_failed_evaluation_is_told_of(told, monkeypatch) -> None:
    session = Session("only", told)

    def fail(forward_step_func, data_iterator, model):
        raise RuntimeError

    symbols.take_out()
    monkeypatch.setattr(training, "evaluate", fail)
    loop.tell_sessions()
    with pytest.raises(RuntimeError):
        training.evaluate(None, None, session.model)
    assert told == [("only", "evaluation_begins"), ("only", "evaluation_ends", None)]
    assert running.current() is None
