#!/usr/bin/env bash
# Pretrains Mixtral 8x7B, tokens travelling to their experts and back in 8 bits.
# Two nodes of 8 GPUs: pipeline parallel 2, and in each stage expert and data parallel 8.
#
#   examples/experts/train_mixtral_8x7b.sh
#   COMPRESSION= examples/experts/train_mixtral_8x7b.sh    the same run uncompressed
#   TINY=1 examples/experts/train_mixtral_8x7b.sh
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
#   EP               expert parallelism, inside the data-parallel ranks
set -euo pipefail
# Two ranks that share the experts; a token has to hold whole groups of the codec.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${EP:=2}" "${HIDDEN_SIZE:=128}" "${NUM_EXPERTS:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${NNODES:=2}" "${TP:=1}" "${PP:=2}" "${EP:=8}"
: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=14336}" "${NUM_HEADS:=32}" "${NUM_GROUPS:=8}"
: "${SEQ_LENGTH:=4096}" "${VOCAB_SIZE:=32000}" "${NUM_EXPERTS:=8}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${CHECKPOINT_PATH=checkpoints/mixtral_8x7b}" "${TENSORBOARD_LOGS_PATH=tensorboard/mixtral_8x7b}"
: "${SPLIT:=99,1,0}" "${COMPRESSION=--ep-compression int8}"

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE"
    --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --group-query-attention --num-query-groups "$NUM_GROUPS"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --num-experts "$NUM_EXPERTS" --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02 --moe-router-dtype fp32
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
    --expert-model-parallel-size "$EP" --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --transformer-impl "$TRANSFORMER_IMPL" --sequence-parallel
)
[ "$USE_TE" != 1 ] || MODEL_PARALLEL_ARGS+=(--moe-grouped-gemm)

shared_args
torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
