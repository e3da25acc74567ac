"""Small random models of Hugging Face's own code: same logits; export and import are inverses."""

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
    """Save a random model.

    Its sizes divide nothing by accident, and the vocabulary needs padding at 2 ranks.

    Args:
        family: of ``FAMILIES``.
        folder: to save into.
        dtype: of the parameters.
        vocabulary: number of tokens.
    """
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
            if parameter.dim() == 1:
                # Norms that are not one and biases that are not zero show mistakes.
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6)
    model.save_pretrained(folder)
    return model.eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder's safetensors files."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(folder: Path, expected_folder: Path) -> None:
    """Assert that two folders have the same names, dtypes and bits."""
    actual = tensors_in(folder)
    expected = tensors_in(expected_folder)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def logits(session) -> torch.Tensor:
    """Return the model's logits for TOKENS on every rank, without the vocabulary's padding."""
    model = session.chunks[0].eval()
    with torch.no_grad():
        part = model(TOKENS, torch.arange(TOKENS.shape[1]).expand_as(TOKENS), None).contiguous()
    parts = [torch.empty_like(part) for _ in range(session.groups.tp.size())]
    torch.distributed.all_gather(parts, part, group=session.groups.tp)
    return torch.cat(parts, dim=-1)[..., :101]


def parity_worker(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """Load the imported weights at TP 2 and at TP 2 with SP; at PP 2 save them again.

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
    """Import every family of a folder, or export it from the two stages' checkpoint.

    Args:
        rank: this rank.
        world_size: number of ranks.
        folder: of the families' folders.
        command: import or export.
    """
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
    expected = {}
    for family in FAMILIES:
        model = make_hugging_face_model(family, folder / family, torch.float32)
        with torch.no_grad():
            expected[family] = model(TOKENS).logits
    spawn(convert_worker, 1, str(folder), "import")
    results = spawn(parity_worker, 2, str(folder))
    spawn(convert_worker, 1, str(folder), "export")
    return folder, expected, results


@pytest.mark.parametrize("parallel", ["TP 2", "TP 2 SP"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_hugging_faces(family, parallel, parity) -> None:
    _, logits_by_family, ours = parity
    expected = logits_by_family[family]
    assert expected.std() > 0.5, "logits of no size would agree by accident"
    for results in ours:
        torch.testing.assert_close(results[f"{family} {parallel}"], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_are_bitwise_inverses(family, parity) -> None:
    """Two pipeline stages have saved the checkpoint in between."""
    folder, _, _ = parity
    assert_same_tensors(folder / f"{family}-from-pp2", folder / family)


def run(script: str, *arguments: str, processes: int = 1) -> str:
    """Run a script of the project on CPUs, and return its output."""
    finished = start(script, *arguments, processes=processes).finish(timeout=240)
    assert finished.returncode == 0, finished.output[-6000:]
    return finished.output


class TestCommandLine:
    """Qwen3 in bf16: convert in, train with --taco at TP 2 from there, convert out."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("command-line")

    @pytest.fixture(scope="class")
    def source(self, folder: Path) -> Path:
        """The folder of Hugging Face's model."""
        source = folder / "source"
        make_hugging_face_model("qwen3", source, torch.bfloat16)
        (source / "tokenizer.json").write_text("{}")
        return source

    @pytest.fixture(scope="class")
    def log(self, folder: Path, source: Path) -> str:
        """The log of the training."""
        checkpoint = folder / "checkpoint"
        run("scripts/convert_hf.py", "import", "--hf-dir", str(source), "--save", str(checkpoint))
        flags = f"""--qwen-model {source} --max-position-embeddings 48 --load {checkpoint}
            --save {folder / "new"} --save-interval 3 --mock-data --tokenizer-type NullTokenizer
            --seq-length 40 --split 1,0,0 --num-workers 0 --bf16 --micro-batch-size 2
            --global-batch-size 4 --train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0
            --eval-interval 10 --tensor-model-parallel-size 2 --taco --compression-min-mb 0"""
        return run("pretrain_qwen.py", *flags.split(), processes=2)

    @pytest.fixture(scope="class")
    def trained(self, folder: Path, source: Path, log: str) -> Path:
        """The folder of the model that was exported after the training."""
        trained = folder / "trained"
        flags = f"export --load {folder / 'new'} --hf-dir {trained} --like {source}"
        run("scripts/convert_hf.py", *flags.split())
        return trained

    def test_training_begins_with_the_imported_weights(self, log: str) -> None:
        assert "qwen: --qwen-model adds --num-layers 4 " in log
        assert "loading release distributed checkpoint" in log
        assert "no mask tensor is needed" in log

    def test_every_iteration_has_a_loss(self, log: str) -> None:
        losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
        assert len(losses) == 3

    def test_export_has_the_tokenizer(self, trained: Path) -> None:
        assert (trained / "tokenizer.json").is_file()

    def test_export_has_the_sources_tensors(self, source: Path, trained: Path) -> None:
        before = tensors_in(source)
        after = tensors_in(trained)
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].shape == after[name].shape, name

    def test_three_steps_change_most_weights_a_little(self, source: Path, trained: Path) -> None:
        before = tensors_in(source)
        after = tensors_in(trained)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert len(changed) > len(before) // 2
        for name in before:
            assert (before[name] - after[name]).abs().max() < 0.1, name

    def test_transformers_runs_the_export(self, trained: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(trained)
        assert model.dtype == torch.bfloat16
        assert model.config.max_position_embeddings == 64
        assert model(TOKENS).logits.isfinite().all()
