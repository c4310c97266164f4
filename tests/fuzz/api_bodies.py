"""Generates random request bodies for the Responses API and the Messages API. The bodies follow the
OpenAPI document, and have items, tools and content blocks of all types; some are then damaged."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz.content_blocks import BlockMaker
from tests.fuzz.input_items import ItemMaker
from tests.fuzz.schema_values import SchemaValues
from tests.fuzz.value_maker import TEXTS

RESPOND, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
BODIES = {
    RESPOND: "ResponsesBody",
    INPUT_TOKENS: "InputTokensBody",
    MESSAGES: "MessagesBody",
    COUNT_TOKENS: "CountTokensBody",
}
UNKNOWN_FIELDS = ("trace_tag", "temprature", "maxTokens", "n", "prompt", "x\r\ny: z", "x" * 5000)
RAW = (
    b"", b"null", b"[]", b'"x"', b"{", b"{}", b"\xff", b"\xef\xbb\xbf{}", b"NaN", b"-", b"{}\n{}",
    b"[" * 300, b'{"input":' * 300, b"9" * 5000, b'{"input":"\\ud800"}', b'{"input":"\\u12"}',
    b'{"input":' + b"[" * 190 + b"]" * 190 + b"}", b'{"input":[' + b"{}," * 20_000 + b"{}]}",
    b'{"input":[' + b'{"role":"user","content":"x"},' * 17_000 + b"{}]}", b'{"input":"a","in',
    b'{"input":"x","tools":[' + b'{"type":"function","name":"f"},' * 200 + b"{}]}",
    b'{"input":[{"role":"user","content":[' + b'{"type":"text","text":"x"},' * 9000 + b"1]}]}",
    b'{"input":"x","metadata":{' + b'"k":"v",' * 9000 + b'"k":"v"}}', b'{"input":1e999}',
    b'{"input":"x","tools":[{"type":"function","name":"f","parameters":'
    + b'{"a":' * 180 + b"1" + b"}" * 180 + b"}]}",
    b'{"max_tokens":1,"messages":[' + b'{"role":"user","content":"x"},' * 17_000 + b"1]}",
    b'{"max_tokens":1,"messages":[{"role":"user","content":['
    + b'{"type":"text","text":"x"},' * 9000 + b"1]}]}",
    b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1",'
    b'"name":"f","input":' + b'{"a":' * 180 + b"1" + b"}" * 180 + b"}]}]}",
    b'{"max_tokens":' + b"9" * 5000 + b',"messages":[{"role":"user","content":"x"}]}',
)  # fmt: skip


class BodyMaker(SchemaValues):
    """Generates request bodies. ``known_ids`` are ids of stored responses, to which some bodies
    refer."""

    def __init__(self, rng: np.random.Generator, known_ids: list[str]) -> None:
        super().__init__(rng)
        self._items = ItemMaker(rng, known_ids)
        self._blocks = BlockMaker(rng)
        self._known_ids = known_ids

    def encoded(self, path: str) -> bytes:
        """Return the bytes of a body for a request to ``path``. Some of these bodies are
        damaged."""
        if self._chance(0.03):
            return bytes(self._one(RAW))
        body = self.body(path)
        if self._chance(0.2):
            body = self._damaged(body)
        data = json.dumps(body).encode()
        if isinstance(body, dict) and body and self._chance(0.03):
            name = json.dumps(self._one(tuple(body)))
            data = data[:-1] + f", {name}: {json.dumps(self.value())}}}".encode()
        return self.broken(data) if self._chance(0.05) else data

    def body(self, path: str) -> dict[str, Any]:
        """Return a valid body in which a few fields have random values."""
        is_responses = path in (RESPOND, INPUT_TOKENS)
        body = self._responses_body() if is_responses else self._messages_body()
        if path == MESSAGES:
            body["max_tokens"] = self._one((1, 8, 200, 200, 10**6))
        if path in (RESPOND, MESSAGES):
            body["stream"] = self._chance(0.6)
        if path == RESPOND and self._chance(0.1):
            body["background"] = True
            body.pop("stream")
        if path == RESPOND and self._chance(0.2):
            name = self._one(("reasoning", "include", "max_output_tokens", "top_logprobs"))
            body[name] = self._field(name, {})
        forms = self.fields(BODIES[path])
        for _ in range(self._below(3)):
            name = self._one(tuple(forms))
            body[name] = self._field(name, forms)
        if self._chance(0.1):
            body[self._one((*UNKNOWN_FIELDS, *TEXTS))] = self.value()
        return body

    def _responses_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"input": self._items.input()}
        if self._chance(0.4):
            body["tools"] = self._items.tools()
            body["tool_choice"] = self._items.tool_choice()
        if self._known_ids and self._chance(0.2):
            body["previous_response_id"] = self._one(self._known_ids)
        return body

    def _messages_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": self._blocks.messages()}
        if self._chance(0.4):
            body["tools"] = self._blocks.tools()
            body["tool_choice"] = self._blocks.tool_choice()
        return body

    def _field(self, name: str, forms: Mapping[str, Any]) -> Any:
        if name == "model":
            return self._mostly(("demo", None), ("other",))
        if name == "reasoning":
            return {
                "effort": self._one(("low", "high", "none")),
                "summary": self._one((None, "auto")),
            }
        if name == "include":
            return [self._one(("reasoning.encrypted_content", "message.output_text.logprobs"))]
        if name in ("max_output_tokens", "top_logprobs"):
            return self._one((1, 3, 10))
        return self.of_schema(forms[name])

    def _damaged(self, body: Any) -> Any:
        """Return the body with one value changed, at any depth."""
        if not isinstance(body, dict | list) or not body or self._chance(0.15):
            return self._replacement(body)
        keys = tuple(body) if isinstance(body, dict) else range(len(body))
        key = self._one(keys)
        changed: Any = body.copy()
        kind = self._below(10)
        if kind == 0:
            del changed[key]
        elif kind == 1 and isinstance(changed, dict):
            changed[self._one((*UNKNOWN_FIELDS, *TEXTS))] = self.value()
        elif kind == 1:
            changed = changed * self._one((2, 130, 1000))
        else:
            changed[key] = self._damaged(body[key])
        return changed

    def _replacement(self, value: Any) -> Any:
        kind = self._below(6)
        if kind == 0:
            return [value]
        if kind == 1:
            return self._nested(value)
        if kind == 2:
            return self._one(("", [], {}, None, float("nan"), float("inf"), 2**64, -(2**70), 1e308))
        return self.value()

    def _nested(self, value: Any) -> Any:
        for _ in range(self._one((5, 60, 125, 190))):
            value = {"a": value} if self._chance(0.5) else [value]
        return value
