"""scripts/accuracy: without codecs it is the plain model; settings, runs and their table."""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx
from torch import Tensor

from megatron.compression.codecs import parse_codec
from megatron.compression.context_parallel.gather import chunks_of
from megatron.compression.errors import CompressionConfigError
from megatron.compression.huggingface.models import find_model
from megatron.compression.huggingface.weights import merge
from scripts.accuracy import layers, results, run
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.layers import attend
from scripts.accuracy.model import GPT, ModelConfig, token_losses
from scripts.accuracy.settings import setting_of
from scripts.accuracy.training import Corpus, Schedule, Trainer
from tests.distributed.test_qwen_parity import make_hugging_face_model

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(vocabulary=64, layers=2, hidden=128, heads=4, sequence=16, dtype=torch.float32)


def plain_forward(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of the model without tensor parallelism, written down once more."""
    config = model.config
    dtype = config.dtype
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


def test_a_stages_gradients_have_the_codecs_own_choice() -> None:
    setting = setting_of("tah-quant-pp")
    assert setting.forward == setting.backward == "none"
    assert setting.stage_forward == "tah-quant"
    assert setting.stage_backward == parse_codec("tah-quant").backward.name


def test_a_stages_gradients_may_have_a_codec_of_their_own() -> None:
    assert setting_of("int4:group=32,,int8-pp").stage_backward == "int8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lossless", "lossless changes no bit"),
        ("int8-pp+int6-pp", "one kind of parallelism twice"),
        ("int8-cp+int6-pp", "context parallelism is simulated alone"),
        ("tah-quant-cp", "sees messages' shapes"),
        ("int8,,int8-ddp", "no weights are sent"),
        ("tagc-dp", "only codecs of gradients"),
        ("int9", "codec 'int9' is unknown"),
    ],
)
def test_what_is_not_simulated_is_refused(name: str, message: str) -> None:
    with pytest.raises(CompressionConfigError, match=message):
        setting_of(name)


def encoded(x: Tensor, codec) -> Tensor:
    """Return what a receiver has of messages [number, *shape]."""
    return codec.decode(codec.encode(x), x.shape[1:], x.dtype)


@pytest.fixture
def sent() -> Tensor:
    """Eight sequences of 16 tokens, one after the other, of 128 channels in bf16."""
    return torch.randn(8 * 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def of_a_micro_batch(x: Tensor, codec) -> Tensor:
    """``sent`` as messages of 4 sequences, [tokens, samples, channels], encoded and put back."""
    messages = x.view(2, 4, 16, 128).transpose(1, 2)
    return encoded(messages, codec).transpose(1, 2).reshape(x.shape)


def test_a_stage_sends_messages_of_a_micro_batch(sent: Tensor) -> None:
    """tah-quant and normalize see a micro-batch's tokens, samples and channels."""
    exchange = Exchange(setting_of("tah-quant-pp"))
    layers.attach(exchange)
    received = layers.send(sent, 16)
    assert torch.equal(received, of_a_micro_batch(sent, exchange.codecs["stage_forward"]))
    assert not torch.equal(received, sent)


def test_a_stage_sends_gradients_back(sent: Tensor) -> None:
    exchange = Exchange(setting_of("tah-quant-pp"))
    layers.attach(exchange)
    x = sent.requires_grad_()
    grad = torch.ones_like(x).cumsum(0)
    layers.send(x, 16).backward(grad)
    assert torch.equal(x.grad, of_a_micro_batch(grad, exchange.codecs["stage_backward"]))
    assert not torch.equal(x.grad, grad)


def test_each_rank_of_a_stage_sends_its_own_tokens(sent: Tensor) -> None:
    """Four ranks with sequence parallelism have four tokens each of a message."""
    exchange = Exchange(setting_of("none-sp+tah-quant-pp"))
    of_ranks = sent.view(2, 4, 4, 4, 128).permute(0, 2, 3, 1, 4).flatten(0, 1)
    expected = encoded(of_ranks, exchange.codecs["stage_forward"]).view(2, 4, 4, 4, 128)
    received = exchange.send(sent, 16, "stage_forward")
    assert torch.equal(received, expected.permute(0, 3, 1, 2, 4).reshape(sent.shape))


def test_sums_beside_compressed_stages_stay_exact() -> None:
    exchange = Exchange(setting_of("tah-quant-pp"))
    partials = torch.randn(4, 8, 128).bfloat16()
    assert torch.equal(exchange.reduce(partials, "forward"), partials.float().sum(0).bfloat16())


@dataclass
class Queries:
    """Queries, keys and values of three sequences of 16 tokens, and a gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


@pytest.fixture
def queries() -> Queries:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 16, 4, 32, generator=generator, requires_grad=True)
    k = torch.randn(3, 16, 2, 32, generator=generator, requires_grad=True)
    v = torch.randn(3, 16, 2, 32, generator=generator, requires_grad=True)
    return Queries(q, k, v, torch.randn(3 * 16, 128, generator=generator))


def test_ranks_that_share_a_sequence_compute_the_same_attention(queries: Queries) -> None:
    """A codec that changes nothing: outputs and gradients are those of one rank, up to rounding."""
    inputs = (queries.q, queries.k, queries.v)
    expected = attend(*inputs, False)
    gradients = torch.autograd.grad(expected, inputs, queries.grad)
    layers.attach(Exchange(setting_of("identity-cp")))
    output = attend(*inputs, True)
    assert torch.allclose(output, expected, atol=1e-6)
    shared_gradients = torch.autograd.grad(output, inputs, queries.grad)
    for ours, exact in zip(shared_gradients, gradients, strict=True):
        assert torch.allclose(ours, exact, atol=1e-5)


def decoded_keys_and_values(queries: Queries, codec) -> Tensor:
    """Keys and values as ranks have them after a compressed gather, [3, 16, 2 * groups, 32]."""
    gathered = torch.cat([queries.k, queries.v], dim=2).view(1, -1, 128).detach()
    return encoded(gathered, codec).view(3, 16, 4, 32)


def test_a_ranks_queries_see_decoded_keys_and_values(queries: Queries) -> None:
    setting = setting_of("int4,,int5-cp")
    assert (setting.context_forward, setting.context_backward) == ("int4", "int5")
    layers.attach(Exchange(setting))
    output = attend(queries.q, queries.k, queries.v, True)
    keys, values = decoded_keys_and_values(queries, parse_codec("int4")).split(2, dim=2)
    assert torch.allclose(output, attend(queries.q, keys, values, False), atol=1e-6)
    uncompressed = attend(queries.q, queries.k, queries.v, False)
    assert not torch.allclose(output, uncompressed, atol=1e-2)


def test_gradients_of_keys_and_values_are_encoded_by_rank(queries: Queries) -> None:
    """A rank encodes its gradient, of the rows that it computes, before the sum."""
    layers.attach(Exchange(setting_of("int4,,int5-cp")))
    output = attend(queries.q, queries.k, queries.v, True)
    keys, values = torch.autograd.grad(output, (queries.k, queries.v), queries.grad)
    decoded = decoded_keys_and_values(queries, parse_codec("int4")).requires_grad_()
    expected_output = attend(queries.q, *decoded.split(2, dim=2), False)
    of_ranks = []
    for rank in range(4):
        is_of_rank = torch.zeros(16, dtype=torch.bool)
        for chunk in chunks_of(rank, 4):
            is_of_rank[2 * chunk : 2 * chunk + 2] = True
        grad = torch.where(is_of_rank.repeat(3)[:, None], queries.grad, 0)
        [gradient] = torch.autograd.grad(expected_output, decoded, grad, retain_graph=True)
        of_ranks.append(gradient.view(-1, 128))
    codec = parse_codec("int5")
    payloads = codec.encode(torch.stack(of_ranks))[:, None]
    expected = codec.decode_sum(payloads, (48, 128), torch.float32)[0]
    assert torch.allclose(torch.cat([keys, values], dim=2).view(48, 128), expected, atol=1e-5)


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


def small_trainer(tokens: dict[str, str], dtype: torch.dtype, steps: int, batch: int) -> Trainer:
    """A trainer of a model of one layer."""
    config = ModelConfig(vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=dtype)
    schedule = Schedule(steps=steps, batch=batch, warmup=2)
    return Trainer(GPT(config), Corpus(tokens, 16, "cpu", 160), schedule)


@dataclass
class Trained:
    """What a training has left."""

    losses: list[float]
    weights: Tensor
    """All of them, flat."""


@pytest.fixture(scope="module")
def trained(tokens) -> dict[str, Trained]:
    """Eight data-parallel steps under several settings, from the same weights."""
    trainer = small_trainer(tokens, torch.float32, steps=8, batch=4)
    result = {}
    for name in ("none", "int8,,none-dp", "int8,,int8-dp", "none,,int4-dp"):
        trainer.start(3)
        losses = trainer.run(setting_of(name), 8, 3)["losses"]
        weights = [parameter.detach().flatten() for parameter in trainer.model.parameters()]
        result[name] = Trained(losses, torch.cat(weights))
    return result


@pytest.mark.parametrize("name", ["int8,,none-dp", "int8,,int8-dp", "none,,int4-dp"])
def test_compressed_data_parallel_weights_stay_close(trained, name: str) -> None:
    """They are as close to the uncompressed training's as bf16 rounds."""
    exact = trained["none"].weights
    error = float((trained[name].weights - exact).norm() / exact.norm())
    assert 0 < error < 0.004


@pytest.mark.parametrize(
    ("name", "is_bf16"),
    [("none", False), ("int8,,none-dp", False), ("int8,,int8-dp", True), ("none,,int4-dp", True)],
)
def test_ranks_with_compressed_weights_hold_bf16(trained, name: str, is_bf16: bool) -> None:
    weights = trained[name].weights
    assert torch.equal(weights, weights.bfloat16().float()) == is_bf16


def test_the_first_loss_with_compressed_weights_is_the_uncompressed_one(trained) -> None:
    first = trained["none"].losses[0]
    assert trained["none,,int4-dp"].losses[0] == pytest.approx(first, rel=1e-3)


@pytest.fixture(scope="module")
def repeated(tokens, tmp_path_factory) -> tuple[list[dict], dict]:
    """Two runs of six steps from one seed; a third does the last three from a checkpoint."""
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "half.pt"
    trainer = small_trainer(tokens, torch.bfloat16, steps=6, batch=2)
    setting = setting_of("int4:group=64")
    runs = []
    for _ in range(2):
        trainer.start(3)
        run = trainer.run(setting, 6, 3, save={3: checkpoint})
        del run["seconds_per_step"]
        runs.append(run)
    trainer.load(checkpoint)
    return runs, trainer.run(setting, 3, 3)


def test_a_run_repeats_to_the_bit(repeated) -> None:
    [first, second], _ = repeated
    assert first == second
    assert first["losses"][-1] < first["losses"][0]


def test_a_continuation_is_the_end_of_its_run(repeated) -> None:
    [run, _], end = repeated
    assert end["losses"] == run["losses"][3:]
    assert end["valid"] == run["valid"]


def _record(name: str, seed: int, valid: float, kind: str = "ending") -> dict:
    setting = setting_of(name)
    record = {
        "id": f"{kind}/{name}/{seed}",
        "setting": setting.as_dict(),
        "bits": setting.bits,
        "seed": seed,
    }
    return record | {"kind": kind, "size": "tiny", "valid": valid}


def records_of_two_seeds() -> list[dict]:
    """Uncompressed runs of seeds 0 and 1, taco's of these, and one of taco without a partner."""
    return [
        _record("none", 0, 2.0, "scratch"),
        _record("none", 1, 4.0, "scratch"),
        _record("taco", 0, 2.02),
        _record("taco", 1, 4.12),
        _record("taco", 7, 9.0),
    ]


def test_runs_are_compared_with_those_of_their_seed() -> None:
    differences = results.differences(records_of_two_seeds())
    assert differences == {"taco": {0: approx(1.0), 1: approx(3.0)}}


def test_the_table_has_the_mean_and_its_interval() -> None:
    text = results.tables(records_of_two_seeds())
    assert "| taco | 8.62 | +1.000, +3.000 | +2.000 ± 1.000 | -10.71 … +14.71 |" in text


def test_a_single_seed_has_no_interval() -> None:
    assert results.estimate([1.0]) == ("+1.000", "")


def test_a_line_that_is_being_written_is_read_over(tmp_path: Path) -> None:
    records = records_of_two_seeds()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "results-0.jsonl").write_text(lines + '{"id": "half a li')
    assert results.load([tmp_path / "results-0.jsonl"]) == records


