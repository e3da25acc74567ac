#!/usr/bin/env bash
# Pretrains Qwen2.5 from 0.5B to 72B: MODEL_SIZE=0.5B|1.5B|3B|7B|14B|32B|72B.
# The default is 7B on one node of 8 GPUs: tensor parallel 2, pipeline parallel 2, data parallel 2.
#
#   examples/qwen/train_qwen2_5.sh
#   examples/qwen/train_qwen2_5.sh --taco               the same run with compressed tensor parallelism
#   SEQ_LENGTH=512 GLOBAL_BATCH_SIZE=64 examples/qwen/train_qwen2_5.sh --compression-3d --tp-compression-min-mb 0
#                                                       TACO's setting: TP 2, PP 2, DP 2, short sequences
#   TINY=1 examples/qwen/train_qwen2_5.sh --taco --tp-compression-min-mb 0
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
    : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${FFN_HIDDEN_SIZE:=192}" "${NUM_HEADS:=4}" "${NUM_GROUPS:=2}"
    : "${SEQ_LENGTH:=64}" "${VOCAB_SIZE:=256}" "${TIED:=0}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}" "${LR_DECAY_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
fi

: "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
: "${MODEL_SIZE:=7B}" "${TP:=2}" "${PP:=2}" "${USE_TE:=0}"
case $MODEL_SIZE in # layers, hidden size, heads, MLP size, query groups, tied embeddings, vocabulary
    0.5B) SHAPE=(24 896 14 4864 2 1 151936) ;;
    1.5B) SHAPE=(28 1536 12 8960 2 1 151936) ;;
    3B) SHAPE=(36 2048 16 11008 2 1 151936) ;;
    7B) SHAPE=(28 3584 28 18944 4 0 152064) ;;
    14B) SHAPE=(48 5120 40 13824 8 0 152064) ;;
    32B) SHAPE=(64 5120 40 27648 8 0 152064) ;;
    72B) SHAPE=(80 8192 64 29568 8 0 152064) ;;
    *)
        echo "error: MODEL_SIZE=$MODEL_SIZE is unknown; use 0.5B, 1.5B, 3B, 7B, 14B, 32B or 72B" >&2
        exit 2
        ;;
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
: "${TOKENIZER_TYPE:=HuggingFaceTokenizer}" "${SPLIT:=99,1,0}"

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
    --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --group-query-attention
    --num-query-groups "$NUM_GROUPS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon "$NORM_EPSILON"
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
if [ "$TIED" = 0 ]; then
    GPT_MODEL_ARGS+=(--untie-embeddings-and-output-weights)
fi

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.02
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
    MODEL_PARALLEL_ARGS+=(--transformer-impl local --sequence-parallel)
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
