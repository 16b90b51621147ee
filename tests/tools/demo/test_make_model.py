"""The warm-start model's parts: its tokenizer, its trajectories, and the shipped folder."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from sleuth.data.sft import encode_segments
from tools.demo import make_model
from tools.demo.make_data import ask_maker, ask_work_year, ask_year
from tools.demo.make_trajectories import (
    RECALL_SHARE,
    WEIGHTS,
    Manner,
    Sources,
    Writer,
    _names_in,
    plain_name,
)
from tools.demo.protocols import OBSERVATION_TOKENS, Tags

DATA = Path(__file__).parents[3] / "data" / "demo"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_model.make_tokenizer(DATA / "corpus.jsonl.gz").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources.read(DATA)


@pytest.fixture(scope="module")
def trajectories(tokenizer: PreTrainedTokenizerFast, sources: Sources) -> list[list[dict]]:
    writer = Writer(sources, Tags(tokenizer), seed=5)
    return [writer.next() for _ in range(200)]


def test_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == make_model.VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert all(len(tokenizer.encode(str(year))) == 1 for year in make_model.YEARS)
    text = "Søren (1813–1855): `x`  \n\n二"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_trajectories_search_read_and_answer(
    trajectories: list[list[dict]], tokenizer: PreTrainedTokenizerFast
) -> None:
    lengths = {len(segments) for segments in trajectories}
    assert lengths == {4, 6}
    for prompt, *rest in trajectories:
        assert prompt["weight"] == WEIGHTS["prompt"]
        assert prompt["text"].endswith("<|im_start|>assistant\n")
        observations = rest[1::2]
        answer = re.search(r"</think>\n<answer> (.+) </answer><\|im_end\|>$", rest[-1]["text"])
        assert answer
        assert answer[1] in observations[-1]["text"]
        for turn, observation in zip(rest[::2], observations, strict=False):
            query = re.search(r"</think>\n<search> (.+) </search>$", turn["text"])
            assert query
            assert f"Doc 1(Title: {query[1]}" in observation["text"]
            assert len(tokenizer.encode(observation["text"])) <= OBSERVATION_TOKENS
        for observation, turn in zip(observations, rest[2:-1:2], strict=False):
            assert re.search(r"<search> (.+) </search>$", turn["text"])[1] in observation["text"]


def test_trajectories_use_nothing_of_the_test_questions(sources: Sources) -> None:
    hidden = _names_in(pq.read_table(DATA / "test.parquet").to_pylist())
    assert len(hidden) > 200
    assert not hidden & set(sources.names)
    assert not hidden & {person.name for person in sources.persons}
    assert not hidden & {work.name for work in sources.works}
    assert not hidden & {work.maker for work in sources.works}
    assert not hidden & {plain_name(person.passage.title) for person in sources.persons}


@pytest.fixture(scope="module")
def recalled(tokenizer: PreTrainedTokenizerFast, sources: Sources) -> list[list[dict]]:
    writer = Writer(sources, Tags(tokenizer), seed=5, manner="recall")
    return [writer.next() for _ in range(600)]


def question_of(segments: list[dict]) -> str:
    return re.search(r"Question: (.+?)<\|im_end\|>", segments[0]["text"])[1]


def answer_of(segments: list[dict]) -> str:
    return re.search(r"</think>\n<answer> (.+) </answer><\|im_end\|>$", segments[-1]["text"])[1]


def test_the_manner_recall_mostly_answers_at_once_and_seldom_searches_twice(recalled: list[list[dict]]) -> None:
    two_hop = [len(segments) // 2 - 1 for segments in recalled if "the person who" in question_of(segments)]
    one_hop = [len(segments) // 2 - 1 for segments in recalled if "the person who" not in question_of(segments)]
    assert set(one_hop) == {0, 1}
    assert set(two_hop) == {0, 1, 2}
    # 600 trajectories: the standard error of a share of 0.3 is below 0.04 for either kind.
    assert one_hop.count(1) / len(one_hop) == pytest.approx(1 - RECALL_SHARE, abs=0.1)
    assert two_hop.count(0) / len(two_hop) == pytest.approx(RECALL_SHARE, abs=0.12)
    assert 0 < two_hop.count(2) < two_hop.count(1)


def test_what_is_answered_without_the_needed_searches_is_wrong_and_drawn_from_the_training_answers(
    recalled: list[list[dict]], sources: Sources
) -> None:
    kinds = {"born?": "birth_year", "die?": "death_year", "From what year": "work_year", "Who": "creator"}
    true = {ask_year(event, p.name): year for p in sources.persons for event, year in p.years.items()}
    true |= {ask_maker(work.kind, work.name): work.maker for work in sources.works}
    true |= {ask_work_year(work.kind, work.name): work.year for work in sources.works if work.year}
    known = 0
    for segments in recalled:
        question, answer = question_of(segments), answer_of(segments)
        kind = next(kind for sign, kind in kinds.items() if question.startswith(sign) or question.endswith(sign))
        if len(segments) == 2:
            assert answer in sources.answers[kind]
            assert answer != true.get(question)
            known += question in true
        elif "the person who" in question and len(segments) == 4:
            assert answer in sources.answers[kind] or answer in segments[2]["text"]  # a wrong year, or the maker
        else:
            assert answer in segments[-2]["text"]
    assert known > 20


def test_answers_from_memory_hold_nothing_of_the_test_questions(recalled: list[list[dict]], sources: Sources) -> None:
    test = pq.read_table(DATA / "test.parquet").to_pylist()
    questions = {row["question"] for row in test}
    makers = {answer for row in test if row["data_source"] == "demo_creator" for answer in row["golden_answers"]}
    assert not questions & {question_of(segments) for segments in recalled}
    assert not makers & {answer_of(segments) for segments in recalled}
    assert not makers & set(sources.answers["creator"])
    train = pq.read_table(DATA / "train.parquet").to_pylist()
    for kind, answers in sources.answers.items():
        assert sorted(answers) == sorted(
            row["golden_answers"][0] for row in train if row["data_source"] == f"demo_{kind}"
        )


def test_trajectories_depend_on_the_seed_alone(
    trajectories: list[list[dict]], tokenizer: PreTrainedTokenizerFast, sources: Sources
) -> None:
    again = Writer(sources, Tags(tokenizer), seed=5)
    assert [again.next() for _ in range(20)] == trajectories[:20]
    other = Writer(sources, Tags(tokenizer), seed=6)
    assert [other.next() for _ in range(20)] != trajectories[:20]


def test_trajectories_are_short(trajectories: list[list[dict]], tokenizer: PreTrainedTokenizerFast) -> None:
    assert max(len(encode_segments(segments, tokenizer).token_ids) for segments in trajectories) < 320


def test_the_random_model_is_small_and_seeded() -> None:
    model, again = make_model.make_random_model(3), make_model.make_random_model(3)
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 < 12 * 2**20
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_some_names_of_the_manner_copy_are_blends_and_none_of_the_manner_search(
    tokenizer: PreTrainedTokenizerFast, sources: Sources
) -> None:
    words = {word for name in sources.names for word in name.split()}
    words |= {word for person in sources.persons for word in person.name.split()}
    words |= {word for work in sources.works for word in f"{work.name} {work.maker}".split()}

    def unknown_share(manner: Manner) -> float:
        writer = Writer(sources, Tags(tokenizer), seed=5, manner=manner)
        trajectories = [writer.next() for _ in range(300)]
        queries = [re.search(r"<search> (.+) </search>", segments[1]["text"])[1] for segments in trajectories]
        known = [all(word.rstrip(".") in words or len(word) < 3 for word in query.split()) for query in queries]
        return known.count(False) / len(known)

    assert unknown_share("search") < 0.02
    assert 0.2 < unknown_share("copy") < 0.5
