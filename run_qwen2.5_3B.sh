#!/usr/bin/env bash
# Teaches Qwen2.5-3B to search, on one node of 8 GPUs: 4 train and generate in turn (--colocate), the rest are
# free for the retrieval server.
#
#   DRY_RUN=1 bash run_qwen2.5_3B.sh     # check everything that needs no GPU, and print the plan
#   bash run_qwen2.5_3B.sh               # train
#   USE_TIS=1 bash run_qwen2.5_3B.sh --lr 2e-6     # with importance sampling; further flags go to train.py
#
# Where things are, each an environment variable with its default:
#   MODEL          qwen2.5-3B                          a file of scripts/models/
#   HF_CHECKPOINT  models/Qwen2.5-3B                   hf download Qwen/Qwen2.5-3B --local-dir models/Qwen2.5-3B
#   REF_LOAD       models/Qwen2.5-3B_torch_dist        tools/convert_hf_to_torch_dist.py makes it
#   SAVE_DIR       checkpoints/qwen2.5-3B_search       a later start goes on from its latest checkpoint
#   RUN_DIR        runs/qwen2.5-3B/<UTC start time>    logs, metrics, trajectories, configuration
#   TRAIN_DATA     data/search_r1/train.parquet        tools/prepare_data.py --local_dir data/search_r1 makes both; or
#   EVAL_DATA      data/search_r1/test.parquet@[0:3000]    a data set of the hub, such as PeterJinGo/nq_hotpotqa_train,
#                                                       whose first use downloads train.parquet, test.parquet
#   SEARCH_BACKEND (SEARCH_R1_CONFIGS in generate_with_search.py: local)      or google, or module.function
#   SEARCH_URL     (there, too: http://127.0.0.1:8000/retrieve)    local_dense_retriever/retrieval_server.py serves it
#   NUM_GPUS       8, or as many as CUDA_VISIBLE_DEVICES names     of this node, for the Ray head
#   GPU_MEMORY     80                                  GB of one GPU, for the plan: 80, 96, 141 or another number
#   RAY_ADDRESS    (none: a Ray head is started here, and stopped at the end)
#   NUM_NODES      1                                   nodes of NUM_GPUS each, all of which train and generate in turn;
#                                                       scripts/ray_worker.sh joins them, or scripts/slurm.sbatch does
#   MASTER_ADDR    127.0.0.1                           this node's address, for the Ray head; RAY_PORT [6379] if others join
#   SUBMIT         1                                   0: run train.py here, inside a job of RAY_ADDRESS or of KubeRay
#   PYTHON         .venv-gpu/bin/python (scripts/setup_gpu.sh) where nvidia-smi shows a GPU, else .venv/bin/python
#   ALLOW_CPU      0                                   1: train on the CPU; else a start where torch sees no GPU stops
#   USE_WANDB      1 if WANDB_API_KEY or WANDB_KEY is set     WANDB_PROJECT [sleuth], WANDB_GROUP [the model's name]
#   USE_TIS        0                                   1: correct for the mismatch between engines and trainer
set -euo pipefail
CALLED_FROM="$PWD" # hooks may lie there
cd "$(dirname "${BASH_SOURCE[0]}")"

MODEL="${MODEL:-qwen2.5-3B}"
if [[ ! -f "scripts/models/$MODEL.sh" ]]; then
    known=(scripts/models/*.sh)
    known=("${known[@]##*/}")
    echo "MODEL: expected one of ${known[*]%.sh} (the files of scripts/models/), found '$MODEL'" >&2
    exit 2
fi
LAYOUT_ARGS=() # a large model's script sets it: what it needs instead of PARALLEL_ARGS, ENGINE_ARGS, PLACEMENT_ARGS
# shellcheck source=scripts/models/qwen2.5-3B.sh
source "scripts/models/$MODEL.sh"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON="$PWD/.venv/bin/python"
    if [[ -x .venv-gpu/bin/python ]] && nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
        PYTHON="$PWD/.venv-gpu/bin/python"
    fi
