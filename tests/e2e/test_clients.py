"""Tests that common OpenAI clients work with a real cluster as they do with OpenAI's API."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from testkit.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of some days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check_arguments(arguments: str) -> None:
    parsed = json.loads(arguments)
    assert parsed.keys() == {"city", "days"}
    assert parsed["city"] in ("Rome", "Oslo") and 1 <= parsed["days"] <= 9


def test_a_forced_tool_call(client: openai.OpenAI, model: str) -> None:
    """The demo model can't call tools by itself; a grammar forces the call."""
    answer = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice=NAMED,
        max_tokens=200,
        temperature=0,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    check_arguments(call.function.arguments)
    # The call can be sent back with its result.
    conversation: Any = [
        *MESSAGES,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]
    again = client.chat.completions.create(model=model, messages=conversation, max_tokens=4)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_tool_call(client: openai.OpenAI, model: str) -> None:
    """The client's stream helper assembles the deltas."""
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, tools=[TOOL], tool_choice="required",
        parallel_tool_calls=False, max_tokens=200, temperature=0,
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = final.choices[0].message.tool_calls or []
    check_arguments(call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_response_is_parsed_into_a_pydantic_model(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Weather, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_concurrent_async_streams_equal_the_whole_response(
    cluster: LocalCluster, model: str
) -> None:
    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none") as client:
            fields: Any = {
                "model": model, "messages": MESSAGES, "max_tokens": 8, "seed": 5,
                "extra_body": {"ignore_eos": True},
            }  # fmt: skip
            whole = await client.chat.completions.create(**fields)
            streams = [client.chat.completions.create(**fields, stream=True) for _ in range(3)]
            texts = []
            for stream in await asyncio.gather(*streams):
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
                texts.append("".join(parts))
            return whole.choices[0].message.content or "", texts

    whole, texts = asyncio.run(run())
    assert texts == [whole] * 3


def test_continue_final_message_extends_the_last_message(
    cluster: LocalCluster, client: openai.OpenAI, model: str
) -> None:
    """The rendered prompt must end exactly at the end of the message."""
    messages = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    rest = client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, temperature=0,
        extra_body={
            "continue_final_message": True, "add_generation_prompt": False,
            "return_token_ids": True,
        },
    )  # fmt: skip
    question = MESSAGES[0]["content"]
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nIt is "
    ids = cluster.post("/tokenize", {"prompt": prompt, "add_special_tokens": False})["tokens"]
    assert (rest.model_extra or {})["prompt_token_ids"] == ids
    same = client.completions.create(model=model, prompt=ids, max_tokens=4, temperature=0)
    assert rest.choices[0].message.content == same.choices[0].text


def test_best_of_returns_the_choice_with_the_highest_mean_logprob(
    client: openai.OpenAI, model: str
) -> None:
    """``best_of=4`` chooses among the outputs that ``n=4`` returns."""
    fields: Any = {
        "model": model, "prompt": "def read(", "max_tokens": 6, "seed": 3, "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    all_of_them = client.completions.create(**fields, n=4).choices
    [best] = client.completions.create(**fields, n=1, best_of=4).choices

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert best.text == max(all_of_them, key=mean).text


def test_min_tokens_delays_a_stop_token(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "prompt": "def read(", "max_tokens": 6, "temperature": 0}
    ids: Any = {"return_token_ids": True}
    free = client.completions.create(**fields, extra_body=ids).choices[0].model_extra or {}
    first = free["token_ids"][0]
    ended = {**ids, "stop_token_ids": [first]}
    short = client.completions.create(**fields, extra_body=ended).choices[0].model_extra or {}
    assert short["token_ids"] == [first]
    delayed = {**ended, "min_tokens": 3}
    longer = client.completions.create(**fields, extra_body=delayed).choices[0].model_extra or {}
    assert len(longer["token_ids"]) >= 3 and first not in longer["token_ids"][:3]


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, model: str) -> None:
    create = client.chat.completions.create
    fields: Any = {"model": model, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as wrong:
        create(**fields, temperature=5)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="supports only text"):
        create(**fields, audio={"voice": "x", "format": "mp3"})
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        create(**fields, tools=[TOOL])
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-0")


def test_a_batch_runs_and_equals_direct_requests(client: openai.OpenAI, model: str) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": name, "messages": MESSAGES, "max_tokens": 4, "temperature": 0},
        }
        for number, name in enumerate([model, model, "gpt-9"])
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 30
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.1)  # noqa: TID251
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None and batch.output_file_id and batch.error_file_id
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    direct = client.chat.completions.create(**lines[0]["body"])
    for each in client.files.content(batch.output_file_id).text.splitlines():
        body = json.loads(each)["response"]["body"]
        assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
    [failed] = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["status_code"] == 404
    assert file.id in {each.id for each in client.files.list(purpose="batch")}
    for file_id in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(file_id).deleted


def test_langchain_chats_streams_and_calls_tools(cluster: LocalCluster, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=cluster.url + "/v1", api_key="none", max_tokens=60,
                      temperature=0, max_retries=0, stream_usage=True)  # fmt: skip
    whole = chat.invoke([HumanMessage("Write a function.")])
    chunks = list(chat.stream([HumanMessage("Write a function.")]))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    forced = chat.bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
    [call] = forced.invoke(MESSAGES).tool_calls
    assert call["name"] == "weather" and call["args"].keys() == {"city", "days"}
    [streamed] = [c for chunk in forced.stream(MESSAGES) for c in chunk.tool_calls if c["name"]]
    assert streamed["name"] == "weather"
    parsed = chat.with_structured_output(Weather).invoke(MESSAGES)
    assert isinstance(parsed, Weather)
