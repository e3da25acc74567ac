#!/usr/bin/env bash
# Pretrains Qwen3 30B-A3B (128 experts, 8 for a token), tokens travelling to their experts and back in 8 bits.
# One node of 8 GPUs of 141 GB: expert and data parallel 8.
#
#   examples/experts/train_qwen3_30b_a3b.sh
#   COMPRESSION= examples/experts/train_qwen3_30b_a3b.sh    the same run uncompressed
#   TINY=1 examples/experts/train_qwen3_30b_a3b.sh
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
#   EP               expert parallelism, inside the data-parallel ranks
set -euo pipefail
# Two ranks that share the experts; a token has to hold whole groups of the codec.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${EP:=2}" "${HIDDEN_SIZE:=128}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TP:=1}" "${PP:=1}" "${EP:=8}" "${SEQ_LENGTH:=4096}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${CHECKPOINT_PATH=checkpoints/qwen3_30b_a3b}" "${TENSORBOARD_LOGS_PATH=tensorboard/qwen3_30b_a3b}"
: "${SPLIT:=99,1,0}" "${COMPRESSION=--ep-compression int8}"

GPT_MODEL_ARGS=(--qwen-model qwen3-30b-a3b --seq-length "$SEQ_LENGTH" --moe-router-dtype fp32)
if [ "$TINY" = 1 ]; then # flags of one's own win over those of --qwen-model
    GPT_MODEL_ARGS+=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
        --num-attention-heads "$NUM_HEADS" --num-query-groups "$NUM_GROUPS" --kv-channels 16
        --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64
    )
fi

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR" --min-lr "$MIN_LR"
    --lr-decay-style cosine --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP" --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --transformer-impl "$TRANSFORMER_IMPL" --sequence-parallel
)
[ "$USE_TE" != 1 ] || MODEL_PARALLEL_ARGS+=(--moe-grouped-gemm)

shared_args
torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_qwen.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
