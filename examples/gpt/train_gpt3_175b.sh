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
# Environment:
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT    where torchrun runs
#   DATA_PATH        prefix of an indexed dataset (scripts/preprocess_data.py); unset: mock data
#   SPLIT            train,valid,test shares of DATA_PATH by document; each non-zero share needs a document
#   TOKENIZER_MODEL  the tokenizer that made it; TOKENIZER_TYPE (default HuggingFaceTokenizer)
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                     where to save; TINY=1 saves only if they are set
#   USE_TE=1         Transformer Engine's layers, with sequence parallelism (--taco needs USE_TE=0)
#   TP PP and every variable set with := below
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
command -v torchrun >/dev/null || PATH=$REPO/.venv/bin:$PATH
# One hardware queue keeps the order in which tensor-parallel communication and GEMMs were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [ "${TINY:-0}" = 1 ]; then
    : "${NNODES:=1}" "${GPUS_PER_NODE:=2}" "${TP:=2}" "${PP:=1}"
    : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${NUM_HEADS:=4}" "${SEQ_LENGTH:=64}" "${VOCAB_SIZE:=256}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}" "${LR_DECAY_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
fi

: "${NNODES:=128}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
: "${TP:=8}" "${PP:=16}" "${USE_TE:=0}"
: "${NUM_LAYERS:=96}" "${HIDDEN_SIZE:=12288}" "${NUM_HEADS:=96}" "${SEQ_LENGTH:=2048}" "${VOCAB_SIZE:=50257}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=1536}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=430000}"
: "${LR:=6.0e-5}" "${MIN_LR:=6.0e-6}" "${LOG_INTERVAL:=100}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
: "${CHECKPOINT_PATH=checkpoints/gpt3_175b}" "${TENSORBOARD_LOGS_PATH=tensorboard/gpt3_175b}"
: "${TOKENIZER_TYPE:=HuggingFaceTokenizer}" "${SPLIT:=949,50,1}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .001
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [ "$USE_TE" = 1 ]; then
    MODEL_PARALLEL_ARGS+=(--transformer-impl transformer_engine --sequence-parallel)
else
    # Torch-native layers: fused attention, no extension needed.
    MODEL_PARALLEL_ARGS+=(--transformer-impl local)
fi

if [ -n "${DATA_PATH:-}" ]; then
    read -ra DATA_PREFIXES <<<"$DATA_PATH"
    DATA_ARGS=(
        --data-path "${DATA_PREFIXES[@]}"
        --split "$SPLIT"
        --tokenizer-type "$TOKENIZER_TYPE"
        --tokenizer-model "${TOKENIZER_MODEL:?set it to the tokenizer that made DATA_PATH}"
    )
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval "$LOG_INTERVAL"
    --log-throughput
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters "$EVAL_ITERS"
)
if [ -n "$CHECKPOINT_PATH" ]; then
    EVAL_AND_LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10000)
fi
if [ -n "$TENSORBOARD_LOGS_PATH" ]; then
    EVAL_AND_LOGGING_ARGS+=(--tensorboard-dir "$TENSORBOARD_LOGS_PATH")
fi

# Compression of communication, off by default: --taco here, or on this script's command line.
COMPRESSION_ARGS=()

torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
