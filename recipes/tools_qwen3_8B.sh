#!/usr/bin/env bash
# Qwen3-8B learns to search by tool calls: as tools_qwen3_1.7B.sh, on 4 GPUs that train and generate in turn.
#
#   DRY_RUN=1 bash recipes/tools_qwen3_8B.sh     # the checks and the plan
#   bash recipes/tools_qwen3_8B.sh               # variables: run_qwen2.5_3B.sh; further flags go to train.py
#   COLOCATE=0 bash recipes/tools_qwen3_8B.sh    # on 6 GPUs, of which 4 train and 2 generate
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
recipe tools qwen3-8B
source "$recipes/tools_settings.sh"

LAYOUT_OF_RECIPE=(
    --tensor-model-parallel-size 4
    --rollout-num-gpus-per-engine 2
)
if [[ "${COLOCATE:-1}" != 1 ]]; then
    LAYOUT_OF_RECIPE+=(--no-colocate --rollout-num-gpus 2 --update-weights-through distributed)
fi
start "$@"
