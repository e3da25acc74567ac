#!/usr/bin/env bash
# TAGC's run (arXiv 2504.05638): GPT-2 of 124 M parameters, batches of 240 x 512 tokens in micro-batches of 6, on
# two nodes of one GPU each over a slow link.
#
#   DATA_PATH=... TOKENIZER_MODEL=... NODE_RANK=0 MASTER_ADDR=... examples/paper/tagc.sh    and NODE_RANK=1
#   NNODES=1 GPUS_PER_NODE=2 ... examples/paper/tagc.sh both on one host
#
# VARIANT  tagc       80 % of the gradients of MLPs and embeddings left out, the rest in a count sketch
#          all        those of attention as well
#          packed     this project's wire (a bitmap and the values) and its warm-up, a fifth of the run
#          none       uncompressed
# COMPRESSION takes VARIANT's place. examples/common.sh: further variables, MOCK=1 and TINY=1.
#
# Of the original: OpenWebText is replaced by DATA_PATH, torch's FSDP by Megatron's distributed optimizer, which
# shards gradients and optimizer but not weights. Biases stay. Its learning rate is nanoGPT's: 6e-4 to 6e-5 over
# 600,000 iterations, 2000 of warm-up. Unknown, and ours: how many of those it ran (20,000).
set -euo pipefail
# Shards need data-parallel ranks.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${LR_WARMUP_ITERS:=2}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${VARIANT:=tagc}" "${NNODES:=2}" "${GPUS_PER_NODE:=1}"
: "${NUM_LAYERS:=12}" "${HIDDEN_SIZE:=768}" "${NUM_HEADS:=12}" "${SEQ_LENGTH:=512}" "${MICRO_BATCH_SIZE:=6}"
: "${GLOBAL_BATCH_SIZE:=240}" "${TRAIN_ITERS:=20000}" "${LR_DECAY_ITERS:=600000}" "${LR_WARMUP_ITERS:=2000}"
: "${LR:=6.0e-4}" "${MIN_LR:=6.0e-5}"
export MEGATRON_COMPRESSION_COMMUNICATORS=1 # as many as the uncompressed run has, also over TCP
case $VARIANT in
    tagc) : "${COMPRESSION=--dp-compression tagc:wire=sketch --compression-start-iteration 0}" ;;
    all) : "${COMPRESSION=--dp-compression tagc:wire=sketch,layers=all --compression-start-iteration 0}" ;;
    packed) : "${COMPRESSION=--dp-compression tagc}" ;;
    none) : "${COMPRESSION=}" ;;
    *) refuse VARIANT "tagc, all, packed or none" ;;
esac
RUN=tagc_gpt2_$VARIANT
source "$REPO/examples/paper/defaults.sh"

train_gpt "${SHARDED_ARGS[@]}" \
    --attention-dropout 0 --hidden-dropout 0 --lr-warmup-iters "$LR_WARMUP_ITERS" "$@"
