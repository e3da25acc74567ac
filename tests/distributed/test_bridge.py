"""Megatron-Bridge's pretrain with the callback: the package itself where it is, and its calls elsewhere.

Megatron-Bridge runs here without a GPU. In folders of their own, which pip does not merge:

    pip install --no-deps --target A megatron-bridge==0.6.2 nvidia-modelopt nvidia-resiliency-ext datasets
    pip install --no-deps --target A multiprocess dill xxhash pyarrow pandas diffusers scipy deprecation
    pip install --no-deps --target A filetype rapidyaml pulp orloge cpsat-logutils defusedxml omegaconf
    pip install --no-deps --target A antlr4-python3-runtime==4.9.3
    pip install --no-deps --target B megatron-energon
    pip install --target C multi-storage-client webdataset s3fs braceexpand jsonschema requests
    rm -r C/numpy*
    MEGATRON_BRIDGE=A:B:C python -m pytest tests/distributed/test_bridge.py
"""

import json
import os
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


def bridge_worker(rank: int, world_size: int, folder: str) -> dict:
    """Two iterations and an evaluation as Megatron-Bridge calls its callbacks, saved, and resumed."""
    os.environ["RANK"] = str(rank)
    import torch

    from examples import own_loop
    from megatron.compression import bridge

    given = dict(tp="int8", min_mb=0, error_bound=1e-4)
    parts = dict(model__transformer_impl="local", model__pipeline_model_parallel_size=1)
    parts |= dict(model__sequence_parallel=False, checkpoint__save=folder, checkpoint__load=folder)

    def started(step: int):
        cfg = container(**parts)
        cfg.logger = SimpleNamespace(log_interval=2)
        callback = bridge.attach(cfg, **given)

        def build(chunks, config):  # what the loop gets in place of an own loop's compression
            cfg.hooks[0][0](chunks)
            return SimpleNamespace(attach_wrapped=cfg.hooks[1][0], step=lambda: None)

        own_loop.attach = build
        loop = own_loop.Loop(world_size, 1, None)
        state = SimpleNamespace(train_state=SimpleNamespace(step=step))
        tags: set[str] = set()
        state.tensorboard_logger = SimpleNamespace(
            tags=tags, add_scalar=lambda tag, *_: tags.add(tag)
        )
        state.wandb_logger = None
        context = SimpleNamespace(state=state, loss_dict={}, skipped_iter=False, total_loss_dict={})
        callback.on_train_start(context)
        return loop, callback, context

    loop, callback, context = started(0)
    for iteration in range(2):
        callback.on_train_step_start(context)
        context.loss_dict = {"lm loss": torch.tensor(loop.iterate(iteration))}
        callback.on_train_step_end(context)
        context.state.train_state.step += 1
    ledger = callback.compression.ledger
    trained = {row["kind"] for row in ledger.rows() if row["traffic"] == "tp.forward"}
    callback.on_eval_start(context)
    evaluating = ledger.evaluating
    callback.on_eval_end(context)
    if rank == 0:
        callback.on_checkpoint_save(context)  # without a folder, which ends no training
        (Path(folder) / "iter_0000002").mkdir()
        # As Megatron-Bridge with async_save: the tracker names the checkpoint before.
        (Path(folder) / "iter_0000001").mkdir()
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("1")
    callback.on_checkpoint_save(context)
    torch.distributed.barrier()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _, again, _ = started(2)
    off = [one.compression.run.policy.meter.state() for one in (callback, again)]
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("iter_*/*"))
    torch.distributed.barrier()
    if rank == 0:
        (Path(folder) / "iter_0000002/megatron_taco.json").write_text('{"config": {')
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    _, damaged, _ = started(2)
    return {
        "files": files,
        "after a damaged file": damaged.compression.run.policy.meter.state(),
        "kinds": trained,
        "evaluating": (evaluating, ledger.evaluating),
        "tags": context.state.tensorboard_logger.tags,
        "off": off,
    }


def test_callbacks_count_log_and_resume(tmp_path: Path) -> None:
    ranks = spawn(bridge_worker, 2, str(tmp_path))
    for rank in ranks:
        assert rank["kinds"] == {"compressed"} and rank["evaluating"] == (True, False)
        before, resumed = rank["off"]
        assert before and resumed == before, "layers past the error bound stay uncompressed"
        assert rank["files"] == ["iter_0000002/megatron_taco.json"], "whole, and of this iteration"
        assert not rank["after a damaged file"], "a damaged file is a line, and no error"
    assert any("ratio" in tag for tag in ranks[-1]["tags"]) and not ranks[0]["tags"]


def run(ranks: int, **options) -> list[dict]:
    """A tiny pretrain of the package: by rank the losses of each iteration and the ledger."""
    words = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    env = dict(PYTHONPATH=os.pathsep.join((str(REPO), os.environ[FOLDERS])), HF_HUB_OFFLINE="1")
    done = torchrun("tests/distributed/bridge_run.py", *words, processes=ranks, **env).finish(400)
    assert done.returncode == 0, done.output[-4000:]
    rows = [json.loads(line[7:]) for line in done.output.splitlines() if line.startswith("RESULT ")]
    return sorted(rows, key=lambda row: row["rank"])


def compressed(rows: list[dict]) -> set[str]:
    """Traffic classes that sent payloads on some rank."""
    return {one["traffic"] for row in rows for one in row["ledger"] if one["kind"] == "compressed"}


@REAL
def test_pretrain_compresses_and_resumes_to_the_same_losses(tmp_path: Path) -> None:
    """TP 2 and PP 2: the losses after a resume are those of the run that went on, and scalars are written."""
    layout = json.dumps(dict(tensor=2, pipeline=2))
    given = json.dumps(dict(tp=["int8", "int6"], pp="int8", min_mb=0, error_bound=0.01))
    options = dict(layout=layout, attach=given, folder=str(tmp_path))
    whole = run(4, **options)
    assert {"tp.forward", "tp.backward", "pp.forward", "pp.backward"} <= compressed(whole)
    resumed = run(4, **options, from_iteration="2")
    assert resumed[-1]["losses"] == whole[-1]["losses"][2:]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert any("ratio" in tag for tag in events.Tags()["scalars"])


@REAL
def test_pretrain_of_experts() -> None:
    """EP 2: tokens and gradients are compressed."""
    given = json.dumps(dict(ep="int8:group=64", dp="sdp4bit", min_mb=0))
    rows = run(2, layout=json.dumps(dict(expert=2)), attach=given)
    assert {"ep.forward", "ep.backward", "dp.gradient", "dp.weight"} <= compressed(rows)
