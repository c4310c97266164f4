"""Tests strict tools: the model need not call one, but the arguments of a call must follow the
tool's schema. Also tests that what each model family's grammar allows is what its parser accepts.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.core.grammar import Grammar
from baton.core.ids import TokenId
from baton.text.detokenizer import byte_level_alphabet
from baton.text.grammar.compilation import validate_grammar
from baton.text.grammar.matcher import GrammarCompiler
from baton.text.tokenizer import Tokenizer
from router.serving.parsers.model_output_format import (
    MARKUP_STRINGS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ModelOutputFormat,
)
from router.serving.parsers.output_parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.serving.parsers.tool_formats import PLAIN_JSON
from tests import router_harness
from tests.router_harness import CHAT, chat, open_harness, wrong_error
from tests.unit.small_chats import load_tokenizer as load_template

EOS = 256
FORMATS = {**TOOL_PARSERS, PLAIN_JSON.name: PLAIN_JSON}
WITH_CHANNELS = ("harmony", "kimi_k3", "command")
"""Formats whose text stands behind a mark, so that they need their format of reasoning, too."""

PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", 'Sa"o, (P)']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "far": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]


class Model:
    """A model's tokenizer and grammar compiler. The vocabulary has a token for each byte, and one
    for each markup string in ``marks``."""

    def __init__(self, folder: Path, marks: Sequence[str]) -> None:
        characters = {byte: character for character, byte in byte_level_alphabet().items()}
        made = tokenizers.Tokenizer(models.BPE({characters[b]: b for b in range(256)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<|end|>"])
        made.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in marks])
        made.save(str(folder / "tokenizer.json"))
        self.tokenizer = Tokenizer.load(folder)
        self.grammars = GrammarCompiler(made.to_str(), 257 + len(marks), [TokenId(EOS)])
        self.num_tokens = 257 + len(marks)

    def dialect(self, form: str, *, thinks: bool = False) -> ModelOutputFormat:
        found = ModelOutputFormat.detect(self.tokenizer)
        reasoning = "think" if thinks else form if form in WITH_CHANNELS else ""
        return replace(found, tools=FORMATS[form], reasoning=REASONING_PARSERS.get(reasoning))

    def follows(self, grammar: Grammar, text: str) -> bool:
        """Return whether ``text``, as the tokenizer encodes it, is a complete answer according to
        ``grammar``."""
        constraint = self.grammars.create(grammar)
        for token in self.tokenizer.encode(text):
            if not _allows(constraint.mask(), token):
                return False
            constraint.accept(TokenId(token))
        return _allows(constraint.mask(), EOS)

    def begins(self, grammar: Grammar, text: str) -> bool:
        constraint = self.grammars.create(grammar)
        for token in self.tokenizer.encode(text):
            if not _allows(constraint.mask(), token):
                return False
            constraint.accept(TokenId(token))
        return True

    def random_answer(self, grammar: Grammar, start: str, seed: int) -> str:
        """Return ``start``, continued by random tokens that the grammar allows. The answer ends
        soon after the grammar first allows it to end."""
        randomness = np.random.default_rng(seed)
        tokens = self.tokenizer.encode(start)
        constraint = self.grammars.create(grammar, [TokenId(token) for token in tokens])
        while len(tokens) < 2000:
            bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(bits)]
            may_end, is_free = EOS in allowed, len(allowed) > 100
            if may_end and (allowed == [EOS] or is_free or randomness.random() < 0.5):
                break
            token = int(randomness.choice([token for token in allowed if token != EOS]))
            tokens.append(token)
            constraint.accept(TokenId(token))
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask) and bool(mask[token // 8] >> (token % 8) & 1)


def calls_in(dialect: ModelOutputFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = dialect.create_parser(TOOLS, forced=False, in_reasoning=False, max_calls=None)
    assert reader is not None
    content, calls = "", list[list[str]]()
    for piece in reader.push(text) + reader.flush():
        match piece:
            case TextPart(more):
                content += more
            case ToolCallStart(_, name):
                calls.append([name, ""])
            case ToolCallArguments(_, more):
                calls[-1][1] += more
            case ReasoningPart():
                pass
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.fixture(scope="module", params=["spelt", "tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with all markup encoded as bytes, and one with markup as single tokens (except for
    Mistral's [ARGS] and [CALL_ID])."""
    marks = [mark for mark in MARKUP_STRINGS if "ARGS" not in mark and "CALL_ID" not in mark]
    folder = tmp_path_factory.mktemp(request.param)
    return Model(folder, marks if request.param == "tokens" else [])


