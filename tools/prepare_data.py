"""Makes train.parquet, test.parquet and dev.parquet, as `--prompt-data` and `--eval-prompt-data` take them.

    python tools/prepare_data.py --local_dir data/search_r1                        NQ and HotpotQA, seven sets to test
    python tools/prepare_data.py --local_dir data/nq --data_sources nq --test_sources nq,popqa
    python tools/prepare_data.py --local_dir data/mine --train mine.csv --question-column q --answers-column answer

Public sets come from FlashRAG's collection on the Hugging Face hub, or from a folder of its files (--source). Your own
rows come from CSV, TSV, JSONL or parquet; without --test a part of them is held out. Rows are in Search-R1's shape:
prompt (instruction and question), reward_model (the accepted answers), data_source, question, golden_answers. Test rows
keep their order; dev.parquet holds a few rows of each set of test.parquet, always the same.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.prompt_templates import QUESTION, TEMPLATES, PromptTemplate
from tools.qa_data import public
from tools.qa_data.read import Columns, read_rows
from tools.qa_data.rows import Counts, RowWriter, make_row, question_key, writing

MOST_HELD_OUT = 500


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one file that go into one of the outputs. `expected`: how many there should be, where that is known."""

    name: str
    path: Path
    columns: Columns
    encoding: str = "utf-8"
    expected: int | None = None
    public: bool = False
    counts: Counts = field(default_factory=Counts)

    @property
    def shown(self) -> str:
        """The file, with its folder where it was given with one."""
        return str(Path(*self.path.parts[-2:]))


@dataclass(slots=True)
class Output:
    """A file that is being written, the questions that are in it, and the rows of each source with the least keys."""

    split: str
    writer: RowWriter
    template: PromptTemplate
    keys: set[int] = field(default_factory=set)
    sources: dict[str, int] = field(default_factory=dict)
    least: dict[str, list[tuple[int, int, dict[str, Any]]]] = field(default_factory=dict)

    def add(self, part: Part, number: int, row: dict[str, Any], question: str, answers: list[str], key: int) -> None:
        source = part.name if part.public else str(row.get("data_source") or part.name)
        made = make_row(row, question, answers, source, self.split, number, self.template)
        self.keys.add(key)
        self.sources[source] = self.sources.get(source, 0) + 1
        self.writer.write(made)
        self._keep_least(source, key, made)

    def _keep_least(self, source: str, key: int, made: dict[str, Any]) -> None:
        """Keep the row for dev.parquet if its key is among the least: always the same rows, spread over the set."""
        heap = self.least.setdefault(source, [])
        if any(-negative == key for negative, _, _ in heap):
            return
        entry = (-key, self.writer.count, made)
        if len(heap) < KEPT_FOR_DEV:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)