fi

# Ray starts the job in a folder of its own: paths must not depend on it.
absolute() { case "$1" in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac; }
# owner/set[@revision][/file] is a data set of the Hugging Face hub, unless its first folder is here.
data_path() {
    local hub='^[A-Za-z0-9_-][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+(@[A-Za-z0-9_.-]+)?(/[^@]+)?(@\[.*\])?$'
    local file='^[^/]+/[^/@]+\.(parquet|jsonl|jsonl\.gz)(@\[.*\])?$'
    if [[ "$1" =~ $hub && ! "$1" =~ $file && ! -e "${1%%/*}" ]]; then printf '%s' "$1"; else absolute "$1"; fi
}
NAME="${MODEL/qwen/Qwen}"
HF_CHECKPOINT="$(absolute "${HF_CHECKPOINT:-models/$NAME}")"
REF_LOAD="$(absolute "${REF_LOAD:-models/${NAME}_torch_dist}")"
SAVE_DIR="$(absolute "${SAVE_DIR:-checkpoints/${MODEL}_search}")"
RUN_DIR="$(absolute "${RUN_DIR:-runs/$MODEL/$(date -u +%Y%m%d-%H%M%S)}")"
TRAIN_DATA="$(data_path "${TRAIN_DATA:-data/search_r1/train.parquet}")"
EVAL_DATA="$(data_path "${EVAL_DATA:-data/search_r1/test.parquet@[0:3000]}")"
NUM_NODES="${NUM_NODES:-1}"
source scripts/count_gpus.sh

CHECKPOINT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "$REF_LOAD"
    --load "$SAVE_DIR"
    --save "$SAVE_DIR"
    --save-interval 20
    --run-dir "$RUN_DIR"
)

ROLLOUT_ARGS=(
    --prompt-data "$TRAIN_DATA"
    --input-key prompt
    --label-key reward_model
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 512
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 25
    --eval-prompt-data nq_test "$EVAL_DATA"
    --eval-input-key prompt
    --eval-label-key reward_model
    --n-samples-per-eval-prompt 1
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
    --use-distributed-optimizer
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.001
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.01
    --adam-beta1 0.9
    --adam-beta2 0.98
)

ENGINE_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend auto
    --use-tensorboard
)

PLACEMENT_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --colocate
)

NODES_ARGS=()
if ((NUM_NODES > 1)); then
    NODES_ARGS=(
        --actor-num-nodes "$NUM_NODES"
        --actor-num-gpus-per-node "$NUM_GPUS"
        --rollout-num-gpus "$((NUM_NODES * NUM_GPUS))"
    )
fi

HOOK_ARGS=(
    --custom-generate-function-path generate_with_search.generate
    --custom-rm-path generate_with_search.reward_func
)
if [[ "${USE_TIS:-0}" == 1 ]]; then
    HOOK_ARGS+=(
        --use-tis
        --custom-config-path "$PWD/mis.yaml"
        --custom-tis-function-path mis.compute_mis_weights_with_cp
    )
fi

# Only what was given: everything else is as the hook has it. Last, so that they outrank every other place.
SEARCH_ARGS=()
[[ -n "${SEARCH_BACKEND:-}" ]] && SEARCH_ARGS+=(--search-backend "$SEARCH_BACKEND")
[[ -n "${SEARCH_URL:-}" ]] && SEARCH_ARGS+=(--search-url "$SEARCH_URL")

WANDB_ARGS=()
wandb_key="${WANDB_API_KEY:-${WANDB_KEY:-}}"
if [[ "${USE_WANDB:-${wandb_key:+1}}" == 1 ]]; then
    WANDB_ARGS=(--use-wandb --wandb-project "${WANDB_PROJECT:-sleuth}" --wandb-group "${WANDB_GROUP:-$MODEL}")
fi

