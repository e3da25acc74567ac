"""--compression auto on links that are slow on purpose: the choice, its check, resumes, ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launch import UNKNOWN, Run, go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawned
from tests.unit.megatron_args import EXPERTS, parsed

SLOW = "tests/distributed/slow_links.py"
CHECKED = 2 + 2 * 3 * 2
"""Iterations of a check of tensor parallelism, with those before it: two, then 2 rounds of 3 blocks
of 2: the codec, without it, and the safer one."""
SUMS = 2 * 1 + 1
"""All-reduces an iteration each way: two a layer, and the embedding's or the output layer's."""
DECISION = "compression-auto.json"


def decisions(run: Run) -> list[dict]:
    """Return what slow_links.py prints of each rank's decision, by rank."""
    by_rank = {}
    for rank, text in re.findall(r"rank (\d) decided (.*)", run.output):
        by_rank[int(rank)] = json.loads(text)
    return [by_rank[rank] for rank in sorted(by_rank)]


def kinds(run: Run, traffic: str) -> dict[str, int]:
    """Return the first rank's calls of a traffic class by kind.

    A compressed operation counts once, as the operation that it replaces.
    """
    calls: dict[str, int] = {}
    for row in run.ranks[0].ledger:
        is_operation = row["operation"].startswith("instead_of") or row["kind"] != "compressed"
        if row["traffic"] == traffic and is_operation:
            calls[row["kind"]] = calls.get(row["kind"], 0) + row["calls"]
    return calls


def tiny_tensor_parallel(*flags: str, train_iters: int) -> list[str]:
    """Return the flags of one layer at TP 2 in bf16 under --compression auto, which may spend 0.2 %."""
    model = tiny_flags(
        num_layers="1", hidden_size="64", global_batch_size="2", train_iters=str(train_iters)
    )
    layout = ("--tensor-model-parallel-size", "2", "--bf16")
    auto = ("--compression", "auto", "--compression-loss-budget", "0.2")
    return [*model, *layout, *auto, *flags]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of the checkpoints of ``slow_run``."""
    return tmp_path_factory.mktemp("auto") / "saved"


@pytest.fixture(scope="module")
def slow_flags(saved: Path) -> list[str]:
    """TP 2 over a slow link, two iterations past the check; a checkpoint lies behind the check."""
    save = ("--save", str(saved), "--save-interval", str(CHECKED))
    schedule = ("--tp-compression-overlap", "weights")
    return tiny_tensor_parallel(*save, *schedule, train_iters=CHECKED + 2)


@pytest.fixture(scope="module")
def slow_run(slow_flags: list[str]) -> Run:
    """The run that measures and decides."""
    return pretrain(*slow_flags, ranks=2, through=SLOW)


@pytest.fixture(scope="module")
def resumed_run(slow_run: Run, slow_flags: list[str], saved: Path) -> Run:
    """The same run, resumed behind the check."""
    go_back_to(CHECKED, saved)
    return pretrain(*slow_flags, "--load", str(saved), ranks=2, through=SLOW)


CHOICE = "int6:outliers=on, back int5:outliers=on"
"""The codecs with the largest gain whose measured loss is at most 0.2 %."""


def test_a_slow_link_is_compressed(slow_run: Run) -> None:
    (choice,) = decisions(slow_run)[0]["dimensions"]
    assert choice["name"] == CHOICE
    assert choice["loss"] == 0.169
    assert choice["gain"] > 0.02


def test_log_has_the_choice_once(slow_run: Run) -> None:
    row = rf"\| tensor parallel +\| 0.00781 MiB all_reduce .* \| {CHOICE} \|"
    assert re.search(row, slow_run.output)
    assert slow_run.output.count("compression auto: decided in") == 1


def test_the_runs_own_iterations_confirm_the_choice(slow_run: Run) -> None:
    line = r"auto: tensor parallel: iterations with it take .* less: kept"
    assert re.search(line, slow_run.output)


def test_timings_send_nothing_that_the_ledger_does_not_know(slow_run: Run) -> None:
    assert UNKNOWN not in slow_run.output


def test_ranks_decide_alike(slow_run: Run, resumed_run: Run) -> None:
    """One rank's links are slow, and all decide by the slowest; so does a resume."""
    first, second = decisions(slow_run)
    assert first["checked"]
    assert second == first
    assert decisions(resumed_run) == [first, first]


def test_decision_is_saved_with_the_checkpoint(
    slow_run: Run, resumed_run: Run, saved: Path
) -> None:
    written = json.loads((saved / DECISION).read_text())
    assert written["decision"] == decisions(slow_run)[0]


@pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward"])
def test_the_check_leaves_the_dimension_out(slow_run: Run, traffic: str) -> None:
    """Two of six blocks of two iterations go without codecs."""
    uncompressed = 4 * SUMS
    compressed = (CHECKED - 4 + 2) * SUMS
    assert kinds(slow_run, traffic) == {"auto": uncompressed, "compressed": compressed}


@pytest.mark.parametrize("traffic", ["tp.forward", "tp.backward"])
def test_a_resume_does_not_check_again(resumed_run: Run, traffic: str) -> None:
    assert kinds(resumed_run, traffic) == {"compressed": 2 * SUMS}
    assert "compares iterations" not in resumed_run.output


def test_a_resume_names_the_decisions_file(resumed_run: Run, saved: Path) -> None:
    assert f"compression auto: as decided before: {saved / DECISION}" in resumed_run.output


def test_a_resume_trains_with_the_checkpoints_settings(slow_run: Run, resumed_run: Run) -> None:
    assert "other settings than" not in resumed_run.output
    losses = slow_run.losses
    assert resumed_run.losses == {i: losses[i] for i in (CHECKED + 1, CHECKED + 2)}


class TestSwitchedOff:
    """PP 2 x DP 2 whose links are slow while they are timed and fast in training."""

    ITERATIONS = 2 + 2 * 3 * 2 + 2

    @pytest.fixture(scope="class")
    def report(self, tmp_path_factory) -> Path:
        """The folder of the report."""
        return tmp_path_factory.mktemp("switched-off") / "report"

    @pytest.fixture(scope="class")
    def run(self, report: Path) -> Run:
        """The finished run."""
        model = tiny_flags(
            seq_length="64", max_position_embeddings="64", train_iters=str(self.ITERATIONS)
        )
        more = f"""--global-batch-size 8 --pipeline-model-parallel-size 2
            --use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather
            --slow-payloads --compression auto --compression-loss-budget 0.2
            --compression-report {report}"""
        return pretrain(*model, *more.split(), ranks=4, through=SLOW)

    def test_ranks_switch_off_alike(self, run: Run) -> None:
        by_rank = decisions(run)
        assert len(by_rank) == 4
        for decision in by_rank:
            assert decision == by_rank[0]

    def test_dimensions_without_gain_go_back(self, run: Run) -> None:
        choices = decisions(run)[0]["dimensions"]
        assert [choice["name"] for choice in choices] == ["none", "none"]
        for choice in choices:
            assert choice["reason"].startswith("switched off")

    def test_log_names_each_dimension(self, run: Run) -> None:
        assert run.output.count("switched off") >= 2

    @pytest.mark.parametrize("traffic", ["dp.gradient", "dp.weight", "pp.forward", "pp.backward"])
    def test_history_has_bytes_before_and_after(self, run: Run, report: Path, traffic: str) -> None:
        rows = [json.loads(line) for line in (report / "history.jsonl").read_text().splitlines()]
        assert "compressed" in rows[1]["bytes_per_iteration"][traffic]
        assert set(rows[-1]["bytes_per_iteration"][traffic]) <= {"auto", "exact"}

    def test_reports_page_has_the_decision(self, run: Run, report: Path) -> None:
        page = (report / "report.md").read_text()
        assert "## What --compression auto decided" in page
        assert "| pipeline parallel |" in page

    def test_reports_settings_have_the_check(self, run: Run, report: Path) -> None:
        settings = json.loads((report / "report.json").read_text())["settings"]
        assert settings["auto"]["checked"]


