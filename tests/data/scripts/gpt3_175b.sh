#!/usr/bin/env bash
# GPT-3 175B as Megatron-LM's users launch it: GPT-2's vocabulary files, fp16, tensor and pipeline parallelism.
# Arguments: checkpoints, TensorBoard's folder, vocabulary, merges, data; further words are flags.
export CUDA_DEVICE_MAX_CONNECTIONS=1
WHERE=(--nproc_per_node 8 --nnodes 16 --node_rank "${NODE_RANK:-0}" --master_addr localhost --master_port 6000)
MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-iters 500000 --lr-decay-iters 430000 --lr-warmup-fraction .001
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
)
PARALLEL=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
DATA=(--data-path "$5" --vocab-file "$3" --merge-file "$4" --split 949,50,1)
LOGGING=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save "$1" --load "$1" --tensorboard-dir "$2"
)
torchrun "${WHERE[@]}" pretrain_gpt.py \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${LOGGING[@]}" "${@:6}"
