#!/usr/bin/env bash
# Pretrains Qwen2.5 from 0.5B to 72B: MODEL_SIZE=0.5B|1.5B|3B|7B|14B|32B|72B.
# The default is 7B on one node of 8 GPUs: tensor parallel 2, pipeline parallel 2, data parallel 2.
#
#   examples/qwen/train_qwen2_5.sh
#   examples/qwen/train_qwen2_5.sh --taco               the same run with compressed tensor parallelism
#   TINY=1 examples/qwen/train_qwen2_5.sh --taco --tp-compression-min-mb 0
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${MODEL_SIZE:=7B}" "${TP:=2}" "${PP:=2}"
case $MODEL_SIZE in # layers, hidden size, heads, MLP size, query groups, tied embeddings, vocabulary
    0.5B) SHAPE=(24 896 14 4864 2 1 151936) ;;
    1.5B) SHAPE=(28 1536 12 8960 2 1 151936) ;;
    3B) SHAPE=(36 2048 16 11008 2 1 151936) ;;
    7B) SHAPE=(28 3584 28 18944 4 0 152064) ;;
    14B) SHAPE=(48 5120 40 13824 8 0 152064) ;;
    32B) SHAPE=(64 5120 40 27648 8 0 152064) ;;
    72B) SHAPE=(80 8192 64 29568 8 0 152064) ;;
    *) refuse MODEL_SIZE "0.5B, 1.5B, 3B, 7B, 14B, 32B or 72B" ;;
esac
: "${NUM_LAYERS:=${SHAPE[0]}}" "${HIDDEN_SIZE:=${SHAPE[1]}}" "${NUM_HEADS:=${SHAPE[2]}}"
: "${FFN_HIDDEN_SIZE:=${SHAPE[3]}}" "${NUM_GROUPS:=${SHAPE[4]}}" "${TIED:=${SHAPE[5]}}"
: "${VOCAB_SIZE:=${SHAPE[6]}}" "${SEQ_LENGTH:=4096}"
case $MODEL_SIZE in # as published for the base models
    14B | 32B | 72B) : "${NORM_EPSILON:=1e-5}" ;;
    *) : "${NORM_EPSILON:=1e-6}" ;;
esac
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${CHECKPOINT_PATH=checkpoints/qwen2_5_${MODEL_SIZE,,}}"
: "${TENSORBOARD_LOGS_PATH=tensorboard/qwen2_5_${MODEL_SIZE,,}}"
: "${SPLIT:=99,1,0}"

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE"
    --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --group-query-attention --num-query-groups "$NUM_GROUPS"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon "$NORM_EPSILON"
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --attention-dropout 0.0 --hidden-dropout 0.0
)
if [ "$TIED" = 0 ]; then
    GPT_MODEL_ARGS+=(--untie-embeddings-and-output-weights)
fi

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
    --transformer-impl "$TRANSFORMER_IMPL" --sequence-parallel
)

shared_args
torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
