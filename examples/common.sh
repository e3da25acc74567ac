# What the launch scripts share: sourced first, it finds the repository and sets the sizes of TINY=1; then
# `train_gpt` or `train_qwen` starts the run, with what the variables say and with its arguments.
#
# Whatever follows a script's name is appended to the command line and wins over what is written there.
# A run asks for its data. MOCK=1 is its full size with mock data and random weights, and saves no checkpoints;
# TINY=1 a model of 2 layers on 2 processes with mock data: seconds on a laptop, no GPU needed (give --compression-min-mb 0
# too, for its messages are small). examples/slurm.sbatch starts a script under SLURM.
# Environment:
#   NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT    where torchrun runs
#   DATA_PATH        prefix of an indexed dataset (scripts/preprocess_data.py)
#   SPLIT            train,valid,test shares of DATA_PATH by document; each non-zero share needs a document
#   TOKENIZER_MODEL  the tokenizer that made it; TOKENIZER_TYPE (default HuggingFaceTokenizer)
#   CHECKPOINT_PATH TENSORBOARD_LOGS_PATH                     where to save; TINY=1 saves only if they are set
#   COMPRESSION      flags of compression in place of the script's own; empty: uncompressed
#   USE_TE=1         Transformer Engine's layers, with sequence parallelism
#   GRAPHS=1         the iteration as one CUDA graph, where the host launches too slowly (with USE_TE=1 not run)
#   PRECISION        bf16, fp16 or fp32
#   TP PP and every variable set with := in the script or below
# shellcheck shell=bash disable=SC2034

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v torchrun >/dev/null || PATH=$REPO/.venv/bin:$PATH
# One hardware queue keeps the order in which tensor-parallel communication and GEMMs were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# The user's own; scripts set COMPRESSION below where it is not given.
GIVEN_COMPRESSION=${COMPRESSION+${COMPRESSION:-none}}
: "${TINY:=0}" "${MOCK:=0}" "${USE_TE:=0}" "${GRAPHS:=0}" "${PRECISION:=bf16}"
if [ "$MOCK" = 1 ]; then
    export MOCK
    unset DATA_PATH HF_DIR PRETRAINED
    CHECKPOINT_PATH=
fi
if [ "$TINY" = 1 ]; then
    : "${NNODES:=1}" "${GPUS_PER_NODE:=2}" "${TP:=2}" "${PP:=1}"
    : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${FFN_HIDDEN_SIZE:=192}" "${NUM_HEADS:=4}" "${NUM_GROUPS:=2}"
    : "${SEQ_LENGTH:=64}" "${VOCAB_SIZE:=256}"
    : "${MICRO_BATCH_SIZE:=2}" "${GLOBAL_BATCH_SIZE:=4}" "${TRAIN_ITERS:=20}" "${LR_DECAY_ITERS:=20}"
    : "${LR:=2e-3}" "${MIN_LR:=2e-4}" "${LOG_INTERVAL:=1}" "${EVAL_INTERVAL:=20}" "${EVAL_ITERS:=1}"
    : "${CHECKPOINT_PATH:=}" "${TENSORBOARD_LOGS_PATH:=}" "${SPLIT:=90,10,0}"
fi
# Torch-native layers: fused attention, no extension needed.
TRANSFORMER_IMPL=local
[ "$USE_TE" != 1 ] || TRANSFORMER_IMPL=transformer_engine

refuse() { # the name of a variable, its choices
    echo "error: $1=${!1} is unknown; use $2" >&2
    exit 2
}

need() { # a variable, what it is; MOCK=1 and TINY=1 do without
    [[ -z "${!1:-}" && $MOCK != 1 && $TINY != 1 ]] || return 0
    echo "error: $1 is not set: give $2, or MOCK=1 to try the full size on mock data and random weights," \
        "TINY=1 a tiny one on a laptop" >&2
    exit 2
}
need DATA_PATH "the prefix of an indexed dataset (scripts/preprocess_data.py), and TOKENIZER_MODEL"
[ -z "${DATA_PATH:-}" ] || MOCK=0 TINY=0 need TOKENIZER_MODEL "the tokenizer that made DATA_PATH"
[[ $PRECISION =~ ^(bf16|fp16|fp32)$ ]] || refuse PRECISION "bf16, fp16 or fp32"

