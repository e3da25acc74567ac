"""Megatron's command line, training loop and checkpoints: where a session is told of what happens.

The functions here take no session: a replaced function finds the one that it serves
(``_session_of``): by the model that it was given, or by the run at work (running.py), which
``pretrain``, ``train``, ``train_step``, ``evaluate`` and ``load_checkpoint`` set. What a session is
told are methods of ``frontends.megatron_lm.MegatronSession``, which ``run.session`` is.
"""

import contextlib
import copy
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.compression.patches import running
from megatron.compression.patches.symbols import extend, follow, replace


def after_validating_arguments(after: Callable[[Namespace], None]) -> None:
    """Call ``after(args)`` after ``validate_args``, in the order of the requests, each function
    once.

    Why: it is the one place that every entrypoint's arguments come through, before the tokenizer
    and the configs are made from them. Not reached: ``--yaml-cfg``, which has a function of its
    own.
    """
    from megatron.training import arguments

    extend(arguments, "validate_args", ("args", "defaults"), _validating, after)


def _validating(validate_args: Callable, calls: list[Callable[[Namespace], None]]) -> Callable:
    def wrapper(args, defaults={}):  # noqa: B006  (megatron-core's own default)
        result = validate_args(args, defaults)
        for after in calls:
            after(args)
        return result

    return wrapper


def with_extra_arguments(add: Callable[[ArgumentParser], ArgumentParser]) -> None:
    """Have every ``parse_args`` call ``add(parser)`` too, after the entrypoint's own provider.

    ``add`` returns the parser. Why: an entrypoint that knows nothing of this project takes its
    flags as well.
    """
    from megatron.training import arguments

    parameters = ("extra_args_provider", "ignore_unknown_args")
    extend(arguments, "parse_args", parameters, _parsing, add)


def _parsing(parse_args: Callable, calls: list[Callable]) -> Callable:
    def wrapper(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser):
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            for add in calls:
                parser = add(parser)
            return parser

        return parse_args(provider, ignore_unknown_args)

    return wrapper


def before_pretrain(before: Callable[[Any], None]) -> None:
    """Call ``before(cfg_container)`` at the start of ``pretrain``.

    Why: an entrypoint of the user's own hands its model's configuration to this call and to nothing
    else. Not reached: code that imported ``pretrain`` by name before the patch.
    """
    _replace_pretrain(before)


def _replace_pretrain(before: Callable[[Any], None]) -> None:
    import megatron.training
    from megatron.training import training

    # Entrypoints call either.
    for owner in (training, megatron.training):  # the package holds the function by name
        extend(owner, "pretrain", ("cfg_container", "model_provider"), _pretraining, before)


def _no_preparation(cfg_container: Any) -> None:
    """Do nothing: the session was opened before ``pretrain``."""


def _pretraining(pretrain: Callable, calls: list[Callable[[Any], None]]) -> Callable:
    def wrapper(cfg_container, *args, **kwargs):
        # -m megatron.compression enables compression here.
        for before in calls:
            before(cfg_container)
        # Marked by ``enable``, if it was given the model's configuration.
        run = running.run_of(cfg_container.model)
        if run is None:
            session = _session_of()
            if session is None:
                return pretrain(cfg_container, *args, **kwargs)
            run = session.run
        with running.at_work(run):
            return pretrain(cfg_container, *args, **kwargs)

    return wrapper


