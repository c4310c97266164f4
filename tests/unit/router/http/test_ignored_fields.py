"""Tests unknown fields of requests: which ones are refused, which ones are ignored, and how the
client is told."""

from typing import Annotated, Any

import orjson
import pytest
from pydantic import Field
from structlog.testing import capture_logs

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.http.body_parser import parse_body
from router.http.ignored_fields import HEADER, IgnoredFields
from router.limits import (
    MAX_IGNORED_FIELDS,
    MAX_LOGGED_FIELDS,
    MAX_LOGGED_TENANTS,
    MAX_NAMES_IN_HEADER,
)
from router.openai.schema import ChatBody
from router.serving.schema.strict_model import StrictModel
from router.serving.schema.unsupported_fields import UNSUPPORTED_FIELDS
from router.telemetry.ignored_fields_log import IgnoredFieldsLog
from router.tenants.tenants_file import parse_tenants_file
from tests import router_harness
from tests.router_harness import CHAT, COMPLETE, chat, open_harness, wrong_error

tokenizer = router_harness.tokenizer

FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**FUNCTION, **fields}}


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        (CHAT, chat(trace_tag=1, zone={"a": 1}), "trace_tag, zone"),
        (CHAT, chat(stream=True, stream_options={"color": 1}), "stream_options.color"),
        (CHAT, chat(response_format={"type": "text", "id": 5}), "response_format.id"),
        (CHAT, chat(use_beam_search=False, mirostat=0, mirostat_tau=5), None),
        (CHAT, chat(models=["a"], mode="x", messages_id=1), "models, mode, messages_id"),
        (COMPLETE, {"prompt": "x", "metadata": {"a": "b"}}, "metadata"),
        (CHAT, chat(store=True), "store"),
        (CHAT, chat(service_tier="flex", verbosity="low"), "service_tier, verbosity"),
        (CHAT, chat(prompt_cache_retention="24h"), "prompt_cache_retention"),
        (CHAT, chat(prompt_cache_options={"a": 1}), "prompt_cache_options"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "annotations": [{}]}]},
            "messages.annotations",
        ),
        ("/tokenize", {"prompt": "x", "temperature": 1}, "temperature"),
        ("/detokenize", {"tokens": [1], "id": "x"}, "id"),
    ],
)
async def test_harmless_fields_are_ignored_and_named(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], header: str | None
) -> None:
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == (header or "use_beam_search, mirostat, mirostat_tau")


async def test_ordinary_requests_have_no_such_header(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        effective = {"store": False, "service_tier": "auto", "verbosity": "medium", "n": 2}
        assert HEADER not in (await client.post(CHAT, json=chat(**effective))).headers
        assert HEADER not in (await client.post("/tokenize", json={"prompt": "x"})).headers


async def test_unknown_fields_of_messages_and_parts_are_ignored(tokenizer: Tokenizer) -> None:
    part = {"type": "text", "text": "x", "id": 1, "cache_control": {"type": "ephemeral", "a": 1}}
    messages = [{"role": "user", "content": [part], "reasoning": "y"}]
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].split(", ") == [
        "messages.reasoning", "messages.content.id", "cache_control.a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"temprature": 1},
            "temprature",
            "unknown parameter 'temprature'; did you mean 'temperatu",
        ),
        ({"maxTokens": 1}, "maxTokens", "did you mean 'max_tokens'?"),
        ({"use_beam_search": True}, "use_beam_search", "there is no such sampling method"),
        ({"max_new_tokens": 5}, "max_new_tokens", "use max_tokens"),
        (
            {"kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
            "only workers transfer KV",
        ),
        ({"mirostat": 2, "id": 1}, "mirostat", "there is no such sampling method"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "belong in the body itself"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema",
            'use {"type": "json_schema"',
        ),
        ({"trace_tag": 1, "n": 0}, "n", "greater than or equal to 1"),
        ({"trace_tag": 1, "top_logprobs": 1}, "top_logprobs", "only allowed with logprobs"),
        ({"tools": [tool(paramters={})]}, "tools[0]", "did you mean 'parameters'?"),
    ],
)
async def test_fields_that_would_change_the_answer_are_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    async with open_harness(tokenizer) as (_, client):
        error = wrong_error(await client.post(CHAT, json=chat(**fields)))
    assert error["param"] == param
    assert message in error["message"]


def test_unsupported_fields_are_none_that_are_supported() -> None:
    assert len(UNSUPPORTED_FIELDS) > 100
    both = UNSUPPORTED_FIELDS.keys() & ChatBody.model_fields.keys()
    assert both == {
        "messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens",
        "reasoning_effort", "add_generation_prompt", "continue_final_message",
        "chat_template_kwargs", "reasoning", "enable_thinking", "think", "thinking",
    }  # fmt: skip


