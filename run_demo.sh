#!/usr/bin/env bash
# Teaches a small model to search, on this machine's CPU, and shows that it learned.
#
#   bash run_demo.sh                      # everything, about four minutes after the set-up
#   bash run_demo.sh --steps 3 --questions 16
#   bash run_demo.sh --protocol tools     # the model searches by tool calls instead of tags
#
# It starts what it needs (a retrieval server, Ray, one engine, the trainer) on free ports and stops
# exactly that at the end. Results: runs/demo/<start time>/.
set -euo pipefail

# In a function, which bash reads whole before it runs it: an edit of this file does not touch a run under way.
main() {
    local called_in="$PWD"
    cd "$(dirname "${BASH_SOURCE[0]}")"

    STEPS=40
    SEED=1
    QUESTIONS=200
    RETRIEVER=bm25
    PROTOCOL=tags
    RUN_DIR="runs/demo/$(date -u +%Y%m%d-%H%M%S)"

    PYTHON=.venv/bin/python
    source scripts/cpu_run.sh
    parse_options "$called_in" "$@"
    choose_protocol
    if [[ -n "$(ls -A "$RUN_DIR" 2>/dev/null)" ]]; then
        echo "--run-dir: expected a new or empty folder, found files in $RUN_DIR; name another" >&2
        exit 2
    fi

    bash scripts/setup_cpu.sh
    STARTED=$(date +%s)
    mkdir -p "$RUN_DIR"
    # Another start may have come as far in the meantime: only one of them can make this file.
    if ! (set -o noclobber; echo "process $$ on $(uname -n), since $(date -u +'%F %T') UTC" >"$RUN_DIR/demo.owner") 2>/dev/null; then
        echo "--run-dir: expected a folder that no other run uses, found $RUN_DIR in use by $(cat "$RUN_DIR/demo.owner"); name another" >&2
        exit 2
    fi

    clean_up_at_end
    start_retriever

    echo "== HF checkpoint -> torch_dist"
    run "$PYTHON" tools/convert_hf_to_torch_dist.py --hf-checkpoint "$MODEL" --save "$RUN_DIR/ref"

    wait_for_retriever
    cat >"$RUN_DIR/search.yaml" <<END
search_r1:
  search_backend: local
  local: {search_url: "$SEARCH_URL"}
  topk: 1
$SETTINGS
END

    echo "== $STEPS steps of GRPO: Ray, one SGLang engine and the Megatron trainer on this CPU"
    run "$PYTHON" train.py \
        --hf-checkpoint "$MODEL" --ref-load "$RUN_DIR/ref" --save "$RUN_DIR/checkpoints" --save-interval 20 --save-keep 2 \
        --prompt-data data/demo/train_mixed.parquet "${COLUMNS_USED[@]}" \
        --rollout-shuffle --num-rollout "$STEPS" --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
        --rollout-max-response-len "$TURN_TOKENS" --rollout-max-context-len 512 --rollout-temperature 1 \
        --eval-interval 10 --eval-prompt-data demo "data/demo/test_mixed.parquet@[0:$QUESTIONS]" \
        --eval-temperature 0 1 \
        --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 \
        --use-dynamic-batch-size --max-tokens-per-gpu 2048 --balance-data \
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl \
        --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0 \
        --optimizer adam --lr 2e-4 --lr-decay-style linear --min-lr 2e-5 --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.98 \
        --clip-grad 1.0 --max-logprob-diff 1e-4 \
        --custom-generate-function-path "$HOOKS.generate" \
        --custom-rm-path "$HOOKS.reward_func" \
        --custom-config-path "$RUN_DIR/search.yaml" \
        --use-tensorboard --run-dir "$RUN_DIR" --seed "$SEED" "${FLAGS[@]}"

    echo "== torch_dist -> HF"
    run "$PYTHON" tools/convert_torch_dist_to_hf.py --load "$RUN_DIR/checkpoints" --hf-checkpoint "$MODEL" --save "$RUN_DIR/hf"

    "$PYTHON" tools/demo/report.py --run-dir "$RUN_DIR" --started "$STARTED"
}

# The model, the hooks and the settings of --protocol. Both have two searches, and passages of the same length.
choose_protocol() {
    case "$PROTOCOL" in
    tags)
        MODEL=data/demo/model
        HOOKS=generate_with_search
        COLUMNS_USED=(--input-key prompt --label-key reward_model --apply-chat-template)
        TURN_TOKENS=48
        SETTINGS="  max_turns: 2
  max_observation_tokens: 48"
        ;;
    tools)
        MODEL=data/demo/model_tools
        HOOKS=generate_with_tools
        COLUMNS_USED=(--input-key question --label-key golden_answers)
        TURN_TOKENS=80 # a call of a tool takes 35 besides its query
        SETTINGS="search_tools: {max_turns: 3, max_searches: 2, max_tool_tokens: 48, instruction: \"\"}"
        ;;
    *)
        echo "--protocol: expected tags or tools, found '$PROTOCOL'" >&2
        exit 2
        ;;
    esac
}

main "$@"; exit
