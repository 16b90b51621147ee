#!/usr/bin/env bash
# Lint, types and tests on this machine's CPU. Arguments go to pytest.
#
#   bash run_tests.sh                     # everything
#   bash run_tests.sh -m "not engine and not megatron and not e2e"     # what starts no server and no trainer
#   bash run_tests.sh tests/algo -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash scripts/setup_cpu.sh

# One thread each: with tiny models more threads are slower, and several processes share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHDYNAMO_DISABLE=1

echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== mypy"
.venv/bin/mypy
echo "== pytest"
if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
# A file at a time in each of two processes: many tests use one core, or wait for something to start.
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile
