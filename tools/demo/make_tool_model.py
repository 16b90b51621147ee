"""Makes the warm-start model of `run_demo.sh --protocol tools` from the demo's model: a chat template, 80 steps.

    python tools/demo/make_tool_model.py             # some minutes on two cores

The demo's model knows the tags of generate_with_search.py. A short supervised training on the same kinds of trajectory,
written as tool calls, gives it the form of generate_with_tools.py, and leaves it the habit to answer most questions at
once and wrongly. The tokenizer stays as it is: `<tool_call>` is plain text to it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from transformers import AutoTokenizer

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo.make_model import BATCH_SIZE, KEPT_FILES, ROOT, Stage, publish, run, train
from tools.demo.make_trajectories import write_trajectories
from tools.demo.protocols import OBSERVATION_TOKENS, ToolCalls

STAGE = Stage("tools", steps=80, lr=1e-3, min_lr=1e-4, label_smoothing=0.0, warmup=5, manner="recall")
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
Tools:
{%- for tool in tools -%}
{%- set function = tool['function'] -%}
{{ ' ' ~ function['name'] ~ '(' ~ function['parameters']['properties'] | join(', ') ~ ')' }}
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] -%}
<tool_call>{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""Tools are named in few tokens, since the model has learned what the one tool is for."""

CARD = """# The warm-start model of the demo's tool calls

The model of `../model` after {steps} more steps of supervised training, by `tools/demo/make_tool_model.py`: it calls
`search(query)` through its chat template, reads a message of the role tool, and ends with a line `Answer: ...`. As that
model does, it answers most questions at once and wrongly. It expects one passage a search, in a result of at most
{observation_tokens} tokens. What is said there of its data, and of what it is good for, holds here, too.
"""


def make(data: Path, base: Path, out: Path, work: Path, seed: int) -> None:
    """From the folder of the demo's data and its model `base` to the HF model in `out`; `work` keeps the rest."""
    start, checkpoint, trajectories = work / "start", work / "torch_dist", work / "tools.jsonl.gz"
    start.mkdir(parents=True)
    for name in KEPT_FILES:
        shutil.copyfile(base / name, start / name)
    (start / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    form = ToolCalls(AutoTokenizer.from_pretrained(start))
    write_trajectories(data, form, BATCH_SIZE * STAGE.steps, trajectories, seed, STAGE.manner)
    run("tools/convert_hf_to_torch_dist.py", "--hf-checkpoint", start, "--save", checkpoint)
    trained = train(STAGE, start, checkpoint, str(trajectories), work, seed)
    run("tools/convert_torch_dist_to_hf.py", "--load", trained, "--hf-checkpoint", start, "--save", work / "hf")
    publish(work / "hf", out, CARD.format(steps=STAGE.steps, observation_tokens=OBSERVATION_TOKENS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model of `run_demo.sh --protocol tools` from the demo's.")
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo", help="folder of the demo's data [data/demo]")
    parser.add_argument("--base", type=Path, default=ROOT / "data/demo/model", help="its model [data/demo/model]")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "data/demo/model_tools", help="model folder [data/demo/model_tools]"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=ROOT / "runs/tool_model", help="intermediate files [runs/tool_model]"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.work_dir.exists():
        parser.error(f"{args.work_dir} exists from an earlier run: remove it or give another --work-dir")
    make(args.data.resolve(), args.base.resolve(), args.out.resolve(), args.work_dir.resolve(), args.seed)
    print(f"the model is in {args.out}")


if __name__ == "__main__":
    main()
