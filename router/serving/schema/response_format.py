"""Constraints on an answer's form: OpenAI's ``response_format``, and vLLM's fields for the same
purpose."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.to_lark import check_grammar_text
from router.errors import invalid_field
from router.http.unknown_fields import UnsupportedField
from router.serving.schema.strict_model import StrictModel, field_validation_error

SchemaName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(StrictModel):
    """A named JSON schema. ``strict`` changes nothing: answers always follow their schema, and a
    schema with unsupported parts is refused."""

    name: SchemaName
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = MappingProxyType(
        {
            name: UnsupportedField(
                'use {"type": "json_schema", "json_schema": {"name": …, "schema": …}}'
            )
            for name in ("schema", "name", "strict", "regex", "grammar", "value")
        }
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format must have json_schema if and only if its type is json_schema"
            raise field_validation_error("response_format", message)
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return Grammar(GrammarKind.JSON_OBJECT) if schema is None else json_schema_grammar(schema)


class StructuredOutputs(StrictModel):
    """The value of vLLM's field ``structured_outputs``, which replaces vLLM's ``guided_…`` fields.
    Exactly one field of this object must be set."""

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = MappingProxyType(
        {
            name: UnsupportedField("it can't be changed", neutral)
            for name, neutral in (
                ("disable_any_whitespace", (False,)),
                ("disable_additional_properties", (False,)),
                ("whitespace_pattern", ()),
                ("structural_tag", ()),
            )
        }
    )

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.grammars) != 1:
            message = (
                "structured_outputs needs exactly one of json, regex, choice, grammar, json_object"
            )
            raise field_validation_error("structured_outputs", message)
        return self

    @property
    def grammars(self) -> list[Grammar]:
        given = _grammars_of_fields(self.json_, self.regex, self.choice, self.grammar)
        return [*given, Grammar(GrammarKind.JSON_OBJECT)] if self.json_object else given


class ResponseFormatFields(StrictModel):
    """The fields that constrain an answer's form; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    # Not in OpenAI's API
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    """A grammar in Lark's notation."""
    structured_outputs: StructuredOutputs | None = None

    _format: tuple[str, Grammar] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        formats = self._formats()
        if not formats:
            return self
        if len(formats) > 1:
            fields = [field for field, _ in formats]
            raise field_validation_error(
                fields[1], f"{fields[1]} is not allowed together with {fields[0]}"
            )
        [self._format] = formats
        check_format(*self._format)
        return self

    @property
    def format(self) -> tuple[str, Grammar] | None:
        """The name of the field that constrains the answer, and its grammar; None if no field
        does. All prompts of a request share this grammar."""
        return self._format

    def _formats(self) -> list[tuple[str, Grammar]]:
        if _FIELDS.isdisjoint(self.model_fields_set):
            return []  # the usual case
        response_format = self.response_format.grammar if self.response_format is not None else None
        formats = [("response_format", response_format)] if response_format is not None else []
        outputs = self.structured_outputs
        for field, given in (
            ("guided_json", _grammars_of_fields(json_=self.guided_json)),
            ("guided_regex", _grammars_of_fields(regex=self.guided_regex)),
            ("guided_choice", _grammars_of_fields(choice=self.guided_choice)),
            ("guided_grammar", _grammars_of_fields(grammar=self.guided_grammar)),
            ("structured_outputs", outputs.grammars if outputs is not None else []),
        ):
            formats += [(field, each) for each in given]
        return formats


_FIELDS = frozenset(ResponseFormatFields.model_fields)


def check_format(field: str, grammar: Grammar) -> tuple[str, Grammar]:
    """Check the size of the grammar that ``field`` contains, and return both. Raises ApiError
    (400)."""
    try:
        check_grammar_text(grammar.text)
    except Invalid as error:
        raise invalid_field(field, f"{field}: {error}") from error
    return field, grammar


def _grammars_of_fields(
    json_: dict[str, Any] | str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> list[Grammar]:
    given = [
        None if json_ is None else json_schema_grammar(json_),
        None if regex is None else Grammar(GrammarKind.REGEX, regex),
        None if choice is None else Grammar(GrammarKind.CHOICE, json.dumps(choice)),
        None if grammar is None else Grammar(GrammarKind.LARK, grammar),
    ]
    return [each for each in given if each is not None]


def json_schema_grammar(schema: dict[str, Any] | str) -> Grammar:
    """Return a grammar for a JSON schema. The order of the schema's keys is kept, since answers
    have the same order."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)
