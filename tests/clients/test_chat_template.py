"""The scripted model's chat template: an incomplete conversation gets another answer."""

from typing import Any

import pytest

from baton.clock import SystemClock
from baton.errors import Invalid
from baton.text.chat_template import ChatTemplate
from tests.clients.chat_template import CHAT_TEMPLATE
from tests.clients.scripted_model import ANSWERS, CALLS

SYSTEM = {"role": "system", "content": "Answer briefly."}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "21 degrees"}
ANSWER = {"role": "assistant", "content": ANSWERS["brief-text"]}
SECOND = {"role": "user", "content": "And in Rome?"}


def answer_to(messages: Any, tool: str = "") -> str:
    """Return the answer to a request that offers no tool, or the one named ``tool``."""
    template = ChatTemplate({"default": CHAT_TEMPLATE}, {}, SystemClock())
    tools = [{"type": "function", "function": {"name": tool}}] if tool else None
    rendered = template.render(messages, tools, add_generation_prompt=True, max_characters=10_000)
    return rendered.rpartition("<|answer:")[2].removesuffix("|>")


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([SYSTEM, QUESTION, CALL, RESULT], "brief-weather"),
        ([QUESTION, CALL, RESULT], "weather"),
        ([CALL, RESULT], "missing-question"),
        ([QUESTION, RESULT], "missing-call"),
        ([QUESTION, CALL, {**RESULT, "tool_call_id": "b"}], "missing-call"),
        ([QUESTION, CALL, {**RESULT, "content": "unknown"}], "missing-result"),
        ([QUESTION, CALL, {**RESULT, "content": ""}], "missing-result"),
        ([SYSTEM, QUESTION, ANSWER, SECOND], "brief-second"),
        ([QUESTION, ANSWER, SECOND], "second"),
        ([ANSWER, SECOND], "missing-question"),
        ([QUESTION, SECOND], "missing-answer"),
        ([SYSTEM, QUESTION], "brief-text"),
        ([QUESTION], "text"),
        ([{"role": "user", "content": ""}], "missing-question"),
    ],
)
def test_the_answer_depends_on_the_whole_conversation(messages: Any, answer: str) -> None:
    assert answer_to(messages) == answer
    assert answer in ANSWERS


def test_an_agent_needs_its_instructions() -> None:
    call = {"id": "a", "function": {"name": "Bash", "arguments": {"command": "echo hello"}}}
    messages = [
        {"role": "user", "content": "Say hello with echo."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "hello"},
    ]
    system = {"role": "system", "content": "You are a Claude agent."}
    assert answer_to(messages) == "missing-instructions"
    assert answer_to([system, *messages]) == "command-done"


@pytest.mark.parametrize("name", CALLS)
def test_a_tool_that_the_model_knows_is_called(name: str) -> None:
    assert answer_to([QUESTION], tool=name) == f"call-{name}"


def test_tools_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(Invalid, match="knows none of these tools: unknown"):
        answer_to([QUESTION], tool="unknown")
