"""Generates the messages, content blocks and tools of the Messages API, of all types."""

from typing import Any

from tests.fuzz.input_items import IDS, NAMES, SHORT_TEXTS, WRONG_NAMES
from tests.fuzz.value_maker import TEXTS, ValueMaker

ROLES, WRONG_ROLES = ("user", "assistant", "user", "assistant", "system"), ("tool", "")
USER_BLOCKS, WRONG_USER_BLOCKS = ("text", "text", "tool_result"), ("image", "document", "tool_use")
ASSISTANT_BLOCKS = ("text", "text", "thinking", "redacted_thinking", "tool_use")
WRONG_ASSISTANT_BLOCKS = ("server_tool_use", "tool_result", "")
BLOCKS = {
    "user": (USER_BLOCKS, WRONG_USER_BLOCKS),
    "assistant": (ASSISTANT_BLOCKS, WRONG_ASSISTANT_BLOCKS),
}
TOOL_TYPES = (
    "custom", "custom", "web_search_20250305", "web_fetch_20250910", "code_execution_20250522",
    "mcp_toolset", "tool_search_tool_regex",
)  # fmt: skip
WRONG_TOOL_TYPES = (
    "bash_20250124",
    "text_editor_20250728",
    "computer_20250124",
    "memory_20250818",
    "",
    "x",
)


class BlockMaker(ValueMaker):
    """Generates messages with a seeded random generator."""

    def messages(self) -> list[Any]:
        first = [] if self._chance(0.03) else [{"role": "user", "content": "Hi"}]
        messages = first + [self._message() for _ in range(self._below(4))]
        return messages if self._chance(0.3) else [*messages, {"role": "user", "content": "Ho"}]

    def _message(self) -> dict[str, Any]:
        role = self._mostly(ROLES, WRONG_ROLES)
        if self._chance(0.4):
            return {"role": role, "content": self._text()}
        right, wrong = BLOCKS.get(role, (("text",), ("thinking",)))
        kinds = [self._mostly(right, wrong) for _ in range(self._below(4))]
        return {"role": role, "content": [self._block(kind) for kind in kinds]}

    def _block(self, kind: str) -> dict[str, Any]:
        block = {"type": kind, **self._block_fields(kind)}
        if self._chance(0.2):
            ttl = self._mostly(("5m", "1h", None), ("x", 5))
            block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        return block

    def _block_fields(self, kind: str) -> dict[str, Any]:
        match kind:
            case "text":
                return {"text": self._text(), "citations": None}
            case "thinking":
                return {"thinking": self._text(), "signature": "unsigned"}
            case "redacted_thinking":
                return {"data": self._text()}
            case "tool_use" | "server_tool_use":
                arguments = self._mostly(({}, {"x": 1}), ({"x": 10**30}, {"a": self.value(1)}))
                return {
                    "id": self._one(IDS),
                    "name": self._mostly(NAMES, WRONG_NAMES),
                    "input": arguments,
                }
            case "tool_result":
                content = self._one((self._text(), [{"type": "text", "text": self._text()}]))
                is_error = self._chance(0.3)
                return {"tool_use_id": self._one(IDS), "content": content, "is_error": is_error}
        return {"source": {"type": "base64", "data": self._text()}}

    def tools(self) -> list[Any]:
        tools = [self._tool() for _ in range(self._below(4))]
        return [{"name": "f", "input_schema": {"type": "object"}}, *tools]

    def _tool(self) -> dict[str, Any]:
        schema = self._mostly(({"type": "object"}, {}), ({"maximum": 10**20}, self.value(1)))
        tool = {
            "name": self._mostly(NAMES, WRONG_NAMES),
            "description": self._text(),
            "input_schema": schema,
        }
        if self._chance(0.5):
            tool["type"] = self._mostly(TOOL_TYPES, WRONG_TOOL_TYPES)
        if self._chance(0.05):
            tool[self._one(("allowed_callers", "strict", "input_examples"))] = self.value(1)
        return tool

    def tool_choice(self) -> dict[str, Any]:
        kind = self._mostly(("auto", "any", "none", "tool"), ("x", 1))
        choice = {"type": kind, "disable_parallel_tool_use": self._chance(0.3)}
        return choice | {"name": self._mostly(NAMES, WRONG_NAMES)} if kind == "tool" else choice

    def _text(self) -> str:
        return str(self._one(TEXTS if self._chance(0.03) else SHORT_TEXTS))
