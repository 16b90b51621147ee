# What the recipes tools_*.sh have in common, to be sourced after lib.sh.
# shellcheck shell=bash
export EVAL_DATA="${EVAL_DATA:-data/search_r1/test.parquet@[0:500]}" # its first rows are of NQ
with_tools ""
RECIPE_ARGS+=(
    --num-rollout 500
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --global-batch-size 64
    --rollout-max-response-len 512  # a turn
    --rollout-max-context-len 3072  # a trajectory
    --eval-interval 50
    --eval-data-source-filter nq
    --lr 1e-6
    --lr-warmup-steps 2
    --eps-clip 0.2
    --eps-clip-high 0.28
    --no-use-kl-loss
    --save-interval 50
    --save-keep 3
)
