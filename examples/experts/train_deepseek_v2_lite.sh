#!/usr/bin/env bash
# Pretrains DeepSeek-V2-Lite (multi-latent attention, 64 experts, 6 for a token, 2 shared).
# One node of 8 GPUs: expert and data parallel 8.
# Tokens go uncompressed by default: over NVLink int8 took longer than it saved (docs/choosing.md). Where experts'
# GPUs are joined by PCIe or Ethernet: COMPRESSION='--ep-compression experts-8bit'.
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/experts/train_deepseek_v2_lite.sh
#
# examples/common.sh: further variables, MOCK=1 and TINY=1.
#   EP               expert parallelism, inside the data-parallel ranks
set -euo pipefail
# Two ranks that share the experts; a token has to hold whole groups of the codec.
[ "${TINY:-0}" != 1 ] || : "${TP:=1}" "${EP:=2}" "${HIDDEN_SIZE:=128}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

: "${TP:=1}" "${EP:=8}"
: "${NUM_LAYERS:=27}" "${HIDDEN_SIZE:=2048}" "${FFN_HIDDEN_SIZE:=10944}" "${NUM_HEADS:=16}"
: "${SEQ_LENGTH:=4096}" "${VOCAB_SIZE:=102400}"
: "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=100000}" "${LR_DECAY_ITERS:=100000}"
: "${LR:=4.2e-4}" "${MIN_LR:=4.2e-5}" "${COMPRESSION=}"
RUN=deepseek_v2_lite

# Experts, those of each token, width of one, width of the shared ones; widths of the latent and of the heads.
EXPERTS=(64 6 1408 2816) LATENT=(512 128 64 128)
[ "$TINY" != 1 ] || EXPERTS=(8 3 64 128) LATENT=(32 16 8 16)
DENSE_FIRST="[0]*1+[1]*$((NUM_LAYERS - 1))" # of the layers
train_gpt "${LLAMA_ARGS[@]}" "${SHARDED_ARGS[@]}" "${EXPERT_ARGS[@]}" --sequence-parallel \
    --ffn-hidden-size "$FFN_HIDDEN_SIZE" \
    --multi-latent-attention --qk-layernorm --kv-lora-rank "${LATENT[0]}" --qk-head-dim "${LATENT[1]}" \
    --qk-pos-emb-head-dim "${LATENT[2]}" --v-head-dim "${LATENT[3]}" \
    --rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707 \
    --norm-epsilon 1e-6 \
    --expert-model-parallel-size "$EP" \
    --num-experts "${EXPERTS[0]}" --moe-router-topk "${EXPERTS[1]}" --moe-ffn-hidden-size "${EXPERTS[2]}" \
    --moe-shared-expert-intermediate-size "${EXPERTS[3]}" --moe-layer-freq "$DENSE_FIRST" \
    --moe-router-pre-softmax --moe-router-dtype fp32 \
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 \
    --lr-warmup-fraction .01 --init-method-std 0.006 "$@"
