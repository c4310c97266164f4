"""Requests chat completions and completions with the openai package."""

import asyncio
from typing import Any

import openai
from cases import MESSAGES, MODEL, TOOL, TOOL_RESULT, URL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
chat = client.chat.completions


class Report(BaseModel):
    city: str
    degrees: int


def create() -> Any:
    [choice] = chat.create(model=MODEL, messages=MESSAGES).choices
    return [choice.message.content, choice.finish_reason]


def stream() -> Any:
    options: Any = {"include_usage": True}
    chunks = list(chat.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return [text, chunks[-1].usage is not None]


def concurrent_streams() -> list[str]:
    async def read(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            return list(await asyncio.gather(*(read(client) for _ in range(3))))

    return asyncio.run(read_all())


def two_turns_with_a_tool() -> Any:
    messages = list(MESSAGES)
    message = chat.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    [call] = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}]
    answer = chat.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    return [call.function.name, call.function.arguments, answer.content]


def streamed_tool_call() -> Any:
    with chat.stream(model=MODEL, messages=MESSAGES, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    deltas = "tool_calls.function.arguments.delta" in kinds
    return [call.function.name, call.function.arguments, deltas]


def parse() -> Any:
    answer = chat.parse(model=MODEL, messages=MESSAGES, response_format=Report)
    return answer.choices[0].message.parsed.model_dump()


def reasoning() -> Any:
    answer = chat.create(model=MODEL, messages=MESSAGES, reasoning_effort="high")
    message = answer.choices[0].message
    return [message.model_extra["reasoning_content"], message.content]


def completions() -> Any:
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=40).choices[0]
    chunks = client.completions.create(model=MODEL, prompt="Once", max_tokens=40, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    return [whole.text, whole.finish_reason, streamed == whole.text]


def five_stop_strings() -> Any:
    stop = ["no", "such", "text", "zero", " five"]
    [choice] = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=40, stop=stop
    ).choices
    return [choice.text, choice.finish_reason]


def embeddings_are_refused() -> Any:
    try:
        client.embeddings.create(model=MODEL, input="a text")
    except openai.APIStatusError as error:
        return [error.status_code, error.body["message"]]
    return "answered"


run(
    {
        "create": create,
        "stream": stream,
        "concurrent async streams": concurrent_streams,
        "tool loop": two_turns_with_a_tool,
        "streamed tool call": streamed_tool_call,
        "parse": parse,
        "reasoning": reasoning,
        "completions": completions,
        "five stop strings": five_stop_strings,
        "models": lambda: [model.id for model in client.models.list()],
        "embeddings": embeddings_are_refused,
    }
)
