#!/usr/bin/env bash
# TAH-Quant's fine-tuning (arXiv 2506.01352) by pipeline stages: MODEL=gpt2-xl (48 layers on 8 stages, 8 GPUs)
# or qwen2.5-3b (36 layers on 4 stages, 4 GPUs, as in the paper's own script). Batches of 32 x 1024 tokens in
# micro-batches of one, learning rate 5e-6 without warm-up, ten epochs of WikiText, everything in fp32.
#
#   PRETRAINED=... DATA_PATH=... TOKENIZER_MODEL=... examples/paper/tah_quant.sh
#   MODEL=qwen2.5-3b HF_DIR=Qwen2.5-3B DATA_PATH=... examples/paper/tah_quant.sh
#   MODEL=qwen2.5-3b PP=8 GPUS_PER_NODE=8 ... examples/paper/tah_quant.sh --decoder-first-pipeline-num-layers 3 \
#       --decoder-last-pipeline-num-layers 3            its 36 layers on 8 stages
#
# VARIANT  tah-quant  tiles of 64 in 4 bits, the 20 % of least entropy in 3; gradients in 6 bits, tiles of 32
#          tile       the same, entropy by tile instead of by token (the paper's second version)
#          none       uncompressed; PRECISION=bf16 halves its bytes
#          pipeline-6bit  this project's choice
# PRETRAINED       gpt2-xl: a Megatron checkpoint to begin with, of this shape
# COMPRESSION takes VARIANT's place. examples/common.sh: further variables, MOCK=1 and TINY=1.
#
# Of the original: GPT-2's published weights are replaced by PRETRAINED (the converter knows Qwen and Llama), the
# data by DATA_PATH (724 iterations are ten epochs of WikiText-2 in GPT-2's tokens), its schedule (all forwards,
# then all backwards) by 1F1B, whose messages are the same. Unknown, and ours: constant learning rate, weight
# decay 0.01, Adam's beta2 0.999.
set -euo pipefail
# Stages, not tensor parallelism; the messages are whole tiles.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${PP:=2}" "${LR:=2e-3}" "${MIN_LR:=2e-4}"
: "${PRECISION:=fp32}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${MODEL:=gpt2-xl}" "${VARIANT:=tah-quant}" "${TP:=1}"
case $MODEL in
    gpt2-xl) : "${PP:=8}" "${NUM_LAYERS:=48}" "${HIDDEN_SIZE:=1600}" "${NUM_HEADS:=25}" ;;
    qwen2.5-3b) : "${PP:=4}" "${GPUS_PER_NODE:=4}" ;;
    *) refuse MODEL "gpt2-xl or qwen2.5-3b" ;;
esac
: "${SEQ_LENGTH:=1024}" "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=32}" "${TRAIN_ITERS:=724}"
: "${LR:=5.0e-6}" "${MIN_LR:=5.0e-6}" "${WEIGHT_DECAY:=0.01}" "${ADAM_BETA2:=0.999}"
case $VARIANT in
    tah-quant) : "${COMPRESSION=--pp-compression tah-quant}" ;;
    tile) : "${COMPRESSION=--pp-compression tah-quant:allocation=tile}" ;;
    none) : "${COMPRESSION=}" ;;
    pipeline-6bit) : "${COMPRESSION=--pp-compression pipeline-6bit}" ;;
    *) refuse VARIANT "tah-quant, tile, none or pipeline-6bit" ;;
esac
RUN=tah_quant_${MODEL}_${VARIANT}_$PRECISION
source "$REPO/examples/paper/defaults.sh"

if [ "$MODEL" = gpt2-xl ]; then
    need PRETRAINED "a Megatron checkpoint of this shape to begin with"
    train_gpt ${PRETRAINED:+--pretrained-checkpoint "$PRETRAINED"} "$@"
else
    train_published_qwen --lr-warmup-fraction 0 "$@"
fi
