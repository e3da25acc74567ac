"""Megatron's command line, training loop and checkpoints: where a run's own parts are called."""

import copy
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import around, follow, put

_after_validating: list[Callable[[Namespace], None]] = []


def after_validating_arguments(*after: Callable[[Namespace], None]) -> None:
    """Call each ``after(args)`` after ``validate_args``, in order; a function given again is called once.

    Why: it is the one place that every entrypoint's arguments come through, before the tokenizer and the
    configs are made from them. Not reached: ``--yaml-cfg``, which has a function of its own.
    """
    from megatron.training import arguments

    _after_validating.extend(one for one in after if one not in _after_validating)

    def run(result: Any, given: dict) -> None:
        for one in _after_validating:
            one(given["args"])

    follow(arguments, "validate_args", ("args",), run)


def with_extra_arguments(add: Callable[[ArgumentParser], ArgumentParser]) -> None:
    """Have every ``parse_args`` call ``add(parser)`` too, after the entrypoint's own provider.

    ``add`` returns the parser. Why: an entrypoint that knows nothing of this project takes its flags as well.
    """
    from megatron.training import arguments

    def parse(parse_args, extra_args_provider=None, *others, **named):
        def provider(parser):
            return add(parser if extra_args_provider is None else extra_args_provider(parser))

        return parse_args(provider, *others, **named)

    around(arguments, "parse_args", ("extra_args_provider",), parse)


def on_training_log(after: Callable[[int, dict], None]) -> None:
    """Call ``after(iteration, loss_dict)`` after each ``training_log``: once an iteration.

    Why: our log line and TensorBoard scalars belong right after Megatron's, and the loop calls the function
    by name. Not reached: losses of iterations that were skipped.
    """
    from megatron.training import training

    def run(result: Any, given: dict) -> None:
        after(given["iteration"], {} if given.get("skipped_iter") else given["loss_dict"])

    follow(training, "training_log", ("loss_dict", "iteration"), run)


def before_training(before: Callable[[], None]) -> None:
    """Call ``before()`` when ``train`` begins.

    Why: everything is built and loaded by then, and what follows is the first iteration. Not reached: runs
    that only evaluate.
    """
    from megatron.training import training

    def begin(train, *args, **kwargs):
        before()
        return train(*args, **kwargs)

    around(training, "train", ("forward_step_func", "model"), begin)


def around_evaluate(before: Callable[[str], None], after: Callable[[dict | None], None]) -> None:
    """Call ``before(split)`` and ``after(losses)`` around each ``evaluate``; split is valid or test.

    Why: evaluation traffic is counted separately, and the report shows the validation loss. Only
    ``evaluate_and_print_results`` knows the split and only ``evaluate`` returns the losses. Not reached:
    callers that imported them by name (megatron.training has none).
    """
    from megatron.training import training

    split = "valid"

    def printing(evaluate_and_print_results, prefix, *args, **kwargs):
        nonlocal split
        split = "test" if prefix.endswith("test set") else "valid"
        return evaluate_and_print_results(prefix, *args, **kwargs)

    def evaluating(evaluate, *args, **kwargs):
        before(split)
        losses = None
        try:
            result = evaluate(*args, **kwargs)
            losses = result[0]
        finally:
            after(losses)
        return result

    around(training, "evaluate_and_print_results", ("prefix",), printing)
    around(training, "evaluate", ("forward_step_func", "data_iterator", "model"), evaluating)


def around_pretrain(before: Callable[[Any, dict], None]) -> None:
    """Call ``before(cfg_container, kwargs)`` at the start of ``pretrain``; kwargs holds its other arguments.

    ``before`` may change kwargs, "model_provider" for example (None: Megatron builds from the config).
    Why: an entrypoint of the user's own hands its models, data and forward step to this call and to nothing
    else. Not reached: code that imported ``pretrain`` by name before the patch.
    """
    import megatron.training
    from megatron.training import training

    def begin(pretrain, *args, **kwargs):
        arguments = dict(inspect.signature(pretrain).bind(*args, **kwargs).arguments)
        container = arguments.pop("cfg_container")
        before(container, arguments)
        return pretrain(container, **arguments)

    around(training, "pretrain", ("cfg_container", "model_provider", "forward_step_func"), begin)
    put(megatron.training, "pretrain", training.pretrain, "the package holds the function by name")


def around_model_building(before: Callable[[list], list], after: Callable[[list], list]) -> None:
    """Call ``before([model])`` with each chunk that a model provider makes, and ``after(chunks)`` with those
    that ``get_model`` has wrapped; both return the chunks.

    Why: an entrypoint with a model provider has no model config whose hooks could be used. Not reached:
    models built from a config.
    """
    from megatron.training import training

    def build(get_model, model_provider_func, *args, **kwargs):
        def provider(*given, **named):
            return before([model_provider_func(*given, **named)])[0]

        return after(get_model(provider, *args, **kwargs))

    around(training, "get_model", ("model_provider_func",), build)


