"""Asks a model the demo's held-out questions with transformers alone: no engine, no trainer.

    python tools/smollm2/ask.py --model runs/smollm2/<start time>/hf --search-url http://127.0.0.1:8000/retrieve

It shows that an exported model works wherever transformers does. The conversation is that of `generate_with_search.py`,
greedily. Ends with status 1 if no question is answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from generate_with_search import STOP, postprocess_predictions
from qa_em_format import em_check
from sleuth.search.observation import format_observation
from tools.smollm2.make_trajectories import OBSERVATION_TOKENS, ROOT

TURNS = 3
TURN_TOKENS = 48


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--search-url", required=True, help="the retrieval server, .../retrieve")
    parser.add_argument(
        "--questions", type=Path, default=ROOT / "data/demo/test.parquet", help="[data/demo/test.parquet]"
    )
    parser.add_argument("--count", type=int, default=4, help="how many questions [4]")
    options = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    answers = []
    for row in pq.read_table(options.questions).slice(0, options.count).to_pylist():
        rendered: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
        answer = ask(model, tokenizer, rendered["input_ids"], options.search_url)
        right = answer is not None and em_check(answer, row["golden_answers"])
        print(f"{row['question']} -> {answer or 'no answer'} ({'right' if right else 'wrong'})")
        answers.append(answer)
    return int(not any(answers))


def ask(model: Any, tokenizer: PreTrainedTokenizerBase, ids: list[int], search_url: str) -> str | None:
    """The answer to a rendered prompt `ids`, after at most TURNS turns; None if there is none."""
    for _ in range(TURNS):
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=TURN_TOKENS, do_sample=False, stop_strings=STOP, tokenizer=tokenizer
        )
        turn = out[0, len(ids) :].tolist()
        action, content = postprocess_predictions(str(tokenizer.decode(turn)))
        if action != "search":
            return content if action == "answer" else None
        answer = requests.post(search_url, json={"queries": [content], "topk": 1}, timeout=60)
        answer.raise_for_status()
        ids = ids + turn + format_observation(answer.json()["result"][0], tokenizer, OBSERVATION_TOKENS)
    return None


if __name__ == "__main__":
    sys.exit(main())
