"""scripts/accuracy/pretrained: weights, text, unequal ranks, FP8 controls, runs and their table."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.compression.codecs import parse_codec
from megatron.compression.codecs.contract import check_contract
from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers, pretrained, pretrained_text
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT, ModelConfig, angles, rotate
from scripts.accuracy.settings import setting_of
from scripts.accuracy.smollm2 import half_pairs

SIZES = DenseModel(
    family="llama",
    layers=2,
    hidden=96,
    ffn=192,
    heads=6,
    groups=3,
    head_dim=16,
    vocabulary=66,
    tied=True,
    norm_epsilon=1e-5,
    rotary_base=10_000,
    positions=64,
)
"""Query groups that two ranks cannot share equally."""


# Weights
# ----------------------------------------------------------------------------------------------------


def interleaved_rotation(x: Tensor) -> Tensor:
    """Rotate pairs of neighbours [S, d] by their positions, as llama.cpp does."""
    sequence, width = x.shape
    angle = torch.arange(sequence)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    even = x[:, 0::2]
    odd = x[:, 1::2]
    turned = [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()]
    return torch.stack(turned, dim=-1).flatten(-2)


def test_rows_of_interleaved_pairs_become_halves() -> None:
    """Attention's products are those of the file's order under the file's kind of rotation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=generator)
    q = torch.randn(16, 24, generator=generator)
    k = torch.randn(16, 24, generator=generator)
    expected = interleaved_rotation(x @ q.t()) @ interleaved_rotation(x @ k.t()).t()
    cosine, sine = angles(SIZES, 5)
    halves = []
    for weight in (q, k):
        of_head = (x @ half_pairs(weight, 16).t()).view(1, 5, 1, 16)
        halves.append(rotate(of_head, cosine, sine).view(5, 16))
    assert torch.allclose(halves[0] @ halves[1].t(), expected, atol=1e-4)


