"""Megatron-Bridge's pretrain with the callback: the package where it is, its calls elsewhere.

Megatron-Bridge runs here without a GPU. In folders of their own, which pip does not merge:

    pip install --no-deps --target A megatron-bridge==0.6.2 nvidia-modelopt nvidia-resiliency-ext
    pip install --no-deps --target A datasets multiprocess dill xxhash pyarrow pandas diffusers
    pip install --no-deps --target A scipy deprecation filetype rapidyaml pulp orloge
    pip install --no-deps --target A cpsat-logutils defusedxml omegaconf
    pip install --no-deps --target A antlr4-python3-runtime==4.9.3
    pip install --no-deps --target B megatron-energon
    pip install --target C multi-storage-client webdataset s3fs braceexpand jsonschema requests
    rm -r C/numpy*
    MEGATRON_BRIDGE=A:B:C python -m pytest tests/distributed/test_bridge.py
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.launch import REPO, torchrun
from tests.distributed.spawn import spawn
from tests.unit.test_bridge import container

FOLDERS = "MEGATRON_BRIDGE"
REAL = pytest.mark.skipif(
    FOLDERS not in os.environ,
    reason=f"{FOLDERS} names no folders of the package; the top of this file says how",
)


class CallbackRun:
    """A loop of own_loop.py that calls the callback as Megatron-Bridge does.

    Args:
        folder: of checkpoints.
        tensor: tensor-parallel size.
        step: the number of iterations before it.
    """

    def __init__(self, folder: str, tensor: int, step: int) -> None:
        from examples import own_loop
        from megatron.compression import bridge

        cfg = container(
            model__transformer_impl="local",
            model__pipeline_model_parallel_size=1,
            model__sequence_parallel=False,
            checkpoint__save=folder,
            checkpoint__load=folder,
        )
        cfg.logger = SimpleNamespace(log_interval=2)
        self.callback = bridge.attach(cfg, tp="int8", min_mb=0, error_bound=1e-4)

        def build(chunks, config):
            """Stand in for own_loop.py's compression: run the hooks of the configuration."""
            cfg.hooks[0][0](chunks)
            return SimpleNamespace(attach_wrapped=cfg.hooks[1][0], step=lambda: None)

        own_loop.attach = build
        self.loop = own_loop.Loop(tensor, 1, None)
        self.tags: set[str] = set()
        """Names of the scalars that were logged."""
        logger = SimpleNamespace(add_scalar=lambda tag, *_: self.tags.add(tag))
        state = SimpleNamespace(train_state=SimpleNamespace(step=step))
        state.tensorboard_logger = logger
        state.wandb_logger = None
        self.context = SimpleNamespace(
            state=state, loss_dict={}, skipped_iter=False, total_loss_dict={}
        )
        self.callback.on_train_start(self.context)

    def train(self, iteration: int) -> None:
        """Run one iteration between the callback's two calls."""
        import torch

        self.callback.on_train_step_start(self.context)
        self.context.loss_dict = {"lm loss": torch.tensor(self.loop.iterate(iteration))}
        self.callback.on_train_step_end(self.context)
        self.context.state.train_state.step += 1

    @property
    def layers_past_the_bound(self) -> dict:
        """Layers whose error has passed the bound, and their errors."""
        return self.callback.compression.run.policy.meter.state()


def bridge_worker(rank: int, world_size: int, folder: str) -> dict:
    """Train, evaluate, save, and resume twice: from a good file and from a damaged one."""
    os.environ["RANK"] = str(rank)
    import torch
    from megatron.core import parallel_state

    checkpoint = Path(folder) / "iter_0000002"
    run = CallbackRun(folder, world_size, step=0)
    for iteration in range(2):
        run.train(iteration)
    ledger = run.callback.compression.ledger
    kinds = {row["kind"] for row in ledger.rows() if row["traffic"] == "tp.forward"}
    run.callback.on_eval_start(run.context)
    phase = ledger.phase
    run.callback.on_eval_end(run.context)
    if rank == 0:
        run.callback.on_checkpoint_save(run.context)  # without a folder, which ends no training
        checkpoint.mkdir()
        # As Megatron-Bridge with async_save: the tracker names the checkpoint before.
        (Path(folder) / "iter_0000001").mkdir()
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("1")
    run.callback.on_checkpoint_save(run.context)
    torch.distributed.barrier()

    parallel_state.destroy_model_parallel()
    resumed = CallbackRun(folder, world_size, step=2)
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("iter_*/*"))
    torch.distributed.barrier()
    if rank == 0:
        (checkpoint / "megatron_taco.json").write_text('{"config": {')
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    resumed_from_damaged = CallbackRun(folder, world_size, step=2)
    return {
        "kinds": kinds,
        "phases": (phase, ledger.phase),
        "tags": run.tags,
        "files": files,
        "past the bound": run.layers_past_the_bound,
        "past the bound after a resume": resumed.layers_past_the_bound,
        "past the bound after a damaged file": resumed_from_damaged.layers_past_the_bound,
    }


