#!/usr/bin/env bash
# Qwen3-1.7B learns to search by tool calls: 500 steps of 8 questions x 8 samples, on 5 GPUs, of which 4 train and 1
# generates; or on 4 that do both in turn.
#
#   DRY_RUN=1 bash recipes/tools_qwen3_1.7B.sh     # the checks and the plan
#   bash recipes/tools_qwen3_1.7B.sh               # variables: run_qwen2.5_3B.sh; further flags go to train.py
#   COLOCATE=1 bash recipes/tools_qwen3_1.7B.sh    # on 4 GPUs
#   MODEL=qwen3-4B bash recipes/tools_qwen3_1.7B.sh    # another model, in a layout that fits it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
recipe tools qwen3-1.7B
source "$recipes/tools_settings.sh"

LAYOUT_OF_RECIPE=(
    --tensor-model-parallel-size 1
    --no-sequence-parallel
    --rollout-num-gpus-per-engine 1
)
if [[ "${COLOCATE:-0}" != 1 ]]; then
    LAYOUT_OF_RECIPE+=(--no-colocate --rollout-num-gpus 1 --update-weights-through distributed)
fi
start "$@"
