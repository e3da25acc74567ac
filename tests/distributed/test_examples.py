"""The launch scripts in examples/: their full-size command lines are valid, their TINY runs train on CPU."""

import math
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.distributed.launch import (
    NONE_SKIPPED,
    REPO,
    START_FAST,
    UNKNOWN,
    free_port,
    launched,
    start,
)
from tests.distributed.real_text import make_dataset
from tests.distributed.spawn import spawn

GPT3 = "gpt/train_gpt3_175b.sh"
LLAMA3 = "gpt/train_llama3_8b.sh"
QWEN = "qwen/pretrain_qwen_taco.sh"
MIXTRAL = "experts/train_mixtral_8x7b.sh"
SLURM = REPO / "examples" / "slurm.sbatch"
SCRIPTS = sorted(
    str(path.relative_to(REPO / "examples")) for path in (REPO / "examples").glob("*/*.sh")
)
SCRIPTS.remove("paper/defaults.sh")
ITERATIONS = 12
SHORT = {"TINY": "1", "TRAIN_ITERS": str(ITERATIONS), "EVAL_INTERVAL": str(ITERATIONS)}
DATA = {"DATA_PATH": "pile", "TOKENIZER_MODEL": "pile"}

# script -> parameters of the published model, padded vocabulary aside; layers; tensor and expert parallelism;
# experts, those of a token; codec of tensor parallelism
FULL_SIZE = {
    GPT3: (174.6e9, 96, 8, 1, (None, 2), "none"),
    LLAMA3: (8.03e9, 32, 4, 1, (None, 2), "none"),
    QWEN: (7.616e9, 28, 4, 1, (None, 2), "int8"),
    MIXTRAL: (46.70e9, 32, 1, 8, (8, 2), "none"),
    "experts/train_qwen3_30b_a3b.sh": (30.53e9, 48, 1, 8, (128, 8), "none"),
    "experts/train_deepseek_v2_lite.sh": (15.71e9, 27, 1, 8, (64, 6), "none"),
}


def parameters(args) -> float:
    """Parameters of the model that Megatron's arguments describe, with learned positions."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    on_one_rank = Namespace(**vars(args))
    on_one_rank.world_size = 1
    on_one_rank.use_distributed_optimizer = False
    for size in ("tensor_model", "pipeline_model", "expert_tensor", "expert_model"):
        setattr(on_one_rank, f"{size}_parallel_size", 1)
    bytes_of_a_parameter = 18  # weight, gradient, master and two moments
    count = compute_weight_and_optimizer_memory(on_one_rank) / bytes_of_a_parameter
    if args.position_embedding_type == "learned_absolute":
        # Megatron's count leaves them out.
        count += args.max_position_embeddings * args.hidden_size
    return count


def validate(rank: int, world_size: int, lines: dict[str, list[str]]) -> dict[str, dict]:
    """What Megatron makes of torchrun's words, by name; in a process of its own, for its state is global."""
    import torch
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from megatron.compression.flags import resolve
    from megatron.compression.frontends.megatron_lm.enable import adapt_arguments, add_arguments
    from megatron.compression.huggingface.models import add_qwen_arguments, expand

    def add_all_arguments(parser):
        return add_qwen_arguments(add_arguments(parser))

    results = {}
    for name, words in lines.items():
        entrypoint = words.index("PRETRAIN")
        launch = words[:entrypoint]
        flags = words[entrypoint + 1 :]
        processes = int(launch[launch.index("--nproc_per_node") + 1])
        nodes = int(launch[launch.index("--nnodes") + 1])
        os.environ["WORLD_SIZE"] = str(processes * nodes)
        if "--qwen-model" in flags:
            flags, _ = expand(flags)
        sys.argv = ["pretrain.py", *flags]
        args = parse_args(add_all_arguments)
        validate_args(args)
        adapt_arguments(args)
        args.padded_vocab_size = args.vocab_size
        compression = resolve(args)
        transformer = gpt_config_from_args(args).transformer
        decay = args.lr_decay_iters or args.train_iters
        results[name] = {
            "parameters": parameters(args),
            "layers": transformer.num_layers,
            "implementation": transformer.transformer_impl,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "ep": args.expert_model_parallel_size,
            "experts": (transformer.num_moe_experts, transformer.moe_router_topk),
            "dp": args.data_parallel_size,
            "specs": [
                compression.tensor_parallel.compression,
                compression.pipeline_parallel.compression,
                compression.data_parallel.compression,
                compression.data_parallel.weights,
            ],
            "least_mb": compression.tensor_parallel.min_bytes / 2**20,
            "fraction": compression.caat_net.sync_fraction,
            "fp32": args.params_dtype == torch.float32,
            "train_iters": args.train_iters,
            "schedule": (args.global_batch_size, args.seq_length, args.lr, args.min_lr, decay),
            "evaluation": (args.eval_interval, args.eval_iters),
        }
    return results


