"""The fields of a request body that had no effect."""

import re

from router.limits import MAX_FIELD_CHARACTERS, MAX_IGNORED_FIELDS, MAX_NAMES_IN_HEADER

HEADER = "x-baton-ignored-fields"

_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")


class IgnoredFields:
    """Collects the names of fields that were ignored, such as ``tools.function.id``. List indexes
    are left out, so that a name occurs once. Only the first ``MAX_IGNORED_FIELDS`` names are kept.

    The collection is passed to pydantic as the context of validation. If ``is_strict`` is True,
    unknown fields are refused, so only known fields without effect are collected."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def add(self, name: str) -> bool:
        """Add a field; return False if there are too many. Names come from clients, so every
        character that could have a meaning in a header or a log becomes ``?``."""
        safe = _UNSAFE.sub("?", name[:MAX_FIELD_CHARACTERS])
        if safe not in self._names and len(self._names) >= MAX_IGNORED_FIELDS:
            return False
        self._names[safe] = None
        return True

    def headers(self) -> dict[str, str]:
        """Return the response header that lists the fields, or no header if no field was ignored.
        The list ends with ``...`` if there were more fields."""
        if not self._names:
            return {}
        shown = [*self._names][:MAX_NAMES_IN_HEADER]
        more = ["..."] if len(self._names) > len(shown) else []
        return {HEADER: ", ".join([*shown, *more])}
