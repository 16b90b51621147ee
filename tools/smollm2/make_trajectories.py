"""Writes the trajectories of SmolLM2's supervised warm-up: training questions of the demo, searched and answered.

    python tools/smollm2/make_trajectories.py --model runs/smollm2/SmolLM2-135M-Instruct --out trajectories.jsonl.gz

Each row has a column `segments` for `train.py --loss-type sft`: the rendered prompt, a turn that searches for the name
in the question, the observation that the search hook makes of what BM25 finds first, and a turn that answers. Only
what the model says is trained on. Questions that need two searches are left out.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from local_dense_retriever.corpus import read_corpus
from local_dense_retriever.retrievers import Bm25Retriever
from sleuth.search.observation import format_observation

ROOT = Path(__file__).resolve().parents[2]
OBSERVATION_TOKENS = 56
"""What run_smollm2.sh sets as max_observation_tokens."""
ONE_HOP = re.compile(
    r"^(?:In what year was (?P<born>.+) born|In what year did (?P<dead>.+) die|Who \w+ the \w+ (?P<made>.+)"
    r"|From what year is the \w+ (?P<dated>.+))\?$"
)
SEARCH_THOUGHT, ANSWER_THOUGHT = "I need to search.", "I can answer now."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo", help="folder of the demo's data [data/demo]")
    parser.add_argument("--count", type=int, default=256, help="how many trajectories [256]")
    parser.add_argument("--seed", type=int, default=1, help="which questions, and their order [1]")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, gzipped")
    options = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = pq.read_table(options.data / "train.parquet").to_pylist()
    random.Random(options.seed).shuffle(rows)
    passages = read_corpus(options.data / "corpus.jsonl.gz")
    trajectories = list(itertools.islice(make_trajectories(rows, passages, tokenizer), options.count))
    if len(trajectories) < options.count:
        parser.error(f"--count {options.count}: expected at most {len(trajectories)}, the number of usable questions")
    with gzip.open(options.out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"segments": segments}, ensure_ascii=False) + "\n" for segments in trajectories)
    return 0


def make_trajectories(
    rows: Sequence[dict[str, Any]], passages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[dict[str, Any]]]:
    """The segments of a trajectory for each row whose answer one search shows."""
    retriever = Bm25Retriever.build(passages)
    for row in rows:
        name = searched_name(row["question"])
        if row["data_source"] == "demo_two_hop" or name is None:
            continue
        (hits,) = retriever.search(retriever.encode([name]), topk=1)
        ids = format_observation([passages[hits[0].index]] if hits else [], tokenizer, OBSERVATION_TOKENS)
        observation, answer = str(tokenizer.decode(ids)), row["golden_answers"][0]
        if answer in observation:
            yield _segments(row["prompt"], name, observation, answer, tokenizer)


def searched_name(question: str) -> str | None:
    """The person or work that a question asks about; None for other questions."""
    match = ONE_HOP.match(question)
    return next(filter(None, match.groups())) if match else None


def _segments(
    prompt: list[dict[str, str]], name: str, observation: str, answer: str, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    rendered = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    return [
        {"text": rendered, "weight": 0.0},
        {"text": f"<think>{SEARCH_THOUGHT}</think>\n<search> {name} </search>", "weight": 1.0},
        {"text": observation, "weight": 0.0},
        {"text": f"<think>{ANSWER_THOUGHT}</think>\n<answer> {answer} </answer>", "weight": 1.0},
    ]


if __name__ == "__main__":
    sys.exit(main())
