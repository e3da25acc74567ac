"""The cost model: bytes as the ledger counts them, monotonic in the links, bad input, a golden prediction."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.compression.advise import Cluster, Constants, Layout, Link, Model, memory, predict, shapes, work
from megatron.compression.advise.__main__ import main
from megatron.compression.advise.settings import Setting
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from tests.distributed.test_sequence_parallel_ledger import BATCH, FACTORS, MESSAGE, SITES
from tests.distributed.tiny_gpt import HIDDEN, LAYERS, SEQUENCE, VOCABULARY

H200 = Constants.load()
SLOW, FAST = Link.of(10, 10), Link.of(200, 3)
TINY = Model(
    **dict(layers=LAYERS, hidden=HIDDEN, ffn=4 * HIDDEN, heads=4, groups=4, head_dim=HIDDEN // 4),
    **dict(vocabulary=VOCABULARY, sequence=SEQUENCE),
)
GPT = Model(layers=8, hidden=4096, ffn=16384, heads=32, groups=32, head_dim=128, vocabulary=32000, tied=True)
MOE = replace(GPT, experts=8, top_k=2, expert_ffn=2048, shared_ffn=1024, dense_layers=2)
LAYOUTS = {
    "tp": Layout(tensor=2, micro_batch=4, global_batch=16),
    "sp": Layout(tensor=2, micro_batch=4, global_batch=16, sequence_parallel=True, recompute="full"),
    "pp": Layout(pipeline=4, micro_batch=2, global_batch=16),
    "vpp": Layout(pipeline=2, virtual=2, micro_batch=2, global_batch=16),
    "dp": Layout(data=8, micro_batch=2, global_batch=32, distributed_optimizer=True, overlap_gradients=True),
    "cp": Layout(context=2, data=2, micro_batch=2, global_batch=8, transformer_engine=True),
    "3d": Layout(tensor=2, pipeline=2, data=4, global_batch=32, sequence_parallel=True, overlap_weights=True),
}


def cluster(gpus: int, intra: Link = FAST, inter: Link = SLOW, constants: Constants = H200) -> Cluster:
    return Cluster(gpus=gpus, gpus_per_node=4, intra=intra, inter=inter, constants=constants)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_messages_are_those_of_the_ledger(sequence_parallel):
    """The hand count that tests/distributed holds against the ledger, uncompressed and as payloads."""
    layout = Layout(tensor=2, micro_batch=BATCH, global_batch=BATCH, sequence_parallel=sequence_parallel)
    parts = work.messages(TINY, layout, H200)
    taco = CompressionConfig(tensor_parallel=TensorParallelConfig(compression="taco", min_mb=0))
    plain = predict(TINY, layout, cluster(2)).sent
    compressed = predict(TINY, layout, cluster(2), taco).sent
    for traffic in ("tp.forward", "tp.backward"):
        counts: Counter = Counter()
        for part, times in (("layer", LAYERS), ("embedding", 1), ("output", 1)):
            for one in parts[part]:
                counts[one.operation] += times * (one.traffic == traffic)
        expected = SITES[sequence_parallel, traffic]
        assert +counts == expected
        assert plain[traffic] == sum(n * FACTORS[name] * MESSAGE // 2 for name, n in expected.items())
        assert compressed[traffic] * 16 == plain[traffic] * 8.5


def test_bytes_are_those_of_measured_runs():
    """MB that the ledger counted in the runs of docs/results; norms and biases are not modelled."""
    thin = Model(layers=4, hidden=2048, ffn=8192, heads=16, groups=16, head_dim=128, vocabulary=8191)
    stages = Layout(pipeline=4, micro_batch=4, global_batch=64)
    deep = replace(thin, layers=24, vocabulary=32000, tied=True)
    shards = Layout(data=4, micro_batch=4, global_batch=16, distributed_optimizer=True, bf16_gradients=True)
    nodes = CompressionConfig(data_parallel=DataParallelConfig(compression="sdp4bit", node_size=1))
    for model, layout, config, sent in (
        (thin, stages, None, {"pp.forward": 402.7, "pp.backward": 402.7}),
        (thin, stages, Setting({"pp": "tah-quant"}, 0).config, {"pp.forward": 111.4, "pp.backward": 163.6}),
        (deep, shards, None, {"dp.gradient": 1917.5, "dp.weight": 1917.5}),
        (deep, shards, Setting({"dp": "sdp4bit"}, 0).config, {"dp.gradient": 988.7, "dp.weight": 481.3}),
        (deep, shards, nodes, {"dp.gradient": 509.3, "dp.weight": 481.3}),
    ):
        found = predict(model, layout, cluster(4), config).sent
        assert {name: nbytes / 1e6 for name, nbytes in found.items()} == pytest.approx(sent, rel=0.005)


def test_memory_is_that_of_measured_runs():
    """GB of docs/results/memory.md."""
    for layout, measured in (
        (Layout(data=2, micro_batch=4, global_batch=8, distributed_optimizer=True), 31.38),
        (Layout(tensor=2, micro_batch=4, global_batch=16), 22.53),
        (Layout(pipeline=2, micro_batch=4, global_batch=16), 26.15),
    ):
        assert memory.gigabytes(GPT, layout) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_faster_links_and_free_codecs_never_cost_time(layout):
    config = Setting({"tp": "int8", "pp": "int8", "dp": "sdp4bit"}, 0).config
    for one in (None, config):
        times = [
            predict(GPT, layout, cluster(layout.gpus, FAST.faster(f), SLOW.faster(f)), one).milliseconds
            for f in (0.1, 0.5, 1, 2, 10)
        ]
        assert times == sorted(times, reverse=True)
    free = replace(H200, launch_us=0, fused_us=0, codecs=dict.fromkeys(H200.codecs, (0.0, 0.0, 0.0)))
    free = replace(free, host_exchange_ms=0, host_fused_ms=0)
    places = cluster(layout.gpus, Link.of(200, 0), Link.of(10, 0), free)
    plain, compressed = predict(GPT, layout, places), predict(GPT, layout, places, config)
    assert compressed.milliseconds <= plain.milliseconds
    assert sum(compressed.sent.values()) <= sum(plain.sent.values())
    assert compressed.phases["codecs"] == 0


def test_a_slow_host_is_waited_for():
    """GPT-1.3B in small micro-batches at TP 2: codecs gain nothing where the host cannot keep up."""
    small = Model(layers=24, hidden=2048, ffn=8192, heads=16, groups=16, head_dim=128, vocabulary=50257)
    layout = Layout(tensor=2, micro_batch=4, global_batch=16)
    quick = replace(H200, host_layer_ms=0.0, host_exchange_ms=0.0, host_fused_ms=0.0)
    for link, specs in (("nvlink", ("none", "taco", "auto")), ("pcie", ("taco", "auto"))):
        for spec in specs:
            config = Setting({"tp": spec}, 0).config
            slow, fast = (
                predict(small, layout, cluster(2, H200.links[link], constants=constants), config)
                for constants in (H200, quick)
            )
            assert fast.phases["host"] == 0 < slow.phases["host"], (link, spec)
            assert slow.milliseconds - fast.milliseconds == pytest.approx(slow.phases["host"])
    pcie = cluster(2, H200.links["pcie"])
    plain, packed = (predict(small, layout, pcie, Setting({"tp": s}, 0).config) for s in ("none", "auto"))
    assert plain.phases["host"] == 0 and packed.milliseconds > 0.95 * plain.milliseconds
    large = replace(layout, micro_batch=16, global_batch=64)
    assert predict(small, large, pcie, Setting({"tp": "auto"}, 0).config).phases["host"] == 0


def test_settings_that_change_a_message_change_its_time():
    """Layers that are left out, small messages, and a transport that is asked for."""

    def found(**settings) -> CompressionConfig:
        transport = settings.pop("transport", "auto")
        return CompressionConfig(
            tensor_parallel=TensorParallelConfig(compression="int8", **settings), transport=transport
        )

    nodes = {name: cluster(2, H200.links[name]) for name in ("nvlink", "pcie")}
    times = {
        name: predict(GPT, LAYOUTS["tp"], nodes["pcie"], found(**settings)).milliseconds
        for name, settings in {
            "all": {},
            "half": {"layers": "0-3,embedding,output"},
            "none": {"min_mb": 65.0},
        }.items()
    }
    plain = predict(GPT, LAYOUTS["tp"], nodes["pcie"])
    assert times["all"] < times["half"] < times["none"] == plain.milliseconds
    fused, apart = (
        predict(GPT, LAYOUTS["tp"], nodes["nvlink"], found(transport=t)) for t in ("auto", "collective")
    )
    assert fused.phases["codecs"] == 0 < apart.phases["codecs"]
    assert fused.sent == apart.sent


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_gradients_and_weights_through_host_memory(distributed_optimizer):
    """On one node by the copies' curves and their overlap loss; over two the first hop's curve alone."""
    intra = H200.links["pcie"]
    slow = replace(intra, copied=False)

    def found(nodes: int, link: Link, transport: str = "auto"):
        config = CompressionConfig(
            data_parallel=DataParallelConfig(compression="sdp4bit"), transport=transport
        )
        gpus = 4 * nodes
        layout = replace(LAYOUTS["dp"], data=gpus, distributed_optimizer=distributed_optimizer)
        return predict(GPT, layout, replace(cluster(gpus, link), gpus_per_node=4), config)

    for nodes in (1, 2):
        before, copied = found(nodes, slow), found(nodes, intra)
        assert copied.phases["DP"] < before.phases["DP"]
        assert found(nodes, intra, "collective") == before
        assert copied.sent == before.sent and copied.phases["codecs"] == before.phases["codecs"]
    one = found(1, intra)
    assert one == found(1, replace(intra, overlap_loss=0.9)) != found(1, replace(intra, copied_loss=0.9))
    assert found(1, slow) != found(1, replace(slow, overlap_loss=0.9))


def test_more_gpus_in_a_group_take_longer():
    """Latency and two hops: the same bytes over more ranks, more nodes, and a curve between its points."""
    times = [FAST.milliseconds("all_reduce", 1e6, ranks) for ranks in (2, 4, 64, 4096)]
    assert times == sorted(times) and times[0] < times[-1]
    link = H200.links["nvlink"]
    (low, early), (high, late) = link.curve("all_reduce")[1:3]
    assert link.milliseconds("all_reduce", (low + high) / 2, 4) == pytest.approx((early + late) / 2e3)
    assert FAST.milliseconds("send", 200e6, 2) == pytest.approx(1.003)
    one, two = (predict(GPT, replace(LAYOUTS["dp"], data=n), cluster(n)).phases["DP"] for n in (4, 8))
    assert one < two


GOLDEN = {
    ("3d", True): 383.65024485707266,
    ("3d", False): 326.90000000000003,
    ("vpp", True): 390.68089352595723,
    ("vpp", False): 392.6840354009572,
    ("cp", True): 149.577599785354,
    ("cp", False): 135.55372847240068,
    ("experts", True): 280.54513823025945,
}
"""By layout, and whether nothing is compressed."""


def test_golden_predictions():
    """Every digit, so that a change of the model shows."""
    found: dict = {}
    for name in ("3d", "vpp", "cp"):
        places = cluster(LAYOUTS[name].gpus, H200.links["nvlink"], H200.links["ethernet"])
        config = Setting({"tp": "auto", "pp": "auto", "dp": "sdp4bit"}, 0).config
        for one in (None, config):
            found[name, one is None] = predict(GPT, LAYOUTS[name], places, one).milliseconds
    experts = Layout(tensor=2, data=4, expert=4, global_batch=16, sequence_parallel=True)
    found["experts", True] = predict(MOE, experts, cluster(8)).milliseconds
    assert found == pytest.approx(GOLDEN, rel=1e-12)


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


SCRIPT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16"
)


EXPERTS = "--num-experts 4"
IMPOSSIBLE = (
    *(("--tensor-model-parallel-size", 0), ("--pipeline-model-parallel-size", 0)),
    *(("--context-parallel-size", 0), ("--num-layers", -8), ("--hidden-size", -4096), ("--vocab-size", -5)),
    *(("--ffn-hidden-size", -5), ("--kv-channels", -4), ("--num-experts", -4), ("--moe-router-topk", 0)),
    *(("--micro-batch-size", 0), ("--num-layers-per-virtual-pipeline-stage", -1)),
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt5", "--model gpt5 is unknown; choose one of gpt3-1.3b"),
        ("--model llama-3-8b --gpus 12", "--gpus 12 must be a multiple of --gpus-per-node 8"),
        ("--model llama-3-8b --inter 0", "--inter 0: the bandwidth must be above 0"),
        ("--model llama-3-8b --intra quick", "--intra quick: give one of nvlink, pcie, ethernet"),
        ("--measure nowhere/here.json", "--measure nowhere/here.json: its folder does not exist"),
        ("--model llama-3-8b --gemm-tflops 0", "--gemm-tflops 0 must be a number from 0.001 on"),
        ("--model llama-3-8b --gemm-tflops 1e-300", "--gemm-tflops 1e-300 must be a number from 0.001 on"),
        ("--model llama-3-8b --calibration nowhere.json", "--calibration nowhere.json: No such file"),
        ("--model gpt3-175b --gpus 8", "no layout fits: the smallest takes"),
        ("", "give --model NAME, or the flags of a launch script"),
        (f"-- {SCRIPT} --tensor-model-parallel-size 3", "--gpus 8 must be a multiple of 3"),
        (f"-- {SCRIPT} --pipeline-model-parallel-size 8 --num-layers 12", "--num-layers 12 cannot be split"),
        (f"-- {SCRIPT} --num-layers 800 --hidden-size 8192", "does not fit: "),
        (f"-- {SCRIPT} --hiden-size 12", "did you mean --hidden-size?"),
        (f"-- {SCRIPT} --multi-latent-attention", "--multi-latent-attention is not modelled"),
        (f"-- {SCRIPT} --fp8-format hybrid", "--fp8-format is not modelled"),
        (
            f"-- {SCRIPT} --caat-net-sync-fraction 0.5 --tensor-model-parallel-size 2",
            "--caat-net-sync-fraction",
        ),
        (f"-- {SCRIPT} --dp-compression tagc", "--dp-compression tagc: its bytes depend on the values"),
        ("-- --num-layers 8", "--hidden-size is missing"),
        *((f"-- {SCRIPT} {flag} {size}", f"{flag} {size} must be 1 or more") for flag, size in IMPOSSIBLE),
        (f"-- {SCRIPT} {EXPERTS} --moe-layer-freq 0", "--moe-layer-freq 0 must be 1 or more"),
        (
            f"-- {SCRIPT} {EXPERTS} --moe-layer-freq [0,1]",
            "--moe-layer-freq has 2 layers, --num-layers says 8",
        ),
        (f"-- {SCRIPT} {EXPERTS} --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
        (
            f"-- {SCRIPT} --num-attention-heads 33",
            "--hidden-size 1024 cannot be split over 33 attention heads",
        ),
        (
            f"-- {SCRIPT} --group-query-attention --num-query-groups 3",
            "--num-attention-heads 16 cannot be split over --num-query-groups 3",
        ),
        (f"-- {SCRIPT} --expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
        (
            f"-- {SCRIPT} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 must divide the 4 layers of a stage",
        ),
        (
            f"-- {SCRIPT} --compression auto",
            "--compression auto is decided by measuring in a run; leave it out",
        ),
        ("--plot advice.docx --model gpt5", "--plot advice.docx: give a file that ends in one of ."),
        ("--plot docs --model gpt5", "--plot docs: give a file that ends in one of ."),
        ("--json nowhere/here.json --model gpt5", "--json nowhere/here.json: its folder does not exist"),
        ("--plot nowhere/here.png --model gpt5", "--plot nowhere/here.png: its folder does not exist"),
        (f"-- {SCRIPT.removesuffix(' --bf16')}", "products of fp32 were not timed; give --bf16 or --fp16"),
    ],
)
def test_bad_input_is_one_line(capsys, words, said):
    status, printed, error = run(capsys, *words.split())
    assert (status, printed) == (2, "")
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_table_json_and_picture(capsys, tmp_path):
    """From a launch script's flags with a codec of its own, and from a name whose layout is searched."""
    files = [tmp_path / "advice.json", tmp_path / "advice.png"]
    words = f"--gpus 8 --gpus-per-node 4 --inter 3:50 --json {files[0]} --plot {files[1]} -- {SCRIPT}"
    words += (
        " --tensor-model-parallel-size 2 --global-batch-size 64 --micro-batch-size 4 --tp-compression int6"
        " --hidden-size 4096"  # narrower layers wait for the host, and all settings of a dimension alike
    )
    status, printed, error = run(capsys, *words.split())
    assert (status, error) == (0, "")
    assert "TP 2 DP 4, 4 micro-batches of 4 x 2048 tokens" in printed
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert rows[1][0] == "| uncompressed" and rows[1][2] == "1.00" and rows[-1][0] == "| as given"
    data = json.loads(files[0].read_text())
    assert len(data["settings"]) == len(rows) - 1
    for setting in data["settings"]:
        assert setting["milliseconds"] == pytest.approx(sum(setting["prediction"]["phases"].values()))
    assert data["gains"]["gpus"]["--dp-compression sdp4bit"][-1][0] == 16384
    slow, fast = (data["gains"]["bandwidth"]["--dp-compression sdp4bit"][i] for i in (0, -1))
    assert slow[0] < fast[0] and slow[1] > fast[1]
    assert files[1].read_bytes().startswith(b"\x89PNG") and files[1].stat().st_size > 20_000
    status, printed, _ = run(capsys, *["--model", "qwen2.5-7b", "--gpus", "16", "--memory-gb", "80"])
    assert status == 0 and "7.6 B parameters on 16 GPUs" in printed
    words = "--model qwen2.5-7b --gpus 64 -- --pipeline-model-parallel-size 4 --pp-compression auto"
    status, printed, _ = run(capsys, *words.split())
    assert status == 0 and "PP 4 DP 16" in printed and "| as given |" in printed


