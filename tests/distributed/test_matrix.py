"""Compression with what real runs switch on.

That is recomputation, accumulation, pipelines, optimizers, precisions.

Nine cells cover every pair of the settings below (but virtual stages with one micro-batch, which
Megatron does not run). Each cell starts from the weights of a serial run and must stay within 0.4 %
of it (0.8 % with compressed pipeline stages); its tensor-parallel and data-parallel replicas must
have equal bits. The text is real. Three layouts more put data parallelism beside each of the other
dimensions, and are resumed.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.launch import NONE_SKIPPED, UNKNOWN, Run, go_back_to, pretrain, tiny_flags
from tests.distributed.real_text import make_dataset

ITERATIONS = 10
SEQUENCE = 32
HIDDEN = 64
BATCH = 4  # sequences an iteration, whatever the layout
COMPRESSED = ("--taco", "--compression-min-mb", "0")
ACTIVATIONS = (
    "tp.forward",
    "tp.backward",
    "pp.forward",
    "pp.backward",
    "cp.forward",
    "cp.backward",
)
REPLICAS = ("dp.gradient", "dp.weight")

ARCHITECTURES = {
    "gpt": f"--max-position-embeddings {SEQUENCE}",
    "llama": f"--position-embedding-type rope --max-position-embeddings {SEQUENCE} "
    "--normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2 --qk-layernorm "
    "--disable-bias-linear",
}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536"}
# virtual: embedding, two layers and output on four virtual stages, of which each rank holds two.
PIPELINES = {
    "1": "",
    "2": "--pipeline-model-parallel-size 2",
    "virtual": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L",
}
COMPRESSED_REPLICAS = ("--dp-compression", "sdp4bit")
COMPRESSED_STAGES = ("--pp-compression", "tah-quant")
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OPTIMIZERS = {"plain": "", "distributed": OVERLAPPED}


@dataclass(frozen=True)
class Cell:
    """One combination of settings."""

    recompute: str
    precision: str
    pipeline: str
    micro_batches: int
    optimizer: str
    tied: bool
    sequence_parallel: bool
    architecture: str
    overlap: str

    @property
    def data_parallel(self) -> int:
        """Two where the distributed optimizer has no pipeline beside it: four processes at most."""
        return 2 if self.optimizer == "distributed" and self.pipeline == "1" else 1

    @property
    def ranks(self) -> int:
        """Processes at tensor-parallel size 2."""
        return 2 * self.data_parallel * (1 if self.pipeline == "1" else 2)

    @property
    def flags(self) -> list[str]:
        """Everything but the compression."""
        micro_batch = BATCH // self.micro_batches // self.data_parallel
        flags = f"""--tensor-model-parallel-size 2 --micro-batch-size {micro_batch}
            {PIPELINES[self.pipeline]} {PRECISIONS[self.precision]} {RECOMPUTE[self.recompute]}
            {OPTIMIZERS[self.optimizer]}""".split()
        if self.sequence_parallel:
            flags.append("--sequence-parallel")
        return [*model_flags(self.architecture, self.tied), *flags]

    @property
    def compressed(self) -> list[str]:
        """Flags of the codecs: TACO, TAH-Quant between stages, and SDP4Bit between replicas."""
        flags = [*COMPRESSED, "--tp-compression-overlap", self.overlap]
        if self.pipeline != "1":
            flags += COMPRESSED_STAGES
        if self.data_parallel > 1:
            flags += COMPRESSED_REPLICAS
        return flags

    @property
    def channels(self) -> tuple[str, ...]:
        """The traffic classes that are in use."""
        channels = ["tp.forward", "tp.backward"]
        if self.pipeline != "1":
            channels += ["pp.forward", "pp.backward"]
        if self.data_parallel > 1:
            channels.append("dp.gradient")
            if self.precision != "fp32":  # fp32 weights are their own masters
                channels.append("dp.weight")
        return tuple(channels)

    @property
    def tolerance(self) -> float:
        """The relative distance that is allowed from the serial run's losses."""
        return 0.004 if self.pipeline == "1" else 0.008


