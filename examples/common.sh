# What the launch scripts share: sourced first, it finds the repository and sets the sizes of TINY=1; then
# `shared_args` makes the argument lists that do not depend on the model.
#
# TINY=1 is a model of 2 layers on 2 processes with mock data: seconds on a laptop, no GPU needed.
# Environment:
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT    where torchrun runs
#   DATA_PATH        prefix of an indexed dataset (scripts/preprocess_data.py); unset: mock data
#   SPLIT            train,valid,test shares of DATA_PATH by document; each non-zero share needs a document
#   TOKENIZER_MODEL  the tokenizer that made it; TOKENIZER_TYPE (default HuggingFaceTokenizer)
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                     where to save; TINY=1 saves only if they are set
#   COMPRESSION      flags of compression
#   USE_TE=1         Transformer Engine's layers, with sequence parallelism
#   PRECISION        bf16, fp16 or fp32, for the scripts of Qwen and of the papers
#   TP PP and every variable set with := in the script or below
# shellcheck shell=bash disable=SC2034

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v torchrun >/dev/null || PATH=$REPO/.venv/bin:$PATH
# One hardware queue keeps the order in which tensor-parallel communication and GEMMs were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1

: "${TINY:=0}" "${USE_TE:=0}" "${PRECISION:=bf16}"
if [ "$TINY" = 1 ]; then
    : "${NNODES:=1}" "${GPUS_PER_NODE:=2}" "${TP:=2}" "${PP:=1}"
    : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${FFN_HIDDEN_SIZE:=192}" "${NUM_HEADS:=4}" "${NUM_GROUPS:=2}"
    : "${SEQ_LENGTH:=64}" "${VOCAB_SIZE:=256}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}" "${LR_DECAY_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
fi
# Torch-native layers: fused attention, no extension needed.
TRANSFORMER_IMPL=local
[ "$USE_TE" != 1 ] || TRANSFORMER_IMPL=transformer_engine

refuse() { # the name of a variable, its choices
    echo "error: $1=${!1} is unknown; use $2" >&2
    exit 2
}

# DISTRIBUTED_ARGS, DATA_ARGS, EVAL_AND_LOGGING_ARGS and COMPRESSION_ARGS from the variables.
shared_args() {
    : "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
    DISTRIBUTED_ARGS=(
        --nproc_per_node "$GPUS_PER_NODE"
        --nnodes "$NNODES"
        --node_rank "$NODE_RANK"
        --master_addr "$MASTER_ADDR"
        --master_port "$MASTER_PORT"
    )

    if [ -n "${DATA_PATH:-}" ]; then
        local prefixes
        read -ra prefixes <<<"$DATA_PATH"
        DATA_ARGS=(
            --data-path "${prefixes[@]}"
            --split "$SPLIT"
            --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
            --tokenizer-model "${TOKENIZER_MODEL:?set it to the tokenizer that made DATA_PATH}"
        )
    else
        DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"})
    fi

    EVAL_AND_LOGGING_ARGS=(
        --log-interval "$LOG_INTERVAL" --log-throughput
        --eval-interval "$EVAL_INTERVAL"
        --eval-iters "$EVAL_ITERS"
    )
    if [ -n "$CHECKPOINT_PATH" ]; then
        EVAL_AND_LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH")
        EVAL_AND_LOGGING_ARGS+=(--save-interval "${SAVE_INTERVAL:-10000}")
    fi
    if [ -n "$TENSORBOARD_LOGS_PATH" ]; then
        EVAL_AND_LOGGING_ARGS+=(--tensorboard-dir "$TENSORBOARD_LOGS_PATH")
    fi

    read -ra COMPRESSION_ARGS <<<"${COMPRESSION:-}"
}
