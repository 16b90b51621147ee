"""How fast trajectories are scored, beside the plain formulation with regular expressions.

    python -m benchmarks.reward [--trajectories 10000] [--trials 3]

The trajectories are of the demo's questions, with the passages that its retriever finds: right and wrong, well-formed
and not, of one search and of two. Reference: the whole response as one string, tags split and matched by regular
expressions, answers and passages normalised as in SQuAD's script. Both give the same reward on what is plain ASCII;
the share on which they agree is printed. Then both get ever longer hostile text: ours stays linear. The last line is
one JSON object; its ratio is scores per second, ours / reference.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.options import whole_number
from local_dense_retriever.corpus import read_corpus
from local_dense_retriever.retrievers import Bm25Retriever
from qa_em_format import Segment, score_response
from sleuth.search import to_passage

DEMO = Path(__file__).resolve().parent.parent / "data/demo"
WEIGHTS = {"score": 1.0, "format_score": 0.2, "retrieval_score": 0.1, "final_format_score": 0.1}
THINK = "<think>I do not know this for certain, so I should look it up before I answer.</think>"


class Trajectory(NamedTuple):
    segments: list[Segment]
    label: dict[str, Any]


def make_trajectories(count: int) -> list[Trajectory]:
    rng = random.Random(0)
    rows = pd.read_parquet(DEMO / "train.parquet").to_dict("records")
    corpus = read_corpus(DEMO / "corpus.jsonl.gz")
    retriever = Bm25Retriever.build(corpus)
    found = retriever.search(retriever.encode([row["question"] for row in rows]), 3)
    observations = [observation([corpus[hit.index] for hit in hits]) for hits in found]
    made = []
    for _ in range(count):
        at = rng.randrange(len(rows))
        label = rows[at]["reward_model"]["ground_truth"]
        answer = rng.choice([label["target"][0], rng.choice(rows)["golden_answers"][0]])
        segments = []
        for index in (at, rng.randrange(len(rows)))[: rng.choice([1, 1, 2])]:
            segments.append(("model", f"{THINK}\n<search>{rows[index]['question']}</search>"))
            segments.append(("observation", observations[index]))
        ending = rng.choice([f"{THINK}\n<answer>{answer}</answer>"] * 4 + [f"<answer>{answer}</answer>.", "I give up."])
        made.append(Trajectory([*segments, ("model", ending)], label))
    return made


def observation(documents: list[dict[str, Any]]) -> str:
    passages = map(to_passage, documents)
    lines = [f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(passages, start=1)]
    return "\n\n<information>" + "\n".join(lines) + "</information>\n\n"


# --- The plain formulation ---


def plain_normalize(text: str) -> str:
    text = text.lower()
    text = "".join(character for character in text if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def plain_is_valid(text: str) -> bool:
    for tag in ("think", "search", "information", "answer"):
        if len(re.findall(f"<{tag}>", text)) != len(re.findall(f"</{tag}>", text)):
            return False
    follows = {
        ("start", "<think>"): "in think",
        ("information", "<think>"): "in think",
        ("in think", "</think>"): "think",
        ("think", "<search>"): "in search",
        ("in search", "</search>"): "search",
        ("search", "<information>"): "in information",
        ("in information", "</information>"): "information",
        ("think", "<answer>"): "in answer",
        ("in answer", "</answer>"): "end",
    }
    state = "start"
    for part in re.split(r"(</?(?:think|search|information|answer)>)", text):
        if re.fullmatch(r"</?(?:think|search|information|answer)>", part):
            if (state, part) not in follows:
                return False
            state = follows[state, part]
        elif part.strip() and not state.startswith("in "):
            return False
    return state == "end"


def plain_score(trajectory: Trajectory) -> float:
    text = "".join(part for _, part in trajectory.segments)
    golden = [plain_normalize(answer) for answer in trajectory.label["target"]]
    answers = [match.group(1).strip() for match in re.finditer(r"<answer>(.*?)</answer>", text, re.DOTALL)]
    valid = plain_is_valid(text)
    if answers and plain_normalize(answers[-1]) in golden:
        return WEIGHTS["score"] if valid else WEIGHTS["score"] - WEIGHTS["format_score"]
    if valid:
        passages = re.findall(r"<information>(.*?)</information>", text, re.DOTALL)
        hit = any(gold in plain_normalize(passage) for passage in passages for gold in golden)
        return WEIGHTS["format_score"] + (WEIGHTS["retrieval_score"] if hit else 0.0)
    return WEIGHTS["final_format_score"] if answers else 0.0


# --- Measuring ---


def score(trajectory: Trajectory) -> float:
    return score_response(trajectory.segments, trajectory.label, **WEIGHTS).reward


def per_second(scorer: Callable[[Trajectory], float], trajectories: list[Trajectory]) -> float:
    start = time.process_time()
    for trajectory in trajectories:
        scorer(trajectory)
    return len(trajectories) / (time.process_time() - start)


def hostile_ms(scorer: Callable[[Trajectory], float], repeats: int) -> float:
    """Milliseconds for a response of nothing but opening tags."""
    trajectory = Trajectory([("model", "<answer>" * repeats)], {"target": ["x"]})
    start = time.process_time()
    scorer(trajectory)
    return 1000 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=whole_number(), default=10_000, help="trajectories to score [10000]")
    parser.add_argument("--trials", type=whole_number(), default=3, help="trials of each formulation [3]")
    options = parser.parse_args()

    trajectories = make_trajectories(options.trajectories)
    agree = sum(abs(score(t) - plain_score(t)) < 1e-9 for t in trajectories) / len(trajectories)
    print(f"{len(trajectories)} trajectories; the two agree on {agree:.1%}")
    for repeats in (2_500, 5_000, 20_000, 80_000):
        plain = f"{hostile_ms(plain_score, repeats):.0f} ms" if repeats <= 5_000 else "not run"
        print(f"{repeats} unclosed tags: ours {hostile_ms(score, repeats):.1f} ms, reference {plain}")
    pairs = []
    for _ in range(options.trials):
        ours, plain = per_second(score, trajectories), per_second(plain_score, trajectories)
        pairs.append((ours / plain, ours, plain))
        print(f"ours {ours:.0f}, reference {plain:.0f} scores a CPU second, ratio {ours / plain:.2f}")
    ratio, ours, plain = sorted(pairs)[len(pairs) // 2]
    print(json.dumps({"name": "reward", "ratio": ratio, "ours": ours, "reference": plain}))


if __name__ == "__main__":
    main()
