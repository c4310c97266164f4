"""Requests structured outputs with instructor: by tool and by schema, whole and streamed."""

from typing import Any

import instructor
import openai
from cases import MESSAGES, MODEL, URL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Report(BaseModel):
    city: str
    degrees: int


def create(**mode: Any) -> Any:
    patched = instructor.from_openai(client, **mode)
    return patched.create(model=MODEL, messages=MESSAGES, response_model=Report).model_dump()


def partial() -> Any:
    reports = instructor.from_openai(client).create_partial(
        model=MODEL, messages=MESSAGES, response_model=Report
    )
    return list(reports)[-1].model_dump()


run(
    {
        "by tool (its default)": create,
        "by strict tool": lambda: create(mode=instructor.Mode.TOOLS_STRICT),
        "by schema": lambda: create(mode=instructor.Mode.JSON_SCHEMA),
        "by JSON mode": lambda: create(mode=instructor.Mode.JSON),
        "streamed": partial,
    }
)
