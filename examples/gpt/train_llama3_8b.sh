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
# Environment:
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT    where torchrun runs
#   DATA_PATH        prefix of an indexed dataset (scripts/preprocess_data.py); unset: mock data
#   SPLIT            train,valid,test shares of DATA_PATH by document; each non-zero share needs a document
#   TOKENIZER_MODEL  the tokenizer that made it; TOKENIZER_TYPE (default HuggingFaceTokenizer)
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                     where to save; TINY=1 saves only if they are set
#   USE_TE=1         Transformer Engine's layers, with sequence parallelism (--taco needs USE_TE=0)
#   CP               context parallelism, USE_TE=1 only
#   TP PP and every variable set with := below
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
command -v torchrun >/dev/null || PATH=$REPO/.venv/bin:$PATH
# One hardware queue keeps the order in which tensor-parallel communication and GEMMs were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [ "${TINY:-0}" = 1 ]; then
    : "${NNODES:=1}" "${GPUS_PER_NODE:=2}" "${TP:=2}" "${PP:=1}"
    : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${FFN_HIDDEN_SIZE:=192}" "${NUM_HEADS:=4}" "${NUM_GROUPS:=2}"
    : "${SEQ_LENGTH:=64}" "${VOCAB_SIZE:=256}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}" "${LR_DECAY_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
fi

: "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
: "${TP:=4}" "${PP:=1}" "${CP:=1}" "${USE_TE:=0}"
: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=14336}" "${NUM_HEADS:=32}" "${NUM_GROUPS:=8}"
: "${SEQ_LENGTH:=8192}" "${VOCAB_SIZE:=128256}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=500000}"
: "${LR:=1.5e-4}" "${MIN_LR:=1.0e-5}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=32}"
: "${CHECKPOINT_PATH=checkpoints/llama3_8b}" "${TENSORBOARD_LOGS_PATH=tensorboard/llama3_8b}"
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
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-decay-iters "$LR_DECAY_ITERS"
    --lr-warmup-fraction .005
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.0134
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
    MODEL_PARALLEL_ARGS+=(
        --transformer-impl transformer_engine
        --sequence-parallel
        --context-parallel-size "$CP"
    )
elif [ "$CP" != 1 ]; then
    echo "error: CP=$CP needs USE_TE=1: local attention has no context parallelism" >&2
    exit 2
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
