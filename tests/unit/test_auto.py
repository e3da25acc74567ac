"""--compression auto: what is chosen of what was timed, what an iteration is made of, what is kept."""

import json
import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.compression import CompressionConfig, CompressionConfigError, attach, parse_codec
from megatron.compression.auto import check, store
from megatron.compression.auto.automatic import Automatic
from megatron.compression.auto.candidates import CANDIDATES, within
from megatron.compression.auto.decision import Choice, Decision, choose
from megatron.compression.auto.measurement import decided_config
from megatron.compression.auto.messages import workload
from megatron.compression.auto.predict import Message, iteration_seconds
from megatron.compression.flags import resolve
from megatron.compression.tensor_parallel.config import RECOMMENDED
from tests.unit.megatron_args import parsed

INT6, INT8 = CANDIDATES["tensor_parallel"][:2]
SDP4BIT = CANDIDATES["data_parallel"][0]


def megatron(**changes) -> Namespace:
    """Megatron's arguments as far as an iteration's messages follow from them: 8 layers of 4096, TP 4."""
    given = dict(
        **dict(world_size=4, tensor_model_parallel_size=4, pipeline_model_parallel_size=1),
        **dict(context_parallel_size=1, data_parallel_size=1, virtual_pipeline_model_parallel_size=None),
        **dict(num_layers=8, hidden_size=4096, seq_length=2048, micro_batch_size=4, global_batch_size=16),
        **dict(sequence_parallel=False, params_dtype=torch.bfloat16, recompute_granularity=None),
        **dict(overlap_grad_reduce=False, overlap_param_gather=False, overlap_p2p_comm=False),
        **dict(use_distributed_optimizer=False, accumulate_allreduce_grads_in_fp32=True),
        ddp_bucket_size=None,
    )
    return Namespace(**{**given, **changes})


class TestChoice:
    def test_the_largest_gain_within_the_budget(self):
        gains = {"tensor_parallel": {INT6: 0.30, INT8: 0.25}, "data_parallel": {SDP4BIT: 0.10}}
        assert choose(gains, 0.1) == {"tensor_parallel": INT6}
        assert choose(gains, 0.11) == {"tensor_parallel": INT8, "data_parallel": SDP4BIT}, "0.35 beats 0.30"
        assert choose(gains, 0.2) == {"tensor_parallel": INT6, "data_parallel": SDP4BIT}
        assert choose(gains, 0.0) == {}

    def test_what_gains_under_two_percent_is_left_alone(self):
        assert choose({"tensor_parallel": {INT6: 0.019, INT8: -0.1}}, 0.1) == {}
        assert choose({"tensor_parallel": {INT6: 0.021}}, 0.1) == {"tensor_parallel": INT6}
        assert choose({}, 0.1) == {}

    def test_of_equally_fast_ones_the_smaller_loss(self):
        assert choose({"tensor_parallel": {INT6: 0.104, INT8: 0.1}}, 0.1) == {"tensor_parallel": INT8}
        assert choose({"tensor_parallel": {INT6: 0.106, INT8: 0.1}}, 0.1) == {"tensor_parallel": INT6}

    def test_candidates_are_settings_of_their_dimension(self):
        """What --tp-compression auto means is one of them; a budget of 0 leaves what changes no bit."""
        assert RECOMMENDED in [dict(one.settings)["compression"] for one in CANDIDATES["tensor_parallel"]]
        for dimension, known in CANDIDATES.items():
            assert [one.name for one in within(0.0, dimension)] == ["lossless"]
            assert len(within(math.inf, dimension)) == len(known) == len({one.name for one in known})
            for one in known:
                assert all(parse_codec(spec) for spec in one.name.split(", back "))