CELLS = [
    Cell("none", "fp32", "1", 1, "distributed", False, True, "gpt", "halves"),
    Cell("none", "bf16", "virtual", 2, "plain", True, False, "gpt", "weights"),
    Cell("none", "fp16", "2", 2, "distributed", False, False, "llama", "halves"),
    Cell("full", "fp32", "virtual", 2, "distributed", True, True, "llama", "halves"),
    Cell("full", "bf16", "2", 1, "distributed", False, True, "llama", "weights"),
    Cell("full", "fp16", "1", 1, "plain", True, False, "gpt", "weights"),
    Cell("selective", "fp32", "2", 1, "plain", True, False, "gpt", "weights"),
    Cell("selective", "bf16", "1", 2, "plain", False, True, "llama", "halves"),
    Cell("selective", "fp16", "virtual", 2, "distributed", False, True, "llama", "weights"),
]


def name_of(cell: Cell) -> str:
    """Return the cell's settings, for pytest."""
    return "-".join(str(value) for value in vars(cell).values())


def model_flags(architecture: str, tied: bool) -> list[str]:
    """Return the flags of the model and the training that every run has."""
    flags = f"""--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4
        --seq-length {SEQUENCE} --global-batch-size {BATCH} --train-iters {ITERATIONS}
        --lr 2e-3 --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
        --split 90,5,5 --num-workers 0 --log-interval 1 --eval-interval 5 --eval-iters 1
        --seed 7 {ARCHITECTURES[architecture]}""".split()
    if not tied:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


class Runs:
    """Runs on one dataset; the serial ones are made once for each model."""

    def __init__(self, directory) -> None:
        self.directory = directory
        prefix, tokenizer = make_dataset(directory, megabytes=2.0)
        self.data = [
            "--data-path",
            str(prefix),
            "--data-cache-path",
            str(directory / "cache"),
            "--tokenizer-type",
            "SentencePieceTokenizer",
            "--tokenizer-model",
            str(tokenizer),
        ]
        self.serial_runs: dict[tuple[str, bool], Run] = {}

    def train(self, flags: list[str], ranks: int) -> Run:
        return pretrain(*self.data, *flags, ranks=ranks)

    def initial(self, architecture: str) -> list[str]:
        """Return flags that start from one set of weights, which one step on one process writes."""
        saved = self.directory / architecture
        if not saved.exists():
            flags = f"""--train-iters 1 --eval-iters 0 --micro-batch-size 1
                --save {saved} --save-interval 1""".split()
            self.train([*model_flags(architecture, tied=False), *flags], 1)
        return ["--load", str(saved), "--finetune", "--no-load-optim", "--no-load-rng"]

    def serial(self, architecture: str, tied: bool) -> Run:
        """Train the model on one process in fp32, as every layout of it should."""
        if (architecture, tied) not in self.serial_runs:
            flags = [*model_flags(architecture, tied), "--micro-batch-size", str(BATCH)]
            run = self.train([*flags, *self.initial(architecture)], 1)
            self.serial_runs[architecture, tied] = run
        return self.serial_runs[architecture, tied]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """Dataset and serial runs shared by the cells."""
    return Runs(tmp_path_factory.mktemp("matrix"))


def test_cells_cover_every_pair() -> None:
    """Any two settings that can meet do meet in some cell."""
    levels = {
        "recompute": RECOMPUTE,
        "precision": PRECISIONS,
        "pipeline": PIPELINES,
        "micro_batches": (1, 2),
        "optimizer": OPTIMIZERS,
        "tied": (True, False),
        "sequence_parallel": (True, False),
        "architecture": ARCHITECTURES,
        "overlap": ("weights", "halves"),
    }
    pairs = set()
    for first, second in itertools.combinations(levels, 2):
        for x, y in itertools.product(levels[first], levels[second]):
            pairs.add(((first, x), (second, y)))
    pairs.remove((("pipeline", "virtual"), ("micro_batches", 1)))  # Megatron does not run it
    covered = {pair for cell in CELLS for pair in itertools.combinations(vars(cell).items(), 2)}
    assert covered == pairs


Copies = dict[tuple, dict[str, list[dict[str, int]]]]
"""{(parameter's name, its cut, coordinates in the cut): {hash of bits: coordinates of holders}}."""


