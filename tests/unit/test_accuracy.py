"""scripts/accuracy: the simulation without codecs is the plain model, settings, runs and their table."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx
from torch import Tensor

from megatron.compression.codecs import parse_codec
from megatron.compression.context_parallel.gather import chunks_of
from megatron.compression.huggingface.models import find_model
from megatron.compression.huggingface.weights import merge
from scripts.accuracy import layers, results
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.layers import attend
from scripts.accuracy.model import GPT, ModelConfig, token_losses
from scripts.accuracy.settings import setting_of
from scripts.accuracy.training import Corpus, Schedule, Trainer
from tests.distributed.test_qwen_parity import make_hugging_face_model

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(vocabulary=64, layers=2, hidden=128, heads=4, sequence=16, dtype=torch.float32)


def plain_forward(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """The same model without tensor parallelism, on its own: what the simulation is tested against."""
    config, dtype = model.config, model.config.dtype
    x = (model.words[ids] + model.positions).to(dtype)
    for block in model.blocks:
        y = F.linear(block.norm1(x), block.qkv.to(dtype), block.qkv_bias.to(dtype))
        y = y.view(*ids.shape, config.heads, 3, -1)
        q, k, v = (y[:, :, :, i].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(y, block.projection.to(dtype), block.projection_bias.to(dtype))
        y = F.linear(block.norm2(x), block.fc1.to(dtype), block.fc1_bias.to(dtype))
        y = F.gelu(y, approximate="tanh")
        x = x + F.linear(y, block.fc2.to(dtype), block.fc2_bias.to(dtype))
    logits = F.linear(model.norm(x), model.output.to(dtype))
    return token_losses(logits.reshape(-1, config.vocabulary), targets.reshape(-1))


@pytest.mark.parametrize("name", ["none", "none-tp2", "none-sp"])
def test_without_codecs_it_is_the_plain_model(name):
    setting = setting_of(name)
    model = GPT(CONFIG)
    model.initialise(1)
    ids, targets = torch.randint(
        CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2)
    )
    expected = plain_forward(model, ids, targets)
    gradients = torch.autograd.grad(expected.mean(), list(model.parameters()))
    exchange = Exchange(setting)
    layers.attach(exchange)
    model.use(setting)
    losses = model(ids, targets)
    assert torch.allclose(losses, expected, atol=1e-5)
    for ours, exact in zip(
        torch.autograd.grad(losses.mean(), list(model.parameters())), gradients, strict=True
    ):
        assert torch.allclose(ours, exact, atol=1e-5 * float(exact.abs().max()) + 1e-9)


def test_stages_send_messages_there_and_back():
    """tah-quant and normalize see a micro-batch's tokens, samples and channels; the sums stay exact."""
    setting = setting_of("tah-quant-pp")
    assert setting.forward == setting.backward == "none" and setting.stage_forward == "tah-quant"
    assert setting.stage_backward == parse_codec("tah-quant").backward.name
    assert setting_of("int4:group=32,,int8-pp").stage_backward == "int8"
    exchange = Exchange(setting)
    layers.attach(exchange)
    x = (
        torch.randn(8 * 16, 128, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .requires_grad_()
    )
    sent = layers.send(x, 16)
    sent.backward(torch.ones_like(x).cumsum(0))
    for direction, before, after in (
        ("forward", x.detach(), sent),
        ("backward", torch.ones_like(x).cumsum(0), x.grad),
    ):
        codec = exchange.codecs[f"stage_{direction}"]
        messages = before.view(2, 4, 16, 128).transpose(1, 2)
        expected = codec.decode(codec.encode(messages), messages.shape[1:], x.dtype).transpose(1, 2)
        assert torch.equal(after, expected.reshape(x.shape)) and not torch.equal(after, before)
    sliced = Exchange(setting_of("none-sp+tah-quant-pp"))
    parts = (
        x.detach().view(2, 4, 4, 4, 128).permute(0, 2, 3, 1, 4).flatten(0, 1)
    )  # a rank's tokens each
    codec = sliced.codecs["stage_forward"]
    expected = codec.decode(codec.encode(parts), parts.shape[1:], x.dtype).view(2, 4, 4, 4, 128)
    assert torch.equal(
        sliced.send(x.detach(), 16, "stage_forward"),
        expected.permute(0, 3, 1, 2, 4).reshape(x.shape),
    )
    partials = torch.randn(4, 8, 128).bfloat16()
    assert torch.equal(exchange.reduce(partials, "forward"), partials.float().sum(0).bfloat16())


def test_ranks_share_a_sequence():
    """Context parallelism: a rank's queries see decoded keys and values, and have gradients of their own."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 16, 4, 32, generator=generator, requires_grad=True)
    k, v = (torch.randn(3, 16, 2, 32, generator=generator, requires_grad=True) for _ in "kv")
    grad = torch.randn(3 * 16, 128, generator=generator)
    plain = attend(q, k, v, False)
    exact = torch.autograd.grad(plain, (q, k, v), grad)
    layers.attach(Exchange(setting_of("identity-cp")))
    y = attend(q, k, v, True)
    assert torch.allclose(y, plain, atol=1e-6)
    for ours, other in zip(torch.autograd.grad(y, (q, k, v), grad), exact, strict=True):
        assert torch.allclose(ours, other, atol=1e-5)
    setting = setting_of("int4,,int5-cp")
    assert (setting.context_forward, setting.context_backward) == ("int4", "int5")
    layers.attach(Exchange(setting))
    y = attend(q, k, v, True)
    there, back = parse_codec("int4"), parse_codec("int5")
    sent = torch.cat([k, v], dim=2).view(1, -1, 128).detach()
    sent = (
        there.decode(there.encode(sent), sent.shape[1:], torch.float32)
        .view(3, 16, 4, 32)
        .requires_grad_()
    )
    rows = attend(q, *sent.split(2, dim=2), False)
    assert torch.allclose(y, rows, atol=1e-6) and not torch.allclose(y, plain, atol=1e-2)
    parts = []
    for rank in range(4):
        mine = torch.zeros(16, dtype=torch.bool)
        for number in chunks_of(rank, 4):
            mine[2 * number : 2 * number + 2] = True
        part = torch.where(mine.repeat(3)[:, None], grad, 0)
        parts.append(torch.autograd.grad(rows, sent, part, retain_graph=True)[0].view(-1, 128))
    expected = back.decode_sum(back.encode(torch.stack(parts))[:, None], (48, 128), torch.float32)
    keys, values = torch.autograd.grad(y, (k, v), grad)
    assert torch.allclose(torch.cat([keys, values], dim=2).view(48, 128), expected[0], atol=1e-5)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> dict[str, str]:
    """Paths of a tiny text of repeated patterns, of 64 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    words = generator.integers(0, 64, (40, 8))
    for name, count in (("train", 400), ("valid", 60)):
        ids = words[generator.integers(0, 40, count)].reshape(-1)
        ids.astype(np.uint16).tofile(folder / f"{name}.bin")
    return {name: str(folder / name) for name in ("train", "valid")}


def test_data_parallel_weights_follow_the_masters(tokens):
    """Ranks hold bf16, which their codec changes towards the fp32 masters; without codecs nothing moves."""
    config = ModelConfig(
        vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=torch.float32
    )
    trainer = Trainer(
        GPT(config), Corpus(tokens, 16, "cpu", 160), Schedule(steps=8, batch=4, warmup=2)
    )
    losses, weights = {}, {}
    for name in ("none", "int8,,none-dp", "int8,,int8-dp", "none,,int4-dp"):
        trainer.start(3)
        losses[name] = trainer.run(setting_of(name), 8, 3)["losses"]
        weights[name] = torch.cat(
            [parameter.detach().flatten() for parameter in trainer.model.parameters()]
        )
    exact = weights["none"]
    error = {name: float((own - exact).norm() / exact.norm()) for name, own in weights.items()}
    assert losses["none,,int4-dp"][0] == pytest.approx(losses["none"][0], rel=1e-3)
    assert not error.pop("none") and all(0 < one < 0.004 for one in error.values()), (
        "as bf16 rounds"
    )
    for name, own in weights.items():
        assert torch.equal(own, own.bfloat16().float()) == ("int8-dp" in name or "int4-dp" in name)


def test_a_run_repeats_and_a_continuation_is_its_end(tokens, tmp_path):
    config = ModelConfig(
        vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=torch.bfloat16
    )
    trainer = Trainer(
        GPT(config), Corpus(tokens, 16, "cpu", 160), Schedule(steps=6, batch=2, warmup=2)
    )
    setting, runs = setting_of("int4:group=64"), []
    for _ in range(2):
        trainer.start(3)
        runs.append(trainer.run(setting, 6, 3, save={3: tmp_path / "half.pt"}))
        runs[-1].pop("seconds_per_step")
    assert runs[0] == runs[1] and runs[0]["losses"][-1] < runs[0]["losses"][0]
    trainer.load(tmp_path / "half.pt")
    end = trainer.run(setting, 3, 3)
    assert end["losses"] == runs[0]["losses"][3:]
    assert end["valid"] == runs[0]["valid"]


def _record(name: str, seed: int, valid: float, kind: str = "ending") -> dict:
    setting = setting_of(name)
    record = {
        "id": f"{kind}/{name}/{seed}",
        "setting": setting.as_dict(),
        "bits": setting.bits,
        "seed": seed,
    }
    return record | {"kind": kind, "size": "tiny", "valid": valid}


def test_the_table_compares_runs_of_a_seed(tmp_path):
    records = [_record("none", seed, valid, "scratch") for seed, valid in ((0, 2.0), (1, 4.0))]
    records += [_record("taco", 0, 2.02), _record("taco", 1, 4.12)]
    records.append(_record("taco", 7, 9.0))  # without a partner
    assert results.differences(records) == {"taco": {0: approx(1.0), 1: approx(3.0)}}
    path, kept = tmp_path / "results-0.jsonl", tmp_path / "kept.json"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"id": "half a li')
    kept.write_text(json.dumps({"records": records}))
    text = results.tables(results.load([path, path]))
    assert "| taco | 8.50 | +1.000, +3.000 | +2.000 ± 1.000 | -10.71 … +14.71 |" in text
    assert text == results.tables(results.load([kept]))
    published = Path(__file__).parents[2] / "docs" / "results" / "accuracy"
    for file in published.glob("*.json"):
        assert results.tables(results.load([file])).count("\n| ") > 1, file


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_is_hugging_faces(family, tmp_path):
    """Losses and gradients of the same weights, with and without sequence parallelism."""
    reference = make_hugging_face_model(family, tmp_path, torch.float32, vocabulary=104)
    qwen, state = find_model(str(tmp_path)), reference.state_dict()
    config = ModelConfig(
        qwen.vocabulary, qwen.layers, qwen.hidden, qwen.heads, 16, torch.float32, qwen=qwen
    )
    model = GPT(config)
    pairs = [(model.words, "model.embed_tokens.weight"), (model.norm.weight, "model.norm.weight")]
    pairs.append((model.output, "lm_head.weight"))
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        qkv = [f"{prefix}self_attn.{name}_proj." for name in "qkv"]
        pairs.append((block.qkv, *(f"{name}weight" for name in qkv)))
        if block.qkv_bias is not None:
            pairs.append((block.qkv_bias, *(f"{name}bias" for name in qkv)))
        else:
            pairs += [
                (getattr(block, f"{n}_norm").weight, f"{prefix}self_attn.{n}_norm.weight")
                for n in "qk"
            ]
        pairs.append((block.norm1.weight, f"{prefix}input_layernorm.weight"))
        pairs.append((block.norm2.weight, f"{prefix}post_attention_layernorm.weight"))
        pairs.append((block.projection, f"{prefix}self_attn.o_proj.weight"))
        pairs.append((block.fc2, f"{prefix}mlp.down_proj.weight"))
        pairs += [
            (block.fc1[n::2], f"{prefix}mlp.{name}_proj.weight")
            for n, name in enumerate(("gate", "up"))
        ]
    with torch.no_grad():
        for ours, *names in pairs:
            ours.copy_(merge([state[name] for name in names], qwen))
    ids, targets = torch.randint(104, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    expected = token_losses(reference(ids).logits.reshape(-1, 104), targets.reshape(-1))
    expected.mean().backward()
    for name in ("none", "none-sp"):
        setting = setting_of(name)
        layers.attach(Exchange(setting))
        model.use(setting)
        model.zero_grad()
        losses = model(ids, targets)
        assert torch.allclose(losses, expected, atol=1e-5)
        losses.mean().backward()
        words = reference.model.embed_tokens.weight.grad
        assert torch.allclose(model.words.grad, words, atol=1e-5 * float(words.abs().max()) + 1e-8)
