"""What a hook written for slime asks for tokens: arguments with slime's names, `GenerateState`, `post`.

`post` to the router's address goes to the engines of the rollout in this process, with their retries, places and key;
to any other address it sends JSON. The router's host is none that another HTTP client would find.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from argparse import Namespace
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import tenacity

from sleuth.hooks.context import Generation, rollout_context
from sleuth.retries import failure, with_retries
from sleuth.tokens import encode

logger = logging.getLogger(__name__)

ROUTER_HOST, ROUTER_PORT = "engines.sleuth.invalid", 80
DEFAULT_NEW_TOKENS = 128  # as SGLang's
RETRIES = 5
"""Of a request to another server at most, even where a hook asks for more."""

SLIME_NAMES: dict[str, Any] = {
    "sglang_router_ip": ROUTER_HOST,
    "sglang_router_port": ROUTER_PORT,
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "group_rm": False,
    "rm_type": None,
    "reward_key": None,
    "eval_reward_key": None,
    "use_rollout_routing_replay": False,
    "sglang_speculative_algorithm": None,
    "ci_test": False,
}
"""Arguments that slime has and this project does not, with what holds here."""


class SlimeArgs(Namespace):
    """The arguments of a run under slime's names; entries of the YAML section `custom` are attributes, as in slime.

    A hook may set further attributes.
    """

    def __init__(self, args: Any) -> None:
        custom = (getattr(args, "custom_config", None) or {}).get("custom") or {}
        super().__init__(
            **SLIME_NAMES
            | {
                "rollout_seed": getattr(args, "seed", 0),
                "sglang_server_concurrency": getattr(args, "rollout_max_concurrency", 256),
                **(custom if isinstance(custom, dict) else {}),
            }
        )
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._args, name)
        except AttributeError:
            raise AttributeError(
                f"no flag of this project and no entry of the YAML section custom is named {name}; put it there "
                "(docs/coming-from-slime.md)"
            ) from None


class GenerateState:
    """The tokenizer and the sampling parameters of a rollout."""

    def __init__(self, args: Any) -> None:
        self.args, self.tokenizer, self.processor = args, rollout_context().tokenizer, None
        self.semaphore = asyncio.Semaphore(2**16)  # the engines' clients bound what is under way
        self.aborted = False
        self.sampling_params = with_slime_params(
            {
                "temperature": args.rollout_temperature,
                "top_p": args.rollout_top_p,
                "top_k": args.rollout_top_k,
                "max_new_tokens": args.rollout_max_response_len,
                "stop": list(args.rollout_stop),
            }
        )


def with_slime_params(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with those that slime adds, whose values are fixed here."""
    fixed = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    return {**params, "stop_token_ids": None, **fixed}


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The address of the engines; there is one model."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request of a hook and what the engine made of it."""

    input_ids: list[int]
    generation: Generation


@dataclass(slots=True)
class Trajectory:
    """The calls of a hook for one sample, which may have `max_tokens` tokens (None: what the engine allows)."""

    max_tokens: int | None = None
    calls: list[EngineCall] = field(default_factory=list)


trajectory: ContextVar[Trajectory | None] = ContextVar("sleuth_compat_slime_trajectory", default=None)


async def post(url: str, payload: dict[str, Any], max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """The answer to a request: an engine's, or that of another server as JSON, or as text where it is none.

    Raises ValueError for a request that the engines do not take, aiohttp's errors for another server.
    """
    place = urlsplit(url)
    if place.hostname != ROUTER_HOST:
        return await _request("POST", url, max_retries, headers, json=payload)
    if place.path != "/generate":
        raise ValueError(f"expected /generate at the engines' address, found {place.path}; nothing else is served")
    return await _generate(payload)


async def get(url: str, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """The answer of another server, as `post` reads it."""
    return await _request("GET", url, max_retries, headers)


async def _generate(payload: dict[str, Any]) -> dict[str, Any]:
    """The answer as SGLang's server would write it; an empty one of the reason `length` where no token is left."""
    context, text, ids = rollout_context(), payload.get("text"), payload.get("input_ids")
    if ids is None:
        if not isinstance(text, str):
            raise ValueError(
                f"expected input_ids or one text in a request, found {sorted(payload)}; send one at a time"
            )
        ids = encode(text, context.tokenizer).ids
    ids = list(ids)
    wanted = dict(payload.get("sampling_params") or {})
    kept = {key: value for key, value in wanted.items() if value is not None and key != "no_stop_trim"}
    stop = kept.get("stop") or []
    kept["stop"] = [stop] if isinstance(stop, str) else list(stop)
    under_way = trajectory.get() or Trajectory()
    if under_way.max_tokens is not None:
        kept["max_new_tokens"] = min(kept.get("max_new_tokens", DEFAULT_NEW_TOKENS), under_way.max_tokens - len(ids))
    if kept.get("max_new_tokens", 1) < 1:
        return _answer("", ids, Generation([], [], "", "length"))
    generation = await context.engine.generate(ids, kept)
    under_way.calls.append(EngineCall(ids, generation))
    said = generation.text
    if wanted.get("no_stop_trim") is False:
        said = next((said.removesuffix(end) for end in kept["stop"] if said.endswith(end)), said)
    return _answer(said, ids, generation)


def _answer(text: str, input_ids: Sequence[int], generation: Generation) -> dict[str, Any]:
    scored = zip(generation.log_probs, generation.ids, strict=True)
    meta = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": generation.finish_reason},
        "prompt_tokens": len(input_ids),
        "completion_tokens": len(generation.ids),
        "cached_tokens": 0,
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in scored],
        "weight_version": generation.weight_version,
    }
    return {"text": text, "output_ids": list(generation.ids), "meta_info": meta}


async def _request(method: str, url: str, retries: int, headers: dict[str, str] | None, **body: Any) -> Any:
    async def attempt() -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, headers=headers, raise_for_status=True, **body) as response,
        ):
            text = await response.text()
        try:
            return json.loads(text)
        except ValueError:
            return text

    return await with_retries(
        attempt,
        is_transient=lambda error: isinstance(error, aiohttp.ClientError | TimeoutError),
        attempts=1 + max(0, min(retries, RETRIES)),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=8.0),
        before_sleep=lambda state: logger.info("attempt %d: %s: %s", state.attempt_number, url, failure(state)),
    )