def begun_call(form: str) -> str:
    """The beginning of a call of ``weather``, up to its arguments."""
    writing = FORMATS[form].writing
    head = writing.opening + writing.head.replace("{number}", "0")
    opening = "So:\n" if form == "hermes" else ""
    return opening + head.replace("{name}", "weather")


@pytest.mark.parametrize("form", FORMATS)
def test_started_tool_call_follows_its_schema(model: Model, form: str) -> None:
    dialect = model.dialect(form)
    grammar = dialect.offered_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    for seed in range(6):
        text = model.random_answer(grammar, begun_call(form), seed)
        content, calls = calls_in(dialect, text)
        assert calls[0][0] == "weather", text
        assert content.strip() == ("So:" if form == "hermes" else ""), text
        for name, arguments in calls:
            jsonschema.validate(arguments, PLACE if name == "weather" else {"maxProperties": 0})


@pytest.mark.parametrize("form", FORMATS)
def test_forced_tool_calls_are_parsed(model: Model, form: str) -> None:
    dialect = model.dialect(form)
    without_reasoning = replace(dialect, reasoning=None)
    grammar = without_reasoning.forced_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    for seed in range(6):
        content, calls = calls_in(dialect, model.random_answer(grammar, "", seed))
        assert (content, bool(calls)) == ("", True)
        for name, arguments in calls:
            jsonschema.validate(arguments, PLACE if name == "weather" else {"maxProperties": 0})


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in WITH_CHANNELS])
@pytest.mark.parametrize(
    "text", ["", "Hello.", " \n It is\n\n30 °C in {Rome} [1] <b>", "<tool", "1"]
)
def test_plain_text_is_not_restricted(model: Model, form: str, text: str) -> None:
    grammar = model.dialect(form).offered_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    assert model.follows(grammar, text)


GOOD = '{"city": "Rome", "days": 3}'
BAD = ('{"city": "Rom', '{"town"', '{"city": "Rome", "days": 10', '{"days"', '{"city":"')


@pytest.mark.parametrize(
    "form", ["hermes", "llama3", "mistral_v3", "mistral", "kimi_k2", "command"]
)
def test_arguments_outside_the_schema_are_not_allowed(model: Model, form: str) -> None:
    grammar = model.dialect(form).offered_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    assert model.begins(grammar, begun_call(form) + GOOD + FORMATS[form].writing.tail)
    for arguments in BAD:
        wrong = arguments if arguments != BAD[0] else '{"city": "Roma'
        assert not model.begins(grammar, begun_call(form) + wrong + "x")
    assert not model.begins(grammar, begun_call(form).replace("weather", "whether"))


def test_pythonic_arguments_follow_the_schema(model: Model) -> None:
    grammar = model.dialect("pythonic").offered_call_grammar(
        TOOLS, in_reasoning=False, max_calls=None
    )
    for text in ('[weather(city="Rome")]', '[weather(city="Oslo", far=true), now()]', "[now()]"):
        assert model.follows(grammar, text)
    for text in ('[weather(city="Roma', "[weather()", "[weather(days=3", "[wh", "[1, 2]"):
        assert not model.begins(grammar, text)


def test_single_tool_call_limit(model: Model) -> None:
    for form, text in (
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("llama3", '{"name": "now", "parameters": {}}'),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'),
        ("pythonic", "[now()]"),
    ):
        grammar = model.dialect(form).offered_call_grammar(TOOLS, in_reasoning=False, max_calls=1)
        assert model.follows(grammar, text)
        assert not model.begins(grammar, f"{text}; {text}")


