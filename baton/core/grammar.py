"""Grammars that constrain an answer, as text that every worker compiles for itself."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """The kind of a grammar's text. JSON_OBJECT: no text, any object is valid. JSON_SCHEMA: a
    schema, as JSON. REGEX: a pattern that the whole answer matches. CHOICE: a JSON list of strings,
    one of which is the answer. LARK: a context-free grammar in Lark's notation, which starts at its
    rule ``start``. TOKEN_RULES: allowed tokens and banned sequences of tokens, as JSON
    (:mod:`baton.text.grammar.token_rules`)."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    TOKEN_RULES = "token_rules"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that constrains an answer. A matcher's state depends only on the grammar and on the
    answer's tokens so far, so a worker that continues another worker's answer replays these tokens.
    The router validates the grammar."""

    kind: GrammarKind
    text: str = ""

    def digest(self, owner: str) -> bytes:
        """Return 32 bytes that identify this grammar of ``owner`` among the grammars of all
        owners."""
        digest = hashlib.blake2b(digest_size=32)
        for part in (owner, self.kind.value, self.text):
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()
