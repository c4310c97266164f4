"""Calls the cluster with litellm's provider ``anthropic``."""

from typing import Any

import litellm
from cases import MESSAGES, MODEL, TOOL, TOOL_RESULT, URL, run

FIELDS: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}


def create(**fields: Any) -> Any:
    [choice] = litellm.completion(messages=MESSAGES, **fields, **FIELDS).choices
    return [choice.message.content, choice.finish_reason]


def stream() -> str:
    chunks = litellm.completion(messages=MESSAGES, stream=True, **FIELDS)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tool_loop() -> Any:
    messages = list(MESSAGES)
    response = litellm.completion(messages=messages, tools=[TOOL], **FIELDS)
    messages.append(response.choices[0].message)
    [call] = response.choices[0].message.tool_calls
    messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})
    answer = litellm.completion(messages=messages, tools=[TOOL], **FIELDS)
    return [call.function.name, call.function.arguments, answer.choices[0].message.content]


run({"create": create, "stream": stream, "tool loop": tool_loop})
