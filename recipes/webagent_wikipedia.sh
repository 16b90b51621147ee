#!/usr/bin/env bash
# A web agent: Qwen3-4B searches Wikipedia itself by tool calls, up to 6 turns and 4 searches, and ends with a line
# `Answer: ...`. No retrieval server and no key; Wikipedia wants to know whom to write to:
#
#   export WIKIPEDIA_CONTACT=you@example.org
#   DRY_RUN=1 bash recipes/webagent_wikipedia.sh     # the checks and the plan
#   bash recipes/webagent_wikipedia.sh               # variables: run_qwen2.5_3B.sh; further flags go to train.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
recipe webagent-wikipedia qwen3-4B
export SEARCH_BACKEND="${SEARCH_BACKEND:-wikipedia}"
source "$recipes/webagent_settings.sh"
start "$@"
