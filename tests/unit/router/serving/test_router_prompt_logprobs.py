"""Tests logprobs of prompts, as evaluation harnesses request them."""

import json
from typing import Any

import pytest

from baton.core.ids import NO_TENANT
from baton.core.request import MAX_PROMPT_LOGPROBS
from baton.text.tokenizer import Tokenizer
from router.serving.memory_budgets import LogprobsBudget
from tests.router_harness import (
    CHAT,
    CONTEXT,
    EOS,
    USER,
    open_harness,
    tokenizer,
    wrong_error,
)

__all__ = ["tokenizer"]

COMPLETION = "/v1/completions"
PROMPT = "aé€"
TOKENS = [*PROMPT.encode()]
OFFSETS = [0, 1, 1, 2, 2, 2]
"""Text offsets of the tokens: all tokens of a character have the character's offset."""


async def complete(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    async with open_harness(tokenizer, text="no") as (_, client):
        response = await client.post(COMPLETION, json={"prompt": PROMPT, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_echo_with_logprobs_begins_with_the_prompt(tokenizer: Tokenizer) -> None:
    body = await complete(tokenizer, echo=True, logprobs=1, max_tokens=2)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT + "no"
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == [*OFFSETS, 3, 4]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.25, -0.125, -0.0625, -0.03125, -0.5, -0.5]
    assert logprobs["tokens"] == [
        "a", r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "n", "o",
    ]  # fmt: skip
    assert logprobs["top_logprobs"][:2] == [None, {r"bytes:\xc3": -0.5}]
    assert body["usage"]["completion_tokens"] == 2
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("prompt", [PROMPT, TOKENS])
async def test_max_tokens_zero_scores_only_the_prompt(tokenizer: Tokenizer, prompt: Any) -> None:
    body = await complete(tokenizer, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(TOKENS)
    assert body["usage"] == {
        **body["usage"], "prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6,
    }  # fmt: skip


async def test_evaluation_harness_can_score_a_continuation(
    tokenizer: Tokenizer,
) -> None:
    """lm-evaluation-harness reads the logprobs of the tokens after the context, without the
    generated token."""
    context = 2
    body = await complete(tokenizer, prompt=[TOKENS], echo=True, logprobs=1, max_tokens=1, seed=1)
    logprobs = body["choices"][0]["logprobs"]
    total = sum(logprobs["token_logprobs"][context:-1])
    assert total == -(0.25 + 0.125 + 0.0625 + 0.03125)
    pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert all(token == max(top, key=top.get) for token, top in [*pairs][context:-1])


async def test_echo_without_logprobs_and_without_an_answer(tokenizer: Tokenizer) -> None:
    choice = (await complete(tokenizer, echo=True, max_tokens=0))["choices"][0]
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)


async def test_prompt_of_one_token_has_no_logprob(tokenizer: Tokenizer) -> None:
    body = await complete(tokenizer, prompt="a", echo=True, logprobs=2, max_tokens=1)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


async def test_echoed_logprobs_of_several_choices_and_prompts(tokenizer: Tokenizer) -> None:
    body = await complete(tokenizer, prompt=["ab", "c"], n=2, echo=True, logprobs=0, max_tokens=1)
    assert [choice["text"] for choice in body["choices"]] == ["abn", "abn", "cn", "cn"]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    assert lengths == [3, 3, 2, 2]


async def test_echoing_stream_begins_with_the_prompt(tokenizer: Tokenizer) -> None:
    for max_tokens, text in ((0, PROMPT), (2, PROMPT + "no")):
        fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": True}
        async with open_harness(tokenizer, text="no") as (_, client):
            response = await client.post(COMPLETION, json={"prompt": PROMPT, **fields})
        frames = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        choices = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[0]["logprobs"]["text_offset"] == OFFSETS
        shown = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
        assert shown == [*OFFSETS, 3, 4][: len(OFFSETS) + max_tokens]
        assert choices[-1]["finish_reason"] == "length"


async def test_vllms_prompt_logprobs_field(tokenizer: Tokenizer) -> None:
    body = await complete(tokenizer, prompt_logprobs=1, max_tokens=1)
    choice = body["choices"][0]
    assert choice["text"] == "n" and choice["logprobs"] is None
    first, second, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 4
    assert second == {"195": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"}}
    none = await complete(tokenizer, prompt_logprobs=0, max_tokens=0)
    assert none["choices"][0]["prompt_logprobs"][1]["195"]["rank"] is None


async def test_vllms_prompt_logprobs_field_of_a_chat(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, text="no") as (router, client):
        body = {"messages": USER, "prompt_logprobs": 0, "max_tokens": 1}
        answer = (await client.post(CHAT, json=body)).json()
    (job,) = router.decode.submitted
    assert len(answer["prompt_logprobs"]) == len(job.spec.token_ids)
    assert EOS not in answer


async def test_scored_prompts_are_placed_without_regard_to_caches(
    tokenizer: Tokenizer,
) -> None:
    async with open_harness(tokenizer) as (router, client):
        await client.post(COMPLETION, json={"prompt": "x" * 20, "max_tokens": 1})
        await client.post(COMPLETION, json={"prompt": "x" * 20, "prompt_logprobs": 1})
    assert [bool(query.block_keys) for query in router.placer.queries] == [True, False]


async def test_too_many_prompt_logprobs_are_rejected(tokenizer: Tokenizer) -> None:
    prompts, num_tokens = 128, CONTEXT - 4
    most = MAX_PROMPT_LOGPROBS // (prompts * num_tokens) - 1
    body = {"prompt": [[1] * num_tokens] * prompts, "max_tokens": 1, "prompt_logprobs": most}
    async with open_harness(tokenizer) as (_, client):
        assert (await client.post(COMPLETION, json=body)).status_code == 200
        twice = {**body, "n": 2}
        assert wrong_error(await client.post(COMPLETION, json=twice))["param"] == "prompt_logprobs"
        echoed = {**body, "prompt_logprobs": None, "echo": True, "logprobs": most + 1}
        assert wrong_error(await client.post(COMPLETION, json=echoed))["param"] == "logprobs"


async def test_concurrent_prompt_logprobs_are_budgeted(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.service.resources.logprobs_budget = budget = LogprobsBudget(15, 15)
        body = {"prompt": "12345", "max_tokens": 1, "prompt_logprobs": 1}
        with budget.new_request(NO_TENANT, 1.0, "logprobs", shared=False) as other:
            other.charge(6)
            assert wrong_error(await client.post(COMPLETION, json=body), 429)["type"]
        assert (await client.post(COMPLETION, json=body)).status_code == 200
        assert budget.num_in_use == 0