@pytest.fixture(scope="module")
def callback_results(tmp_path_factory) -> list[dict]:
    """Results of ``bridge_worker`` by rank."""
    return spawn(bridge_worker, 2, str(tmp_path_factory.mktemp("bridge")))


def test_callback_compresses(callback_results: list[dict]) -> None:
    for rank in callback_results:
        assert rank["kinds"] == {"compressed"}


def test_callback_counts_evaluations_by_themselves(callback_results: list[dict]) -> None:
    for rank in callback_results:
        assert rank["phases"] == ("eval", "train")


def test_callback_saves_into_the_iterations_folder(callback_results: list[dict]) -> None:
    for rank in callback_results:
        assert rank["files"] == ["iter_0000002/megatron_taco.json"]


def test_layers_past_the_bound_stay_so_after_a_resume(callback_results: list[dict]) -> None:
    for rank in callback_results:
        assert rank["past the bound"]
        assert rank["past the bound after a resume"] == rank["past the bound"]


def test_damaged_file_ends_no_training(callback_results: list[dict]) -> None:
    """The log has a line; the bound begins anew."""
    for rank in callback_results:
        assert not rank["past the bound after a damaged file"]


def test_last_rank_logs_scalars(callback_results: list[dict]) -> None:
    assert any("ratio" in tag for tag in callback_results[-1]["tags"])
    assert not callback_results[0]["tags"]


def run(ranks: int, **options) -> list[dict]:
    """Run a tiny pretrain of the package.

    Args:
        ranks: number of ranks.
        options: of bridge_run.py, by name; True for a switch.

    Returns:
        By rank the losses of each iteration, the dispatcher before and after ``attach``, and the
        ledger.
    """
    flags = []
    for name, value in options.items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(value)
    env = {
        "PYTHONPATH": os.pathsep.join((str(REPO), os.environ[FOLDERS])),
        "HF_HUB_OFFLINE": "1",
    }
    started = torchrun("tests/distributed/bridge_run.py", *flags, processes=ranks, **env)
    finished = started.finish(400)
    assert finished.returncode == 0, finished.output[-4000:]
    results = re.findall(r"^RESULT (.*)$", finished.output, re.MULTILINE)
    return sorted(map(json.loads, results), key=lambda row: row["rank"])


def compressed_channels(rows: list[dict]) -> set[str]:
    """Return the traffic classes that sent payloads on some rank."""
    channels = set()
    for rank in rows:
        channels |= {row["traffic"] for row in rank["ledger"] if row["kind"] == "compressed"}
    return channels


@REAL
class TestPretrain:
    """Megatron-Bridge's pretrain at TP 2 and PP 2, and its resume from the second iteration."""

    LAYOUT = json.dumps(dict(tensor=2, pipeline=2))
    ATTACH = json.dumps(dict(tp=["int8", "int6"], pp="int8", min_mb=0, error_bound=0.01))

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> str:
        return str(tmp_path_factory.mktemp("pretrain"))

    @pytest.fixture(scope="class")
    def uninterrupted(self, folder: str) -> list[dict]:
        return run(4, layout=self.LAYOUT, attach=self.ATTACH, folder=folder)

    def test_it_compresses(self, uninterrupted: list[dict]) -> None:
        channels = {"tp.forward", "tp.backward", "pp.forward", "pp.backward"}
        assert channels <= compressed_channels(uninterrupted)

    def test_resume_has_the_same_losses(self, uninterrupted: list[dict], folder: str) -> None:
        resumed = run(4, layout=self.LAYOUT, attach=self.ATTACH, folder=folder, from_iteration="2")
        assert resumed[-1]["losses"] == uninterrupted[-1]["losses"][2:]

    def test_scalars_are_written(self, uninterrupted: list[dict], folder: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{folder}/events").Reload()
        assert any("ratio" in tag for tag in events.Tags()["scalars"])


@REAL
def test_pretrain_of_experts_compresses_tokens_and_gradients() -> None:
    attach = json.dumps(dict(ep="int8:group=64", dp="sdp4bit", min_mb=0))
    rows = run(2, layout=json.dumps(dict(expert=2)), attach=attach)
    channels = {"ep.forward", "ep.backward", "dp.gradient", "dp.weight"}
    assert channels <= compressed_channels(rows)


@REAL
def test_recipe_of_experts_that_names_flex_trains_by_alltoall() -> None:
    """The package's recipe of Qwen3-30B-A3B, whose container names the flex dispatcher."""
    attach = json.dumps(dict(ep="int8:group=64", min_mb=0))
    rows = run(2, qwen3_experts=True, layout=json.dumps(dict(expert=2)), attach=attach)
    assert {"ep.forward", "ep.backward"} <= compressed_channels(rows)
    for rank in rows:
        assert rank["dispatchers"] == ["flex", "alltoall"]
        losses = [iteration["lm loss"] for iteration in rank["losses"]]
        assert losses[-1] < losses[0]
