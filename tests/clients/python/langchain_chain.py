"""Calls the cluster with ChatOpenAI of langchain-openai. The argument chooses the API: ``chat`` or
``responses``."""

import sys
from typing import Any

from cases import MODEL, QUESTION, TOOL, TOOL_RESULT, URL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

chat = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key="none",
    max_retries=0,
    stream_usage=True,
    use_responses_api=sys.argv[1] == "responses",
)
question = HumanMessage(QUESTION)


class Report(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def stream() -> Any:
    chunks = list(chat.stream([question]))
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    return ["".join(chunk.text for chunk in chunks), len(usage)]


def tool_loop() -> Any:
    agent = chat.bind_tools([TOOL])
    message = agent.invoke([question])
    [call] = message.tool_calls
    result = ToolMessage(TOOL_RESULT, tool_call_id=call["id"])
    return [call["name"], call["args"], agent.invoke([question, message, result]).text]


def structured_output(method: str) -> Any:
    return chat.with_structured_output(Report, method=method).invoke([question]).model_dump()


def completion() -> str:
    return OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=40).invoke("Once")


run(
    {
        "invoke": lambda: chat.invoke([question]).text,
        "stream": stream,
        "batch": lambda: [answer.text for answer in chat.batch([[question]] * 3)],
        "tool loop": tool_loop,
        "structured output by schema": lambda: structured_output("json_schema"),
        "structured output by tool": lambda: structured_output("function_calling"),
    }
    | ({"completions": completion} if sys.argv[1] == "chat" else {})
)
