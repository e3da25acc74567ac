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
# Environment: examples/common.sh says which variables there are.
#   QWEN_MODEL       2.5-0.5b 2.5-1.5b 2.5-3b 2.5-7b 2.5-14b 2.5-32b 2.5-72b 3-0.6b 3-1.7b 3-4b 3-8b 3-14b 3-32b
#   HF_DIR           a Hugging Face folder: model, weights (converted once, on CPUs, into CHECKPOINT_PATH) and
#                    tokenizer come from it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# The messages of so small a model are below the default least size.
[ "$TINY" != 1 ] || : "${COMPRESSION=--taco --tp-compression-min-mb 0}"
: "${QWEN_MODEL:=2.5-7b}" "${TP:=4}" "${SEQ_LENGTH:=4096}" "${COMPRESSION=--taco}"
: "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=100000}" "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}" "${SPLIT:=99,1,0}"
: "${CHECKPOINT_PATH=checkpoints/qwen${QWEN_MODEL}}" "${TENSORBOARD_LOGS_PATH=tensorboard/qwen${QWEN_MODEL}}"

MODEL_ARGS=(--qwen-model "${HF_DIR:-$QWEN_MODEL}" --seq-length "$SEQ_LENGTH")
if [ "$TINY" = 1 ]; then # flags of one's own win over those of --qwen-model
    MODEL_ARGS+=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
        --num-attention-heads "$NUM_HEADS" --num-query-groups "$NUM_GROUPS" --kv-channels 16
    )
fi
if [ -n "${HF_DIR:-}" ]; then
    : "${TOKENIZER_MODEL:=$HF_DIR}" "${CHECKPOINT_PATH:?set it to where the converted weights go}"
    # Once, on the first node; the others wait for it. Later starts find their own checkpoint and go on from it.
    if [ "${NODE_RANK:-0}" = 0 ] && [ ! -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
        python "$REPO/scripts/convert_hf.py" import --hf-dir "$HF_DIR" --save "$CHECKPOINT_PATH"
    fi
    until [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; do sleep 5; done
fi

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR" --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0
)
[ "$PRECISION" = fp32 ] || TRAINING_ARGS+=("--$PRECISION")

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --transformer-impl "$TRANSFORMER_IMPL" --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)

shared_args
torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_qwen.py" \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${COMPRESSION_ARGS[@]}" \
    "$@"
