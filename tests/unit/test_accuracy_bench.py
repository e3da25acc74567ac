"""The accuracy bench: the simulation without codecs is the plain model, its settings mean what they say."""

import math

import numpy as np
import pytest
import torch

from scripts.accuracy import corpus, error_tables, errors, layers
from scripts.accuracy.exchange import Exchange, encode_partials, reduce_once, sum_tensor_fp8
from scripts.accuracy.model import GPT, ModelConfig, plain_forward
from scripts.accuracy.settings import SETTINGS, Setting, bits_a_value, parse_codec
from scripts.accuracy.training import Corpus, Schedule, Trainer

CONFIG = ModelConfig(vocabulary=64, layers=2, hidden=128, heads=4, sequence=16, dtype=torch.float32)


@pytest.fixture
def partials() -> torch.Tensor:
    """[W, T, h] with a part common to all tokens."""
    generator = torch.Generator().manual_seed(5)
    common = 4 * torch.randn(1, 1, 256, generator=generator)
    return (common + torch.randn(4, 12, 256, generator=generator)).bfloat16()


@pytest.mark.parametrize("name", ["none", "none-tp2", "none-sp"])
def test_without_codecs_it_is_the_plain_model(name):
    setting = SETTINGS[name]
    model = GPT(CONFIG)
    model.initialise(1)
    ids, targets = torch.randint(CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    expected = plain_forward(model, ids, targets)
    gradients = torch.autograd.grad(expected.mean(), list(model.parameters()))
    exchange = Exchange(setting)
    exchange.start(0)
    layers.bind(exchange)
    model.use_sequence_parallelism(setting.sequence_parallel)
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
    coarse, fine = "int4:128:single", "int8:128:single"
    exact = partials.double().sum(0)
    error = {}
    for hops in ((coarse, "none"), ("none", coarse), (fine, coarse), (coarse, fine), (coarse, coarse)):
        setting = Setting("s", forward1=hops[0], forward2=hops[1])
        error[hops] = float((Exchange(setting).reduce(partials, "forward") - exact).norm() / exact.norm())
        untouched = Exchange(setting).reduce(partials, "backward")
        assert torch.equal(untouched, partials.float().sum(0).bfloat16())
    one = parse_codec(coarse)
    assert torch.equal(
        Exchange(Setting("s", forward1=coarse)).reduce(partials, "forward"),
        reduce_once(partials, one, 0, torch.bfloat16),
    )
    assert error[fine, coarse] == pytest.approx(error["none", coarse], rel=0.1)
    assert error[coarse, fine] == pytest.approx(error[coarse, "none"], rel=0.1)
    both = math.hypot(error[coarse, "none"], error["none", coarse])
    assert error[coarse, coarse] == pytest.approx(both, rel=0.1)
    sequence_parallel = Setting("s", forward1=coarse, forward2=fine, sequence_parallel=True)
    assert torch.equal(
        Exchange(sequence_parallel).reduce(partials, "forward"),
        Exchange(Setting("s", forward1=coarse)).reduce(partials, "forward"),
    )
    gathered = Exchange(sequence_parallel).gather(partials[0], "forward")
    assert 0 < float((gathered - partials[0]).norm() / partials[0].norm()) < 0.01


def test_split_hops_agree_with_the_fused_one(partials):
    """Different roundings in the hops go through fp32; the same codec goes the collectives' fused way."""
    codec = parse_codec("int6:128:single")
    fused = Exchange(Setting("s", forward1="int6:128:single", forward2="int6:128:single"))
    total = reduce_once(partials, codec, 0, torch.float32)
    split = Exchange(Setting("s", forward2="int6:128:single")).reduce(total[None], "forward")
    difference = (fused.reduce(partials, "forward") - split).float()
    assert float(difference.norm() / total.norm()) < 0.004  # rounding ties and bf16's last bit


def test_removing_the_mean_leaves_the_rest_to_the_codec():
    generator = torch.Generator().manual_seed(6)
    common = 20 * torch.randn(1, 256, generator=generator)
    x = common + torch.randn(64, 256, generator=generator)
    error = {}
    for remove in (False, True):
        setting = Setting("s", forward2="int4:128:single", remove_mean=remove)
        error[remove] = float((Exchange(setting).reduce(x[None], "forward") - x).norm())
    assert error[True] < error[False] / 5


def test_random_rounding_depends_on_step_and_place_alone(partials):
    setting = SETTINGS["int6-dither"]

    def pair(step: int, seed: int = 0) -> list[torch.Tensor]:
        exchange = Exchange(setting, seed)
        exchange.start(step)
        return [exchange.reduce(partials, "forward"), exchange.reduce(partials, "forward")]

    first = pair(3)
    assert all(torch.equal(a, b) for a, b in zip(first, pair(3), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], pair(4)[0]) and not torch.equal(first[0], pair(3, seed=1)[0])


def test_partials_of_one_call_are_those_of_single_ones(partials):
    codec = parse_codec("int8:128:dual")
    together = encode_partials(partials, codec, 0)
    for w, wire in enumerate(together):
        assert torch.equal(wire, encode_partials(partials[w : w + 1], codec, 0)[0])


def test_bits():
    assert bits_a_value("none") == 16
    assert bits_a_value("int6:128:single:dither") == 6.125
    assert bits_a_value("fp8-e4m3:128:dual") == 8.5


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A tiny corpus of repeated patterns."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    words = generator.integers(0, 64, (40, 8))
    for name, count in (("train", 400), ("valid", 60)):
        ids = words[generator.integers(0, 40, count)].reshape(-1)
        np.save(folder / f"{name}.npy", ids.astype(np.uint16))
    return folder


def test_a_run_repeats_and_a_branch_continues_bitwise(tokens, tmp_path):
    config = ModelConfig(vocabulary=64, layers=1, hidden=64, heads=2, sequence=16, dtype=torch.bfloat16)
    trainer = Trainer(GPT(config), Corpus(tokens, 16, "cpu", 160), Schedule(steps=6, batch=2, warmup=2))
    setting, runs = SETTINGS["int4-dither-g64"], []
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
    with torch.no_grad():
        next(trainer.model.parameters())[0, :2] = next(trainer.model.parameters())[0, :2].flip(0)
    assert trainer.digest() != rest["weights"]


def test_orders_are_permutations(tokens):
    text = Corpus(tokens, 16, "cpu")
    order = text.order(4, 2 * text.windows)
    assert sorted(order[: text.windows]) == sorted(order[text.windows :]) == list(range(text.windows))
    assert not np.array_equal(order, text.order(5, 2 * text.windows))


def test_no_file_is_in_both_parts(tmp_path):
    root = tmp_path / "packages"
    for i in range(120):
        path = root / f"p{i % 7}" / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def f{j}_{i}(x):\n    return x + {j * i}\n" for j in range(40)))
    (root / "copy.py").write_text((root / "p0" / "m0.py").read_text())
    documents = corpus.read_documents(root, workers=1)
    assert len(documents) == 120, "a copy counts once"
    train, valid = corpus.split(documents, 0.2)
    assert not {d.path for d in train} & {d.path for d in valid}
    assert not {d.text for d in train} & {d.text for d in valid}
    assert 8 <= len(valid) <= 45 and len(train) + len(valid) == 120
    meta = corpus.prepare(tmp_path / "out", root, 300, 5000, 0.2, 1.0, workers=1)
    assert np.load(tmp_path / "out" / "train.npy").shape == (5000,)
    assert meta["valid"]["tokens"] == len(np.load(tmp_path / "out" / "valid.npy")) > 0
    assert (
        corpus.prepare(tmp_path / "again", root, 300, 5000, 0.2, 1.0, workers=2)["sha256"] == meta["sha256"]
    )


def test_error_measures():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)) + 3
    same = torch.full_like(x, 0.1)
    found = errors.measure(same, x)
    assert float(found["common"]) == pytest.approx(50, rel=1e-4)
    assert float(found["error"]) == pytest.approx(float(same.norm() / x.norm()))
    shrunk = errors.measure(-0.02 * (x - x.mean(0)), x)
    assert float(shrunk["own_gain"]) == pytest.approx(-0.02) and float(shrunk["common"]) < 1e-6
    draws = list(torch.randn(4, 1000, 8, generator=torch.Generator().manual_seed(2)))
    assert abs(float(errors.bias_share(draws))) < 0.02
    biased = [draw + 1 for draw in draws]
    assert float(errors.bias_share(biased)) == pytest.approx(0.5, abs=0.02)
    assert int(errors.histogram(x).sum()) == x.numel()


