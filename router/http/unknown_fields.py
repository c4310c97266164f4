"""Decides whether an unknown field of a request is ignored or refused.

A field that would change the answer is refused: one that the schema lists as unsupported, or one
whose name is so close to a known field's name that it is probably a typo. All others are
ignored."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel

from router.limits import MAX_FIELD_CHARACTERS

TYPO_SIMILARITY = 0.85
"""The similarity (``difflib``'s ratio, 0 to 1) from which an unknown name is taken for a typo.
Names reach it if a letter is left out, doubled or exchanged in a name of at least six letters."""

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field of other servers that changes the answer and that Baton does not have. With a
    ``neutral`` value the field changes nothing, so it is ignored."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """The refusal of a field. ``message`` is the error's whole message, and ``code`` is its
    code."""

    message: str
    code: str


def find_refusal(
    path: str,
    value: Any,
    known: frozenset[str],
    unsupported: Mapping[str, UnsupportedField],
    harmless: Collection[str] = (),
) -> FieldRefusal | None:
    """Return why the unknown field at ``path`` is refused; None if it is ignored. ``known`` are the
    fields that the object around it may have. A name that looks like a typo of one of them is
    refused, unless it is one of ``harmless``."""
    name = path.rpartition(".")[2]
    if value is None or name in harmless:
        return None
    if name in unsupported:
        field = unsupported[name]
        if value in field.neutral:
            return None
        return FieldRefusal(f"{path} is not supported: {field.reason}", "unsupported_parameter")
    meant = closest_name(name, known)
    if meant is None:
        return None
    message = f"unknown parameter {path!r}; did you mean {meant!r}?"
    return FieldRefusal(message, "unknown_parameter")


def refuse_unknown_field(
    schema: type[BaseModel], location: Location, path: str, value: Any
) -> FieldRefusal | None:
    """Return why the unknown field at ``location`` of a body is refused; None if it is ignored.
    Each model of a schema lists unsupported and harmless fields in its class attributes
    ``unsupported_fields`` and ``harmless_fields``."""
    steps = tuple(step for step in location[:-1] if isinstance(step, str))
    fields = _fields_at(schema, steps)
    return find_refusal(path, value, fields.known, fields.unsupported, fields.harmless)


@dataclass(frozen=True, slots=True)
class _Fields:
    known: frozenset[str]
    unsupported: Mapping[str, UnsupportedField]
    harmless: frozenset[str]


@lru_cache(maxsize=256)
def _fields_at(schema: type[BaseModel], steps: tuple[str, ...]) -> _Fields:
    models = _models_at(schema, steps)
    unsupported: dict[str, UnsupportedField] = {}
    harmless: set[str] = set()
    for model in models:
        unsupported |= getattr(model, "unsupported_fields", {})
        harmless |= getattr(model, "harmless_fields", frozenset())
    known = frozenset(name for model in models for name in _names(model))
    return _Fields(known, unsupported, frozenset(harmless))


def closest_name(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that ``name`` is probably a typo of; None if there is no such name."""
    return None if len(name) > MAX_FIELD_CHARACTERS else _closest(name, known)


@lru_cache(maxsize=1024)
def _closest(name: str, known: frozenset[str]) -> str | None:
    plain = {_plain(each): each for each in known}
    matches = get_close_matches(_plain(name), plain, 1, TYPO_SIMILARITY)
    if not matches or (_is_id(name) and not _is_id(plain[matches[0]])):
        return None
    return plain[matches[0]]


def _is_id(name: str) -> bool:
    """Whether the name says that the field is an id: ``prompt_id`` is not a typo of ``prompt``."""
    return name.endswith(("_id", "_ids", "Id", "Ids"))


def _plain(name: str) -> str:
    """Return the name in lower case and without separators, so that ``maxTokens`` equals
    ``max_tokens``."""
    return name.lower().replace("_", "").replace("-", "")


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_at(schema: type[BaseModel], steps: Iterable[str]) -> list[type[BaseModel]]:
    """Return the models that a validation error's location may refer to. ``steps`` are the names in
    the location. Some are names of fields; others are names of a union's members, and are
    skipped."""
    models = [schema]
    for step in steps:
        inner = [
            nested
            for model in models
            for name, field in model.model_fields.items()
            if step in (name, field.alias)
            for nested in _nested_models(field.annotation)
        ]
        models = inner or models
    return models


def _nested_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _nested_models(each)]