def test_costs_are_those_of_the_results():
    """Means of the tables' seeds."""
    pages = Path(__file__).parents[2] / "docs" / "results"
    endings, stages, replicas = (
        (pages / name).read_text() for name in ("accuracy.md", "pipeline_parallel.md", "data_parallel.md")
    )

    def losses(dimension: str) -> dict[str, float]:
        return {one.name.split(", ")[0].split(":")[0]: one.loss for one in CANDIDATES[dimension]}

    tensor = [one.loss for one in CANDIDATES["tensor_parallel"]]
    for setting, loss in zip(
        ("int6-signed", "int8-nearest", "int6655-quadratic", "int5655-quadratic", "int5-quadratic"),
        tensor,
        strict=False,
    ):
        (mean,) = re.findall(rf"^\| {setting} \|[^|]*\|(?:[^|]*,){{2}}[^|]*\| \+([\d.]+) ±", endings, re.M)[
            :1
        ]
        assert float(mean) == loss, setting
    for bits in (5, 6):
        (row,) = re.findall(rf"^\| int{bits} standardized \| .*$", stages, re.M)
        seeds = [float(value) for value in re.findall(r"\+([\d.]+) %", row)]
        assert losses("pipeline_parallel")[f"int{bits}"] == pytest.approx(sum(seeds) / 2)
    (mean,) = re.findall(r"^\| `--pp-compression auto` .*\| \+([\d.]+) ±", endings, re.M)
    assert float(mean) == losses("pipeline_parallel")["int4"]
    (row,) = re.findall(r"^\| sdp4bit \| .*$", replicas, re.M)
    seeds = [float(value) for value in re.findall(r"([-+][\d.]+) %", row)]
    assert losses("data_parallel")["sdp4bit"] == pytest.approx(sum(seeds) / 2)


