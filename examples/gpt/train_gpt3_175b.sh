#!/usr/bin/env bash
# Pretrains GPT-3 175B: 128 nodes of 8 GPUs, tensor parallel 8, pipeline parallel 16.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/gpt/train_gpt3_175b.sh   one call on every node, NODE_RANK set on each
#   ... examples/gpt/train_gpt3_175b.sh --dp-compression gradients-4bit   the same with compressed gradients and weights
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${NNODES:=128}" "${TP:=8}" "${PP:=16}"
: "${NUM_LAYERS:=96}" "${HIDDEN_SIZE:=12288}" "${NUM_HEADS:=96}" "${SEQ_LENGTH:=2048}" "${VOCAB_SIZE:=50257}"
: "${GLOBAL_BATCH_SIZE:=1536}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=430000}"
: "${LR:=6.0e-5}" "${MIN_LR:=6.0e-6}" "${LOG_INTERVAL:=100}" "${SPLIT:=949,50,1}"
RUN=gpt3_175b

[ "$USE_TE" != 1 ] || set -- --sequence-parallel "$@"
train_gpt "${SHARDED_ARGS[@]}" --lr-warmup-fraction .001 --init-method-std 0.006 "$@"
