"""Compression with what real runs switch on: recomputation, accumulation, pipelines, optimizers, precisions.

Nine cells cover every pair of the settings below (but virtual stages with one micro-batch, which Megatron
does not run). Each cell starts from the weights of a serial run and must stay within 0.4 % of it (0.8 % with
compressed pipeline stages), its tensor-parallel and data-parallel replicas bit
for bit alike. The text is real. Three layouts more put data parallelism beside each of the other dimensions,
and are resumed.
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
    "llama": f"--position-embedding-type rope --max-position-embeddings {SEQUENCE} --normalization RMSNorm "
    "--swiglu --group-query-attention --num-query-groups 2 --qk-layernorm --disable-bias-linear",
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
        words = f"""--tensor-model-parallel-size 2 --micro-batch-size {micro_batch} {PIPELINES[self.pipeline]}
            {PRECISIONS[self.precision]} {RECOMPUTE[self.recompute]} {OPTIMIZERS[self.optimizer]}"""
        words += " --sequence-parallel" * self.sequence_parallel
        return [*model_flags(self.architecture, self.tied), *words.split()]

    @property
    def compressed(self) -> list[str]:
        """The codecs: TACO, TAH-Quant between stages where there are any, and SDP4Bit between replicas."""
        stages = COMPRESSED_STAGES if self.pipeline != "1" else ()
        overlap = ("--tp-compression-overlap", self.overlap)
        return [
            *COMPRESSED,
            *overlap,
            *stages,
            *(COMPRESSED_REPLICAS if self.data_parallel > 1 else ()),
        ]

    @property
    def channels(self) -> tuple[str, ...]:
        """The traffic classes that are in use."""
        replicas = (
            REPLICAS[:1] if self.precision == "fp32" else REPLICAS
        )  # fp32 weights are their own masters
        return ACTIVATIONS[: 2 if self.pipeline == "1" else 4] + replicas * (self.data_parallel > 1)

    @property
    def tolerance(self) -> float:
        """How far from the serial run's losses."""
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
    """The cell's settings, for pytest."""
    return "-".join(str(value) for value in vars(cell).values())


def model_flags(architecture: str, tied: bool) -> list[str]:
    """The model and the training of every run."""
    flags = f"""--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE}
        --global-batch-size {BATCH} --train-iters {ITERATIONS} --lr 2e-3 --lr-decay-style constant
        --clip-grad 1.0 --attention-dropout 0
        --hidden-dropout 0 --split 90,5,5 --num-workers 0 --log-interval 1 --eval-interval 5 --eval-iters 1
        --seed 7 {ARCHITECTURES[architecture]}"""
    return flags.split() + ["--untie-embeddings-and-output-weights"] * (not tied)


class Runs:
    """Runs on one dataset; the serial ones are made once for each model."""

    def __init__(self, directory) -> None:
        self.directory = directory
        prefix, tokenizer = make_dataset(directory, megabytes=2.0)
        self.data = [
            *("--data-path", str(prefix), "--data-cache-path", str(directory / "cache")),
            *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tokenizer)),
        ]
        self.serial_runs: dict[tuple[str, bool], Run] = {}

    def train(self, flags: list[str], ranks: int) -> Run:
        return pretrain(*self.data, *flags, ranks=ranks)

    def initial(self, architecture: str) -> list[str]:
        """Flags that start from one set of weights; one step on a single process writes them."""
        saved = self.directory / architecture
        if not saved.exists():
            flags = [
                *model_flags(architecture, tied=False),
                "--train-iters",
                "1",
                "--eval-iters",
                "0",
            ]
            flags += ["--micro-batch-size", "1", "--save", str(saved), "--save-interval", "1"]
            self.train(flags, 1)
        return ["--load", str(saved), "--finetune", "--no-load-optim", "--no-load-rng"]

    def serial(self, architecture: str, tied: bool) -> Run:
        """The model on one process in fp32: what every layout of it should compute."""
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
    """The claim of this file: any two settings that can meet do meet in some cell."""
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
    wanted = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(levels, 2)
        for x, y in itertools.product(levels[one], levels[other])
    } - {(("pipeline", "virtual"), ("micro_batches", 1))}
    covered = {pair for cell in CELLS for pair in itertools.combinations(vars(cell).items(), 2)}
    assert covered == wanted


