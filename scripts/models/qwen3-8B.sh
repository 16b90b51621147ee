# The shape of Qwen3-8B, to be sourced: sets MODEL_ARGS. It has its own output matrix.
# shellcheck shell=bash disable=SC2034  # these are for the script that sources this
MODEL_ARGS=(
    --swiglu
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --use-rotary-position-embeddings
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --group-query-attention
    --num-query-groups 8
    --qk-layernorm
    --kv-channels 128
    --vocab-size 151936
    --untie-embeddings-and-output-weights
)
MAX_POSITION_EMBEDDINGS=40960 # tokens; for a plan before the model is here
