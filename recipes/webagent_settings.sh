# What the recipes webagent_*.sh have in common, to be sourced after lib.sh. All weights are trained; the published
# agents train a LoRA of rank 32 at 4e-5, which is too much for all weights.
# shellcheck shell=bash
with_tools webagent.yaml answer_line_reward
RECIPE_ARGS+=(
    --num-rollout 200
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --global-batch-size 64
    --rollout-max-response-len 8192  # a turn
    --rollout-max-context-len 8192   # a trajectory
    --eval-interval 20
    --advantage-estimator importance_sampling  # advantage = reward - mean of the group
    --no-use-kl-loss
    --lr 1e-6
    --save-interval 20
)