def check_copies(run: Run, tied: bool = False) -> None:
    """Ranks that hold copies of a parameter, over any dimension of the mesh, hold the same bits; and, if
    ``tied``, so do stages of the embeddings. Every dimension of several ranks has copies of some."""
    copies: dict[tuple, dict[str, list]] = {}
    for rank in run.ranks:
        for name, bits in rank.parameters.items():
            values = tuple(rank.coordinates[dimension] for dimension in rank.cut[name])
            copies.setdefault((name, rank.cut[name], values), {}).setdefault(bits, []).append(
                rank.coordinates
            )
    for (name, *_), by_bits in copies.items():
        assert len(by_bits) == 1, f"{name} differs between copies: {[*by_bits.values()]}"
    for dimension in ("tensor", "data"):
        if any(rank.coordinates[dimension] for rank in run.ranks):
            assert any(
                len({holder[dimension] for holder in holders}) > 1
                for by_bits in copies.values()
                for holders in by_bits.values()
            ) or all("data" in cut for _, cut, _ in copies), f"no copies over {dimension} ranks"
    if tied:
        check_tied_embeddings(run)


def check_tied_embeddings(run: Run) -> None:
    """The first stage's word embeddings are the last stage's output weights, on every tensor rank."""
    copies: dict[int, dict[str, str]] = {}
    for rank in run.ranks:
        stage, tensor_rank = rank.stage_and_tensor_rank
        for name, bits in rank.parameters.items():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                copies.setdefault(tensor_rank, {})[f"{stage} {name}"] = bits
    stages = {rank.coordinates["pipeline"] for rank in run.ranks}
    for found in copies.values():
        assert len(found) == min(2, len(stages)), found.keys()
        assert len(set(found.values())) == 1, "the tied embeddings have drifted apart"


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_cell(runs: Runs, cell: Cell) -> None:
    """Finite, near the serial run; replicas identical; nothing uncompressed in any channel of activations."""
    serial = runs.serial(cell.architecture, cell.tied)
    run = runs.train([*cell.flags, *runs.initial(cell.architecture), *cell.compressed], cell.ranks)
    skipped = set(range(1, ITERATIONS + 1)) - set(run.losses)
    assert len(skipped) <= (cell.precision == "fp16"), "the loss scale may fall once"
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
    """These channels sent payloads and no other activations were sent; the ledger knows all that was."""
    assert UNKNOWN not in run.output
    sent: dict[str, set[str]] = {}
    saved: dict[str, int] = dict.fromkeys(channels, 0)
    for row in (row for rank in run.ranks for row in rank.ledger):
        if row["sent_bytes"]:
            sent.setdefault(row["traffic"], set()).add(row["kind"])
        if row["traffic"] in saved and row["kind"] == "compressed":
            saved[row["traffic"]] += row["plain_bytes"] - row["sent_bytes"]
    assert min(saved.values()) > 0, "fewer bytes than without compression"
    assert set(sent) & {*ACTIVATIONS} == set(channels) - {*REPLICAS}
    for channel in channels:
        # "exact", of data parallelism alone: the first weights, and parameters that are too small
        assert sent[channel] - ({"exact"} if channel.startswith("dp.") else set()) == {
            "compressed"
        }, channel


# name: (architecture, tied, everything but the sizes, the codecs, the channels)
LAYOUTS = {
    "tensor and data": (
        *("llama", False),
        f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {RECOMPUTE['selective']} "
        "--micro-batch-size 2",
        "--taco --tp-compression-overlap halves --compression-min-mb 0",
        ACTIVATIONS[:2],
    ),
    "stages and data": (
        *("gpt", True),
        f"--fp16 --initial-loss-scale 32768 {PIPELINES['virtual']}",
        "--pp-compression tah-quant",
        ACTIVATIONS[2:4],
    ),
    "context and data": (
        *("llama", False),
        f"--context-parallel-size 2 --bf16 {RECOMPUTE['full']}",
        "--cp-compression int8",
        ACTIVATIONS[4:],
    ),
}


# the first cell and test_ways_in.py have tensor and data parallelism as well
THOROUGH = {"tensor and data": pytest.mark.thorough}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=THOROUGH.get(name, ())) for name in LAYOUTS]
)
def test_layout(runs: Runs, layout: str) -> None:
    """On four ranks with the distributed optimizer's overlaps: near the serial run, every channel compressed,
    and a resumed run ends in the same bits."""
    architecture, tied, words, codecs, channels = LAYOUTS[layout]
    saved, half, whole = runs.directory / layout.replace(" ", "-"), ITERATIONS // 2, ITERATIONS
    flags = [
        *model_flags(architecture, tied),
        "--micro-batch-size",
        "1",
        *words.split(),
        *codecs.split(),
    ]
    flags += [*OPTIMIZERS["distributed"].split(), *COMPRESSED_REPLICAS, "--train-iters", str(whole)]
    flags += ["--save", str(saved), "--save-interval", str(half)]
    run = runs.train([*flags, *runs.initial(architecture)], 4)
    serial = runs.serial(architecture, tied).losses
    expected = {iteration: serial[iteration] for iteration in run.losses}
    assert len(expected) == whole
    assert run.losses == pytest.approx(expected, rel=0.005) and run.losses != expected
    check_copies(run, tied)
    check_channels(run, channels + REPLICAS)
    go_back_to(half, saved)
    resumed = runs.train([*flags, "--load", str(saved)], 4)
    assert resumed.losses == {
        iteration: run.losses[iteration] for iteration in range(half + 1, whole + 1)
    }
    assert resumed.parameters == run.parameters


