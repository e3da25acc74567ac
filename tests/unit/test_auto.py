"""--compression auto: what is chosen of what was timed, what is kept, and how a run checks the choice."""

import json
import math
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.compression import CompressionConfig, CompressionConfigError, Session, attach
from megatron.compression.auto import plan
from megatron.compression.auto.measurement import Candidates, Measurement, decided_config
from megatron.compression.auto.messages import MessageKind, Workload
from megatron.compression.auto.plan import DimensionPlan, RunPlan, choose
from megatron.compression.codecs.recipes import RECIPES
from megatron.compression.flags import resolve
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from tests.unit.megatron_args import EXPERTS, experts, megatron, parsed

INT6, INT8 = RECIPES["tensor_parallel"][:2]
SDP4BIT = RECIPES["data_parallel"][0]
SDP4BIT_WEIGHTS = "sdp4bit:intra=4,group=2048,hadamard=off"


@pytest.mark.parametrize(
    ("int6", "int8", "sdp4bit", "budget", "chosen"),
    [
        (0.30, 0.25, 0.10, 0.09, [INT8, SDP4BIT]),
        (0.30, 0.25, 0.10, 0.1, [INT6, SDP4BIT]),
        (0.30, 0.15, 0.10, 0.09, [INT6]),
        (0.30, 0.25, 0.10, 0.0, []),
        (0.004, -0.1, 0.0, 0.1, []),
        (0.006, -0.1, 0.0, 0.1, [INT6]),
        (0.104, 0.1, 0.0, 0.1, [INT8]),
        (0.106, 0.1, 0.0, 0.1, [INT6]),
    ],
)
def test_the_largest_gain_within_the_budget(int6, int8, sdp4bit, budget, chosen):
    """Of all dimensions together, from 0.5 % on; of equally fast ones the smaller loss."""
    gains = {"tensor_parallel": {INT6: int6, INT8: int8}, "data_parallel": {SDP4BIT: sdp4bit}}
    assert list(choose(gains, budget).values()) == chosen
    assert choose({}, budget) == {}


USED = EXPERTS | dict(context_parallel_size=2)
"""Of arguments as they are parsed: experts and context parallelism in use."""


@pytest.mark.parametrize(
    ("begin", "costs", "timed", "said"),
    [
        (0.0, (0.1,) * 6, 6, ""),
        (
            0.0,
            (4.0, 3.0, 1.0, 1.0, 1.0, 1.0),
            2,
            "; 4 more not timed: no time was left of the 10 s",
        ),
        (9.5, (4.0,) * 6, 1, "; 5 more not timed"),
        (10.5, (0.1,) * 6, 1, "; 5 more not timed"),
    ],
)
def test_no_recipe_is_timed_that_would_end_after_the_limit(begin, costs, timed, said):
    """The first of a dimension is, and may have to be compiled."""
    (found,), order = decided_in_time(begin, costs, "tensor_parallel")
    assert said in found.why and (" more not timed" in found.why) == (timed < 6) and found.chosen
    assert order == [(one.name, "tensor_parallel") for one in RECIPES["tensor_parallel"][:timed]]


def test_slow_timings_of_one_dimension_leave_the_others_theirs():
    """The first recipe of each, before any second one."""
    dimensions = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    plans, order = decided_in_time(8.0, (7.0, 1.0, 1.0), *dimensions)
    assert order == [(RECIPES[one][0].name, one) for one in dimensions]
    assert all(one.chosen and " more not timed" in one.why for one in plans)
    _, order = decided_in_time(0.0, (0.1,) * 12, *dimensions)
    assert [dimension for _, dimension in order[:6]] == [*dimensions] * 2 and len(order) == 12


def decided_in_time(begin: float, costs: tuple[float, ...], *dimensions: str) -> tuple[tuple, list]:
    """The plans where each timing of a recipe takes so many seconds; and what was timed, in order."""
    now, left, order = [begin], iter(costs), []
    messages = tuple(
        MessageKind(one, one, "all_reduce", (4,), torch.float32, 1.0) for one in dimensions
    )

    def seconds(rule, in_graph):
        assert not in_graph
        if rule is None:
            return 1.0
        order.append(rule.codec)
        now[0] += next(left)
        return 0.5

    def possible(dimension, budget):
        rules = {
            recipe: {dimension: Namespace(codec=(recipe.name, dimension))}
            for recipe in RECIPES[dimension]
        }
        return Candidates(rules)

    run = measurement(
        megatron(cuda_graph_impl="none"),
        CompressionConfig(auto=dimensions),
        messages,
        watch=Namespace(elapsed=lambda: now[0], seconds=seconds, not_captured=set()),
    )
    run._possible = possible
    return run.decide(math.inf).dimensions, order


