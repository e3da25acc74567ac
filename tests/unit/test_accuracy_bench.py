"""The accuracy bench: the simulation without codecs is the plain model, its settings mean what they say."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.compression.codecs import parse_codec
from megatron.compression.context_parallel.gather import chunks_of
from scripts.accuracy import corpus, layers
from scripts.accuracy.attention import attend
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.experts import Experts
from scripts.accuracy.model import GPT, ModelConfig, token_losses
from scripts.accuracy.settings import LEGS, Setting, bits_of, setting_of
from scripts.accuracy.training import Corpus, Schedule, Trainer

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


@pytest.fixture
def partials() -> torch.Tensor:
    """[W, T, h] with a part common to all tokens."""
    generator = torch.Generator().manual_seed(5)
    common = 4 * torch.randn(1, 1, 256, generator=generator)
    return (common + torch.randn(4, 12, 256, generator=generator)).bfloat16()


@pytest.mark.parametrize("name", ["none", "none-tp2", "none-sp"])
def test_without_codecs_it_is_the_plain_model(name):
    setting = setting_of(name)
    model = GPT(CONFIG)
    model.initialise(1)
    ids, targets = torch.randint(CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2))
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
    # embedding, two row-parallel layers a block; output layer, two column-parallel ones a block
    number = 1 + 2 * CONFIG.layers + 1 + 2 * CONFIG.layers
    gathers = (2 * CONFIG.layers + 1) + (2 * CONFIG.layers + 1) if setting.sequence_parallel else 0
    assert exchange.number == number + gathers


def test_each_hop_has_its_own_codec(partials):
    coarse, fine = "int4:scales=single", "int8:scales=single"
    exact = partials.double().sum(0)
    error = {}
    for hops in (f"{fine}/{fine}", f"{fine}/{coarse}", f"{coarse}/{fine}", f"{coarse}/{coarse}"):
        exchange = Exchange(Setting("s", hops))
        error[hops] = float((exchange.reduce(partials, "forward") - exact).norm() / exact.norm())
        assert torch.equal(exchange.reduce(partials, "backward"), partials.float().sum(0).bfloat16())
    first, second = error[f"{coarse}/{fine}"], error[f"{fine}/{coarse}"]
    assert error[f"{fine}/{fine}"] < 0.15 * first < 0.15 * second
    assert error[f"{coarse}/{coarse}"] == pytest.approx(math.hypot(first, second), rel=0.1)
    sliced = Exchange(Setting("s", f"{coarse}/{fine}", sequence_parallel=True))
    scattered = sliced.reduce(partials, "forward")
    assert float((scattered - exact).norm() / exact.norm()) == pytest.approx(first, rel=0.05)
    whole = sliced.reduce(partials, "forward", whole=True)
    assert torch.equal(whole, Exchange(Setting("s", f"{coarse}/{fine}")).reduce(partials, "forward"))
    gathered = sliced.gather(partials[0], "forward")
    assert 0 < float((gathered - partials[0]).norm() / partials[0].norm()) < 0.01


def test_stages_send_messages_there_and_back():
    """tah-quant and normalize see a micro-batch's tokens, samples and channels; the sums stay exact."""
    setting = setting_of("tah-quant-pp")
    assert setting.forward == setting.backward == "none" and setting.stage_forward == "tah-quant"
    assert setting.stage_backward == parse_codec("tah-quant").backward.name
    assert setting_of("int4:group=32,,int8-pp").stage_backward == "int8"
    exchange = Exchange(setting)
    layers.attach(exchange)
    x = torch.randn(8 * 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
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
    parts = x.detach().view(2, 4, 4, 4, 128).permute(0, 2, 3, 1, 4).flatten(0, 1)  # a rank's tokens each
    codec = sliced.codecs["stage_forward"]
    expected = codec.decode(codec.encode(parts), parts.shape[1:], x.dtype).view(2, 4, 4, 4, 128)
    assert torch.equal(
        sliced.send(x.detach(), 16, "forward"), expected.permute(0, 3, 1, 2, 4).reshape(x.shape)
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
    sent = there.decode(there.encode(sent), sent.shape[1:], torch.float32).view(3, 16, 4, 32).requires_grad_()
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


def test_names_stand_for_specs_and_specs_for_themselves():
    assert setting_of("paper").forward == "taco" and bits_of(setting_of("paper").as_dict()) == 8.5
    assert setting_of("int6-quadratic-sp") == Setting("int6-quadratic-sp", "int6", "int6", True)
    assert setting_of("int6:group=64").backward == "int6:group=64"
    assert bits_of(setting_of("none").as_dict()) == 16
    with pytest.raises(ValueError, match="int7"):
        setting_of("int7-nearest")


def test_kinds_of_parallelism_are_joined():
    three = setting_of("paper-sp+tah-quant-pp+sdp4bit-dp")
    assert three.sequence_parallel and three.forward == three.backward == "taco"
    assert three.stage_forward == "tah-quant" and three.gradients == "sdp4bit"
    assert three.weights == "sdp4bit:intra=4,group=2048,hadamard=off"
    alone = [bits_of(setting_of(name).as_dict()) for name in three.name.split("+")]
    assert bits_of(three.as_dict()) == pytest.approx(sum(alone) / 3)
    assert setting_of("sdp4bit,,none-dp").weights == "none" == setting_of("none,,sdp4bit-dp").gradients
    assert setting_of("paper+auto-pp", 2).world_size == setting_of("auto-pp", 2).world_size == 2
    plain = setting_of("sdp4bit-ddp")
    assert plain.unsharded and (plain.gradients, plain.weights) == ("sdp4bit", "none") and not three.unsharded
    assert setting_of("zero++-dp").gradients == "sdp4bit:intra=4,hadamard=off"
    refused = {"int6+int8": "twice", "int6+none-tp2": "twice", "int6,,none-dp+none,,int8-dp": "twice"}
    refused |= dict.fromkeys(
        ("tagc-dp", "loco-dp", "tah-quant-dp", "tah-quant-cp", "int8-cp+int6"), "simulated"
    )
    refused |= {"lossless-dp": "no bit", "lossless": "no bit", "sdp4bit,,int8-ddp": "no weights travel"}
    for name, words in refused.items():
        with pytest.raises(ValueError, match=words):
            setting_of(name)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A tiny corpus of repeated patterns."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    words = generator.integers(0, 64, (40, 8))
    for name, count in (("train", 400), ("valid", 60), ("test", 60)):
        ids = words[generator.integers(0, 40, count)].reshape(-1)
        np.save(folder / f"{name}.npy", ids.astype(np.uint16))
    return folder


def test_data_parallel_weights_follow_the_masters(tokens):
    """Ranks hold bf16, which their codec changes towards the fp32 masters; without codecs nothing moves."""
    config = ModelConfig(vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=torch.float32)
    trainer = Trainer(GPT(config), Corpus(tokens, 16, "cpu", 160), Schedule(steps=8, batch=4, warmup=2))
    losses, weights = {}, {}
    for name in ("none", "int8,,none-dp", "int8,,int8-dp", "none,,int4-dp"):
        trainer.start(3)
        losses[name] = trainer.run(setting_of(name), 8, 3)["losses"]
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    exact = weights["none"]
    error = {name: float((own - exact).norm() / exact.norm()) for name, own in weights.items()}
    assert losses["none,,int4-dp"][0] == pytest.approx(losses["none"][0], rel=1e-3)
    assert not error.pop("none") and all(0 < one < 0.004 for one in error.values()), "as bf16 rounds"
    for name, own in weights.items():
        assert torch.equal(own, own.bfloat16().float()) == ("int8-dp" in name or "int4-dp" in name)


def test_a_run_repeats_and_an_ending_continues_bitwise(tokens, tmp_path):
    config = ModelConfig(vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=torch.bfloat16)
    trainer = Trainer(GPT(config), Corpus(tokens, 16, "cpu", 160), Schedule(steps=6, batch=2, warmup=2))
    setting, runs = setting_of("int4-signed-g64"), []
    for _ in range(2):
        trainer.start(3)
        runs.append(trainer.run(setting, 6, 3, save={3: tmp_path / "half.pt"}))
    assert runs[0]["weights"] == runs[1]["weights"]
    assert runs[0]["losses"] == runs[1]["losses"] and runs[0]["losses"][-1] < runs[0]["losses"][0]
    for _ in range(2):  # the checkpoint that stays in memory is not trained on
        trainer.load(tmp_path / "half.pt")
        rest = trainer.run(setting, 3, 3)
        assert rest["weights"] == runs[0]["weights"] and rest["losses"] == runs[0]["losses"][3:]
        assert rest["valid"] == runs[0]["valid"] != rest["valid_uncompressed"]
        assert rest["test"] == runs[0]["test"] not in (rest["valid"], rest["valid_uncompressed"])
    with torch.no_grad():
        next(trainer.model.parameters())[0, :2] = next(trainer.model.parameters())[0, :2].flip(0)
    assert trainer.digest() != rest["weights"]


def test_orders_are_permutations(tokens):
    text = Corpus(tokens, 16, "cpu")
    order = text.order(4, 2 * text.windows)
    assert sorted(order[: text.windows]) == sorted(order[text.windows :]) == list(range(text.windows))
    assert not np.array_equal(order, text.order(5, 2 * text.windows))


def test_no_file_is_in_two_parts(tmp_path):
    root = tmp_path / "packages"
    for i in range(120):
        path = root / f"p{i % 7}" / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def f{j}_{i}(x):\n    return x + {j * i}\n" for j in range(40)))
    (root / "copy.py").write_text((root / "p0" / "m0.py").read_text())
    meta = corpus.prepare(tmp_path / "out", root, 300, 5000, 0.2, 1.0, workers=1)
    assert np.load(tmp_path / "out" / "train.npy").shape == (5000,)
    assert 8 <= meta["valid"]["files"] <= 45, "a copy counts once"
    assert sum(meta[name]["files"] for name in ("train", "valid", "test")) == 120
    assert meta["valid"]["tokens"] == len(np.load(tmp_path / "out" / "valid.npy")) > 0
    assert corpus.prepare(tmp_path / "again", root, 300, 5000, 0.2, 1.0, workers=2) == meta


MIXTURE = replace(CONFIG, experts=4, expert_width=64)


def plain_mixture(module: Experts, x: Tensor) -> Tensor:
    """Every expert on every token, weighted; those that are not chosen by zero."""
    logits = x @ module.router.t()
    best, ids = logits.topk(module.chosen, dim=-1)
    weights = torch.zeros_like(logits).scatter(1, ids, best.softmax(-1))
    hidden = F.gelu(torch.einsum("th,emh->tem", x, module.fc1), approximate="tanh")
    return torch.einsum("tem,ehm,te->th", hidden, module.fc2, weights)


def mixture_results(setting: Setting) -> tuple[Tensor, list[Tensor]]:
    """Losses of a model with experts and gradients."""
    model = GPT(MIXTURE)
    model.initialise(1)
    layers.attach(Exchange(setting))
    ids, targets = torch.randint(CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    losses = model(ids, targets)
    return losses.detach(), torch.autograd.grad(losses.mean(), list(model.parameters()))


def test_experts_are_the_plain_mixture():
    """Output and gradients; the auxiliary loss pulls on the router alone."""
    layers.attach(Exchange(setting_of("none")))
    module = Experts(128, 64, 4, 2, balance=0.0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(48, 128, generator=generator).requires_grad_()
    upstream = torch.randn(48, 128, generator=generator)
    wanted = (x, *module.parameters())
    ours, plain = module(x), plain_mixture(module, x)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    exact = torch.autograd.grad(plain, wanted, upstream)
    for one, other in zip(torch.autograd.grad(ours, wanted, upstream), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    module.balance = 10.0
    _, router, *others = torch.autograd.grad(module(x), wanted, upstream)
    assert not torch.allclose(router, exact[1], rtol=0.01)
    assert all(
        torch.allclose(one, two, rtol=1e-4, atol=1e-3) for one, two in zip(others, exact[2:], strict=True)
    )


def test_each_leg_goes_through_its_codec():
    """None changes nothing; legs of the forward change losses, those of the backward gradients alone."""
    losses, gradients = mixture_results(setting_of("none"))
    same, equal = mixture_results(setting_of("ep-identity"))
    assert torch.equal(losses, same) and all(map(torch.equal, gradients, equal))
    for leg in LEGS:
        found, changed = mixture_results(Setting("leg", **{leg: "int4"}))
        assert torch.equal(found, losses) == leg.endswith("backward"), leg
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(changed, gradients, strict=True)]
        assert 0 < max(apart) < 0.5, leg
    fine, _ = mixture_results(setting_of("ep-int8"))
    coarse, _ = mixture_results(setting_of("ep-fp8"))
    assert 0 < (fine - losses).norm() < 0.5 * (coarse - losses).norm()


def test_names_of_legs():
    assert setting_of("ep-int8").codecs["combine_backward"].name == "int8"
    assert bits_of(setting_of("ep-int6").as_dict()) == 6.125
    assert bits_of(setting_of("ep-fp8-to-experts").as_dict()) == (8.5 + 16 + 8.5 + 16) / 4
    only = setting_of("ep-int8-dispatch").codecs
    assert [leg for leg in LEGS if only[leg]] == ["dispatch"] and only["forward"] is None
