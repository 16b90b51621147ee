#!/usr/bin/env bash
# Qwen3-30B-A3B, a mixture of experts, learns to search with tags, as run_qwen2.5_3B.sh teaches a small model. It takes
# all 8 GPUs: the retrieval server runs on the CPU, or on another machine that SEARCH_URL names.
#
#   DRY_RUN=1 bash recipes/tags_qwen3_30B_A3B.sh     # the checks and the plan
#   bash recipes/tags_qwen3_30B_A3B.sh               # variables: run_qwen2.5_3B.sh; further flags go to train.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
recipe tags qwen3-30B-A3B # its layout stands in scripts/models/qwen3-30B-A3B.sh

# A token may go to other experts in the trainer than in the engine: their probabilities differ more than a dense model's.
export USE_TIS="${USE_TIS:-1}"
RECIPE_ARGS+=(
    --rollout-max-context-len 4096
    --moe-grouped-gemm
    --save-keep 2  # half a terabyte each
)
start "$@"
