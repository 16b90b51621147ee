"""The warm-start model's parts: its tokenizer, its trajectories, and the shipped folder."""

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from sleuth.data.sft import encode_segments
from tools.demo import make_model
from tools.demo.make_trajectories import OBSERVATION_TOKENS, WEIGHTS, Sources, Writer, _names_in, plain_name

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
    writer = Writer(sources, tokenizer, seed=5)
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
    import pyarrow.parquet as pq

    hidden = _names_in(pq.read_table(DATA / "test.parquet").to_pylist())
    assert len(hidden) > 200
    assert not hidden & set(sources.names)
    assert not hidden & {person.name for person in sources.persons}
    assert not hidden & {work.name for work in sources.works}
    assert not hidden & {work.maker for work in sources.works}
    assert not hidden & {plain_name(person.passage.title) for person in sources.persons}


def test_trajectories_depend_on_the_seed_alone(
    trajectories: list[list[dict]], tokenizer: PreTrainedTokenizerFast, sources: Sources
) -> None:
    again = Writer(sources, tokenizer, seed=5)
    assert [again.next() for _ in range(20)] == trajectories[:20]
    other = Writer(sources, tokenizer, seed=6)
    assert [other.next() for _ in range(20)] != trajectories[:20]


def test_trajectories_are_short(trajectories: list[list[dict]], tokenizer: PreTrainedTokenizerFast) -> None:
    assert max(len(encode_segments(segments, tokenizer).token_ids) for segments in trajectories) < 320


def test_the_random_model_is_small_and_seeded() -> None:
    model, again = make_model.make_random_model(3), make_model.make_random_model(3)
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 < 12 * 2**20
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters(), strict=True))
