#!/usr/bin/env bash
# Pretrains Mixtral 8x7B.
# Two nodes of 8 GPUs: pipeline parallel 2, and in each stage expert and data parallel 8.
# Tokens go uncompressed by default: over NVLink int8 took longer than it saved (docs/choosing.md). Where experts'
# GPUs are joined by PCIe or Ethernet: COMPRESSION='--ep-compression experts-8bit'.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/experts/train_mixtral_8x7b.sh
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
#   EP               expert parallelism, inside the data-parallel ranks
set -euo pipefail
# Two ranks that share the experts; a token has to hold whole groups of the codec.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${EP:=2}" "${HIDDEN_SIZE:=128}" "${NUM_EXPERTS:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${NNODES:=2}" "${TP:=1}" "${PP:=2}" "${EP:=8}"
: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=14336}" "${NUM_HEADS:=32}" "${NUM_GROUPS:=8}"
: "${SEQ_LENGTH:=4096}" "${VOCAB_SIZE:=32000}" "${NUM_EXPERTS:=8}"
: "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}" "${COMPRESSION=}"
RUN=mixtral_8x7b

train_gpt "${LLAMA_ARGS[@]}" "${SHARDED_ARGS[@]}" "${EXPERT_ARGS[@]}" --sequence-parallel \
    --ffn-hidden-size "$FFN_HIDDEN_SIZE" --group-query-attention --num-query-groups "$NUM_GROUPS" \
    --rotary-base 1000000 --rotary-percent 1.0 --norm-epsilon 1e-5 \
    --expert-model-parallel-size "$EP" --num-experts "$NUM_EXPERTS" --moe-router-topk 2 --moe-router-dtype fp32 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02 \
    --lr-warmup-fraction .01 --init-method-std 0.02 "$@"
