# The shape of Qwen2.5-7B, to be sourced: sets MODEL_ARGS. It has its own output matrix.
# shellcheck shell=bash disable=SC2034  # these are for the script that sources this
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --use-rotary-position-embeddings
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --group-query-attention
    --num-query-groups 4
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
MAX_POSITION_EMBEDDINGS=131072 # tokens; for a plan before the model is here
# A row of 131,072 tokens would not fit a GPU of 80 GB beside this model; no search takes so many.
LAYOUT_ARGS=(--rollout-max-context-len 32768)
