"""Measures the cost model's constants: message curves of a link, GEMMs, attention, memory, layers, codecs,
and what the host needs to launch them.

    python -m megatron.compression.advise --measure here.json                  # all links of one host
    torchrun ... -m megatron.compression.advise.calibrate here.json roce       # one between nodes

On GPUs of one host three kinds of link are measured, by NCCL's switches: nvlink (as it is), pcie
(NCCL_P2P_DISABLE=1) and ethernet (NCCL_SHM_DISABLE=1 as well). --measure
writes a file anew, the module alone adds a link.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.advise.cluster import OPERATIONS, Constants
from megatron.compression.communication.host_transport import HostTransport
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.transports import Transports, over_tcp
from megatron.compression.errors import InputError, require_folder

LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "pcie": {"NCCL_P2P_DISABLE": "1"},
    "ethernet": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
CODECS = {
    **{name: name for name in ("taco", "int8", "int6", "sdp4bit", "tah-quant", "lossless")},
    "outliers": "int6:outliers=on",
    "normalize": "int4:group=32,normalize=standardize",
}
"""Name in the constants -> the spec that is timed."""
MIB = (0.0625, 1.0, 8.0, 32.0, 64.0, 128.0)
SECONDS, SUSTAINED = (0.03, 0.4) if torch.cuda.is_available() else (0.002, 0.002)
"""Of calls that are timed together, twice, at least two; of computation, until clocks have settled."""
ATTEMPTS = 5
"""At a difference that other work on the machine may hide."""
WHOLE_LAYER = {True: (4096, 2048, 4), False: (64, 64, 2)}
"""By whether there are GPUs: hidden size, sequence, samples of the layer that is timed."""
LAUNCHED_LAYER = {True: (512, 128, 1), False: (64, 16, 1)}
"""The same of one in which the device has nothing to do, so that the host's time is seen."""


def measure(path: Path) -> int:
    """Start the ranks, one link after the other; the exit status of the first that fails, else 0.

    Raises: InputError: one GPU, which has no links, or nowhere to write.
    """
    require_folder(path, "--measure")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 1:
        raise InputError("--measure needs two GPUs or more: one has no links; take the constants of an H200")
    path.unlink(missing_ok=True)
    shared = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    for name, environment in LINKS.items() if gpus else [("gloo", {})]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={gpus or 2}",
        ]
        command += ["-m", "megatron.compression.advise.calibrate", str(path), name]
        status = subprocess.run(command, env=shared | environment).returncode
        if status:
            return status
    return 0


class Clock:
    """Microseconds of a call, the slowest rank's."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _run(self, call: Callable[[], object], count: int) -> float:
        self.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        slowest = torch.tensor((time.perf_counter() - begin) / count, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest) * 1e6

    def us(self, call: Callable[[], object], seconds: float = SECONDS) -> float:
        """The faster of two rounds of back-to-back calls, after two warm-up calls."""
        self._run(call, 1)
        count = max(2, min(1000, int(seconds * 1e6 / self._run(call, 1))))
        return min(self._run(call, count) for _ in range(2))


def collective(
    operation: str, nbytes: int, groups: list[dist.ProcessGroup], device: torch.device
) -> Callable:
    """A call of one collective whose whole buffer has ``nbytes``, a share of it on each communicator."""
    ranks, rank = groups[0].size(), dist.get_rank()
    size = max(nbytes // 2 // len(groups) // ranks, 1) * ranks
    buffers = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in groups]
    parts = [torch.zeros(size // ranks, dtype=torch.bfloat16, device=device) for _ in groups]
    bytes_, others = [one.view(torch.uint8) for one in buffers], [torch.zeros_like(one) for one in buffers]
    peer = rank ^ 1 if rank ^ 1 < ranks else None

    def start(i: int) -> list:
        group = groups[i]
        if operation == "all_reduce":
            return [dist.all_reduce(buffers[i], group=group, async_op=True)]
        if operation == "all_gather":
            return [dist.all_gather_into_tensor(buffers[i], parts[i], group=group, async_op=True)]
        if operation == "reduce_scatter":
            return [dist.reduce_scatter_tensor(parts[i], buffers[i], group=group, async_op=True)]
        if operation == "all_to_all":
            out = others[i].view(torch.uint8)
            return [dist.all_to_all_single(out, bytes_[i], group=group, async_op=True)]
        if peer is None:
            return []
        pairs = (dist.isend, buffers[i]), (dist.irecv, others[i])
        return dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, group) for kind, tensor in pairs])

    def call() -> None:
        for work in [work for i in range(len(groups)) for work in start(i)]:
            work.wait()

    return call


def copies(operation: str, nbytes: int, transport: HostTransport, device: torch.device) -> Callable:
    """The same of a payload's exchange by copy engines."""
    payload = torch.zeros(
        transport.world_size, nbytes // transport.world_size, dtype=torch.uint8, device=device
    )
    if operation == "all_gather":
        return lambda: transport.all_gather(payload[0])[1].wait()
    return lambda: transport.all_to_all(payload)[1].wait()