def measurement(args, config, messages=(), watch=None, not_attachable=None) -> Measurement:
    """A measurement of messages that nobody sends; rules stand for the calls that would send them."""
    sender = Namespace(
        prepare=lambda *_: [], sends=lambda _, rule=None: rule, describe=lambda *_: ""
    )
    watch = watch or Namespace(elapsed=lambda: 1.0, seconds=lambda *_: 0.0, not_captured=set())
    work = Workload(1.0, tuple(messages))
    return Measurement(args, config, work, sender, watch, not_attachable or {})


def test_what_cannot_be_combined_is_a_line():
    """Not an error: experts of the flex dispatcher, Transformer Engine's ring, FSDP2, even for no gain."""
    settings = dict(moe_token_dispatcher_type="flex", transformer_impl="transformer_engine")
    args = parsed("--compression", "auto", **{**USED, **settings})
    one, other = measurement(args, resolve(args)).decide(0.0).dimensions
    assert (one.dimension, one.name, one.link) == ("expert_parallel", "none", "not timed")
    assert "not possible: --moe-token-dispatcher-type flex (deepep) sends tokens" in one.why
    assert (
        other.dimension == "context_parallel"
        and "keys and values on in a ring of its own" in other.why
    )


def test_fsdp2_is_not_timed():
    args = parsed("--compression", "auto", use_torch_fsdp2=True, data_parallel_size=2)
    message = MessageKind("data_parallel", "dp.gradient", "all_reduce", (4,), torch.float32, 1.0)
    (plan,) = measurement(args, resolve(args), [message]).decide(0.1).dimensions
    assert plan.name == "none" and "--use-torch-fsdp2 is not timed" in plan.why


def test_layers_that_send_in_another_way_are_named():
    """What attaching would refuse, before anything is chosen."""
    experts, attention = (cls.__new__(cls) for cls in (MoELayer, SelfAttention))
    for layer in (experts, attention):
        torch.nn.Module.__init__(layer)
    experts.token_dispatcher = Namespace(ep_size=2, tp_size=1)
    attention.config, attention.core_attention = (
        Namespace(context_parallel_size=2),
        torch.nn.Identity(),
    )
    chunk = torch.nn.ModuleDict({"mlp": experts, "attention": attention})
    compression = Session(CompressionConfig())
    hooks = compression.dimensions
    for name, said in (
        ("expert_parallel", "mlp: Namespace sends in a way of its own; use --moe-token-"),
        ("context_parallel", "attention: Identity exchanges keys and values by itself; use --tr"),
    ):
        assert hooks[name].refusal([chunk]).startswith(said)
    experts.token_dispatcher.ep_size = attention.config.context_parallel_size = 1
    assert all(
        hooks[name].refusal([chunk]) is None for name in ("expert_parallel", "context_parallel")
    )


EXPERTS_AND_CONTEXT = ["expert_parallel", "context_parallel"]


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "more", "closed"),
        [
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
        ],
    )
    def test_dimensions_in_use_without_a_flag_are_open(self, flags, more, closed):
        """Experts and context parallelism where they are in use, the others always."""
        open_parts = resolve(parsed("--compression", "auto", *flags.split(), **more)).auto
        assert set(open_parts) == set(RECIPES) - set(closed)
        assert not resolve(parsed(*flags.split(), **more)).auto

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (
                "--compression auto --tp-compression none --dp-compression none --pp-compression none",
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
    def test_bad_input_is_one_line(self, flags, said):
        with pytest.raises(CompressionConfigError) as error:
            resolve(parsed(*flags.split()))
        assert said in str(error.value) and "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "given", [{"auto": ("data_parallel",)}, {"error_bound": 0.1}, {"report": "out"}]
    )
    def test_an_own_loop_has_not_what_follows_megatrons(self, given):
        given = CompressionConfig(tensor_parallel=TensorParallelConfig(compression="int6"), **given)
        with pytest.raises(CompressionConfigError, match="needs Megatron's loop and arguments"):
            attach([], given)


def one_plan(**changes) -> RunPlan:
    given = dict(
        dimension="tensor_parallel", link="1 MiB", chosen=True, name=INT6.name, gain=0.2, loss=0.067
    )
    return RunPlan((DimensionPlan(**{**given, "why": "best", **changes}),), 0.1, 100.0, 60.0, 3.0)


