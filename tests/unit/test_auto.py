"""--compression auto: what is chosen of what was timed, and what is kept."""

import json
import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.compression import CompressionConfig, CompressionConfigError, attach, parse_codec
from megatron.compression.auto import store, timing
from megatron.compression.auto.automatic import Automatic
from megatron.compression.auto.candidates import CANDIDATES, within
from megatron.compression.auto.decision import Choice, Decision, choose
from megatron.compression.auto.measurement import Measurement, decided_config
from megatron.compression.auto.messages import Workload
from megatron.compression.auto.predict import Message
from megatron.compression.compression import Compression
from megatron.compression.context_parallel import hooks as context_hooks
from megatron.compression.expert_parallel import hooks as expert_hooks
from megatron.compression.flags import resolve
from megatron.compression.tensor_parallel.config import RECOMMENDED
from megatron.compression.tensor_parallel.turns_checks import HALVES
from tests.unit.megatron_args import experts, megatron, parsed

INT6, INT8 = CANDIDATES["tensor_parallel"][:2]
SDP4BIT = CANDIDATES["data_parallel"][0]


class TestChoice:
    def test_the_largest_gain_within_the_budget(self):
        gains = {"tensor_parallel": {INT6: 0.30, INT8: 0.25}, "data_parallel": {SDP4BIT: 0.10}}
        assert choose(gains, 0.09) == {"tensor_parallel": INT8, "data_parallel": SDP4BIT}, "0.35 beats 0.30"
        assert choose(gains, 0.12) == {"tensor_parallel": INT6, "data_parallel": SDP4BIT}
        gains["tensor_parallel"][INT8] = 0.15
        assert choose(gains, 0.09) == {"tensor_parallel": INT6}
        assert choose(gains, 0.0) == {}

    def test_what_would_gain_nothing_is_not_tried(self):
        assert choose({"tensor_parallel": {INT6: 0.004, INT8: -0.1}}, 0.1) == {}
        assert choose({"tensor_parallel": {INT6: 0.006}}, 0.1) == {"tensor_parallel": INT6}
        assert choose({}, 0.1) == {}

    def test_of_equally_fast_ones_the_smaller_loss(self):
        assert choose({"tensor_parallel": {INT6: 0.104, INT8: 0.1}}, 0.1) == {"tensor_parallel": INT8}
        assert choose({"tensor_parallel": {INT6: 0.106, INT8: 0.1}}, 0.1) == {"tensor_parallel": INT6}

    def test_candidates_are_settings_of_their_dimension(self):
        """What --tp-compression auto means is one of them; a budget of 0 leaves what changes no bit."""
        assert RECOMMENDED in [dict(one.settings)["compression"] for one in CANDIDATES["tensor_parallel"]]
        for dimension, known in CANDIDATES.items():
            exact = [] if dimension == "expert_parallel" else ["lossless"]
            assert [one.name for one in within(0.0, dimension)] == exact
            assert len(within(math.inf, dimension)) == len(known) == len({one.name for one in known})
            for one in known:
                assert all(parse_codec(spec) for spec in one.name.split(", back "))


def test_costs_are_those_of_the_results():
    """Means of the tables' seeds, or the only one."""
    pages = Path(__file__).parents[2] / "docs" / "results"
    endings = (pages / "accuracy.md").read_text()

    def losses(dimension: str) -> dict[str, float]:
        return {one.name.split(", ")[0].split(":")[0]: one.loss for one in CANDIDATES[dimension]}

    tensor = [one.loss for one in CANDIDATES["tensor_parallel"]]
    for setting, loss in zip(
        ("int6-quadratic", "int8-nearest", "int6655-quadratic", "int5655-quadratic", "int5-quadratic"),
        tensor,
        strict=False,
    ):
        (mean,) = re.findall(rf"^\| {setting} \|[^|]*\|(?:[^|]*,){{2}}[^|]*\| \+([\d.]+) ±", endings, re.M)[
            :1
        ]
        assert float(mean) == loss, setting
    for dimension, codec, flag in (
        ("pipeline_parallel", "int4", "--pp-compression auto"),
        ("pipeline_parallel", "int6", "--pp-compression int6:group=64[^`]*"),
        ("pipeline_parallel", "int5", "--pp-compression int5:group=64[^`]*"),
        ("data_parallel", "sdp4bit", "--dp-compression sdp4bit"),
        ("context_parallel", "int8", "--cp-compression int8"),
        ("context_parallel", "int6", "--cp-compression int6"),
    ):
        (mean,) = re.findall(rf"^\| `{flag}`.*?\| \+([\d.]+) [±|]", endings, re.M)[:1]
        assert float(mean) == losses(dimension)[codec], flag
    for codec, loss in losses("expert_parallel").items():
        (mean,) = re.findall(
            rf"^\| `--ep-compression {codec}` \|[^|]*\|[^|]*\| ([-+][\d.]+) ±", endings, re.M
        )
        assert float(mean) == loss, codec


