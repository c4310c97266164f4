"""Runs an agent with a tool with the openai-agents package. The argument chooses the API: ``chat``
or ``responses``."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import MODEL, QUESTION, SECOND_QUESTION, TOOL_RESULT, URL, run
from pydantic import BaseModel

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Report(BaseModel):
    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    assert city == "Paris"
    return TOOL_RESULT


@asynccontextmanager
async def make_agent(**fields: Any) -> AsyncIterator[Agent[Any]]:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        model = MODELS[sys.argv[1]](model=MODEL, openai_client=client)
        yield Agent(name="Reporter", instructions="Answer briefly.", model=model, **fields)


async def ask(**fields: Any) -> Any:
    async with make_agent(**fields) as agent:
        return (await Runner.run(agent, QUESTION)).final_output


async def stream(**fields: Any) -> Any:
    async with make_agent(**fields) as agent:
        answer = Runner.run_streamed(agent, QUESTION)
        kinds = {event.type async for event in answer.stream_events()}
        return [answer.final_output, "raw_response_event" in kinds]


async def two_questions() -> str:
    async with make_agent() as agent:
        first = await Runner.run(agent, QUESTION)
        following = [*first.to_input_list(), {"role": "user", "content": SECOND_QUESTION}]
        return (await Runner.run(agent, following)).final_output


set_tracing_disabled(True)
run(
    {
        "run": lambda: asyncio.run(ask()),
        "stream": lambda: asyncio.run(stream()),
        "second question": lambda: asyncio.run(two_questions()),
        "tool loop": lambda: asyncio.run(ask(tools=[get_weather])),
        "streamed tool loop": lambda: asyncio.run(stream(tools=[get_weather])),
        "structured output": lambda: asyncio.run(ask(output_type=Report)).model_dump(),
    }
)