@pytest.mark.parametrize(
    "damage",
    [
        *({"gemm_tflops": "720"}, {"gemm_tflops": None}, {"launch_us": "5"}, {"iteration_ms": -1}),
        *({"codecs": {}}, {"codecs": {"int8": [1, 2]}}, {"codecs": {"int8": ["1", "2", "3"]}}, {"links": []}),
        *({"curves": {}}, {"curves": {"send": []}}, {"curves": {"send": [[1, 2], [1, 3]]}}, {"ranks": 0}),
        *({"curves": {"send": [["1", "2"]]}}, {"curves": {"send": ["ab"]}}, {"curves": {"send": [[0, 5]]}}),
        *({"ranks": 1}, {"ranks": "2"}, {"overlap_loss": "0"}),
    ],
    ids=str,
)
def test_a_damaged_calibration_is_one_line(capsys, tmp_path, damage):
    data = json.loads(Path(shapes.__file__).with_name("h200.json").read_text())
    (data if damage.keys() <= data.keys() else data["links"]["pcie"]).update(damage)
    file = tmp_path / "here.json"
    file.write_text(json.dumps(data))
    status, printed, error = run(capsys, "--model", "llama-3-8b", "--calibration", str(file))
    assert (status, printed) == (2, "") and error.count("\n") == 1
    assert error.startswith(f"error: --calibration {file} is no calibration (")


