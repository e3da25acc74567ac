#!/usr/bin/env bash
# Pretrains GPT-350M with TACO: the run of its paper (arXiv 2604.24088) on one node of 8 GPUs.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/gpt/train_gpt_350m_taco.sh
#   COMPRESSION= examples/gpt/train_gpt_350m_taco.sh    the uncompressed baseline of the same run
#   COMPRESSION='--tp-compression int6' ...         another codec
#   TINY=1 examples/gpt/train_gpt_350m_taco.sh          a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# The messages of so small a model are below the default least size.
[ "$TINY" != 1 ] || : "${COMPRESSION=--taco --tp-compression-min-mb 0}"
: "${TP:=4}" "${PP:=1}"
: "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=1024}" "${NUM_HEADS:=16}" "${SEQ_LENGTH:=2048}" "${VOCAB_SIZE:=50257}"
: "${MICRO_BATCH_SIZE:=8}" "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=20000}" "${LR_DECAY_ITERS:=20000}"
: "${LR:=3.0e-4}" "${MIN_LR:=3.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${COMPRESSION=--taco}" "${SAVE_INTERVAL:=2000}"
: "${CHECKPOINT_PATH=checkpoints/gpt_350m}" "${TENSORBOARD_LOGS_PATH=tensorboard/gpt_350m}"
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
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.02
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