def check_copies(run: Run, tied: bool = False) -> None:
    """Assert that ranks that hold copies of a parameter hold the same bits.

    They may be copies over any dimension of the mesh; every dimension of several ranks has some.

    Args:
        run: the finished run.
        tied: stages hold copies of the embeddings too.
    """
    copies = copies_of(run)
    for (name, *_), by_bits in copies.items():
        assert len(by_bits) == 1, f"{name} differs between copies: {[*by_bits.values()]}"
    every_parameter_is_sharded = all("data" in cut for _, cut, _ in copies)
    for dimension in ("tensor", "data"):
        has_several_ranks = any(rank.coordinates[dimension] for rank in run.ranks)
        if has_several_ranks and not every_parameter_is_sharded:
            assert has_copies_over(copies, dimension), f"no copies over {dimension} ranks"
    if tied:
        check_tied_embeddings(run)


def copies_of(run: Run) -> Copies:
    """Group parameters: ranks with equal coordinates in a parameter's cut hold copies."""
    copies: Copies = {}
    for rank in run.ranks:
        for name, bits in rank.parameters.items():
            values = tuple(rank.coordinates[dimension] for dimension in rank.cut[name])
            holders = copies.setdefault((name, rank.cut[name], values), {})
            holders.setdefault(bits, []).append(rank.coordinates)
    return copies


def has_copies_over(copies: Copies, dimension: str) -> bool:
    """Return true if a parameter has holders that differ in this dimension of the mesh."""
    for by_bits in copies.values():
        for holders in by_bits.values():
            if len({holder[dimension] for holder in holders}) > 1:
                return True
    return False


def check_tied_embeddings(run: Run) -> None:
    """Assert that the first stage's embeddings are the last stage's output weights."""
    copies: dict[int, dict[str, str]] = {}
    for rank in run.ranks:
        stage, tensor_rank = rank.stage_and_tensor_rank
        for name, bits in rank.parameters.items():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                copies.setdefault(tensor_rank, {})[f"{stage} {name}"] = bits
    stages = {rank.coordinates["pipeline"] for rank in run.ranks}
    for hashes in copies.values():
        assert len(hashes) == min(2, len(stages)), hashes.keys()
        assert len(set(hashes.values())) == 1, "the tied embeddings have drifted apart"


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_cell_trains_as_the_serial_run(runs: Runs, cell: Cell) -> None:
    """Losses are finite and near the serial run's, replicas equal, all activations compressed."""
    serial = runs.serial(cell.architecture, cell.tied)
    run = runs.train([*cell.flags, *runs.initial(cell.architecture), *cell.compressed], cell.ranks)
    skipped = set(range(1, ITERATIONS + 1)) - set(run.losses)
    if cell.precision == "fp16":
        assert len(skipped) <= 1, "the loss scale may fall once"
    else:
        assert not skipped
    expected = {iteration: serial.losses[iteration] for iteration in run.losses}
    assert run.losses == pytest.approx(expected, rel=cell.tolerance)
    assert run.losses != serial.losses, "nothing was compressed"
    assert serial.losses[ITERATIONS] < serial.losses[1] - 0.1, "it has learnt something"
    assert run.ranks[-1].validation == pytest.approx(
        serial.ranks[-1].validation, rel=cell.tolerance
    )
    assert NONE_SKIPPED in run.output
    check_copies(run, cell.tied)
    check_channels(run, cell.channels)


def check_channels(run: Run, channels: tuple[str, ...]) -> None:
    """Assert that these channels sent payloads, and that no other activations were sent.

    Nor does the audit of the first iteration name bytes that the ledger does not know.
    """
    assert UNKNOWN not in run.output
    kinds: dict[str, set[str]] = {}
    saved_bytes: dict[str, int] = dict.fromkeys(channels, 0)
    for row in itertools.chain.from_iterable(rank.ledger for rank in run.ranks):
        if row["sent_bytes"]:
            kinds.setdefault(row["traffic"], set()).add(row["kind"])
        if row["traffic"] in saved_bytes and row["kind"] == "compressed":
            saved_bytes[row["traffic"]] += row["plain_bytes"] - row["sent_bytes"]
    assert min(saved_bytes.values()) > 0, "a channel sent no fewer bytes than without compression"
    assert set(kinds) & {*ACTIVATIONS} == set(channels) - {*REPLICAS}
    for channel in channels:
        lossy = set(kinds[channel])
        if channel.startswith("dp."):
            lossy.discard("exact")  # the first weights, and parameters that are too small
        assert lossy == {"compressed"}, channel


