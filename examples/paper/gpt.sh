# What the papers' launch scripts share: sourced behind ../common.sh and the script's own sizes, `train_gpt`
# starts pretrain_gpt.py with them and with its arguments.
# shellcheck shell=bash

: "${TP:=1}" "${PP:=1}" "${VOCAB_SIZE:=50257}" "${LR_DECAY_ITERS:=$TRAIN_ITERS}"
: "${WEIGHT_DECAY:=0.1}" "${ADAM_BETA2:=0.95}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=100}" "${EVAL_ITERS:=10}" "${SAVE_INTERVAL:=2000}" "${SPLIT:=949,50,1}"
: "${CHECKPOINT_PATH=checkpoints/$RUN}" "${TENSORBOARD_LOGS_PATH=tensorboard/$RUN}"

train_gpt() {
    local words=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
        --train-iters "$TRAIN_ITERS"
        --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --lr-decay-iters "$LR_DECAY_ITERS"
        --weight-decay "$WEIGHT_DECAY" --adam-beta1 0.9 --adam-beta2 "$ADAM_BETA2" --clip-grad 1.0
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --transformer-impl "$TRANSFORMER_IMPL"
    )
    [ "$PRECISION" = fp32 ] || words+=("--$PRECISION")
    shared_args
    torchrun "${DISTRIBUTED_ARGS[@]}" "$REPO/pretrain_gpt.py" "${words[@]}" "${DATA_ARGS[@]}" \
        "${EVAL_AND_LOGGING_ARGS[@]}" "${COMPRESSION_ARGS[@]}" "$@"
}
