#!/usr/bin/env bash
# Pretrains GPT-3 175B: 128 nodes of 8 GPUs, tensor parallel 8, pipeline parallel 16.
#
#   examples/gpt/train_gpt3_175b.sh                     one call on every node, NODE_RANK set on each
#   examples/gpt/train_gpt3_175b.sh --taco              the same run with compressed tensor parallelism
#   TINY=1 examples/gpt/train_gpt3_175b.sh --taco --tp-compression-min-mb 0
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${NNODES:=128}" "${TP:=8}" "${PP:=16}"
: "${NUM_LAYERS:=96}" "${HIDDEN_SIZE:=12288}" "${NUM_HEADS:=96}" "${SEQ_LENGTH:=2048}" "${VOCAB_SIZE:=50257}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=1536}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=430000}"
: "${LR:=6.0e-5}" "${MIN_LR:=6.0e-6}" "${LOG_INTERVAL:=100}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${CHECKPOINT_PATH=checkpoints/gpt3_175b}" "${TENSORBOARD_LOGS_PATH=tensorboard/gpt3_175b}"
: "${SPLIT:=949,50,1}"

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR" --min-lr "$MIN_LR"
    --lr-decay-style cosine --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .001
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --transformer-impl "$TRANSFORMER_IMPL"
)
if [ "$USE_TE" = 1 ]; then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

shared_args
torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