def test_non_strict_functions_accept_any_object(model: Model) -> None:
    loose = {"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}
    grammar = model.dialect("llama3").offered_call_grammar(
        [loose, TOOLS[1]], in_reasoning=False, max_calls=1
    )
    assert model.follows(grammar, '{"name": "weather", "parameters": {"town": [1]}}')
    assert not model.begins(grammar, '{"name": "now", "parameters": {"t')


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_reasoning_comes_before_tool_calls(model: Model, form: str) -> None:
    dialect = model.dialect(form, thinks=True)
    opened = dialect.offered_call_grammar(TOOLS, in_reasoning=True, max_calls=None)
    closed = dialect.offered_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    call = begun_call(form) + GOOD + "}"
    assert model.begins(opened, f"Hm, {{...</think>\n\n{call}")
    assert model.begins(closed, f"<think>\nHm</think>\n\n{call}")
    assert model.follows(closed, "Hi")
    assert not model.begins(opened, f"Hm</think>\n\n{begun_call(form)}[")


def test_name_before_arguments(tmp_path: Path) -> None:
    """Mistral's newer models, whose vocabularies have ``[ARGS]``, write calls in this order."""
    model = Model(tmp_path, ["[TOOL_CALLS]", "[ARGS]"])
    dialect = model.dialect("mistral")
    text = f"Hm.[TOOL_CALLS]weather[ARGS]{GOOD}[TOOL_CALLS]now[ARGS]{{}}"
    grammar = dialect.offered_call_grammar(TOOLS, in_reasoning=False, max_calls=None)
    assert model.follows(grammar, text)
    assert calls_in(dialect, text)[1] == [("weather", json.loads(GOOD)), ("now", {})]
    assert not model.begins(grammar, "[TOOL_CALLS]weather[ARGS]{}")
    content, calls = calls_in(
        dialect,
        model.random_answer(
            dialect.forced_call_grammar(TOOLS, in_reasoning=False, max_calls=1), "", 1
        ),
    )
    assert (content, len(calls)) == ("", 1)


@pytest.mark.parametrize("form", FORMATS)
def test_answer_calls_or_follows_the_response_format(model: Model, form: str) -> None:
    dialect = model.dialect(form)
    grammar = dialect.call_or_answer_grammar(
        TOOLS, '%json {"enum": ["yes"]}', in_reasoning=False, max_calls=None
    )
    opening = dialect.reasoning.answer_opening if dialect.reasoning is not None else ""
    assert model.follows(grammar, f'{opening}"yes"')
    assert not model.begins(grammar, f'{opening}"no')
    text = model.random_answer(grammar, begun_call(form).removeprefix("So:\n"), 1)
    assert calls_in(dialect, text)[1][0][0] == "weather"


async def test_response_format_and_tools_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_harness, "CONTEXT", 512)
    template = "{{ tools }}{# <tool_call> #}{{ messages[0].content }}"
    schema = {"name": "s", "schema": {"enum": ["yes"]}}
    both = {
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for answer, choice in (
        ('"yes"', "auto"),
        (call, "auto"),
        (call, "required"),
        ('"yes"', "none"),
    ):
        async with open_harness(load_template(tmp_path, template), answer) as (router, client):
            reply = await client.post(CHAT, json=chat(tool_choice=choice, **both))
            grammar = router.prefill.submitted[-1].spec.sampling.grammar
        assert grammar is not None
        message = reply.json()["choices"][0]["message"]
        assert (message["content"] == answer) is (answer != call)
        assert ("tool_calls" in message) is (answer == call)
        assert ("now" in grammar.text, "yes" in grammar.text) == {
            "auto": (True, True), "required": (True, False), "none": (False, True),
        }[choice]  # fmt: skip


def test_schema_with_definitions(model: Model) -> None:
    parameters = {
        "$defs": {"n": {"enum": [1, 2]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    for form, text in (
        ("pythonic", "[f(a=2)]"),
        ("llama3", '{"name": "f", "parameters": {"a": 2}}'),
    ):
        grammar = model.dialect(form).offered_call_grammar(
            [tool], in_reasoning=False, max_calls=None
        )
        validate_grammar(grammar)
        assert model.follows(grammar, text)
        assert not model.begins(grammar, text.replace("2", "3"))


async def test_strict_tools_reach_the_workers(tmp_path: Path) -> None:
    template = "{{ tools[0].function.name }}{# <tool_call> #}{{ messages[0].content }}"
    tokenizer = load_template(tmp_path, template)
    async with open_harness(tokenizer, "Hi") as (router, client):
        loose = [{"type": "function", "function": {"name": "now"}}]
        for tools, held in ((TOOLS, True), (loose, False)):
            await client.post(CHAT, json=chat(tools=tools, max_tokens=2))
            grammar = router.prefill.submitted[-1].spec.sampling.grammar
            assert (grammar is not None) == held
        few = await client.post(CHAT, json=chat(tools=TOOLS, min_tokens=1, max_tokens=2))
        assert wrong_error(few)["param"] == "min_tokens"
        hostile = {"name": "f", "strict": True, "parameters": {"type": "nothing"}}
        bad = await client.post(CHAT, json=chat(tools=[{"type": "function", "function": hostile}]))
        assert wrong_error(bad)["param"] == "tools[0].function.parameters"