def tell_sessions() -> None:
    """Have Megatron's training loop tell the session of the model that it trains what happens.

    ``pretrain``, ``train``, ``train_step``, ``evaluate``, ``load_checkpoint`` put the model's run
    to work.
    Why: what the loop calls in between gets no model. ``train`` tells that everything is built and
    loaded. Not reached: callers that imported these functions by name (megatron.training's own are
    reached).

    ``train_step`` tells its session with which arguments it begins. Why: the loss meter passes its
    last micro-batch forward again, with the step's own schedule and forward step.

    ``get_model`` hands over the chunks that a model provider makes. Why: an entrypoint with a
    provider has no model config whose hooks could be used. Not reached: models built from a config.

    ``training_log`` tells of an iteration that has ended. Why: our log line and scalars belong
    right after Megatron's. Not reached: losses of iterations that were skipped.

    ``evaluate_and_print_results`` alone knows the split, ``evaluate`` alone returns the losses.

    ``save_checkpoint`` saves the weights that several data centres have in common. Why: what reads a
    checkpoint's weights alone, as evaluation and export do, is to find these. Not reached: callers
    that imported it by name.

    ``one_logger_utils.finish`` tells that training has ended. Why: an early exit
    (``--exit-interval``) leaves by ``sys.exit``, after Megatron's own last call. Not reached:
    errors.
    """
    from megatron.training import checkpointing, one_logger_utils, training

    _replace_pretrain(_no_preparation)
    replace(training, "train", ("forward_step_func", "model", "optimizer"), _training)
    step = ("forward_step_func", "data_iterator", "model", "forward_backward_func")
    replace(training, "train_step", step, _stepping)
    replace(training, "get_model", ("model_provider_func",), _building)
    log_parameters = ("loss_dict", "iteration", "skipped_iter")
    follow(training, "training_log", log_parameters, _after_training_log)
    evaluation = ("forward_step_func", "data_iterator", "model")
    replace(training, "evaluate_and_print_results", ("prefix", *evaluation), _printing_evaluation)
    replace(training, "evaluate", evaluation, _evaluating)
    follow(one_logger_utils, "finish", (), _after_finish)
    # megatron.training.training holds it by name.
    for owner in (training, checkpointing):
        replace(owner, "load_checkpoint", ("ddp_model",), _loading_checkpoint)
        replace(owner, "save_checkpoint", ("iteration", "model"), _saving_checkpoint)
    tell_of_checkpoints()
    share_samples()


def share_samples() -> None:
    """Have each of several data centres read its own training samples, of a dataset of them all.

    ``get_train_valid_test_num_samples`` says how many samples the dataset needs.
    ``build_train_valid_test_data_loaders`` makes the loader, with a sampler.

    Why: the sampler divides samples over the data-parallel ranks that torch.distributed knows,
    which are those of one data centre. Not reached: loaders of a user's own.
    """
    from megatron.training import training

    replace(training, "get_train_valid_test_num_samples", (), _counting_samples)
    parameters = ("build_train_valid_test_datasets_provider",)
    follow(training, "build_train_valid_test_data_loaders", parameters, _after_building_loaders)


def _counting_samples(get_num_samples: Callable) -> Callable:
    def wrapper():
        train_samples, *others = get_num_samples()
        session = _session_of()
        if session is not None:
            train_samples *= session.config.local_steps.data_centres
        return (train_samples, *others)

    return wrapper


def _after_building_loaders(result: Any, arguments: dict) -> None:
    session = _session_of()
    train_loader = result[0]
    # Validation stays whole: all data centres evaluate the anchor on the same samples.
    if session is not None and train_loader is not None:
        session.local_steps.take_share(train_loader)


def tell_of_checkpoints() -> None:
    """Have Megatron tell the session at work of checkpoints that are saved and read.

    ``generate_state_dict`` puts a checkpoint together, to be saved or loaded. Why: checkpoints have
    no place for the state of a run's own parts. Without "optimizer" in the state
    (``--no-save-optim``, ``--no-load-optim``, ``--finetune``) the checkpoint holds weights alone:
    the session has to look.

    ``check_checkpoint_args`` gets a checkpoint's arguments, once a resume. Why: Megatron saves its
    arguments with a checkpoint and hands them to nobody on the way back. Not reached:
    ``--finetune`` and ``--pretrained-checkpoint``, which begin anew.

    ``_load_base_checkpoint`` has read a checkpoint: the arguments alone, then everything. Why:
    every load comes through it, ``--finetune`` too, before anything is checked. Not reached: what
    reads files by itself.
    """
    from megatron.training import checkpointing

    generate = ("model", "optimizer", "optim_sd_kwargs")
    follow(checkpointing, "generate_state_dict", generate, _after_generate_state_dict)
    follow(checkpointing, "check_checkpoint_args", ("checkpoint_args",), _after_check_args)
    follow(checkpointing, "_load_base_checkpoint", ("rank0",), _after_load_base_checkpoint)


def _session_of(model: Any = None) -> Any:
    """Return the session of a model's run; without a model that of the run at work, or where none
    is, the one opened last. None: no session of Megatron's loop."""
    if model is not None:
        run = running.run_of_model(model)
        return None if run is None else run.session
    sessions = [run.session for run in running.open_runs() if run.session is not None]
    newest = sessions[-1].run if sessions else None
    run = running.current(otherwise=newest)
    return None if run is None else run.session


def _training(train: Callable) -> Callable:
    def wrapper(forward_step_func, model, optimizer, *args, **kwargs):
        run = running.run_of_model(model)
        with running.at_work(run):
            if run is not None and run.session is not None:
                # Within the run's scope: what is logged here belongs to it.
                run.session.training_begins(optimizer)
            return train(forward_step_func, model, optimizer, *args, **kwargs)

    return wrapper