class TestHalves:
    """TP 2 whose link is hidden by halves of a micro-batch, where payloads travel."""

    CHECKED = 2 + 2 * 6 * 2
    """Two rounds of six blocks of two: the codec, without it, the safer one, and all three in
    halves."""

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        """The folder of the checkpoints."""
        return tmp_path_factory.mktemp("halves") / "saved"

    @pytest.fixture(scope="class")
    def flags(self, saved: Path) -> list[str]:
        """The command line of two iterations past the check."""
        more = f"--micro-batch-size 2 --global-batch-size 4 --attention-dropout 0 --save {saved}"
        more += f" --save-interval {self.CHECKED} --hiding-halves"
        return tiny_tensor_parallel(*more.split(), train_iters=self.CHECKED + 2)

    @pytest.fixture(scope="class")
    def run(self, flags: list[str]) -> Run:
        """The run that measures and decides."""
        return pretrain(*flags, ranks=2, through=SLOW)

    @pytest.fixture(scope="class")
    def resumed(self, run: Run, flags: list[str], saved: Path) -> Run:
        """The same run, resumed behind the check."""
        go_back_to(self.CHECKED, saved)
        return pretrain(*flags, "--load", str(saved), ranks=2, through=SLOW)

    def test_halves_are_taken_with_the_safer_codec(self, run: Run) -> None:
        """Eight bits are as fast as six, where the link is hidden."""
        first, second = decisions(run)
        assert second == first
        assert first["halves"]
        (choice,) = first["dimensions"]
        assert choice["name"] == "int8:outliers=on"
        assert choice["loss"] == 0.018

    def test_the_log_names_each_way_and_what_the_comparison_cost(self, run: Run) -> None:
        chosen = "int6:outliers=on, back int5:outliers=on"
        names = [chosen, "uncompressed", "int8:outliers=on"]
        names += [f"{name} in halves" for name in ("uncompressed", chosen, "int8:outliers=on")]
        times = ", ".join(rf"[\d.]+ ms {name}" for name in names)
        taken = "int8:outliers=on in halves"
        line = f"tensor parallelism: an iteration takes {times}; from now on {taken}"
        assert re.search(line, run.output)
        flags = (
            "--tp-compression tensor-8bit --compression-min-mb 0 --tp-compression-overlap halves"
        )
        assert f"the same without timings: {flags} in place of --compression auto" in run.output
        assert re.search(r"cost as much time as \d+ iterations: .* and 24 iterations", run.output)

    def test_a_resume_goes_on_in_halves(self, run: Run, resumed: Run) -> None:
        assert "halves of a micro-batch interleaved" in resumed.output
        assert decisions(resumed) == decisions(run)
        assert "other settings than" not in resumed.output
        last = (self.CHECKED + 1, self.CHECKED + 2)
        assert resumed.losses == {iteration: run.losses[iteration] for iteration in last}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--micro-batch-size 1 --attention-dropout 0",
            "halves are not tried: --micro-batch-size 1 has no two halves",
        ),
        ("--micro-batch-size 2 --tp-compression-overlap weights", None),
    ],
)
def test_halves_that_are_not_covered_are_not_tried(flags: str, line: str | None) -> None:
    """Nor where the schedule was typed, which needs no line."""
    run = pretrain(*tiny_tensor_parallel(*flags.split(), train_iters="2"), ranks=2, through=SLOW)
    if line is None:
        assert "halves are not tried" not in run.output
    else:
        assert line in run.output
    assert f"the first {2 * 3 * 2} iterations after a warm-up compare 3 ways" in run.output


@pytest.fixture(scope="module")
def lossless_run() -> Run:
    """A run that may lose nothing: its budget is zero."""
    flags = tiny_tensor_parallel("--compression-loss-budget", "0", train_iters=2)
    return pretrain(*flags, ranks=2, through=SLOW)


def test_a_budget_of_zero_chooses_lossless(lossless_run: Run) -> None:
    choices = decisions(lossless_run)[0]["dimensions"]
    assert [choice["name"] for choice in choices] == ["lossless"]


def test_lossless_that_was_chosen_does_not_wait(lossless_run: Run) -> None:
    """Training steps are repeated instead: that is arranged after the decision."""
    assert "the host waits before each message" not in lossless_run.output


