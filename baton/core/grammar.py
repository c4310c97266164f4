"""What an answer must look like, as text that every worker compiles for itself."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """What the text of a grammar is. JSON_OBJECT: nothing, any object will do. JSON_SCHEMA: a
    schema, as JSON. REGEX: a pattern that the whole answer matches. CHOICE: a JSON list of
    strings, one of which is the answer. LARK: a context-free grammar in Lark's notation, from its
    rule ``start``."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Where an answer is in its grammar is a function of its tokens alone, so whoever goes on with
    one replays them. Checked where the request enters."""

    kind: GrammarKind
    text: str = ""

    def digest(self, owner: str) -> bytes:
        """Names it among all grammars of all owners, in 32 bytes."""
        digest = hashlib.blake2b(digest_size=32)
        for part in (owner, self.kind.value, self.text):
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()
