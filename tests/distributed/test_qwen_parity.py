"""Small random models of Hugging Face's own code: same logits, and bitwise there and back."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.compression.huggingface.models import LLAMA3_ROPE
from tests.distributed.launch import start
from tests.distributed.spawn import spawn

TOKENS = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(5))
FAMILIES = ("qwen2", "qwen3", "llama")
FLAGS = ["--seq-length", "40"]


def make_hugging_face_model(
    family: str, folder: Path, dtype: torch.dtype, vocabulary: int = 101
) -> torch.nn.Module:
    """Save a random model; sizes divide nothing by accident, the vocabulary needs padding at 2 ranks."""
    sizes = dict(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
    )
    if family == "qwen2":
        config = transformers.Qwen2Config(**sizes, tie_word_embeddings=False)
    elif family == "llama":
        sizes["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            **LLAMA3_ROPE,
        }
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    else:
        config = transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # norms that are not one and biases that are not zero show mistakes
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6)
    model.save_pretrained(folder)
    return model.eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def assert_same_tensors(folder: Path, wanted: Path) -> None:
    """Same names, dtypes and bits."""
    got, want = tensors_in(folder), tensors_in(wanted)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


def logits(session) -> torch.Tensor:
    """The model's logits for TOKENS, whole on every rank, padding of the vocabulary cut off."""
    model = session.chunks[0].eval()
    with torch.no_grad():
        part = model(TOKENS, torch.arange(TOKENS.shape[1]).expand_as(TOKENS), None).contiguous()
    parts = [torch.empty_like(part) for _ in range(session.groups.tp.size())]
    torch.distributed.all_gather(parts, part, group=session.groups.tp)
    return torch.cat(parts, dim=-1)[..., :101]


def parity_worker(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """Load what was imported at TP 2 and at TP 2 with SP; at PP 2 save it again.

    Returns:
        Logits by "family TP".
    """
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    from megatron.compression.frontends.megatron_lm.model_alone import built_model

    layouts = {
        "TP 2": ["--tensor-model-parallel-size", "2"],
        "TP 2 SP": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        "PP 2": ["--pipeline-model-parallel-size", "2"],
    }
    results = {}
    for family in FAMILIES:
        source = f"{folder}/{family}"
        for layout, words in layouts.items():
            with built_model(source, torch.float32, [*FLAGS, *words]) as session:
                session.args.load = f"{source}-megatron"
                load_checkpoint(session.chunks, None, None)
                if layout == "PP 2":
                    session.args.save = f"{source}-pp2"
                    save_checkpoint(0, session.chunks, None, None, 0, release=True)
                    continue
                results[f"{family} {layout}"] = logits(session)
    return results


def convert_worker(rank: int, world_size: int, folder: str, command: str) -> None:
    """Import every family of a folder, or export it from what two stages saved."""
    import convert_hf

    for family in FAMILIES:
        source = Path(folder, family)
        if command == "import":
            convert_hf.import_model(source, f"{source}-megatron", None)
        else:
            convert_hf.export_model(f"{source}-pp2", source, Path(f"{source}-from-pp2"), None)


@pytest.fixture(scope="module")
def parity(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The folder, Hugging Face's logits by family, and ours by rank."""
    folder = tmp_path_factory.mktemp("qwen")
    wanted = {}
    for family in FAMILIES:
        model = make_hugging_face_model(family, folder / family, torch.float32)
        with torch.no_grad():
            wanted[family] = model(TOKENS).logits
    spawn(convert_worker, 1, str(folder), "import")
    results = spawn(parity_worker, 2, str(folder))
    spawn(convert_worker, 1, str(folder), "export")
    return folder, wanted, results


@pytest.mark.parametrize("parallel", ["TP 2", "TP 2 SP"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_hugging_faces(family, parallel, parity) -> None:
    _, wanted, ours = parity
    assert wanted[family].std() > 0.5, "logits of no size would agree by accident"
    for results in ours:
        torch.testing.assert_close(
            results[f"{family} {parallel}"], wanted[family], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_are_bitwise_inverses(family, parity) -> None:
    """Also when two pipeline stages have saved the checkpoint in between."""
    folder, _, _ = parity
    assert_same_tensors(folder / f"{family}-from-pp2", folder / family)


def run(script: str, *arguments: str, processes: int = 1) -> str:
    """Run a script of the project on CPUs; returns what it printed."""
    done = start(script, *arguments, processes=processes).finish(timeout=240)
    assert done.returncode == 0, done.output[-6000:]
    return done.output


def test_import_train_export_on_the_command_line(tmp_path) -> None:
    """bf16, Qwen3: convert in, train with --taco at TP 2 from there, convert out, run in transformers."""
    source, checkpoint, trained = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "trained"
    make_hugging_face_model("qwen3", source, torch.bfloat16)
    (source / "tokenizer.json").write_text("{}")
    run("scripts/convert_hf.py", "import", "--hf-dir", str(source), "--save", str(checkpoint))
    flags = f"""--qwen-model {source} --max-position-embeddings 48 --load {checkpoint}
        --save {tmp_path / "new"} --save-interval 3 --mock-data --tokenizer-type NullTokenizer --seq-length 40
        --split 1,0,0 --num-workers 0 --bf16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3
        --lr 1e-3 --log-interval 1 --eval-iters 0 --eval-interval 10 --tensor-model-parallel-size 2
        --taco --compression-min-mb 0"""
    log = run("pretrain_qwen.py", *flags.split(), processes=2)
    assert "qwen: --qwen-model adds --num-layers 4 " in log
    assert "loading release distributed checkpoint" in log
    assert "no mask tensor is needed" in log
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
    assert len(losses) == 3
    flags = f"export --load {tmp_path / 'new'} --hf-dir {trained} --like {source}"
    run("scripts/convert_hf.py", *flags.split())
    assert (trained / "tokenizer.json").is_file()
    before, after = tensors_in(source), tensors_in(trained)
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) // 2, "it must really have trained"
    for name in before:
        assert (before[name] - after[name]).abs().max() < 0.1, "three steps change weights a little"
    model = transformers.AutoModelForCausalLM.from_pretrained(trained)
    assert model.dtype == torch.bfloat16 and model.config.max_position_embeddings == 64
    assert model(TOKENS).logits.isfinite().all()
