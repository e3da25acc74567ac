#!/usr/bin/env bash
# CAAT-Net's runs (arXiv 2506.19645): Llama of MODEL=130m, 1b or 7b, tensor parallel 8, half of the channels of
# each row-parallel layer synchronised.
#
#   DATA_PATH=... TOKENIZER_MODEL=... MODEL=1b examples/paper/caat_net.sh
#   FRACTION=1 ... examples/paper/caat_net.sh           the ordinary model, the paper's baseline
#   COMPRESSION='--tp-compression int8 --compression-min-mb 0' ... with a codec on what is left, whose messages
#                                                       are small: 1.5 and 4 MiB of 130m and 1b
#
# FRACTION         part of the channels that is synchronised (0.5); a checkpoint is tied to it and to TP
# examples/common.sh: further variables, MOCK=1 and TINY=1; USE_TE=1 is refused.
#
# Of the original: 7b has the shape of Llama 2 7B. Unknown, and ours: the widths of 130m and 1b (heads that 8
# ranks can share), sequence, batch, tokens, learning rates and data (DATA_PATH).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${MODEL:=1b}" "${FRACTION:=0.5}" "${TP:=8}" "${VOCAB_SIZE:=32000}"
case $MODEL in # layers, hidden size, heads, MLP size, sequence, global batch, learning rate, its least
    130m) SHAPE=(12 768 16 2048 2048 256 6.0e-4 6.0e-5) ;;
    1b) SHAPE=(24 2048 32 5504 2048 512 3.0e-4 3.0e-5) ;;
    7b) SHAPE=(32 4096 32 11008 4096 1024 3.0e-4 3.0e-5) ;;
    *) refuse MODEL "130m, 1b or 7b" ;;
esac
: "${NUM_LAYERS:=${SHAPE[0]}}" "${HIDDEN_SIZE:=${SHAPE[1]}}" "${NUM_HEADS:=${SHAPE[2]}}"
: "${FFN_HIDDEN_SIZE:=${SHAPE[3]}}" "${SEQ_LENGTH:=${SHAPE[4]}}" "${GLOBAL_BATCH_SIZE:=${SHAPE[5]}}"
: "${MICRO_BATCH_SIZE:=1}" "${TRAIN_ITERS:=20000}" "${LR:=${SHAPE[6]}}" "${MIN_LR:=${SHAPE[7]}}"
RUN=caat_net_${MODEL}_$FRACTION
source "$REPO/examples/paper/defaults.sh"

train_gpt "${LLAMA_ARGS[@]}" "${SHARDED_ARGS[@]}" --ffn-hidden-size "$FFN_HIDDEN_SIZE" --norm-epsilon 1e-5 \
    --lr-warmup-fraction .01 --caat-net-sync-fraction "$FRACTION" "$@"
