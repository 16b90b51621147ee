# The shape of Qwen3-30B-A3B, to be sourced: sets MODEL_ARGS. A mixture of experts with its own output matrix.
# shellcheck shell=bash disable=SC2034  # these are for the script that sources this
MODEL_ARGS=(
    --swiglu
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --use-rotary-position-embeddings
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --group-query-attention
    --num-query-groups 4
    --qk-layernorm
    --kv-channels 128
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
)
MAX_POSITION_EMBEDDINGS=40960 # tokens; for a plan before the model is here
# It takes all 8 GPUs of 80 GB: `DRY_RUN=1 MODEL=qwen3-30B-A3B bash run_qwen2.5_3B.sh` shows by how much.
LAYOUT_ARGS=(
    --actor-num-gpus-per-node 8
    --rollout-num-gpus 8
    --tensor-model-parallel-size 4
    --expert-model-parallel-size 8
    --rollout-num-gpus-per-engine 8
)
