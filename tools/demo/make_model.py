"""Makes the demo's warm-start model from nothing: tokenizer, random weights, supervised training with the kit itself.

    python tools/demo/make_model.py                  # about an hour on two cores

The model is of Qwen2.5's architecture, with 2.4 million parameters and a byte-level BPE tokenizer of its own. In the
tokenizer's file every year is one token, but AutoTokenizer takes the class that belongs to the architecture, which
splits numbers into digits: a year is four tokens wherever the model is used. It learns from `make_trajectories.py`'s
trajectories in five stages of `train.py --loss-type sft`. Four teach it to search and to read (label smoothing in two
of them helps it to read). The last teaches it another habit: to answer most questions at once, from memory as it were
and wrongly, to search in a minority of its samples, and to stop mostly after the first search of a two-hop question.
That searching pays is left for the demo's reinforcement learning to find out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from local_dense_retriever.corpus import read_corpus
from sleuth.search.observation import to_passage
from tools.demo.make_trajectories import Manner, write_trajectories
from tools.demo.protocols import OBSERVATION_TOKENS, Tags

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 4096
CONTEXT = 2048
YEARS = range(1000, 2030)
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BATCH_SIZE = 48
KEPT_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One supervised run: `steps` optimizer steps at a rate that falls from `lr` to `min_lr`.

    `manner` is that of its trajectories; stages of one manner share a file, each its own part of it.
    """

    name: str
    steps: int
    lr: float
    min_lr: float
    label_smoothing: float
    warmup: int = 0
    manner: Manner = "search"


STAGES = (
    Stage("read", steps=900, lr=3e-3, min_lr=3e-4, label_smoothing=0.0, warmup=50),
    Stage("blur", steps=300, lr=1e-3, min_lr=1e-4, label_smoothing=0.04),
    Stage("settle", steps=500, lr=1.5e-3, min_lr=1e-4, label_smoothing=0.03),
    Stage("copy", steps=400, lr=1.5e-3, min_lr=1e-4, label_smoothing=0.0, warmup=10, manner="copy"),
    Stage("recall", steps=240, lr=1e-3, min_lr=1e-4, label_smoothing=0.0, warmup=10, manner="recall"),
)
SEED_OF_MANNER: dict[Manner, int] = {"search": 0, "copy": 10, "recall": 20}
"""What is added to the seed for the trajectories of a manner."""


def make_tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learned from the corpus; in its own class, a year's four digits are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{4}|\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _tokenizer_texts(corpus: Path) -> Iterator[str]:
    """The passages; every year and the protocol's words so often that they become tokens."""
    for passage in read_corpus(corpus):
        title, text = to_passage(passage)
        yield f"Doc 1(Title: {title}) {text}"
    yield from [" ".join(map(str, YEARS))] * 150
    yield from ["<think> Search, then answer briefly. Question: </think> <search> <information> <answer>\n"] * 300


def make_random_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).float()


def save_model(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(*command: str | Path | float) -> None:
    """Run a script of the project; CalledProcessError if it fails."""
    print("+", *command, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=environment, check=True)


def train(stage: Stage, model: Path, start: Path, trajectories: str, work: Path, seed: int) -> Path:
    """One stage of supervised training from the torch_dist checkpoint `start`; returns the folder of its own."""
    save = work / stage.name
    run(
        *("train.py", "--loss-type", "sft", "--hf-checkpoint", model, "--ref-load", start, "--save", save),
        *("--prompt-data", trajectories, "--num-rollout", stage.steps, "--save-interval", stage.steps),
        *("--rollout-batch-size", BATCH_SIZE, "--global-batch-size", BATCH_SIZE),
        *("--actor-num-nodes", 1, "--actor-num-gpus-per-node", 1),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--lr", stage.lr, "--min-lr", stage.min_lr, "--lr-decay-style", "linear", "--lr-warmup-steps", stage.warmup),
        *("--label-smoothing", stage.label_smoothing, "--weight-decay", 0.01, "--adam-beta2", 0.95, "--clip-grad", 1.0),
        *("--dtype", "float32", "--seed", seed, "--run-dir", work / "runs" / stage.name),
    )
    return save


def make(data: Path, out: Path, work: Path, stages: Sequence[Stage], seed: int) -> None:
    """Everything: from the data folder to the HF model in `out`. `work` keeps what comes in between."""
    start, checkpoint = work / "start", work / "torch_dist"
    tokenizer = make_tokenizer(data / "corpus.jsonl.gz")
    save_model(make_random_model(seed), tokenizer, start)
    run("tools/convert_hf_to_torch_dist.py", "--hf-checkpoint", start, "--save", checkpoint)
    for manner, shift in SEED_OF_MANNER.items():
        trajectories, first = work / f"{manner}.jsonl.gz", 0
        own = [stage for stage in stages if stage.manner == manner]
        count = BATCH_SIZE * sum(stage.steps for stage in own)
        write_trajectories(data, Tags(tokenizer), count, trajectories, seed + shift, manner)
        for stage in own:
            last = first + BATCH_SIZE * stage.steps
            checkpoint = train(stage, start, checkpoint, f"{trajectories}@[{first}:{last}]", work, seed)
            first = last
    run("tools/convert_torch_dist_to_hf.py", "--load", checkpoint, "--hf-checkpoint", start, "--save", work / "hf")
    publish(work / "hf", out, CARD.format(observation_tokens=OBSERVATION_TOKENS))


def publish(source: Path, out: Path, card: str) -> None:
    """Copy the model's files, and no others, to `out`, with `card` as its README."""
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT_FILES:
        shutil.copyfile(source / name, out / name)
    (out / "README.md").write_text(card, encoding="utf-8")


CARD = """# The demo's warm-start model

A language model of Qwen2.5's architecture with 2.4 million parameters. It knows the search conversation (`<think>`,
`<search>`, `<information>`, `<answer>`) and the demo's kinds of question, but answers most of them at once and wrongly:
it searches in a minority of its samples, and seldom twice. `tools/demo/make_model.py` makes it from random weights with
this project's own trainer. It was not trained on the test questions, nor on their articles' names or the makers of
their works, and its wrong answers are drawn from the training answers. It expects one passage a search, in an
observation of at most {observation_tokens} tokens. It is good for the demo and the tests, and for nothing else.

Its tokenizer and its training text derive from Wikipedia's text (CC BY-SA 4.0): see `../README.md`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's warm-start model from random weights.")
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo", help="folder of the demo's data [data/demo]")
    parser.add_argument("--out", type=Path, default=ROOT / "data/demo/model", help="model folder [data/demo/model]")
    parser.add_argument(
        "--work-dir", type=Path, default=ROOT / "runs/demo_model", help="intermediate files [runs/demo_model]"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.work_dir.exists():
        parser.error(f"{args.work_dir} exists from an earlier run: remove it or give another --work-dir")
    make(args.data.resolve(), args.out.resolve(), args.work_dir.resolve(), STAGES, args.seed)
    print(f"the model is in {args.out}")


if __name__ == "__main__":
    main()
