#!/usr/bin/env bash
# Makes .venv-gpu with all that a machine with NVIDIA GPUs needs: engine, trainer, search, tests.
#
#   bash scripts/setup_gpu.sh                # about 5 GB to download; the trainer runs on torch's own kernels
#   bash scripts/setup_gpu.sh --te           # with TransformerEngine, which is compiled here: takes long
#   bash scripts/setup_gpu.sh --retriever    # .venv-retriever-gpu: the retrieval server with FAISS on GPUs
#   bash scripts/setup_gpu.sh --check        # only look whether this machine has what it takes
#
# PYTHON=/usr/bin/python3.12 names the Python, 3.11 or 3.12. SKIP_DRIVER_CHECK=1 is for images, built without a GPU.
# A second run returns at once; one after an interruption, or with other options or locks, makes the environment good.
# Everything is installed from scripts/locks/, by hash; `make locks` makes those files.
set -euo pipefail

SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$SCRIPTS")"
NEEDED_DRIVER=580   # of CUDA 13
NEEDED_GLIBC=2.34   # of SGLang's wheels
NEEDED_NVCC=13      # what is compiled must be for the CUDA that torch is built for
NEEDED_COMPUTE=7.5  # the oldest GPUs that CUDA 13 computes on; the driver still accepts older ones

# Each check prints what it misses, with the remedy, and then returns 1.

missing() {
    printf 'setup: %s\n' "$@" >&2
    return 1
}

