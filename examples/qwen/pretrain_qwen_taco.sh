#!/usr/bin/env bash
# Pretrains Qwen2.5 or Qwen3, or goes on from Hugging Face weights, with compressed tensor parallelism:
# pretrain_qwen.py knows the models by name. The default is Qwen2.5 7B on one node of 8 GPUs: tensor parallel 4
# with sequence parallelism, data parallel 2.
#
#   examples/qwen/pretrain_qwen_taco.sh
#   QWEN_MODEL=3-32b TP=8 NNODES=4 ... examples/qwen/pretrain_qwen_taco.sh --pipeline-model-parallel-size 2
#   COMPRESSION= examples/qwen/pretrain_qwen_taco.sh            the same run uncompressed
#   COMPRESSION=--compression-3d TP=2 examples/qwen/pretrain_qwen_taco.sh --pipeline-model-parallel-size 2
#                                                               TP 2, PP 2, DP 2, all of them compressed
#   HF_DIR=Qwen2.5-7B examples/qwen/pretrain_qwen_taco.sh       from the weights in that folder, with its tokenizer
#   TINY=1 examples/qwen/pretrain_qwen_taco.sh                  2 small layers on 2 processes with mock data:
#                                                               seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment:
#   QWEN_MODEL       2.5-0.5b 2.5-1.5b 2.5-3b 2.5-7b 2.5-14b 2.5-32b 2.5-72b 3-0.6b 3-1.7b 3-4b 3-8b 3-14b 3-32b
#   HF_DIR           a Hugging Face folder: model, weights (converted once, on CPUs, into CHECKPOINT_PATH) and
#                    tokenizer come from it
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT    where torchrun runs
#   DATA_PATH        prefix of an indexed dataset (scripts/preprocess_data.py); unset: mock data
#   SPLIT            train,valid,test shares of DATA_PATH by document
#   TOKENIZER_MODEL  the Hugging Face tokenizer that made it (a folder); default HF_DIR
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                     where to save; TINY=1 saves only if they are set
#   TP and every variable set with := below
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
command -v torchrun >/dev/null || PATH=$REPO/.venv/bin:$PATH
# One hardware queue keeps the order in which tensor-parallel communication and GEMMs were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1

TINY_ARGS=()
if [ "${TINY:-0}" = 1 ]; then
    : "${NNODES:=1}" "${GPUS_PER_NODE:=2}" "${TP:=2}" "${SEQ_LENGTH:=64}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
    : "${COMPRESSION=--taco --tp-compression-min-mb 0}" # the messages of so small a model are below the default
    # Flags of one's own win over those of --qwen-model.
    TINY_ARGS=(
        --num-layers 2
        --hidden-size 64
        --ffn-hidden-size 192
        --num-attention-heads 4
        --num-query-groups 2
        --kv-channels 16
        --vocab-size 256
    )
fi

: "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
: "${QWEN_MODEL:=2.5-7b}" "${TP:=4}" "${SEQ_LENGTH:=4096}" "${COMPRESSION=--taco}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=100000}" "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}" "${SPLIT:=99,1,0}"
: "${CHECKPOINT_PATH=checkpoints/qwen${QWEN_MODEL}}" "${TENSORBOARD_LOGS_PATH=tensorboard/qwen${QWEN_MODEL}}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

MODEL_ARGS=(--qwen-model "${HF_DIR:-$QWEN_MODEL}" --seq-length "$SEQ_LENGTH")
if [ -n "${HF_DIR:-}" ]; then
    : "${TOKENIZER_MODEL:=$HF_DIR}" "${CHECKPOINT_PATH:?set it to where the converted weights go}"
    # Once, on the first node; the others wait for it. Later starts find their own checkpoint and go on from it.
    if [ "$NODE_RANK" = 0 ] && [ ! -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
        python "$REPO/scripts/convert_hf.py" import --hf-dir "$HF_DIR" --save "$CHECKPOINT_PATH"
    fi
    until [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; do sleep 5; done
fi

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

read -ra COMPRESSION_ARGS <<<"$COMPRESSION"

if [ -n "${DATA_PATH:-}" ]; then
    read -ra DATA_PREFIXES <<<"$DATA_PATH"
    DATA_ARGS=(
        --data-path "${DATA_PREFIXES[@]}"
        --split "$SPLIT"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?set it to the tokenizer that made DATA_PATH}"
    )
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer)
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

torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_qwen.py" \
    "${MODEL_ARGS[@]}" \
    "${TINY_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