def curve(clock: Clock, operation: str, ranks: int, make: Callable[[int], Callable]) -> list[list[float]]:
    """(bytes that a rank sends, microseconds) of the calls that ``make`` makes for some sizes."""
    points = []
    for mib in MIB if clock.cuda else MIB[:2]:
        nbytes = int(mib * 2**20)
        points.append([bytes_sent(operation, nbytes, ranks), round(clock.us(make(nbytes)), 1)])
    return points


def link(clock: Clock, transport: TorchTransport) -> dict:
    """The curves of the default group's link, by operation; with two communicators as well over TCP, and by
    copy engines where payloads take them."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    result = {"ranks": ranks, "curves": {}}
    if over_tcp(world):
        result["tcp"] = True
    more = dist.new_group(list(range(ranks))) if "tcp" in result else None
    for operation in OPERATIONS:
        for suffix, groups in (("", [world]), (" x2", [world, more])):
            if suffix and (more is None or operation == "send"):
                continue
            make = partial(collective, operation, groups=groups, device=clock.device)
            result["curves"][operation + suffix] = curve(clock, operation, ranks, make)
    if isinstance(transport, HostTransport):
        result["copied"] = True
        for operation in ("all_to_all", "all_gather"):
            make = partial(copies, operation, transport=transport, device=clock.device)
            result["curves"][f"{operation} copied"] = curve(clock, operation, ranks, make)
        payload = torch.zeros(ranks, 2**25 // ranks, dtype=torch.uint8, device=clock.device)
        result["copied_loss"] = round(overlap_loss(clock, lambda: transport.all_to_all(payload)[1]), 3)
    buffer = torch.zeros(2**25 if clock.cuda else 2**16, dtype=torch.bfloat16, device=clock.device)
    result["overlap_loss"] = round(overlap_loss(clock, lambda: dist.all_reduce(buffer, async_op=True)), 3)
    return result


def overlap_loss(clock: Clock, start: Callable[[], Any]) -> float:
    """How much of the shorter one comes back where what ``start`` starts and GEMMs run at once."""
    size = 4096 if clock.cuda else 128
    x = torch.randn(size, size, dtype=torch.bfloat16, device=clock.device)
    alone = clock.us(lambda: start().wait())
    count = max(1, round(alone / clock.us(lambda: x @ x)))

    def gemms() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        work = start()
        gemms()
        work.wait()

    computed = clock.us(gemms)
    more = (clock.us(both) - max(alone, computed)) / min(alone, computed)
    return min(max(more, 0.0), 1.0)


def fused_us(clock: Clock, curves: dict, transport: TorchTransport) -> float | None:
    """A fused all-reduce's codec for 2^20 values: what is left of its time after latency and link.

    None: symmetric memory cannot be had.
    """
    from megatron.compression.advise.cluster import _link
    from megatron.compression.codecs import parse_codec
    from megatron.compression.communication.all_reduce import all_reduce

    codec = parse_codec("int8")
    if not transport.fuses(codec):
        return None
    values = 2**25
    x, ranks, known = (
        torch.randn(values, device=clock.device).bfloat16(),
        dist.get_world_size(),
        _link(curves),
    )
    us = clock.us(lambda: all_reduce(x, codec, transport).wait())
    sent = 2 * bytes_sent("all_gather", codec.payload_bytes((values,)), ranks)
    left = us - 0.6 * known.curve("all_reduce")[0][1] - sent / known.bandwidth * 1e3
    return max(left / (values / 2**20), 0.1)


def codecs(clock: Clock) -> tuple[dict[str, list[float]], float]:
    """Encode, decode, sum of each sender's value: us for 2^20 values, by name; and us of a small encode."""
    from megatron.compression.codecs import parse_codec
    from megatron.compression.communication.rest import sum_and_encode

    (tokens, width), results = ((4096, 4096) if clock.cuda else (64, 512)), {}
    for name, spec in CODECS.items():
        codec = parse_codec(spec)
        shape = (tokens, 1, width) if codec.sees_shape else (tokens * width,)
        own = (tokens // 4, 1, width) if codec.sees_shape else (tokens * width // 4,)
        x = torch.randn(1, *shape, device=clock.device).bfloat16()
        payload, senders = codec.encode(x), codec.encode(x.view(4, *own))[:, None]
        calls = (
            lambda: codec.encode(x),  # noqa: B023
            lambda: codec.decode(payload, shape, torch.bfloat16),  # noqa: B023
            lambda: sum_and_encode(codec, senders, own, torch.bfloat16, codec),  # noqa: B023
        )
        results[name] = [round(clock.us(call) * 2**20 / (tokens * width), 3) for call in calls]
    small, codec = torch.zeros(1, 2**14, device=clock.device).bfloat16(), parse_codec("int6")
    return results, round(clock.us(lambda: codec.encode(small)), 1)


def compute(clock: Clock) -> dict:
    """What one GPU does while all of them do: GEMMs, attention, copies, and a layer's other operations."""
    hidden, sequence, samples = WHOLE_LAYER[clock.cuda]
    tokens, heads = sequence * samples, hidden // 128 or 1
    kind = {"dtype": torch.bfloat16, "device": clock.device}
    x, flops, operands = torch.randn(tokens, hidden, **kind), 0, []
    for width in (3 * hidden, hidden, 4 * hidden, 4 * hidden):  # qkv, projection, fc1 and fc2 as shapes
        operands.append((torch.randn(width, hidden, **kind), torch.randn(tokens, width, **kind)))
        flops += 6 * tokens * hidden * width

    def products() -> None:
        for weight, y in operands:
            x @ weight.t(), y @ weight, y.t() @ x

    product_us = clock.us(products, SUSTAINED)
    shape = samples, heads, sequence, hidden // heads
    qkv = [torch.randn(shape, requires_grad=True, **kind) for _ in range(3)]

    def attention() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    attention_us = clock.us(attention, SUSTAINED / 4)
    source = torch.zeros(2**27 if clock.cuda else 2**20, **kind)
    copy = torch.empty_like(source)
    memory_us = clock.us(lambda: copy.copy_(source))
    layer_us = one_layer(clock, WHOLE_LAYER[clock.cuda])
    rest = max(layer_us - product_us - attention_us, 0.02 * layer_us)
    moved = tokens * hidden * 2 * (22 + 6 * 4 + 8 * 4)  # phases.RESIDUAL, INNER, ACTIVATION
    return {
        "gemm_tflops": round(flops / product_us / 1e6, 3),
        "attention_tflops": round(3.5 * 2 * tokens * sequence * hidden / attention_us / 1e6, 3),
        "memory_gbps": round(2 * source.nbytes / memory_us / 1e3, 3),
        "elementwise_gbps": round(moved / rest / 1e3, 3),
        "layer_ms": round(layer_us / 1e3, 3),
    }


def host(clock: Clock, transport: TorchTransport) -> dict:
    """What the host needs to launch a layer and, beside an uncompressed message, an exchange through a codec:
    timed where the device has nothing to do."""
    from megatron.compression.codecs import parse_codec
    from megatron.compression.communication.all_reduce import all_reduce

    x = torch.zeros(2**14, dtype=torch.bfloat16, device=clock.device)
    plain = clock.us(lambda: dist.all_reduce(x))

    def more(spec: str) -> float:
        codec = parse_codec(spec)
        return max(clock.us(lambda: all_reduce(x, codec, transport).wait()) - plain, 0.0) / 1e3

    found = {"host_layer_ms": one_layer(clock, LAUNCHED_LAYER[clock.cuda]) / 1e3}
    found["host_exchange_ms"] = more(CODECS["outliers"]) / 2  # never one kernel
    if transport.fuses(parse_codec("int8")):
        found["host_fused_ms"] = more("int8")
    return {name: round(ms, 4) for name, ms in found.items()}


def one_layer(clock: Clock, size: tuple[int, int, int]) -> float:
    """Microseconds of a layer's forward and backward.

    Raises: InputError: other work on the machine hides them.
    """
    for _ in range(ATTEMPTS):
        layer_us = (whole_model(clock, 3, size) - whole_model(clock, 1, size)) / 2
        if layer_us > 0:
            return layer_us
    raise InputError("--measure: three layers took no longer than one; stop what else runs here")


def whole_model(clock: Clock, layers: int, size: tuple[int, int, int]) -> float:
    """Microseconds of forward and backward of a GPT without tensor parallelism.

    Args:
        size: hidden size, sequence, samples.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron.compression.setup import gpt_layer_spec

    hidden, sequence, samples = size
    fusions = ("gradient_accumulation", "masked_softmax", "bias_dropout", "bias_activation")
    transformer = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 128 or 1,
        transformer_impl="local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        persist_layer_norm=False,
        use_cpu_initialization=not clock.cuda,
        **{f"{name}_fusion": False for name in fusions},
    )
    config = GPTModelConfig(
        transformer=transformer, transformer_layer_spec=gpt_layer_spec, vocab_size=1024, seq_length=sequence
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    model = model.to(clock.device, torch.bfloat16)
    # Equal rows, as of equal tokens, take less power and are multiplied faster than a training's.
    tokens = torch.randint(1024, (samples, sequence), device=clock.device)
    places = torch.arange(sequence, device=clock.device).expand(samples, -1)

    def step() -> None:
        model(tokens, places, None, labels=tokens).float().mean().backward()
        model.zero_grad(set_to_none=True)

    return clock.us(step, SUSTAINED)


def worker(path: Path, name: str) -> None:
    """One rank of the default group: the link, and everything else where the file is not there yet."""
    from megatron.host import install

    cuda = torch.cuda.is_available()
    if not cuda:
        install()
    clock = Clock()
    data = json.loads(path.read_text()) if path.exists() else None
    dist.barrier()
    transports = Transports()
    transports.prepare([dist.group.WORLD])
    transport = transports.transport(dist.group.WORLD)
    found = link(clock, transport)
    if data is None:
        defaults = Constants.load()
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        costs, launch = codecs(clock)
        data = {"origin": f"measured {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"}
        data["device"] = torch.cuda.get_device_name() if cuda else "CPU"
        data |= compute(clock) | host(clock, transport)
        data |= {"codecs": costs, "launch_us": launch, "iteration_ms": defaults.iteration_ms}
        data |= {"fused_us": defaults.fused_us, "links": {}}
    fused = fused_us(clock, found, transport) if cuda and "tcp" not in found else None
    if fused is not None:
        data["fused_us"], found["fused"] = round(fused, 3), True
    data["links"][name] = found
    if dist.get_rank() == 0:
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"{name}: {found['ranks']} ranks, {path}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) != 3 or "RANK" not in os.environ:
        sys.exit("error: usage: torchrun ... -m megatron.compression.advise.calibrate FILE LINK")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    worker(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
