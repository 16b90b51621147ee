# The shape of SmolLM2-135M, to be sourced: sets MODEL_ARGS. It ties its embeddings.
# shellcheck shell=bash disable=SC2034  # these are for the script that sources this
MODEL_ARGS=(
    --swiglu
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --use-rotary-position-embeddings
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --rotary-base 100000
    --group-query-attention
    --num-query-groups 3
    --vocab-size 49152
)
MAX_POSITION_EMBEDDINGS=8192 # tokens; for a plan before the model is here
# Its three groups of heads cannot be divided by two.
LAYOUT_ARGS=(
    --tensor-model-parallel-size 1
    --no-sequence-parallel
    --rollout-num-gpus-per-engine 1
)