@dataclass(frozen=True)
class Layout:
    """Four ranks with data parallelism beside one other dimension."""

    architecture: str
    tied: bool
    flags: str
    codecs: str
    channels: tuple[str, ...]
    """The other dimension's."""


LAYOUTS = {
    "tensor and data": Layout(
        "llama",
        tied=False,
        flags="--tensor-model-parallel-size 2 --sequence-parallel --bf16 --micro-batch-size 2 "
        + RECOMPUTE["selective"],
        codecs="--taco --tp-compression-overlap halves --compression-min-mb 0",
        channels=ACTIVATIONS[:2],
    ),
    "stages and data": Layout(
        "gpt",
        tied=True,
        flags=f"--fp16 --initial-loss-scale 32768 {PIPELINES['virtual']}",
        codecs="--pp-compression tah-quant",
        channels=ACTIVATIONS[2:4],
    ),
    "context and data": Layout(
        "llama",
        tied=False,
        flags=f"--context-parallel-size 2 --bf16 {RECOMPUTE['full']}",
        codecs="--cp-compression int8",
        channels=ACTIVATIONS[4:],
    ),
}


# The first cell and test_ways_in.py have tensor and data parallelism as well.
THOROUGH = {"tensor and data": pytest.mark.thorough}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=THOROUGH.get(name, ())) for name in LAYOUTS]
)
def test_layout_trains_as_the_serial_run_and_resumes_exactly(runs: Runs, layout: str) -> None:
    """Every channel is compressed, beside the distributed optimizer's overlaps.

    Losses are near the serial run's; a resumed run ends in the same bits.
    """
    case = LAYOUTS[layout]
    saved = runs.directory / layout.replace(" ", "-")
    half = ITERATIONS // 2
    more = f"""--micro-batch-size 1 {case.flags} {case.codecs} {OPTIMIZERS["distributed"]}
        --save {saved} --save-interval {half}""".split()
    flags = [*model_flags(case.architecture, case.tied), *more, *COMPRESSED_REPLICAS]
    run = runs.train([*flags, *runs.initial(case.architecture)], 4)
    serial = runs.serial(case.architecture, case.tied).losses
    expected = {iteration: serial[iteration] for iteration in run.losses}
    assert len(expected) == ITERATIONS
    assert run.losses == pytest.approx(expected, rel=0.005)
    assert run.losses != expected, "nothing was compressed"
    check_copies(run, case.tied)
    check_channels(run, case.channels + REPLICAS)
    go_back_to(half, saved)
    resumed = runs.train([*flags, "--load", str(saved)], 4)
    second_half = range(half + 1, ITERATIONS + 1)
    assert resumed.losses == {iteration: run.losses[iteration] for iteration in second_half}
    assert resumed.parameters == run.parameters


COPIES = {
    "FSDP2 beside tensor parallelism, int8": (
        "fsdp2",
        "--tensor-model-parallel-size 2 --bf16",
        "--dp-compression int8 int8",
    ),
    "FSDP2 beside sequence parallelism, sdp4bit": (
        "fsdp2",
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --qk-layernorm",
        "--dp-compression sdp4bit int6 --taco --compression-min-mb 0",
    ),
    "FSDP2 beside tensor parallelism, tagc": (
        "fsdp2",
        "--tensor-model-parallel-size 2 --bf16 --hidden-size 128",
        "--dp-compression tagc:layers=all none --compression-start-iteration 0",
    ),
    "shards beside tensor parallelism, int8": (
        "ddp",
        f"--tensor-model-parallel-size 2 --bf16 {OVERLAPPED}",
        "--dp-compression int8 int8",
    ),
    "plain DDP beside tensor parallelism, tagc": (
        "ddp",
        "--tensor-model-parallel-size 2 --bf16",
        "--dp-compression tagc:layers=all --compression-start-iteration 0",
    ),
    "experts' tensor parallelism, sdp4bit": (
        "ddp",
        f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {OVERLAPPED}",
        "--num-experts 2 --expert-tensor-parallel-size 2 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --dp-compression sdp4bit",
    ),
    "context ranks, int8": (
        "ddp",
        f"--context-parallel-size 2 --bf16 {OVERLAPPED}",
        "--dp-compression int8 int8 --cp-compression int8",
    ),
}
"""Lossy settings of data parallelism, each beside a dimension whose ranks hold copies."""


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_their_bits(name: str) -> None:
    """After five iterations copies over every dimension of the mesh are bit for bit alike."""
    data_parallelism, layout, codecs = COPIES[name]
    flags = "--hidden-size 64 --train-iters 5 --lr 1e-2 --no-gradient-accumulation-fusion".split()
    flags += [*layout.split(), *codecs.split()]
    env = {}
    if data_parallelism == "fsdp2":
        flags += ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # Megatron refuses FSDP2 with 1
    run = pretrain(*tiny_flags(*flags), ranks=4, env=env)
    check_copies(run)
    kinds = set()
    for row in itertools.chain.from_iterable(rank.ledger for rank in run.ranks):
        if row["traffic"] == "dp.gradient" and row["sent_bytes"]:
            kinds.add(row["kind"])
    assert "compressed" in kinds


