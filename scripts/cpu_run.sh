# What run_demo.sh and run_smollm2.sh share, to be sourced: options, a retrieval server, a clean end.
# shellcheck shell=bash disable=SC2034  # some of these are for the script that sources this
#
# The script sets STEPS, SEED, QUESTIONS, RUN_DIR and RETRIEVER to their defaults, PROTOCOL if it has several, and PYTHON.

CORPUS=data/demo/corpus.jsonl.gz
retriever_pid="" step_pid=""

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${0##*/}"
    cat <<END
  --steps N       GRPO steps [$STEPS]
  --seed N        seed of data order, sampling and training [$SEED]
  --questions N   held-out questions of each evaluation [$QUESTIONS]
  --run-dir DIR   where results go [${RUN_DIR%/*}/<start time>]
  --retriever_name NAME   bm25, or a dense encoder: minilm comes with the set-up; e5, bge and dpr are downloaded.
                  Its index is built once, in about three minutes [$RETRIEVER]
END
    [[ -z "${PROTOCOL:-}" ]] || echo "  --protocol NAME tags or tools: what the model searches by [$PROTOCOL]"
    echo "  -- FLAGS        further flags for train.py"
}

# Reads the options into those variables, and what follows `--` into FLAGS. $1 is the folder in which the script was called.
parse_options() {
    local called_in="$1"
    shift
    while [[ $# -gt 0 ]]; do
        case "$1" in
        --steps | --seed | --questions | --run-dir | --retriever_name | --protocol)
            [[ "$1" != --protocol || -n "${PROTOCOL:-}" ]] || { echo "unknown option: $1" >&2; usage >&2; exit 2; }
            [[ $# -ge 2 ]] || { echo "$1 needs a value" >&2; exit 2; }
            case "$1" in
            --steps) STEPS="$2" ;;
            --seed) SEED="$2" ;;
            --questions) QUESTIONS="$2" ;;
            --retriever_name) RETRIEVER="$2" ;;
            --protocol) PROTOCOL="$2" ;;
            --run-dir) [[ "$2" == /* ]] && RUN_DIR="$2" || RUN_DIR="$called_in/$2" ;;
            esac
            shift 2
            ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
        esac
    done
    FLAGS=("$@")
    local option
    for option in "--steps $STEPS" "--questions $QUESTIONS" "--seed $SEED"; do
        [[ "$option" =~ ^--(seed\ 0|[a-z]+\ [1-9][0-9]*)$ ]] && continue
        echo "${option%% *}: expected a whole number$([[ "$option" == --seed* ]] || echo " from 1 on"), found '${option#* }'" >&2
        exit 2
    done
}

# A step runs in the background, so that a signal to the script is answered at once.
run() {
    "$@" &
    step_pid=$!
    wait "$step_pid"
    step_pid=""
}

# Stops what the script started, and nothing else.
clean_up() {
    trap - EXIT INT TERM
    local pid
    for pid in $step_pid $retriever_pid; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}

clean_up_at_end() {
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# Starts the retrieval server over the shipped corpus on a free port; `retriever_url` waits for it.
start_retriever() {
    local index=()
    if [[ "$RETRIEVER" != bm25 ]]; then
        echo "== index of the shipped corpus for $RETRIEVER"
        run "$PYTHON" local_dense_retriever/build_index.py --corpus_path "$CORPUS" --retriever_name "$RETRIEVER" \
            --save_dir "runs/demo_index/$RETRIEVER"
        index=(--index_path "runs/demo_index/$RETRIEVER/flat.index")
    fi
    echo "== retrieval server ($RETRIEVER over the shipped corpus)"
    rm -f "$RUN_DIR/retriever.url"
    "$PYTHON" local_dense_retriever/retrieval_server.py --corpus_path "$CORPUS" --retriever_name "$RETRIEVER" "${index[@]}" \
        --port 0 --url_file "$RUN_DIR/retriever.url" >"$RUN_DIR/retriever.log" 2>&1 &
    retriever_pid=$!
}

# Waits until the retrieval server is up, and sets SEARCH_URL.
wait_for_retriever() {
    local _
    for _ in $(seq 300); do
        [[ -s "$RUN_DIR/retriever.url" ]] && break
        kill -0 "$retriever_pid" 2>/dev/null || { cat "$RUN_DIR/retriever.log" >&2; echo "the retrieval server did not start" >&2; exit 1; }
        sleep 0.2
    done
    [[ -s "$RUN_DIR/retriever.url" ]] || { echo "the retrieval server was not ready within a minute: $RUN_DIR/retriever.log" >&2; exit 1; }
    SEARCH_URL="$(cat "$RUN_DIR/retriever.url")/retrieve"
}
