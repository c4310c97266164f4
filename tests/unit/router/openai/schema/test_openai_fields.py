"""Compares docs/openai.md with the router's schema and the types of OpenAI's own client."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types import (
    batch_create_params,
    batch_list_params,
    chat,
    completion_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_text_config_param,
)
from openai.types.shared_params import FunctionDefinition, Reasoning

from baton.text.tokenizer import Tokenizer
from router.batches.schema import CreateBatchBody
from router.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)
from router.responses.schema import InputTokensBody, ReasoningConfig, ResponsesBody, TextConfig
from router.serving.schema.message import Message
from tests import router_harness
from tests.router_harness import CHAT, COMPLETE, RESPOND, open_harness, wrong_error
from tests.router_harness import chat as chat_body

tokenizer = router_harness.tokenizer

DOCUMENT = Path(__file__).parents[5] / "docs" / "openai.md"
STATUSES = {"supported", "limited", "accepted", "rejected"}


def tables() -> dict[str, dict[str, str]]:
    """Return the documented status of every field, by section."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        row = re.match(r"\| `([^`]+)` \| (\w+) \| (.*)\|$", line)
        if row is not None and row[2] in STATUSES:
            fields = found.setdefault(section, {})
            assert row[1] not in fields, row[1]
            fields[row[1]] = row[2]
    return found


TABLES = tables()
CHATS, COMPLETIONS = TABLES["Chat completions"], TABLES["Completions"]
RESPONSES = TABLES["Responses"]
TOP = {name: status for name, status in CHATS.items() if "." not in name}


def keys(*types: Any) -> set[str]:
    return {name for each in types for name in typing.get_type_hints(each)}


def below(prefix: str, table: dict[str, str]) -> set[str]:
    return {name.removeprefix(prefix) for name in table if name.startswith(prefix)}


# -- the tables list every field of OpenAI's ------------------------------------------------------


def test_chat_tables_have_all_of_openais_fields() -> None:
    theirs = keys(
        chat_create_params.CompletionCreateParamsNonStreaming,
        chat_create_params.CompletionCreateParamsStreaming,
    )
    assert theirs <= TOP.keys()
    options = below("stream_options.", CHATS) - {"continuous_usage_stats"}  # fields of vLLM
    assert keys(chat.ChatCompletionStreamOptionsParam) == options
    assert below("stream_options.", CHATS) == StreamOptions.model_fields.keys()
    assert keys(FunctionDefinition) == below("tools.function.", CHATS)


def test_message_tables_have_all_of_openais_fields() -> None:
    theirs = keys(
        chat.ChatCompletionSystemMessageParam,
        chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionUserMessageParam,
        chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionToolMessageParam,
    )
    assert theirs <= below("messages.", CHATS)
    assert below("messages.", CHATS) - {"cache_control"} <= Message.model_fields.keys() | {"role"}
    assert Message.model_fields.keys() - {"cache_control"} <= below("messages.", CHATS)
    assert keys(chat.ChatCompletionContentPartTextParam) == {
        "type", "text", "prompt_cache_breakpoint",
    }  # fmt: skip


def test_completion_table_has_all_of_openais_fields() -> None:
    theirs = keys(
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    )
    assert theirs <= COMPLETIONS.keys()


def test_responses_table_has_all_of_openais_fields() -> None:
    theirs = keys(
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
        input_token_count_params.InputTokenCountParams,
    )
    assert theirs <= RESPONSES.keys()
    assert keys(response_create_params.StreamOptions) == below("stream_options.", RESPONSES)
    assert keys(Reasoning) == below("reasoning.", RESPONSES)
    assert keys(response_text_config_param.ResponseTextConfigParam) == below("text.", RESPONSES)
    assert (
        keys(input_token_count_params.InputTokenCountParams) <= InputTokensBody.model_fields.keys()
    )


def test_file_and_batch_tables_have_all_of_openais_fields() -> None:
    files, batches = TABLES["Files"], TABLES["Batches"]
    assert keys(file_create_params.FileCreateParams) <= below("files.", files)
    assert keys(file_list_params.FileListParams) == below("files.list.", files)
    assert keys(batch_create_params.BatchCreateParams) <= below("batches.", batches)
    assert keys(batch_list_params.BatchListParams) == below("batches.list.", batches)
    top = {name for name in below("batches.", batches) if "." not in name}
    assert top == CreateBatchBody.model_fields.keys()


# -- the tables list every field of the router's --------------------------------------------------


def test_tables_have_exactly_the_routers_fields() -> None:
    assert TOP.keys() == ChatBody.model_fields.keys()
    assert COMPLETIONS.keys() == CompletionBody.model_fields.keys()
    responses = {name for name in RESPONSES if "." not in name}
    assert responses == ResponsesBody.model_fields.keys()
    assert below("reasoning.", RESPONSES) == ReasoningConfig.model_fields.keys()
    assert below("text.", RESPONSES) == TextConfig.model_fields.keys()
    tokenize = TABLES["Tokenize, detokenize"]
    assert below("tokenize.", tokenize) == TokenizeBody.model_fields.keys()
    assert below("detokenize.", tokenize) == DetokenizeBody.model_fields.keys()


# -- the statuses are true ------------------------------------------------------------------------

ACCEPTED_VALUES: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "Hello"},
    "spaces_between_special_tokens": True,
    "service_tier": "flex",
    "store": True,
    "modalities": ["text"],
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "suffix": "",
}
"""Values that are accepted for fields with the status "accepted" or "limited"."""

REJECTED_VALUES: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "mp3"},
    "web_search_options": {},
    "moderation": {"model": "x"},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "chat_template": "{{ messages }}",
    "suffix": "end",
}
"""Values that are refused for fields with the status "rejected" or "limited"."""

ANY_OBJECT = {
    "guided_json", "prompt_cache_options", "client_metadata", "image", "access_programs",
    "reasoning", "text",
}  # fmt: skip
"""Fields that accept any object, or an object whose unknown fields are ignored."""


def of(table: dict[str, str], *statuses: str) -> list[str]:
    return [name for name, status in table.items() if status in statuses and "." not in name]


@pytest.mark.parametrize(("path", "table"), [(CHAT, CHATS), (COMPLETE, COMPLETIONS)])
async def test_rejected_values_are_refused_and_accepted_ones_taken(
    tokenizer: Tokenizer, path: str, table: dict[str, str]
) -> None:
    body = chat_body() if path == CHAT else {"prompt": "x"}
    async with open_harness(tokenizer) as (router, client):
        for name in of(table, "rejected", "limited"):
            response = await client.post(path, json={**body, name: REJECTED_VALUES[name]})
            error = wrong_error(response)
            assert error["param"] == name and len(error["message"]) > len(name) + 10
            nothing = await client.post(path, json={**body, name: None})
            assert nothing.status_code == 200, nothing.text
        known = len(router.placer.queries)
        for name in of(table, "accepted", "limited"):
            if name in ACCEPTED_VALUES:
                response = await client.post(path, json={**body, name: ACCEPTED_VALUES[name]})
                assert response.status_code == 200, response.text
        assert len(router.placer.queries) > known


RESPONSES_ACCEPTED_VALUES: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "u",
    "service_tier": "priority",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "max_tool_calls": 3,
    "client_metadata": {"x": "y"},
    "image": {"context_compression": "auto"},
    "access_programs": {"cyber": "standard"},
    "truncation": "disabled",
    "background": False,
    "spaces_between_special_tokens": True,
}
RESPONSES_REJECTED_VALUES: dict[str, Any] = {
    "truncation": "auto",
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "m"},
    "personality": "friendly",
}


async def test_statuses_of_responses_are_true(tokenizer: Tokenizer) -> None:
    body = {"input": "x"}
    async with open_harness(tokenizer) as (_, client):
        for name in of(RESPONSES, "rejected", "limited"):
            wrong = {**body, name: RESPONSES_REJECTED_VALUES[name]}
            assert wrong_error(await client.post(RESPOND, json=wrong))["param"] == name
        for name in of(RESPONSES, "accepted", "limited"):
            good = {**body, name: RESPONSES_ACCEPTED_VALUES[name]}
            response = await client.post(RESPOND, json=good)
            assert response.status_code == 200, response.text


def test_rejected_message_fields_are_refused() -> None:
    for field in ("audio", "function_call"):
        assert CHATS[f"messages.{field}"] == "rejected"
        with pytest.raises(ValueError, match=field):
            Message.model_validate({"role": "assistant", "content": "x", field: {}})


@pytest.mark.parametrize(
    "field",
    sorted(({*TOP, *COMPLETIONS} | set(of(RESPONSES, *STATUSES))) - ANY_OBJECT),
)
async def test_values_of_a_wrong_type_are_refused(tokenizer: Tokenizer, field: str) -> None:
    """Every supported field is validated: if a request gives it a JSON object that it does not
    accept, the request is refused with an error that names the field."""
    async with open_harness(tokenizer) as (_, client):
        for path, body, table in (
            (CHAT, chat_body(), CHATS), (COMPLETE, {"prompt": "x"}, COMPLETIONS),
            (RESPOND, {"input": "x"}, RESPONSES),
        ):  # fmt: skip
            if field in table:
                wrong = {**body, field: {"no": ["such", {"thing": 1}]}}
                error = wrong_error(await client.post(path, json=wrong))
                assert str(error["param"]).startswith(field), error
