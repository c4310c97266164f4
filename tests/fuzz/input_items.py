"""Generates the input items and tools of the Responses API, of all types."""

from typing import Any

import numpy as np

from router.responses.chat_request import IGNORED_ITEMS, TEXT_PARTS
from router.responses.output_items import encode_reasoning
from router.responses.tools import HOSTED_TOOLS
from tests.fuzz.value_maker import TEXTS, ValueMaker

ROLES, WRONG_ROLES = ("user", "system", "developer", "assistant", "user"), ("tool", "")
ITEM_TYPES = (
    "message", "message", "message", "message", "reasoning", "function_call", "custom_tool_call",
    "function_call_output", "custom_tool_call_output", *sorted(IGNORED_ITEMS),
)  # fmt: skip
WRONG_ITEM_TYPES = ("item_reference", "item_reference", "compaction", "", *sorted(HOSTED_TOOLS))
PART_TYPES, WRONG_PART_TYPES = (*TEXT_PARTS, "refusal"), ("input_image", "input_file", "")
TOOL_TYPES = ("function", "function", "custom", "namespace", *sorted(HOSTED_TOOLS))
NAMES, WRONG_NAMES = ("f", "g", "run", "h"), ("a b", "", "x" * 129)
IDS = ("1", "call_1", "msg_0_0", "rs_1_0", "fc_2_in0", "_", "", "msg_" + "9" * 200)
SHORT_TEXTS = ("", "x", "Hi", "wörld", '{"x": 1}', "{", "\ue000", "<|im_end|>", "</think>")


class ItemMaker(ValueMaker):
    """Generates input items and tools. ``known_ids`` are ids of stored responses; some input items
    refer to items of these responses."""

    def __init__(self, rng: np.random.Generator, known_ids: list[str]) -> None:
        super().__init__(rng)
        self._known_ids = known_ids

    def input(self) -> Any:
        """Return a value for the field ``input`` of a request."""
        if self._chance(0.3):
            return self._text()
        first = [] if self._chance(0.2) else [{"role": "user", "content": "Hi"}]
        return first + [self.item() for _ in range(self._below(4))]

    def item(self) -> dict[str, Any]:
        kind = self._mostly(ITEM_TYPES, WRONG_ITEM_TYPES)
        item = {"type": kind, **self._item_fields(kind)}
        if kind == "message" and self._chance(0.5):
            del item["type"]
        if self._chance(0.3):
            item["id"] = self._mostly((*IDS, None), (self.value(),))
        if self._chance(0.2):
            item["status"] = self._mostly(("completed", "in_progress", None), (self.value(),))
        return item

    def _item_fields(self, kind: str) -> dict[str, Any]:
        name, call_id = self._mostly(NAMES, WRONG_NAMES), self._one(IDS)
        if kind == "message":
            return {"role": self._mostly(ROLES, WRONG_ROLES), "content": self._content()}
        if kind == "reasoning":
            return self._reasoning()
        if kind == "function_call":
            return {"name": name, "call_id": call_id, "arguments": self._text()}
        if kind == "custom_tool_call":
            return {"name": name, "call_id": call_id, "input": self._text(), "namespace": None}
        if kind.endswith("_call_output"):
            return {"call_id": call_id, "output": self._content()}
        return {"id": self._reference(), "action": self.value(1)}

    def _reference(self) -> str:
        if not self._known_ids or self._chance(0.2):
            return str(self._one(IDS))
        number = self._one(self._known_ids).removeprefix("resp_")
        return f"{self._one(('msg', 'rs', 'fc'))}_{number}_{self._one(('0', '1', 'in0', 'in1'))}"

    def _reasoning(self) -> dict[str, Any]:
        text = self._text()
        encrypted = (encode_reasoning(text), encode_reasoning(text)[:-3], "gAAAA", None)
        return {
            "summary": [{"type": "summary_text", "text": text}][: self._below(2)],
            "content": self._one((None, [], [{"type": "reasoning_text", "text": text}])),
            "encrypted_content": self._one(encrypted),
        }

    def _content(self) -> Any:
        if self._chance(0.4):
            return self._text()
        return [self._part() for _ in range(self._below(4))]

    def _part(self) -> dict[str, Any]:
        kind = self._mostly(PART_TYPES, WRONG_PART_TYPES)
        name = "refusal" if kind == "refusal" else "text"
        return {"type": kind, name: self._text(), "annotations": []}

    def tools(self) -> list[Any]:
        tools = [self._tool() for _ in range(self._below(4))]
        return [{"type": "function", "name": "f"}, *tools] if self._chance(0.5) else tools

    def _tool(self, depth: int = 0) -> dict[str, Any]:
        kind = self._mostly(TOOL_TYPES, ("", "x"))
        tool: dict[str, Any] = {
            "type": kind,
            "name": self._mostly(NAMES, WRONG_NAMES),
            "description": self._text(),
        }
        if kind == "function" and self._chance(0.7):
            tool |= {"parameters": self._parameters(), "strict": self._chance(0.5)}
        if kind == "custom" and self._chance(0.3):
            tool["format"] = {"type": self._mostly(("text",), ("grammar",)), "syntax": "lark"}
        if kind == "namespace" and (depth == 0 or self._chance(0.1)):
            tool["tools"] = [self._tool(depth + 1) for _ in range(self._below(3))]
        if self._chance(0.1):
            tool["limit"] = self.value(1)
        return tool

    def _parameters(self) -> Any:
        if self._chance(0.05):
            return self.value()
        bound = self._mostly((1, 0.5, 2**53), (10**20, -(2**70), "x"))
        return {"type": "object", "properties": {"x": {"type": "integer", "maximum": bound}}}

    def tool_choice(self) -> Any:
        kind = self._mostly(("function", "function", "custom"), ("mcp", "x"))
        named = {"type": kind, "name": self._mostly(NAMES, WRONG_NAMES)}
        mode = self._mostly(("auto", "required"), ("none", ""))
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [named] * self._below(3)}
        right = ("auto", "auto", "none", "required", None, named, allowed)
        return self._mostly(right, ("x", self.value()))

    def _text(self) -> str:
        return str(self._one(TEXTS if self._chance(0.03) else SHORT_TEXTS))
