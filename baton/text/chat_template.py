"""Renders a model's chat template in a sandbox, with the extensions of Hugging Face templates."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from baton.clock import Clock
from baton.errors import CONTEXT_LENGTH_EXCEEDED, Invalid
from baton.text.template_messages import fit_messages
from baton.text.template_rules import Message, TemplateRules, find_rules

PROBE_CHARACTERS = 2**20
"""The limit of the prompts from which a template's rules are found."""

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
    },
}

JSON_LIMIT = "baton json limit"
"""The template variable with the limit of the JSON that one rendering makes. Templates can't name
it, since it contains spaces."""


class ChatTemplate:
    """The chat templates of a model. ``named`` maps a template's name to its source. The template
    ``tool_use``, if the model has one, renders chats with tools; ``default`` renders all others.
    ``variables`` are the special tokens by name, for example ``bos_token``."""

    def __init__(self, named: Mapping[str, str], variables: Mapping[str, Any], clock: Clock):
        """Compile the templates, and find out which messages they take. Raises Invalid for a
        template that does not compile."""
        self._variables = dict(variables)
        self.source = "\n".join(named.values())
        environment = _environment(clock)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in named.items()
            }
        except jinja2.TemplateError as error:
            raise Invalid(f"the chat template does not compile: {error}") from error
        rules = self._find_rules(None) or TemplateRules()
        self._rules = {False: rules, True: self._find_rules([PROBE_TOOL]) or rules}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        *,
        max_characters: int,
    ) -> str:
        """Render messages, fitted to what the template takes
        (:func:`~baton.text.template_messages.fit_messages`). ``variables`` are options that the
        template defines for its users; they can't override the variables that every template gets:
        the first three arguments of this method, ``documents`` and the special tokens. Raises
        Invalid when the template rejects the messages, or fails on them, or as soon as the text, or
        the JSON that the template makes, has more than ``max_characters``."""
        return self._render(
            fit_messages(messages, self.rules(bool(tools))),
            tools,
            add_generation_prompt,
            variables or {},
            max_characters,
        )

    def rules(self, with_tools: bool) -> TemplateRules:
        """Return which messages the template takes in chats with or without tools."""
        return self._rules[with_tools]

    def _find_rules(self, tools: Sequence[Mapping[str, Any]] | None) -> TemplateRules | None:
        return find_rules(
            lambda messages: self._render(messages, tools, True, {}, PROBE_CHARACTERS)
        )

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        max_characters: int,
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        pieces = self._templates[name].generate(
            {
                **variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self._variables,
                JSON_LIMIT: _TextLimit(max_characters),
            }
        )
        try:
            return _without_surrogates(_TextLimit(max_characters).join(pieces))
        except Invalid:
            raise
        # A template is a program by the model's author. With unexpected messages it may raise
        # anything (TemplateError, TypeError, IndexError, …).
        except Exception as error:
            raise Invalid(f"the chat template failed: {error}", param="messages") from error


class _TextLimit:
    """Limits the number of characters of several texts together."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._num_left = max_characters

    def join(self, pieces: Iterable[str]) -> str:
        """Join pieces, and count them. Raises Invalid at the piece that exceeds the limit."""
        taken: list[str] = []
        for piece in pieces:
            self._num_left -= len(piece)
            if self._num_left < 0:
                raise Invalid(
                    "the chat template makes a text of more than "
                    f"{self._max_characters} characters from the messages and tools, the limit of "
                    "one request; send fewer or shorter ones",
                    param="messages",
                    code=CONTEXT_LENGTH_EXCEEDED,
                )
            taken.append(piece)
        return "".join(taken)


def _without_surrogates(text: str) -> str:
    """Return the text with a replacement character for each unpaired surrogate, which has no
    encoding. JSON within JSON, such as a call's arguments, may contain one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _environment(clock: Clock) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: _now(clock).strftime(layout)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks an assistant's text for training. Here it has no
    effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.wall_nanoseconds() / 1e9).astimezone()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Render JSON without HTML escapes, unlike Jinja's own filter. Indented JSON is made in pieces,
    since it may be many times as long as the value."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = [encoder.encode(value)] if indent is None else encoder.iterencode(value)
    limit: _TextLimit = context[JSON_LIMIT]
    return limit.join(pieces)