USED = dict(
    **dict(num_experts=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1, moe_latent_size=None),
    **dict(moe_token_dispatcher_type="alltoall", moe_pad_expert_input_to_capacity=False),
    context_parallel_size=2,
)
"""Of arguments as they are parsed: experts and context parallelism in use."""


def untimed(**changes) -> list[Choice]:
    """What is decided for a run of experts and context parallelism whose messages cannot be timed."""
    args = parsed("--compression", "auto", **{**USED, **changes})
    run = Measurement.__new__(Measurement)
    run.args, run.config, run._not_attachable, run._times = args, resolve(args), {}, {}
    run.work, run.watch = Workload(1.0, ()), Namespace(elapsed=lambda: 1.0)
    return list(run.decide(0.0).choices)


@pytest.mark.parametrize(
    ("begin", "costs", "timed", "said"),
    [
        (0.0, (0.1,) * 6, 6, ""),
        (0.0, (4.0, 3.0, 1.0, 1.0, 1.0, 1.0), 2, "; 4 more not timed: no time was left of the 10 s"),
        (9.5, (4.0,) * 6, 1, "; 5 more not timed"),
        (10.5, (0.1,) * 6, 1, "; 5 more not timed"),
    ],
)
def test_no_candidate_begins_that_would_end_behind_the_limit(begin, costs, timed, said):
    """The first of a dimension does, and may have to be compiled."""
    (choice,), order = decided_in_time(begin, costs, "tensor_parallel")
    assert said in choice.why and (" more not timed" in choice.why) == (timed < 6) and choice.settings
    assert order == [(one.name, "tensor_parallel") for one in CANDIDATES["tensor_parallel"][:timed]]


def test_slow_timings_of_one_dimension_leave_the_others_theirs():
    """A first candidate each, before any second one."""
    dimensions = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    choices, order = decided_in_time(8.0, (7.0, 1.0, 1.0), *dimensions)
    assert order == [(CANDIDATES[one][0].name, one) for one in dimensions]
    assert all(one.settings and " more not timed" in one.why for one in choices)
    _, order = decided_in_time(0.0, (0.1,) * 12, *dimensions)
    assert [dimension for _, dimension in order[:6]] == [*dimensions] * 2 and len(order) == 12


def decided_in_time(begin: float, costs: tuple[float, ...], *dimensions: str) -> tuple[tuple, list]:
    """The choices where each timing of a candidate takes so many seconds; and what was timed, in order."""
    now, left, order = [begin], iter(costs), []
    messages = tuple(Message(one, one, "all_reduce", (4,), torch.float32, 1.0) for one in dimensions)

    def seconds(rule):
        if rule is None:
            return 1.0
        order.append(rule.codec)
        now[0] += next(left)
        return 0.5

    run = Measurement.__new__(Measurement)
    run.args, run.config = megatron(), CompressionConfig(auto=dimensions)
    run.work, run.lines, run._times = Workload(1.0, messages), [], {}
    run.watch = Namespace(elapsed=lambda: now[0], seconds=seconds)
    run._sender = Namespace(prepare=lambda *_: [], sends=lambda _, rule=None: rule, describe=lambda *_: "")

    def possible(dimension, budget):
        rules = {one: {dimension: Namespace(codec=(one.name, dimension))} for one in CANDIDATES[dimension]}
        return rules, ""

    run._possible = possible
    return run.decide(math.inf).choices, order