# Layers as Llama's.
LLAMA_ARGS=(
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
)
EXPERT_ARGS=(--moe-token-dispatcher-type alltoall)
[ "$USE_TE" != 1 ] || EXPERT_ARGS+=(--moe-grouped-gemm)
SHARDED_ARGS=(--use-distributed-optimizer --overlap-grad-reduce)
# Compressed weights cannot be gathered in a graph.
[ "$GRAPHS" = 1 ] || SHARDED_ARGS+=(--overlap-param-gather)

train_gpt() { # arguments of pretrain_gpt.py
    train pretrain_gpt.py --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" \
        --num-attention-heads "$NUM_HEADS" --max-position-embeddings "$SEQ_LENGTH" "$@"
}

train_qwen() { # a model that pretrain_qwen.py knows, its other arguments
    local model=(--qwen-model "$1")
    if [ "$TINY" = 1 ]; then # flags of one's own win over those of --qwen-model
        model+=(
            --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
            --num-attention-heads "$NUM_HEADS" --num-query-groups "$NUM_GROUPS" --kv-channels 16
        )
    fi
    train pretrain_qwen.py "${model[@]}" "${@:2}"
}

train() { # an entrypoint, its arguments; RUN names the folders of checkpoints and logs
    : "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=6000}"
    : "${PP:=1}" "${MICRO_BATCH_SIZE:=1}" "${SPLIT:=99,1,0}"
    : "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
    : "${CHECKPOINT_PATH=checkpoints/$RUN}" "${TENSORBOARD_LOGS_PATH=tensorboard/$RUN}"
    local launch=(
        --nproc_per_node "$GPUS_PER_NODE"
        --nnodes "$NNODES"
        --node_rank "$NODE_RANK"
        --master_addr "$MASTER_ADDR"
        --master_port "$MASTER_PORT"
    )
    local words=(
        --seq-length "$SEQ_LENGTH"
        --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
        --train-iters "$TRAIN_ITERS"
        --lr "$LR" --min-lr "$MIN_LR"
        --lr-decay-style cosine ${LR_DECAY_ITERS:+--lr-decay-iters "$LR_DECAY_ITERS"}
        --weight-decay "${WEIGHT_DECAY:-0.1}" --adam-beta1 0.9 --adam-beta2 "${ADAM_BETA2:-0.95}"
        --clip-grad 1.0
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --transformer-impl "$TRANSFORMER_IMPL"
        --log-interval "$LOG_INTERVAL" --log-throughput
        --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
    )
    [ "$PRECISION" = fp32 ] || words+=("--$PRECISION")
    [ "$GRAPHS" != 1 ] || words+=(--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad)
    if [ -n "${DATA_PATH:-}" ]; then
        local prefixes
        read -ra prefixes <<<"$DATA_PATH"
        words+=(
            --data-path "${prefixes[@]}"
            --split "$SPLIT"
            --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
            --tokenizer-model "$TOKENIZER_MODEL"
        )
    else
        words+=(--mock-data --tokenizer-type NullTokenizer ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"})
    fi
    if [ -n "$CHECKPOINT_PATH" ]; then
        words+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "${SAVE_INTERVAL:-10000}")
    fi
    [ -z "$TENSORBOARD_LOGS_PATH" ] || words+=(--tensorboard-dir "$TENSORBOARD_LOGS_PATH")
    local compression
    read -ra compression <<<"${COMPRESSION:-}"
    torchrun "${launch[@]}" "$REPO/$1" "${words[@]}" "${compression[@]}" "${@:2}"
}
