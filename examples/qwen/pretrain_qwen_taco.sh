#!/usr/bin/env bash
# Pretrains Qwen2.5 or Qwen3, or goes on from Hugging Face weights, with compressed tensor parallelism:
# pretrain_qwen.py knows the models by name. The default is Qwen2.5 7B on one node of 8 GPUs: tensor parallel 4
# with sequence parallelism, data parallel 2, tensor parallelism in int8, which is for GPUs joined by PCIe.
# Over NVLink leave it uncompressed: COMPRESSION=. The TACO paper's codec: COMPRESSION='--taco outliers=off' (examples/paper/taco.sh
# has the paper's runs).
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/qwen/pretrain_qwen_taco.sh
#   QWEN_MODEL=3-32b TP=8 PP=2 NNODES=4 ... examples/qwen/pretrain_qwen_taco.sh
#   GPUS_PER_NODE=4 QWEN_MODEL=2.5-3b ... examples/qwen/pretrain_qwen_taco.sh       a box of 4 GPUs
#   COMPRESSION='--compression taco-paper' TP=2 PP=2 examples/qwen/pretrain_qwen_taco.sh
#                                                               TP 2, PP 2, DP 2, all of them compressed
#   HF_DIR=Qwen2.5-7B examples/qwen/pretrain_qwen_taco.sh       from the weights in that folder, with its tokenizer
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
#   QWEN_MODEL       2.5-0.5b 2.5-1.5b 2.5-3b 2.5-7b 2.5-14b 2.5-32b 2.5-72b 3-0.6b 3-1.7b 3-4b 3-8b 3-14b 3-32b
#   HF_DIR           a Hugging Face folder: model, weights (converted once, on CPUs, into CHECKPOINT_PATH) and
#                    tokenizer come from it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# The messages of so small a model are below the default least size.
[ "$TINY" != 1 ] || : "${COMPRESSION=--tp-compression int8 --compression-min-mb 0}"
: "${QWEN_MODEL:=2.5-7b}" "${TP:=4}" "${SEQ_LENGTH:=4096}" "${COMPRESSION=--tp-compression int8}"
: "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=100000}" "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}"
RUN=qwen$QWEN_MODEL
: "${CHECKPOINT_PATH=checkpoints/$RUN}"

if [ -n "${HF_DIR:-}" ]; then
    : "${TOKENIZER_MODEL:=$HF_DIR}" "${CHECKPOINT_PATH:?set it to where the converted weights go}"
    # Once, on the first node; the others wait for it. Later starts find their own checkpoint and go on from it.
    if [ "${NODE_RANK:-0}" = 0 ] && [ ! -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
        python "$REPO/scripts/convert_hf.py" import --hf-dir "$HF_DIR" --save "$CHECKPOINT_PATH"
    fi
    until [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; do sleep 5; done
fi

train_qwen "${HF_DIR:-$QWEN_MODEL}" "${SHARDED_ARGS[@]}" --sequence-parallel --lr-warmup-fraction .01 "$@"
