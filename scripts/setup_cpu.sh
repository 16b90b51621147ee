#!/usr/bin/env bash
# Makes .venv with all that a CPU needs: the engine, the trainer, the tests. About 2.5 GB and two minutes.
#
#   bash scripts/setup_cpu.sh              # run_demo.sh and run_tests.sh do this themselves
#   PYTHON=/usr/bin/python3.11 bash scripts/setup_cpu.sh
#
# A second run returns at once; one after an interruption, or after a change of the requirements, repairs .venv.
# scripts/requirements-cpu.txt says what is needed, scripts/constraints-cpu.txt at which versions;
# scripts/requirements-cpu-hashed.txt is data, which must be the same to the byte.
set -euo pipefail

SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$SCRIPTS")"
VENV="$ROOT/.venv"
STAMP="$VENV/sleuth-setup.done"
LOG="$VENV/sleuth-setup.log"
REQUIREMENTS="$SCRIPTS/requirements-cpu.txt"
NO_DEPS="$SCRIPTS/requirements-cpu-nodeps.txt"
HASHED="$SCRIPTS/requirements-cpu-hashed.txt"
CONSTRAINTS="$SCRIPTS/constraints-cpu.txt"
NEEDED_MB=4000

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# What the stamp holds: the requirements it stands for. Written last, so an interrupted set-up has none.
fingerprint() {
    "$1" - "$REQUIREMENTS" "$NO_DEPS" "$HASHED" "$CONSTRAINTS" <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(b"\0".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])).hexdigest())
PY
}

is_done() {
    [[ -f "$STAMP" && -x "$VENV/bin/python" ]] || return 1
    [[ "$(fingerprint "$VENV/bin/python" 2>/dev/null)" == "$(cat "$STAMP")" ]]
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
    local candidate found=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        local version
        version="$(version_of "$candidate")" || continue
        if [[ "$version" == 3.11 ]]; then
            command -v "$candidate"
            return
        fi
        found+=" $candidate is $version;"
        [[ "$candidate" == "${PYTHON:-}" ]] && break
    done
    fail "expected Python 3.11, found${found:- none of ${PYTHON:-python3.11, python3};}" \
        "install it (Debian: apt install python3.11-venv; or uv python install 3.11, or pyenv install 3.11)" \
        "and name it: PYTHON=/path/to/python3.11 bash scripts/setup_cpu.sh"
}

check_space() {
    local free used=0
    free="$(df -Pm "$ROOT" | awk 'NR == 2 { print $4 }')"
    [[ -d "$VENV" ]] && used="$(du -sm "$VENV" 2>/dev/null | cut -f1)"
    (( free + used >= NEEDED_MB )) || fail "expected $NEEDED_MB MB of free disk space for $VENV, found $free MB" \
        "free some, or clone the project to a larger disk"
}

