"""Megatron's own loop on CPU tensors: every kind of parallelism, and runs that agree to the last digit."""

import math

import pytest
import torch

from tests.distributed.launch import pretrain

DATA_PARALLEL = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(2, ("--tensor-model-parallel-size", "2", "--bf16"), id="tp2"),
        pytest.param(2, ("--pipeline-model-parallel-size", "2"), id="pp2"),
        pytest.param(2, ("--bf16", *DATA_PARALLEL), id="dp2"),
        pytest.param(
            4,
            ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--bf16"),
            id="tp2-pp2",
        ),
    ],
)
def test_loss_falls(processes, flags):
    # Made-up sequences count upwards: four steps at a high rate are enough to learn from.
    run = pretrain(*flags, processes=processes, train_iters="6", lr="1e-2", eval_iters="1")
    losses = run.losses()
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[1] == pytest.approx(
        math.log(128 * (2 if "--tensor-model-parallel-size" in flags else 1)), abs=0.3
    )
    assert losses[6] < losses[1] - 0.2
    assert "validation loss at iteration 6 on test set" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("parallel", [(), DATA_PARALLEL], ids=["replicated", "distributed-optimizer"])
def test_resume_is_bitwise(tmp_path, parallel):
    # Dropout is on: the resumed run must draw the same masks.
    common = ("--bf16", *parallel)
    whole = pretrain(*common, exact=True)
    save = ("--save", str(tmp_path), "--save-interval", "2")
    pretrain(*common, *save, "--exit-interval", "2")
    resumed = pretrain(*common, "--load", str(tmp_path), exact=True)
    assert list(whole.exact_losses()) == [1, 2, 3, 4]
    assert resumed.exact_losses() == {i: loss for i, loss in whole.exact_losses().items() if i > 2}
    assert resumed.log("grad norm") == {i: norm for i, norm in whole.log("grad norm").items() if i > 2}


def test_tensor_parallel_resume_is_bitwise(tmp_path):
    common = ("--bf16", "--tensor-model-parallel-size", "2")
    whole = pretrain(*common, "--save", str(tmp_path), "--save-interval", "2", exact=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = pretrain(*common, "--load", str(tmp_path), exact=True)
    assert resumed.exact_losses() == {i: loss for i, loss in whole.exact_losses().items() if i > 2}


def test_tensor_parallel_sizes_agree():
    # The weights are the same at any size with --use-cpu-initialization; the vocabulary is padded alike.
    flags = ("--use-cpu-initialization", *NO_DROPOUT)
    one = pretrain(*flags, processes=1, make_vocab_size_divisible_by="256", exact=True).exact_losses()
    two = pretrain(*flags, "--tensor-model-parallel-size", "2", exact=True).exact_losses()
    assert two == pytest.approx(one, rel=2e-6)


def test_tensor_parallel_ranks_draw_the_same_dropout_masks(tmp_path):
    # Replicated parameters stay equal only where both ranks drop the same activations.
    pretrain(
        *("--tensor-model-parallel-size", "2", "--hidden-dropout", "0.5", "--ckpt-format", "torch"),
        *("--save", str(tmp_path), "--save-interval", "4"),
    )
    folder = tmp_path / "iter_0000004"
    first, second = (
        torch.load(folder / f"mp_rank_0{rank}" / "model_optim_rng.pt", weights_only=False)["model"]
        for rank in range(2)
    )
    replicated = [name for name in first if "layernorm" in name and first[name] is not None]
    assert len(replicated) >= 8
    for name in replicated:
        assert torch.equal(first[name], second[name]), name
