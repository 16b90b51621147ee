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
