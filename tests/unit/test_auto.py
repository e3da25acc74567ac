"""--compression auto: what it chooses, what is reused of it, and how a run checks it."""

import json
import math
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.compression import CompressionConfig, CompressionConfigError, Session, attach
from megatron.compression.auto import plan
from megatron.compression.auto.dispatchers import Comparison, may_leave_flex
from megatron.compression.auto.measurement import Candidates, Measurement, decided_config
from megatron.compression.auto.messages import MessageKind, Workload
from megatron.compression.auto.plan import DimensionPlan, RunPlan, choose
from megatron.compression.codecs.recipes import RECIPES
from megatron.compression.flags import resolve
from megatron.compression.names import FLAG_NAMES
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from tests.unit.megatron_args import EXPERTS, experts, megatron, parsed

INT6, INT8 = RECIPES["tensor_parallel"][:2]
SDP4BIT = RECIPES["data_parallel"][0]
SDP4BIT_WEIGHTS = "sdp4bit:intra=4,group=2048,hadamard=off"


# Percent of loss: int6 costs 0.123, int8 0.018, sdp4bit 0.030; int6 with sdp4bit, 0.153, is above
# the first budget and within the second. A gain counts from 0.5 % of an iteration on (0.004 against
# 0.006), and gains that differ by less than 0.5 % count as equally fast (0.104 against 0.106).
@pytest.mark.parametrize(
    ("int6", "int8", "sdp4bit", "budget", "chosen"),
    [
        (0.30, 0.25, 0.10, 0.15, [INT8, SDP4BIT]),
        (0.30, 0.25, 0.10, 0.17, [INT6, SDP4BIT]),
        (0.30, 0.15, 0.10, 0.15, [INT6]),
        (0.30, 0.15, 0.10, 0.1, [INT8, SDP4BIT]),
        (0.30, 0.25, 0.10, 0.0, []),
        (0.004, -0.1, 0.0, 0.15, []),
        (0.006, -0.1, 0.0, 0.15, [INT6]),
        (0.104, 0.1, 0.0, 0.15, [INT8]),
        (0.106, 0.1, 0.0, 0.15, [INT6]),
    ],
)
def test_the_largest_gain_within_the_budget_is_chosen(int6, int8, sdp4bit, budget, chosen):
    """The budget is for all dimensions together; of equally fast recipes the smaller loss wins."""
    gains = {"tensor_parallel": {INT6: int6, INT8: int8}, "data_parallel": {SDP4BIT: sdp4bit}}
    assert list(choose(gains, budget).values()) == chosen


def test_without_dimensions_nothing_is_chosen():
    assert choose({}, 0.1) == {}


USED = EXPERTS | dict(context_parallel_size=2)
"""Arguments of a run that uses experts and context parallelism."""


class AnyRecipe(Measurement):
    """A measurement that takes every recipe of a dimension, whatever the run's settings.

    A rule's codec is (recipe's name, dimension), which a stand-in for the stopwatch writes down.
    """

    def _possible(self, dimension: str, budget: float) -> Candidates:
        rules = {}
        for recipe in RECIPES[dimension]:
            rules[recipe] = {dimension: Namespace(codec=(recipe.name, dimension))}
        return Candidates(rules)


class SlowStopwatch:
    """Says that an uncompressed message takes 1 s and a compressed one 0.5 s.

    Timing a compressed one takes the next of ``costs`` on a clock that starts at ``begin``.
    """

    def __init__(self, begin: float, costs: tuple[float, ...]) -> None:
        self.now = begin
        self.costs = iter(costs)
        self.timed: list[tuple[str, str]] = []
        """(recipe's name, dimension) of each timing, in order."""
        self.not_captured: set[str] = set()

    def elapsed(self) -> float:
        return self.now

    def seconds(self, rule, in_graph: bool) -> float:
        assert not in_graph
        if rule is None:
            return 1.0
        self.timed.append(rule.codec)
        self.now += next(self.costs)
        return 0.5


