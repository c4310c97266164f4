"""Tests the errors of requests that are longer than the model's context: clients recognise them by
how the message begins."""

from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.anthropic_harness import COUNT, MESSAGES, error_of, request
from tests.router_harness import CHAT, COMPLETE, CONTEXT, RESPOND, open_harness, wrong_error

tokenizer = router_harness.tokenizer

BEGINNING = f"This model's maximum context length is {CONTEXT} tokens. However, "
NUM_TEMPLATE_TOKENS = len("<user\n>\n<assistant\n")  # a special token is < or > here
NONE_LEFT = "which leaves none for the answer"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat_text(num_tokens: int) -> str:
    """Return a message that makes a prompt of this length: each character is a token."""
    return "x" * (num_tokens - NUM_TEMPLATE_TOKENS)


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        (CHAT, {"messages": asked(chat_text(64))}, "messages",
         f"messages has 64 tokens, {NONE_LEFT}"),
        (CHAT, {"messages": asked("x" * 9999)}, "messages", "messages has more than 64 tokens"),
        (CHAT, {"messages": asked(chat_text(60)), "max_tokens": 5}, "max_tokens",
         "you requested 65 tokens: messages has 60, and max_tokens is 5"),
        (COMPLETE, {"prompt": "x" * 64}, "prompt", f"prompt has 64 tokens, {NONE_LEFT}"),
        (COMPLETE, {"prompt": [5] * 9999}, "prompt", f"prompt has 9999 tokens, {NONE_LEFT}"),
        (COMPLETE, {"prompt": "x" * 60, "max_tokens": 5}, "max_tokens",
         "you requested 65 tokens: prompt has 60, and max_tokens is 5"),
        (RESPOND, {"input": "x" * 9999}, "input", "input has more than 64 tokens"),
        (RESPOND, {"input": chat_text(60), "max_output_tokens": 16}, "max_output_tokens",
         "you requested 76 tokens: input has 60, and max_output_tokens is 16"),
    ],
)  # fmt: skip
async def test_openai_errors(
    path: str, body: dict[str, Any], param: str, problem: str, tokenizer: Tokenizer
) -> None:
    async with open_harness(tokenizer) as (router, client):
        error = wrong_error(await client.post(path, json={"model": "demo", **body}))
    assert error["message"] == BEGINNING + problem
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert router.placer.queries == []


async def test_messages_errors(tokenizer: Tokenizer) -> None:
    """The last token of the context is the answer's. A prompt that is far too long is counted only
    until that is certain."""
    async with open_harness(tokenizer) as (_, client):
        for num_tokens, counted in ((64, 64), (65, 65), (9999, 65)):
            body = request(*asked(chat_text(num_tokens)))
            error = error_of(await client.post(MESSAGES, json=body))
            assert error == {
                "type": "invalid_request_error",
                "message": f"prompt is too long: {counted} tokens > 63 maximum",
            }
            assert (await client.post(COUNT, json=body)).json() == {"input_tokens": num_tokens}
        fits = await client.post(MESSAGES, json=request(*asked(chat_text(63))))
        assert fits.json()["usage"]["input_tokens"] == 63
