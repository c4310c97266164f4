"""Tests that every kind of invalid request to the HTTP API is rejected with OpenAI's error body."""

import json
from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.router_harness import (
    CHAT,
    COMPLETE,
    CONTEXT,
    USER,
    VOCAB,
    chat,
    open_harness,
    wrong_error,
)

tokenizer = router_harness.tokenizer


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": [5]}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    ({"temprature": 1}, "temprature"),
    ({"functions": []}, "functions"),
    ({"prompt": "x"}, "prompt"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"attention_window": {}}, "attention_window.recent_tokens"),
    ({"attention_window": {"recent_tokens": 0}}, "attention_window.recent_tokens"),
    ({"attention_window": {"recent_tokens": 2**31}}, "attention_window.recent_tokens"),
    (
        {"attention_window": {"recent_tokens": 1, "sink_tokens": -1}},
        "attention_window.sink_tokens",
    ),
    ({"attention_window": 4096}, "attention_window"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    ({"max_completion_tokens": 10**12}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["", 5]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"includeUsage": 1}}, "stream_options.includeUsage"),
    ({"tools": [{"type": "x"}]}, "tools[0]"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
    ({"tools": [TOOL], "tool_choice": named("g")}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x-y": 1}}, "chat_template_kwargs"),
    ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "regex"}}, "response_format.type"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    ({"bad_words": ["a"], "response_format": {"type": "json_object"}}, "bad_words"),
    ({"bad_words": ["a"], "tools": [TOOL], "tool_choice": "required"}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["x" * 250] * 20}, "bad_words"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
]  # fmt: skip

WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [0, "a"]}, "prompt"),
    ({"prompt": [None]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 513, "n": 2}, "n"),
    ({"prompt": ["x"] * 9, "best_of": 128}, "best_of"),
    ({"prompt": "x" * CONTEXT}, "prompt"),
    ({"prompt": "x" * (CONTEXT - 3), "max_tokens": 4}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": USER}, "messages"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_chats_are_rejected(tokenizer: Tokenizer, stream: bool) -> None:
    async with open_harness(tokenizer) as (router, client):
        for fields, param in WRONG_CHATS:
            body = json.dumps({**chat(), "stream": stream, **fields})
            if "stream_options" in fields and stream and "stream" not in fields:
                continue
            response = await client.post(CHAT, content=body)
            error = wrong_error(response)
            assert error["param"] == param, fields
            assert error["type"] == "invalid_request_error"
            if "Hi" not in body or param == "max_tokens":
                assert error["code"] is not None
        assert router.placer.queries == []


async def test_invalid_completions_are_rejected(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        for fields, param in WRONG_COMPLETIONS:
            response = await client.post(COMPLETE, json={"prompt": "x", **fields})
            assert wrong_error(response)["param"] == param, fields
        assert router.placer.queries == []


async def test_error_codes_are_those_of_openai(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        long = await client.post(COMPLETE, json={"prompt": "x" * 100})
        missing = await client.post(CHAT, json={"model": "demo"})
        unknown = await client.post(CHAT, json=chat(temprature=1))
        unsupported = await client.post(CHAT, json=chat(use_beam_search=True))
        model = await client.post(CHAT, json={**chat(), "model": "gpt-9"})
        alias = await client.post(CHAT, json={**chat(), "model": "/models/demo"})
    assert wrong_error(long)["code"] == "context_length_exceeded"
    assert wrong_error(missing)["message"] == "Missing required parameter: messages"
    assert wrong_error(unknown)["code"] == "unknown_parameter"
    assert wrong_error(unsupported)["code"] == "unsupported_parameter"
    assert wrong_error(model, 404)["code"] == "model_not_found"
    assert alias.status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"nonsense", b"[]", b"5", b"null", b'"text"', b"\xff\xfe",
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 10_000,
    ],
)  # fmt: skip
async def test_body_that_is_no_json_object_is_rejected(
    tokenizer: Tokenizer, content: bytes
) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
            assert wrong_error(await client.post(path, content=content))["code"] == "invalid_json"


async def test_wrong_content_type_route_or_method_is_rejected(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        form = await client.post(CHAT, files={"prompt": b"x"})
        packed = await client.post(CHAT, content=b"{}", headers={"content-encoding": "br"})
        nowhere = await client.post("/v1/embeddings", json={})
        method = await client.get(CHAT)
        delete = await client.delete("/v1/models")
        model = await client.get("/v1/models/gpt-9")
    assert "application/json" in wrong_error(form, 415)["message"]
    wrong_error(packed, 415)
    assert "/v1/embeddings" in wrong_error(nowhere)["message"]
    assert wrong_error(method, 405) and method.headers["allow"] == "POST"
    wrong_error(delete, 405)
    assert wrong_error(model, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_invalid_tokenize_bodies_are_rejected(tokenizer: Tokenizer, path: str) -> None:
    async with open_harness(tokenizer) as (_, client):
        for body in ({}, {"prompt": 5}, {"tokens": "x"}, {"tokens": [VOCAB]}, {"x": 1}):
            wrong_error(await client.post(path, json=body))
        wrong_error(await client.post("/tokenize", json={"prompt": "a", "messages": USER}))
