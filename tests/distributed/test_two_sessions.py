"""Two sessions in one process over the same process groups, such as an actor's and a critic's.

Each has settings, decisions, bytes, gradients and weights of its own, whatever the other one does,
and also after the other one has been closed. With the last one the functions of other packages are
the originals again.
"""

import functools
import importlib
import inspect

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.test_transformer_engine import HIDDEN, TOKENS, Model, stand_in
from tests.distributed.tiny_gpt import run_with

SYMBOLS = (
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
    "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
    "megatron.core.transformer.multi_latent_attention:gather_from_sequence_parallel_region",
    "torch.cuda:CUDAGraph.capture_begin",
    "torch.cuda:CUDAGraph.capture_end",
    "torch.cuda:CUDAGraph.replay",
    "torch.distributed:destroy_process_group",
)
"""Functions that a session with every dimension of ``loops_of`` replaces."""

ENGINE_SYMBOLS = (
    "transformer_engine.pytorch.module.linear:allreduce",
    "transformer_engine.pytorch.module.linear:reduce_scatter_along_first_dim",
    "transformer_engine.pytorch.module.linear:gather_along_first_dim",
    "transformer_engine.pytorch.module.layernorm_linear:allreduce",
    "transformer_engine.pytorch.module.layernorm_linear:reduce_scatter_along_first_dim",
    "transformer_engine.pytorch.module.layernorm_linear:gather_along_first_dim",
    "transformer_engine.pytorch.module.base:gather_along_first_dim",
    "transformer_engine.pytorch.quantization:FP8GlobalStateManager.reduce_tensor_across_group_op_max",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
    "megatron.core.transformer.cuda_graphs:CudaGraphManager.call_ddp_preforward_hook",
)


def objects_at(symbols: tuple[str, ...]) -> list[object]:
    """Return the objects that these symbols name now."""
    objects = []
    for symbol in symbols:
        module, _, path = symbol.partition(":")
        owner = importlib.import_module(module)
        *classes, name = path.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name)
        objects.append(inspect.getattr_static(owner, name))
    return objects


def config_of(name: str):
    """Return the settings of a session with this codec in every dimension."""
    from megatron.compression import (
        CompressionConfig,
        DataParallelConfig,
        PipelineParallelConfig,
        TensorParallelConfig,
    )

    if name == "none":
        return CompressionConfig()
    return CompressionConfig(
        tensor_parallel=TensorParallelConfig(compression=name, min_mb=0.0),
        pipeline_parallel=PipelineParallelConfig(compression=name, min_mb=0.0),
        data_parallel=DataParallelConfig(compression=name, weights=name, min_mb=0.0),
    )


def loops_of(names: tuple[str, ...], tensor: int, pipeline: int) -> list:
    """Make a training loop for each setting, all over the same process groups.

    Args:
        names: codecs.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
    """
    from megatron.core import parallel_state

    import examples.own_loop as own_loop

    loops = [own_loop.Loop(tensor, pipeline, config_of(names[0]))]
    initialize = parallel_state.initialize_model_parallel
    parallel_state.initialize_model_parallel = lambda *sizes: None
    try:
        for name in names[1:]:
            loops.append(own_loop.Loop(tensor, pipeline, config_of(name)))
    finally:
        parallel_state.initialize_model_parallel = initialize
    return loops


def iterate(loops: list, step: int, pipeline: int) -> None:
    """Run an iteration of each loop, interleaved.

    First come all forward passes, then all backward passes, then the sums of gradients.

    Args:
        loops: of ``loops_of``.
        step: number of the iteration.
        pipeline: pipeline-parallel size.
    """
    from megatron.core.distributed import finalize_model_grads

    if pipeline > 1:  # a schedule has both passes
        for loop in loops:
            loop.iterate(step)
        return
    losses = []
    for loop in loops:
        loop.model.zero_grad_buffer()
        loop.optimizer.zero_grad()
        output, loss_function = loop.forward_step(loop.batches(step), loop.model)
        losses.append(loss_function(output)[0])
    for loss in losses:
        loss.backward()
    for loop in reversed(loops):
        finalize_model_grads([loop.model])
    for loop in loops:
        loop.optimizer.step()
        loop.compression.step()


