"""Times what one GPU and its host do: computation, codecs, launches. calibrate.py has the links.

Every rank does the same at once, and the slowest counts.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.compression.communication.transport import TorchTransport
from megatron.compression.errors import InputError

CODECS = {
    **{name: name for name in ("taco", "int8", "int6", "sdp4bit", "tah-quant", "lossless")},
    "outliers": "int6:outliers=on",
    "normalize": "int4:group=32,normalize=standardize",
}
"""Name in the constants -> the spec that is timed."""
SECONDS, SUSTAINED = (0.03, 0.4) if torch.cuda.is_available() else (0.002, 0.002)
"""Of calls that are timed together, twice, at least two; of computation, until clocks have settled."""
ATTEMPTS = 5
"""At a difference that other work on the machine may hide."""
WHOLE_LAYER = {True: (4096, 2048, 4), False: (64, 64, 2)}
"""By whether there are GPUs: hidden size, sequence, samples of the layer that is timed."""
LAUNCHED_LAYER = {True: (512, 128, 1), False: (64, 16, 1)}
"""The same of one in which the device has nothing to do, so that the host's time is seen."""


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


def codecs(clock: Clock) -> tuple[dict[str, list[float]], float]:
    """Encode, decode, sum of each sender's value: us for 2^20 values, by name; and us of a small encode."""
    from megatron.compression.codecs import parse_codec

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
            lambda: codec.decode_sum_encode(senders, own, codec),  # noqa: B023
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