def environment(**variables: str) -> dict[str, str]:
    """This environment with the interpreter's torchrun first, without what a launcher may have set."""
    result = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "TINY"):
        result.pop(name, None)
    result["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result["OMP_NUM_THREADS"] = "1"
    return result | variables


def fake(directory: Path, name: str, body: str) -> None:
    """Put an executable `name` into `directory`."""
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def printed(words: list, env: dict[str, str], folder: Path) -> list[str]:
    """The lines that a command prints, which has to succeed."""
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def command_line(tmp_path: Path, script: str, *flags: str, **variables: str) -> list[str]:
    """The words that a script gives torchrun, its name for the entrypoint replaced by PRETRAIN."""
    fake(tmp_path, "torchrun", 'env > "$0.environment"; printf "%s\\n" "$@"')
    env = environment(**variables)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    words = printed([REPO / "examples" / script, *flags], env, tmp_path)
    (entrypoint,) = (word for word in words if word.startswith(f"{REPO}/pretrain_"))
    words[words.index(entrypoint)] = "PRETRAIN"
    return words


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> dict:
    """What Megatron makes of every full-size and every TINY command line."""
    folder = tmp_path_factory.mktemp("validated")
    lines = {
        (script, size): command_line(folder, script, **{size: "1"})
        for script in FULL_SIZE
        for size in ("MOCK", "TINY")
    }
    lines[GPT3, "GRAPHS"] = command_line(folder, GPT3, MOCK="1", GRAPHS="1")
    return spawn(validate, 1, lines)[0]


@pytest.mark.parametrize("script", FULL_SIZE)
def test_flags_describe_the_published_model(validated, script):
    full = validated[script, "MOCK"]
    published_size, layers, tp, ep, experts, spec = FULL_SIZE[script]
    assert full["parameters"] == pytest.approx(published_size, rel=0.01)
    assert (full["layers"], full["tp"], full["ep"]) == (layers, tp, ep)
    assert full["experts"] == experts
    assert full["implementation"] == "local"
    assert full["specs"] == [spec, "none", "none", "none"]


@pytest.mark.parametrize("script", FULL_SIZE)
def test_a_tiny_model_fits_a_laptop(validated, script):
    """Two layers on two processes; mixtures of experts spread their experts over them."""
    tiny = validated[script, "TINY"]
    assert tiny["parameters"] < 1e6
    assert (tiny["layers"], tiny["train_iters"]) == (2, 20)
    if "experts" in script:
        assert (tiny["tp"], tiny["ep"]) == (1, 2)
    else:
        assert (tiny["tp"], tiny["ep"]) == (2, 1)


@pytest.mark.parametrize("script", [script for script in FULL_SIZE if script != QWEN])
def test_scripts_compress_nothing_by_themselves(tmp_path, script):
    """Over NVLink compression seldom gains; Qwen's script is for boxes of PCIe GPUs."""
    words = command_line(tmp_path, script, MOCK="1")
    assert not [word for word in words if "compression" in word or word == "--taco"]


def test_graphs_add_what_a_capture_needs(tmp_path):
    eager = command_line(tmp_path, GPT3, MOCK="1")
    captured = command_line(tmp_path, GPT3, MOCK="1", GRAPHS="1")
    assert set(captured) - set(eager) == {
        "--cuda-graph-impl",
        "full_iteration",
        "--no-check-for-nan-in-loss-and-grad",
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_asks_for_its_data(tmp_path, script):
    """Nothing starts without; SLURM hands the script's error on."""
    for words in ([REPO / "examples" / script], ["bash", SLURM, script]):
        env = slurm(tmp_path)
        fake(tmp_path, "torchrun", "echo started")
        done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert "started" not in done.stdout
        message = "error: DATA_PATH is not set: give the prefix of an indexed dataset ("
        assert done.stderr.startswith(message)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_trial_on_mock_data_touches_no_checkpoint(tmp_path, script):
    words = command_line(tmp_path, script, MOCK="1", CHECKPOINT_PATH="real", **DATA)
    assert "--mock-data" in words
    assert not {"--save", "--load", "--data-path"} & set(words)


def test_extra_flags_come_last_and_paths_are_kept_whole(tmp_path):
    words = command_line(
        tmp_path,
        LLAMA3,
        "--lr",
        "1e-5",
        "--exit-signal-handler",
        DATA_PATH="0.3 /data/a_text_document 0.7 /data/b_text_document",
        TOKENIZER_MODEL="/models/with space/tokenizer",
        CHECKPOINT_PATH="/out put/checkpoints",
    )
    assert words[-3:] == ["--lr", "1e-5", "--exit-signal-handler"]
    start = words.index("--data-path")
    assert words[start + 1 : start + 5] == [
        "0.3",
        "/data/a_text_document",
        "0.7",
        "/data/b_text_document",
    ]
    assert words[words.index("--tokenizer-model") + 1] == "/models/with space/tokenizer"
    assert (
        words[words.index("--save") + 1]
        == words[words.index("--load") + 1]
        == "/out put/checkpoints"
    )
    assert "--mock-data" not in words


# What SLURM's commands do, as far as the scripts use them. srun sends the signals it gets to every process of
# its step, as the real one does.
SRUN = """import os, signal, subprocess, sys
import psutil
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
step = subprocess.Popen(words, env=os.environ | {"SLURM_NODEID": os.environ.get("NODE", "0")})
def forward(number, frame):
    for process in [psutil.Process(step.pid), *psutil.Process(step.pid).children(recursive=True)]:
        process.send_signal(number)
signal.signal(signal.SIGTERM, forward)
sys.exit(step.wait())
"""


def slurm(directory: Path, nodes: int = 1, **variables: str) -> dict[str, str]:
    """Stand-ins for SLURM's commands, first on the path, and what a job finds in its environment."""
    (directory / "srun.py").write_text(SRUN)
    fake(directory, "srun", f'exec {sys.executable} {directory}/srun.py "$@"')
    hosts = " ".join(str(7 + node) for node in range(nodes))
    names = f'printf "node-%s\\n" {hosts}' if nodes > 1 else "echo localhost"
    fake(
        directory,
        "scontrol",
        f'case "$1" in show) {names} ;; *) echo "$*" >>{directory}/requeued ;; esac',
    )
    env = environment(
        SLURM_SUBMIT_DIR=str(REPO),
        SLURM_JOB_NODELIST=f"node-[7-{6 + nodes}]",
        SLURM_JOB_NUM_NODES=str(nodes),
        SLURM_JOB_ID="12345",
        **variables,
    )
    return env | {"PATH": f"{directory}:{env['PATH']}"}


def directives(script: Path) -> set[str]:
    """The #SBATCH lines."""
    return {
        line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")
    }


def test_slurm_script_places_each_node(tmp_path):
    fake(tmp_path, "torchrun", 'printf "%s\n" "$@"')
    # --gpus-per-node h100:4 --exclusive on nodes of eight
    asked = {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "h100:4"}
    env = slurm(tmp_path, nodes=4, NODE="3", DATA_PATH="pile", TOKENIZER_MODEL="pile", **asked)
    words = printed(["bash", SLURM, QWEN, "--taco", "--seed", "7"], env, tmp_path)
    assert words[:10] == [
        *("--nproc_per_node", "4", "--nnodes", "4", "--node_rank", "3"),
        *("--master_addr", "node-7", "--master_port", "32345"),
    ]
    assert words[10] == str(REPO / "pretrain_qwen.py")
    assert words[-4:] == ["--taco", "--seed", "7", "--exit-signal-handler"]
    assert words[words.index("--save") + 1] == words[words.index("--load") + 1]
    assert {"--signal=B:TERM@300", "--requeue", "--open-mode=append"} <= directives(SLURM)
    assert not (tmp_path / "requeued").exists()


@pytest.mark.thorough
def test_a_preempted_job_goes_on_where_it_stopped(tmp_path):
    """Under torchrun itself: a signal to the batch script, and the run is saved, queued again and resumed."""
    variables = SHORT | {
        "TRAIN_ITERS": "100000",
        "EVAL_INTERVAL": "100000",
        "LR_DECAY_ITERS": "100000",
    }
    env = slurm(
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
        SLURM_GPUS_ON_NODE="2",
        MASTER_PORT=str(free_port()),
        PYTHONPATH=f"{START_FAST}:{REPO}",
        CHECKPOINT_PATH=str(tmp_path / "checkpoints"),
        **variables,
    )
    iterations: list[list[int]] = [[0]]  # of each job
    for _ in range(2):
        job = launched(["bash", SLURM, LLAMA3], env)
        try:
            # Three iterations after the last one of the job before.
            job.wait_for(f"iteration {iterations[-1][-1] + 3:8}/", timeout=100)
            job.processes[0].send_signal(signal.SIGTERM)
            run = job.finish(100)
        finally:
            job.kill()
        assert run.returncode == 0, run.output[-4000:]
        numbers = re.findall(r"iteration +(\d+)/", run.output)
        iterations.append([int(number) for number in numbers])
        newest = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        assert newest == iterations[-1][-1], "saved at the signal"
    assert iterations[2][0] == iterations[1][-1] + 1, "resumed"
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 12345"] * 2


def test_gpt3_trains_on_real_text(tmp_path):
    """At TINY size under torchrun on two CPU processes, with data made by the project's own scripts.

    All iterations ran, none was skipped, losses are finite, training lowered them, bytes are counted.
    """
    prefix, tokenizer = make_dataset(tmp_path)
    kind = "SentencePieceTokenizer"
    data = {"DATA_PATH": str(prefix), "TOKENIZER_TYPE": kind, "TOKENIZER_MODEL": str(tokenizer)}
    paths = {"PYTHONPATH": f"{START_FAST}:{REPO}", "MASTER_PORT": str(free_port())}
    env = environment(CUDA_VISIBLE_DEVICES="", **SHORT, **paths, **data)
    run = launched([REPO / "examples" / GPT3], env).finish(400)
    assert run.returncode == 0, run.output[-4000:]
    assert UNKNOWN not in run.output
    losses = run.log("lm loss")
    assert list(losses) == list(range(1, ITERATIONS + 1)) and all(
        map(math.isfinite, losses.values())
    )
    assert f"iteration {ITERATIONS:8}/{ITERATIONS:8} |" in run.output
    assert run.output.count(NONE_SKIPPED) == ITERATIONS
    validation = re.search(
        rf"validation loss at iteration {ITERATIONS} \| lm loss value: (\S+)", run.output
    )
    assert max(losses[ITERATIONS], float(validation[1])) < losses[1] - 0.1


def train_fsdp2(ranks: int, folder: Path, reduce: str):
    """Two steps of examples/fsdp2.py, from the checkpoint in a folder if there is one, saved there."""
    words = ("--steps", "2", "--checkpoint", str(folder), "--reduce", reduce)
    return start("examples/fsdp2.py", *words, processes=ranks).finish(120)


def test_leftover_gradients_need_as_many_ranks_as_saved_them(tmp_path):
    """Each rank has its own; a resume on another number of ranks is refused in one line, with the fix."""
    saved = train_fsdp2(2, tmp_path, "tagc:layers=all")
    assert saved.returncode == 0, saved.output[-3000:]
    refused = train_fsdp2(1, tmp_path, "tagc:layers=all")
    assert refused.returncode == 2
    assert refused.errors == [
        f"error: --checkpoint {tmp_path}: 2 ranks have saved what --reduce left over, and this run has 1; "
        "start 2 ranks, or drop it with a --reduce that keeps nothing, such as int8"
    ]
    assert "Traceback" not in refused.output
    dropped = train_fsdp2(1, tmp_path, "int8")
    assert dropped.returncode == 0 and "step 4: loss" in dropped.output, dropped.output[-3000:]
    begun = train_fsdp2(1, tmp_path, "tagc:layers=all")
    assert begun.returncode == 0 and "step 6: loss" in begun.output, begun.output[-3000:]
