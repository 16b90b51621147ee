# Sets NUM_GPUS, where nobody set it, to the number of GPUs that CUDA_VISIBLE_DEVICES names (a Slurm job), else 8; and
# checks it. To be sourced.
# shellcheck shell=bash
if [[ -z "${NUM_GPUS:-}" ]]; then
    NUM_GPUS=8
    # "-1" is what people write for none.
    [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]] && NUM_GPUS="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -vc '^ *\(-1\)\? *$' || true)"
fi
for name in NUM_GPUS NUM_NODES; do
    if [[ ! "${!name-1}" =~ ^[1-9][0-9]*$ ]]; then
        echo "$name: expected a number from 1 on, found '${!name}'${CUDA_VISIBLE_DEVICES:+ (CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES')}" >&2
        exit 2
    fi
done
