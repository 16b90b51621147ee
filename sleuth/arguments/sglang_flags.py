"""SGLang's own options, `--sglang-<its name>`: taken as text and handed to every engine's command line.

    --sglang-cuda-graph-max-bs 128 --sglang-enable-torch-compile --sglang-json-model-override-args '{"...": 1}'

In a configuration file: `sglang_cuda_graph_max_bs: 128`, `sglang_enable_torch_compile: true`. Which options there are,
and their values, SGLang knows (`sleuth.engine.option_check` asks it before a run starts). Here stand those that follow
from other flags. The few with a type of their own are fields of `EngineArgs`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sleuth.engine.option_names import option_flag

PREFIX = "sglang_"

_ITS_NODES = "an engine's nodes follow from --rollout-num-gpus-per-engine and the cluster"
_OWN_GPUS = "every engine sees only its own GPUs, and takes them all: use --rollout-num-gpus-per-engine"
_OWN_PORT = "every engine listens on a free port, for its own machine only"
SET_HERE = {
    "model_path": "use --hf-checkpoint",
    "model": "use --hf-checkpoint",
    "tp_size": "use --rollout-num-gpus-per-engine",
    "tensor_parallel_size": "use --rollout-num-gpus-per-engine",
    "pp_size": _OWN_GPUS,
    "pipeline_parallel_size": _OWN_GPUS,
    "base_gpu_id": _OWN_GPUS,
    "gpu_id_step": _OWN_GPUS,
    "device": "engines run on GPUs where Ray has any, else on the CPU",
    "nnodes": _ITS_NODES,
    "node_rank": _ITS_NODES,
    "dist_init_addr": _ITS_NODES,
    "nccl_init_addr": _ITS_NODES,
    "host": _OWN_PORT,
    "port": _OWN_PORT,
    "ssl_keyfile": _OWN_PORT,
    "ssl_certfile": _OWN_PORT,
    "api_key": _OWN_PORT,
    "random_seed": "use --seed",
    "context_length": "use --rollout-max-context-len",
    "max_running_requests": "use --rollout-max-concurrency",
    "enable_memory_saver": "use --colocate",
    "skip_tokenizer_init": "turns end at stop strings, for which an engine needs its tokenizer",
    "config": "options in a file of SGLang's would not be checked; give them one by one",
}
"""Options of SGLang that are not for `--sglang-...`, aliases included, and what to do instead."""


def take_options(argv: Sequence[str], known: Collection[str]) -> tuple[dict[str, list[str]], list[str]]:
    """SGLang's options in a command line, name -> words, and the other words; `known` are flags with the same prefix.

    An option's words go up to the next `--`; one that is given again replaces the first.
    """
    options: dict[str, list[str]] = {}
    others: list[str] = []
    words = others
    for word in argv:
        if word.startswith("--"):
            head, given, value = word.removeprefix("--").partition("=")
            name = head.replace("-", "_")
            words = others
            if is_option(name, known):
                words = options[name.removeprefix(PREFIX)] = [value] if given else []
                continue
        words.append(word)
    return options, others


def is_option(name: str, known: Collection[str]) -> bool:
    """Whether a flag's name, with underscores, is one of SGLang's options."""
    return name.startswith(PREFIX) and name not in known


def option_from_yaml(name: str, value: Any) -> list[str]:
    """A value in a configuration file as words of a command line; ValueError for one that says nothing there."""
    if value is False or value is None:
        raise ValueError(f"{name}: expected a value or true, found {json.dumps(value)}; leave it out")
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def options_to_yaml(options: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What `option_from_yaml` reads back."""
    return {
        PREFIX + name: list(words) if len(words) > 1 else words[0] if words else True for name, words in options.items()
    }


def clashes(options: Collection[str]) -> Iterator[str]:
    """What is wrong with options that are set from elsewhere."""
    for name in options:
        if name in SET_HERE:
            yield f"{option_flag(name)} follows from the rest of a run: {SET_HERE[name]}"
