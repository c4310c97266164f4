"""Compares docs/anthropic.md with the router's schema and the types of Anthropic's own client."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import (
    ToolParam,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from pydantic import BaseModel

from baton.text.tokenizer import Tokenizer
from router.anthropic.schema import CountTokensBody, MessagesBody
from router.anthropic.schema.content_block import ASSISTANT_TYPES, USER_TYPES
from router.anthropic.schema.messages_body import OutputConfig
from router.anthropic.schema.tool import CustomTool
from tests import router_harness
from tests.anthropic_harness import COUNT, MESSAGES, TOOL, error_of, message_of, request
from tests.router_harness import open_harness

tokenizer = router_harness.tokenizer

DOCUMENT = Path(__file__).parents[5] / "docs" / "anthropic.md"
STATUSES = {"supported", "limited", "accepted", "rejected"}


def table() -> dict[str, str]:
    """Return the documented status of every field and block."""
    rows = re.findall(r"^\| (`.+?) \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    return {
        name: status
        for names, status in rows
        if status in STATUSES
        for name in re.findall(r"`([^`]+)`", names)
    }


TABLE = table()
BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
TOP = MessagesBody.model_fields.keys()


def keys(*types: Any) -> set[str]:
    return {name for each in types for name in typing.get_type_hints(each)}


def below(prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in TABLE if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("prefix", "model"),
    [("", MessagesBody), ("count.", CountTokensBody), ("tools.", CustomTool),
     ("output_config.", OutputConfig)],
)  # fmt: skip
def test_tables_have_all_fields_of_the_router(prefix: str, model: type[BaseModel]) -> None:
    documented = {name for name in below(prefix) if prefix or "." not in name}
    fields = {field.alias or name for name, field in model.model_fields.items()}
    assert fields <= documented
    assert prefix == "" or fields == documented


def test_tables_have_all_fields_of_anthropics_client() -> None:
    create = keys(
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
    )
    assert create <= TABLE.keys()
    count = keys(
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_params.MessageCountTokensParams,
    )
    assert count <= below("count.")
    assert keys(ToolParam) <= below("tools.")


def test_blocks_are_those_of_the_router() -> None:
    assert (USER_TYPES | ASSISTANT_TYPES).keys() == BLOCKS <= TABLE.keys()


ACCEPTED_VALUES: dict[str, Any] = {
    "metadata": {"user_id": "u"}, "service_tier": "standard_only",
}  # fmt: skip
"""Values of accepted fields that do not accept everything."""


async def test_accepted_fields_are_taken_and_rejected_ones_refused(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for name in TOP:
            if TABLE[name] == "accepted":
                value = ACCEPTED_VALUES.get(name, {"x": [1]})
                message_of(await client.post(MESSAGES, json=request(**{name: value})))
            if TABLE[name] == "rejected":
                refused = await client.post(MESSAGES, json=request(**{name: {"id": "x"}}))
                assert error_of(refused)["message"].startswith(f"{name}: ")
            assert (await client.post(MESSAGES, json=request(**{name: None}))).status_code == (
                400 if name in ("messages", "max_tokens") else 200
            )


async def test_fields_of_chats_and_unknown_fields(tokenizer: Tokenizer) -> None:
    tool = {**TOOL, "tag": "t"}
    async with open_harness(tokenizer) as (_, client):
        for name in ("seed", "min_p", "response_format", "chat_template_kwargs", "num_beams"):
            refused = await client.post(MESSAGES, json=request(**{name: 7}))
            assert error_of(refused)["message"].startswith(f"{name} is not supported: ")
        typo = await client.post(MESSAGES, json=request(stop_sequence=["a"]))
        assert "did you mean 'stop_sequences'?" in error_of(typo)["message"]
        parameters = await client.post(MESSAGES, json=request(tools=[{**TOOL, "parameters": {}}]))
        assert "use input_schema" in error_of(parameters)["message"]
        body = request(trace_id="x", n=1, tools=[tool], tool_choice={"type": "none", "tag": 1})
        ignored = (await client.post(MESSAGES, json=body)).headers["x-baton-ignored-fields"]
        counted = await client.post(COUNT, json=request(temperature=0.5))
    assert set(ignored.split(", ")) == {"trace_id", "n", "tools.tag", "tool_choice.tag"}
    assert counted.headers["x-baton-ignored-fields"] == "max_tokens, temperature"


@pytest.mark.parametrize("name", [each for each in TOP if TABLE[each] == "supported"])
async def test_values_of_a_wrong_type_are_refused(tokenizer: Tokenizer, name: str) -> None:
    async with open_harness(tokenizer) as (_, client):
        wrong = await client.post(MESSAGES, json=request(**{name: [{"no": ["such"]}]}))
    assert name in error_of(wrong)["message"]
