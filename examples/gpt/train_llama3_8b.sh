#!/usr/bin/env bash
# Pretrains Llama 3 8B: one node of 8 GPUs, tensor parallel 4, data parallel 2.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/gpt/train_llama3_8b.sh
#   ... examples/gpt/train_llama3_8b.sh --taco          the same run with compressed tensor parallelism
#   DATA_PATH=... TOKENIZER_MODEL=... sbatch --nodes 4 examples/slurm.sbatch gpt/train_llama3_8b.sh
#                                                       on several nodes, under SLURM
#   TINY=1 examples/gpt/train_llama3_8b.sh --taco --compression-min-mb 0
#                                                       a model of 2 layers on 2 processes with mock data:
#                                                       seconds on a laptop, no GPU needed
#
# Whatever follows the script's name is appended to the command line and wins over what is written here.
# Environment: examples/common.sh says which variables there are.
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