# A venv that is half made, or of another Python, is made anew; what is none of ours is not touched.
make_venv() {
    local python="$1"
    if [[ -e "$VENV" && ! -f "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        fail "$VENV exists and is no virtual environment: move it away"
    fi
    if [[ "$(version_of "$VENV/bin/python")" != 3.11 ]] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$VENV" || fail "$python cannot make a virtual environment (see above);" \
            "its venv module may be missing (Debian: apt install python3.11-venv), or the disk be full"
    fi
}

show_progress() {
    local terminal=0
    [[ -t 1 ]] && terminal=1
    awk -v terminal="$terminal" '
        /^Collecting/ { n++; if (terminal) printf "\r\033[K  %d packages found, now %s", n, $2; else if (n % 40 == 0) print "  " n " packages found" }
        /^Installing collected/ { if (terminal) printf "\r\033[K"; print "  unpacking"; fflush() }
        { fflush() }'
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --retries 3 "$@" </dev/null 2>&1; }

uv_install() { "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" --no-progress "$@" </dev/null 2>&1; }

install() {
    echo "-- $1"
    shift
    local start
    start="$(wc -l <"$LOG")"
    pip_install "$@" | tee -a "$LOG" | show_progress || explain_failure "$start"
}

unreachable() { grep -Eim 1 'NewConnectionError|ConnectTimeout|NameResolution|name resolution|Read timed out|ProxyError|Network is unreachable|SSLError|ConnectionReset'; }

# Says in words what pip's output from line $1 of the log on means, and ends.
explain_failure() {
    local end why
    end="$(tail -n +"$(($1 + 1))" "$LOG")"
    if grep -qi 'no space left' <<<"$end"; then
        fail "the disk is full: it needs about $NEEDED_MB MB; free some and run this again"
    elif why="$(unreachable <<<"$end")"; then
        fail "the package index cannot be reached: ${why:0:300}" \
            "check the network (or pip's index-url and proxy) and run this again; what was downloaded is kept"
    fi
    grep -v '^WARNING: Location' <<<"$end" | tail -n 8 | sed 's/^/    /' >&2
    fail "pip failed; all it said is in $LOG"
}

# PyPI's build of torch for x86 Linux carries CUDA (several GB); a CPU build has "+cpu" in its version.
install_torch() {
    local version
    version="$(sed -n 's/^torch==//p' "$CONSTRAINTS")"
    if "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
        return
    fi
    echo "-- torch $version for CPUs"
    local start
    start="$(wc -l <"$LOG")"
    pip_install --no-deps "torch==$version+cpu" >>"$LOG" && return
    # If even the usual index cannot be reached, the rest would fail as well.
    if tail -n +"$((start + 1))" "$LOG" | grep -q 'from versions: none'; then
        explain_failure "$start"
    fi
    grep -qi 'no space left' "$LOG" && explain_failure "$start"
    # uv knows where PyTorch's own builds are.
    pip_install "uv>=0.7" >>"$LOG" && uv_install --torch-backend cpu --no-deps "torch==$version" >>"$LOG" && return
    echo "   no CPU build of torch $version to be had: taking the index's own build" >&2
    NEEDED_MB=12000
    check_space
}

# Whether exactly the pinned set is there: an interrupted pip can leave packages half unpacked.
verify() {
    "$VENV/bin/python" - "$CONSTRAINTS" "$HASHED" <<'PY'
import importlib.metadata, pathlib, sys
lines = [line for name in sys.argv[1:] for line in pathlib.Path(name).read_text().splitlines()]
wrong = []
for pin in [line.split()[0] for line in lines if "==" in line and line[0] not in "# "]:
    name, version = pin.split("==")
    try:
        distribution = importlib.metadata.distribution(name)
        missing = [file for file in distribution.files or [] if file.suffix in (".py", ".safetensors") and not file.locate().exists()]
        if distribution.version.split("+")[0] != version or missing:
            wrong.append(name)
    except importlib.metadata.PackageNotFoundError:
        wrong.append(name)
print(*wrong)
PY
}

repair() {
    local wrong
    wrong="$(verify)" || fail "cannot read $CONSTRAINTS"
    [[ -z "$wrong" ]] && return
    local pins=() name
    for name in $wrong; do
        if grep -qi "^$name==" "$HASHED"; then
            install "repairing $name" --no-deps --force-reinstall --require-hashes --requirement "$HASHED"
        else
            pins+=("$(grep -i "^$name==" "$CONSTRAINTS")")
        fi
    done
    (( ${#pins[@]} == 0 )) || install "repairing ${#pins[@]} packages" --no-deps --force-reinstall "${pins[@]}"
    wrong="$(verify)"
    [[ -z "$wrong" ]] || fail "these packages are not at the pinned versions: $wrong" "remove $VENV and run this again"
}

main() {
    is_done && return
    if command -v flock >/dev/null; then
        exec 9<"$SCRIPTS"
        flock 9
        is_done && return # another set-up did it meanwhile
    fi
    local python
    python="$(find_python)"
    check_space
    echo "== setting up $VENV ($python); once, some minutes"
    make_venv "$python"
    rm -f "$STAMP"
    : >"$LOG"
    install_torch
    install "the packages of scripts/requirements-cpu.txt" --constraint "$CONSTRAINTS" --requirement "$REQUIREMENTS"
    install "the engine" --constraint "$CONSTRAINTS" --no-deps --requirement "$NO_DEPS"
    install "an encoder" --no-deps --require-hashes --requirement "$HASHED"
    repair
    fingerprint "$VENV/bin/python" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    echo "== ready: $VENV"
}

main
