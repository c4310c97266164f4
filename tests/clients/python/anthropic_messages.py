"""Calls the Messages API with the anthropic package."""

import asyncio
from typing import Any

import anthropic
from cases import MESSAGES, MODEL, PARAMETERS, TOOL_RESULT, URL, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
FIELDS: Any = {"model": MODEL, "max_tokens": 100}
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}


def create() -> Any:
    message = client.messages.create(messages=MESSAGES, system="Answer briefly.", **FIELDS)
    return [[block.text for block in message.content], message.stop_reason, message.role]


def stream() -> Any:
    with client.messages.stream(messages=MESSAGES, **FIELDS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    return [text, final.content[0].text == text, final.usage.output_tokens > 0]


def concurrent_messages() -> list[str]:
    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as client:
            asked = [client.messages.create(messages=MESSAGES, **FIELDS) for _ in range(3)]
            return [message.content[0].text for message in await asyncio.gather(*asked)]

    return asyncio.run(ask_all())


def ask(messages: Any, streamed: bool) -> Any:
    if not streamed:
        return client.messages.create(messages=messages, tools=[TOOL], **FIELDS)
    with client.messages.stream(messages=messages, tools=[TOOL], **FIELDS) as stream:
        return stream.get_final_message()


def tool_loop(streamed: bool) -> Any:
    first = ask(MESSAGES, streamed)
    [call] = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    return [call.name, call.input, first.stop_reason, ask(messages, streamed).content[0].text]


def thinking() -> Any:
    message = client.messages.create(messages=MESSAGES, thinking={"type": "adaptive"}, **FIELDS)
    return [[block.type for block in message.content], message.content[-1].text]


def stop_sequences() -> Any:
    message = client.messages.create(
        messages=MESSAGES, stop_sequences=["no", "such", "text", "zero", " scripted"], **FIELDS
    )
    return [message.content[0].text, message.stop_reason, message.stop_sequence]


def count_tokens() -> Any:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(messages=MESSAGES, **FIELDS).usage
    return counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


run(
    {
        "create": create,
        "stream": stream,
        "concurrent async messages": concurrent_messages,
        "tool loop": lambda: tool_loop(streamed=False),
        "streamed tool loop": lambda: tool_loop(streamed=True),
        "thinking": thinking,
        "five stop sequences": stop_sequences,
        "count_tokens": count_tokens,
    }
)