def test_fused_kernels_are_asked_for_as_the_hooks_do(monkeypatch):
    """Of keys and values only where a codec has some; never for tokens."""
    asked = {}
    monkeypatch.setattr(timing, "_group", lambda message: (message.dimension, message.operation))
    transports = Namespace(prepare=lambda groups, fused: asked.update({groups[0]: fused}) or [])
    sender = timing.Sender(transports, None, True, torch.device("cpu"))
    ways = (("tensor_parallel", "all_reduce"), ("context_parallel", "all_gather"))
    messages = [Message(one, "", way, (4,), torch.float32, 1.0) for one, way in ways]
    messages.append(Message("expert_parallel", "", "all_to_all", (4,), torch.float32, 1.0))
    for lossy in (True, False):
        sender.prepare(messages, lossy)
        assert list(asked.values()) == [True, lossy, False]


def test_what_cannot_be_combined_is_a_line():
    """Not an error: experts of the flex dispatcher, Transformer Engine's ring."""
    settings = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    one, other = untimed(**settings, transformer_impl="transformer_engine")
    assert (one.dimension, one.name, one.link) == ("expert_parallel", "none", "not timed")
    assert (
        "not possible: --moe-token-dispatcher-type flex (deepep) sends tokens inside its kernels" in one.why
    )
    assert other.dimension == "context_parallel" and "keys and values on in a ring of its own" in other.why
    flag = dict(moe_token_dispatcher_type="alltoall", overlap_moe_expert_parallel_comm=True)
    assert "--overlap-moe-expert-parallel-comm exchanges tokens" in untimed(**flag)[0].why


def test_layers_that_send_in_another_way_are_named():
    """What attaching would refuse, before anything is chosen."""
    experts, attention = (cls.__new__(cls) for cls in (MoELayer, SelfAttention))
    for layer in (experts, attention):
        torch.nn.Module.__init__(layer)
    experts.token_dispatcher = Namespace(ep_size=2, tp_size=1)
    attention.config, attention.core_attention = Namespace(context_parallel_size=2), torch.nn.Identity()
    chunk = torch.nn.ModuleDict({"mlp": experts, "attention": attention})
    for hooks, said in (
        (expert_hooks, "mlp: Namespace sends in a way of its own; use --moe-token-dispatcher-type alltoall"),
        (context_hooks, "attention: Identity exchanges keys and values by itself; use --transformer-impl"),
    ):
        assert hooks.why_not_attachable([chunk]).startswith(said)
    experts.token_dispatcher.ep_size = attention.config.context_parallel_size = 1
    assert expert_hooks.why_not_attachable([chunk]) is context_hooks.why_not_attachable([chunk]) is None


