"""Tests tool calls, reasoning and continued answers over HTTP, with exact answers and chunks."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tokenizers
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from baton.core.grammar import GrammarKind
from baton.text.grammar.to_lark import MAX_GRAMMAR_BYTES
from baton.text.tokenizer import Tokenizer
from router.openai.context import RouterContext
from router.openai.parsers.strict_schema import forbid_extra_properties
from router.openai.schema import chat as chat_schema
from router.openai.schema.tool import MAX_TOOLS, resolve_tool_choice
from tests import router_harness
from tests.router_harness import (
    CHAT,
    COMPLETE,
    EOS,
    RESPOND,
    USER,
    chat,
    events,
    open_harness,
    write_tokenizer,
    wrong_error,
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
JSON_OBJECT = {"type": "json_object"}
GRAMMAR_TOO_LARGE = {
    "message": "tools: a grammar may have at most 65536 bytes",
    "type": "invalid_request_error",
    "param": "tools",
    "code": "invalid_value",
}
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
    assert unknown(model.model_validate(data)) <= {
        "reasoning_content", "token_ids", "prompt_token_ids", "obfuscation",
    }  # fmt: skip


def unknown(value: Any) -> set[str]:
    if isinstance(value, BaseModel):
        found = set(value.model_extra or ())
        for name in type(value).model_fields:
            found |= unknown(getattr(value, name))
        return found
    return set().union(*map(unknown, value)) if isinstance(value, list) else set()


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *chunks, done = events(response)
    assert done == "[DONE]"
    for chunk in chunks:
        checked(ChatCompletionChunk, chunk)
    return [chunk["choices"][0]["delta"] for chunk in chunks]


# -- tool calls -----------------------------------------------------------------------------------


async def test_tool_call_is_parsed(hermes: Tokenizer) -> None:
    async with open_harness(hermes, f"Well.\n{CALL}") as (router, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL]))
    message = message_of(response)
    call_id = message["tool_calls"][0]["id"]
    assert message == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {
                "id": call_id, "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            }
        ],
    }  # fmt: skip
    assert call_id.startswith("call_")
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f ]<user>Hi|>"
    assert router.prefill.submitted[0].spec.sampling.grammar is None


async def test_tool_call_without_text_has_no_content(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (_, client):
        assert message_of(await client.post(CHAT, json=chat(tools=[TOOL])))["content"] is None


async def test_tool_calls_are_streamed(hermes: Tokenizer) -> None:
    second = '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    async with open_harness(hermes, f"Hm\n{CALL}{second}") as (_, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL, OTHER], stream=True))
        again = await client.post(CHAT, json=chat(tools=[TOOL, OTHER]))
    got = deltas(response)
    begun = [d["tool_calls"][0] for d in got if "id" in d.get("tool_calls", [{}])[0]]
    assert got == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "m"},
        {"tool_calls": [begun[0]]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": c}}]} for c in '{"x": 1}'),
        {"tool_calls": [begun[1]]},
        *({"tool_calls": [{"index": 1, "function": {"arguments": c}}]} for c in "{}"),
        {},
    ]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    assert len({call["id"] for call in begun}) == 2
    assert events(response)[-2]["choices"][0]["finish_reason"] == "tool_calls"
    calls = message_of(again)["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"x": 1}', "{}"]


async def test_invalid_tool_call_is_text(hermes: Tokenizer) -> None:
    text = "a <tool_call> b"
    async with open_harness(hermes, text) as (_, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL]))
        plain = await client.post(CHAT, json=chat())
        none = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="none"))
        streamed = await client.post(CHAT, json=chat(tools=[TOOL], stream=True))
    for each in (response, plain, none):
        assert message_of(each) == {"role": "assistant", "content": text}
        assert each.json()["choices"][0]["finish_reason"] == "stop"
    assert "".join(d.get("content", "") for d in deltas(streamed)) == text


async def test_without_tools_markup_is_text(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        assert message_of(await client.post(CHAT, json=chat()))["content"] == CALL
        body = chat(tools=[TOOL], tool_choice="none")
        assert message_of(await client.post(CHAT, json=body))["content"] == CALL
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


async def test_parallel_tool_calls_can_be_disabled(hermes: Tokenizer) -> None:
    async with open_harness(hermes, f"{CALL}\n{CALL}") as (router, client):
        body = chat(tools=[TOOL], parallel_tool_calls=False)
        response = await client.post(CHAT, json=body)
        assert router.decode.cancelled == [("chatcmpl-0", 1)]
    assert len(message_of(response)["tool_calls"]) == 1
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_forced_tool_calls_have_a_grammar(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        for choice in ("required", NAMED):
            body = chat(tools=[TOOL, OTHER], tool_choice=choice)
            assert message_of(await client.post(CHAT, json=body))["tool_calls"]
    required, named = (job.spec.sampling.grammar for job in router.prefill.submitted)
    assert required is not None and named is not None
    tags = r'"<tool_call>" "\n" call "\n" "</tool_call>"'
    assert required.kind is named.kind is GrammarKind.LARK
    assert required.text.splitlines()[:2] == [
        rf'start: {tags} ("\n" {tags})*',
        "call: call_0 | call_1",
    ]
    assert named.text.splitlines()[:3] == [
        f"start: {tags}",
        "call: call_0",
        r'call_0: "{\"name\": \"f\", \"arguments\": " arguments_0 "}"',
    ]
    assert bytes(router.prefill.submitted[1].spec.token_ids) == b"[f ]<user>Hi|>"


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3", "mistral", "pythonic", "none"])
async def test_grammars_of_tools_have_a_largest_size(hermes: Tokenizer, tool_parser: str) -> None:
    async with open_harness(hermes, "x", tool_parser=tool_parser) as (router, client):

        async def send(description: str) -> httpx.Response:
            schema = {"type": "object", "properties": {"x": {"description": description}}}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            return await client.post(CHAT, json=chat(tools=[tool], tool_choice=NAMED))

        await send("")
        [empty] = [job.spec.sampling.grammar for job in router.prefill.submitted]
        assert empty is not None
        longest = MAX_GRAMMAR_BYTES - len(empty.text)
        message_of(await send("a" * longest))
        largest = router.prefill.submitted[1].spec.sampling.grammar
        assert largest is not None and len(largest.text) == MAX_GRAMMAR_BYTES
        refused = await send("a" * (longest + 1))
        assert len(router.model.text.grammar_validator._verdicts) == 2, "a large one was hashed"
    assert wrong_error(refused) == GRAMMAR_TOO_LARGE


@pytest.mark.parametrize("strict", [False, True])
async def test_definitions_are_not_repeated_beyond_the_largest_grammar(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """The format with keyword arguments repeats the schema's definitions in each argument's rule:
    here, 1,000 times 20 KB."""
    dumped: list[int] = []

    def dumps(value: Any, **options: Any) -> str:
        text = json.dumps(value, **options)
        dumped.append(len(text))
        return text

    counting = SimpleNamespace(dumps=dumps)
    monkeypatch.setattr("router.openai.parsers.tool_call_format.json", counting)
    schema = {
        "type": "object",
        "properties": {f"p{number}": {"$ref": "#/$defs/d"} for number in range(1000)},
        "$defs": {"d": {"description": "a" * 20_000}},
    }
    function = {"name": "f", "parameters": schema, "strict": strict}
    body = chat(tools=[{"type": "function", "function": function}])
    if not strict:
        body["tool_choice"] = "required"
    async with open_harness(hermes, "x", tool_parser="pythonic") as (_, client):
        refused = await client.post(CHAT, json=body)
    assert wrong_error(refused) == GRAMMAR_TOO_LARGE
    assert [size for size in dumped if size > 20_000] == [20_151] * 4


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"properties": [1]}, "`properties` of a function's parameters must be an object"),
        ({"required": 1}, "`required` of a function's parameters must be a list of names"),
        ({"required": [[]]}, "`required` of a function's parameters must be a list of names"),
    ],
)
async def test_malformed_parameters_are_refused_by_keyword_calls(
    hermes: Tokenizer, schema: dict[str, Any], wrong: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with open_harness(hermes, "x", tool_parser="pythonic") as (_, client):
        error = wrong_error(await client.post(CHAT, json=chat(tools=[tool], tool_choice=NAMED)))
    assert (error["message"], error["param"]) == (f"tools: {wrong}", "tools")


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, lambda schema: chat(tools=[function_tool(schema)]), "tools[0]"),
        ("/tokenize", lambda schema: chat(tools=[function_tool(schema)]), "tools[0]"),
        (
            RESPOND,
            lambda schema: {
                "input": "Hi", "store": False,
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
            },
            "tools[0]",
        ),
        (
            "/v1/messages",
            lambda schema: {
                "messages": USER, "max_tokens": 4, "tools": [{"name": "f", "input_schema": schema}],
            },
            "tools.0",
        ),
    ],
)  # fmt: skip
async def test_nesting_of_parameters_is_limited(
    hermes: Tokenizer, path: str, body: Callable[[Any], Any], field: str
) -> None:
    async with open_harness(hermes, "x") as (_, client):
        deepest = await client.post(path, json=body({"type": "object", **nested(32)}))
        refused = await client.post(path, json=body({"type": "object", **nested(33)}))
    assert deepest.status_code == 200, deepest.text
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"] == f"{field}: a tool's parameters may be nested at most 32 levels deep"
    assert error.get("param", field) == field  # Anthropic's errors have no param


def function_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("convert", [dict, json.dumps])
@pytest.mark.parametrize("key", ["arguments", "more"])
async def test_nesting_of_earlier_calls_is_limited(
    hermes: Tokenizer, convert: Callable[[Any], Any], key: str
) -> None:
    """A function's unknown fields are given to the template, too; text in them is not parsed."""

    def body(levels: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}", key: convert(nested(levels))}
        call = {"id": "c1", "type": "function", "function": function}
        return {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}

    async with open_harness(hermes, "x") as (_, client):
        message_of(await client.post(CHAT, json=body(32)))
        response = await client.post(CHAT, json=body(33))
    if (key, convert) == ("more", json.dumps):
        message_of(response)
        return
    assert wrong_error(response) == {
        "message": "messages: the arguments of a tool call may be nested at most 32 levels deep",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_value",
    }