def test_unknown_fields_of_tools_are_not_rendered() -> None:
    ignored = IgnoredFields()
    body = chat(tools=[{**tool(id="x"), "index": 0}])
    parsed = parse_body(ChatBody, _json(body), ignored=ignored)
    assert parsed.tools == [tool()]
    assert set(ignored.names) == {"tools.index", "tools.function.id"}


class Inner(StrictModel):
    size: int


class Outer(StrictModel):
    """A schema with a union and an alias, like the schemas of other APIs."""

    inner: Inner | str | None = None
    items: list[Inner] = Field(default_factory=list)
    kind: Annotated[str, Field(alias="type")]


def test_other_schemas_follow_the_same_rule() -> None:
    ignored = IgnoredFields()
    body = {"type": "x", "items": [{"size": 1, "a": 2}, {"size": 2, "a": 3}], "b": 1}
    parsed = parse_body(Outer, _json(body), ignored=ignored)
    assert [each.size for each in parsed.items] == [1, 2]
    assert ignored.names == ("items.a", "b")
    for wrong in ({"items": [{"size": 1, "sizes": 1}]}, {"typ": 1}, {"items": [{"size": ""}]}):
        with pytest.raises(ApiError):
            parse_body(Outer, _json({"type": "x", **wrong}), ignored=IgnoredFields())


def _json(value: Any) -> bytes:
    return orjson.dumps(value)


async def test_strict_routers_and_tenants_refuse_unknown_fields(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, strict_fields=True) as (_, client):
        for fields in ({"id": 1}, {"tools": [{**tool(), "id": 1}]}):
            wrong_error(await client.post(CHAT, json=chat(**fields)))
        error = wrong_error(await client.post(CHAT, json=chat(id=1)))
        assert error["message"] == "Unrecognized request argument supplied: id"
        assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize(("of_router", "of_tenant"), [(False, "true"), (True, "false")])
async def test_a_tenants_own_value_counts(
    tokenizer: Tokenizer, of_router: bool, of_tenant: str
) -> None:
    file = f"tenants: {{default: {{strict_fields: {of_tenant}}}}}"
    async with open_harness(tokenizer, strict_fields=of_router) as (router, _):
        authenticator = router.service.tenants.authenticator
        assert router.service.ignored_fields(TenantId("default")).is_strict is of_router
        authenticator.set_directory(parse_tenants_file(file.encode()))
        assert router.service.ignored_fields(TenantId("default")).is_strict is not of_router


def test_names_are_safe_in_a_header() -> None:
    ignored = IgnoredFields()
    for name in ("a\r\nset-cookie: x", "ü", "x" * 1000, "a, b"):
        ignored.add(name)
    for number in range(100):
        ignored.add(f"n{number}")
    header = ignored.headers()[HEADER]
    names = header.split(", ")
    assert names[:4] == ["a??set-cookie??x", "?", "x" * 64, "a??b"]
    assert len(names) == MAX_NAMES_IN_HEADER + 1 and names[-1] == "..."
    assert header.isascii() and header.isprintable()


@pytest.mark.parametrize("nested", [False, True])
def test_the_number_of_unknown_fields_is_bounded(nested: bool) -> None:
    for number in (MAX_IGNORED_FIELDS, MAX_IGNORED_FIELDS + 1):
        fields = {f"trace_{each}": each for each in range(number)}
        body = chat(tools=[{**tool(), **fields}]) if nested else chat(**fields)
        ignored = IgnoredFields()
        if number == MAX_IGNORED_FIELDS:
            parse_body(ChatBody, _json(body), ignored=ignored)
            assert len(ignored.names) == MAX_IGNORED_FIELDS
        else:
            with pytest.raises(
                ApiError, match=f"more than {MAX_IGNORED_FIELDS} different unknown fields"
            ):
                parse_body(ChatBody, _json(body), ignored=ignored)


def test_a_field_is_logged_once_per_tenant() -> None:
    written = IgnoredFieldsLog()
    with capture_logs() as logs:
        written.write(TenantId("a"), ("x", "y"))
        written.write(TenantId("a"), ("y", "z"))
        written.write(TenantId("b"), ("x",))
        written.write(TenantId("b"), ())
    assert [(each["event"], each["tenant"], each["fields"]) for each in logs] == [
        ("fields_ignored", "a", ["x", "y"]),
        ("fields_ignored", "a", ["z"]),
        ("fields_ignored", "b", ["x"]),
    ]


def test_the_memory_of_logged_fields_is_bounded() -> None:
    written = IgnoredFieldsLog()
    with capture_logs() as logs:
        written.write(TenantId("a"), [str(number) for number in range(1000)])
        written.write(TenantId("a"), ["more"])
        for number in range(MAX_LOGGED_TENANTS + 10):
            written.write(TenantId(f"t{number}"), ["x"])
    assert len(logs[0]["fields"]) == MAX_LOGGED_FIELDS
    assert len(logs) == MAX_LOGGED_TENANTS
