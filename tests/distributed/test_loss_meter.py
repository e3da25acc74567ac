"""The loss meter in runs: it changes no bit of training, finds what a codec costs, and repairs it.

The cost of a pair is compared with losses of two runs from the same checkpoint, one with the codecs
and one without.
"""

import difflib
import json
import re
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from megatron.compression.codecs.recipes import RECIPES
from tests.distributed.launch import Run, go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawned

METER = ("--compression-loss-interval", "1")
TWO_RANKS = "--tensor-model-parallel-size 2 --bf16"
TENSOR = f"{TWO_RANKS} --compression-min-mb 0"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"

_LAYOUTS = {
    "tensor parallel with dropout": f"""{TENSOR} {DROPOUT} --sequence-parallel
        --tp-compression int4""",
    "experts, weights gathered in the forward": """--num-experts 4 --expert-model-parallel-size 2
        --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01
        --moe-router-enable-expert-bias --moe-router-score-function sigmoid --bf16
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --hidden-dropout 0.1 --ep-compression int6:group=32 --dp-compression sdp4bit""",
}
_MORE_LAYOUTS = {
    "pipeline": """--pipeline-model-parallel-size 2 --hidden-dropout 0.1 --bf16
        --pp-compression int4:group=32""",
    "virtual stages": """--num-layers 4 --pipeline-model-parallel-size 2
        --num-layers-per-virtual-pipeline-stage 1 --hidden-dropout 0.1 --bf16
        --pp-compression int4:group=32""",
    "multi-token prediction, layers recomputed": f"""{TENSOR} --hidden-dropout 0.1
        --position-embedding-type rope --mtp-num-layers 1 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1 --tp-compression int4""",
    "halves, results of passes not checked": f"""{TENSOR} --hidden-dropout 0.1
        --attention-dropout 0 --tp-compression int4 --tp-compression-overlap halves
        --rerun-mode disabled""",
    "context parallel": """--context-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0
        --bf16 --cp-compression int4""",
    "CAAT-Net": f"{TENSOR} --caat-net-sync-fraction 0.5 --tp-compression int4",
}


@pytest.fixture(
    scope="module",
    params=[
        *_LAYOUTS,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in _MORE_LAYOUTS),
    ],
)
def off_and_on(request) -> tuple[Run, Run]:
    """The same run without and with the meter, which measures in every iteration but the first."""
    layout = {**_LAYOUTS, **_MORE_LAYOUTS}[request.param].split()
    flags = tiny_flags("--global-batch-size", "8", *layout, train_iters="5")
    return pretrain(*flags), pretrain(*flags, *METER)


def test_losses_and_parameters_are_the_same_bits(off_and_on: tuple[Run, Run]) -> None:
    off, on = off_and_on
    assert len(on.losses) == 5
    assert on.losses == off.losses
    assert on.parameters == off.parameters


def test_training_sends_the_same_bytes(off_and_on: tuple[Run, Run]) -> None:
    off, on = off_and_on
    for without, with_meter in zip(off.ranks, on.ranks, strict=True):
        training = [row for row in with_meter.ledger if row["phase"] == "train"]
        assert training == without.ledger


def test_bytes_of_the_meter_have_a_phase_of_their_own(off_and_on: tuple[Run, Run]) -> None:
    """Its passes send activations once with codecs and once without; no gradients."""
    _, on = off_and_on
    rows = [row for row in on.ranks[0].ledger if row["phase"] == "meter"]
    assert {row["kind"] for row in rows} >= {"compressed", "auto"}
    assert {row["traffic"].partition(".")[2] for row in rows} <= {"forward", "other"}


_OF_THE_MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?|elapsed time per iteration \(ms\): [\d.]+"
    r"|time to initialize.*|\(after \d iterations\) memory.*|\(\d+\.\d+, \d+\.\d+\)"
    r"|[\d.]+ seconds|0x[0-9a-f]+"
)


