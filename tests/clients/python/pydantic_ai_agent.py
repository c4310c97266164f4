"""Runs an agent with a tool with pydantic-ai. The argument chooses the API: ``chat`` or
``responses``."""

import asyncio
import sys
from typing import Any

from cases import MODEL, QUESTION, TOOL_RESULT, URL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Report(BaseModel):
    city: str
    degrees: int


def make_agent(output: Any = str, with_tool: bool = False) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    agent = Agent(MODELS[sys.argv[1]](MODEL, provider=provider), output_type=output)
    if with_tool:
        agent.tool_plain(get_weather)
    return agent


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    assert city == "Paris"
    return TOOL_RESULT


def ask(agent: Agent[None, Any]) -> Any:
    return asyncio.run(agent.run(QUESTION)).output


def stream() -> list[Any]:
    async def read() -> list[Any]:
        async with make_agent().run_stream(QUESTION) as answer:
            parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
            return ["".join(parts), len(parts) > 1]

    return asyncio.run(read())


run(
    {
        "run": lambda: ask(make_agent()),
        "stream": stream,
        "tool loop": lambda: ask(make_agent(with_tool=True)),
        "structured output by tool": lambda: ask(make_agent(Report)).model_dump(),
        "structured output by schema": lambda: ask(make_agent(NativeOutput(Report))).model_dump(),
        "tool loop with structured output": lambda: ask(make_agent(Report, True)).model_dump(),
    }
)