class TestIteration:
    def test_exposed_communication_is_what_was_measured(self):
        """TP 4, docs/results/iterations.md: 128 sums of 4.14 ms in pcie hold up 499 ms, of 0.357 ms on NVLink
        22.5, beside 120.7 ms of GEMMs."""
        work = workload(megatron(), 0, 4 * 0.1207 * 1e15, 1e15)
        forward, backward = work.messages
        assert forward.count == backward.count == 4 * 17 and forward.nbytes == 2**26
        for sums, measured in ((0.5301, 0.4987), (0.0457, 0.0225)):
            seconds = sums / 136
            exposed = forward.exposed(seconds) + backward.exposed(seconds)
            assert exposed == pytest.approx(measured, rel=0.06)
        times = dict.fromkeys(work.messages, 0.5301 / 136)
        whole = iteration_seconds(work.computation, work.messages, times)
        assert whole == pytest.approx(0.7022, rel=0.06)

    def test_messages_of_each_dimension(self):
        """Counts of an iteration: sequence parallelism, buckets, 1F1B's exchanges."""

        def counts(parameters: int = 0, **changes) -> dict[str, float]:
            work = workload(megatron(**changes), parameters, 1e12, 1e12)
            return {f"{one.traffic} {one.operation}": one.count for one in work.messages}

        assert counts(sequence_parallel=True) == {
            "tp.forward reduce_scatter": 68,
            "tp.forward all_gather": 68,
            "tp.backward reduce_scatter": 68,
            "tp.backward all_gather": 136,
        }
        alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        stages = {**alone, "pipeline_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 16}
        # the first message, 15 exchanges, the last: a half of it for each direction
        assert counts(**stages) == {"pp.forward exchange": 8.5, "pp.backward exchange": 8.5}
        replicas = {**alone, "data_parallel_size": 4, "use_distributed_optimizer": True}
        assert counts(3 * 2**23, **replicas) == {"dp.gradient gradients": 3, "dp.weight weights": 3}
        assert counts(3 * 2**23, **alone) == {}

    def test_overlapped_buckets_leave_the_last_one(self):
        settings = dict(tensor_model_parallel_size=1, data_parallel_size=4, overlap_grad_reduce=True)
        (message,) = workload(megatron(**settings, ddp_bucket_size=2**22), 2**24, 4e15, 1e15).messages
        assert message.dtype == torch.float32 and message.count == 4 and message.least == 1
        # a micro-batch of 1.6 s computation, of which 2/3 are the backward's: they hide 4 buckets of 0.2
        assert message.exposed(0.2) == 0.2, "the last"
        assert message.exposed(0.4) == pytest.approx(1.6 - 1.6 * 2 / 3)

    def test_hidden_seconds_are_not_gained_twice(self):
        message = Message("tensor_parallel", "tp.backward", "all_reduce", (4,), torch.float32, 10, hidden=0.2)
        assert (message.exposed(0.1), message.exposed(0.3)) == (0.0, pytest.approx(1.0))


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

    def test_a_folder_that_cannot_be_written_ends_nothing(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        store.write(str(tmp_path / "file" / "folder"), decision(), {}, print)
        assert "cannot be written" in capsys.readouterr().out
        store.write(None, decision(), {}, print)

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

    def test_the_table_names_what_is_off(self):
        table = decision().after_check({"tensor_parallel": "switched off: slower"}).table()
        assert len(table) == 3 and len({len(line) for line in table}) == 1
        assert "| none " in table[2] and "switched off: slower" in table[2]


class TestCheck:
    @pytest.fixture
    def run(self, monkeypatch):
        """Runs iterations of given lengths and returns what was left out in each, and the verdict."""
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)

        def run(seconds, dimensions=("tensor_parallel", "data_parallel"), first=0, iterations=60):
            now, clock, verdict, history = [0], [0.0], [], []
            monkeypatch.setattr(check.time, "perf_counter", lambda: clock[0])
            found = check.Check(dimensions, first, lambda: now[0], lambda *given: verdict.append(given))
            for now[0] in range(iterations):
                left_out = {one for one in ("tp.forward", "dp.weight", "pp.forward") if found.left_out(one)}
                history.append(left_out)
                clock[0] += seconds(left_out)
                found.on_training_log(now[0] + 1)
            return history, verdict

        return run

    def test_each_dimension_takes_its_turns(self, run):
        """Tensor parallelism saves a fifth, data parallelism costs time: it is off from then on."""
        history, verdict = run(lambda out: 1.0 + 0.25 * ("tp.forward" in out) - 0.1 * ("dp.weight" in out))
        turn = [set()] * check.TURN + [{"tp.forward"}] * check.TURN + [{"dp.weight"}] * check.TURN
        begin = 1 + check.WARM_UP
        assert history[: begin + 2 * len(turn)] == [set()] * begin + turn * check.ROUNDS
        assert all(left_out == {"dp.weight"} for left_out in history[begin + 2 * len(turn) :])
        ((gains, off),) = verdict
        assert off == {"data_parallel"} and gains["tensor_parallel"] == pytest.approx(0.2)

    def test_a_gain_under_one_percent_is_none(self, run):
        _, ((gains, off),) = run(lambda out: 1.0 + 0.005 * bool(out), ("tensor_parallel",))
        assert off == {"tensor_parallel"} and 0 < gains["tensor_parallel"] < 0.01

    def test_it_waits_for_the_first_compressed_iteration(self, run):
        history, verdict = run(lambda out: 1.0 + bool(out), ("tensor_parallel",), first=20)
        begin = 20 + check.WARM_UP + check.TURN
        assert not any(history[:begin]) and history[begin] == {"tp.forward"} and verdict

    def test_a_run_that_ends_early_decides_nothing(self, run):
        _, verdict = run(lambda out: 1.0, iterations=10)
        assert not verdict

    def test_nothing_to_check(self, run):
        history, verdict = run(lambda out: 1.0, ())
        assert not any(history) and not verdict


def test_a_model_provider_makes_chunk_after_chunk():
    """They are attached together, behind the last one of a stage."""
    run, attached = Automatic.__new__(Automatic), []
    run.args, run._built = megatron(virtual_pipeline_model_parallel_size=2), []
    run.attach_model = attached.append
    first, second = torch.nn.Identity(), torch.nn.Identity()
    assert run.attach_next([first]) == [first] and not attached
    assert run.attach_next([second]) == [second] and attached == [[first, second]]
