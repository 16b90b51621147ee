#!/usr/bin/env bash
# Joins this node to the Ray head of a run, and leaves when the head is gone: for every node but the first.
#
#   MASTER_ADDR=10.0.0.1 RAY_AUTH_TOKEN=... bash scripts/ray_worker.sh
#
#   MASTER_ADDR      address of the first node, where `MASTER_ADDR=... bash run_qwen2.5_3B.sh` runs
#   RAY_PORT         6379              of its Ray head
#   RAY_AUTH_TOKEN   that of the head  the script prints it, unless it was set there, too
#   NODE_ADDRESS     this node's own   set it if the node has several networks
#   WAIT_SECONDS     600               how long to wait for the Ray head
#   NUM_GPUS         8, or as many as CUDA_VISIBLE_DEVICES names
#   PYTHON           .venv-gpu/bin/python, else .venv/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MASTER_ADDR:?expected the address of the first node, found none; set MASTER_ADDR}"
: "${RAY_AUTH_TOKEN:?expected the token of the Ray head, found none; set RAY_AUTH_TOKEN}"
port="${RAY_PORT:-6379}"
source scripts/count_gpus.sh
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$PWD/.venv/bin/python"
    [[ -x .venv-gpu/bin/python ]] && PYTHON="$PWD/.venv-gpu/bin/python"
fi
# Ray's processes here must find the project as those of the first node do.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_raylet_start_wait_time_s=150 RAY_worker_niceness="${RAY_worker_niceness:-0}"

deadline=$((SECONDS + ${WAIT_SECONDS:-600}))
until (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null; do # the head starts after the plan's checks
    if ((SECONDS > deadline)); then
        echo "expected a Ray head at $MASTER_ADDR:$port, found none; is run_qwen2.5_3B.sh running there?" >&2
        exit 1
    fi
    sleep 2
done
words=(--address "$MASTER_ADDR:$port" --num-gpus "$NUM_GPUS" --block --disable-usage-stats)
[[ -n "${NODE_ADDRESS:-}" ]] && words+=(--node-ip-address "$NODE_ADDRESS")
exec "$PYTHON" -m ray.scripts.scripts start "${words[@]}"
