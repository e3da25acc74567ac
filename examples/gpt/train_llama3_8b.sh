#!/usr/bin/env bash
# Pretrains Llama 3 8B: one node of 8 GPUs, tensor parallel 4, data parallel 2.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/gpt/train_llama3_8b.sh
#   ... examples/gpt/train_llama3_8b.sh --tp-compression int8      the same with compressed tensor parallelism, over PCIe
#   NNODES=8 TP=8 PP=2 ... examples/gpt/train_llama3_8b.sh         8 nodes of 8 GPUs, data parallel 4
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
#   CP               context parallelism; with --cp-compression (USE_TE=0) keys and values go compressed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TP:=4}" "${CP:=1}"
: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=14336}" "${NUM_HEADS:=32}" "${NUM_GROUPS:=8}"
: "${SEQ_LENGTH:=8192}" "${VOCAB_SIZE:=128256}"
: "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=500000}"
: "${LR:=1.5e-4}" "${MIN_LR:=1.0e-5}" "${EVAL_ITERS:=32}"
RUN=llama3_8b

train_gpt "${LLAMA_ARGS[@]}" "${SHARDED_ARGS[@]}" --sequence-parallel --context-parallel-size "$CP" \
    --ffn-hidden-size "$FFN_HIDDEN_SIZE" --group-query-attention --num-query-groups "$NUM_GROUPS" \
    --rotary-base 500000 --rotary-percent 1.0 --norm-epsilon 1e-5 \
    --lr-warmup-fraction .005 --init-method-std 0.0134 "$@"