class TestEveryDimension:
    """TP 2 x PP 2 x DP 2 on eight processes, with a report."""

    FLAGS = """--hidden-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --bf16 --use-distributed-optimizer --compression taco-paper --compression-min-mb 0"""
    CHANNELS = ACTIVATIONS[:4] + REPLICAS

    @pytest.fixture(scope="class")
    def report(self, tmp_path_factory) -> Path:
        """The folder of the report."""
        return tmp_path_factory.mktemp("every-dimension") / "report"

    @pytest.fixture(scope="class")
    def run(self, report: Path) -> Run:
        """The finished run."""
        flags = tiny_flags(*self.FLAGS.split(), "--compression-report", str(report))
        return pretrain(*flags, ranks=8)

    @pytest.fixture(scope="class")
    def figures(self, run: Run, report: Path) -> dict:
        """The report's figures."""
        return json.loads((report / "report.json").read_text())

    def test_the_loss_falls(self, run: Run) -> None:
        assert sorted(run.losses) == [1, 2, 3, 4]
        assert run.losses[4] < run.losses[1]

    def test_every_channel_is_compressed(self, run: Run) -> None:
        check_channels(run, self.CHANNELS)

    def test_copies_keep_their_bits(self, run: Run) -> None:
        check_copies(run, tied=True)

    def test_report_has_the_codecs_errors(self, figures: dict) -> None:
        errors = {(row["site"], row["traffic"]): row["relative_error"] for row in figures["errors"]}
        # TAH-Quant has 3 to 4 bits a value forward, the gradients' int6 has 6.
        assert 0.03 < errors["pipeline stage 0", "pp.forward"] < 0.15
        assert 0.005 < errors["pipeline stage 1", "pp.backward"] < 0.05

    def test_report_has_every_ranks_ledger(self, run: Run, figures: dict) -> None:
        assert figures["ledger_by_rank"] == [rank.ledger for rank in run.ranks]

    def test_report_has_every_dimensions_ratio(self, figures: dict) -> None:
        dimensions = figures["summary"]["dimensions"]
        # The order is that of --help.
        names = ["tensor parallel", "pipeline parallel", "data parallel", "all"]
        assert list(dimensions) == names
        ratios = {name: row["ratio"] for name, row in dimensions.items()}
        # Tied embeddings go over pp.other uncompressed: much of so small a model.
        assert min(ratios["tensor parallel"], ratios["data parallel"], ratios["all"]) > 1.5, ratios

    def test_report_counts_tied_embeddings_as_uncompressed(self, figures: dict) -> None:
        tied_embeddings = figures["summary"]["bytes_per_iteration"]["pp.other"]
        # fp32 gradients of 256 padded ids x 64 channels, of which a tensor rank holds half
        assert tied_embeddings["sent"] == 4 * 256 * 64 / 2
        assert tied_embeddings["uncompressed"] == 4 * 256 * 64 / 2

    def test_reports_page_has_every_channel(self, figures: dict, report: Path) -> None:
        page = (report / "report.md").read_text()
        for channel in self.CHANNELS:
            assert f"| {channel} |" in page
