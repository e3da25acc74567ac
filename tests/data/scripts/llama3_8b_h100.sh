#!/usr/bin/env bash
# Llama 3 8B on one node of H100 as Megatron-LM's users launch it, in fp8 or bf16 (DTYPE), on mock data by samples.
# Arguments: checkpoints, TensorBoard's folder; further words are flags.
export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_FWD_LAYERNORM_SM_MARGIN=16 NVTE_BWD_LAYERNORM_SM_MARGIN=16
WHERE=(--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000)
MODEL=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134
    --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
if [ "${DTYPE:-fp8}" = fp8 ]; then
    TRAINING+=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather)
fi
PARALLEL=(
    --tensor-model-parallel-size 1 --context-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
DATA=(
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split 99,1,0
    --data-cache-path "$1/cache" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
)
LOGGING=(
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60
    --save "$1" --load "$1" --tensorboard-dir "$2"
)
torchrun "${WHERE[@]}" pretrain_gpt.py \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${LOGGING[@]}" "${@:3}"
