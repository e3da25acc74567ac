"""Whole runs of a tiny model in the shape of DeepSeek-V3: latent attention, experts, a second token."""

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.test_expert_training import dense
from tests.distributed.test_matrix import check_replicas

DEEPSEEK = """--tensor-model-parallel-size 2 --sequence-parallel --bf16 --hidden-size 64 --num-layers 2
    --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --qk-layernorm --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --mtp-num-layers 1
    --num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 32 --moe-router-topk 2
    --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
    --attention-dropout 0 --hidden-dropout 0 --lr 4e-3
    --train-iters 3"""


def train(*flags: str) -> Run:
    """The audit of the first iteration has nothing to say."""
    run = pretrain(*tiny_flags(*DEEPSEEK.split(), *flags))
    assert "that the ledger does not know" not in run.output
    return run


def test_all_is_compressed() -> None:
    """Near the uncompressed losses, in half of the bytes, and replicas agree."""
    plain = train()
    run = train("--tp-compression", "int8", "--compression-min-mb", "0")
    assert run.losses == pytest.approx(plain.losses, rel=0.003) and run.losses != plain.losses
    assert run.losses[3] < run.losses[1] - 0.2
    check_replicas(dense(run))
    for traffic in ("tp.forward", "tp.backward"):
        rows = [row for row in run.ranks[0].ledger if row["traffic"] == traffic]
        assert {row["kind"] for row in rows} == {"compressed"}
        expected = sum(row["plain_bytes"] for row in plain.ranks[0].ledger if row["traffic"] == traffic)
        assert sum(row["plain_bytes"] for row in rows) == expected
        assert sum(row["sent_bytes"] for row in rows) < 0.53 * expected