def write(folder: Path, kept: dict) -> None:
    (folder / plan.FILE).write_text(json.dumps({"decision": kept, "made_for": {}}))


class TestKept:
    def test_a_plan_comes_back(self, tmp_path, capsys):
        circumstances = {"world_size": 2, "settings": {"auto": ["tensor_parallel"]}}
        checked = one_plan().after_check({})
        plan.write(str(tmp_path), checked, circumstances, print)
        assert plan.read(str(tmp_path), circumstances, print) == checked != one_plan()
        assert plan.read(None, circumstances, print) is None
        assert plan.read(str(tmp_path / "none"), circumstances, print) is None
        assert not capsys.readouterr().out

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        unknown = RunPlan(one_plan(gain=math.inf).dimensions, 0.1, math.nan, 60.0, 3.0)
        plan.write(str(tmp_path), unknown, {"seed": math.nan}, print)
        text = (tmp_path / plan.FILE).read_text()
        kept = json.loads(text, parse_constant=pytest.fail)["decision"]
        assert kept["iteration_ms"] is None and kept["dimensions"][0]["gain"] is None
        found = plan.read(str(tmp_path), {}, print)
        assert math.isnan(found.iteration_ms) and found.recipes() == {"tensor_parallel": INT6}

    @pytest.mark.parametrize(
        ("where", "value"), [("budget", "0.1"), ("gain", []), ("chosen", None)]
    )
    def test_a_damaged_value_is_no_plan(self, where, value):
        kept = asdict(one_plan())
        (kept if where in kept else kept["dimensions"][0])[where] = value
        with pytest.raises(TypeError):
            RunPlan.from_dict(kept)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"decision": {}, "made_for": {}}', '{"decision": 1}']
    )
    def test_a_broken_file_is_named_and_the_run_measures(self, tmp_path, capsys, text):
        (tmp_path / plan.FILE).write_text(text)
        assert plan.read(str(tmp_path), {}, print) is None
        said = capsys.readouterr().out
        assert "cannot be read" in said and "measures anew" in said and said.count("\n") == 1

    @pytest.mark.parametrize("name", ["danger:Codec", "int7", "int6", "none", "int8:outliers=off"])
    def test_only_what_auto_could_have_chosen_is_accepted(
        self, tmp_path, capsys, monkeypatch, name
    ):
        """Of its own dimension; a module that the file names is not imported."""
        (tmp_path / "danger.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        write(tmp_path, asdict(one_plan(name=name)))
        assert plan.read(str(tmp_path), {}, print) is None
        assert f"{name!r} is no choice for 'tensor_parallel'" in capsys.readouterr().out
        write(
            tmp_path, asdict(one_plan(name="danger:Codec", chosen=False))
        )  # of the dimension's own flag
        assert plan.read(str(tmp_path), {}, print).recipes() == {}

    @pytest.mark.parametrize(
        "changed",
        [
            *({"num_layers": 16}, {"micro_batch_size": 8}, {"world_size": 8}),
            *({"tensor_model_parallel_size": 2}, {"recompute_granularity": "full"}),
            *({"overlap_grad_reduce": True}, {"moe_router_topk": 4}),
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_what_changes_messages_is_another_run(self, tmp_path, capsys, changed):
        """A plan of another number of layers, another size of a micro-batch and so on is not reused."""
        kind = experts if "moe_router_topk" in changed else megatron
        plan.write(str(tmp_path), one_plan(), plan.circumstances(kind(), {}), print)
        assert plan.read(str(tmp_path), plan.circumstances(kind(), {}), print) == one_plan()
        assert plan.read(str(tmp_path), plan.circumstances(kind(**changed), {}), print) is None
        assert f"is of another run ({next(iter(changed))})" in capsys.readouterr().out

    def test_every_dimension_is_adopted(self):
        """What is kept becomes settings, without what the check has switched off."""
        args = parsed("--compression", "auto", **USED, use_distributed_optimizer=True)
        compression, kept = Session(resolve(args)), one_plan().dimensions
        others = {
            "expert_parallel": "int8",
            "context_parallel": "lossless",
            "data_parallel": "sdp4bit",
        }
        for dimension, name in others.items():
            kept += one_plan(dimension=dimension, name=name).dimensions
        whole = RunPlan(kept, 0.1, 100.0, 60.0, 3.0)
        compression.adopt(decided_config(resolve(args), whole, args))
        assert compression.config.tensor_parallel.min_mb == 0
        rules = compression.run.policy.rules
        names = [
            rules[one].codec.name
            for one in ("tp.forward", "ep.backward", "cp.forward", "dp.weight")
        ]
        assert names == ["int6:outliers=on", "int8", "lossless", SDP4BIT_WEIGHTS]
        off = whole.after_check({"tensor_parallel": "switched off: slower"})
        assert not decided_config(resolve(args), off, args).tensor_parallel.enabled


TURN = plan.BLOCK
BOTH = ("tensor_parallel", "data_parallel")


@pytest.fixture
def run(monkeypatch):
    """Runs iterations of given lengths and returns what was left out in each, and the gains."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

    def run(seconds, dimensions=BOTH, first=0, iterations=60, skipped=(), capturing=0):
        now, clock, gains, history = [0], [0.0], [], []
        monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])
        check = plan.Check(dimensions, first, lambda: now[0], gains.append, capturing)
        for now[0] in range(iterations):
            left_out = {
                one for one in ("tp.forward", "dp.weight", "pp.forward") if check.left_out(one)
            }
            history.append(left_out)
            clock[0] += seconds(left_out)
            if now[0] not in skipped:
                check.on_training_log(now[0] + 1)
        return history, gains, check.off

    return run


def test_each_dimension_is_left_out_in_turn(run):
    """Tensor parallelism saves a fifth, data parallelism costs time: it is off from then on."""
    history, (gains,), off = run(
        lambda out: 1.0 + 0.25 * ("tp.forward" in out) - 0.1 * ("dp.weight" in out)
    )
    blocks = [set()] * TURN + [{"tp.forward"}] * TURN + [{"dp.weight"}] * TURN
    begin = 1 + plan.WARM_UP
    assert history[: begin + 2 * len(blocks)] == [set()] * begin + blocks * plan.ROUNDS
    assert all(left_out == {"dp.weight"} for left_out in history[begin + 2 * len(blocks) :])
    assert off == {"data_parallel"} and gains["tensor_parallel"] == pytest.approx(0.2)


def test_in_a_cuda_graph_only_replays_are_timed(run):
    """Each kind of block once. Where it begins, eager iterations and a capture take long."""
    before, slow = [None], [0]

    def seconds(out):
        slow[0] = slow[0] - 1 if out == before[0] else 3  # two eager iterations and a capture
        before[0] = out
        return 9.0 if slow[0] > 0 else 1.0 + 0.25 * ("tp.forward" in out)

    history, (gains,), off = run(seconds, ("tensor_parallel",), capturing=3)
    begin, length = 1 + plan.WARM_UP, TURN + 3
    assert history[begin : begin + 2 * length] == [set()] * length + [{"tp.forward"}] * length
    assert not any(history[begin + 2 * length :]) and not off
    assert gains == {"tensor_parallel": pytest.approx(0.2)}


def test_a_gain_under_two_percent_is_none(run):
    _, (gains,), off = run(lambda out: 1.0 + 0.015 * bool(out), ("tensor_parallel",))
    assert off == {"tensor_parallel"} and 0.01 < gains["tensor_parallel"] < 0.02


def test_it_waits_for_the_first_compressed_iteration(run):
    history, gains, _ = run(lambda out: 1.0 + bool(out), ("tensor_parallel",), first=20)
    begin = 20 + plan.WARM_UP + TURN
    assert not any(history[:begin]) and history[begin] == {"tp.forward"} and gains


def test_skipped_iterations_are_not_timed(run):
    """--iterations-to-skip: neither they nor the next one; a dimension without any stays as decided."""
    begin = 1 + plan.WARM_UP
    slow = lambda out: 1.0 + 0.25 * ("tp.forward" in out) + ("dp.weight" in out)  # noqa: E731
    _, (gains,), _ = run(slow, skipped=(begin + 2 * TURN - 1,))
    assert gains == {"tensor_parallel": pytest.approx(0.2), "data_parallel": pytest.approx(0.5)}
    blocks = [range(begin + number * TURN, begin + (number + 1) * TURN) for number in (2, 5)]
    _, (gains,), off = run(slow, skipped=[one for block in blocks for one in block])
    assert gains == {"tensor_parallel": pytest.approx(0.2)} and not off


def test_without_enough_iterations_or_dimensions_nothing_is_decided(run):
    _, gains, _ = run(lambda out: 1.0, iterations=10)
    assert not gains
    history, gains, _ = run(lambda out: 1.0, ())
    assert not any(history) and not gains