def test_of_records_with_one_id_the_last_counts(tmp_path: Path) -> None:
    earlier = _record("taco", 0, 3.0)
    later = _record("taco", 0, 2.0)
    (tmp_path / "kept.json").write_text(json.dumps({"records": [earlier, later]}))
    assert results.load([tmp_path / "kept.json"]) == [later]


PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "accuracy"


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.json")), ids=lambda file: file.stem)
def test_published_records_make_a_table(file: Path) -> None:
    assert results.tables(results.load([file])).count("\n| ") > 1


@pytest.mark.parametrize("flag", ["size", "steps", "corpus-mb"])
def test_a_folder_of_other_runs_is_refused(tmp_path: Path, flag: str) -> None:
    """Names of runs do not say their model, length and text, so they would pass for these."""
    words = {"size": "tiny", "steps": "8", "corpus-mb": "1"}
    changed = words | {flag: {"size": "350m", "steps": "9", "corpus-mb": "2"}[flag]}

    def arguments(values: dict[str, str]) -> Namespace:
        flags = [word for name, value in values.items() for word in (f"--{name}", value)]
        return run.parse(["--work-dir", str(tmp_path), *flags])

    run.claim(arguments(words))
    run.claim(arguments(words))
    with pytest.raises(
        SystemExit, match=rf"its runs are of --{flag} .*; give the same, or another"
    ):
        run.claim(arguments(changed))