TRAIN_ARGS=(
    "${MODEL_ARGS[@]}"
    "${CHECKPOINT_ARGS[@]}"
    "${ROLLOUT_ARGS[@]}"
    "${EVAL_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    "${GRPO_ARGS[@]}"
    "${OPTIMIZER_ARGS[@]}"
    "${ENGINE_ARGS[@]}"
    "${MISC_ARGS[@]}"
    "${PLACEMENT_ARGS[@]}"
    "${LAYOUT_ARGS[@]}"
    "${NODES_ARGS[@]}"
    "${HOOK_ARGS[@]}"
    "${WANDB_ARGS[@]}"
    "$@"
    "${SEARCH_ARGS[@]}"
)

scratch="$(mktemp -d)"

ray_pid="" ray_dir="" submit_pid="" submission_id=""

# Stops what this script started, and nothing else: `ray stop` would end every Ray on this machine.
# Killing `ray start --block` ends exactly its own head: its children go with it.
clean_up() {
    local status=$?
    trap - EXIT INT TERM
    if [[ -n "$submit_pid" ]] && kill "$submit_pid" 2>/dev/null; then
        echo "stopping the job; it saves its last whole step first" >&2
        timeout 150 "$PYTHON" -m ray.scripts.scripts job stop "$submission_id" >/dev/null 2>&1 || true
    fi
    if [[ -n "$ray_pid" ]]; then
        kill "$ray_pid" 2>/dev/null || true
        wait "$ray_pid" 2>/dev/null || true
        if [[ "$status" -eq 0 ]]; then rm -rf "$ray_dir"; else echo "Ray's own logs: $ray_dir" >&2; fi
    fi
    rm -rf "$scratch"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

free_ports() {
    "$PYTHON" - "$1" <<'END'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))
END
}

export PYTHONPATH="$PWD:$CALLED_FROM${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PLAN_ARGS=(--available-gpus "$((NUM_NODES * NUM_GPUS))" --gpu-memory "${GPU_MEMORY:-80}")
((NUM_NODES > 1)) && PLAN_ARGS+=(--cluster "${NUM_NODES}x$NUM_GPUS")
# On another cluster the files may be where this machine does not see them.
[[ "${DRY_RUN:-0}" != 1 && -z "${RAY_ADDRESS:-}" ]] && PLAN_ARGS+=(--require-files)
[[ "${DRY_RUN:-0}" != 1 ]] && mkdir -p "$RUN_DIR"
"$PYTHON" -m sleuth.plan "${TRAIN_ARGS[@]}" "${PLAN_ARGS[@]}"
[[ "${DRY_RUN:-0}" == 1 ]] && exit 0
if [[ "${SUBMIT:-1}" == 0 ]]; then
    rm -rf "$scratch"
    exec "$PYTHON" "$PWD/train.py" "${TRAIN_ARGS[@]}"
fi

