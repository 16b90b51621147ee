#!/usr/bin/env bash
# Teaches a small model to search, on this machine's CPU, and shows that it learned.
#
#   bash run_demo.sh                      # everything, about ten minutes after the set-up
#   bash run_demo.sh --steps 3 --questions 16
#
# It starts what it needs (a retrieval server, Ray, one engine, the trainer) on free ports and stops
# exactly that at the end. Results: runs/demo/<start time>/.
set -euo pipefail

usage() {
    sed -n '2,8p' "${BASH_SOURCE[0]##*/}" | sed 's/^# \{0,1\}//'
    cat <<END
  --steps N       GRPO steps [$STEPS]
  --seed N        seed of data order, sampling and training [$SEED]
  --questions N   held-out questions of each evaluation [$QUESTIONS]
  --run-dir DIR   where results go [runs/demo/<start time>]
  --retriever_name NAME   bm25, or a dense encoder: minilm comes with the set-up; e5, bge and dpr are downloaded.
                  Its index is built once, in about three minutes [$RETRIEVER]
  -- FLAGS        further flags for train.py
END
}

# A step runs in the background, so that a signal to this script is answered at once.
run() {
    "$@" &
    step_pid=$!
    wait "$step_pid"
    step_pid=""
}

# Stops what this script started, and nothing else.
clean_up() {
    trap - EXIT INT TERM
    local pid
    for pid in $step_pid $retriever_pid; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}

# In a function, which bash reads whole before it runs it: an edit of this file does not touch a run under way.
main() {
    CALLED_IN="$PWD"
    cd "$(dirname "${BASH_SOURCE[0]}")"

    STEPS=40
    SEED=1
    QUESTIONS=200
    RETRIEVER=bm25
    RUN_DIR="runs/demo/$(date -u +%Y%m%d-%H%M%S)"

    while [[ $# -gt 0 ]]; do
        case "$1" in
        --steps | --seed | --questions | --run-dir | --retriever_name)
            [[ $# -ge 2 ]] || { echo "$1 needs a value" >&2; exit 2; }
            case "$1" in
            --steps) STEPS="$2" ;;
            --seed) SEED="$2" ;;
            --questions) QUESTIONS="$2" ;;
            --retriever_name) RETRIEVER="$2" ;;
            --run-dir) [[ "$2" == /* ]] && RUN_DIR="$2" || RUN_DIR="$CALLED_IN/$2" ;;
            esac
            shift 2
            ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
        esac
    done
    for option in "--steps $STEPS" "--questions $QUESTIONS" "--seed $SEED"; do
        [[ "$option" =~ ^--(seed\ 0|[a-z]+\ [1-9][0-9]*)$ ]] && continue
        echo "${option%% *}: expected a whole number$([[ "$option" == --seed* ]] || echo " from 1 on"), found '${option#* }'" >&2
        exit 2
    done
    if [[ -n "$(ls -A "$RUN_DIR" 2>/dev/null)" ]]; then
        echo "--run-dir: expected a new or empty folder, found files in $RUN_DIR; name another" >&2
        exit 2
    fi

    bash scripts/setup_cpu.sh
    STARTED=$(date +%s)
    PYTHON=.venv/bin/python
    MODEL=data/demo/model
    mkdir -p "$RUN_DIR"
    # Another start may have come as far in the meantime: only one of them can make this file.
    if ! (set -o noclobber; echo "process $$ on $(uname -n), since $(date -u +'%F %T') UTC" >"$RUN_DIR/demo.owner") 2>/dev/null; then
        echo "--run-dir: expected a folder that no other run uses, found $RUN_DIR in use by $(cat "$RUN_DIR/demo.owner"); name another" >&2
        exit 2
    fi

    retriever_pid="" step_pid=""

    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM

    CORPUS=data/demo/corpus.jsonl.gz
    INDEX=()
    if [[ "$RETRIEVER" != bm25 ]]; then
        echo "== index of the shipped corpus for $RETRIEVER"
        run $PYTHON local_dense_retriever/build_index.py --corpus_path $CORPUS --retriever_name "$RETRIEVER" \
            --save_dir "runs/demo_index/$RETRIEVER"
        INDEX=(--index_path "runs/demo_index/$RETRIEVER/flat.index")
    fi

    echo "== retrieval server ($RETRIEVER over the shipped corpus)"
    $PYTHON local_dense_retriever/retrieval_server.py --corpus_path $CORPUS --retriever_name "$RETRIEVER" "${INDEX[@]}" \
        --port 0 --url_file "$RUN_DIR/retriever.url" >"$RUN_DIR/retriever.log" 2>&1 &
    retriever_pid=$!

    echo "== HF checkpoint -> torch_dist"
    run $PYTHON tools/convert_hf_to_torch_dist.py --hf-checkpoint "$MODEL" --save "$RUN_DIR/ref"

    for _ in $(seq 300); do
        [[ -s "$RUN_DIR/retriever.url" ]] && break
        kill -0 "$retriever_pid" 2>/dev/null || { cat "$RUN_DIR/retriever.log" >&2; echo "the retrieval server did not start" >&2; exit 1; }
        sleep 0.2
    done
    [[ -s "$RUN_DIR/retriever.url" ]] || { echo "the retrieval server was not ready within a minute: $RUN_DIR/retriever.log" >&2; exit 1; }

    cat >"$RUN_DIR/search.yaml" <<END
search_r1:
  search_backend: local
  local: {search_url: "$(cat "$RUN_DIR/retriever.url")/retrieve"}
  topk: 1
  max_turns: 2
  max_observation_tokens: 48
END

    echo "== $STEPS steps of GRPO: Ray, one SGLang engine and the Megatron trainer on this CPU"
    run $PYTHON train.py \
        --hf-checkpoint "$MODEL" --ref-load "$RUN_DIR/ref" --save "$RUN_DIR/checkpoints" --save-interval 20 --save-keep 2 \
        --prompt-data data/demo/train_mixed.parquet --input-key prompt --label-key reward_model --apply-chat-template \
        --rollout-shuffle --num-rollout "$STEPS" --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
        --rollout-max-response-len 48 --rollout-max-context-len 512 --rollout-temperature 1 \
        --eval-interval 10 --eval-prompt-data demo "data/demo/test_mixed.parquet@[0:$QUESTIONS]" \
        --eval-temperature 0 1 \
        --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 \
        --use-dynamic-batch-size --max-tokens-per-gpu 2048 --balance-data \
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl \
        --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0 \
        --optimizer adam --lr 2e-4 --lr-decay-style linear --min-lr 2e-5 --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.98 \
        --clip-grad 1.0 --max-logprob-diff 1e-4 \
        --custom-generate-function-path generate_with_search.generate \
        --custom-rm-path generate_with_search.reward_func \
        --custom-config-path "$RUN_DIR/search.yaml" \
        --use-tensorboard --run-dir "$RUN_DIR" --seed "$SEED" "$@"

    echo "== torch_dist -> HF"
    run $PYTHON tools/convert_torch_dist_to_hf.py --load "$RUN_DIR/checkpoints" --hf-checkpoint "$MODEL" --save "$RUN_DIR/hf"

    $PYTHON tools/demo/report.py --run-dir "$RUN_DIR" --started "$STARTED"
}

main "$@"; exit