def outcome(loop) -> dict:
    """Return a session's ledger, and its model's gradients and weights."""
    parameters = dict(loop.model.named_parameters())
    return {
        "rows": loop.compression.ledger.rows(),
        "gradients": {name: value.main_grad.clone() for name, value in parameters.items()},
        "weights": {name: value.detach().clone() for name, value in parameters.items()},
    }


def loops_worker(
    rank: int, ranks: int, names: tuple[str, ...], tensor: int, pipeline: int
) -> list[dict]:
    """Train two iterations, and return the outcome of each session."""
    loops = loops_of(names, tensor, pipeline)
    for step in range(2):
        iterate(loops, step, pipeline)
    return [outcome(loop) for loop in loops]


def assert_same(actual: dict, alone: dict) -> None:
    """Assert that bytes and tensors are those of a session that is alone, to the last bit."""
    assert actual["rows"] == alone["rows"]
    for kind in ("gradients", "weights"):
        assert actual[kind].keys() == alone[kind].keys()
        for name, tensor in actual[kind].items():
            assert torch.equal(tensor, alone[kind][name]), f"{kind} of {name}"


@functools.cache
def outcomes(names: tuple[str, ...], tensor: int, pipeline: int) -> list[list[dict]]:
    """Return the results of ``loops_worker`` by rank."""
    return spawn(loops_worker, 2, names, tensor, pipeline)


@pytest.mark.parametrize(
    "names", [("int8", "none"), ("none", "int8")], ids=["compressed first", "counted first"]
)
@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), (1, 2), (1, 1)], ids=["tensor", "pipeline", "data"]
)
def test_two_sessions_stay_apart(tensor: int, pipeline: int, names: tuple[str, ...]) -> None:
    """One session compresses, the other one only counts."""
    for rank, sessions in enumerate(outcomes(names, tensor, pipeline)):
        for name, session in zip(names, sessions, strict=True):
            (alone,) = outcomes((name,), tensor, pipeline)[rank]
            assert_same(session, alone)


def closing_worker(rank: int, ranks: int) -> dict:
    """Close one of two sessions between two iterations, and in the end the other one.

    Returns:
        The first session's outcome, and the symbols that were replaced after each closing.
    """
    before = objects_at(SYMBOLS)

    def replaced() -> list[str]:
        objects = zip(SYMBOLS, objects_at(SYMBOLS), before, strict=True)
        return [symbol for symbol, now, original in objects if now is not original]

    first, second = loops_of(("int8", "int6"), 1, 2)
    iterate([first, second], 0, 2)
    second.compression.close()
    replaced_by_first = replaced()
    iterate([first, second], 1, 2)
    first.compression.close()
    second.compression.close()
    return {
        "first": outcome(first),
        "replaced while one is open": replaced_by_first,
        "replaced in the end": replaced(),
    }


@functools.cache
def closings() -> list[dict]:
    """Return the results of ``closing_worker`` by rank."""
    return spawn(closing_worker, 2)


def test_a_session_trains_on_when_another_is_closed() -> None:
    for rank, closing in enumerate(closings()):
        (alone,) = outcomes(("int8",), 1, 2)[rank]
        assert_same(closing["first"], alone)


def test_functions_stay_replaced_while_a_session_is_open() -> None:
    for closing in closings():
        assert closing["replaced while one is open"] == list(SYMBOLS)


def test_the_last_session_puts_the_original_functions_back() -> None:
    for closing in closings():
        assert closing["replaced in the end"] == []


def closed_model_worker(rank: int, ranks: int) -> list[dict]:
    """Return the rows of compressed messages that a closed session's model adds to its ledger."""
    (loop,) = loops_of(("int8",), 2, 1)
    iterate([loop], 0, 1)
    loop.compression.close()
    sent = loop.compression.ledger.rows()
    iterate([loop], 1, 1)
    new_rows = [row for row in loop.compression.ledger.rows() if row not in sent]
    return [row for row in new_rows if row["kind"] == "compressed"]