def measurement(
    args,
    config,
    messages=(),
    watch=None,
    not_attachable=None,
    kind=Measurement,
    cost_of_alltoall=0.0,
) -> Measurement:
    """Return a measurement of messages that nobody sends.

    Args:
        args: Megatron's arguments.
        config: the settings, with dimensions left open.
        messages: of an iteration that computes for 1 s.
        watch: the stopwatch; None: everything takes no time, and 1 s has passed.
        not_attachable: by dimension, why a model's layers cannot be compressed.
        kind: the class.
        cost_of_alltoall: seconds by which alltoall is slower than flex, in an iteration.
    """
    sender = Namespace(
        prepare=lambda *_: [], sends=lambda _, rule=None: rule, describe=lambda *_: ""
    )
    watch = watch or Namespace(elapsed=lambda: 1.0, seconds=lambda *_: 0.0, not_captured=set())
    work = Workload(1.0, tuple(messages))
    return kind(args, config, work, sender, watch, not_attachable or {}, cost_of_alltoall)


def decided_in_time(
    begin: float, costs: tuple[float, ...], *dimensions: str
) -> tuple[tuple[DimensionPlan, ...], list[tuple[str, str]]]:
    """Return the plans of dimensions, and which recipes were timed, in order.

    Args:
        begin: seconds that had passed before the first recipe; the limit is 10.
        costs: seconds that each timing of a recipe takes.
        dimensions: those left open; each has one message.
    """
    messages = [
        MessageKind(dimension, dimension, "all_reduce", (4,), torch.float32, 1.0)
        for dimension in dimensions
    ]
    watch = SlowStopwatch(begin, costs)
    args = megatron(cuda_graph_impl="none")
    run = measurement(args, CompressionConfig(auto=dimensions), messages, watch, kind=AnyRecipe)
    return run.decide(math.inf).dimensions, watch.timed


@pytest.mark.parametrize(
    ("begin", "costs", "timed", "note"),
    [
        (0.0, (0.1,) * 6, 6, ""),
        # After 7 s another timing of 4 s would end at 11 s.
        (
            0.0,
            (4.0, 3.0, 1.0, 1.0, 1.0, 1.0),
            2,
            "; 4 more not timed: no time was left of the 10 s",
        ),
        # A dimension's first recipe is timed at any rate.
        (9.5, (4.0,) * 6, 1, "; 5 more not timed"),
        (10.5, (0.1,) * 6, 1, "; 5 more not timed"),
    ],
)
def test_no_recipe_is_timed_that_would_end_after_the_limit(begin, costs, timed, note):
    (tensor_parallel,), order = decided_in_time(begin, costs, "tensor_parallel")
    assert order == [
        (recipe.name, "tensor_parallel") for recipe in RECIPES["tensor_parallel"][:timed]
    ]
    assert tensor_parallel.chosen
    assert note in tensor_parallel.reason
    assert (" more not timed" in tensor_parallel.reason) == (timed < 6)


THREE_DIMENSIONS = ("tensor_parallel", "data_parallel", "pipeline_parallel")


def test_slow_timings_of_one_dimension_leave_the_others_theirs():
    """At 8 s a timing of 7 s passes the limit; the other dimensions' first recipes are timed."""
    plans, order = decided_in_time(8.0, (7.0, 1.0, 1.0), *THREE_DIMENSIONS)
    assert order == [(RECIPES[dimension][0].name, dimension) for dimension in THREE_DIMENSIONS]
    for dimension_plan in plans:
        assert dimension_plan.chosen
        assert " more not timed" in dimension_plan.reason


def test_dimensions_take_turns():
    """Their first recipes come before any second one."""
    _, order = decided_in_time(0.0, (0.1,) * 12, *THREE_DIMENSIONS)
    dimensions = [dimension for _, dimension in order]
    assert dimensions[:6] == [*THREE_DIMENSIONS, *THREE_DIMENSIONS]
    assert len(order) == 12


def plans_of_a_run_that_cannot_be_compressed() -> tuple[DimensionPlan, ...]:
    """Return the plans of experts of the flex dispatcher and Transformer Engine's ring.

    The budget is zero: the reason is that they are not possible, not that they cost too much.
    """
    settings = {
        "moe_token_dispatcher_type": "flex",
        "moe_expert_rank_capacity_factor": 1.5,
        "transformer_impl": "transformer_engine",
    }
    args = parsed("--compression", "auto", **{**USED, **settings})
    return measurement(args, resolve(args)).decide(0.0).dimensions