if [[ -z "${RAY_ADDRESS:-}" ]]; then
    if ((NUM_NODES > 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
        echo "MASTER_ADDR: expected this node's address, at which the other nodes join, found none; set it" >&2
        exit 2
    fi
    DEVICES=(--num-gpus "$NUM_GPUS")
    if [[ "${ALLOW_CPU:-0}" == 1 ]]; then
        cores="$(nproc)" # each slot is a rank or an engine: more of them than cores take turns
        DEVICES=(--num-gpus 0 --num-cpus "$(((cores > NUM_GPUS ? cores : NUM_GPUS) + 1))")
    elif ! "$PYTHON" - "$PYTHON" <<'END'; then
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"expected GPUs, found none that torch {torch.__version__} of {sys.argv[1]} sees: run scripts/setup_gpu.sh, "
             "which makes .venv-gpu; or set ALLOW_CPU=1 to train on the CPU")
END
        exit 2
    fi
    read -r gcs_port dashboard_port agent_port client_port < <(free_ports 4)
    head_address="${MASTER_ADDR:-127.0.0.1}"
    ((NUM_NODES > 1)) && gcs_port="${RAY_PORT:-6379}" # the other nodes must know it
    export RAY_raylet_start_wait_time_s=150 # a busy machine is not a broken one
    # Ray's own commands must not look for the head through a proxy.
    export no_proxy="${no_proxy:+$no_proxy,}$head_address,127.0.0.1,localhost,::1"
    export NO_PROXY="${NO_PROXY:+$NO_PROXY,}$head_address,127.0.0.1,localhost,::1"
    export RAY_worker_niceness="${RAY_worker_niceness:-0}" # Ray's own 15 starves a run beside ordinary processes
    # Only who has this token may submit jobs to the head; every process of this script inherits it.
    if [[ -z "${RAY_AUTH_TOKEN:-}" ]]; then
        RAY_AUTH_TOKEN="$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')"
        ((NUM_NODES > 1)) && echo "on each other node: MASTER_ADDR=$head_address RAY_PORT=$gcs_port" \
            "RAY_AUTH_TOKEN=$RAY_AUTH_TOKEN bash scripts/ray_worker.sh"
    fi
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    # Its own folder: another Ray on this machine keeps its address file. In /tmp, since socket paths must be short.
    ray_dir="$(mktemp -d /tmp/sleuth-ray-XXXXXX)"
    "$PYTHON" -m sleuth.leftovers $$ "$ray_dir" || true # should this script be killed, the next start removes it
    echo "starting a Ray head with ${DEVICES[*]} (log: $RUN_DIR/ray.log, dashboard: http://127.0.0.1:$dashboard_port)"
    # A session of its own, so that ctrl-C reaches the job first and the head is stopped by clean_up.
    setsid "$PYTHON" -m ray.scripts.scripts start --head --block "${DEVICES[@]}" --disable-usage-stats \
        --node-ip-address "$head_address" --port "$gcs_port" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard_port" \
        --dashboard-agent-listen-port "$agent_port" --ray-client-server-port "$client_port" \
        --temp-dir "$ray_dir" >"$RUN_DIR/ray.log" 2>&1 &
    ray_pid=$!
    export RAY_ADDRESS="http://127.0.0.1:$dashboard_port"
    deadline=$((SECONDS + 180))
    until "$PYTHON" -m ray.scripts.scripts job list >"$scratch/ready.log" 2>&1; do
        if ! kill -0 "$ray_pid" 2>/dev/null || ((SECONDS > deadline)); then
            tail -n 20 "$RUN_DIR/ray.log" "$scratch/ready.log" >&2
            echo "the Ray head did not start: $RUN_DIR/ray.log" >&2
            exit 1
        fi
        sleep 1
    done
fi

RUNTIME_ENV="$("$PYTHON" - "$PYTHONPATH" <<'END'
import json, sys
variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0", "PYTHONPATH": sys.argv[1]}
variables["RAY_JOB_STOP_WAIT_TIME_S"] = "120"  # a stopped job may save for 60 s; Ray would kill it after 3
print(json.dumps({"env_vars": variables}))
END
)"
# Ray gives a job's command to a shell without quoting it: so the command stands in a file, which is also its record.
(umask 077 && : >"$RUN_DIR/job.sh") # the command may hold a password
printf 'exec %q %q' "$PYTHON" "$PWD/train.py" >"$RUN_DIR/job.sh"
printf ' %q' "${TRAIN_ARGS[@]}" >>"$RUN_DIR/job.sh"
submission_id="sleuth-$MODEL-$(date -u +%Y%m%d-%H%M%S)-$$"
"$PYTHON" -m ray.scripts.scripts job submit --submission-id "$submission_id" --runtime-env-json "$RUNTIME_ENV" \
    -- bash "$RUN_DIR/job.sh" &
submit_pid=$!
wait "$submit_pid" # not in the foreground: a signal is acted on at once
