# What the papers' launch scripts share, sourced behind ../common.sh and the script's own sizes.
# shellcheck shell=bash disable=SC2034

# A run of its own for flags given in place of a VARIANT's: it must not go on from that one's checkpoint.
[ -z "$GIVEN_COMPRESSION" ] || RUN+=_$(tr -cs 'a-zA-Z0-9.=,\n' _ <<<"${GIVEN_COMPRESSION#--}")
: "${TP:=1}" "${PP:=1}" "${VOCAB_SIZE:=50257}" "${LR_DECAY_ITERS:=$TRAIN_ITERS}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=100}" "${EVAL_ITERS:=10}" "${SAVE_INTERVAL:=2000}" "${SPLIT:=949,50,1}"
: "${CHECKPOINT_PATH=checkpoints/$RUN}" "${TENSORBOARD_LOGS_PATH=tensorboard/$RUN}"

train_published_qwen() { # MODEL by name, with these settings; further arguments
    export QWEN_MODEL=${MODEL#qwen} TP PP SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS LR MIN_LR SPLIT
    export COMPRESSION CHECKPOINT_PATH TENSORBOARD_LOGS_PATH LOG_INTERVAL EVAL_INTERVAL EVAL_ITERS PRECISION
    export SAVE_INTERVAL WEIGHT_DECAY ADAM_BETA2 # the latter two where they are set
    [ -z "${GPUS_PER_NODE:-}" ] || export GPUS_PER_NODE
    unset VOCAB_SIZE # the model's own
    "$REPO/examples/qwen/pretrain_qwen_taco.sh" "$@"
}