def test_tokens_of_a_run_that_needs_the_flex_dispatcher_are_not_possible():
    expert_parallel, _ = plans_of_a_run_that_cannot_be_compressed()
    assert expert_parallel.dimension == "expert_parallel"
    assert expert_parallel.name == "none"
    assert expert_parallel.link == "not timed"
    reason = "not possible: --moe-expert-rank-capacity-factor 1.5 works with the flex dispatcher"
    assert reason in expert_parallel.reason


FLEX = {
    "moe_token_dispatcher_type": "flex",
    "expert_model_parallel_size": 2,
    "num_experts": 8,
}


def test_flex_that_cannot_run_here_is_switched_and_not_compared():
    """A run would stop when the model is built: DeepEP is not installed with this project."""
    args = parsed("--compression", "auto", **{**USED, **FLEX})
    (line,) = resolve(args).replace_flex_dispatcher(args)
    assert FLAG_NAMES.resolve(line) == (
        "--moe-token-dispatcher-type flex (deepep) is switched to alltoall: deepep is not installed "
        "here, so --compression auto has not compared the two"
    )
    assert args.moe_token_dispatcher_type == "alltoall"


def test_flex_that_can_run_stays_until_it_is_compared(monkeypatch):
    monkeypatch.setattr(token_dispatcher, "fused_dispatch", object())
    args = parsed("--compression", "auto", **{**USED, **FLEX})
    config = resolve(args)
    assert not config.replace_flex_dispatcher(args)
    assert args.moe_token_dispatcher_type == "flex"
    assert may_leave_flex(args, config)
    args.moe_expert_rank_capacity_factor = 1.5
    assert not may_leave_flex(args, config)


@pytest.mark.parametrize(("cost", "chosen"), [(0.0, True), (0.4, True), (0.6, False), (-1.0, True)])
def test_a_codec_has_to_gain_more_than_leaving_flex_costs(cost, chosen):
    """An uncompressed message takes 1 s and a compressed one 0.5 s."""
    message = MessageKind(
        "expert_parallel", "expert_parallel", "all_reduce", (4,), torch.float32, 1.0
    )
    run = measurement(
        megatron(cuda_graph_impl="none"),
        CompressionConfig(auto=("expert_parallel",)),
        [message],
        SlowStopwatch(0.0, (0.1,) * 6),
        kind=AnyRecipe,
        cost_of_alltoall=cost,
    )
    (plan,) = run.decide(math.inf).dimensions
    assert plan.chosen == chosen


def test_a_comparison_counts_a_round_trip_for_each_layer_and_micro_batch():
    comparison = Comparison("deepep", by_flex=0.001, by_alltoall=0.003)
    # Eight layers, four micro-batches: 32 round trips, each with two legs of gradients.
    message = MessageKind("expert_parallel", "ep.backward", "all_to_all", (4,), torch.float32, 64.0)
    assert comparison.cost_of_alltoall(Workload(1.0, (message,))) == pytest.approx(0.064)
    assert FLAG_NAMES.resolve(comparison.describe()) == (
        "--moe-token-dispatcher-type flex (deepep) was compared with alltoall: a layer's tokens and "
        "their gradients take 1 ms by deepep and 3 ms by alltoall, uncompressed"
    )


def test_keys_and_values_of_transformer_engine_are_not_possible():
    _, context_parallel = plans_of_a_run_that_cannot_be_compressed()
    assert context_parallel.dimension == "context_parallel"
    assert "keys and values on in a ring of its own" in context_parallel.reason


def test_fsdp2_is_not_timed():
    args = parsed("--compression", "auto", use_torch_fsdp2=True, data_parallel_size=2)
    message = MessageKind("data_parallel", "dp.gradient", "all_reduce", (4,), torch.float32, 1.0)
    (data_parallel,) = measurement(args, resolve(args), [message]).decide(0.1).dimensions
    assert data_parallel.name == "none"
    assert "--use-torch-fsdp2 is not timed" in data_parallel.reason