class TestFlags:
    def test_a_dimension_with_its_own_flag_is_not_open(self):
        every = ("tensor_parallel", "data_parallel", "pipeline_parallel")
        assert resolve(parsed("--compression", "auto")).auto == every
        assert resolve(parsed()).auto == resolve(parsed("--compression", "none")).auto == ()
        config = resolve(parsed("--compression", "auto", "--tp-compression", "int8"))
        assert config.auto == every[1:] and config.tensor_parallel.compression == "int8"
        assert resolve(parsed("--compression", "auto", "--tp-compression", "none")).auto == every[1:]
        assert resolve(parsed("--compression", "auto", "--taco")).auto == every[1:]
        assert resolve(parsed("--compression", "auto", "--pp-backward-compression", "int8")).auto == every[:2]

    def test_experts_and_context_parallelism_are_open_where_they_are_in_use(self):
        more = ("expert_parallel", "context_parallel")
        assert resolve(parsed("--compression", "auto", **USED)).auto[3:] == more
        by_hand = ("--compression", "auto", "--ep-compression", "int8", "--cp-compression", "none")
        config = resolve(parsed(*by_hand, **USED))
        assert len(config.auto) == 3 and config.expert_parallel.compression == "int8"
        alone = {**USED, "expert_model_parallel_size": 1, "context_parallel_size": 1}
        assert len(resolve(parsed("--compression", "auto", **alone)).auto) == 3

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--compression auto --compression-3d", "--compression auto has nothing to decide"),
            ("--compression-loss-budget 0.2", "--compression-loss-budget given, but nothing uses it"),
            ("--compression auto --compression-loss-budget -1", "-1.0 must be a percentage >= 0"),
            ("--compression auto --compression-loss-budget nan", "nan must be a percentage >= 0"),
            ("--compression auto --tp-compression-min-mb 1", "add --taco or --tp-compression"),
        ],
    )
    def test_bad_input_is_one_line(self, flags, said):
        with pytest.raises(CompressionConfigError) as error:
            resolve(parsed(*flags.split()))
        assert said in str(error.value) and "\n" not in str(error.value)

    def test_settings_for_what_may_be_chosen_are_accepted(self):
        flags = "--compression-start-iteration 5 --validate-uncompressed --compression-error-bound 0.1"
        assert resolve(parsed("--compression", "auto", *flags.split())).start_iteration == 5

    def test_an_own_loop_names_its_codecs(self):
        with pytest.raises(CompressionConfigError, match="needs Megatron's arguments"):
            attach([], CompressionConfig(auto=("tensor_parallel",)))


def decision(**changes) -> Decision:
    given = dict(link="1 MiB", name="int6", gain=0.2, loss=0.085, why="best")
    settings = dict(INT6.settings)
    choice = Choice(**{"dimension": "tensor_parallel", "settings": settings, **given, **changes})
    return Decision((choice,), 0.1, 100.0, 60.0, 3.0)