def test_sweeps_leave_out_what_no_layout_is_of(capsys, tmp_path):
    """GPUs over which experts cannot be spread; nodes of 6, and the cluster's own count."""
    file = tmp_path / "advice.json"
    for words, first, some in (
        (f"--gpus 32 -- {EXPERTS} --expert-model-parallel-size 4", 4, 32),
        ("--gpus 36 --gpus-per-node 6 --", 2, 36),
    ):
        status, printed, error = run(capsys, "--json", str(file), *words.split(), *SCRIPT.split())
        assert (status, error) == (0, "")
        assert "host: what the GPU waits for launches, at 5.3 ms for a layer" in printed
        curves = json.loads(file.read_text())["gains"]["gpus"].values()
        counts = [gpus for gpus, _ in next(iter(curves))]
        assert counts[0] == first and some in counts and max(counts) > 6000


def test_a_message_that_was_not_measured_takes_the_nearest_kinds_curve():
    """Over as many communicators: one fills TCP less."""
    link = H200.links["ethernet"]
    assert link.curve("reduce_scatter", 2) == link.curves["all_gather x2"] != link.curves["all_gather"]
    assert link.curve("reduce_scatter") == link.curves["all_gather"]


def test_a_model_with_experts_by_its_name(capsys):
    words = "--model qwen3-30b-a3b --gpus 16 --memory-gb 80 -- --tensor-model-parallel-size 2"
    status, printed, _ = run(capsys, *words.split())
    assert status == 0 and "30.5 B parameters on 16 GPUs: TP 2" in printed and " EP " in printed
    assert "| --ep-compression int8 |" in printed and "| --ep-compression int6 |" in printed


def test_layers_of_experts_are_those_of_megatron() -> None:
    """Layers 0, 2 and 4 of five with --moe-layer-freq 2."""
    words = "--num-layers 5 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    for frequency, dense in (("1", 0), ("2", 2), ("[0,1,1,0,1]", 2)):
        args = shapes.parse_megatron([*words.split(), "--num-experts", "4", "--moe-layer-freq", frequency])
        assert shapes.model_of(args).dense_layers == dense