class ForeignExperts(MoELayer):
    """A layer of experts whose dispatcher is not one of Megatron's."""

    def __init__(self, ranks: int) -> None:
        torch.nn.Module.__init__(self)
        self.token_dispatcher = Namespace(ep_size=ranks, tp_size=1)


class ForeignAttention(SelfAttention):
    """An attention whose core exchanges keys and values by itself."""

    def __init__(self, ranks: int) -> None:
        torch.nn.Module.__init__(self)
        self.config = Namespace(context_parallel_size=ranks)
        self.core_attention = torch.nn.Identity()


FOREIGN_LAYERS = pytest.mark.parametrize(
    ("dimension", "layer", "line"),
    [
        (
            "expert_parallel",
            ForeignExperts,
            "layer: Namespace sends in a way of its own; use --moe-token-",
        ),
        (
            "context_parallel",
            ForeignAttention,
            "layer: Identity exchanges keys and values by itself; use --tr",
        ),
    ],
)


@FOREIGN_LAYERS
def test_a_layer_that_sends_by_itself_is_named(dimension, layer, line):
    """``auto`` asks before it chooses, so that attaching never refuses what it has chosen."""
    chunk = torch.nn.ModuleDict({"layer": layer(ranks=2)})
    refusal = Session(CompressionConfig()).dimensions[dimension].refusal([chunk])
    assert refusal.startswith(line)


@FOREIGN_LAYERS
def test_a_layer_that_sends_nothing_is_not_refused(dimension, layer, line):
    chunk = torch.nn.ModuleDict({"layer": layer(ranks=1)})
    assert Session(CompressionConfig()).dimensions[dimension].refusal([chunk]) is None


EXPERTS_AND_CONTEXT = ["expert_parallel", "context_parallel"]
CLOSED_DIMENSIONS = [
    ("", {}, EXPERTS_AND_CONTEXT),
    ("", USED, []),
    (
        "",
        USED | {"expert_model_parallel_size": 1, "context_parallel_size": 1},
        EXPERTS_AND_CONTEXT,
    ),
    ("--tp-compression int8", USED, ["tensor_parallel"]),
    ("--tp-compression none", USED, ["tensor_parallel"]),
    ("--taco", USED, ["tensor_parallel"]),
    ("--ep-compression int8 --cp-compression none", USED, EXPERTS_AND_CONTEXT),
]
"""Flags, arguments of Megatron, and the dimensions that ``auto`` leaves alone under them."""


class TestFlags:
    @pytest.mark.parametrize(("flags", "megatron", "closed"), CLOSED_DIMENSIONS)
    def test_dimensions_in_use_without_a_flag_are_open(self, flags, megatron, closed):
        """Experts and context parallelism are open where they are in use, the others always."""
        config = resolve(parsed("--compression", "auto", *flags.split(), **megatron))
        assert set(config.auto) == set(RECIPES) - set(closed)

    @pytest.mark.parametrize(("flags", "megatron"), [case[:2] for case in CLOSED_DIMENSIONS])
    def test_without_auto_no_dimension_is_open(self, flags, megatron):
        assert not resolve(parsed(*flags.split(), **megatron)).auto

    @pytest.mark.parametrize(
        ("flags", "line"),
        [
            (
                "--compression auto --tp-compression none --dp-compression none "
                "--pp-compression none",
                "--compression auto has nothing to decide",
            ),
            (
                "--compression-loss-budget 0.2",
                "--compression-loss-budget given, but nothing uses it",
            ),
            ("--compression auto --compression-loss-budget -1", "-1.0 must be a percentage >= 0"),
            ("--compression auto --compression-loss-budget nan", "nan must be a percentage >= 0"),
        ],
    )
    def test_bad_input_is_one_line(self, flags, line):
        with pytest.raises(CompressionConfigError) as error:
            resolve(parsed(*flags.split()))
        assert line in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "setting", [{"auto": ("data_parallel",)}, {"error_bound": 0.1}, {"report": "out"}]
    )
    def test_a_setting_that_needs_megatrons_loop_is_refused_in_an_own_loop(self, setting):
        tensor_parallel = TensorParallelConfig(compression="int6")
        config = CompressionConfig(tensor_parallel=tensor_parallel, **setting)
        with pytest.raises(CompressionConfigError, match="needs Megatron's loop and arguments"):
            attach([], config)


