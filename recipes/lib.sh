# Shared by the recipes, to be sourced. A recipe is what differs from run_qwen2.5_3B.sh, which does the rest: it reads
# the same environment variables, checks, prints the plan (DRY_RUN=1), starts Ray and trains.
#
# A recipe calls `recipe NAME MODEL`, fills RECIPE_ARGS, and LAYOUT_OF_RECIPE where its own model needs another layout
# than the script's; then it calls `start "$@"`. With another MODEL the layout is that model's: the script's own, or
# what its file in scripts/models/ says.
# shellcheck shell=bash disable=SC2034  # these are for the recipe
RECIPE_ARGS=()
LAYOUT_OF_RECIPE=()

# recipe NAME MODEL: the defaults of the variables, for a recipe of this name and the model that it is meant for.
recipe() {
    recipe_model="$2"
    export MODEL="${MODEL:-$2}"
    export SAVE_DIR="${SAVE_DIR:-checkpoints/$1-$MODEL}"
    export RUN_DIR="${RUN_DIR:-runs/$1-$MODEL/$(date -u +%Y%m%d-%H%M%S)}"
    export WANDB_GROUP="${WANDB_GROUP:-$1-$MODEL}"
}

# The search conversation by tool calls, on bare questions; docs/tools.md. $1: a YAML file of recipes/, or nothing. $2: the
# function of generate_with_tools.py that gives the reward [reward_func].
with_tools() {
    RECIPE_ARGS+=(
        --custom-generate-function-path generate_with_tools.generate
        --custom-rm-path "generate_with_tools.${2:-reward_func}"
        --input-key question
        --label-key golden_answers
        --eval-input-key question
        --eval-label-key golden_answers
    )
    [[ -z "${1:-}" ]] || RECIPE_ARGS+=(--custom-config-path "$recipes/$1")
}

# start FLAGS...: trains; the flags given here come last, so that they outrank the recipe's.
start() {
    local layout=()
    [[ "$MODEL" == "$recipe_model" ]] && layout=("${LAYOUT_OF_RECIPE[@]}")
    exec bash "$recipes/../run_qwen2.5_3B.sh" "${RECIPE_ARGS[@]}" "${layout[@]}" "$@"
}

recipes="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