# Whether version $1 is at least $2.
at_least() { [[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

check_processor() {
    local found
    found="$(uname -sm)"
    [[ "$found" == "Linux x86_64" ]] || missing "expected Linux on x86_64, which scripts/locks/ are for, found $found: use such a machine"
}

check_driver() {
    local found
    if [[ "${SKIP_DRIVER_CHECK:-0}" == 1 ]]; then
        return
    elif ! found="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1)"; then
        missing "expected an NVIDIA driver >= $NEEDED_DRIVER, found none (nvidia-smi: ${found:0:200})" \
            "install one and restart, or start the container with its GPUs (docker run --gpus all)"
    elif found="$(head -n 1 <<<"$found")" && ! at_least "$found" "$NEEDED_DRIVER"; then
        missing "expected an NVIDIA driver >= $NEEDED_DRIVER (CUDA 13), found $found: update it and restart"
    else
        check_gpus
    fi
}

check_gpus() {
    local name capability
    while IFS=, read -r name capability; do
        capability="${capability// /}"
        [[ "$capability" =~ ^[0-9]+\.[0-9]+$ ]] || continue # not told
        at_least "$capability" "$NEEDED_COMPUTE" \
            || missing "expected GPUs of compute capability >= $NEEDED_COMPUTE (Turing or newer), found $name of $capability: use others" || return
    done < <(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader)
}

check_glibc() {
    local found
    found="$(ldd --version 2>&1 | grep -oEm 1 '[0-9]+\.[0-9]+$' || true)"
    if [[ -z "$found" ]]; then
        missing "expected glibc >= $NEEDED_GLIBC, found another C library: use Ubuntu 22.04, Debian 12 or later, or the Dockerfile"
    elif ! at_least "$found" "$NEEDED_GLIBC"; then
        missing "expected glibc >= $NEEDED_GLIBC, found $found: use Ubuntu 22.04, Debian 12 or later, or the Dockerfile"
    fi
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the Python to use.
find_python() {
    local candidate version found=""
    local candidates=(python3.12 python3.11 python3)
    [[ -n "${PYTHON:-}" ]] && candidates=("$PYTHON") # one, whose path may have spaces
    for candidate in "${candidates[@]}"; do
        version="$(version_of "$candidate")" || continue
        if [[ "$version" == 3.1[12] ]]; then
            command -v "$candidate"
            return
        fi
        found+=" $candidate is $version;"
    done
    missing "expected Python 3.11 or 3.12, found${found:- none${PYTHON:+ that runs as $PYTHON};} install it (Debian, Ubuntu: apt install python3.12-venv," \
        "python3.12-dev) and name it: PYTHON=/path/to/python3.12 bash scripts/setup_gpu.sh"
}

# Engines compile some of their kernels when they start (SGLang's own and FlashInfer's), and look for nvcc as here.
check_nvcc() {
    local nvcc=nvcc found
    if [[ -n "${CUDA_HOME:-}" ]]; then
        nvcc="$CUDA_HOME/bin/nvcc"
    elif ! command -v nvcc >/dev/null; then
        nvcc=/usr/local/cuda/bin/nvcc
    fi
    found="$("$nvcc" --version 2>/dev/null | grep -oEm 1 'release [0-9]+\.[0-9]+' || true)"
    if [[ -z "$found" ]]; then
        missing "expected CUDA's compiler $NEEDED_NVCC, by which engines make kernels when they start, found no $nvcc:" \
            "install the CUDA toolkit $NEEDED_NVCC and set CUDA_HOME to it, or use the Dockerfile"
    elif [[ "${found#release }" != "$NEEDED_NVCC".* ]]; then
        missing "expected CUDA's compiler $NEEDED_NVCC, found ${found#release } ($nvcc): set CUDA_HOME to another, or use the Dockerfile"
    fi
}

# The compiler and headers that nvcc and Triton call for what they compile.
check_build_tools() {
    local python include
    command -v g++ >/dev/null || missing "expected a C++ compiler, found no g++: install it (Debian, Ubuntu: apt install build-essential)" || return
    python="$(find_python 2>/dev/null)" || return 0 # told already
    include="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    if [[ ! -f "$include/Python.h" ]]; then
        missing "expected Python's headers, found no $include/Python.h: install them (Debian, Ubuntu: apt install" \
            "python$(version_of "$python")-dev)"
    fi
}

# Free disk for environment $1, which will take about $2 MB.
check_space() {
    local free used=0
    free="$(df -Pm "$ROOT" | awk 'NR == 2 { print $4 }')"
    [[ -d "$1" ]] && used="$(du -sm "$1" 2>/dev/null | cut -f1)"
    if ((free + used < $2)); then
        missing "expected $2 MB of free disk space for $1, found $free MB: free some, or clone the project to a larger disk"
    fi
}

# Reports everything that this machine lacks for environment $1 of $2 MB, not only the first thing.
check_machine() {
    local good=0
    check_processor || good=1
    check_driver || good=1
    check_glibc || good=1
    find_python >/dev/null || good=1
    check_venv_module || good=1
    if [[ "$1" != *retriever* ]]; then
        check_nvcc || good=1
        check_build_tools || good=1
    fi
    check_space "$1" "$2" || good=1
    return "$good"
}

check_venv_module() {
    local python
    python="$(find_python 2>/dev/null)" || return 0 # told already
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing "expected Python's venv and ensurepip, found none in $python:" \
        "install them (Debian, Ubuntu: apt install python$(version_of "$python")-venv)"
}

# A hash of the locks that the environment was made from. It is written last, as a sign that all is installed.
fingerprint() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

# Whether the environment is there for Python $1, from the locks that follow.
is_done() {
    local version="$1"
    shift
    [[ "$(version_of "$VENV/bin/python")" == "$version" && "$(fingerprint "$@")" == "$(cat "$VENV/sleuth-setup.done" 2>/dev/null)" ]]
}

# An interrupted set-up goes on; one that was finished with other locks may hold what these do not name.
make_venv() {
    if [[ -e "$VENV" && ! -f "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        missing "expected no $VENV, or one that this script made, found something else: move it away"
    elif [[ -f "$VENV/sleuth-setup.done" || "$(version_of "$VENV/bin/python")" != "$2" ]]; then
        "$1" -m venv --clear "$VENV"
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --retries 3 --no-deps --require-hashes \
        --only-binary :all: "$@" </dev/null
}

# Only its PyTorch part is compiled. By itself it would first look for a binary elsewhere, of which no hash is known.
install_te() {
    local packages include
    packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    include="$(printf '%s:' "$packages"/nvidia/*/include)" # headers of cuDNN and NCCL
    echo "-- TransformerEngine"
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE CPLUS_INCLUDE_PATH="$include${CPLUS_INCLUDE_PATH:-}" \
        pip_install --no-build-isolation --no-binary transformer-engine-torch --requirement "$1"
}

# The environment must see the GPUs, or the set-up has failed whatever was installed.
try_out() {
    [[ "${SKIP_DRIVER_CHECK:-0}" == 1 ]] || "$VENV/bin/python" - <<'PY'
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"setup: torch {torch.__version__} sees no GPU: compare nvidia-smi, and CUDA_VISIBLE_DEVICES")
print(f"== torch {torch.__version__} sees {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
PY
}

main() {
    local name=gpu needed=20000 only_check=0 python version locks
    WITH_TE=0
    while (($#)); do
        case "$1" in
            --te) WITH_TE=1 needed=25000 ;;
            --retriever) name=retriever-gpu needed=12000 ;;
            --check) only_check=1 ;;
            *) missing "unknown option: $1 (there are --te, --retriever, --check)" || exit 2 ;;
        esac
        shift
    done
    [[ "$WITH_TE$name" == 1retriever-gpu ]] && { missing "expected --te or --retriever, found both: leave one out" || exit 2; }
    VENV="$ROOT/.venv-$name"
    check_machine "$VENV" "$needed" || exit 1
    python="$(find_python)"
    version="$(version_of "$python")"
    if ((only_check)); then
        echo "== this machine has what .venv-$name takes (Python $version)"
        return
    fi
    locks=("$SCRIPTS/locks/$name-$version.txt")
    [[ "$WITH_TE" == 1 ]] && locks+=("$SCRIPTS/locks/gpu-te-$version.txt")
    is_done "$version" "${locks[@]}" || {
        if command -v flock >/dev/null; then
            exec 9<"$SCRIPTS"
            flock 9 # another set-up may be doing it
        fi
    }
    if is_done "$version" "${locks[@]}"; then
        try_out
        return
    fi
    echo "== setting up $VENV ($python); once, some minutes"
    make_venv "$python" "$version"
    pip_install --requirement "${locks[0]}"
    [[ "$WITH_TE" == 1 ]] && install_te "${locks[1]}"
    try_out
    fingerprint "${locks[@]}" >"$VENV/sleuth-setup.done"
    echo "== ready: $VENV"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then main "$@"; fi
