#!/usr/bin/env bash
# Pretrains Llama 3 8B: one node of 8 GPUs, tensor parallel 4, data parallel 2.
#
#   examples/gpt/train_llama3_8b.sh
#   examples/gpt/train_llama3_8b.sh --taco              the same run with compressed tensor parallelism
#   sbatch examples/gpt/train_llama3_8b.sbatch          on several nodes, under SLURM
#   TINY=1 examples/gpt/train_llama3_8b.sh --taco --tp-compression-min-mb 0
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
#   CP               context parallelism; with --cp-compression (USE_TE=0) keys and values go compressed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TP:=4}" "${PP:=1}" "${CP:=1}"
: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=14336}" "${NUM_HEADS:=32}" "${NUM_GROUPS:=8}"
: "${SEQ_LENGTH:=8192}" "${VOCAB_SIZE:=128256}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=500000}"
: "${LR:=1.5e-4}" "${MIN_LR:=1.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=32}"
: "${CHECKPOINT_PATH=checkpoints/llama3_8b}" "${TENSORBOARD_LOGS_PATH=tensorboard/llama3_8b}"
: "${SPLIT:=99,1,0}"

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE"
    --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --group-query-attention --num-query-groups "$NUM_GROUPS"
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 500000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR" --min-lr "$MIN_LR"
    --lr-decay-style cosine --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .005
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.0134
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
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