def write_gguf(path: Path, state: dict[str, Tensor]) -> None:
    """Write a Llama's Hugging Face weights as llama.cpp does, matrices in Q8_0."""
    import gguf

    def interleaved(weight: Tensor) -> Tensor:
        halves = weight.view(-1, 2, SIZES.head_dim // 2, weight.shape[1])
        return halves.transpose(1, 2).reshape(weight.shape)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES.layers)
    writer.add_context_length(SIZES.positions)
    writer.add_embedding_length(SIZES.hidden)
    writer.add_feed_forward_length(SIZES.ffn)
    writer.add_head_count(SIZES.heads)
    writer.add_head_count_kv(SIZES.groups)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(SIZES.norm_epsilon)
    writer.add_token_list(["<|endoftext|>", *"abcdefghij", "Ġ", "ab"])
    writer.add_token_merges(["a b"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for layer in range(SIZES.layers):
        before = f"model.layers.{layer}."
        after = f"blk.{layer}."
        names[f"{before}input_layernorm"] = f"{after}attn_norm"
        names[f"{before}post_attention_layernorm"] = f"{after}ffn_norm"
        names[f"{before}self_attn.o_proj"] = f"{after}attn_output"
        for name in "qkv":
            names[f"{before}self_attn.{name}_proj"] = f"{after}attn_{name}"
        for name in ("gate", "up", "down"):
            names[f"{before}mlp.{name}_proj"] = f"{after}ffn_{name}"
    for name, gguf_name in names.items():
        weight = state[f"{name}.weight"]
        if gguf_name.endswith(("attn_q", "attn_k")):
            weight = interleaved(weight)
        values = weight.float().numpy()
        if weight.dim() == 1:
            writer.add_tensor(f"{gguf_name}.weight", values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        blocks = gguf.quantize(values, kind)
        writer.add_tensor(f"{gguf_name}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A GGUF file of a random Llama, and Hugging Face's model of its rounded weights."""
    gguf = pytest.importorskip("gguf", reason="of the extra pretrained")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZES.vocabulary,
        hidden_size=SIZES.hidden,
        intermediate_size=SIZES.ffn,
        num_hidden_layers=SIZES.layers,
        num_attention_heads=SIZES.heads,
        num_key_value_heads=SIZES.groups,
        max_position_embeddings=SIZES.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=SIZES.norm_epsilon,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
                continue
            parameter.mul_(6)
            # Interleaving moves whole rows, and a block lies inside a row: rounded as in the file.
            rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
            parameter.copy_(torch.from_numpy(rounded))
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, model.state_dict())
    return path, model


def test_a_gguf_model_has_hugging_faces_losses(written) -> None:
    from scripts.accuracy.smollm2 import GgufModel

    path, reference = written
    file = GgufModel(path)
    assert file.sizes == SIZES or file.sizes.norm_epsilon == pytest.approx(SIZES.norm_epsilon)
    model = tiny_model()
    model.load_state_dict(file.state())
    ids, targets = torch.randint(66, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    layers.attach(Exchange(setting_of("none", 3)))
    with torch.no_grad():
        expected = F.cross_entropy(reference(ids).logits.flatten(0, 1), targets.flatten())
        assert float(model(ids, targets).mean()) == pytest.approx(float(expected), rel=1e-5)


def test_the_tokenizer_of_a_gguf_file_merges(written) -> None:
    from scripts.accuracy.smollm2 import GgufModel

    encoding = GgufModel(written[0]).tokenizer().encode("ab ba")
    assert encoding.tokens == ["ab", "Ġ", "b", "a"]


# Ranks with unequal numbers of heads
# -------------------------------------------------------------------------------------------------


def tiny_model() -> GPT:
    """Return the simulation's model of SIZES in fp32."""
    config = ModelConfig(
        vocabulary=SIZES.vocabulary,
        layers=SIZES.layers,
        hidden=SIZES.hidden,
        heads=SIZES.heads,
        sequence=16,
        dtype=torch.float32,
        qwen=SIZES,
        stages=1,
    )
    model = GPT(config)
    model.initialise(1)
    return model


@pytest.mark.parametrize("name", ["none-tp2", "none-tp3"])
def test_ranks_of_any_number_are_the_plain_model(name: str) -> None:
    """One rank's losses and gradients are those of three equal ranks, and of two unequal ones."""
    ids, targets = torch.randint(66, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    results = []
    for setting in (setting_of("none", 1), setting_of(name)):
        model = tiny_model()
        layers.attach(Exchange(setting))
        losses = model(ids, targets)
        losses.mean().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    for exact, simulated in zip(*results, strict=True):
        assert torch.allclose(simulated, exact, atol=1e-5 * float(exact.abs().max()) + 1e-9)


def test_unequal_ranks_send_sums_of_whole_query_groups() -> None:
    """Of three groups rank 0 has two: its partial sum is encoded, then that of rank 1."""
    codec = parse_codec("int4")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 96, generator=generator)
    weight = torch.randn(64, 96, generator=generator)
    layers.attach(Exchange(setting_of("int4", 2)))
    partials = torch.stack([x[:, :64] @ weight[:, :64].t(), x[:, 64:] @ weight[:, 64:].t()])
    payloads = codec.encode(partials.view(2, -1))[:, None]
    expected = codec.decode_sum(payloads, (8 * 64,), torch.float32).view(8, 64)
    assert torch.allclose(layers.row_linear(x, weight, 3), expected, atol=1e-5)
    # Cut in the middle, rank 0 would have half of the second group.
    assert not torch.allclose(layers.row_linear(x, weight), expected, atol=1e-2)


# FP8 controls
# ---------------------------------------------------------------------------------------------------

ERRORS = {"e4m3": (0.02, 0.035), "e5m2": (0.04, 0.07)}
"""Relative L2 error of normal values, at least and at most: 3 or 2 bits of mantissa."""


@pytest.mark.parametrize("name", pretrained.CONTROLS)
def test_fp8_controls_keep_the_contract(name: str) -> None:
    codec = parse_codec(pretrained.CONTROLS[name])
    check_contract([codec])
    x = torch.randn(2, 16, 96, generator=torch.Generator().manual_seed(0))
    payloads = codec.encode(x)
    assert payloads.shape == (2, codec.payload_bytes((16, 96)))
    decoded = codec.decode(payloads, (16, 96), torch.float32)
    least, most = ERRORS[name.partition("-")[0]]
    assert least < float((decoded - x).norm() / x.norm()) < most


def error_of_ordinary_values(name: str) -> float:
    """Return a control's relative error of 15 tokens beside which one has a value 3,000,000 times as
    large."""
    codec = parse_codec(pretrained.CONTROLS[name])
    x = torch.randn(1, 16, 96, generator=torch.Generator().manual_seed(0))
    x[0, 0, 5] = 3e6
    decoded = codec.decode(codec.encode(x), (16, 96), torch.float32)
    return float((decoded - x)[0, 1:].norm() / x[0, 1:].norm())


def test_a_large_value_spoils_what_shares_its_scale() -> None:
    assert error_of_ordinary_values("e4m3-tensor") > 0.5
    for name in ("e4m3-token", "e4m3-mx", "e4m3-64"):
        assert error_of_ordinary_values(name) < 0.035


def test_mx_scales_are_powers_of_two() -> None:
    """Values of a block whose largest is 1.0 keep their bits where they have three of mantissa."""
    codec = parse_codec(pretrained.CONTROLS["e4m3-mx"])
    x = torch.tensor([1.0, 0.875, -0.5, 0.0625]).repeat(8)[None] * 2.0**-40
    assert torch.equal(codec.decode(codec.encode(x), (32,), torch.float32), x)


def test_bits_of_controls() -> None:
    bits = {name: setting_of(spec, 2).bits for name, spec in pretrained.CONTROLS.items()}
    assert bits["e4m3-tensor"] == pytest.approx(8.0, abs=1e-4)
    assert bits["e5m2-mx"] == 8.25
    assert bits["e4m3-64"] == 8.5


# Text
# --------------------------------------------------------------------------------------------------------


def test_docstrings_of_a_file() -> None:
    source = '"""Module."""\ndef f():\n    """Function."""\nclass C:\n    """Class."""\nx = "no"\n'
    assert sorted(pretrained_text.docstrings(source).split("\n\n")) == [
        "Class.",
        "Function.",
        "Module.",
    ]


def test_a_file_that_is_no_python_has_no_docstrings() -> None:
    assert pretrained_text.docstrings("def f(:") == ""


def test_a_paragraph_counts_once() -> None:
    seen: set[str] = set()
    assert pretrained_text.new_paragraphs("a\n\nb", seen) == "a\n\nb"
    assert pretrained_text.new_paragraphs("c\n\na", seen) == "c"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch) -> Path:
    """A folder in the place of the installed packages: 40 files with docstrings of 500 characters."""
    for number in range(40):
        docstring = f"About {number}. " + "word " * 100
        text = f'"""{docstring}"""\n\nx = {number}\n'
        (tmp_path / f"module{number}.py").write_text(text)
    monkeypatch.setattr(pretrained_text.sysconfig, "get_path", lambda scheme: str(tmp_path))
    return tmp_path


def test_documents_are_of_both_splits_and_repeat(packages: Path) -> None:
    first = list(pretrained_text.documents(1.0))
    assert {split for split, _ in first} == {"train", "valid"}
    assert first == list(pretrained_text.documents(1.0))


def test_a_file_is_documentation_or_a_source(packages: Path) -> None:
    texts = [text for _, text in pretrained_text.documents(1.0)]
    assert len(texts) == 40
    sources = [text for text in texts if "x = " in text]
    assert 0 < len(sources) < len(texts) / 2


def test_half_of_the_text_is_documentation(packages: Path) -> None:
    """Ten files of 500 characters reach the budget of 5,000; sources are too few for theirs."""
    texts = [text for _, text in pretrained_text.documents(0.01)]
    assert sum(1 for text in texts if "x = " not in text) == 10


# Runs and their table
# ------------------------------------------------------------------------------------------


def arguments(folder: Path, *words: str):
    return pretrained.parse(["--work-dir", str(folder), *words])


def test_uncompressed_runs_come_first(tmp_path: Path) -> None:
    args = arguments(tmp_path, "--settings", "int8", "none", "--seeds", "0", "4")
    planned = [(run.kind, run.name, run.seed) for run in pretrained.plan(args)]
    assert planned == [
        ("as-is", "none", 0),
        ("as-is", "int8", 0),
        ("tuned", "none", 0),
        ("tuned", "none", 4),
        ("tuned", "int8", 0),
        ("tuned", "int8", 4),
    ]


def test_further_settings_are_measured_as_they_are_at_the_end(tmp_path: Path) -> None:
    words = ("--kinds", "tuned", "--settings", "int8", "--seeds", "0", "--also-as-is", "int6")
    planned = [(run.kind, run.name) for run in pretrained.plan(arguments(tmp_path, *words))]
    assert planned == [("tuned", "none"), ("tuned", "int8"), ("as-is", "none"), ("as-is", "int6")]


def test_every_default_setting_can_be_simulated() -> None:
    for name in pretrained.SETTINGS:
        assert pretrained.setting_named(name, 2).world_size in (2, 3)


def keep(folder: Path, run: pretrained.Run, losses: list[float], without: list | None = None):
    """Keep a run with these losses of its sequences in a work folder."""
    (folder / "losses").mkdir(exist_ok=True)
    np.save(folder / "losses" / f"{run.id}.npy", np.array(losses, np.float32))
    if without is not None:
        np.save(folder / "losses" / f"{run.id}_without.npy", np.array(without, np.float32))
    record = {"id": run.id, "kind": run.kind, "name": run.name, "ranks": 2, "seed": run.seed}
    with (folder / "results.jsonl").open("a") as stream:
        stream.write(json.dumps(record | {"bits": 8.125, "valid": 2.0}) + "\n")


def test_the_table_pairs_sequences_with_those_of_the_seed(tmp_path: Path) -> None:
    """Changes of +1 and +3 % as it is, of +2 % with the codec and +1 % without after tuning."""
    run = pretrained.Run
    keep(tmp_path, run("as-is", "none", 2, 0), [1.0, 3.0])
    keep(tmp_path, run("as-is", "int8", 2, 0), [1.02, 3.06])
    for seed, base in ((0, [1.0, 3.0]), (1, [2.0, 2.0])):
        keep(tmp_path, run("tuned", "none", 2, seed), base)
        with_codec = [loss + 0.04 for loss in base]
        without = [loss + 0.02 for loss in base]
        keep(tmp_path, run("tuned", "int8", 2, seed), with_codec, without)
    text = pretrained.tables([tmp_path], ["int8"])
    row = "| int8 | 8.12 | +2.000 ± 1.000 | +2.000, +2.000 | +2.000 ± 0.000 |"
    assert f"{row} +1.000, +1.000 | +1.000 ± 0.000 |" in text
    assert "Uncompressed after tuning, seed 1: 2.0000 (+0.000 ± 50.000 % against" in text


def test_a_setting_without_an_uncompressed_run_has_no_row(tmp_path: Path) -> None:
    keep(tmp_path, pretrained.Run("as-is", "int8", 2, 0), [1.0, 2.0])
    assert "| int8 |" not in pretrained.tables([tmp_path], ["int8"])


def test_folders_of_two_devices_make_one_table(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        keep(folder, pretrained.Run("tuned", "none", 2, seed), [2.0, 2.0])
        keep(folder, pretrained.Run("tuned", "int8", 2, seed), [2.02, 2.02], [2.0, 2.0])
    text = pretrained.tables([tmp_path / "0", tmp_path / "1"], ["int8"])
    assert "+1.000, +1.000 | +1.000 ± 0.000 |" in text


class StandIn:
    """Does runs without a model: losses that grow with the seed."""

    def __init__(self, args) -> None:
        self.folder = args.work_dir[0]
        self.done: list[str] = []

    def do(self, run: pretrained.Run) -> dict:
        self.done.append(run.id)
        return {"id": run.id, "valid": 2.0, "seconds": 1.0}


def test_a_later_call_does_what_is_missing(tmp_path: Path, monkeypatch) -> None:
    benches = []

    def bench(args):
        benches.append(StandIn(args))
        return benches[-1]

    monkeypatch.setattr(pretrained, "Bench", bench)
    words = ("--kinds", "tuned", "--settings", "int8", "--seeds")
    pretrained.run_missing(arguments(tmp_path, *words, "0"))
    pretrained.run_missing(arguments(tmp_path, *words, "0", "1"))
    assert benches[0].done == ["tuned_none_tp2_0", "tuned_int8_tp2_0"]
    assert benches[1].done == ["tuned_none_tp2_1", "tuned_int8_tp2_1"]