KEPT_FOR_DEV = 100
"""The most rows of a source in dev.parquet; they are in memory."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_dir", "--local-dir", required=True, type=Path, help="folder for the three files")
    sets = ",".join(public.TRAIN_SETS), ",".join(public.TEST_SETS)
    add("--data_sources", "--data-sources", default=None, help=f"public sets to train on [{sets[0]}]")
    add("--test_sources", "--test-sources", default=None, help=f"public sets to test on [{sets[1]}]")
    add(
        "--source",
        default=public.REPOSITORY,
        help=f"where public sets are: a data set of the hub, or a folder of SET/SPLIT.jsonl [{public.REPOSITORY}]",
    )
    add("--train", nargs="+", type=Path, help="files of your own instead: .csv, .tsv, .jsonl or .parquet")
    add("--test", nargs="+", type=Path, help="files to test on [a tenth of --train, 500 rows at most, is held out]")
    add("--question-column", "--question_column", default=None, help="column of the question [question]")
    add(
        "--answers-column",
        "--answers_column",
        default=None,
        help="column of the answers: one, or a list, also written out as JSON or Python [golden_answers]",
    )
    add(
        "--answers-separator", "--answers_separator", default=None, help="what stands between answers, such as | [none]"
    )
    add("--name", default=None, help="data_source of your rows, where they have no such column [the file's name]")
    add("--encoding", default="utf-8", help="of CSV and TSV files; Excel on Windows may write cp1252 [utf-8]")
    add(
        "--protocol",
        choices=(*TEMPLATES, "none"),
        default="tags",
        help="whose instruction stands before the question: tags (generate_with_search.py), tools "
        "(generate_with_tools.py), none [tags]",
    )
    add(
        "--prompt-template",
        "--prompt_template",
        default=None,
        help="file of an instruction of your own, with {question}",
    )
    add("--dev-rows", "--dev_rows", type=int, default=10, help="rows of each source in dev.parquet [10]")
    add(
        "--drop-duplicates",
        action="store_true",
        help="leave out training questions that were there before, or are tested",
    )
    args = parser.parse_args(argv)
    own = {"--test": args.test, "--name": args.name, "--question-column": args.question_column}
    own |= {"--answers-column": args.answers_column, "--answers-separator": args.answers_separator}
    if args.train is None and (given := [flag for flag, value in own.items() if value is not None]):
        parser.error(f"{given[0]} is for files of your own: expected --train FILE with it, found none; add it")
    if args.train is not None and (args.data_sources or args.test_sources):
        parser.error("expected --train, or public sets by --data_sources and --test_sources, found both; drop one")
    if not 0 <= args.dev_rows <= KEPT_FOR_DEV:
        parser.error(f"--dev-rows: expected 0 to {KEPT_FOR_DEV}, found {args.dev_rows}")
    if args.answers_separator == "":
        parser.error("--answers-separator: expected a text such as |, found an empty one; leave it out")
    return args


def public_parts(args: argparse.Namespace) -> tuple[list[Part], list[Part]]:
    """The parts to train on and to test on, all of their files here."""
    train = public.named_sets(args.data_sources or ",".join(public.TRAIN_SETS), "train", "--data_sources")
    test = public.named_sets(args.test_sources or ",".join(public.TEST_SETS), "test", "--test_sources")
    splits = [(name, "train") for name in train], [(name, public.SETS[name].held_out) for name in test]
    return tuple(  # type: ignore[return-value]
        [
            Part(
                name,
                public.file_of(name, split, args.source),
                Columns(),
                expected=public.SETS[name].rows(split),
                public=True,
            )
            for name, split in side
        ]
        for side in splits
    )


def own_parts(args: argparse.Namespace, paths: Sequence[Path]) -> list[Part]:
    columns = Columns(
        args.question_column or "question", args.answers_column or "golden_answers", args.answers_separator
    )
    return [Part(args.name or path.name.split(".")[0], path, columns, args.encoding) for path in paths]


def usable_rows(part: Part) -> Iterator[tuple[int, dict[str, Any], str, list[str], int]]:
    """Each row that has a question and an answer, with its number, question, answers and key; counts the others."""
    bar = tqdm(desc=part.shown, total=part.expected, unit=" rows", disable=None)
    with bar:
        for number, row in read_rows(part.path, part.columns, part.encoding):
            bar.update()
            part.counts.rows += 1
            question, answers = part.columns.question_in(row), []
            try:
                answers = part.columns.answers_in(row)
                "".join((question, *answers, str(row.get("id")))).encode()
            except UnicodeEncodeError:
                part.counts.note("with half a character, left out", number)
                continue
            except ValueError:
                part.counts.note("with answers that are no text, number or list, left out", number)
                continue
            if not question or not answers:
                part.counts.note(f"without {'an answer' if question else 'a question'}, left out", number)
                continue
            if part.public and not question.endswith("?"):
                question += "?"  # Search-R1's rows have one
            yield number, row, question, answers, question_key(question)


def write_test(parts: Sequence[Part], output: Output) -> None:
    for part in parts:
        for number, row, question, answers, key in usable_rows(part):
            if key in output.keys:
                part.counts.note("asked before", number)
            output.add(part, number, row, question, answers, key)


def write_train(parts: Sequence[Part], output: Output, tested: set[int], *, drop: bool) -> None:
    for part in parts:
        for number, row, question, answers, key in usable_rows(part):
            what = "asked in the test set, too" if key in tested else "asked before" if key in output.keys else None
            if what is not None:
                part.counts.note(what + (", left out" if drop else ""), number)
            if what is None or not drop:
                output.add(part, number, row, question, answers, key)


def held_out_keys(parts: Sequence[Part]) -> set[int]:
    """The questions of a tenth of the rows, 500 at most, chosen by their words and not by their place in the file."""
    keys = {key for part in parts for *_, key in usable_rows(part)}
    for part in parts:
        part.counts.clear()  # the second reading counts
    if len(keys) < 2:
        raise ValueError(
            f"expected at least 2 different questions with answers, to hold some out, found {len(keys)}; give --test"
        )
    return set(heapq.nsmallest(min(MOST_HELD_OUT, max(1, len(keys) // 10)), keys))


def split_rows(parts: Sequence[Part], train: Output, test: Output, held_out: set[int], *, drop: bool) -> None:
    for part in parts:
        for number, row, question, answers, key in usable_rows(part):
            output = test if key in held_out else train
            if key in output.keys:
                part.counts.note("asked before" + (", left out" if drop else ""), number)
                if drop:
                    continue
            output.add(part, number, row, question, answers, key)


def write_dev(path: Path, test: Output, rows: int) -> int:
    """Write the `rows` rows of each source with the least keys, in the order of the test set; returns their number."""
    chosen = [entry for heap in test.least.values() for entry in heapq.nlargest(rows, heap)]
    with writing(path) as writer:
        for _, _, row in sorted(chosen, key=lambda entry: entry[1]):
            writer.write({**row, "extra_info": {**row["extra_info"], "split": "dev"}})
    return len(chosen)


def report(output: Output, path: Path, parts: Sequence[Part]) -> None:
    """Say what was written, and what was wrong with the rows of each part."""
    sources = ", ".join(f"{source} {count:,}" for source, count in output.sources.items())
    print(f"{path}: {output.writer.count:,} rows ({sources})")
    for part in parts:
        where = f"  {part.shown}"
        if part.expected is not None and part.counts.rows != part.expected:
            print(f"{where}: {part.counts.rows:,} rows, where FlashRAG's table states {part.expected:,}")
        for sentence in part.counts.sentences():
            print(f"{where}: {sentence}")


def prepare(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError for data that cannot be used; files of an earlier run are then left as they were."""
    bare = args.protocol == "none" and not args.prompt_template
    template = PromptTemplate(QUESTION) if bare else PromptTemplate.load(args.prompt_template or args.protocol)
    if args.train is None:
        train_parts, test_parts = public_parts(args)
    else:
        train_parts, test_parts = own_parts(args, args.train), own_parts(args, args.test or [])
    folder: Path = args.local_dir
    with writing(folder / "test.parquet") as test_writer, writing(folder / "train.parquet") as train_writer:
        test, train = Output("test", test_writer, template), Output("train", train_writer, template)
        if test_parts:
            write_test(test_parts, test)
            write_train(train_parts, train, test.keys, drop=args.drop_duplicates)
        else:
            split_rows(train_parts, train, test, held_out_keys(train_parts), drop=args.drop_duplicates)
        for output in (train, test):
            if not output.writer.count:
                raise ValueError(
                    f"no row with a question and an answer is left for {output.split}.parquet; see its data"
                )
    report(train, folder / "train.parquet", train_parts)
    report(test, folder / "test.parquet", test_parts)
    if args.dev_rows:
        path = folder / "dev.parquet"
        print(f"{path}: {write_dev(path, test, args.dev_rows):,} rows, also in {folder / 'test.parquet'}")
    print(
        f"\npython train.py --prompt-data {folder / 'train.parquet'} --apply-chat-template --eval-interval 25 "
        f"--eval-prompt-data dev {folder / 'dev.parquet' if args.dev_rows else folder / 'test.parquet'} ..."
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        prepare(args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