def test_log_differs_by_lines_of_the_meter_alone(off_and_on: tuple[Run, Run]) -> None:
    """Ranks write at the same time, so lines are compared in the order of the alphabet."""
    logs = []
    for run in off_and_on:
        iterations = [line for line in run.output.splitlines() if re.search(r"\] \w+ +\d+/", line)]
        messages = [line for line in run.output.splitlines() if line.startswith("compression")]
        logs.append(sorted(_OF_THE_MOMENT.sub("", line) for line in iterations + messages))
    changes = [
        line
        for line in difflib.unified_diff(*logs, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert changes
    for line in changes:
        assert line.startswith(("+compression costs", "+compression: in every iteration"))


def costs(run: Run) -> list[tuple[float, float, int]]:
    """Return percent, standard error and pairs of each line of the log."""
    found = re.findall(
        r"compression costs ([+-][\d.]+) \+- ([\d.]+) % of loss \((\d+) pairs\)", run.output
    )
    return [(float(percent), float(error), int(pairs)) for percent, error, pairs in found]


def test_every_micro_batch_is_a_pair(off_and_on: tuple[Run, Run], request) -> None:
    """Four measurements: of two replicas where experts lie on both ranks, of two micro-batches
    under virtual stages, else of one."""
    _, on = off_and_on
    two = {"experts, weights gathered in the forward", "virtual stages"}
    expected = 8 if request.node.callspec.params["off_and_on"] in two else 4
    assert costs(on)[-1][2] == expected


class TestLossless:
    """A codec that changes no bit costs nothing, and the meter says so exactly."""

    @pytest.fixture(scope="class")
    def report(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("lossless") / "report"
        flags = f"{TENSOR} {DROPOUT} --tp-compression lossless --compression-report {folder}"
        run = pretrain(*tiny_flags(*flags.split(), *METER, train_iters="4"))
        assert costs(run) == [(0.0, 0.0, 2), (0.0, 0.0, 3)]
        return folder

    def test_the_cost_is_zero(self, report: Path) -> None:
        cost = json.loads((report / "report.json").read_text())["summary"]["cost_in_loss"]
        assert cost == {"percent": 0.0, "standard_error": 0.0, "pairs": 3, "broken_pairs": 0}

    def test_the_history_has_a_row_a_log_interval(self, report: Path) -> None:
        rows = [json.loads(line) for line in (report / "history.jsonl").read_text().splitlines()]
        pairs = {row["iteration"]: row["cost"]["pairs"] for row in rows if "cost" in row}
        assert pairs == {3: 2, 4: 3}

    def test_the_reports_page_has_the_cost(self, report: Path) -> None:
        page = (report / "report.md").read_text()
        assert "Compression costs +0.000 +- 0.000 % of the training loss, by 3 pairs" in page


class TestReplay:
    """One pair, measured at iteration 3, against that iteration's losses of resumed runs."""

    INT4 = ("--tp-compression", "int4", "--compression-min-mb", "0")

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("replay") / "saved"

    @pytest.fixture(scope="class")
    def flags(self, saved: Path) -> list[str]:
        """One micro-batch an iteration, without dropout: a loss follows from the weights alone."""
        still = "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 2"
        save = f"--save {saved} --save-interval 1"
        return tiny_flags(*TWO_RANKS.split(), *still.split(), *save.split(), train_iters="3")

    @pytest.fixture(scope="class")
    def sums(self, flags: list[str], saved: Path) -> list[float]:
        """The sums over pairs that the last checkpoint holds."""
        meter = ("--compression-loss-interval", "3")
        pretrain(*flags, *self.INT4, *meter)
        common = load_common_state_dict(str(saved / "iter_0000003"))
        return common["megatron_taco"]["loss_meter"]["sums"]["all"]

    def test_the_pair_is_that_of_a_replay(
        self, sums: list[float], flags: list[str], saved: Path
    ) -> None:
        losses = []
        for codec in (self.INT4, ()):
            go_back_to(2, saved)
            run = pretrain(*flags, "--load", str(saved), *codec)
            losses.append(run.losses[3])
        with_codecs, without = losses
        pairs, loss, difference = sums[:3]
        assert pairs == 1
        assert with_codecs != without
        tokens = 2 * 32
        assert loss / tokens == pytest.approx(without, rel=1e-6)
        assert (loss + difference) / tokens == pytest.approx(with_codecs, rel=1e-6)


BUDGET = 0.01
FOUND = 20
"""The iteration after which the cost is known to be above the budget."""


class TestRepair:
    """int4 without a transform on one site, in a run whose budget it breaks."""

    BAD = "int8;fc2=int4:hadamard=off"

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("repair") / "saved"

    @pytest.fixture(scope="class")
    def flags(self, saved: Path) -> list[str]:
        replaced = {
            "hidden_size": "128",
            "lr": "5e-3",
            "train_iters": "40",
            "log_interval": "10",
        }
        more = f"""{TENSOR} --tp-compression {self.BAD} --compression auto
            --compression-loss-budget {BUDGET} --save {saved} --save-interval 30"""
        return tiny_flags(*more.split(), *METER, **replaced)

    @pytest.fixture(scope="class")
    def run(self, flags: list[str]) -> Run:
        return pretrain(*flags)

    @pytest.fixture(scope="class")
    def resumed(self, run: Run, flags: list[str], saved: Path) -> Run:
        go_back_to(30, saved)
        return pretrain(*flags, "--load", str(saved))

    @property
    def safer(self) -> str:
        """The codec that costs least by its table: nobody knows what the flag's costs."""
        recipes = [recipe for recipe in RECIPES["tensor_parallel"] if not recipe.exact]
        return min(recipes, key=lambda recipe: recipe.loss).name

    def test_the_cost_is_found(self, run: Run) -> None:
        percent, error, pairs = costs(run)[1]
        assert pairs == FOUND - 1
        assert percent - 2 * error > BUDGET

    def test_the_log_says_what_is_taken_instead(self, run: Run) -> None:
        line = (
            f"compression auto: tensor parallel: {self.BAD} cost .* in this run, above the budget "
            f"of {BUDGET} %: {self.safer} after iteration {FOUND}"
        )
        assert len(re.findall(line, run.output)) == 1

    def test_the_cost_is_within_the_budget_from_then_on(self, run: Run) -> None:
        """Pairs are counted anew."""
        percent, error, pairs = costs(run)[-1]
        assert pairs == 40 - FOUND
        assert percent - 2 * error <= BUDGET

    def test_the_decision_is_kept(self, run: Run, saved: Path) -> None:
        decision = json.loads((saved / "compression-auto.json").read_text())["decision"]
        (tensor_parallel,) = decision["dimensions"]
        assert tensor_parallel["name"] == self.safer
        assert f"{self.BAD} cost" in tensor_parallel["reason"]

    def test_a_resume_has_the_safer_codec(self, resumed: Run) -> None:
        assert "as decided before" in resumed.output
        assert "above the budget of" not in resumed.output.split("as decided before")[0]

    def test_a_resume_trains_as_the_run_went_on(self, run: Run, resumed: Run) -> None:
        """Not so with the flag's codec."""
        assert resumed.losses == {i: run.losses[i] for i in range(31, 41)}

    def test_a_resume_goes_on_with_the_pairs(self, run: Run, resumed: Run) -> None:
        """The first iteration of a process is not measured."""
        ((_, _, pairs),) = costs(resumed)
        assert pairs == costs(run)[-1][2] - 1


@pytest.mark.thorough
def test_the_dimension_that_costs_most_is_repaired() -> None:
    """TP 2 x PP 2: each is measured by itself before the worse one takes a safer codec."""
    more = f"""{TENSOR} --pipeline-model-parallel-size 2 --hidden-size 128 --lr 5e-3
        --tp-compression int8;fc2=int4:hadamard=off --pp-compression int8 --compression auto
        --compression-loss-budget {BUDGET} --log-interval 10"""
    run = pretrain(*tiny_flags(*more.split(), *METER, train_iters="80"), ranks=4)
    taken = re.findall(r"compression auto: (\w+ parallel): .* cost .* after iteration", run.output)
    assert taken == ["tensor parallel"]


def own_loop_worker(rank: int, world_size: int) -> dict:
    """Train with and without the meter in a loop of one's own; return losses and the cost."""
    import os

    os.environ["RANK"] = str(rank)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from examples import own_loop
    from megatron.compression import CompressionConfig, TensorParallelConfig

    losses = {}
    for interval in (None, 2):
        tensor_parallel = TensorParallelConfig(compression="int4", min_mb=0)
        config = CompressionConfig(tensor_parallel=tensor_parallel, loss_interval=interval)
        loop = own_loop.Loop(world_size, 1, config)
        update = loop.optimizer.step

        def measure_and_update(loop=loop, update=update) -> object:
            def forward() -> torch.Tensor:
                *_, last = loop.batches(loop.compression.steps)
                (report,) = get_forward_backward_func()(
                    forward_step_func=loop.forward_step,
                    data_iterator=iter([last]),
                    model=[loop.model],
                    num_microbatches=1,
                    seq_length=own_loop.SEQUENCE,
                    micro_batch_size=own_loop.SAMPLES,
                    forward_only=True,
                )
                return report["loss"]

            loop.compression.measure_loss(forward)
            return update()

        if interval is not None:
            loop.optimizer.step = measure_and_update
        losses[interval] = [loop.iterate(iteration) for iteration in range(6)]
        cost = loop.compression.loss_cost()
        again = loop.compression.loss_cost()
        parallel_state.destroy_model_parallel()
    return {"losses": losses, "cost": cost, "again": again}


own_loop = spawned(own_loop_worker, 2)


def test_a_loop_of_ones_own_trains_as_without(own_loop: list[dict]) -> None:
    for rank in own_loop:
        assert rank["losses"][2] == rank["losses"][None]


def test_a_loop_of_ones_own_is_told_the_cost(own_loop: list[dict]) -> None:
    """Iterations 2, 4 and 6 measure; the same on both ranks, and only once."""
    first, second = own_loop
    assert first["cost"].pairs == 3
    assert first["cost"].percent != 0
    assert second["cost"] == first["cost"]
    assert first["again"] is None