def test_error_probe_leaves_the_model_alone_and_names_every_exchange():
    model = GPT(CONFIG)
    model.initialise(1)
    ids, targets = torch.randint(CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    codecs = ["int8:64:single", "int6:64:single:dither"]
    found = errors.probe(model, ids, targets, codecs, 2, errors.default_histograms(CONFIG.layers))
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    sites = {(row["direction"], row["site"]) for row in rows}
    assert sites == {(d, site) for d, sites in errors.site_names(2).items() for site in sites}
    for row in rows:
        gathers = "gather" in row["site"]
        assert row["hop"] == 2 or not gathers
        if row["codec"] == codecs[0]:
            assert row["bias"] == 1 and 1e-4 < row["error"] < 0.02
        elif row["codec"] == codecs[1]:
            assert abs(row["bias"]) < 0.1
    assert any("histograms" in signal for signal in found["signals"])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_error_tables(tmp_path):
    model = GPT(CONFIG)
    model.initialise(1)
    ids, targets = torch.randint(CONFIG.vocabulary, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    found = errors.probe(model, ids, targets, ["int8:64:single"], 2, errors.default_histograms(CONFIG.layers))
    records = [{"id": f"errors/{at}", "kind": "errors", "errors": found} for at in ("late-0", "initial-0")]
    stages = error_tables.stages_of(records)
    assert list(stages) == ["initial-0", "late-0"]
    assert len(stages["late-0"]["codecs"]) == 2 * (1 + 2 + 2), "hop 1; hop 2 and slices also without the mean"
    again = error_tables.stages_of([records[0] | {"errors": stages["late-0"]}])
    assert again["late-0"] == stages["late-0"], "what is kept makes the same tables"
    [row] = error_tables.codec_table(found := stages["late-0"])[2:]
    hop2 = next(r for r in found["codecs"] if r["what"] == "sum, hop 2" and r["direction"] == "forward")
    assert row.split(" | ")[2] == f"{100 * hop2['error']:.2f}"
    assert len(error_tables.signal_table(stages)) == 2 + 2 * 4
    assert [path.name for path in error_tables.plots(stages, tmp_path)] == ["shared.png", "distributions.png"]
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_per_tensor_fp8(partials):
    total = sum_tensor_fp8(partials, torch.float32)
    expected = torch.zeros_like(total)
    for partial in partials.float():
        scale = partial.abs().max() / 448
        expected += (partial / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(total, expected)
    exact = partials.float().sum(0)
    assert 0.01 < float((total - exact).norm() / exact.norm()) < 0.03
