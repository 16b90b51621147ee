#!/usr/bin/env bash
# A web agent: Qwen3-4B searches the web through DeepSeek's search, otherwise as webagent_wikipedia.sh.
#
#   export DEEPSEEK_API_KEY=...                      # or in a file .env, as in .env.example
#   DRY_RUN=1 bash recipes/webagent_deepseek.sh      # the checks and the plan
#   bash recipes/webagent_deepseek.sh                # variables: run_qwen2.5_3B.sh; further flags go to train.py
#   SEARCH_BACKEND=zhihu bash recipes/webagent_deepseek.sh    # or google, searxng, module.function
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
recipe webagent-deepseek qwen3-4B
export SEARCH_BACKEND="${SEARCH_BACKEND:-deepseek}"
source "$recipes/webagent_settings.sh"
start "$@"