def test_a_model_whose_session_is_closed_sends_uncompressed() -> None:
    """It still trains."""
    assert spawn(closed_model_worker, 2) == [[], []]


def engine_pass(models: list, step: int) -> list[dict]:
    """Run models of Transformer Engine's layers, forwards first, and return their gradients."""
    losses = []
    for model in models:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
        losses.append(model(x).sin().sum())
    for loss in losses:
        loss.backward()
    return [
        {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        for model in models
    ]


def engine_worker(rank: int, ranks: int, names: tuple[str, ...]) -> list[tuple[dict, list]]:
    """Train a model of Transformer Engine's layers for each codec, and close one run after another.

    Returns:
        Gradients and ledger of each.
    """
    with stand_in() as group:
        from megatron.compression.patches import running
        from megatron.compression.tensor_parallel import hooks

        importlib.import_module("transformer_engine.pytorch")
        before = objects_at(ENGINE_SYMBOLS)
        models = []
        runs = []
        for name in names:
            model = Model(rank, group, sequence_parallel=False, fuse=True)
            run = run_with(name)
            hooks.TensorParallel(run.config, run).attach([model])
            models.append(model)
            runs.append(run)
        for original, now in zip(before, objects_at(ENGINE_SYMBOLS), strict=True):
            assert now is not original
        for step in range(2):
            gradients = engine_pass(models, step)
        for run in runs:
            assert objects_at(ENGINE_SYMBOLS)[0] is not before[0], "another run is open"
            running.close_run(run)
        for original, now in zip(before, objects_at(ENGINE_SYMBOLS), strict=True):
            assert now is original
        return list(zip(gradients, [run.ledger.rows() for run in runs], strict=True))


@functools.cache
def engine_results(*names: str) -> list[list[tuple[dict, list]]]:
    """Return the results of ``engine_worker`` by rank."""
    return spawn(engine_worker, 2, names)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "name"), [(0, "int4"), (1, "int8")])
def test_transformer_engines_layers_of_two_runs_stay_apart(
    number: int, name: str, rank: int
) -> None:
    """Compressed, counted, and their weight gradients deferred: each as if it were alone."""
    gradients, rows = engine_results("int4", "int8")[rank][number]
    alone_gradients, alone_rows = engine_results(name)[rank][0]
    assert rows
    assert rows == alone_rows
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, alone_gradients[parameter]), parameter


class Raised(Exception):
    """A fault in a backward pass."""


def raising_worker(rank: int, ranks: int, raises: bool) -> tuple[dict, int]:
    """Train after a step whose backward pass may have raised between two layers.

    Args:
        rank: this rank.
        ranks: number of ranks.
        raises: whether it has.

    Returns:
        The last step's gradients, and the number of layers that count as running.
    """

    def explode(gradient: torch.Tensor) -> None:
        raise Raised

    def explode_later(module, inputs, output: torch.Tensor) -> None:
        output.register_hook(explode)

    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks
        from megatron.compression.transformer_engine.hooks import _active

        model = Model(rank, group, sequence_parallel=False, fuse=True)
        run = run_with("identity")
        hooks.TensorParallel(run.config, run).attach([model])
        if raises:
            handle = model.blocks[1].linear_fc1.register_forward_hook(explode_later)
            with pytest.raises(Raised):
                engine_pass([model], 0)
            handle.remove()
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        for step in (1, 2):
            (gradients,) = engine_pass([model], step)
        return gradients, len(_active)


@functools.cache
def raising_results(raises: bool) -> list[tuple[dict, int]]:
    """Return the results of ``raising_worker`` by rank."""
    return spawn(raising_worker, 2, raises)


def test_no_layer_counts_as_running_after_a_backward_pass_that_raised() -> None:
    for _, active in raising_results(True):
        assert active == 0


def test_no_weight_gradient_of_a_backward_pass_that_raised_comes_later() -> None:
    """The loop has caught the exception and skipped the batch."""
    results = zip(raising_results(True), raising_results(False), strict=True)
    for (gradients, _), (expected, _) in results:
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
