"""Request bodies as OpenAI defines them, with vLLM's extensions.

Validation is strict: a wrong type, a number that is not finite, or (except in messages) an unknown
field is an error. If the only errors are unknown fields that can't change the answer,
:func:`router.http.body_parser.parse_body` validates the body again without them. ``null`` means
that a field is absent."""

from router.openai.schema.chat import ChatBody
from router.openai.schema.completion import CompletionBody
from router.openai.schema.generation_body import GenerationBody, StreamOptions
from router.openai.schema.tokenize import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "StreamOptions",
    "TokenizeBody",
]
