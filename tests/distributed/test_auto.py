"""--compression auto on links that are slow on purpose: the choice, its check in the run, resumes, ranks."""

import json
import re

import pytest

from tests.distributed.launch import UNKNOWN, Run, go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.unit.megatron_args import EXPERTS, parsed

SLOW = "tests/distributed/slow_links.py"
CHECKED = 2 + 2 * 2 * 2
"""Iterations that slow_links.py's check of one dimension takes, with those before it."""


def decisions(run: Run) -> list[dict]:
    """What each rank has decided, by rank."""
    found = {
        int(rank): json.loads(text)
        for rank, text in re.findall(r"rank (\d) decided (.*)", run.output)
    }
    return [found[rank] for rank in sorted(found)]


def kinds(run: Run, traffic: str) -> dict[str, int]:
    """Calls of the first rank by kind, of an uncompressed operation or in place of one."""
    calls: dict[str, int] = {}
    for row in run.ranks[0].ledger:
        whole = row["operation"].startswith("instead_of") or row["kind"] != "compressed"
        if row["traffic"] == traffic and whole:
            calls[row["kind"]] = calls.get(row["kind"], 0) + row["calls"]
    return calls


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """TP 2 over a slow link, two iterations past the check; and the same resumed behind the check."""
    directory = tmp_path_factory.mktemp("auto")
    saved = directory / "saved"
    flags = [
        *tiny_flags(
            num_layers="1", hidden_size="64", global_batch_size="2", train_iters=str(CHECKED + 2)
        ),
        *("--tensor-model-parallel-size", "2", "--bf16", "--compression", "auto"),
        *("--save", str(saved), "--save-interval", str(CHECKED)),
    ]
    whole = pretrain(*flags, ranks=2, through=SLOW)
    go_back_to(CHECKED, saved)
    resumed = pretrain(*flags, "--load", str(saved), ranks=2, through=SLOW)
    return whole, resumed, saved / "compression-auto.json"


def test_a_slow_link_is_compressed(slow_run) -> None:
    """By what gains most within 0.1 %; the run's own iterations agree, and the log says all of it."""
    whole, _, _ = slow_run
    (choice,) = decisions(whole)[0]["dimensions"]
    name = "int6:outliers=on, back int5:outliers=on"
    assert (choice["name"], choice["loss"]) == (name, 0.092) and choice["gain"] > 0.02
    assert re.search(
        rf"\| tensor parallel +\| 0.00781 MiB all_reduce .* \| {name} \|", whole.output
    )
    assert re.search(r"auto: tensor parallel: iterations with it take .* less: kept", whole.output)
    assert whole.output.count("compression auto: decided in") == 1
    assert UNKNOWN not in whole.output


def test_ranks_decide_alike(slow_run) -> None:
    """One rank's links are slow, and all decide by the slowest; so does a resume."""
    whole, resumed, kept = slow_run
    first, second = decisions(whole)
    assert first == second == decisions(resumed)[0] == decisions(resumed)[1] and first["checked"]
    assert json.loads(kept.read_text())["decision"] == first


def test_the_check_leaves_the_dimension_out(slow_run) -> None:
    """Two of four blocks go without. What was counted on for the choice is what an iteration sends."""
    whole, resumed, _ = slow_run
    sums = 2 * 1 + 1  # two a layer, and the embedding's or the output layer's
    for traffic in ("tp.forward", "tp.backward"):
        assert kinds(whole, traffic) == {"auto": 4 * sums, "compressed": (CHECKED - 4 + 2) * sums}
        assert kinds(resumed, traffic) == {"compressed": 2 * sums}


def test_a_resume_does_not_measure(slow_run) -> None:
    """It says where the decision is from, and goes on with the checkpoint's settings."""
    whole, resumed, kept = slow_run
    assert f"compression auto: as decided before: {kept}" in resumed.output
    assert (
        "compares iterations" not in resumed.output and "other settings than" not in resumed.output
    )
    assert resumed.losses == {i: whole.losses[i] for i in (CHECKED + 1, CHECKED + 2)}


def test_what_does_not_gain_is_switched_off(tmp_path) -> None:
    """PP 2 x DP 2, links slow while they are timed and fast in training: both dimensions go back, on all
    ranks in the same iteration, and the report says so."""
    iterations = 2 + 2 * 3 * 2 + 2
    run = pretrain(
        *tiny_flags(seq_length="64", max_position_embeddings="64", train_iters=str(iterations)),
        *("--global-batch-size", "8"),
        *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--bf16"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--slow-payloads"),
        *("--compression", "auto", "--compression-loss-budget", "0.2"),
        *("--compression-report", str(tmp_path / "report")),
        ranks=4,
        through=SLOW,
    )
    everyone = decisions(run)
    assert all(one == everyone[0] for one in everyone) and len(everyone) == 4
    assert [one["name"] for one in everyone[0]["dimensions"]] == ["none", "none"]
    assert all(one["why"].startswith("switched off") for one in everyone[0]["dimensions"])
    assert run.output.count("switched off") >= 2
    rows = [
        json.loads(line) for line in (tmp_path / "report/history.jsonl").read_text().splitlines()
    ]
    for traffic in ("dp.gradient", "dp.weight", "pp.forward", "pp.backward"):
        assert "compressed" in rows[1]["bytes_per_iteration"][traffic]
        assert set(rows[-1]["bytes_per_iteration"][traffic]) <= {"auto", "exact"}
    text = (tmp_path / "report/report.md").read_text()
    assert "## What --compression auto decided" in text and "| pipeline parallel |" in text
    assert json.loads((tmp_path / "report/report.json").read_text())["settings"]["auto"]["checked"]


