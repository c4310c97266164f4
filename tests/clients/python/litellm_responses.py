"""Calls the Responses API with litellm."""

from typing import Any

import litellm
from cases import MODEL, PARAMETERS, QUESTION, TOOL_RESULT, URL, run

FIELDS: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


def text_of(response: Any) -> str:
    return response.output[-1].content[0].text


def stream() -> str:
    events = litellm.responses(input=QUESTION, stream=True, **FIELDS)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def tool_loop() -> Any:
    first = litellm.responses(input=QUESTION, tools=[TOOL], **FIELDS)
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
    second = litellm.responses(
        input=[result], tools=[TOOL], previous_response_id=first.id, **FIELDS
    )
    return [call.name, call.arguments, text_of(second)]


run(
    {
        "create": lambda: text_of(litellm.responses(input=QUESTION, **FIELDS)),
        "stream": stream,
        "tool loop": tool_loop,
    }
)
