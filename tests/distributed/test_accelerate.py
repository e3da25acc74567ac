"""Hugging Face's accelerate with its FSDP2 plugin, and peft's LoRA: where ``attach`` is called.

The packages are an extra, and need no GPU here:

    pip install -e '.[accelerate]'
    python -m pytest tests/distributed/test_accelerate.py
"""

import pytest
import torch

from tests.distributed.spawn import spawned

pytestmark = pytest.mark.thorough
pytest.importorskip("accelerate", reason="pip install -e '.[accelerate]'")
pytest.importorskip("peft", reason="pip install -e '.[accelerate]'")

VOCABULARY = 96
SEQUENCE = 32


def accelerator_of(mixed_precision: str):
    """Return an ``Accelerator`` with the FSDP2 plugin, on CPU ranks.

    accelerate takes FSDP for GPUs alone; the state is told that it is in use.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    assert accelerator.is_fsdp2
    return accelerator


def build(adapters: bool) -> torch.nn.Module:
    """Return a tiny Llama, the same weights each time; ``adapters``: frozen, in bf16, with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
        )
    )
    if not adapters:
        return model
    # peft keeps adapters in fp32 beside weights in bf16.
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model.to(torch.bfloat16), lora)


def train(
    mixed_precision: str, adapters: bool, gather: str, reduce: str
) -> tuple[list[float], dict]:
    """Train four steps of two micro-batches each: the losses, and the totals of the ledger."""
    from megatron.compression.fsdp2 import attach

    accelerator = accelerator_of(mixed_precision)
    accelerator.gradient_accumulation_steps = 2
    model = build(adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=3e-3))
    compression = attach(model, gather, reduce, log=lambda line: None)
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        first = torch.randint(VOCABULARY, (4, 1), generator=generator)
        tokens = (first + 3 * torch.arange(SEQUENCE)) % VOCABULARY
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")))
    # A step of the optimizer ends an iteration, not a micro-batch.
    assert compression.iteration == 3
    totals = compression.run.ledger.totals()
    compression.close()
    return losses, totals


SETTINGS = {
    "fp32": ("no", False),
    "bf16": ("bf16", False),
    "LoRA, each type as it is": ("no", True),
    "LoRA, in bf16": ("bf16", True),
}


def accelerate_worker(rank: int, ranks: int) -> dict[str, dict]:
    """By setting: losses and bytes uncompressed, with lossless weights, and with int8 gradients."""
    results = {}
    for name, (mixed_precision, adapters) in SETTINGS.items():
        results[name] = {
            codecs: train(mixed_precision, adapters, *codecs)
            for codecs in (("none", "none"), ("lossless", "none"), ("lossless", "int8"))
        }
    return results


ranks = spawned(accelerate_worker, 2, timeout=400)
"""Results by rank."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_attach_after_prepare_compresses(ranks: list[dict], setting: str) -> None:
    """Lossless weights keep every loss; int8 gradients keep near them."""
    for rank in ranks:
        by_codecs = rank[setting]
        exact, _ = by_codecs["none", "none"]
        lossless, _ = by_codecs["lossless", "none"]
        assert lossless == exact
        losses, totals = by_codecs["lossless", "int8"]
        torch.testing.assert_close(losses, exact, rtol=0.05, atol=0)
        for traffic in ("dp.weight", "dp.gradient"):
            sent, uncompressed = totals[traffic]["compressed"]
            assert 0 < sent < uncompressed