def one_plan(**changes) -> RunPlan:
    """Return a plan of one dimension, with changes of its fields."""
    fields = {
        "dimension": "tensor_parallel",
        "link": "1 MiB",
        "chosen": True,
        "name": INT6.name,
        "gain": 0.2,
        "loss": INT6.loss,
        "reason": "best",
    }
    dimension_plan = DimensionPlan(**{**fields, **changes})
    return RunPlan(
        (dimension_plan,), budget=0.1, iteration_ms=100.0, computation_ms=60.0, seconds=3.0
    )


def write_decision(folder: Path, decision: dict) -> None:
    """Write the file of a plan by hand."""
    (folder / plan.FILE).write_text(json.dumps({"decision": decision, "made_for": {}}))


CIRCUMSTANCES = {"world_size": 2, "settings": {"auto": ["tensor_parallel"]}}


class TestFile:
    """Plans are compared as text: a NaN in them is not equal to itself from Python 3.13 on."""

    def test_a_plan_comes_back_as_it_was_checked(self, tmp_path, capsys):
        checked = one_plan().after_check({})
        plan.write(str(tmp_path), checked, CIRCUMSTANCES, print)
        assert repr(plan.read(str(tmp_path), CIRCUMSTANCES, print)) == repr(checked)
        assert checked != one_plan()
        assert not capsys.readouterr().out

    def test_a_file_of_0_3_0_is_read(self, tmp_path):
        """It calls a reason ``why``, and knows neither halves nor what messages cost."""
        decision = asdict(one_plan())
        for name in ("halves", "cost_iterations"):
            del decision[name]
        for dimension_plan in decision["dimensions"]:
            dimension_plan["why"] = dimension_plan.pop("reason")
            del dimension_plan["exposed"]
        write_decision(tmp_path, decision)
        assert repr(plan.read(str(tmp_path), {}, print)) == repr(one_plan())

    def test_halves_come_back(self, tmp_path):
        in_halves = replace(one_plan(), halves=True)
        plan.write(str(tmp_path), in_halves, CIRCUMSTANCES, print)
        assert plan.read(str(tmp_path), CIRCUMSTANCES, print).halves

    def test_without_a_folder_or_a_file_there_is_no_plan(self, tmp_path, capsys):
        assert plan.read(None, CIRCUMSTANCES, print) is None
        assert plan.read(str(tmp_path / "none"), CIRCUMSTANCES, print) is None
        assert not capsys.readouterr().out

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        """JSON has no NaN and no infinity; read back, an unknown time is NaN again."""
        unknown = RunPlan(one_plan(gain=math.inf).dimensions, 0.1, math.nan, 60.0, 3.0)
        plan.write(str(tmp_path), unknown, {"seed": math.nan}, print)
        text = (tmp_path / plan.FILE).read_text()
        decision = json.loads(text, parse_constant=pytest.fail)["decision"]
        assert decision["iteration_ms"] is None
        assert decision["dimensions"][0]["gain"] is None
        reread = plan.read(str(tmp_path), {}, print)
        assert math.isnan(reread.iteration_ms)
        assert reread.recipes() == {"tensor_parallel": INT6}

    def test_a_damaged_value_of_the_plan_is_refused(self):
        decision = asdict(one_plan())
        decision["budget"] = "0.1"
        with pytest.raises(TypeError):
            RunPlan.from_dict(decision)

    @pytest.mark.parametrize(("field", "value"), [("gain", []), ("chosen", None)])
    def test_a_damaged_value_of_a_dimension_is_refused(self, field, value):
        decision = asdict(one_plan())
        decision["dimensions"][0][field] = value
        with pytest.raises(TypeError):
            RunPlan.from_dict(decision)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"decision": {}, "made_for": {}}', '{"decision": 1}']
    )
    def test_a_broken_file_is_named_and_the_run_measures(self, tmp_path, capsys, text):
        (tmp_path / plan.FILE).write_text(text)
        assert plan.read(str(tmp_path), {}, print) is None
        log = capsys.readouterr().out
        assert "cannot be read" in log
        assert "measures anew" in log
        assert log.count("\n") == 1

    @pytest.mark.parametrize("name", ["danger:Codec", "int7", "int6", "none", "int8:outliers=off"])
    def test_only_a_recipe_of_the_dimension_is_accepted(self, tmp_path, capsys, monkeypatch, name):
        """A module that the file names as a codec's is not imported: it could be anybody's."""
        (tmp_path / "danger.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        write_decision(tmp_path, asdict(one_plan(name=name)))
        assert plan.read(str(tmp_path), {}, print) is None
        assert f"{name!r} is no choice for 'tensor_parallel'" in capsys.readouterr().out

    def test_a_codec_of_the_dimensions_own_flag_may_have_any_name(self, tmp_path):
        write_decision(tmp_path, asdict(one_plan(name="danger:Codec", chosen=False)))
        assert plan.read(str(tmp_path), {}, print).recipes() == {}

    @pytest.mark.parametrize(
        "changed",
        [
            {"num_layers": 16},
            {"micro_batch_size": 8},
            {"world_size": 8},
            {"tensor_model_parallel_size": 2},
            {"recompute_granularity": "full"},
            {"overlap_grad_reduce": True},
            {"moe_router_topk": 4},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_a_plan_is_not_reused_where_an_argument_changes_messages(
        self, tmp_path, capsys, changed
    ):
        (name,) = changed
        arguments = experts if name == "moe_router_topk" else megatron
        plan.write(str(tmp_path), one_plan(), plan.circumstances(arguments(), {}), print)
        reread = plan.read(str(tmp_path), plan.circumstances(arguments(), {}), print)
        assert repr(reread) == repr(one_plan())
        elsewhere = plan.circumstances(arguments(**changed), {})
        assert plan.read(str(tmp_path), elsewhere, print) is None
        assert f"is of another run ({name})" in capsys.readouterr().out


class TestAdoption:
    @pytest.fixture
    def args(self) -> Namespace:
        return parsed("--compression", "auto", **USED, use_distributed_optimizer=True)

    @pytest.fixture
    def decision(self) -> RunPlan:
        """A plan in which each dimension has a codec."""
        dimensions = (
            *one_plan().dimensions,
            *one_plan(dimension="expert_parallel", name="int8").dimensions,
            *one_plan(dimension="context_parallel", name="lossless").dimensions,
            *one_plan(dimension="data_parallel", name="sdp4bit").dimensions,
        )
        return RunPlan(dimensions, 0.1, 100.0, 60.0, 3.0)

    def test_the_plan_of_each_dimension_becomes_its_rules(self, args, decision):
        session = Session(resolve(args))
        session.adopt(decided_config(resolve(args), decision, args))
        assert session.config.tensor_parallel.min_mb == 0
        rules = session.run.policy.rules
        assert rules["tp.forward"].codec.name == "int6:outliers=on"
        assert rules["ep.backward"].codec.name == "int8"
        assert rules["cp.forward"].codec.name == "lossless"
        assert rules["dp.weight"].codec.name == SDP4BIT_WEIGHTS

    def test_halves_are_a_setting_of_the_run(self, args, decision):
        """Beside a codec and without one: a resume attaches what the file says."""
        args = parsed("--compression", "auto")
        for one in (one_plan(), one_plan(chosen=False, name="none")):
            config = decided_config(resolve(args), replace(one, halves=True), args)
            assert config.tensor_parallel.halves
            assert config.tensor_parallel.enabled == one.dimensions[0].chosen

    def test_halves_that_the_run_cannot_have_are_refused(self, args, decision):
        args = parsed("--compression", "auto", micro_batch_size=1)
        with pytest.raises(CompressionConfigError, match="has no two halves"):
            decided_config(resolve(args), replace(one_plan(), halves=True), args)

    def test_a_dimension_that_the_check_has_switched_off_stays_uncompressed(self, args, decision):
        checked = decision.after_check({"tensor_parallel": "switched off: slower"})
        assert not decided_config(resolve(args), checked, args).tensor_parallel.enabled