class TestKept:
    def test_a_decision_comes_back(self, tmp_path, capsys):
        circumstances = {"world_size": 2, "settings": {"auto": ["tensor_parallel"]}}
        store.write(str(tmp_path), decision(), circumstances, print)
        assert store.read(str(tmp_path), circumstances, print) == decision()
        assert store.read(None, circumstances, print) is None
        assert store.read(str(tmp_path / "none"), circumstances, print) is None
        assert not capsys.readouterr().out

    def test_another_run_measures_anew(self, tmp_path, capsys):
        store.write(str(tmp_path), decision(), {"world_size": 2, "seq_length": 8}, print)
        assert store.read(str(tmp_path), {"world_size": 4, "seq_length": 8}, print) is None
        assert "is of another run (world_size)" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"decision": {}, "made_for": {}}', '{"decision": 1}'])
    def test_a_broken_file_is_said_and_measured_anew(self, tmp_path, capsys, text):
        (tmp_path / store.FILE).write_text(text)
        assert store.read(str(tmp_path), {}, print) is None
        said = capsys.readouterr().out
        assert "cannot be read" in said and said.count("\n") == 1

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            *(("budget", "0.1"), ("seconds", None), ("checked", "no"), ("loss", "0"), ("gain", [])),
            *(("dimension", "foo"), ("why", 3), ("settings", {"compression": 5}), ("settings", [1])),
            *(("settings", {"codec": "int8"}), ("settings", {"compression": "int8", "min_mb": "0"})),
        ],
    )
    def test_a_damaged_value_is_said_and_measured_anew(self, tmp_path, capsys, where, value):
        kept = decision().asdict()
        (kept if where in kept else kept["choices"][0])[where] = value
        (tmp_path / store.FILE).write_text(json.dumps({"decision": kept, "made_for": {}}))
        assert store.read(str(tmp_path), {}, print) is None
        said = capsys.readouterr().out
        assert "cannot be read" in said and "measures anew" in said and said.count("\n") == 1

    def test_a_folder_that_cannot_be_written_ends_nothing(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        store.write(str(tmp_path / "file" / "folder"), decision(), {}, print)
        assert "cannot be written" in capsys.readouterr().out
        store.write(None, decision(), {}, print)

    @pytest.mark.parametrize(
        "changed",
        [
            *({"recompute_granularity": "full"}, {"recompute_method": "block"}, {"recompute_num_layers": 2}),
            *({"ddp_bucket_size": 2**20}, {"tp_comm_overlap": True}, {"padded_vocab_size": 256}),
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_what_changes_messages_is_another_run(self, changed):
        one, other = (store.circumstances(megatron(**more), {}) for more in ({}, changed))
        assert [name for name in one if one[name] != other[name]] == list(changed)

    def test_the_default_budget_typed_out_is_the_same_run(self):
        def made_for(*flags):
            args = megatron(**vars(parsed("--compression", "auto", *flags)))
            return Automatic(args, Compression(resolve(args)), lambda: 1.0, print, print)._made_for

        default, typed, other = (
            made_for(*flags)
            for flags in ((), ("--compression-loss-budget", "0.1"), ("--compression-loss-budget", "0.2"))
        )
        assert default == typed != other

    def test_circumstances_are_json(self):
        made_for = store.circumstances(megatron(), {"auto": ("tensor_parallel",)})
        assert json.loads(json.dumps(made_for)) == made_for and made_for["params_dtype"] == "torch.bfloat16"

    def test_what_is_kept_becomes_settings(self):
        args = parsed("--compression", "auto")
        config = decided_config(resolve(args), decision(), args)
        assert config.tensor_parallel.compression == "int6:outliers=on" and config.tensor_parallel.min_mb == 0
        off = decision().after_check({"tensor_parallel": "switched off: slower"})
        assert not decided_config(resolve(args), off, args).tensor_parallel.enabled and off.checked
        with pytest.raises(CompressionConfigError, match="int7"):
            decided_config(resolve(args), decision(settings={"compression": "int7"}), args)

    def test_every_dimension_is_adopted(self):
        """And goes on behind a resume; other experts measure anew."""
        args = parsed("--compression", "auto", **USED)
        compression = Compression(resolve(args))
        kept = decision().choices
        for dimension, spec in (("expert_parallel", "int6"), ("context_parallel", "lossless")):
            kept += decision(dimension=dimension, settings={"compression": spec}).choices
        compression.adopt(decided_config(resolve(args), Decision(kept, 0.1, 100.0, 60.0, 3.0), args))
        assert compression._experts.config.compression == "int6"
        rules = compression.run.policy.rules
        assert [rules[one].codec.name for one in ("ep.backward", "cp.forward")] == ["int6", "lossless"]
        one, other = (store.circumstances(experts(moe_router_topk=k), {}) for k in (2, 4))
        assert [name for name in one if one[name] != other[name]] == ["moe_router_topk"]
        assert "moe_router_topk" not in store.circumstances(megatron(), {})

    def test_a_schedule_is_kept(self):
        """With what the check has found; one that is unknown is no decision."""
        checked = decision().after_check({}, HALVES)
        assert Decision.from_dict(json.loads(json.dumps(checked.asdict()))) == checked
        assert checked.table()[-1] == f"tensor parallel by {HALVES}"
        with pytest.raises(TypeError, match="thirds"):
            Decision.from_dict({**checked.asdict(), "schedule": "thirds"})

    def test_the_table_names_what_is_off(self):
        table = decision().after_check({"tensor_parallel": "switched off: slower"}).table()
        assert len(table) == 3 and len({len(line) for line in table}) == 1
        assert "| none " in table[2] and "switched off: slower" in table[2]
        alone = Decision((), 0.1, 100.0, 60.0, 3.0).table()
        assert alone == ["ranks send each other nothing: there is nothing to compress"]


def test_a_model_provider_makes_chunk_after_chunk():
    """They are attached together, behind the last one of a stage."""
    run, attached = Automatic.__new__(Automatic), []
    run.args, run._built = megatron(virtual_pipeline_model_parallel_size=2), []
    run.attach_model = attached.append
    first, second = torch.nn.Identity(), torch.nn.Identity()
    assert run.attach_next([first]) == [first] and not attached
    assert run.attach_next([second]) == [second] and attached == [[first, second]]
