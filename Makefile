# The commands of daily work; AGENTS.md says more about each.
PYTHON := .venv/bin/python

.PHONY: setup demo test lint format docs locks gpu-check

setup:
	bash scripts/setup_cpu.sh

demo:
	bash run_demo.sh

test:
	bash run_tests.sh

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: setup
	$(PYTHON) tools/make_docs.py

# Under eight minutes on one GPU, in the environment of scripts/setup_gpu.sh; docs/gpu.md says what it checks.
gpu-check:
	.venv-gpu/bin/python tools/gpu_check.py

# The lock files of the GPU environments, where their inputs changed; with LOCKS=--all newer versions, too. With
# LOCKS=--verify nothing is written: all are resolved anew, and a difference is an error.
locks:
	python3 -m venv --clear .venv-locks
	.venv-locks/bin/python -m pip install --quiet uv
	PATH="$$PWD/.venv-locks/bin:$$PATH" .venv-locks/bin/python scripts/locks/make_locks.py $(LOCKS)
	rm -rf .venv-locks
