# The commands of daily work; AGENTS.md says more about each.
PYTHON := .venv/bin/python

.PHONY: setup demo test lint format docs

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