def _stepping(train_step: Callable) -> Callable:
    signature = inspect.signature(train_step)

    def wrapper(forward_step_func, data_iterator, model, *args, **kwargs):
        run = running.run_of_model(model)
        arguments = (forward_step_func, data_iterator, model, *args)
        with running.at_work(run):
            if run is None or run.session is None:
                return train_step(*arguments, **kwargs)
            by_name = signature.bind(*arguments, **kwargs).arguments
            with run.session.training_step(by_name):
                result = train_step(*arguments, **kwargs)
            # Before the loop logs, evaluates or saves.
            run.session.step_ended()
            return result

    return wrapper


def _building(get_model: Callable) -> Callable:
    def wrapper(model_provider_func, *args, **kwargs):
        session = _session_of()
        if session is None or not session.awaits_provided_chunks:
            return get_model(model_provider_func, *args, **kwargs)

        def provider(*provider_args, **provider_kwargs):
            # Called once a virtual stage, in the order of the chunks.
            chunk = model_provider_func(*provider_args, **provider_kwargs)
            return session.chunk_provided(chunk)

        return session.attach_wrapped(get_model(provider, *args, **kwargs))

    return wrapper


def _after_training_log(result: Any, arguments: dict) -> None:
    session = _session_of()
    if session is not None:
        losses = {} if arguments.get("skipped_iter") else arguments["loss_dict"]
        session.iteration_ends(arguments["iteration"], losses)


def _printing_evaluation(evaluate_and_print_results: Callable) -> Callable:
    def wrapper(prefix, forward_step_func, data_iterator, model, *args, **kwargs):
        session = _session_of(model)
        if session is not None:
            # Megatron evaluates the test split under this prefix alone.
            session.split = "test" if prefix.endswith("test set") else "valid"
        return evaluate_and_print_results(
            prefix, forward_step_func, data_iterator, model, *args, **kwargs
        )

    return wrapper


def _evaluating(evaluate: Callable) -> Callable:
    def wrapper(forward_step_func, data_iterator, model, *args, **kwargs):
        run = running.run_of_model(model)
        session = None if run is None else run.session
        losses = None
        if session is not None:
            session.evaluation_begins()
        try:
            with running.at_work(run), _anchor_in_weights(session):
                result = evaluate(forward_step_func, data_iterator, model, *args, **kwargs)
            # The losses, averaged over micro-batches; None on stages without a loss.
            losses = result[0]
        finally:
            if session is not None:
                session.evaluation_ends(losses)
        return result

    return wrapper


def _anchor_in_weights(session: Any) -> contextlib.AbstractContextManager[None]:
    """Return what puts the weights that all data centres have in common into the model, if there
    are several."""
    if session is None:
        return contextlib.nullcontext()
    return session.anchor_in_weights()


def _saving_checkpoint(save_checkpoint: Callable) -> Callable:
    def wrapper(iteration, model, *args, **kwargs):
        with _anchor_in_weights(_session_of(model)):
            return save_checkpoint(iteration, model, *args, **kwargs)

    return wrapper


def _after_finish(result: Any, arguments: dict) -> None:
    session = _session_of()
    if session is not None:
        session.training_ends()


def _loading_checkpoint(load_checkpoint: Callable) -> Callable:
    def wrapper(ddp_model, *args, **kwargs):
        with running.at_work(running.run_of_model(ddp_model)):
            return load_checkpoint(ddp_model, *args, **kwargs)

    return wrapper


def _after_generate_state_dict(state_dict: dict, arguments: dict) -> None:
    session = _session_of(arguments["model"])
    if session is not None:
        # Megatron puts a state together for loading as well, to have shapes to read into.
        is_loading = (arguments.get("optim_sd_kwargs") or {}).get("is_loading", False)
        session.add_state(state_dict, is_loading, arguments.get("optimizer"))


def _after_check_args(result: Any, arguments: dict) -> None:
    session = _session_of()
    if session is not None:
        session.check_checkpoint_arguments(arguments["checkpoint_args"])


def _after_load_base_checkpoint(result: Any, arguments: dict) -> None:
    session = _session_of()
    if session is not None:
        session.checkpoint_read(result[0])


