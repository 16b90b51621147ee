"""The public question sets of FlashRAG's collection: which splits they have, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sleuth.data.hub import fetch

REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
TRAIN_SETS = ("nq", "hotpotqa")
TEST_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


@dataclass(frozen=True, slots=True)
class PublicSet:
    """Rows of each split as FlashRAG's table states them (0: it has no such split)."""

    train: int
    dev: int
    test: int

    @property
    def held_out(self) -> str:
        """The split that is evaluated: test, where it is public, else dev."""
        return "test" if self.test else "dev"

    def rows(self, split: str) -> int:
        return {"train": self.train, "dev": self.dev, "test": self.test}[split]


SETS = {
    "nq": PublicSet(79_168, 8_757, 3_610),
    "triviaqa": PublicSet(78_785, 8_837, 11_313),
    "popqa": PublicSet(0, 0, 14_267),
    "hotpotqa": PublicSet(90_447, 7_405, 0),
    "2wikimultihopqa": PublicSet(15_000, 12_576, 0),
    "musique": PublicSet(19_938, 2_417, 0),
    "bamboogle": PublicSet(0, 0, 125),
}


def named_sets(text: str, split: str, flag: str) -> list[str]:
    """The sets in `nq,hotpotqa`; ValueError for one that is unknown, or has no rows to train on (`split` train)."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    usable = [name for name, found in SETS.items() if split != "train" or found.train]
    if not names or (wrong := [name for name in names if name not in usable]):
        found = ", ".join(wrong) if names else repr(text)
        raise ValueError(f"{flag}: expected names among {', '.join(usable)}, with commas between, found {found}")
    if len(set(names)) < len(names):
        raise ValueError(f"{flag}: expected each set once, found {text}; leave the repeated one out")
    return names


def file_of(name: str, split: str, source: str) -> Path:
    """`<set>/<split>.jsonl` of `source`: a folder on this machine, or else a data set of the Hugging Face hub.

    FileNotFoundError, which says what to do, if it is not there.
    """
    file = f"{name}/{split}.jsonl"
    folder = Path(source)
    if folder.is_dir():
        if (folder / file).is_file():
            return folder / file
        raise FileNotFoundError(
            f"--source: expected {file} in the folder {folder}, found none; download it with `hf download {REPOSITORY} "
            f"{file} --repo-type dataset --local-dir {folder}`"
        )
    repo, _, revision = source.partition("@")
    return fetch(repo, file, revision or None)
