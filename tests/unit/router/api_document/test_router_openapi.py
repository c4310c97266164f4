"""Tests that the OpenAPI document is valid, complete, and consistent with what the router accepts
and returns."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import OpenAPIV31SpecValidator

from baton.text.tokenizer import Tokenizer
from router.api_document.document import REQUEST_MODELS, build_document
from router.api_document.request_schemas import request_schemas
from router.app import build_routes
from tests import router_harness
from tests.router_harness import CHAT, COMPLETE, RESPOND, chat, open_harness

tokenizer = router_harness.tokenizer
DOCUMENT = build_document("1")


def test_document_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


async def test_document_has_every_route(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A new route must be described in router/api_document/document.py."""
    async with open_harness(tokenizer) as (router, client):
        served = (await client.get("/openapi.json")).json()
        app = build_routes(router.service, router.make_batch_service(tmp_path))
        routes = [each for each in app.routes if isinstance(each, APIRoute)]
    there = {(route.path_format, method.lower()) for route in routes for method in route.methods}
    documented = {(path, method) for path, item in served["paths"].items() for method in item}
    assert documented == there
    assert served["components"] == json.loads(json.dumps(DOCUMENT["components"]))


@pytest.mark.parametrize("body", REQUEST_MODELS)
def test_every_field_has_a_schema(body: Any) -> None:
    """A new field that code validates must be described in
    router/api_document/request_schemas.py."""
    for name, schema in request_schemas([body]).items():
        for field, form in schema["properties"].items():
            assert set(form) - {"default", "title", "description"}, f"{name}.{field} has no form"


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stop="x", n=2, logit_bias={"7": 1.5}, user="u", stream=False)),
        (CHAT, chat(stop=["x", "y"], tool_choice="none", response_format={"type": "text"})),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        (COMPLETE, {"prompt": "a"}),
        (COMPLETE, {"prompt": ["a", "b"], "max_tokens": 2, "best_of": 1}),
        (COMPLETE, {"prompt": [1, 2], "stop": None, "logprobs": 1, "suffix": ""}),
        (COMPLETE, {"prompt": [[1], [2]], "min_tokens": 0}),
        (COMPLETE, {"prompt": "a", "attention_window": {"recent_tokens": 9}}),
        (RESPOND, {"input": "a"}),
        (RESPOND, {"input": [{"role": "user", "content": "a"}], "store": True, "stop": "x"}),
        (
            RESPOND,
            {
                "input": "a",
                "tools": [{"type": "function", "name": "f"}],
                "text": {},
                "tool_choice": "none",
                "reasoning": {"summary": "auto"},
            },
        ),
        (f"{RESPOND}/input_tokens", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
async def test_accepted_requests_and_answers_match_the_document(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]
    components = {"components": DOCUMENT["components"]}
    jsonschema.validate(body, {**schema, **components})
    async with open_harness(tokenizer) as (_, client):
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), {**answered, **components})


async def test_errors_match_the_document(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in (CHAT, COMPLETE, RESPOND, "/tokenize", "/detokenize"):
            answer = await client.post(path, content=b"{")
            jsonschema.validate(answer.json(), schema_of("Error"))
        jsonschema.validate((await client.get("/nowhere")).json(), schema_of("Error"))
