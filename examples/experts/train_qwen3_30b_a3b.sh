#!/usr/bin/env bash
# Pretrains Qwen3 30B-A3B (128 experts, 8 for a token).
# One node of 8 GPUs of 141 GB: expert and data parallel 8. Two nodes of 8 GPUs of 80 GB: NNODES=2 PP=2.
# Tokens go uncompressed by default: over NVLink int8 took longer than it saved (docs/choosing.md). Where experts'
# GPUs are joined by PCIe or Ethernet: COMPRESSION='--ep-compression experts-8bit'.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/experts/train_qwen3_30b_a3b.sh
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
#   EP               expert parallelism, inside the data-parallel ranks
set -euo pipefail
# Two ranks that share the experts; a token has to hold whole groups of the codec.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${EP:=2}" "${HIDDEN_SIZE:=128}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TP:=1}" "${EP:=8}" "${SEQ_LENGTH:=4096}"
: "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=1.0e-4}" "${MIN_LR:=1.0e-5}" "${COMPRESSION=}"
RUN=qwen3_30b_a3b

# Of a tiny model; flags of one's own win over those of --qwen-model.
EXPERTS=(--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64)
[ "$TINY" = 1 ] || EXPERTS=()
train_qwen qwen3-30b-a3b "${EXPERTS[@]}" "${SHARDED_ARGS[@]}" "${EXPERT_ARGS[@]}" --sequence-parallel \
    --expert-model-parallel-size "$EP" --moe-router-dtype fp32 --lr-warmup-fraction .01 "$@"
