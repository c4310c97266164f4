"""Calls the Responses API with the openai package."""

import asyncio
from typing import Any

import openai
from cases import MODEL, PARAMETERS, QUESTION, SECOND_QUESTION, TOOL_RESULT, URL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
responses = client.responses
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}
POLLING_SECONDS = 30.0


class Report(BaseModel):
    city: str
    degrees: int


def create() -> Any:
    response = responses.create(model=MODEL, input=QUESTION)
    return [response.output_text, response.status]


def stream() -> Any:
    events = list(responses.create(model=MODEL, input=QUESTION, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    numbers = [event.sequence_number for event in events]
    return [text, events[0].type, events[-1].type, numbers == list(range(len(events)))]


def stream_helper() -> Any:
    with responses.stream(model=MODEL, input=QUESTION, text_format=Report) as stream:
        for _ in stream:
            pass
        return stream.get_final_response().output_parsed.model_dump()


def concurrent_responses() -> list[str]:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            asked = [client.responses.create(model=MODEL, input=QUESTION) for _ in range(3)]
            return [response.output_text for response in await asyncio.gather(*asked)]

    return asyncio.run(ask_all())


def second_question() -> str:
    first = responses.create(model=MODEL, input=QUESTION)
    second = responses.create(model=MODEL, input=SECOND_QUESTION, previous_response_id=first.id)
    return second.output_text


def tool_loop(continued: bool) -> Any:
    """Run two turns. The second one refers to the first response by its id if ``continued``;
    otherwise, it repeats the first turn."""
    first = responses.create(model=MODEL, input=QUESTION, tools=[TOOL], store=continued)
    [call] = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
    fields: Any = (
        {"previous_response_id": first.id, "input": [result]}
        if continued
        else {"input": [{"role": "user", "content": QUESTION}, *first.output, result]}
    )
    second = responses.create(model=MODEL, tools=[TOOL], **fields)
    return [call.name, call.arguments, second.output_text]


def parse() -> Any:
    response = responses.parse(model=MODEL, input=QUESTION, text_format=Report)
    return response.output_parsed.model_dump()


def reasoning() -> Any:
    response = responses.create(
        model=MODEL, input=QUESTION, reasoning={"effort": "high", "summary": "auto"}
    )
    return [[item.type for item in response.output], response.output_text]


def stored_response() -> Any:
    response = responses.create(model=MODEL, input=QUESTION)
    again = responses.retrieve(response.id)
    responses.delete(response.id)
    try:
        responses.retrieve(response.id)
    except openai.NotFoundError:
        return again.output_text
    return "still there"


def background() -> Any:
    async def poll() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            first = await client.responses.create(model=MODEL, input=QUESTION, background=True)
            response = first
            async with asyncio.timeout(POLLING_SECONDS):
                while response.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.05)
                    response = await client.responses.retrieve(first.id)
            return [first.status, response.status, response.output_text]

    return asyncio.run(poll())


def input_items() -> Any:
    """List the items of a request with a call and its result, in pages of one item."""
    [call] = responses.create(model=MODEL, input=QUESTION, tools=[TOOL]).output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT}
    items = [{"role": "user", "content": QUESTION}, call, result]
    response = responses.create(model=MODEL, input=items, tools=[TOOL])
    asked, called, returned = responses.input_items.list(response.id, order="asc", limit=1)
    return [
        [asked.type, asked.role, [part.text for part in asked.content]],
        [called.type, called.name, called.arguments],
        [returned.type, returned.call_id == called.call_id, returned.output],
    ]


run(
    {
        "create": create,
        "stream": stream,
        "concurrent async responses": concurrent_responses,
        "second question": second_question,
        "tool loop with previous_response_id": lambda: tool_loop(continued=True),
        "tool loop with all items": lambda: tool_loop(continued=False),
        "parse": parse,
        "parse a stream": stream_helper,
        "reasoning": reasoning,
        "retrieve and delete": stored_response,
        "background": background,
        "input items": input_items,
    }
)
