"""Generates random JSON bodies that match the router's schema fully, nearly or not at all, and
random upload forms and batch files."""

import json
from typing import Any

from pydantic import BaseModel

from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.fuzz.value_maker import NUMBERS, TEXTS, ValueMaker

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
SCHEMAS: dict[str, type[BaseModel]] = {
    CHAT: ChatBody,
    COMPLETE: CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

UNKNOWN_FIELDS = ("trace_tag", "temprature", "use_beam_search", "x\r\ny: z", "x" * 5000)
SCHEMA_TYPES = ("string", "integer", "object", "array", "null", "boolean", "number", "x")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "")
RAW = (
    b"", b"null", b"[]", b'"x"', b"{", b"}", b'{"a"', b"\xff", b"\xef\xbb\xbf{}", b"[" * 300,
    b'{"a":' * 300, b"NaN", b"1e999", b"-", b'{"prompt":"\\ud800"}', b'{"prompt":"\\u12"}',
    b'{"prompt":"x","prompt":1}', b"9" * 5000, b'{"prompt":' + b"9" * 5000 + b"}", b"\x00" * 99,
    b'{"messages":' + b"[" * 190 + b"]" * 190 + b"}", b'{"prompt":[' + b"[]," * 20_000 + b"[]]}",
    b'{"tokens":[' + b"1," * 20_000 + b"1]}", b'{"stop_token_ids":[' + b'"",' * 20_000 + b"1]}",
    b"{" + b'"k":0,' * 9_000 + b'"k":0}', b"{}\n{}",
)  # fmt: skip


class JsonMaker(ValueMaker):
    """Generates request bodies, upload forms and batch files with a seeded random generator."""

    def request(self) -> tuple[str, bytes]:
        """Return a path and the body to post there."""
        path = self._one(tuple(SCHEMAS))
        if self._chance(0.1):
            return path, bytes(self._one(RAW))
        body = json.dumps(self.body(path)).encode()
        return path, self.broken(body) if self._chance(0.2) else body

    def body(self, path: str) -> dict[str, Any]:
        """Return a valid body in which a few fields have random values."""
        body = self._right(path)
        fields = tuple(SCHEMAS[path].model_fields)
        for _ in range(self._below(5)):
            name = self._one(fields if self._chance(0.9) else (*TEXTS, *UNKNOWN_FIELDS))
            body[name] = self._likely(name) if self._chance(0.6) else self.value()
        if self._chance(0.1):
            body.pop(self._one(tuple(body)), None)
        return body

    def form(self) -> tuple[dict[str, str], bytes]:
        """Return the headers and body of an upload."""
        boundary = self._one((b"b", b"----x", b"a" * 70, b"a" * 71, b"-"))
        parts = [self._part() for _ in range(self._below(4))]
        fields = [(b'name="purpose"', b"batch"), (b'name="file"; filename="f"', self.lines())]
        ends = b"--" if self._chance(0.95) else b""
        data = b"".join(
            b"--" + boundary + b"\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + value
            + b"\r\n" for head, value in [*fields, *parts][: self._below(6) + 1]
        ) + b"--" + boundary + ends  # fmt: skip
        kind = b"multipart/form-data; boundary=" + boundary
        if self._chance(0.05):
            kind = self._one((b"application/json", b"multipart/form-data", b'x; boundary=""'))
        return {"content-type": kind.decode()}, self.broken(data) if self._chance(0.3) else data

    def lines(self) -> bytes:
        """Return the content of a batch file: up to three lines, each of which is a request, or a
        broken request."""
        return b"\n".join(self._line() for _ in range(self._below(4)))

    def _line(self) -> bytes:
        url = self._one((CHAT, COMPLETE))
        line: dict[str, Any] = {
            "custom_id": str(self._below(5)), "method": "POST", "url": url, "body": self.body(url),
        }  # fmt: skip
        if self._chance(0.2):
            line[self._one((*line, "mood"))] = self.value()
        data = json.dumps(line).encode()
        return self.broken(data) if self._chance(0.2) else data

    def _part(self) -> tuple[bytes, bytes]:
        names = ("purpose", "file", "expires_after", "expires_after[seconds]", "x", "")
        name = self._one(names).encode()
        value = self._one(TEXTS).encode(errors="replace")[:5000]
        return b'name="' + name + b'"', value

    def _right(self, path: str) -> dict[str, Any]:
        if path == CHAT:
            return {"messages": self._messages(), "max_tokens": 1 + self._below(4)}
        if path == COMPLETE:
            prompts = ("x", ["x", "yz"], [1, 2, 3], [[1], [2, 3]])
            return {"prompt": self._one(prompts), "max_tokens": 1 + self._below(4)}
        if path == "/detokenize":
            return {"tokens": [self._below(300) for _ in range(self._below(9))]}
        if self._chance(0.5):
            return {"prompt": self._one(TEXTS)}
        return {"messages": self._messages()}

    def _messages(self) -> list[Any]:
        return [
            {"role": "user", "content": "Hi"},
            *(self._message() for _ in range(self._below(3))),
        ]

    def _message(self) -> Any:
        if self._chance(0.05):
            return self.value()
        message: dict[str, Any] = {"role": self._one(ROLES), "content": self._one(TEXTS)}
        if self._chance(0.3):
            ephemeral = {"type": "ephemeral", "ttl": self._one(("5m", "1h", "x"))}
            part = {"type": "text", "text": self._one(TEXTS), "cache_control": ephemeral}
            message["content"] = [part] * self._below(6)
        if self._chance(0.3):
            function = {"name": "f", "arguments": self._one((*TEXTS, {"x": 1}))}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        if self._chance(0.3):
            message[self._one(("name", "tool_call_id", "refusal", "reasoning", "x"))] = self.value()
        return message

    def _likely(self, name: str) -> Any:
        """Return a value for the field ``name`` that is valid in most cases."""
        tool = {"type": "function", "function": {"name": "f", "parameters": self._schema()}}
        known: dict[str, Any] = {
            "messages": self._messages(),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "n": 1 + self._below(4),
            "stop": [self._one(TEXTS) for _ in range(self._below(70))],
            "logprobs": self._one((True, 2)),
            "echo": True,
            "tools": [tool],
            "tool_choice": self._one(("auto", "none", "required")),
            "response_format": {"type": self._one(("text", "json_object"))},
            "guided_json": self._schema(),
            "guided_choice": ["a", "b"],
            "guided_regex": self._one(("a+", "[ab]{3}", "(", "\\")),
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": self._one((1, 3, 60, 10**9)),
            "logit_bias": {"1": 5, "x": 1},
            "prompt_logprobs": 1,
            "best_of": 3,
            "chat_template_kwargs": {self._one(TEXTS): self.value(4)},
            "stop_token_ids": [1, 2],
            "return_token_ids": True,
        }
        return known[name] if name in known else self._one((*NUMBERS, *TEXTS, True, None))

    def _schema(self, depth: int = 0) -> Any:
        schema: dict[str, Any] = {"type": self._one(SCHEMA_TYPES)}
        if depth < 3 and self._chance(0.4):
            schema["properties"] = {"a": self._schema(depth + 1)}
        if depth < 3 and self._chance(0.2):
            schema[self._one(("items", "anyOf", "allOf", "$defs", "not"))] = self._schema(depth + 1)
        return schema