COPIES = {
    "FSDP2 beside tensor parallelism, int8": (
        *("fsdp2", "--tensor-model-parallel-size 2 --bf16"),
        "--dp-compression int8 int8",
    ),
    "FSDP2 beside sequence parallelism, sdp4bit": (
        *("fsdp2", "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --qk-layernorm"),
        "--dp-compression sdp4bit int6 --taco --compression-min-mb 0",
    ),
    "FSDP2 beside tensor parallelism, tagc": (
        *("fsdp2", "--tensor-model-parallel-size 2 --bf16 --hidden-size 128"),
        "--dp-compression tagc:layers=all none --compression-start-iteration 0",
    ),
    "shards beside tensor parallelism, int8": (
        *("ddp", f"--tensor-model-parallel-size 2 --bf16 {OVERLAPPED}"),
        "--dp-compression int8 int8",
    ),
    "plain DDP beside tensor parallelism, tagc": (
        *("ddp", "--tensor-model-parallel-size 2 --bf16"),
        "--dp-compression tagc:layers=all --compression-start-iteration 0",
    ),
    "experts' tensor parallelism, sdp4bit": (
        *("ddp", f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {OVERLAPPED}"),
        "--num-experts 2 --expert-tensor-parallel-size 2 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --dp-compression sdp4bit",
    ),
    "context ranks, int8": (
        *("ddp", f"--context-parallel-size 2 --bf16 {OVERLAPPED}"),
        "--dp-compression int8 int8 --cp-compression int8",
    ),
}
"""Lossy settings of data parallelism, each beside a dimension whose ranks hold copies."""


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_their_bits(name: str) -> None:
    """Five iterations on four ranks: copies over every dimension of the mesh are bit for bit alike."""
    kind, layout, codecs = COPIES[name]
    flags = "--hidden-size 64 --train-iters 5 --lr 1e-2 --no-gradient-accumulation-fusion".split()
    flags += [*layout.split(), *codecs.split()]
    if kind == "fsdp2":
        flags += ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if kind == "fsdp2" else {}
    run = pretrain(*tiny_flags(*flags), ranks=4, env=env)
    check_copies(run)
    sent = {
        row["kind"]
        for rank in run.ranks
        for row in rank.ledger
        if row["traffic"] == "dp.gradient" and row["sent_bytes"]
    }
    assert "compressed" in sent


ALL_THREE = """--hidden-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16
    --use-distributed-optimizer --compression taco-paper --compression-min-mb 0"""
SIX = ACTIVATIONS[:4] + REPLICAS


def test_every_channel_is_compressed(tmp_path: Path) -> None:
    """TP 2 x PP 2 x DP 2 on eight processes: in training, and in the report's page for all three."""
    report = tmp_path / "report"
    flags = tiny_flags(*ALL_THREE.split(), "--compression-report", str(report))
    whole = pretrain(*flags, ranks=8)
    assert sorted(whole.losses) == [1, 2, 3, 4] and whole.losses[4] < whole.losses[1]
    check_channels(whole, SIX)
    check_copies(whole, tied=True)
    written = json.loads((report / "report.json").read_text())
    errors = {(row["site"], row["traffic"]): row["relative_error"] for row in written["errors"]}
    assert 0.03 < errors["pipeline stage 0", "pp.forward"] < 0.15
    assert 0.005 < errors["pipeline stage 1", "pp.backward"] < 0.05
    assert written["ledger_by_rank"] == [rank.ledger for rank in whole.ranks]
    summary = written["summary"]
    assert list(summary["dimensions"]) == [
        "tensor parallel",
        "data parallel",
        "pipeline parallel",
        "all",
    ]
    ratios = {name: row["ratio"] for name, row in summary["dimensions"].items()}
    tied_embeddings = summary["bytes_per_iteration"][
        "pp.other"
    ]  # exact, and much of so small a model
    assert tied_embeddings["sent"] == tied_embeddings["uncompressed"] == 4 * 256 * 64 / 2
    assert min(ratios["tensor parallel"], ratios["data parallel"], ratios["all"]) > 1.5, ratios
    page = (report / "report.md").read_text()
    assert all(f"| {channel} |" in page for channel in SIX)
