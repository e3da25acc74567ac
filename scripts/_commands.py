"""The measurements of docs/results as commands, in their stages; reproduce.py runs them."""

from typing import NamedTuple

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {gpus}"


class Command(NamedTuple):
    """One process."""

    stage: str
    gpus: int
    """Needed; on fewer it is reported as not run."""
    minutes: float
    """Killed after that long."""
    name: str
    line: str
    """What follows ``python``. ``{output}`` is the folder for results, ``{gpus}`` the number of GPUs but at
    most four, ``{ranks}`` the same but at least two."""
    paper: str = ""
    """What the paper has here, and in what setting."""


END_TO_END = "scripts/bench_end_to_end.py --tensor-parallel {gpus}"
DATA_PARALLEL = (
    "scripts/bench_end_to_end.py --shape 1.3b --data-parallel {gpus} --micro-batches 1 --vocab-size 32000"
    " --communicators 2"
)
LOSSES = "scripts/losses.py --share-gpus --{dimension}-parallel {ranks} --output {output}/{name}"

ENDINGS = "-m scripts.accuracy.run --work-dir {output}/{work} --size {size} --minutes {minutes}"
BETWEEN_STAGES = (
    "int6:group=64,scales=single,normalize=standardize,outliers=on,,"
    "int6:group=32,scales=single,hadamard=off,outliers=on-pp"
)
"""What ``--compression auto`` takes there within its usual budget, with int8 and sdp4bit."""
WEIGHTS = "sdp4bit:intra=4,group=2048,hadamard=off"
"""Codec of the changes of SDP4Bit's weights."""
HALVES, CHUNKS = "--tp-compression-overlap halves", "--tp-compression-chunks 2"


def _losses(stage: str, name: str, dimension: str, minutes: int, options: str, paper: str = "") -> tuple:
    """A row of trainings."""
    line = LOSSES.replace("{dimension}", dimension).replace("{name}", name)
    line += f" --time-limit {60 * minutes - 60} {options}"
    return stage, 1, minutes, name, line, paper


def _losses_3d(stage: str, gpus: int, minutes: int, name: str, more: str) -> tuple:
    """A row of trainings of eight ranks, two in each dimension."""
    line = (
        f"scripts/losses.py --data-parallel 8{more} --time-limit {60 * minutes - 60}"
        ' --codecs none "none --compression-3d" "none --compression auto"'
        f" --output {{output}}/{name} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --sequence-parallel"
    )
    return stage, gpus, minutes, name, line


def _endings(
    stage: str, name: str, work: str, size: str, minutes: int, settings: str, paper: str, more: str = ""
) -> tuple:
    """A row of last quarters of trainings, simulated on one GPU; rows of one ``work`` share the trainings."""
    line = ENDINGS.replace("{work}", work).replace("{size}", size).replace("{minutes}", str(minutes - 1))
    return stage, 1, minutes, name, f"{line}{more} --settings {settings}", paper


