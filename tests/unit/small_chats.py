"""Chats with tokenizers of one token per byte, for tests of tools and reasoning.

A test module that uses the fixtures assigns them to names of its own."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.responses_harness import unknown_fields
from tests.router_harness import (
    events,
    write_tokenizer,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        },
    },
}  # fmt: skip
OTHER = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}:{{ c.function.arguments.x }}"
    "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
"""A short chat template, so that prompts can be read at a glance. Each byte is a token."""


def load_tokenizer(folder: Path, template: str, *special: str) -> Tokenizer:
    """Load a tokenizer with a token for each byte, and with the ``special`` tokens from id 258
    on."""
    write_tokenizer(folder)
    if special:
        made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        made.add_special_tokens(list(special))
        made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(autouse=True)
def room_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_harness, "CONTEXT", 512)


@pytest.fixture
def hermes(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tmp_path, TEMPLATE + "{# <tool_call> #}")


@pytest.fixture
def thinker(tmp_path: Path) -> Tokenizer:
    opens = "{% if enable_thinking is not false %}<think>{% endif %}"
    return load_tokenizer(tmp_path, TEMPLATE + opens + "{# <tool_call> </think> #}")


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    checked(ChatCompletion, response.json())
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def checked(model: type[BaseModel], data: Any) -> None:
    """Validate ``data`` strictly by ``model``, a type of OpenAI's client: correct types, and no
    unknown field apart from the listed extensions."""
    model.model_validate(data, strict=True)
    assert unknown_fields(model.model_validate(data)) <= {
        "reasoning_content", "token_ids", "prompt_token_ids", "obfuscation",
    }  # fmt: skip


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *chunks, done = events(response)
    assert done == "[DONE]"
    for chunk in chunks:
        checked(ChatCompletionChunk, chunk)
    return [chunk["choices"][0]["delta"] for chunk in chunks]


@pytest.fixture
def closing_thinker(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose template does not open reasoning itself."""
    return load_tokenizer(tmp_path, TEMPLATE + "{# <tool_call> </think> #}")