SENDS = {
    "tensor_parallel": (
        "tp.forward all_reduce",
        "tp.forward reduce_scatter",
        "tp.backward all_gather",
        # tokens between ranks that share an expert
        "tp.forward gather_tokens",
        "tp.forward sum_tokens",
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
"""Every operation of each dimension that --compression auto times: traffic class, operation."""
GROUPS = {
    "tensor_parallel": {"tensor_model_parallel_size": 2},
    "data_parallel": {},
    "pipeline_parallel": {"pipeline_model_parallel_size": 2},
    "expert_parallel": {"expert_model_parallel_size": 2},
    "context_parallel": {"context_parallel_size": 2},
}
"""Sizes that give two ranks one group of a dimension."""


def timing_worker(rank: int, world_size: int) -> dict:
    """Send every recipe's messages in each dimension.

    Returns:
        {operation: {recipe: error of its tokens}} where tokens are unequal, the ranks' largest
        values, the timings, descriptions, and whether the random state is what it was.
    """
    import torch
    from megatron.core import parallel_state

    from megatron.compression.auto.stopwatch import Stopwatch

    random_state = torch.cuda.get_rng_state if torch.cuda.is_available() else torch.get_rng_state
    state = random_state()
    results = {"largest": [], "errors": [], "descriptions": [], "seconds": []}
    for dimension in SENDS:
        parallel_state.initialize_model_parallel(**GROUPS[dimension])
        watch = Stopwatch()
        shardings = (True, False) if dimension == "data_parallel" else (True,)
        for sharded in shardings:
            send_every_recipe(dimension, sharded, watch.device, float(rank), results)
        results["seconds"].append(watch.seconds(lambda: None))
        parallel_state.destroy_model_parallel()
    results["outer"] = send_between_optimizer_instances(watch, results)
    results["keeps random state"] = torch.equal(state, random_state())
    return results


def send_every_recipe(dimension: str, sharded: bool, device, value: float, results: dict) -> None:
    """Send each operation of a dimension uncompressed and with each recipe's codecs.

    Args:
        dimension: key of ``SENDS``.
        sharded: data parallelism has a distributed optimizer.
        device: of the messages.
        value: this rank's, for ``largest``.
        results: of ``timing_worker``; filled here.
    """
    from megatron.compression.auto.measurement import dimension_config
    from megatron.compression.auto.plan import largest
    from megatron.compression.auto.sender import Sender
    from megatron.compression.codecs.recipes import RECIPES
    from megatron.compression.communication.topology import find_topology
    from megatron.compression.communication.transport import Transports
    from megatron.compression.config import CompressionConfig

    args = parsed(use_distributed_optimizer=True, main_params_dtype=None, **EXPERTS)
    sender = Sender(Transports(), find_topology, sharded, device)
    for recipe in (None, *RECIPES[dimension]):
        rules = {}
        if recipe is not None:
            rules = dimension_config(CompressionConfig(), dimension, recipe, args).rules(0)
        for send in SENDS[dimension]:
            message = message_of(dimension, send, recipe)
            rule = rules.get(send.split()[0])
            sender.sends(message, rule)()
            result = sender.sends(message, rule)()
            if message.unequal:
                uncompressed = sender.sends(message)()
                assert result.shape == uncompressed.shape
                difference = (result - uncompressed).float().norm()
                error = float(difference / uncompressed.float().norm())
                results["errors"].append((send, recipe is not None, error))
            results["largest"] += largest(value)
    results["descriptions"].append(sender.describe(message, 1.0))


def message_of(dimension: str, send: str, recipe):
    """Return the message of an operation, in a shape that the codecs of its dimension take.

    Args:
        dimension: key of ``SENDS``.
        send: traffic class and operation.
        recipe: the codecs, or None. Lossless ones are for equal numbers of tokens.
    """
    import torch

    from megatron.compression.auto.messages import MessageKind

    traffic, operation = send.split()
    has_tokens = operation == "all_to_all" or "tokens" in operation
    if dimension == "data_parallel":
        shape = (8192,)
    elif has_tokens:
        shape = (32, 128)
    else:
        shape = (32, 2, 64)
    unequal = has_tokens and (recipe is None or recipe.name != "lossless")
    return MessageKind(dimension, traffic, operation, shape, torch.bfloat16, 1.0, unequal=unequal)


def send_between_optimizer_instances(watch, results: dict) -> str:
    """Time a sum of gradients between two optimizer instances of one rank, and describe it."""
    import torch
    from megatron.core import parallel_state

    from megatron.compression.auto.messages import MessageKind
    from megatron.compression.auto.sender import Sender
    from megatron.compression.communication.topology import find_topology
    from megatron.compression.communication.transport import Transports
    from megatron.compression.data_parallel.config import DataParallelConfig

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    sender = Sender(Transports(), lambda ranks, *_: find_topology(ranks), True, watch.device)
    message = MessageKind("data_parallel", "dp.outer", "outer", (8192,), torch.bfloat16, 1.0)
    rules = DataParallelConfig(compression="int8").rules(0)
    for rule in (None, rules["dp.outer"]):
        results["seconds"].append(watch.seconds(sender.sends(message, rule)))
    description = sender.describe(message, 1.0)
    parallel_state.destroy_model_parallel()
    return description


timings = spawned(timing_worker, 2)
"""Results of ``timing_worker`` by rank."""


def test_every_candidate_can_be_timed(timings: list[dict]) -> None:
    """Ranks have the same seconds, which are the slowest rank's, in every operation."""
    first, second = timings
    assert first["seconds"] == second["seconds"]
    assert min(first["seconds"]) >= 0


def test_largest_value_is_that_of_all_ranks(timings: list[dict]) -> None:
    first, second = timings
    assert first["largest"] == second["largest"]
    assert min(first["largest"]) >= 0


def test_unequal_tokens_arrive_uncompressed_exactly_and_nearly_through_codecs(
    timings: list[dict],
) -> None:
    for rank in timings:
        for send, is_compressed, error in rank["errors"]:
            assert error < 0.1, send
            assert (error > 0) == is_compressed, send


def test_links_are_described_by_their_speed(timings: list[dict]) -> None:
    for rank in timings:
        for description in rank["descriptions"]:
            assert description.endswith("GB/s")


def test_messages_between_optimizer_instances_are_described_by_size(timings: list[dict]) -> None:
    for rank in timings:
        assert rank["outer"].startswith("0.0156 MiB all_reduce")


def test_timings_leave_the_random_state(timings: list[dict]) -> None:
    for rank in timings:
        assert rank["keeps random state"]