PAPERS = (
    *(
        (
            *("taco", gpus, 8, f"taco_{shape}"),
            f"{END_TO_END} --shape {shape} --regimes nvlink pcie --iterations 8 --codecs none taco auto none"
            f" --json {{output}}/taco_{shape}.json",
            "TACO: up to 1.87 times as fast end to end, GPT and Qwen; on which links is not known to us",
        )
        for shape, gpus in (("350m", 2), ("1.3b", 2), ("2.7b", 2), ("6.7b", 2), ("13b", 4), ("qwen2.5-7b", 2))
    ),
    (
        *("taco", 2, 10, "taco_thin_layers"),
        "scripts/bench_end_to_end.py --tensor-parallel 2 --regimes pcie --iterations 8 --micro-batch-size 8"
        " --num-attention-heads 16 --kv-channels 128 --ffn-hidden-size 8192 --codecs none taco int6 none"
        f' "none {HALVES}" "taco {HALVES}" "int6 {HALVES}" "none --compression auto"'
        " --json {output}/taco_thin_layers.json",
        "TACO: up to 1.87 times as fast end to end; layers as thin as TP 4 leaves them, on both sides",
    ),
    *(
        (
            *("taco", 2, 9, f"taco_ablations_{regime}"),
            f"{END_TO_END} --regimes {regime} --iterations 8 --ablations taco"
            f" --json {{output}}/taco_ablations_{regime}.json",
            "TACO: fused kernels and overlap are parts of its 1.87; each one's share is not known",
        )
        for regime in ("nvlink", "pcie")
    ),
    (
        *("taco", 8, 20, "taco_3d"),
        "scripts/bench_end_to_end.py --shape qwen2.5-7b --tensor-parallel 2 --pipeline-parallel 2"
        ' --data-parallel 2 --sequence-parallel --codecs none "none --compression-3d"'
        ' "none --compression auto" none --json {output}/taco_3d.json',
        "TACO: Qwen2.5-7B at TP 2, PP 2, DP 2 is one of its runs; up to 1.87",
    ),
    (
        *_losses_3d("taco", 1, 45, "taco_3d_losses", " --share-gpus --noise-seed 0"),
        "TACO: TACO, SDP4Bit and TAH-Quant together, near-lossless",
    ),
    _endings(
        *("taco", "taco_350m_endings", "350m", "350m", 30),
        "paper int6:outliers=on int6655-quadratic auto-pp tah-quant tah-quant-pp"
        " taco:format=fp8-e5m2,group=256",
        "TACO, GPT-350M over 20,000 iterations: validation loss 2.3899 uncompressed, 2.3958 with TACO"
        " (+0.25 %), 2.4587 with TAH-Quant on tensor parallelism (+2.88 %)",
        " --steps 924 --seeds 1",
    ),
    _endings(
        *("taco", "taco_controls", "111m", "111m", 10),
        "examples.paper.per_tensor_fp8:PerTensorFp8 paper taco:format=fp8-e5m2,group=256 tah-quant",
        "TACO, controls: TAH-Quant on tensor parallelism +2.88 % (GPT-350M); of e5m2 and of one scale for a "
        "whole tensor no number is known to us",
        " --seeds 1",
    ),
    _endings(
        *("taco", "taco_3d_endings", "350m", "350m", 30),
        f"paper+tah-quant-pp+sdp4bit-dp int6:outliers=on+auto-pp+sdp4bit-dp"
        f" int8:outliers=on+{BETWEEN_STAGES}+sdp4bit-dp sdp4bit-dp",
        "TACO: TACO, SDP4Bit and TAH-Quant together, near-lossless",
        " --steps 924 --seeds 1",
    ),
    *(
        _endings(
            *("taco", f"taco_{model}_endings", model, model, 20),
            "paper-sp int6:outliers=on-sp paper-sp+taco,,taco-pp paper-sp+tah-quant-pp+sdp4bit-dp"
            f" int8:outliers=on-sp+{BETWEEN_STAGES}+sdp4bit-dp",
            "TACO: Qwen3-0.6B at TP 2, PP 2, DP 2 is one of its runs; near-lossless",
            " --steps 200 --seeds 1",
        )
        for model in ("qwen3-0.6b", "qwen2.5-0.5b")
    ),
    (
        *("tah-quant", 2, 8, "tah_quant_times"),
        "scripts/bench_end_to_end.py --shape thin --pipeline-parallel {gpus} --fp32 --regimes pcie ethernet"
        " --codecs none tah-quant auto none --json {output}/tah_quant_times.json",
        "TAH-Quant: up to 4.3 times the throughput of uncompressed fp32 over slow networks (8 stages)",
    ),
    _losses(
        *("tah-quant", "tah_quant_pretraining", "pipeline", 10),
        "--codecs none --seeds 1 --noise-seed 0 --save {output}/tah_quant_weights --save-interval 400",
    ),
    _losses(
        *("tah-quant", "tah_quant_fine_tuning", "pipeline", 15),
        "--codecs none tah-quant auto --seeds 1 2 3 --iterations 100"
        " --data {output}/tah_quant_pretraining/data --lr 5e-6 --min-lr 5e-6"
        " --pretrained-checkpoint {output}/tah_quant_weights",
        "TAH-Quant: fine-tuning of GPT2-XL and Qwen2.5-3B matches uncompressed training",
    ),
    (
        *("sdp4bit", 2, 10, "sdp4bit_times"),
        f"{DATA_PARALLEL} --fp32-gradients"
        ' --codecs none "none --grad-reduce-in-bf16" "sdp4bit --dp-compression-node-size 1" sdp4bit none'
        " --json {output}/sdp4bit_times.json",
        "SDP4Bit: up to 4.08 times as fast as fp32 gradients on 128 GPUs, one micro-batch of one sequence",
    ),
    _endings(
        *("sdp4bit", "sdp4bit_endings", "sdp4bit", "111m", 45),
        f"sdp4bit-dp sdp4bit,,none-dp sdp4bit:hadamard=off,,none-dp none,,{WEIGHTS}-dp identity,,identity-dp"
        " sdp4bit-ddp",
        "SDP4Bit, 125M to 6.7B over 80,000 iterations: validation loss at most +0.24 %",
    ),
    (
        *("tagc", 2, 8, "tagc_times"),
        f"{DATA_PARALLEL} --regimes ethernet"
        ' --codecs none "tagc:wire=sketch --compression-start-iteration 0"'
        ' "tagc --compression-start-iteration 0" none'
        " --json {output}/tagc_times.json",
        "TAGC: up to 15 % faster than FSDP over slow links, GPT-2 of 124 M on two nodes",
    ),
    _losses(
        *("tagc", "tagc_losses", "data", 15),
        '--codecs none "tagc:wire=sketch --compression-start-iteration 0" tagc tagc:sparsity=0.6,bits=8',
        "TAGC: a small loss of quality",
    ),
    (
        *("caat-net", 2, 10, "caat_net_times"),
        f"{END_TO_END} --regimes nvlink pcie --codecs none"
        ' "none --caat-net-sync-fraction 0.5" "int8 --caat-net-sync-fraction 0.5"'
        ' "none --caat-net-sync-fraction 0.25" none --json {output}/caat_net_times.json',
        "CAAT-Net at p = 0.5: half of the tensor-parallel traffic; 1.8 times in training (secondary source)",
    ),
    _losses(
        *("caat-net", "caat_net_losses", "tensor", 90),
        "--model 111m --iterations 600 --seeds 1 2 3 --codecs none int8"
        ' "none --caat-net-sync-fraction 0.5" "int8 --caat-net-sync-fraction 0.5"'
        ' "none --caat-net-sync-fraction 0.25" "int8 --caat-net-sync-fraction 0.25"',
        "CAAT-Net, Llama of 1B and 7B at TP 8: no significant drop in accuracy at p = 0.5",
    ),
)
REGIMES = ("nvlink", "pcie", "ethernet")
LARGE = (  # of hosts with four or eight GPUs
    *(
        (
            *("large", ranks, 8, f"large_collectives_{ranks}"),
            f"{TORCHRUN.replace('{gpus}', str(ranks))} -m taco_kernels.benchmarks collectives"
            f" --mib 1 4 16 64 256 --json {{output}}/large_collectives_{ranks}.json",
        )
        for ranks in (4, 8)
    ),
    *(
        (
            *("large", ranks, 12, f"large_{regime}{name}_tp{ranks}"),
            f"scripts/bench_end_to_end.py --tensor-parallel {ranks}{more} --regimes {regime}"
            f" --communicators {2 if regime == 'ethernet' else 1}"
            f" --iterations {6 if regime == 'ethernet' else 9} --codecs none taco int8 int6 none"
            f' "none {HALVES}" "taco {HALVES}" "int6 {HALVES}" "int6 {CHUNKS}" "lossless"'
            ' "none --compression auto"'
            f" --json {{output}}/large_{regime}{name}_tp{ranks}.json",
        )
        for ranks in (4, 8)
        for regime in REGIMES
        for name, more in (("", ""), ("_sp", " --sequence-parallel"))
    ),
    *(
        (
            *("large", ranks, 8, f"large_models_tp{ranks}"),
            f"scripts/bench_end_to_end.py --tensor-parallel {ranks} --regimes nvlink pcie --iterations 9"
            ' --codecs none "int6 --ladder-residual" "int6 --caat-net-sync-fraction 0.5"'
            ' "int6 --ladder-residual --caat-net-sync-fraction 0.5" none'
            f" --json {{output}}/large_models_tp{ranks}.json",
        )
        for ranks in (4, 8)
    ),
    (
        *("large", 8, 20, "large_3d"),
        "scripts/bench_end_to_end.py --shape 1.3b --tensor-parallel 2 --pipeline-parallel 2"
        ' --data-parallel 2 --sequence-parallel --codecs none "none --compression-3d"'
        ' "none --compression auto" none --json {output}/large_3d.json',
    ),
    _losses_3d("large", 8, 15, "large_3d_losses", " --model 111m --iterations 300"),
    *(
        (
            *("large", ranks, 2, f"large_predictions_tp{ranks}"),
            "-m scripts.predict_iterations --points"
            + "".join(
                f" {{output}}/large_{regime}{name}_tp{ranks}.json"
                for regime in REGIMES
                for name in ("", "_sp")
            ),
        )
        for ranks in (4, 8)
    ),
)
COMMANDS = tuple(
    Command(*row)
    for row in (
        ("tests", 2, 25, "gpu_tests", "-m pytest -q -p no:cacheprovider tests/gpu"),
        *(
            ("codecs", 1, 4, name, f"-m taco_kernels.benchmarks {name} --json {{output}}/{name}.json")
            for name in ("codec", "sdp4bit", "tah-quant", "bitmap-sparse", "count-sketch")
        ),
        (
            *("collectives", 2, 5, "collectives"),
            f"{TORCHRUN} -m taco_kernels.benchmarks collectives --json {{output}}/collectives.json",
        ),
        (
            *("end-to-end", 2, 10, "end_to_end"),
            "scripts/bench_end_to_end.py --tensor-parallel {gpus} --json {output}/end_to_end.json",
        ),
        (
            *("end-to-end", 2, 6, "end_to_end_tcp"),
            "scripts/bench_end_to_end.py --tensor-parallel {gpus} --regimes ethernet --communicators 2"
            " --json {output}/end_to_end_tcp.json",
        ),
        *(
            (
                *("end-to-end", 2, 8, f"one_sequence{name}"),
                f"{END_TO_END}{flag} --regimes pcie --iterations 8 --micro-batch-size 1 --seq-length 16384"
                " --max-position-embeddings 16384 --codecs none taco int6 none"
                f' "none {HALVES}" "taco {HALVES}" "int6 {HALVES}" --json {{output}}/one_sequence{name}.json',
            )
            for name, flag in (("", ""), ("_sp", " --sequence-parallel"))
        ),
        (
            *("pipeline", 2, 6, "pipeline"),
            "scripts/bench_end_to_end.py --shape thin --pipeline-parallel {gpus}"
            " --json {output}/pipeline.json",
        ),
        (
            *("pipeline", 2, 10, "pipeline_losses"),
            "scripts/losses.py --pipeline-parallel {gpus} --codecs none auto tah-quant"
            " tah-quant:transform=none --output {output}/pipeline_losses --time-limit 540",
        ),
        (
            *("data-parallel", 2, 10, "data_parallel"),
            f"{DATA_PARALLEL} --json {{output}}/data_parallel.json",
        ),
        (
            *("data-parallel", 2, 10, "data_parallel_losses"),
            'scripts/losses.py --data-parallel {gpus} --codecs none sdp4bit "tagc --dp-error-feedback fp32"'
            ' "none --grad-reduce-in-bf16" --output {output}/data_parallel_losses --time-limit 540',
        ),
        (
            "cost-model",
            2,
            3,
            "calibration",
            "-m megatron.compression.advise --measure {output}/calibration.json",
        ),
        (
            *("cost-model", 2, 2, "predictions"),
            "-m scripts.predict_iterations --calibration {output}/calibration.json"
            " --plot {output}/predictions.png --points {output}/end_to_end.json"
            " {output}/end_to_end_tcp.json {output}/pipeline.json {output}/data_parallel.json",
        ),
        (
            *("accuracy", 1, 40, "accuracy"),
            "-m scripts.accuracy.run --work-dir {output}/accuracy --minutes 30 --out {output}",
        ),
        *LARGE,
        *PAPERS,
    )
)
