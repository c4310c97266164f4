"""The grammar options of ``baton generate``."""

from pathlib import Path

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid


def parse_grammar(json_schema: str | None, regex: str | None) -> Grammar | None:
    """Return the grammar that the answer must follow, if any. ``json_schema`` is JSON or the path
    of a JSON file. Raises Invalid if both options are given, or if the file can't be read."""
    if json_schema is not None and regex is not None:
        raise Invalid("--json-schema and --regex can't be combined")
    if regex is not None:
        return Grammar(GrammarKind.REGEX, regex)
    if json_schema is None:
        return None
    if json_schema.lstrip().startswith("{"):
        return Grammar(GrammarKind.JSON_SCHEMA, json_schema)
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, Path(json_schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--json-schema {json_schema}: {error}") from error
