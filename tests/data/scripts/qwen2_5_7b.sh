#!/usr/bin/env bash
# Qwen2.5 7B with the flags of Alibaba PAI's scripts that are Megatron-LM's: Transformer Engine, a Hugging Face
# tokenizer, recomputation, saving in the background.
# Arguments: checkpoints, TensorBoard's folder, tokenizer, data; further words are flags.
export CUDA_DEVICE_MAX_CONNECTIONS=1
WHERE=(--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000)
MODEL=(
    --transformer-impl transformer_engine --use-mcore-models --use-flash-attn --attention-backend flash
    --num-layers 28 --hidden-size 3584 --num-attention-heads 28 --ffn-hidden-size 18944
    --group-query-attention --num-query-groups 4 --add-qkv-bias --disable-bias-linear
    --seq-length 4096 --max-position-embeddings 131072 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --use-rotary-position-embeddings --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000
    --rotary-seq-len-interpolation-factor 1 --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.008 --no-masked-softmax-fusion
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 64 --train-iters 12000 --lr-decay-iters 11900 --lr-warmup-iters 100
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --bf16 --recompute-activations --manual-gc --no-gradient-accumulation-fusion
    --no-load-optim --no-load-rng
)
PARALLEL=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer
)
DATA=(
    --data-path "$4" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$3"
    --dataloader-type cyclic --eod-mask-loss --num-workers 8
)
LOGGING=(
    --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10 --save-interval 1000
    --tensorboard-queue-size 1 --tensorboard-dir "$2" --log-timers-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-params-norm --log-num-zeros-in-grad
    --save "$1" --ckpt-format torch_dist --async-save --no-save-optim
)
torchrun "${WHERE[@]}" pretrain_gpt.py \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${LOGGING[@]}" "${@:5}"