def test_lossless_that_was_chosen_does_not_wait() -> None:
    """Its training steps may be repeated: that is arranged behind the decision."""
    run = pretrain(
        *tiny_flags(num_layers="1", hidden_size="64", global_batch_size="2", train_iters="2"),
        *("--tensor-model-parallel-size", "2", "--bf16"),
        *("--compression", "auto", "--compression-loss-budget", "0"),
        ranks=2,
        through=SLOW,
    )
    assert [choice["name"] for choice in decisions(run)[0]["dimensions"]] == ["lossless"]
    assert "the host waits before each message" not in run.output, "passes are repeated instead"


def timing_worker(rank: int, world_size: int) -> list[float]:
    """Send every recipe's messages in each dimension; the run's random numbers stay as they are."""
    import torch
    from megatron.core import parallel_state

    from megatron.compression.auto.measurement import dimension_config
    from megatron.compression.auto.messages import MessageKind
    from megatron.compression.auto.plan import largest
    from megatron.compression.auto.sender import Sender
    from megatron.compression.auto.stopwatch import Stopwatch
    from megatron.compression.codecs.recipes import RECIPES
    from megatron.compression.communication.topology import find_topology
    from megatron.compression.communication.transport import Transports
    from megatron.compression.config import CompressionConfig
    from megatron.compression.data_parallel.config import DataParallelConfig

    sends = {
        "tensor_parallel": (
            "tp.forward all_reduce",
            "tp.forward reduce_scatter",
            "tp.backward all_gather",
        ),
        "data_parallel": ("dp.gradient gradients", "dp.weight weights"),
        "pipeline_parallel": ("pp.forward exchange", "pp.backward exchange"),
        "expert_parallel": (
            "ep.forward all_to_all",
            "ep.backward gather_tokens",
            "ep.backward sum_tokens",
        ),
        "context_parallel": ("cp.forward all_gather", "cp.backward reduce_scatter"),
    }
    shared = (
        "tp.forward gather_tokens",
        "tp.forward sum_tokens",
    )  # between ranks that share an expert
    sends["tensor_parallel"] += shared
    sizes = {one: {f"{one.replace('_', '_model_')}_size": 2} for one in sends}
    sizes |= {"data_parallel": {}, "context_parallel": {"context_parallel_size": 2}}
    args = parsed(use_distributed_optimizer=True, main_params_dtype=None, **EXPERTS)
    random_state = torch.cuda.get_rng_state if torch.cuda.is_available() else torch.get_rng_state
    state, found = random_state(), []
    for dimension, words in sends.items():
        parallel_state.initialize_model_parallel(**sizes[dimension])
        watch = Stopwatch()
        for sharded in (True, False) if dimension == "data_parallel" else (True,):
            sender = Sender(Transports(), find_topology, sharded, watch.device)
            for recipe in (None, *RECIPES[dimension]):
                part = recipe and dimension_config(CompressionConfig(), dimension, recipe, args)
                rules = part.rules(0) if part else {}
                for word in words:
                    traffic, operation = word.split()
                    tokens = operation == "all_to_all" or "tokens" in operation
                    unequal = tokens and (recipe is None or recipe.name != "lossless")
                    shape = (
                        (8192,)
                        if dimension == "data_parallel"
                        else (32, 128)
                        if tokens
                        else (32, 2, 64)
                    )
                    kind = (dimension, traffic, operation, shape, torch.bfloat16, 1.0)
                    message = MessageKind(*kind, unequal=unequal)
                    send = sender.sends(message, rules.get(traffic))
                    send()
                    result = send()
                    if tokens and unequal:
                        plain = sender.sends(message)()
                        error = (result - plain).float().norm() / plain.float().norm()
                        assert result.shape == plain.shape and error < 0.1
                        assert (recipe is None) == (error == 0)
                    found += largest(float(rank))
            assert sender.describe(message, 1.0).endswith("GB/s")
        found.append(watch.seconds(lambda: None))
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        num_distributed_optimizer_instances=2
    )  # of one rank each
    sender = Sender(Transports(), lambda ranks, *_: find_topology(ranks), True, watch.device)
    message = MessageKind("data_parallel", "dp.outer", "outer", (8192,), torch.bfloat16, 1.0)
    rules = DataParallelConfig(compression="int8").rules(0)
    found += [watch.seconds(sender.sends(message, rule)) for rule in (None, rules["dp.outer"])]
    assert sender.describe(message, 1.0).startswith("0.0156 MiB all_reduce")
    parallel_state.destroy_model_parallel()
    assert torch.equal(state, random_state())
    return found


def test_every_candidate_can_be_timed() -> None:
    """In every operation of its dimension, with results that are the same on all ranks."""
    first, second = spawn(timing_worker, 2)
    assert first == second and min(first) >= 0
