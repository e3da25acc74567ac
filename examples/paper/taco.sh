#!/usr/bin/env bash
# TACO's runs (arXiv 2604.24088), each on one node of 8 GPUs:
#
#   MODEL=gpt-350m     pretraining: 20,000 iterations of 256 x 2048 tokens, learning rate decayed over 70,000
#   MODEL=qwen2.5-7b   100 iterations of 64 x 512 from the Instruct weights: TP 2, PP 2, DP 2
#   MODEL=qwen3-0.6b   200 iterations of 64 x 512: TP 2, PP 2, DP 2, TACO between stages too, no threshold
#
#   DATA_PATH=... TOKENIZER_MODEL=... examples/paper/taco.sh
#   MODEL=qwen2.5-7b HF_DIR=Qwen2.5-7B-Instruct DATA_PATH=... examples/paper/taco.sh
#
# VARIANT  taco       tensor parallelism (qwen3-0.6b: and stages, both ways), FP8 e4m3 in groups of 128; outliers=off,
#                     since the paper stores none separately
#          none       uncompressed (of gpt-350m's 3d: with TP=2 PP=2)
#          3d         the paper's set-up of three dimensions: TACO, SDP4Bit, TAH-Quant
#          e5m2       TACO as its code has it: e5m2 in groups of 256
#          tah-quant  the paper's control: TAH-Quant's codec on tensor parallelism
#          per-tensor another control: FP8 with one scale for a whole tensor, per_tensor_fp8.py
# COMPRESSION takes VARIANT's place. examples/common.sh: further variables, MOCK=1 and TINY=1.
#
# Of the original: the Pile is replaced by DATA_PATH; e5m2 has its own range here, where the code clips at e4m3's
# largest value. Unknown, and ours: GPT-350M's layout (TP 4, DP 2; 3d: TP 2, PP 2,
# DP 2), the Qwen runs' warm-up and decay (cosine over the run; Qwen3 constant), Qwen3's batch (Qwen2.5's) and first weights
# (HF_DIR's), and what besides tensor parallelism the Qwen2.5 run compressed.
set -euo pipefail
: "${MODEL:=gpt-350m}" "${VARIANT:=taco}"
[[ "${TINY:-0} $MODEL $VARIANT" != 1*@(qwen3-0.6b @(taco|none|e5m2)|3d) ]] || : "${PP:=2}" "${GPUS_PER_NODE:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
RUN=taco_${MODEL}_$VARIANT
case $MODEL in
    gpt-350m)
        [ "$VARIANT" != 3d ] || : "${TP:=2}" "${PP:=2}"
        : "${TP:=4}" "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=1024}" "${NUM_HEADS:=16}" "${SEQ_LENGTH:=2048}"
        : "${MICRO_BATCH_SIZE:=8}" "${GLOBAL_BATCH_SIZE:=256}" "${TRAIN_ITERS:=20000}"
        : "${LR_DECAY_ITERS:=70000}" "${LR:=3.0e-4}" "${MIN_LR:=3.0e-5}"
        ;;
    qwen2.5-7b) : "${TRAIN_ITERS:=100}" "${LR:=3.0e-4}" "${MIN_LR:=3.0e-5}" ;;
    qwen3-0.6b) : "${TRAIN_ITERS:=200}" "${LR:=1.0e-5}" "${MIN_LR:=1.0e-5}" ;;
    *) refuse MODEL "gpt-350m, qwen2.5-7b or qwen3-0.6b" ;;
esac
case $MODEL in qwen*)
    : "${TP:=2}" "${PP:=2}" "${SEQ_LENGTH:=512}" "${MICRO_BATCH_SIZE:=8}" "${GLOBAL_BATCH_SIZE:=64}"
    ;;
esac

STAGES='' THRESHOLD=''
[ "$MODEL" != qwen3-0.6b ] || STAGES='--pp-compression CODEC CODEC'
# The messages of a tiny model are below the default least size.
[[ "$TINY $MODEL" != 1* && $MODEL != qwen3-0.6b ]] || THRESHOLD='--compression-min-mb 0'
case $VARIANT in
    none) : "${COMPRESSION=}" ;;
    taco) : "${COMPRESSION=--taco outliers=off ${STAGES//CODEC/taco:outliers=off} $THRESHOLD}" ;;
    3d) : "${COMPRESSION=--compression taco-paper $THRESHOLD}" ;;
    e5m2)
        SPEC=taco:format=fp8-e5m2,group=256,outliers=off
        : "${COMPRESSION=--tp-compression $SPEC ${STAGES//CODEC/$SPEC} $THRESHOLD}"
        ;;
    tah-quant) : "${COMPRESSION=--tp-compression tah-quant $THRESHOLD}" ;;
    per-tensor) : "${COMPRESSION=--tp-compression examples.paper.per_tensor_fp8:PerTensorFp8 $THRESHOLD}" ;;
    *) refuse VARIANT "taco, none, 3d, e5m2, tah-quant or per-tensor" ;;
esac
source "$REPO/examples/paper/defaults.sh"

if [ "$MODEL" = gpt-350m ]; then
    train_gpt "${SHARDED_ARGS[@]}" --recompute-activations \
        --lr-warmup-fraction .01 --init-method-std 0.02 "$@"
else
    train_published_qwen "$@"
fi
