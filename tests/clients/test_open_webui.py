"""Tests Baton with requests in the form of Open WebUI 0.6, written by hand: a chat with its
advanced parameters, and what it asks for after the first answer."""

import json
from typing import Any

import httpx
import pytest

from testkit.local_cluster import LocalCluster
from tests.clients.conftest import MODEL
from tests.clients.scripted_model import REASONED, TEXT

pytestmark = pytest.mark.timeout(300)

PATH = "/v1/chat/completions"
QUESTION = "What is the weather in Paris?"
ANSWERED = (TEXT, 16)
THOUGHT = (REASONED, 17)
"""The answers without and with reasoning, and their tokens."""

ADVANCED = {
    "temperature": 0.8,
    "seed": 7,
    "stop": ["###"],
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repeat_penalty": 1.1,
    "max_tokens": 64,
    "logit_bias": {"5": 10},
}
"""The settings of a chat's "Advanced Params" panel. They are sent as they are named there."""

TASK = """### Task:
Suggest {wanted} for the chat.
### Output:
JSON format: {{ "{field}": {example} }}
### Chat History:
<chat_history>
USER: {question}
ASSISTANT: {answer}
</chat_history>"""
TASKS = {
    "title": '"📉 Weather"',
    "tags": '["weather"]',
    "follow_ups": '["And tomorrow?"]',
}


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "stream": True,
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You help."},
            {"role": "user", "content": QUESTION},
        ],
        "stream_options": {"include_usage": True},
        **fields,
    }


def task(name: str, example: str) -> dict[str, Any]:
    """Return the request for a chat's title, tags or follow-up questions."""
    text = TASK.format(wanted=name, field=name, example=example, question=QUESTION, answer=TEXT)
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": False}
    return {**body, "max_completion_tokens": 1000} if name == "title" else body


def read_stream(response: httpx.Response) -> tuple[str, dict[str, int]]:
    """Return the text and the usage of a streamed answer."""
    assert response.status_code == 200, response.text
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    pieces = [each["delta"].get("content") for chunk in chunks for each in chunk["choices"]]
    return "".join(filter(None, pieces)), chunks[-1]["usage"]


@pytest.fixture(scope="module")
def num_prompt_tokens(cluster: LocalCluster) -> int:
    body = {"model": MODEL, "messages": chat()["messages"]}
    counted: int = httpx.post(f"{cluster.url}/tokenize", json=body, trust_env=False).json()["count"]
    return counted


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ANSWERED),
        (ADVANCED, ANSWERED),
        ({"reasoning_effort": "low"}, THOUGHT),
        ({"reasoning": {"effort": "low"}}, THOUGHT),
        ({"thinking": {"type": "disabled"}}, ANSWERED),
        ({"enable_thinking": False}, ANSWERED),
        ({"enable_thinking": True}, THOUGHT),
        ({"chat_template_kwargs": {"enable_thinking": True}}, THOUGHT),
    ],
)
def test_chat_is_streamed_with_right_counts(
    cluster: LocalCluster,
    fields: dict[str, Any],
    expected: tuple[str, int],
    num_prompt_tokens: int,
) -> None:
    response = httpx.post(cluster.url + PATH, json=chat(**fields), timeout=60, trust_env=False)
    text, usage = read_stream(response)
    assert (text, usage["completion_tokens"]) == expected
    assert usage["prompt_tokens"] == num_prompt_tokens
    assert usage["total_tokens"] == sum((usage["prompt_tokens"], usage["completion_tokens"]))


@pytest.mark.parametrize(("name", "example"), TASKS.items())
def test_tasks_after_the_first_answer(cluster: LocalCluster, name: str, example: str) -> None:
    body = task(name, example)
    response = httpx.post(cluster.url + PATH, json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    [choice], usage = response.json()["choices"], response.json()["usage"]
    assert (choice["message"]["content"], usage["completion_tokens"]) == ANSWERED
    assert choice["finish_reason"] == "stop"


def test_models_are_listed(cluster: LocalCluster) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models", trust_env=False).json()
    assert [each["id"] for each in listed["data"]] == [MODEL]
