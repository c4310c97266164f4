"""Tests how a request's prompts are prepared, and the limits that apply before any is sent."""

from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.schema import ChatBody, CompletionBody
from router.serving.parsers.model_output_format import ModelOutputFormat
from router.serving.preprocessor import MAX_REPEATED_PROMPT_BYTES, ModelLimits, Preprocessor
from tests.router_harness import USER, tokenizer

__all__ = ["tokenizer"]

CONTEXT = 2**18
LONGEST = MAX_REPEATED_PROMPT_BYTES // 128


def preprocessor(tokenizer: Tokenizer) -> Preprocessor:
    return Preprocessor(tokenizer, ModelOutputFormat(), ModelLimits(CONTEXT, 259), None, 7)


def completion(prompt: Any, **fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": prompt, "n": 128, **fields})


def test_choices_may_repeat_prompts_up_to_a_total_size(tokenizer: Tokenizer) -> None:
    text = "a" * LONGEST
    [prompt] = preprocessor(tokenizer).prepare(completion(text, echo=True).request())
    assert prompt.echo_text == text
    ids = [97] * (LONGEST // 8)
    [prompt] = preprocessor(tokenizer).prepare(completion(ids, return_token_ids=True).request())
    assert list(prompt.token_ids) == ids


@pytest.mark.parametrize(
    ("body", "param", "size"),
    [
        (completion("a" * (LONGEST + 1), echo=True), "echo", 2**24 + 128),
        (completion(["a" * LONGEST, "b"], echo=True), "echo", 2**24 + 128),
        (
            completion([97] * (LONGEST // 8 + 1), return_token_ids=True),
            "return_token_ids",
            2**24 + 1024,
        ),
        (
            completion("a" * LONGEST, echo=True, return_token_ids=True),
            "return_token_ids",
            9 * 2**24,
        ),
    ],
)
def test_more_repeated_prompts_are_refused(
    tokenizer: Tokenizer, body: CompletionBody, param: str, size: int
) -> None:
    with pytest.raises(ApiError) as error:
        preprocessor(tokenizer).prepare(body.request())
    assert (error.value.status, error.value.param) == (400, param)
    assert f"{param}: the 128 choices of each prompt would repeat {size} bytes" in str(error.value)


def test_candidates_that_are_not_sent_do_not_count(tokenizer: Tokenizer) -> None:
    body = completion(["a" * LONGEST, "b"], echo=True, n=64, best_of=128)
    assert len(preprocessor(tokenizer).prepare(body.request())) == 2


def test_ids_of_a_chat_count_as_well(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a" * (LONGEST // 8)}]
    fields = {"max_tokens": 1, "return_token_ids": True}
    body = ChatBody.model_validate({"messages": messages, "n": 128, **fields})
    with pytest.raises(ApiError, match="return_token_ids: the 128 choices"):
        preprocessor(tokenizer).prepare(body.request())
    assert preprocessor(tokenizer).prepare(
        ChatBody.model_validate({"messages": USER, "n": 128, **fields}).request()
    )
