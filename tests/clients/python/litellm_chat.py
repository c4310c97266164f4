"""Calls the cluster with litellm's provider ``openai``."""

from typing import Any

import litellm
from cases import MESSAGES, MODEL, TOOL, TOOL_RESULT, URL, run
from pydantic import BaseModel

FIELDS: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}


class Report(BaseModel):
    city: str
    degrees: int


def create() -> Any:
    [choice] = litellm.completion(messages=MESSAGES, **FIELDS).choices
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


def structured_output() -> str:
    answer = litellm.completion(messages=MESSAGES, response_format=Report, **FIELDS)
    return answer.choices[0].message.content


def text_completion() -> str:
    fields = {**FIELDS, "model": f"text-completion-openai/{MODEL}"}
    return litellm.text_completion(prompt="Once", max_tokens=40, **fields).choices[0].text


run(
    {
        "create": create,
        "stream": stream,
        "tool loop": tool_loop,
        "structured output": structured_output,
        "completions": text_completion,
    }
)