def weight_pairs(model: GPT) -> list[tuple]:
    """Return each parameter of a qwen with the names of Hugging Face's tensors for it."""
    pairs = [(model.words, "model.embed_tokens.weight"), (model.norm.weight, "model.norm.weight")]
    pairs.append((model.output, "lm_head.weight"))
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        qkv = [f"{prefix}self_attn.{name}_proj." for name in "qkv"]
        pairs.append((block.qkv, *(f"{name}weight" for name in qkv)))
        if block.qkv_bias is not None:
            pairs.append((block.qkv_bias, *(f"{name}bias" for name in qkv)))
        else:
            pairs.append((block.q_norm.weight, f"{prefix}self_attn.q_norm.weight"))
            pairs.append((block.k_norm.weight, f"{prefix}self_attn.k_norm.weight"))
        pairs.append((block.norm1.weight, f"{prefix}input_layernorm.weight"))
        pairs.append((block.norm2.weight, f"{prefix}post_attention_layernorm.weight"))
        pairs.append((block.projection, f"{prefix}self_attn.o_proj.weight"))
        pairs.append((block.fc2, f"{prefix}mlp.down_proj.weight"))
        # Rows of the gate and of its values alternate in fc1.
        pairs.append((block.fc1[0::2], f"{prefix}mlp.gate_proj.weight"))
        pairs.append((block.fc1[1::2], f"{prefix}mlp.up_proj.weight"))
    return pairs


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_is_hugging_faces(family, tmp_path):
    """Losses and gradients of the same weights, with and without sequence parallelism."""
    reference = make_hugging_face_model(family, tmp_path, torch.float32, vocabulary=104)
    qwen = find_model(str(tmp_path))
    state = reference.state_dict()
    config = ModelConfig(
        qwen.vocabulary, qwen.layers, qwen.hidden, qwen.heads, 16, torch.float32, qwen=qwen
    )
    model = GPT(config)
    pairs = weight_pairs(model)
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
