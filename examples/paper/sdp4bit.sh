#!/usr/bin/env bash
# SDP4Bit's runs (arXiv 2410.15526): GPT under sharded data parallelism, MODEL=125m, 350m, 1.3b, 2.7b, 6.7b, 13b
# or 18b. Losses: 80,000 iterations of 256 x 2048 tokens. SPEED=1: its measurement of throughput, one
# micro-batch of one sequence a data-parallel rank, mock data, 200 iterations.
#
#   DATA_PATH=... TOKENIZER_MODEL=... MODEL=125m examples/paper/sdp4bit.sh
#   VARIANT=none ... examples/paper/sdp4bit.sh          fp32 gradients, the baseline of the paper's 4.08x
#   SPEED=1 MODEL=18b NNODES=16 ... examples/paper/sdp4bit.sh
#
# VARIANT  all        4-bit weight changes; gradients in 8 bits inside a node, 4 bits between
#          weights    the weights alone (the paper's qWD)
#          gradients  the gradients alone (TLq-HS)
#          tlq        the gradients alone, without the Hadamard transform (TLq)
#          none       uncompressed: fp32 gradients, bf16 weights
#          bf16       uncompressed with gradients reduced in bf16: half of the baseline's bytes
# COMPRESSION takes VARIANT's place. The published scripts leave Megatron's --overlap-grad-reduce and
# --overlap-param-gather off. examples/common.sh: further variables, MOCK=1 and TINY=1.
#
# Of the original: the deduplicated Pile is replaced by DATA_PATH; learning rates of 2.7b to 18b are those of
# its throughput scripts. Unknown: on how many GPUs the losses were made (global batch and data decide them).
set -euo pipefail
# Shards need data-parallel ranks.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}"
[ "${SPEED:-0}" != 1 ] || MOCK=1
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${MODEL:=125m}" "${VARIANT:=all}" "${SPEED:=0}"
case $MODEL in # layers, hidden size, heads, micro-batch, learning rate, its least, TP of the throughput runs
    125m) SHAPE=(12 768 12 8 6.0e-4 6.0e-5 1) ;;
    350m) SHAPE=(24 1024 16 8 3.0e-4 3.0e-5 1) ;;
    1.3b) SHAPE=(24 2048 16 2 2.0e-4 2.0e-5 1) ;;
    2.7b) SHAPE=(32 2560 32 2 1.6e-4 1.6e-5 1) ;;
    6.7b) SHAPE=(32 4096 32 2 1.2e-4 1.2e-5 4) ;;
    13b) SHAPE=(40 5120 40 1 1.0e-4 1.0e-5 8) ;;
    18b) SHAPE=(40 6144 48 1 1.0e-4 1.0e-5 8) ;;
    *) refuse MODEL "125m, 350m, 1.3b, 2.7b, 6.7b, 13b or 18b" ;;
esac
if [ "$SPEED" = 1 ]; then
    export MEGATRON_COMPRESSION_COMMUNICATORS=1 # as many as the uncompressed run has, also over TCP
    : "${NNODES:=1}" "${GPUS_PER_NODE:=8}" "${TP:=${SHAPE[6]}}" "${TRAIN_ITERS:=200}" "${LOG_INTERVAL:=1}"
    : "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=$((NNODES * GPUS_PER_NODE / TP))}"
    : "${EVAL_ITERS:=0}"
fi
[[ $MODEL != 13b && $MODEL != 18b ]] || : "${TP:=8}" # The losses' sizes end at 6.7b.
: "${NUM_LAYERS:=${SHAPE[0]}}" "${HIDDEN_SIZE:=${SHAPE[1]}}" "${NUM_HEADS:=${SHAPE[2]}}" "${SEQ_LENGTH:=2048}"
: "${MICRO_BATCH_SIZE:=${SHAPE[3]}}" "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=80000}"
: "${LR_DECAY_ITERS:=70000}" "${LR:=${SHAPE[4]}}" "${MIN_LR:=${SHAPE[5]}}"

WEIGHTS=sdp4bit:intra=4,group=2048,hadamard=off
case $VARIANT in
    all) : "${COMPRESSION=--dp-compression sdp4bit}" ;;
    weights) : "${COMPRESSION=--dp-compression none $WEIGHTS}" ;;
    gradients) : "${COMPRESSION=--dp-compression sdp4bit none}" ;;
    tlq) : "${COMPRESSION=--dp-compression sdp4bit:hadamard=off none}" ;;
    none) : "${COMPRESSION=}" ;;
    bf16) : "${COMPRESSION=--grad-reduce-in-bf16}" ;;
    *) refuse VARIANT "all, weights, gradients, tlq, none or bf16" ;;
esac
RUN=sdp4bit_${MODEL}_$VARIANT
source "$REPO/examples/paper/defaults.sh"

train_gpt --use-distributed-optimizer --recompute-activations --lr-warmup-fraction .01 --adam-eps 1e-8 "$@"
