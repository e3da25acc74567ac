"""Iteration time of a GPT of 1.3 B parameters under data parallelism, by kind of link, on one host.

    python scripts/bench_data_parallel.py --data-parallel 4 --json data_parallel.json
    python scripts/bench_data_parallel.py --fp32-gradients --regimes ethernet

A regime is one run of the training loop with the distributed optimizer and both overlap flags; the settings
take turns in it, a block of iterations each, so that all of them see the same machine, model and optimizer.
Reported: the median of each block after its first iterations, from Megatron's log, and the bytes that one
rank sends in an iteration, from the ledger's. The regimes are bench_end_to_end.py's. "nodes of n" counts n
ranks of this host as a node: one of them a node is what the link of the ethernet regime stands for.
Gradients are reduced in bf16; --fp32-gradients measures Megatron's default instead.
"""

import argparse

import _blocks

CHANNELS = ("dp.gradient", "dp.weight")
ON = {"dp_compression": "sdp4bit", "quantized_weights": True, "quantized_gradients": True}
TAGC = {"dp_compression": "tagc", "dp_error_feedback": "fp32"}
CODECS = {
    "none": {},
    "sdp4bit": ON,
    "sdp4bit, nodes of 1": {**ON, "dp_intra_node_size": 1},
    "sdp4bit, nodes of 2": {**ON, "dp_intra_node_size": 2},
    "sdp4bit, nodes of 1, int8 feedback": {**ON, "dp_intra_node_size": 1, "dp_error_feedback": "int8"},
    "sdp4bit, nodes of 1, one communicator": {**ON, "dp_intra_node_size": 1, "dp_communicators": 1},
    "tagc, sketch": {**TAGC, "tagc_wire": "sketch"},
    "tagc, packed": TAGC,
    "tagc, packed, int4 weights": {**TAGC, "quantized_weights": True},
    "tagc, packed, all matrices, int4 weights": {**TAGC, "tagc_layers": "all", "quantized_weights": True},
    "weights only": {**ON, "quantized_gradients": False},
}
MODEL = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --bf16
    --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 100,0,0 --eval-iters 0
    --eval-interval 100000 --log-interval 1 --log-throughput --no-create-attention-mask-in-dataloader
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dp-compression sdp4bit"""


class Switch:
    """Changes what a bound model's buckets use, between iterations."""

    def __init__(self, settings: dict) -> None:
        self.iterations = settings["iterations"]
        self.names = settings["codecs"]
        self.chunks, self.runtime, self.current, self.prepared = [], None, None, {}

    def bind(self, chunks: list, runtime) -> list:
        """In place of ``bind_data_parallel``: binds, and keeps hold of the model."""
        from megatron.compression.data_parallel.bind import bind_data_parallel

        self.chunks, self.runtime = bind_data_parallel(chunks, runtime), runtime
        return chunks

    def to(self, iteration: int) -> None:
        """Take on the setting of this iteration's block; every rank calls it before a forward."""
        name = self.names[min(iteration // self.iterations, len(self.names) - 1)]
        if name == self.current:
            return
        self.current = name
        for chunk in self.chunks:
            for group in chunk.bucket_groups:
                if group.weights and group.weights[0].pending is not None:
                    group.start_param_sync(force_sync=True)
                self._change(group, name)

    def _change(self, group, name: str) -> None:
        from dataclasses import replace

        from megatron.compression.data_parallel.codecs import data_parallel_codecs
        from megatron.compression.data_parallel.config import DataParallelCompression
        from megatron.compression.data_parallel.topology import find_topology
        from megatron.compression.data_parallel.weights import ATTRIBUTE, BucketWeights

        if not hasattr(group, "bench_views"):
            group.bench_views = [sync.bucket for sync in group.gradient_syncs]
        settings = DataParallelCompression(**CODECS[name])
        wanted = settings.dp_intra_node_size, settings.dp_communicators
        if wanted not in self.prepared:
            self.prepared[wanted] = find_topology(group.topology.group, *wanted)
        group.topology = self.prepared[wanted]
        gradients, weights = data_parallel_codecs(settings)
        views = [replace(view, topology=group.topology) for view in group.bench_views]
        group.gradient_syncs = [gradients(view) for view in views] if gradients else []
        group.weights = []
        for bucket in group.buckets:
            if hasattr(bucket, ATTRIBUTE):
                delattr(bucket, ATTRIBUTE)
            if weights is not None:
                held = BucketWeights(bucket.param_data, weights, group.topology, self.runtime.ledger)
                setattr(bucket, ATTRIBUTE, held)
                group.weights.append(held)


def worker() -> None:
    """One rank of a regime's run: pretrain_gpt.py's loop, with the codecs changed at each block's start."""
    from megatron.compression import preflight

    preflight.prepare()
    from megatron.training import get_args

    from megatron.compression import entrypoint, weave
    from megatron.compression.arguments import add_compression_arguments

    switch = Switch(_blocks.settings())
    weave.bind_data_parallel = switch.bind

    class SwitchingForwardStep(entrypoint.ForwardStep):
        def __call__(self, data_iterator, model):
            switch.to(get_args().curr_iteration)
            return super().__call__(data_iterator, model)

    entrypoint.ForwardStep = SwitchingForwardStep
    entrypoint.run(entrypoint.parse_arguments(add_compression_arguments))


def main() -> None:
    """Run all regimes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _blocks.add_arguments(parser, CODECS, ["none", "sdp4bit", "sdp4bit, nodes of 1"], iterations=8)
    parser.add_argument("--data-parallel", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation, of 4 samples")
    parser.add_argument("--fp32-gradients", action="store_true", help="the baseline reduces in fp32")
    options, options.extra = parser.parse_known_args()
    batch = 4 * options.data_parallel * options.micro_batches
    flags = [*MODEL.split(), "--global-batch-size", str(batch)]
    flags += [] if options.fp32_gradients else ["--grad-reduce-in-bf16"]
    rows = _blocks.measure(__file__, options.data_parallel, flags, CHANNELS, options)
    print(f"gradients of the baseline: {'fp32' if options.fp32_gradients else 'bf16'}")
    _blocks.show(rows, CHANNELS, options)


if __name__ == "__main__":
    worker() if _blocks.settings() else main()