def follow_passes() -> None:
    """Follow the passes of training steps: the session at work may have one repeated, and is told
    when the last one of a step has ended.

    The ``begin()`` of the session's ``repetition`` is called before the first pass and ``end()``
    after it; where that is true, the same on every rank, the pass is repeated, with the same
    micro-batches and random state, and ``end()`` called once more. What Megatron has made of the
    first pass is forgotten. ``passes_ended()`` comes last, before the optimizer's step.

    Why: what a pass has sent may have to be sent in another way; and the weights that a pass has
    used are complete until the optimizer's step. Not reached: evaluation; loops without
    megatron.training; repeated passes also under ``--rerun-mode`` other than validate_results,
    where nothing is kept.
    """
    from megatron.core.rerun_state_machine import RerunStateMachine

    replace(RerunStateMachine, "should_run_forward_backward", ("data_iterator",), _following_passes)


def _following_passes(should_run_forward_backward: Callable) -> Callable:
    from megatron.core.rerun_state_machine import RerunState

    repeating = _repeating(should_run_forward_backward)

    def wrapper(self, data_iterator):
        runs = repeating(self, data_iterator)
        session = _session_of()
        # In other states Megatron is about to leave, to look into a result.
        if not runs and session is not None and self.state == RerunState.NOT_RUNNING_YET:
            session.passes_ended()
        return runs

    return wrapper


def _repeating(should_run_forward_backward: Callable) -> Callable:
    from megatron.core.rerun_state_machine import RerunMode, RerunState

    # The machine's results before the pass that may be repeated. A process has one machine and one
    # step at a time, whichever session trains.
    results_before: dict[str, Any] | None = None

    # train_step runs "while should_run_forward_backward(...)": it asks before the pass whether to
    # run it, and after each pass whether to run it again.
    def wrapper(self, data_iterator):
        nonlocal results_before
        session = _session_of()
        repetition = None if session is None else session.repetition
        if repetition is None:
            return should_run_forward_backward(self, data_iterator)
        results, results_before = results_before, None
        if results is not None and repetition.end():
            # As if the first pass had not been: its NaNs and spikes are forgotten, and so are its
            # random states and micro-batches.
            vars(self).update(results)
            self.validation_counts.clear()
            self._restore_state()
            self._save_state()  # what was kept is in use now
            for iterator in self._sanitize_data_iterators(data_iterator):
                iterator.rewind()
            results_before = _results(self)
            return True
        runs = should_run_forward_backward(self, data_iterator)
        # In other modes the machine keeps neither micro-batches nor random states.
        validates = self.mode == RerunMode.VALIDATE_RESULTS
        if runs and validates and self.state == RerunState.INITIAL_RUN:
            repetition.begin()
            results_before = _results(self)
        return runs

    return wrapper


def _results(machine: Any) -> dict[str, Any]:
    results = {name: copy.copy(vars(machine)[name]) for name in _CHECKED}
    results["error_injector"] = copy.copy(machine.error_injector)
    return results


_CHECKED = (
    "rerun_requested",
    "failed_validation_call",
    "initial_result",
    "large_value_counts",
    "max_values",
)
"""What a pass's results change in megatron-core's machine."""


@contextmanager
def without_checks_of_results() -> Iterator[None]:
    """Have Megatron's machine check no result while the body runs.

    Why: a forward pass beside a training step calls the model's loss function, which has losses
    checked; there is no step that could be run again. Not reached: checks that do not go through
    the machine.
    """
    from megatron.core import rerun_state_machine

    # The one machine of the process. A loop of one's own may have none, and is not to get one here.
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        yield
        return
    # Over the method of its class.
    machine.validate_result = _unchecked
    try:
        yield
    finally:
        del machine.validate_result


def _unchecked(*_: Any, **__: Any) -> None:
    """Stand in for ``validate_result``."""


def around_whole_iterations() -> None:
    """Have the ``whole_iterations`` of a model's session stand for each pass of ``--cuda-graph-impl
    full_iteration``, which runs, captures or replays.

    Why: megatron-core's wrapper captures once, and what is sent is decided in the capture. The loop
    makes a wrapper for training and one for each evaluation; their graphs belong to the class, so
    one session of a process at most has any. Not reached: graphs of layers.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    replace(FullCudaGraphWrapper, "__call__", ("self",), _capturing)


def _capturing(run_pass: Callable) -> Callable:
    def wrapper(self, **arguments):
        session = _session_of(arguments.get("model"))
        if session is None or session.whole_iterations is None:
            return run_pass(self, **arguments)
        return session.whole_iterations.one_pass(run_pass, self, **arguments)

    return wrapper
