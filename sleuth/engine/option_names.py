"""How an option of SGLang's server is written: on its own command line, and as a flag of a run.

Names have underscores (`cuda_graph_max_bs`); an option's words are what follows it, none for a switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def option(name: str) -> str:
    """`cuda_graph_max_bs` -> `--cuda-graph-max-bs`."""
    return "--" + name.replace("_", "-")


def option_flag(name: str) -> str:
    """`cuda_graph_max_bs` -> `--sglang-cuda-graph-max-bs`."""
    return option(f"sglang_{name}")


def option_words(options: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The options, name -> words, as SGLang's command line takes them."""
    return tuple(word for name, words in options.items() for word in (option(name), *words))
