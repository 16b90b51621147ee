"""The search conversation as a hook in slime's style, to show that such a file runs as it is.

    --custom-generate-function-path examples.slime_search.generate
    --custom-rm-path examples.slime_search.reward_func --apply-chat-template --search-url http://127.0.0.1:8000/retrieve

It imports slime, whose names `sleuth.compat.slime` stands in for; docs/coming-from-slime.md. A new hook is better
written as `generate_with_search.py` is, with `Conversation`.
"""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

from qa_em_format import compute_score_em

CONFIG = {
    "max_turns": 2,
    "topk": 3,
    "search_url": "http://127.0.0.1:8000/retrieve",
    # True: the ids that the engine sampled. False: its text, encoded anew, so that ids may drift.
    "return_logprob": True,
}
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


async def look_up(args, query: str) -> str:
    url = args.search_url or CONFIG["search_url"]
    answer = await post(url, {"queries": [query], "topk": CONFIG["topk"], "return_scores": True})
    texts = [hit["document"]["contents"] for hit in answer["result"][0]]
    numbered = (f"Doc {number}: {text}" for number, text in enumerate(texts, 1))
    return "\n\n<information>" + "\n".join(numbered) + "</information>\n\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "a trajectory is generated in one go"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    with_ids = getattr(args, "return_logprob", CONFIG["return_logprob"])
    sampling_params = {**sampling_params, "stop": [*(sampling_params["stop"] or []), "</search>", "</answer>"]}
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, log_probs = "", [], [], []

    for turn in range(CONFIG["max_turns"] + 1):
        payload = {"sampling_params": sampling_params, "return_logprob": with_ids}
        payload |= {"input_ids": prompt_ids + ids} if with_ids else {"text": sample.prompt + response}
        output = await post(url, payload)
        sample.update_from_meta_info(args, output["meta_info"])
        if sample.status == Sample.Status.ABORTED:
            return sample
        said = output["text"]
        scored = output["meta_info"]["output_token_logprobs"]
        new = (
            [entry[1] for entry in scored] if with_ids else state.tokenizer(said, add_special_tokens=False)["input_ids"]
        )
        response, ids, mask = response + said, ids + new, mask + [1] * len(new)
        log_probs += [entry[0] for entry in scored] if with_ids else []

        action = ACTION.search(said)
        if sample.status == Sample.Status.TRUNCATED or action is None or action[1] == "answer":
            break
        if turn == CONFIG["max_turns"]:
            sample.status = Sample.Status.TRUNCATED
            break
        found = await look_up(args, action[2].strip())
        new = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response, ids, mask = response + found, ids + new, mask + [0] * len(new)
        log_probs += [0.0] * len(new) if with_ids else []

    sample.tokens, sample.response, sample.response_length = prompt_ids + ids, response, len(ids)
    sample.loss_mask = mask
    if with_ids:
        sample.rollout_log_probs = log_probs
    return sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    if not isinstance(sample, Sample):
        raise TypeError(f"expected a Sample, found {type(sample).__name__}")
    return compute_score_em(sample.response, sample.label)
