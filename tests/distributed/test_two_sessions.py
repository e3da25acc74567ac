"""Two sessions in one process, over the same process groups: an actor and a critic, a teacher and a student.

Each keeps what it has alone: settings, decisions, bytes, gradients and weights, whatever the other one does, and
also after the other one has been closed. With the last one the functions of other packages are their own again.
"""

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
"""What a session with every dimension of ``loops`` replaces."""

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


def held(symbols: tuple[str, ...]) -> list[object]:
    """What the owners of these symbols hold now."""
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
    """Settings of one session."""
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
    """A training loop for each setting, all over the same process groups."""
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
    """One iteration of each loop: their forwards, then their backwards, then the sums of their gradients."""
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
    """What a session has sent, and what has become of its model."""
    return {
        "rows": loop.compression.ledger.rows(),
        "gradients": {
            name: parameter.main_grad.clone() for name, parameter in loop.model.named_parameters()
        },
        "weights": {
            name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()
        },
    }


def loops_worker(
    rank: int, ranks: int, names: tuple[str, ...], tensor: int, pipeline: int
) -> list[dict]:
    loops = loops_of(names, tensor, pipeline)
    for step in range(2):
        iterate(loops, step, pipeline)
    return [outcome(loop) for loop in loops]


def assert_same(together: dict, alone: dict) -> None:
    """Bytes and tensors are those of a session that is alone, to the last bit."""
    assert together["rows"] == alone["rows"]
    for kind in ("gradients", "weights"):
        assert together[kind].keys() == alone[kind].keys()
        for name, tensor in together[kind].items():
            assert torch.equal(tensor, alone[kind][name]), f"{kind} of {name}"


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), (1, 2), (1, 1)], ids=["tensor", "pipeline", "data"]
)
def test_two_sessions_stay_apart(tensor: int, pipeline: int) -> None:
    """The first compresses, the second only counts; then the other way round."""
    alone = {name: spawn(loops_worker, 2, (name,), tensor, pipeline) for name in ("int8", "none")}
    for names in (("int8", "none"), ("none", "int8")):
        for rank, outcomes in enumerate(spawn(loops_worker, 2, names, tensor, pipeline)):
            for name, together in zip(names, outcomes, strict=True):
                assert_same(together, alone[name][rank][0])


def closing_worker(
    rank: int, ranks: int, closes: bool, pipeline: int
) -> tuple[dict, list[int], list[int]]:
    before = held(SYMBOLS)

    def changed() -> list[int]:
        pairs = zip(held(SYMBOLS), before, strict=True)
        return [number for number, (now, original) in enumerate(pairs) if now is not original]

    first, second = loops_of(("int8", "int6"), 1, pipeline)
    iterate([first, second], 0, pipeline)
    if closes:
        second.compression.close()
    changed_while_open = changed()
    iterate([first, second], 1, pipeline)
    first.compression.close()
    second.compression.close()
    return outcome(first), changed_while_open, changed()


def test_a_session_is_closed_while_another_trains() -> None:
    """The other one goes on as before; with the last one the functions are the originals, the very objects."""
    alone = spawn(loops_worker, 2, ("int8",), 1, 2)
    for rank, (first, open_, closed) in enumerate(spawn(closing_worker, 2, True, 2)):
        assert_same(first, alone[rank][0])
        assert open_ == list(range(len(SYMBOLS))) and closed == []


def closed_model_worker(rank: int, ranks: int) -> list[dict]:
    (loop,) = loops_of(("int8",), 2, 1)
    iterate([loop], 0, 1)
    loop.compression.close()
    sent = loop.compression.ledger.rows()
    iterate([loop], 1, 1)
    return [
        {key: row[key] for key in ("traffic", "kind", "calls")}
        for row in loop.compression.ledger.rows()
        if row not in sent and row["kind"] == "compressed"
    ]


def test_a_model_whose_session_is_closed_sends_uncompressed() -> None:
    """It still trains: nothing of it is compressed any more."""
    assert spawn(closed_model_worker, 2) == [[], []]


def engine_pass(models: list, step: int) -> list[dict]:
    """The gradients of each model of Transformer Engine's layers: forwards first, then backwards."""
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
    with stand_in() as group:
        from megatron.compression.patches import running
        from megatron.compression.tensor_parallel import hooks

        importlib.import_module("transformer_engine.pytorch")
        before = held(ENGINE_SYMBOLS)
        models, runs = [], []
        for name in names:
            models.append(Model(rank, group, sequence_parallel=False, fuse=True))
            runs.append(run_with(name))
            hooks.TensorParallel(runs[-1].config, runs[-1]).attach(models[-1:])
        for original, now in zip(before, held(ENGINE_SYMBOLS), strict=True):
            assert now is not original
        for step in range(2):
            gradients = engine_pass(models, step)
        for run in runs:
            assert held(ENGINE_SYMBOLS)[0] is not before[0], "another run is open"
            running.close_run(run)
        for original, now in zip(before, held(ENGINE_SYMBOLS), strict=True):
            assert now is original
        return list(zip(gradients, [run.ledger.rows() for run in runs], strict=True))


def test_transformer_engines_layers_of_two_runs_stay_apart() -> None:
    """Compressed, counted, and their weight gradients deferred: each as if it were alone."""
    alone = {name: spawn(engine_worker, 2, (name,)) for name in ("int4", "int8")}
    for rank, outcomes in enumerate(spawn(engine_worker, 2, ("int4", "int8"))):
        for name, (gradients, rows) in zip(("int4", "int8"), outcomes, strict=True):
            alone_gradients, alone_rows = alone[name][rank][0]
            assert rows == alone_rows and rows
            for parameter, gradient in gradients.items():
                assert torch.equal(gradient, alone_gradients[parameter]), f"{name} {parameter}"


class Raised(Exception):
    """By a backward pass."""


def raising_worker(rank: int, ranks: int, raises: bool) -> tuple[dict, int]:
    """Gradients of the step after one whose backward pass may have raised between two layers."""

    def explode(gradient: torch.Tensor) -> None:
        raise Raised

    def explode_later(module, inputs, output: torch.Tensor) -> None:
        output.register_hook(explode)

    with stand_in() as group:
        from megatron.compression.tensor_parallel import hooks
        from megatron.compression.transformer_engine.hooks import _active

        model, run = Model(rank, group, sequence_parallel=False, fuse=True), run_with("identity")
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


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    """The loop has caught it and skipped the batch: no deferred weight gradient comes to a later step, and no
    layer counts as running."""
    caught, undisturbed = spawn(raising_worker, 2, True), spawn(raising_worker, 2, False)
    for (gradients, active), (expected, _) in zip(caught, undisturbed, strict=True):
        assert active == 0
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
