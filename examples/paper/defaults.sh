# What the papers' launch scripts share, sourced after ../common.sh and the script's own sizes.
# shellcheck shell=bash disable=SC2034

: "${TP:=1}" "${PP:=1}"
# A folder of its own for what may not go on from another run's checkpoint: flags given in place of a VARIANT's,
# another layout, Transformer Engine's layers.
[ -z "$GIVEN_COMPRESSION" ] || RUN+=_$(tr -cs 'a-zA-Z0-9.=,\n' _ <<<"${GIVEN_COMPRESSION#--}")
RUN+=_tp${TP}pp$PP
[ "$USE_TE" != 1 ] || RUN+=_te
[ "$MOCK" != 1 ] || RUN+=_mock
: "${VOCAB_SIZE:=50257}" "${LR_DECAY_ITERS:=$TRAIN_ITERS}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=100}" "${EVAL_ITERS:=10}" "${SAVE_INTERVAL:=2000}" "${SPLIT:=949,50,1}"
: "${CHECKPOINT_PATH=checkpoints/$RUN}" "${TENSORBOARD_LOGS_PATH=tensorboard/$RUN}"

train_published_qwen() { # MODEL by name, with these settings; further arguments
    need HF_DIR "the Hugging Face folder of the weights to begin with"
    export QWEN_MODEL=${MODEL#qwen} TP PP SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS LR MIN_LR SPLIT
    export COMPRESSION CHECKPOINT_PATH TENSORBOARD_LOGS_PATH LOG_INTERVAL EVAL_INTERVAL EVAL_ITERS PRECISION
    export SAVE_INTERVAL WEIGHT_DECAY ADAM_BETA2 # the latter two where they are set
    [ -z "${GPUS_PER_NODE:-}" ] || export GPUS_PER_NODE
    unset VOCAB_SIZE # the model's own
    "$REPO/examples/qwen/pretrain_qwen_taco.sh" "$@"
}
