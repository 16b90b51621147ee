import json
import re

from rich.console import Console

from tools.demo.side_by_side import LONGEST, side_by_side

PROMPT = "<|im_start|>user\nSearch, then answer briefly. Question: {}<|im_end|>\n<|im_start|>assistant\n"


def record(row, source, texts, right, question="Who is it?"):
    segments = [
        {
            "source": ["model", "observation"][i % 2],
            "tokens": 9,
            "trained_tokens": 9,
            "mean_log_prob": None,
            "text": text,
        }
        for i, text in enumerate(texts)
    ]
    return {
        **{"index": row, "group_index": row, "status": "completed", "stop_reason": "answered", "error": None},
        **{"label": {"ground_truth": {"target": ["1815"]}}, "prompt": PROMPT.format(question), "segments": segments},
        **{"reward": 1.0, "reward_components": {"exact_match": float(right)}, "rollout_metrics": {}},
        **{"file": "test.parquet", "row": row, "data_source": source, "evaluation": True, "notes": {}},
    }


def write(run_dir, step, records):
    folder = run_dir / "trajectories"
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in records)
    (folder / f"eval_{step:07d}_demo_greedy.jsonl").write_text(text)
    (folder / f"eval_{step:07d}_demo_t1.0.jsonl").write_text("no JSON: it is not read")


def shown(panels):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for panel in panels:
        console.print(panel)
    return console.export_text()


def test_the_first_question_of_each_kind_is_shown_whatever_became_of_it(tmp_path):
    guess, search = (
        ["<answer> 1700 </answer>"],
        ["<search> Ada </search>", "Doc 1", "<answer> 1815 </answer><|im_end|>"],
    )
    kinds = {4: "demo_two_hop", 5: "demo_birth_year", 6: "demo_birth_year", 7: "demo_creator"}
    write(tmp_path, 0, [record(row, kind, guess, False, f"Question {row}?") for row, kind in kinds.items()])
    write(tmp_path, 20, [record(row, kind, ["middle"], False) for row, kind in kinds.items()])
    write(tmp_path, 40, [record(row, kind, search, row != 7) for row, kind in reversed(kinds.items())])
    panels = side_by_side(tmp_path)
    text = shown(panels)
    assert re.findall(r"Question \d\? \(1815\)", text) == [f"Question {row}? (1815)" for row in (5, 7, 4)]
    assert text.count("wrong") == 4  # three before, and one after
    assert text.count("right") == 2
    assert "middle" not in text
    assert "<|im_end|>" not in text
    assert any("1700" in line and "<search> Ada" in line for line in text.splitlines())


def test_long_texts_are_shortened(tmp_path):
    for step in (0, 1):
        write(tmp_path, step, [record(1, "demo_creator", ["x" * 500], False)])
    text = shown(side_by_side(tmp_path))
    assert text.count("x") == 2 * (LONGEST - 3)
    assert "..." in text


def test_tool_calls_are_shown_without_the_turns_of_the_chat_template(tmp_path):
    tools = "<|im_start|>system\nTools: search(query)<|im_end|>\n<|im_start|>user\nWho is it?<|im_end|>\n"
    result = "\n<|im_start|>tool\n[1] Ada<|im_end|>\n<|im_start|>assistant\n"
    said = record(1, "demo_creator", ["<tool_call>...</tool_call>", result, "Answer: Ada<|im_end|>"], True)
    for step in (0, 1):
        write(tmp_path, step, [said | {"prompt": tools + "<|im_start|>assistant\n"}])
    text = shown(side_by_side(tmp_path))
    assert re.search(r"^│ Who is it\? \(1815\)", text, re.MULTILINE)
    assert text.count("[1] Ada") == 2
    assert not re.search(r"system|Tools:|tool \[|im_start", text)


def test_without_two_evaluations_there_is_nothing_to_compare(tmp_path):
    assert side_by_side(tmp_path) == []
    write(tmp_path, 0, [record(1, "demo_creator", ["x"], False)])
    assert side_by_side(tmp_path) == []


def test_a_question_that_was_logged_only_once_is_left_out(tmp_path):
    write(tmp_path, 0, [record(1, "demo_creator", ["x"], False)])
    write(tmp_path, 1, [record(2, "demo_creator", ["x"], False)])
    assert side_by_side(tmp_path) == []
