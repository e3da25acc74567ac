"""Iteration time of a GPT with compressed pipeline stages, under several kinds of link on one host.

    python scripts/bench_pipeline.py --pipeline-parallel 4 --json pipeline.json
    python scripts/bench_pipeline.py --virtual-stages 2          # interleaved, overlapped point-to-point

A regime is one run of the training loop; the settings take turns in it, a block of iterations each, so that
all of them see the same machine, model and weights. Reported: the median of each block after its first
iterations, from Megatron's log, with the bytes that one rank sends in an iteration, from the ledger's. The
regimes are bench_end_to_end.py's. A setting may be named twice: the second "none" shows how much the times of
two blocks differ. In "tah-quant waited" the computation waits for each message to be sent, as megatron-core
has it. Stages are thin (one layer of hidden size 2048 by default), so that point-to-point traffic weighs as
it does between nodes; --num-layers and --hidden-size after the script's own options change the model.
"""

import argparse

import _blocks

CHANNELS = ("pp.forward", "pp.backward")
CODECS = {
    "none": {},
    "tah-quant": {"pp_compression": "tah-quant"},
    "tah-quant tile": {"pp_compression": "tah-quant", "tah_allocation": "tile"},
    "tah-quant 4-bit back": {"pp_compression": "tah-quant", "tah_backward_bits": 4},
    "tah-quant waited": {"pp_compression": "tah-quant"},
    "int8": {"pp_compression": "int8"},
    "int4 standardized": {
        "pp_compression": "int4",
        "pp_backward_compression": "tah-quant",
        "pp_normalize": "standardize",
    },
    "auto": {"pp_compression": "auto"},
    "taco": {"pp_compression": "taco"},
}
MODEL = """--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 4 --global-batch-size 64 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 8191 --split 100,0,0 --eval-iters 0 --eval-interval 100000
    --log-interval 1 --log-throughput --no-create-attention-mask-in-dataloader
    --untie-embeddings-and-output-weights"""


def worker() -> None:
    """One rank of a regime's run: pretrain_gpt.py's loop, with the codecs changed at each block's start."""
    from megatron.compression import preflight

    preflight.prepare()
    from megatron.compression import entrypoint, weave
    from megatron.compression.arguments import add_compression_arguments
    from megatron.compression.pipeline_parallel.codecs import backward_codec, forward_codec
    from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
    from megatron.compression.pipeline_parallel.exchange import BACKWARD, FORWARD, PipelineExchange

    settings = _blocks.settings()
    blocks = []
    for name in settings["codecs"]:
        config = PipelineParallelCompression(**CODECS[name])
        codecs = {FORWARD: forward_codec(config), BACKWARD: backward_codec(config)}
        blocks.append((codecs, not name.endswith("waited")))

    class SwitchingExchange(PipelineExchange):
        def __call__(self, *args, **kwargs):
            self.codecs, self.put_off_sends = blocks[self.iteration() // settings["iterations"]]
            return super().__call__(*args, **kwargs)

    weave.PipelineExchange = SwitchingExchange
    entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


def layout(options) -> list[str]:
    """Flags for the stages."""
    flags = ["--pipeline-model-parallel-size", str(options.pipeline_parallel)]
    layers = options.pipeline_parallel * options.virtual_stages
    if options.virtual_stages > 1:
        flags += ["--num-layers-per-virtual-pipeline-stage", "1"]
    return [*flags, "--num-layers", str(layers)]


def main() -> None:
    """Run all regimes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _blocks.add_arguments(parser, CODECS, ["none", "tah-quant", "int8", "none"], iterations=6)
    parser.add_argument("--pipeline-parallel", type=int, default=4)
    parser.add_argument("--virtual-stages", type=int, default=1, help="layers, and stages, of each rank")
    parser.add_argument("--fp32", action="store_true", help="an fp32 model: messages twice as large")
    options, options.extra = parser.parse_known_args()
    flags = [*MODEL.split(), *layout(options), *([] if options.fp32 else ["--bf16"])]
    rows = _blocks.measure(
        __file__, options.pipeline_parallel, flags, CHANNELS, options, CUDA_DEVICE_MAX_CONNECTIONS="1"
    )
    _blocks.show(rows, CHANNELS, options)


if __name__ == "__main__":
    worker() if _blocks.settings() else main()
