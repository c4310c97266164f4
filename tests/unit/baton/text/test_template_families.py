"""Tests what model families' chat templates get: conversations that some of them would refuse or
leave out parts of."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.text.chat_template import ChatTemplate
from baton.text.template_messages import INVALID_ARGUMENTS, fit_messages
from baton.text.template_rules import TemplateRules, short_id
from router.openai.schema import ChatBody
from router.serving.chat_renderer import ChatRenderer
from router.serving.request import Chat
from router.serving.schema.tool import ToolUse
from tests.template_families import FAMILIES
from tests.unit.small_chats import TOOL, load_tokenizer

LIMIT = 10_000

Render = Callable[..., str]


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders messages with a family's template, as for a chat request."""
    renderers: dict[str, ChatRenderer] = {}

    def make(family: str) -> ChatRenderer:
        folder = tmp_path_factory.mktemp("family")
        return ChatRenderer(load_tokenizer(folder, FAMILIES[family]))

    def render(family: str, messages: Sequence[Mapping[str, Any]], tools: Any = ()) -> str:
        renderer = renderers.get(family) or renderers.setdefault(family, make(family))
        body = ChatBody.model_validate({"messages": messages})
        return renderer.render(Chat(body.messages, ToolUse(tools, tools)), LIMIT)

    return render


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: Any, call_id: str = "call_1", name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def called(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return message("assistant", content, tool_calls=list(calls), **fields)


def result(content: str, call_id: str = "call_1") -> dict[str, Any]:
    return message("tool", content, tool_call_id=call_id)


SYSTEM, OTHER_SYSTEM = message("system", "text-S"), message("system", "text-T")
DEVELOPER = message("developer", "text-D")
USER, OTHER_USER = message("user", "text-U"), message("user", "text-V")
ANSWER, OTHER_ANSWER = message("assistant", "text-A"), message("assistant", "text-B")
CALLED = called(call('{"x": "text-X"}'))
RESULT = result("text-R")

CHATS: dict[str, list[dict[str, Any]]] = {
    "two system messages": [SYSTEM, OTHER_SYSTEM, USER],
    "a developer after the system (Codex)": [SYSTEM, DEVELOPER, USER],
    "a developer": [DEVELOPER, USER],
    "a system message at the end (Claude Code)": [SYSTEM, USER, OTHER_SYSTEM],
    "a system message in the middle": [SYSTEM, USER, ANSWER, OTHER_SYSTEM, OTHER_USER],
    "system messages everywhere": [SYSTEM, DEVELOPER, USER, OTHER_SYSTEM, OTHER_USER, ANSWER,
                                   message("developer", "text-E")],
    "a system message after the user": [USER, SYSTEM],
    "only a system message": [SYSTEM],
    "only system messages": [SYSTEM, DEVELOPER],
    "no user": [SYSTEM, ANSWER],
    "only an answer": [ANSWER],
    "an answer first": [ANSWER, USER],
    "an answer after the system": [SYSTEM, ANSWER, USER],
    "an answer at the end": [SYSTEM, USER, ANSWER],
    "user after user": [USER, OTHER_USER],
    "answer after answer": [USER, ANSWER, OTHER_ANSWER, OTHER_USER],
}  # fmt: skip
"""Chats without tools."""

TOOL_CHATS: dict[str, list[dict[str, Any]]] = {
    "a call": [USER, CALLED, RESULT],
    "a call after the system": [SYSTEM, USER, CALLED, RESULT],
    "arguments as an object": [USER, called(call({"x": "text-X"})), RESULT],
    "arguments that are cut off": [USER, called(call('{"x": "text-X')), RESULT],
    "arguments as a list": [USER, called(call('["text-X"]')), RESULT],
    "arguments as a string": [USER, called(call('"text-X"')), RESULT],
    "arguments with a line break": [USER, called(call('{"x": "text-X\n"}')), RESULT],
    "arguments with half a surrogate pair": [USER, called(call('{"x": "text-X\\ud83d"}')), RESULT],
    "arguments that are null": [USER, called(call("null")), RESULT],
    "blank arguments": [USER, called(call(" \n")), RESULT],
    "no arguments": [USER, called(call("")), RESULT],
    "a system message after the result": [SYSTEM, USER, CALLED, RESULT, OTHER_SYSTEM],
    "the user after the result": [USER, CALLED, RESULT, OTHER_USER],
    "two calls at once": [
        USER, called(call('{"x": "text-X"}'), call('{"x": "text-Y"}', "call_2", "g")),
        result("text-R"), result("text-Q", "call_2"),
    ],
    "a text beside the call": [USER, {**CALLED, "content": "text-C"}, RESULT],
    "reasoning before the call": [USER, {**CALLED, "reasoning_content": "text-H"}, RESULT],
}  # fmt: skip

WITHOUT_REASONING = {
    "Hermes, Qwen2.5", "Qwen3-VL", "Gemma 2", "Gemma 3", "Command R", "Mistral", "Mistral v0.3",
    "R1-Distill", "DeepSeek V3", "Llama 3", "LFM2", "LFM2.5", "Phi-3", "SmolVLM", "Granite",
    "JSON arguments",
}  # fmt: skip
"""Families whose templates read no reasoning."""

WITHOUT_TEXT_BESIDE_CALLS = {"Mistral", "Mistral v0.3"}
"""Families whose templates don't show it and refuse an answer after an answer."""


def texts_of(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    return set(re.findall("text-[A-Z]", json.dumps(messages)))


def texts_in(prompt: str) -> list[str]:
    return re.findall("text-[A-Z]", prompt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", CHATS)
def test_all_texts_are_in_the_prompt_once(render: Render, family: str, chat: str) -> None:
    assert sorted(texts_in(render(family, CHATS[chat]))) == sorted(texts_of(CHATS[chat]))


@pytest.mark.parametrize("tools", [(), [TOOL]])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", TOOL_CHATS)
def test_all_texts_of_calls_are_in_the_prompt_once(
    render: Render, family: str, chat: str, tools: Any
) -> None:
    expected = texts_of(TOOL_CHATS[chat])
    if family in WITHOUT_TEXT_BESIDE_CALLS:
        expected -= {"text-C"}
    if family in WITHOUT_REASONING:
        expected -= {"text-H"}
    prompt = render(family, TOOL_CHATS[chat], tools)
    assert sorted(texts_in(prompt)) == sorted(expected)
    prompt.encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_may_have_any_order(family: str) -> None:
    """All chats of up to three messages; a call counts as one with its result."""
    rendered = template(family).render
    kinds = ("system", "developer", "user", "assistant", "call")
    for length in (1, 2, 3):
        for order in product(kinds, repeat=length):
            chat, shown = chat_in_order(order)
            if family in WITHOUT_TEXT_BESIDE_CALLS:
                # Answers before a call become part of its message.
                initials = "".join(kind[0] for kind in order)
                shown = [
                    text for at, text in enumerate(shown) if not re.match("a+c", initials[at:])
                ]
            prompt = rendered(chat, None, True, max_characters=LIMIT)
            assert sorted(re.findall("text-[A-Z]", prompt)) == sorted(shown), order


def chat_in_order(order: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a chat and its texts, one for each of ``order``."""
    chat: list[dict[str, Any]] = []
    texts = [f"text-{letter}" for letter in "ABC"[: len(order)]]
    for kind, text in zip(order, texts, strict=True):
        if kind == "call":
            chat += [called(call({"x": "y"}, text.lower())), result(text, text.lower())]
        else:
            chat.append(message(kind, text))
    return chat, texts


def template(family: str) -> ChatTemplate:
    return ChatTemplate({"default": FAMILIES[family]}, {}, ManualClock())


LENIENT = ("Hermes, Qwen2.5", "Qwen3", "Kimi K2", "Granite")


@pytest.mark.parametrize("family", LENIENT)
@pytest.mark.parametrize("with_tools", [False, True])
def test_lenient_templates_get_the_messages_as_they_are(family: str, with_tools: bool) -> None:
    """Apart from the role ``developer``, which they don't know."""
    rules = template(family).rules(with_tools)
    for messages in (CHATS | TOOL_CHATS).values():
        expected = json.dumps(messages).replace('"developer"', '"system"')
        assert json.dumps(fit_messages(messages, rules)) == expected


GOLDEN: list[tuple[str, list[dict[str, Any]], str]] = [
    # Lenient templates, as ever
    ("Hermes, Qwen2.5", [SYSTEM, DEVELOPER, USER, USER, called(call('{"x": 1}')), RESULT],
     "<|im_start|>system\ntext-S<|im_end|>\n<|im_start|>system\ntext-D<|im_end|>\n"
     "<|im_start|>user\ntext-U<|im_end|>\n<|im_start|>user\ntext-U<|im_end|>\n"
     '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
     "<|im_end|>\n"
     "<|im_start|>tool\ntext-R<|im_end|>\n<|im_start|>assistant\n"),
    ("Kimi K2", [USER, {**CALLED, "reasoning_content": "Hm"}, RESULT],
     "<|im_user|>user<|im_middle|>text-U<|im_end|>"
     "<|im_assistant|>assistant<|im_middle|><think>Hm</think>"
     '<|call|>call_1<|argument|>{"x": "text-X"}<|im_end|>'
     "<|im_tool|>tool<|im_middle|>## Return of call_1\ntext-R<|im_end|>"
     "<|im_assistant|>assistant<|im_middle|>"),
    ("Hermes, Qwen2.5", [USER, called(call('{"x": 1')), RESULT],
     "<|im_start|>user\ntext-U<|im_end|>\n"
     '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call><|im_end|>\n'
     "<|im_start|>tool\ntext-R<|im_end|>\n<|im_start|>assistant\n"),
    # Strict ones
    ("Llama 3", [USER, {**CALLED, "content": "text-C"}, RESULT],
     "<|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\ntext-U<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\ntext-C<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"
     '{"name": "f", "parameters": {"x": "text-X"}}<|eot_id|>'
     '<|start_header_id|>ipython<|end_header_id|>\n\n"text-R"<|eot_id|>'
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("Command R7B", [DEVELOPER, USER, {**CALLED, "reasoning_content": "H", "content": "C"}],
     "<|SYSTEM|># Defaults, unless a developer says otherwise.\n"
     "# Developer Preamble\ntext-D\n<|USER|>text-U<|CHATBOT|><|RESPONSE|>C"
     '<|CHATBOT|><|THINKING|>H<|ACTION|>f {"x": "text-X"}<|CHATBOT|>'),
    ("Qwen3.5", [SYSTEM, DEVELOPER, USER, OTHER_SYSTEM],
     "<|im_start|>system\ntext-S\n\ntext-D<|im_end|>\n"
     "<|im_start|>user\ntext-U\n\ntext-T<|im_end|>\n<|im_start|>assistant\n"),
    ("Qwen3.5", [SYSTEM, DEVELOPER],
     "<|im_start|>user\ntext-S\n\ntext-D<|im_end|>\n<|im_start|>assistant\n"),
    ("Qwen3.5", [USER, called(call("[1]")), RESULT],
     "<|im_start|>user\ntext-U<|im_end|>\n<|im_start|>assistant\n"
     "<tool_call><function=f><parameter=invalid_arguments>[1]</parameter></function></tool_call>"
     "<|im_end|>\n<|im_start|>tool\ntext-R<|im_end|>\n<|im_start|>assistant\n"),
    ("Gemma 2", [SYSTEM, OTHER_SYSTEM, USER, ANSWER, DEVELOPER, OTHER_USER],
     "<start_of_turn>user\ntext-S\n\ntext-T\n\ntext-U<end_of_turn>\n"
     "<start_of_turn>assistant\ntext-A<end_of_turn>\n"
     "<start_of_turn>user\ntext-D\n\ntext-V<end_of_turn>\n<start_of_turn>model\n"),
    ("Gemma 3", [SYSTEM, ANSWER, OTHER_ANSWER, USER, OTHER_USER],
     "<start_of_turn>user\ntext-S\n\n<end_of_turn>\n"
     "<start_of_turn>assistant\ntext-A\n\ntext-B<end_of_turn>\n"
     "<start_of_turn>user\ntext-U\n\ntext-V<end_of_turn>\n<start_of_turn>model\n"),
    ("Mistral", [USER, called(call({"x": 1}, "toolu_1")), result("2", "toolu_1"), OTHER_USER],
     f'[INST]text-U[/INST][TOOL_CALLS][{{"name": "f", "arguments": {{"x": 1}}, '
     f'"id": "{short_id("toolu_1")}"}}]</s>[TOOL_RESULTS]{short_id("toolu_1")} 2[/TOOL_RESULTS]'
     "</s>[INST]text-V[/INST]"),
    ("DeepSeek V3", [SYSTEM, OTHER_SYSTEM, USER, called(call({"x": "ä"}))],
     'text-S\n\ntext-T<User>text-U<Assistant><call>f<sep>{"x": "ä"}</call><end><Assistant>'),
    ("LFM2", [USER, {**CALLED, "content": "text-C"}, RESULT],
     "<|im_start|>user\ntext-U<|im_end|>\n<|im_start|>assistant\n"
     'text-C\n\n{"name": "f", "arguments": {"x": "text-X"}}<|im_end|>\n'
     "<|im_start|>tool\n<|tool_response_start|>text-R<|im_end|>\n<|im_start|>assistant\n"),
    ("Gemma 3",
     [USER, called(call({"x": 1}), call("7", "call_2", "g")), result("a"), result("b", "call_2"),
      OTHER_USER],
     "<start_of_turn>user\ntext-U<end_of_turn>\n<start_of_turn>assistant\n"
     '{"name": "f", "arguments": {"x": 1}}\n{"name": "g", "arguments": "7"}<end_of_turn>\n'
     "<start_of_turn>user\na\n\nb\n\ntext-V<end_of_turn>\n<start_of_turn>model\n"),
    ("R1-Distill", [USER, {**CALLED, "content": "text-C"}, RESULT],
     "<User>text-U<Assistant>text-C<end>"
     '<Assistant><call>f<sep>{"x": "text-X"}</call><end><output>text-R</output><Assistant>'),
    ("R1-Distill", [USER, SYSTEM], "text-S<User>text-U<Assistant>"),
    ("Mistral v0.3", [SYSTEM, USER, ANSWER, OTHER_USER],
     "[INST]text-U[/INST]text-A</s>[INST]text-S\n\ntext-V[/INST]"),
    ("Mistral v0.3", [SYSTEM, USER, ANSWER], "[INST]text-S\n\ntext-U[/INST]text-A</s>"),
    ("SmolVLM", [SYSTEM, DEVELOPER, USER],
     "System: text-S<end_of_utterance>\nSystem: text-D<end_of_utterance>\n"
     "User: text-U<end_of_utterance>\nAssistant:"),
    ("JSON arguments", [USER, CALLED], '<user>text-U<assistant>f {"x": "text-X"}'),
    ("gpt-oss",
     [DEVELOPER, SYSTEM, USER,
      called(call({"x": 1}), call({"x": 2}, "call_2", "g"), content="C", reasoning_content="H"),
      result("b", "call_2"), result("a")],
     "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
     "<|start|>developer<|message|>text-D\n\ntext-S<|end|><|start|>user<|message|>text-U<|end|>"
     "<|start|>assistant<|channel|>analysis<|message|>H\n\nC<|end|>"
     '<|start|>assistant to=functions.f<|message|>{"x": 1}<|call|>'
     '<|start|>functions.f<|message|>"a"<|end|>'
     '<|start|>assistant to=functions.g<|message|>{"x": 2}<|call|>'
     '<|start|>functions.g<|message|>"b"<|end|><|start|>assistant'),
    ("reasoning field", [USER, {**ANSWER, "reasoning_content": "Hm"}, OTHER_USER],
     "<user>text-U<assistant>[Hm]text-A<user>text-V"),
    ("thoughts in content", [USER, {**ANSWER, "reasoning_content": "Hm"}, OTHER_USER],
     "<user>text-U<assistant>[Hm]text-A<user>text-V"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "prompt"), GOLDEN)
def test_prompts(render: Render, family: str, messages: list[dict[str, Any]], prompt: str) -> None:
    assert render(family, messages) == prompt


def test_half_a_surrogate_pair_is_replaced(render: Render) -> None:
    escaped = '{"\\ud83d": "\\ude00a\\ud83d", "whole": "\\ud83d\\ude00"}'
    prompt = render("Kimi K2", [USER, called(call(escaped)), RESULT])
    assert '{"\ufffd": "\ufffda\ufffd", "whole": "\U0001f600"}' in prompt


def test_call_ids_are_the_same_in_call_and_result() -> None:
    assert short_id("aB3456789") == "aB3456789"
    for other in ("call_1", "123456789\n", "12345678ä", "", "\ud800"):
        assert re.fullmatch("[0-9a-f]{9}", short_id(other)) and short_id(other) != other
    assert short_id("call_1") != short_id("call_2")
    rules = TemplateRules(takes_foreign_ids=False)
    calls = [{"function": {"name": "f", "arguments": {}}} for _ in range(2)]
    first, second = fit_messages([USER, {**ANSWER, "tool_calls": calls}], rules)[1]["tool_calls"]
    assert len(first["id"]) == len(second["id"]) == 9 and first["id"] != second["id"]


def test_results_without_a_call_stay_behind_those_with_one() -> None:
    rules = TemplateRules(takes_parallel_calls=False)
    both = called(call({}, "a"), call({}, "b"), content="text-A")
    stray, late = result("stray", "x"), result("b", "b")
    alone = {**both, "content": "", "tool_calls": [both["tool_calls"][1]]}
    assert fit_messages([USER, both, stray, late, USER], rules) == [
        USER, {**both, "tool_calls": both["tool_calls"][:1]}, alone, late, stray, USER,
    ]  # fmt: skip


def test_a_long_chat_is_fitted_in_time_linear_in_its_length() -> None:
    """A quadratic algorithm would copy 16,384 texts of 1 kB 8,192 times each: 128 GB."""
    texts = [message("system", "a" * 1024), *[message("user", "b" * 1024)] * 16_384]
    rules = TemplateRules(takes_user_pair=False)
    assert fit_messages(texts, rules) == [
        texts[0], message("user", "\n\n".join(["b" * 1024] * 16_384)),
    ]  # fmt: skip


def test_rules_are_found_for_chats_with_and_without_tools() -> None:
    strict = "{% if messages[1:] %}{{ raise_exception('one') }}{% endif %}"
    named = {"default": FAMILIES["Gemma 3"], "tool_use": FAMILIES["Hermes, Qwen2.5"]}
    both = ChatTemplate(named, {}, ManualClock())
    assert not both.rules(False).takes_user_pair
    assert both.rules(True) == TemplateRules()
    picky = (
        "{% if tools %}{{ raise_exception('unknown tool') }}{% endif %}{{ messages[0].content }}"
    )
    found = ChatTemplate({"default": picky + strict}, {}, ManualClock())
    assert found.rules(True) == found.rules(False) and not found.rules(True).takes_system


def test_a_template_that_shows_no_message_keeps_all_messages() -> None:
    silent = ChatTemplate({"default": "{{ messages | length }}"}, {}, ManualClock())
    assert silent.rules(False) == TemplateRules()
    assert silent.render([SYSTEM, DEVELOPER, USER, USER], None, True, max_characters=9) == "4"


def test_a_role_that_any_template_would_write_is_not_known() -> None:
    writes_any = "{# developer #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    known = writes_any.replace("m.role }}", "'boss' if m.role == 'developer' else m.role }}")
    prompts = [
        ChatTemplate({"default": source}, {}, ManualClock()).render(
            [DEVELOPER, USER], None, False, max_characters=LIMIT
        )
        for source in (writes_any, known)
    ]
    assert prompts == ["<system>text-D<user>text-U", "<boss>text-D<user>text-U"]


def test_arguments_that_only_objects_can_have(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}" + (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    renderer = ChatRenderer(load_tokenizer(tmp_path, source))
    for arguments, shown in (
        ('{"x": 1}', "x=1;"), ("null", ""), ("", ""), ("\t", ""), ('{"x": "a\nb"}', "x=a\nb;"),
        ('{"x": 1', INVALID_ARGUMENTS + '={"x": 1;'), ("7", f"{INVALID_ARGUMENTS}=7;"),
        ("[" * 100_000, f"{INVALID_ARGUMENTS}={'[' * 100_000};"),
    ):  # fmt: skip
        body = ChatBody.model_validate({"messages": [USER, called(call(arguments))]})
        assert renderer.render(Chat(body.messages), 200_000) == f"text-U{shown}"