async def test_text_of_a_chat_is_limited(tmp_path: Path) -> None:
    """A template may repeat the tools: here, once for each message."""
    source = "{% for m in messages %}{{ tools | tojson }}{% endfor %}"
    tokenizer = load_tokenizer(tmp_path, source)
    size = len('[{"type": "function", "function": {"name": "f", "description": ""}}]')
    description = "a" * (20_000 - size)
    tool = {"type": "function", "function": {"name": "f", "description": description}}
    limit = 16 * (262_144 + 2 * 512)
    messages = USER * (limit // 20_000 + 1)
    async with open_harness(tokenizer, "x") as (_, client):
        for path in (CHAT, "/tokenize"):
            body = {"messages": messages, "tools": [tool]}
            error = wrong_error(await client.post(path, json=body))
            assert error["message"] == (
                f"the chat template makes a text of more than {limit} characters from the messages "
                "and tools, the limit of one request; send fewer or shorter ones"
            )
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_allowed_tools_restrict_prompt_and_grammar(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (router, client):
        for mode in ("auto", "required"):
            allowed = {"mode": mode, "tools": [NAMED]}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
            await client.post(CHAT, json=chat(tools=[TOOL, OTHER], tool_choice=choice))
    auto, required = router.prefill.submitted
    assert bytes(auto.spec.token_ids) == bytes(required.spec.token_ids) == b"[f ]<user>Hi|>"
    assert auto.spec.sampling.grammar is None and required.spec.sampling.grammar is not None


async def test_allowed_tools_are_limited(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (_, client):
        allowed: dict[str, Any] = {"mode": "auto", "tools": [NAMED] * (MAX_TOOLS + 1)}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = chat(tools=[TOOL], tool_choice=choice)
        error = wrong_error(await client.post(CHAT, json=body))
        assert error["param"] == "tool_choice"
        assert error["message"] == "tool_choice: allowed_tools may have at most 128 tools"
        allowed["tools"].pop()
        assert message_of(await client.post(CHAT, json=body))["content"] == "x"


@pytest.mark.parametrize("num_answers", [1, 3])
async def test_tool_choice_is_resolved_once_for_all_answers(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    """While the streams of the answers are created, the choice is resolved twice: once for the
    offered tools, and once for whether a call is forced."""
    allowed = {"mode": "auto", "tools": [NAMED] * MAX_TOOLS}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    calls: list[Any] = []

    def resolve(choice: Any, tools: Any) -> Any:
        calls.append(choice)
        return resolve_tool_choice(choice, tools)

    create_choice_streams = RouterContext.create_choice_streams

    def create(*args: Any) -> Any:
        monkeypatch.setattr(chat_schema, "resolve_tool_choice", resolve)
        return create_choice_streams(*args)

    monkeypatch.setattr(RouterContext, "create_choice_streams", create)

    async with open_harness(hermes, "x") as (router, client):
        body = chat(tools=[TOOL, OTHER], tool_choice=choice, n=num_answers)
        answer = (await client.post(CHAT, json=body)).json()
    assert [each["message"]["content"] for each in answer["choices"]] == ["x"] * num_answers
    assert calls == [choice, choice]
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f ]<user>Hi|>"


async def test_template_without_tools_rejects_them_unless_forced(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    text = '{"name": "f", "arguments": {"x": 1}}'
    async with open_harness(tokenizer, text) as (_, client):
        refused = await client.post(CHAT, json=chat(tools=[TOOL]))
        forced = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="required"))
        hidden = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="none"))
    assert wrong_error(refused)["param"] == "tools"
    assert message_of(forced)["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert message_of(hidden)["content"] == text


async def test_special_token_can_begin_a_tool_call(tmp_path: Path) -> None:
    """Special tokens are hidden in the answer, but the parser must see those that begin a tool
    call."""
    tokenizer = load_tokenizer(tmp_path, TEMPLATE + "{# <|python_tag|> #}", "<|python_tag|>")
    async with open_harness(tokenizer) as (router, client):
        tokens = [258, *b'{"name": "f", "parameters": {"x": 2}}', EOS]
        for worker in (router.prefill, router.decode):
            worker._next_token = lambda known, spec: tokens[len(known) - spec.num_prompt_tokens]  # type: ignore
        called = await client.post(CHAT, json=chat(tools=[TOOL]))
        plain = await client.post(CHAT, json=chat())
        shown = await client.post(CHAT, json=chat(skip_special_tokens=False))
    assert message_of(called)["tool_calls"][0]["function"]["arguments"] == '{"x": 2}'
    assert message_of(plain)["content"].startswith('{"name"')
    assert message_of(shown)["content"].startswith('<|python_tag|>{"name"')


async def test_tool_calls_and_results_are_rendered_into_the_prompt(hermes: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ]
    async with open_harness(hermes, "x") as (router, client):
        await client.post(CHAT, json={"messages": messages})
    prompt = b"<user>Hi|<assistant>!f:1|<tool>ok#c1|>"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt


async def test_tool_call_ids_have_mistrals_form(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, TEMPLATE + "{# [TOOL_CALLS] #}")
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    async with open_harness(tokenizer, text) as (_, client):
        message = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
    assert len(message["tool_calls"][0]["id"]) == 9 and message["tool_calls"][0]["id"].isalnum()


# -- reasoning ------------------------------------------------------------------------------------


async def test_reasoning_is_separated_from_the_answer(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Hm.\n</think>\n\nYes") as (_, client):
        response = await client.post(CHAT, json=chat())
        streamed = await client.post(CHAT, json=chat(stream=True))
    message = message_of(response)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm.\n</think>")}
    assert usage["completion_tokens"] == len("Hm.\n</think>\n\nYes") + 1
    parts = deltas(streamed)
    assert [d for d in parts if d] == [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": c} for c in "Hm."),
        *({"content": c} for c in "Yes"),
    ]


async def test_reasoning_before_a_tool_call(thinker: Tokenizer) -> None:
    text = f"f?</think>{CALL}"
    async with open_harness(thinker, text) as (router, client):
        message = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        forced = chat(tools=[TOOL], tool_choice=NAMED)
        assert message_of(await client.post(CHAT, json=forced))["tool_calls"]
    assert message["reasoning_content"] == "f?" and message["content"] is None
    grammar = router.prefill.submitted[1].spec.sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith(r'start: thought /\n{0,2}/ "<tool_call>" "\n" call')


async def test_thinking_can_be_switched_off(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Yes") as (router, client):
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
        ):  # fmt: skip
            message = message_of(await client.post(CHAT, json=chat(**fields)))
            assert message == {"role": "assistant", "content": "Yes"}
        wrong = await client.post(CHAT, json=chat(chat_template_kwargs={"enable_thinkin": True}))
        taken = await client.post(CHAT, json=chat(chat_template_kwargs={"messages": "x"}))
        token = await client.post(CHAT, json=chat(chat_template_kwargs={"eos_token": "x"}))
    for each in (wrong, taken, token):
        assert wrong_error(each)["param"] == "chat_template_kwargs"
    assert "did you mean 'enable_thinking'?" in wrong_error(wrong)["message"]
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


async def test_reasoning_effort_unknown_to_the_template_is_ignored(hermes: Tokenizer) -> None:
    """Clients send ``reasoning_effort`` to any model; other servers ignore it, too."""
    async with open_harness(hermes, "Yes") as (router, client):
        for effort in ("low", "none"):
            message_of(await client.post(CHAT, json=chat(reasoning_effort=effort)))
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


@pytest.mark.parametrize("strict", [False, True])
async def test_variables_that_the_template_lacks_are_ignored(
    hermes: Tokenizer, strict: bool
) -> None:
    """Clients send ``enable_thinking`` to any model, whether or not its template has this
    variable."""
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    async with open_harness(hermes, "Yes", strict_fields=strict) as (_, client):
        for path in (CHAT, "/tokenize"):
            response = await client.post(path, json={"messages": chat()["messages"], **fields})
            if strict:
                assert wrong_error(response)["param"] == "chat_template_kwargs"
            else:
                name = response.headers["x-baton-ignored-fields"]
                assert name == "chat_template_kwargs.enable_thinking"


async def test_any_reasoning_effort_is_accepted(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Hm</think>Yes") as (_, client):
        for effort in ("some", "", "maximal"):
            message_of(await client.post(CHAT, json=chat(reasoning_effort=effort)))


async def test_verbosity_is_passed_to_a_template_that_has_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "{{ verbosity }}:" + TEMPLATE)
    async with open_harness(tokenizer, "Yes") as (router, client):
        response = await client.post(CHAT, json=chat(verbosity="low"))
        assert "x-baton-ignored-fields" not in response.headers
    assert bytes(router.prefill.submitted[0].spec.token_ids).startswith(b"low:")


async def test_reasoning_of_earlier_turns_is_rendered(hermes: Tokenizer) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    async with open_harness(hermes, "x") as (router, client):
        await client.post(CHAT, json={"messages": [*USER, message, *USER]})
    prompt = b"<user>Hi|<assistant>Yes(Hm)|<user>Hi|>"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt


# -- other features -------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Once ", "Once", " Once\n"])
async def test_final_message_can_be_continued(hermes: Tokenizer, content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with open_harness(hermes, "x") as (router, client):
        assert message_of(await client.post(CHAT, json={"messages": messages, **fields}))
        ids = (await client.post("/tokenize", json={"messages": messages, **fields})).json()
    prompt = f"<user>Hi|<assistant>{content.lstrip()}".encode()
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt == bytes(ids["tokens"])


async def test_template_that_hides_the_final_message_rejects_continuation(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        tmp_path, "{{ messages[0].content }}{{ messages[1].content | length }}"
    )
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with open_harness(tokenizer) as (_, client):
        response = await client.post(CHAT, json={"messages": messages, **fields})
    assert wrong_error(response)["param"] == "continue_final_message"


async def test_stop_strings_can_be_included_in_the_output(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "Hello, you") as (_, client):
        body = {"prompt": "x", "include_stop_str_in_output": True}
        cut = (await client.post(COMPLETE, json={**body, "stop": ","})).json()
        checked(Completion, cut)
        by_token = {**body, "stop_token_ids": [ord("o")]}
        token = (await client.post(COMPLETE, json=by_token)).json()
        whole = (await client.post(COMPLETE, json=body)).json()
    assert [each["choices"][0]["text"] for each in (cut, token, whole)] == [
        "Hello,", "Hello", "Hello, you",
    ]  # fmt: skip


async def test_min_tokens_is_passed_on_and_validated(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (router, client):
        body = {"prompt": "x", "max_tokens": 5}
        assert (await client.post(COMPLETE, json={**body, "min_tokens": 5})).status_code == 200
        assert router.prefill.submitted[0].spec.sampling.min_tokens == 5
        for fields in ({"min_tokens": 6}, {"min_tokens": 1, "response_format": JSON_OBJECT}):
            wrong = await client.post(COMPLETE, json={**body, **fields})
            assert wrong_error(wrong)["param"] == "min_tokens"
        forced = chat(tools=[TOOL], tool_choice="required", min_tokens=1)
        assert wrong_error(await client.post(CHAT, json=forced))["param"] == "min_tokens"


async def test_obfuscation_pads_chunks_to_one_size(hermes: Tokenizer) -> None:
    options = {"include_obfuscation": True}
    async with open_harness(hermes, "Hi ö" + "x" * 9) as (_, client):
        body = chat(stream=True, stream_options=options)
        response = await client.post(CHAT, json=body)
    sizes = {len(block.encode()) for block in response.text.split("\n\n")[:-2]}
    assert len(sizes) == 1
    assert "".join(d.get("content", "") for d in deltas(response)) == "Hi ö" + "x" * 9


async def test_service_tier_is_returned_if_requested(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (_, client):
        answer = (await client.post(CHAT, json=chat(service_tier="auto"))).json()
        silent = (await client.post(CHAT, json=chat())).json()
    assert answer["service_tier"] == "default" and "service_tier" not in silent


async def test_best_of_returns_the_best_choices(hermes: Tokenizer) -> None:
    """Choices are ranked by their mean logprob; all of them count as usage."""
    async with open_harness(hermes, "abc") as (router, client):
        body = {"prompt": ["x", "yz"], "n": 1, "best_of": 3, "max_tokens": 2}
        answer = (await client.post(COMPLETE, json=body)).json()
    checked(Completion, answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 3
    assert {job.spec.sampling.logprobs for job in router.prefill.submitted} == {0}


# -- fields that other providers' clients send ----------------------------------------------------


async def test_litellms_extra_message_fields_are_accepted(hermes: Tokenizer) -> None:
    """The client sends an answer back with the fields that litellm, and providers behind it, add to
    messages."""
    async with open_harness(hermes, CALL) as (router, client):
        first = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        assert "refusal" not in first
        added = {
            "refusal": None, "annotations": [], "audio": None, "function_call": None,
            "provider_specific_fields": {"refusal": None, "citations": [1]},
            "reasoning": "Hm", "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}],
            "reasoning_content": None, "thinking_blocks": [{"type": "thinking"}],
            "id": "msg_1", "type": "message", "status": "completed", "index": 0,
        }  # fmt: skip
        call = {**first["tool_calls"][0], "index": 0, "provider_specific_fields": {"x": 1}}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "2"}
        turns = [*USER, {**first, **added, "tool_calls": [call]}, result]
        second = await client.post(CHAT, json={"messages": turns, "tools": [TOOL]})
        assert second.status_code == 200, second.text
    prompt = bytes(router.prefill.submitted[1].spec.token_ids).decode()
    assert prompt == f"[f ]<user>Hi|<assistant>!f:1|<tool>2#{call['id']}|>"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_usage_in_every_chunk(hermes: Tokenizer, path: str) -> None:
    """As in vLLM, each chunk has its choice's usage so far, and the last chunk has the total."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat() if path == CHAT else {"prompt": "abc"}
    body |= {"n": 2, "stream": True, "stream_options": options}
    async with open_harness(hermes, "Yes") as (_, client):
        response = await client.post(path, json=body)
        only = {**body, "stream_options": {"continuous_usage_stats": True}}
        plain = events(await client.post(path, json=only))
    *chunks, last, done = events(response)
    assert done == "[DONE]" and last["choices"] == []
    prompt = last["usage"]["prompt_tokens"]
    for index in (0, 1):
        mine = [each for each in chunks if each["choices"][0]["index"] == index]
        for each in mine if path == CHAT else ():
            checked(ChatCompletionChunk, each)
        taken = [each["usage"] for each in mine]
        counts = [each["completion_tokens"] for each in taken]
        assert counts == [0, 1, 2, 3, 4][-len(counts) :] and counts[-1] == 4
        assert all(each["prompt_tokens"] == prompt for each in taken)
        assert all(
            each["total_tokens"] == prompt + n for each, n in zip(taken, counts, strict=True)
        )
    assert last["usage"]["completion_tokens"] == 8
    assert not any("usage" in each for each in plain[:-1])


async def test_many_stop_strings(hermes: Tokenizer) -> None:
    stops = [f"stop {number}" for number in range(63)] + ["ö"]
    async with open_harness(hermes, "Hello wörld") as (_, client):
        message = message_of(await client.post(CHAT, json=chat(stop=stops)))
    assert message["content"] == "Hello w"


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


async def test_grammar_applies_from_the_first_token_without_reasoning(
    thinker: Tokenizer, tmp_path: Path
) -> None:
    """Thinking is switched off. One template then writes no ``<think>``; the other one opens and
    closes the reasoning."""
    folder = tmp_path / "qwen3"
    folder.mkdir()
    shut = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    qwen3 = load_tokenizer(folder, TEMPLATE + shut)
    off = ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"})
    for tokenizer in (thinker, qwen3):
        async with open_harness(tokenizer, "1") as (router, client):
            for fields in off:
                asked = chat(response_format=SCHEMA, **fields)
                assert message_of(await client.post(CHAT, json=asked))["content"] == "1"
                forced = chat(tools=[TOOL], tool_choice="required", **fields)
                await client.post(CHAT, json=forced)
            message_of(await client.post(CHAT, json=chat(response_format=SCHEMA)))
        grammars = [job.spec.sampling.grammar for job in router.prefill.submitted]
        kinds = [grammar.kind for grammar in grammars if grammar is not None]
        assert kinds[0] is kinds[2] is GrammarKind.JSON_SCHEMA
        texts = [grammar.text for grammar in grammars if grammar is not None]
        assert "think" not in texts[1] + texts[3]
        assert "thought" in texts[4]


async def test_forced_tool_calls_allow_no_extra_arguments(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        message_of(await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="required")))
    grammar = router.prefill.submitted[0].spec.sampling.grammar
    assert grammar is not None and '"additionalProperties": false' in grammar.text


INNER = {"type": "object", "properties": {"y": {}}}
CLOSED = {**INNER, "additionalProperties": False}
OPEN_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"properties": {"y": {}}, "additionalProperties": {"type": "string"}},
    {"properties": {"y": {}}, "patternProperties": {"x": {}}},
    {"properties": {"y": {}}, "allOf": [INNER]},
    {"properties": {"y": {}}, "anyOf": [INNER]},
    {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": INNER}},
    {"const": {"properties": {"y": 1}}},
    {"not": INNER},
]


@pytest.mark.parametrize("schema", OPEN_SCHEMAS)
def test_complex_schemas_are_not_closed(schema: dict[str, Any]) -> None:
    assert forbid_extra_properties(schema) == schema


def test_schemas_are_closed_recursively() -> None:
    assert forbid_extra_properties({"properties": {"a": INNER}}) == {
        "properties": {"a": CLOSED}, "additionalProperties": False,
    }  # fmt: skip
    assert forbid_extra_properties({"items": INNER, "prefixItems": [INNER]}) == {
        "items": CLOSED, "prefixItems": [CLOSED],
    }  # fmt: skip
    schema = {"anyOf": [INNER, {"$ref": "#/$defs/A"}], "$defs": {"A": INNER}}
    assert forbid_extra_properties(schema) == {
        "anyOf": [CLOSED, {"$ref": "#/$defs/A"}], "$defs": {"A": CLOSED},
    }  # fmt: skip
