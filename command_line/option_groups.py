"""Defines the options of commands as dataclasses, so that a command takes a few groups of options
instead of many parameters."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

from baton.core.worker_kinds import WORKER_KINDS, WorkerKind

GroupT = TypeVar("GroupT")

Command = Callable[..., None]


def with_option_groups(command: Command) -> Command:
    """Return ``command`` in the form that typer expects: each parameter whose type is a dataclass
    is replaced by one parameter per field, in the fields' order, and ``command`` is called with an
    instance of the dataclass. A field's type is ``Annotated[…, typer.Option(…)]``; the field's
    default is the option's default."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            options = _parameters_of(kind)
            groups[parameter.name] = kind, [option.name for option in options]
            parameters += options
        else:
            parameters.append(_as_keyword(parameter.name, kind, parameter.default))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (group, options) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in options})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def option_per_kind(
    option: Callable[[WorkerKind], object],
) -> Callable[[type[GroupT]], type[GroupT]]:
    """Return a decorator that gives a class, before it becomes a dataclass, a field for each kind
    of worker: with the role as its name, the type that ``option`` returns, and None as default."""

    def add_fields(group: type[GroupT]) -> type[GroupT]:
        group.__annotations__ = {role.value: option(kind) for role, kind in WORKER_KINDS.items()}
        for role in WORKER_KINDS:
            setattr(group, role.value, None)
        return group

    return add_fields


def _parameters_of(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_as_keyword(each.name, hints[each.name], _default(each)) for each in fields(group)]


def _default(option: Field[Any]) -> object:
    return Parameter.empty if option.default is MISSING else option.default


def _as_keyword(name: str, kind: object, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