def repeat_passes(begin: Callable[[], None], end: Callable[[], bool]) -> None:
    """Call ``begin()`` before a training step's first pass and ``end()`` after it; where that is true, the
    same on every rank, the pass is repeated, with the same micro-batches and random state, and ``end()``
    called once more. What Megatron has made of the first pass is forgotten.

    Why: what a pass has sent may have to be sent in another way. Not reached: ``--rerun-mode`` other than
    validate_results, where nothing is kept; evaluation; loops without megatron.training.
    """
    from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

    checked: dict[str, Any] | None = (
        None  # the machine's results before the pass that may be repeated
    )

    def should_run(should_run_forward_backward, self, data_iterator):
        nonlocal checked
        before, checked = checked, None
        if before is not None and end():
            vars(self).update(before)
            self.validation_counts.clear()
            self._restore_state()
            self._save_state()  # what was kept is in use now
            for iterator in self._sanitize_data_iterators(data_iterator):
                iterator.rewind()
            checked = _results(self)
            return True
        runs = should_run_forward_backward(self, data_iterator)
        if (
            runs
            and self.mode == RerunMode.VALIDATE_RESULTS
            and self.state == RerunState.INITIAL_RUN
        ):
            begin()
            checked = _results(self)
        return runs

    around(RerunStateMachine, "should_run_forward_backward", ("data_iterator",), should_run)


def around_whole_iterations(call: Callable[..., Any]) -> None:
    """Have ``call(run_pass, wrapper, **arguments)`` stand for each pass of ``--cuda-graph-impl
    full_iteration``, which runs, captures or replays.

    Why: megatron-core's wrapper captures once, and what is sent is decided in the capture. The loop makes a
    wrapper for training and one for each evaluation; their graphs belong to the class. Not reached: graphs of
    layers.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    around(FullCudaGraphWrapper, "__call__", ("self",), call)


def _results(machine: Any) -> dict[str, Any]:
    results = {name: copy.copy(vars(machine)[name]) for name in _CHECKED}
    return results | {"error_injector": copy.copy(machine.error_injector)}


_CHECKED = (
    "rerun_requested",
    "failed_validation_call",
    "initial_result",
    "large_value_counts",
    "max_values",
)
"""What a pass's results change in megatron-core's machine."""


def on_training_end(after: Callable[[], None]) -> None:
    """Call ``after()`` when ``pretrain`` ends, normally or by an early exit, with process groups.

    Why: an early exit (``--exit-interval``) leaves by ``sys.exit``, after Megatron's own last call. Not
    reached: errors.
    """
    from megatron.training import one_logger_utils

    follow(one_logger_utils, "finish", (), lambda result, given: after())


def on_checkpoint_args(after: Callable[[Any], None]) -> None:
    """Call ``after(checkpoint_args)`` when a checkpoint's arguments have been checked: once a resume.

    Why: Megatron saves its arguments with a checkpoint and hands them to nobody on the way back. Not reached:
    ``--finetune`` and ``--pretrained-checkpoint``, which begin anew (see ``on_checkpoint_read``).
    """
    from megatron.training import checkpointing

    def run(result: Any, given: dict) -> None:
        after(given["checkpoint_args"])

    follow(checkpointing, "check_checkpoint_args", ("checkpoint_args",), run)


def around_checkpoint_state(add: Callable[[dict, bool], None]) -> None:
    """Call ``add(state_dict, is_loading)`` for each checkpoint that is put together to be saved or loaded.

    Why: checkpoints have no place for the state of a run's own parts. Without "optimizer" in the state
    (``--no-save-optim``, ``--no-load-optim``, ``--finetune``) the checkpoint holds weights alone: ``add`` has
    to look.
    """
    from megatron.training import checkpointing

    def run(state_dict: dict, given: dict) -> None:
        add(state_dict, (given.get("optim_sd_kwargs") or {}).get("is_loading", False))

    follow(checkpointing, "generate_state_dict", ("optimizer", "optim_sd_kwargs"), run)


def on_checkpoint_read(after: Callable[[dict | None], None]) -> None:
    """Call ``after(state_dict)`` with what has been read of a checkpoint; None: there is none.

    Why: it is the one place that every load comes through, ``--finetune`` too, before anything is checked.
    The arguments alone are read first, then everything. Not reached: what reads files by itself.
    """
    from megatron.training import checkpointing

    follow(
        checkpointing, "_load_base_checkpoint", ("rank0",), lambda result, given: after(result[0])
    )
